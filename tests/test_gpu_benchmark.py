"""The benchmark for a GPU machine: which cells it runs, what it keeps of those that go wrong, and its page."""

import json
import os
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import numpy as np
import onnxruntime
import pytest

from benchmarks.gpu import RECORDS, main, read_records, run_cell, run_cells
from benchmarks.gpu_cells import (
    Cell,
    CellSkippedError,
    EngineCase,
    TrainingCase,
    list_cells,
    measure_engine,
    measure_training,
)
from benchmarks.gpu_kernels import (
    CAMERA,
    FRAME,
    KERNELS,
    MEAN,
    NO_GRAPH,
    NUM_CLASSES,
    NUMPY,
    SCORES,
    STD,
    KernelCase,
    compare_forms,
    make_graphs,
)
from benchmarks.gpu_ladder import with_copied_models
from benchmarks.gpu_page import page
from tasks.core.config import read_params
from tasks.parts.engines.frame_engine.pixels import find_classes, normalise
from tasks.parts.engines.gpu import find_gpus
from tests.conftest import REPOSITORY
from tests.cuda_on_cpu import build_library, put_pycuda
from tests.wheels import unpack_wheel


def measure_one() -> dict[str, float]:
    return {"one": 1}


def raise_error() -> None:
    raise ValueError("weights are square")


def crash() -> None:
    os.kill(os.getpid(), signal.SIGSEGV)


def lack() -> None:
    raise CellSkippedError("onnxruntime-gpu is not installed")


def hang(pid_file: Path) -> None:
    child = subprocess.Popen(["sleep", "600"])
    pid_file.write_text(str(child.pid))
    child.wait()


def statuses(out: Path) -> list[tuple[str, str, str]]:
    return [(record["cell"], record["status"], record["reason"]) for record in read_records(out)]


def is_running(pid: int) -> bool:
    stat = Path(f"/proc/{pid}/stat")
    return stat.is_file() and stat.read_text().rpartition(")")[2].split()[0] != "Z"


def test_without_a_gpu_it_says_so_and_ends_with_1(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.gpu", "--out", str(tmp_path / "out")],
        cwd=REPOSITORY,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
        text=True,
        capture_output=True,
        check=False,
    )
    assert done.returncode == 1 and "no NVIDIA GPU" in done.stdout, done.stderr
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_cells_that_fail_crash_or_hang_cost_only_themselves(tmp_path: Path) -> None:
    cells = [
        Cell("error", "engine", 300, raise_error),
        Cell("crash", "engine", 300, crash),
        Cell("lack", "engine", 300, lack),
        Cell("hang", "engine", 6, partial(hang, tmp_path / "pid")),
        Cell("good", "engine", 300, measure_one),
    ]
    run_cells(cells, tmp_path, time.monotonic() + 3600)
    assert statuses(tmp_path) == [
        ("error", "failed", "exit code 1: ValueError: weights are square"),
        ("crash", "failed", "killed by SIGSEGV: --- crash"),
        ("lack", "skipped", "onnxruntime-gpu is not installed"),
        ("hang", "failed", "exceeded its limit of 6 s"),
        ("good", "measured", ""),
    ]
    assert read_records(tmp_path)[-1]["result"] == {"one": 1}
    assert not is_running(int((tmp_path / "pid").read_text()))


def test_second_run_measures_only_what_has_no_record(tmp_path: Path) -> None:
    cells = [Cell("first", "engine", 300, raise_error), Cell("second", "engine", 60, measure_one)]
    run_cells(cells[:1], tmp_path, time.monotonic() + 3600)
    before = (tmp_path / RECORDS).read_text()
    run_cells(cells, tmp_path, time.monotonic() + 3600)
    assert (tmp_path / RECORDS).read_text().startswith(before)
    assert [name for name, _, _ in statuses(tmp_path)] == ["first", "second"]


