"""Q/DQ pairs of a graph: what one rounds, and a graph without one.

Rewrites that move pairs share these; each works on a graph and on its index, as it was before.
"""

from collections.abc import Collection, Mapping

import numpy as np
from numpy.typing import NDArray
from onnx import GraphProto, NodeProto, TensorProto, numpy_helper

from tasks.parts.onnx_graphs.foreign_qdq import dequantized
from tasks.parts.onnx_graphs.graph import GraphIndex


def rounded_by_pair(name: str, makers: Mapping[str, NodeProto]) -> str | None:
    """Return the tensor that a Q/DQ pair rounds to this one; None if this one comes from no pair."""
    dequantize = makers.get(name)
    if dequantize is None or dequantize.op_type != "DequantizeLinear":
        return None
    quantize = makers.get(dequantize.input[0])
    return quantize.input[0] if quantize is not None and quantize.op_type == "QuantizeLinear" else None


def drop_pair(index: GraphIndex, quantize: NodeProto | None) -> None:
    """Let the readers of a Q/DQ pair read what it rounds."""
    if quantize is None:
        return
    pairs = {node.output[0] for node in index.readers.get(quantize.output[0], [])}
    for pair in pairs:
        for node in index.readers.get(pair, []):
            node.input[:] = [quantize.input[0] if name == pair else name for name in node.input]


def is_stored_quantized(weight: NodeProto, constants: Collection[str]) -> bool:
    """Return whether a node dequantizes constants; some tools quantize float weights in the graph."""
    return weight.op_type == "DequantizeLinear" and all(name in constants for name in weight.input if name)


def float_weight(weight: NodeProto, constants: Mapping[str, TensorProto]) -> NDArray[np.float32]:
    """Return the values of a weight that is stored quantized."""
    return dequantized(
        weight, {name: numpy_helper.to_array(constants[name]) for name in weight.input if name}
    )


def read_float(
    graph: GraphProto,
    node: NodeProto,
    source: str,
    weight: NDArray[np.float32],
    constants: dict[str, TensorProto],
) -> None:
    """Let a layer read a float tensor and this weight."""
    name = f"{node.input[1]}:float"
    if name not in constants:  # layers may share a weight
        graph.initializer.append(numpy_helper.from_array(weight, name))
        constants[name] = graph.initializer[-1]
    node.input[0], node.input[1] = source, name
