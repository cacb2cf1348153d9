"""Judge every engine, draw the Pareto front of each target, and pick one engine per target.

``engines.json`` lists every engine; ``picks.json`` maps a target to its picked row. A target without an accepted
engine is missing from ``picks.json``; report.json, report.md and report.html say why.
"""

import dataclasses
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from tasks.core.bounds import AtLeast, Between, Distinct, LessThan, MinItems, MoreThan
from tasks.core.errors import ConfigError
from tasks.core.reports import read_report, write_json
from tasks.parts.measuring.load_report import LoadReport
from tasks.parts.measuring.reports import BenchmarkReport
from tasks.parts.quantization.left_out import Search, read_left_out
from tasks.parts.selection.accuracy_gates import AccuracyGates, find_parents
from tasks.parts.selection.engine_row import ENGINES_FILE, EngineRow, UnseenVerdict, Verdict, flatten
from tasks.parts.selection.headline import class_warnings_of, frame_finding_of
from tasks.parts.selection.stage_folders import StageFolders
from tasks.parts.selection.verdicts import Gates, find_reference, judge_all, targets_without_pick

if TYPE_CHECKING:
    from tasks.parts.selection.findings import Findings
logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class EngineName:
    """One engine: a variant built for a target."""

    variant: str
    target: str


@dataclass(frozen=True)
class Technique:
    """A compression step, given by the variants before and after it."""

    name: str
    before: str
    after: str


@dataclass(frozen=True)
class Config:
    """The gates, and the engines that they apply to."""

    float_reference: EngineName
    """The engine whose score counts as 100 %. It must be in ``engines``."""
    max_score_rel_loss: Annotated[float, AtLeast(0), LessThan(1)]
    """Share of the reference's score that an accepted engine may lose: the upper end of its 95 % interval counts."""
    max_parent_rel_loss: Annotated[float, AtLeast(0), LessThan(1)]
    """Share of the score of its own float graph that an engine in reduced precision may lose, in the same way."""
    max_boundary_iou_rel_loss: Annotated[float, AtLeast(0), LessThan(1)] | None
    """Share of the reference's Boundary IoU that an engine may lose, in the same way; null for no limit."""
    class_limits: dict[str, Annotated[float, AtLeast(0), LessThan(1)]]
    """Class, or ``*`` for every class without a limit of its own -> share of its IoU (in classification: its recall)
    in the reference that an engine may lose, in the same way; intervals are corrected for the number of limits."""
    class_floors: dict[str, Annotated[float, MoreThan(0), LessThan(1)]]
    """Class, or ``*`` -> IoU or recall that an engine has to reach for certain, whatever the reference reaches."""
    allow_unproven: bool
    """Whether an engine may be picked if there are too few images to tell whether it holds these gates."""
    ladder: Annotated[list[str], MinItems(1), Distinct(), "the float start first"]
    """Variants from the float start to the last rung of compression. On each target a rung must be faster than the
    last accepted one below it."""
    min_speedup_factor: Annotated[float, Between(1, 1000), "1.02 is two per cent faster"]
    """Minimum speed-up of a rung over the last accepted rung below it."""
    max_latency_ms: Annotated[float, MoreThan(0)] | None
    """Longest time of a pick from the frame to the answer at batch 1, by the upper end of the median's interval; null
    for no limit."""
    min_fps: Annotated[float, MoreThan(0)] | None
    """Fewest frames per second of a pick, one after the other; null for no limit."""
    techniques: list[Technique]
    """The techniques that the report compares."""
    engines: list[EngineName]
    """Every engine that was built, without repeats."""
    parents: dict[str, str]
    """Variant of reduced precision -> variant of its float graph."""
    explained: list[str]
    """Targets whose layers `explain` held against the roofs."""
    loaded: list[str]
    """Targets whose engines `measure_load` measured."""
    searches: dict[str, Search]
    """Variant -> the search that made its graph, which may have left something out."""

    def __post_init__(self) -> None:
        names = [(engine.variant, engine.target) for engine in self.engines]
        twice = sorted(
            {f"{variant}-{target}" for variant, target in names if names.count((variant, target)) > 1}
        )
        if not names or twice:
            raise ConfigError(
                f"engines {'repeats ' + ', '.join(twice) if twice else 'is empty'}, expected every built "
                "{variant, target} once."
            )
        wanted = (self.float_reference.variant, self.float_reference.target)
        if wanted not in names:
            raise ConfigError(
                f"float_reference is {'-'.join(wanted)}, expected one of engines: "
                f"{', '.join('-'.join(name) for name in names)}."
            )


@dataclass(frozen=True)
class Pick:
    """The engine to deploy on a target."""

    variant: str
    target: str
    latency_ms_p50: float
    metric: str
    """Name of the score's metric."""
    miou: float | None
    """None for classification."""
    top1: float | None
    """None for segmentation."""
    score_rel_loss: float
    score_rel_loss_high: float
    """Upper end of its 95 % interval."""
    unseen_score: float
    """Score on the split that nothing was decided on."""
    unseen_verdict: UnseenVerdict
    """Whether it holds there the accuracy gates by which it was picked."""
    speedup_vs_reference: float
    engine_sha256: str
    other_score: float | None = None
    """Score of values, or of a metric of the user's own."""


