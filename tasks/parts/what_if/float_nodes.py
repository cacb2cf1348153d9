"""Take nodes of a Q/DQ graph out of INT8."""

from collections.abc import Collection, Mapping

import numpy as np
from onnx import ModelProto, NodeProto, TensorProto, numpy_helper

from tasks.parts.onnx_graphs.graph import MOVES_VALUES, drop_unused
from tasks.parts.quantization.qdq import along

_ACTIVATIONS = frozenset({"Relu", "Clip", "HardSigmoid", "HardSwish", "LeakyRelu", "Sigmoid"})


def leave_int8(model: ModelProto, names: Collection[str], *, keeps_pairs: bool) -> ModelProto:
    """Return a copy in which these nodes read float activations and weights; weights keep their rounding.

    With `keeps_pairs`, the pair in front of such a node stays if an operator that remains in INT8 makes what it
    rounds: ONNX Runtime computes that operator in integers only if a pair follows.
    """
    changed = ModelProto()
    changed.CopyFrom(model)
    graph = changed.graph
    constants = {tensor.name: tensor for tensor in graph.initializer}
    makers = {name: node for node in graph.node for name in node.output}
    for node in graph.node:
        if node.name not in names or node.op_type in ("QuantizeLinear", "DequantizeLinear"):
            continue
        for index, name in enumerate(node.input):
            dequantize = makers.get(name)
            if dequantize is None or dequantize.op_type != "DequantizeLinear":
                continue
            if dequantize.input[0] in constants:
                if f"{name}:float" not in constants:
                    weight = numpy_helper.from_array(_dequantized(dequantize, constants), f"{name}:float")
                    graph.initializer.append(weight)
                    constants[weight.name] = graph.initializer[-1]
                node.input[index] = f"{name}:float"
                continue
            source = makers[dequantize.input[0]].input[0] if dequantize.input[0] in makers else name
            if not (keeps_pairs and _stays_in_int8(source, makers, names)):
                node.input[index] = source
    drop_unused(graph)
    return changed


def _stays_in_int8(name: str, makers: Mapping[str, NodeProto], names: Collection[str]) -> bool:
    """Return whether an operator that reads quantized values makes a tensor, perhaps behind an activation."""
    node = makers.get(name)
    while node is not None and node.op_type in _ACTIVATIONS | MOVES_VALUES and node.name not in names:
        node = makers.get(node.input[0])
    if node is None or node.name in names:
        return False
    return any(name in makers and makers[name].op_type == "DequantizeLinear" for name in node.input)


def _dequantized(node: NodeProto, constants: Mapping[str, TensorProto]) -> np.ndarray:
    """Return the float values of a quantized constant."""
    levels, scales, *zeros = (numpy_helper.to_array(constants[name]) for name in node.input if name)
    axis = next((item.i for item in node.attribute if item.name == "axis"), 1)
    if scales.ndim:
        scales = along(scales, axis, levels.ndim)
        zeros = [along(zero, axis, levels.ndim) for zero in zeros]
    shifted = levels.astype(np.float32) - (zeros[0].astype(np.float32) if zeros else 0)
    values: np.ndarray = (shifted * scales).astype(np.float32)
    return values
