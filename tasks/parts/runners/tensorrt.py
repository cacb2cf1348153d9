"""TensorRT. The engine file is a serialized plan. Not run on real hardware.

A plan belongs to the exact TensorRT version and the GPU that built it. Importing this module needs TensorRT and
pycuda; whoever imports it has checked the target first.
"""

from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import pycuda.driver as cuda
import tensorrt as trt

from tasks.core.errors import ArtifactError, DataError
from tasks.parts.cuda_driver import CapturedGraph
from tasks.parts.runners.contract import (
    EngineManifest,
    FloatArray,
    OperatorTime,
    RunnerDescription,
    check_batch,
)
from tasks.parts.target import Target
from tasks.parts.tensorrt_log import TensorrtLog

if TYPE_CHECKING:
    import torch

ENGINE_FILE = "engine.plan"


class PrimaryContext:
    """The CUDA context that torch and other libraries of this process use as well, current inside the block."""

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


class GrowingOutput(trt.IOutputAllocator):  # type: ignore[misc]
    """Device memory of one output that TensorRT asks for when it knows the size."""

    def __init__(self, num_bytes: int) -> None:
        """Take room for the largest batch at once: a captured graph holds the address."""
        trt.IOutputAllocator.__init__(self)
        self.shape: tuple[int, ...] = ()
        self._memory, self._num_bytes = cuda.mem_alloc(num_bytes), num_bytes

    @property
    def address(self) -> int:
        """Where the output lies."""
        return int(self._memory)

    def reallocate_output_async(
        self, _name: str, _memory: int, num_bytes: int, _alignment: int, _stream: int
    ) -> int:
        """Return an address with room for the output; pycuda aligns it by 256 bytes."""
        if num_bytes > self._num_bytes:
            self._memory, self._num_bytes = cuda.mem_alloc(num_bytes), num_bytes
        return self.address

    def notify_shape(self, _name: str, shape: Any) -> None:
        """Remember what shape the output got."""
        self.shape = tuple(shape)


class LayerTimes(trt.IProfiler):  # type: ignore[misc]
    """Adds up the milliseconds that each layer takes."""

    def __init__(self) -> None:
        trt.IProfiler.__init__(self)
        self.milliseconds: dict[str, float] = {}

    def report_layer_time(self, layer_name: str, ms: float) -> None:
        """Add one run of one layer."""
        self.milliseconds[layer_name] = self.milliseconds.get(layer_name, 0.0) + ms


def load_plan(plan: bytes, target: Target, log: TensorrtLog) -> "trt.ICudaEngine":
    """Deserialize a plan; raise ArtifactError with TensorRT's own words where it refuses."""
    assert target.tensorrt is not None
    runtime = trt.Runtime(log)
    # The plan of a version-compatible engine carries a runtime of its own, which is host code.
    runtime.engine_host_code_allowed = target.tensorrt.version_compatible
    engine = runtime.deserialize_cuda_engine(plan)
    if engine is None:
        raise ArtifactError(
            f"TensorRT {trt.__version__} cannot load the engine ({log.describe_errors()}). Run build_engine for "
            f"target {target.name} again on this machine."
        )
    return engine


def tensor_names(engine: "trt.ICudaEngine", mode: "trt.TensorIOMode") -> list[str]:
    """Return the names of an engine's inputs or outputs."""
    names = [engine.get_tensor_name(index) for index in range(engine.num_io_tensors)]
    return [name for name in names if engine.get_tensor_mode(name) == mode]


