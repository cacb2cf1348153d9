"""Report what an engine really runs: layers by precision, fused nodes, and the share of MACs in each precision.

OpenVINO reports this in its execution graph, ONNX Runtime in the optimised graph, TensorRT in its engine inspector.
Layers are matched with the nodes of the ONNX graph by the tensors that they compute and by name.
"""

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from tasks.parts.engines.manifest import EngineLayer

if TYPE_CHECKING:
    from onnx import ModelProto, NodeProto

LAYER_WORDS = re.compile(r"conv(?!ert)|matmul|gemm|fullyconnected", re.IGNORECASE)
"""Matches the names that the runtimes have for convolutions and matrix products."""

WORK_WORDS = re.compile(rf"{LAYER_WORDS.pattern}|einsum|lstm|gru|rnn|attention", re.IGNORECASE)
"""Matches these and the names of other operators whose MACs are counted."""

UNKNOWN = "unknown"
"""Precision of nodes that match no layer."""

_QDQ = ("QuantizeLinear", "DequantizeLinear")


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
    kernel: str
    """The implementation, by the runtime's own name; empty if it reports none."""
    reads: str
    """Layers whose results it reads, separated by tabs."""
    input_bytes: int | None
    """Bytes read from other layers for one image, as the runtime stores them; empty if it does not report them."""
    weight_bytes: int | None
    """Bytes of constants."""
    output_bytes: int | None
    """Bytes written for one image."""
    operators: str
    """Types of `nodes`, separated by spaces."""
    channels_in: int | None
    """Channels that its convolution, matrix product or other operator with MACs reads; empty without one."""
    channels_out: int | None
    groups: int | None
    module: str
    """Module of the network that it comes from; empty if the graph does not tell."""
    source: str
    """file:line of that module."""


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
    uncounted_operators: dict[str, int]
    """Operator of the graph -> nodes whose MACs are not known. They are in none of the shares, which are those of the
    other operators."""
    num_layers: int
    """Layers that compute."""
    num_fused_nodes: int
    """Nodes that were fused into another layer."""
    num_conversions: int
    """Layers that only change layout or precision."""


def sum_up_layers(layers: Sequence[EngineLayer], graph: "ModelProto") -> ExecutedLayers:
    """Sum up the layers of an engine that the runtime made of `graph`."""
    from tasks.parts.onnx_graphs.macs import conv_macs, quantized_layers, uncounted_operators

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
        uncounted_operators=uncounted_operators(graph),
        num_layers=len(working),
        num_fused_nodes=sum(max(0, len(layer.nodes) - 1) for layer in working),
        num_conversions=len(layers) - len(working),
    )


def list_rows(layers: Sequence[EngineLayer], graph: "ModelProto") -> list[LayerRow]:
    """Return the rows of layers.csv, in the order of execution."""
    from tasks.parts.onnx_graphs.graph import node_sources
    from tasks.parts.onnx_graphs.macs import layer_sizes

    sizes, sources = layer_sizes(graph), node_sources(graph)
    types = {node.name: node.op_type for node in graph.graph.node}
    rows = []
    for layer in layers:
        works = sorted((node for node in layer.nodes if node in sizes), key=lambda node: -sizes[node].macs)
        work = sizes[works[0]] if works else None
        module, source = next((sources[node] for node in (*works, *layer.nodes) if node in sources), ("", ""))
        rows.append(
            LayerRow(
                layer=layer.name,
                kind=layer.kind,
                precision=layer.precision,
                nodes=" ".join(layer.nodes),
                is_conversion=layer.is_conversion,
                macs=sum(sizes[node].macs for node in works),
                kernel=layer.kernel,
                reads="\t".join(layer.reads),
                input_bytes=layer.input_bytes,
                weight_bytes=layer.weight_bytes,
                output_bytes=layer.output_bytes,
                operators=" ".join(types[node] for node in layer.nodes),
                channels_in=work.channels_in if work else None,
                channels_out=work.channels_out if work else None,
                groups=work.groups if work else None,
                module=module,
                source=source,
            )
        )
    return rows


