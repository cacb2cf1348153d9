"""Pretrained weights to start training from: a local file of this project, torch or Hugging Face `transformers`.

The file is read as data: only tensors are taken from a pickle (.pt, .pth), and one that needs code is refused.
"""

import hashlib
import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from tasks.core.bounds import Matches
from tasks.core.errors import ArtifactError, ConfigError
from tasks.parts.networks.config import FOREIGN_PREFIX, NetworkName
from tasks.parts.training.config import PretrainedReport

if TYPE_CHECKING:
    from torch import Tensor, nn

logger = logging.getLogger(__name__)

_LISTED = 4
_FILE_OF_FOLDER = "model.safetensors"
_SEGFORMER_DECODER = "decode_head."
_SEGFORMER_NAMES = (
    (r"^(encoder|stages)\.", r"segformer.\1."),
    (r"encoder\.patch_embeddings\.(\d+)\.", r"stages.\1.patch_embeddings."),
    (r"encoder\.block\.(\d+)\.", r"stages.\1.blocks."),
    (r"encoder\.layer_norm\.(\d+)\.", r"stages.\1.layer_norm."),
    (r"attention\.self\.query\.", "attention.q_proj."),
    (r"attention\.self\.key\.", "attention.k_proj."),
    (r"attention\.self\.value\.", "attention.v_proj."),
    (r"attention\.self\.sr\.", "attention.sequence_reduction.sequence_reduction."),
    (r"attention\.self\.layer_norm\.", "attention.sequence_reduction.layer_norm."),
    (r"attention\.output\.dense\.", "attention.o_proj."),
    (r"mlp\.dense(\d)\.", r"mlp.fc\1."),
    (r"\.layer_norm_1\.", ".layernorm_before."),
    (r"\.layer_norm_2\.", ".layernorm_after."),
    (r"decode_head\.linear_c\.", "decode_head.linear_projections."),
)
_DINOV2_NAMES = (
    (r"^(embeddings|encoder|layernorm)\.", r"dinov2.\1."),
    (r"attention\.attention\.query\.", "attention.q_proj."),
    (r"attention\.attention\.key\.", "attention.k_proj."),
    (r"attention\.attention\.value\.", "attention.v_proj."),
    (r"attention\.output\.dense\.", "attention.o_proj."),
)
_FOREIGN_NAMES: Mapping[NetworkName, Sequence[tuple[str, str]]] = {
    NetworkName.segformer: _SEGFORMER_NAMES,
    NetworkName.dinov2: _DINOV2_NAMES,
}
"""Names in published files, of `transformers` before and since version 5, and their names here."""


@dataclass(frozen=True)
class PretrainedConfig:
    """The file, and the digest of its content."""

    file: str | None
    """A .safetensors file, a .pt or .pth file with tensors only, or a folder with model.safetensors, as saved by
    `transformers`; null starts from random weights."""
    sha256: (
        Annotated[
            str,
            Matches(r"[0-9a-f]{64}", "64 hexadecimal digits in lower case"),
            "`sha256sum <file>` prints them",
        ]
        | None
    )
    """Digest of the file's content: part of the stage's key, so that other weights lead to a new training."""

    def __post_init__(self) -> None:
        if (self.file is None) != (self.sha256 is None):
            raise ConfigError(
                f"file is {self.file} and sha256 is {self.sha256}, expected both or none. "
                "`sha256sum <file>` prints the value."
            )


