"""Remove the channels with the smallest weights until the network has the wanted share of its MACs."""

import csv
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tasks.parts.channel_pruning import ChannelPruning, ConvSize

logger = logging.getLogger(__name__)

Config = ChannelPruning


@dataclass(frozen=True)
class Report:
    """What was removed; MACs are those of one image of the training size."""

    macs_before: int
    macs_after: int
    macs_ratio: float
    """macs_after / macs_before."""
    num_parameters_before: int
    num_parameters_after: int
    num_layers: int
    """Convolutions in the network."""
    num_layers_pruned: int
    """Convolutions with fewer output channels than before."""
    num_channels_removed: int
    """Output channels, summed over all convolutions."""


def prune(cfg: Config, *, checkpoint: Path, out: Path) -> Report:
    """Prune a network and write ``model.safetensors`` and ``removed.csv``.

    Raises GateFailed when the target is out of reach, ConfigError when the multiple does not fit the network,
    ArtifactError when the network cannot be traced or does not run after the cut.
    """
    from tasks.parts.channel_pruning import check_runs, measure_convs, prune_channels, total_macs
    from tasks.parts.checkpoint import load_checkpoint, save_checkpoint

    network, card = load_checkpoint(checkpoint)
    size = (card.height, card.width)
    logger.info("%s: pruning to %.2f of its MACs", checkpoint, cfg.target_macs_ratio)
    before = measure_convs(network, size)
    num_parameters_before = sum(parameter.numel() for parameter in network.parameters())
    prune_channels(network, cfg, size=size)
    for height, width in (size, (2 * size[0], 2 * size[1])):
        check_runs(network, height, width, len(card.classes))
    after = measure_convs(network, size)
    _write_removed(out / "removed.csv", before, after)
    save_checkpoint(out / "model.safetensors", network, card)
    removed = {name: before[name].out_channels - after[name].out_channels for name in before}
    macs_before, macs_after = total_macs(before), total_macs(after)
    logger.info(
        "pruned %.1f -> %.1f MMACs, %d channels", macs_before / 1e6, macs_after / 1e6, sum(removed.values())
    )
    return Report(
        macs_before=macs_before,
        macs_after=macs_after,
        macs_ratio=macs_after / macs_before,
        num_parameters_before=num_parameters_before,
        num_parameters_after=sum(parameter.numel() for parameter in network.parameters()),
        num_layers=len(before),
        num_layers_pruned=sum(count > 0 for count in removed.values()),
        num_channels_removed=sum(removed.values()),
    )


def _write_removed(path: Path, before: Mapping[str, ConvSize], after: Mapping[str, ConvSize]) -> None:
    """Write one row for each convolution, in the order of execution."""
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        columns = ("channels_before", "channels_after", "channels_removed", "macs_before", "macs_after")
        writer.writerow(("layer", *columns))
        for name, old in before.items():
            new = after[name]
            removed = old.out_channels - new.out_channels
            writer.writerow((name, old.out_channels, new.out_channels, removed, old.macs, new.macs))
