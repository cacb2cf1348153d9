"""A row of engines.json: one engine with everything that was measured, and its verdict."""

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

import dacite

from tasks.core.reports import STRICT
from tasks.parts.data.accuracy import Accuracy, Standing

ENGINES_FILE = "engines.json"

MACHINE = "Machine"
"""The condition that holds the id of the machine an engine was measured on."""
REFERENCE_NAME = "Reference"
"""The condition that names what the speed-up of an engine refers to."""


class Verdict(StrEnum):
    """Whether an engine is accepted, or why not."""

    ACCEPT = "ACCEPT"
    TOO_LOSSY = "TOO_LOSSY"
    """It certainly loses more accuracy than a gate allows."""
    UNPROVEN = "UNPROVEN"
    """Too few validation images to tell whether it holds the gates."""
    TOO_SLOW = "TOO_SLOW"
    """It holds the gates of accuracy and breaks a limit of the user: max_latency_ms or min_fps."""
    NOT_FASTER = "NOT_FASTER"
    """It holds the gates, but gives neither speed nor accuracy over the rung below it."""
    INCONCLUSIVE = "INCONCLUSIVE"
    """It holds the gates; noise of the machine hides whether it is faster."""
    BUILD_FAILED = "BUILD_FAILED"
    PRECISION_MISMATCH = "PRECISION_MISMATCH"
    """It does not compute in the declared precision: measured, but never picked."""
    SKIPPED = "SKIPPED"


class UnseenVerdict(StrEnum):
    """What the split that nothing was decided on says about a pick that the validation images chose."""

    confirmed = "confirmed"
    """It holds every accuracy gate there, too."""
    not_confirmed = "not confirmed"
    """Too few images there to tell."""
    refuted = "refuted"
    """It certainly breaks a gate there."""


UNSEEN_VERDICTS = {
    Standing.within: UnseenVerdict.confirmed,
    Standing.unproven: UnseenVerdict.not_confirmed,
    Standing.beyond: UnseenVerdict.refuted,
}


@dataclass(frozen=True)
class SuspectLayer:
    """A layer that differs from the float graph, with its place in the source code."""

    kind: str
    """Why it is suspect: it is the first to collapse, or the one with the largest own drop."""
    node: str
    module: str
    source: str
    """``file:line`` of the module's call."""
    sqnr_db: float
    """SQNR of the engine's output at this layer, including the noise of all layers before it."""
    own_sqnr_db: float | None
    """SQNR of the layer alone, with exact inputs; None if only the runtime differs from the float graph."""


@dataclass(frozen=True)
class Speed:
    """Latency at batch 1, throughput, speed-up, start, memory and energy."""

    latency_ms_p50: float
    """From the frame to the answer. Measured in the same rounds as the other engines of the target."""
    latency_ms_p50_low: float
    """Lower end of its 95 % interval."""
    latency_ms_p50_high: float
    """Upper end; it is what a limit in milliseconds is held against."""
    latency_ms_p90: float
    latency_ms_p99: float | None
    """None for fewer than 1,000 samples."""
    throughput_per_s: float
    """Images per second, one inference after the other."""
    throughput_per_s_batched: float | None
    """Images per second at the largest of benchmark.batch_sizes that the engine takes."""
    speedup_vs_reference: float
    """Speed-up over the reference engine, measured in the same rounds: the condition `Reference` names it. Only
    speed-ups over one reference on one machine can be compared."""
    speedup_low: float
    """Lower end of the interval."""
    speedup_high: float
    aa_ratio_spread: float
    """The spread of the A/A control; smaller differences are not significant."""
    is_inconclusive: bool
    """Whether the machine was too noisy."""
    frames_per_s: float
    """Over a stream of image files, in which decoding, running and finishing overlap. A limit in frames per second is
    held against it."""
    decode_ms_p50: float
    """An image file of the engine's size, to a frame."""
    pre_ms_p50: float
    """What stands before the engine: normalisation, if it is not in the graph."""
    run_ms_p50: float
    """The engine alone."""
    post_ms_p50: float
    """What stands behind it: the argmax, if it is not in the graph."""
    load_ms: float
    """From the engine file to a loaded engine, without importing the runtime; a single load."""
    first_call_ms: float
    """The first inference after that."""
    memory_mib: float
    """Resident memory of runtime, weights and buffers."""
    memory_total_mib: float
    """Peak of the whole process, including Python."""
    gpu_memory_mib: float | None
    """GPU memory of the process; None on a CPU, or if NVML does not report it."""
    energy_mj_per_image: float | None
    """Millijoules of the whole device per image, at the largest of benchmark.concurrencies; None if the machine does
    not tell: the condition `Energy` says why."""


