"""Take nodes of a Q/DQ graph out of INT8."""

from collections.abc import Collection, Mapping

from onnx import ModelProto, NodeProto, numpy_helper

from tasks.parts.onnx_graphs.foreign_qdq import dequantized
from tasks.parts.onnx_graphs.graph import MOVES_VALUES, drop_unused, index_graph

_ACTIVATIONS = frozenset({"Relu", "Clip", "HardSigmoid", "HardSwish", "LeakyRelu", "Sigmoid"})


def leave_int8(model: ModelProto, names: Collection[str], *, keeps_pairs: bool) -> ModelProto:
    """Return a copy in which these nodes read float activations and weights; weights keep their rounding.

    With `keeps_pairs`, the pair in front of such a node stays if an operator that remains in INT8 makes what it
    rounds: ONNX Runtime computes that operator in integers only if a pair follows.
    """
    changed = ModelProto()
    changed.CopyFrom(model)
    graph, found = changed.graph, index_graph(changed.graph)
    makers, constants = found.makers, found.constants
    for node in graph.node:
        if node.name not in names or node.op_type in ("QuantizeLinear", "DequantizeLinear"):
            continue
        for index, name in enumerate(node.input):
            dequantize = makers.get(name)
            if dequantize is None or dequantize.op_type != "DequantizeLinear":
                continue
            if dequantize.input[0] in constants:
                if f"{name}:float" not in constants:
                    arrays = {n: numpy_helper.to_array(constants[n]) for n in dequantize.input if n}
                    weight = numpy_helper.from_array(dequantized(dequantize, arrays), f"{name}:float")
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
