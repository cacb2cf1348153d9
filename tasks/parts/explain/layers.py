"""Hold the layers of an engine against the roofs of its machine."""

import csv
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tasks.core.errors import ArtifactError
from tasks.parts.engines.manifest import LAYERS_FILE
from tasks.parts.roofs.roofs import Bound, Roofs, limits_of

CONVERTING = frozenset({"QuantizeLinear", "DequantizeLinear", "Cast"})
"""Operators that only change the precision."""

_VIEWING = frozenset({"Reshape", "Flatten", "Squeeze", "Unsqueeze", "Identity"})
"""Operators that only give the same bytes another shape."""

_ABOVE_ROOF = 1.1
"""A layer that is faster than its roof by more than this was counted wrongly, or the roof was measured too low."""


@dataclass(frozen=True)
class TimedLayer:
    """A layer of an engine with its time, from the tables of build_engine and benchmark."""

    name: str
    kind: str
    precision: str
    nodes: tuple[str, ...]
    operators: tuple[str, ...]
    is_conversion: bool
    """Whether it only changes layout or precision."""
    macs: int
    """Multiply-adds of one image."""
    kernel: str
    reads: tuple[str, ...]
    """Names of the layers whose results it reads."""
    input_bytes: int | None
    weight_bytes: int | None
    output_bytes: int | None
    channels_in: int | None
    channels_out: int | None
    groups: int | None
    module: str
    source: str
    milliseconds: float
    """0 if the runtime's profiler does not report it."""

    @property
    def is_view(self) -> bool:
        """Whether it only gives the same bytes another shape, for which runtimes move nothing."""
        return bool(self.operators) and _VIEWING.issuperset(self.operators)

    @property
    def moved_bytes(self) -> int:
        """Bytes read and written for one image, as far as they are known."""
        sizes = () if self.is_view else (self.input_bytes, self.weight_bytes, self.output_bytes)
        return sum(size or 0 for size in sizes)

    @property
    def is_depthwise(self) -> bool:
        """Whether each channel is convolved by itself."""
        return self.groups is not None and self.groups > 1 and self.groups == self.channels_in


@dataclass(frozen=True)
class ExplainedLayer:
    """A row of layers.csv of `explain`: what a layer does, how long it takes, and what bounds it."""

    layer: str
    kind: str
    operators: str
    """ONNX operators that it computes."""
    precision: str
    kernel: str
    """The implementation, by the runtime's own name."""
    macs: int
    flops: int
    """Two for each multiply-add."""
    input_bytes: int | None
    weight_bytes: int | None
    output_bytes: int | None
    macs_per_byte: float | None
    """Arithmetic intensity (density)."""
    milliseconds: float
    """From the runtime's profiler, without the profiler's own time."""
    share: float
    """Of the latency of the engine."""
    bound: Bound
    working_set_bytes: int | None
    """The measured working set whose bandwidth bounds it; None unless memory does."""
    attainable_ms: float | None
    """What a layer would take that reaches the roofs."""
    share_of_roof: float | None
    """attainable_ms / milliseconds."""
    winnable_ms: float | None
    """What could still be won."""
    is_above_roof: bool
    """It is faster than its roof: its work was counted wrongly, or the roof measured too low."""
    is_conversion: bool
    module: str
    source: str
    """file:line"""


def read_layers(folder: Path) -> tuple[TimedLayer, ...]:
    """Read `layers.csv` that benchmark wrote; empty if the runtime has no such table.

    Raises ArtifactError for a table of another version.
    """
    file = folder / LAYERS_FILE
    if not file.is_file():
        return ()
    try:
        with file.open(newline="", encoding="utf-8") as table:
            return tuple(_read_row(row) for row in csv.DictReader(table))
    except (KeyError, ValueError) as error:
        raise ArtifactError(
            f"{file}: no readable table ({error!r}); it is from another version. Run build_engine and benchmark "
            "again: `dvc repro`."
        ) from error


def _read_row(row: Mapping[str, str]) -> TimedLayer:
    def number(name: str) -> int | None:
        return int(row[name]) if row[name] else None

    operators = tuple(row["operators"].split())
    return TimedLayer(
        name=row["layer"],
        kind=row["kind"],
        precision=row["precision"],
        nodes=tuple(row["nodes"].split()),
        operators=operators,
        is_conversion=row["is_conversion"] == "True"
        or (bool(operators) and CONVERTING.issuperset(operators)),
        macs=int(row["macs"]),
        kernel=row["kernel"],
        reads=tuple(name for name in row["reads"].split("\t") if name),
        input_bytes=number("input_bytes"),
        weight_bytes=number("weight_bytes"),
        output_bytes=number("output_bytes"),
        channels_in=number("channels_in"),
        channels_out=number("channels_out"),
        groups=number("groups"),
        module=row["module"],
        source=row["source"],
        milliseconds=float(row["milliseconds"] or 0),
    )


def explain_layers(
    layers: Sequence[TimedLayer], roofs: Roofs, latency_ms: float
) -> tuple[ExplainedLayer, ...]:
    """Return what bounds each layer of an engine that takes `latency_ms`."""
    return tuple(_explain(layer, roofs, latency_ms) for layer in layers)


def time_of(layer: TimedLayer, roofs: Roofs) -> float:
    """Return the time of a layer in ms without the profiler's own."""
    if roofs.layer_ms is None:
        return layer.milliseconds
    own_ms = max(0.0, roofs.profiled_layer_ms - roofs.layer_ms.value)
    return max(0.0, layer.milliseconds - own_ms)


def _explain(layer: TimedLayer, roofs: Roofs, latency_ms: float) -> ExplainedLayer:
    milliseconds = time_of(layer, roofs)
    is_known = bool(layer.macs or layer.moved_bytes or layer.is_view)
    limits = (
        limits_of(
            roofs,
            precision=layer.precision,
            macs=layer.macs,
            moved_bytes=layer.moved_bytes,
            is_depthwise=layer.is_depthwise,
        )
        if is_known and roofs.compute and roofs.memory
        else None
    )
    attainable_ms = limits.attainable_ms if limits else None
    bound = limits.bound if limits else Bound.unknown
    is_timed = attainable_ms is not None and milliseconds > 0
    return ExplainedLayer(
        layer=layer.name,
        kind=layer.kind,
        operators=" ".join(layer.operators),
        precision=layer.precision,
        kernel=layer.kernel,
        macs=layer.macs,
        flops=2 * layer.macs,
        input_bytes=layer.input_bytes,
        weight_bytes=layer.weight_bytes,
        output_bytes=layer.output_bytes,
        macs_per_byte=layer.macs / layer.moved_bytes if layer.moved_bytes else None,
        milliseconds=milliseconds,
        share=milliseconds / latency_ms,
        bound=bound,
        working_set_bytes=roofs.bandwidth(layer.moved_bytes).working_set_bytes
        if bound is Bound.memory
        else None,
        attainable_ms=attainable_ms,
        share_of_roof=attainable_ms / milliseconds if is_timed and attainable_ms else None,
        winnable_ms=max(0.0, milliseconds - attainable_ms) if is_timed and attainable_ms else None,
        is_above_roof=bool(is_timed and attainable_ms and attainable_ms > _ABOVE_ROOF * milliseconds),
        is_conversion=layer.is_conversion,
        module=layer.module,
        source=layer.source,
    )
