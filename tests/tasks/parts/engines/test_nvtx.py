"""NVTX ranges of stages and inferences, seen by a list in place of torch's binding, which builds for CPUs lack."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from tasks.parts.engines.nvtx import is_profiled, nvtx_range
from tasks.parts.engines.open_engine import open_engine
from tests.tasks.conftest import REPOSITORY, Workshop


@pytest.fixture
def ranges(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Pretend that Nsight Systems runs this process, and that torch is built for CUDA."""
    seen: list[str] = []
    monkeypatch.setenv("NSYS_PROFILING_SESSION_ID", "1")
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda.nvtx, "range_push", seen.append)
    monkeypatch.setattr(torch.cuda.nvtx, "range_pop", lambda: seen.append("end"))
    return seen


def test_range_ends_after_an_error_too(ranges: list[str]) -> None:
    with pytest.raises(ValueError, match="fault"), nvtx_range("train.teacher"):
        raise ValueError("fault")
    assert ranges == ["train.teacher", "end"]


@pytest.mark.parametrize("target", ["cpu_onnxruntime", "cpu_torch"])
def test_each_inference_is_a_range_named_by_engine_target_and_batch(
    workshop: Workshop, ranges: list[str], target: str
) -> None:
    engine = workshop.engine("float", target)
    ranges.clear()
    with open_engine(engine) as runner:
        images_NCHW = np.zeros((2, *runner.manifest.card.image_shape), np.float32)
        runner.infer(images_NCHW)
        runner.run(images_NCHW[:1])
        [other] = runner.open_concurrent(1)
        with other:
            other.run(images_NCHW)
        name = f"{engine / runner.manifest.file} on {target}"
    batches = [f"{name}, batch {size}" for size in (2, 1, 2)]
    assert [text for text in ranges if text != "end"] == batches and len(ranges) == 2 * len(batches)


def test_call_that_is_timed_stays_the_runners_own_without_a_profiler(workshop: Workshop) -> None:
    assert not is_profiled()
    with open_engine(workshop.engine("float", "cpu_onnxruntime")) as runner:
        assert not {"run", "open_concurrent"} & set(vars(runner))


def test_build_of_torch_without_nvtx_marks_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NVTX_INJECTION64_PATH", "tool.so")
    monkeypatch.setattr(torch.version, "cuda", None)
    with nvtx_range("train.teacher"):
        assert not is_profiled()


def test_command_of_a_stage_is_a_range_named_by_its_address(tmp_path: Path) -> None:
    script = (
        "import torch\n"
        "torch.version.cuda = '13.0'\n"
        "torch.cuda.nvtx.range_push = lambda name: print('begin', name)\n"
        "torch.cuda.nvtx.range_pop = lambda: print('end')\n"
        "from tasks import __main__ as command\n"
        "command.execute = lambda call: print('run', call.address)\n"
        "command.main(['prepare_data', '--params', 'params.yaml'])\n"
    )
    command = [sys.executable, "-c", script]
    environment = {"NSYS_PROFILING_SESSION_ID": "1", "PYTHONPATH": str(REPOSITORY)}
    run = subprocess.run(
        command, capture_output=True, text=True, cwd=REPOSITORY, env=environment, check=False
    )
    assert run.stdout.splitlines() == ["begin prepare_data", "run prepare_data", "end"], run.stderr


def test_start_of_a_stage_loads_no_library_for_it() -> None:
    script = "import sys, tasks.parts.engines.nvtx; assert not {'torch', 'numpy'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", script], check=True, cwd=REPOSITORY)
