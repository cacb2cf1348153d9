"""Judge every engine, draw the Pareto front of each target, pick one engine per target, and log all to
MLflow.

``engines.json`` lists every engine; ``picks.json`` maps a target to its picked row. A target of which no
engine passes is absent from ``picks.json``; the stage's report and both readable reports say why.
"""

import dataclasses
import json
import logging
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from tasks.core.bounds import AtLeast, Between, Distinct, LessThan, MinItems
from tasks.core.errors import ArtifactError, ConfigError
from tasks.core.fingerprint import digest
from tasks.core.tracking.config import TrackingConfig, registered_name
from tasks.core.tracking.pending import log_or_keep
from tasks.core.tracking.records import ENGINE_FOLDER, DataSet, RunRecord
from tasks.parts.measuring.pareto import pareto_front
from tasks.parts.selection.engine_row import EngineRow, Verdict, rungs
from tasks.parts.selection.race import Race, read_race

if TYPE_CHECKING:
    from tasks.parts.selection.stage_reports import StageFolders

logger = logging.getLogger(__name__)

_SCALARS = (
    "miou",
    "top1",
    "score_rel_loss",
    "pixel_accuracy",
    "latency_ms_p50",
    "latency_ms_p90",
    "latency_ms_p99",
    "throughput_per_s",
    "throughput_per_s_batched",
    "speedup_vs_reference",
    "speedup_low",
    "speedup_high",
    "aa_ratio_spread",
    "memory_mib",
    "size_bytes",
)


@dataclass(frozen=True)
class EngineName:
    """One engine: a variant built for a target."""

    variant: str
    target: str


@dataclass(frozen=True)
class Technique:
    """A compression step, seen as the variant before it and the variant after it."""

    name: str
    before: str
    after: str


@dataclass(frozen=True)
class Config:
    """The gates, and which engines they are for."""

    float_reference: EngineName
    """The engine whose score (mIoU, or top-1 accuracy) counts as 100 %. It must be in ``engines``."""
    max_score_rel_loss: Annotated[float, AtLeast(0), LessThan(1)]
    """Share of the reference's score that an accepted engine may lose."""
    ladder: Annotated[list[str], MinItems(1), Distinct(), "the float start first"]
    """Variants from the float start to the last rung of compression. On each target a rung must be faster than the
    last one below it that was accepted."""
    min_int8_macs_share: Annotated[float, Between(0, 1)]
    """Share of the MACs wanted in int8 by its graph that an engine must really run in int8."""
    min_speedup_factor: Annotated[float, Between(1, 1000), "1.02 is two per cent faster"]
    """How many times as fast as the last accepted rung below it a rung must be."""
    techniques: list[Technique]
    """What the report compares."""
    engines: list[EngineName]
    """Every engine that was built, without repeats."""
    data_name: str
    """What MLflow calls the data set."""
    tracking: TrackingConfig
    """Where the runs are logged."""

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
    """What the score is."""
    miou: float | None
    """None for classification."""
    top1: float | None
    """None for segmentation."""
    score_rel_loss: float
    speedup_vs_reference: float
    engine_sha256: str


@dataclass(frozen=True)
class Report:
    """The outcome in short; ``engines.json`` has every number."""

    num_engines: int
    num_accepted: int
    picks: dict[str, Pick]
    """By target."""
    without_pick: dict[str, str]
    """Why a target has none."""
    best: Pick | None
    """The fastest of the picks."""
    mlflow_run: str | None
    """``<experiment id>/runs/<run id>`` of the pipeline in MLflow; None where it had not answered."""


