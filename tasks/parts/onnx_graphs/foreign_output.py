"""Turn the output of a foreign graph into class logits: [batch, C], or [batch, C, H, W] of the image's size.

Values that are no classes stay as they are, [batch, ...].

N or batch images, C classes, H rows, W columns.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import GraphProto, ModelProto, NodeProto, TensorProto, ValueInfoProto, helper, numpy_helper

from tasks.core.errors import ArtifactError
from tasks.parts.data.dataset import MAX_CLASSES
from tasks.parts.data.input_card import Task
from tasks.parts.onnx_graphs.foreign_form import Layout
from tasks.parts.onnx_graphs.foreign_inputs import describe, sizes_of
from tasks.parts.onnx_graphs.graph import MOVES_VALUES, drop_unused, read_shapes, resize_scale

ALL_OUTPUTS = "*"
"""Instead of a name: all outputs."""
_JOINED = "joined_outputs"
_CHANNEL_AXIS = {"Conv": 0, "ConvTranspose": 1}
"""Axis of the output channels in the weights."""


class OutputKind(StrEnum):
    """What the output of a file means."""

    classes = "classes"
    """Logits or probabilities of classes, for the image or for each pixel."""
    values = "values"
    """Numbers of any shape that are no classes."""


@dataclass(frozen=True)
class OutputForm:
    """The output of a file, as its user declares it."""

    name: str | None
    """Name of the output; None: the only one; ALL_OUTPUTS: all of them."""
    layout: Layout
    """Order of the axes of an output with four."""
    threshold: float | None
    """Value of an output with one channel above which an image or a pixel is of the second class; None: the output
    has a channel for each class."""
    kind: OutputKind = OutputKind.classes


@dataclass(frozen=True)
class Head:
    """The output of a rewritten graph, and how the file's own answer follows from it."""

    task: Task
    num_classes: int
    """0 for values."""
    tensor: str
    """Logits in the rewritten graph, before they are resized or flattened; or the values."""
    layout: Layout
    zero_logit: float | None
    """Logit of the file at its threshold, for an output of one channel."""
    is_probability: bool
    """Whether this one channel is a sigmoid."""
    changes: tuple[str, ...]
    """One sentence for each change of the graph."""

    def to_answer(self, logits: NDArray[np.float32]) -> NDArray[Any]:
        """Turn `tensor` into what the file answers."""
        answer: NDArray[Any] = logits
        if self.zero_logit is not None:
            answer = logits[:, 1:] - logits[:, :1] + self.zero_logit
        if self.is_probability:
            answer = 1 / (1 + np.exp(-answer))
        return np.moveaxis(answer, 1, -1) if self.layout is Layout.nhwc and answer.ndim == 4 else answer

    def classes(self, answer: NDArray[Any]) -> NDArray[Any]:
        """Return the class of each image or pixel in what the file answers."""
        if self.zero_logit is not None:
            threshold = 1 / (1 + math.exp(-self.zero_logit)) if self.is_probability else self.zero_logit
            return answer > threshold
        classes: NDArray[Any] = answer.argmax(
            axis=-1 if self.layout is Layout.nhwc and answer.ndim == 4 else 1
        )
        return classes


def kept_outputs(model: ModelProto, path: Path, output: str | None) -> tuple[str, ...]:
    """Return the names of the outputs that are kept; `output` may also name a tensor inside the graph.

    Raises ArtifactError if the choice is open, or there is no such tensor.
    """
    outputs = {value.name: value for value in model.graph.output}
    listing = ", ".join(f"'{name}' {describe(value)}" for name, value in outputs.items())
    first = next(iter(outputs))
    if output is None and len(outputs) > 1:
        raise ArtifactError(
            f"{path}: {len(outputs)} outputs ({listing}). Name the one to measure, with the logits: "
            f"model.output={first}. Or keep all as values: model.output={ALL_OUTPUTS} model.output_kind=values."
        )
    if output in (None, ALL_OUTPUTS):
        return tuple(outputs)
    if output not in outputs and not _maker(model.graph, str(output)).op_type:
        raise ArtifactError(
            f"{path}: has no output '{output}', and no node makes a tensor of this name (model.output); found: "
            f"{listing}."
        )
    return (str(output),)


