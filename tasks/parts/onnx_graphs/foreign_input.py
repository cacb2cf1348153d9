"""Bring the input of a foreign graph to the form of this pipeline: float32 [N, C, H, W], normalised by the card.

What the graph computes with the pixels before its first layer becomes a part of the card's mean and std. What is left
is folded into the weights of a first convolution, or becomes nodes in front of the graph.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from onnx import GraphProto, ModelProto, NodeProto, TensorProto, ValueInfoProto, helper, numpy_helper

from tasks.core.errors import ArtifactError
from tasks.parts.onnx_graphs.foreign_form import ChannelOrder, InputForm, Layout, Values
from tasks.parts.onnx_graphs.foreign_inputs import (
    describe,
    drop_unread_inputs,
    sizes_of,
    ways_to_one_input,
)
from tasks.parts.onnx_graphs.graph import MOVES_VALUES, drop_unused

_KINDS = {TensorProto.FLOAT: "float32", TensorProto.UINT8: "uint8"}
_MOVES = MOVES_VALUES | {"Concat", "Gather"}
"""Operators that move values without looking at them."""
_TO_CHANNELS_FIRST, _TO_CHANNELS_LAST = [0, 3, 1, 2], [0, 2, 3, 1]
_LARGEST_INPUT = 20.0
"""Inputs that reach higher are divided by 255. Calibration refuses them (quantize_ptq.max_abs_input)."""


@dataclass(frozen=True)
class Normalised:
    """The normalisation that the rewritten graph expects, in the order of the data set's channels."""

    mean: tuple[float, ...]
    std: tuple[float, ...]
    changes: tuple[str, ...]
    """One sentence for each change of the graph."""


def find_image(model: ModelProto, path: Path, form: InputForm) -> ValueInfoProto:
    """Return the only input that a node reads; inputs that no node reads are removed.

    Raises ArtifactError for a graph whose inputs are not one image in the declared form.
    """
    drop_unread_inputs(model)
    inputs = list(model.graph.input)
    found = ", ".join(f"'{value.name}' {describe(value)}" for value in inputs[:4])
    axes = ["N", "height", "width"]
    axes.insert(form.axes[0], str(form.num_channels))
    expected = (
        f"float32, float16 or uint8 [{', '.join(axes)}] (model.layout={form.layout}, N fixed or dynamic)"
    )
    if len(inputs) != 1:
        raise ArtifactError(
            f"{path}: {len(inputs)} inputs ({found}), expected one image: {expected}. "
            f"{ways_to_one_input(model, path)}"
        )
    kept = ValueInfoProto()
    kept.CopyFrom(inputs[0])
    del model.graph.input[:]
    model.graph.input.append(kept)
    image: ValueInfoProto = model.graph.input[0]
    kind, sizes = image.type.tensor_type.elem_type, [max(0, size) for size in sizes_of(image)]
    if kind not in _KINDS or len(sizes) != 4:
        raise ArtifactError(
            f"{path}: the input is {found}, expected {expected}. Export the model without the preprocessing before "
            "it."
        )
    channels, other = sizes[form.axes[0]], sizes[4 - form.axes[0]]
    if channels not in (0, form.num_channels):
        layout = Layout.nhwc if form.layout is Layout.nchw else Layout.nchw
        hint = f" It looks like model.layout={layout}." if other == form.num_channels else ""
        raise ArtifactError(f"{path}: the input is {found}, expected {expected}.{hint}")
    if kind == TensorProto.UINT8 and form.values is not Values.byte:
        raise ArtifactError(
            f"{path}: the input is {found}, and model.values is {form.values}; uint8 holds 0..255. Set "
            "model.values=byte; what the graph does with the values, it does itself."
        )
    return image


