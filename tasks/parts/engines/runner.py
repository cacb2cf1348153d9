"""Define the interface of all engine runners.

Shape letters: N batch, C channels (images) or classes (logits), H height, W width. Logits are
[N, C, H, W], or [N, C] for an engine that classifies images. What an engine reads and gives is in its target: the
names here are those of plain engines.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Protocol, Self

import numpy as np

from tasks.core.errors import DataError
from tasks.parts.engines.manifest import EngineManifest, FloatArray
from tasks.parts.engines.target import Reads


@dataclass(frozen=True)
class RunnerDescription:
    """What is really in use, as reported by the runtime."""

    runtime: str
    runtime_version: str
    provider: str
    num_threads: int
    options: dict[str, str | int | bool]
    """Switches that affect latency, by the runtime's own names."""


@dataclass(frozen=True)
class DeviceTimes:
    """Milliseconds of inferences on a GPU, measured with CUDA events; one value per inference."""

    total_ms: list[float]
    """From the copy of the images to the copy of the logits."""
    compute_ms: list[float]
    """Kernels alone, measured in other inferences than `total_ms`."""


@dataclass(frozen=True)
class OperatorTime:
    """Typical time of one operator in one inference, from the runtime's own profiler."""

    name: str
    op_type: str
    milliseconds: float


def typical_time(times: Sequence[float], num_iterations: int) -> float:
    """Return the time per iteration from the middle half of all times.

    An interruption does not distort it as it does the mean, nor a resolution of a microsecond as it does the median.
    """
    ordered = sorted(times)
    quarter = len(ordered) // 4
    middle = ordered[quarter : len(ordered) - quarter]
    return sum(middle) / len(middle) * len(ordered) / num_iterations


class Runner(Protocol):
    """A loaded engine. Use it in a `with` block."""

    manifest: EngineManifest

    def __enter__(self) -> Self:
        """Load the engine."""
        ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Free it."""
        ...

    def infer(self, images_NCHW: FloatArray) -> FloatArray:
        """Return the logits of normalised images; raise DataError for a batch that does not fit."""
        ...

    def run(self, images_NCHW: FloatArray) -> FloatArray:
        """Do the same without checks; the next call may overwrite the result. This is what is timed."""
        ...

    def describe(self) -> RunnerDescription:
        """Return what is really in use."""
        ...

    def profile(self, images_NCHW: FloatArray, num_iterations: int) -> tuple[OperatorTime, ...]:
        """Measure every operator, slowest first."""
        ...

    def open_concurrent(self, count: int) -> "tuple[Runner, ...]":
        """Return `count` runners of this loaded engine that run concurrently, to measure throughput.

        Each belongs to the thread that enters it. Together they use `count` times the threads of one inference. They
        must be closed before this runner.
        """
        ...

    def time_on_device(self, images_NCHW: FloatArray, num_iterations: int) -> DeviceTimes | None:
        """Time inferences with the GPU's clock; None on a CPU, or if the runtime exposes no stream."""
        ...


def check_batch(images_NCHW: FloatArray, manifest: EngineManifest) -> None:
    """Raise DataError unless the batch has the dtype, the shape and the finite values that the engine
    expects."""
    card, target = manifest.card, manifest.target
    who = f"Engine {manifest.file} of target {target.name}"
    channels, height, width = card.image_shape
    dtype: np.dtype[Any]
    if target.reads is Reads.normalised:
        dtype, shape, form = np.dtype(np.float32), card.image_shape, ", normalised"
    else:
        dtype, shape, form = np.dtype(np.uint8), (height, width, channels), ""
    order = {3: ", BGR" if target.reads is Reads.bgr_frames else ", RGB"}.get(channels, "")
    expected = f"{dtype} [1..{target.max_batch}, {', '.join(map(str, shape))}]{form}{order}"
    if images_NCHW.dtype != dtype or images_NCHW.shape[1:] != shape:
        raise DataError(
            f"{who}: input is {images_NCHW.dtype} {list(images_NCHW.shape)}, expected {expected}. Resize the "
            "images, or export the variant for that size (prepare_data) and build again."
        )
    if not 1 <= len(images_NCHW) <= target.max_batch:
        raise DataError(
            f"{who}: input is a batch of {len(images_NCHW)}, expected {expected}. Raise "
            f"target.{target.name}.max_batch and build again, or send smaller batches."
        )
    if not np.isfinite(images_NCHW).all():
        bad = [int(i) for i in np.flatnonzero(~np.isfinite(images_NCHW).all(axis=(1, 2, 3)))]
        raise DataError(
            f"{who}: NaN or infinity in image {bad[0]} of the batch ({len(bad)} in all), expected finite "
            "values. Check the normalisation and the source of the images."
        )
