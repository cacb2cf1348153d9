"""Judge every engine; mark the front and the pick of each target."""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tasks.core.errors import ArtifactError
from tasks.parts.measuring.pareto import pareto_front
from tasks.parts.measuring.reports import BenchmarkReport
from tasks.parts.selection.engine_row import EngineRow, Measured, Verdict, rungs


@dataclass(frozen=True)
class Gates:
    """The limits that an accepted engine meets."""

    max_score_rel_loss: float
    """Maximum loss, as a share of the reference's score."""
    min_int8_macs_share: float
    """Minimum share of the graph's quantized MACs that run in int8."""
    min_speedup_factor: float
    """Minimum speed-up of a rung over the last accepted rung below it."""


@dataclass(frozen=True)
class Reference:
    """The float engine that all others are compared with."""

    variant: str
    target: str
    metric: str
    """The metric of the scores: mIoU or top-1 accuracy, or the agreement with the float model in one of them."""
    score: float
    """The score that counts as 100 %."""
    speed_name: str
    """Readable name of the engine that speed-ups refer to."""


def find_reference(rows: Sequence[EngineRow], variant: str, target: str) -> Reference:
    """Return the float reference and its score.

    Raises ArtifactError if it has no score, or if the speed-ups refer to different engines.
    """
    row = next(row for row in rows if (row.variant, row.target) == (variant, target))
    score = row.measured.accuracy.score if row.measured else None
    if row.measured is None or not score:
        raise ArtifactError(
            f"The float reference {row.name} has the score {score} ({row.verdict}: {row.reason}), expected more than "
            "0: losses are relative to it. Fix its build or its training, or choose another "
            "select_engine.float_reference."
        )
    engines = sorted({row.measured.reference_sha256 for row in rows if row.measured})
    if len(engines) > 1:
        raise ArtifactError(
            f"The targets are compared with {len(engines)} different reference engines ({', '.join(engines)}), "
            "expected one. Measure all of them again: dvc repro benchmark."
        )
    is_eager = row.conditions["Runtime"].startswith("torch ")
    speed_name = "eager PyTorch" if is_eager else f"{variant} on {target}"
    return Reference(variant, target, row.measured.accuracy.metric, score, speed_name)


def judge_all(
    rows: Sequence[EngineRow],
    gates: Gates,
    reference: Reference,
    ladder: Sequence[str],
    benchmarks: Mapping[str, BenchmarkReport],
) -> list[EngineRow]:
    """Give every row its verdict, and mark the front and the pick of each target; `benchmarks` is by target.

    On each target a rung of the ladder must be faster than the last accepted one below it.
    """
    judged = {row.name: _judge(row, gates, reference, None) for row in rows if row.variant not in ladder}
    for target in dict.fromkeys(row.target for row in rows):
        below: EngineRow | None = None
        first_with: dict[str, str] = {}
        for rung in rungs(rows, ladder, target):
            sha256 = rung.measured.engine_sha256 if rung.measured else rung.name
            twin = first_with.setdefault(sha256, rung.variant)
            has_twin = twin != rung.variant
            rival = (below, benchmarks[target]) if below and not has_twin else None
            row = _judge(rung, gates, reference, rival)
            if has_twin and row.verdict is Verdict.ACCEPT:
                row = _decide(row, Verdict.NOT_FASTER, f"the same engine file as {twin}")
            if row.verdict is Verdict.ACCEPT:
                below = row
            judged[row.name] = row
    return _mark_picks(_mark_front([judged[row.name] for row in rows]), ladder)


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


def _judge(
    row: EngineRow, gates: Gates, reference: Reference, rival: tuple[EngineRow, BenchmarkReport] | None
) -> EngineRow:
    """Apply the gates in order; the first that fails gives the verdict. `rival` is the accepted rung to beat."""
    if row.measured is None:
        return row
    score, speed = row.measured.accuracy.score, row.measured.speed
    loss, metric = 1 - score / reference.score, row.measured.accuracy.metric
    row = dataclasses.replace(row, measured=dataclasses.replace(row.measured, score_rel_loss=loss))
    accuracy = f"{metric} {score:.4f}, {_loss_text(loss)} {reference.variant} ({reference.score:.4f})"
    factor = f"{speed.speedup_vs_reference:.3g}x the speed of {reference.speed_name}"
    speed_text = f"p50 {speed.latency_ms_p50:.3g} ms, {factor}"
    if fault := row.reason if row.verdict is Verdict.PRECISION_MISMATCH else _int8_fault(row, gates):
        return _decide(row, Verdict.PRECISION_MISMATCH, fault, accuracy)
    if loss > gates.max_score_rel_loss:
        allowed = f"allowed are {100 * gates.max_score_rel_loss:g} %"
        return _decide(row, Verdict.TOO_LOSSY, f"{accuracy}, {allowed}", speed_text)
    if rival is None:
        return _decide(row, Verdict.ACCEPT, accuracy, speed_text)
    is_faster, compared = _compare(row, *rival, gates.min_speedup_factor)
    if not is_faster:
        return _decide(row, Verdict.NOT_FASTER, compared, accuracy)
    return _decide(row, Verdict.ACCEPT, accuracy, speed_text, compared)


