"""Open an ONNX file of another tool, with its weights, and refuse damaged ones."""

import graphlib
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx
from google.protobuf.message import DecodeError
from numpy.typing import NDArray
from onnx import ModelProto, TensorProto, helper, numpy_helper
from onnx.inliner import inline_local_functions

from tasks.core.errors import ArtifactError, BuildFailed, first_line
from tasks.parts.onnx_graphs.foreign_form import InputForm
from tasks.parts.onnx_graphs.foreign_half import half_to_float
from tasks.parts.onnx_graphs.foreign_inputs import (
    INPUTS_FILE,
    drop_listed_constants,
    drop_unread_inputs,
    give_inputs,
)
from tasks.parts.onnx_graphs.foreign_opset import convert_opset, read_opset
from tasks.parts.onnx_graphs.foreign_qdq import dequantize_input, to_float
from tasks.parts.onnx_graphs.foreign_qoperator import write_pairs
from tasks.parts.onnx_graphs.foreign_raw import leave_out
from tasks.parts.onnx_graphs.foreign_size import change_size, forget_sizes, scale_resizes
from tasks.parts.onnx_graphs.graph import all_tensors, check_model, drop_unused, without_large_constants
from tasks.parts.onnx_session import open_session

if TYPE_CHECKING:
    import onnxruntime

_LAYERS = {"Conv", "ConvTranspose", "Gemm", "MatMul", "BatchNormalization"}
"""Operators whose constants are trained; an infinite constant of others is a mask, or what a Pad puts around."""
_TYPES = {
    "tensor(float)": "float32",
    "tensor(float16)": "float16",
    "tensor(double)": "float64",
    "tensor(uint8)": "uint8",
}


def find_file(model: Path) -> Path:
    """Return the ONNX file at a path: the file itself, or the only one in a folder (with its weights next to it)."""
    if not model.is_dir():
        return model
    files = sorted(model.glob("*.onnx"))
    if len(files) != 1:
        raise ArtifactError(
            f"{model}: a folder with {len(files)} files *.onnx, expected one, with its weights next to it "
            "(model.path)."
        )
    return files[0]


def read_foreign(model: Path) -> ModelProto:
    """Open an ONNX file, or a folder with one and its external weights.

    Raises ArtifactError for a file that is missing, damaged or bfloat16.
    """
    path = find_file(model)
    if not path.is_file() or path.stat().st_size == 0:
        raise ArtifactError(f"{path}: missing or 0 bytes, expected an ONNX model (model.path).")
    try:
        graph = onnx.load(path, load_external_data=False)
    except DecodeError as error:
        raise ArtifactError(
            f"{path}: {path.stat().st_size} bytes that are not an ONNX model ({error}); the file is damaged or of "
            "another kind. Copy or export it again (model.path)."
        ) from error
    if not graph.graph.node or not graph.graph.output:
        raise ArtifactError(
            f"{path}: a graph with {len(graph.graph.node)} nodes and {len(graph.graph.output)} outputs; the file is "
            "damaged or not an ONNX model. Copy or export it again (model.path)."
        )
    _refuse_strays(graph, model)
    _load_weights(graph, path, is_folder=model.is_dir())
    if (model / INPUTS_FILE).is_file():
        give_inputs(graph, model / INPUTS_FILE)
    _sort_nodes(graph, path)
    try:
        check_model(graph)
    except onnx.checker.ValidationError as error:
        raise ArtifactError(
            f"{path}: not a valid ONNX model ({first_line(error)}). Export it again (model.path)."
        ) from error
    _check_values(graph, path)
    return graph


def _refuse_strays(graph: ModelProto, model: Path) -> None:
    """Raise ArtifactError for a folder that holds more than the model: all of it would count as the model."""
    if not model.is_dir():
        return
    own = {find_file(model).name, *_locations(graph), INPUTS_FILE}
    strays = [file for file in sorted(model.rglob("*")) if file.is_file() and _inside(file, model) not in own]
    if strays:
        raise ArtifactError(
            f"{strays[0]}: not a part of the model in {model}, expected only {', '.join(sorted(own)[:4])} there: a "
            "change of any file in this folder would be a change of the model. Move it elsewhere (model.path)."
        )


def _inside(file: Path, folder: Path) -> str:
    return file.relative_to(folder).as_posix()


def _locations(graph: ModelProto) -> set[str]:
    """Return the files that hold the external weights."""
    return {
        entry.value
        for item in all_tensors(graph.graph)
        if item.data_location == TensorProto.EXTERNAL
        for entry in item.external_data
        if entry.key == "location"
    }


def _sort_nodes(graph: ModelProto, path: Path) -> None:
    """Put nodes behind those that they read; some converters append theirs, and only ONNX Runtime accepts that."""
    nodes = list(graph.graph.node)
    maker = {name: index for index, node in enumerate(nodes) for name in node.output if name}
    reads = {index: [maker[name] for name in node.input if name in maker] for index, node in enumerate(nodes)}
    if all(source < index for index, sources in reads.items() for source in sources):
        return
    try:
        order = list(graphlib.TopologicalSorter(reads).static_order())
    except graphlib.CycleError as error:
        found = ", ".join(f"{nodes[index].op_type} '{nodes[index].name}'" for index in error.args[1][:5])
        raise ArtifactError(
            f"{path}: its nodes form a circle ({found}), expected none. Export it again (model.path)."
        ) from error
    del graph.graph.node[:]
    graph.graph.node.extend(nodes[index] for index in order)


