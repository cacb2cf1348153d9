"""Move what surrounds an engine into its graph: from camera frames to images, and from logits to classes.

Shape letters: N batch, C channels or classes, H height, W width.
"""

from typing import Any

import numpy as np
from onnx import ModelProto, NodeProto, TensorProto, helper, numpy_helper

from tasks.core.errors import BuildFailed
from tasks.parts.data.input_card import InputCard, Task
from tasks.parts.engines.frame_engine.pixels import lead_of_first, scale_and_shift
from tasks.parts.engines.target import Gives, Reads, Target
from tasks.parts.onnx_graphs.graph import drop_unused, infer_shapes, resize_scale

_Step = tuple[str, list[str], dict[str, Any]]
"""Type of a node, its constants, its attributes."""
_MOST_UINT8 = 256
FRAMES, CLASSES = "frames", "classes"
"""Names of the input and of the output."""


def fit_frames(target: Target, graph: ModelProto, card: InputCard) -> ModelProto:
    """Return the graph with the input and the output that the target's engines have."""
    if target.reads is not Reads.normalised:
        graph = read_frames(graph, card, is_bgr=target.reads is Reads.bgr_frames)
    if target.gives is Gives.classes and card.task is not Task.values:
        is_cast_twice = target.tensorrt is not None
        if is_cast_twice and len(card.classes) > _MOST_UINT8:
            raise BuildFailed(
                f"Target {target.name}: TensorRT has no uint16 for {len(card.classes)} classes, expected up to "
                f"{_MOST_UINT8}. Set target.{target.name}.gives=logits."
            )
        if target.coarse_classes:
            graph = drop_last_resize(target, graph)
        graph = give_classes(graph, card, target.threshold, is_cast_twice=is_cast_twice)
        if target.coarse_classes:
            graph = repeat_classes(graph, card)
    return graph


def read_frames(model: ModelProto, card: InputCard, *, is_bgr: bool = False) -> ModelProto:
    """Return a copy that reads uint8 [N, H, W, C] and normalises it.

    Folded into the first convolution it would be exact only without padding, and save a few per cent at most
    (benchmarks/frames.py).
    """
    changed = _copy(model, FRAMES)
    graph = changed.graph
    [image] = graph.input
    batch = image.type.tensor_type.shape.dim[0]
    channels, height, width = card.image_shape
    scale, shift = (f"{FRAMES}:{name}" for name in ("scale", "shift"))
    scale_C, shift_C = scale_and_shift(card.mean, card.std)
    graph.initializer.append(numpy_helper.from_array(scale_C.reshape(1, channels, 1, 1), scale))
    graph.initializer.append(numpy_helper.from_array(shift_C.reshape(1, channels, 1, 1), shift))
    steps: list[_Step] = [
        ("Cast", [], {"to": TensorProto.FLOAT}),
        ("Transpose", [], {"perm": [0, 3, 1, 2]}),
        *([("Gather", [f"{FRAMES}:order"], {"axis": 1})] if is_bgr else []),
        ("Mul", [scale], {}),
        ("Add", [shift], {}),
    ]
    if is_bgr:
        graph.initializer.append(numpy_helper.from_array(np.array([2, 1, 0]), f"{FRAMES}:order"))
    nodes = _chain(FRAMES, steps, FRAMES, image.name)
    for index, node in enumerate(nodes):
        graph.node.insert(index, node)
    shape = [batch.dim_param or batch.dim_value, height, width, channels]
    graph.input.remove(image)
    graph.input.append(helper.make_tensor_value_info(FRAMES, TensorProto.UINT8, shape))
    return changed


def give_classes(
    model: ModelProto, card: InputCard, threshold: float | None = None, *, is_cast_twice: bool = False
) -> ModelProto:
    """Return a copy that gives the class of the largest logit, the first one of equals.

    With a threshold, the second of two classes wins where its probability is above it. TensorRT makes uint8 of floats
    only, so there the class is cast twice.
    """
    changed = _copy(model, CLASSES)
    graph = changed.graph
    [logits] = graph.output
    batch = logits.type.tensor_type.shape.dim[0]
    kind = TensorProto.UINT8 if len(card.classes) <= _MOST_UINT8 else TensorProto.UINT16
    steps: list[_Step] = []
    if threshold is not None:
        lead = np.array([lead_of_first(threshold), 0], np.float32).reshape(
            1, 2, *[1] * (len(card.logits_shape) - 1)
        )
        graph.initializer.append(numpy_helper.from_array(lead, f"{CLASSES}:lead"))
        steps.append(("Add", [f"{CLASSES}:lead"], {}))
    steps.append(("ArgMax", [], {"axis": 1, "keepdims": 0}))
    steps += [("Cast", [], {"to": to}) for to in ([TensorProto.FLOAT, kind] if is_cast_twice else [kind])]
    graph.node.extend(_chain(CLASSES, steps, logits.name, CLASSES))
    axes = logits.type.tensor_type.shape.dim[2:]
    shape = [batch.dim_param or batch.dim_value, *(axis.dim_value for axis in axes)]
    graph.output.remove(logits)
    graph.output.append(helper.make_tensor_value_info(CLASSES, kind, shape))
    return changed


