"""Make the batch that a graph of another tool fixes dynamic.

The axis that holds the batch, maybe united with windows, heads or places, is followed from the input on. Numbers that
stand for it in constants are replaced: in the shape of a Reshape or an Expand, in the size of a Resize, and in
constants that were repeated for each image. Only running the graph shows whether that was enough.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from onnx import GraphProto, ModelProto, NodeProto, helper, numpy_helper

from tasks.parts.onnx_graphs.foreign_custom import infer_custom_outputs
from tasks.parts.onnx_graphs.foreign_inputs import sizes_of
from tasks.parts.onnx_graphs.foreign_size import scale_resizes
from tasks.parts.onnx_graphs.graph import drop_unused, read_attribute, read_shapes

_BROADCASTS = {"Add", "Sub", "Mul", "Div", "Where", "Pow", "Max", "Min", "MatMul"}
Place = tuple[int, int]
"""Axis that holds the batch, and how many parts of this axis stand in front of it."""
_DROPS_AXES = {"Squeeze", "ReduceMean", "ReduceSum", "ReduceMax", "ReduceMin", "ReduceProd", "ReduceL2"}


def free_batch(model: ModelProto, static_batch: int, batch: str) -> int:
    """Make the batch dynamic, in place, and call it `batch`; return how many constants were rewritten."""
    graph = model.graph
    scale_resizes(model)
    graph.value_info.extend(infer_custom_outputs(model, [static_batch], batch))
    inferred = read_shapes(model, data_prop=True)
    sizes = {value.name: sizes_of(value) for value in (*inferred.value_info, *inferred.output, *graph.input)}
    constants = {tensor.name: numpy_helper.to_array(tensor) for tensor in graph.initializer}
    sizes |= {name: list(value.shape) for name, value in constants.items()}
    places: dict[str, Place] = {graph.input[0].name: (0, 1)}
    from_image, num_rewritten = {graph.input[0].name}, 0
    for node in list(graph.node):
        reads = [name for name in node.input if name in from_image]
        if not reads:
            continue
        from_image.update(node.output)
        for name in reads:  # where the axis was lost, it is taken up again
            if name not in places and (sizes.get(name) or [0])[0] == static_batch:
                places[name] = (0, 1)
        source = next((name for name in reads if name in places), None)
        if source is None or not all(name in sizes for name in (source, node.output[0])):
            continue
        before, after = sizes[source], sizes[node.output[0]]
        place = _follow(node, places[source], before, after, constants, static_batch)
        if place is None:
            continue
        places.update(dict.fromkeys(node.output, place))
        num_rewritten += _rewrite(
            graph, node, source, (places[source], place), (before, after), constants, static_batch
        )
    graph.input[0].type.tensor_type.shape.dim[0].dim_param = batch
    drop_unused(graph)
    return num_rewritten


def _follow(
    node: NodeProto,
    place: Place,
    before: Sequence[int],
    after: Sequence[int],
    constants: Mapping[str, NDArray[Any]],
    batch: int,
) -> Place | None:
    """Return the place of the batch behind a node; None where it is gone, or not known."""
    kind, (axis, outer) = node.op_type, place
    if kind == "Transpose":
        return list(read_attribute(node, "perm", range(len(before))[::-1])).index(axis), outer
    if kind in ("Reshape", "Flatten"):
        return _regrouped(place, before, after, batch)
    if len(before) == len(after):
        return place
    if kind == "Unsqueeze":
        added = _axes(node, constants, len(after))
        return [index for index in range(len(after)) if index not in added][axis], outer
    if kind in _DROPS_AXES or (kind == "Gather" and len(after) == len(before) - 1):
        at = [read_attribute(node, "axis", 0)] if kind == "Gather" else _axes(node, constants, len(before))
        dropped = {index % len(before) for index in at}
        return None if axis in dropped else (axis - sum(index < axis for index in dropped), outer)
    if kind in _BROADCASTS:
        return axis + len(after) - len(before), outer
    return None


def _regrouped(place: Place, before: Sequence[int], after: Sequence[int], batch: int) -> Place | None:
    """Return the place that begins behind as many values as the batch did, in the order of memory.

    A batch of 1 leaves open with which of its neighbours it was united: with those before it where axes were united,
    [T, 1, C] to [T, C], as in a layer on all places at once, else with those behind it, as in heads of attention.
    """
    axis, outer = place
    if not all(before) or not all(after):
        return (0, 1) if place == (0, 1) else None
    offset = math.prod(before[:axis]) * outer
    starts = [math.prod(after[:index]) for index in range(len(after))]
    found = [
        (index, offset // start)
        for index, start in enumerate(starts)
        if offset % start == 0 and after[index] % (offset // start * batch) == 0
    ]
    is_united = len(after) < len(before)

    def unlikeness(place: Place) -> tuple[bool, bool]:
        index, outer = place
        return not (outer == 1 and after[index] == batch), (outer == 1) == is_united

    return min(found, key=unlikeness, default=None)


def _rewrite(
    graph: GraphProto,
    node: NodeProto,
    source: str,
    places: tuple[Place, Place],
    sizes: tuple[Sequence[int], Sequence[int]],
    constants: Mapping[str, NDArray[Any]],
    batch: int,
) -> int:
    """Replace the batch in the constants of a node; return how many there were."""
    (before, after), (axis, outer) = sizes, places[1]
    if node.op_type in ("Reshape", "Expand") and node.input[1] in constants:
        shape = constants[node.input[1]].copy()
        if axis >= len(shape) or shape[axis] <= 0:
            return 0
        if node.op_type == "Expand":
            shape[axis] = 1  # is broadcast to what it is already
        elif (
            places[0] == places[1]
            and before[axis] == after[axis]
            and not read_attribute(node, "allowzero", 0)
        ):
            shape[axis] = 0  # as in the input
        else:
            shape = np.where(shape == -1, np.array(after), shape)
            shape[axis] = -1
        node.input[1] = _constant(graph, f"{node.output[0]}:shape", shape)
        return 1
    if outer != 1:
        return 0
    num_rewritten = 0
    for index, name in enumerate(node.input):
        values = constants.get(name)
        own = axis - len(after) + values.ndim if values is not None else -1
        if values is None or own < 0:
            continue
        num_parts = values.shape[own] // batch
        if num_parts > 1 and node.op_type in _BROADCASTS - {"MatMul"} and list(before) == list(after):
            if values.shape[own] == after[axis] and _is_repeated(values, own, num_parts):
                _split_parts(
                    graph, node, source, index, values.take(range(num_parts), axis=own), own, axis, after
                )
                num_rewritten += 1
            continue
        if values.shape[own] != batch or not _is_repeated(values, own, 1):
            continue
        once = values.take([0], axis=own)
        if node.op_type == "Concat" and read_attribute(node, "axis", 0) % len(after) != axis:
            node.input[index] = _expand(graph, node, source, once, own, index)
        elif node.op_type in _BROADCASTS and batch > 1:
            node.input[index] = _constant(graph, f"{node.output[0]}:once{index}", once)
        else:
            continue
        num_rewritten += 1
    return num_rewritten


def _expand(
    graph: GraphProto, node: NodeProto, source: str, once: NDArray[Any], axis: int, index: int
) -> str:
    """Put nodes in front of one that repeat a constant for each image of the batch of `source`."""
    name = f"{node.output[0]}:each{index}"
    ones = np.ones(once.ndim, np.int64)
    parts = [_constant(graph, f"{name}:before", ones[:axis]), f"{name}:batch"]
    parts.append(_constant(graph, f"{name}:after", ones[axis + 1 :]))
    nodes = [
        helper.make_node("Shape", [source], [f"{name}:sizes"], f"{name}:sizes"),
        helper.make_node(
            "Gather",
            [f"{name}:sizes", _constant(graph, f"{name}:axis", np.array([axis]))],
            [f"{name}:batch"],
            f"{name}:batch",
        ),
        helper.make_node("Concat", parts, [f"{name}:shape"], f"{name}:shape", axis=0),
        helper.make_node("Expand", [_constant(graph, f"{name}:once", once), f"{name}:shape"], [name], name),
    ]
    place = list(graph.node).index(node)
    for new in reversed(nodes):
        graph.node.insert(place, new)
    return name


def _split_parts(
    graph: GraphProto,
    node: NodeProto,
    source: str,
    index: int,
    once: NDArray[Any],
    own: int,
    axis: int,
    sizes: Sequence[int],
) -> None:
    """Give the parts of each image an axis of their own around a node that reads a constant for each part.

    So masks of windows are added in Swin, whose windows are images of the batch.
    """
    output, number = node.output[0], once.shape[own]
    name, united = f"{output}:parts", [*sizes[:axis], -1, *sizes[axis + 1 :]]
    split = [*sizes[:axis], -1, number, *sizes[axis + 1 :]]
    shapes = [
        _constant(graph, f"{name}:{kind}", np.array(sizes))
        for kind, sizes in (("split", split), ("united", united))
    ]
    place = list(graph.node).index(node)
    node.input[index] = _constant(graph, f"{name}:constant", np.expand_dims(once, own))
    node.input[list(node.input).index(source)] = f"{name}:before"
    node.output[0] = f"{name}:after"
    graph.node.insert(
        place + 1, helper.make_node("Reshape", [f"{name}:after", shapes[1]], [output], f"{name}:united")
    )
    graph.node.insert(
        place, helper.make_node("Reshape", [source, shapes[0]], [f"{name}:before"], f"{name}:split")
    )


def _is_repeated(values: NDArray[Any], axis: int, period: int) -> bool:
    first = values.take(range(period), axis=axis)
    repeats = [values.shape[axis] // period if index == axis else 1 for index in range(values.ndim)]
    return bool((values == np.tile(first, repeats)).all())


def _axes(node: NodeProto, constants: Mapping[str, NDArray[Any]], rank: int) -> list[int]:
    """Return the axes that a node adds or takes away, as an attribute or, in newer opsets, as an input."""
    given = constants.get(node.input[1]) if len(node.input) > 1 else read_attribute(node, "axes", ())
    return [] if given is None else [int(axis) % rank for axis in given]


def _constant(graph: GraphProto, name: str, value: NDArray[Any]) -> str:
    graph.initializer.append(numpy_helper.from_array(value, name))
    return name
