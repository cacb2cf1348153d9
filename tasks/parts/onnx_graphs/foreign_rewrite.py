"""Rewrite an ONNX graph of another tool for this pipeline, and refuse one that the pipeline cannot use.

The result has one float32 input [batch, 3, H, W] with a dynamic batch, one output (logits [batch, C], or
[batch, C, H, W] of the image's size), standard operators of an opset that every runtime and quantizer reads, named
nodes and constants as initializers. N batch, C classes, H rows, W columns.
"""

import contextlib
import io
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
import onnxslim
from onnx import ModelProto, NodeProto, TensorProto, ValueInfoProto, helper, numpy_helper
from onnx.inliner import inline_local_functions

from tasks.core.errors import ArtifactError, first_line
from tasks.parts.data.dataset import MAX_CLASSES
from tasks.parts.data.input_card import Task
from tasks.parts.onnx_graphs.equal_operators import replace_operators
from tasks.parts.onnx_graphs.foreign_file import find_file, read_foreign
from tasks.parts.onnx_graphs.graph import MAX_IR_VERSION, MAX_OPSET, MIN_IR_VERSION, MIN_OPSET, drop_unused

_BATCH = "batch"
_STANDARD = ("", "ai.onnx")
_LAYOUT = "float32 [N, 3, height, width], N fixed or dynamic"


class FixedBatch(ArtifactError):
    """A graph whose batch cannot be made dynamic."""


@dataclass(frozen=True)
class Imported:
    """A rewritten graph, and the changes that were made."""

    graph: ModelProto
    """The written graph, without a card."""
    task: Task
    num_classes: int
    tensor: str
    """Name of the output in the original file; the rewritten graph still has this tensor."""
    static_batch: int | None
    """Fixed batch size of the original file; None if it was dynamic."""
    max_batch: int | None
    """1 if the batch stayed fixed; None if it is dynamic."""
    opset_before: int
    rewritten: tuple[str, ...]
    """One sentence for each change."""


def rewrite(
    original: ModelProto,
    *,
    path: Path,
    height: int | None,
    width: int | None,
    output: str | None,
    is_batch_freed: bool,
) -> Imported:
    """Rewrite a foreign graph for this pipeline; `height` and `width` are for graphs that leave them open.

    With `is_batch_freed`, a fixed batch is made dynamic. Raises FixedBatch if that is impossible, ArtifactError for a
    graph that the pipeline cannot use.
    """
    model, changes = ModelProto(), []
    model.CopyFrom(original)
    opset = _opset(model, path)
    if model.functions:
        changes.append(f"{len(model.functions)} functions inlined")
        model = inline_local_functions(model)
    _check_operators(model, path)
    image = _find_image(model, path)
    tensor = _choose_output(model, path, output)
    static_batch = _set_size(image, path, height=height, width=width)
    if opset < MIN_OPSET:
        model = _convert(model, path)
        changes.append(f"opset {opset} converted to {MIN_OPSET}")
    num_before = len(model.graph.node)
    model = _simplify(model)
    changes.append(f"simplified from {num_before} to {len(model.graph.node)} nodes")
    changes += _name_nodes(model)
    max_batch = None if is_batch_freed else static_batch
    if max_batch not in (None, 1):
        raise _fixed_batch(
            path, f"the batch of {max_batch} cannot be made dynamic, and no engine supports it"
        )
    if max_batch == 1:
        changes.append("batch stays 1, which the graph depends on")
    elif static_batch is not None:
        num_rewritten = _free_batch(model, static_batch)
        changes.append(f"batch of {static_batch} made dynamic, {num_rewritten} Reshape constants rewritten")
    model = _infer(model, path, max_batch)
    task, num_classes, head = _rewrite_head(model, tensor, path)
    changes += head
    changes += replace_operators(model)
    drop_unused(model.graph)
    del model.metadata_props[:]
    model.ir_version = min(max(model.ir_version, MIN_IR_VERSION), MAX_IR_VERSION)
    model = _infer(model, path, max_batch)
    onnx.checker.check_model(model, full_check=True)
    return Imported(model, task, num_classes, tensor, static_batch, max_batch, opset, tuple(changes))


def read_image_size(
    model: Path, *, height: int | None, width: int | None, output: str | None
) -> tuple[int, int]:
    """Return height and width of the images that a model reads; raise the same errors as `rewrite`."""
    path, graph = find_file(model), read_foreign(model)
    _opset(graph, path)
    if graph.functions:
        graph = inline_local_functions(graph)
    _check_operators(graph, path)
    image = _find_image(graph, path)
    _choose_output(graph, path, output)
    _set_size(image, path, height=height, width=width)
    _, _, image_height, image_width = _sizes(image)
    return image_height, image_width