@pytest.mark.slow
def test_cell_that_the_budget_cuts_is_left_to_the_next_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_cell(Cell("long", "engine", 600, partial(hang, tmp_path / "pid")), tmp_path, 6)
    run_cells([Cell("late", "engine", 300, measure_one)], tmp_path, time.monotonic() + 1)
    assert statuses(tmp_path) == []
    printed = capsys.readouterr().out
    assert "long: interrupted by the end of the budget" in printed and "spent before late" in printed


@pytest.mark.slow
@pytest.mark.trial
def test_cells_of_cpu_targets_run_for_real(tmp_path: Path) -> None:
    engine = EngineCase("baseline", 64, 64, "cpu_onnxruntime", "f16")
    training = TrainingCase("baseline", 64, 64, "bf16_mixed", True, "cpu", 6)
    cells = [
        Cell(engine.name, "engine", 1500, partial(measure_engine, engine)),
        Cell(training.name, "training", 1500, partial(measure_training, training)),
    ]
    run_cells(cells, tmp_path, time.monotonic() + 3600)
    assert [status for _, status, _ in statuses(tmp_path)] == ["measured"] * 2, (
        tmp_path / "log.txt"
    ).read_text()
    found, trained = (record["result"] for record in read_records(tmp_path))
    assert 0 < found["speedup_low"] <= found["speedup"] <= found["speedup_high"]
    assert found["latency_ms_p50"] > 0 and found["throughput_per_s"] > 0 and found["batch"] == 16
    assert found["agreement_db"] > 30 and found["gpu_memory_mib"] is None
    assert 0 < trained["compute_ms_p50"] < trained["step_ms_p50"] and trained["batch_size"] == 16
    text = page(MACHINE, read_records(tmp_path), cells)
    assert (
        "| student | cpu_onnxruntime | f16 |" in text and "| student | 64x64 | 16 | bf16_mixed | on |" in text
    )
    assert "Not measured" not in text


@pytest.mark.skipif(bool(find_gpus()), reason="this machine has an NVIDIA GPU")
def test_kernels_are_skipped_without_a_gpu(tmp_path: Path) -> None:
    [cell, _] = [cell for cell in list_cells() if cell.kind == "kernels"]
    run_cells([cell], tmp_path, time.monotonic() + 3600)
    reason = "this machine has no NVIDIA GPU, or no driver (libcuda.so.1)"
    assert statuses(tmp_path) == [("kernels-256x256", "skipped", reason)]
    assert f"- kernels-256x256: skipped. {reason}" in page(MACHINE, read_records(tmp_path), [cell])


def test_kernels_and_numpy_agree_where_both_are_timed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(unpack_wheel("nvidia-cuda-nvrtc==13.*", tmp_path / "nvrtc"))
    put_pycuda(monkeypatch, build_library(tmp_path))
    found = compare_forms(KernelCase(9, 16), num_rounds=2)
    assert list(found["steps"]) == [FRAME, CAMERA, SCORES] and found["graph_note"] == NO_GRAPH
    for forms in found["steps"].values():
        assert list(forms) == [NUMPY, KERNELS]
        for form in forms.values():
            assert form["share_equal"] == 1 and form["latency_ms_p50"] > 0
            assert 0 < form["speedup_low"] <= form["speedup"] <= form["speedup_high"]
    records = [{"cell": "a", "kind": "kernels", "status": "measured", "reason": "", "result": found}]
    text = page(MACHINE, records, [])
    assert f"| 9x16 | {SCORES} | kernels |" in text and "| 100.000% |" in text
    assert f"- {NO_GRAPH}" in text


def test_graphs_that_are_timed_beside_kernels_do_the_same_steps() -> None:
    generator = np.random.default_rng(0)
    frame_NHWC = generator.integers(0, 256, (1, 9, 16, 3), np.uint8)
    scores_NKHW = generator.standard_normal((1, NUM_CLASSES, 9, 16), np.float32)
    reads, gives = (onnxruntime.InferenceSession(graph) for graph in make_graphs((9, 16)))
    [image_NCHW] = reads.run(None, {"frames": frame_NHWC})
    np.testing.assert_allclose(image_NCHW, normalise(frame_NHWC, MEAN, STD), atol=1e-6)
    [classes_NHW] = gives.run(None, {"given": scores_NKHW})
    np.testing.assert_array_equal(classes_NHW, find_classes(scores_NKHW), strict=True)


