"""ONNX Runtime, on the CPU or an NVIDIA GPU. The engine file is an ONNX graph; the runtime optimises it for the
machine at hand when it is loaded. For its TensorRT provider the graph holds a plan, and nothing is optimised.

An offline-optimised file would load 2-20 ms faster and run no faster, but only on the CPU that made it.
The GPU was not run on real hardware.
"""

import importlib
import json
import re
import tempfile
from collections import defaultdict
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from tasks.core.errors import BuildFailed, TargetMismatch
from tasks.parts.runners.contract import (
    EngineLayer,
    EngineManifest,
    FloatArray,
    OperatorTime,
    RunnerDescription,
    check_batch,
)
from tasks.parts.target import CPU, CUDA, ONNXRUNTIME_TENSORRT_MAJOR, Target

if TYPE_CHECKING:
    import onnxruntime

ENGINE_FILE = "engine.onnx"
PROVIDERS = {CPU: "CPUExecutionProvider", CUDA: "CUDAExecutionProvider"}
"""Device of a target -> the provider that must really be in use, where no plan is."""
TENSORRT_PROVIDER = "TensorrtExecutionProvider"
PLAN_OPERATOR = "EPContext"
"""Of graphs that hold what another compiler made."""

PROVIDER_OPTIONS = {
    "CUDAExecutionProvider": {"use_tf32": "0"}
}  # else float32 is rounded to 10 bits of mantissa
_LOG_ERRORS_ONLY = 3
_INT8_TYPES = {2: "int8", 3: "int8"}  # TensorProto.UINT8, INT8
_FLOAT_TYPES = {1: "f32", 10: "f16", 16: "bf16"}  # TensorProto.FLOAT, FLOAT16, BFLOAT16
_CONVERSIONS = {
    "QuantizeLinear",
    "DequantizeLinear",
    "ReorderInput",
    "ReorderOutput",
    "Cast",
    "MemcpyFromHost",
    "MemcpyToHost",
}
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


def provider_of(target: Target) -> str:
    """Return the provider that must really be in use."""
    return PROVIDERS[target.device] if target.tensorrt is None else TENSORRT_PROVIDER


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

    if provider != PROVIDERS[CPU]:
        onnxruntime.preload_dlls()  # pip's CUDA libraries lie where the loader does not look
    available = onnxruntime.get_available_providers()
    if provider not in available:
        raise TargetMismatch(
            f"ONNX Runtime has no provider {provider}; available: {', '.join(available)}. Install the build "
            "of onnxruntime that has it (for CUDA `pip uninstall onnxruntime` and `pip install onnxruntime-gpu`), or "
            "run on a worker of the target's work pool (target.<name>.device)."
        )
    providers = [provider]
    if provider == TENSORRT_PROVIDER:
        importlib.import_module("tensorrt")  # it loads its libraries, which the provider is linked against
        providers.append(PROVIDERS[CUDA])
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
        session = onnxruntime.InferenceSession(
            source, options, providers=[(name, PROVIDER_OPTIONS.get(name, {})) for name in providers]
        )
    except (
        state.Fail,
        state.InvalidGraph,
        state.InvalidProtobuf,
        state.NotImplemented,
        state.InvalidArgument,
    ) as error:
        if isinstance(error, state.NotImplemented) and PLAN_OPERATOR in str(error):
            raise TargetMismatch(
                f"ONNX Runtime {onnxruntime.__version__} did not load its TensorRT provider, which the engine's plan "
                f"needs. Install the TensorRT {ONNXRUNTIME_TENSORRT_MAJOR}, CUDA and cuDNN that this onnxruntime-gpu "
                "was built for, or run on a worker of the target's work pool."
            ) from error
        raise BuildFailed(
            f"ONNX Runtime {onnxruntime.__version__} refuses the graph: {first_line(error)}"
        ) from error
    in_use = session.get_providers()
    if in_use[0] != provider:
        raise TargetMismatch(
            f"ONNX Runtime runs on {in_use[0]}, requested was {provider} (target.<name>.device)."
        )
    return session


class BoundBatch:
    """Images and logits of one batch size on a device, bound to a session, so that no call allocates them again."""

    def __init__(
        self,
        session: "onnxruntime.InferenceSession",
        device: str,
        images_shape: tuple[int, ...],
        logits_shape: tuple[int, ...],
    ) -> None:
        import onnxruntime

        allocate = onnxruntime.OrtValue.ortvalue_from_shape_and_type
        self._session, self._binding = session, session.io_binding()
        self._images_NCHW = allocate(images_shape, np.float32, device)
        self._logits_NCHW = allocate(logits_shape, np.float32, device)
        self._binding.bind_ortvalue_input(session.get_inputs()[0].name, self._images_NCHW)
        self._binding.bind_ortvalue_output(session.get_outputs()[0].name, self._logits_NCHW)

    def run(self, images_NCHW: FloatArray) -> FloatArray:
        """Copy images to the device, run, wait, and copy the logits back."""
        self._images_NCHW.update_inplace(images_NCHW)
        self._session.run_with_iobinding(self._binding)
        logits_NCHW: FloatArray = self._logits_NCHW.numpy()
        return logits_NCHW


