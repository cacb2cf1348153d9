"""Describe an engine on disk.

engine/manifest.json     EngineManifest
engine/<file>            the one file that a user deploys (absent unless status is "built")
"""

import dataclasses
import hashlib
import json
import shutil
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

import dacite
import numpy as np
from numpy.typing import NDArray

from tasks.core.errors import ArtifactError
from tasks.parts.custom_operators import OPERATORS_FOLDER, check_libraries
from tasks.parts.data.input_card import InputCard
from tasks.parts.data.reading import Reading
from tasks.parts.engines.gpu import Gpu
from tasks.parts.engines.target import Target

MANIFEST_FILE = "manifest.json"

Precisions = dict[str, dict[str, int]]
"""Operator type -> precision that the runtime chose -> number of nodes."""

FloatArray = NDArray[np.float32]

ENGINE_FOLDER = "engine"

TWIN_FOLDER = "twin"
"""Folder in that of an engine which reads frames or gives classes: the same engine with normalised images and logits.
It is compared where logits are needed, and not deployed."""

LAYERS_FILE = "layers.csv"
"""Table beside the engine file; benchmark writes another with the time of each layer."""

GRAPH_FILE = "graph.onnx"
"""Graph from which an engine was compiled, kept beside engines that are not graphs themselves."""


class EngineStatus(StrEnum):
    """How a build ended."""

    built = "built"
    skipped = "skipped"
    failed = "failed"


@dataclass(frozen=True)
class EngineManifest:
    """Everything that must be known about an engine before its file is opened."""

    target: Target
    status: EngineStatus
    reason: str
    """Why there is no engine; empty if there is one."""
    file: str
    """Name of the engine file; empty without one."""
    sha256: str
    """Digest of the engine file, in hex; empty without one."""
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
    is_precision_ok: bool
    """Whether the runtime computes in the precision that graph and target declare."""
    provider: str
    """Where the runtime really placed the graph, by its own name for it."""

    @property
    def is_built(self) -> bool:
        """Whether there is an engine file."""
        return self.status is EngineStatus.built


@dataclass(frozen=True)
class EngineLayer:
    """One layer that a runtime really executes, in the runtime's own terms."""

    name: str
    kind: str
    """Its type, such as Convolution, QLinearConv or CaskConvolution."""
    precision: str
    """int8, fp8, f16, bf16 or f32; empty if it computes in none of them."""
    nodes: tuple[str, ...]
    """Names of the ONNX nodes that it computes, as far as the runtime reports them."""
    is_conversion: bool
    """Whether it only changes layout or precision."""
    outputs: tuple[str, ...] = ()
    """Names of the ONNX tensors that it computes, as far as the runtime reports them."""
    kernel: str = ""
    """The implementation, by the runtime's own name, such as brgconv_avx512_amx_I8; empty if it reports none.
    Behind TensorRT's name stand the units of the GPU that it tells: "(Tensor Cores)"."""
    reads: tuple[str, ...] = ()
    """Names of the layers whose results it reads, as far as the runtime reports them."""
    input_bytes: int | None = None
    """Bytes of its inputs for one image, as the runtime stores them; None if it does not report them."""
    weight_bytes: int | None = None
    """Bytes of its constants, as the runtime stores them."""
    output_bytes: int | None = None
    """Bytes of its results for one image, as the runtime stores them."""


def count_precisions(layers: Sequence[EngineLayer]) -> Precisions:
    """Count the layers that compute, by kind and precision."""
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    for layer in layers:
        if layer.precision and not layer.is_conversion:
            counts[layer.kind][layer.precision] += 1
    return {kind: dict(sorted(by_precision.items())) for kind, by_precision in sorted(counts.items())}


def copy_libraries(target: Target, engine: Path) -> None:
    """Put the libraries with custom operators beside an engine, so that it goes with them wherever it is run."""
    for library in target.custom_operators:
        (engine / OPERATORS_FOLDER).mkdir(exist_ok=True)
        shutil.copyfile(library.library, engine / OPERATORS_FOLDER / library.name)


def engine_libraries(file: Path, target: Target) -> list[Path]:
    """Return the libraries with custom operators beside an engine file.

    Raises ArtifactError if one is missing or has another sha256 than the declared one: it is not to be loaded.
    """
    return check_libraries(target.custom_operators, target.operators_key, file.parent / OPERATORS_FOLDER)


def plain_engine(engine: Path) -> Path:
    """Return the folder of the engine with normalised images and logits: the twin, or the engine itself."""
    twin = engine / TWIN_FOLDER
    return twin if twin.is_dir() else engine


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
        Reading.from_fields(fields["card"]["reading"])  # dacite would fill it in
        return dacite.from_dict(EngineManifest, fields, dacite.Config(cast=[StrEnum, tuple], strict=True))
    except (ValueError, KeyError, TypeError, dacite.DaciteError) as error:
        raise ArtifactError(
            f"{path}: damaged or of another version ({error!r}). Run build_engine again."
        ) from error
