"""The card of a checkpoint, which can be read without the weights and without the code of any network."""

import json
import struct
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tasks.core.bounds import allows, in_words
from tasks.core.errors import ArtifactError, ConfigError
from tasks.parts.data.dataset import Manifest
from tasks.parts.data.input_card import InputCard, channel_values
from tasks.parts.data.reading import Reading
from tasks.parts.networks.config import Multiplier, NetworkConfig, NetworkName
from tasks.parts.networks.foreign_code import code_sha256

CARD_KEY = "enginewright"  # the only metadata entry: safetensors writes several in random order


@dataclass(frozen=True)
class ModelCard:
    """Description of a file of weights: enough to rebuild the network and to feed it."""

    network: NetworkConfig
    """Architecture before pruning; a pruned model's real widths and blocks are those of the stored tensors."""
    classes: tuple[str, ...]
    """Names in the order of the logits."""
    mean: tuple[float, ...]
    """Mean of the training images: RGB, 0..1 scale."""
    std: tuple[float, ...]
    """Standard deviation of the training images: RGB, 0..1 scale."""
    height: int
    """Rows of the training images, in pixels."""
    width: int
    """Columns of the training images, in pixels."""
    code_sha256: str | None = None
    """Of the folder of a foreign network's code."""
    reading: Reading = field(default_factory=Reading)
    """How the files of the training images were read."""

    def __post_init__(self) -> None:
        self.for_input()

    @classmethod
    def for_data(cls, network: NetworkConfig, manifest: Manifest) -> "ModelCard":
        """Return the card of a network that is trained on a data set."""
        return cls(
            network,
            manifest.classes,
            manifest.mean,
            manifest.std,
            manifest.height,
            manifest.width,
            code_sha256(network),
            manifest.reading,
        )

    def for_input(self) -> InputCard:
        """Return the input card of the network; raise ArtifactError for invalid values."""
        return InputCard(self.classes, self.mean, self.std, self.height, self.width, reading=self.reading)

    def to_json(self) -> str:
        """Write the card as one line with sorted keys; without those that have no value for most networks."""
        fields = asdict(self)
        if not self.network.name.is_foreign:
            del fields["code_sha256"], fields["network"]["file"], fields["network"]["factory"]
        if self.network.atrous_rates is None:
            del fields["network"]["atrous_rates"]
        if not self.network.arguments:
            del fields["network"]["arguments"]
        return json.dumps(fields, sort_keys=True, ensure_ascii=False)

    @classmethod
    def from_json(cls, text: str, *, reading: Reading | None = None) -> "ModelCard":
        """Read what `to_json` wrote; `reading` is for cards of the version before, which have none.

        Raises ArtifactError when keys are missing or unknown, or values are invalid.
        """
        try:
            fields = json.loads(text)
            network = fields.pop("network")
            network = NetworkConfig(name=NetworkName(network.pop("name")), **network)
            mean, std = (channel_values(fields.pop(key)) for key in ("mean", "std"))
            for value in () if network.name.is_foreign else (network.width, network.depth):
                if not allows(Multiplier, value):
                    raise ValueError(f"multiplier {value}, expected {in_words(Multiplier)}")
            classes = tuple(str(name) for name in fields.pop("classes"))
            if reading is None or "reading" in fields:
                reading = Reading.from_fields(fields.pop("reading"))
            return cls(network=network, classes=classes, mean=mean, std=std, reading=reading, **fields)
        except (ValueError, KeyError, TypeError, AttributeError, ConfigError) as error:
            raise ArtifactError(
                f"The model card cannot be read ({error!r}). The file was changed or written by another "
                "version; run the stage that makes it again."
            ) from error


def read_card(path: Path) -> ModelCard:
    """Read the card of a checkpoint; this loads neither torch nor the weights.

    Raises ArtifactError when the file is missing, damaged, or not a checkpoint of this project.
    """
    return read_card_and_keys(path)[0]


def read_card_and_keys(path: Path, *, reading: Reading | None = None) -> tuple[ModelCard, list[str]]:
    """Read the card and the names of the tensors; check the length of the file against its offsets.

    `reading` is for cards of the version before.
    """
    header, size_bytes = _read_header(path)
    metadata = header.pop("__metadata__", None)
    if not isinstance(metadata, dict) or CARD_KEY not in metadata:
        raise ArtifactError(
            f"{path} is a safetensors file without a model card (metadata {CARD_KEY!r}), so the network it "
            "belongs to is unknown. Expected a file written by a stage of this pipeline."
        )
    try:
        end = max((int(entry["data_offsets"][1]) for entry in header.values()), default=0)
    except (KeyError, TypeError, ValueError, IndexError) as error:
        raise ArtifactError(f"{path} is damaged: its list of tensors cannot be read.") from error
    if end != size_bytes:
        raise ArtifactError(
            f"{path} is damaged: {size_bytes} bytes of weights found, {end} expected. Run the stage that makes "
            "it again."
        )
    try:
        return ModelCard.from_json(metadata[CARD_KEY], reading=reading), list(header)
    except ArtifactError as error:
        raise ArtifactError(f"{path}: {error}") from error


def _read_header(path: Path) -> tuple[dict[str, Any], int]:
    """Return the JSON header of a safetensors file and the number of bytes that follow it.

    The file starts with the header's length: 8 bytes, little endian.
    """
    try:
        size_bytes = path.stat().st_size
        with path.open("rb") as file:
            start = file.read(8)
            length = struct.unpack("<Q", start)[0] if len(start) == 8 else 0
            text = file.read(length) if 0 < length <= size_bytes - 8 else b""
    except OSError as error:
        raise ArtifactError(
            f"{path} cannot be read: {error.strerror}. Run the stage that makes it."
        ) from error
    if size_bytes == 0:
        raise ArtifactError(f"{path} is empty (0 bytes). Run the stage that makes it again.")
    if not text and start.startswith((b"PK\x03\x04", b"\x80")):  # a zip or pickle: no plausible length
        raise ArtifactError(
            f"{path} is a pickled PyTorch file (.pt, .pth or .ckpt), which can run code when it is loaded. "
            "Expected a .safetensors file written by a stage of this pipeline."
        )
    try:
        header = json.loads(text)
    except ValueError as error:
        raise ArtifactError(
            f"{path} is damaged or not a safetensors file: its header cannot be read. Run the stage that makes it "
            "again."
        ) from error
    if not isinstance(header, dict):
        raise ArtifactError(f"{path} is not a safetensors file: its header is not a mapping.")
    return header, size_bytes - 8 - length