def normalise_input(model: ModelProto, path: Path, form: InputForm) -> Normalised:
    """Bring the input to float32 [N, C, H, W], in place, and return the mean and std that it then expects.

    Raises ArtifactError for an input of uint8 that is read by an operator which computes with integers.
    """
    graph = model.graph
    if graph.input[0].type.tensor_type.elem_type == TensorProto.UINT8:
        _check_reads_floats(graph, path)
    changes = []
    absorbed, layout, gain_C, shift_C = _absorb(graph, form)
    if absorbed:
        changes.append(f"{', '.join(absorbed)} of the input taken over by mean and std, or by the layout")
    is_reversed = form.channel_order is ChannelOrder.bgr
    if is_reversed:
        gain_C, shift_C = gain_C[::-1], shift_C[::-1]
    mean_C, std_C = (np.array(values) for values in form.normalisation)
    mean_C, std_C = mean_C - shift_C * std_C / gain_C, std_C / gain_C
    factor = 1.0
    if max(np.abs(mean_C / std_C).max(), np.abs((1 - mean_C) / std_C).max()) > _LARGEST_INPUT:
        factor = 255.0
        std_C = std_C * factor
        changes.append("input divided by 255, weights multiplied by it")
    if is_reversed:
        changes.append("input in the order RGB")
    if (is_reversed or factor != 1) and not _fold(graph, factor, is_reversed, layout):
        _prepend(graph, factor, is_reversed)
    if layout is Layout.nhwc:
        _put_in_front(graph, "Transpose", [], perm=_TO_CHANNELS_LAST)
        changes.append("input transposed from [N, C, H, W] to [N, H, W, C]")
    _set_shape(graph, form)
    drop_unused(graph)
    del graph.value_info[:]
    return Normalised(tuple(mean_C.tolist()), tuple(std_C.tolist()), tuple(changes))


def _check_reads_floats(graph: GraphProto, path: Path) -> None:
    """Refuse operators that compute with the bytes of the input; floats move and become floats as bytes do."""
    pixels = {graph.input[0].name}
    for node in graph.node:
        if not pixels & set(node.input):
            continue
        if node.op_type in _MOVES:
            pixels.update(node.output)
        elif node.op_type != "Cast" or helper.get_node_attr_value(node, "to") != TensorProto.FLOAT:
            raise ArtifactError(
                f"{path}: node '{node.name}' ({node.op_type}) reads the uint8 input, expected a Cast to float32 or "
                f"operators that only move values ({', '.join(sorted(_MOVES))}). Export the model without the "
                "preprocessing before it."
            )


def _absorb(
    graph: GraphProto, form: InputForm
) -> tuple[list[str], Layout, NDArray[np.float64], NDArray[np.float64]]:
    """Remove the casts, transpositions and per-channel arithmetic that the input goes through first.

    Returns the operators, the layout after them, and their result as gain_C * input + shift_C.
    """
    constants = {tensor.name: numpy_helper.to_array(tensor) for tensor in graph.initializer}
    image, layout = graph.input[0].name, form.layout
    gain_C, shift_C = np.ones(form.num_channels), np.zeros(form.num_channels)
    absorbed: list[str] = []
    while len(readers := [node for node in graph.node if image in node.input]) == 1:
        [node] = readers
        if node.output[0] in {value.name for value in graph.output}:
            break
        if node.op_type == "Transpose":
            if layout is Layout.nchw or helper.get_node_attr_value(node, "perm") != _TO_CHANNELS_FIRST:
                break
            layout = Layout.nchw
        elif node.op_type != "Cast" or helper.get_node_attr_value(node, "to") != TensorProto.FLOAT:
            step = _affine(node, image, constants, layout, form.num_channels)
            if step is None:
                break
            gain_C, shift_C = gain_C * step[0], shift_C * step[0] + step[1]
        absorbed.append(node.op_type)
        graph.node.remove(node)
        _rename(graph, node.output[0], image)
    return absorbed, layout, gain_C, shift_C


