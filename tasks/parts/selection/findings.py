"""The content of the engine report: rows in order, and numbers formatted for reading."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from tasks.parts.data.accuracy import Accuracy, Similarity
from tasks.parts.data.class_limits import EVERY, ClassLimits
from tasks.parts.data.metrics import Metric
from tasks.parts.measuring.load_report import LoadReport
from tasks.parts.measuring.reports import BenchmarkReport
from tasks.parts.selection.engine_row import EngineRow, Speed, Verdict, fastest_first, rungs
from tasks.parts.selection.verdicts import Reference

INT8_CHECKLIST = "artifacts/check_int8/checklist.md"
_REDUCED_IN_VAIN = (Verdict.PRECISION_MISMATCH, Verdict.BUILD_FAILED, Verdict.SKIPPED)
"""Verdicts on rungs of reduced precision that do not show this precision."""
NOTHING = "–"  # noqa: RUF001
_NO_ACCURACY = (
    "These scores are no accuracy. The model returns values, not classes, and the truth is what the float model "
    "returns for the same images: the score is 1 - noise / signal, the dB are its signal-to-noise ratio, and the "
    "cosine is that of all values. Nothing here says how right the float model is, or how much a difference matters "
    "to the use of these values."
)


@dataclass(frozen=True)
class Gain:
    """The effect of one technique on one target. A ratio is the value with the technique over the value without."""

    score_change: float
    """Change of the score on the validation images."""
    speed_factor: float
    """How many times as fast, from rounds in which both ran."""
    memory_ratio: float
    """Ratio of the memory: on the GPU if both are known, else the resident memory of runtime, weights and buffers."""
    size_ratio: float
    """Ratio of the sizes of the engine files."""
    compressed_ratio: float
    """Ratio of these sizes after gzip."""
    macs_ratio: float | None
    """Ratio of the multiply-accumulates; None if there were none."""


@dataclass(frozen=True)
class Shown:
    """The formatted numbers of an engine; dashes if there is no engine."""

    score: str = NOTHING
    change: str = NOTHING
    """Change of the score from the reference."""
    change_interval: str = NOTHING
    """Its 95 % interval: ``+1.6 to +2.9 %``."""
    frame_score: str = NOTHING
    """Score on the original files."""
    boundary_iou: str = NOTHING
    boundary_change: str = NOTHING
    """Change of Boundary IoU from the reference."""
    unseen_score: str = NOTHING
    """Score of a pick on the split that nothing was decided on."""
    unseen_change: str = NOTHING
    """Its change from the reference on that split, with the interval."""
    unseen_verdict: str = NOTHING
    """Whether that split confirms the pick."""
    p50_ms: str = NOTHING
    p50_interval: str = NOTHING
    """Its 95 % interval: ``0.151 to 0.158``."""
    p90_ms: str = NOTHING
    p99_ms: str = NOTHING
    speedup: str = NOTHING
    size_mb: str = NOTHING
    compressed_mb: str = NOTHING
    """Size of the engine file after gzip."""
    build_s: str = NOTHING
    load_ms: str = NOTHING
    first_call_ms: str = NOTHING
    memory_mib: str = NOTHING
    """Resident memory of runtime, weights and buffers."""
    memory_total_mib: str = NOTHING
    """Peak of the whole process."""
    gpu_memory_mib: str = NOTHING
    energy_mj: str = NOTHING
    """Energy of the whole device per image."""
    mmacs: str = NOTHING
    """Millions of multiply-accumulates for one image."""


@dataclass(frozen=True)
class Findings:
    """All rows and what they are compared with."""

    rows: Sequence[EngineRow]
    without_pick: dict[str, str]
    """Target -> why none of its engines passes."""
    ladder: Sequence[str]
    """Variants from the float start to the last rung of compression."""
    techniques: Sequence[tuple[str, str, str]]
    """Name, variant before, variant after."""
    reference: Reference
    max_score_rel_loss: float
    max_parent_rel_loss: float
    max_boundary_iou_rel_loss: float | None
    """None for no limit."""
    unseen_split: str
    """Split that the picks are reported on, and nothing is decided on."""
    benchmarks: Mapping[str, BenchmarkReport]
    """By target."""
    class_limits: ClassLimits = field(default_factory=lambda: ClassLimits({}, {}))
    loads: Mapping[str, LoadReport] = field(default_factory=dict)
    """By target, as far as measure_load ran."""

    @property
    def gate(self) -> float:
        """Minimum score of an accepted engine."""
        return self.reference.score * (1 - self.max_score_rel_loss)

    @property
    def boundary_gate(self) -> str:
        """The sentence about the limit of Boundary IoU, with a space before it; empty without a limit."""
        if self.max_boundary_iou_rel_loss is None:
            return ""
        limit = f"{100 * self.max_boundary_iou_rel_loss:g} %"
        return f" It may lose at most {limit} of the reference's Boundary IoU, in the same way."

    @property
    def class_gate(self) -> str:
        """The sentence about the limits of classes, with a space before it; empty without any."""
        parts = [
            f"of {_class_of(name)} at most {100 * limit:g} % of the reference's score may be lost"
            for name, limit in self.class_limits.max_rel_loss.items()
        ]
        parts += [
            f"{_class_of(name)} has to reach {floor:g}" for name, floor in self.class_limits.floors.items()
        ]
        if not parts:
            return ""
        corrected = "by intervals that all hold together in 95 % of cases"
        return f" Single classes, by IoU or recall: {', '.join(parts)}, {corrected}."

    @property
    def has_frames(self) -> bool:
        """Whether any engine was scored on original files."""
        return any(row.measured and row.measured.frame_score is not None for row in self.rows)

    @property
    def has_boundaries(self) -> bool:
        """Whether any engine has a Boundary IoU."""
        return any(row.measured and row.measured.accuracy.boundary_iou is not None for row in self.rows)

    @property
    def note(self) -> str:
        """What a reader must know about the metric; empty for those that need no words."""
        return note_on(self.reference.metric)

    @property
    def targets(self) -> list[str]:
        """Targets in the order of the rows."""
        return list(dict.fromkeys(row.target for row in self.rows))

    @property
    def picks(self) -> list[EngineRow]:
        """The picked rows, the fastest first."""
        return fastest_first([row for row in self.rows if row.picked])

    @property
    def ordered(self) -> list[EngineRow]:
        """All rows: picks first, then by latency, rows without an engine last."""
        return sorted(self.rows, key=lambda row: (not row.picked, latency_ms(row), row.name))

    def row(self, variant: str, target: str) -> EngineRow | None:
        """Return one engine's row."""
        return next((row for row in self.rows if (row.variant, row.target) == (variant, target)), None)

    def rungs(self, target: str) -> list[EngineRow]:
        """Return the engines of a target in the order of the ladder."""
        return rungs(self.rows, self.ladder, target)

    def ladder_end(self, target: str) -> str:
        """Describe where the ladder of a target ends, and where to look if INT8 lost too much accuracy."""
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
        return (
            f"{end} See {INT8_CHECKLIST} for what INT8 loses without training, and why." if is_lossy else end
        )

    def gain(self, before: str, after: str, target: str) -> Gain | None:
        """Compare two variants on one target; None unless both were measured there."""
        rows = self.row(before, target), self.row(after, target)
        old, new = (row.measured if row else None for row in rows)
        if old is None or new is None:
            return None
        return Gain(
            score_change=new.accuracy.score - old.accuracy.score,
            speed_factor=self.benchmarks[target].ratio(after, before).factor,
            memory_ratio=_memory_ratio(old.speed, new.speed),
            size_ratio=new.size_bytes / old.size_bytes,
            compressed_ratio=new.compressed_bytes / old.compressed_bytes,
            macs_ratio=new.macs / old.macs if old.macs else None,
        )

    @property
    def ious(self) -> list[tuple[EngineRow, dict[str, float | None]]]:
        """Every engine that has an IoU per class, with these IoUs."""
        measured = [(row, row.measured.accuracy.iou) for row in self.ordered if row.measured]
        return [(row, iou) for row, iou in measured if iou]

    @property
    def loaded(self) -> list[EngineRow]:
        """The engines that were measured under load, most images per second within the bound first."""
        rows = [(row, row.measured.load) for row in self.rows if row.measured and row.measured.load]
        return [
            row for row, load in sorted(rows, key=lambda item: -(item[1].throughput_per_s_within_p99 or 0.0))
        ]

    def conditions(self) -> dict[str, dict[str, str]]:
        """Return target -> condition -> its value, or the range of values over the target's engines."""
        return {
            target: {name: _span(values) for name, values in _collect(self.rows, target).items()}
            for target in self.targets
            if _collect(self.rows, target)
        }