@dataclass(frozen=True)
class Report:
    """Summary of the selection; ``engines.json`` has every number."""

    num_engines: int
    num_accepted: int
    picks: dict[str, Pick]
    """By target."""
    without_pick: dict[str, str]
    """Target -> why it has no pick."""
    best: Pick | None
    """The pick with the highest speed-up over its reference, of races that order no targets: only race_picks says
    which of several picks is the fastest."""


def reads(
    cfg: Config,
    *,
    builds: Path,
    validations: Path,
    benchmarks: Path,
    diffs: Path,
    explanations: Path,
    loads: Path,
    **_: Path,
) -> dict[str, list[Path]]:
    """Return the outputs of these engines; another configuration may have left more of them."""
    folders = StageFolders(builds, validations, benchmarks, diffs)
    read = folders.of_engines((engine.variant, engine.target) for engine in cfg.engines)
    return read | {
        "explanations": [explanations / target for target in cfg.explained],
        "loads": [loads / target for target in cfg.loaded],
    }


def select_engine(
    cfg: Config,
    *,
    builds: Path,
    validations: Path,
    benchmarks: Path,
    diffs: Path,
    explanations: Path,
    loads: Path,
    data: Path,
    repaired: Path,
    partial: Path,
    out: Path,
) -> Report:
    """Write engines.json, picks.json, report.md, report.html, pareto.png and a bundle of each pick.

    `explanations`, `loads` and `data` decide nothing: the page shows the layers of engines, what they do under load,
    and images on which they differ. Nor do `repaired` and `partial`, which say what these searches left out.

    Raises ArtifactError if a report is missing or accuracy, latency and speed-up were measured on different files.
    """
    logger.info("select_engine: %d engines from %s", len(cfg.engines), builds)
    folders = StageFolders(builds, validations, benchmarks, diffs)
    left_out = _read_left_out(cfg, {Search.quantize_repaired: repaired, Search.quantize_partial: partial})
    findings = judge(cfg, folders, loads, left_out)
    _write(findings, folders, {target: explanations / target for target in cfg.explained}, data, out)
    report = _report(findings)
    for row in findings.picks:
        if warning := class_warnings_of(row):
            logger.warning("select_engine: %s: %s", row.name, warning)
        if finding := frame_finding_of(row):
            logger.info("select_engine: %s: %s", row.name, finding)
    logger.info(
        "select_engine: %d of %d accepted, best %s", report.num_accepted, report.num_engines, report.best
    )
    return report


def _read_left_out(cfg: Config, files: Mapping[Search, Path]) -> dict[str, str]:
    """Return variant -> what the search for its graph left out, if it did."""
    read = {variant: read_left_out(files[search]) for variant, search in cfg.searches.items()}
    return {variant: text for variant, text in read.items() if text}


def judge(
    cfg: Config,
    folders: StageFolders,
    loads: Path | None = None,
    left_out: Mapping[str, str] | None = None,
) -> "Findings":
    """Return every engine with its verdict, and mark the pick of each target; nothing is written.

    `loads` holds the reports of measure_load by target; None reads none of them. `left_out` says for variants what
    was not tried for them. Raises ArtifactError if a report is
    missing or accuracy, latency and speed-up were measured on different files.
    """
    from tasks.parts.selection.findings import Findings
    from tasks.parts.selection.stage_reports import check_conditions, name_reference, read_row

    targets = dict.fromkeys(engine.target for engine in cfg.engines)
    benchmarks = {target: read_report(BenchmarkReport, folders.benchmarks / target) for target in targets}
    variant = cfg.float_reference.variant
    references = {
        target: name_reference(folders, variant, report.reference_target)
        for target, report in benchmarks.items()
    }
    loaded = {target: read_report(LoadReport, loads / target) for target in cfg.loaded} if loads else {}
    rows = [
        read_row(
            folders,
            engine.variant,
            engine.target,
            benchmarks[engine.target],
            references[engine.target],
            loaded.get(engine.target),
        )
        for engine in cfg.engines
    ]
    check_conditions(rows)
    reference = find_reference(rows, variant, cfg.float_reference.target)
    gates = Gates(
        accuracy=_accuracy_gates(cfg, folders, rows),
        allow_unproven=cfg.allow_unproven,
        min_speedup_factor=cfg.min_speedup_factor,
        max_latency_ms=cfg.max_latency_ms,
        min_fps=cfg.min_fps,
    )
    rows = judge_all(rows, gates, reference, cfg.ladder, benchmarks)
    return Findings(
        rows=[_with_left_out(row, left_out or {}) for row in rows],
        without_pick=targets_without_pick(rows),
        ladder=cfg.ladder,
        techniques=[(technique.name, technique.before, technique.after) for technique in cfg.techniques],
        reference=reference,
        max_score_rel_loss=cfg.max_score_rel_loss,
        max_parent_rel_loss=cfg.max_parent_rel_loss,
        max_boundary_iou_rel_loss=cfg.max_boundary_iou_rel_loss,
        class_limits=gates.accuracy.class_limits,
        unseen_split=gates.accuracy.unseen_split,
        benchmarks=benchmarks,
        loads=loaded,
    )


