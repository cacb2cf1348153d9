"""Predict what changes of an engine would bring, from its layer times, its float twin and the measured roofs."""

import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property

from onnx import ModelProto

from tasks.parts.builders.graph_rewrites import rewrite_for
from tasks.parts.engines.runtimes import Runtime
from tasks.parts.explain.engine_view import INT8, EngineView
from tasks.parts.explain.layers import TimedLayer
from tasks.parts.explain.waterfall import LayerGroup, match_layers
from tasks.parts.onnx_graphs.graph import is_quantized
from tasks.parts.onnx_graphs.macs import layer_sizes, quantized_layers, sizes_of_one_image
from tasks.parts.roofs.roofs import Bound, limits_of
from tasks.parts.what_if.change import Change, ChangeKind, turned_on
from tasks.parts.what_if.widths import find_width_groups, with_widths

_CONVERSION_SHARE = 0.25
"""Share of the bandwidth that a conversion reaches, if the engine has none of its own to tell."""
_BYTES_CONVERTED = 5
"""Bytes that a conversion between float32 and INT8 reads and writes for each value."""
_LEAST_BYTES = 4096
"""Conversions of less tell nothing about bytes per second."""
_RANGE_OF_BATCHES = 1.1
"""How many times as long an image takes at least in OpenVINO's engines for a range of batches as in those with fixed
shapes (benchmarks/encodings.py)."""
_IDLE = 1.1
"""A layer has next to no work if it could be done in this multiple of a layer's start."""
_SWITCHES = ("stem_in_float", "token_depthwise_in_float")
"""Switches of a target that take layers of a Q/DQ graph out of INT8."""


def predict_changes(engine: EngineView, twin: EngineView | None, graph: ModelProto) -> list[Change]:
    """Return the changes that are predicted to save time, the largest saving first.

    `twin` is the float engine that a quantized one was made from, and `graph` the variant's ONNX graph. Changes of
    the same kind do not overlap.
    """
    runs = FloatRuns(engine, twin, graph) if twin is not None and is_quantized(graph) else None
    changes = [*(runs.best() if runs else ()), *other_changes(engine, runs, graph)]
    gaining = [change for change in changes if change.predicted_ms < engine.latency_ms]
    return sorted(gaining, key=lambda change: change.predicted_ms)


def other_changes(engine: EngineView, runs: "FloatRuns | None", graph: ModelProto) -> Iterator[Change]:
    """Yield changes of scheme, widths and batch, whether they are predicted to save time or not."""
    if runs is not None:
        yield from _schemes(engine, runs, graph)
    yield from _width_changes(engine, graph)
    yield _batch_of_two(engine)


def explained_share(view: EngineView) -> float:
    """Return the time of the layers and the call as a share of the latency.

    Predictions are scaled by it: a remainder, positive or negative, spreads over all layers alike.
    """
    return (view.layers_ms + view.call_ms) / view.latency_ms


