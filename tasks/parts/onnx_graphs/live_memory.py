"""Estimate the memory of the activations of a graph, to choose how many images run at once."""

import math

from onnx import ModelProto, TensorProto, helper, shape_inference

_SMALL = 64
"""Constants of so few numbers may be shapes, which tell the sizes of other tensors."""


def live_bytes(model: ModelProto) -> int:
    """Return the most bytes of activations that are alive at once for one image, in the order of the nodes.

    Tensors whose size is not known count as nothing, all others as float32. Runtimes that compute in place need less,
    and with a heap that is divided into odd pieces more.
    """
    sizes = _bytes_of_tensors(model)
    last_reader = {name: index for index, node in enumerate(model.graph.node) for name in node.input}
    ends: dict[int, list[str]] = {}
    for name, index in last_reader.items():
        ends.setdefault(index, []).append(name)
    alive = most = sum(sizes.get(value.name, 0) for value in model.graph.input)
    for index, node in enumerate(model.graph.node):
        alive += sum(sizes.get(name, 0) for name in node.output)
        most = max(most, alive)
        alive -= sum(sizes.get(name, 0) for name in ends.get(index, ()))
    return most


def images_that_fit(model: ModelProto, max_bytes: int, *, most: int) -> int:
    """Return of how many images, at most `most` and one at least, the activations fit into so much memory."""
    return max(1, min(most, max_bytes // max(1, live_bytes(model))))


def _bytes_of_tensors(model: ModelProto) -> dict[str, int]:
    """Return the size of each activation for one image; weights are left out of the inference of shapes."""
    light = ModelProto()
    light.ir_version = model.ir_version
    light.opset_import.extend(model.opset_import)
    light.functions.extend(model.functions)
    light.graph.name = "sizes"
    light.graph.node.extend(model.graph.node)
    light.graph.input.extend(model.graph.input)
    light.graph.output.extend(helper.make_empty_tensor_value_info(value.name) for value in model.graph.output)
    constants = {tensor.name for tensor in model.graph.initializer}
    for tensor in model.graph.initializer:
        if math.prod(tensor.dims) <= _SMALL and tensor.data_location != TensorProto.EXTERNAL:
            light.graph.initializer.append(tensor)
        else:
            light.graph.input.append(
                helper.make_tensor_value_info(tensor.name, tensor.data_type, tensor.dims)
            )
    for value in light.graph.input:
        if value.name not in constants and value.type.tensor_type.shape.dim:
            value.type.tensor_type.shape.dim[0].dim_value = 1
    graph = shape_inference.infer_shapes(light, data_prop=True).graph
    return {
        value.name: 4 * math.prod(axis.dim_value for axis in value.type.tensor_type.shape.dim)
        for value in (*graph.input, *graph.value_info, *graph.output)
        if value.name not in constants
    }
