"""Write an Einsum with a constant weight as the matrix product that it is, which runtimes compute in INT8."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from onnx import ModelProto, NodeProto, TensorProto, helper, numpy_helper

from tasks.parts.onnx_graphs.graph import replace_nodes
from tasks.parts.onnx_graphs.macs import einsum_labels


@dataclass(frozen=True)
class _Product:
    """An Einsum of an activation and a weight: labels of axes, in the order in which the product has them."""

    activation: str
    weight: str
    labels_of_activation: list[str]
    labels_of_weight: list[str]
    output: list[str]
    rows: list[str]
    """Axes that only the activation has."""
    summed: list[str]
    columns: list[str]
    """Axes that only the weight has."""


def einsum_as_matmul(model: ModelProto) -> int:
    """Replace each Einsum of an activation and a float constant by a MatMul in place; return how many there were.

    The MatMul has the name of the Einsum, and a weight with two axes. An Einsum stays where an axis of the weight is
    in the output and in the activation, too (a product for each head, say), where an axis is summed in one operand
    alone or named twice, and where the number of axes is not known.
    """
    graph = model.graph
    replaced: dict[str, list[NodeProto]] = {}
    constants = {tensor.name: tensor for tensor in graph.initializer}
    num_axes = {
        value.name: len(value.type.tensor_type.shape.dim)
        for value in (*graph.input, *graph.value_info, *graph.output)
        if value.type.tensor_type.HasField("shape")
    } | {name: len(tensor.dims) for name, tensor in constants.items()}
    for node in [node for node in graph.node if node.op_type == "Einsum"]:
        product = _find_product(node, constants, num_axes)
        if product is None:
            continue
        weight = numpy_helper.to_array(constants[product.weight])
        nodes, tensors = _write(node, product, weight)
        graph.initializer.extend(tensors)
        replaced[node.output[0]] = nodes
    replace_nodes(graph, replaced)
    return len(replaced)


def _find_product(
    node: NodeProto, constants: Mapping[str, TensorProto], num_axes: Mapping[str, int]
) -> _Product | None:
    is_constant = [name in constants for name in node.input]
    if sorted(is_constant) != [False, True] or not set(node.input) <= num_axes.keys():
        return None
    equation = next(item.s.decode() for item in node.attribute if item.name == "equation")
    operands, output = einsum_labels(equation, [[0] * num_axes[name] for name in node.input])
    place = is_constant.index(True)
    weight, activation = operands[place], operands[1 - place]
    rows = [label for label in output if label in activation]
    columns = [label for label in output if label in weight]
    summed = [label for label in activation if label in weight]
    is_product = (
        constants[node.input[place]].data_type == TensorProto.FLOAT
        and all(len(set(labels)) == len(labels) for labels in (weight, activation, output))
        and {*rows, *summed} == set(activation)
        and {*columns, *summed} == set(weight)
        and not (set(rows) | set(columns)) & set(summed)
        and all((rows, columns, summed))
    )
    if not is_product:
        return None
    return _Product(
        node.input[1 - place], node.input[place], activation, weight, output, rows, summed, columns
    )


def _write(
    node: NodeProto, product: _Product, weight: NDArray[np.float32]
) -> tuple[list[NodeProto], list[TensorProto]]:
    """Return the nodes and constants of Transpose, Reshape, MatMul, Reshape and Transpose, as far as needed."""
    nodes: list[NodeProto] = []
    tensors: list[TensorProto] = []
    source = product.activation

    def add(operator: str, inputs: Sequence[str], step: str, **attributes: Any) -> str:
        name = f"{node.output[0]}:{step}"
        title = node.name if operator == "MatMul" else f"{node.name}:{step}"
        nodes.append(helper.make_node(operator, inputs, [name], title, **attributes))
        return name

    def constant(values: NDArray[np.generic], step: str) -> str:
        tensors.append(numpy_helper.from_array(np.ascontiguousarray(values), f"{node.output[0]}:{step}"))
        return tensors[-1].name

    def moved(labels: Sequence[str], wanted: Sequence[str], step: str) -> str:
        if list(labels) == list(wanted):
            return source
        return add("Transpose", [source], step, perm=[list(labels).index(label) for label in wanted])

    order = [*product.summed, *product.columns]
    sizes = dict(zip(product.labels_of_weight, weight.shape, strict=True))
    num_summed = int(np.prod([sizes[label] for label in product.summed]))
    weight_IO = weight.transpose([product.labels_of_weight.index(label) for label in order]).reshape(
        num_summed, -1
    )
    source = moved(product.labels_of_activation, [*product.rows, *product.summed], "rows_first")
    kept = [0] * len(product.rows)  # 0 keeps a size
    if len(product.summed) > 1:
        shape = constant(np.array([*kept, num_summed]), "joined_shape")
        source = add("Reshape", [source, shape], "joined")
    source = add("MatMul", [source, constant(weight_IO, "weight")], "product")
    if len(product.columns) > 1:
        shape = constant(np.array([*kept, *(sizes[label] for label in product.columns)]), "split_shape")
        source = add("Reshape", [source, shape], "split")
    moved([*product.rows, *product.columns], product.output, "in_order")
    nodes[-1].output[0] = node.output[0]
    return nodes, tensors
