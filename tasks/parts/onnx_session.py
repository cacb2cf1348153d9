"""Open ONNX Runtime sessions, both to evaluate graphs and to run engines."""

import importlib
import math
import tempfile
import weakref
from collections.abc import Container, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tasks.core.errors import ArtifactError, BuildFailed, TargetMismatch, first_line
from tasks.parts.custom_operators import check_libraries, libraries_of

if TYPE_CHECKING:
    import onnxruntime
    from google.protobuf.message import Message
    from onnx import ModelProto, TensorProto

ONNXRUNTIME = ("onnxruntime", "onnxruntime-gpu")
"""Python packages that provide ONNX Runtime."""

CPU_PROVIDER = "CPUExecutionProvider"
CUDA_PROVIDER = "CUDAExecutionProvider"
TENSORRT_PROVIDER = "TensorrtExecutionProvider"

TENSORRT_MAJOR = 10
"""onnxruntime-gpu 1.31 is linked against libnvinfer.so.10."""

PLAN_OPERATOR = "EPContext"
"""Operator that holds the output of another compiler."""

PROVIDER_OPTIONS = {CUDA_PROVIDER: {"use_tf32": "0"}}  # TF32 has only 10 bits of mantissa

_LOG_ERRORS_ONLY = 3
_NO_COPIES = "session.disable_prepacking", "1"
_OPTIMISED_CONSTANTS = {
    "session.optimized_model_external_initializers_file_name": "optimised.weights",
    "session.optimized_model_external_initializers_min_size_in_bytes": str(1 << 20),
}
"""Larger constants of an optimised graph are written beside it."""
_FOLDER_OF_CONSTANTS = "session.model_external_initializers_file_folder_path"
_CONSTANTS_FILE, _PAGE_BYTES = "constants", 4096

_LARGE_GRAPH_BYTES, _LARGE_TENSOR_BYTES = 1 << 27, 1 << 20
"""Graphs with more constants than this are passed on without the larger ones: a message of 2 GiB cannot be
serialized, and each copy of a smaller one costs its size."""
_MAPPED_BYTES = 1 << 30
"""Large constants of more than this reach a session through a file."""


