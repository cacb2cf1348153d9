"""The race of the picks of all targets: real engines in real processes."""

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from tasks.core.errors import ArtifactError
from tasks.parts.data.accuracy import Accuracy
from tasks.parts.engines.manifest import read_engine_manifest
from tasks.parts.measuring.machine_state import read_machine_id
from tasks.parts.measuring.reports import Race, SpeedRatio, Timed
from tasks.parts.measuring.surroundings import QuietLimits
from tasks.parts.selection.engine_row import MACHINE, EngineRow, Measured, Speed, Verdict, flatten
from tasks.parts.selection.headline import RACE_PENDING
from tasks.race_picks import Config, RankedPick, Report, describe_race, race_picks, reads
from tests.tasks.conftest import Workshop

CONFIG = Config(
    seed=0,
    warm_up_ms=5.0,
    burst_ms=3.0,
    min_calls=2,
    timed=Timed.frame,
    min_rounds=5,
    budget_s=1e-3,
    resolution=0.015,
    max_aa_spread=1e9,
    quiet=QuietLimits(max_busy_cores=0.3, max_wait_s=0.0),
    timeout_s=60.0,
)


class Selection:
    """Engines as build_engine lays them out, and a picks.json."""

    def __init__(self, workshop: Workshop, root: Path) -> None:
        self.root, self.reference = root, workshop.engine("float", "cpu_torch")
        self.rows: dict[str, dict[str, Any]] = {}
        for variant, target in (("quantized", "cpu_onnxruntime"), ("float", "cpu_openvino")):
            engine = root / "builds" / variant / target / "engine"
            shutil.copytree(workshop.engine(variant, target), engine)
            self.rows[target] = flatten(row_of(variant, target, read_engine_manifest(engine).sha256))

    def race(self) -> Report:
        out = self.root / "out"
        out.mkdir()
        return race_picks(CONFIG, **self.inputs(), out=out)

    def inputs(self) -> dict[str, Path]:
        picks = self.root / "picks.json"
        picks.write_text(json.dumps(self.rows), encoding="utf-8")
        page = self.root / "report.html"
        page.write_text(f"<p>{RACE_PENDING}</p>", encoding="utf-8")
        builds = self.root / "builds/*/*/engine"
        return {"builds": builds, "picks": picks, "page": page, "reference": self.reference}


def row_of(variant: str, target: str, sha256: str) -> EngineRow:
    numbers = {field.name: 1.0 for field in dataclasses.fields(Speed)} | {"is_inconclusive": False}
    measured = Measured(
        accuracy=Accuracy("mIoU", 0.7, None, None, {}),
        losses=None,
        unseen=None,
        speed=Speed(**numbers),
        size_bytes=1,
        compressed_bytes=1,
        build_s=1.0,
        macs=1,
        engine_sha256=sha256,
        reference_sha256="",
    )
    return EngineRow(
        variant=variant,
        target=target,
        verdict=Verdict.ACCEPT,
        reason="",
        pareto=True,
        picked=True,
        precision="f32",
        macs_share={},
        macs_share_quantized=None,
        measured=measured,
        suspect_layers=(),
        conditions={MACHINE: read_machine_id()},
    )


@pytest.fixture
def selection(workshop: Workshop, tmp_path: Path) -> Selection:
    return Selection(workshop, tmp_path)


def test_only_picked_engines_are_inputs(selection: Selection) -> None:
    picked = [
        selection.root / f"builds/{name}/engine"
        for name in ("quantized/cpu_onnxruntime", "float/cpu_openvino")
    ]
    shutil.copytree(picked[0], selection.root / "builds/another/cpu_onnxruntime/engine")
    assert reads(CONFIG, **selection.inputs()) == {"builds": picked}


@pytest.mark.slow
def test_picks_are_ranked_by_the_ratios_of_one_race(selection: Selection) -> None:
    report = selection.race()
    first, second = report.ranking
    assert {first.target, second.target} == set(selection.rows)
    assert first.vs_reference.factor >= second.vs_reference.factor > 0
    assert first.lag is None and not first.is_slower
    assert isinstance(second.lag, SpeedRatio) and (second.lag.faster, second.lag.slower) == (
        first.target,
        second.target,
    )
    assert report.race is not None and report.race.num_comparisons == 1
    assert second.is_slower == (
        second.lag.low > 1 and second.lag.factor - 1 > report.race.smallest_difference
    )
    table = (selection.root / "out" / "ranking.md").read_text(encoding="utf-8")
    assert table.index(f"| {first.target} |") < table.index(f"| {second.target} |")
    headline = table.partition("\n")[0]
    assert (
        f"{first.variant} on {first.target}" in headline
        and f"{second.variant} on {second.target}" in headline
    )
    assert ("The fastest pick is" in headline) == second.is_slower
    assert (selection.root / "out" / "report.html").read_text(encoding="utf-8") == f"<p>{headline}</p>"


def test_pick_of_another_machine_takes_no_part(selection: Selection) -> None:
    selection.rows["cpu_openvino"]["conditions"][MACHINE] = "another"
    report = selection.race()
    assert report.elsewhere == {"cpu_openvino": "another"}
    assert report.race is None and report.ranking == ()
    text = (selection.root / "out" / "ranking.md").read_text(encoding="utf-8")
    assert (
        "no race" in text.partition("\n")[0]
        and "cpu_openvino took no part: it was measured on another machine (another)" in text
    )


def ranked(target: str, factor: float, lag: SpeedRatio | None, *, is_slower: bool) -> RankedPick:
    ratio = SpeedRatio(target, "reference", factor, 0.98 * factor, 1.02 * factor)
    return RankedPick(target, "int8", "0" * 64, ratio, lag, is_slower)


def race_with(spread: float) -> Race:
    control = SpeedRatio("control", "first", 1.0, 1 - spread, 1 + spread)
    return Race((), control, 0.95, 1, 0.001, (), 1.0, 40, 0, (0,))


@pytest.mark.parametrize(
    ("is_slower", "spread", "words"),
    [
        (
            True,
            0.01,
            "The fastest pick is int8 on a: in one race of all picks 20.00x as fast (19.60 to 20.40) as the "
            "reference, and 1.10x as fast (1.05 to 1.15) as int8 on b, the next one.",
        ),
        (
            False,
            0.01,
            "Noise hides which pick is the fastest: in one race of all picks int8 on a came first, 20.00x as fast "
            "(19.60 to 20.40) as the reference, and int8 on b is not certainly slower.",
        ),
        (
            True,
            0.2,
            "Which pick is the fastest is not known: the machine was too noisy in the race of the picks, two "
            "processes of the same engine differed by up to 20.0 %.",
        ),
    ],
)
def test_the_headline_says_what_the_race_of_the_picks_says_e1(
    is_slower: bool, spread: float, words: str
) -> None:
    lag = SpeedRatio("a", "b", 1.1, 1.05, 1.15)
    ranking = (
        ranked("a", 20.0, None, is_slower=False),
        ranked("b", 18.2, lag, is_slower=is_slower),
    )
    assert describe_race(ranking, {}, race_with(spread), is_inconclusive=spread > 0.05) == words


def test_engine_that_is_not_the_measured_one_is_refused(selection: Selection) -> None:
    selection.rows["cpu_openvino"]["engine_sha256"] = "0" * 64
    with pytest.raises(
        ArtifactError, match=r"another one was measured and picked\. Select again: dvc repro select"
    ):
        selection.race()
