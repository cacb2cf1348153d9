"""Files of weights that others wrote, read as data: a pickle that holds more than tensors is refused."""

import itertools
import pickle
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load
from torch import Tensor

from tasks.core.errors import ArtifactError, first_line

_WRAPPERS = ("_orig_mod.", "module.", "network.", "model.")
"""What torch.compile, DistributedDataParallel and Lightning put before the names of all tensors."""
_MOST_WRAPPERS = 3
_COUNTERS = ("n_averaged",)
"""What AveragedModel of torch adds, which holds the moving average of a network's weights."""
_CONTAINERS = ("state_dict", "model", "model_state_dict")


def read_tensors(path: Path, content: bytes, key: str) -> dict[str, Tensor]:
    """Return the tensors of a file with this content by name; `key` is the configuration key that named it.

    Accepts .safetensors, and a state dict of torch.save, also one below ``state_dict`` or ``model``. Raises
    ArtifactError for a file that is damaged or of another kind, and for a pickle that needs code.
    """
    if content.startswith((b"PK\x03\x04", b"\x80")):
        return _read_pickle(path, key)
    try:
        return load(content)
    except SafetensorError as error:
        raise ArtifactError(
            f"{path} ({key}) is damaged or of another kind ({error}); expected .safetensors, or a .pt "
            "file of tensors. Download it again."
        ) from error


def without_wrappers(tensors: Mapping[str, Tensor], known: Collection[str] = ()) -> dict[str, Tensor]:
    """Strip the prefixes that wrappers of a network put before the names of all its tensors.

    Where all that are `known` stand behind the same prefixes, the rest belongs to a wrapper, such as the weights of
    Lightning's loss. Names that are known stay: a network may have a part of its own that is called ``model``.
    """
    stripped = {name: tensor for name, tensor in tensors.items() if name not in _COUNTERS}
    below = {
        prefix: {name.removeprefix(prefix): stripped[name] for name in stripped if name.startswith(prefix)}
        for count in range(_MOST_WRAPPERS + 1)
        for prefix in map("".join, itertools.product(_WRAPPERS, repeat=count))
    }
    needed = {name for name in known if not name.endswith("num_batches_tracked")}  # which old files lack
    whole = [found for found in below.values() if needed and found.keys() >= needed]
    if whole or stripped.keys() & known:
        return whole[0] if whole else stripped
    return below[max((name for name, found in below.items() if len(found) == len(stripped)), key=len)]


def _read_pickle(path: Path, key: str) -> dict[str, Tensor]:
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError, ValueError, KeyError) as error:
        needs_code = "global" in str(error).lower() or "TorchScript" in str(error)
        what = "needs code to be run" if needs_code else "is damaged or not a file of torch"
        raise ArtifactError(
            f"{path} ({key}) {what} ({first_line(error)}); expected tensors only. "
            "Save model.state_dict() with safetensors or torch.save in the program that created it."
        ) from error
    for name in _CONTAINERS:
        if isinstance(content, dict) and isinstance(content.get(name), dict):
            content = content[name]
    tensors: dict[str, Any] = content if isinstance(content, dict) else {}
    tensors = {str(name): value for name, value in tensors.items() if isinstance(value, Tensor)}
    if not tensors:
        raise ArtifactError(
            f"{path} ({key}) holds no tensors by name, expected a state dict. Save model.state_dict()."
        )
    return tensors
