"""Judge every engine; mark the front and the pick of each target.

Speeds are compared by the ratios of common rounds alone, accuracies image by image.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tasks.core.errors import ArtifactError
from tasks.parts.data.accuracy import Standing, worst
from tasks.parts.data.comparison import ImageResults
from tasks.parts.measuring.pareto import pareto_front
from tasks.parts.measuring.reports import BenchmarkReport
from tasks.parts.selection.accuracy_gates import AccuracyGates, describe, losses_of
from tasks.parts.selection.engine_row import EngineRow, Losses, Measured, Speed, Unseen, Verdict, rungs

_HOLDS_GATES = (Verdict.ACCEPT, Verdict.NOT_FASTER, Verdict.INCONCLUSIVE)
_EQUAL_SIZES = 1.01
"""Files that differ by less than this factor count as equally small."""


@dataclass(frozen=True)
class Gates:
    """The limits that an accepted engine meets."""

    accuracy: AccuracyGates
    allow_unproven: bool
    """Whether an engine may be picked though too few images tell whether it holds the accuracy gates."""
    min_speedup_factor: float
    """Minimum speed-up of a rung over the last accepted rung below it."""
    max_latency_ms: float | None
    """Longest time from the frame to the answer; the upper end of the median's interval counts."""
    min_fps: float | None
    """Fewest frames per second over a stream of image files."""

    def describe_slowness(self, speed: Speed) -> str:
        """Return the limit that an engine breaks; empty if it holds both."""
        if self.max_latency_ms is not None and speed.latency_ms_p50_high > self.max_latency_ms:
            return f"up to {speed.latency_ms_p50_high:.3g} ms, allowed are {self.max_latency_ms:g} (max_latency_ms)"
        if self.min_fps is not None and speed.frames_per_s < self.min_fps:
            return f"{speed.frames_per_s:.4g} frames/s, wanted are {self.min_fps:g} (min_fps)"
        return ""


@dataclass(frozen=True)
class Reference:
    """The float engine that the accuracy of all others is compared with."""

    variant: str
    target: str
    metric: str
    """The metric of the scores: mIoU or top-1 accuracy, or the agreement with the float model in one of them."""
    score: float
    """The score that counts as 100 %."""
    boundary_iou: float | None
    """Its Boundary IoU; None without masks."""


def find_reference(rows: Sequence[EngineRow], variant: str, target: str) -> Reference:
    """Return the float reference and its score.

    Raises ArtifactError if it has no score, or if speed-ups over one reference refer to different files.
    """
    row = next(row for row in rows if (row.variant, row.target) == (variant, target))
    score = row.measured.accuracy.score if row.measured else None
    if row.measured is None or not score:
        raise ArtifactError(
            f"The float reference {row.name} has the score {score} ({row.verdict}: {row.reason}), expected more than "
            "0: losses are relative to it. Fix its build or its training, or choose another "
            "select_engine.float_reference."
        )
    files: dict[str, set[str]] = {}
    for measured, name in ((row.measured, row.speed_reference) for row in rows if row.measured):
        files.setdefault(name, set()).add(measured.reference_sha256)
    for name, found in files.items():
        if len(found) > 1:
            raise ArtifactError(
                f"The targets are compared with {len(found)} different reference engines for {name} "
                f"({', '.join(sorted(found))}), expected one. Measure all of them again: dvc repro benchmark."
            )
    accuracy = row.measured.accuracy
    return Reference(variant, target, accuracy.metric, score, accuracy.boundary_iou)


def judge_all(
    rows: Sequence[EngineRow],
    gates: Gates,
    reference: Reference,
    ladder: Sequence[str],
    benchmarks: Mapping[str, BenchmarkReport],
) -> list[EngineRow]:
    """Give every row its verdict, and mark the front and the pick of each target; `benchmarks` is by target.

    On each target a rung of the ladder must be faster than the last accepted one below it, or as fast and more
    accurate.
    """
    judged = {row.name: _judge(row, gates, reference) for row in rows}
    for target in dict.fromkeys(row.target for row in rows):
        below: EngineRow | None = None
        first_with: dict[str, str] = {}
        for row in rungs([*judged.values()], ladder, target):
            sha256 = row.measured.engine_sha256 if row.measured else row.name
            twin = first_with.setdefault(sha256, row.variant)
            if row.verdict is not Verdict.ACCEPT:
                continue
            if twin != row.variant:
                judged[row.name] = _decide(row, Verdict.NOT_FASTER, f"the same engine file as {twin}")
                continue
            if below is not None:
                row = judged[row.name] = _climb(row, below, gates, benchmarks[target])
            if row.verdict is Verdict.ACCEPT:
                below = row
    return _mark_picks(_mark_front([judged[row.name] for row in rows]), gates, benchmarks)


