"""Run TensorRT plans, of both flavours. Not run on real hardware."""

import ctypes
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from .cuda_graph import NON_BLOCKING, CapturedGraph
from .jit import JitContexts, kernels_file, user_folder
from .kernels import GpuArray, GpuFrames, open_kernels
from .pixels import dtype_of_classes
from .sessions import Array


@dataclass(frozen=True)
class GpuAnswers:
    """Answers in the memory of the GPU; the next call of the plan overwrites them."""

    answers: GpuArray
    """The class of each pixel, [N, H, W], or of each image, [N], or values."""
    colours: GpuArray | None
    """Uint8 [N, H, W, 3] or [N, 3], if a palette was given."""


@dataclass(frozen=True)
class _Buffer:
    """Memory of the GPU for the largest batch."""

    memory: Any
    shape: tuple[int, ...]
    """For one image."""
    dtype: np.dtype[Any]


class Plan:
    """A plan on the GPU of pycuda's primary context (CUDA_DEVICE chooses), on one stream.

    Where NVRTC is installed, kernels on the GPU do what the plan does not do with frames and scores, and `card` says
    so: with them, it reads frames and gives classes.
    """

    def __init__(self, plan: bytes, card: dict[str, Any], libraries: Sequence[Path] = ()) -> None:
        """Load a plan, whose plugins are in checked `libraries`.

        Raises ValueError for another GPU than it was built for, or if it does not load.
        """
        import pycuda.autoprimaryctx
        import pycuda.driver as cuda

        is_rtx = card["runtime"] == "tensorrt_rtx"
        if is_rtx:
            import tensorrt_rtx as trt
        else:
            import tensorrt as trt

        device, options = pycuda.autoprimaryctx.device, card["options"]
        check_gpu(device.name(), device.compute_capability(), options)
        logger = trt.Logger(trt.Logger.WARNING)
        if not trt.init_libnvinfer_plugins(logger, ""):
            raise ValueError("TensorRT cannot load its own plugins; its error is above.")
        runtime = trt.Runtime(logger)
        runtime.engine_host_code_allowed = options["version_compatible"]
        for library in libraries:
            if runtime.get_plugin_registry().load_library(str(library)) is None:
                raise ValueError(f"TensorRT cannot load the plugins in {library}; its error is above.")
        engine = runtime.deserialize_cuda_engine(plan)
        if engine is None:
            raise ValueError(
                f"TensorRT {trt.__version__} cannot load the engine; its error is above. Build it again here."
            )
        self._jit: JitContexts | None = None
        if is_rtx:
            self._jit = JitContexts(engine, _find_kernels(device, trt.__version__, card["sha256"]))
            context = self._jit.open(cuda_graph=options["cuda_graph"])
        else:
            context = engine.create_execution_context()
        if context is None:
            raise ValueError(
                "TensorRT has too little GPU memory for the engine. End other processes on the GPU."
            )
        self._cuda, self._engine, self._stream = cuda, engine, cuda.Stream(NON_BLOCKING)
        self._context = context
        self._batches: list[list[int]] = card["batches"]
        self._has_graph: bool = options["cuda_graph"] and not is_rtx  # it has graphs of its own
        self._graph: CapturedGraph | None = None
        self._batch = 0
        names = [engine.get_tensor_name(index) for index in range(engine.num_io_tensors)]
        [self._reads] = [name for name in names if engine.get_tensor_mode(name) == trt.TensorIOMode.INPUT]
        [gives] = [name for name in names if engine.get_tensor_mode(name) == trt.TensorIOMode.OUTPUT]
        self._inputs, self._outputs = (
            self._allocate(
                tuple(engine.get_tensor_shape(name))[1:], trt.nptype(engine.get_tensor_dtype(name))
            )
            for name in (self._reads, gives)
        )
        for name, buffer in ((self._reads, self._inputs), (gives, self._outputs)):
            is_set = context.set_tensor_address(name, int(buffer.memory))
            _require(is_set, f"the memory of {name}")
        self._add_kernels(card)
        self._host_frames, self._host_answers = (
            cuda.pagelocked_empty((self._largest, *buffer.shape), buffer.dtype)
            for buffer in (self._frames, self._answers)
        )

    def _add_kernels(self, card: dict[str, Any]) -> None:
        """Decide what kernels do, and allocate what they read and write."""
        self._kernels = open_kernels(card, self._stream)
        self._has_classes, has_kernels = card["task"] != "values", self._kernels is not None
        self._fits = has_kernels and card["reads"] == "normalised"
        self._chooses = has_kernels and self._has_classes and card["gives"] == "logits"
        self._is_bgr = card["reads"] == "bgr_frames"
        self._channels = len(card["mean"])
        self.card = card | ({"reads": "frames"} if self._fits else {})
        self.card |= {"gives": "classes"} if self._chooses else {}
        self._frames, self._answers = self._inputs, self._outputs
        if self._fits:
            self._frames = self._allocate((card["height"], card["width"], self._channels), np.uint8)
        if self._chooses:
            num_classes, *pixels = self._outputs.shape
            self._answers = self._allocate(tuple(pixels), dtype_of_classes(num_classes))
        self._colours: _Buffer | None = None

    def __call__(self, inputs: Array) -> Array:
        """Return what the plan gives for a batch of what it reads, both in host memory and as `card` says.

        The next call overwrites the result.
        """
        batch = len(inputs)
        self._host_frames[:batch] = inputs
        self._set_batch(batch)
        if self._has_graph and self._graph is None:
            self._enqueue()  # lazily loaded kernels must be loaded before a capture
            self._stream.synchronize()
            self._graph = CapturedGraph(self._stream.handle, self._enqueue)
        if self._graph is None:
            self._enqueue()
        else:
            self._graph.launch()
        self._finish()
        answers: Array = self._host_answers[:batch]
        return answers

    def answer_on_gpu(
        self, frames: Any, *, resize: str | None = None, is_bgr: bool = False, palette: Array | None = None
    ) -> GpuAnswers:
        """Return the answers to one batch of frames that are in the memory of the GPU, of any size.

        `frames` are uint8 [N, H, W, C] with `__cuda_array_interface__`, RGB, or BGR if `is_bgr`. They are resized as
        `fit_frame` does it, by `resize` or as the network was trained. `palette`, uint8 [K, 3] in host memory, asks
        for colours. The call waits for the stream that the frames name, or for all of the context, and for the
        answers.

        Raises ValueError for frames that the engine does not take, and without NVRTC.
        """
        if self._kernels is None:
            raise ValueError(
                "frames on the GPU need NVRTC, which compiles what stands before and behind the engine. Run pip "
                "install nvidia-cuda-nvrtc, or nvidia-cuda-nvrtc-cu12 for CUDA 12."
            )
        if palette is not None and not self._has_classes:
            raise ValueError("a palette colours classes, and the engine gives values. Leave it out.")
        source = GpuFrames.of(frames, self._channels)
        batch = len(source)
        if not any(low <= batch <= high for low, high in self._batches):
            raise ValueError(
                f"there are {batch} frames, the engine takes {self._batches} (lowest, highest). Split them."
            )
        if source.stream is None:
            self._cuda.Context.synchronize()
        else:
            wait_for_stream(source.stream)
        self._set_batch(batch)
        inputs, is_reversed = self._on_gpu(self._inputs), is_bgr != self._is_bgr
        mode = resize or self.card["reading"]["resize_mode"]
        self._kernels.fit(source, inputs, resize=mode, is_reversed=is_reversed)
        self._execute()
        answers, colours = self._on_gpu(self._answers), None
        if palette is not None:
            if self._colours is None:
                self._colours = self._allocate((*self._answers.shape, 3), np.uint8)
            colours = self._on_gpu(self._colours)
        if self._chooses:
            scores = self._on_gpu(self._outputs)
            self._kernels.choose(scores, answers, palette=palette, colours=colours)
        elif palette is not None and colours is not None:
            self._kernels.paint(answers, palette=palette, colours=colours)
        self._finish()
        return GpuAnswers(answers, colours)

    def _enqueue(self) -> None:
        """Queue a batch from host memory to host memory."""
        frames, answers = self._on_gpu(self._frames), self._on_gpu(self._answers)
        self._cuda.memcpy_htod_async(self._frames.memory, self._host_frames[: self._batch], self._stream)
        if self._kernels is not None and self._fits:
            packed = GpuFrames.packed(frames.address, frames.shape)
            self._kernels.fit(packed, self._on_gpu(self._inputs))
        self._execute()
        if self._kernels is not None and self._chooses:
            self._kernels.choose(self._on_gpu(self._outputs), answers)
        self._cuda.memcpy_dtoh_async(self._host_answers[: self._batch], self._answers.memory, self._stream)

    def _finish(self) -> None:
        """Wait for a batch, and keep the kernels that were compiled for it."""
        self._stream.synchronize()
        if self._jit is not None:
            self._jit.keep(self._batch)

    def _execute(self) -> None:
        is_queued = self._context.execute_async_v3(self._stream.handle)
        _require(is_queued, f"to run a batch of {self._batch}")

    def _set_batch(self, batch: int) -> None:
        """Set the shape; a captured graph belongs to the one before."""
        if batch == self._batch:
            return
        if self._graph is not None:
            self._graph.close()
            self._graph = None
        fitting = [index for index, (low, high) in enumerate(self._batches) if low <= batch <= high]
        if self._context.active_optimization_profile != fitting[0]:
            is_set = self._context.set_optimization_profile_async(fitting[0], self._stream.handle)
            _require(is_set, f"optimization profile {fitting[0]}")
        shape = (batch, *self._inputs.shape)
        is_set = self._context.set_input_shape(self._reads, shape)
        _require(is_set, f"the shape {list(shape)} of {self._reads}")
        self._batch = batch

    @property
    def _largest(self) -> int:
        return max(highest for _, highest in self._batches)

    def _allocate(self, shape: tuple[int, ...], dtype: Any) -> _Buffer:
        dtype = np.dtype(dtype)
        num_bytes = self._largest * math.prod(shape) * dtype.itemsize
        return _Buffer(self._cuda.mem_alloc(num_bytes), shape, dtype)

    def _on_gpu(self, buffer: _Buffer) -> GpuArray:
        """Return the memory of the current batch."""
        shape = (self._batch, *buffer.shape)
        return GpuArray(int(buffer.memory), shape, buffer.dtype, self._stream.handle)


