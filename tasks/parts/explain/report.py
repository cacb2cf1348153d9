"""The report of `explain`: where the time of the engines of a target goes, and what makes them differ."""

from collections.abc import Sequence
from dataclasses import dataclass

from tasks.parts.explain.advice import advise
from tasks.parts.explain.causes import Cause, find_causes
from tasks.parts.explain.engine_view import EngineView
from tasks.parts.explain.waterfall import Step, sum_parts
from tasks.parts.measuring.reports import BenchmarkReport
from tasks.parts.roofs.roofs import Bound


@dataclass(frozen=True)
class EngineExplanation:
    """Where the time of one engine goes."""

    latency_ms: float
    """Median at batch 1, measured by benchmark."""
    layers_ms: float
    """Sum of the layers' times."""
    call_ms: float
    """What a call costs beside them."""
    remainder_ms: float
    """latency_ms without both; negative if the profiler's times are too long."""
    attainable_ms: float | None
    """What the engine would take if every layer reached its roof; None without roofs."""
    share_by_bound: dict[str, float]
    """Share of the latency that each roof bounds: compute, memory, overhead, mixed, unknown, and the remainder."""
    labelled_share: float
    """Share of the latency with one clear bound; a negative remainder counts against it as a positive one does."""
    above_roof: tuple[str, ...]
    """Layers that are faster than their roof: their work was counted wrongly."""
    causes: tuple[Cause, ...]
    """Why it is not faster."""


@dataclass(frozen=True)
class PairExplanation:
    """What makes one engine faster or slower than another one."""

    before: str
    after: str
    before_ms: float
    after_ms: float
    speedup: float
    """How many times as fast the second one is, from the rounds of benchmark."""
    parts_ms: dict[str, float]
    """Milliseconds of each part of the waterfall; they sum to after_ms - before_ms."""
    advice: str


@dataclass(frozen=True)
class Explanation:
    """Where the time of the engines of a target goes."""

    target: str
    engines: dict[str, EngineExplanation]
    """By variant; without those whose runtime reports no layers."""
    pairs: tuple[PairExplanation, ...]
    reason: str
    """Why nothing is explained; empty otherwise."""


def explain_engine(engine: EngineView, twin: EngineView | None) -> EngineExplanation:
    """Return where the time of an engine goes; `twin` is the float engine that it was made from."""
    shares = engine.share_by_bound
    attainable = [
        row.attainable_ms for row in engine.rows if row.attainable_ms is not None and row.milliseconds
    ]
    clear = (Bound.compute.value, Bound.memory.value, Bound.overhead.value)
    return EngineExplanation(
        latency_ms=engine.latency_ms,
        layers_ms=engine.layers_ms,
        call_ms=engine.call_ms,
        remainder_ms=engine.remainder_ms,
        attainable_ms=sum(attainable) + engine.call_ms if attainable else None,
        share_by_bound=shares,
        labelled_share=1 - sum(abs(share) for bound, share in shares.items() if bound not in clear),
        above_roof=tuple(row.layer for row in engine.rows if row.is_above_roof),
        causes=find_causes(engine, twin),
    )


def explain_pair(
    before: EngineView, after: EngineView, steps: Sequence[Step], benchmark: BenchmarkReport
) -> PairExplanation:
    """Return what makes the second engine faster or slower than the first one; `steps` are those of `compare`."""
    speedup = benchmark.ratio(after.name, before.name).factor
    return PairExplanation(
        before=before.name,
        after=after.name,
        before_ms=before.latency_ms,
        after_ms=after.latency_ms,
        speedup=speedup,
        parts_ms=sum_parts(steps),
        advice=advise(before, after, speedup),
    )
