"""Convert a Q/DQ graph to symmetric int8.

A Q/DQ pair is QuantizeLinear followed by DequantizeLinear. "U8S8" means uint8 activations with a zero point and int8
weights; "S8S8" means int8 for both, with zero point 0, which TensorRT requires.
"""

import numpy as np
from numpy.typing import NDArray
from onnx import GraphProto, ModelProto, NodeProto, TensorProto, numpy_helper

from tasks.parts.onnx_graphs.dropped_activations import write_dropped_activations
from tasks.parts.onnx_graphs.foreign_qdq import add_zero_points, dequantized
from tasks.parts.onnx_graphs.graph import drop_unused, replace_nodes

_INT8_MAX = 127
_8_BITS = (TensorProto.UINT8, TensorProto.INT8)


def activations_to_int8(model: ModelProto) -> ModelProto:
    """Return a copy whose activations of 8 bits are int8 with zero point 0 and cover the same ranges.

    The steps become wider: twice as wide for a tensor that is never negative. A ReLU that was dropped because the
    range begins at 0 is written again: the new range does not begin there. Biases of 32 bits become floats: kernels
    scale them by the product of the scales of input and weight, and TensorRT reads none. Weights stay as they are.
    """
    encoded = ModelProto()
    encoded.CopyFrom(model)
    add_zero_points(encoded)
    write_dropped_activations(encoded)
    graph = encoded.graph
    constants = {tensor.name: tensor for tensor in graph.initializer}
    levels: dict[str, tuple[str, str]] = {}
    for node in graph.node:
        if (
            node.op_type != "QuantizeLinear"
            or len(node.input) < 3
            or not constants.keys() >= set(node.input[1:])
        ):
            continue
        scale, zero_point = (numpy_helper.to_array(constants[name]) for name in node.input[1:3])
        if constants[node.input[2]].data_type in _8_BITS and not _is_symmetric(zero_point):
            names = f"{node.output[0]}:int8_scale", f"{node.output[0]}:int8_zero_point"
            info = np.iinfo(zero_point.dtype)
            centre = zero_point.astype(np.float32)
            largest = np.maximum(centre - info.min, info.max - centre)
            wider = (scale * largest / _INT8_MAX).astype(np.float32)
            graph.initializer.append(numpy_helper.from_array(wider, names[0]))
            graph.initializer.append(numpy_helper.from_array(np.zeros_like(zero_point, np.int8), names[1]))
            levels[node.output[0]] = names
    for node in graph.node:
        if node.op_type in ("QuantizeLinear", "DequantizeLinear"):
            quantized = node.output[0] if node.op_type == "QuantizeLinear" else node.input[0]
            if quantized in levels:
                node.input[1], node.input[2] = levels[quantized]
    for value in graph.value_info:
        if value.name in levels:
            value.type.tensor_type.elem_type = TensorProto.INT8
    _biases_to_float(graph)
    drop_unused(graph)
    return encoded


def constants_to_int8(model: ModelProto) -> ModelProto:
    """Return a copy whose constants of 8 bits, such as weights, are int8 with zero point 0.

    Those of uint8 around 128 are only shifted. Others are rounded to new steps, of the largest magnitude / 127.
    """
    encoded = ModelProto()
    encoded.CopyFrom(model)
    graph = encoded.graph
    constants = {tensor.name: tensor for tensor in graph.initializer}
    for node in graph.node:
        if not _dequantizes(node, constants, _8_BITS) or len(node.input) < 3 or not node.input[2]:
            continue
        levels, scale, zero_point = (numpy_helper.to_array(constants[name]) for name in node.input)
        if _is_symmetric(zero_point):
            continue
        is_shifted = zero_point.dtype == np.uint8 and bool((zero_point == 128).all())
        new: tuple[NDArray[np.generic], ...] = (
            (levels.astype(np.int16) - 128).astype(np.int8),
            scale,
        )
        if not is_shifted:
            new = _symmetric(node, {name: numpy_helper.to_array(constants[name]) for name in node.input})
        for index, values in enumerate((*new, np.zeros_like(zero_point, np.int8))):
            name = f"{node.output[0]}:int8:{index}"
            graph.initializer.append(numpy_helper.from_array(values, name))
            node.input[index] = name
    drop_unused(graph)
    return encoded


def _is_symmetric(zero_point: NDArray[np.generic]) -> bool:
    return zero_point.dtype == np.int8 and not zero_point.any()


def _symmetric(
    node: NodeProto, constants: dict[str, NDArray[np.generic]]
) -> tuple[NDArray[np.int8], NDArray[np.float32]]:
    """Return new levels and scales of a constant; one scale, or one for each index of the node's axis."""
    values, scale = dequantized(node, constants), constants[node.input[1]]
    axis = next((item.i for item in node.attribute if item.name == "axis"), 1) % max(1, values.ndim)
    others = tuple(other for other in range(values.ndim) if scale.size == 1 or other != axis)
    amax = np.abs(values).max(axis=others, keepdims=True)
    steps = (np.where(amax > 0, amax, 1.0) / _INT8_MAX).astype(np.float32)
    return np.rint(values / steps).astype(np.int8), steps.reshape(scale.shape)


def _biases_to_float(graph: GraphProto) -> None:
    constants = {tensor.name: tensor for tensor in graph.initializer}
    biases = [node for node in graph.node if _dequantizes(node, constants, (TensorProto.INT32,))]
    for node in biases:
        arrays = {name: numpy_helper.to_array(constants[name]) for name in node.input if name}
        graph.initializer.append(numpy_helper.from_array(dequantized(node, arrays), node.output[0]))
    replace_nodes(graph, {node.output[0]: [] for node in biases})


def _dequantizes(node: NodeProto, constants: dict[str, TensorProto], kinds: tuple[int, ...]) -> bool:
    """Return whether a node dequantizes a constant of one of these types, with constant scales."""
    return (
        node.op_type == "DequantizeLinear"
        and all(name in constants for name in node.input if name)
        and constants[node.input[0]].data_type in kinds
    )
