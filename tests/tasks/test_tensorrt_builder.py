"""Graphs of every rung, parsed and built by NVIDIA's own code: the builder of TensorRT for RTX, which needs no GPU.

Its parser, its strong typing and its profiles are those of TensorRT; kernels, tactics and speed of the data-centre
builder are not, and no plan is loaded without a GPU. It is installed apart, for the time of these tests, under the
name `tensorrt`.
"""

from pathlib import Path

from tests.conftest import REPOSITORY
from tests.tasks.conftest import Workshop
from tests.tensorrt_stand_in import compiled_plugin
from tests.wheels import run_tests_over


def test_real_builder_takes_the_graphs_as_they_are(
    tensorrt_builder: Path, workshop: Workshop, tmp_path: Path
) -> None:
    environment = {
        "PYTHONPATH": f"{REPOSITORY}:{tensorrt_builder}",
        "WORKSHOP": str(workshop.root),
        "PLUGIN": str(compiled_plugin(tmp_path)),
    }
    run_tests_over("tests/over_tensorrt_builder.py", environment)
