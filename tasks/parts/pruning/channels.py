"""Remove whole channels of coupled layers.

Layers are coupled in the groups of Fang et al., "DepGraph: Towards Any Structural Pruning", 2023, arXiv:2301.12900
(torch-pruning). The least important channels go first (channel_importance.py).

Networks may normalise by BatchNorm, by InstanceNorm, or by GroupNorm, which loses whole groups: what is left is then
normalised as before.

Only convolutions that are not coupled to a grouped convolution, linear or attention layer lose channels: each group
would have to lose as many, and the channels of attention belong to heads, which torch-pruning does not trace through
reshapes.
"""

import logging
import math
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING

from tasks.core.errors import ArtifactError, ConfigError, GateFailed
from tasks.parts.pruning.channel_groups import (
    ALTERNATIVES,
    ChannelGroup,
    by_importance,
    cut_channels,
    find_groups,
    trace_dependencies,
)
from tasks.parts.pruning.channel_importance import BatchLosses
from tasks.parts.pruning.config import ChannelPruning, Ranking
from tasks.parts.pruning.macs import ConvSize, macs_budget, measure_convs, total_macs
from tasks.parts.pruning.sensitivity import GroupCost, check_costs

if TYPE_CHECKING:
    from torch import nn

logger = logging.getLogger(__name__)

NOT_MEASURED = (
    " With prune.ranking sensitivity no layer loses more channels than rank_groups tried: higher rank_groups.ratios "
    "allow more."
)


def prune_channels(
    network: "nn.Module",
    cfg: ChannelPruning,
    *,
    size: tuple[int, int],
    original: Mapping[str, ConvSize] | None = None,
    progress: float = 1.0,
    batch_losses: BatchLosses | None = None,
    costs: Mapping[str, GroupCost] | None = None,
) -> None:
    """Prune in place, in `num_steps` portions, the last one ending at the target; the classifier is kept.

    `size` is the (height, width) for which MACs are counted. To prune step by step with training in between, pass
    the result of `measure_convs` on the unpruned network as `original`, and as `progress` the share of the whole cut
    that is done after this call. Importance `taylor` needs `batch_losses`, ranking `sensitivity` the `costs` of the
    groups of the unpruned network. Layers that have no more than one multiple of channels stay whole.

    Raises GateFailed when the target is out of reach, ConfigError when all layers are as narrow as the multiple
    or the layer ratios do not fit the network, ArtifactError when it cannot be traced or the costs do not fit it.
    """
    original = measure_convs(network, size) if original is None else original
    costs = costs or {}
    check_layer_names(cfg.layer_ratios, network)
    kept = [name for name, ratio in cfg.layer_ratios.items() if ratio == 0]
    widths = {name: conv.out_channels for name, conv in original.items()}
    budget = macs_budget(original, cfg.target_macs_ratio, progress)
    start = total_macs(measure_convs(network, size))
    for step in range(1, cfg.num_steps + 1):
        graph = trace_dependencies(network, size)
        groups = find_groups(graph, network, cfg.importance, kept=kept, batch_losses=batch_losses)
        shares = _shares_by_root(groups, cfg.layer_ratios)
        if step == 1:
            cuttable = {group.root: widths[group.root] for group in groups if shares.get(group.root) != 0}
            check_multiple(cuttable, cfg.channel_multiple)
            _log_narrow(cuttable, cfg.channel_multiple)
            check_costs(costs, {group.root: widths[group.root] for group in groups})
        convs = measure_convs(network, size)
        limit = budget + (start - budget) * (1 - step / cfg.num_steps)
        ordered = {root: share * progress for root, share in shares.items()}
        cuts = _choose_cuts(groups, convs, widths, cfg, limit=limit, ordered=ordered, costs=costs)
        for group in groups:
            if cuts[group.root]:
                cut_channels(graph, network, group, cuts[group.root])


def check_layer_names(
    layer_ratios: Mapping[str, float], network: "nn.Module", layers: Collection[str] | None = None
) -> None:
    """Raise ConfigError when `layer_ratios` names the classifier, or none of `layers` (None: convolutions)."""
    from torch import nn

    classifier = str(network.classifier_layer)
    kinds = nn.Conv2d | nn.ConvTranspose2d
    convs = [name for name, layer in network.named_modules() if isinstance(layer, kinds)]
    kind, known = ("convolution", convs) if layers is None else ("convolution or linear layer", layers)
    if classifier in layer_ratios:
        raise ConfigError(
            f"prune.layer_ratios names the classifier {classifier!r}, which is never pruned: its channels are "
            "the classes. Remove it from prune.layer_ratios."
        )
    unknown = [name for name in layer_ratios if name not in known]
    if unknown:
        raise ConfigError(
            f"prune.layer_ratios names {unknown[0]!r}, which is not a {kind} of the network. Choose from: "
            f"{', '.join(name for name in known if name != classifier)}."
        )