def _class_of(name: str) -> str:
    return "each other class" if name == EVERY else name


def shown(row: EngineRow) -> Shown:
    """Format the numbers of an engine."""
    if row.measured is None:
        return Shown()
    speed, losses, unseen = row.measured.speed, row.measured.losses, row.measured.unseen
    assert losses is not None
    return Shown(
        score=score_of(row.measured.accuracy),
        change=percent_change(losses.score_rel_loss),
        change_interval=_span_of_change(losses.score_rel_loss_low, losses.score_rel_loss_high),
        frame_score=number(row.measured.frame_score, ".4f"),
        boundary_iou=number(row.measured.accuracy.boundary_iou, ".4f"),
        boundary_change=NOTHING
        if losses.boundary_iou_rel_loss is None
        else percent_change(losses.boundary_iou_rel_loss),
        unseen_score=f"{unseen.unseen_score:.4f}" if unseen else NOTHING,
        unseen_change=f"{percent_change(unseen.unseen_rel_loss)} "
        f"({_span_of_change(unseen.unseen_rel_loss_low, unseen.unseen_rel_loss_high)})"
        if unseen
        else NOTHING,
        unseen_verdict=unseen.unseen_verdict if unseen else NOTHING,
        p50_ms=milliseconds(speed.latency_ms_p50),
        p50_interval=f"{milliseconds(speed.latency_ms_p50_low)} to {milliseconds(speed.latency_ms_p50_high)}",
        p90_ms=milliseconds(speed.latency_ms_p90),
        p99_ms=NOTHING if speed.latency_ms_p99 is None else milliseconds(speed.latency_ms_p99),
        speedup=times(speed.speedup_vs_reference),
        size_mb=megabytes(row.measured.size_bytes),
        compressed_mb=megabytes(row.measured.compressed_bytes),
        build_s=number(row.measured.build_s, ".1f" if row.measured.build_s >= 1 else ".2f"),
        load_ms=milliseconds(speed.load_ms),
        first_call_ms=milliseconds(speed.first_call_ms),
        memory_mib=number(speed.memory_mib, ".0f"),
        memory_total_mib=number(speed.memory_total_mib, ".0f"),
        gpu_memory_mib=number(speed.gpu_memory_mib, ".0f"),
        energy_mj=number(speed.energy_mj_per_image, ".3g"),
        mmacs=number(row.measured.macs / 1e6, ".1f"),
    )


