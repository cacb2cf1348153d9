"""TensorRT, of both flavours. The engine file is a serialized plan. Not run on real hardware.

A plan belongs to the exact TensorRT version and the GPU that built it. Importing this module needs pycuda and a
flavour that was chosen (tensorrt_flavour.py), so check the target first.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import pycuda.driver as cuda
import tensorrt as trt
from numpy.typing import NDArray

from tasks.core.errors import ArtifactError, DataError, TargetMismatch
from tasks.parts.engines.frame_engine.cuda_graph import NON_BLOCKING, CapturedGraph
from tasks.parts.engines.frame_engine.jit import JitContexts, kernels_file
from tasks.parts.engines.manifest import EngineManifest, FloatArray, engine_libraries
from tasks.parts.engines.runner import DeviceTimes, OperatorTime, RunnerDescription, check_batch, typical_time
from tasks.parts.engines.runtimes import Runtime
from tasks.parts.engines.target import Target
from tasks.parts.engines.tensorrt.debug_tensors import DebugTensors
from tasks.parts.engines.tensorrt.inspector import read_layers
from tasks.parts.engines.tensorrt.log import LOG, describe_errors
from tasks.parts.engines.tensorrt.plugins import load_plugins
from tasks.parts.engines.tensorrt_flavour import choose_tensorrt
from tasks.parts.engines.tensorrt_options import RUNTIME_CACHE

if TYPE_CHECKING:
    import torch

ENGINE_FILE = "engine.plan"


def open_runner(file: Path, manifest: EngineManifest) -> "TensorrtRunner":
    """Return the runner of a plan; raise TargetMismatch in a process that runs the other flavour of TensorRT."""
    choose_tensorrt(manifest.target.runtime)
    return TensorrtRunner(file, manifest)


class PrimaryContext:
    """Make the primary CUDA context current, which torch and other libraries of this process share."""

    def __enter__(self) -> Self:
        cuda.init()
        self._primary = cuda.Device(0).retain_primary_context()
        self._primary.push()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._primary.pop()
        self._primary.detach()


def _copy_from_device(values: NDArray[Any], address: int) -> None:
    cuda.Context.synchronize()
    cuda.memcpy_dtoh(values, address)


class LayerTimes(trt.IProfiler):  # type: ignore[misc]
    """Collects the milliseconds that each layer takes."""

    def __init__(self) -> None:
        trt.IProfiler.__init__(self)
        self.milliseconds: dict[str, list[float]] = defaultdict(list)

    def report_layer_time(self, layer_name: str, ms: float) -> None:
        """Add one run of one layer."""
        self.milliseconds[layer_name].append(ms)


class LogitsMemory(trt.IOutputAllocator):  # type: ignore[misc]
    """Allocates the logits for TensorRT, with more memory if an engine writes more than its card says."""

    def __init__(self, num_bytes: int) -> None:
        trt.IOutputAllocator.__init__(self)
        self.memory, self._num_bytes = cuda.mem_alloc(num_bytes), num_bytes
        self.shape: tuple[int, ...] = ()
        """Shape of the latest logits, as reported by TensorRT."""

    def reallocate_output_async(
        self, tensor_name: str, memory: int, size: int, alignment: int, stream: int
    ) -> int:
        """Return the address of at least `size` bytes."""
        if size > self._num_bytes:
            self.memory, self._num_bytes = cuda.mem_alloc(size), size
        return int(self.memory)

    def notify_shape(self, tensor_name: str, shape: "trt.Dims") -> None:
        """Keep the shape of the written logits."""
        self.shape = tuple(shape)


def load_plan(plan: bytes, target: Target, libraries: Sequence[Path]) -> "trt.ICudaEngine":
    """Deserialize a plan, whose plugins checked `libraries` have; raise ArtifactError if that fails."""
    assert target.tensorrt is not None
    num_before = len(LOG.errors)
    runtime = trt.Runtime(LOG)
    load_plugins(runtime.get_plugin_registry(), libraries)
    # A version-compatible plan carries its own runtime, which is host code.
    runtime.engine_host_code_allowed = target.tensorrt.version_compatible
    engine = runtime.deserialize_cuda_engine(plan)
    if engine is None:
        raise ArtifactError(
            f"TensorRT {trt.__version__} cannot load the engine ({describe_errors(LOG.errors[num_before:])}). Run "
            f"build_engine for target {target.name} again on this machine."
        )
    return engine


def open_jit(engine: "trt.ICudaEngine", manifest: EngineManifest) -> JitContexts:
    """Return what opens the contexts of a plan of TensorRT for RTX, with the kernels of earlier processes."""
    device = cuda.Device(0)
    file = kernels_file(
        RUNTIME_CACHE,
        gpu=device.name(),
        capability=".".join(map(str, device.compute_capability())),
        version=trt.__version__,
        driver=cuda.get_driver_version(),
        sha256=manifest.sha256,
    )
    return JitContexts(engine, file, ArtifactError)


def open_context(
    engine: "trt.ICudaEngine", target: Target, jit: JitContexts | None = None
) -> "trt.IExecutionContext":
    """Create an execution context with its own memory; raise ArtifactError if the GPU has too little."""
    num_before = len(LOG.errors)
    if jit is None:
        context = engine.create_execution_context()
    else:
        assert target.tensorrt is not None
        context = jit.open(cuda_graph=target.tensorrt.cuda_graph)
    if context is None:
        raise ArtifactError(
            f"TensorRT has no memory for an execution context ({describe_errors(LOG.errors[num_before:])}). End "
            f"other processes on the GPU, or lower target.{target.name}.max_batch and build again."
        )
    return context


def require(is_accepted: bool, call: str, target: Target) -> None:
    """Raise ArtifactError with TensorRT's latest error unless it accepted a call."""
    if not is_accepted:
        raise ArtifactError(
            f"TensorRT {trt.__version__} refuses {call} for the engine of target {target.name} "
            f"({describe_errors(LOG.errors[-1:])}). Run build_engine for this target again on this machine."
        )


