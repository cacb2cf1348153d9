"""Turn an ONNX graph with parts in float16 or float64 into float32."""

import numpy as np
from onnx import ModelProto, TensorProto, ValueInfoProto, numpy_helper

from tasks.parts.onnx_graphs.graph import all_tensors

_TYPE_ATTRIBUTES = ("to", "dtype", "output_dtype")
"""Attributes of standard operators that hold the type of an output."""


def has_half(model: ModelProto) -> bool:
    """Return whether a constant, an input, an output or a cast of the graph is float16."""
    return _has(model, TensorProto.FLOAT16)


def has_double(model: ModelProto) -> bool:
    """Return whether a constant, an input, an output or a cast of the graph is float64."""
    return _has(model, TensorProto.DOUBLE)


def half_to_float(model: ModelProto) -> int:
    """Make every float16 tensor float32, in place; return the number of converted constants."""
    return _to_float(model, TensorProto.FLOAT16)


def double_to_float(model: ModelProto) -> int:
    """Make every float64 tensor float32, in place; return the number of converted constants."""
    return _to_float(model, TensorProto.DOUBLE)


def _has(model: ModelProto, kind: int) -> bool:
    graph = model.graph
    return (
        any(tensor.data_type == kind for tensor in all_tensors(graph))
        or any(_is(value, kind) for value in (*graph.input, *graph.output))
        or any(
            attribute.name in _TYPE_ATTRIBUTES and attribute.i == kind
            for node in graph.node
            for attribute in node.attribute
        )
    )


def _to_float(model: ModelProto, kind: int) -> int:
    graph = model.graph
    found = [tensor for tensor in all_tensors(graph) if tensor.data_type == kind]
    for tensor in found:
        values = numpy_helper.to_array(tensor).astype(np.float32)
        tensor.CopyFrom(numpy_helper.from_array(values, tensor.name))
    for node in graph.node:
        for attribute in node.attribute:
            if attribute.name in _TYPE_ATTRIBUTES and attribute.i == kind:
                attribute.i = TensorProto.FLOAT
    for value in (*graph.input, *graph.output):
        if _is(value, kind):
            value.type.tensor_type.elem_type = TensorProto.FLOAT
    del graph.value_info[:]
    return len(found)


def _is(value: ValueInfoProto, kind: int) -> bool:
    return bool(value.type.tensor_type.elem_type == kind)
