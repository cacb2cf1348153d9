"""Channels and multiply-accumulate operations (MACs) of the layers of a network."""

import math
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
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
    """Multiply-accumulates, over all calls: positions (tokens, for a linear layer) times kernel positions."""
    is_depthwise: bool
    has_channels: bool = True
    """Whether this is a layer; False for products that a module computes without one, such as attention's."""

    @property
    def macs(self) -> int:
        """Multiply-accumulates for one image."""
        connections = self.out_channels * (1 if self.is_depthwise else self.in_channels)
        return connections * self.macs_per_connection


def measure_convs(network: "nn.Module", size: tuple[int, int]) -> dict[str, ConvSize]:
    """Count channels and MACs of each convolution and linear layer for one image of `size` = (H, W).

    A layer counts as often as it runs. A transposed convolution meets each weight of its kernel at each position of
    its input, the others at each position of their output. Products without a layer, such as those of attention, are
    ``<module> (products)``. Raises ArtifactError when the layers do not fit together.
    """
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel

    from tasks.parts.networks.blocks import image_channels

    sizes: dict[str, ConvSize] = {}
    images_NCHW = torch.zeros(1, image_channels(network), *size)
    try:
        # Fused attention would hide its products.
        with torch.no_grad(), sdpa_kernel(SDPBackend.MATH), _plain_attention(), _counted(network, sizes):
            network(images_NCHW)
    except RuntimeError as error:
        raise ArtifactError(f"The network does not run at {size[0]}x{size[1]}: {error}") from error
    return sizes


@contextmanager
def _plain_attention() -> Iterator[None]:
    """Let nn.MultiheadAttention compute in single steps."""
    from torch.backends import mha

    was_enabled = mha.get_fastpath_enabled()
    mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        mha.set_fastpath_enabled(was_enabled)


@contextmanager
def _counted(network: "nn.Module", sizes: dict[str, ConvSize]) -> Iterator[None]:
    """Add to `sizes` what the network computes meanwhile."""
    from torch import nn
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils.flop_counter import flop_registry

    kinds = (nn.modules.conv._ConvNd, nn.Linear)
    running: list[tuple[str, nn.Module]] = []

    def leave(module: "nn.Module", inputs: Any, named: Mapping[str, "Tensor"], output: "Tensor") -> None:
        name, _ = running.pop()
        if isinstance(module, kinds):
            _add(sizes, name, _size_of_call(module, inputs[0] if inputs else named["input"], output))

    class Products(TorchDispatchMode):  # type: ignore[no-untyped-call]
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = func(*args, **(kwargs or {}))
            count = flop_registry.get(func._overloadpacket)
            name, module = running[-1]
            if count and not isinstance(module, kinds):
                macs = count(*args, **(kwargs or {}), out_val=result) // 2  # a multiplication and an addition
                _add(
                    sizes, f"{name or 'network'} (products)", ConvSize(1, 1, macs, False, has_channels=False)
                )
            return result

    with ExitStack() as stack:
        for name, module in network.named_modules():
            entry = name, module
            stack.callback(
                module.register_forward_pre_hook(lambda *_, entry=entry: running.append(entry)).remove
            )
            stack.callback(module.register_forward_hook(leave, with_kwargs=True).remove)
        stack.enter_context(Products())  # type: ignore[no-untyped-call]
        yield


def _size_of_call(layer: "nn.Module", inputs: "Tensor", output: "Tensor") -> ConvSize:
    from torch import nn

    if isinstance(layer, nn.Linear):
        return ConvSize(layer.in_features, layer.out_features, output.numel() // layer.out_features, False)
    assert isinstance(layer, nn.modules.conv._ConvNd)
    positions = (
        inputs.numel() // layer.in_channels if layer.transposed else output.numel() // layer.out_channels
    )
    is_depthwise = layer.groups == layer.in_channels > 1
    in_channels = layer.in_channels if is_depthwise else layer.in_channels // layer.groups
    return ConvSize(in_channels, layer.out_channels, positions * math.prod(layer.kernel_size), is_depthwise)


def _add(sizes: dict[str, ConvSize], name: str, size: ConvSize) -> None:
    before = sizes[name].macs_per_connection if name in sizes else 0
    sizes[name] = replace(size, macs_per_connection=before + size.macs_per_connection)


def total_macs(convs: Mapping[str, ConvSize]) -> int:
    """Add up the MACs of all layers and products."""
    return sum(conv.macs for conv in convs.values())


def macs_budget(original: Mapping[str, ConvSize], target_macs_ratio: float, progress: float) -> float:
    """Return the MACs that may remain after the given share of the whole cut."""
    target = target_macs_ratio * total_macs(original)
    return target + (total_macs(original) - target) * (1 - progress)
