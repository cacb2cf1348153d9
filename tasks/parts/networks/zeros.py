"""Zero weights: count them, keep them zero in training, and recognise the 2:4 pattern that a runtime can use.

Shapes: O output channels, I input channels (of one group).
"""

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from torch import Tensor, nn

BLOCK = 4
"""Number of consecutive input channels of which at most half have a non-zero weight in the 2:4 pattern."""


def layer_weights(network: "nn.Module") -> "dict[str, Tensor]":
    """Return the weights of all convolutions [O, I, h, w] and linear layers [O, I], by layer."""
    from torch import nn

    return {
        name: layer.weight
        for name, layer in network.named_modules()
        if isinstance(layer, (nn.Conv2d, nn.Linear))
    }


def layers_without_pattern(network: "nn.Module") -> list[str]:
    """Return the layers whose number of input channels (one, if depthwise) is not a multiple of 4."""
    return [name for name, weight in layer_weights(network).items() if weight.shape[1] % BLOCK]


def count_zeros(network: "nn.Module") -> dict[str, int]:
    """Return convolution or linear layer -> number of its weights that are zero."""
    return {name: int((weight == 0).sum()) for name, weight in layer_weights(network).items()}


def is_two_of_four(weights_OIhw: NDArray[Any]) -> bool:
    """Return whether at most two of each four input channels have a non-zero weight, for [O, I, h, w] or [O, I]."""
    channels = weights_OIhw.shape[1]
    if channels % BLOCK:
        return False
    blocks = weights_OIhw.reshape(len(weights_OIhw), channels // BLOCK, BLOCK, -1)
    return bool((np.count_nonzero(blocks, axis=2) <= BLOCK // 2).all())


def keep_zeros(network: "nn.Module") -> int:
    """Keep convolution and linear weights that are zero now at zero in training; return how many there are.

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