def with_output(model: ModelProto, tensor: str) -> ModelProto:
    """Return a copy whose only output is one of its tensors."""
    marked = ModelProto()
    marked.CopyFrom(model)
    del marked.graph.output[:]
    marked.graph.output.append(helper.make_tensor_value_info(tensor, TensorProto.FLOAT, None))
    return marked


def _opset(model: ModelProto, path: Path) -> int:
    opset = next((entry.version for entry in model.opset_import if entry.domain in _STANDARD), 0)
    if not 1 <= opset <= MAX_OPSET:
        raise ArtifactError(
            f"{path}: opset {opset}, expected at most {MAX_OPSET}, which all runtimes here read. Export it with "
            "an older opset."
        )
    return int(opset)


def _check_operators(model: ModelProto, path: Path) -> None:
    foreign = Counter(
        f"{node.domain}::{node.op_type}" for node in model.graph.node if node.domain not in _STANDARD
    )
    if foreign:
        raise ArtifactError(
            f"{path}: {sum(foreign.values())} nodes are not standard ONNX operators: "
            f"{', '.join(sorted(foreign)[:5])}. Export the model without runtime-specific operators, "
            "for example before a runtime optimised it."
        )
    branching = [
        node for node in model.graph.node if any(item.HasField("g") or item.graphs for item in node.attribute)
    ]
    if branching:
        raise ArtifactError(
            f"{path}: {len(branching)} nodes contain subgraphs (first: {branching[0].op_type} "
            f"'{branching[0].name}'), expected one plain graph. Export the model without control "
            "flow (torch.export, or a traced module)."
        )
    kept = [entry for entry in model.opset_import if entry.domain in _STANDARD]
    del model.opset_import[:]
    model.opset_import.extend(kept)


def _find_image(model: ModelProto, path: Path) -> ValueInfoProto:
    """Return the only input; weights that old files list among the inputs are removed from them."""
    constants = {tensor.name for tensor in model.graph.initializer}
    inputs = [value for value in model.graph.input if value.name not in constants]
    found = ", ".join(f"'{value.name}' {_describe(value)}" for value in inputs)
    if len(inputs) != 1:
        raise ArtifactError(f"{path}: {len(inputs)} inputs ({found}), expected one image: {_LAYOUT}.")
    kept = ValueInfoProto()
    kept.CopyFrom(inputs[0])
    del model.graph.input[:]
    model.graph.input.append(kept)
    image: ValueInfoProto = model.graph.input[0]
    sizes = _sizes(image)
    if image.type.tensor_type.elem_type != TensorProto.FLOAT or len(sizes) != 4:
        raise ArtifactError(
            f"{path}: the input is {found}, expected {_LAYOUT}: normalised RGB. Export the model without the "
            "preprocessing before it."
        )
    is_open = sizes[1] == 0 and sizes[3] != 3  # some tools name all four axes
    if sizes[1] != 3 and not is_open:
        hint = (
            " It looks like [N, height, width, 3]: transpose it in the export (tf2onnx: --inputs-as-nchw)."
            if sizes[3] == 3
            else ""
        )
        raise ArtifactError(f"{path}: the input is {found}, expected {_LAYOUT}.{hint}")
    return image


def _choose_output(model: ModelProto, path: Path, output: str | None) -> str:
    names = [value.name for value in model.graph.output]
    if output is None and len(names) > 1:
        raise ArtifactError(
            f"{path}: {len(names)} outputs ({', '.join(names)}). Name the one with the logits: "
            f"model.output={names[0]}."
        )
    if output is not None and output not in names:
        raise ArtifactError(f"{path}: has no output '{output}' (model.output); found: {', '.join(names)}.")
    chosen = next(value for value in model.graph.output if value.name == (output or names[0]))
    if chosen.type.tensor_type.elem_type != TensorProto.FLOAT:
        raise ArtifactError(
            f"{path}: output '{chosen.name}' is {_describe(chosen)}, expected float32 logits. Export the model "
            "without the ArgMax or the cast after them."
        )
    kept = ValueInfoProto()
    kept.CopyFrom(chosen)
    del model.graph.output[:]
    model.graph.output.append(kept)
    drop_unused(model.graph)
    return str(kept.name)


