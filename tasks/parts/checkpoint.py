"""One model in one file: weights as safetensors, and in its metadata a card that says what they are.

The file holds no code: pickles (.pt, .ckpt) are refused. Equal weights and card give equal bytes.
"""

import json
import math
import struct
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tasks.core.errors import ArtifactError, ConfigError
from tasks.parts.networks.config import NetworkConfig, NetworkName

if TYPE_CHECKING:
    from torch import Tensor, nn

CARD_KEY = "enginewright"  # the only metadata entry: safetensors writes several in random order
DRY_RUN_SIZE = 64
_LISTED = 8


@dataclass(frozen=True)
class ModelCard:
    """What a file of weights is: enough to rebuild the network and to feed it."""

    network: NetworkConfig
    """Architecture before pruning; a pruned model's real widths are those of the stored tensors."""
    classes: tuple[str, ...]
    """Names in the order of the logits."""
    mean: tuple[float, float, float]
    """Of the training images: RGB, 0..1 scale."""
    std: tuple[float, float, float]
    """Of the training images: RGB, 0..1 scale."""
    height: int
    """Of the training images, in pixels."""
    width: int
    """Of the training images, in pixels."""

    def __post_init__(self) -> None:
        if len(self.classes) < 2 or len(set(self.classes)) != len(self.classes):
            raise ArtifactError(
                f"Model card: classes are {self.classes}; expected at least two different names."
            )
        for name, values, low in (("mean", self.mean, -math.inf), ("std", self.std, 0.0)):
            if len(values) != 3 or not all(math.isfinite(value) and value > low for value in values):
                raise ArtifactError(
                    f"Model card: {name} is {values}; expected three finite numbers above {low}."
                )
        if self.height < 1 or self.width < 1:
            raise ArtifactError(
                f"Model card: image size is {self.height}x{self.width}; expected at least 1x1."
            )

    def to_json(self) -> str:
        """Write the card as one line with sorted keys."""
        return json.dumps(asdict(self), sort_keys=True, ensure_ascii=False)

    @classmethod
    def from_json(cls, text: str) -> "ModelCard":
        """Read what `to_json` wrote.

        Raises ArtifactError when keys are missing, unknown or impossible.
        """
        try:
            fields = json.loads(text)
            network = fields.pop("network")
            network = NetworkConfig(name=NetworkName(network.pop("name")), **network)
            mean, std = (_triple(fields.pop(key)) for key in ("mean", "std"))
            classes = tuple(str(name) for name in fields.pop("classes"))
            return cls(network=network, classes=classes, mean=mean, std=std, **fields)
        except (ValueError, KeyError, TypeError, AttributeError, ConfigError) as error:
            raise ArtifactError(
                f"The model card cannot be read ({error!r}). The file was changed or written by another "
                "version; run the stage that makes it again."
            ) from error


def _triple(values: list[float]) -> tuple[float, float, float]:
    red, green, blue = values
    return float(red), float(green), float(blue)


def save_checkpoint(path: Path, model: "nn.Module", card: ModelCard) -> None:
    """Write the weights of a network, also of a pruned or compiled one, with its card.

    Raises ArtifactError when a tensor is not finite.
    """
    import torch
    from safetensors.torch import save

    source = getattr(model, "_orig_mod", model)  # what torch.compile wrapped
    tensors: dict[str, Tensor] = {}
    for name, tensor in source.state_dict().items():
        dtype = torch.float32 if tensor.is_floating_point() else tensor.dtype
        tensors[name] = tensor.detach().to("cpu", dtype, copy=True, memory_format=torch.contiguous_format)
    _check_finite(path, tensors)
    path.write_bytes(save(tensors, metadata={CARD_KEY: card.to_json()}))


def read_card(path: Path) -> ModelCard:
    """Read the card of a checkpoint; loads neither torch nor the weights.

    Raises ArtifactError when the file is missing, torn, or not a checkpoint of this project.
    """
    return _read_card_and_keys(path)[0]


def load_checkpoint(path: Path) -> "tuple[nn.Module, ModelCard]":
    """Rebuild a network from a checkpoint and return it, in eval mode, with its card.

    A pruned model's layers take the sizes of the stored tensors. Random state is left alone.
    Raises ArtifactError when the file is damaged, its keys are not exactly the network's, a tensor is not
    finite, or shapes contradict each other.
    """
    import torch
    from safetensors import SafetensorError
    from safetensors.torch import load

    from tasks.parts.networks.build import build_network

    card, keys = _read_card_and_keys(path)
    try:
        tensors = {name: tensor.clone() for name, tensor in load(path.read_bytes()).items()}
    except SafetensorError as error:
        raise ArtifactError(f"{path} is damaged ({error}). Run the stage that makes it again.") from error
    with torch.device("meta"):
        model = build_network(card.network, len(card.classes))
    _check_keys(path, set(keys), set(model.state_dict()))
    _check_finite(path, tensors)
    _fit_layers(path, model, tensors)
    model.load_state_dict(tensors, strict=True, assign=True)
    model.eval()
    _dry_run(path, model, card)
    return model, card


