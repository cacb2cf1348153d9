"""Read and write ONNX files; query graphs for their card, the origin of nodes, and other things."""

from collections import Counter
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
from google.protobuf.message import DecodeError, Message
from onnx import AttributeProto, GraphProto, ModelProto, NodeProto, TensorProto

from tasks.core.errors import ArtifactError, first_line
from tasks.parts.data.input_card import InputCard

CARD_KEY = "enginewright"
MODULE_KEY = "module"
SOURCE_KEY = "source"
MIN_OPSET, MAX_OPSET = 13, 23  # 13: first with per-channel Q/DQ; 23: last that all runtimes here read
MIN_IR_VERSION, MAX_IR_VERSION = 7, 12

MOVES_VALUES = frozenset(
    {
        "DepthToSpace",
        "Flatten",
        "Identity",
        "Reshape",
        "Slice",
        "SpaceToDepth",
        "Split",
        "Squeeze",
        "Transpose",
        "Unsqueeze",
    }
)
"""Operators that only move the values of one tensor."""


@dataclass(frozen=True)
class GraphIndex:
    """Who makes and who reads each tensor of a graph, as it was when `index_graph` walked it.

    The nodes and tensors are those of the graph, so a change of one of them shows; one that comes or goes does not.
    """

    makers: dict[str, NodeProto]
    """Tensor -> the node that computes it."""
    readers: dict[str, list[NodeProto]]
    """Tensor -> the nodes that read it, in graph order, each once; tensors that no node reads are missing."""
    constants: dict[str, TensorProto]
    """Name -> initializer."""
    outputs: frozenset[str]
    """Names of the outputs of the graph."""


def index_graph(graph: GraphProto) -> GraphIndex:
    """Walk a graph once, so that a rewrite needs no search of its own for each node."""
    makers: dict[str, NodeProto] = {}
    readers: dict[str, list[NodeProto]] = {}
    for node in graph.node:
        for name in node.output:
            makers[name] = node
        for name in dict.fromkeys(node.input):
            readers.setdefault(name, []).append(node)
    return GraphIndex(
        makers,
        readers,
        {tensor.name: tensor for tensor in graph.initializer},
        frozenset(value.name for value in graph.output),
    )


def read_graph(path: Path) -> ModelProto:
    """Open one self-contained ONNX file; raise ArtifactError for any other.

    Weights outside the file are refused, because such files can be missing, truncated or linked to anywhere.
    """
    if not path.is_file():
        raise ArtifactError(
            f"{path}: no such file, expected an ONNX model. Run the stage that exports it (export_onnx)."
        )
    size_bytes = path.stat().st_size
    if size_bytes == 0:
        raise ArtifactError(f"{path}: 0 bytes, expected an ONNX model. Delete it and run its stage again.")
    try:
        model = onnx.load(path, load_external_data=False)
    except DecodeError as error:
        raise ArtifactError(
            f"{path}: {size_bytes} bytes that are not an ONNX model ({error}); the file is damaged or of "
            "another kind. Delete it and run its stage again."
        ) from error
    _refuse_external_data(model, path)
    _check_versions(model, path)
    try:
        onnx.checker.check_model(model)
    except onnx.checker.ValidationError as error:
        raise ArtifactError(
            f"{path}: not a valid ONNX model ({first_line(error)}). Delete it and run its stage again."
        ) from error
    return model


def write_graph(model: ModelProto, path: Path) -> None:
    """Write one self-contained file; equal models give equal bytes."""
    path.write_bytes(model.SerializeToString(deterministic=True))


def read_card_of_graph(model: ModelProto) -> InputCard:
    """Return the card (task, classes, mean and std, size) that export_onnx or import_onnx stored in the graph."""
    cards = [entry.value for entry in model.metadata_props if entry.key == CARD_KEY]
    if len(cards) != 1:
        raise ArtifactError(
            f"graph '{model.graph.name}': {len(cards)} metadata entries '{CARD_KEY}', expected 1 with "
            "classes, mean and std. Use a graph that export_onnx wrote, or import a file of another tool with "
            "import_onnx (model=onnx model.path=<file>)."
        )
    return InputCard.from_json(cards[0])


def node_sources(model: ModelProto) -> dict[str, tuple[str, str]]:
    """Return node name -> (dotted torch module, file:line) for all nodes with a recorded origin."""
    sources: dict[str, tuple[str, str]] = {}
    for node in model.graph.node:
        entries = {entry.key: entry.value for entry in node.metadata_props}
        if MODULE_KEY in entries and SOURCE_KEY in entries:
            sources[node.name] = (entries[MODULE_KEY], entries[SOURCE_KEY])
    return sources


def set_node_source(node: NodeProto, module: str, source: str) -> None:
    """Replace all metadata of a node by its module and file:line."""
    del node.metadata_props[:]
    for key, value in ((MODULE_KEY, module), (SOURCE_KEY, source)):
        entry = node.metadata_props.add()
        entry.key, entry.value = key, value


def name_nodes(model: ModelProto) -> int:
    """Name every node without a name of its own after its first output, and return how many there were.

    Quantizers and reports identify layers by name.
    """
    counts = Counter(node.name for node in model.graph.node)
    taken = {name for name, count in counts.items() if name and count == 1}
    unnamed = [node for node in model.graph.node if node.name not in taken]
    for node in unnamed:
        name, number = node.output[0], 2
        while name in taken:
            name, number = f"{node.output[0]}_{number}", number + 1
        node.name = name
        taken.add(name)
    return len(unnamed)


