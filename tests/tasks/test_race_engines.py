"""Engines of a target against each other: real engines in real processes."""

import csv
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from tasks.core.errors import ArtifactError
from tasks.parts.engines.manifest import EngineStatus, read_engine_manifest, write_engine_manifest
from tasks.parts.measuring.reports import REFERENCE
from tasks.race_engines import CONTROL, Config, Report, race_engines
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


@pytest.fixture
def reference(workshop: Workshop) -> Path:
    return workshop.engine("float", "cpu_torch")


@pytest.fixture
def builds(workshop: Workshop, tmp_path: Path) -> Path:
    """Lay out engines as build_engine does; `twin` is the same file as `float`."""
    folder = tmp_path / "builds"
    for variant, source in (("float", "float"), ("twin", "float"), ("quantized", "quantized")):
        shutil.copytree(workshop.engine(source, CONFIG.target), folder / variant / CONFIG.target / "engine")
    return folder / "*" / CONFIG.target / "engine"


def race(config: Config, builds: Path, reference: Path, out: Path) -> Report:
    out.mkdir()
    return race_engines(config, builds=builds, reference=reference, out=out)


def fail(engine: Path) -> None:
    failed = replace(read_engine_manifest(engine), status=EngineStatus.failed, reason="no such kernel")
    write_engine_manifest(engine, failed)


def test_every_two_files_are_compared_once_and_twins_are_one(
    builds: Path, reference: Path, tmp_path: Path
) -> None:
    report = race(CONFIG, builds, reference, tmp_path / "out")
    assert [(ratio.faster, ratio.slower) for ratio in report.ratios] == [
        ("float", "reference"),
        ("quantized", "reference"),
        ("quantized", "float"),
    ]
    assert all(0 < ratio.low <= ratio.factor <= ratio.high for ratio in report.ratios)
    files = report.engine_sha256
    assert set(files) == {"float", "twin", "quantized"} and files["float"] == files["twin"]
    assert report.reference_sha256 == read_engine_manifest(reference).sha256
    assert report.raced_as == {"float": "float", "twin": "float", "quantized": "quantized"}
    assert report.ratio("twin", REFERENCE) == report.ratios[0]
    assert report.ratio("quantized", "twin") == report.ratios[2]
    assert report.ratio("twin", "float").factor == 1
    backwards = report.ratio("float", "quantized")
    assert (backwards.faster, backwards.slower) == ("float", "quantized")
    assert backwards.factor == 1 / report.ratios[2].factor
    assert backwards.low <= backwards.factor <= backwards.high
    assert set(report.latency_ms_p50) == {"reference", "float", "quantized"}
    assert report.aa_ratio is not None and report.aa_ratio_spread == report.aa_ratio.spread >= 0
    with (tmp_path / "out" / "latencies.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert {row["engine"] for row in rows} == {"reference", "float", "quantized", CONTROL}
    assert {int(row["round"]) for row in rows} == set(range(CONFIG.num_rounds))


def test_the_only_engine_of_a_target_races_the_reference(
    builds: Path, reference: Path, tmp_path: Path
) -> None:
    fail(tmp_path / "builds" / "quantized" / CONFIG.target / "engine")
    report = race(CONFIG, builds, reference, tmp_path / "out")
    [ratio] = report.ratios
    assert (ratio.faster, ratio.slower) == ("float", "reference")
    assert set(report.engine_sha256) == {"float", "twin"}


def test_the_reference_alone_has_no_race(builds: Path, tmp_path: Path) -> None:
    fail(tmp_path / "builds" / "quantized" / CONFIG.target / "engine")
    reference = tmp_path / "builds" / "float" / CONFIG.target / "engine"
    report = race(CONFIG, builds, reference, tmp_path / "out")
    assert report.ratios == () and report.aa_ratio is None
    assert report.raced_as == {"float": REFERENCE, "twin": REFERENCE}
    assert report.ratio("twin", REFERENCE).factor == 1
    assert not list((tmp_path / "out").iterdir())


def test_the_file_of_the_reference_is_another_engine_on_another_target(builds: Path, tmp_path: Path) -> None:
    fail(tmp_path / "builds" / "quantized" / CONFIG.target / "engine")
    reference = tmp_path / "reference"
    shutil.copytree(tmp_path / "builds" / "float" / CONFIG.target / "engine", reference)
    manifest = read_engine_manifest(reference)
    write_engine_manifest(reference, replace(manifest, target=replace(manifest.target, name="elsewhere")))
    report = race(CONFIG, builds, reference, tmp_path / "out")
    assert report.raced_as == {"float": "float", "twin": "float"}
    assert report.engine_sha256["float"] == report.reference_sha256
    assert report.ratio("twin", REFERENCE) == report.ratios[0]


def test_a_reference_that_was_not_built_or_takes_other_images_is_refused(
    builds: Path, reference: Path, tmp_path: Path
) -> None:
    other = tmp_path / "reference"
    shutil.copytree(reference, other)
    manifest = read_engine_manifest(other)
    write_engine_manifest(other, replace(manifest, card=replace(manifest.card, height=32)))
    with pytest.raises(ArtifactError, match=r"of \(32, \d+\) \(height, width\)"):
        race(CONFIG, builds, other, tmp_path / "size")
    fail(other)
    with pytest.raises(ArtifactError, match=r"the reference engine was not built \(failed: no such kernel\)"):
        race(CONFIG, builds, other, tmp_path / "failed")
