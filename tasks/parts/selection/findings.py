"""What a reader of the engine report wants to know, in an order and with numbers fit to be read."""

from collections.abc import Sequence
from dataclasses import dataclass

from tasks.parts.selection.engine_row import EngineRow, Verdict, rungs

INT8_CHECKLIST = "artifacts/check_int8/checklist.md"

_REDUCED_IN_VAIN = (Verdict.PRECISION_MISMATCH, Verdict.BUILD_FAILED, Verdict.SKIPPED)
"""What can become of a rung of reduced precision that shows no such precision."""

NOTHING = "–"  # noqa: RUF001


@dataclass(frozen=True)
class Gain:
    """What one technique gave on one target."""

    score_change: float
    speed_factor: float


@dataclass(frozen=True)
class Findings:
    """All rows and what they are held against."""

    rows: Sequence[EngineRow]
    without_pick: dict[str, str]
    """Target -> why no engine of it passes."""
    ladder: Sequence[str]
    """Variants from the float start to the last rung of compression."""
    techniques: Sequence[tuple[str, str, str]]
    """Name, variant before, variant after."""
    metric: str
    """What scores are: mIoU or top-1 accuracy, or the agreement with the float model in one of them."""
    reference: str
    """The engine whose score counts as 100 %."""
    reference_score: float
    speed_reference: str
    """The engine that speed-ups are over."""
    max_score_rel_loss: float

    @property
    def gate(self) -> float:
        """The score that an accepted engine has at least."""
        return self.reference_score * (1 - self.max_score_rel_loss)

    @property
    def targets(self) -> list[str]:
        """Targets in the order of the rows."""
        return list(dict.fromkeys(row.target for row in self.rows))

    @property
    def picks(self) -> list[EngineRow]:
        """The picked rows, fastest first."""
        return sorted((row for row in self.rows if row.picked), key=lambda row: row.latency_ms_p50 or 0)

    @property
    def ordered(self) -> list[EngineRow]:
        """Picks, then by latency, then what has no engine."""
        return sorted(
            self.rows,
            key=lambda row: (not row.picked, row.latency_ms_p50 is None, row.latency_ms_p50 or 0, row.name),
        )

    def row(self, variant: str, target: str) -> EngineRow | None:
        """Return one engine's row."""
        return next((row for row in self.rows if (row.variant, row.target) == (variant, target)), None)

    def rungs(self, target: str) -> list[EngineRow]:
        """Return the engines of a target in the order of the ladder."""
        return rungs(self.rows, self.ladder, target)

    def ladder_end(self, target: str) -> str:
        """Say where the ladder of a target ends, and where to look if accuracy stopped it."""
        rows = self.rungs(target)
        accepted = [row for row in rows if row.verdict is Verdict.ACCEPT]
        is_tried = any(row.is_reduced or row.verdict in _REDUCED_IN_VAIN for row in rows)
        if not accepted:
            end = "No rung is accepted for this model on this target."
        elif is_tried and not any(row.is_reduced for row in accepted):
            end = f"No reduced precision is acceptable for this model on this target: {accepted[-1].variant} stays."
        elif accepted[-1].variant == self.ladder[0]:
            end = f"No compression is worth it for this model on this target: {accepted[0].variant} stays."
        else:
            end = f"{accepted[-1].variant} is the last rung that is accepted."
        is_lossy = any(row.verdict is Verdict.TOO_LOSSY and "int8" in row.precision for row in rows)
        return f"{end} What INT8 loses without training, and why: {INT8_CHECKLIST}." if is_lossy else end

    def gain(self, before: str, after: str, target: str) -> Gain | None:
        """Compare two variants on one target; None unless both were measured there."""
        old, new = self.row(before, target), self.row(after, target)
        if old is None or new is None:
            return None
        if (
            old.score is None
            or new.score is None
            or not old.speedup_vs_reference
            or not new.speedup_vs_reference
        ):
            return None
        return Gain(new.score - old.score, new.speedup_vs_reference / old.speedup_vs_reference)

    def conditions(self) -> dict[str, dict[str, str]]:
        """Return target -> condition -> its value, or the range of values over the target's engines."""
        return {
            target: {name: _span(values) for name, values in _collect(self.rows, target).items()}
            for target in self.targets
            if _collect(self.rows, target)
        }


def _collect(rows: Sequence[EngineRow], target: str) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for row in rows:
        if row.target == target:
            for name, value in row.conditions.items():
                found.setdefault(name, []).append(value)
            if row.aa_ratio_spread is not None:
                found.setdefault("A/A spread", []).append(f"{100 * row.aa_ratio_spread:.1f} %")
    return found


def _span(values: Sequence[str]) -> str:
    distinct = list(dict.fromkeys(values))
    if len(distinct) == 1:
        return distinct[0]
    try:
        ordered = sorted(distinct, key=lambda value: float(value.removesuffix(" %")))
    except ValueError:
        return ", ".join(distinct)
    return f"{ordered[0].removesuffix(' %')} to {ordered[-1]}"


def number(value: float | None, spec: str) -> str:
    """Format a number, or say that there is none."""
    return NOTHING if value is None else format(value, spec)


def milliseconds(value: float | None) -> str:
    """Format with three digits: ``0.663``, ``18.6``, ``252``."""
    if value is None:
        return NOTHING
    return f"{value:.3f}" if value < 1 else f"{value:.2f}" if value < 10 else f"{value:.1f}"


def times(value: float | None) -> str:
    """Format a factor: ``0.98x``, ``28.2x``."""
    return NOTHING if value is None else f"{value:.{2 if value < 10 else 1}f}×"  # noqa: RUF001


def percent_change(loss: float | None) -> str:
    """Format a relative loss as a change: a loss of 0.012 is ``-1.2 %``."""
    if loss is None:
        return NOTHING
    text = f"{-100 * loss:+.1f}"
    return "0.0 %" if text in ("+0.0", "-0.0") else f"{text.replace('-', '−')} %"  # noqa: RUF001


def signed(value: float) -> str:
    """Format a change of the score: ``+0.0123``."""
    return f"{value:+.4f}".replace("-", "−")  # noqa: RUF001


def megabytes(size_bytes: int | None) -> str:
    """Format a file size in MB (1e6 bytes)."""
    if size_bytes is None:
        return NOTHING
    return f"{size_bytes / 1e6:.2f}" if size_bytes < 10e6 else f"{size_bytes / 1e6:.1f}"