def _find_kernels(device: Any, version: str, sha256: str) -> Path | None:
    """Return the file for the kernels of a plan on a device of pycuda; None for a user without a home."""
    import pycuda.driver as cuda

    folder = user_folder()
    if folder is None:
        return None
    capability = ".".join(map(str, device.compute_capability()))
    driver = cuda.get_driver_version()
    return kernels_file(
        folder, gpu=device.name(), capability=capability, version=version, driver=driver, sha256=sha256
    )


def wait_for_stream(stream: int) -> None:
    """Wait for the work on a stream of any library, by its handle."""
    status = ctypes.CDLL("libcuda.so.1").cuStreamSynchronize(ctypes.c_void_p(stream))
    if status:
        raise ValueError(
            f"cuStreamSynchronize returned error {status} (CUresult in cuda.h) for the stream of the frames."
        )


def _require(is_accepted: bool, call: str) -> None:
    """Raise ValueError unless TensorRT accepted a call."""
    if not is_accepted:
        raise ValueError(f"TensorRT refuses {call}; its error is above. Build the engine again here.")


def check_gpu(name: str, compute_capability: tuple[int, int], options: dict[str, Any]) -> None:
    """Raise ValueError for a GPU on which the plan does not run, or runs unlike it was measured."""
    built_on, compatibility = options["gpu"], options["hardware_compatibility"]
    here = ".".join(map(str, compute_capability))
    is_same = here == built_on["compute_capability"]
    fits = {
        "none": is_same and name == built_on["name"],
        "same_compute_capability": is_same,
        "ampere_plus": compute_capability >= (8, 0),
    }
    if not fits[compatibility]:
        raise ValueError(
            f"the engine was built on {built_on['name']} ({built_on['compute_capability']}) with "
            f"hardware_compatibility {compatibility}, this GPU is {name} ({here}). Build it again here."
        )