def choose_output(model: ModelProto, path: Path, output: str | None) -> tuple[str, ...]:
    """Keep one output, drop the others and what only they need; or join all. Return the names that are kept.

    Raises ArtifactError if the choice is open, or an output holds no floats.
    """
    kept = kept_outputs(model, path, output)
    outputs = {value.name: value for value in model.graph.output}
    if kept[0] not in outputs:
        outputs[kept[0]] = _inner(model, kept[0])
    for chosen in (outputs[name] for name in kept):
        if chosen.type.tensor_type.elem_type != TensorProto.FLOAT:
            raise ArtifactError(
                f"{path}: output '{chosen.name}' is {describe(chosen)}, expected float32 or float16 logits. "
                f"{_advice(model.graph, chosen.name)}"
            )
    if len(kept) > 1:
        _join_outputs(model.graph, kept)
        return kept
    only = ValueInfoProto()
    only.CopyFrom(outputs[kept[0]])
    del model.graph.output[:]
    model.graph.output.append(only)
    drop_unused(model.graph)
    return kept


def _inner(model: ModelProto, name: str) -> ValueInfoProto:
    """Return the type of a tensor inside the graph as far as it is known; float32 if nothing is."""
    known = read_shapes(model).value_info
    declared = helper.make_tensor_value_info(name, TensorProto.FLOAT, None)
    return next((value for value in known if value.name == name), declared)


def _advice(graph: GraphProto, name: str) -> str:
    """Name the logits behind which an output of answers was chosen, or else the ways out."""
    while (node := _maker(graph, name)).op_type in (*MOVES_VALUES, "Cast"):
        name = node.input[0]
    if node.op_type == "ArgMax":
        return f"Set model.output={node.input[0]}, the logits in front of the ArgMax '{node.name or name}'."
    return (
        "Export the model without the cast at its end, or name another output or a tensor inside the graph "
        "(model.output)."
    )


def _join_outputs(graph: GraphProto, names: Sequence[str]) -> None:
    """Make one output [N, values] of several: each is flattened and joined to the next."""
    flat = [f"{name}:flat" for name in names]
    for name, flattened in zip(names, flat, strict=True):
        graph.node.append(helper.make_node("Flatten", [name], [flattened], flattened, axis=1))
    _append(graph, helper.make_node("Concat", flat, [_JOINED], _JOINED, axis=1))


def rewrite_head(model: ModelProto, path: Path, form: OutputForm) -> Head:
    """Derive the task from the shape of the output, and turn the output into logits, in place.

    Raises ArtifactError for an output that cannot be logits, or that contradicts `form`.
    """
    graph = model.graph
    sizes, image = sizes_of(graph.output[0]), sizes_of(graph.input[0])
    found = f"{path}: output '{graph.output[0].name}' is {describe(graph.output[0])}"
    if form.kind is OutputKind.values:
        _check_values(sizes, found, form)
        return Head(Task.values, 0, graph.output[0].name, Layout.nchw, None, False, ())
    changes = []
    if len(sizes) == 4 and form.layout is Layout.nhwc:
        _channels_first(graph)
        sizes = [sizes[0], sizes[3], sizes[1], sizes[2]]
        changes.append("output transposed from [N, H, W, C] to [N, C, H, W]")
    _check_sizes(sizes, image, found, form)
    num_classes, size = sizes[1], tuple(sizes[2:])
    zero_logit, is_probability = None, False
    if form.threshold is not None:
        zero_logit, is_probability = _two_classes(graph, len(sizes), form.threshold)
        num_classes = 2
        kind = "probability" if is_probability else "value"
        changes.append(f"output of one channel, a {kind}, turned into the logits of two classes")
    tensor = graph.output[0].name
    task = Task.classification if len(sizes) == 2 or size == (1, 1) else Task.segmentation
    if size == (1, 1):
        name = f"{tensor}:classes"
        _append(graph, helper.make_node("Flatten", [tensor], [name], name, axis=1))
        changes.append("logits [N, C, 1, 1] flattened to [N, C]")
    elif task is Task.segmentation and size != tuple(image[2:]):
        _resize(graph, size, image[2:])
        changes.append(f"logits of {size[0]}x{size[1]} resized bilinearly to {image[2]}x{image[3]}")
    return Head(task, num_classes, tensor, form.layout, zero_logit, is_probability, tuple(changes))


