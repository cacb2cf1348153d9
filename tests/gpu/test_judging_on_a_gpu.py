"""Float graphs are judged on a GPU."""

import pytest
import torch

from tasks.core.environment import versions
from tasks.parts.onnx_graphs.graph import read_graph
from tasks.parts.onnx_graphs.half_precision import to_half
from tasks.parts.onnx_graphs.judging import judging_provider
from tasks.parts.onnx_session import CPU_PROVIDER, CUDA_PROVIDER
from tasks.parts.quantization.evaluation import open_evaluator

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU on this machine"),
    pytest.mark.skipif(not versions("onnxruntime-gpu"), reason="onnxruntime-gpu is not installed"),
]


def test_gpu_judges_as_the_cpu_does(workshop) -> None:
    assert judging_provider() == CUDA_PROVIDER
    graph = read_graph(workshop.graph)
    found = {}
    for provider in (CPU_PROVIDER, CUDA_PROVIDER):
        evaluator = open_evaluator(graph, workshop.data, num_images=0, batch_size=2, provider=provider)
        found[provider] = evaluator.float_answers, evaluator.evaluate(to_half(graph))
    (on_cpu, half_on_cpu), (on_gpu, half_on_gpu) = found[CPU_PROVIDER], found[CUDA_PROVIDER]
    assert (on_cpu == on_gpu).mean() > 0.999
    assert half_on_gpu.agreement == pytest.approx(half_on_cpu.agreement, abs=0.01)
