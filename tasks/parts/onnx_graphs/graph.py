"""Read and write ONNX files; query graphs for their card, the origin of nodes, and other things."""

import hashlib
import math
import re
from collections import Counter
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from google.protobuf.message import DecodeError, Message
from onnx import AttributeProto, GraphProto, ModelProto, NodeProto, TensorProto, helper, numpy_helper

from tasks.core.errors import ArtifactError, first_line
from tasks.parts.data.input_card import InputCard
from tasks.parts.onnx_session import copy_field, copy_without, large_constants, refer, size_of

CARD_KEY = "enginewright"
MODULE_KEY = "module"
SOURCE_KEY = "source"
MIN_OPSET, MAX_OPSET = 13, 23  # 13: first with per-channel Q/DQ; 23: last that all runtimes here read
MIN_IR_VERSION, MAX_IR_VERSION = 7, 12
MAX_BYTES = 2**31 - 2**24
"""Most bytes of the constants in one file: the limit of a protobuf message, minus room for nodes and shapes."""
_SMALL_CONSTANT = 1000
_WEIGHTS_SUFFIX = ".weights"
_WEIGHTS_FILE = re.compile(r"[0-9a-f]{32}\.weights")

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
    """Open one ONNX file that `write_graph` wrote, or a self-contained one; raise ArtifactError for any other.

    Weights that lie elsewhere are refused, because such files can be missing, truncated or linked to anywhere.
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
    _load_weights(model, path)
    _check_versions(model, path)
    try:
        check_model(model)
    except onnx.checker.ValidationError as error:
        raise ArtifactError(
            f"{path}: not a valid ONNX model ({first_line(error)}). Delete it and run its stage again."
        ) from error
    return model


def write_graph(model: ModelProto, path: Path) -> None:
    """Write one self-contained file; equal models give equal bytes.

    A message ends at 2 GiB. The large constants of a larger graph go into a file beside it, which is named by their
    md5, so that the graph's own bytes tell which they are.
    """
    if not is_too_large(model):
        with path.open("wb") as file:
            file.writelines(_serialized(model))
        return
    large, offset, digest = large_constants(model), 0, hashlib.md5(usedforsecurity=False)
    draft, places = path.with_suffix(_WEIGHTS_SUFFIX), {}
    with draft.open("wb") as file:
        for name, tensor in large.items():
            values = numpy_helper.to_array(tensor).tobytes()
            places[name] = offset, len(values)
            digest.update(values)
            offset += file.write(values)
    weights = path.with_name(f"{digest.hexdigest()}{_WEIGHTS_SUFFIX}")
    draft.replace(weights)
    light = copy_without(model, large)
    light.graph.initializer.extend(
        refer(name, tensor, weights.name, *places[name]) for name, tensor in large.items()
    )
    path.write_bytes(light.SerializeToString(deterministic=True))


def _serialized(model: ModelProto) -> Iterator[bytes]:
    """Yield what `SerializeToString(deterministic=True)` returns; of large graphs in parts of one constant each.

    As a whole it takes several times the memory of the graph.
    """
    if not large_constants(model):
        yield model.SerializeToString(deterministic=True)
        return
    constants = model.graph.initializer
    for part in _serialized_fields(model, "graph"):
        if part is not None:
            yield part
            continue
        size = sum(
            sum(map(_size_with_head, constants)) if own is None else len(own)
            for own in _serialized_fields(model.graph, "initializer")
        )
        yield _head(ModelProto, "graph", size)
        for own in _serialized_fields(model.graph, "initializer"):
            if own is not None:
                yield own
                continue
            for tensor in constants:
                yield _head(GraphProto, "initializer", tensor.ByteSize())
                yield tensor.SerializeToString(deterministic=True)


def _serialized_fields(message: Message, apart: str) -> Iterator[bytes | None]:
    """Yield the bytes of each field that is set, in the order of a serialized message; None for the field `apart`."""
    for field, value in message.ListFields():
        if field.name == apart:
            yield None
            continue
        alone = type(message)()
        copy_field(alone, field.name, value)
        yield alone.SerializeToString(deterministic=True)


def _size_with_head(tensor: TensorProto) -> int:
    size: int = tensor.ByteSize()
    return size + len(_head(GraphProto, "initializer", size))


def _head(kind: type[Message], field: str, size: int) -> bytes:
    """Return what stands in front of a message in a field: number and type of the field, and the message's bytes.

    Protocol Buffers documentation, "Encoding", length-delimited records.
    """
    tag, head = kind.DESCRIPTOR.fields_by_name[field].number << 3 | 2, bytearray()
    for number in (tag, size):
        while number > 0x7F:
            head.append(number & 0x7F | 0x80)
            number >>= 7
        head.append(number)
    return bytes(head)


def pads_with_zeros(pad: NodeProto, constants: Mapping[str, TensorProto]) -> bool:
    """Return whether a Pad of mode constant is known to add zeros."""
    padding = pad.input[2] if len(pad.input) > 2 else ""
    return not padding or (padding in constants and not numpy_helper.to_array(constants[padding]).any())


def is_too_large(model: ModelProto) -> bool:
    """Return whether a graph does not fit into one file."""
    return size_of_constants(model) > MAX_BYTES


def size_of_constants(model: ModelProto) -> int:
    """Return the bytes of all constants."""
    return sum(map(size_of, model.graph.initializer))


def infer_shapes(model: ModelProto, *, strict_mode: bool = False, data_prop: bool = False) -> ModelProto:
    """Return a copy with the shapes that ONNX infers; large constants are not passed through onnx."""
    return without_large_constants(
        model,
        lambda light: onnx.shape_inference.infer_shapes(light, strict_mode=strict_mode, data_prop=data_prop),
    )


def read_shapes(model: ModelProto, *, data_prop: bool = False) -> GraphProto:
    """Return the graph with the shapes that ONNX infers, to be read: its large constants are inputs."""
    return onnx.shape_inference.infer_shapes(_light(model), data_prop=data_prop).graph


def check_model(model: ModelProto, *, full_check: bool = False) -> None:
    """Raise onnx.checker.ValidationError, or with `full_check` InferenceError, for a graph that is not valid."""
    onnx.checker.check_model(_light(model), full_check=full_check)


def without_large_constants(
    model: ModelProto,
    change: Callable[[ModelProto], ModelProto],
    kept: Container[str] = (),
) -> ModelProto:
    """Return a changed graph; where it has large constants, `change` gets them as inputs, but for those in `kept`."""
    large = {name: tensor for name, tensor in large_constants(model).items() if name not in kept}
    if not large:
        return change(model)
    changed = change(_with_inputs(model, large))
    for index in reversed(range(len(changed.graph.input))):
        if changed.graph.input[index].name in large:
            del changed.graph.input[index]
    changed.graph.initializer.extend(large.values())
    return changed


def light_copy(model: ModelProto) -> ModelProto:
    """Return a copy whose large constants are inputs of the same type and shape."""
    return _with_inputs(model, large_constants(model))


def _light(model: ModelProto) -> ModelProto:
    return light_copy(model) if large_constants(model) else model


def _with_inputs(model: ModelProto, constants: Mapping[str, TensorProto]) -> ModelProto:
    """Return a copy in which some constants are inputs of the same type and shape."""
    light = copy_without(model, constants)
    listed = {value.name for value in model.graph.input}  # old files list constants among the inputs
    light.graph.input.extend(
        helper.make_tensor_value_info(name, tensor.data_type, tensor.dims)
        for name, tensor in constants.items()
        if name not in listed
    )
    return light


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


def read_attribute(node: NodeProto, name: str, default: Any) -> Any:
    """Return the value of an attribute; the default where the node has none of this name."""
    found = next((item for item in node.attribute if item.name == name), None)
    return default if found is None else helper.get_attribute_value(found)


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


def join_equal_constants(graph: GraphProto) -> None:
    """Let the readers of equal small constants read the first of them."""
    first: dict[tuple[int, tuple[int, ...], bytes], str] = {}
    joined = {}
    for tensor in graph.initializer:
        if math.prod(tensor.dims) < _SMALL_CONSTANT:
            key = tensor.data_type, tuple(tensor.dims), numpy_helper.to_array(tensor).tobytes()
            joined[tensor.name] = first.setdefault(key, tensor.name)
    for node in graph.node:
        node.input[:] = [joined.get(name, name) for name in node.input]
    drop_unused(graph)


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


def _load_weights(model: ModelProto, path: Path) -> None:
    """Read the constants that `write_graph` put into a file of their own; raise ArtifactError for any other file."""
    outside = [tensor for tensor in all_tensors(model.graph) if tensor.data_location == TensorProto.EXTERNAL]
    if not outside:
        return
    place_of = {tensor.name: {entry.key: entry.value for entry in tensor.external_data} for tensor in outside}
    names = {place.get("location", "") for place in place_of.values()}
    if len(names) != 1 or not _WEIGHTS_FILE.fullmatch(next(iter(names))):
        raise ArtifactError(
            f"{path}: {len(outside)} tensors are outside the file (first: '{outside[0].name}'), expected one "
            "self-contained file. Save it again with onnx.save(model, path, save_as_external_data=False)."
        )
    weights, digest = path.with_name(names.pop()), hashlib.md5(usedforsecurity=False)
    try:
        with weights.open("rb") as file:
            for tensor in outside:  # one after the other, as they were written
                tensor.raw_data = file.read(int(place_of[tensor.name]["length"]))
                digest.update(tensor.raw_data)
                del tensor.external_data[:]
                tensor.ClearField("data_location")
    except OSError as error:
        raise ArtifactError(
            f"{weights}: the weights of {path.name} cannot be read ({error}). Run its stage again."
        ) from error
    if digest.hexdigest() != weights.stem:
        raise ArtifactError(
            f"{weights}: not the weights of {path.name}, whose md5 is the file's name; the file is damaged or of "
            "another graph. Delete both and run their stage again."
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
