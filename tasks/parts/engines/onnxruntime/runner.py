"""ONNX Runtime, on the CPU or an NVIDIA GPU. The engine file is an ONNX graph; the runtime optimises it for the
current machine on loading. For its TensorRT provider the graph holds a plan, and nothing is optimised.

An offline-optimised file would load 2-20 ms faster and run no faster, but only on the CPU that made it.
"""

import time
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from tasks.core.errors import TargetMismatch
from tasks.parts.engines.frame_engine.sessions import Run, open_onnxruntime, run_onnxruntime
from tasks.parts.engines.manifest import EngineManifest, FloatArray, engine_libraries
from tasks.parts.engines.onnxruntime.layers import (
    operator_times,
    record_nodes,
    without_first_runs,
    without_profiler,
)
from tasks.parts.engines.runner import OperatorTime, RunnerDescription, check_batch, typical_time
from tasks.parts.engines.runtimes import CPU, CUDA
from tasks.parts.engines.target import Target
from tasks.parts.onnx_session import (
    CPU_PROVIDER,
    CUDA_PROVIDER,
    PROVIDER_OPTIONS,
    TENSORRT_PROVIDER,
    open_session,
)

if TYPE_CHECKING:
    import onnxruntime
    from onnx import ModelProto

ENGINE_FILE = "engine.onnx"

_PROVIDERS = {CPU: CPU_PROVIDER, CUDA: CUDA_PROVIDER}


def provider_of(target: Target) -> str:
    """Return the provider that must really be in use."""
    return _PROVIDERS[target.device] if target.tensorrt is None else TENSORRT_PROVIDER


def session_options(target: Target, *, needs_vnni: bool) -> dict[str, Any]:
    """Return the options of the sessions of a target's engines, as in model.json."""
    provider = provider_of(target)
    return {
        "provider": provider,
        "provider_options": PROVIDER_OPTIONS.get(provider, {}),
        "num_threads": target.num_threads,
        "needs_vnni": needs_vnni,
    }


def _nothing() -> "ModelProto":
    """Return a graph of one value that computes nothing: what it takes is the call."""
    from onnx import TensorProto, helper

    image, same = (helper.make_tensor_value_info(name, TensorProto.FLOAT, (1,)) for name in ("image", "same"))
    copy = helper.make_node("Identity", ["image"], ["same"])
    graph = helper.make_graph([copy], "nothing", [image], [same])
    return helper.make_model(graph, ir_version=8, opset_imports=[helper.make_opsetid("", 17)])


def open_runner(
    file: Path, manifest: EngineManifest, more_options: Mapping[str, Any] = MappingProxyType({})
) -> "OnnxruntimeRunner":
    """Return the runner of a graph; `more_options` of the session are those of frame_engine."""
    return OnnxruntimeRunner(file, manifest, more_options=more_options)


class OnnxruntimeRunner:
    """Runs an ONNX file in an ONNX Runtime session; on a GPU with persistent device buffers."""

    def __init__(
        self,
        file: Path,
        manifest: EngineManifest,
        session: "onnxruntime.InferenceSession | None" = None,
        more_options: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        self._file, self.manifest, self._session = file, manifest, session
        self._more_options = more_options
        self._run: Run | None = None

    def __enter__(self) -> Self:
        if self._session is None:
            self._session = self._open()
        self._run = run_onnxruntime(self._session)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._run = self._session = None

    def infer(self, images_NCHW: FloatArray) -> FloatArray:
        check_batch(images_NCHW, self.manifest)
        return self.run(images_NCHW)

    def run(self, images_NCHW: FloatArray) -> FloatArray:
        assert self._run is not None, "use the runner in a with block"
        return self._run(images_NCHW)

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
        """Measure every operator; together they take what an inference without the profiler takes beside the call."""
        check_batch(images_NCHW, self.manifest)
        target = self.manifest.target
        if target.device == CUDA:
            return ()  # its events time the launch of a kernel, not the kernel
        before_ms = self._time_nodes(images_NCHW, num_iterations)
        events = record_nodes(
            self._file,
            images_NCHW,
            1 + num_iterations,
            provider=provider_of(target),
            num_threads=target.num_threads,
        )
        nodes_ms = (before_ms + self._time_nodes(images_NCHW, num_iterations)) / 2
        return without_profiler(operator_times(without_first_runs(events), num_iterations), nodes_ms)

    def _time_nodes(self, images_NCHW: FloatArray, num_iterations: int) -> float:
        """Return the typical time of an inference in ms without what a call of the runtime costs."""
        image = np.zeros(1, np.float32)
        nothing = open_session(_nothing(), num_threads=self.manifest.target.num_threads)
        typical_ms = []
        for call in (lambda: self.run(images_NCHW), lambda: nothing.run(None, {"image": image})):
            call()
            times_ms = []
            for _ in range(num_iterations):
                start = time.perf_counter()
                call()
                times_ms.append(1000 * (time.perf_counter() - start))
            typical_ms.append(typical_time(times_ms, num_iterations))
        return typical_ms[0] - typical_ms[1]

    def open_concurrent(self, count: int) -> tuple[Self, ...]:
        """Return runners that share the session, which computes in the calling threads."""
        return tuple(type(self)(self._file, self.manifest, self._session) for _ in range(count))

    def time_on_device(self, images_NCHW: FloatArray, num_iterations: int) -> None:
        return None

    def _open(self) -> "onnxruntime.InferenceSession":
        target = self.manifest.target
        provider = provider_of(target)
        if provider == TENSORRT_PROVIDER:
            return open_session(self._file, provider=provider, num_threads=target.num_threads)
        try:
            options = session_options(target, needs_vnni=False) | dict(self._more_options)
            return open_onnxruntime(self._file, options, engine_libraries(self._file, target))
        except ValueError as error:
            raise TargetMismatch(
                f"{self._file}: {error} Run on a worker of the target's work pool (target.{target.name}.device)."
            ) from error