def check_multiple(widths: Mapping[str, int], multiple: int) -> None:
    """Raise ConfigError when none of the layers (name -> channels) has more than one multiple of channels."""
    widest = max(widths, key=lambda name: widths[name], default=None)
    if widest is not None and widths[widest] <= multiple:
        raise ConfigError(
            f"prune.channel_multiple is {multiple}, and the widest layer that may be cut, {widest!r}, has only "
            f"{widths[widest]} channels; each layer keeps at least one multiple. Set prune.channel_multiple below "
            f"{widths[widest]}, or train a wider network (network.width)."
        )


def check_runs(network: "nn.Module", height: int, width: int, num_classes: int) -> None:
    """Raise ArtifactError when the logits of the pruned network do not have the right shape."""
    import torch

    from tasks.parts.networks.blocks import image_channels

    try:
        with torch.inference_mode():
            shape = tuple(network(torch.zeros(1, image_channels(network), height, width)).shape)
    except RuntimeError as error:
        raise ArtifactError(f"The pruned network does not run at {height}x{width}: {error}") from error
    if shape != (1, num_classes, height, width):
        raise ArtifactError(
            f"The pruned network's logits are {shape} at {height}x{width} with {num_classes} classes."
        )


def _shares_by_root(groups: list[ChannelGroup], layer_ratios: Mapping[str, float]) -> dict[str, float]:
    """Return root -> share of its channels to remove, for the groups that `layer_ratios` names.

    Raises ConfigError for a layer that follows several others, or two of one group with different shares.
    """
    shares: dict[str, float] = {}
    for name, ratio in layer_ratios.items():
        owners = [group for group in groups if name in group.cut_outputs]
        if len(owners) != 1:
            roots = ", ".join(group.root for group in owners)
            raise ConfigError(
                f"prune.layer_ratios names {name!r}, whose channels are those of {roots}. Name these instead."
                if owners
                else f"prune.layer_ratios names {name!r}, whose channels are those of the classifier, of grouped "
                "convolutions or of linear and attention layers, which are always kept whole. Remove it from "
                "prune.layer_ratios."
            )
        if shares.setdefault(owners[0].root, ratio) != ratio:
            raise ConfigError(
                f"prune.layer_ratios gives {name!r} {ratio}, but a layer that is added to it {shares[owners[0].root]}"
                f"; {', '.join(owners[0].cut_outputs)} can only lose channels together. Give all the same share."
            )
    return shares


def _log_narrow(widths: Mapping[str, int], multiple: int) -> None:
    """Log the layers that have no channels to lose."""
    narrow = [name for name, width in widths.items() if width <= multiple]
    if narrow:
        logger.warning(
            "%d of %d layers have no more than prune.channel_multiple = %d channels and stay whole: %s",
            len(narrow),
            len(widths),
            multiple,
            ", ".join(narrow),
        )


def _choose_cuts(
    groups: list[ChannelGroup],
    convs: Mapping[str, ConvSize],
    widths: Mapping[str, int],
    cfg: ChannelPruning,
    *,
    limit: float,
    ordered: Mapping[str, float],
    costs: Mapping[str, GroupCost],
) -> dict[str, list[int]]:
    """Cut the `ordered` shares (by root), then take portions of channels, cheapest first, down to `limit` MACs.

    Returns root -> indices of the channels to remove. `widths` are the channels before any pruning.
    """
    portions: list[tuple[tuple[float, ...], int, list[int]]] = []
    cuts: dict[str, list[int]] = {group.root: [] for group in groups}
    for index, group in enumerate(groups):
        width = widths[group.root]
        if group.root in ordered:
            cuts[group.root] = _ordered_cut(group, width, ordered[group.root], cfg.channel_multiple)
        elif cfg.ranking is not Ranking.sensitivity:
            portions += [((score,), index, channels) for score, channels in _portions(group, width, cfg)]
        elif group.root in costs:
            ranked = _portions_by_cost(group, width, cfg, costs[group.root], groups, convs)
            portions += [(score, index, channels) for score, channels in ranked]
    portions.sort(key=lambda portion: portion[:2])
    macs = _macs_after(groups, convs, cuts)
    for _, index, channels in portions:
        if macs <= limit:
            return cuts
        cuts[groups[index].root] += channels
        macs = _macs_after(groups, convs, cuts)
    if macs > limit:
        raise GateFailed(
            f"Pruning reaches {macs} MACs at best, expected at most {limit:.0f} (prune.target_macs_ratio "
            f"{cfg.target_macs_ratio}). Raise prune.target_macs_ratio or prune.max_layer_ratio "
            f"({cfg.max_layer_ratio}), or lower prune.channel_multiple ({cfg.channel_multiple})."
            f"{NOT_MEASURED if cfg.ranking is Ranking.sensitivity else ''}{_describe_kept(groups, convs)}"
        )
    return cuts


