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

from tasks.benchmark import Config, benchmark
from tasks.build_engine import build_engine
from tasks.core.errors import ArtifactError
from tasks.parts.engines.manifest import LAYERS_FILE, read_engine_manifest
from tasks.parts.measuring import engine_process
from tasks.parts.measuring.batch_latency import Windows
from tasks.parts.measuring.engine_process import EngineProcess

REPOSITORY = Path(engine_process.__file__).resolve().parents[3]
CONFIG = Config(
    seed=0,
    batch_sizes=[4],
    warm_up_ms=5.0,
    burst_ms=3.0,
    min_calls=2,
    min_rounds=4,
    windows=Windows(num_rounds=1, tolerance=1e9),
    budget_s=0.2,
    budget_batch_s=0.1,
    concurrencies=[],
    throughput_s=0.03,
    max_aa_spread=1e9,
    timeout_s=60.0,
)


def test_report_holds_all_numbers_of_the_engine(workshop, tmp_path):
    engine = workshop.engine("quantized", "cpu_onnxruntime")
    report = benchmark(CONFIG, engine=engine, out=tmp_path)
    manifest = read_engine_manifest(engine)
    assert report.engine_sha256 == manifest.sha256
    latency, single = report.latency, report.latency.at_batch_1
    assert 0 < single.latency_ms_p50 <= single.latency_ms_p90 <= single.latency_ms_p95
    assert list(single.latency_ms_intervals)[:3] == ["p50", "p90", "p95"]
    assert (single.latency_ms_p99 is None) == (single.num_samples < 1000)
    p50 = single.latency_ms_intervals["p50"]
    assert 0 < p50.low <= p50.high
    assert (single.device_ms_p50, single.device_compute_ms_p50) == (None, None)
    assert latency.gpu_memory_mib is None
    assert latency.memory_mib > 0 and latency.memory_total_mib > latency.memory_mib
    assert [result.batch for result in latency.batches] == [1, 4]
    assert latency.throughput_per_s_batched == latency.batches[1].throughput_per_s
    assert all(result.num_rounds >= 3 and result.num_samples >= 12 for result in latency.batches)
    assert report.provider == "CPUExecutionProvider" and report.num_threads == manifest.target.num_threads
    assert report.precisions["QLinearConv"]["int8"] > 0
    assert not latency.is_inconclusive and latency.throughputs == ()
    assert report.options == {"graph_optimization_level": "ORT_ENABLE_ALL"}
    assert report.versions["numpy"] == np.__version__ and "nvidia driver" not in report.versions
    assert latency.machine_before.gpu is None
    assert latency.machine_after.gpu_note == "the target does not use one"


def test_every_timed_inference_is_in_the_table(workshop, tmp_path):
    engine = workshop.engine("float", "cpu_openvino")
    report = benchmark(CONFIG, engine=engine, out=tmp_path)
    with (tmp_path / "latencies.csv").open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert {row["process"] for row in rows} == {"engine", "control"}
    mine = [row for row in rows if row["batch"] == "1"]
    assert len(mine) == report.latency.batches[0].num_samples
    assert np.median([float(row["latency_ms"]) for row in mine]) == pytest.approx(
        report.latency.at_batch_1.latency_ms_p50, abs=1e-4
    )


@pytest.mark.parametrize("target", ["cpu_onnxruntime", "cpu_openvino"])
def test_every_layer_that_computes_has_its_time(workshop, tmp_path, target):
    benchmark(CONFIG, engine=workshop.engine("quantized", target), out=tmp_path)
    with (tmp_path / LAYERS_FILE).open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    working = [row for row in rows if int(row["macs"])]
    assert len(working) > 10 and {row["precision"] for row in working} <= {"int8", "f32"}
    assert all(float(row["milliseconds"]) > 0 for row in working)


def test_batch_beyond_the_engine_is_left_out(workshop, tmp_path):
    report = benchmark(
        replace(CONFIG, batch_sizes=[64]),
        engine=workshop.engine("float", "cpu_onnxruntime"),
        out=tmp_path,
    )
    assert [result.batch for result in report.latency.batches] == [1]
    assert report.latency.throughput_per_s_batched is None


def test_sweep_measures_each_batch_once_and_by_size(workshop, tmp_path):
    report = benchmark(
        replace(CONFIG, batch_sizes=[4, 2, 4, 64]),
        engine=workshop.engine("float", "cpu_onnxruntime"),
        out=tmp_path,
    )
    assert [result.batch for result in report.latency.batches] == [1, 2, 4]
    assert report.latency.throughput_per_s_batched == report.latency.batches[2].throughput_per_s


