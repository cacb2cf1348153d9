"""Where float graphs that are only judged run. What needs a GPU is in tests/gpu."""

import pytest

from tasks import convert_precision, quantize_ptq
from tasks.core.environment import versions
from tasks.core.errors import TargetMismatch
from tasks.parts.onnx_graphs.graph import read_graph
from tasks.parts.onnx_graphs.judging import (
    find_fault,
    judging_facts,
    judging_provider,
    judging_providers,
)
from tasks.parts.onnx_session import CPU_PROVIDER, CUDA_PROVIDER, TENSORRT_PROVIDER
from tasks.parts.quantization.evaluation import open_evaluator
from tests.tasks.conftest import Workshop
from tests.tasks.test_convert_precision import CONFIG

needs_cpu_build = pytest.mark.skipif(
    bool(versions("onnxruntime-gpu")), reason="this ONNX Runtime may have a GPU to run on"
)


def test_only_cuda_is_tried_before_the_cpu() -> None:
    assert judging_providers([TENSORRT_PROVIDER, CUDA_PROVIDER, CPU_PROVIDER]) == (CUDA_PROVIDER,)
    assert judging_providers(["AzureExecutionProvider", CPU_PROVIDER]) == ()


def test_provider_is_tried_with_a_convolution() -> None:
    assert find_fault(CPU_PROVIDER) == ""


@needs_cpu_build
def test_provider_that_does_not_run_says_why() -> None:
    assert "ONNX Runtime has no provider CUDAExecutionProvider" in find_fault(CUDA_PROVIDER)


@needs_cpu_build
def test_without_a_gpu_the_cpu_judges_and_the_key_says_so() -> None:
    assert judging_provider() == CPU_PROVIDER
    assert judging_facts().items() <= convert_precision.environment(CONFIG).items()
    assert judging_facts() == {"judged_on": CPU_PROVIDER}


def test_key_of_a_calibration_is_the_same_with_and_without_a_gpu(workshop: Workshop) -> None:
    assert "judged_on" not in quantize_ptq.environment(None)  # type: ignore[arg-type]
    evaluator = open_evaluator(read_graph(workshop.graph), workshop.data, num_images=2, batch_size=2)
    assert evaluator.provider == CPU_PROVIDER


@needs_cpu_build
def test_graph_is_never_judged_elsewhere_than_asked(workshop: Workshop) -> None:
    with pytest.raises(TargetMismatch, match="no provider CUDAExecutionProvider"):
        open_evaluator(
            read_graph(workshop.graph), workshop.data, num_images=2, batch_size=2, provider=CUDA_PROVIDER
        )
