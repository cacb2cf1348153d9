"""ONNX Runtime. The engine file is an ONNX graph; the runtime optimises it for the CPU at hand when it is
loaded.

An offline-optimised file would load 2-20 ms faster and run no faster, but only on the CPU that made it.
"""

import importlib.metadata
import json
import re
import tempfile
from collections import defaultdict
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from tasks.core.errors import BuildFailed, TargetMismatch
from tasks.parts.runners.contract import (
    EngineLayer,
    EngineManifest,
    FloatArray,
    OperatorTime,
    RunnerDescription,
    check_batch,
)

if TYPE_CHECKING:
    import onnxruntime

ENGINE_FILE = "engine.onnx"
PROVIDERS = {"cpu": "CPUExecutionProvider"}
"""Device of a target -> the provider that must really be in use."""

_LOG_ERRORS_ONLY = 3
_INT8_TYPES = {2: "int8", 3: "int8"}  # TensorProto.UINT8, INT8
_FLOAT_TYPES = {1: "f32", 10: "f16", 16: "bf16"}  # TensorProto.FLOAT, FLOAT16, BFLOAT16
_CONVERSIONS = {"QuantizeLinear", "DequantizeLinear", "ReorderInput", "ReorderOutput", "Cast"}
_INSERTED = re.compile(r"Transpose(_token_\d+)?")
_ADDED_TO_NAMES = re.compile(r"^(InsertedPrecisionFreeCast_)+|(_nchwc|_quant|_token_\d+|/MatMulAddFusion)+$")
_SAME_TYPE_OPS = {
    "MaxPool",
    "Resize",
    "Reshape",
    "Transpose",
    "Concat",
    "Relu",
    "Clip",
    "Slice",
    "Squeeze",
    "Split",
}


def installed_version() -> str:
    """Return ONNX Runtime's version without importing it."""
    return importlib.metadata.version("onnxruntime")


def open_session(
    model: Path | bytes,
    *,
    provider: str,
    num_threads: int,
    is_optimised: bool = True,
    optimised_file: Path | None = None,
    profile_prefix: str | None = None,
) -> "onnxruntime.InferenceSession":
    """Create a session that really runs on `provider`.

    By itself ONNX Runtime falls back to the CPU silently when the provider is absent: here that raises
    TargetMismatch. Raises BuildFailed when the runtime refuses the graph.
    """
    import onnxruntime
    from onnxruntime.capi import onnxruntime_pybind11_state as state

    available = onnxruntime.get_available_providers()
    if provider not in available:
        raise TargetMismatch(
            f"ONNX Runtime has no provider {provider}; available: {', '.join(available)}. Install the build "
            "of onnxruntime that has it, or run on a worker of the target's work pool "
            "(target.<name>.device)."
        )
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.inter_op_num_threads = num_threads, 1
    options.log_severity_level = _LOG_ERRORS_ONLY
    # Between inferences the threads sleep, so that a waiting engine does not slow its neighbours down.
    options.add_session_config_entry("session.force_spinning_stop", "1")
    if not is_optimised:
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    if optimised_file is not None:
        options.optimized_model_filepath = str(optimised_file)
    if profile_prefix is not None:
        options.enable_profiling, options.profile_file_prefix = True, profile_prefix
    source = model if isinstance(model, bytes) else str(model)
    try:
        session = onnxruntime.InferenceSession(source, options, providers=[provider])
    except (
        state.Fail,
        state.InvalidGraph,
        state.InvalidProtobuf,
        state.NotImplemented,
        state.InvalidArgument,
    ) as error:
        raise BuildFailed(
            f"ONNX Runtime {installed_version()} refuses the graph: {first_line(error)}"
        ) from error
    in_use = session.get_providers()
    if in_use[0] != provider:
        raise TargetMismatch(
            f"ONNX Runtime runs on {in_use[0]}, requested was {provider} (target.<name>.device)."
        )
    return session


