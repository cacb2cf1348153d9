"""Reduce the int8 weights of a Q/DQ graph to 7 bits."""

import numpy as np
from numpy.typing import NDArray
from onnx import ModelProto, NodeProto, TensorProto, numpy_helper

from tasks.parts.onnx_graphs.graph import drop_unused
from tasks.parts.onnx_graphs.macs import LAYER_TYPES

INT7_MAX, _INT8_MAX = 63, 127


def weights_to_7_bits(model: ModelProto) -> ModelProto:
    """Return a copy in which int8 weights have 7 bits in layers that read a uint8 activation.

    There, two products of 8 bits can exceed the 16 bits in which x86 adds them without VNNI. A layer with a quantized
    bias stays as it is: kernels scale the bias by the product of both scales.
    """
    rewritten = ModelProto()
    rewritten.CopyFrom(model)
    graph = rewritten.graph
    constants = {tensor.name: tensor for tensor in graph.initializer}
    makers = {name: node for node in graph.node for name in node.output}
    factor = np.float32(INT7_MAX / _INT8_MAX)
    for node in [node for node in graph.node if node.op_type in LAYER_TYPES]:
        dequantized = [makers.get(name) for name in node.input]
        if [maker is not None and maker.op_type for maker in dequantized] not in (
            ["DequantizeLinear"] * 2,
            ["DequantizeLinear"] * 2 + [False],
        ):
            continue
        activation, weight = dequantized[:2]
        assert activation is not None and weight is not None
        if weight.input[0] not in constants or not _is_uint8(activation, constants):
            continue
        levels, scale = (numpy_helper.to_array(constants[name]) for name in weight.input[:2])
        if levels.dtype != np.int8:
            continue
        narrow: list[NDArray[np.generic]] = [np.rint(levels * factor).astype(np.int8), scale / factor]
        for index, values in enumerate(narrow):
            name = f"{weight.input[index]}:7bit"
            graph.initializer.append(numpy_helper.from_array(values, name))
            weight.input[index] = name
    drop_unused(graph)
    return rewritten


def _is_uint8(node: NodeProto, constants: dict[str, TensorProto]) -> bool:
    return len(node.input) < 3 or constants[node.input[2]].data_type == TensorProto.UINT8