@dataclass(frozen=True)
class LoadPoint:
    """Images per second that an engine reaches with a p99."""

    throughput_per_s: float
    latency_ms_p99: float | None
    """None for fewer than 1,000 calls."""
    setting: str
    """In words: ``batch 4, 2 lanes of 1 thread``."""


@dataclass(frozen=True)
class Load:
    """What an engine does under load; see `measure_load`."""

    load_max_p99_ms: float | None
    """The bound; None if images per second alone decided."""
    load_setting: str
    """The best cell in words; empty if no cell holds the bound."""
    load_options: dict[str, int | bool]
    """The best cell by field: batch, lanes, and those of its tuning."""
    throughput_per_s_within_p99: float | None
    """Images per second of the best cell; None if no cell holds the bound."""
    throughput_ms_p99: float | None
    """The p99 of a call there; None for fewer than 1,000 calls."""
    knee_per_s: float | None
    """The largest rate of open arrivals, one image each, whose p99 held the bound."""
    knee_max_p99_ms: float | None
    """The bound of the arrivals."""
    load_front: tuple[LoadPoint, ...]
    """The cells that are best for some bound, most images per second first; the best one also without a p99."""


@dataclass(frozen=True)
class ClassLoss:
    """What an engine loses in one class, if a limit is about it."""

    rel_loss: float
    """Share of the class's score in the float reference; of a floor, what the score lacks to 1."""
    low: float
    """Lower end of its interval; the intervals of all classes together hold the truth in 95 % of cases."""
    high: float
    max_rel_loss: float


@dataclass(frozen=True)
class Losses:
    """What an engine loses on the validation images, as shares of a score; negative if it scores more."""

    score_rel_loss: float
    """Against the float reference."""
    score_rel_loss_low: float
    """Lower end of the 95 % interval, from a comparison image by image."""
    score_rel_loss_high: float
    parent: str
    """Name of the engine that runs the variant's own float graph; empty for a float variant."""
    parent_rel_loss: float
    """Against the parent; 0 without a parent, as its interval."""
    parent_rel_loss_low: float
    parent_rel_loss_high: float
    images_needed: int | None
    """Validation images that would tell whether all gates hold, if that is unproven; None otherwise, if it would take
    more than 1024 times as many as there are, or if some of them belong together."""
    boundary_iou_rel_loss: float | None
    """Share of the float reference's Boundary IoU that is lost; None without masks."""
    boundary_iou_rel_loss_low: float | None
    """Lower end of the 95 % interval; None unless a gate limits this loss."""
    boundary_iou_rel_loss_high: float | None
    groups_needed: int | None = None
    """As `images_needed`, a number of groups, for images that belong together, such as the frames of a video."""
    frame_rel_loss_high: float | None = None
    """Upper end of the 95 % interval of the loss of the score on the original files; None where there are none."""
    class_losses: dict[str, ClassLoss] = field(default_factory=dict)
    """Limit, such as ``class_limits.nucleus`` -> what the engine loses there; empty without such limits."""
    class_warnings: tuple[str, ...] = ()
    """Classes that the engine does not find at all, or has certainly lost more than a third of, in words."""


@dataclass(frozen=True)
class Unseen:
    """What a picked engine scores on the split that nothing was decided on."""

    unseen_split: str
    unseen_score: float
    unseen_rel_loss: float
    """Share of the float reference's score on this split that is lost."""
    unseen_rel_loss_low: float
    """Lower end of the 95 % interval."""
    unseen_rel_loss_high: float
    unseen_verdict: UnseenVerdict
    """Whether it holds there the accuracy gates by which it was picked."""
    unseen_reason: str
    """The gates that it does not hold there for certain, in words; empty if it is confirmed."""


@dataclass(frozen=True)
class Measured:
    """What was measured of an engine file."""

    accuracy: Accuracy
    losses: Losses | None
    """None until it is judged."""
    unseen: Unseen | None
    """None unless it is picked."""
    speed: Speed
    size_bytes: int
    compressed_bytes: int
    """Size of the file after gzip at level 6."""
    build_s: float
    """Seconds that the build took."""
    macs: int
    """Multiply-accumulates of the variant for one image."""
    engine_sha256: str
    """The file that accuracy and latency were measured on."""
    reference_sha256: str
    """The engine that the speed-up refers to."""
    load: Load | None = None
    """None if measure_load did not measure it."""
    frame_score: float | None = None
    """Score of the bundle's code on the original files, at their own sizes; None where there are none."""
    frame_note: str = ""
    """Why there is none, or why it differs from the score."""


_PARTS: dict[str, type[Any]] = {
    "accuracy": Accuracy,
    "losses": Losses,
    "unseen": Unseen,
    "speed": Speed,
    "load": Load,
}
"""The fields of Measured whose own fields stand beside the others in engines.json."""


