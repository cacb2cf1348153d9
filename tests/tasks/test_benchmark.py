import csv
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import psutil
import pytest

from tasks.benchmark import Config, _Round, benchmark, summarise
from tasks.build_engine import build_engine
from tasks.core.errors import ArtifactError, ConfigError
from tasks.parts.engine_truth import LAYERS_FILE
from tasks.parts.runners import burst_process
from tasks.parts.runners.burst_process import BurstProcess
from tasks.parts.runners.contract import read_engine_manifest

REPOSITORY = Path(burst_process.__file__).resolve().parents[3]
CONFIG = Config(
    seed=0,
    batch_size=4,
    warm_up_ms=5.0,
    burst_ms=3.0,
    min_calls=2,
    min_rounds=4,
    budget_s=0.2,
    budget_batch_s=0.1,
    max_aa_spread=1e9,
    timeout_s=60.0,
)


@pytest.fixture
def reference(workshop):
    return workshop.engine("float", "cpu_torch")


def test_report_holds_all_numbers_of_engine_and_reference(workshop, tmp_path, reference):
    engine = workshop.engine("quantized", "cpu_onnxruntime")
    report = benchmark(CONFIG, engine=engine, reference=reference, out=tmp_path)
    manifest = read_engine_manifest(engine)
    assert report.engine_sha256 == manifest.sha256
    assert report.reference_sha256 == read_engine_manifest(reference).sha256
    assert 0 < report.latency_ms_p50 <= report.latency_ms_p90 <= report.latency_ms_p99
    assert report.speedup_vs_reference_low <= report.speedup_vs_reference <= report.speedup_vs_reference_high
    assert report.memory_mib > 0 and report.memory_total_mib > report.memory_mib
    assert [result.batch for result in report.batches] == [1, 4]
    assert report.throughput_per_s_batched == report.batches[1].throughput_per_s
    assert all(result.num_rounds >= 3 and result.num_samples >= 12 for result in report.batches)
    assert report.provider == "CPUExecutionProvider" and report.num_threads == manifest.target.num_threads
    assert report.precisions["QLinearConv"]["int8"] > 0
    assert not report.inconclusive


def test_every_timed_inference_is_in_the_table(workshop, tmp_path, reference):
    engine = workshop.engine("float", "cpu_openvino")
    report = benchmark(CONFIG, engine=engine, reference=reference, out=tmp_path)
    with (tmp_path / "latencies.csv").open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    mine = [row for row in rows if row["batch"] == "1" and row["process"] in ("engine", "control")]
    assert len(mine) == report.batches[0].num_samples
    assert np.median([float(row["latency_ms"]) for row in mine]) == pytest.approx(
        report.latency_ms_p50, abs=1e-4
    )


@pytest.mark.parametrize("target", ["cpu_onnxruntime", "cpu_openvino"])
def test_every_layer_that_computes_has_its_time(workshop, tmp_path, reference, target):
    benchmark(CONFIG, engine=workshop.engine("quantized", target), reference=reference, out=tmp_path)
    with (tmp_path / LAYERS_FILE).open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    working = [row for row in rows if int(row["macs"])]
    assert len(working) > 10 and {row["precision"] for row in working} <= {"int8", "f32"}
    assert all(float(row["milliseconds"]) > 0 for row in working)


def test_reference_can_be_measured_against_itself(tmp_path, reference):
    report = benchmark(CONFIG, engine=reference, reference=reference, out=tmp_path)
    assert report.engine_sha256 == report.reference_sha256
    assert report.speedup_vs_reference > 0


def test_batch_beyond_the_engine_is_left_out(workshop, tmp_path, reference):
    report = benchmark(
        replace(CONFIG, batch_size=64),
        engine=workshop.engine("float", "cpu_onnxruntime"),
        reference=reference,
        out=tmp_path,
    )
    assert [result.batch for result in report.batches] == [1]
    assert report.throughput_per_s_batched is None


def test_machine_too_noisy_for_a_claim_is_measured_twice_and_called_inconclusive(
    workshop, tmp_path, reference
):
    report = benchmark(
        replace(CONFIG, max_aa_spread=1e-12),
        engine=workshop.engine("float", "cpu_onnxruntime"),
        reference=reference,
        out=tmp_path,
    )
    assert report.inconclusive
    assert [result.num_repeats for result in report.batches] == [1, 0]


