"""Open an ONNX file of another tool, with its weights, and refuse damaged ones."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
from google.protobuf.message import DecodeError
from numpy.typing import NDArray
from onnx import ModelProto, TensorProto, numpy_helper

from tasks.core.errors import ArtifactError, first_line
from tasks.parts.onnx_graphs.graph import all_tensors
from tasks.parts.onnx_session import open_session

_INTEGER_OPERATORS = {
    "QuantizeLinear",
    "DequantizeLinear",
    "DynamicQuantizeLinear",
    "QLinearConv",
    "QLinearMatMul",
    "ConvInteger",
    "MatMulInteger",
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

    Raises ArtifactError for a file that is missing, damaged, quantized or of 16 bits.
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
    _load_weights(graph, path, is_folder=model.is_dir())
    try:
        onnx.checker.check_model(graph)
    except onnx.checker.ValidationError as error:
        raise ArtifactError(
            f"{path}: not a valid ONNX model ({first_line(error)}). Export it again (model.path)."
        ) from error
    _check_values(graph, path)
    return graph


def _load_weights(graph: ModelProto, path: Path, *, is_folder: bool) -> None:
    outside = [tensor for tensor in all_tensors(graph.graph) if tensor.data_location == TensorProto.EXTERNAL]
    if not outside:
        return
    files = sorted(
        {entry.value for item in outside for entry in item.external_data if entry.key == "location"}
    )
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
    for tensor in all_tensors(graph.graph):
        if tensor.data_type in (TensorProto.FLOAT16, TensorProto.BFLOAT16):
            raise ArtifactError(
                f"{path}: tensor '{tensor.name}' has 16 bits, expected the float32 model: lower precisions are "
                "made from it here. Export it in float32."
            )
        if tensor.data_type in (TensorProto.FLOAT, TensorProto.DOUBLE):
            values = numpy_helper.to_array(tensor)
            if not np.isfinite(values).all():
                raise ArtifactError(
                    f"{path}: tensor '{tensor.name}' holds NaN or infinity, expected finite weights. Take another "
                    "checkpoint of the model and export it again."
                )
    integer = sorted({node.op_type for node in graph.graph.node} & _INTEGER_OPERATORS)
    if integer:
        raise ArtifactError(
            f"{path}: is already quantized ({', '.join(integer)}), expected the float model, because quantization is "
            "done here. Use the original float file."
        )


def open_original(
    model: Path, tensor: str, static_batch: int | None
) -> Callable[[NDArray[np.float32]], NDArray[np.float32]]:
    """Return a function that maps images_NCHW to the output of the original file in ONNX Runtime.

    A file with a fixed batch runs as often as needed. Raises BuildFailed when the runtime refuses the file.
    """
    session = open_session(find_file(model))
    name, step = session.get_inputs()[0].name, static_batch

    def answer(images_NCHW: NDArray[np.float32]) -> NDArray[np.float32]:
        answers = []
        for start in range(0, len(images_NCHW), step or len(images_NCHW)):
            part_NCHW = images_NCHW[start : start + (step or len(images_NCHW))]
            if step:
                part_NCHW = np.resize(part_NCHW, (step, *images_NCHW.shape[1:]))  # repeats images
            answers.append(session.run([tensor], {name: part_NCHW})[0])
        return np.concatenate(answers)[: len(images_NCHW)]

    return answer