class OnnxruntimeRunner:
    """Runs an ONNX file in an ONNX Runtime session."""

    def __init__(
        self, file: Path, manifest: EngineManifest, session: "onnxruntime.InferenceSession | None" = None
    ) -> None:
        self._file, self.manifest, self._session = file, manifest, session
        self._input_name = ""

    def __enter__(self) -> Self:
        if self._session is None:
            self._session = self._open()
        self._input_name = self._session.get_inputs()[0].name
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._session = None

    def infer(self, images_NCHW: FloatArray) -> FloatArray:
        check_batch(images_NCHW, self.manifest)
        return self.run(images_NCHW)

    def run(self, images_NCHW: FloatArray) -> FloatArray:
        assert self._session is not None, "use the runner in a with block"
        logits: FloatArray = self._session.run(None, {self._input_name: images_NCHW})[0]
        return logits

    def describe(self) -> RunnerDescription:
        assert self._session is not None, "use the runner in a with block"
        options = self._session.get_session_options()
        return RunnerDescription(
            runtime="onnxruntime",
            runtime_version=installed_version(),
            provider=self._session.get_providers()[0],
            num_threads=options.intra_op_num_threads,
            options={"graph_optimization_level": options.graph_optimization_level.name},
        )

    def profile(self, images_NCHW: FloatArray, num_iterations: int) -> tuple[OperatorTime, ...]:
        check_batch(images_NCHW, self.manifest)
        with tempfile.TemporaryDirectory() as folder:
            session = self._open(profile_prefix=str(Path(folder) / "profile"))
            for _ in range(num_iterations):
                session.run(None, {self._input_name: images_NCHW})
            events = json.loads(Path(session.end_profiling()).read_text(encoding="utf-8"))
        return _operator_times(events, num_iterations)

    def open_lanes(self, count: int) -> tuple[Self, ...]:
        """Return runners that share the session: it computes in the threads that call it."""
        return tuple(type(self)(self._file, self.manifest, self._session) for _ in range(count))

    def time_on_device(self, images_NCHW: FloatArray, num_iterations: int) -> None:
        return None

    def _open(self, profile_prefix: str | None = None) -> "onnxruntime.InferenceSession":
        target = self.manifest.target
        return open_session(
            self._file,
            provider=PROVIDERS[target.device],
            num_threads=target.num_threads,
            profile_prefix=profile_prefix,
        )


def layers_of(file: Path, *, provider: str, num_threads: int) -> tuple[EngineLayer, ...]:
    """Read the graph that ONNX Runtime really executes."""
    import onnx

    with tempfile.TemporaryDirectory() as folder:
        optimised_file = Path(folder) / "optimised.onnx"
        open_session(file, provider=provider, num_threads=num_threads, optimised_file=optimised_file)
        graph = onnx.load(optimised_file).graph
    types = {tensor.name: tensor.data_type for tensor in graph.initializer}
    types |= {value.name: value.type.tensor_type.elem_type for value in [*graph.value_info, *graph.input]}
    own = {tensor.name for tensor in graph.initializer}
    return tuple(
        EngineLayer(
            name=node.name,
            kind=node.op_type,
            precision=_node_precision(node, types),
            nodes=(_ADDED_TO_NAMES.sub("", node.name),),
            is_conversion=node.op_type in _CONVERSIONS or bool(_INSERTED.fullmatch(node.name)),
        )
        for node in graph.node
        if not own >= set(node.input)  # a constant that is dequantized once
    )


def _node_precision(node: Any, types: dict[str, int]) -> str:
    """Return what a node computes in, and note the type of its outputs; nodes must come in topological
    order."""
    if node.op_type.startswith("QLinear") or node.op_type.endswith("Integer"):
        zero_point = types.get(node.input[-1] if node.op_type == "QLinearConcat" else node.input[2], 2)
        types.update(dict.fromkeys(node.output, zero_point if zero_point in _INT8_TYPES else 2))
        return "int8"
    if node.op_type == "QuantizeLinear":
        types[node.output[0]] = types.get(node.input[2], 2) if len(node.input) > 2 else 2
        return "f32"
    if node.op_type == "DequantizeLinear":
        types[node.output[0]] = 1
        return "f32"
    found = types.get(node.input[0], 0) if node.input else 0
    if node.op_type in _SAME_TYPE_OPS or found in _FLOAT_TYPES:
        types.update({name: found for name in node.output if name not in types})
    return _INT8_TYPES.get(found) or _FLOAT_TYPES.get(found) or ""


def _operator_times(events: list[dict[str, Any]], num_iterations: int) -> tuple[OperatorTime, ...]:
    milliseconds: dict[tuple[str, str], float] = defaultdict(float)
    for event in events:
        if event.get("cat") == "Node" and event["name"].endswith("_kernel_time"):
            name = event["name"].removesuffix("_kernel_time")
            milliseconds[name, event["args"].get("op_name", "")] += event["dur"] / 1000 / num_iterations
    times = [OperatorTime(name, op_type, value) for (name, op_type), value in milliseconds.items()]
    return tuple(sorted(times, key=lambda time: -time.milliseconds))


def first_line(error: BaseException) -> str:
    """Return the first line of a runtime's error text, shortened."""
    lines = str(error).strip().splitlines() or [repr(error)]
    return lines[0][:400]
