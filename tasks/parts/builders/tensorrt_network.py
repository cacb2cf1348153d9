"""What TensorRT's parser made of a graph, held against the graph before a plan is built.

Checked with the parser of TensorRT for RTX (tests/over_tensorrt_builder.py), which is NVIDIA's code for graphs of
ONNX; not run with that of the data-centre builder. Importing this module needs TensorRT.
"""

from collections import Counter
from collections.abc import Iterator, Mapping

import tensorrt as trt
from onnx import ModelProto, TensorProto

from tasks.core.errors import BuildFailed
from tasks.parts.engines.target import Target
from tasks.parts.onnx_graphs.graph import node_sources, read_shapes

_NAMES = {
    trt.DataType.FLOAT: "f32",
    trt.DataType.HALF: "f16",
    trt.DataType.BF16: "bf16",
    trt.DataType.INT8: "int8",
}
_TYPES = {
    TensorProto.FLOAT: trt.DataType.FLOAT,
    TensorProto.FLOAT16: trt.DataType.HALF,
    TensorProto.BFLOAT16: trt.DataType.BF16,
    TensorProto.INT8: trt.DataType.INT8,
}
_PRODUCTS = (trt.LayerType.CONVOLUTION, trt.LayerType.DECONVOLUTION, trt.LayerType.MATRIX_MULTIPLY)
_SHOWN = 3


def check_types(network: "trt.INetworkDefinition", graph: ModelProto, target: Target) -> None:
    """Check that each tensor has the type that the graph gives it.

    A strongly typed network computes in the types that were parsed, so another type is another precision than the one
    that was asked for. Raises BuildFailed with the first tensors and where they come from.
    """
    typed = read_shapes(graph)
    expected = {
        value.name: _TYPES[value.type.tensor_type.elem_type]
        for value in (*typed.value_info, *typed.output)
        if value.type.tensor_type.elem_type in _TYPES
    }
    wrong = {
        tensor.name: tensor.dtype
        for layer in _layers(network)
        for tensor in _outputs(layer)
        if tensor.dtype != expected.get(tensor.name, tensor.dtype)
    }
    if not wrong:
        return
    makers = {name: node for node in graph.graph.node for name in node.output}
    sources = node_sources(graph)
    lines = []
    for name, found in list(wrong.items())[:_SHOWN]:
        node = makers[name]
        lines.append(
            f"{node.op_type} '{node.name}'{origin_of(node.name, sources)} gives {_NAMES.get(found, found)}, expected "
            f"{_NAMES[expected[name]]}"
        )
    raise BuildFailed(
        f"Target {target.name}: TensorRT {trt.__version__} reads {len(wrong)} tensors in other types than the graph "
        f"has: {'; '.join(lines)}. Replace these operators in the network, or lower export_onnx.opset."
    )


def origin_of(node: str, sources: Mapping[str, tuple[str, str]]) -> str:
    """Return where a node comes from, in brackets; empty if that is not known."""
    module, line = sources.get(node, ("", ""))
    return f" (module {module}, {line})" if module else ""


def count_products(network: "trt.INetworkDefinition") -> dict[str, int]:
    """Return how many convolutions and matrix products compute in each precision; int8 are those between Q/DQ."""
    dequantized = {
        tensor.name
        for layer in _layers(network)
        if layer.type == trt.LayerType.DEQUANTIZE
        for tensor in _outputs(layer)
    }
    found = Counter[str]()
    for layer in _layers(network):
        if layer.type in _PRODUCTS:
            [given] = _outputs(layer)
            read = layer.get_input(0)
            is_int8 = read is not None and read.name in dequantized
            found["int8" if is_int8 else _NAMES.get(given.dtype, str(given.dtype))] += 1
    return dict(found)


def _layers(network: "trt.INetworkDefinition") -> "Iterator[trt.ILayer]":
    for index in range(network.num_layers):
        yield network.get_layer(index)


def _outputs(layer: "trt.ILayer") -> "Iterator[trt.ITensor]":
    for index in range(layer.num_outputs):
        tensor = layer.get_output(index)
        if tensor is not None:
            yield tensor