def targets_without_pick(rows: Sequence[EngineRow]) -> dict[str, str]:
    """Return for each target without a pick what happened to its engines; equal reasons are listed once."""
    picked = {row.target for row in rows if row.picked}
    variants_by_fate: dict[str, dict[str, list[str]]] = {}
    for row in rows:
        if row.target not in picked:
            fate = f"{row.verdict}, {row.reason}"
            variants_by_fate.setdefault(row.target, {}).setdefault(fate, []).append(row.variant)
    return {
        target: "; ".join(f"{', '.join(variants)}: {fate}" for fate, variants in fates.items())
        for target, fates in variants_by_fate.items()
    }


def _judge(row: EngineRow, gates: Gates, reference: Reference) -> EngineRow:
    """Apply the gates that do not depend on other rungs; the first that fails gives the verdict."""
    if row.measured is None:
        return row
    checks = gates.accuracy.check(row.name)
    boundary_loss = _rel_loss(row.measured.accuracy.boundary_iou, reference.boundary_iou)
    results, warnings = gates.accuracy.results[row.name], gates.accuracy.warnings(row.name)
    losses = losses_of(checks, boundary_loss, warnings, are_grouped=results.are_grouped)
    standing = worst(check.standing for check in checks)
    measured = dataclasses.replace(row.measured, losses=losses)
    row = dataclasses.replace(row, measured=measured)
    score = f"{measured.accuracy.metric} {measured.accuracy.score:.4f}"
    accuracy = ", ".join([score, *describe(checks)])
    factor = f"{measured.speed.speedup_vs_reference:.3g}x the speed of {row.speed_reference}"
    speed = f"p50 {measured.speed.latency_ms_p50:.3g} ms, {factor}"
    if row.verdict is Verdict.PRECISION_MISMATCH:
        return _add_reason(row, Verdict.PRECISION_MISMATCH, accuracy)
    if standing is Standing.beyond:
        return _decide(row, Verdict.TOO_LOSSY, accuracy, speed)
    slow = gates.describe_slowness(measured.speed)
    if slow and (standing is not Standing.unproven or gates.allow_unproven):
        return _decide(row, Verdict.TOO_SLOW, accuracy, speed, slow)
    if standing is Standing.unproven:
        return _decide(row, Verdict.UNPROVEN, accuracy, _describe_missing(results, losses), speed)
    if measured.speed.is_inconclusive:
        spread = f"{100 * measured.speed.aa_ratio_spread:.1f} %"
        noise = f"latency inconclusive: two processes of the same engine differ by {spread}"
        return _decide(row, Verdict.INCONCLUSIVE, accuracy, speed, noise)
    return _decide(row, Verdict.ACCEPT, accuracy, speed)


def _describe_missing(results: ImageResults, losses: Losses) -> str:
    """Return how many images, or more groups of images, would tell whether an engine holds the gates."""
    if not results.are_grouped:
        needed = "far more" if losses.images_needed is None else f"about {losses.images_needed}"
        return f"{results.num_images} validation images do not tell; {needed} would, at this loss"
    if results.num_groups == 1:
        return f"{results.num_images} validation images of one group do not tell what others lose; add groups"
    more = (
        "far more"
        if losses.groups_needed is None
        else f"about {losses.groups_needed - results.num_groups} more"
    )
    return (
        f"{results.num_images} validation images in {results.num_groups} groups do not tell; "
        f"{more} groups would, at this loss and spread"
    )


def _rel_loss(score: float | None, base: float | None) -> float | None:
    """Return the share of the base's score that is lost; None if either has none, or if it is 0."""
    return None if score is None or not base else 1 - score / base


def _climb(row: EngineRow, below: EngineRow, gates: Gates, benchmark: BenchmarkReport) -> EngineRow:
    """Judge a rung that holds the gates against the accepted one below it."""
    ratio, wanted = benchmark.ratio(row.variant, below.variant), f"{gates.min_speedup_factor:g}x"
    compared = (
        f"{ratio.factor:.3f}x as fast as {below.variant} in the same rounds "
        f"({ratio.low:.3f} to {ratio.high:.3f})"
    )
    if abs(ratio.factor - 1) <= benchmark.smallest_difference:
        compared += f", less than the {100 * benchmark.smallest_difference:.1f} % that count as a difference"
    elif ratio.low >= gates.min_speedup_factor:
        return _add_reason(row, Verdict.ACCEPT, compared)
    if not _is_slower(row, below, benchmark) and gates.accuracy.is_more_accurate(row.name, below.name):
        return _add_reason(
            row, Verdict.ACCEPT, f"{compared}, and certainly more accurate than {below.variant}"
        )
    if ratio.high >= gates.min_speedup_factor:
        return _add_reason(
            row, Verdict.INCONCLUSIVE, f"{compared}: noise hides whether it is {wanted} or more"
        )
    return _add_reason(row, Verdict.NOT_FASTER, f"{compared}, expected {wanted} or more for certain")