def tensor_names(engine: "trt.ICudaEngine", mode: "trt.TensorIOMode") -> list[str]:
    """Return the names of an engine's inputs or outputs."""
    names = [engine.get_tensor_name(index) for index in range(engine.num_io_tensors)]
    return [name for name in names if engine.get_tensor_mode(name) == mode]


def shape_of(engine: "trt.ICudaEngine", name: str) -> tuple[int, ...]:
    """Return the shape of an input or output for one image."""
    return tuple(engine.get_tensor_shape(name))[1:]


def inspect(engine: "trt.ICudaEngine", target: Target) -> str:
    """Return the engine inspector's JSON about all layers.

    It needs a context with known shapes: without one, layers that depend on the batch report no precision.
    """
    assert target.tensorrt is not None
    [name] = tensor_names(engine, trt.TensorIOMode.INPUT)
    context = open_context(engine, target)
    batch = target.tensorrt.profiles_for(target.max_batch)[0].opt
    shape = (batch, *shape_of(engine, name))
    require(context.set_input_shape(name, shape), f"the shape {list(shape)} of {name}", target)
    inspector = engine.create_engine_inspector()
    require(inspector is not None, "an engine inspector", target)
    inspector.execution_context = context
    return str(inspector.get_engine_information(trt.LayerInformationFormat.JSON))