def load_pretrained(
    network: "nn.Module", name: NetworkName, config: PretrainedConfig
) -> PretrainedReport | None:
    """Load the tensors of a file that have the same names and shapes into a fresh network; None without a file.

    The classifier may differ (other classes) and then stays random. Where the network reads other bands than RGB, the
    filters that read the image are adapted (`adapt_rgb_filters`). Raises ArtifactError for a file that is missing,
    damaged or of another kind, for a pickle that needs code, for weights that are not finite, and for the file of
    another network: nothing matches, a tensor other than the classifier's has another shape, or a part of the network
    has more layers in the file (another depth). Whole parts that the network does not have are skipped.
    """
    if config.file is None:
        return None
    import torch

    from tasks.parts.networks.blocks import image_channels

    path = _find_file(Path(config.file))
    own = network.state_dict()
    tensors = _rename(_read(path, config), name, own)
    classifier = f"{network.classifier_layer}."
    shared = {key: tensor for key, tensor in tensors.items() if key in own}
    adapted = adapt_rgb_filters(shared, own, image_channels(network))
    shared |= adapted
    if adapted:
        logger.info(
            "%s: %s read RGB, and now %d bands: each has the sum of their filters, divided by the number of bands",
            path,
            ", ".join(adapted),
            image_channels(network),
        )
    other = {key for key, tensor in shared.items() if tensor.shape != own[key].shape}
    wrong = sorted(key for key in other if not key.startswith(classifier))
    loaded = {key: tensor for key, tensor in shared.items() if key not in other}
    if wrong or all(key.startswith(classifier) for key in loaded):
        raise ArtifactError(_misfit(path, name, wrong, tensors, own))
    _refuse_other_depth(path, name, network, tensors)
    broken = [key for key, tensor in loaded.items() if not bool(torch.isfinite(tensor).all())]
    if broken:
        raise ArtifactError(
            f"{path} (pretrained.file): NaN or infinite values in {len(broken)} tensors: "
            f"{', '.join(broken[:_LISTED])}; expected finite weights. Take another file."
        )
    network.load_state_dict(loaded, strict=False)
    report = PretrainedReport(len(loaded), len(own) - len(loaded), len(tensors) - len(loaded))
    fresh = [key for key in own if key not in loaded]
    logger.info(
        "%s: %d tensors loaded, %d stay random (%s), %d of the file skipped",
        path,
        report.num_loaded,
        report.num_fresh,
        ", ".join(fresh[:_LISTED]) or "none",
        report.num_skipped,
    )
    return report


def adapt_rgb_filters(
    tensors: "Mapping[str, Tensor]", own: "Mapping[str, Tensor]", num_channels: int
) -> "dict[str, Tensor]":
    """Return those filters of RGB images, [out, 3, H, W], that read `num_channels` bands in the network, for these.

    Each band has the sum of the filters of red, green and blue, divided by the number of bands. So a grey image, as
    one band or repeated in each, gives what it gives as an RGB image of three equal channels, and the maps keep the
    scale to which later layers are trained. For one band this is what timm does; of more, which are colours is not
    known.
    """
    adapted = {}
    for key, tensor in tensors.items():
        wanted = tuple(own[key].shape)
        is_of_image = len(wanted) == 4 and wanted[1] == num_channels != 3
        if is_of_image and tuple(tensor.shape) == (wanted[0], 3, *wanted[2:]):
            adapted[key] = (tensor.sum(dim=1, keepdim=True) / num_channels).expand(wanted).contiguous()
    return adapted


def _find_file(path: Path) -> Path:
    """Return the weights file in a folder saved by `transformers`; return a file as it is."""
    if not path.is_dir():
        return path
    file = path / _FILE_OF_FOLDER
    if not file.is_file():
        raise ArtifactError(
            f"{path} (pretrained.file) is a folder without {_FILE_OF_FOLDER}; expected a file of weights, or the "
            f"folder of save_pretrained with one {_FILE_OF_FOLDER}. It holds: "
            f"{', '.join(sorted(item.name for item in path.iterdir())[:_LISTED]) or 'nothing'}."
        )
    return file