def select_engine(
    cfg: Config,
    *,
    builds: Path,
    validations: Path,
    benchmarks: Path,
    races: Path,
    diffs: Path,
    data: Path,
    out: Path,
) -> Report:
    """Write engines.json, picks.json, report.md, report.html, pareto.png and a bundle of each pick; log to MLflow.

    When MLflow does not answer, the runs stay pending on disk.

    Raises ArtifactError when a report is missing or accuracy and latency come from different files.
    """
    from tasks.parts.selection.bundle import write_bundle
    from tasks.parts.selection.findings import Findings
    from tasks.parts.selection.markdown import render_markdown
    from tasks.parts.selection.page import render_page
    from tasks.parts.selection.plots import draw_pareto
    from tasks.parts.selection.stage_reports import StageFolders, engine_file, read_row

    logger.info("select_engine: %d engines from %s", len(cfg.engines), builds)
    folders = StageFolders(builds, validations, benchmarks, diffs)
    targets = dict.fromkeys(engine.target for engine in cfg.engines)
    rows = judge_all(
        cfg,
        [read_row(folders, engine.variant, engine.target) for engine in cfg.engines],
        {target: read_race(races / target) for target in targets},
    )
    reference = _reference(cfg, rows)
    reference_score = _reference_score(reference)
    findings = Findings(
        rows=rows,
        without_pick=targets_without_pick(rows),
        ladder=cfg.ladder,
        techniques=[(technique.name, technique.before, technique.after) for technique in cfg.techniques],
        reference=f"{cfg.float_reference.variant} on {cfg.float_reference.target}",
        metric=reference.metric,
        reference_score=reference_score,
        speed_reference=_speed_reference(cfg, reference),
        max_score_rel_loss=cfg.max_score_rel_loss,
    )
    _write_json(out / "engines.json", [_row_json(row) for row in rows])
    _write_json(out / "picks.json", {row.target: _row_json(row) for row in rows if row.picked})
    draw_pareto(rows, gate=findings.gate, metric=findings.metric, file=out / "pareto.png")
    (out / "report.md").write_text(render_markdown(findings), encoding="utf-8")
    (out / "report.html").write_text(render_page(findings), encoding="utf-8")
    for row in findings.picks:
        write_bundle(engine_file(folders, row).parent, _row_json(row), out / "bundles" / row.target)
    report = _report(rows, findings.without_pick)
    if cfg.tracking.enabled:
        data_set = DataSet(cfg.data_name, digest(data), data.as_posix())
        report = dataclasses.replace(report, mlflow_run=_track(cfg, data_set, folders, report, rows, out))
    logger.info("select_engine: %d of %d accepted, best %s", report.num_accepted, len(rows), report.best)
    return report


def judge_all(cfg: Config, rows: Sequence[EngineRow], races: Mapping[str, Race]) -> list[EngineRow]:
    """Give every row its verdict, its place on the front of its target, and the picks; `races` by target.

    Raises ArtifactError when the reference engine has no accuracy, or when the speed-ups have several
    references.
    """
    reference = _reference(cfg, rows)
    references = sorted({row.reference_sha256 for row in rows if row.reference_sha256})
    if len(references) > 1:
        raise ArtifactError(
            f"The benchmarks compare with {len(references)} different reference engines "
            f"({', '.join(references)}), "
            "expected one. Run all of them again: dvc repro benchmark."
        )
    judged = {
        row.name: _judge(cfg, row, reference, None, None) for row in rows if row.variant not in cfg.ladder
    }
    for target in dict.fromkeys(row.target for row in rows):
        below: EngineRow | None = None
        files: dict[str | None, str] = {}
        for row in rungs(rows, cfg.ladder, target):
            twin = files.setdefault(row.engine_sha256, row.variant)
            is_twin = row.engine_sha256 is not None and twin != row.variant
            found = _judge(cfg, row, reference, None if is_twin else below, races[target])
            if is_twin and found.verdict is Verdict.ACCEPT:
                found = _with(found, Verdict.NOT_FASTER, f"the same engine file as {twin}")
            if found.verdict is Verdict.ACCEPT:
                below = found
            judged[row.name] = found
    return _mark_picks(_mark_front([judged[row.name] for row in rows]), cfg.ladder)


def targets_without_pick(rows: Sequence[EngineRow]) -> dict[str, str]:
    """Say for each target without a pick what became of its engines; equal reasons are said once."""
    picked = {row.target for row in rows if row.picked}
    left: dict[str, dict[str, list[str]]] = {}
    for row in rows:
        if row.target not in picked:
            fate = f"{row.verdict}, {row.reason}"
            left.setdefault(row.target, {}).setdefault(fate, []).append(row.variant)
    return {
        target: "; ".join(f"{', '.join(variants)}: {fate}" for fate, variants in fates.items())
        for target, fates in left.items()
    }