class TensorrtRunner:
    """Runs a plan on one stream, through page-locked host memory.

    The stream is non-blocking: it neither waits for work on the legacy default stream, such as torch's, nor holds it
    up.
    A captured graph belongs to the shapes of its context, so the one graph is recorded again when the batch changes.
    TensorRT for RTX captures and keeps its graphs itself.
    """

    def __init__(
        self,
        file: Path,
        manifest: EngineManifest,
        shared: "tuple[trt.ICudaEngine, JitContexts | None] | None" = None,
    ) -> None:
        self._file, self.manifest, self._shared = file, manifest, shared
        self._graph: CapturedGraph | None = None
        self._batch = 0
        self._tensor_context: trt.IExecutionContext | None = None

    def __enter__(self) -> Self:
        target = self.manifest.target
        with ExitStack() as stack:
            stack.enter_context(PrimaryContext())
            if self._shared is None:
                engine = load_plan(self._file.read_bytes(), target, engine_libraries(self._file, target))
                is_rtx = target.runtime is Runtime.tensorrt_rtx
                self._engine, self._jit = engine, open_jit(engine, self.manifest) if is_rtx else None
            else:
                self._engine, self._jit = self._shared
            self._context = open_context(self._engine, target, self._jit)
            self._stream = cuda.Stream(NON_BLOCKING)
            [self._input] = tensor_names(self._engine, trt.TensorIOMode.INPUT)
            [self._output] = tensor_names(self._engine, trt.TensorIOMode.OUTPUT)
            try:
                self._images_NCHW, self._logits_NCHW = map(self._allocate, (self._input, self._output))
                self._device_images = cuda.mem_alloc(self._images_NCHW.nbytes)
                self._device_logits = LogitsMemory(self._logits_NCHW.nbytes)
            except cuda.MemoryError as error:
                raise ArtifactError(
                    f"Target {target.name}: no memory for {target.max_batch} images and their logits ({error}). End "
                    f"other processes on the GPU, or lower target.{target.name}.max_batch and build again."
                ) from error
            self._bind(self._context)
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._stack:
            self._forget_graph()
            self._stream.synchronize()
            # In this order, while the CUDA context exists: what outlives it is never freed.
            self._tensor_context = None
            del self._context, self._jit, self._engine, self._device_images, self._device_logits
            del self._images_NCHW, self._logits_NCHW, self._stream

    def _bind(self, context: "trt.IExecutionContext") -> None:
        """Let a context read and write the memory of this runner."""
        target = self.manifest.target
        is_set = context.set_tensor_address(self._input, int(self._device_images))
        require(is_set, f"the memory of {self._input}", target)
        is_set = context.set_output_allocator(self._output, self._device_logits)
        require(is_set, f"the allocator of {self._output}", target)

    @contextmanager
    def _without_graph(self) -> Iterator[None]:
        """Launch kernels one by one meanwhile: in a graph, TensorRT calls neither profiler nor listener."""
        self._forget_graph()
        usual = self._context
        if self._jit is not None:
            self._context = self._jit.open(cuda_graph=False)
            self._bind(self._context)
        try:
            yield
        finally:
            self._context = usual

    def infer(self, images_NCHW: FloatArray) -> FloatArray:
        check_batch(images_NCHW, self.manifest)
        return self.run(images_NCHW).copy()

    def run(self, images_NCHW: FloatArray) -> FloatArray:
        num_images = len(images_NCHW)
        self._images_NCHW[:num_images] = images_NCHW
        if num_images != self._batch:
            self._choose_batch(num_images)
        self._start()
        self._stream.synchronize()
        expected = (num_images, *self._logits_NCHW.shape[1:])
        if self._device_logits.shape != expected:
            raise ArtifactError(
                f"{self._file} writes logits {list(self._device_logits.shape)}, its card says {list(expected)}. Run "
                f"build_engine for target {self.manifest.target.name} again."
            )
        logits_NCHW: FloatArray = self._logits_NCHW[:num_images]
        return logits_NCHW

    def infer_tensor(self, images_NCHW: "torch.Tensor", logits_NCHW: "torch.Tensor") -> None:
        """Read a contiguous CUDA tensor and write another one, of the engine's types, without copies.

        The work is queued on torch's current stream in a separate execution context, so it neither waits for nor
        disturbs `run`. Calls of this method must be sequential on one stream.

        Raises DataError for tensors that are not contiguous on the GPU or do not fit the engine.
        """
        import torch

        num_images, target = len(images_NCHW), self.manifest.target
        for tensor, host in ((images_NCHW, self._images_NCHW), (logits_NCHW, self._logits_NCHW)):
            expected, dtype = (num_images, *host.shape[1:]), torch.from_numpy(host[:0]).dtype
            is_plain = tensor.is_cuda and tensor.is_contiguous() and tensor.dtype == dtype
            if not is_plain or tuple(tensor.shape) != expected:
                raise DataError(
                    f"Engine of target {target.name}: got {tensor.dtype} {list(tensor.shape)} on "
                    f"{tensor.device}, expected contiguous {host.dtype} {list(expected)} on the GPU."
                )
        context = self._tensor_context = self._tensor_context or open_context(self._engine, target, self._jit)
        stream = torch.cuda.current_stream().cuda_stream
        self._set_shape(context, num_images, stream)
        for name, tensor in ((self._input, images_NCHW), (self._output, logits_NCHW)):
            is_set = context.set_tensor_address(name, tensor.data_ptr())
            require(is_set, f"the memory of {name}", target)
        self._launch(context, stream)

    def infer_tensors(self, images_NCHW: FloatArray) -> dict[str, NDArray[Any]]:
        """Return the logits and the debug tensors, by TensorRT's names.

        A plan that was built without marked tensors returns only the logits.
        """
        check_batch(images_NCHW, self.manifest)
        num_images, listener = len(images_NCHW), DebugTensors(_copy_from_device)
        self._images_NCHW[:num_images] = images_NCHW
        with self._without_graph():
            self._set_shape(self._context, num_images, self._stream.handle)
            is_set = self._context.set_debug_listener(listener)
            require(is_set, "a debug listener", self.manifest.target)
            self._context.unfused_tensors_debug_state = True
            self._enqueue(num_images)
            self._stream.synchronize()
            self._context.unfused_tensors_debug_state = False
        return {**listener.tensors, self._output: self._logits_NCHW[:num_images].copy()}

    def describe(self) -> RunnerDescription:
        target, device = self.manifest.target, cuda.Device(0)
        assert target.tensorrt is not None
        return RunnerDescription(
            runtime=target.runtime,
            runtime_version=trt.__version__,
            provider=f"{device.name()} sm_{''.join(map(str, device.compute_capability()))}",
            num_threads=target.num_threads,
            options={
                "cuda_graph": target.tensorrt.cuda_graph,
                "transfers_included": True,
                "tf32": target.tensorrt.tf32,
                "sparse_weights": target.tensorrt.sparse_weights,
                **({"kernels_read": self._jit.are_kernels_read} if self._jit else {}),
            },
        )

    def profile(self, images_NCHW: FloatArray, num_iterations: int) -> tuple[OperatorTime, ...]:
        check_batch(images_NCHW, self.manifest)
        num_images, times = len(images_NCHW), LayerTimes()
        kinds = {layer.name: layer.kind for layer in read_layers(inspect(self._engine, self.manifest.target))}
        self._images_NCHW[:num_images] = images_NCHW
        with self._without_graph():
            self._set_shape(self._context, num_images, self._stream.handle)
            self._context.profiler = times
            for _ in range(num_iterations):
                self._enqueue(num_images)
                self._stream.synchronize()
            self._context.profiler = None
        layer_times = [
            OperatorTime(name, kinds.get(name, ""), typical_time(values, num_iterations))
            for name, values in times.milliseconds.items()
        ]
        return tuple(sorted(layer_times, key=lambda time: -time.milliseconds))

    def open_concurrent(self, count: int) -> tuple[Self, ...]:
        """Return runners that share the plan; each has its own execution context, stream and memory."""
        shared = (self._engine, self._jit)
        return tuple(type(self)(self._file, self.manifest, shared) for _ in range(count))

    def time_on_device(self, images_NCHW: FloatArray, num_iterations: int) -> DeviceTimes:
        """Time the GPU work of `run`, and the kernels alone; waiting for the host is included."""
        self.infer(images_NCHW)
        total_ms = [self._elapsed_ms(self._start) for _ in range(num_iterations)]
        if self._graph is None:
            return DeviceTimes(total_ms, [self._elapsed_ms(self._compute) for _ in range(num_iterations)])
        graph = CapturedGraph(self._stream.handle, self._compute, TargetMismatch)
        compute_ms = [self._elapsed_ms(graph.launch) for _ in range(num_iterations)]
        graph.close()
        return DeviceTimes(total_ms, compute_ms)

    def _allocate(self, name: str) -> NDArray[Any]:
        """Return page-locked memory for the largest batch of an input or output."""
        shape = (self.manifest.target.max_batch, *shape_of(self._engine, name))
        memory: NDArray[Any] = cuda.pagelocked_empty(shape, trt.nptype(self._engine.get_tensor_dtype(name)))
        return memory

    def _elapsed_ms(self, start: Callable[[], None]) -> float:
        before, after = cuda.Event(), cuda.Event()
        before.record(self._stream)
        start()
        after.record(self._stream)
        after.synchronize()
        return float(after.time_since(before))

    def _start(self) -> None:
        if self._graph is None:
            self._enqueue(self._batch)
        else:
            self._graph.launch()

    def _compute(self) -> None:
        self._launch(self._context, self._stream.handle)

    def _choose_batch(self, num_images: int) -> None:
        """Set the shape of a batch; compile its kernels, or capture its work if the target enables CUDA graphs."""
        options = self.manifest.target.tensorrt
        assert options is not None
        self._forget_graph()
        self._set_shape(self._context, num_images, self._stream.handle)
        if self._jit is not None:
            self._enqueue(num_images)  # compiles the kernels
            self._stream.synchronize()
            self._jit.keep(num_images)
        elif options.cuda_graph:
            self._enqueue(num_images)  # lazily loaded kernels must be loaded before a capture
            self._stream.synchronize()
            self._graph = CapturedGraph(
                self._stream.handle, lambda: self._enqueue(num_images), TargetMismatch
            )
        self._batch = num_images

    def _forget_graph(self) -> None:
        if self._graph is not None:
            self._graph.close()
        self._graph, self._batch = None, 0

    def _set_shape(self, context: "trt.IExecutionContext", num_images: int, stream: int) -> None:
        target = self.manifest.target
        assert target.tensorrt is not None
        profiles = target.tensorrt.profiles_for(target.max_batch)
        fitting = [
            index for index, profile in enumerate(profiles) if profile.min <= num_images <= profile.max
        ]
        if not fitting:
            raise DataError(
                f"Target {target.name}: no profile accepts a batch of {num_images} (target.{target.name}.tensorrt"
                ".profiles). Declare one and build again."
            )
        if context.active_optimization_profile != fitting[0]:
            is_set = context.set_optimization_profile_async(fitting[0], stream)
            require(is_set, f"optimization profile {fitting[0]}", target)
        shape = (num_images, *self._images_NCHW.shape[1:])
        is_set = context.set_input_shape(self._input, shape)
        require(is_set, f"the shape {list(shape)} of {self._input}", target)

    def _enqueue(self, num_images: int) -> None:
        cuda.memcpy_htod_async(self._device_images, self._images_NCHW[:num_images], self._stream)
        self._compute()
        cuda.memcpy_dtoh_async(self._logits_NCHW[:num_images], self._device_logits.memory, self._stream)

    def _launch(self, context: "trt.IExecutionContext", stream: int) -> None:
        num_before = len(LOG.errors)
        if not context.execute_async_v3(stream):
            raise ArtifactError(
                f"{self._file}: TensorRT cannot run the engine ({describe_errors(LOG.errors[num_before:])}). Run "
                f"build_engine for target {self.manifest.target.name} again on this machine."
            )