def _affine(
    node: NodeProto, image: str, constants: dict[str, NDArray[Any]], layout: Layout, num_channels: int
) -> tuple[NDArray[np.float64], NDArray[np.float64]] | None:
    """Return gain and shift [C] of a node that computes with each channel alone; None for any other node."""
    if node.op_type not in ("Add", "Sub", "Mul", "Div"):
        return None
    is_first = node.input[0] == image
    other = node.input[1] if is_first else node.input[0]
    if other not in constants or (not is_first and node.op_type in ("Sub", "Div")):
        return None
    value_C = _per_channel(constants[other].astype(np.float64), layout, num_channels)
    if value_C is None:
        return None
    ones_C, zeros_C = np.ones(num_channels), np.zeros(num_channels)
    if node.op_type in ("Add", "Sub"):
        return ones_C, value_C if node.op_type == "Add" else -value_C
    if not (value_C > 0).all():
        return None
    return (value_C if node.op_type == "Mul" else 1 / value_C), zeros_C


def _per_channel(value: NDArray[np.float64], layout: Layout, num_channels: int) -> NDArray[np.float64] | None:
    """Return a constant as [C] if it is the same for all pixels, else None."""
    axis = 1 if layout is Layout.nchw else 3
    sizes = (1,) * (4 - value.ndim) + value.shape
    if len(sizes) != 4 or sizes[axis] not in (1, num_channels) or value.size != sizes[axis]:
        return None
    return np.broadcast_to(value.reshape(-1), (num_channels,))


def _fold(graph: GraphProto, factor: float, is_reversed: bool, layout: Layout) -> bool:
    """Put the factor and the order of the channels into the weights of the first convolution, if it alone reads."""
    image = graph.input[0].name
    readers = [node for node in graph.node if image in node.input]
    weights = {tensor.name: tensor for tensor in graph.initializer}
    if len(readers) != 1 or readers[0].op_type != "Conv" or layout is Layout.nhwc:
        return False
    [conv] = readers
    groups = {item.name: item.i for item in conv.attribute}.get("group", 1)
    if conv.input[1] not in weights or groups != 1:
        return False
    values_OIHW = numpy_helper.to_array(weights[conv.input[1]]) * np.float32(factor)
    if is_reversed:
        values_OIHW = np.ascontiguousarray(values_OIHW[:, ::-1])
    name = f"{conv.input[1]}:input"
    graph.initializer.append(numpy_helper.from_array(values_OIHW, name))
    conv.input[1] = name
    return True


def _prepend(graph: GraphProto, factor: float, is_reversed: bool) -> None:
    """Undo the factor and the order of the channels by nodes; the last one added comes first in the graph."""
    if factor != 1:
        _put_in_front(graph, "Mul", [np.float32(factor)])
    if is_reversed:
        _put_in_front(graph, "Gather", [np.array([2, 1, 0])], axis=1)


def _put_in_front(graph: GraphProto, operator: str, constants: list[Any], **attributes: Any) -> None:
    """Insert a node between the input and everything that reads it."""
    image = graph.input[0].name
    name = f"{image}:{operator.lower()}"
    _rename(graph, image, name)
    names = [f"{name}:constant" for _ in constants]
    for constant, value in zip(names, constants, strict=True):
        graph.initializer.append(numpy_helper.from_array(np.asarray(value), constant))
    graph.node.insert(0, helper.make_node(operator, [image, *names], [name], name, **attributes))


def _rename(graph: GraphProto, old: str, new: str) -> None:
    """Let all nodes that read `old` read `new`."""
    for node in graph.node:
        node.input[:] = [new if name == old else name for name in node.input]


def _set_shape(graph: GraphProto, form: InputForm) -> None:
    """Declare the input as float32 [N, C, H, W], with the batch as it was."""
    kind = graph.input[0].type.tensor_type
    dims = list(kind.shape.dim)
    kind.elem_type = TensorProto.FLOAT
    kind.shape.ClearField("dim")
    kind.shape.dim.extend([dims[0], *(dims[axis] for axis in form.axes)])
