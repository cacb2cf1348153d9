"""Rewrite a graph for the fastest execution on a target: the same function with other operators.

Each rewrite is a switch of the target; benchmarks/encodings.py measures them.
"""

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import ModelProto, NodeProto, TensorProto, helper, numpy_helper

from tasks.parts.engines.machine import int8_sums_saturate
from tasks.parts.engines.target import Target
from tasks.parts.onnx_graphs.graph import drop_unused, is_quantized
from tasks.parts.onnx_graphs.uint8_activations import activations_to_uint8

_MAX_7_BITS, _MAX_8_BITS = 63, 127

STEM_CHANNELS = 4
"""Largest number of channels of an image."""

MAX_MACS_PER_VALUE = 32
"""Largest multiply-adds per value for which interpolation as matrix products is used; beyond, Resize is faster."""


def rewrite_for(target: Target, graph: ModelProto) -> ModelProto:
    """Return the graph with the target's rewrites applied."""
    if target.max_batch == 1:
        graph = fix_batch(graph)
    if target.uint8_activations and is_quantized(graph):
        graph = activations_to_uint8(graph)
        if int8_sums_saturate():
            graph = weights_to_7_bits(graph)
    if target.stem_in_float:
        graph = stem_in_float(graph)
    return resize_as_matmul(graph) if target.resize_as_matmul else graph


def fix_batch(model: ModelProto) -> ModelProto:
    """Return a copy that takes one image, with all shapes known.

    OpenVINO is 1.1 to 1.2 times as fast for it as for a range of batches; ONNX Runtime gains nothing
    (benchmarks/encodings.py).
    """
    rewritten = ModelProto()
    rewritten.CopyFrom(model)
    for value in (*rewritten.graph.input, *rewritten.graph.output):
        value.type.tensor_type.shape.dim[0].dim_value = 1
    del rewritten.graph.value_info[:]
    return onnx.shape_inference.infer_shapes(rewritten, data_prop=True)


def weights_to_7_bits(model: ModelProto) -> ModelProto:
    """Return a copy in which int8 weights have 7 bits in layers that read a uint8 activation with a zero point.

    There, two products of 8 bits can exceed the 16 bits in which x86 adds them without VNNI. Activations without a
    zero point use half of uint8 and cannot. A layer with a quantized bias stays as it is: kernels scale the bias by
    the product of both scales.
    """
    rewritten = ModelProto()
    rewritten.CopyFrom(model)
    graph = rewritten.graph
    constants = {tensor.name: tensor for tensor in graph.initializer}
    makers = {name: node for node in graph.node for name in node.output}
    factor = np.float32(_MAX_7_BITS / _MAX_8_BITS)
    for node in [node for node in graph.node if node.op_type in ("Conv", "ConvTranspose", "MatMul", "Gemm")]:
        dequantized = [makers.get(name) for name in node.input]
        if [maker is not None and maker.op_type for maker in dequantized] not in (
            ["DequantizeLinear"] * 2,
            ["DequantizeLinear"] * 2 + [False],
        ):
            continue
        activation, weight = dequantized[:2]
        assert activation is not None and weight is not None
        if weight.input[0] not in constants or not _has_zero_point(activation, constants):
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


def stem_in_float(model: ModelProto) -> ModelProto:
    """Return a copy in which convolutions that read the quantized image read the image itself.

    Their int8 weights are dequantized. Three channels do not fill a vector register of an integer kernel: ONNX
    Runtime takes twice as long as for the same convolution in float.
    """
    rewritten = ModelProto()
    rewritten.CopyFrom(model)
    graph = rewritten.graph
    constants = {tensor.name: tensor for tensor in graph.initializer}
    makers = {name: node for node in graph.node for name in node.output}
    images = {value.name for value in graph.input}
    for node in graph.node:
        if node.op_type != "Conv" or node.input[0] not in makers or node.input[1] not in makers:
            continue
        dequantize, weight = makers[node.input[0]], makers[node.input[1]]
        quantize = makers.get(dequantize.input[0])
        reads_image = quantize is not None and quantize.input[0] in images
        if not reads_image or weight.op_type != "DequantizeLinear":
            continue
        values_OIHW = _dequantized(
            weight, {name: numpy_helper.to_array(constants[name]) for name in weight.input}
        )
        if values_OIHW.shape[1] > STEM_CHANNELS:
            continue
        name = f"{weight.output[0]}:float"
        graph.initializer.append(numpy_helper.from_array(values_OIHW, name))
        assert quantize is not None
        node.input[0], node.input[1] = quantize.input[0], name
    drop_unused(graph)
    return rewritten