def _set_size(image: ValueInfoProto, path: Path, *, height: int | None, width: int | None) -> int | None:
    """Fix height and width of the input; return the batch that the graph fixes, or None."""
    dims = image.type.tensor_type.shape.dim
    dims[1].dim_value = 3
    for axis, name, wanted in ((2, "height", height), (3, "width", width)):
        found = max(0, dims[axis].dim_value)  # some tools write -1 for open
        if not found and wanted is None:
            raise ArtifactError(
                f"{path}: the input leaves its {name} open ({_describe(image)}). Set the one that engines are built "
                f"for, for example model.{name}=224."
            )
        if found and wanted not in (None, found):
            raise ArtifactError(
                f"{path}: the input has {name} {found}, model.{name} is {wanted}. Set model.{name}=null, or "
                "export the model for that size."
            )
        dims[axis].dim_value = found or wanted or 0
    return max(0, dims[0].dim_value) or None


def _convert(model: ModelProto, path: Path) -> ModelProto:
    model.ir_version = max(model.ir_version, 4)  # since version 4 weights need not be inputs
    try:
        return onnx.version_converter.convert_version(model, MIN_OPSET)
    except (RuntimeError, ValueError) as error:
        raise ArtifactError(
            f"{path}: onnx cannot convert it to opset {MIN_OPSET} ({first_line(error)}). Export it "
            f"with opset {MIN_OPSET} to {MAX_OPSET}."
        ) from error


def _simplify(model: ModelProto) -> ModelProto:
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        slim: ModelProto = onnxslim.slim(model)
    _constants_to_initializers(slim)
    return slim


def _constants_to_initializers(model: ModelProto) -> None:
    for node in [node for node in model.graph.node if node.op_type == "Constant"]:
        attribute = node.attribute[0]
        if attribute.name == "value":
            tensor = TensorProto()
            tensor.CopyFrom(attribute.t)
            tensor.name = node.output[0]
        else:
            dtype = np.int64 if "int" in attribute.name else np.float32
            values = np.array(helper.get_attribute_value(attribute), dtype)
            tensor = numpy_helper.from_array(values, node.output[0])
        model.graph.initializer.append(tensor)
        model.graph.node.remove(node)
    drop_unused(model.graph)


def _name_nodes(model: ModelProto) -> list[str]:
    """Give every node a unique name, because quantizers and reports identify layers by name."""
    counts = Counter(node.name for node in model.graph.node)
    taken = {name for name, count in counts.items() if name and count == 1}
    unnamed = [node for node in model.graph.node if node.name not in taken]
    number = 0
    for node in unnamed:
        while (name := f"{node.op_type}_{number}") in taken:
            number += 1
        node.name = name
        taken.add(name)
    return [f"{len(unnamed)} nodes named"] if unnamed else []


def _free_batch(model: ModelProto, static_batch: int) -> int:
    """Make the batch dynamic; return how many Reshape constants were rewritten.

    In a Reshape of a tensor that depends on the image and whose first axis is the batch, a first number equal to the
    batch becomes 0, which means "as in the input". Only running the graph shows whether that was enough.
    """
    graph = model.graph
    sizes = {value.name: _sizes(value) for value in onnx.shape_inference.infer_shapes(model).graph.value_info}
    sizes[graph.input[0].name] = _sizes(graph.input[0])
    constants = {tensor.name: tensor for tensor in graph.initializer}
    from_image, num_rewritten = {graph.input[0].name}, 0
    for node in graph.node:
        if not from_image & set(node.input):
            continue
        from_image.update(node.output)
        if node.op_type != "Reshape" or node.input[1] not in constants or _integer(node, "allowzero"):
            continue
        shape = numpy_helper.to_array(constants[node.input[1]]).copy()
        if len(shape) and shape[0] == static_batch and (sizes.get(node.input[0]) or [0])[0] == static_batch:
            shape[0] = 0
            name = f"{node.output[0]}:shape"
            graph.initializer.append(numpy_helper.from_array(shape, name))
            node.input[1] = name
            num_rewritten += 1
    graph.input[0].type.tensor_type.shape.dim[0].dim_param = _BATCH
    drop_unused(graph)
    return num_rewritten


