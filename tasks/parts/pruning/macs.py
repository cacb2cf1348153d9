"""Channels and multiply-accumulate operations (MACs) of the layers of a network."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tasks.core.errors import ArtifactError

if TYPE_CHECKING:
    from torch import Tensor, nn


@dataclass(frozen=True)
class ConvSize:
    """Channels of one convolution or linear layer, and the cost of one connection between channels."""

    in_channels: int
    """Of one group, if there are several and they are not the channels themselves."""
    out_channels: int
    macs_per_connection: int
    """Multiply-accumulates: output positions (tokens, for a linear layer) times kernel positions."""
    is_depthwise: bool

    @property
    def macs(self) -> int:
        """Multiply-accumulates for one image."""
        connections = self.out_channels * (1 if self.is_depthwise else self.in_channels)
        return connections * self.macs_per_connection


def measure_convs(network: "nn.Module", size: tuple[int, int]) -> dict[str, ConvSize]:
    """Count channels and MACs of each convolution and linear layer for one image of `size` = (H, W).

    The matrix products of attention, which have no weights, are not counted. Raises ArtifactError when the layers do
    not fit together.
    """
    import torch
    from torch import nn

    from tasks.parts.networks.blocks import image_channels

    sizes: dict[str, ConvSize] = {}

    def record(name: str) -> Callable[["nn.Module", Any, "Tensor"], None]:
        def hook(conv: "nn.Module", _inputs: Any, output: "Tensor") -> None:
            if isinstance(conv, nn.Linear):
                tokens = output.numel() // conv.out_features
                sizes[name] = ConvSize(conv.in_features, conv.out_features, tokens, is_depthwise=False)
                return
            assert isinstance(conv, nn.Conv2d)
            positions = output.shape[2] * output.shape[3] * math.prod(conv.kernel_size)
            is_depthwise = conv.groups == conv.in_channels > 1
            in_channels = conv.in_channels if is_depthwise else conv.in_channels // conv.groups
            sizes[name] = ConvSize(in_channels, conv.out_channels, positions, is_depthwise)

        return hook

    hooks = [
        module.register_forward_hook(record(name))
        for name, module in network.named_modules()
        if isinstance(module, nn.Conv2d | nn.Linear)
    ]
    try:
        with torch.inference_mode():
            network(torch.zeros(1, image_channels(network), *size))
    except RuntimeError as error:
        raise ArtifactError(f"The network does not run at {size[0]}x{size[1]}: {error}") from error
    finally:
        for handle in hooks:
            handle.remove()
    return sizes


def total_macs(convs: Mapping[str, ConvSize]) -> int:
    """Add up the MACs of all layers."""
    return sum(conv.macs for conv in convs.values())


def macs_budget(original: Mapping[str, ConvSize], target_macs_ratio: float, progress: float) -> float:
    """Return the MACs that may remain after the given share of the whole cut."""
    target = target_macs_ratio * total_macs(original)
    return target + (total_macs(original) - target) * (1 - progress)
