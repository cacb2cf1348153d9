"""Residual blocks that a network can do without: those whose shortcut is the identity.

Such a block has the attribute `is_residual` set to true; dropping it replaces it by the identity.
"""

from collections.abc import Iterable

from torch import nn


def residual_blocks(network: nn.Module) -> list[str]:
    """Return the names of the blocks that may be dropped, in the order of the network's modules."""
    return [name for name, module in network.named_modules() if getattr(module, "is_residual", False)]


def drop_block(network: nn.Module, name: str) -> None:
    """Replace a block by the identity."""
    network.set_submodule(name, nn.Identity())


def drop_absent_blocks(network: nn.Module, keys: Iterable[str]) -> None:
    """Drop the blocks that own none of the tensors named in `keys`."""
    stored = list(keys)
    for name in residual_blocks(network):
        if not any(key.startswith(f"{name}.") for key in stored):
            drop_block(network, name)
