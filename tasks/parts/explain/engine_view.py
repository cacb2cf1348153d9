"""An engine with everything that explains its time."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from tasks.parts.engines.manifest import EngineManifest, read_engine_manifest
from tasks.parts.explain.layers import ExplainedLayer, TimedLayer, explain_layers, read_layers, time_of
from tasks.parts.measuring.race import engine_folder
from tasks.parts.measuring.reports import BenchmarkReport
from tasks.parts.roofs.roofs import Bound, Roofs

INT8 = "int8"


@dataclass(frozen=True)
class EngineView:
    """One engine file of a target: what it runs, how long, and against which roofs."""

    name: str
    """The variant."""
    manifest: EngineManifest
    latency_ms: float
    """Median at batch 1, in the rounds of all engines."""
    layers: tuple[TimedLayer, ...]
    roofs: Roofs

    @cached_property
    def rows(self) -> tuple[ExplainedLayer, ...]:
        """The layers held against the roofs, in the order of execution."""
        return explain_layers(self.layers, self.roofs, self.latency_ms)

    @cached_property
    def times_ms(self) -> dict[str, float]:
        """The time of each layer without the profiler's own."""
        return {layer.name: time_of(layer, self.roofs) for layer in self.layers}

    @cached_property
    def bounds(self) -> dict[str, Bound]:
        """What bounds each layer."""
        return {row.layer: row.bound for row in self.rows}

    @property
    def layers_ms(self) -> float:
        """The time of all layers."""
        return sum(self.times_ms.values())

    @property
    def call_ms(self) -> float:
        """The part of the latency beside the layers that a call of this runtime costs anyway."""
        call_ms = self.roofs.call_ms.value if self.roofs.call_ms else 0.0
        return min(max(0.0, self.latency_ms - self.layers_ms), call_ms)

    @property
    def remainder_ms(self) -> float:
        """What neither the layers nor the call explain; negative if the profiler's times are too long."""
        return self.latency_ms - self.layers_ms - self.call_ms

    @property
    def conversions_ms(self) -> float:
        """The time of the layers that only change layout or precision."""
        return sum(self.times_ms[layer.name] for layer in self.layers if layer.is_conversion)

    @property
    def left_in_float(self) -> tuple[TimedLayer, ...]:
        """The layers of a quantized engine that compute, but not in INT8."""
        return tuple(
            layer
            for layer in self.layers
            if self.manifest.is_quantized and not layer.is_conversion and layer.precision != INT8
        )

    @property
    def share_by_bound(self) -> dict[str, float]:
        """The share of the latency that each roof bounds; the call counts as overhead, the remainder is its own."""
        shares = defaultdict[str, float](float, {Bound.overhead.value: self.call_ms / self.latency_ms})
        for row in self.rows:
            shares[row.bound.value] += row.share
        shares["remainder"] = self.remainder_ms / self.latency_ms
        return dict(sorted(shares.items()))

    def neighbours(self, layer: TimedLayer) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Return the layers that compute before and behind a conversion, through other conversions."""
        readers: dict[str, list[str]] = {}
        for other in self.layers:
            for name in other.reads:
                readers.setdefault(name, []).append(other.name)
        reads = {other.name: other.reads for other in self.layers}
        return self._computing(layer.name, reads), self._computing(layer.name, readers)

    def _computing(self, start: str, next_to: Mapping[str, Sequence[str]]) -> tuple[str, ...]:
        conversions = {layer.name for layer in self.layers if layer.is_conversion}
        waiting, found = list(next_to.get(start, ())), dict[str, None]()
        for name in waiting:  # grows
            if name in conversions:
                waiting += [other for other in next_to.get(name, ()) if other not in waiting]
            else:
                found[name] = None
        return tuple(found)


def view_engines(
    variants: Sequence[str], builds: Path, benchmark: Path, measured: BenchmarkReport, roofs: Roofs
) -> dict[str, EngineView]:
    """Return the engines of a target that were measured and whose layers are known, by variant.

    `builds` has a `*` in place of the variant; `measured` is the report in the folder `benchmark`.
    """
    found = {}
    for variant in variants:
        layers, latency = read_layers(benchmark / variant), measured.engines[variant].latency
        if latency is not None and layers:
            manifest = read_engine_manifest(engine_folder(builds, variant))
            found[variant] = EngineView(variant, manifest, latency.at_batch_1.latency_ms_p50, layers, roofs)
    return found
