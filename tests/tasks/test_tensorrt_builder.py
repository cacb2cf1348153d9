"""Graphs of every rung, parsed and built by NVIDIA's own code: the builder of TensorRT for RTX, which needs no GPU.

Its parser, its strong typing and its profiles are those of TensorRT; kernels, tactics and speed of the data-centre
builder are not, and no plan is loaded without a GPU. It is installed apart, for the time of these tests, under the
name `tensorrt`.
"""

import os
from pathlib import Path

from tests.conftest import REPOSITORY
from tests.tasks.conftest import Workshop
from tests.tensorrt_stand_in import compiled_plugin
from tests.test_tensorrt_contract import CORE, read_faults
from tests.wheels import run_tests_over

ONLY_RTX = {
    "ComputeCapability.__members__",
    "CudaGraphStrategy.WHOLE_GRAPH_CAPTURE",
    "DynamicShapesKernelSpecializationStrategy.EAGER",
    "IBuilderConfig.num_compute_capabilities",
    "IBuilderConfig.set_compute_capability",
    "ICudaEngine.create_runtime_config",
    "IRuntimeCache.deserialize",
    "IRuntimeCache.serialize",
    "IRuntimeConfig.cuda_graph_strategy",
    "IRuntimeConfig.dynamic_shapes_kernel_specialization_strategy",
    "IRuntimeConfig.set_runtime_cache",
}
"""Uses that must be found; that the files which have them are looked at."""


def test_real_builder_takes_the_graphs_as_they_are(
    tensorrt_builder: Path, workshop: Workshop, tmp_path: Path
) -> None:
    environment = {
        "PYTHONPATH": f"{REPOSITORY}:{tensorrt_builder}",
        "WORKSHOP": str(workshop.root),
        "PLUGIN": str(compiled_plugin(tmp_path)),
    }
    run_tests_over("tests/over_tensorrt_builder.py", environment)


def test_bindings_of_tensorrt_for_rtx_have_everything_that_tasks_uses(tensorrt_builder: Path) -> None:
    paths = {"PYTHONPATH": f"{REPOSITORY}:{tensorrt_builder}", "VERSION": "1.7"}
    uses, faults = read_faults({**os.environ, **paths}, *sorted((REPOSITORY / "tasks").rglob("*.py")))
    assert not faults
    assert uses >= CORE | ONLY_RTX
