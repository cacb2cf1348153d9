"""Rewrite an ONNX graph of another tool for this pipeline, and refuse one that the pipeline cannot use.

The result has one float32 input [batch, C, H, W] with a dynamic batch, one output (logits [batch, C], or
[batch, C, H, W] of the image's size), standard operators of an opset that every runtime and quantizer reads, named
nodes and constants as initializers. N batch, C classes, H rows, W columns.
"""

import contextlib
import io
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum
from functools import partial
from pathlib import Path

import numpy as np
import onnx
import onnxslim
from numpy.typing import NDArray
from onnx import ModelProto, TensorProto, helper, numpy_helper
from onnx.inliner import inline_local_functions

from tasks.core.errors import ArtifactError, first_line
from tasks.parts.custom_operators import CustomOperators
from tasks.parts.onnx_graphs.checked_rewrite import Rewrite, checked_rewrite
from tasks.parts.onnx_graphs.equal_operators import REPLACED, replace_operators
from tasks.parts.onnx_graphs.foreign_batch import free_batch
from tasks.parts.onnx_graphs.foreign_branches import branching_nodes, inline_branches, refuse_branches
from tasks.parts.onnx_graphs.foreign_custom import accept_domains, infer_custom_outputs
from tasks.parts.onnx_graphs.foreign_file import find_file, read_foreign
from tasks.parts.onnx_graphs.foreign_form import InputForm
from tasks.parts.onnx_graphs.foreign_half import double_to_float, half_to_float, has_double, has_half
from tasks.parts.onnx_graphs.foreign_infinity import bound_infinities
from tasks.parts.onnx_graphs.foreign_input import find_image, normalise_input
from tasks.parts.onnx_graphs.foreign_inputs import INPUTS_FILE, describe, drop_listed_constants, sizes_of
from tasks.parts.onnx_graphs.foreign_opset import check_opset, convert_opset, read_opset
from tasks.parts.onnx_graphs.foreign_output import (
    Head,
    OutputForm,
    check_output,
    choose_output,
    kept_outputs,
    rewrite_head,
)
from tasks.parts.onnx_graphs.foreign_qdq import (
    add_zero_points,
    check_quantization,
    dequantize_input,
    has_quantized_weights,
    to_float,
)
from tasks.parts.onnx_graphs.foreign_qoperator import write_pairs
from tasks.parts.onnx_graphs.foreign_raw import last_activations
from tasks.parts.onnx_graphs.foreign_size import set_size
from tasks.parts.onnx_graphs.graph import (
    MAX_IR_VERSION,
    MIN_IR_VERSION,
    check_model,
    drop_unused,
    index_graph,
    infer_shapes,
    join_equal_constants,
    name_nodes,
    read_shapes,
    replace_nodes,
    without_large_constants,
)
from tasks.parts.onnx_graphs.macs import LAYER_TYPES
from tasks.parts.onnx_graphs.zeros_before_pools import OPSET_OF_AXES, name_axes_of_pads, pads_of_zeros
from tasks.parts.onnx_session import copy_without, large_constants

_BATCH = "batch"
_MOST_COMPARED = 2048
"""onnxslim compares each pair of constants, which takes 20 s for 5,000 of them."""
_PRODUCTS = frozenset({"MatMul", "Gemm"})
_FOLDED_INTO_CONVOLUTIONS = frozenset({"BatchNormalization", "Add", "Mul", "Sub", "Div"})


class Quantization(Enum):
    """What becomes of the Q/DQ pairs of a graph."""

    none = "none"
    """The graph is expected to have none."""
    kept = "kept"
    removed = "removed"


class FixedBatch(ArtifactError):
    """A graph whose batch cannot be made dynamic."""