class FloatRuns:
    """Runs of layers that could leave INT8, and what that would bring.

    A run is predicted to take the times of its layers in the float twin. Conversions vanish that would stand between
    float layers, and new ones appear where the run meets INT8.
    """

    def __init__(self, engine: EngineView, twin: EngineView, graph: ModelProto) -> None:
        self._engine, self._graph = engine, graph
        order = {node.name: place for place, node in enumerate(graph.graph.node)}
        self._groups = sorted(
            (group for group in match_layers(twin, engine) if group.after),
            key=lambda group: min((order.get(node, 0) for node in group.nodes), default=0),
        )
        self._scale = 1 / explained_share(engine)
        self._twin_scale = 1 / explained_share(twin)
        self._int8 = {
            place
            for place, group in enumerate(self._groups)
            if any(layer.precision == INT8 for layer in group.after)
        }
        self._gain_ms = [
            self._scale * sum(engine.times_ms[layer.name] for layer in group.after)
            - self._twin_scale * sum(twin.times_ms[layer.name] for layer in group.before)
            for group in self._groups
        ]
        self._vanishing = self._conversions(engine, self._scale, lambda group: group.after)
        self._appearing = self._conversions(twin, self._twin_scale, lambda group: group.before)

    @property
    def places(self) -> list[int]:
        """The groups of layers that run in INT8 and have a time in the float twin, in the order of the graph."""
        return [place for place in sorted(self._int8) if self._groups[place].before]

    def best(self) -> Iterator[Change]:
        """Yield the runs with the largest savings that do not overlap."""
        places = self.places
        savings_ms = {
            run: self.saving_ms(run)
            for first in range(len(places))
            for last in range(first + 1, len(places) + 1)
            if len(run := frozenset(places[first:last])) < len(places) and self.is_possible(run)
        }
        taken: set[int] = set()
        for run in sorted(savings_ms, key=lambda run: (-savings_ms[run], len(run))):
            if savings_ms[run] > 0 and not taken & run:
                taken |= run
                yield self.change(run)

    def run_of(self, nodes: Sequence[str]) -> frozenset[int]:
        """Return the run that takes these nodes out of INT8."""
        return frozenset(place for place in self.places if self._groups[place].nodes & set(nodes))

    def is_possible(self, run: frozenset[int]) -> bool:
        """Return whether the runtime computes the run in float, and all times of that are known.

        They are not if a layer beside the run is not found in the float twin. Where pairs stand on all sides of a
        layer, ONNX Runtime quantizes its weights itself (WeightBiasQuantization).
        """
        unknown, outside = self._int8.difference(self.places), self._int8 - run
        requantizes = self._engine.manifest.target.pairs_before_activations
        return not any(
            links & unknown or (requantizes and links <= outside)
            for links in (self._links.get(place, {place}) for place in run)
        )

    @cached_property
    def _links(self) -> dict[int, set[int]]:
        """The groups that read from each group or that it reads from."""
        links: dict[int, set[int]] = {}
        for source, reader, *_ in self._edges:
            links.setdefault(source, set()).add(reader)
            links.setdefault(reader, set()).add(source)
        return links

    def saving_ms(self, run: frozenset[int]) -> float:
        """Return the milliseconds that an engine saves with these groups of layers in float."""
        saving_ms = sum(self._gain_ms[place] for place in run)
        still_int8 = self._int8 - run
        for conversions, sign in ((self._vanishing, 1), (self._appearing, -1)):
            saving_ms += sign * sum(ms for sides, ms in conversions if sides & run and not sides & still_int8)
        crossed = {
            tensor: values
            for source, reader, tensor, values in self._edges
            if {source, reader} <= self._int8 and (source in run) != (reader in run)
        }
        return saving_ms - self._scale * sum(map(self._conversion_ms, crossed.values()))

    def change(self, run: frozenset[int]) -> Change:
        """Return the change that takes a run out of INT8."""
        layers = [name for place in sorted(run) for name in self._names(self._groups[place])]
        nodes = frozenset(node for place in run for node in self._groups[place].nodes)
        title = layers[0] if len(layers) == 1 else f"{len(layers)} layers from {layers[0]} to {layers[-1]}"
        return Change(
            ChangeKind.back_to_float,
            f"{title} back to float",
            self._engine.latency_ms - self.saving_ms(run),
            "none is lost",
            f"quantize_partial.keep_float=[{', '.join(layers)}]",
            nodes=nodes,
        )

    def _names(self, group: LayerGroup) -> list[str]:
        """Return the nodes of a group that have weights, or its first one."""
        own = [node.name for node in self._graph.graph.node if node.name in group.nodes]
        work = {node.name for node in quantized_layers(self._graph)}
        return [name for name in own if name in work] or own[:1]

    def _conversions(
        self, view: EngineView, scale: float, side: Callable[[LayerGroup], list[TimedLayer]]
    ) -> list[tuple[frozenset[int], float]]:
        """Return the groups between which each conversion of an engine stands, and its time."""
        places = {layer.name: place for place, group in enumerate(self._groups) for layer in side(group)}
        found = []
        for layer in view.layers:
            if layer.is_conversion:
                names = {name for names in view.neighbours(layer) for name in names}
                sides = frozenset(places[name] for name in names if name in places)
                found.append((sides, scale * view.times_ms[layer.name]))
        return found

    @cached_property
    def _edges(self) -> list[tuple[int, int, str, int]]:
        """Group that makes a tensor, group that reads it, the tensor, and its number of values."""
        nodes = self._graph.graph.node
        makers = {name: node for node in nodes for name in node.output}
        place_of = {node: place for place, group in enumerate(self._groups) for node in group.nodes}
        sizes = sizes_of_one_image(self._graph)
        edges = set()
        for node in nodes:
            if node.name not in place_of:
                continue
            for name in node.input:
                while name in makers and makers[name].name not in place_of:
                    name = makers[name].input[0] if makers[name].input else ""
                if name in makers:
                    values = math.prod(sizes.get(name, [0]))
                    source = place_of[makers[name].name]
                    if source != place_of[node.name]:
                        edges.add((source, place_of[node.name], name, values))
        return sorted(edges)

    def _conversion_ms(self, num_values: int) -> float:
        """Return what the new conversions of a tensor would take, as those do that its engine has of the same kind.

        A runtime may need several in a row, for precision and layout.
        """
        start_ms, num_bytes = start_of_layer(self._engine), _BYTES_CONVERTED * num_values
        if self._own_borders:
            count, milliseconds, moved_bytes = min(
                self._own_borders, key=lambda border: abs(border[2] - num_bytes)
            )
            own_ms = max(0.0, milliseconds - count * start_ms)
            return count * start_ms + own_ms * num_bytes / moved_bytes
        roofs = self._engine.roofs
        bandwidth = roofs.bandwidth(num_bytes).bytes_per_s.value if roofs.memory else math.inf
        return start_ms + 1000 * num_bytes / bandwidth / _CONVERSION_SHARE

    @cached_property
    def _own_borders(self) -> list[tuple[int, float, int]]:
        """The conversions in a row between a float and an INT8 layer: number, time, and bytes between precisions."""
        engine = self._engine
        layers = {layer.name: layer for layer in engine.layers}
        rows: dict[tuple[tuple[str, ...], tuple[str, ...]], list[TimedLayer]] = {}
        for layer in engine.layers:
            if layer.is_conversion:
                rows.setdefault(engine.neighbours(layer), []).append(layer)
        borders = []
        for (before, after), row in rows.items():
            are_int8 = [
                {layers[name].precision == INT8 for name in names} or {False}  # images and outputs are float
                for names in (before, after)
            ]
            moved_bytes = max(layer.moved_bytes for layer in row)
            if sorted(are_int8, key=max) == [{False}, {True}] and moved_bytes > _LEAST_BYTES:
                borders.append((len(row), sum(engine.times_ms[layer.name] for layer in row), moved_bytes))
        return borders