def _int8_fault(row: EngineRow, gates: Gates) -> str:
    """Return that too few MACs run in int8; empty if enough do, or if the runtime does not report it."""
    wanted, in_int8 = row.macs_share_quantized or 0.0, row.macs_share.get("int8", 0.0)
    if not row.macs_share or in_int8 >= gates.min_int8_macs_share * wanted:
        return ""
    return (
        f"the graph wants {wanted:.0%} of the MACs in int8, the runtime runs {in_int8:.0%} "
        f"(expected {gates.min_int8_macs_share:g} of them or more: select_engine.min_int8_macs_share)"
    )


def _compare(
    row: EngineRow, below: EngineRow, benchmark: BenchmarkReport, min_factor: float
) -> tuple[bool, str]:
    """Return whether a rung is certainly faster than one below it, and how they compare."""
    ratio = benchmark.ratio(row.variant, below.variant)
    text = (
        f"{ratio.factor:.3f}x as fast as {below.variant} in the same rounds "
        f"({ratio.low:.3f} to {ratio.high:.3f})"
    )
    is_noise = abs(ratio.factor - 1) <= benchmark.aa_ratio_spread
    if is_noise:
        text += f", which is within the A/A spread of {100 * benchmark.aa_ratio_spread:.1f} %"
    if is_noise or ratio.low < min_factor:
        return False, f"{text}, expected {min_factor:g}x or more for certain"
    return True, text


def _decide(row: EngineRow, verdict: Verdict, *reasons: str) -> EngineRow:
    speed = _measured(row).speed
    if speed.is_inconclusive:
        spread = f"{100 * speed.aa_ratio_spread:.1f} %"
        reasons += (f"latency inconclusive: two processes of the same engine differ by {spread}",)
    return dataclasses.replace(row, verdict=verdict, reason="; ".join(reasons))


def _loss_text(loss: float) -> str:
    if abs(loss) < 5e-5:
        return "equal to"
    return f"{100 * abs(loss):.2f} % {'below' if loss > 0 else 'above'}"


def _measured(row: EngineRow) -> Measured:
    assert row.measured is not None
    return row.measured


def _mark_front(rows: Sequence[EngineRow]) -> list[EngineRow]:
    """Mark the front of each target; an engine with a precision mismatch is never on it."""
    on_front: set[str] = set()
    for target in dict.fromkeys(row.target for row in rows):
        sound = {
            row.name: (row.measured.speed.latency_ms_p50, row.measured.accuracy.score)
            for row in rows
            if row.target == target and row.measured and row.verdict is not Verdict.PRECISION_MISMATCH
        }
        on_front |= {
            name for name, is_kept in zip(sound, pareto_front([*sound.values()]), strict=True) if is_kept
        }
    return [dataclasses.replace(row, pareto=row.name in on_front) for row in rows]


def _mark_picks(rows: Sequence[EngineRow], ladder: Sequence[str]) -> list[EngineRow]:
    """Mark the fastest accepted engine of each target; of equals, the more accurate, then the smaller one.

    Only the last accepted rung of the ladder counts: the race has shown that it is the fastest of them.
    """
    picks: set[str] = set()
    for target in dict.fromkeys(row.target for row in rows):
        accepted = [row for row in rows if row.target == target and row.verdict is Verdict.ACCEPT]
        last_rung = rungs(accepted, ladder, target)[-1:]
        candidates = last_rung + [row for row in accepted if row.variant not in ladder]
        if candidates:
            picks.add(min(candidates, key=_rank).name)
    return [dataclasses.replace(row, picked=row.name in picks) for row in rows]


def _rank(row: EngineRow) -> tuple[float, float, int, str]:
    """Return the sort key of a target's accepted engines, best first; their latencies are from the same rounds."""
    measured = _measured(row)
    return measured.speed.latency_ms_p50, -measured.accuracy.score, measured.size_bytes, row.variant