def open_session(
    model: "Path | bytes | ModelProto",
    *,
    provider: str = CPU_PROVIDER,
    num_threads: int = 0,
    is_optimised: bool = True,
    optimised_file: Path | None = None,
    profile_prefix: str | None = None,
    libraries: Sequence[Path] | None = None,
    weights: "Mapping[str, TensorProto] | None" = None,
    is_lean: bool = False,
) -> "onnxruntime.InferenceSession":
    """Create a session that really runs on `provider`; with `num_threads` 0 it uses one thread per core.

    A graph in memory brings its libraries with custom operators along; for a file `libraries` has their checked
    paths. `weights` are large constants that a graph in memory lacks.

    With `is_lean`, and for graphs in memory with large constants, kernels read weights where they lie, and make no
    copies in their own layout. With `is_lean`, and for graphs in memory with more than a gigabyte, ONNX Runtime maps
    large constants from a temporary file, which needs no memory for its own copy and is slower to open.

    ONNX Runtime itself silently falls back to the CPU when the provider is absent; this raises TargetMismatch
    instead. Raises BuildFailed when the runtime refuses the graph, ArtifactError for a library that is missing or has
    another sha256.
    """
    import onnxruntime
    from onnxruntime.capi import onnxruntime_pybind11_state as state

    if provider != CPU_PROVIDER:
        onnxruntime.preload_dlls()  # the loader does not find pip's CUDA libraries by itself
    available = onnxruntime.get_available_providers()
    if provider not in available:
        raise TargetMismatch(
            f"ONNX Runtime has no provider {provider}; available: {', '.join(available)}. Install the build "
            "of onnxruntime that has it (for CUDA `pip uninstall onnxruntime` and `pip install onnxruntime-gpu`), or "
            "run on a worker of the target's work pool (target.<name>.device)."
        )
    providers = [provider]
    if provider == TENSORRT_PROVIDER:
        importlib.import_module("tensorrt")  # loads the libraries that the provider is linked against
        providers.append(CUDA_PROVIDER)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.inter_op_num_threads = num_threads, 1
    options.log_severity_level = _LOG_ERRORS_ONLY
    # Threads sleep between inferences, so that an idle engine does not slow down the others. One per core sleep
    # between operators too: stages run side by side, and threads that spin take the CPU from the others.
    options.add_session_config_entry("session.force_spinning_stop", "1")
    if num_threads == 0:
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    if not is_optimised:
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    if optimised_file is not None:
        options.optimized_model_filepath = str(optimised_file)
        for entry, value in _OPTIMISED_CONSTANTS.items():
            options.add_session_config_entry(entry, value)
    if profile_prefix is not None:
        options.enable_profiling, options.profile_file_prefix = True, profile_prefix
    constants: dict[str, onnxruntime.OrtValue] = {}
    folder: tempfile.TemporaryDirectory[str] | None = None
    if is_lean:
        options.add_session_config_entry(*_NO_COPIES)
    if isinstance(model, Path):
        source: str | bytes = str(model)
    elif isinstance(model, bytes):
        source = model
    else:
        large = {**large_constants(model), **(weights or {})}
        if large and (is_lean or sum(map(size_of, large.values())) > _MAPPED_BYTES):
            folder = tempfile.TemporaryDirectory()
            source = _with_mapped_constants(model, large, options, Path(folder.name))
        else:
            source = _serialize(model, large, options, constants)
        libraries = (
            check_libraries(libraries_of(model), "model.custom_operators") if libraries is None else libraries
        )
    for library in libraries or ():
        register_library(options, library)
    try:
        session = onnxruntime.InferenceSession(
            source, options, providers=[(name, PROVIDER_OPTIONS.get(name, {})) for name in providers]
        )
    except (
        state.Fail,
        state.InvalidGraph,
        state.InvalidProtobuf,
        state.NotImplemented,
        state.InvalidArgument,
        state.RuntimeException,
    ) as error:
        if isinstance(error, state.NotImplemented) and PLAN_OPERATOR in str(error):
            raise TargetMismatch(
                f"ONNX Runtime {onnxruntime.__version__} did not load its TensorRT provider, which the engine's plan "
                f"needs. Install the TensorRT {TENSORRT_MAJOR}, CUDA and cuDNN that this onnxruntime-gpu "
                "was built for, or run on a worker of the target's work pool."
            ) from error
        raise BuildFailed(
            f"ONNX Runtime {onnxruntime.__version__} refuses the graph: {first_line(error)}"
        ) from error
    finally:
        if folder is not None:
            folder.cleanup()  # what is mapped stays
    weakref.finalize(session, constants.clear)  # it reads them in place
    in_use = session.get_providers()
    if in_use[0] != provider:
        raise TargetMismatch(f"ONNX Runtime runs on {in_use[0]}, expected {provider} (target.<name>.device).")
    return session


def size_of(tensor: "TensorProto") -> int:
    """Return the bytes of the values of a tensor."""
    from onnx import helper

    return int(math.prod(tensor.dims) * helper.tensor_dtype_to_np_dtype(tensor.data_type).itemsize)


def large_constants(model: "ModelProto") -> dict[str, "TensorProto"]:
    """Return the large constants of a graph that has many, by name; none of any other graph."""
    sizes = {tensor.name: size_of(tensor) for tensor in model.graph.initializer}
    if sum(sizes.values()) <= _LARGE_GRAPH_BYTES:
        return {}
    return {
        tensor.name: tensor for tensor in model.graph.initializer if sizes[tensor.name] > _LARGE_TENSOR_BYTES
    }


def copy_without(model: "ModelProto", constants: Container[str]) -> "ModelProto":
    """Return a copy without some constants, which are not copied to be removed."""
    from onnx import ModelProto

    copied = ModelProto()
    for source, target, left_out in (
        (model, copied, "graph"),
        (model.graph, copied.graph, "initializer"),
    ):
        for field, value in source.ListFields():
            if field.name != left_out:
                copy_field(target, field.name, value)
    copied.graph.initializer.extend(
        tensor for tensor in model.graph.initializer if tensor.name not in constants
    )
    return copied


