"""Report what an engine really runs: layers by precision, fused nodes, and the share of MACs in each precision.

OpenVINO reports this in its execution graph, ONNX Runtime in the optimised graph, TensorRT in its engine inspector.
Layers are matched with the nodes of the ONNX graph by name.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tasks.parts.engines.manifest import EngineLayer

if TYPE_CHECKING:
    from onnx import ModelProto

UNKNOWN = "unknown"
"""Precision of layers that match no node of the graph."""


@dataclass(frozen=True)
class LayerRow:
    """A row of layers.csv."""

    layer: str
    kind: str
    precision: str
    nodes: str
    """ONNX nodes that it computes, separated by spaces."""
    is_conversion: bool
    macs: int
    """Multiply-adds of one image."""


@dataclass(frozen=True)
class NodeNotInInt8:
    """A node between Q/DQ pairs that the runtime computes in another precision."""

    node: str
    op_type: str
    macs: int
    """Multiply-adds of one image."""
    precision: str
    """What it runs in; "unknown" if no layer of the engine is known to compute it."""


@dataclass(frozen=True)
class ExecutedLayers:
    """Summary of the layers of an engine. The graph is the one that the runtime was given: what the target leaves in
    float there, such as the stem, is not quantized."""

    macs_share: dict[str, float]
    """Share of the graph's MACs that runs in each precision."""
    macs_share_quantized: float
    """Share of the graph's MACs between Q/DQ pairs, which int8 is wanted for."""
    int8_share_of_quantized: float | None
    """Share of the MACs between Q/DQ pairs that run in int8; None if there are none."""
    not_in_int8: tuple[NodeNotInInt8, ...]
    """Nodes between Q/DQ pairs that do not run in int8, most MACs first."""
    num_layers: int
    """Layers that compute."""
    num_fused_nodes: int
    """Nodes that were fused into another layer."""
    num_conversions: int
    """Layers that only change layout or precision."""


def sum_up_layers(layers: Sequence[EngineLayer], graph: "ModelProto") -> ExecutedLayers:
    """Sum up the layers of an engine that the runtime made of `graph`."""
    from tasks.parts.onnx_graphs.macs import conv_macs, quantized_layers

    macs = conv_macs(graph)
    total = sum(macs.values()) or 1
    precision_of = {node: layer.precision for layer in layers for node in layer.nodes}
    macs_of: dict[str, int] = defaultdict(int)
    for node, count in macs.items():
        macs_of[precision_of.get(node) or UNKNOWN] += count
    wanted = [
        NodeNotInInt8(node.name, node.op_type, macs[node.name], precision_of.get(node.name) or UNKNOWN)
        for node in quantized_layers(graph)
    ]
    macs_wanted, missed = sum(node.macs for node in wanted), [n for n in wanted if n.precision != "int8"]
    working = [layer for layer in layers if not layer.is_conversion]
    return ExecutedLayers(
        macs_share={precision: count / total for precision, count in sorted(macs_of.items())},
        macs_share_quantized=macs_wanted / total,
        int8_share_of_quantized=1 - sum(node.macs for node in missed) / macs_wanted if macs_wanted else None,
        not_in_int8=tuple(sorted(missed, key=lambda node: -node.macs)),
        num_layers=len(working),
        num_fused_nodes=sum(max(0, len(layer.nodes) - 1) for layer in working),
        num_conversions=len(layers) - len(working),
    )


def list_rows(layers: Sequence[EngineLayer], graph: "ModelProto") -> list[LayerRow]:
    """Return the rows of layers.csv, in the order of execution."""
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
    """Add all nodes of a fused chain to the layer that is named after its last node.

    ONNX Runtime names a convolution with a fused ReLU after the ReLU. From there the chain is walked back to the
    first convolution or matrix product that no other layer is named after.
    """
    from dataclasses import replace

    makers = {name: node for node in graph.graph.node for name in node.output}
    nodes = {node.name: node for node in graph.graph.node}
    named = {node for layer in layers for node in layer.nodes}
    joined = []
    for layer in layers:
        chain = [nodes.get(name) or makers[name] for name in layer.nodes if name in nodes or name in makers]
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
