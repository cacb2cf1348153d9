"""Quantized graphs of other tools: what is accepted of them, and their float form."""

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from onnx import GraphProto, ModelProto, NodeProto, TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator

from tasks.core.errors import ArtifactError
from tasks.parts.onnx_graphs.dropped_activations import write_dropped_activations
from tasks.parts.onnx_graphs.graph import drop_unused

_QDQ = ("QuantizeLinear", "DequantizeLinear")
_INTEGER_OPERATORS = {
    "DynamicQuantizeLinear",
    "ConvInteger",
    "MatMulInteger",
    "QGemm",
}
"""Beside all whose names begin with QLinear; foreign_qoperator.py writes most of those between pairs before."""
_TYPES = {
    TensorProto.INT8: np.int8,
    TensorProto.UINT8: np.uint8,
    TensorProto.INT16: np.int16,
    TensorProto.UINT16: np.uint16,
}


def check_quantization(model: ModelProto, path: Path, *, is_quantized: bool) -> None:
    """Raise ArtifactError unless the graph is a float graph, or with `is_quantized` a Q/DQ graph."""
    nodes = model.graph.node
    for node in nodes:
        if node.op_type in _INTEGER_OPERATORS or node.op_type.startswith("QLinear"):
            raise ArtifactError(
                f"{path}: node '{_name(node)}' is {node.op_type}, which computes with integers itself; expected a "
                "float graph, or one with pairs of QuantizeLinear and DequantizeLinear. Use the float file, or "
                "quantize it in that format (ONNX Runtime: quant_format=QuantFormat.QDQ)."
            )
    pairs = _activation_pairs(model)
    for node in [*pairs, *(_quantized_weights(model) if pairs else [])]:
        _check_levels(node, model, path)
    if pairs and not is_quantized:
        raise ArtifactError(
            f"{path}: node '{_name(pairs[0])}' is {pairs[0].op_type}, expected a float graph. Use the float file, or "
            "choose model=onnx_quantized: it measures the file as it is, and quantizes its float form."
        )
    if is_quantized and not pairs:
        what = "only weights are quantized" if _quantized_weights(model) else "no node is QuantizeLinear"
        raise ArtifactError(
            f"{path}: {what}, expected a Q/DQ graph with pairs on its activations. Choose model=onnx for a float "
            "graph and for quantized weights, which it makes floats."
        )


def has_quantized_weights(model: ModelProto) -> bool:
    """Return whether a DequantizeLinear reads a constant."""
    return bool(_quantized_weights(model))


def _constants(model: ModelProto) -> dict[str, int]:
    """Return the constants of a graph with their types."""
    kinds = {tensor.name: tensor.data_type for tensor in model.graph.initializer}
    for node in model.graph.node:
        if node.op_type == "Constant" and node.attribute[0].name == "value":
            kinds[node.output[0]] = node.attribute[0].t.data_type
    return kinds


def _activation_pairs(model: ModelProto) -> list[NodeProto]:
    """Return each QuantizeLinear of an activation."""
    constants = _constants(model)
    return [
        node
        for node in model.graph.node
        if node.op_type == "QuantizeLinear" and node.input[0] not in constants
    ]


def _quantized_weights(model: ModelProto) -> list[NodeProto]:
    constants = _constants(model)
    return [
        node for node in model.graph.node if node.op_type == "DequantizeLinear" and node.input[0] in constants
    ]


def _check_levels(node: NodeProto, model: ModelProto, path: Path) -> None:
    """Raise ArtifactError for a Q/DQ node of other levels than those of 8 and 16 bits."""
    kinds = _constants(model)
    if node.op_type == "DequantizeLinear":
        kind = kinds[node.input[0]]
    elif len(node.input) > 2 and node.input[2] in kinds:
        kind = kinds[node.input[2]]
    else:
        types = [attribute.i for attribute in node.attribute if attribute.name == "output_dtype"]
        kind = types[0] if types and types[0] else TensorProto.UINT8
    if kind not in _TYPES and kind != TensorProto.INT32:  # that of a bias
        raise ArtifactError(
            f"{path}: node '{_name(node)}' ({node.op_type}) has levels of type "
            f"{TensorProto.DataType.Name(kind).lower()}, expected int8, uint8, int16 or uint16, which the engines "
            "here compute with. Use the float file: model=onnx quantizes it to INT8."
        )


def add_zero_points(model: ModelProto) -> None:
    """Write the zero point of every Q/DQ node that leaves it out, in place; then no node names its type as well."""
    graph = model.graph
    constants = {tensor.name: tensor for tensor in graph.initializer}
    kinds = {tensor.name: tensor.data_type for tensor in graph.initializer}
    for node in graph.node:
        if node.op_type == "QuantizeLinear":
            kinds[node.output[0]] = _quantized_kind(node, constants)
    for node in graph.node:
        if node.op_type not in _QDQ:
            continue
        if len(node.input) > 2 and node.input[2]:
            _drop_type(node)
            continue
        kind = kinds.get(node.output[0] if node.op_type == "QuantizeLinear" else node.input[0])
        if kind not in _TYPES or node.input[1] not in constants:
            continue
        zeros = np.zeros(tuple(constants[node.input[1]].dims), _TYPES[kind])
        name = f"{node.output[0]}:zero_point"
        graph.initializer.append(numpy_helper.from_array(zeros, name))
        node.input[:] = [*node.input[:2], name]
        _drop_type(node)


