"""All engines of a target, measured side by side: real engines in real processes."""

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

from tasks.benchmark import Config, Report, benchmark
from tasks.core.errors import ArtifactError
from tasks.parts.engines.manifest import (
    LAYERS_FILE,
    EngineStatus,
    read_engine_manifest,
    write_engine_manifest,
)
from tasks.parts.engines.open_engine import load_runner
from tasks.parts.measuring import engine_process
from tasks.parts.measuring.batch_latency import Windows
from tasks.parts.measuring.engine_process import EngineProcess
from tasks.parts.measuring.race import CONTROL
from tasks.parts.measuring.reports import REFERENCE, EngineMeasurement, Timed
from tasks.parts.measuring.surroundings import QuietLimits
from tests.tasks.conftest import Workshop

REPOSITORY = Path(engine_process.__file__).resolve().parents[3]
TARGET = "cpu_onnxruntime"
CONFIG = Config(
    target=TARGET,
    gpu=None,
    variants=["float", "twin", "quantized"],
    seed=0,
    batch_sizes=[],
    warm_up_ms=5.0,
    burst_ms=3.0,
    min_calls=2,
    timed=Timed.frame,
    min_rounds=5,
    budget_s=1e-3,
    resolution=0.015,
    windows=Windows(num_rounds=1, tolerance=1e9),
    budget_batch_s=0.05,
    concurrencies=[],
    throughput_s=0.03,
    max_aa_spread=1e9,
    quiet=QuietLimits(max_busy_cores=0.3, max_wait_s=0.0),
    timeout_s=60.0,
)


@pytest.fixture
def reference(workshop: Workshop) -> Path:
    return workshop.engine("float", "cpu_torch")


@pytest.fixture
def builds(workshop: Workshop, tmp_path: Path) -> Path:
    """Lay out engines as build_engine does; `twin` is the same file as `float`."""
    for variant, source in (("float", "float"), ("twin", "float"), ("quantized", "quantized")):
        shutil.copytree(workshop.engine(source, TARGET), folder_of(variant, tmp_path))
    return folder_of("*", tmp_path)


def folder_of(variant: str, root: Path) -> Path:
    return root / "builds" / variant / TARGET / "engine"


def measure(config: Config, builds: Path, reference: Path, out: Path) -> Report:
    out.mkdir()
    images = save_images(out.with_suffix(".npy"))
    return benchmark(config, builds=builds, reference=reference, images=images, out=out)


def save_images(file: Path) -> Path:
    """Save three images of another size than the engines'."""
    np.save(file, np.random.default_rng(0).integers(0, 256, (3, 40, 24, 3), np.uint8))
    return file


def measure_one(config: Config, engine: Path, out: Path) -> EngineMeasurement:
    """Measure a single engine, which is its own reference."""
    config = replace(config, variants=["one"], target=read_engine_manifest(engine).target.name)
    images = save_images(out / "images.npy")
    report = benchmark(config, builds=engine, reference=engine, images=images, out=out)
    return report.engines["one"]


def fail(engine: Path) -> None:
    failed = replace(
        read_engine_manifest(engine), status=EngineStatus.failed, reason="no such kernel", sha256=""
    )
    write_engine_manifest(engine, failed)


def rows_of(folder: Path) -> list[dict[str, str]]:
    with (folder / "latencies.csv").open(encoding="utf-8") as file:
        return list(csv.DictReader(file))


