"""What an engine really runs: layers by precision, what was fused into them, and how the MACs are spread.

The runtimes tell it in their own words: OpenVINO in its execution graph, ONNX Runtime in the graph after its
optimisations, TensorRT in its engine inspector. Layers are joined with the nodes of the ONNX graph by name.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tasks.parts.engines.manifest import EngineLayer

if TYPE_CHECKING:
    from onnx import ModelProto

UNKNOWN = "unknown"
"""Precision of layers that cannot be joined with the graph."""


@dataclass(frozen=True)
class LayerRow:
    """A line of layers.csv."""

    layer: str
    kind: str
    precision: str
    nodes: str
    """ONNX nodes that it computes, separated by spaces."""
    is_conversion: bool
    macs: int
    """Multiply-adds of one image."""


@dataclass(frozen=True)
class ExecutedLayers:
    """What the layers of an engine come to."""

    macs_share: dict[str, float]
    """Share of the graph's MACs that runs in each precision."""
    macs_share_quantized: float
    """Share of the MACs that the graph wants in int8: between Q/DQ pairs."""
    num_layers: int
    """Layers that compute."""
    num_fused_nodes: int
    """Nodes that another layer computes along."""
    num_conversions: int
    """Layers that only change layout or precision."""


def sum_up_layers(layers: Sequence[EngineLayer], graph: "ModelProto") -> ExecutedLayers:
    """Sum up the layers of an engine that was built from `graph`."""
    from tasks.parts.onnx_graphs.macs import conv_macs

    macs = conv_macs(graph)
    total = sum(macs.values()) or 1
    precision_of = {node: layer.precision for layer in layers for node in layer.nodes}
    macs_of: dict[str, int] = defaultdict(int)
    for node, count in macs.items():
        macs_of[precision_of.get(node) or UNKNOWN] += count
    dequantized = {node.output[0] for node in graph.graph.node if node.op_type == "DequantizeLinear"}
    wanted = [node.name for node in graph.graph.node if len(dequantized & set(node.input[:2])) == 2]
    working = [layer for layer in layers if not layer.is_conversion]
    return ExecutedLayers(
        macs_share={precision: count / total for precision, count in sorted(macs_of.items())},
        macs_share_quantized=sum(macs.get(name, 0) for name in wanted) / total,
        num_layers=len(working),
        num_fused_nodes=sum(max(0, len(layer.nodes) - 1) for layer in working),
        num_conversions=len(layers) - len(working),
    )


def list_rows(layers: Sequence[EngineLayer], graph: "ModelProto") -> list[LayerRow]:
    """Return the lines of layers.csv, in the order of execution."""
    from tasks.parts.onnx_graphs.macs import conv_macs

    macs = conv_macs(graph)
    return [
        LayerRow(
            layer=layer.name,
            kind=layer.kind,
            precision=layer.precision,
            nodes=" ".join(layer.nodes),
            is_conversion=layer.is_conversion,
            macs=sum(macs.get(node, 0) for node in layer.nodes),
        )
        for layer in layers
    ]


def join_fused(
    layers: Sequence[EngineLayer], graph: "ModelProto", layer_types: Sequence[str]
) -> tuple[EngineLayer, ...]:
    """Give layers that are named after the last node of a fused chain all nodes of it.

    ONNX Runtime names a convolution that computes its ReLU along after the ReLU: from there the chain is walked back
    to the first convolution or matrix product that no other layer is named after.
    """
    from dataclasses import replace

    makers = {name: node for node in graph.graph.node for name in node.output}
    nodes = {node.name: node for node in graph.graph.node}
    named = {node for layer in layers for node in layer.nodes}
    joined = []
    for layer in layers:
        chain = [nodes[name] for name in layer.nodes if name in nodes]
        while (
            len(layer.nodes) == 1
            and any(word.lower() in layer.kind.lower() for word in layer_types)
            and chain
            and chain[0].op_type not in layer_types
        ):
            before = [makers[name] for name in chain[0].input if name in makers]
            before = [node for node in before if node.name not in named]
            chain = [before[0], *chain] if before else []
        joined.append(replace(layer, nodes=tuple(node.name for node in chain)) if chain else layer)
    return tuple(joined)