def test_engine_that_was_skipped_gives_a_report_with_the_reason(workshop, tmp_path, reference):
    (tmp_path / "build").mkdir()
    target = workshop.target("cpu_openvino_bf16", cpu_flags=["avx_imaginary"])
    build_engine(target, model=workshop.graph, out=tmp_path / "build")
    skipped = tmp_path / "build" / "engine"
    report = benchmark(CONFIG, engine=skipped, reference=reference, out=tmp_path)
    assert (report.status, report.latency_ms_p50, report.batches) == ("skipped", None, ())
    assert "avx_imaginary" in report.reason
    with pytest.raises(ArtifactError, match=r"the reference engine was skipped \(this CPU lacks"):
        benchmark(CONFIG, engine=reference, reference=skipped, out=tmp_path)


def test_changed_engine_is_refused_in_its_process(workshop, tmp_path, reference):
    engine = tmp_path / "engine"
    shutil.copytree(workshop.engine("float", "cpu_openvino"), engine)
    with (engine / "engine.blob").open("ab") as file:
        file.write(b"!")
    with pytest.raises(ArtifactError, match=r"sha256 .* is not loaded"):
        benchmark(CONFIG, engine=engine, reference=reference, out=tmp_path)


def test_death_of_the_engine_s_process_is_a_typed_error(workshop):
    engine = workshop.engine("float", "cpu_onnxruntime")
    with BurstProcess(engine, num_threads=1, timeout_s=60) as process:
        process.wait_until_loaded()
        os.kill(process.pid, signal.SIGKILL)
        with pytest.raises(ArtifactError, match=r"the process that ran it died \(killed by SIGKILL\)"):
            process.burst(1, seconds=0.01, min_calls=1)


def test_silent_process_is_given_up(workshop):
    engine = workshop.engine("float", "cpu_onnxruntime")
    with BurstProcess(engine, num_threads=1, timeout_s=60) as process:
        process.wait_until_loaded()
        process._timeout_s = 0.2
        os.kill(process.pid, signal.SIGSTOP)
        with pytest.raises(ArtifactError, match=r"no answer for 0\.2 s.*benchmark\.timeout_s"):
            process.burst(1, seconds=0.01, min_calls=1)
    assert not psutil.pid_exists(process.pid)


def test_engine_process_ends_with_the_block(workshop):
    with BurstProcess(workshop.engine("float", "cpu_onnxruntime"), num_threads=1, timeout_s=60) as process:
        process.wait_until_loaded()
    assert not psutil.pid_exists(process.pid)


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's parent-death signal exists on Linux only")
def test_engine_process_dies_with_its_killed_parent(workshop):
    program = (
        "import sys, time; from pathlib import Path\n"
        "from tasks.parts.runners.burst_process import BurstProcess\n"
        "process = BurstProcess(Path(sys.argv[1]), num_threads=1, timeout_s=60)\n"
        "process.wait_until_loaded(); print(process.pid, flush=True); time.sleep(600)"
    )
    command = [sys.executable, "-c", program, str(workshop.engine("float", "cpu_onnxruntime"))]
    with subprocess.Popen(command, cwd=REPOSITORY, stdout=subprocess.PIPE, text=True) as parent:
        child = psutil.Process(int(parent.stdout.readline()))
        parent.kill()
    deadline = time.monotonic() + 10
    while child.is_running() and child.status() != psutil.STATUS_ZOMBIE and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not child.is_running() or child.status() == psutil.STATUS_ZOMBIE


def rounds_of(reference_ms, engine_ms, control_ms):
    return [
        _Round([r] * 3, [e] * 3, [c] * 3) for r, e, c in zip(reference_ms, engine_ms, control_ms, strict=True)
    ]


def test_slow_phases_of_the_machine_cancel_in_the_ratio():
    slowness = np.array([1.0, 1.4, 1.0, 3.0, 1.1, 0.9])
    result = summarise(rounds_of(10 * slowness, slowness, slowness), batch=1, seed=0, num_repeats=0)
    assert result.speedup_vs_reference == pytest.approx(10)
    assert result.speedup_vs_reference_low == pytest.approx(10)
    assert result.aa_ratio_spread == pytest.approx(0)
    assert result.num_samples == 36


def test_difference_between_equal_processes_is_the_spread():
    ones = np.ones(8)
    result = summarise(rounds_of(10 * ones, 1.1 * ones, ones), batch=2, seed=0, num_repeats=0)
    assert result.aa_ratio_spread == pytest.approx(0.1)
    assert result.throughput_per_s == pytest.approx(2 * 1000 / 1.05)


@pytest.mark.parametrize(
    ("field", "value"),
    [("batch_size", 0), ("min_rounds", 1), ("burst_ms", 0.0), ("budget_s", -1.0), ("max_aa_spread", 0.0)],
)
def test_impossible_config_is_refused_with_its_key(field, value):
    with pytest.raises(ConfigError, match=rf"benchmark\.{field} is {value!r}, allowed"):
        replace(CONFIG, **{field: value})