@pytest.mark.slow
def test_every_two_files_are_compared_once_and_twins_are_one(
    builds: Path, reference: Path, tmp_path: Path
) -> None:
    report = measure(CONFIG, builds, reference, tmp_path / "out")
    race = report.race
    assert race is not None
    assert [(ratio.faster, ratio.slower) for ratio in race.ratios] == [
        ("float", "reference"),
        ("quantized", "reference"),
        ("quantized", "float"),
    ]
    assert all(0 < ratio.low <= ratio.factor <= ratio.high for ratio in race.ratios)
    assert (race.level, race.num_comparisons, race.num_rounds, race.num_repeats) == (0.95, 1, 5, 0)
    engines = report.engines
    assert {name: engine.measured_as for name, engine in engines.items()} == {
        "float": "float",
        "twin": "float",
        "quantized": "quantized",
    }
    assert engines["twin"].latency == engines["float"].latency != engines["quantized"].latency
    assert report.reference_sha256 == read_engine_manifest(reference).sha256
    assert report.reference_target == "cpu_torch"
    assert report.ratio("twin", REFERENCE) == race.ratios[0]
    assert report.ratio("quantized", "twin") == race.ratios[2]
    assert report.ratio("twin", "float").factor == 1
    backwards = report.ratio("float", "quantized")
    assert (backwards.faster, backwards.slower) == ("float", "quantized")
    assert backwards.factor == 1 / race.ratios[2].factor
    assert backwards.low <= backwards.factor <= backwards.high
    assert report.aa_ratio_spread == race.aa_ratio.spread >= 0
    assert (race.aa_ratio.faster, race.aa_ratio.slower) == (CONTROL, "float")
    folders = {path.name for path in (tmp_path / "out").iterdir()}
    assert folders == {"reference", "control", "float", "twin", "quantized"}


@pytest.mark.slow
def test_ratio_and_latency_come_from_the_same_rounds(builds: Path, reference: Path, tmp_path: Path) -> None:
    report = measure(CONFIG, builds, reference, tmp_path / "out")
    by_name = {}
    for name in ("reference", "float", "quantized"):
        by_round: dict[str, list[float]] = {}
        for row in rows_of(tmp_path / "out" / name):
            by_round.setdefault(row["round"], []).append(float(row["latency_ms"]))
        by_name[name] = by_round
        if name != "reference":
            latency = report.engines[name].latency
            assert latency is not None and latency.at_batch_1.num_samples == sum(map(len, by_round.values()))
            every = np.concatenate(list(by_round.values()))
            assert latency.at_batch_1.latency_ms_p50 == pytest.approx(np.median(every), abs=1e-4)
    medians = {name: [np.median(burst) for burst in rounds.values()] for name, rounds in by_name.items()}
    factor = np.median(np.array(medians["reference"]) / medians["quantized"])
    assert report.ratio("quantized", REFERENCE).factor == pytest.approx(factor, rel=1e-3)


def test_report_holds_all_numbers_of_an_engine(workshop: Workshop, tmp_path: Path) -> None:
    engine = workshop.engine("quantized", TARGET)
    config = replace(CONFIG, batch_sizes=[4, 2, 4, 64], concurrencies=[1, 3])
    found, manifest = measure_one(config, engine, tmp_path), read_engine_manifest(engine)
    assert (found.status, found.engine_sha256) == ("built", manifest.sha256)
    latency = found.latency
    assert latency is not None
    assert [result.batch for result in latency.batches] == [1, 2, 4]  # 64 is more than the engine takes
    for result in latency.batches:
        assert 0 < result.latency_ms_p50 <= result.latency_ms_p90 <= result.latency_ms_p95
        assert list(result.latency_ms_intervals)[:3] == ["p50", "p90", "p95"]
        assert (result.latency_ms_p99 is None) == (result.num_samples < 1000)
        assert (result.device_ms_p50, result.device_compute_ms_p50) == (None, None)
        assert result.is_stable and result.num_rounds >= 5 and result.num_samples >= 10
    assert latency.throughput_per_s_batched == latency.batches[2].throughput_per_s
    assert latency.memory_mib > 0 and latency.memory_total_mib > latency.memory_mib
    assert latency.gpu_memory_mib is None
    assert latency.load_ms > 0 and latency.first_call_ms > 0
    assert [one.concurrency for one in latency.throughputs] == [1, 3]
    for one in latency.throughputs:
        assert 0 < one.throughput_per_s_low <= one.throughput_per_s <= one.throughput_per_s_high
        assert one.latency_ms_p50 > 0
        assert one.energy_mj_per_image is None or one.energy_mj_per_image > 0
    assert list(latency.phases_ms) == ["decode", "pre", "run", "post"] and min(latency.phases_ms.values()) > 0
    assert 0 < latency.frames_per_s < 1000 / min(latency.phases_ms["decode"], latency.phases_ms["run"])
    assert latency.energy_mj_per_image == latency.throughputs[1].energy_mj_per_image and latency.energy_note
    assert (found.provider, found.num_threads) == ("CPUExecutionProvider", manifest.target.num_threads)
    assert found.options == {"graph_optimization_level": "ORT_ENABLE_ALL"}


