"""What every reader of an ONNX file needs: a safe open, card, origin of nodes, encoding of INT8.

Words: a Q/DQ pair is QuantizeLinear followed by DequantizeLinear. "S8S8" means int8 activations and int8
weights, both with zero point 0; "U8S8" means uint8 activations and int8 weights.
"""

import math
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnx
from google.protobuf.message import DecodeError
from onnx import AttributeProto, GraphProto, ModelProto, NodeProto, TensorProto, helper, numpy_helper

from tasks.core.errors import ArtifactError
from tasks.parts.input_card import InputCard

CARD_KEY = "enginewright"
MODULE_KEY = "module"
SOURCE_KEY = "source"
MIN_OPSET, MAX_OPSET = 13, 23  # 13: first with per-channel Q/DQ; 23: last that all our runtimes read
MIN_IR_VERSION, MAX_IR_VERSION = 7, 12

_UINT8_SHIFT = 128
_KEEPS_SIGN_OF_FIRST = frozenset(
    {"MaxPool", "AveragePool", "GlobalAveragePool", "QuantizeLinear", "DequantizeLinear", "Reshape"}
)
_KEEPS_SIGN_OF_ALL = frozenset({"Concat", "Add", "Mul"})


def read_graph(path: Path) -> ModelProto:
    """Open one self-contained ONNX file, or raise ArtifactError that says what is wrong with it.

    Weights outside the file are refused: such files can be missing, truncated or linked to anywhere.
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
            f"{path}: {size_bytes} bytes that are no whole ONNX model ({error}); the file is torn or of "
            "another kind. Delete it and run its stage again."
        ) from error
    _refuse_external_data(model, path)
    _check_versions(model, path)
    try:
        onnx.checker.check_model(model)
    except onnx.checker.ValidationError as error:
        first_line = str(error).strip().splitlines()[0]
        raise ArtifactError(
            f"{path}: not a valid ONNX model ({first_line}). Delete it and run its stage again."
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
            "classes, mean and std. Use a graph that export_onnx wrote; a file of another tool enters through "
            "import_onnx (model=onnx model.path=<file>)."
        )
    return InputCard.from_json(cards[0])


def node_sources(model: ModelProto) -> dict[str, tuple[str, str]]:
    """Return node name -> (dotted torch module, file:line) for all nodes that know where they come from."""
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


def is_quantized(model: ModelProto) -> bool:
    """Tell whether the graph carries Q/DQ."""
    return any(node.op_type == "QuantizeLinear" for node in model.graph.node)


def other_types(model: ModelProto) -> set[str]:
    """Names of the tensors that are not float32, such as shapes, as far as the graph says."""
    values = [*model.graph.value_info, *model.graph.input, *model.graph.output]
    known = {value.name: value.type.tensor_type.elem_type for value in values}
    return {name for name, kind in known.items() if kind not in (TensorProto.UNDEFINED, TensorProto.FLOAT)}


def conv_macs(model: ModelProto) -> dict[str, int]:
    """Multiply-accumulates of each convolution and matrix product for one image, by node name."""
    layers = [
        node for node in model.graph.node if node.op_type in ("Conv", "ConvTranspose", "MatMul", "Gemm")
    ]
    needed = {name for node in layers for name in (*node.input[:2], node.output[0])}
    sizes = _sizes_of_one_image(model)
    unknown = sorted(name for name in needed if not sizes.get(name) or not all(sizes[name]))
    if unknown:  # shapes that the graph computes
        sizes |= _run_for_sizes(model, unknown)
    macs = {}
    for node in layers:
        image, weight, output = (sizes[name] for name in (*node.input[:2], node.output[0]))
        if node.op_type == "Conv":
            macs[node.name] = math.prod(weight) * math.prod(output[2:])
        elif node.op_type == "ConvTranspose":
            macs[node.name] = math.prod(weight) * math.prod(image[2:])
        else:
            channels = weight[-1 if _flag(node, "transB") or len(weight) == 1 else -2]
            macs[node.name] = channels * math.prod(output)
    return macs


def _sizes_of_one_image(model: ModelProto) -> dict[str, list[int]]:
    """Infer the sizes of all tensors for a batch of 1, since tokens and windows may be folded into the batch."""
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
    """Run one black image and look at the named tensors."""
    from tasks.parts.onnx_predict import open_session

    marked = ModelProto()
    marked.CopyFrom(model)
    own = {value.name for value in model.graph.output}
    marked.graph.output.extend(helper.make_empty_tensor_value_info(name) for name in names if name not in own)
    image = model.graph.input[0]
    size = [axis.dim_value for axis in image.type.tensor_type.shape.dim[1:]]
    found = open_session(marked).run(names, {image.name: np.zeros((1, *size), np.float32)})
    return {name: list(values.shape) for name, values in zip(names, found, strict=True)}


def activations_to_uint8(model: ModelProto) -> ModelProto:
    """Return a copy whose int8 activations are uint8 with the same scales; weights stay int8.

    ONNX Runtime multiplies uint8 by int8 on VNNI; S8S8 is slower there than float. A tensor that may be
    negative gets zero point + 128, which is the same arithmetic. One that cannot be negative (after ReLU)
    keeps zero point 0: the same for every value in the calibrated range, and the ReLU then is the lower end
    of uint8, so that ONNX Runtime drops it and runs the whole layer in integers, 4 times faster
    (benchmarks/encodings.py). What int8 would clip above its range is kept up to twice as far. An int8 tensor
    that something else than DequantizeLinear reads keeps its type.
    """
    encoded = ModelProto()
    encoded.CopyFrom(model)
    graph = encoded.graph
    constants = {tensor.name: tensor for tensor in graph.initializer}
    readers: dict[str, list[NodeProto]] = {}
    for node in graph.node:
        for name in node.input:
            readers.setdefault(name, []).append(node)
    outputs = {value.name for value in graph.output}
    never_negative = _never_negative(graph)
    new_zero_points: dict[str, TensorProto] = {}
    shifted: set[str] = set()
    for node in graph.node:
        if node.op_type != "QuantizeLinear" or node.input[0] in constants or node.output[0] in outputs:
            continue
        users = readers.get(node.output[0], [])
        if _quantized_type(node, constants) != TensorProto.INT8 or any(
            user.op_type != "DequantizeLinear" for user in users
        ):
            continue
        zero_point = _zero_point(node, constants)
        is_positive = node.input[0] in never_negative and not zero_point.any()
        values = (zero_point.astype(np.int16) + (0 if is_positive else _UINT8_SHIFT)).astype(np.uint8)
        name = f"{node.output[0]}:uint8_zero_point"
        new_zero_points[name] = numpy_helper.from_array(values, name)
        _drop_attribute(node, "output_dtype")
        for user in [node, *users]:
            user.input[:] = [user.input[0], user.input[1], name]
        shifted.add(node.output[0])
    for value in graph.value_info:
        if value.name in shifted:
            value.type.tensor_type.elem_type = TensorProto.UINT8
    graph.initializer.extend(new_zero_points.values())
    drop_unused(graph)
    return encoded


def _never_negative(graph: GraphProto) -> set[str]:
    """Names of tensors that are >= 0 whatever the input is; nodes are in topological order."""
    positive: set[str] = set()
    for node in graph.node:
        always = node.op_type in ("Relu", "Sigmoid")
        interpolates = node.op_type == "Resize" and _text_attribute(node, "mode") != "cubic"
        first = (interpolates or node.op_type in _KEEPS_SIGN_OF_FIRST) and node.input[0] in positive
        every = node.op_type in _KEEPS_SIGN_OF_ALL and all(name in positive for name in node.input)
        if always or first or every:
            positive.update(node.output)
    return positive


def _refuse_external_data(model: ModelProto, path: Path) -> None:
    outside = [
        tensor.name for tensor in all_tensors(model.graph) if tensor.data_location == TensorProto.EXTERNAL
    ]
    if outside:
        raise ArtifactError(
            f"{path}: {len(outside)} tensors lie outside the file (first: '{outside[0]}'), expected one "
            "self-contained file. Save it again with onnx.save(model, path, save_as_external_data=False)."
        )


def all_tensors(graph: GraphProto) -> Iterator[TensorProto]:
    """Yield every constant of a graph, those inside of nodes and of their subgraphs too."""
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


def _check_versions(model: ModelProto, path: Path) -> None:
    if not model.graph.node or not model.graph.output:
        raise ArtifactError(
            f"{path}: a graph with {len(model.graph.node)} nodes and {len(model.graph.output)} outputs, "
            "expected at least one of each; the file is torn or no ONNX model. Delete it and run its stage "
            "again."
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


def _quantized_type(node: NodeProto, constants: dict[str, TensorProto]) -> int:
    if len(node.input) > 2 and node.input[2] in constants:
        return constants[node.input[2]].data_type
    types = [attribute.i for attribute in node.attribute if attribute.name == "output_dtype"]
    return types[0] if types and types[0] else TensorProto.UINT8


def _zero_point(node: NodeProto, constants: dict[str, TensorProto]) -> np.ndarray:
    if len(node.input) > 2 and node.input[2]:
        return numpy_helper.to_array(constants[node.input[2]])
    return np.zeros(tuple(constants[node.input[1]].dims), dtype=np.int8)


def _text_attribute(node: NodeProto, name: str) -> str | None:
    return next((attribute.s.decode() for attribute in node.attribute if attribute.name == name), None)


def _flag(node: NodeProto, name: str) -> bool:
    return any(attribute.i for attribute in node.attribute if attribute.name == name)


def _drop_attribute(node: NodeProto, name: str) -> None:
    kept = [attribute for attribute in node.attribute if attribute.name != name]
    del node.attribute[:]
    node.attribute.extend(kept)


def drop_unused(graph: GraphProto) -> None:
    """Take out nodes and constants that nothing reads."""
    while True:
        used = {name for node in graph.node for name in node.input} | {value.name for value in graph.output}
        unread = [node for node in graph.node if not used & set(node.output)]
        for node in unread:
            graph.node.remove(node)
        if not unread:
            break
    kept = [tensor for tensor in graph.initializer if tensor.name in used]
    del graph.initializer[:]
    graph.initializer.extend(kept)
