"""Run torch programs, eager or compiled ahead of time, on the CPU or an NVIDIA GPU.

On a GPU, images and logits pass through page-locked memory, and a run returns when its stream has finished.
"""

import contextlib
import importlib.metadata
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from tasks.core.errors import ArtifactError, TargetMismatch, first_line
from tasks.parts.engines.manifest import EngineManifest, FloatArray
from tasks.parts.engines.runner import DeviceTimes, OperatorTime, RunnerDescription, check_batch
from tasks.parts.engines.runtimes import CUDA
from tasks.parts.engines.target import Target
from tasks.parts.engines.torch.eager import load_network

if TYPE_CHECKING:
    from torch import Tensor

Program = Callable[["Tensor"], "Tensor"]
"""From images [N, 3, H, W] to logits [N, classes, H, W], both float32 on the target's device."""


def set_up_torch(target: Target) -> None:
    """Set torch's threads, and turn off TF32, in which GPUs round the factors of float32 products to 10 bits.

    Raises TargetMismatch if torch cannot use the GPU.
    """
    import torch

    torch.set_num_threads(target.num_threads)
    if target.device == CUDA:
        if not torch.cuda.is_available():
            raise TargetMismatch(
                f"Target {target.name} needs torch with CUDA; torch {torch.__version__} finds no GPU that it can "
                "use. Install the build of torch for this machine's driver (see nvidia-smi), or run this on a worker "
                f"of its work pool."
            )
        torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = False


@contextlib.contextmanager
def _explained_out_of_memory(target: Target) -> Iterator[None]:
    """Raise ArtifactError if the GPU has too little memory."""
    import torch

    try:
        yield
    except torch.OutOfMemoryError as error:
        raise ArtifactError(
            f"Target {target.name}: the GPU has too little memory ({first_line(error)}). End other "
            "processes on it, send smaller batches (validate.batch_size, benchmark.batch_sizes), or lower "
            f"target.{target.name}.max_batch and build again."
        ) from error


def open_runner(file: Path, manifest: EngineManifest) -> "TorchRunner":
    """Return the runner of an eager network."""
    return TorchRunner(file, manifest, load_network)


