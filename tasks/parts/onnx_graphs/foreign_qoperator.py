"""Write operators that compute with integers themselves as float operators between Q/DQ pairs.

Such files (`QuantFormat.QOperator` of ONNX Runtime) hold the same levels, scales and zero points as Q/DQ files, as
inputs of their operators (ONNX, QLinearConv and QLinearMatMul; ONNX Runtime, ContribOperators.md). Both forms differ
by the rounding of sums alone.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from onnx import ModelProto, NodeProto, TensorProto, helper, numpy_helper

from tasks.parts.onnx_graphs.graph import replace_nodes

_AXES_OF_SCALES = 13
"""Opset from which a DequantizeLinear has a scale for each channel."""


@dataclass(frozen=True)
class _Form:
    """Where an operator has what; a quantized tensor, its scale and its zero point stand side by side."""

    op_type: str
    """The float operator."""
    tensors: tuple[int, ...]
    """Places of quantized inputs."""
    output: int
    """Place of the output's scale; its zero point follows."""
    bias: int | None = None
    """Place of an int32 bias, whose scale is the product of those of the two tensors, and of alpha."""


_FORMS = {
    "QLinearConv": _Form("Conv", (0, 3), 6, bias=8),
    "QGemm": _Form("Gemm", (0, 3), 7, bias=6),
    "QLinearMatMul": _Form("MatMul", (0, 3), 6),
    "QLinearAdd": _Form("Add", (0, 3), 6),
    "QLinearMul": _Form("Mul", (0, 3), 6),
    "QLinearAveragePool": _Form("AveragePool", (0,), 3),
    "QLinearGlobalAveragePool": _Form("GlobalAveragePool", (0,), 3),
    "QLinearLeakyRelu": _Form("LeakyRelu", (0,), 3),
    "QLinearSigmoid": _Form("Sigmoid", (0,), 3),
    "QLinearSoftmax": _Form("Softmax", (0,), 3),
}
_OWN_ATTRIBUTES = {"QLinearSoftmax": {"opset"}}
"""What float operators do not have."""


def write_pairs(model: ModelProto) -> int:
    """Write the operators that have a float form between pairs, in place; return how many there were.

    Those with another order of axes (channels_last) or computed scales stay, and so do all where the opset has no
    scale for each channel of a layer.
    """
    graph = model.graph
    constants = {tensor.name: tensor for tensor in graph.initializer}
    opset = max(entry.version for entry in model.opset_import if entry.domain in ("", "ai.onnx"))
    replacements, dequantized = {}, dict[tuple[str, ...], str]()
    for node in graph.node:
        form = _form_of(node)
        if form is None or opset < _AXES_OF_SCALES:
            continue
        if not all(node.input[place + 1] in constants for place in form.tensors):
            continue
        nodes: list[NodeProto] = []
        inputs = []
        for place in form.tensors:
            source = tuple(node.input[place : place + 3])
            if source not in dequantized:
                dequantized[source] = f"{source[0]}:{len(dequantized)}:float"
                nodes.append(_dequantize(source, dequantized[source], _axis(node, place, constants)))
            inputs.append(dequantized[source])
        if form.bias is not None and len(node.input) > form.bias and node.input[form.bias]:
            bias, scale = node.input[form.bias], f"{node.output[0]}:bias_scale"
            scales = _bias_scales(node, constants)
            graph.initializer.append(numpy_helper.from_array(scales, scale))
            inputs.append(f"{node.output[0]}:bias")
            nodes.append(_dequantize((bias, scale), inputs[-1], 0 if scales.ndim else None))
        nodes += _between(node, form, inputs)
        replacements[node.output[0]] = nodes
    replace_nodes(graph, replacements)
    return len(replacements)


def _form_of(node: NodeProto) -> _Form | None:
    if any(item.name == "channels_last" and item.i for item in node.attribute):
        return None
    if node.op_type == "QLinearConcat":
        return _Form("Concat", tuple(range(2, len(node.input), 3)), 0)
    return _FORMS.get(node.op_type)


def _between(node: NodeProto, form: _Form, inputs: list[str]) -> list[NodeProto]:
    """Return the float operator, and what quantizes its answer, unless the operator answers in float."""
    scale = list(node.input[form.output : form.output + 2])
    answers_in_float = not scale or not scale[0]
    answer = node.output[0] if answers_in_float else f"{node.output[0]}:float"
    name = node.name.removesuffix("_quant")  # which the quantizer adds, and ONNX Runtime to what it fuses
    computed = helper.make_node(form.op_type, inputs, [answer], name)
    left_out = _OWN_ATTRIBUTES.get(node.op_type, set()) | {"channels_last"}
    computed.attribute.extend(item for item in node.attribute if item.name not in left_out)
    if answers_in_float:
        return [computed]
    quantize = helper.make_node(
        "QuantizeLinear", [answer, *scale], [node.output[0]], name and f"{name}:quantize"
    )
    return [computed, quantize]


def _bias_scales(node: NodeProto, constants: Mapping[str, TensorProto]) -> NDArray[np.float32]:
    """Return the scale of a bias, or one for each channel."""
    alpha = next((item.f for item in node.attribute if item.name == "alpha"), 1.0)
    ours, weights = (numpy_helper.to_array(constants[node.input[place]]).ravel() for place in (1, 4))
    scales: NDArray[np.float32] = np.squeeze(np.float32(alpha) * ours * weights)
    return scales


def _axis(node: NodeProto, place: int, constants: Mapping[str, TensorProto]) -> int | None:
    """Return the axis of the channels of a weight; None for a tensor with one scale."""
    if math.prod(constants[node.input[place + 1]].dims) == 1:
        return None
    if node.op_type == "QLinearConv":
        return 0
    is_transposed = any(item.name == "transB" and item.i for item in node.attribute)
    return 0 if is_transposed else 1


def _dequantize(inputs: tuple[str, ...], output: str, axis: int | None) -> NodeProto:
    node = helper.make_node("DequantizeLinear", [name for name in inputs if name], [output], output)
    if axis is not None:
        node.attribute.append(helper.make_attribute("axis", axis))
    return node