@dataclass(frozen=True)
class Imported:
    """A rewritten graph, and the changes that were made."""

    graph: ModelProto
    """The written graph, without a card."""
    head: Head
    """Its output."""
    mean: tuple[float, ...]
    """The written graph reads (value / 255 - mean) / std."""
    std: tuple[float, ...]
    tensors: tuple[str, ...]
    """Names of the outputs in the original file that are kept."""
    size: tuple[int, int] | None
    """Height and width of the images, if the original file fixes others."""
    static_batch: int | None
    """Fixed batch size of the original file; None if it was dynamic."""
    max_batch: int | None
    """1 if the batch stayed fixed; None if it is dynamic."""
    opset_before: int
    ir_version_before: int
    num_nodes_before: int
    is_half: bool
    """Whether parts of the original file are float16."""
    is_simplified_at_one: bool
    """Whether a dynamic batch was fixed at 1 until the graph was simplified."""
    is_whole: bool
    """Whether the image is the only input of the original file, and all tensors are outputs of it."""
    activations: frozenset[str]
    """What the last sigmoids and softmaxes in front of the outputs make, in the original file."""
    rewritten: tuple[str, ...]
    """One sentence for each change."""


def rewrite(
    model: ModelProto,
    *,
    path: Path,
    form: InputForm,
    height: int | None,
    width: int | None,
    output: OutputForm,
    quantization: Quantization,
    is_batch_freed: bool,
    libraries: Sequence[CustomOperators] = (),
) -> Imported:
    """Rewrite a foreign graph for this pipeline; `height` and `width` are for graphs that can have this size.

    The graph itself is changed, so that there is no second one in memory: pass a copy of one that is still needed.

    With `is_batch_freed`, a fixed batch is made dynamic; without, a dynamic one is fixed until the graph is
    simplified. Those of `libraries` whose operators it has are declared in the graph. Raises FixedBatch if the batch
    stays fixed, ArtifactError for a graph that the pipeline cannot use.
    """
    changes = []
    opset = read_opset(model, path)
    ir_version, num_nodes = model.ir_version, len(model.graph.node)
    if model.functions:
        changes.append(f"{len(model.functions)} functions inlined")
        model = without_large_constants(model, inline_local_functions)
    if num_integer := write_pairs(model):
        changes.append(f"{num_integer} operators of integers written as float operators between pairs")
    check_quantization(model, path, is_quantized=quantization is not Quantization.none)
    activations = last_activations(model, kept_outputs(model, path, output.name))
    del model.metadata_props[:]
    accept_domains(model, path, libraries)
    is_half = has_half(model)
    if is_half:
        changes.append(f"float16 converted to float32, {half_to_float(model)} constants")
    if has_double(model):
        changes.append(f"float64 converted to float32, {double_to_float(model)} constants")
    if quantization is not Quantization.none:
        dequantize_input(model, path)
    if quantization is Quantization.removed:
        changes.append(f"{to_float(model, path)} pairs of QuantizeLinear and DequantizeLinear removed")
    elif quantization is Quantization.kept:
        add_zero_points(model)
    elif has_quantized_weights(model):
        to_float(model, path)
        changes.append("quantized weights made floats")
    drop_listed_constants(model)
    outputs = {value.name for value in model.graph.output}
    is_whole = len(model.graph.input) == 1 and not (path.parent / INPUTS_FILE).is_file()
    tensors = choose_output(model, path, output.name)
    is_whole = is_whole and outputs.issuperset(tensors)
    image = find_image(model, path, form)
    if len(tensors) > 1:
        changes.append(f"{len(tensors)} outputs joined")
    size = set_size(model, image, path, form, height=height, width=width)
    if size is not None:
        changes.append(f"image size changed to {size[0]}x{size[1]}")
    static_batch = max(0, sizes_of(image)[0]) or None
    batch = static_batch
    if static_batch is None and not is_batch_freed:
        # Shapes that are computed from the batch become constants.
        batch = image.type.tensor_type.shape.dim[0].dim_value = 1
        del model.graph.value_info[:]
    del image  # it keeps all of the graph that it is a part of
    model, branches = _without_branches(model, path)
    model, conversion = convert_opset(model, path, opset)
    changes += branches + conversion
    num_before = len(model.graph.node)
    model = _simplify(model)
    changes.append(f"simplified from {num_before} to {len(model.graph.node)} nodes")
    changes += bound_infinities(model)
    if pads_of_zeros(model):
        model, conversion = convert_opset(model, path, read_opset(model, path), least=OPSET_OF_AXES)
        model = infer_shapes(model)
        changes += conversion + name_axes_of_pads(model)
    if num_unnamed := name_nodes(model):
        changes.append(f"{num_unnamed} nodes named")
    normalised = normalise_input(model, path, form)
    changes += normalised.changes
    max_batch = static_batch if static_batch is not None and not is_batch_freed else None
    if max_batch not in (None, 1):
        raise _fixed_batch(
            path, f"the batch of {max_batch} cannot be made dynamic, and no engine supports it"
        )
    if max_batch == 1:
        changes.append("batch stays 1, which the graph depends on")
    elif batch is not None:
        num_rewritten = free_batch(model, batch, _BATCH)
        how = "made dynamic" if static_batch else "only for the simplification"
        changes.append(f"batch of {batch} {how}, {num_rewritten} constants rewritten")
    model = _infer(model, path, max_batch)
    head = rewrite_head(model, path, output)
    changes += head.changes
    drop_unused(model.graph)
    model.ir_version = min(max(model.ir_version, MIN_IR_VERSION), MAX_IR_VERSION)
    model = _infer(model, path, max_batch)
    check_model(model, full_check=True)
    return Imported(
        model,
        head,
        normalised.mean,
        normalised.std,
        tensors,
        size,
        static_batch,
        max_batch,
        opset,
        ir_version,
        num_nodes,
        is_half,
        static_batch is None and batch is not None,
        is_whole,
        activations,
        tuple(changes),
    )