def _is_slower(row: EngineRow, other: EngineRow, benchmark: BenchmarkReport) -> bool:
    """Return whether an engine is certainly slower than another one of its target."""
    return benchmark.ratio(other.variant, row.variant).is_faster(benchmark.smallest_difference)


def _add_reason(row: EngineRow, verdict: Verdict, reason: str) -> EngineRow:
    return _decide(row, verdict, row.reason, reason)


def _decide(row: EngineRow, verdict: Verdict, *reasons: str) -> EngineRow:
    return dataclasses.replace(row, verdict=verdict, reason="; ".join(reasons))


def _measured(row: EngineRow) -> Measured:
    assert row.measured is not None
    return row.measured


def _place(row: EngineRow) -> tuple[float, float]:
    """Return the time in the common rounds as a multiple of the reference's, and the score."""
    return 1 / _measured(row).speed.speedup_vs_reference, _measured(row).accuracy.score


def _mark_front(rows: Sequence[EngineRow]) -> list[EngineRow]:
    """Mark the front of each target; an engine with a precision mismatch is never on it."""
    on_front: set[str] = set()
    for target in dict.fromkeys(row.target for row in rows):
        on_front |= _front(
            [
                row
                for row in rows
                if row.target == target and row.measured and row.verdict is not Verdict.PRECISION_MISMATCH
            ]
        )
    return [dataclasses.replace(row, pareto=row.name in on_front) for row in rows]


def _front(rows: Sequence[EngineRow]) -> set[str]:
    kept = pareto_front([_place(row) for row in rows])
    return {row.name for row, is_kept in zip(rows, kept, strict=True) if is_kept}


def _mark_picks(
    rows: Sequence[EngineRow], gates: Gates, benchmarks: Mapping[str, BenchmarkReport]
) -> list[EngineRow]:
    """Mark the pick of each target, and report it on the unseen split."""
    marked = []
    picks = {
        pick.name
        for target in dict.fromkeys(row.target for row in rows)
        if (pick := _pick([row for row in rows if row.target == target], gates, benchmarks[target]))
    }
    for row in rows:
        if row.name in picks:
            unseen = gates.accuracy.unseen(row.name)
            row = dataclasses.replace(
                row, picked=True, measured=dataclasses.replace(_measured(row), unseen=unseen)
            )
            if row.verdict is Verdict.NOT_FASTER:
                row = _add_reason(row, Verdict.ACCEPT, "picked: no accepted engine is certainly faster")
            row = _add_reason(row, row.verdict, describe_unseen(unseen))
        marked.append(row)
    return marked


def describe_unseen(unseen: Unseen) -> str:
    """Return what the split on which nothing was decided says about a pick: ``confirmed on test``."""
    text = f"{unseen.unseen_verdict} on {unseen.unseen_split}"
    return f"{text}: {unseen.unseen_reason}" if unseen.unseen_reason else text


def _pick(rows: Sequence[EngineRow], gates: Gates, benchmark: BenchmarkReport) -> EngineRow | None:
    """Return the engine to ship among those of one target, or None.

    Candidates hold the gates, are not certainly slower than the fastest engine that does, and are not dominated: no
    engine that holds the gates measured both faster and more accurate. Among them an engine gives way to one that is
    certainly more accurate; of the rest the smallest is picked, and of equal sizes the more accurate one.
    """
    allowed = (*_HOLDS_GATES, Verdict.UNPROVEN) if gates.allow_unproven else _HOLDS_GATES
    first_with = {_measured(row).engine_sha256: row.name for row in reversed(rows) if row.measured}
    holding = [
        row for row in rows if row.verdict in allowed and first_with[_measured(row).engine_sha256] == row.name
    ]
    if not holding:
        return None
    fastest = min(holding, key=lambda row: (_place(row)[0], -_place(row)[1]))
    front = _front(holding)
    candidates = [row for row in holding if row.name in front and not _is_slower(row, fastest, benchmark)]
    best = [
        row
        for row in candidates
        if not any(gates.accuracy.is_more_accurate(other.name, row.name) for other in candidates)
    ]
    smallest = min(_measured(row).size_bytes for row in best)
    small = [row for row in best if _measured(row).size_bytes <= _EQUAL_SIZES * smallest]
    return min(small, key=lambda row: (-_place(row)[1], _place(row)[0], row.variant))