def check_output(value: ValueInfoProto, image_NCHW: Sequence[int], path: Path, form: OutputForm) -> None:
    """Raise the same errors as `rewrite_head` for an output whose sizes are known, for images of this size."""
    sizes, found = sizes_of(value), f"{path}: output '{value.name}' is {describe(value)}"
    if not sizes or not all(sizes[1:]):
        return
    if form.kind is OutputKind.values:
        _check_values(sizes, found, form)
        return
    if len(sizes) == 4 and form.layout is Layout.nhwc:
        sizes = [sizes[0], sizes[3], sizes[1], sizes[2]]
    _check_sizes(sizes, list(image_NCHW), found, form)


def _check_sizes(sizes: list[int], image: list[int], found: str, form: OutputForm) -> None:
    """Refuse the shape [N, C, ...] of an output that cannot be logits of this form."""
    if len(sizes) not in (2, 4):
        raise ArtifactError(
            f"{found}, expected [N, classes] or [N, classes, 1, 1] (classification), or [N, classes, height, width] "
            "(segmentation). Name another one or a tensor inside the graph with model.output, or set "
            "model.output_kind=values if these are no classes, or those of a sequence [N, T, C], which a metric of "
            "your own compares (model.metric)."
        )
    num_classes, size = sizes[1], tuple(sizes[2:])
    other = (sizes[1:3] if form.layout is Layout.nchw else [sizes[3], sizes[1]]) if len(size) == 2 else []
    if size != (1, 1) and other and not _has_aspect(size, image) and _has_aspect(other, image):
        layout = Layout.nhwc if form.layout is Layout.nchw else Layout.nchw
        raise ArtifactError(
            f"{found}, and model.output_layout is {form.layout}: height and width would not have the ratio of the "
            f"image, {image[2]}x{image[3]}. It looks like model.output_layout={layout}."
        )
    if form.threshold is not None and num_classes != 1:
        raise ArtifactError(
            f"{found}: {num_classes} channels, and model.threshold is {form.threshold}, which is for outputs of one "
            "channel. Set model.threshold=null."
        )
    if form.threshold is None and num_classes == 1:
        raise ArtifactError(
            f"{found}: one channel, expected one for each class. Set model.threshold to the value above which it is "
            "the second class: 0.5 for a sigmoid, 0 for its logit."
        )
    if len(sizes) == 4 and size != (1, 1) and num_classes > MAX_CLASSES:
        raise ArtifactError(f"{found}: {num_classes} classes, masks hold at most {MAX_CLASSES}.")


def _check_values(sizes: list[int], found: str, form: OutputForm) -> None:
    if len(sizes) < 2:
        raise ArtifactError(
            f"{found}, expected [N, ...] with at least two axes (model.output_kind=values). Export the model without "
            "the Squeeze at its end."
        )
    if form.threshold is not None:
        raise ArtifactError(
            f"{found}, and model.threshold is {form.threshold}, which is for classes. Set model.threshold=null."
        )


def _has_aspect(size: Sequence[int], image: Sequence[int]) -> bool:
    return size[0] * image[3] == size[1] * image[2]


def _channels_first(graph: GraphProto) -> None:
    """Transpose the output, or drop the transposition that made it channels-last."""
    name = graph.output[0].name
    last = _maker(graph, name)
    if last.op_type == "Transpose" and helper.get_node_attr_value(last, "perm") == [0, 2, 3, 1]:
        _set_output(graph, last.input[0])
        return
    _append(graph, helper.make_node("Transpose", [name], [f"{name}:nchw"], f"{name}:nchw", perm=[0, 3, 1, 2]))


