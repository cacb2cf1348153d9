"""What an engine is on disk, and what every runner of engines offers.

    engine/manifest.json     EngineManifest
    engine/<file>            the one file that a user deploys (absent unless status is "built")

Shape letters: N batch, C channels (images) or classes (logits), H height, W width. Logits are
[N, C, H, W], or [N, C] of an engine that classifies images.
"""

import dataclasses
import hashlib
import json
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from types import TracebackType
from typing import Protocol, Self

import dacite
import numpy as np
from numpy.typing import NDArray

from tasks.core.errors import ArtifactError, DataError
from tasks.parts.cuda_driver import Gpu
from tasks.parts.input_card import InputCard as InputCard
from tasks.parts.target import Target

MANIFEST_FILE = "manifest.json"

Precisions = dict[str, dict[str, int]]
"""Operator type -> precision that the runtime really chose -> number of nodes."""

FloatArray = NDArray[np.float32]


class EngineStatus(StrEnum):
    """How a build ended."""

    built = "built"
    skipped = "skipped"
    failed = "failed"


@dataclass(frozen=True)
class EngineManifest:
    """All that must be known about an engine before its file is opened."""

    target: Target
    status: EngineStatus
    reason: str
    """Why there is no engine; empty if there is one."""
    file: str
    sha256: str
    size_bytes: int
    runtime_version: str
    """The full version that built the file."""
    tensorrt_version: str
    """The full version of TensorRT that made the plan; empty for engines without one."""
    isa: tuple[str, ...]
    """Instruction sets of the CPU that built the file."""
    gpu: Gpu | None
    """The GPU that built the file, for targets with one."""
    card: InputCard
    is_quantized: bool
    precisions: Precisions
    precision_ok: bool
    """Whether the runtime really computes in the precision that graph and target declare."""
    provider: str
    """Where the runtime really placed the graph, in its own words."""

    @property
    def is_built(self) -> bool:
        """Whether there is an engine file."""
        return self.status is EngineStatus.built


@dataclass(frozen=True)
class RunnerDescription:
    """What is really in use, asked from the runtime."""

    runtime: str
    runtime_version: str
    provider: str
    num_threads: int
    options: dict[str, str | int | bool]
    """What was on that changes the time, by the runtime's own names."""


@dataclass(frozen=True)
class DeviceTimes:
    """Milliseconds of inferences on a GPU, by CUDA events; one value for each inference."""

    total_ms: list[float]
    """From the copy of the images to the copy of the logits."""
    compute_ms: list[float]
    """Kernels alone; of other inferences than `total_ms`."""


@dataclass(frozen=True)
class OperatorTime:
    """Mean time of one operator in one inference, from the runtime's own profiler."""

    name: str
    op_type: str
    milliseconds: float


@dataclass(frozen=True)
class EngineLayer:
    """One layer that a runtime really executes, in its own words."""

    name: str
    kind: str
    """Its type, such as Convolution, QLinearConv or CaskConvolution."""
    precision: str
    """int8, fp8, f16, bf16 or f32; empty where it computes in none of them."""
    nodes: tuple[str, ...]
    """Names of the ONNX nodes that it computes, as far as the runtime tells."""
    is_conversion: bool
    """Whether it only changes layout or precision."""


def count_precisions(layers: Sequence[EngineLayer]) -> Precisions:
    """Count the layers that compute, by kind and precision."""
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    for layer in layers:
        if layer.precision and not layer.is_conversion:
            counts[layer.kind][layer.precision] += 1
    return {kind: dict(sorted(found.items())) for kind, found in sorted(counts.items())}


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
        """Do the same without checks; the result may be overwritten by the next call. This is what is
        timed."""
        ...

    def describe(self) -> RunnerDescription:
        """Tell what is really in use."""
        ...

    def profile(self, images_NCHW: FloatArray, num_iterations: int) -> tuple[OperatorTime, ...]:
        """Measure every operator, slowest first."""
        ...

    def open_lanes(self, count: int) -> "tuple[Runner, ...]":
        """Return `count` runners of this loaded engine that work at the same time: throughput is measured with them.

        Each belongs to the thread that enters it. Together they use `count` times the threads of one inference. They
        end before this runner does.
        """
        ...

    def time_on_device(self, images_NCHW: FloatArray, num_iterations: int) -> DeviceTimes | None:
        """Measure inferences by the clock of the GPU; None on a CPU, and where the runtime shows no stream."""
        ...


def check_batch(images_NCHW: FloatArray, manifest: EngineManifest) -> None:
    """Raise DataError unless the batch has the dtype, the shape and the finite values that the engine
    expects."""
    card, target = manifest.card, manifest.target
    who = f"Engine {manifest.file} of target {target.name}"
    expected = f"float32 [1..{target.max_batch}, 3, {card.height}, {card.width}], normalised, RGB"
    if images_NCHW.dtype != np.float32 or images_NCHW.shape[1:] != (3, card.height, card.width):
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


def sha256_of(path: Path) -> str:
    """Return the sha256 of a file, in hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def write_engine_manifest(engine: Path, manifest: EngineManifest) -> None:
    """Write `engine/manifest.json`."""
    text = json.dumps(dataclasses.asdict(manifest), indent=2, ensure_ascii=False)
    (engine / MANIFEST_FILE).write_text(text + "\n", encoding="utf-8")


def read_engine_manifest(engine: Path) -> EngineManifest:
    """Read `engine/manifest.json`; raise ArtifactError if it is missing or damaged."""
    path = engine / MANIFEST_FILE
    if not path.is_file():
        raise ArtifactError(
            f"{path}: not found, expected the output of build_engine. Run build_engine first."
        )
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
        return dacite.from_dict(EngineManifest, fields, dacite.Config(cast=[StrEnum, tuple], strict=True))
    except (ValueError, TypeError, dacite.DaciteError) as error:
        raise ArtifactError(
            f"{path}: damaged or of another version ({error!r}). Run build_engine again."
        ) from error
