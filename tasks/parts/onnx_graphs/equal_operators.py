"""Replace operators by equal ones that runtimes compute in integers."""

import math
from typing import Any

import numpy as np
from onnx import ModelProto, NodeProto, TensorProto, helper, numpy_helper

from tasks.parts.onnx_graphs.constant_einsum import einsum_as_matmul
from tasks.parts.onnx_graphs.graph import replace_nodes

REPLACED = frozenset({"AveragePool", "ConvTranspose", "Einsum", "ReduceMean"})
"""Operators that are replaced where they can be."""


def replace_operators(model: ModelProto) -> list[str]:
    """Replace operators in place, in a graph with known shapes; return one sentence for each kind.

    - The mean over rows and columns, and an AveragePool whose only window covers the map, become a GlobalAveragePool:
      ONNX Runtime and OpenVINO have INT8 kernels for it.
    - A ConvTranspose whose stride is its kernel becomes a convolution of 1x1 and a DepthToSpace, with as many
      multiplications: neither runtime computes a ConvTranspose in INT8.
    - An Einsum with a constant weight becomes a MatMul: no runtime computes an Einsum in INT8.
    """
    num_means, num_transposed = _pool_means(model) + _pool_whole_maps(model), _unfold_transposed(model)
    num_einsums = einsum_as_matmul(model)
    changes = []
    if num_means:
        changes.append(f"{num_means} means over rows and columns written as GlobalAveragePool")
    if num_transposed:
        changes.append(f"{num_transposed} ConvTranspose written as Conv and DepthToSpace")
    if num_einsums:
        changes.append(f"{num_einsums} Einsum with a constant weight written as MatMul")
    return changes


def _pool_means(model: ModelProto) -> int:
    graph = model.graph
    replaced: dict[str, list[NodeProto]] = {}
    constants = {tensor.name: tensor for tensor in graph.initializer}
    num_axes = {
        value.name: len(value.type.tensor_type.shape.dim) for value in [*graph.input, *graph.value_info]
    }
    for node in [node for node in graph.node if node.op_type == "ReduceMean"]:
        attributes = _attributes(node)
        axes = attributes.get("axes")
        if len(node.input) > 1 and node.input[1] in constants:
            axes = numpy_helper.to_array(constants[node.input[1]])
        if (
            axes is None
            or num_axes.get(node.input[0]) != 4
            or sorted(int(axis) % 4 for axis in axes) != [2, 3]
        ):
            continue
        output = node.output[0]
        if attributes.get("keepdims", 1):
            nodes = [helper.make_node("GlobalAveragePool", node.input[:1], [output], node.name)]
        else:
            pooled = f"{output}:pooled"
            nodes = [
                helper.make_node("GlobalAveragePool", node.input[:1], [pooled], node.name),
                helper.make_node("Flatten", [pooled], [output], f"{node.name}:flattened", axis=1),
            ]
        replaced[output] = nodes
    replace_nodes(graph, replaced)
    return len(replaced)


def _pool_whole_maps(model: ModelProto) -> int:
    graph = model.graph
    replaced: dict[str, list[NodeProto]] = {}
    sizes = {
        value.name: [axis.dim_value for axis in value.type.tensor_type.shape.dim]
        for value in [*graph.input, *graph.value_info, *graph.output]
    }
    for node in [node for node in graph.node if node.op_type == "AveragePool"]:
        attributes = _attributes(node)
        before, after = (sizes.get(name, [])[2:] for name in (node.input[0], node.output[0]))
        is_whole = len(before) == 2 and all(
            0 < axis <= window for axis, window in zip(before, attributes["kernel_shape"], strict=True)
        )
        is_plain = not any(attributes.get("pads", [])) and attributes.get("auto_pad", b"NOTSET") == b"NOTSET"
        if is_whole and is_plain and after == [1, 1]:
            replaced[node.output[0]] = [
                helper.make_node("GlobalAveragePool", node.input[:1], node.output, node.name)
            ]
    replace_nodes(graph, replaced)
    return len(replaced)


def _unfold_transposed(model: ModelProto) -> int:
    graph = model.graph
    replaced: dict[str, list[NodeProto]] = {}
    constants = {tensor.name: tensor for tensor in graph.initializer}
    for node in [node for node in graph.node if node.op_type == "ConvTranspose"]:
        names = [*node.input[1:]]
        if not _has_disjoint_windows(node, constants) or not set(names) <= constants.keys():
            continue
        weights_IOHW = numpy_helper.to_array(constants[names[0]])
        channels, size = weights_IOHW.shape[1], weights_IOHW.shape[2]
        weights_OIHW = weights_IOHW.transpose(1, 2, 3, 0).reshape(channels * size * size, -1, 1, 1)
        tensors = [
            numpy_helper.from_array(np.ascontiguousarray(weights_OIHW), f"{names[0]}:{node.name}:unfolded")
        ]
        if len(names) > 1:
            bias_O = numpy_helper.to_array(constants[names[1]]).repeat(size * size)
            tensors.append(numpy_helper.from_array(bias_O, f"{names[1]}:{node.name}:unfolded"))
        graph.initializer.extend(tensors)
        output, unfolded = node.output[0], f"{node.output[0]}:unfolded"
        inputs = [node.input[0], *(tensor.name for tensor in tensors)]
        replaced[output] = [
            helper.make_node("Conv", inputs, [unfolded], node.name, kernel_shape=[1, 1]),
            helper.make_node(
                "DepthToSpace", [unfolded], [output], f"{node.name}:folded", blocksize=size, mode="CRD"
            ),
        ]
    replace_nodes(graph, replaced)
    return len(replaced)


def _has_disjoint_windows(node: NodeProto, constants: dict[str, TensorProto]) -> bool:
    """Return whether each output pixel of a ConvTranspose depends on one input pixel, in squares."""
    if node.input[1] not in constants or len(constants[node.input[1]].dims) != 4:
        return False
    attributes = _attributes(node)
    size = [int(axis) for axis in constants[node.input[1]].dims[2:]]
    plain = {
        "group": 1,
        "dilations": [1, 1],
        "pads": [0, 0, 0, 0],
        "output_padding": [0, 0],
        "auto_pad": b"NOTSET",
    }
    return (
        size[0] == size[1]
        and list(attributes.get("strides", [1, 1])) == size
        and math.prod(size) > 1
        and "output_shape" not in attributes
        and all(attributes.get(name, value) == value for name, value in plain.items())
    )


def _attributes(node: NodeProto) -> dict[str, Any]:
    return {attribute.name: helper.get_attribute_value(attribute) for attribute in node.attribute}
