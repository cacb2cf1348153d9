"""Remove whole residual blocks whose shortcut is the identity; the identity then replaces the block.

After Veit et al., "Residual Networks Behave Like Ensembles of Relatively Shallow Networks", 2016,
arXiv:1605.06431, section 4: delete one block and measure the change.

Tensor suffixes: N batch, C channels, H height, W width.
"""

import logging
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from tasks.core.errors import ArtifactError, GateFailed
from tasks.parts.networks.residual import drop_block, residual_blocks
from tasks.parts.pruning.macs import ConvSize, measure_convs, total_macs

if TYPE_CHECKING:
    from torch import Tensor, nn

logger = logging.getLogger(__name__)


def prune_blocks(
    network: "nn.Module", *, batches: "Sequence[Tensor]", size: tuple[int, int], limit_macs: float
) -> list[str]:
    """Drop residual blocks, least important first, until at most `limit_macs` remain; return their names.

    `batches` are normalised images_NCHW. Importance is measured again after each block.

    Raises GateFailed when all blocks together are not enough, ArtifactError when there is no such block.
    """
    convs = measure_convs(network, size)
    if total_macs(convs) <= limit_macs:
        return []
    blocks = residual_blocks(network)
    if not blocks:
        raise ArtifactError(
            "The network has no residual block whose shortcut is the identity. Prune it with prune.method "
            "channels, or train a deeper one (network.depth)."
        )
    least = total_macs(convs) - sum(_macs_of(convs, name) for name in blocks)
    if least > limit_macs:
        raise GateFailed(
            f"Without its {len(blocks)} residual blocks with an identity shortcut ({', '.join(blocks)}) the "
            f"network still has {least} MACs, expected at most {limit_macs:.0f}. Raise prune.target_macs_ratio, "
            "or set prune.method to channels."
        )
    dropped: list[str] = []
    while total_macs(measure_convs(network, size)) > limit_macs:
        changes = logit_changes(network, residual_blocks(network), batches)
        weakest = min(changes, key=lambda name: changes[name])
        logger.info("dropping block %s: the logits change by %.3g", weakest, changes[weakest])
        drop_block(network, weakest)
        dropped.append(weakest)
    return dropped


def logit_changes(
    network: "nn.Module", blocks: Sequence[str], batches: "Sequence[Tensor]"
) -> dict[str, float]:
    """Return block -> relative change of the logits without it: RMS of the difference / RMS of the logits."""
    import torch
    from torch import nn

    noise, signal = dict.fromkeys(blocks, 0.0), 0.0
    network.eval()
    with torch.inference_mode():
        for images_NCHW in batches:
            expected_NCHW = network(images_NCHW)
            signal += float(expected_NCHW.square().sum())
            for block in blocks:
                module = network.get_submodule(block)
                network.set_submodule(block, nn.Identity())
                noise[block] += float((network(images_NCHW) - expected_NCHW).square().sum())
                network.set_submodule(block, module)
    return {block: math.sqrt(noise[block] / signal) if signal > 0 else 0.0 for block in blocks}


def _macs_of(convs: dict[str, ConvSize], block: str) -> int:
    return total_macs({name: conv for name, conv in convs.items() if name.startswith(f"{block}.")})