def _read_card_and_keys(path: Path) -> tuple[ModelCard, list[str]]:
    """Read the header and check that the file is as long as its offsets say."""
    header, size_bytes = _read_header(path)
    metadata = header.pop("__metadata__", None)
    if not isinstance(metadata, dict) or CARD_KEY not in metadata:
        raise ArtifactError(
            f"{path} is a safetensors file without a model card (metadata {CARD_KEY!r}), so the network "
            "it belongs to is unknown. Expected a file written by a stage of this pipeline."
        )
    try:
        end = max((int(entry["data_offsets"][1]) for entry in header.values()), default=0)
    except (KeyError, TypeError, ValueError, IndexError) as error:
        raise ArtifactError(f"{path} is damaged: its list of tensors cannot be read.") from error
    if end != size_bytes:
        raise ArtifactError(
            f"{path} is torn: {size_bytes} bytes of weights found, {end} expected. Run the stage "
            "that makes it again."
        )
    try:
        return ModelCard.from_json(metadata[CARD_KEY]), list(header)
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
            f"{path} is torn or no safetensors file: its header cannot be read. Run the stage that "
            "makes it again."
        ) from error
    if not isinstance(header, dict):
        raise ArtifactError(f"{path} is no safetensors file: its header is not a mapping.")
    return header, size_bytes - 8 - length


def _check_keys(path: Path, found: set[str], expected: set[str]) -> None:
    missing, extra = sorted(expected - found), sorted(found - expected)
    if not missing and not extra:
        return
    text = f"{path}: the stored tensors are not those of the network that its card names."
    text += _list_names(" Missing", missing) + _list_names(" Not expected", extra)
    if any(name.startswith("_orig_mod.") for name in extra):
        text += (
            " The prefix `_orig_mod.` is left by torch.compile and is not accepted: save `model._orig_mod`."
        )
    elif any(name.startswith(("model.", "module.", "network.")) for name in extra):
        text += " The names carry the prefix of a wrapper (Lightning, DDP): save the network inside it."
    raise ArtifactError(text)


def _list_names(title: str, names: list[str]) -> str:
    if not names:
        return ""
    rest = f" and {len(names) - _LISTED} more" if len(names) > _LISTED else ""
    return f"{title} ({len(names)}): {', '.join(names[:_LISTED])}{rest}."


def _check_finite(path: Path, tensors: "dict[str, Tensor]") -> None:
    import torch

    bad = sorted(name for name, tensor in tensors.items() if not bool(torch.isfinite(tensor).all()))
    if bad:
        raise ArtifactError(
            f"{path}: NaN or infinite weights.{_list_names(' Tensors', bad)} Training diverged: lower the "
            "learning rate and run the stage that makes this file again."
        )


def _fit_layers(path: Path, model: "nn.Module", tensors: "dict[str, Tensor]") -> None:
    """Give each layer of the unpruned network on the meta device the size of its stored tensors."""
    import torch
    from torch import nn

    for name, built in list(model.state_dict().items()):
        found, expected = tuple(tensors[name].shape), tuple(built.shape)
        is_cut = len(found) == len(expected) and all(0 < a <= b for a, b in zip(found, expected, strict=True))
        if not is_cut or found[2:] != expected[2:]:
            raise ArtifactError(
                f"{path}: tensor {name!r} is {list(found)}, the network of the card has {list(expected)} "
                "there; pruning makes channels fewer but never more, and leaves kernels alone."
            )
        if found != expected:
            owner_name, _, attribute = name.rpartition(".")
            owner = model.get_submodule(owner_name)
            empty = torch.empty(found, device="meta")
            is_parameter = isinstance(getattr(owner, attribute), nn.Parameter)
            setattr(owner, attribute, nn.Parameter(empty) if is_parameter else empty)
    for layer in model.modules():
        if isinstance(layer, nn.Conv2d):
            is_depthwise = layer.groups > 1
            layer.out_channels = layer.weight.shape[0]
            layer.groups = layer.out_channels if is_depthwise else 1
            layer.in_channels = layer.weight.shape[1] * layer.groups
        elif isinstance(layer, nn.BatchNorm2d):
            layer.num_features = layer.running_var.shape[0] if layer.running_var is not None else 0


def _dry_run(path: Path, model: "nn.Module", card: ModelCard) -> None:
    """Prove by one small forward pass that the layers fit together."""
    import torch

    height, width = min(card.height, DRY_RUN_SIZE), min(card.width, DRY_RUN_SIZE)
    try:
        with torch.inference_mode():
            found = tuple(model(torch.zeros(1, 3, height, width)).shape)
    except RuntimeError as error:
        raise ArtifactError(f"{path}: the stored layers do not fit together: {error}") from error
    expected = (1, len(card.classes), height, width)
    if found != expected:
        raise ArtifactError(
            f"{path}: the logits are {found}, expected {expected}: the card names {len(card.classes)} "
            "classes."
        )
