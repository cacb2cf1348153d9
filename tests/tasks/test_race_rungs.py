"""Rungs against each other: real engines in real processes."""

import csv
import shutil
from dataclasses import replace
from pathlib import Path

from tasks.parts.engines.manifest import EngineStatus, read_engine_manifest, write_engine_manifest
from tasks.race_rungs import CONTROL, Config, Report, race_rungs
from tests.tasks.conftest import Workshop

CONFIG = Config(
    target="cpu_onnxruntime",
    variants=["float", "twin", "quantized"],
    seed=0,
    warm_up_ms=5.0,
    burst_ms=3.0,
    min_calls=1,
    num_rounds=5,
    timeout_s=60.0,
)


def builds(workshop: Workshop, folder: Path) -> Path:
    """Lay out engines as build_engine does; `twin` is the same file as `float`."""
    for variant, source in (("float", "float"), ("twin", "float"), ("quantized", "quantized")):
        shutil.copytree(workshop.engine(source, CONFIG.target), folder / variant / CONFIG.target / "engine")
    return folder / "*" / CONFIG.target


def race(config: Config, engines: Path, out: Path) -> Report:
    out.mkdir()
    return race_rungs(config, builds=engines, out=out)


def test_every_two_files_are_compared_once_and_twins_are_one(workshop: Workshop, tmp_path: Path) -> None:
    report = race(CONFIG, builds(workshop, tmp_path / "builds"), tmp_path / "out")
    [ratio] = report.ratios
    assert (ratio.faster, ratio.slower) == ("quantized", "float")
    assert 0 < ratio.low <= ratio.factor <= ratio.high
    assert set(report.engine_sha256) == {"float", "twin", "quantized"}
    assert report.engine_sha256["float"] == report.engine_sha256["twin"]
    assert set(report.latency_ms_p50) == {"float", "quantized"}
    assert report.aa_ratio_spread is not None and report.aa_ratio_spread >= 0
    with (tmp_path / "out" / "latencies.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert {row["variant"] for row in rows} == {"float", "quantized", CONTROL}
    assert {int(row["round"]) for row in rows} == set(range(CONFIG.num_rounds))


def test_one_engine_alone_has_no_race(workshop: Workshop, tmp_path: Path) -> None:
    engines = builds(workshop, tmp_path / "builds")
    folder = tmp_path / "builds" / "quantized" / CONFIG.target / "engine"
    failed = replace(read_engine_manifest(folder), status=EngineStatus.failed, reason="no such kernel")
    write_engine_manifest(folder, failed)
    report = race(CONFIG, engines, tmp_path / "out")
    assert report.ratios == () and report.aa_ratio_spread is None
    assert set(report.engine_sha256) == {"float", "twin"}
    assert not list((tmp_path / "out").iterdir())