def _judge(
    cfg: Config, row: EngineRow, reference: EngineRow, below: EngineRow | None, race: Race | None
) -> EngineRow:
    """Apply the gates in order; the first that fails gives the verdict. `below` is the accepted rung to beat."""
    if row.verdict in (Verdict.SKIPPED, Verdict.BUILD_FAILED):
        return row
    if row.score is None or row.latency_ms_p50 is None or row.speedup_vs_reference is None:
        raise ArtifactError(
            f"{row.name} was built, but has no score or no latency. Run it again: "
            f"dvc repro validate@{row.name} benchmark@{row.name}."
        )
    reference_score, eager = _reference_score(reference), _speed_reference(cfg, reference)
    loss = 1 - row.score / reference_score
    row = dataclasses.replace(row, score_rel_loss=loss)
    accuracy = (
        f"{row.metric} {row.score:.4f}, {_loss_text(loss)} "
        f"{cfg.float_reference.variant} ({reference_score:.4f})"
    )
    if row.verdict is Verdict.PRECISION_MISMATCH:
        return _with(row, Verdict.PRECISION_MISMATCH, row.reason, accuracy)
    quantized, in_int8 = row.macs_share_quantized or 0.0, row.macs_share.get("int8", 0.0)
    if row.macs_share and in_int8 < cfg.min_int8_macs_share * quantized:
        reason = (
            f"the graph wants {quantized:.0%} of the MACs in int8, the runtime runs {in_int8:.0%} "
            f"(select_engine.min_int8_macs_share {cfg.min_int8_macs_share:g} of them)"
        )
        return _with(row, Verdict.PRECISION_MISMATCH, reason, accuracy)
    if loss > cfg.max_score_rel_loss:
        return _with(
            row,
            Verdict.TOO_LOSSY,
            f"{accuracy}, allowed are {100 * cfg.max_score_rel_loss:g} %",
            _speed(row, eager),
        )
    if below is not None and race is not None:
        ratio = race.ratio(row, below)
        compared = (
            f"{ratio.factor:.3f}x as fast as {below.variant} in the same rounds "
            f"({ratio.low:.3f} to {ratio.high:.3f})"
        )
        is_noise = abs(ratio.factor - 1) <= ratio.aa_ratio_spread
        if is_noise:
            compared += f", which is within the A/A spread of {100 * ratio.aa_ratio_spread:.1f} %"
        if is_noise or ratio.low < cfg.min_speedup_factor:
            wanted = f"{compared}, expected {cfg.min_speedup_factor:g}x or more for certain"
            return _with(row, Verdict.NOT_FASTER, wanted, accuracy)
        return _with(row, Verdict.ACCEPT, accuracy, _speed(row, eager), compared)
    return _with(row, Verdict.ACCEPT, accuracy, _speed(row, eager))


def _with(row: EngineRow, verdict: Verdict, *reasons: str) -> EngineRow:
    said = list(reasons)
    if row.inconclusive and row.aa_ratio_spread is not None:
        said.append(
            f"latency inconclusive: two processes of the same engine differ by "
            f"{100 * row.aa_ratio_spread:.1f} %"
        )
    return dataclasses.replace(row, verdict=verdict, reason="; ".join(said))


def _loss_text(loss: float) -> str:
    if abs(loss) < 5e-5:
        return "equal to"
    return f"{100 * abs(loss):.2f} % {'below' if loss > 0 else 'above'}"


def _speed(row: EngineRow, reference: str) -> str:
    return f"p50 {row.latency_ms_p50:.3g} ms, {row.speedup_vs_reference:.3g}x the speed of {reference}"


def _speed_reference(cfg: Config, reference: EngineRow) -> str:
    """Name the engine that speed-ups are over."""
    if reference.conditions.get("Runtime", "").startswith("torch "):
        return "eager PyTorch"
    return f"{cfg.float_reference.variant} on {cfg.float_reference.target}"


def _reference(cfg: Config, rows: Sequence[EngineRow]) -> EngineRow:
    wanted = cfg.float_reference.variant, cfg.float_reference.target
    return next(row for row in rows if (row.variant, row.target) == wanted)  # Config checks that it is there


def _reference_score(reference: EngineRow) -> float:
    if reference.score:
        return reference.score
    raise ArtifactError(
        f"The float reference {reference.name} has {reference.metric or 'score'} {reference.score} "
        f"({reference.verdict}: {reference.reason}), expected more than 0: no loss can be told without it. Mend its "
        "build or its training, or choose another select_engine.float_reference."
    )


def _mark_front(rows: Sequence[EngineRow]) -> list[EngineRow]:
    """Mark the front of each target; an engine that is not what it claims has no place on it."""
    marked = {row.name: row for row in rows}
    for target in dict.fromkeys(row.target for row in rows):
        sound = [
            (row, (row.latency_ms_p50, row.score))
            for row in rows
            if row.target == target
            and row.verdict is not Verdict.PRECISION_MISMATCH
            and row.latency_ms_p50 is not None
            and row.score is not None
        ]
        front = pareto_front(
            [(latency, score) for _, (latency, score) in sound if latency and score is not None]
        )
        for (row, _), is_on_front in zip(sound, front, strict=True):
            marked[row.name] = dataclasses.replace(row, pareto=is_on_front)
    return [marked[row.name] for row in rows]


def _mark_picks(rows: Sequence[EngineRow], ladder: Sequence[str]) -> list[EngineRow]:
    """Mark the fastest accepted engine of each target; between equals the more accurate, then the smaller one.

    Of the ladder only the last accepted rung counts: the race has shown that it is the fastest of them.
    """
    picks: dict[str, EngineRow] = {}
    for target in dict.fromkeys(row.target for row in rows):
        accepted = [row for row in rows if row.target == target and row.verdict is Verdict.ACCEPT]
        last_rung = rungs(accepted, ladder, target)[-1:]
        candidates = last_rung + [row for row in accepted if row.variant not in ladder]
        if candidates:
            picks[target] = min(candidates, key=_rank)
    return [dataclasses.replace(row, picked=picks.get(row.target) is row) for row in rows]