class TensorrtRunner:
    """Runs a plan in one execution context on one stream, through page-locked host memory."""

    def __init__(self, file: Path, manifest: EngineManifest) -> None:
        self._file, self.manifest = file, manifest
        self._graphs: dict[int, CapturedGraph] = {}
        self._batch = 0

    def __enter__(self) -> Self:
        target, card = self.manifest.target, self.manifest.card
        self._log = TensorrtLog()
        self._device = PrimaryContext().__enter__()
        self._engine = load_plan(self._file.read_bytes(), target, self._log)
        self._context: trt.IExecutionContext = self._engine.create_execution_context()
        self._stream = cuda.Stream()
        [self._input] = tensor_names(self._engine, trt.TensorIOMode.INPUT)
        [self._output_name] = tensor_names(self._engine, trt.TensorIOMode.OUTPUT)
        size = (card.height, card.width)
        self._images_NCHW = cuda.pagelocked_empty((target.max_batch, 3, *size), np.float32)
        self._logits_NCHW = cuda.pagelocked_empty((target.max_batch, len(card.classes), *size), np.float32)
        self._device_images = cuda.mem_alloc(self._images_NCHW.nbytes)
        self._output = GrowingOutput(self._logits_NCHW.nbytes)
        self._context.set_tensor_address(self._input, int(self._device_images))
        self._context.set_output_allocator(self._output_name, self._output)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stream.synchronize()
        for graph in self._graphs.values():
            graph.close()
        self._graphs.clear()
        del self._context, self._engine, self._output, self._device_images
        self._device.__exit__(kind, error, trace)

    def infer(self, images_NCHW: FloatArray) -> FloatArray:
        check_batch(images_NCHW, self.manifest)
        return self.run(images_NCHW).copy()

    def run(self, images_NCHW: FloatArray) -> FloatArray:
        num_images = len(images_NCHW)
        self._images_NCHW[:num_images] = images_NCHW
        if num_images != self._batch:
            self._choose_batch(num_images)
        graph = self._graphs.get(num_images)
        if graph is None:
            self._enqueue(num_images)
        else:
            graph.launch()
        self._stream.synchronize()
        logits_NCHW: FloatArray = self._logits_NCHW[:num_images]
        return logits_NCHW

    def infer_tensor(self, images_NCHW: "torch.Tensor", logits_NCHW: "torch.Tensor") -> None:
        """Read a contiguous CUDA tensor and write another one, float32, without copies.

        The work is queued behind torch's current stream, and torch's later work there sees the result.

        Raises DataError for tensors that are not contiguous float32 on the GPU or do not fit the engine.
        """
        import torch

        num_images, card = len(images_NCHW), self.manifest.card
        size = (card.height, card.width)
        for tensor, channels in ((images_NCHW, 3), (logits_NCHW, len(card.classes))):
            expected = (num_images, channels, *size)
            is_plain = tensor.is_cuda and tensor.is_contiguous() and tensor.dtype == torch.float32
            if not is_plain or tuple(tensor.shape) != expected:
                raise DataError(
                    f"Engine of target {self.manifest.target.name}: got {tensor.dtype} {list(tensor.shape)} on "
                    f"{tensor.device}, expected contiguous float32 {list(expected)} on the GPU."
                )
        if num_images != self._batch:
            self._choose_batch(num_images)
        context = self._context
        context.set_tensor_address(self._input, images_NCHW.data_ptr())
        context.set_output_allocator(self._output_name, None)
        context.set_tensor_address(self._output_name, logits_NCHW.data_ptr())
        is_queued = context.execute_async_v3(torch.cuda.current_stream().cuda_stream)
        context.set_tensor_address(self._input, int(self._device_images))
        context.set_output_allocator(self._output_name, self._output)
        self._check_queued(is_queued)

    def describe(self) -> RunnerDescription:
        device = cuda.Device(0)
        provider = f"{device.name()} sm_{''.join(map(str, device.compute_capability()))}"
        return RunnerDescription("tensorrt", trt.__version__, provider, self.manifest.target.num_threads)

    def profile(self, images_NCHW: FloatArray, num_iterations: int) -> tuple[OperatorTime, ...]:
        check_batch(images_NCHW, self.manifest)
        kinds = layer_kinds(self._engine)
        times = LayerTimes()
        self._images_NCHW[: len(images_NCHW)] = images_NCHW
        self._choose_batch(len(images_NCHW))
        self._context.profiler = times
        for _ in range(num_iterations):
            self._enqueue(len(images_NCHW))
            self._stream.synchronize()
        self._context.profiler = None
        found = [
            OperatorTime(name, kinds.get(name, ""), total / num_iterations)
            for name, total in times.milliseconds.items()
        ]
        return tuple(sorted(found, key=lambda time: -time.milliseconds))

    def _choose_batch(self, num_images: int) -> None:
        """Set shape and profile for a batch; the first time, run it once and capture it where that is wanted."""
        options, target = self.manifest.target.tensorrt, self.manifest.target
        assert options is not None
        profiles = options.profiles_for(target.max_batch)
        fitting = [index for index, one in enumerate(profiles) if one.min <= num_images <= one.max]
        if not fitting:
            raise DataError(
                f"Target {target.name}: no profile takes a batch of {num_images} (target.{target.name}.tensorrt"
                ".profiles). Declare one and build again."
            )
        if self._context.active_optimization_profile != fitting[0]:
            self._context.set_optimization_profile_async(fitting[0], self._stream.handle)
        self._context.set_input_shape(self._input, (num_images, *self._images_NCHW.shape[1:]))
        self._batch = num_images
        if options.cuda_graph and num_images not in self._graphs:
            self._enqueue(num_images)  # sizes and lazily loaded kernels must be settled before a capture
            self._stream.synchronize()
            self._graphs[num_images] = CapturedGraph(self._stream.handle, lambda: self._enqueue(num_images))

    def _enqueue(self, num_images: int) -> None:
        cuda.memcpy_htod_async(self._device_images, self._images_NCHW[:num_images], self._stream)
        self._check_queued(self._context.execute_async_v3(self._stream.handle))
        cuda.memcpy_dtoh_async(self._logits_NCHW[:num_images], self._output.address, self._stream)

    def _check_queued(self, is_queued: bool) -> None:
        if not is_queued:
            raise ArtifactError(
                f"{self._file}: TensorRT cannot run the engine ({self._log.describe_errors()}). Run build_engine "
                f"for target {self.manifest.target.name} again on this machine."
            )


def layer_kinds(engine: "trt.ICudaEngine") -> Mapping[str, str]:
    """Return layer name -> layer type, as the engine inspector tells."""
    from tasks.parts.tensorrt_inspector import read_layers

    return {layer.name: layer.kind for layer in read_layers(inspect(engine))}


def inspect(engine: "trt.ICudaEngine") -> str:
    """Return what the engine inspector says about all layers, as JSON."""
    inspector = engine.create_engine_inspector()
    return str(inspector.get_engine_information(trt.LayerInformationFormat.JSON))
