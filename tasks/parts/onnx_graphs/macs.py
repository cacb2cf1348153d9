"""Count the multiply-accumulate operations (MACs) of the convolutions and matrix products of a graph."""

import math
from dataclasses import dataclass

import numpy as np
import onnx
from onnx import ModelProto, NodeProto, helper

LAYER_TYPES = frozenset({"Conv", "ConvTranspose", "MatMul", "Gemm"})
"""Operators that do nearly all the work."""


@dataclass(frozen=True)
class LayerSize:
    """The size of a convolution or matrix product."""

    macs: int
    """Multiply-accumulates of one image."""
    channels_in: int
    channels_out: int
    groups: int


def conv_macs(model: ModelProto) -> dict[str, int]:
    """Return the multiply-accumulates of each convolution and matrix product for one image, by node name."""
    return {name: size.macs for name, size in layer_sizes(model).items()}


def layer_sizes(model: ModelProto) -> dict[str, LayerSize]:
    """Return the size of each convolution and matrix product, by node name."""
    layers = [node for node in model.graph.node if node.op_type in LAYER_TYPES]
    needed = {name for node in layers for name in (*node.input[:2], node.output[0])}
    sizes = sizes_of_one_image(model)
    unknown = sorted(name for name in needed if not sizes.get(name) or not all(sizes[name]))
    if unknown:  # shapes that the graph computes
        sizes |= _run_for_sizes(model, unknown)
    found = {}
    for node in layers:
        image, weight, output = (sizes[name] for name in (*node.input[:2], node.output[0]))
        groups = next((attribute.i for attribute in node.attribute if attribute.name == "group"), 1)
        if node.op_type == "Conv":
            macs = math.prod(weight) * math.prod(output[2:])
            found[node.name] = LayerSize(macs, groups * weight[1], weight[0], groups)
        elif node.op_type == "ConvTranspose":
            macs = math.prod(weight) * math.prod(image[2:])
            found[node.name] = LayerSize(macs, weight[0], groups * weight[1], groups)
        else:
            channels = weight[-1 if _flag(node, "transB") or len(weight) == 1 else -2]
            found[node.name] = LayerSize(
                channels * math.prod(output), channels, output[-1] if output else 1, 1
            )
    return found


def quantized_layers(model: ModelProto) -> list[NodeProto]:
    """Return the convolutions and matrix products whose input and weight both come from DequantizeLinear."""
    dequantized = {node.output[0] for node in model.graph.node if node.op_type == "DequantizeLinear"}
    return [
        node
        for node in model.graph.node
        if node.op_type in LAYER_TYPES and dequantized.issuperset(node.input[:2])
    ]


def sizes_of_one_image(model: ModelProto) -> dict[str, list[int]]:
    """Infer the sizes of all tensors for a batch of 1, because tokens and windows may be folded into the batch."""
    single = ModelProto()
    single.CopyFrom(model)
    single.graph.input[0].type.tensor_type.shape.dim[0].dim_value = 1
    del single.graph.value_info[:]
    for value in single.graph.output:
        value.type.tensor_type.ClearField("shape")
    inferred = onnx.shape_inference.infer_shapes(single, data_prop=True).graph
    sizes = {
        value.name: [axis.dim_value for axis in value.type.tensor_type.shape.dim]
        for value in [*inferred.input, *inferred.value_info, *inferred.output]
    }
    return sizes | {tensor.name: list(tensor.dims) for tensor in model.graph.initializer}


def _run_for_sizes(model: ModelProto, names: list[str]) -> dict[str, list[int]]:
    """Run the graph on one image of zeros and return the sizes of the named tensors."""
    from tasks.parts.onnx_session import open_session

    marked = ModelProto()
    marked.CopyFrom(model)
    own = {value.name for value in model.graph.output}
    marked.graph.output.extend(helper.make_empty_tensor_value_info(name) for name in names if name not in own)
    image = model.graph.input[0]
    size = [axis.dim_value for axis in image.type.tensor_type.shape.dim[1:]]
    dtype = helper.tensor_dtype_to_np_dtype(image.type.tensor_type.elem_type)
    arrays = open_session(marked).run(names, {image.name: np.zeros((1, *size), dtype)})
    return {name: list(values.shape) for name, values in zip(names, arrays, strict=True)}


def _flag(node: NodeProto, name: str) -> bool:
    return any(attribute.i for attribute in node.attribute if attribute.name == name)