def join_nodes(layers: Sequence[EngineLayer], graph: "ModelProto") -> tuple[EngineLayer, ...]:
    """Return the layers with the names of the nodes of `graph` that each of them computes.

    A layer is joined by the tensors that it computes and by the names that it reports, of nodes or of tensors. Of
    several layers that report the same operator whose MACs are counted, it belongs to the first one of such a kind. A
    layer of such a kind that reports none, because it is named after a node fused into it, gets the one before that
    node, unless another layer reports it.
    """
    from tasks.parts.onnx_graphs.macs import COUNTED_TYPES

    order = {node.name: index for index, node in enumerate(graph.graph.node)}
    nodes = {node.name: node for node in graph.graph.node}
    makers = {name: node for node in graph.graph.node for name in node.output}
    reported = [
        {makers[name].name for name in layer.outputs if name in makers}
        | {(nodes.get(name) or makers[name]).name for name in layer.nodes if name in nodes or name in makers}
        for layer in layers
    ]
    is_worker = [bool(WORK_WORDS.search(layer.kind)) for layer in layers]
    owners: dict[str, int] = {}
    for index in sorted(range(len(layers)), key=lambda index: not is_worker[index]):
        for name in reported[index]:
            if nodes[name].op_type in COUNTED_TYPES:
                owners.setdefault(name, index)
    claimed = set().union(*reported)
    joined = []
    for index in range(len(layers)):
        computed = {name for name in reported[index] if owners.get(name, index) == index}
        if is_worker[index]:
            own = {name for name in computed if name in owners}
            for name in sorted(computed - own, key=order.__getitem__):
                chain = _chain_before(nodes[name], makers, claimed - computed)
                if chain and (not own or chain[0].name in own):
                    computed |= {node.name for node in chain}
                    own.add(chain[0].name)
            claimed |= computed
        joined.append(computed)
    for layer, computed in zip(layers, joined, strict=True):
        if not layer.is_conversion and {nodes[name].op_type for name in computed} == {"Cast"}:
            computed |= {  # the runtime dropped the cast, and the layer before it took its name
                maker.name
                for name in computed
                if (maker := makers.get(nodes[name].input[0])) and maker.name not in claimed
            }
    _add_unreported(joined, graph)
    return tuple(
        replace(
            layer,
            nodes=tuple(
                sorted(
                    {name for name in computed if nodes[name].op_type not in _QDQ} or computed,
                    key=order.__getitem__,
                )
            ),
        )
        for layer, computed in zip(layers, joined, strict=True)
    )


def _add_unreported(computed: Sequence[set[str]], graph: "ModelProto") -> None:
    """Give nodes that no layer reports, such as an activation function, to the one that makes what they read."""
    owners = {name: index for index, names in enumerate(computed) for name in names}
    makers = {name: node.name for node in graph.graph.node for name in node.output}
    for node in graph.graph.node:
        if node.name in owners or node.op_type in _QDQ:
            continue
        before = [owners[makers[name]] for name in node.input if makers.get(name) in owners]
        if before:
            owners[node.name] = max(before)
            computed[owners[node.name]].add(node.name)


def _chain_before(
    last: "NodeProto", makers: Mapping[str, "NodeProto"], foreign: Set[str]
) -> list["NodeProto"]:
    """Return the nodes from the nearest operator whose MACs are counted to the one before `last`, empty without one.

    The way back ends at the nodes of other layers and where a quantized tensor is read.
    """
    from tasks.parts.onnx_graphs.macs import COUNTED_TYPES

    chains, seen = [[last]], {last.name}
    for chain in chains:  # grows: breadth first
        for name in chain[0].input:
            maker = makers.get(name)
            if maker is None or maker.name in foreign | seen or maker.op_type == "DequantizeLinear":
                continue
            if maker.op_type in COUNTED_TYPES:
                return [maker, *chain[:-1]]
            seen.add(maker.name)
            chains.append([maker, *chain])
    return []
