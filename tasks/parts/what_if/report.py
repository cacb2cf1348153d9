"""The report of `try_changes`: what was predicted of each change, and what was measured."""

from collections.abc import Sequence
from dataclasses import dataclass

from tasks.parts.explain.engine_view import EngineView
from tasks.parts.what_if.change import Change
from tasks.parts.what_if.trial import Trials


@dataclass(frozen=True)
class TriedChange:
    """A change, what was predicted of it and what was measured."""

    kind: str
    title: str
    accuracy: str
    """What it costs in accuracy."""
    recipe: str
    """How to keep the change."""
    predicted_ms: float
    """Time of the changed engine for one image."""
    predicted_saving: float
    """Share of the unchanged engine's time."""
    measured_saving: float | None
    """The same from the race; None if the change was not built."""
    measured_low: float | None
    """Lower end of its interval."""
    measured_high: float | None
    reason: str
    """Why it was not built; empty otherwise."""


@dataclass(frozen=True)
class WhatIf:
    """Changes of one engine, predicted and tried."""

    target: str
    variant: str
    latency_ms: float
    """Median of the unchanged engine at batch 1, before the race."""
    tried: tuple[TriedChange, ...]
    """The largest predicted saving first."""
    not_tried: tuple[TriedChange, ...]
    """Changes that were only predicted."""
    aa_spread: float
    """How much two processes of the unchanged engine seemed to differ in the race."""
    num_rounds: int
    reason: str
    """Why nothing was predicted; empty otherwise."""


def sum_up(engine: EngineView, target: str, changes: Sequence[Change], trials: Trials) -> WhatIf:
    """Return what was predicted and measured; changes that `trials` does not know were not tried."""
    rows = [_row(engine, change, number, trials) for number, change in enumerate(changes)]
    num_tried = len(trials.laps) + len(trials.reasons)
    return WhatIf(
        target=target,
        variant=engine.name,
        latency_ms=engine.latency_ms,
        tried=tuple(rows[:num_tried]),
        not_tried=tuple(rows[num_tried:]),
        aa_spread=trials.aa_spread,
        num_rounds=trials.num_rounds,
        reason="" if changes else "no change is predicted to save time",
    )


def _row(engine: EngineView, change: Change, number: int, trials: Trials) -> TriedChange:
    lap = trials.laps.get(number)
    return TriedChange(
        kind=change.kind,
        title=change.title,
        accuracy=change.accuracy,
        recipe=change.recipe,
        predicted_ms=change.predicted_ms,
        predicted_saving=1 - change.predicted_ms / engine.latency_ms,
        measured_saving=None if lap is None else 1 - lap.factor,
        measured_low=None if lap is None else 1 - lap.high,
        measured_high=None if lap is None else 1 - lap.low,
        reason=trials.reasons.get(number, ""),
    )


def write_page(report: WhatIf) -> str:
    """Return the report as Markdown."""
    lines = [f"# What if: {report.variant} on {report.target}", ""]
    if report.reason:
        return "\n".join([*lines, f"Nothing was tried: {report.reason}.", ""])
    lines += [
        f"{report.latency_ms:.3f} ms for an image. Savings are shares of that time; measured ones come from "
        f"{report.num_rounds} common rounds, where two processes of the unchanged engine seemed to differ by up to "
        f"{report.aa_spread:.1%}.",
        "",
        "| change | predicted | measured | accuracy | to keep it |",
        "|---|---:|---|---|---|",
    ]
    lines += [
        f"| {row.title} | {row.predicted_saving:.1%} | {_measured(row)} | {row.accuracy} | `{row.recipe}` |"
        for row in (*report.tried, *report.not_tried)
    ]
    return "\n".join([*lines, ""])


def _measured(row: TriedChange) -> str:
    if row.measured_saving is None:
        return row.reason or "not tried"
    return f"{row.measured_saving:.1%} ({row.measured_low:.1%} to {row.measured_high:.1%})"