def _describe_kept(groups: list[ChannelGroup], convs: Mapping[str, ConvSize]) -> str:
    """Return a sentence about the layers that are in no group; empty if all layers are in one."""
    touched = {name for group in groups for name in (*group.cut_outputs, *group.cut_inputs)}
    kept = {name: conv for name, conv in convs.items() if name not in touched}
    if not kept:
        return ""
    share = total_macs(kept) / total_macs(convs)
    return (
        f" {len(kept)} layers with {share:.0%} of the MACs are kept whole: grouped convolutions, linear and "
        f"attention layers, and the layers coupled to them. {ALTERNATIVES}"
    )


def _ordered_cut(group: ChannelGroup, width: int, share: float, multiple: int) -> list[int]:
    """Return the least important channels, at most `share` of `width`, so that a whole multiple is left."""
    least, multiple = group.least(multiple), group.multiple(multiple)
    left = max(least, math.ceil(round(width * (1 - share) / multiple, 6)) * multiple)
    return by_importance(group)[: max(0, len(group.importance) - left)]


def _portions(group: ChannelGroup, width: int, cfg: ChannelPruning) -> list[tuple[float, list[int]]]:
    """Split a group's removable channels, least important first, into portions with a rising score.

    The first portion leaves a whole multiple of channels, each further one removes one multiple.
    """
    num_channels = len(group.importance)
    order = by_importance(group)
    multiple = group.multiple(cfg.channel_multiple)
    floor = max(group.least(cfg.channel_multiple), math.ceil(width * (1 - cfg.max_layer_ratio)))
    portions: list[tuple[float, list[int]]] = []
    start = 0
    while True:
        left = num_channels - start
        end = start + (left % multiple or multiple)
        if num_channels - end < floor:
            return portions
        channels = order[start:end]
        if cfg.ranking is Ranking.uniform:
            score = (width - (num_channels - end)) / width
        else:
            score = sum(group.importance[channel] for channel in channels) / len(channels)
        portions.append((score, channels))
        start = end


def _portions_by_cost(
    group: ChannelGroup,
    width: int,
    cfg: ChannelPruning,
    cost: GroupCost,
    groups: list[ChannelGroup],
    convs: Mapping[str, ConvSize],
) -> list[tuple[tuple[float, float], list[int]]]:
    """Score the portions of a group by the loss of score per MAC saved, as far as cuts of it were measured.

    Equal losses, above all none, are decided by the share of the channels that is then gone, so that no group gives
    all before others give any.
    """
    removed, score = width - len(group.importance), 0.0
    cuts: dict[str, list[int]] = {other.root: [] for other in groups}
    macs = _macs_after(groups, convs, cuts)
    ranked = []
    for _, channels in _portions(group, width, cfg):
        end = removed + len(channels)
        if end > cost.removed[-1]:
            break
        cuts[group.root] += channels
        left = _macs_after(groups, convs, cuts)
        score = max(score, cost.between(removed, end) / (macs - left))  # never falls, but for rounding
        ranked.append(((score, end / width), channels))
        removed, macs = end, left
    return ranked


def _macs_after(
    groups: list[ChannelGroup], convs: Mapping[str, ConvSize], cuts: Mapping[str, list[int]]
) -> int:
    """Return the MACs that would remain; positions and kernels do not change."""
    outputs = {name: conv.out_channels for name, conv in convs.items()}
    inputs = {name: conv.in_channels for name, conv in convs.items()}
    for group in groups:
        removed = len(cuts[group.root])
        for name, share in group.cut_outputs.items():
            outputs[name] -= removed * share
        for name, share in group.cut_inputs.items():
            inputs[name] -= removed * share
    return sum(
        outputs[name] * (1 if conv.is_depthwise else inputs[name]) * conv.macs_per_connection
        for name, conv in convs.items()
    )
