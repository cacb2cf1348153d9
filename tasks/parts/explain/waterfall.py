"""The difference of two engines in milliseconds, layer by layer: a waterfall that sums to what was measured."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from tasks.parts.explain.engine_view import INT8, EngineView
from tasks.parts.explain.layers import TimedLayer
from tasks.parts.roofs.roofs import Bound


class Part(StrEnum):
    """Where a difference comes from."""

    faster_layers = "faster_layers"
    left_in_float = "left_in_float"
    conversions = "conversions"
    fusions_lost = "fusions_lost"
    slower_layers = "slower_layers"
    overhead = "overhead"
    """Layers whose time is the start of a layer in both engines."""
    remainder = "remainder"
    """What the layers do not explain: the call, and what the profiler itself adds."""


@dataclass(frozen=True)
class Step:
    """A row of a waterfall."""

    part: Part
    before: str
    """Layers of the first engine, separated by tabs; empty if it has none of these."""
    after: str
    milliseconds: float
    """Time in the second engine minus time in the first one."""


def compare(before: EngineView, after: EngineView) -> tuple[Step, ...]:
    """Return what makes the second engine faster or slower, the largest differences first within each part.

    Layers belong together if they compute the same ONNX nodes. The steps sum to the difference of the latencies.
    """
    steps = [_conversion(before, layer, -1) for layer in before.layers if layer.is_conversion]
    steps += [_conversion(after, layer, 1) for layer in after.layers if layer.is_conversion]
    for group in match_layers(before, after):
        steps += _compare_layers(before, after, group.before, group.after)
    difference_ms = after.latency_ms - before.latency_ms
    steps.append(Step(Part.remainder, "", "", difference_ms - sum(step.milliseconds for step in steps)))
    order = list(Part)
    return tuple(sorted(steps, key=lambda step: (order.index(step.part), -abs(step.milliseconds))))


def sum_parts(steps: Sequence[Step]) -> dict[str, float]:
    """Return the milliseconds of each part."""
    sums = dict.fromkeys((part.value for part in Part), 0.0)
    for step in steps:
        sums[step.part.value] += step.milliseconds
    return sums


def _conversion(view: EngineView, layer: TimedLayer, sign: int) -> Step:
    names = (layer.name, "") if sign < 0 else ("", layer.name)
    return Step(Part.conversions, *names, sign * view.times_ms[layer.name])


@dataclass
class LayerGroup:
    """Layers of two engines that compute the same nodes."""

    nodes: set[str]
    before: list[TimedLayer]
    after: list[TimedLayer]


def match_layers(before: EngineView, after: EngineView) -> list[LayerGroup]:
    """Return the layers of both engines that compute the same nodes, in the order of the first engine.

    Conversions belong to none of them.
    """
    groups: list[LayerGroup] = []
    both = [(layer, True) for layer in before.layers] + [(layer, False) for layer in after.layers]
    for layer, is_before in both:
        if layer.is_conversion:
            continue
        group = LayerGroup(set(layer.nodes), [layer] if is_before else [], [] if is_before else [layer])
        shared = [other for other in groups if other.nodes & group.nodes]
        place = groups.index(shared[0]) if shared else len(groups)
        for other in reversed(shared):
            group.nodes |= other.nodes
            group.before, group.after = other.before + group.before, other.after + group.after
            groups.remove(other)
        groups.insert(place, group)
    return groups


def _compare_layers(
    before: EngineView, after: EngineView, ours: Sequence[TimedLayer], theirs: Sequence[TimedLayer]
) -> list[Step]:
    """Return the steps of layers that compute the same nodes."""
    fused = {node for layer in ours if layer.macs for node in layer.nodes}
    lost = [layer for layer in theirs if not layer.macs and layer.nodes and fused.issuperset(layer.nodes)]
    steps = [Step(Part.fusions_lost, "", layer.name, after.times_ms[layer.name]) for layer in lost]
    kept = [layer for layer in theirs if layer not in lost]
    difference_ms = sum(after.times_ms[layer.name] for layer in kept) - sum(
        before.times_ms[layer.name] for layer in ours
    )
    names = ("\t".join(layer.name for layer in ours), "\t".join(layer.name for layer in kept))
    return [*steps, Step(_part_of(before, after, ours, kept, difference_ms), *names, difference_ms)]


def _part_of(
    before: EngineView,
    after: EngineView,
    ours: Sequence[TimedLayer],
    theirs: Sequence[TimedLayer],
    difference_ms: float,
) -> Part:
    bounds = [before.bounds[layer.name] for layer in ours] + [after.bounds[layer.name] for layer in theirs]
    if ours and theirs and set(bounds) == {Bound.overhead}:
        return Part.overhead
    is_lowered = after.manifest.is_quantized and not before.manifest.is_quantized
    if is_lowered and theirs and all(layer.precision != INT8 for layer in theirs):
        return Part.left_in_float
    return Part.faster_layers if difference_ms < 0 else Part.slower_layers
