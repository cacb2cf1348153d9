"""Infinite constants in graphs of other tools: attention masks, and the margins of a MaxPool."""

import numpy as np
from onnx import ModelProto, NodeProto, TensorProto, helper, numpy_helper

from tasks.parts.onnx_graphs.graph import drop_unused, index_graph, read_attribute

_LARGEST = float(np.finfo(np.float32).max)


def bound_infinities(model: ModelProto) -> list[str]:
    """Write infinite constants as finite ones, in place; return one sentence for each kind of change.

    A Pad with -inf in front of a MaxPool becomes the padding of the MaxPool, which is the same. Other infinities
    become the largest number of float32: a softmax gives 0 for either. Ranges and lower precisions need finite ones.
    """
    changes = []
    if num_pads := _pads_into_pools(model):
        changes.append(f"{num_pads} Pad with -inf taken over by the MaxPool behind")
    num_bounded = 0
    for tensor in model.graph.initializer:
        if tensor.data_type != TensorProto.FLOAT:
            continue
        values = numpy_helper.to_array(tensor)
        if np.isinf(values).any():
            bounded = np.clip(values, -_LARGEST, _LARGEST).astype(np.float32)
            tensor.CopyFrom(numpy_helper.from_array(bounded, tensor.name))
            num_bounded += 1
    if num_bounded:
        changes.append(f"infinity made {_LARGEST:.3g} in {num_bounded} constants")
    return changes


def _pads_into_pools(model: ModelProto) -> int:
    graph, index, replaced = model.graph, index_graph(model.graph), 0
    for pool in [node for node in graph.node if node.op_type == "MaxPool"]:
        pad = index.makers.get(pool.input[0], NodeProto())
        if pad.op_type != "Pad" or len(index.readers[pad.output[0]]) != 1 or len(pad.input) != 3:
            continue
        if not set(pad.input[1:]) <= index.constants.keys():
            continue
        amounts, value = (numpy_helper.to_array(index.constants[name]) for name in pad.input[1:])
        if read_attribute(pad, "mode", b"constant") != b"constant" or not np.isneginf(value).all():
            continue
        if _take_over(pool, [int(amount) for amount in amounts]):
            pool.input[0] = pad.input[0]
            replaced += 1
    drop_unused(graph)
    return replaced


def _take_over(pool: NodeProto, amounts: list[int]) -> bool:
    """Add the amounts of a Pad on [N, C, H, W] to those of a MaxPool; return whether it can have them."""
    kernel = read_attribute(pool, "kernel_shape", [])
    if len(amounts) != 8 or any(amounts[:2]) or any(amounts[4:6]) or len(kernel) != 2:
        return False
    own = read_attribute(pool, "pads", [0, 0, 0, 0])
    pads = [a + b for a, b in zip([*amounts[2:4], *amounts[6:8]], own, strict=True)]
    is_plain = read_attribute(pool, "auto_pad", b"NOTSET") == b"NOTSET"
    if not is_plain or not all(0 <= pad < size for pad, size in zip(pads, [*kernel, *kernel], strict=True)):
        return False
    for attribute in [item for item in pool.attribute if item.name == "pads"]:
        pool.attribute.remove(attribute)
    pool.attribute.append(helper.make_attribute("pads", pads))
    return True