def _infer(model: ModelProto, path: Path, max_batch: int | None) -> ModelProto:
    """Infer all shapes again; a dynamic batch is the only open size.

    Raises FixedBatch if the batch does not reach the output.
    """
    graph = model.graph
    if max_batch is None:
        graph.input[0].type.tensor_type.shape.dim[0].dim_param = _BATCH
    del graph.value_info[:]
    graph.output[0].type.tensor_type.ClearField("shape")
    try:
        inferred = onnx.shape_inference.infer_shapes(model, strict_mode=True, data_prop=True)
    except onnx.shape_inference.InferenceError as error:
        raise _fixed_batch(path, first_line(error)) from error
    sizes = _sizes(inferred.graph.output[0])
    if not sizes or sizes[0] != (max_batch or 0) or not all(sizes[1:]):
        raise _fixed_batch(path, f"the output is {_describe(inferred.graph.output[0])}")
    return inferred


def _fixed_batch(path: Path, what: str) -> FixedBatch:
    return FixedBatch(
        f"{path}: with a dynamic batch its shapes contradict each other or stay open ({what}). Export it again with "
        "a dynamic batch (torch.onnx.export: dynamic_axes or dynamic_shapes for axis 0), and with fixed height and "
        "width."
    )


def _rewrite_head(model: ModelProto, tensor: str, path: Path) -> tuple[Task, int, list[str]]:
    """Derive the task from the output, and turn it into logits [batch, C] or [batch, C, height, width]."""
    graph = model.graph
    sizes, image = _sizes(graph.output[0]), _sizes(graph.input[0])
    found = f"{path}: output '{tensor}' is {_describe(graph.output[0])}"
    if len(sizes) not in (2, 4):
        raise ArtifactError(
            f"{found}, expected [N, classes] or [N, classes, 1, 1] (classification), or [N, classes, height, width] "
            "(segmentation). Name another one with model.output, or export the model up to its logits."
        )
    num_classes, size = sizes[1], tuple(sizes[2:])
    is_channels_last = len(sizes) == 4 and sizes[1] * image[3] == sizes[2] * image[2]
    if is_channels_last and size != (1, 1) and size[0] * image[3] != size[1] * image[2]:
        raise ArtifactError(
            f"{found}: looks like [N, height, width, classes], expected [N, classes, height, width]. Export it with "
            "channels first (tf2onnx: --outputs-as-nchw)."
        )
    if num_classes < 2:
        raise ArtifactError(
            f"{found}: {num_classes} class. Expected two or more; a model with one (sigmoid) is not supported."
        )
    if len(sizes) == 4 and size != (1, 1) and num_classes > MAX_CLASSES:
        raise ArtifactError(f"{found}: {num_classes} classes, masks hold at most {MAX_CLASSES}.")
    if len(sizes) == 2 or size == tuple(image[2:]):
        return (Task.classification if len(sizes) == 2 else Task.segmentation), num_classes, []
    if size == (1, 1):
        _append(
            graph, helper.make_node("Flatten", [tensor], [f"{tensor}:classes"], f"{tensor}:classes", axis=1)
        )
        return Task.classification, num_classes, ["logits [N, C, 1, 1] flattened to [N, C]"]
    scales = [1.0, 1.0]
    for before, after in zip(size, image[2:], strict=True):
        scale = np.float32(after) / np.float32(before)
        if int(np.floor(np.float32(before) * scale)) != after:
            scale = np.nextafter(scale, np.float32(np.inf))
        scales.append(float(scale))
    name = f"{tensor}:resized"
    graph.initializer.append(numpy_helper.from_array(np.array(scales, np.float32), f"{name}:scales"))
    inputs = [tensor, "", f"{name}:scales"]
    resize = helper.make_node(
        "Resize", inputs, [name], name, mode="linear", coordinate_transformation_mode="half_pixel"
    )
    _append(graph, resize)
    text = f"logits of {size[0]}x{size[1]} resized bilinearly to {image[2]}x{image[3]}"
    return Task.segmentation, num_classes, [text]


def _append(graph: onnx.GraphProto, node: NodeProto) -> None:
    graph.node.append(node)
    del graph.output[:]
    graph.output.append(helper.make_tensor_value_info(node.output[0], TensorProto.FLOAT, None))


def _sizes(value: ValueInfoProto) -> list[int]:
    """Return the sizes of a tensor, 0 for open ones."""
    return [axis.dim_value for axis in value.type.tensor_type.shape.dim]


def _describe(value: ValueInfoProto) -> str:
    kind = value.type.tensor_type
    sizes = [str(axis.dim_value or axis.dim_param or "?") for axis in kind.shape.dim]
    return f"{helper.tensor_dtype_to_np_dtype(kind.elem_type)} [{', '.join(sizes)}]"


def _integer(node: NodeProto, name: str) -> int:
    return next((attribute.i for attribute in node.attribute if attribute.name == name), 0)