def test_measurement_ends_long_before_its_budget_when_three_windows_agree(workshop, tmp_path):
    agreeing = Windows(num_rounds=2, tolerance=1e9)
    report = benchmark(
        replace(CONFIG, batch_sizes=[], windows=agreeing, budget_s=1000.0),
        engine=workshop.engine("float", "cpu_onnxruntime"),
        out=tmp_path,
    )
    [result] = report.latency.batches
    assert report.latency.at_batch_1.is_stable and (result.num_windows, result.num_rounds) == (3, 6)


def test_machine_that_never_settles_is_given_up_at_the_budget(workshop, tmp_path):
    report = benchmark(
        replace(CONFIG, batch_sizes=[], windows=Windows(num_rounds=1, tolerance=1e-12)),
        engine=workshop.engine("float", "cpu_onnxruntime"),
        out=tmp_path,
    )
    assert not report.latency.at_batch_1.is_stable and report.latency.batches[0].num_rounds >= 3


@pytest.mark.parametrize("target", ["cpu_onnxruntime", "cpu_openvino"])
def test_throughput_is_measured_with_every_number_of_threads(workshop, tmp_path, target):
    report = benchmark(
        replace(CONFIG, batch_sizes=[], concurrencies=[1, 3]),
        engine=workshop.engine("float", target),
        out=tmp_path,
    )
    assert [one.concurrency for one in report.latency.throughputs] == [1, 3]
    for one in report.latency.throughputs:
        assert 0 < one.throughput_per_s_low <= one.throughput_per_s <= one.throughput_per_s_high
        assert one.latency_ms_p50 > 0


def test_machine_too_noisy_for_a_claim_is_measured_twice_and_called_inconclusive(workshop, tmp_path):
    report = benchmark(
        replace(CONFIG, max_aa_spread=1e-12),
        engine=workshop.engine("float", "cpu_onnxruntime"),
        out=tmp_path,
    )
    assert report.latency.is_inconclusive
    assert [result.num_repeats for result in report.latency.batches] == [1, 0]


def test_engine_that_was_skipped_gives_a_report_with_the_reason(workshop, tmp_path):
    (tmp_path / "build").mkdir()
    target = workshop.target("cpu_openvino_bf16", cpu_flags=["avx_imaginary"])
    build_engine(target, model=workshop.graph, out=tmp_path / "build")
    skipped = tmp_path / "build" / "engine"
    report = benchmark(CONFIG, engine=skipped, out=tmp_path)
    assert (report.status, report.latency) == ("skipped", None)
    assert "avx_imaginary" in report.reason


def test_changed_engine_is_refused_in_its_process(workshop, tmp_path):
    engine = tmp_path / "engine"
    shutil.copytree(workshop.engine("float", "cpu_openvino"), engine)
    with (engine / "engine.blob").open("ab") as file:
        file.write(b"!")
    with pytest.raises(ArtifactError, match=r"sha256 .* is not loaded"):
        benchmark(CONFIG, engine=engine, out=tmp_path)


def test_death_of_the_engine_s_process_is_a_typed_error(workshop):
    engine = workshop.engine("float", "cpu_onnxruntime")
    with EngineProcess(engine, num_threads=1, timeout_s=60) as process:
        process.wait_until_loaded()
        os.kill(process.pid, signal.SIGKILL)
        with pytest.raises(ArtifactError, match=r"the process that ran it died \(killed by SIGKILL\)"):
            process.burst(1, seconds=0.01, min_calls=1)


def test_lane_that_fails_ends_the_others(workshop):
    engine = workshop.engine("float", "cpu_openvino")  # compiled for batches up to 4
    with EngineProcess(engine, num_threads=1, timeout_s=60) as process:
        process.wait_until_loaded()
        with pytest.raises(ArtifactError, match=r"the process that ran it died \(exit code 1\)"):
            process.load(5, concurrency=3, seconds=0.01, num_windows=3)


def test_silent_process_is_given_up(workshop):
    engine = workshop.engine("float", "cpu_onnxruntime")
    with EngineProcess(engine, num_threads=1, timeout_s=60) as process:
        process.wait_until_loaded()
        process._timeout_s = 0.2
        os.kill(process.pid, signal.SIGSTOP)
        with pytest.raises(ArtifactError, match=r"no answer for 0\.2 s.*timeout_s of the stage"):
            process.burst(1, seconds=0.01, min_calls=1)
    assert not psutil.pid_exists(process.pid)


def test_engine_process_ends_with_the_block(workshop):
    with EngineProcess(workshop.engine("float", "cpu_onnxruntime"), num_threads=1, timeout_s=60) as process:
        process.wait_until_loaded()
    assert not psutil.pid_exists(process.pid)


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's parent-death signal exists on Linux only")
def test_engine_process_dies_with_its_killed_parent(workshop):
    program = (
        "import sys, time; from pathlib import Path\n"
        "from tasks.parts.measuring.engine_process import EngineProcess\n"
        "process = EngineProcess(Path(sys.argv[1]), num_threads=1, timeout_s=60)\n"
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
