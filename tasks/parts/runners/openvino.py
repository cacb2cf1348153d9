"""OpenVINO. The engine file is the compiled blob: it loads about ten times faster than the graph compiles.

A blob belongs to the exact OpenVINO version and the instruction sets of the CPU that compiled it.
"""

import importlib.metadata
import io
from collections import defaultdict
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from tasks.core.errors import ArtifactError, BuildFailed
from tasks.parts.runners.contract import (
    EngineLayer,
    EngineManifest,
    FloatArray,
    OperatorTime,
    RunnerDescription,
    check_batch,
)
from tasks.parts.target import Precision, Target

if TYPE_CHECKING:
    import openvino

ENGINE_FILE = "engine.blob"
PROVIDER = "CPU"

_PRECISION_NAMES = {"u8": "int8", "i8": "int8", "f32": "f32", "bf16": "bf16", "f16": "f16"}
_NO_WORK = {"Input", "Output", "Const", "Reshape", "ShapeOf"}
_CONVERSIONS = {"Reorder", "FakeQuantize", "Convert"}


def installed_version() -> str:
    """Return OpenVINO's version without importing it."""
    return importlib.metadata.version("openvino")


def compile_options(target: Target) -> dict[str, Any]:
    """Return the properties that a target stands for.

    The precision hint is pinned: OpenVINO's default on a CPU with bf16 is bf16, also for a graph in float32.
    Threads are not pinned to cores: several engines may share a machine.
    """
    return {
        "PERFORMANCE_HINT": "LATENCY",
        "NUM_STREAMS": 1,
        "INFERENCE_NUM_THREADS": target.num_threads,
        "INFERENCE_PRECISION_HINT": "bf16" if target.precision is Precision.bf16 else "f32",
        "ENABLE_CPU_PINNING": False,
    }


def compile_graph(model: bytes, target: Target) -> "openvino.CompiledModel":
    """Compile an ONNX graph for batches 1..max_batch; raise BuildFailed when the runtime refuses it."""
    import openvino

    core = openvino.Core()
    try:
        graph = core.read_model(io.BytesIO(model))
        shape = graph.input(0).partial_shape
        shape[0] = openvino.Dimension(1, target.max_batch)
        graph.reshape({0: shape})
        return core.compile_model(graph, PROVIDER, compile_options(target))
    except RuntimeError as error:
        raise BuildFailed(f"OpenVINO {installed_version()} refuses the graph: {_cause(error)}") from error


def export_blob(compiled: "openvino.CompiledModel") -> bytes:
    """Return the self-contained file of a compiled graph."""
    blob = compiled.export_model()
    return blob if isinstance(blob, bytes) else bytes(blob.getvalue())


class OpenvinoRunner:
    """Runs a compiled blob with one synchronous request."""

    def __init__(self, file: Path, manifest: EngineManifest, compiled: Any = None) -> None:
        self._file, self.manifest, self._compiled = file, manifest, compiled
        self._request: Any = None

    def __enter__(self) -> Self:
        if self._compiled is None:
            self._compiled = self._import({})
        self._request = self._compiled.create_infer_request()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._request = self._compiled = None

    def infer(self, images_NCHW: FloatArray) -> FloatArray:
        check_batch(images_NCHW, self.manifest)
        return self.run(images_NCHW).copy()

    def run(self, images_NCHW: FloatArray) -> FloatArray:
        assert self._request is not None, "use the runner in a with block"
        logits: FloatArray = self._request.infer({0: images_NCHW}, share_inputs=True, share_outputs=True)[0]
        return logits

    def describe(self) -> RunnerDescription:
        get = self._compiled.get_property
        return RunnerDescription(
            runtime="openvino",
            runtime_version=installed_version(),
            provider="+".join(get("EXECUTION_DEVICES")),
            num_threads=int(get("INFERENCE_NUM_THREADS")),
            options={
                "inference_precision_hint": get("INFERENCE_PRECISION_HINT").get_type_name(),
                "num_streams": int(get("NUM_STREAMS")),
            },
        )

    def profile(self, images_NCHW: FloatArray, num_iterations: int) -> tuple[OperatorTime, ...]:
        check_batch(images_NCHW, self.manifest)
        request = self._import({"PERF_COUNT": True}).create_infer_request()
        milliseconds: dict[tuple[str, str], float] = defaultdict(float)
        request.infer({0: images_NCHW}, share_inputs=True)  # the first run is slower
        for _ in range(num_iterations):
            request.infer({0: images_NCHW}, share_inputs=True)
            for info in request.profiling_info:
                key = info.node_name, info.node_type
                milliseconds[key] += info.real_time.total_seconds() * 1000 / num_iterations
        times = [OperatorTime(name, kind, value) for (name, kind), value in milliseconds.items() if value > 0]
        return tuple(sorted(times, key=lambda time: -time.milliseconds))

    def open_lanes(self, count: int) -> tuple[Self, ...]:
        """Load the blob once more with a stream for each runner."""
        num_threads = count * self.manifest.target.num_threads
        compiled = self._import({"NUM_STREAMS": count, "INFERENCE_NUM_THREADS": num_threads})
        return tuple(type(self)(self._file, self.manifest, compiled) for _ in range(count))

    def time_on_device(self, images_NCHW: FloatArray, num_iterations: int) -> None:
        return None

    def _import(self, more_options: dict[str, Any]) -> "openvino.CompiledModel":
        import openvino

        options = compile_options(self.manifest.target) | more_options
        try:
            return openvino.Core().import_model(io.BytesIO(self._file.read_bytes()), PROVIDER, options)
        except RuntimeError as error:
            raise ArtifactError(
                f"{self._file}: OpenVINO {installed_version()} cannot load it ({_cause(error)}). Run "
                f"build_engine for target {self.manifest.target.name} again on this machine."
            ) from error


def layers_of(compiled: "openvino.CompiledModel") -> tuple[EngineLayer, ...]:
    """Read the graph that OpenVINO really executes; what depends on constants alone is left out."""
    layers, constants = [], set[str]()
    for node in compiled.get_runtime_model().get_ordered_ops():
        info = node.get_rt_info()
        kind = _text(info["layerType"])
        makers = {value.get_node().get_friendly_name() for value in node.input_values()}
        if kind == "Const" or (makers and makers <= constants):
            constants.add(node.get_friendly_name())
        elif kind not in _NO_WORK:
            layers.append(
                EngineLayer(
                    name=node.get_friendly_name(),
                    kind=kind,
                    precision=_PRECISION_NAMES.get(_text(info["runtimePrecision"]), ""),
                    nodes=tuple(name for name in _text(info["originalLayersNames"]).split(",") if name),
                    is_conversion=kind in _CONVERSIONS,
                )
            )
    return tuple(layers)


def _text(value: Any) -> str:
    return str(value.astype(str)) if hasattr(value, "astype") else str(value)


def _cause(error: RuntimeError) -> str:
    """Return the part of OpenVINO's error text that names the cause, without the frames of its source."""
    lines = [line.strip() for line in str(error).strip().splitlines() if line.strip()]
    telling = [
        line for line in lines if not line.startswith(("Exception from", "Check '", "While validating"))
    ]
    return " ".join(telling or lines)[:400]
