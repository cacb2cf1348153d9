"""Eager PyTorch: the reference that everybody has. The engine file is the checkpoint itself."""

import importlib.metadata
from collections import Counter, defaultdict
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from tasks.parts.runners.contract import (
    EngineManifest,
    FloatArray,
    OperatorTime,
    Precisions,
    RunnerDescription,
    check_batch,
)

if TYPE_CHECKING:
    from torch import nn

ENGINE_FILE = "engine.safetensors"
PROVIDER = "torch.cpu"


def installed_version() -> str:
    """Return torch's version without importing it."""
    return importlib.metadata.version("torch")


class TorchEagerRunner:
    """Runs an `nn.Module` rebuilt from its checkpoint, layer by layer, in inference mode."""

    def __init__(self, file: Path, manifest: EngineManifest, model: "nn.Module | None" = None) -> None:
        self._file, self.manifest, self._model = file, manifest, model
        self._torch: Any = None

    def __enter__(self) -> Self:
        import torch

        from tasks.parts.checkpoint import load_checkpoint

        torch.set_num_threads(self.manifest.target.num_threads)
        self._torch = torch
        if self._model is None:
            self._model, _ = load_checkpoint(self._file)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._model = None

    @property
    def model(self) -> "nn.Module":
        """The loaded network in eval mode."""
        assert self._model is not None, "use the runner in a with block"
        return self._model

    def infer(self, images_NCHW: FloatArray) -> FloatArray:
        check_batch(images_NCHW, self.manifest)
        return self.run(images_NCHW)

    def run(self, images_NCHW: FloatArray) -> FloatArray:
        with self._torch.inference_mode():
            logits: FloatArray = self.model(self._torch.from_numpy(images_NCHW)).numpy()
        return logits

    def describe(self) -> RunnerDescription:
        return RunnerDescription(
            runtime="torch",
            runtime_version=installed_version(),
            provider=PROVIDER,
            num_threads=self._torch.get_num_threads(),
            options={"float32_matmul_precision": self._torch.get_float32_matmul_precision()},
        )

    def profile(self, images_NCHW: FloatArray, num_iterations: int) -> tuple[OperatorTime, ...]:
        check_batch(images_NCHW, self.manifest)
        with self._torch.profiler.profile(activities=[self._torch.profiler.ProfilerActivity.CPU]) as profiler:
            for _ in range(num_iterations):
                self.run(images_NCHW)
        milliseconds: dict[str, float] = defaultdict(float)
        for event in profiler.key_averages():
            milliseconds[event.key] += event.self_cpu_time_total / 1000 / num_iterations
        times = [OperatorTime(name, name, value) for name, value in milliseconds.items()]
        return tuple(sorted(times, key=lambda time: -time.milliseconds))

    def open_lanes(self, count: int) -> tuple[Self, ...]:
        """Return runners that share the network; each sets the number of threads in its own."""
        return tuple(type(self)(self._file, self.manifest, self._model) for _ in range(count))

    def time_on_device(self, images_NCHW: FloatArray, num_iterations: int) -> None:
        return None


def precisions_of(model: "nn.Module") -> Precisions:
    """Count the modules with weights by type and by the type of their weights."""
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    for module in model.modules():
        weight = getattr(module, "weight", None)
        if weight is not None:
            name = str(weight.dtype).removeprefix("torch.")
            counts[type(module).__name__][
                {"float32": "f32", "bfloat16": "bf16", "float16": "f16"}.get(name, name)
            ] += 1
    return {op: dict(sorted(by_precision.items())) for op, by_precision in sorted(counts.items())}
