"""How channels are pruned; needs no torch, so that a configuration can be checked without it."""

from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated

from tasks.core.bounds import AtLeast, Between, LessThan, MoreThan


class Importance(StrEnum):
    """How the importance of a channel is measured."""

    l1 = "l1"
    """L1 norm of all weights that go with the channel, relative to the mean of its group of layers; after
    Li et al., "Pruning Filters for Efficient ConvNets", 2017, arXiv:1608.08710."""
    l2 = "l2"
    """Squared L2 norm of the channel's own filter, relative to the mean of its layer; after He et al., "Soft
    Filter Pruning", 2018, arXiv:1808.06866."""
    batchnorm_scale = "batchnorm_scale"
    """Magnitude of the BatchNorm scales, compared across the whole network; train with trainer.batchnorm_l1
    first. Liu et al., "Network Slimming", 2017, arXiv:1708.06519."""
    group_norm = "group_norm"
    """Squared L2 norm of all weights that go with the channel, relative to the mean of its group of layers;
    Fang et al., "DepGraph", 2023, arXiv:2301.12900."""
    taylor = "taylor"
    """First-order change of the training loss without the channel, compared across the whole network; Molchanov
    et al., "Importance Estimation for Neural Network Pruning", 2019, arXiv:1906.10771. Needs labelled images."""


class Ranking(StrEnum):
    """How layers compete."""

    across_layers = "across_layers"
    """The least important channels of the whole network go first: layers lose different shares."""
    uniform = "uniform"
    """Each layer loses the same share of its channels."""
    sensitivity = "sensitivity"
    """The channels with the smallest measured loss of score per MAC saved go first (the table of rank_groups)."""


@dataclass(frozen=True)
class ChannelPruning:
    """How much is removed, and in which portions."""

    target_macs_ratio: Annotated[float, MoreThan(0), LessThan(1)]
    """MACs that may remain, as a share of the original network's; lower: faster, less accurate."""
    channel_multiple: Annotated[int, Between(1, 1024)]
    """Pruned layers keep a multiple of this many channels; 8 or 16 suit vector units and tensor cores."""
    ranking: Ranking
    """Whether layers compete by the importance of their channels (across_layers) or by what cuts of them cost
    (sensitivity), or lose the same share (uniform)."""
    max_layer_ratio: Annotated[float, MoreThan(0), LessThan(1)]
    """Largest share of its channels that one layer may lose; keeps thin layers from becoming bottlenecks."""
    num_steps: Annotated[int, Between(1, 100)]
    """Portions in which channels are removed; the importance is measured again before each one."""
    importance: Importance
    """How the importance of a channel is measured."""
    layer_ratios: dict[str, Annotated[float, AtLeast(0), LessThan(1)]]
    """Share of the channels to remove, by layer; 0 keeps the layer whole. All other layers compete for the target."""
