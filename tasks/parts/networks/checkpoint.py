"""Store a model in one file: the weights as safetensors, with a card in the metadata that describes them.

The file holds no code: pickles (.pt, .ckpt) are refused. Equal weights and cards give equal bytes.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from tasks.core.errors import ArtifactError
from tasks.parts.networks.foreign_code import code_sha256
from tasks.parts.networks.model_card import CARD_KEY, ModelCard, read_card_and_keys

if TYPE_CHECKING:
    from torch import Tensor, nn

    from tasks.parts.data.reading import Reading

DRY_RUN_SIZE = 64
_LISTED = 8


def save_checkpoint(path: Path, model: "nn.Module", card: ModelCard) -> None:
    """Write the weights of a network, pruned and compiled ones included, with its card.

    Raises ArtifactError when a tensor is not finite.
    """
    import torch
    from safetensors.torch import save

    source = getattr(model, "_orig_mod", model)  # what torch.compile wrapped
    tensors: dict[str, Tensor] = {}
    for name, tensor in stored_tensors(source).items():
        dtype = torch.float32 if tensor.is_floating_point() else tensor.dtype
        tensors[name] = tensor.detach().to("cpu", dtype, copy=True, memory_format=torch.contiguous_format)
    _check_finite(path, tensors)
    path.write_bytes(save(tensors, metadata={CARD_KEY: card.to_json()}))


def stored_tensors(model: "nn.Module") -> "dict[str, Tensor]":
    """Return the tensors of a network that a checkpoint holds: all but those that only run in training."""
    from tasks.parts.networks.foreign import ForeignNetwork

    tensors = model.state_dict()
    if isinstance(model, ForeignNetwork):
        return {name: tensor for name, tensor in tensors.items() if model.is_stored(name)}
    return tensors


def load_checkpoint(path: Path, *, reading: "Reading | None" = None) -> "tuple[nn.Module, ModelCard]":
    """Rebuild a network from a checkpoint and return it, in eval mode, with its card.

    Layers of a pruned model take the sizes of the stored tensors, and residual blocks without stored tensors are
    dropped. The random state does not change. `reading` is for cards of the version before, which have none.
    Raises ArtifactError when the file is damaged, its keys are not exactly the network's, a tensor is not
    finite, shapes contradict each other, or the code of a foreign network is not what it was.
    """
    import torch
    from safetensors import SafetensorError
    from safetensors.torch import load

    from tasks.parts.networks.build import build_network
    from tasks.parts.networks.foreign import ForeignNetwork
    from tasks.parts.networks.residual import drop_absent_blocks

    card, keys = read_card_and_keys(path, reading=reading)
    try:
        tensors = {name: tensor.clone() for name, tensor in load(path.read_bytes()).items()}
    except SafetensorError as error:
        raise ArtifactError(f"{path} is damaged ({error}). Run the stage that makes it again.") from error
    check_code(path, card)
    with torch.device("meta"), torch.random.fork_rng(devices=[]):
        model = build_network(
            card.network, len(card.classes), size=(card.height, card.width), num_channels=len(card.mean)
        )
    if isinstance(model, ForeignNetwork):
        model.drop_auxiliary()
    drop_absent_blocks(model, keys)
    _check_keys(path, set(keys), set(model.state_dict()))
    _check_finite(path, tensors)
    _fit_layers(path, model, card, tensors)
    tied = _tied_parameters(model)
    model.load_state_dict(tensors, strict=True, assign=True)
    _tie(model, tied)
    model.eval()
    _dry_run(path, model, card)
    return model, card


def _tied_parameters(model: "nn.Module") -> list[list[str]]:
    """Return the names of parameters that several modules share."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return [shared for shared in names.values() if len(shared) > 1]


def _tie(model: "nn.Module", tied: list[list[str]]) -> None:
    """Let modules share a parameter again; not where pruning made them different."""
    import torch

    for first, *others in tied:
        parameter = model.get_parameter(first)
        for name in others:
            if torch.equal(model.get_parameter(name), parameter):
                owner, _, leaf = name.rpartition(".")
                setattr(model.get_submodule(owner), leaf, parameter)


def check_code(path: Path, card: ModelCard) -> None:
    """Raise ArtifactError if the code of a checkpoint's foreign network is not that with which it was made."""
    found = code_sha256(card.network)
    if found != card.code_sha256:
        raise ArtifactError(
            f"{path} was made with other code of the network: {_place_of(card)}, with the packages that it imports, "
            f"had sha256 {str(card.code_sha256)[:12]}, now it has {str(found)[:12]}. Run the stage that makes it "
            "again, or go back to that code and those packages."
        )


