"""The stage try_changes, on engines that are built and raced here."""

import csv
import dataclasses
from pathlib import Path

import pytest

from tasks.core.reports import write_json
from tasks.parts.engines.manifest import read_engine_manifest
from tasks.parts.measuring.race import RaceOptions
from tasks.parts.measuring.reports import Timed
from tasks.parts.measuring.surroundings import QuietLimits
from tasks.parts.onnx_graphs.graph import name_nodes, read_graph
from tasks.parts.onnx_graphs.macs import layer_sizes
from tasks.parts.what_if.change import Change, ChangeKind
from tasks.parts.what_if.report import WhatIf
from tasks.parts.what_if.trial import try_changes as build_and_race
from tasks.parts.what_if.widths import find_width_groups
from tasks.try_changes import Config, reads, try_changes
from tests.tasks.conftest import Workshop
from tests.tasks.parts.explain.engines import ROOFS

TARGET = "cpu_onnxruntime"
OPTIONS = RaceOptions(
    seed=0,
    warm_up_ms=5.0,
    burst_ms=3.0,
    min_calls=2,
    timed=Timed.frame,
    min_rounds=5,
    budget_s=1e-3,
    resolution=0.015,
    max_aa_spread=1e9,
    quiet=QuietLimits(max_busy_cores=64.0, max_wait_s=0.0),
    timeout_s=60.0,
)


def change(kind: ChangeKind, **options: object) -> Change:
    return Change(kind, kind.value, 1.0, "none", "", **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["cpu_onnxruntime", "cpu_openvino"])
def test_a_change_of_each_kind_is_built_and_raced(workshop: Workshop, tmp_path: Path, name: str) -> None:
    graph = read_graph(workshop.quantized)
    name_nodes(graph)
    sizes, groups = layer_sizes(graph), find_width_groups(graph)
    target = workshop.target(name, stem_in_float=False, max_batch=1)
    changes = [
        change(ChangeKind.back_to_float, nodes=frozenset(list(sizes)[2:5])),
        change(
            ChangeKind.wider, widths={layer: group.width + 8 for group in groups for layer in group.layers}
        ),
        change(ChangeKind.narrower, widths={layer: 8 for group in groups for layer in group.layers}),
        change(ChangeKind.scheme, switch="stem_in_float"),
        change(ChangeKind.batch, batch=2),
    ]
    trials = build_and_race(
        changes,
        workshop.engine("quantized", name),
        graph,
        target,
        images=workshop.images,
        folder=tmp_path,
        options=OPTIONS,
    )
    assert not trials.reasons and list(trials.laps) == [0, 1, 2, 3, 4] and trials.num_rounds >= 5
    assert all(lap.low <= lap.factor <= lap.high and lap.factor > 0 for lap in trials.laps.values())
    manifests = [read_engine_manifest(tmp_path / str(number) / "engine") for number in range(5)]
    assert len({manifest.sha256 for manifest in manifests[:4]}) == 4
    assert manifests[3].target.stem_in_float and manifests[4].target.max_batch == 2


def test_change_that_the_runtime_refuses_is_reported(workshop: Workshop, tmp_path: Path) -> None:
    graph = read_graph(workshop.quantized)
    refusing = workshop.target(TARGET, opsets=[13, 14])
    trials = build_and_race(
        [change(ChangeKind.batch, batch=2)],
        workshop.engine("quantized", TARGET),
        graph,
        refusing,
        images=workshop.images,
        folder=tmp_path,
        options=OPTIONS,
    )
    assert "opset" in trials.reasons[0] and not trials.laps


class Inputs:
    """Two engines of one target, and the roofs of a made-up machine."""

    def __init__(self, workshop: Workshop, root: Path) -> None:
        for variant in ("float", "quantized"):
            folder = root / "build_engine" / variant / TARGET
            folder.mkdir(parents=True)
            (folder / "engine").symlink_to(workshop.engine(variant, TARGET))
        self.builds = root / "build_engine" / "*" / TARGET / "engine"
        self.roofs, self.out = root / "roofs", root / "out"
        self.roofs.mkdir()
        self.out.mkdir()
        write_json(self.roofs / "report.json", dataclasses.asdict(ROOFS))
        self._workshop = workshop
        self.config = Config(
            **vars(OPTIONS),
            target=workshop.target(TARGET),
            variant="quantized",
            parent="float",
            num_changes=2,
            num_turns=3,
        )

    def run(self) -> WhatIf:
        return try_changes(
            self.config,
            builds=self.builds,
            roofs=self.roofs,
            model=self._workshop.quantized,
            images=self._workshop.images,
            out=self.out,
        )


@pytest.fixture
def inputs(workshop: Workshop, tmp_path: Path) -> Inputs:
    return Inputs(workshop, tmp_path)


def test_most_promising_changes_are_tried_and_both_numbers_stand_in_the_report(inputs: Inputs) -> None:
    report = inputs.run()
    assert 1 <= len(report.tried) <= 2 and not report.reason and report.variant == "quantized"
    rows = [*report.tried, *report.not_tried]
    assert [row.predicted_ms for row in rows] == sorted(row.predicted_ms for row in rows)
    for row in report.tried:
        assert 0 < row.predicted_saving < 1 and row.accuracy and row.recipe
        assert row.measured_low is not None and row.measured_high is not None
        assert row.measured_saving is not None
        assert row.measured_low <= row.measured_saving <= row.measured_high
    assert all(row.measured_saving is None and not row.reason for row in report.not_tried)
    page = (inputs.out / "what_if.md").read_text(encoding="utf-8")
    assert all(row.title in page and f"{row.predicted_saving:.1%}" in page for row in rows)
    with (inputs.out / "what_if.csv").open(encoding="utf-8") as file:
        assert [row["kind"] for row in csv.DictReader(file)] == [row.kind for row in rows]


def test_target_without_roofs_says_so(inputs: Inputs) -> None:
    write_json(
        inputs.roofs / "report.json", dataclasses.asdict(dataclasses.replace(ROOFS, reason="no layers"))
    )
    report = inputs.run()
    assert report.reason == "no layers" and not report.tried
    assert "Nothing was tried: no layers." in (inputs.out / "what_if.md").read_text(encoding="utf-8")


def test_only_the_engine_and_its_float_twin_are_read(inputs: Inputs) -> None:
    folders = [inputs.builds.parents[2] / name / TARGET / "engine" for name in ("quantized", "float")]
    assert reads(inputs.config, builds=inputs.builds) == {"builds": folders}
    alone = dataclasses.replace(inputs.config, variant="float", parent=None)
    assert reads(alone, builds=inputs.builds) == {"builds": folders[1:]}