MACHINE = {
    "date": "2000-01-01",
    "gpu": {"name": "NVIDIA Imaginary", "compute_capability": "9.9"},
    "cpu_model": "some CPU",
    "versions": {"nvidia driver": "1.2", "torch": "2.13.0"},
}
"""Written by hand: no GPU was measured for this."""


def test_page_has_tables_skips_with_reasons_and_the_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The records are written by hand, because tests run without a GPU.
    engine = {
        **{"network": "teacher", "height": 256, "width": 256, "target": "cuda_torch", "precision": "f16"},
        **{"latency_ms_p50": 1.5, "device_ms_p50": 1.25, "aa_ratio_spread": 0.01, "is_precision_ok": True},
        **{"speedup": 2.0, "speedup_low": 1.9, "speedup_high": 2.1, "throughput_per_s": 800.0},
        **{"batch": 16, "batch_throughput_per_s": 4000.0, "gpu_memory_mib": 612.0, "agreement_db": 45.0},
        "build_s": 3.0,
    }
    tests = {"exit_code": 1, "summary": "1 failed, 9 passed", "outcomes": ["FAILED tests/gpu/test_x.py::a"]}
    records = [
        {"cell": "tests", "kind": "tests", "status": "measured", "reason": "", "seconds": 9, "result": tests},
        {"cell": "a", "kind": "engine", "status": "measured", "reason": "", "seconds": 9, "result": engine},
        {
            "cell": "b",
            "kind": "engine",
            "status": "skipped",
            "reason": "no g++",
            "seconds": 1,
            "result": None,
        },
    ]
    (tmp_path / "docs").mkdir()
    (tmp_path / "machine.json").write_text(json.dumps(MACHINE))
    (tmp_path / "notes.md").write_text("What ran.\n")
    (tmp_path / RECORDS).write_text("".join(json.dumps(record) + "\n" for record in records))
    monkeypatch.chdir(tmp_path)
    assert main(["--page", str(tmp_path)]) == 0
    text = (tmp_path / "docs" / "gpu-results.md").read_text()
    row = "| teacher | cuda_torch | f16 | 1.500 | 1.250 | 2.00 (1.90 to 2.10) | 1.0% | 800 | 4000 (16) | 612 | 45.0 |"
    assert "### 256x256" in text and row in text and "\n\nWhat ran.\n\n" in text
    assert "1 failed, 9 passed" in text and "- FAILED tests/gpu/test_x.py::a" in text
    assert (
        "- b: skipped. no g++" in text
        and "Not measured within the budget: baseline-256x256-cuda_torch-f32" in text
    )
    assert "2000-01-01 on, NVIDIA Imaginary (compute capability 9.9), some CPU, nvidia driver 1.2" in text


def test_cells_have_names_of_their_own_and_declared_targets() -> None:
    names = [cell.name for cell in list_cells()]
    assert len(set(names)) == len(names) == 1 + 2 + 6 + 2 * 3 * 8
    assert names[0] == "tests"


def test_ladder_leaves_out_the_variants_whose_model_was_not_copied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # the repository may hold models of its own
    params = read_params(REPOSITORY / "params.yaml")
    engines = params["engines"]
    model = tmp_path / "model.onnx"
    model.touch()
    copied = {
        name: item | ({"model": str(model)} if item["variant"] in ("pruned", "pruned_ptq") else {})
        for name, item in engines.items()
    }
    left = with_copied_models({**params, "engines": copied})
    assert {item["variant"] for item in left["engines"].values()} == {"pruned", "pruned_ptq"}
    assert left["benchmark"]["cpu_onnxruntime"]["variants"] == ["pruned", "pruned_ptq"]
    assert left["benchmark"]["cpu_torch"]["variants"] == ["pruned"]
    assert left["explain"]["cpu_onnxruntime"]["pairs"] == [{"before": "pruned", "after": "pruned_ptq"}]
    assert len(left["select_engine"]["engines"]) == len(left["engines"])
