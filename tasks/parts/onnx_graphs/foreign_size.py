"""The image size of a graph of another tool: the one that it leaves open, or another than the one that it fixes."""

from pathlib import Path

import numpy as np
import onnx
from onnx import ModelProto, NodeProto, ValueInfoProto, numpy_helper

from tasks.core.errors import ArtifactError, first_line
from tasks.parts.onnx_graphs.foreign_form import InputForm
from tasks.parts.onnx_graphs.foreign_inputs import describe, sizes_of
from tasks.parts.onnx_graphs.graph import drop_unused, infer_shapes, read_shapes, resize_scale


def set_size(
    model: ModelProto,
    image: ValueInfoProto,
    path: Path,
    form: InputForm,
    *,
    height: int | None,
    width: int | None,
) -> tuple[int, int] | None:
    """Fix channels, height and width of the input, in place; return the size if the file fixes another one.

    Raises ArtifactError for a size that is missing, or that the graph cannot have.
    """
    dims, axes = image.type.tensor_type.shape.dim, form.axes
    found = describe(image)
    fixed = tuple(max(0, dims[axis].dim_value) for axis in axes[1:])  # some tools write -1 for open
    wanted = tuple(own if given is None else given for own, given in zip(fixed, (height, width), strict=True))
    for name, size in zip(("height", "width"), wanted, strict=True):
        if not size:
            raise ArtifactError(
                f"{path}: the input leaves its {name} open ({found}). Set the one that engines are built for, for "
                f"example model.{name}=224."
            )
    is_changed = any(own not in (0, new) for own, new in zip(fixed, wanted, strict=True))
    if is_changed:
        scale_resizes(model)
    change_size(image, form, wanted)
    if not is_changed:
        return None
    forget_sizes(model)
    try:
        inferred = infer_shapes(model, strict_mode=True, data_prop=True)
    except onnx.shape_inference.InferenceError as error:
        raise depends_on_size(path, f"{fixed[0]}x{fixed[1]}", wanted, first_line(error)) from error
    del model.graph.output[:]
    model.graph.output.extend(inferred.graph.output)
    return wanted[0], wanted[1]


def change_size(image: ValueInfoProto, form: InputForm, size: tuple[int, ...]) -> None:
    """Declare the channels and the size of an input, in place."""
    dims = image.type.tensor_type.shape.dim
    for axis, value in zip(form.axes, (form.num_channels, *size), strict=True):
        dims[axis].dim_value = value


def forget_sizes(model: ModelProto) -> None:
    """Drop what a graph declares about the sizes of its tensors but those of its inputs, in place."""
    del model.graph.value_info[:]
    for value in model.graph.output:
        value.type.tensor_type.ClearField("shape")


def scale_resizes(model: ModelProto) -> None:
    """Let a Resize to a constant size resize by the factor that this is at the size of the file, in place."""
    constants = {tensor.name: numpy_helper.to_array(tensor) for tensor in model.graph.initializer}
    constants |= {
        node.output[0]: numpy_helper.to_array(node.attribute[0].t)
        for node in model.graph.node
        if node.op_type == "Constant" and node.attribute[0].name == "value"
    }
    inferred = read_shapes(model, data_prop=True)
    before = {value.name: sizes_of(value) for value in (*inferred.input, *inferred.value_info)}
    for node in model.graph.node:
        if node.op_type == "Resize" and len(node.input) == 4 and node.input[3] in constants:
            _scale(
                model, node, before.get(node.input[0], []), [int(size) for size in constants[node.input[3]]]
            )
    drop_unused(model.graph)


def _scale(model: ModelProto, node: NodeProto, before: list[int], after: list[int]) -> None:
    if len(before) != len(after) or not all(before[1:]):
        return
    scales = [1.0] + [resize_scale(*sizes) for sizes in zip(before[1:], after[1:], strict=True)]
    name = f"{node.output[0]}:scales"
    model.graph.initializer.append(numpy_helper.from_array(np.array(scales, np.float32), name))
    node.input[:] = [node.input[0], node.input[1], name]


def depends_on_size(path: Path, own: str, wanted: tuple[int, ...], what: str) -> ArtifactError:
    """Return the error of a graph that cannot read images of another size."""
    height, width = wanted
    return ArtifactError(
        f"{path}: reads images of {own}, and model.height and model.width ask for {height}x{width}, which the graph "
        f"cannot have ({what}). Set both to null and prepare_data to {own}, or export the model for {height}x{width}."
    )
