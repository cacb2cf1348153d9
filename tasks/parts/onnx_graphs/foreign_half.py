"""Turn an ONNX graph with float16 parts into float32."""

import numpy as np
from onnx import ModelProto, TensorProto, ValueInfoProto, numpy_helper

from tasks.parts.onnx_graphs.graph import all_tensors

_TYPE_ATTRIBUTES = ("to", "dtype", "output_dtype")
"""Attributes of standard operators that hold the type of an output."""


def has_half(model: ModelProto) -> bool:
    """Return whether a constant, an input, an output or a cast of the graph is float16."""
    graph = model.graph
    return (
        any(tensor.data_type == TensorProto.FLOAT16 for tensor in all_tensors(graph))
        or any(_is_half(value) for value in (*graph.input, *graph.output))
        or any(
            attribute.name in _TYPE_ATTRIBUTES and attribute.i == TensorProto.FLOAT16
            for node in graph.node
            for attribute in node.attribute
        )
    )


def half_to_float(model: ModelProto) -> int:
    """Make every float16 tensor float32, in place; return the number of converted constants."""
    graph = model.graph
    halves = [tensor for tensor in all_tensors(graph) if tensor.data_type == TensorProto.FLOAT16]
    for tensor in halves:
        values = numpy_helper.to_array(tensor).astype(np.float32)
        tensor.CopyFrom(numpy_helper.from_array(values, tensor.name))
    for node in graph.node:
        for attribute in node.attribute:
            if attribute.name in _TYPE_ATTRIBUTES and attribute.i == TensorProto.FLOAT16:
                attribute.i = TensorProto.FLOAT
    for value in (*graph.input, *graph.output):
        if _is_half(value):
            value.type.tensor_type.elem_type = TensorProto.FLOAT
    del graph.value_info[:]
    return len(halves)


def _is_half(value: ValueInfoProto) -> bool:
    return bool(value.type.tensor_type.elem_type == TensorProto.FLOAT16)
