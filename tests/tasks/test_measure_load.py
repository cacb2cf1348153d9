"""The stage measure_load, on real engines in real processes."""

import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from tasks.core.reports import read_report, write_json
from tasks.measure_load import Config, measure_load, reads
from tasks.parts.engines.manifest import EngineStatus, read_engine_manifest, write_engine_manifest
from tasks.parts.engines.tuning import Tuning
from tasks.parts.measuring.engine_process import EngineProcess
from tasks.parts.measuring.load_report import LoadReport, Setting
from tasks.parts.measuring.reports import Timed
from tasks.parts.measuring.surroundings import QuietLimits
from tests.tasks.conftest import Workshop

TARGET = "cpu_onnxruntime"
CONFIG = Config(
    target=TARGET,
    gpu=None,
    variants=["float", "twin"],
    together=[],
    max_p99_ms=None,
    unloaded_factor=1e6,
    batches=[1, 2, 64],
    lanes=[1, 2],
    threads=[1],
    window_s=0.02,
    num_rounds=1,
    num_tuning_rounds=5,
    budget_cell_s=0.02,
    arrival_shares=[0.2, 0.4],
    num_refinements=1,
    min_arrivals_s=0.1,
    max_arrivals_s=60.0,
    seed=0,
    warm_up_ms=1.0,
    quiet=QuietLimits(max_busy_cores=64.0, max_wait_s=0.0),
    timed=Timed.frame,
    timeout_s=120.0,
)


def lay_out(workshop: Workshop, root: Path, target: str = TARGET) -> Path:
    """Lay out engines as build_engine does; `twin` is the same file as `float`."""
    for variant, source in (("float", "float"), ("twin", "float"), ("quantized", "quantized")):
        folder = root / "builds" / variant / target / "engine"
        shutil.copytree(workshop.engine(source, target), folder)
    return root / "builds" / "*" / target / "engine"


def measure(config: Config, builds: Path, out: Path) -> LoadReport:
    out.mkdir()
    return measure_load(config, builds=builds, out=out)


def test_grid_tunings_and_knee_of_an_engine(workshop: Workshop, tmp_path: Path) -> None:
    builds = lay_out(workshop, tmp_path)
    report = measure(CONFIG, builds, tmp_path / "out")
    load = report.engines["float"]
    assert report.engines["twin"] == load and load.measured_as == "float"  # measured once
    assert {(cell.setting.batch, cell.setting.lanes) for cell in load.cells} == {
        (1, 1),
        (1, 2),
        (2, 1),
        (2, 2),  # 64 is more than the engine takes
    }
    for cell in load.cells:
        assert 0 < cell.throughput_per_s_low <= cell.throughput_per_s <= cell.throughput_per_s_high
        assert cell.latency_ms_p50 > 0
        assert (cell.latency_ms_p99 is None) == (cell.num_calls < 1000)
    assert load.best is not None and load.aa_spread is not None and load.aa_spread >= 0
    tried = {tuning.tuning for tuning in load.tried}
    assert {Tuning(1, has_arena=False), Tuning(1, num_branches=2)} <= tried
    assert all(one.low <= one.factor <= one.high for one in load.tried)
    arrivals = load.arrivals
    assert arrivals is not None and arrivals.setting == replace(load.best.setting, batch=1)
    assert all(step.num_arrivals >= 1000 and step.latency_ms_p99 for step in arrivals.steps)
    for step in arrivals.steps:  # an arrival waits before it is served
        assert step.latency_ms_p99 is not None and step.latency_ms_p99 >= step.service_ms_p99
    page = (tmp_path / "out" / "load.md").read_text(encoding="utf-8")
    assert "## float" in page and "## twin" in page and "Open arrivals" in page
    write_json(tmp_path / "out" / "report.json", _asdict(report))
    assert read_report(LoadReport, tmp_path / "out") == report


def _asdict(report: LoadReport) -> dict[str, object]:
    import dataclasses

    return dataclasses.asdict(report)


def test_bound_that_no_cell_holds_leaves_no_best_cell_and_no_arrivals(
    workshop: Workshop, tmp_path: Path
) -> None:
    config = replace(CONFIG, variants=["float"], max_p99_ms=1e-4, batches=[1], lanes=[1], budget_cell_s=30.0)
    load = measure(config, lay_out(workshop, tmp_path), tmp_path / "out").engines["float"]
    assert (load.best, load.arrivals, load.aa_spread, load.tried) == (None, None, None, ())
    assert load.cells[0].latency_ms_p99 is not None and load.front == load.cells
    assert "No cell of the grid holds the bound" in (tmp_path / "out" / "load.md").read_text("utf-8")


def test_engines_at_the_same_time_stand_beside_themselves_alone(workshop: Workshop, tmp_path: Path) -> None:
    builds = lay_out(workshop, tmp_path)
    failed = tmp_path / "builds" / "twin" / TARGET / "engine"
    write_engine_manifest(failed, replace(read_engine_manifest(failed), status=EngineStatus.failed))
    config = replace(
        CONFIG, variants=["twin"], together=["float", "twin", "quantized"], window_s=0.2, num_rounds=2
    )
    report = measure(config, builds, tmp_path / "out")
    assert not report.engines  # it was not built
    assert [one.variant for one in report.together] == ["float", "quantized"]
    assert all(one.alone_per_s > 0 and one.together_per_s > 0 for one in report.together)
    page = (tmp_path / "out" / "load.md").read_text("utf-8")
    assert "at the same time" in page and "| quantized |" in page


@pytest.mark.parametrize(
    ("target", "tuning"),
    [
        ("cpu_onnxruntime", Tuning(2)),
        ("cpu_onnxruntime", Tuning(1, is_pinned=True)),
        ("cpu_onnxruntime", Tuning(1, has_arena=False, num_branches=2)),
        ("cpu_openvino", Tuning(2)),
        ("cpu_openvino", Tuning(1, is_pinned=True)),
        ("cpu_torch", Tuning(2)),
    ],
)
def test_engine_opens_with_each_tuning_and_tells_its_threads(
    workshop: Workshop, target: str, tuning: Tuning
) -> None:
    engine = workshop.engine("float", target)
    with EngineProcess(engine, num_threads=tuning.num_threads, timeout_s=60.0, tuning=tuning) as process:
        assert process.wait_until_loaded()["num_threads"] == tuning.num_threads
        load = process.load(1, concurrency=1, seconds=0.01, num_windows=1, warm_up_s=0.01)
        served = process.serve(lanes=1, rate_per_s=200.0, seconds=0.2, seed=0)
    assert load.calls_per_s[0] > 0
    assert len(served.latencies_ns) == len(served.late_ns) > 10 and min(served.late_ns) >= 0


def test_inputs_are_the_engines_that_are_named(tmp_path: Path) -> None:
    config = replace(CONFIG, variants=["float"], together=["float", "quantized"])
    builds = tmp_path / "*" / TARGET / "engine"
    assert reads(config, builds=builds) == {
        "builds": [tmp_path / name / TARGET / "engine" for name in ("float", "quantized")]
    }


def test_setting_reads_as_words() -> None:
    setting = Setting(4, 2, Tuning(1, is_pinned=True, has_arena=False, num_branches=2))
    assert setting.describe() == "batch 4, 2 lanes of 1 thread, pinned, no arena, 2 branches"
    assert Setting(1, 1, Tuning(2)).describe() == "batch 1, 1 lane of 2 threads"
