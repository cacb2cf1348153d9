"""Weights that are zero: which go, how they stay zero in training, which pattern a runtime can use.

Shapes: O output channels, I input channels (of one group).
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from torch import Tensor, nn

_BLOCK = 4
"""Of so many consecutive input channels at most half keep a weight."""


def zero_smallest_weights(network: "nn.Module", layers: Sequence[str], share: float) -> None:
    """Set the given share of the weights of these layers to zero, the smallest magnitudes of all of them first.

    Han et al., "Learning both Weights and Connections", 2015, arXiv:1506.02626. Weights that are zero already
    count.
    """
    from torch.nn.utils import prune

    parameters = [(network.get_submodule(name), "weight") for name in layers]
    prune.global_unstructured(parameters, prune.L1Unstructured, amount=share)
    for layer, name in parameters:
        prune.remove(layer, name)  # type: ignore[no-untyped-call]


def prune_two_of_four(network: "nn.Module") -> None:
    """Keep, of each four consecutive input channels, the two weights with the largest magnitudes.

    Mishra et al., "Accelerating Sparse Deep Neural Networks", 2021, arXiv:2104.08378, section 4.1; the pattern of
    TensorRT's SPARSE_WEIGHTS. The layers of `layers_without_pattern` stay dense.
    """
    import torch

    dense = layers_without_pattern(network)
    for name, weight in layer_weights(network).items():
        if name in dense:
            continue
        with torch.no_grad():
            blocks_OB4hw = weight.unflatten(1, (-1, _BLOCK))  # type: ignore[no-untyped-call]
            smallest = blocks_OB4hw.abs().argsort(dim=2, stable=True)[:, :, : _BLOCK // 2]
            weight.copy_(blocks_OB4hw.scatter(2, smallest, 0.0).flatten(1, 2))


def layer_weights(network: "nn.Module") -> "dict[str, Tensor]":
    """Return the weights of all convolutions [O, I, h, w] and linear layers [O, I], by layer."""
    from torch import nn

    return {
        name: layer.weight
        for name, layer in network.named_modules()
        if isinstance(layer, (nn.Conv2d, nn.Linear))
    }


def layers_without_pattern(network: "nn.Module") -> list[str]:
    """Return the layers whose input channels (one, if depthwise) are no multiple of 4."""
    return [name for name, weight in layer_weights(network).items() if weight.shape[1] % _BLOCK]


def count_zeros(network: "nn.Module") -> dict[str, int]:
    """Return convolution or linear layer -> number of its weights that are zero."""
    return {name: int((weight == 0).sum()) for name, weight in layer_weights(network).items()}


def is_two_of_four(weights_OIhw: NDArray[Any]) -> bool:
    """Tell, for [O, I, h, w] or [O, I], whether of each four input channels at most two have a non-zero weight."""
    channels = weights_OIhw.shape[1]
    if channels % _BLOCK:
        return False
    blocks = weights_OIhw.reshape(len(weights_OIhw), channels // _BLOCK, _BLOCK, -1)
    return bool((np.count_nonzero(blocks, axis=2) <= _BLOCK // 2).all())


def keep_zeros(network: "nn.Module") -> int:
    """Let no optimizer change a convolution or linear weight that is zero now; return how many there are.

    Their gradients become zero. Adam's moments and momentum then stay zero, and weight decay scales zero.
    """
    num_zeros = 0
    for weight in layer_weights(network).values():
        zeros = weight.detach() == 0
        if zeros.any():
            weight.register_hook(_masked(zeros))  # type: ignore[no-untyped-call]
            num_zeros += int(zeros.sum())
    return num_zeros


def _masked(zeros: "Tensor") -> Any:
    """Return a gradient hook; not a product with a mask, because an overflowed gradient times 0 is NaN."""
    return lambda gradient: gradient.masked_fill(zeros.to(gradient.device), 0.0)