class TorchRunner:
    """Runs the program that `load` returns for an engine file, in inference mode."""

    def __init__(
        self,
        file: Path,
        manifest: EngineManifest,
        load: Callable[[Path, Target], Program],
        *,
        is_program_shared: bool = True,
    ) -> None:
        """Take a loader, and whether concurrent runners may share one loaded program."""
        self._file, self.manifest, self._load = file, manifest, load
        self._is_program_shared = is_program_shared
        self._program: Program | None = None
        self._torch: Any = None

    def __enter__(self) -> Self:
        import torch

        target, card = self.manifest.target, self.manifest.card
        set_up_torch(target)
        self._torch = torch
        with _explained_out_of_memory(target):
            self._program = self._load(self._file, target)
            if target.device == CUDA:
                images_shape = (target.max_batch, *card.image_shape)
                logits_shape = (target.max_batch, *card.logits_shape)
                self._images_NCHW = torch.empty(images_shape, pin_memory=True)
                self._logits_NCHW = torch.empty(logits_shape, pin_memory=True)
                self._device_images = torch.empty(images_shape, device=CUDA)
                self._stream = self._torch.cuda.Stream()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._program = None
        if self.manifest.target.device == CUDA:
            del self._images_NCHW, self._logits_NCHW, self._device_images, self._stream

    def infer(self, images_NCHW: FloatArray) -> FloatArray:
        check_batch(images_NCHW, self.manifest)
        logits_NCHW = self.run(images_NCHW)
        return logits_NCHW.copy() if self.manifest.target.device == CUDA else logits_NCHW

    def run(self, images_NCHW: FloatArray) -> FloatArray:
        assert self._program is not None, "use the runner in a with block"
        images = self._torch.from_numpy(images_NCHW)
        with self._torch.inference_mode():
            if self.manifest.target.device == CUDA:
                with _explained_out_of_memory(self.manifest.target):
                    logits_NCHW: FloatArray = self._run_on_gpu(self._program, images).numpy()
            else:
                logits_NCHW = self._program(images).numpy()
        return logits_NCHW

    def _run_on_gpu(self, program: Program, images_NCHW: "Tensor") -> "Tensor":
        num_images = len(images_NCHW)
        self._images_NCHW[:num_images] = images_NCHW
        with self._torch.cuda.stream(self._stream):
            self._enqueue(program, num_images)
        self._stream.synchronize()
        return self._logits_NCHW[:num_images]

    def _enqueue(self, program: Program, num_images: int) -> None:
        self._device_images[:num_images].copy_(self._images_NCHW[:num_images], non_blocking=True)
        logits_NCHW = program(self._device_images[:num_images])
        self._logits_NCHW[:num_images].copy_(logits_NCHW, non_blocking=True)

    def describe(self) -> RunnerDescription:
        target = self.manifest.target
        provider = "torch.cpu"
        if target.device == CUDA:
            capability = "".join(map(str, self._torch.cuda.get_device_capability()))
            provider = f"{self._torch.cuda.get_device_name()} sm_{capability}"
        version = importlib.metadata.version("torch")
        return RunnerDescription(
            runtime=target.runtime,
            runtime_version=version,
            provider=provider,
            num_threads=self._torch.get_num_threads(),
            options={"float32_matmul_precision": self._torch.get_float32_matmul_precision()},
        )

    def profile(self, images_NCHW: FloatArray, num_iterations: int) -> tuple[OperatorTime, ...]:
        check_batch(images_NCHW, self.manifest)
        profiler_module = self._torch.profiler
        is_gpu = self.manifest.target.device == CUDA
        activities = [profiler_module.ProfilerActivity.CPU]
        if is_gpu:
            activities.append(profiler_module.ProfilerActivity.CUDA)
        with profiler_module.profile(activities=activities) as profiler:
            for _ in range(num_iterations):
                self.run(images_NCHW)
        milliseconds: dict[str, float] = defaultdict(float)
        for event in profiler.key_averages():
            total_us = event.self_device_time_total if is_gpu else event.self_cpu_time_total
            milliseconds[event.key] += total_us / 1000 / num_iterations
        times = [OperatorTime(name, name, value) for name, value in milliseconds.items()]
        return tuple(sorted(times, key=lambda time: -time.milliseconds))

    def open_concurrent(self, count: int) -> tuple[Self, ...]:
        """Return runners of this file; on a GPU each has its own stream.

        AOTInductor packages hold Python's GIL while they compute on the CPU: several are no faster than one.
        """
        program = self._program
        assert program is not None, "use the runner in a with block"
        load = (lambda *_: program) if self._is_program_shared else self._load
        return tuple(type(self)(self._file, self.manifest, load) for _ in range(count))

    def time_on_device(self, images_NCHW: FloatArray, num_iterations: int) -> DeviceTimes | None:
        if self.manifest.target.device != CUDA:
            return None
        program, num_images = self._program, len(images_NCHW)
        assert program is not None, "use the runner in a with block"
        self._images_NCHW[:num_images] = self._torch.from_numpy(images_NCHW)
        return DeviceTimes(
            [self._time(lambda: self._enqueue(program, num_images)) for _ in range(num_iterations)],
            [self._time(lambda: program(self._device_images[:num_images])) for _ in range(num_iterations)],
        )

    def _time(self, enqueue: Callable[[], Any]) -> float:
        """Return the milliseconds of work on the stream, measured with CUDA events."""
        first, last = (self._torch.cuda.Event(enable_timing=True) for _ in range(2))
        with self._torch.inference_mode(), self._torch.cuda.stream(self._stream):
            first.record()
            enqueue()
            last.record()
        last.synchronize()
        return float(first.elapsed_time(last))
