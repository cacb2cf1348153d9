"""OpenVINO. The engine file is the compiled blob: it loads about ten times faster than the graph compiles.

A blob belongs to the exact OpenVINO version and the instruction sets of the CPU that compiled it.
"""

from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import TYPE_CHECKING, Any, Self

from tasks.core.errors import ArtifactError
from tasks.parts.engines.frame_engine.sessions import Run, open_openvino, run_openvino
from tasks.parts.engines.machine import installed_version
from tasks.parts.engines.manifest import EngineManifest, FloatArray, engine_libraries
from tasks.parts.engines.openvino.compile import cause_of, compile_options
from tasks.parts.engines.runner import OperatorTime, RunnerDescription, check_batch, typical_time
from tasks.parts.engines.runtimes import Runtime

if TYPE_CHECKING:
    import openvino

_PROFILED_PER_LOAD = 8
"""Inferences of one loaded engine whose layers are timed; an interruption distorts only this load."""


def open_runner(
    file: Path, manifest: EngineManifest, more_options: Mapping[str, Any] = MappingProxyType({})
) -> "OpenvinoRunner":
    """Return the runner of a blob; `more_options` are properties."""
    return OpenvinoRunner(file, manifest, more_options=more_options)


def _infer_means_ms(request: Any, images_NCHW: FloatArray, count: int) -> dict[tuple[str, str], float]:
    """Run `count` times; return the mean time of each layer by name and type, over all runs since the engine loaded.

    OpenVINO reports no other, and rounds it down to a microsecond.
    """
    for _ in range(count):
        request.infer({0: images_NCHW}, share_inputs=True)
    return {
        (info.node_name, info.node_type): 1000 * info.real_time.total_seconds()
        for info in request.profiling_info
    }


class OpenvinoRunner:
    """Runs a compiled blob with one synchronous request."""

    def __init__(
        self,
        file: Path,
        manifest: EngineManifest,
        compiled: Any = None,
        more_options: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        self._file, self.manifest, self._compiled = file, manifest, compiled
        self._more_options = more_options
        self._run: Run | None = None

    def __enter__(self) -> Self:
        if self._compiled is None:
            self._compiled = self._import({})
        self._run = run_openvino(self._compiled)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._run = self._compiled = None

    def infer(self, images_NCHW: FloatArray) -> FloatArray:
        check_batch(images_NCHW, self.manifest)
        return self.run(images_NCHW).copy()

    def run(self, images_NCHW: FloatArray) -> FloatArray:
        assert self._run is not None, "use the runner in a with block"
        return self._run(images_NCHW)

    def describe(self) -> RunnerDescription:
        get = self._compiled.get_property
        return RunnerDescription(
            runtime="openvino",
            runtime_version=installed_version(Runtime.openvino),
            provider="+".join(get("EXECUTION_DEVICES")),
            num_threads=int(get("INFERENCE_NUM_THREADS")),
            options={
                "inference_precision_hint": get("INFERENCE_PRECISION_HINT").get_type_name(),
                "num_streams": int(get("NUM_STREAMS")),
            },
        )

    def profile(self, images_NCHW: FloatArray, num_iterations: int) -> tuple[OperatorTime, ...]:
        check_batch(images_NCHW, self.manifest)
        milliseconds: dict[tuple[str, str], list[float]] = defaultdict(list)
        for _ in range(-(-num_iterations // _PROFILED_PER_LOAD)):
            request = self._import({"PERF_COUNT": True}).create_infer_request()
            first = _infer_means_ms(request, images_NCHW, 1)  # it is slower
            means = _infer_means_ms(request, images_NCHW, _PROFILED_PER_LOAD)
            for key, mean in means.items():
                total = (1 + _PROFILED_PER_LOAD) * mean - first[key]
                milliseconds[key].append(max(0.0, total / _PROFILED_PER_LOAD))
        times = [
            OperatorTime(name, kind, typical_time(values, len(values)))
            for (name, kind), values in milliseconds.items()
            if any(values)
        ]
        return tuple(sorted(times, key=lambda time: -time.milliseconds))

    def open_concurrent(self, count: int) -> tuple[Self, ...]:
        """Load the blob once more with a stream for each runner."""
        num_threads = count * self.manifest.target.num_threads
        compiled = self._import({"NUM_STREAMS": count, "INFERENCE_NUM_THREADS": num_threads})
        return tuple(type(self)(self._file, self.manifest, compiled) for _ in range(count))

    def time_on_device(self, images_NCHW: FloatArray, num_iterations: int) -> None:
        return None

    def _import(self, more_options: dict[str, Any]) -> "openvino.CompiledModel":
        options = compile_options(self.manifest.target) | dict(self._more_options) | more_options
        libraries = engine_libraries(self._file, self.manifest.target)
        try:
            return open_openvino(self._file.read_bytes(), {"properties": options}, libraries)
        except RuntimeError as error:
            raise ArtifactError(
                f"{self._file}: OpenVINO {installed_version(Runtime.openvino)} cannot load it ({cause_of(error)}). "
                f"Run build_engine for target {self.manifest.target.name} again on this machine."
            ) from error