def _refuse_other_depth(
    path: Path, name: NetworkName, network: "nn.Module", tensors: "Mapping[str, Tensor]"
) -> None:
    """Raise ArtifactError when a part of the network has layers in the file that the network does not have."""
    modules = {key for key, _ in network.named_modules() if key}
    level = FOREIGN_PREFIX.count(".") if name.is_foreign else 0

    def part_of(key: str) -> str:
        return ".".join(key.split(".")[: level + 1])

    unknown = []
    for key in tensors:
        is_classifier = key.startswith(f"{network.classifier_layer}.")
        if part_of(key) in modules and key.rpartition(".")[0] not in modules and not is_classifier:
            unknown.append(key)
    if unknown:
        parts = {part_of(key) for key in unknown}
        in_file, in_network = (
            sum(part_of(key) in parts for key in names) for names in (tensors, network.state_dict())
        )
        size = "network.arguments" if name.is_foreign else "network.depth"
        raise ArtifactError(
            f"{path} (pretrained.file) does not fit {name}: in {', '.join(sorted(parts))} it has {in_file} tensors, "
            f"the network {in_network}; {len(unknown)} belong to layers that the network does not have: "
            f"{', '.join(unknown[:_LISTED])}. Set {size} to that of the file. If no value gives these layers, "
            "write a file without these tensors (safetensors.torch.save_file) to load the rest."
        )


def _read(path: Path, config: PretrainedConfig) -> "dict[str, Tensor]":
    """Check the digest of the file and return its tensors."""
    from tasks.parts.networks.weights_file import read_tensors

    try:
        content = path.read_bytes()
    except OSError as error:
        raise ArtifactError(
            f"{path} (pretrained.file) cannot be read: {error.strerror}. Relative paths start at the working "
            "directory."
        ) from error
    sha256 = hashlib.sha256(content).hexdigest()
    if sha256 != config.sha256:
        raise ArtifactError(
            f"{path} (pretrained.file) has sha256 {sha256}, pretrained.sha256 is {config.sha256}. If this is the "
            f"right file, set pretrained.sha256={sha256}; otherwise download it again."
        )
    return read_tensors(path, content, "pretrained.file")


def _rename(
    tensors: "dict[str, Tensor]", name: NetworkName, own: "Mapping[str, Tensor]"
) -> "dict[str, Tensor]":
    """Strip the prefixes of wrappers and translate the names of published files."""
    from tasks.parts.networks.weights_file import without_wrappers

    known = {key.removeprefix(FOREIGN_PREFIX) for key in own} if name.is_foreign else set()
    renamed = {}
    for key, tensor in without_wrappers(tensors, known).items():
        for pattern, replacement in _FOREIGN_NAMES.get(name, ()):
            key = re.sub(pattern, replacement, key)
        renamed[f"{FOREIGN_PREFIX}{key}" if name.is_foreign else key] = tensor
    return renamed


def _misfit(
    path: Path,
    name: NetworkName,
    wrong: Sequence[str],
    tensors: "Mapping[str, Tensor]",
    own: "Mapping[str, Tensor]",
) -> str:
    if wrong:
        listed = "; ".join(
            f"{key} is {list(tensors[key].shape)}, the network has {list(own[key].shape)}"
            for key in wrong[:_LISTED]
        )
        text = f"{path} (pretrained.file) does not fit {name}: {len(wrong)} tensors have another shape: {listed}. "
        if name is NetworkName.segformer and all(key.startswith(_SEGFORMER_DECODER) for key in wrong):
            return (
                f"{text}The encoder fits; the decoder's width follows from network.arguments.size and network.width. "
                f"Choose the size of the file, or write a file without the tensors {_SEGFORMER_DECODER}* "
                "(safetensors.torch.save_file): the decoder then starts from random weights."
            )
        size = "network.arguments" if name.is_foreign else "network.width and network.depth"
        return f"{text}Set {size} to those of the file."
    return (
        f"{path} (pretrained.file) does not fit {name}: none of its {len(tensors)} tensors has a name of the "
        f"network. Found {', '.join(list(tensors)[:_LISTED])}; expected {', '.join(list(own)[:_LISTED])}. Set "
        "network.name to that of the file."
    )
