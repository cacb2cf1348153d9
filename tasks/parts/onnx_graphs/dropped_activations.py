"""Write out the activation functions that quantizers drop.

Where the range of a Q/DQ pair begins at 0, the pair itself computes the ReLU: its lowest level means 0, and all
below becomes 0. ONNX Runtime's quantizer therefore removes the Relu or Clip in front of such a pair. Whoever removes
the pair, or gives it symmetric levels, has to put the function back.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from onnx import GraphProto, ModelProto, NodeProto, TensorProto, helper, numpy_helper

from tasks.parts.onnx_graphs.graph import MOVES_VALUES

_NEVER_NEGATIVE = frozenset({"Relu", "Sigmoid", "HardSigmoid", "Softmax", "Softplus", "Abs", "Exp", "Sqrt"})
_KEEPS_SIGN = MOVES_VALUES | {
    "AveragePool",
    "GlobalAveragePool",
    "GlobalMaxPool",
    "MaxPool",
    "ReduceMax",
    "ReduceMean",
    "ReduceSum",
}
_AT_LEAST_MINUS_ONE = frozenset({"Erf", "Tanh", "Cos", "Sin"})
_KEEPS_SIGN_OF_ALL = frozenset({"Add", "Concat", "Mul"})
_RELU6_END = 6.0


def write_dropped_activations(model: ModelProto) -> int:
    """Put a Relu, or a Clip where the range ends at 6 (ReLU6), before each pair that acts as one, in place.

    Return how many were written. None is where the operators before the pair give nothing negative, so a second call
    writes none. Images keep their pair alone: nothing in front of it was dropped.
    """
    graph = model.graph
    constants = {tensor.name: numpy_helper.to_array(tensor) for tensor in graph.initializer}
    images = {value.name for value in graph.input}
    never_negative: set[str] = _one_more_than_its_least(graph.node, constants)
    nodes: list[NodeProto] = []
    num_written = 0
    for node in graph.node:
        if _is_never_negative(node, never_negative, constants):
            never_negative.update(node.output)
        if node.op_type == "QuantizeLinear" and not any(
            node.input[0] in known for known in (constants, images, never_negative)
        ):
            activation = _dropped_activation(graph, node, constants)
            if activation is not None:
                node.input[0] = activation.output[0]
                nodes.append(activation)
                num_written += 1
        nodes.append(node)
    if num_written:
        written = [_copy(node) for node in nodes]
        del graph.node[:]
        graph.node.extend(written)
    return num_written


def _one_more_than_its_least(nodes: Sequence[NodeProto], constants: dict[str, NDArray[Any]]) -> set[str]:
    """Return the sums of 1 and what is -1 at least, such as 1 + erf in a GELU, also through pairs."""
    ones = {name for name, values in constants.items() if values.size and bool((values >= 1).all())}
    bounded: set[str] = set()
    sums: set[str] = set()
    for node in nodes:
        if node.op_type in _AT_LEAST_MINUS_ONE:
            bounded.update(node.output)
        elif node.op_type in ("QuantizeLinear", "DequantizeLinear"):
            for names in (ones, bounded):
                if node.input[0] in names:
                    names.update(node.output)
        elif node.op_type == "Add" and any(
            one in bounded and other in ones for one, other in (node.input, reversed(node.input))
        ):
            sums.update(node.output)
    return sums


def _starts_at_zero(zero_point: NDArray[Any]) -> bool:
    """Return whether the lowest level of a pair with this zero point means 0: the pair gives nothing negative."""
    if zero_point.dtype.kind not in "iu":
        return False
    return bool((zero_point == np.iinfo(zero_point.dtype).min).all())


def _is_never_negative(node: NodeProto, known: set[str], constants: dict[str, NDArray[Any]]) -> bool:
    """Return whether a node gives nothing negative, if the tensors in `known` have nothing negative."""
    reads_none = bool(node.input) and node.input[0] in known
    if node.op_type == "QuantizeLinear":
        return reads_none or _starts_at_zero(_zero_point(node, constants))
    if node.op_type == "DequantizeLinear" and node.input[0] in constants:
        zero_point = constants.get(node.input[2]) if len(node.input) > 2 else np.zeros((), np.int8)
        is_one = zero_point is not None and zero_point.size == 1
        return is_one and bool((constants[node.input[0]] >= zero_point).all())
    if node.op_type == "Clip":
        low = next((item.f for item in node.attribute if item.name == "min"), None)  # before opset 11
        if len(node.input) > 1 and node.input[1] in constants:
            low = float(constants[node.input[1]].min())
        return reads_none or (low is not None and low >= 0)
    if node.op_type == "Resize":
        return reads_none and not any(item.name == "mode" and item.s == b"cubic" for item in node.attribute)
    if node.op_type in _KEEPS_SIGN_OF_ALL:
        return all(
            name in known or (name in constants and bool((constants[name] >= 0).all())) for name in node.input
        )
    return node.op_type in _NEVER_NEGATIVE or (
        reads_none and node.op_type in (*_KEEPS_SIGN, "DequantizeLinear")
    )


def _zero_point(node: NodeProto, constants: dict[str, NDArray[Any]]) -> NDArray[Any]:
    """Return the zero point of a QuantizeLinear; without one it is 0 of the type that the node names, or of uint8.

    One that is computed may be any.
    """
    if len(node.input) < 3 or not node.input[2]:
        kind = next((item.i for item in node.attribute if item.name == "output_dtype"), 0)
        return np.zeros(1, helper.tensor_dtype_to_np_dtype(kind or TensorProto.UINT8))
    return constants.get(node.input[2], np.zeros(1, np.float32))


def _dropped_activation(
    graph: GraphProto, node: NodeProto, constants: dict[str, NDArray[Any]]
) -> NodeProto | None:
    """Return the Relu or Clip whose effect a QuantizeLinear has, because its range begins at 0; None without one."""
    scale, zero_point = constants.get(node.input[1]), _zero_point(node, constants)
    if scale is None or scale.size != 1 or not _starts_at_zero(zero_point):
        return None
    step = float(scale.reshape(-1)[0])
    info, name = np.iinfo(zero_point.dtype), f"{node.output[0]}:activation"
    if abs((int(info.max) - int(info.min)) * step - _RELU6_END) > step:
        return helper.make_node("Relu", [node.input[0]], [name], name)
    bounds = {f"{name}:min": 0.0, f"{name}:max": _RELU6_END}
    for constant, value in bounds.items():
        graph.initializer.append(numpy_helper.from_array(np.array(value, np.float32), constant))
    return helper.make_node("Clip", [node.input[0], *bounds], [name], name)


def _copy(node: NodeProto) -> NodeProto:
    copied = NodeProto()
    copied.CopyFrom(node)
    return copied