class OnnxruntimeRunner:
    """Runs an ONNX file in an ONNX Runtime session; on a GPU through buffers that stay there."""

    def __init__(
        self, file: Path, manifest: EngineManifest, session: "onnxruntime.InferenceSession | None" = None
    ) -> None:
        self._file, self.manifest, self._session = file, manifest, session
        self._input_name = ""
        self._bound: dict[int, BoundBatch] = {}

    def __enter__(self) -> Self:
        if self._session is None:
            self._session = self._open()
        self._input_name = self._session.get_inputs()[0].name
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bound.clear()
        self._session = None

    def infer(self, images_NCHW: FloatArray) -> FloatArray:
        check_batch(images_NCHW, self.manifest)
        return self.run(images_NCHW)

    def run(self, images_NCHW: FloatArray) -> FloatArray:
        assert self._session is not None, "use the runner in a with block"
        if self.manifest.target.device == CPU:
            logits: FloatArray = self._session.run(None, {self._input_name: images_NCHW})[0]
            return logits
        num_images, card = len(images_NCHW), self.manifest.card
        if num_images not in self._bound:
            logits_shape = (num_images, *card.logits_shape)
            self._bound[num_images] = BoundBatch(self._session, CUDA, images_NCHW.shape, logits_shape)
        return self._bound[num_images].run(images_NCHW)

    def describe(self) -> RunnerDescription:
        import onnxruntime

        assert self._session is not None, "use the runner in a with block"
        options = self._session.get_session_options()
        return RunnerDescription(
            runtime="onnxruntime",
            runtime_version=onnxruntime.__version__,
            provider=self._session.get_providers()[0],
            num_threads=options.intra_op_num_threads,
            options={"graph_optimization_level": options.graph_optimization_level.name},
        )

    def profile(self, images_NCHW: FloatArray, num_iterations: int) -> tuple[OperatorTime, ...]:
        check_batch(images_NCHW, self.manifest)
        target = self.manifest.target
        if target.device == CUDA:
            return ()  # its events time the launch of a kernel and not the kernel
        events = record_nodes(
            self._file,
            images_NCHW,
            1 + num_iterations,
            provider=provider_of(target),
            num_threads=target.num_threads,
        )
        return _operator_times(_without_first(events), num_iterations)

    def open_lanes(self, count: int) -> tuple[Self, ...]:
        """Return runners that share the session: it computes in the threads that call it."""
        return tuple(type(self)(self._file, self.manifest, self._session) for _ in range(count))

    def time_on_device(self, images_NCHW: FloatArray, num_iterations: int) -> None:
        return None

    def _open(self) -> "onnxruntime.InferenceSession":
        target = self.manifest.target
        return open_session(self._file, provider=provider_of(target), num_threads=target.num_threads)


def record_nodes(
    file: Path, images_NCHW: FloatArray, num_iterations: int, *, provider: str, num_threads: int
) -> list[dict[str, Any]]:
    """Return what ONNX Runtime's profiler records of every node that ran."""
    with tempfile.TemporaryDirectory() as folder:
        prefix = str(Path(folder) / "profile")
        session = open_session(file, provider=provider, num_threads=num_threads, profile_prefix=prefix)
        for _ in range(num_iterations):
            session.run(None, {session.get_inputs()[0].name: images_NCHW})
        events = json.loads(Path(session.end_profiling()).read_text(encoding="utf-8"))
    return [
        event for event in events if event.get("cat") == "Node" and event["name"].endswith("_kernel_time")
    ]


def _without_first(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Leave out the first run of each node, which is slower."""
    seen: set[str] = set()
    later = []
    for event in events:
        if event["name"] in seen:
            later.append(event)
        seen.add(event["name"])
    return later


def find_nodes_elsewhere(events: list[dict[str, Any]], provider: str) -> dict[str, str]:
    """Return node -> operator type of recorded nodes that another provider ran; ONNX Runtime moves them silently."""
    return {
        event["name"].removesuffix("_kernel_time"): event["args"]["op_name"]
        for event in events
        if event["args"].get("provider") != provider
    }


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
        name = event["name"].removesuffix("_kernel_time")
        milliseconds[name, event["args"].get("op_name", "")] += event["dur"] / 1000 / num_iterations
    times = [OperatorTime(name, op_type, value) for (name, op_type), value in milliseconds.items()]
    return tuple(sorted(times, key=lambda time: -time.milliseconds))


def first_line(error: BaseException) -> str:
    """Return the first line of a runtime's error text, shortened."""
    lines = str(error).strip().splitlines() or [repr(error)]
    return lines[0][:400]