def is_quantized(model: ModelProto) -> bool:
    """Return whether the graph has Q/DQ nodes."""
    return any(node.op_type == "QuantizeLinear" for node in model.graph.node)


def other_types(model: ModelProto) -> set[str]:
    """Return the names of the tensors that the graph declares as other than float32, such as shapes."""
    values = [*model.graph.value_info, *model.graph.input, *model.graph.output]
    known = {value.name: value.type.tensor_type.elem_type for value in values}
    return {name for name, kind in known.items() if kind not in (TensorProto.UNDEFINED, TensorProto.FLOAT)}


def all_tensors(graph: GraphProto) -> Iterator[TensorProto]:
    """Yield every constant of a graph, including those inside nodes and their subgraphs."""
    yield from graph.initializer
    for sparse in graph.sparse_initializer:
        yield sparse.values
        yield sparse.indices
    for node in graph.node:
        for attribute in node.attribute:
            if attribute.type == AttributeProto.TENSOR:
                yield attribute.t
            yield from attribute.tensors
            for subgraph in [*attribute.graphs, *([attribute.g] if attribute.HasField("g") else [])]:
                yield from all_tensors(subgraph)


def resize_scale(size: int, new_size: int) -> float:
    """Return the scale with which a Resize makes exactly `new_size` of a size, as float32."""
    scale = np.float32(new_size) / np.float32(size)
    if int(np.floor(np.float32(size) * scale)) != new_size:
        scale = np.nextafter(scale, np.float32(np.inf))
    return float(scale)


def captured_names(node: NodeProto) -> set[str]:
    """Return the names that the subgraphs of a node use."""
    subgraphs: list[GraphProto] = [a.g for a in node.attribute if a.type == AttributeProto.GRAPH]
    return {
        name
        for graph in subgraphs
        for inner in graph.node
        for name in (*inner.input, *captured_names(inner), *(value.name for value in graph.output))
    }


def drop_unused(graph: GraphProto) -> None:
    """Remove nodes and constants that no output of the graph depends on.

    What stays is not copied: a message keeps the memory of all that it ever held.
    """
    makers = {name: index for index, node in enumerate(graph.node) for name in node.output}
    used: set[str] = set()
    kept: set[int] = set()
    waiting = [value.name for value in graph.output]
    while waiting:
        name = waiting.pop()
        if name in used:
            continue
        used.add(name)
        index = makers.get(name)
        if index is not None and index not in kept:
            kept.add(index)
            waiting.extend((*graph.node[index].input, *captured_names(graph.node[index])))
    for index in reversed(range(len(graph.node))):
        if index not in kept:
            del graph.node[index]
    for index in reversed(range(len(graph.initializer))):
        if graph.initializer[index].name not in used:
            del graph.initializer[index]


def copy_without(model: ModelProto, constants: Container[str]) -> ModelProto:
    """Return a copy without some constants, which are not copied to be removed."""
    copied = ModelProto()
    for source, target, left_out in (
        (model, copied, "graph"),
        (model.graph, copied.graph, "initializer"),
    ):
        for field, value in source.ListFields():
            if field.name == left_out:
                continue
            if isinstance(value, Message):
                getattr(target, field.name).CopyFrom(value)
            elif isinstance(value, str | bytes | int):
                setattr(target, field.name, value)
            else:
                getattr(target, field.name).extend(value)
    copied.graph.initializer.extend(
        tensor for tensor in model.graph.initializer if tensor.name not in constants
    )
    return copied


def replace_nodes(graph: GraphProto, replacements: Mapping[str, Sequence[NodeProto]]) -> None:
    """Put nodes in the place of others, which are named by their first output; new nodes keep the origin of old ones.

    Without new nodes a node is removed. Nodes that stay keep their identity for those who hold them.
    """
    if not replacements:
        return
    places = [index for index, node in enumerate(graph.node) if node.output[0] in replacements]
    for index in reversed(places):
        node = graph.node[index]
        for new in replacements[node.output[0]]:
            new.metadata_props.extend(node.metadata_props)
        del graph.node[index]
        for offset, new in enumerate(replacements[node.output[0]]):
            graph.node.insert(index + offset, new)


def _refuse_external_data(model: ModelProto, path: Path) -> None:
    outside = [
        tensor.name for tensor in all_tensors(model.graph) if tensor.data_location == TensorProto.EXTERNAL
    ]
    if outside:
        raise ArtifactError(
            f"{path}: {len(outside)} tensors are outside the file (first: '{outside[0]}'), expected one "
            "self-contained file. Save it again with onnx.save(model, path, save_as_external_data=False)."
        )


def _check_versions(model: ModelProto, path: Path) -> None:
    if not model.graph.node or not model.graph.output:
        raise ArtifactError(
            f"{path}: a graph with {len(model.graph.node)} nodes and {len(model.graph.output)} outputs, "
            "expected at least one of each; the file is damaged or not an ONNX model. Delete it and run its "
            "stage again."
        )
    opsets = {entry.domain: entry.version for entry in model.opset_import}
    opset = opsets.get("", opsets.get("ai.onnx"))
    if opset is None or not MIN_OPSET <= opset <= MAX_OPSET:
        raise ArtifactError(
            f"{path}: opset {opset}, expected {MIN_OPSET}..{MAX_OPSET}. Export it again with "
            "export_onnx.opset in that range."
        )
    if not MIN_IR_VERSION <= model.ir_version <= MAX_IR_VERSION:
        raise ArtifactError(
            f"{path}: IR version {model.ir_version}, expected {MIN_IR_VERSION}..{MAX_IR_VERSION}. Export it "
            "again with the installed torch and onnx."
        )
