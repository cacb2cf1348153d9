"""Convert a Q/DQ graph from uint8 activations to symmetric int8 ones.

A Q/DQ pair is QuantizeLinear followed by DequantizeLinear. "U8S8" means uint8 activations with a zero point and int8
weights; "S8S8" means int8 for both, with zero point 0, which TensorRT requires.
"""

import numpy as np
from onnx import ModelProto, TensorProto, numpy_helper

from tasks.parts.onnx_graphs.graph import drop_unused

_INT8_MAX, _UINT8_MAX = 127, 255


def activations_to_int8(model: ModelProto) -> ModelProto:
    """Return a copy whose uint8 activations are int8 with zero point 0 and cover the same ranges.

    The steps become wider: twice as wide for a tensor that is never negative. Weights stay as they are.
    """
    encoded = ModelProto()
    encoded.CopyFrom(model)
    graph = encoded.graph
    constants = {tensor.name: tensor for tensor in graph.initializer}
    levels: dict[str, tuple[str, str]] = {}
    for node in graph.node:
        is_pair = node.op_type == "QuantizeLinear" and node.input[2] in constants
        if is_pair and constants[node.input[2]].data_type == TensorProto.UINT8:
            scale, zero_point = (numpy_helper.to_array(constants[name]) for name in node.input[1:3])
            largest = np.maximum(zero_point, _UINT8_MAX - zero_point.astype(np.float32))
            names = f"{node.output[0]}:int8_scale", f"{node.output[0]}:int8_zero_point"
            for name, values in zip(
                names,
                ((scale * largest / _INT8_MAX).astype(np.float32), zero_point.astype(np.int8) * 0),
                strict=True,
            ):
                graph.initializer.append(numpy_helper.from_array(values, name))
            levels[node.output[0]] = names
    for node in graph.node:
        if node.op_type in ("QuantizeLinear", "DequantizeLinear"):
            quantized = node.output[0] if node.op_type == "QuantizeLinear" else node.input[0]
            if quantized in levels:
                node.input[1], node.input[2] = levels[quantized]
    for value in graph.value_info:
        if value.name in levels:
            value.type.tensor_type.elem_type = TensorProto.INT8
    drop_unused(graph)
    return encoded