def _two_classes(graph: GraphProto, num_axes: int, threshold: float) -> tuple[float, bool]:
    """Turn the logit z of one channel into -(z - z0) / 2 and (z - z0) / 2; return z0 and whether there was a sigmoid.

    The difference of the two logits is z - z0, where z0 is the logit of the threshold, and their softmax is the
    sigmoid of z - z0. They come from the last layer itself if that is a convolution, otherwise from one more node.
    """
    last = _maker(graph, graph.output[0].name)
    is_probability = last.op_type == "Sigmoid"
    zero_logit = threshold
    if is_probability:
        if not 0 < threshold < 1:
            raise ArtifactError(
                f"node '{last.name}' (Sigmoid) gives the output, and model.threshold is {threshold}; expected a "
                "probability above 0 and below 1."
            )
        zero_logit = math.log(threshold / (1 - threshold))
        _set_output(graph, last.input[0])
    layer = _last_layer(graph)
    if layer is not None:
        _double(graph, layer, zero_logit)
        return zero_logit, is_probability
    logit = graph.output[0].name
    name, bias_C = f"{logit}:two", np.array([zero_logit / 2, -zero_logit / 2], np.float32)
    weights = np.array([-0.5, 0.5], np.float32).reshape((2, 1, 1, 1) if num_axes == 4 else (1, 2))
    constants = [_constant(graph, f"{name}:weight", weights), _constant(graph, f"{name}:bias", bias_C)]
    operator = "Conv" if num_axes == 4 else "Gemm"
    _append(graph, helper.make_node(operator, [logit, *constants], [name], name))
    return zero_logit, is_probability


def _last_layer(graph: GraphProto) -> NodeProto | None:
    """Return the convolution that makes the output, maybe resized behind it by factors, if nothing else reads it."""
    constants = {tensor.name for tensor in graph.initializer}
    node = _maker(graph, graph.output[0].name)
    while node.op_type == "Resize" and len(node.input) == 3 and _is_read_once(graph, node.input[0]):
        node = _maker(graph, node.input[0])
    groups = {item.name: item.i for item in node.attribute}.get("group", 1)
    if node.op_type not in _CHANNEL_AXIS or groups != 1 or not constants.issuperset(node.input[1:]):
        return None
    return node


def _double(graph: GraphProto, layer: NodeProto, zero_logit: float) -> None:
    """Give a convolution with one output channel the two channels of `_two_classes`."""
    values = {tensor.name: numpy_helper.to_array(tensor) for tensor in graph.initializer}
    weights = values[layer.input[1]] / 2
    bias = (float(values[layer.input[2]][0]) if len(layer.input) > 2 else 0.0) - zero_logit
    doubled = np.concatenate([-weights, weights], axis=_CHANNEL_AXIS[layer.op_type])
    layer.input[:] = [
        layer.input[0],
        _constant(graph, f"{layer.input[1]}:two", doubled),
        _constant(graph, f"{layer.output[0]}:two:bias", np.array([-bias / 2, bias / 2], np.float32)),
    ]
    drop_unused(graph)


def _resize(graph: GraphProto, before: Iterable[int], after: Iterable[int]) -> None:
    tensor = graph.output[0].name
    scales = [1.0, 1.0, *(resize_scale(*sizes) for sizes in zip(before, after, strict=True))]
    name = f"{tensor}:resized"
    inputs = [tensor, "", _constant(graph, f"{name}:scales", np.array(scales, np.float32))]
    resize = helper.make_node(
        "Resize", inputs, [name], name, mode="linear", coordinate_transformation_mode="half_pixel"
    )
    _append(graph, resize)


def _constant(graph: GraphProto, name: str, value: NDArray[Any]) -> str:
    graph.initializer.append(numpy_helper.from_array(value, name))
    return name


def _maker(graph: GraphProto, tensor: str) -> NodeProto:
    return next((node for node in graph.node if tensor in node.output), NodeProto())


def _is_read_once(graph: GraphProto, tensor: str) -> bool:
    return [name for node in graph.node for name in node.input].count(tensor) == 1


def _append(graph: onnx.GraphProto, node: NodeProto) -> None:
    graph.node.append(node)
    _set_output(graph, node.output[0])


def _set_output(graph: GraphProto, tensor: str) -> None:
    """Make a tensor the only output."""
    del graph.output[:]
    graph.output.append(helper.make_tensor_value_info(tensor, TensorProto.FLOAT, None))
    drop_unused(graph)
