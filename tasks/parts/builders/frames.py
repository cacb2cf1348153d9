"""Move what surrounds an engine into its graph: from camera frames to images, and from logits to classes.

Shape letters: N batch, C channels or classes, H height, W width.
"""

from typing import Any

import numpy as np
from onnx import ModelProto, NodeProto, TensorProto, helper, numpy_helper

from tasks.parts.data.input_card import InputCard, Task
from tasks.parts.engines.frame_engine.pixels import lead_of_first
from tasks.parts.engines.target import Gives, Reads, Target

_Step = tuple[str, list[str], dict[str, Any]]
"""Type of a node, its constants, its attributes."""
FRAMES, CLASSES = "frames", "classes"
"""Names of the input and of the output."""


def fit_frames(target: Target, graph: ModelProto, card: InputCard) -> ModelProto:
    """Return the graph with the input and the output that the target's engines have."""
    if target.reads is not Reads.normalised:
        graph = read_frames(graph, card, is_bgr=target.reads is Reads.bgr_frames)
    if target.gives is Gives.classes and card.task is not Task.values:
        graph = give_classes(graph, card, target.threshold)
    return graph


def read_frames(model: ModelProto, card: InputCard, *, is_bgr: bool = False) -> ModelProto:
    """Return a copy that reads uint8 [N, H, W, C] and normalises it.

    The runtimes fuse the normalisation: folded into the first convolution it would be exact only without padding, and
    benchmarks/frames.py found no gain.
    """
    changed = _copy(model)
    graph = changed.graph
    [image] = graph.input
    batch = image.type.tensor_type.shape.dim[0]
    channels, height, width = card.image_shape
    scale, shift = (f"{FRAMES}:{name}" for name in ("scale", "shift"))
    std_C = np.asarray(card.std, np.float64)
    scale_C = (1.0 / (255.0 * std_C)).astype(np.float32)
    shift_C = (-np.asarray(card.mean, np.float64) / std_C).astype(np.float32)
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


def give_classes(model: ModelProto, card: InputCard, threshold: float | None = None) -> ModelProto:
    """Return a copy that gives the class of the largest logit, the first one of equals.

    With a threshold, the second of two classes wins where its probability is above it.
    """
    changed = _copy(model)
    graph = changed.graph
    [logits] = graph.output
    batch = logits.type.tensor_type.shape.dim[0]
    kind = TensorProto.UINT8 if len(card.classes) <= 256 else TensorProto.UINT16
    steps: list[_Step] = []
    if threshold is not None:
        lead = np.array([lead_of_first(threshold), 0], np.float32).reshape(
            1, 2, *[1] * (len(card.logits_shape) - 1)
        )
        graph.initializer.append(numpy_helper.from_array(lead, f"{CLASSES}:lead"))
        steps.append(("Add", [f"{CLASSES}:lead"], {}))
    steps += [("ArgMax", [], {"axis": 1, "keepdims": 0}), ("Cast", [], {"to": kind})]
    graph.node.extend(_chain(CLASSES, steps, logits.name, CLASSES))
    shape = [batch.dim_param or batch.dim_value, *card.logits_shape[1:]]
    graph.output.remove(logits)
    graph.output.append(helper.make_tensor_value_info(CLASSES, kind, shape))
    return changed


def _copy(model: ModelProto) -> ModelProto:
    changed = ModelProto()
    changed.CopyFrom(model)
    return changed


def _chain(name: str, steps: list[_Step], first: str, last: str) -> list[NodeProto]:
    """Return nodes that follow one another from the tensor `first` to the tensor `last`."""
    tensors = [first, *(f"{name}/{op_type}" for op_type, *_ in steps[:-1]), last]
    return [
        helper.make_node(
            op_type, [tensors[i], *constants], [tensors[i + 1]], f"{name}/{op_type}", **attributes
        )
        for i, (op_type, constants, attributes) in enumerate(steps)
    ]
