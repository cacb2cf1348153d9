"""Open ONNX Runtime sessions, both to evaluate graphs and to run engines."""

import importlib
import math
import weakref
from collections.abc import Container, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tasks.core.errors import ArtifactError, BuildFailed, TargetMismatch, first_line
from tasks.parts.custom_operators import check_libraries, libraries_of

if TYPE_CHECKING:
    import onnxruntime
    from numpy.typing import NDArray
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

_LARGE_GRAPH_BYTES, _LARGE_TENSOR_BYTES = 1 << 27, 1 << 20
"""Graphs with more constants than this are passed on without the larger ones: a message of 2 GiB cannot be
serialized, and each copy of a smaller one costs its size."""


def open_session(
    model: "Path | bytes | ModelProto",
    *,
    provider: str = CPU_PROVIDER,
    num_threads: int = 0,
    is_optimised: bool = True,
    optimised_file: Path | None = None,
    profile_prefix: str | None = None,
    libraries: Sequence[Path] | None = None,
) -> "onnxruntime.InferenceSession":
    """Create a session that really runs on `provider`; with `num_threads` 0 it uses one thread per core.

    A graph in memory brings its libraries with custom operators along; for a file `libraries` has their checked
    paths. ONNX Runtime itself silently falls back to the CPU when the provider is absent; this raises TargetMismatch
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
    # Threads sleep between inferences, so that an idle engine does not slow down the others.
    options.add_session_config_entry("session.force_spinning_stop", "1")
    if not is_optimised:
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    if optimised_file is not None:
        options.optimized_model_filepath = str(optimised_file)
    if profile_prefix is not None:
        options.enable_profiling, options.profile_file_prefix = True, profile_prefix
    constants: dict[str, NDArray[Any]] = {}
    if isinstance(model, Path):
        source: str | bytes = str(model)
    elif isinstance(model, bytes):
        source = model
    else:
        source = _serialize(model, options, constants)
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
    from google.protobuf.message import Message
    from onnx import ModelProto

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


def refer(tensor: "TensorProto", location: str, offset: int, length: int) -> "TensorProto":
    """Return a tensor of the same name, type and shape whose values lie in a file."""
    from onnx import StringStringEntryProto, TensorProto

    entries = {"location": location, "offset": str(offset), "length": str(length)}
    return TensorProto(
        name=tensor.name,
        data_type=tensor.data_type,
        dims=tensor.dims,
        data_location=TensorProto.EXTERNAL,
        external_data=[StringStringEntryProto(key=key, value=value) for key, value in entries.items()],
    )


def _serialize(
    model: "ModelProto", options: "onnxruntime.SessionOptions", constants: "dict[str, NDArray[Any]]"
) -> bytes:
    """Return a graph as bytes; large constants reach the session as arrays, which are added to `constants`."""
    import onnxruntime
    from onnx import numpy_helper

    large = large_constants(model)
    if not large:
        return bytes(model.SerializeToString())
    light = copy_without(model, large)
    constants |= {name: numpy_helper.to_array(tensor) for name, tensor in large.items()}
    light.graph.initializer.extend(
        refer(tensor, "constants", 0, constants[name].nbytes) for name, tensor in large.items()
    )
    arrays = [onnxruntime.OrtValue.ortvalue_from_numpy(array) for array in constants.values()]
    options.add_external_initializers(list(constants), arrays)
    options.add_session_config_entry("session.disable_prepacking", "1")  # each kernel would copy its weight
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