def with_equal_operators(imported: Imported, images_NCHW: NDArray[np.float32], path: Path) -> Imported:
    """Return the graph with operators that runtimes compute in integers, if it gives the same for these images."""
    changes: list[str] = []

    def replaced(graph: ModelProto) -> ModelProto:
        read = {name for node in graph.graph.node if node.op_type in REPLACED for name in node.input}
        if not replace_operators(copy_without(graph, large_constants(graph).keys() - read)):
            return graph
        model = ModelProto()
        model.CopyFrom(graph)
        changes[:] = replace_operators(model)
        drop_unused(model.graph)
        model = _infer(model, path, imported.max_batch)
        check_model(model, full_check=True)
        return model

    name = "of operators that have no INT8 kernels"
    rewrites = [Rewrite(name, replaced, is_optional=True)]
    graph = checked_rewrite(imported.graph, rewrites, images_NCHW, where=str(path))
    if graph is imported.graph:
        return imported
    return replace(imported, graph=graph, rewritten=(*imported.rewritten, *changes))


def read_interface(
    model: Path,
    *,
    form: InputForm,
    height: int | None,
    width: int | None,
    output: OutputForm,
    is_quantized: bool,
    libraries: Sequence[CustomOperators] = (),
) -> tuple[tuple[int, int], list[int]]:
    """Return height and width of the images that a model reads, and the sizes of its output as far as they are known.

    Raises the same errors as `rewrite` for what the file says, in seconds.
    """
    path, graph = find_file(model), read_foreign(model)
    check_opset(graph, path)
    if graph.functions:
        graph = inline_local_functions(graph)
    write_pairs(graph)
    check_quantization(graph, path, is_quantized=is_quantized)
    accept_domains(graph, path, libraries)
    half_to_float(graph)
    double_to_float(graph)
    drop_listed_constants(graph)
    tensors = choose_output(graph, path, output.name)
    image = find_image(graph, path, form)
    set_size(graph, image, path, form, height=height, width=width)
    sizes = sizes_of(image)
    graph = _without_branches(graph, path)[0]
    answer = read_shapes(graph, data_prop=True).output[0]
    if len(tensors) == 1:
        image_NCHW = [0, form.num_channels, sizes[form.axes[1]], sizes[form.axes[2]]]
        check_output(answer, image_NCHW, path, output)
    return (sizes[form.axes[1]], sizes[form.axes[2]]), sizes_of(answer)


def with_output(model: ModelProto, tensor: str) -> ModelProto:
    """Return a copy whose only output is one of its tensors."""
    copied = ModelProto()
    copied.CopyFrom(model)
    return _mark(copied, [tensor])