def drop_last_resize(target: Target, model: ModelProto) -> ModelProto:
    """Return a copy whose logits are those before the Resize that gives them; raise BuildFailed if none does."""
    changed = _copy(model)
    graph = changed.graph
    [logits] = graph.output
    last = next((node for node in graph.node if logits.name in node.output), None)
    if last is None or last.op_type != "Resize":
        raise BuildFailed(
            f"Target {target.name}: the logits come from {last.op_type if last else 'no node'}, expected Resize. Set "
            f"target.{target.name}.coarse_classes=false."
        )
    graph.node.remove(last)
    maker = next(node for node in graph.node if last.input[0] in node.output)
    for node in graph.node:
        node.input[:] = [logits.name if name == last.input[0] else name for name in node.input]
    maker.output[:] = [logits.name if name == last.input[0] else name for name in maker.output]
    for axis in (2, 3):
        logits.type.tensor_type.shape.dim[axis].Clear()
    del graph.value_info[:]
    drop_unused(graph)
    return infer_shapes(changed, data_prop=True)


def repeat_classes(model: ModelProto, card: InputCard) -> ModelProto:
    """Return a copy that repeats classes [N, h, w] to the size of the image."""
    changed = _copy(model)
    graph = changed.graph
    [classes] = graph.output
    batch, height, width = classes.type.tensor_type.shape.dim
    coarse = f"{CLASSES}/coarse"
    for node in graph.node:
        node.output[:] = [coarse if name == CLASSES else name for name in node.output]
    sizes = {axis.dim_value for axis in (height, width)}
    assert 0 not in sizes, "shapes are inferred"
    pairs = ((height.dim_value, card.height), (width.dim_value, card.width))
    scales = np.array([1, 1, *(resize_scale(low, high) for low, high in pairs)], np.float32)
    for name, values in (("axis", np.array([1])), ("scales", scales)):
        graph.initializer.append(numpy_helper.from_array(values, f"{CLASSES}:{name}"))
    nearest = {"mode": "nearest", "coordinate_transformation_mode": "half_pixel"}
    steps: list[_Step] = [
        ("Unsqueeze", [f"{CLASSES}:axis"], {}),
        ("Resize", ["", f"{CLASSES}:scales"], nearest),
        ("Squeeze", [f"{CLASSES}:axis"], {}),
    ]
    graph.node.extend(_chain(CLASSES, steps, coarse, CLASSES))
    kind = classes.type.tensor_type.elem_type
    shape = [batch.dim_param or batch.dim_value, card.height, card.width]
    graph.output.remove(classes)
    graph.output.append(helper.make_tensor_value_info(CLASSES, kind, shape))
    return changed


def _copy(model: ModelProto, reserved: str = "") -> ModelProto:
    """Return a copy in which a tensor of the user's has another name than the reserved one."""
    changed = ModelProto()
    changed.CopyFrom(model)
    graph = changed.graph
    for node in graph.node:
        for names in (node.input, node.output):
            names[:] = [f"{name}:own" if name and name == reserved else name for name in names]
    for value in (*graph.input, *graph.output, *graph.value_info, *graph.initializer):
        if value.name == reserved:
            value.name = f"{reserved}:own"
    return changed


def _chain(name: str, steps: list[_Step], first: str, last: str) -> list[NodeProto]:
    """Return nodes that follow one another from the tensor `first` to the tensor `last`."""
    types = [op_type for op_type, *_ in steps]
    names = [
        f"{name}/{kind}" if kind not in types[:i] else f"{name}/{kind}_{i}" for i, kind in enumerate(types)
    ]
    tensors = [first, *names[:-1], last]
    return [
        helper.make_node(op_type, [tensors[i], *constants], [tensors[i + 1]], names[i], **attributes)
        for i, (op_type, constants, attributes) in enumerate(steps)
    ]