def _drop_type(node: NodeProto) -> None:
    """Leave the type of a QuantizeLinear to its zero point; whoever changes that would contradict the attribute."""
    if node.op_type == "QuantizeLinear":
        for attribute in [item for item in node.attribute if item.name == "output_dtype"]:
            node.attribute.remove(attribute)


def dequantize_input(model: ModelProto, path: Path) -> None:
    """Write a DequantizeLinear of the input itself as arithmetic on floats, in place."""
    graph = model.graph
    constants = {tensor.name: numpy_helper.to_array(tensor) for tensor in graph.initializer}
    inputs, nodes = {value.name for value in graph.input} - constants.keys(), list(graph.node)
    del graph.node[:]
    for node in nodes:
        if node.op_type != "DequantizeLinear" or node.input[0] not in inputs:
            graph.node.append(node)
            continue
        _check_constant_scale(node, constants, path)
        base = node.output[0]
        zero_point = constants[node.input[2]] if len(node.input) > 2 and node.input[2] else np.zeros(1)
        for name, value in ((f"{base}:zero", zero_point), (f"{base}:scale", constants[node.input[1]])):
            graph.initializer.append(numpy_helper.from_array(value.astype(np.float32), name))
        cast, centred = f"{base}:float", f"{base}:centred"
        graph.node.extend(
            [
                helper.make_node("Cast", [node.input[0]], [cast], cast, to=TensorProto.FLOAT),
                helper.make_node("Sub", [cast, f"{base}:zero"], [centred], centred),
                helper.make_node("Mul", [centred, f"{base}:scale"], [base], f"{base}:scaled"),
            ]
        )


def to_float(model: ModelProto, path: Path) -> int:
    """Remove the Q/DQ pairs of a graph, in place; return how many activations had one.

    Integer weights become floats. What quantizers drop is written again (`dropped_activations.py`). Raises
    ArtifactError for a node whose scale is computed.
    """
    write_dropped_activations(model)
    graph = model.graph
    constants = {tensor.name: numpy_helper.to_array(tensor) for tensor in graph.initializer}
    renamed: dict[str, str] = {}
    kept: list[NodeProto] = []
    num_pairs = 0
    for node in graph.node:
        node.input[:] = [renamed.get(name, name) for name in node.input]
        if node.op_type not in _QDQ:
            kept.append(node)
            continue
        source = node.input[0]
        _check_constant_scale(node, constants, path)
        if node.op_type == "QuantizeLinear":
            num_pairs += source not in constants
            renamed[node.output[0]] = source
        elif source in constants and constants[source].dtype.kind in "iuV":
            graph.initializer.append(numpy_helper.from_array(dequantized(node, constants), node.output[0]))
        else:
            renamed[node.output[0]] = source
    del graph.node[:]
    graph.node.extend(kept)
    _keep_output_names(graph, renamed)
    del graph.value_info[:]
    drop_unused(graph)
    return num_pairs


def float_form(model: ModelProto) -> ModelProto:
    """Return a copy without Q/DQ pairs: the function that the graph rounds, as `to_float` makes it."""
    copied = ModelProto()
    copied.CopyFrom(model)
    to_float(copied, Path(model.graph.name))
    return copied


def _name(node: NodeProto) -> str:
    return str(node.name or node.output[0])


def _check_constant_scale(node: NodeProto, constants: dict[str, NDArray[Any]], path: Path) -> None:
    computed = [name for name in node.input[1:] if name and name not in constants]
    if computed:
        raise ArtifactError(
            f"{path}: node '{_name(node)}' ({node.op_type}) reads the computed scale or zero point '{computed[0]}', "
            "expected constants. Quantize the model statically, or use the float file."
        )


def _quantized_kind(node: NodeProto, constants: dict[str, TensorProto]) -> int:
    if len(node.input) > 2 and node.input[2] in constants:
        return int(constants[node.input[2]].data_type)
    kinds = [attribute.i for attribute in node.attribute if attribute.name == "output_dtype"]
    return kinds[0] if kinds and kinds[0] else TensorProto.UINT8


def dequantized(node: NodeProto, constants: dict[str, NDArray[Any]]) -> NDArray[np.float32]:
    """Evaluate a DequantizeLinear of constants, with ONNX's own reference of the operator."""
    inputs = [name for name in node.input if name]
    constants = {name: _of_whole_bytes(constants[name]) for name in inputs}
    graph = helper.make_graph(
        [node],
        "dequantize",
        [],
        [helper.make_tensor_value_info(node.output[0], TensorProto.FLOAT, None)],
        [numpy_helper.from_array(constants[name], name) for name in inputs],
    )
    evaluator = ReferenceEvaluator(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)]))
    [values] = evaluator.run(None, {})
    return np.asarray(values, np.float32)


def _of_whole_bytes(values: NDArray[Any]) -> NDArray[Any]:
    """Return integers of 4 bits, which numpy does not know, as those of 8."""
    names = {"int4": np.int8, "uint4": np.uint8}
    return values.astype(names[values.dtype.name]) if values.dtype.name in names else values


def _keep_output_names(graph: GraphProto, renamed: dict[str, str]) -> None:
    """Give outputs that a pair made their name again."""
    for value in graph.output:
        if value.name in renamed:
            name = f"{value.name}:output"
            graph.node.append(helper.make_node("Identity", [renamed[value.name]], [value.name], name))