def note_on(metric: str) -> str:
    """Return what a reader must know about a metric; empty for those that need no words."""
    return _NO_ACCURACY if metric == Metric.values_agreement else ""


def score_of(accuracy: Accuracy) -> str:
    """Format a score: ``0.6421``, or ``0.9991 (30.5 dB, cosine 0.99955)`` for values; each output by its name."""
    text = f"{accuracy.score:.4f}"
    if accuracy.sqnr_db is None or accuracy.cosine is None:
        return text
    outputs = accuracy.outputs or {"": Similarity(accuracy.sqnr_db, accuracy.cosine)}
    found = "; ".join(
        f"{name} {output.sqnr_db:.1f} dB, cosine {output.cosine:.5f}".strip()
        for name, output in outputs.items()
    )
    return f"{text} ({found})"


def _memory_ratio(old: Speed, new: Speed) -> float:
    if old.gpu_memory_mib is not None and new.gpu_memory_mib is not None:
        return new.gpu_memory_mib / old.gpu_memory_mib
    return new.memory_mib / old.memory_mib


def latency_ms(row: EngineRow) -> float:
    """Return the latency that rows are sorted by; infinity if there is no engine."""
    return row.measured.speed.latency_ms_p50 if row.measured else math.inf


def columns(rows: Iterable[Mapping[str, object]]) -> list[str]:
    """Return the names that occur in any of the rows, each once."""
    return list(dict.fromkeys(name for row in rows for name in row))


def _collect(rows: Sequence[EngineRow], target: str) -> dict[str, list[str]]:
    values: dict[str, list[str]] = {}
    for row in rows:
        if row.target == target and row.measured:
            for name, value in row.conditions.items():
                values.setdefault(name, []).append(value)
    return values


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
    """Format a number; None becomes a dash."""
    return NOTHING if value is None else format(value, spec)


def milliseconds(value: float) -> str:
    """Format a latency with three digits or more: ``0.663``, ``18.6``, ``252.0``."""
    return f"{value:.3f}" if value < 1 else f"{value:.2f}" if value < 10 else f"{value:.1f}"


def times(value: float) -> str:
    """Format a factor: ``0.98x``, ``28.2x``."""
    return f"{value:.{2 if value < 10 else 1}f}×"  # noqa: RUF001


def percent_change(loss: float) -> str:
    """Format a relative loss as a change: a loss of 0.012 is ``-1.2 %``."""
    text = f"{-100 * loss:+.1f}"
    return "0.0 %" if text in ("+0.0", "-0.0") else f"{text.replace('-', '−')} %"  # noqa: RUF001


def _span_of_change(low: float, high: float) -> str:
    return f"{percent_change(high).removesuffix(' %')} to {percent_change(low)}"


def signed(value: float) -> str:
    """Format a change of the score: ``+0.0123``."""
    return f"{value:+.4f}".replace("-", "−")  # noqa: RUF001


def megabytes(size_bytes: int) -> str:
    """Format a file size in MB (1e6 bytes)."""
    return f"{size_bytes / 1e6:.2f}" if size_bytes < 10e6 else f"{size_bytes / 1e6:.1f}"
