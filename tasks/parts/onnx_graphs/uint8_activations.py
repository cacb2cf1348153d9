"""Convert a Q/DQ graph from int8 to uint8 activations.

A Q/DQ pair is QuantizeLinear followed by DequantizeLinear. "S8S8" means int8 activations and int8 weights, both with
zero point 0; "U8S8" means uint8 activations and int8 weights.
"""

import numpy as np
from onnx import GraphProto, ModelProto, NodeProto, TensorProto, numpy_helper

from tasks.parts.onnx_graphs.graph import drop_unused

_UINT8_SHIFT = 128
_KEEPS_SIGN_OF_FIRST = frozenset(
    {"MaxPool", "AveragePool", "GlobalAveragePool", "QuantizeLinear", "DequantizeLinear", "Reshape"}
)
_KEEPS_SIGN_OF_ALL = frozenset({"Concat", "Add", "Mul"})


def activations_to_uint8(model: ModelProto) -> ModelProto:
    """Return a copy whose int8 activations are uint8 with the same scales; weights stay int8.

    ONNX Runtime multiplies uint8 by int8 on VNNI; S8S8 is slower there than float. A tensor that may be negative gets
    zero point + 128, which gives the same arithmetic. One that cannot be negative (after ReLU) keeps zero point 0:
    values in the calibrated range do not change, and the ReLU coincides with the lower end of uint8, so ONNX Runtime
    drops it and runs the whole layer in integers, 4 times faster (benchmarks/encodings.py). Values that int8 would
    clip are then kept up to twice the range. An int8 tensor with any reader other than DequantizeLinear keeps its
    type.
    """
    encoded = ModelProto()
    encoded.CopyFrom(model)
    graph = encoded.graph
    constants = {tensor.name: tensor for tensor in graph.initializer}
    readers: dict[str, list[NodeProto]] = {}
    for node in graph.node:
        for name in node.input:
            readers.setdefault(name, []).append(node)
    outputs = {value.name for value in graph.output}
    never_negative = _never_negative(graph)
    new_zero_points: dict[str, TensorProto] = {}
    shifted: set[str] = set()
    for node in graph.node:
        if node.op_type != "QuantizeLinear" or node.input[0] in constants or node.output[0] in outputs:
            continue
        users = readers.get(node.output[0], [])
        if _quantized_type(node, constants) != TensorProto.INT8 or any(
            user.op_type != "DequantizeLinear" for user in users
        ):
            continue
        zero_point = _zero_point(node, constants)
        is_positive = node.input[0] in never_negative and not zero_point.any()
        values = (zero_point.astype(np.int16) + (0 if is_positive else _UINT8_SHIFT)).astype(np.uint8)
        name = f"{node.output[0]}:uint8_zero_point"
        new_zero_points[name] = numpy_helper.from_array(values, name)
        _drop_attribute(node, "output_dtype")
        for user in [node, *users]:
            user.input[:] = [user.input[0], user.input[1], name]
        shifted.add(node.output[0])
    for value in graph.value_info:
        if value.name in shifted:
            value.type.tensor_type.elem_type = TensorProto.UINT8
    graph.initializer.extend(new_zero_points.values())
    drop_unused(graph)
    return encoded


def _never_negative(graph: GraphProto) -> set[str]:
    """Return the names of the tensors that are >= 0 for any input; nodes are in topological order."""
    positive: set[str] = set()
    for node in graph.node:
        is_activation = node.op_type in ("Relu", "Sigmoid")
        is_interpolation = node.op_type == "Resize" and _text_attribute(node, "mode") != "cubic"
        keeps_first = (is_interpolation or node.op_type in _KEEPS_SIGN_OF_FIRST) and node.input[0] in positive
        keeps_all = node.op_type in _KEEPS_SIGN_OF_ALL and all(name in positive for name in node.input)
        if is_activation or keeps_first or keeps_all:
            positive.update(node.output)
    return positive


def _quantized_type(node: NodeProto, constants: dict[str, TensorProto]) -> int:
    if len(node.input) > 2 and node.input[2] in constants:
        return constants[node.input[2]].data_type
    types = [attribute.i for attribute in node.attribute if attribute.name == "output_dtype"]
    return types[0] if types and types[0] else TensorProto.UINT8


def _zero_point(node: NodeProto, constants: dict[str, TensorProto]) -> np.ndarray:
    if len(node.input) > 2 and node.input[2]:
        return numpy_helper.to_array(constants[node.input[2]])
    return np.zeros(tuple(constants[node.input[1]].dims), dtype=np.int8)


def _text_attribute(node: NodeProto, name: str) -> str | None:
    return next((attribute.s.decode() for attribute in node.attribute if attribute.name == name), None)


def _drop_attribute(node: NodeProto, name: str) -> None:
    kept = [attribute for attribute in node.attribute if attribute.name != name]
    del node.attribute[:]
    node.attribute.extend(kept)