@dataclass(frozen=True)
class EngineRow:
    """One configured engine, whether it was built or not."""

    variant: str
    target: str
    verdict: Verdict
    reason: str
    pareto: bool
    """No other sound engine of the target is as fast and as accurate, and better in one of the two."""
    picked: bool
    """The engine to ship on its target."""
    precision: str
    """What the convolutions run in, most used first, as ``int8+f32``; without an engine, what the target declares."""
    macs_share: dict[str, float]
    """Precision -> share of the graph's MACs that the runtime runs in it; empty if it does not report this."""
    macs_share_quantized: float | None
    """Share of the MACs that the graph wants in int8."""
    measured: Measured | None
    """None if there is no engine."""
    suspect_layers: tuple[SuspectLayer, ...]
    conditions: dict[str, str]
    """How the latency was measured."""

    @property
    def is_reduced(self) -> bool:
        """Whether some convolution runs in less than FP32."""
        return self.precision != "f32"

    @property
    def name(self) -> str:
        """``<variant>-<target>``, as in the DVC stage names."""
        return f"{self.variant}-{self.target}"

    @property
    def speed_reference(self) -> str:
        """What the speed-up refers to, in words."""
        return self.conditions[REFERENCE_NAME]


def fastest_first(rows: Sequence[EngineRow]) -> list[EngineRow]:
    """Return measured rows by speed-up, as far as it refers to the same reference on the same machine.

    Rows of different references or machines stand in the order of the lowest latency of each.
    """
    groups: dict[tuple[str, str], list[tuple[float, float, EngineRow]]] = {}
    for row in rows:
        assert row.measured is not None
        speed = row.measured.speed
        group = groups.setdefault((row.speed_reference, row.conditions[MACHINE]), [])
        group.append((speed.speedup_vs_reference, speed.latency_ms_p50, row))
    ordered = sorted(groups.values(), key=lambda group: min(latency_ms for _, latency_ms, _ in group))
    return [row for group in ordered for _, _, row in sorted(group, key=lambda item: -item[0])]


def rungs(rows: Sequence[EngineRow], ladder: Sequence[str], target: str) -> list[EngineRow]:
    """Return the engines of a target that are rungs of the ladder, in its order."""
    by_variant = {row.variant: row for row in rows if row.target == target}
    return [by_variant[variant] for variant in ladder if variant in by_variant]


def flatten(row: EngineRow) -> dict[str, Any]:
    """Return a row in the flat form of engines.json, with null for numbers if there is no engine."""
    flat = dataclasses.asdict(row)
    values = measured = flat.pop("measured") or {}
    for name in _PARTS:
        values = values | (measured.get(name) or {})
    return flat | {name: values.get(name) for name in measured_names()}


def read_rows(folder: Path) -> list[EngineRow]:
    """Return the rows of the engines.json that select_engine wrote into a folder."""
    return [_row_of(flat) for flat in json.loads((folder / ENGINES_FILE).read_text(encoding="utf-8"))]


def read_engine_names(folder: Path) -> list[tuple[str, str]]:
    """Return variant and target of each row, in less time than it takes to check a thousand rows."""
    rows = json.loads((folder / ENGINES_FILE).read_text(encoding="utf-8"))
    return [(row["variant"], row["target"]) for row in rows]


def read_picks(file: Path) -> dict[str, EngineRow]:
    """Return the rows of a picks.json by target."""
    picks: dict[str, dict[str, Any]] = json.loads(file.read_text(encoding="utf-8"))
    return {target: _row_of(flat) for target, flat in picks.items()}


def _row_of(flat: dict[str, Any]) -> EngineRow:
    parts: dict[str, Any] = {name: _pick(flat, part) for name, part in _PARTS.items()}
    for name, mark in (
        ("losses", "score_rel_loss"),
        ("unseen", "unseen_split"),
        ("load", "load_setting"),
    ):
        parts[name] = None if flat.get(mark) is None else parts[name]
    measured = _pick(flat, Measured) | parts if flat["engine_sha256"] else None
    return dacite.from_dict(EngineRow, _pick(flat, EngineRow) | {"measured": measured}, STRICT)


def measured_names() -> list[str]:
    """Return the keys of engines.json that are null if there is no engine."""
    names = [field.name for part in (*_PARTS.values(), Measured) for field in dataclasses.fields(part)]
    return [name for name in names if name not in _PARTS]


def _pick(flat: dict[str, Any], part: type[Any]) -> dict[str, Any]:
    return {field.name: flat[field.name] for field in dataclasses.fields(part) if field.name in flat}