def _place_of(card: ModelCard) -> str:
    return (
        f"the folder of {card.network.file}"
        if card.network.file
        else f"the package of {card.network.factory}"
    )


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


def _fit_layers(path: Path, model: "nn.Module", card: ModelCard, tensors: "dict[str, Tensor]") -> None:
    """Give each layer of the unpruned network on the meta device the size of its stored tensors."""
    import torch
    from torch import nn

    for name, built in list(model.state_dict().items()):
        found, expected = tuple(tensors[name].shape), tuple(built.shape)
        is_cut = len(found) == len(expected) and all(0 < a <= b for a, b in zip(found, expected, strict=True))
        if not is_cut or found[2:] != expected[2:]:
            raise ArtifactError(
                f"{path}: tensor {name!r} is {list(found)}, the network of the card has {list(expected)} "
                "there; pruning only removes channels and never changes kernel sizes."
            )
        if found != expected:
            owner_name, _, attribute = name.rpartition(".")
            owner = model.get_submodule(owner_name)
            empty = torch.empty(found, device="meta")
            is_parameter = isinstance(getattr(owner, attribute), nn.Parameter)
            setattr(owner, attribute, nn.Parameter(empty) if is_parameter else empty)
    for layer in model.modules():
        if isinstance(layer, nn.Conv2d):
            if 1 < layer.groups == layer.in_channels:  # depthwise: a group for each channel that is left
                layer.groups = layer.weight.shape[0] * layer.groups // layer.out_channels
            layer.out_channels = layer.weight.shape[0]
            layer.in_channels = layer.weight.shape[1] * layer.groups
        elif isinstance(layer, nn.ConvTranspose2d):
            if 1 < layer.groups == layer.in_channels:
                layer.groups = layer.weight.shape[0]
            layer.in_channels = layer.weight.shape[0]
            layer.out_channels = layer.weight.shape[1] * layer.groups
        elif isinstance(layer, nn.PReLU):
            layer.num_parameters = layer.weight.shape[0]
        elif isinstance(layer, nn.BatchNorm2d):
            layer.num_features = layer.running_var.shape[0] if layer.running_var is not None else 0
        elif isinstance(layer, nn.LayerNorm) and tuple(layer.weight.shape) != tuple(layer.normalized_shape):
            raise ArtifactError(
                f"{path}: a LayerNorm has {layer.weight.shape[0]} channels, {card.network.name} normalises "
                f"{layer.normalized_shape[0]} there: channels that attention reads belong to heads and cannot be "
                "pruned. Leave this network unpruned, or prune a convolutional one (network.name)."
            )


@contextmanager
def _fitted_norms(model: "nn.Module") -> Iterator[None]:
    """Give GroupNorm and InstanceNorm the number of channels that arrive; without weights, nothing else tells it."""
    from torch import nn

    def fit_instances(norm: "nn.InstanceNorm2d", inputs: "tuple[Tensor, ...]") -> None:
        norm.num_features = inputs[0].shape[1]

    def fit_groups(norm: "nn.GroupNorm", inputs: "tuple[Tensor, ...]") -> None:
        found = inputs[0].shape[1]
        if norm.num_groups > 1:  # pruning removes whole groups
            norm.num_groups = found * norm.num_groups // norm.num_channels
        norm.num_channels = found

    hooks = [
        layer.register_forward_pre_hook(fit_groups if isinstance(layer, nn.GroupNorm) else fit_instances)
        for layer in model.modules()
        if isinstance(layer, nn.GroupNorm | nn.InstanceNorm2d)
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _dry_run(path: Path, model: "nn.Module", card: ModelCard) -> None:
    """Verify with one small forward pass that the layers fit together."""
    import torch

    height, width = card.height, card.width
    if not card.network.name.is_foreign:  # which may have a fixed size
        height, width = min(height, DRY_RUN_SIZE), min(width, DRY_RUN_SIZE)
    try:
        with torch.inference_mode(), _fitted_norms(model):
            shape = tuple(model(torch.zeros(1, len(card.mean), height, width)).shape)
    except RuntimeError as error:
        raise ArtifactError(f"{path}: the stored layers do not fit together: {error}") from error
    expected = (1, len(card.classes), height, width)
    if shape != expected:
        raise ArtifactError(
            f"{path}: the logits are {shape}, expected {expected}: the card names {len(card.classes)} "
            "classes."
        )