def start_of_layer(engine: EngineView) -> float:
    """Return the milliseconds that a layer of this engine costs before it computes anything.

    That is what its quickest layer takes that has next to no work, or the measured cost of a layer if that is more.
    """
    layer_ms = engine.roofs.layer_ms.value if engine.roofs.layer_ms else 0.0
    idle_ms = [
        row.milliseconds
        for row in engine.rows
        if row.milliseconds and row.attainable_ms is not None and row.attainable_ms < _IDLE * layer_ms
    ]
    return max(layer_ms, min(idle_ms, default=0.0))


def _schemes(engine: EngineView, runs: FloatRuns, graph: ModelProto) -> Iterator[Change]:
    """Yield what a switch of the target would bring that takes layers out of INT8."""
    target = engine.manifest.target
    now = {node.name for node in quantized_layers(rewrite_for(target, graph))}
    for switch in _SWITCHES:
        if getattr(target, switch):
            continue
        switched = turned_on(target, switch)
        left = now - {node.name for node in quantized_layers(rewrite_for(switched, graph))}
        run = runs.run_of(sorted(left))
        if run and runs.is_possible(run):
            yield Change(
                ChangeKind.scheme,
                f"{switch}: {', '.join(sorted(left))}",
                engine.latency_ms - runs.saving_ms(run),
                "none is lost",
                f"target.{target.name}.{switch}=true",
                switch=switch,
            )