def copy_field(message: "Message", name: str, value: Any) -> None:
    """Give a message the value that a field has in another message of its type."""
    from google.protobuf.message import Message

    if isinstance(value, Message):
        getattr(message, name).CopyFrom(value)
    elif isinstance(value, str | bytes | int):
        setattr(message, name, value)
    else:
        getattr(message, name).extend(value)


def refer(name: str, tensor: "TensorProto", location: str, offset: int, length: int) -> "TensorProto":
    """Return a tensor of the same type and shape whose values lie in a file."""
    from onnx import StringStringEntryProto, TensorProto

    entries = {"location": location, "offset": str(offset), "length": str(length)}
    return TensorProto(
        name=name,
        data_type=tensor.data_type,
        dims=tensor.dims,
        data_location=TensorProto.EXTERNAL,
        external_data=[StringStringEntryProto(key=key, value=value) for key, value in entries.items()],
    )


def _serialize(
    model: "ModelProto",
    large: "Mapping[str, TensorProto]",
    options: "onnxruntime.SessionOptions",
    constants: "dict[str, onnxruntime.OrtValue]",
) -> bytes:
    """Return a graph as bytes; large constants reach the session as arrays, which are added to `constants`.

    What a session is only given as the values of external initializers, it copies.
    """
    import onnxruntime
    from onnx import numpy_helper

    if not large:
        return bytes(model.SerializeToString())
    light = copy_without(model, large)
    for name, tensor in large.items():
        constants[name] = onnxruntime.OrtValue.ortvalue_from_numpy(numpy_helper.to_array(tensor))
        options.add_initializer(name, constants[name])
    light.graph.initializer.extend(
        refer(name, tensor, _CONSTANTS_FILE, 0, size_of(tensor)) for name, tensor in large.items()
    )
    options.add_external_initializers(list(constants), list(constants.values()))
    options.add_session_config_entry(*_NO_COPIES)
    return bytes(light.SerializeToString())


def _with_mapped_constants(
    model: "ModelProto",
    large: "Mapping[str, TensorProto]",
    options: "onnxruntime.SessionOptions",
    folder: Path,
) -> bytes:
    """Return a graph as bytes; its large constants are written to a folder, from where the session maps them."""
    from onnx import numpy_helper

    light, offset = copy_without(model, large), 0
    with (folder / _CONSTANTS_FILE).open("wb") as file:
        for name, tensor in large.items():
            values = (
                tensor.raw_data if tensor.HasField("raw_data") else numpy_helper.to_array(tensor).tobytes()
            )
            light.graph.initializer.append(refer(name, tensor, _CONSTANTS_FILE, offset, len(values)))
            offset += file.write(values)
            offset += file.write(bytes(-offset % _PAGE_BYTES))
    options.add_session_config_entry(_FOLDER_OF_CONSTANTS, str(folder))
    options.add_session_config_entry(*_NO_COPIES)
    return bytes(light.SerializeToString())


def run_session(
    session: "onnxruntime.InferenceSession", outputs: Sequence[str] | None, feeds: Mapping[str, Any]
) -> list[Any]:
    """Return the outputs of a session, all for None.

    Raises BuildFailed where the runtime accepted the graph and does not compute it: sizes that do not fit, or no
    memory for them.
    """
    from onnxruntime.capi import onnxruntime_pybind11_state as state

    try:
        found: list[Any] = session.run(outputs, feeds)
    except (state.Fail, state.InvalidArgument, state.NotImplemented, state.RuntimeException) as error:
        raise BuildFailed(f"ONNX Runtime does not compute the graph: {first_line(error)}") from error
    return found


def register_library(options: "onnxruntime.SessionOptions", library: Path) -> None:
    """Let sessions with these options have the operators of a checked library, which is loaded here."""
    from onnxruntime.capi import onnxruntime_pybind11_state as state

    try:
        options.register_custom_ops_library(str(library))
    except (state.Fail, state.InvalidArgument, state.RuntimeException) as error:
        raise ArtifactError(
            f"{library}: ONNX Runtime cannot load the custom operators ({first_line(error)}). Build the library for "
            "this machine and this ONNX Runtime or an earlier one, with the function RegisterCustomOps."
        ) from error
