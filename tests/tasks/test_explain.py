"""The stages measure_machine and explain, on engines that were built and measured here."""

import csv
import dataclasses
import json
from pathlib import Path

import pytest
import yaml

from tasks.benchmark import Config as BenchmarkConfig
from tasks.benchmark import benchmark
from tasks.core.config import typed_config
from tasks.core.reports import read_report, write_json
from tasks.explain import Config, Pair, explain
from tasks.measure_machine import Config as MachineConfig
from tasks.measure_machine import environment, measure_machine
from tasks.parts.explain.report import Explanation
from tasks.parts.roofs.roofs import Bound, Roofs
from tests.tasks.conftest import REPOSITORY, Workshop

TARGET = "cpu_onnxruntime"


@dataclasses.dataclass(frozen=True)
class Measured:
    """Folders of what the stages before made, as in artifacts/."""

    builds: Path
    benchmark: Path
    roofs: Path


@pytest.fixture(scope="module")
def measured(workshop: Workshop, tmp_path_factory: pytest.TempPathFactory) -> Measured:
    """Two engines of one target with their benchmark and the roofs of this machine."""
    root = tmp_path_factory.mktemp("measured") / "artifacts"
    for variant in ("float", "quantized"):
        folder = root / "build_engine" / variant / TARGET
        folder.mkdir(parents=True)
        (folder / "engine").symlink_to(workshop.engine(variant, TARGET))
    options = yaml.safe_load((REPOSITORY / "conf/benchmark/default.yaml").read_text(encoding="utf-8"))
    options |= {"budget_s": 1.0, "quiet": {"max_busy_cores": 64.0, "max_wait_s": 0.0}, "max_aa_spread": 10.0}
    options |= {"target": TARGET, "gpu": None, "variants": ["float", "quantized"], "concurrencies": []}
    found = Measured(
        root / "build_engine" / "*" / TARGET / "engine",
        root / "benchmark" / TARGET,
        root / "measure_machine" / TARGET,
    )
    for folder in (found.benchmark, found.roofs):
        folder.mkdir(parents=True)
    report = benchmark(
        typed_config(BenchmarkConfig, options, "benchmark"),
        builds=found.builds,
        reference=workshop.engine("float", TARGET),
        images=workshop.images,
        out=found.benchmark,
    )
    write_json(found.benchmark / "report.json", dataclasses.asdict(report))
    cfg = MachineConfig(workshop.target(TARGET), 3, [64, 1024])
    write_json(found.roofs / "report.json", dataclasses.asdict(measure_machine(cfg, out=found.roofs)))
    return found


def run(measured: Measured, out: Path, **changes: object) -> Explanation:
    cfg = Config(TARGET, ["float", "quantized"], {"quantized": "float"}, [Pair("float", "quantized")])
    cfg = dataclasses.replace(cfg, **changes)  # type: ignore[arg-type]
    return explain(cfg, builds=measured.builds, benchmark=measured.benchmark, roofs=measured.roofs, out=out)


def test_details_hold_the_layers_once_and_the_steps_between_two_engines(
    measured: Measured, tmp_path: Path
) -> None:
    report = run(measured, tmp_path)
    details = json.loads((tmp_path / "details.json").read_text(encoding="utf-8"))
    assert list(details["engines"]) == ["float", "quantized"]
    [pair] = details["pairs"]
    assert (pair["before"], pair["after"]) == ("float", "quantized")
    assert pair["advice"] == report.pairs[0].advice
    assert sum(pair["parts_ms"]) == pytest.approx(
        report.pairs[0].after_ms - report.pairs[0].before_ms, abs=2e-3
    )
    with (tmp_path / "quantized" / "layers.csv").open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    layers = [
        dict(zip(details["layer_fields"], layer, strict=True))
        for layer in details["engines"]["quantized"]["layers"]
    ]
    assert [details["texts"][layer["layer"]] for layer in layers] == [row["layer"] for row in rows]
    assert [layer["macs"] for layer in layers] == [int(row["macs"]) for row in rows]
    for part, before, after, _ in pair["steps"]:
        assert 0 <= part < len(details["parts"]) and (before or after)
    compared = sorted(place for _, _, after, _ in pair["steps"] for place in after)
    assert compared == list(range(len(rows)))  # each layer is in one step


def test_time_of_each_engine_and_their_difference_add_up(measured: Measured, tmp_path: Path) -> None:
    report = run(measured, tmp_path)
    assert list(report.engines) == ["float", "quantized"] and not report.reason
    for name, engine in report.engines.items():
        assert engine.layers_ms + engine.call_ms + engine.remainder_ms == pytest.approx(engine.latency_ms)
        assert sum(engine.share_by_bound.values()) == pytest.approx(1)
        assert engine.attainable_ms is not None and engine.attainable_ms > 0
        with (tmp_path / name / "layers.csv").open(encoding="utf-8") as file:
            rows = list(csv.DictReader(file))
        assert sum(float(row["milliseconds"]) for row in rows) == pytest.approx(engine.layers_ms, abs=1e-3)
        assert {row["bound"] for row in rows} <= {bound.value for bound in Bound}
        assert all(row["source"] for row in rows if int(row["macs"]))
    [pair] = report.pairs
    assert sum(pair.parts_ms.values()) == pytest.approx(pair.after_ms - pair.before_ms)
    with (tmp_path / "float--quantized" / "waterfall.csv").open(encoding="utf-8") as file:
        steps = [float(row["milliseconds"]) for row in csv.DictReader(file)]
    assert sum(steps) == pytest.approx(pair.after_ms - pair.before_ms, abs=1e-3)


def test_page_shows_roofs_engines_waterfall_layers_and_causes(measured: Measured, tmp_path: Path) -> None:
    report = run(measured, tmp_path)
    text = (tmp_path / "explain.md").read_text(encoding="utf-8")
    assert "| int8 |" in text and "| one more layer |" in text and report.pairs[0].advice in text
    assert "| float to quantized, ms |" in text and "## quantized" in text
    for cause in report.engines["quantized"].causes[:3]:
        assert cause.detail in text


def test_files_are_compared_once_and_never_with_themselves(measured: Measured, tmp_path: Path) -> None:
    twice = [Pair("float", "quantized"), Pair("float", "quantized"), Pair("float", "float")]
    assert len(run(measured, tmp_path, pairs=twice).pairs) == 1


def test_target_without_engines_says_so(measured: Measured, tmp_path: Path) -> None:
    report = run(measured, tmp_path, variants=[], pairs=[])
    assert report.reason == "no engine of this target was built"
    assert "Nothing to explain" in (tmp_path / "explain.md").read_text(encoding="utf-8")


def test_roofs_belong_to_machine_runtime_and_versions(workshop: Workshop, measured: Measured) -> None:
    facts = environment(MachineConfig(workshop.target(TARGET), 3, [64]))
    assert facts is not None and {"machine", "cpu", "onnxruntime", "cpu_flags"} <= facts.keys()
    roofs = read_report(Roofs, measured.roofs)
    assert facts["onnxruntime"] == roofs.runtime_version and facts["machine"] == roofs.machine.id