def _width_changes(engine: EngineView, graph: ModelProto) -> Iterator[Change]:
    """Yield channels at a multiple of what the target wants, padded or cut."""
    multiple = engine.manifest.target.channel_multiple
    groups = [group for group in find_width_groups(graph) if group.width % multiple]
    cuttable = [group for group in groups if group.width > multiple]
    for kind, chosen in ((ChangeKind.wider, groups), (ChangeKind.narrower, cuttable)):
        widths = {
            name: -(-group.width // multiple) * multiple
            if kind is ChangeKind.wider
            else group.width // multiple * multiple
            for group in chosen
            for name in group.layers
        }
        if not widths:
            continue
        saving_ms = sum(_resized_savings_ms(engine, graph, with_widths(graph, widths)))
        was = sorted({group.width for group in chosen})
        yield Change(
            kind,
            f"{', '.join(map(str, was))} channels to multiples of {multiple}",
            engine.latency_ms - saving_ms / explained_share(engine),
            "none is lost: the same function"
            if kind is ChangeKind.wider
            else "unknown: the network has to be pruned and trained again",
            f"prune.channel_multiple={multiple}"
            if kind is ChangeKind.narrower
            else "pad the weights with zeros",
            widths=widths,
        )


def _resized_savings_ms(engine: EngineView, graph: ModelProto, resized: ModelProto) -> Iterator[float]:
    """Yield what each layer saves with other widths: the time beside its start follows the work.

    A convolution that gets more work is predicted to reach the share of its roof that those with full registers
    reach in this engine; without any such, it takes longer.
    """
    before, after = layer_sizes(graph), layer_sizes(resized)
    values, new_values = (_num_values(model) for model in (graph, resized))
    start_ms = start_of_layer(engine)
    for layer in engine.layers:
        milliseconds = engine.times_ms[layer.name]
        work = next((node for node in layer.nodes if node in before), None)
        if work is not None and before[work] != after[work]:
            ratio = after[work].macs / max(1, before[work].macs)
            share = _share_of_roof(engine, layer)
            if ratio > 1 and share is not None:
                limits = limits_of(
                    engine.roofs,
                    precision=layer.precision,
                    macs=round(layer.macs * ratio),
                    moved_bytes=round(layer.moved_bytes * ratio**0.5),
                    is_depthwise=layer.is_depthwise,
                )
                yield milliseconds - limits.attainable_ms / share
                continue
        else:
            ratios = [new_values[node] / values[node] for node in layer.nodes if values.get(node)]
            ratio = ratios[-1] if ratios else 1.0
        yield (1 - ratio) * max(0.0, milliseconds - start_ms)


def _num_values(model: ModelProto) -> dict[str, int]:
    """Return the number of values that each node writes."""
    sizes = sizes_of_one_image(model)
    return {node.name: math.prod(sizes.get(node.output[0], [0])) for node in model.graph.node}


def _share_of_roof(engine: EngineView, like: TimedLayer) -> float | None:
    """Return the typical share of the roof of convolutions like this one whose channels fill the registers."""
    multiple = engine.manifest.target.channel_multiple
    rows = {row.layer: row for row in engine.rows}
    shares = [
        share
        for layer in engine.layers
        if layer.macs
        and layer.precision == like.precision
        and layer.is_depthwise == like.is_depthwise
        and layer.channels_in
        and layer.channels_out
        and layer.channels_in % multiple == layer.channels_out % multiple == 0
        and (share := rows[layer.name].share_of_roof) is not None
    ]
    return statistics.median(shares) if shares else None


def _batch_of_two(engine: EngineView) -> Change:
    """Return what two images in one call would bring: half of the starts, and weights that are read once for both."""
    target, start_ms = engine.manifest.target, start_of_layer(engine)
    is_fixed = target.runtime is Runtime.openvino and target.max_batch == 1
    saving_ms = engine.call_ms / 2
    for row, layer in zip(engine.rows, engine.layers, strict=True):
        own_ms = max(0.0, row.milliseconds - start_ms)
        saving_ms += (row.milliseconds - own_ms) / 2
        if row.bound is Bound.memory and layer.moved_bytes:
            saving_ms += own_ms * (layer.weight_bytes or 0) / layer.moved_bytes / 2
    return Change(
        ChangeKind.batch,
        "two images in one call",
        (engine.latency_ms - saving_ms / explained_share(engine)) * (_RANGE_OF_BATCHES if is_fixed else 1),
        "none is lost; each image waits for the other one",
        f"target.{target.name}.max_batch=2",
        batch=2,
    )
