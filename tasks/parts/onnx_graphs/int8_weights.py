"""Reduce the int8 weights of a Q/DQ graph to 7 bits."""

import numpy as np
from onnx import ModelProto, NodeProto, TensorProto, numpy_helper

from tasks.parts.onnx_graphs.graph import drop_unused, index_graph
from tasks.parts.onnx_graphs.macs import LAYER_TYPES

INT7_MAX, _INT8_MAX = 63, 127


def weights_to_7_bits(model: ModelProto) -> ModelProto:
    """Return a copy in which int8 weights have 7 bits in layers that read a uint8 activation.

    There, two products of 8 bits can exceed the 16 bits in which x86 adds them without VNNI. A layer with a quantized
    bias stays as it is, and so does one that shares its weight with such a layer: kernels scale the bias by the
    product of both scales.
    """
    rewritten = ModelProto()
    rewritten.CopyFrom(model)
    graph, index = rewritten.graph, index_graph(rewritten.graph)
    makers, readers, constants = index.makers, index.readers, index.constants
    factor = np.float32(INT7_MAX / _INT8_MAX)
    weights: dict[str, list[NodeProto]] = {}
    for node in graph.node:
        if node.op_type == "DequantizeLinear" and _is_symmetric_int8(node, constants):
            weights.setdefault(node.input[0], []).append(node)
    for name, dequantizing in weights.items():  # layers may share a node, and nodes may share levels
        layers = [layer for node in dequantizing for layer in readers.get(node.output[0], [])]
        if not all(_may_narrow(layer, makers, constants) for layer in layers):
            continue
        levels = np.rint(numpy_helper.to_array(constants[name]) * factor).astype(np.int8)
        graph.initializer.append(numpy_helper.from_array(levels, f"{name}:7bit"))
        for node in dequantizing:
            scale = f"{node.input[1]}:7bit"
            if scale not in constants:
                values = numpy_helper.to_array(constants[node.input[1]]) / factor
                graph.initializer.append(numpy_helper.from_array(values, scale))
                constants[scale] = graph.initializer[-1]
            node.input[0], node.input[1] = f"{name}:7bit", scale
    drop_unused(graph)
    return rewritten


def _is_symmetric_int8(node: NodeProto, constants: dict[str, TensorProto]) -> bool:
    """Return whether a node dequantizes an int8 constant around 0."""
    if not all(name in constants for name in node.input if name):
        return False
    zero_point = (
        len(node.input) > 2 and node.input[2] and numpy_helper.to_array(constants[node.input[2]]).any()
    )
    return constants[node.input[0]].data_type == TensorProto.INT8 and not zero_point


def _may_narrow(node: NodeProto, makers: dict[str, NodeProto], constants: dict[str, TensorProto]) -> bool:
    """Return whether a node is a layer that reads a uint8 activation and a float bias."""
    dequantized = [name in makers and makers[name].op_type == "DequantizeLinear" for name in node.input]
    return (
        node.op_type in LAYER_TYPES
        and dequantized in ([True, True], [True, True, False])
        and _is_uint8(makers[node.input[0]], constants)
    )


def _is_uint8(node: NodeProto, constants: dict[str, TensorProto]) -> bool:
    return len(node.input) < 3 or constants[node.input[2]].data_type == TensorProto.UINT8