def with_outputs(model: ModelProto, tensors: Sequence[str]) -> tuple[ModelProto, dict[str, TensorProto]]:
    """Return a copy whose outputs are these of its tensors, without its large constants, and those constants."""
    large = large_constants(model)
    return _mark(copy_without(model, large), tensors), large


def _mark(marked: ModelProto, tensors: Sequence[str]) -> ModelProto:
    del marked.graph.output[:]
    marked.graph.output.extend(helper.make_empty_tensor_value_info(tensor) for tensor in tensors)
    return marked


def _without_branches(model: ModelProto, path: Path) -> tuple[ModelProto, list[str]]:
    """Replace each `If` whose condition is known, as soon as the sizes are, by the branch that it takes.

    Raises ArtifactError for other control flow.
    """
    num_branching = len(branching_nodes(model))
    inline_branches(model)
    while left := len(branching_nodes(model)):
        model = _simplify(model)
        inline_branches(model)
        if len(branching_nodes(model)) == left:
            break
    refuse_branches(model, path)
    changes = [f"{num_branching} If with a known condition replaced by their branch"]
    return model, changes if num_branching else []


def _simplify(model: ModelProto) -> ModelProto:
    for value in model.graph.output:  # some files declare the wrong number of axes
        value.type.tensor_type.ClearField("shape")
    skipped = []
    if (
        sum(node.op_type == "Constant" for node in model.graph.node) + len(model.graph.initializer)
        > _MOST_COMPARED
    ):
        _constants_to_initializers(model)
        join_equal_constants(model.graph)
        skipped = ["weight_tying"]
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        slim = without_large_constants(model, partial(_slim, skipped), kept=_folded(model))
    _constants_to_initializers(slim)
    return slim


def _slim(skipped: list[str], model: ModelProto) -> ModelProto:
    """Return what onnxslim makes of a graph, as a copy: objects of onnxslim in circles of references keep its own."""
    slim = ModelProto()
    slim.CopyFrom(onnxslim.slim(model, skip_optimizations=skipped))
    return slim


def _folded(model: ModelProto) -> set[str]:
    """Return the constants that simplification may need the values of.

    All but the weights of layers whose output no BatchNormalization, addition or multiplication of a constant reads.
    """
    index = index_graph(model.graph)
    folded = set()
    for name in index.constants:
        for layer in index.readers.get(name, []):
            following = [node.op_type for node in index.readers.get(layer.output[0], [])]
            is_plain = layer.op_type in _PRODUCTS or not _FOLDED_INTO_CONVOLUTIONS.intersection(following)
            if layer.op_type not in LAYER_TYPES or layer.input[1] != name or not is_plain:
                folded.add(name)
    return folded


def _constants_to_initializers(model: ModelProto) -> None:
    constants = [node for node in model.graph.node if node.op_type == "Constant"]
    for node in constants:
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
    replace_nodes(model.graph, {node.output[0]: [] for node in constants})
    drop_unused(model.graph)


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
        graph.value_info.extend(
            infer_custom_outputs(model, [1, 2] if max_batch is None else [max_batch], _BATCH)
        )
        inferred = infer_shapes(model, strict_mode=True, data_prop=True)
    except (onnx.shape_inference.InferenceError, ArtifactError) as error:
        raise _fixed_batch(path, first_line(error)) from error
    sizes = sizes_of(inferred.graph.output[0])
    if not sizes or sizes[0] != (max_batch or 0) or not all(sizes[1:]):
        raise _fixed_batch(path, f"the output is {describe(inferred.graph.output[0])}")
    return inferred


def _fixed_batch(path: Path, what: str) -> FixedBatch:
    return FixedBatch(
        f"{path}: with a dynamic batch its shapes contradict each other or stay open ({what}). Export it again with "
        "a dynamic batch (torch.onnx.export: dynamic_axes or dynamic_shapes for axis 0), and with fixed height and "
        "width, up to the layer before a NonMaxSuppression or NonZero, whose outputs have no fixed size "
        "(model.output)."
    )
