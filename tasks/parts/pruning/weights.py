"""Set weights to zero: the smallest ones, or two of each four.

Shapes: O output channels, I input channels (of one group).
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from tasks.parts.networks.zeros import BLOCK, layer_weights, layers_without_pattern

if TYPE_CHECKING:
    from torch import nn


def zero_smallest_weights(network: "nn.Module", layers: Sequence[str], share: float) -> None:
    """Set the given share of the weights of these layers to zero, smallest magnitudes over all layers first.

    Han et al., "Learning both Weights and Connections", 2015, arXiv:1506.02626. Weights that are already zero count.
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
            blocks_OB4hw = weight.unflatten(1, (-1, BLOCK))  # type: ignore[no-untyped-call]
            smallest = blocks_OB4hw.abs().argsort(dim=2, stable=True)[:, :, : BLOCK // 2]
            weight.copy_(blocks_OB4hw.scatter(2, smallest, 0.0).flatten(1, 2))