def _rank(row: EngineRow) -> tuple[float, float, int, str]:
    assert row.latency_ms_p50 is not None and row.score is not None and row.size_bytes is not None
    return row.latency_ms_p50, -row.score, row.size_bytes, row.variant


def _report(rows: Sequence[EngineRow], without_pick: dict[str, str]) -> Report:
    picked = sorted((row for row in rows if row.picked), key=_rank)
    picks = {row.target: _pick(row) for row in picked}
    return Report(
        num_engines=len(rows),
        num_accepted=sum(row.verdict is Verdict.ACCEPT for row in rows),
        picks=picks,
        without_pick=without_pick,
        best=picks[picked[0].target] if picked else None,
        mlflow_run=None,
    )


def _pick(row: EngineRow) -> Pick:
    assert row.latency_ms_p50 is not None and row.score_rel_loss is not None
    assert row.speedup_vs_reference is not None and row.engine_sha256 is not None
    return Pick(
        variant=row.variant,
        target=row.target,
        latency_ms_p50=row.latency_ms_p50,
        metric=row.metric,
        miou=row.miou,
        top1=row.top1,
        score_rel_loss=row.score_rel_loss,
        speedup_vs_reference=row.speedup_vs_reference,
        engine_sha256=row.engine_sha256,
    )


def _track(
    cfg: Config,
    data: DataSet,
    folders: "StageFolders",
    report: Report,
    rows: Sequence[EngineRow],
    out: Path,
) -> str | None:
    """Log everything and return where MLflow has it."""
    picked = {row.target: row.name for row in rows if row.picked}
    pages = ("report.html", "report.md", "pareto.png", "engines.json", "picks.json")
    pipeline = RunRecord(
        name="pipeline",
        metrics={"num_engines": float(report.num_engines), "num_accepted": float(report.num_accepted)}
        | ({f"best_{name}": value for name, value in _numbers(report.best).items()} if report.best else {}),
        tags={"best": f"{report.best.variant}-{report.best.target}" if report.best else "none"},
        artifacts=tuple(("", out / page) for page in pages),
        data=data,
    )
    with tempfile.TemporaryDirectory() as companions:
        tracked = log_or_keep(
            cfg.tracking,
            pipeline=pipeline,
            candidates=[_record(folders, row, data, Path(companions) / row.name) for row in rows],
            picks={registered_name(cfg.tracking, row.target): picked.get(row.target) for row in rows},
        )
    if tracked is None:
        return None
    logger.info(
        "select_engine: MLflow has %d new runs and %d new versions",
        tracked.num_runs_added,
        tracked.num_versions_added,
    )
    return f"{tracked.experiment_id}/runs/{tracked.parent_run_id}"


def _record(folders: "StageFolders", row: EngineRow, data: DataSet, companions: Path) -> RunRecord:
    from tasks.parts.selection.bundle import write_companions
    from tasks.parts.selection.stage_reports import engine_file, evidence_files, stage_keys

    artifacts = evidence_files(folders, row)
    if row.engine_sha256 is not None:
        file = engine_file(folders, row)
        beside = write_companions(file.parent, _row_json(row), companions)
        artifacts = (*((ENGINE_FOLDER, one) for one in (file, *beside)), *artifacts)
    keys = {f"key_{stage}": key for stage, key in stage_keys(folders, row).items()}
    tags = {
        "variant": row.variant,
        "target": row.target,
        "metric": row.metric,
        "precision": row.precision,
        "pareto": str(row.pareto).lower(),
        "picked": str(row.picked).lower(),
        "verdict": row.verdict,
        "reason": row.reason,
        "engine_sha256": row.engine_sha256 or "",
    }
    metrics = {name: float(value) for name in _SCALARS if (value := getattr(row, name)) is not None}
    return RunRecord(name=row.name, metrics=metrics, tags=tags | keys, artifacts=artifacts, data=data)


def _numbers(pick: Pick) -> dict[str, float]:
    return {name: value for name, value in dataclasses.asdict(pick).items() if isinstance(value, float)}


def _row_json(row: EngineRow) -> dict[str, Any]:
    return dataclasses.asdict(row)


def _write_json(file: Path, content: Any) -> None:
    text = json.dumps(content, indent=2, allow_nan=False, ensure_ascii=False)
    file.write_text(text + "\n", encoding="utf-8")