def _load_weights(graph: ModelProto, path: Path, *, is_folder: bool) -> None:
    outside = [tensor for tensor in all_tensors(graph.graph) if tensor.data_location == TensorProto.EXTERNAL]
    if not outside:
        return
    files = sorted(_locations(graph))
    if not is_folder:
        raise ArtifactError(
            f"{path}: {len(outside)} tensors are in other files ({', '.join(files[:3])}), whose changes would not be "
            "noticed. Put only the model and these files into a folder and set model.path to the folder."
        )
    try:
        onnx.load_external_data_for_model(graph, str(path.parent))
    except (OSError, ValueError, onnx.checker.ValidationError) as error:
        raise ArtifactError(
            f"{path}: its weights in {', '.join(files[:3])} cannot be read ({first_line(error)}). "
            "Copy the whole folder again (model.path)."
        ) from error


def _check_values(graph: ModelProto, path: Path) -> None:
    of_layers = {name for node in graph.graph.node if node.op_type in _LAYERS for name in node.input}
    for tensor in all_tensors(graph.graph):
        if tensor.data_type == TensorProto.BFLOAT16:
            raise ArtifactError(
                f"{path}: tensor '{tensor.name}' is bfloat16, which ONNX Runtime does not run on a CPU, so that no "
                "import could be verified. Export the model in float32 or float16."
            )
        if tensor.data_type in (TensorProto.FLOAT, TensorProto.DOUBLE, TensorProto.FLOAT16):
            values = numpy_helper.to_array(tensor)
            is_weight = tensor.name in of_layers
            if np.isnan(values).any() or (is_weight and np.isinf(values).any()):
                raise ArtifactError(
                    f"{path}: tensor '{tensor.name}' holds NaN or infinity, expected finite weights. Take another "
                    "checkpoint of the model and export it again."
                )


@dataclass(frozen=True)
class Original:
    """The original file in ONNX Runtime."""

    session: "onnxruntime.InferenceSession"
    form: InputForm
    tensors: tuple[str, ...]
    """Names of the outputs."""
    static_batch: int | None
    """Fixed batch of the file, which then runs as often as needed."""
    conversion: str
    """What was converted so that ONNX Runtime reads the file; empty if it reads the file itself."""

    def feed(self, images_NHWC: NDArray[np.uint8]) -> dict[str, NDArray[Any]]:
        """Return what the file reads for images of a data set."""
        image = self.session.get_inputs()[0]
        return {image.name: self.form.to_input(images_NHWC, np.dtype(_TYPES[image.type]))}

    def answers(self, images_NHWC: NDArray[np.uint8]) -> list[NDArray[np.float32]]:
        """Return each output for images of a data set."""
        [(name, inputs)] = self.feed(images_NHWC).items()
        parts, step = [], self.static_batch or len(inputs)
        for start in range(0, len(inputs), step):
            part = inputs[start : start + step]
            if self.static_batch:
                part = np.resize(part, (step, *inputs.shape[1:]))  # repeats images
            parts.append(self.session.run(list(self.tensors), {name: part}))
        return [
            np.concatenate(outputs)[: len(inputs)].astype(np.float32) for outputs in zip(*parts, strict=True)
        ]


def open_original(
    model: Path,
    form: InputForm,
    tensors: tuple[str, ...],
    static_batch: int | None,
    libraries: Sequence[Path],
    *,
    is_float_form: bool = False,
    activations: Collection[str] = (),
    is_optimised: bool,
    is_whole: bool,
    inner: Collection[str] = (),
    size: tuple[int, int] | None = None,
    is_lean: bool = False,
) -> Original:
    """Open the original file, or its float form; where it is newer than ONNX Runtime, convert its opset.

    With `is_whole`, its outputs are `tensors`, and its input the image alone; else that part of it is opened.
    `libraries` have its custom operators; the nodes that make `activations` are left out. Those tensors of `inner`
    that the file has become outputs, too. Images have another `size` than the file fixes. `is_lean` is that of
    `open_session`.

    Raises BuildFailed when the runtime refuses the file.
    """
    path = find_file(model)
    graph: ModelProto | None = None
    if is_float_form or activations or inner or size or not is_whole:
        graph = read_foreign(model)
        if graph.functions:
            graph = without_large_constants(graph, inline_local_functions)
        leave_out(graph, activations)
        if size is not None:
            _take_size(graph, form, size)
    if graph is not None and is_float_form:
        half_to_float(graph)
        write_pairs(graph)
        dequantize_input(graph, path)
        to_float(graph, path)
    if graph is not None:
        _give(graph, (*tensors, *inner))
    try:
        session = open_session(
            path if graph is None else graph,
            is_optimised=is_optimised,
            libraries=libraries,
            is_lean=is_lean,
        )
        return Original(session, form, tensors, static_batch, "")
    except BuildFailed:
        graph = read_foreign(model) if graph is None else graph
        converted, changes = convert_opset(graph, path, read_opset(graph, path))
        if not changes:
            raise
        session = open_session(converted, is_optimised=is_optimised, libraries=libraries)
        return Original(session, form, tensors, static_batch, changes[0])


def _take_size(graph: ModelProto, form: InputForm, size: tuple[int, int]) -> None:
    """Let the graph read images of another size, in place."""
    scale_resizes(graph)
    for value in graph.graph.input:
        if len(value.type.tensor_type.shape.dim) == 4:
            change_size(value, form, size)
    forget_sizes(graph)


def _give(graph: ModelProto, names: Iterable[str]) -> None:
    """Let a graph return these tensors alone, as far as it has them, and read only what they need, in place."""
    known = {value.name: value for value in graph.graph.output}
    made = {name for node in graph.graph.node for name in node.output}
    kept = [name for name in dict.fromkeys(names) if name in made or name in known]
    outputs = [known.get(name) or helper.make_empty_tensor_value_info(name) for name in kept]
    del graph.graph.output[:]
    graph.graph.output.extend(outputs)
    drop_listed_constants(graph)
    drop_unused(graph.graph)
    drop_unread_inputs(graph)