def resize_as_matmul(model: ModelProto) -> ModelProto:
    """Return a copy in which a bilinear Resize that produces the logits is replaced by two matrix products.

    Bilinear interpolation is linear and separable: rows times a constant matrix, columns times another. For the
    small maps of a segmentation head this is three times as fast as ONNX Runtime's Resize kernel.
    """
    rewritten = ModelProto()
    rewritten.CopyFrom(model)
    graph = rewritten.graph
    maker = next(node for node in graph.node if graph.output[0].name in node.output)
    if maker.op_type != "Resize" or not _is_bilinear(maker):
        return rewritten
    inferred = onnx.shape_inference.infer_shapes(model).graph
    sizes = {
        value.name: [axis.dim_value for axis in value.type.tensor_type.shape.dim]
        for value in [*inferred.value_info, *inferred.input, *inferred.output]
    }
    maps, logits = maker.input[0], maker.output[0]
    size, new_size = sizes.get(maps, []), sizes[logits]
    if len(size) != 4 or not all([*size[2:], *new_size[2:]]):
        return rewritten  # the size may change between calls
    (height, width), (new_height, new_width) = size[2:], new_size[2:]
    if height + width * height / new_height > MAX_MACS_PER_VALUE:
        return rewritten
    widen_wW, heighten_Hh = f"{logits}:widen", f"{logits}:heighten"
    graph.initializer.append(numpy_helper.from_array(_interpolation(width, new_width).T.copy(), widen_wW))
    graph.initializer.append(numpy_helper.from_array(_interpolation(height, new_height), heighten_Hh))
    widened = helper.make_node("MatMul", [maps, widen_wW], [f"{logits}:widened"], f"{maker.name}:widen")
    heightened = helper.make_node("MatMul", [heighten_Hh, widened.output[0]], [logits], maker.name)
    for node in (widened, heightened):
        node.metadata_props.extend(maker.metadata_props)
    index = list(graph.node).index(maker)
    graph.node.remove(maker)
    graph.node.insert(index, widened)
    graph.node.insert(index + 1, heightened)
    drop_unused(graph)
    return rewritten


def _has_zero_point(node: NodeProto, constants: dict[str, TensorProto]) -> bool:
    return len(node.input) > 2 and bool(numpy_helper.to_array(constants[node.input[2]]).any())


def _is_bilinear(node: NodeProto) -> bool:
    attributes = {attribute.name: helper.get_attribute_value(attribute) for attribute in node.attribute}
    return (
        attributes.get("mode") == b"linear"
        and attributes.get("coordinate_transformation_mode", b"half_pixel") == b"half_pixel"
        and not attributes.get("antialias", 0)
        and not attributes.get("exclude_outside", 0)
    )


def _interpolation(size: int, new_size: int) -> NDArray[np.float32]:
    """Return the matrix [new_size, size] of linear interpolation (ONNX half_pixel, edges repeated)."""
    centres = np.clip((np.arange(new_size) + 0.5) * size / new_size - 0.5, 0, size - 1)
    left = np.floor(centres).astype(int)
    right = np.minimum(left + 1, size - 1)
    matrix = np.zeros((new_size, size))
    np.add.at(matrix, (np.arange(new_size), left), 1 - (centres - left))
    np.add.at(matrix, (np.arange(new_size), right), centres - left)
    return matrix.astype(np.float32)


def _dequantized(node: NodeProto, values: dict[str, NDArray[np.generic]]) -> NDArray[np.float32]:
    """Evaluate a DequantizeLinear of constants; scales are per tensor or per output channel (axis 0)."""
    levels = values[node.input[0]].astype(np.float32)
    scale, zero_point = (
        values[name].astype(np.float32).reshape(-1, *[1] * (levels.ndim - 1)) for name in node.input[1:3]
    )
    return np.asarray((levels - zero_point) * scale, np.float32)