def _with_left_out(row: EngineRow, left_out: Mapping[str, str]) -> EngineRow:
    """Add to the reason of a verdict what was not tried for this variant."""
    parts = [text for text in (row.reason, left_out.get(row.variant, "")) if text]
    return dataclasses.replace(row, reason="; ".join(parts))


def _accuracy_gates(cfg: Config, folders: StageFolders, rows: Sequence[EngineRow]) -> AccuracyGates:
    from tasks.parts.data.class_limits import ClassLimits
    from tasks.parts.selection.stage_reports import (
        read_boundary_results,
        read_classes,
        read_frame_results,
        read_image_results,
    )

    reference = f"{cfg.float_reference.variant}-{cfg.float_reference.target}"
    measured = [row for row in rows if row.measured]
    read = {row.name: read_image_results(folders, row) for row in measured}
    has_limit = cfg.max_boundary_iou_rel_loss is not None
    boundaries = {row.name: read_boundary_results(folders, row) for row in measured} if has_limit else {}
    frames = {row.name: results for row in measured if (results := read_frame_results(folders, row))}
    classes = read_classes(folders, cfg.float_reference.variant, cfg.float_reference.target)
    limits = ClassLimits(cfg.class_limits, cfg.class_floors)
    limits.check_names(classes, "select_engine")
    return AccuracyGates(
        reference=reference,
        parents=find_parents(rows, cfg.parents, cfg.float_reference.target),
        max_score_rel_loss=cfg.max_score_rel_loss,
        max_parent_rel_loss=cfg.max_parent_rel_loss,
        results={name: results.decisive for name, results in read.items()},
        unseen_results={name: results.unseen for name, results in read.items()},
        unseen_split=read[reference].unseen_split,
        max_boundary_iou_rel_loss=cfg.max_boundary_iou_rel_loss,
        boundary_results={name: results.decisive for name, results in boundaries.items()},
        unseen_boundary_results={name: results.unseen for name, results in boundaries.items()},
        frame_results=frames,
        classes=classes,
        class_limits=limits,
    )


def _write(
    findings: "Findings", folders: StageFolders, explanations: dict[str, Path], data: Path, out: Path
) -> None:
    from tasks.parts.selection.bundle import write_bundle
    from tasks.parts.selection.gallery import make_gallery
    from tasks.parts.selection.markdown import render_markdown
    from tasks.parts.selection.page import picks_and_fronts_first, render_page
    from tasks.parts.selection.page_data import page_data
    from tasks.parts.selection.plots import draw_pareto
    from tasks.parts.selection.stage_reports import engine_file

    rows = findings.rows
    write_json(out / ENGINES_FILE, [flatten(row) for row in rows])
    write_json(out / "picks.json", {row.target: flatten(row) for row in rows if row.picked})
    draw_pareto(rows, gate=findings.gate, metric=findings.reference.metric, file=out / "pareto.png")
    reference = f"{findings.reference.variant}-{findings.reference.target}"
    gallery = make_gallery(picks_and_fronts_first(rows), folders, data, reference)
    shown = page_data(findings, explanations, gallery)
    (out / "report.md").write_text(render_markdown(findings, shown), encoding="utf-8")
    (out / "report.html").write_text(render_page(findings, shown), encoding="utf-8")
    for row in findings.picks:
        write_bundle(engine_file(folders, row).parent, flatten(row), out / "bundles" / row.target)


def _report(findings: "Findings") -> Report:
    picks = {row.target: _pick(row) for row in findings.picks}
    return Report(
        num_engines=len(findings.rows),
        num_accepted=sum(row.verdict is Verdict.ACCEPT for row in findings.rows),
        picks=picks,
        without_pick=findings.without_pick,
        best=next(iter(picks.values()), None),
    )


def _pick(row: EngineRow) -> Pick:
    assert row.measured is not None and row.measured.losses is not None and row.measured.unseen is not None
    return Pick(
        variant=row.variant,
        target=row.target,
        latency_ms_p50=row.measured.speed.latency_ms_p50,
        metric=row.measured.accuracy.metric,
        miou=row.measured.accuracy.miou,
        top1=row.measured.accuracy.top1,
        score_rel_loss=row.measured.losses.score_rel_loss,
        score_rel_loss_high=row.measured.losses.score_rel_loss_high,
        unseen_score=row.measured.unseen.unseen_score,
        unseen_verdict=row.measured.unseen.unseen_verdict,
        speedup_vs_reference=row.measured.speed.speedup_vs_reference,
        engine_sha256=row.measured.engine_sha256,
        other_score=row.measured.accuracy.other_score,
    )