@pytest.mark.parametrize("target", ["cpu_onnxruntime", "cpu_openvino"])
def test_every_layer_that_computes_has_its_time(workshop: Workshop, tmp_path: Path, target: str) -> None:
    measure_one(CONFIG, workshop.engine("quantized", target), tmp_path)
    with (tmp_path / "one" / LAYERS_FILE).open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    working = [row for row in rows if int(row["macs"])]
    assert len(working) > 10 and {row["precision"] for row in working} <= {"int8", "f32"}
    assert all(float(row["milliseconds"]) > 0 for row in working)


@pytest.mark.parametrize("model", ["float", "quantized"])
def test_layers_that_onnxruntime_inserted_have_their_times(
    workshop: Workshop, tmp_path: Path, model: str
) -> None:
    """It numbers them in each session differently."""
    measure_one(CONFIG, workshop.engine(model, "cpu_onnxruntime"), tmp_path)
    with (tmp_path / "one" / LAYERS_FILE).open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert all(row["milliseconds"] for row in rows)
    assert len({row["layer"] for row in rows}) == len(rows)


def test_batches_for_which_an_engine_needs_too_long_are_left_out(
    workshop: Workshop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("tasks.benchmark._LONGEST_CALL_S", 1e-9)
    measured = measure_one(replace(CONFIG, batch_sizes=[2]), workshop.engine("float", TARGET), tmp_path)
    assert measured.latency is not None
    assert [batch.batch for batch in measured.latency.batches] == [1]
    assert measured.latency.throughput_per_s_batched is None
    assert "batches of 2 are not measured, since one image takes" in caplog.text


def test_long_call_counts_from_the_first_on(workshop: Workshop, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    monkeypatch.setattr(engine_process, "_call", lambda *_: lambda: calls.append(1))
    engine = workshop.engine("float", TARGET)
    manifest = read_engine_manifest(engine)
    with load_runner(engine / manifest.file, manifest) as runner:
        for long_ns, num_calls in ((0, 1), (10**12, 2)):
            monkeypatch.setattr(engine_process, "_LONG_NS", long_ns)
            calls.clear()
            found = engine_process._carry_out(
                runner, np.zeros((1, 1, 1, 3), np.uint8), Timed.run, do="burst", seconds=0.0, min_calls=1
            )
            assert (len(found["latencies_ns"]), len(calls)) == (1, num_calls)


@pytest.mark.slow
def test_machine_and_its_surroundings_are_recorded(builds: Path, reference: Path, tmp_path: Path) -> None:
    report = measure(CONFIG, builds, reference, tmp_path / "out")
    machine, around = report.machine, report.surroundings
    assert machine.versions["numpy"] == np.__version__ and "nvidia driver" not in machine.versions
    assert around is not None
    assert around.before.gpu is None and around.after.gpu_note == "the target does not use one"
    if sys.platform == "linux":
        assert around.steal_share is not None and 0 <= around.steal_share <= 1
        assert around.quiet.busy_cores is not None and around.quiet.busy_cores >= 0


@pytest.mark.slow
def test_the_only_engine_of_a_target_races_the_reference(
    builds: Path, reference: Path, tmp_path: Path
) -> None:
    fail(folder_of("quantized", tmp_path))
    report = measure(CONFIG, builds, reference, tmp_path / "out")
    assert report.race is not None
    [ratio] = report.race.ratios
    assert (ratio.faster, ratio.slower) == ("float", "reference") and report.race.num_comparisons == 1
    failed = report.engines["quantized"]
    assert (failed.status, failed.reason, failed.latency) == ("failed", "no such kernel", None)


def test_the_reference_alone_is_measured_beside_itself(builds: Path, tmp_path: Path) -> None:
    fail(folder_of("quantized", tmp_path))
    report = measure(CONFIG, builds, folder_of("float", tmp_path), tmp_path / "out")
    assert report.race is not None and report.race.ratios == ()
    assert (report.race.aa_ratio.faster, report.race.aa_ratio.slower) == (CONTROL, REFERENCE)
    assert {report.engines[name].measured_as for name in ("float", "twin")} == {REFERENCE}
    assert report.ratio("twin", REFERENCE).factor == 1 and report.engines["twin"].latency is not None


def test_a_target_without_engines_gives_the_reasons(builds: Path, reference: Path, tmp_path: Path) -> None:
    for variant in CONFIG.variants:
        fail(folder_of(variant, tmp_path))
    report = measure(CONFIG, builds, reference, tmp_path / "out")
    assert report.race is None and not report.is_inconclusive and report.surroundings is None
    assert {engine.reason for engine in report.engines.values()} == {"no such kernel"}
    assert not list((tmp_path / "out").iterdir())


def test_the_file_of_the_reference_is_another_engine_on_another_target(builds: Path, tmp_path: Path) -> None:
    fail(folder_of("quantized", tmp_path))
    reference = tmp_path / "reference"
    shutil.copytree(folder_of("float", tmp_path), reference)
    manifest = read_engine_manifest(reference)
    write_engine_manifest(reference, replace(manifest, target=replace(manifest.target, name="elsewhere")))
    report = measure(CONFIG, builds, reference, tmp_path / "out")
    assert {report.engines[name].measured_as for name in ("float", "twin")} == {"float"}
    assert report.engines["float"].engine_sha256 == report.reference_sha256
    assert report.race is not None and report.ratio("twin", REFERENCE) == report.race.ratios[0]


def test_a_reference_that_was_not_built_or_takes_other_images_is_refused(
    builds: Path, reference: Path, tmp_path: Path
) -> None:
    other = tmp_path / "reference"
    shutil.copytree(reference, other)
    manifest = read_engine_manifest(other)
    write_engine_manifest(other, replace(manifest, card=replace(manifest.card, height=32)))
    with pytest.raises(ArtifactError, match=r"of \(32, \d+\) \(height, width\)"):
        measure(CONFIG, builds, other, tmp_path / "size")
    fail(other)
    with pytest.raises(ArtifactError, match=r"the reference engine was not built \(failed: no such kernel\)"):
        measure(CONFIG, builds, other, tmp_path / "failed")


@pytest.mark.slow
def test_a_race_with_a_large_spread_is_repeated_and_the_better_one_is_kept(
    builds: Path, reference: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    report = measure(replace(CONFIG, max_aa_spread=1e-12), builds, reference, tmp_path / "out")
    assert report.is_inconclusive and report.race is not None and report.race.num_repeats == 1
    [warning] = [record for record in caplog.records if "measuring again" in record.message]
    assert isinstance(warning.args, tuple) and isinstance(warning.args[0], float)
    assert 100 * report.aa_ratio_spread <= warning.args[0]


def test_changed_engine_is_refused_in_its_process(workshop: Workshop, tmp_path: Path) -> None:
    engine = tmp_path / "engine"
    shutil.copytree(workshop.engine("float", "cpu_openvino"), engine)
    with (engine / "engine.blob").open("ab") as file:
        file.write(b"!")
    with pytest.raises(ArtifactError, match=r"sha256 .* is not loaded"):
        measure_one(CONFIG, engine, tmp_path)


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


def test_engine_is_loaded_when_it_is_asked_for(workshop, tmp_path):
    engine = tmp_path / "engine"
    shutil.copytree(workshop.engine("float", "cpu_onnxruntime"), engine)
    with EngineProcess(engine, num_threads=1, timeout_s=60) as process:
        process.wait_until_imported()
        (engine / read_engine_manifest(engine).file).unlink()
        with pytest.raises(ArtifactError, match="not found, expected the engine"):
            process.wait_until_loaded()


def test_peak_memory_is_not_that_of_the_parent(workshop):
    """Linux starts ru_maxrss of a child at the parent's."""
    ballast = np.ones(1 << 27)  # 1 GiB
    with EngineProcess(workshop.engine("float", "cpu_onnxruntime"), num_threads=1, timeout_s=60) as process:
        process.wait_until_loaded()
        found = process.warm_up(1, seconds=0.0)
    assert 0 < found.memory_mib < found.memory_total_mib < ballast.nbytes / (1 << 20)
    assert found.load_ms > 0 and found.first_call_ms > 0


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
