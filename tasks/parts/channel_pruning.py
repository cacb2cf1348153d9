"""Remove whole channels of coupled layers.

Over the groups of coupled layers of Fang et al., "DepGraph: Towards Any Structural Pruning", 2023,
arXiv:2301.12900 (torch-pruning), the least important channels first (tasks/parts/channel_importance.py).

Only convolutions that no linear or attention layer touches lose channels: the channels of attention belong to
heads, and torch-pruning does not follow them through its reshapes.
"""

import logging
import math
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from tasks.core.errors import ArtifactError, ConfigError, GateFailed
from tasks.parts.channel_importance import BatchLosses, Importance, score_channels, tracing_errors

if TYPE_CHECKING:
    from torch import Tensor, nn

logger = logging.getLogger(__name__)


class Ranking(StrEnum):
    """How layers compete."""

    across_layers = "across_layers"
    """The least important channels of the whole network go first: layers end up differently thin."""
    uniform = "uniform"
    """Each layer loses the same share of its channels."""


@dataclass(frozen=True)
class ChannelPruning:
    """How much is removed, and in which portions."""

    target_macs_ratio: float
    """MACs that may remain, as a share of the original's; lower: faster, less accurate."""
    channel_multiple: int
    """Pruned layers keep a multiple of this many channels; 8 or 16 suit vector units and tensor cores."""
    ranking: Ranking
    """Whether layers compete (across_layers) or lose the same share (uniform)."""
    max_layer_ratio: float
    """Largest share of its channels that one layer may lose; keeps thin layers from becoming bottlenecks."""
    num_steps: int
    """Portions; the importance is measured again before each one."""
    importance: Importance
    """What makes a channel important."""
    layer_ratios: dict[str, float]
    """Layer -> share of its channels that go; 0 keeps it whole. All other layers compete for the target."""

    def __post_init__(self) -> None:
        if not 0.0 < self.target_macs_ratio < 1.0:
            raise ConfigError(
                f"prune.target_macs_ratio is {self.target_macs_ratio}; expected between 0 and 1."
            )
        if not 1 <= self.channel_multiple <= 1024:
            raise ConfigError(f"prune.channel_multiple is {self.channel_multiple}; expected 1 to 1024.")
        if not 0.0 < self.max_layer_ratio < 1.0:
            raise ConfigError(f"prune.max_layer_ratio is {self.max_layer_ratio}; expected between 0 and 1.")
        if not 1 <= self.num_steps <= 100:
            raise ConfigError(f"prune.num_steps is {self.num_steps}; expected 1 to 100.")
        for name, ratio in self.layer_ratios.items():
            if not 0.0 <= ratio < 1.0:
                raise ConfigError(
                    f"prune.layer_ratios.{name} is {ratio}; expected at least 0 and less than 1."
                )


@dataclass(frozen=True)
class ConvSize:
    """Of one convolution or linear layer: its channels, and what one connection between channels costs."""

    in_channels: int
    out_channels: int
    macs_per_connection: int
    """Output positions (of a linear layer: tokens) times kernel positions."""
    is_depthwise: bool

    @property
    def macs(self) -> int:
        """Multiply-accumulates for one image."""
        connections = self.out_channels * (1 if self.is_depthwise else self.in_channels)
        return connections * self.macs_per_connection


@dataclass(frozen=True)
class ChannelGroup:
    """Channels of several layers that only go together; counts are per removed channel of `root`."""

    root: str
    """Convolution that stands for the group."""
    importance: tuple[float, ...]
    """One number a channel, comparable between groups; zeros where the group is kept whole."""
    cut_outputs: Mapping[str, int]
    """Convolution -> output channels that it loses."""
    cut_inputs: Mapping[str, int]
    """Convolution -> input channels that it loses."""


def prune_channels(
    network: "nn.Module",
    cfg: ChannelPruning,
    *,
    size: tuple[int, int],
    original: Mapping[str, ConvSize] | None = None,
    progress: float = 1.0,
    batch_losses: BatchLosses | None = None,
) -> None:
    """Prune in place, in `num_steps` portions, the last one ending at the target; the classifier is kept.

    `size` is the (height, width) for which MACs are counted. A network that is pruned bit by bit, with training
    between, gives what `measure_convs` found at first as `original`, and in `progress` the share of the whole
    cut that is done after this call. Importance `taylor` needs `batch_losses`. Layers that have no more than one
    multiple of channels stay whole.

    Raises GateFailed when the target is out of reach, ConfigError when all layers are as narrow as the multiple
    or the layer ratios do not fit the network, ArtifactError when it cannot be traced.
    """
    original = measure_convs(network, size) if original is None else original
    check_layer_names(cfg.layer_ratios, network)
    kept = [name for name, ratio in cfg.layer_ratios.items() if ratio == 0]
    widths = {name: conv.out_channels for name, conv in original.items()}
    budget = macs_budget(original, cfg.target_macs_ratio, progress)
    start = total_macs(measure_convs(network, size))
    for step in range(1, cfg.num_steps + 1):
        graph = _trace(network, size)
        groups = _find_groups(graph, network, cfg.importance, kept=kept, batch_losses=batch_losses)
        shares = _shares_by_root(groups, cfg.layer_ratios)
        if step == 1:
            cuttable = {group.root: widths[group.root] for group in groups if shares.get(group.root) != 0}
            check_multiple(cuttable, cfg.channel_multiple)
            _log_narrow(cuttable, cfg.channel_multiple)
        convs = measure_convs(network, size)
        limit = budget + (start - budget) * (1 - step / cfg.num_steps)
        ordered = {root: share * progress for root, share in shares.items()}
        cuts = _choose_cuts(groups, convs, widths, cfg, limit=limit, ordered=ordered)
        for group in groups:
            if cuts[group.root]:
                _cut(graph, network, group, cuts[group.root])


def measure_convs(network: "nn.Module", size: tuple[int, int]) -> dict[str, ConvSize]:
    """Count channels and MACs of each convolution and linear layer for one image of `size` = (H, W).

    The products of attention, which have no weights, are not counted. Raises ArtifactError when the layers do not
    fit together.
    """
    import torch
    from torch import nn

    sizes: dict[str, ConvSize] = {}

    def record(name: str) -> Callable[["nn.Module", Any, "Tensor"], None]:
        def hook(conv: "nn.Module", _inputs: Any, output: "Tensor") -> None:
            if isinstance(conv, nn.Linear):
                tokens = output.numel() // conv.out_features
                sizes[name] = ConvSize(conv.in_features, conv.out_features, tokens, is_depthwise=False)
                return
            assert isinstance(conv, nn.Conv2d)
            positions = output.shape[2] * output.shape[3] * math.prod(conv.kernel_size)
            sizes[name] = ConvSize(conv.in_channels, conv.out_channels, positions, conv.groups > 1)

        return hook

    hooks = [
        module.register_forward_hook(record(name))
        for name, module in network.named_modules()
        if isinstance(module, nn.Conv2d | nn.Linear)
    ]
    try:
        with torch.inference_mode():
            network(torch.zeros(1, 3, *size))
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
    """Return the MACs that may remain when the given share of the whole cut is done."""
    target = target_macs_ratio * total_macs(original)
    return target + (total_macs(original) - target) * (1 - progress)


_OTHER_WAYS = "Train a network of convolutions (network.name), or set prune.method to weights."


def _trace(network: "nn.Module", size: tuple[int, int]) -> Any:
    """Build torch-pruning's dependency graph."""
    import torch
    import torch_pruning

    network.eval()
    with tracing_errors():
        return torch_pruning.DependencyGraph().build_dependency(
            network, torch.zeros(1, 3, *size), verbose=False
        )


def _find_groups(
    graph: Any,
    network: "nn.Module",
    importance: Importance = Importance.l1,
    *,
    kept: Collection[str] = (),
    batch_losses: BatchLosses | None = None,
) -> list[ChannelGroup]:
    """List the groups that may be cut, in the order of the network's modules.

    Groups with a layer in `kept` stay whole, so their importance is not measured: zeros.
    """
    import torch

    found = _coupled_groups(graph, network)
    scored = [
        (group, coupled) for group, coupled in found if not any(name in kept for name in group.cut_outputs)
    ]
    values = score_channels(importance, [coupled for _, coupled in scored], network, batch_losses)
    # A group of zeros has no mean to divide by.
    scores = {
        group.root: tuple(torch.nan_to_num(value, nan=0.0).tolist())
        for (group, _), value in zip(scored, values, strict=True)
    }
    return [replace(group, importance=scores.get(group.root, group.importance)) for group, _ in found]


def _coupled_groups(graph: Any, network: "nn.Module") -> list[tuple[ChannelGroup, Any]]:
    """Return the groups of convolutions alone, without the classifier's, each with torch-pruning's own.

    Each group starts at a plain convolution, where channels are independent; depthwise ones only follow.
    """
    from torch import nn
    from torch_pruning import ops

    movable = (nn.Conv2d, nn.BatchNorm2d, ops._ElementWiseOp, ops._ConcatOp, ops._SplitOp)

    names = {module: name for name, module in network.named_modules()}
    found: list[tuple[ChannelGroup, Any]] = []
    seen = {str(network.classifier_layer)}
    for root, name in names.items():
        if not isinstance(root, nn.Conv2d) or root.groups > 1 or name in seen:
            continue
        with tracing_errors():
            coupled = _coupled_layers(graph, root, list(range(root.out_channels)))
            group = _describe_group(graph, names, coupled)
        is_classifier = str(network.classifier_layer) in group.cut_outputs
        seen.update(group.cut_outputs)
        if not is_classifier and all(isinstance(item.target.module, movable) for item, _ in coupled):
            found.append((group, coupled))
    if not found:
        raise ArtifactError(
            "The network has no convolution that may be pruned: the classifier is kept whole, and so are linear and "
            f"attention layers with all that is coupled to them. {_OTHER_WAYS}"
        )
    return found


def _coupled_layers(graph: Any, root: "nn.Module", channels: list[int]) -> Any:
    """Ask torch-pruning for all layers that lose something when `root` loses these output channels."""
    return graph.get_pruning_group(root, graph.get_pruner_of_module(root).prune_out_channels, channels)


def _describe_group(graph: Any, names: Mapping["nn.Module", str], coupled: Any) -> ChannelGroup:
    from torch import nn

    num_channels = len(coupled[0].idxs)
    outputs: Counter[str] = Counter()
    inputs: Counter[str] = Counter()
    for dependency, idxs in coupled:
        layer = dependency.target.module
        if isinstance(layer, nn.Conv2d):
            is_output = graph.is_out_channel_pruning_fn(dependency.handler)
            (outputs if is_output else inputs)[names[layer]] += len(idxs) // num_channels
    root = names[coupled[0].dep.target.module]
    return ChannelGroup(root, (0.0,) * num_channels, outputs, inputs)


def _shares_by_root(groups: list[ChannelGroup], layer_ratios: Mapping[str, float]) -> dict[str, float]:
    """Return root -> share of its channels that go, for the groups that `layer_ratios` names.

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
                else f"prune.layer_ratios names {name!r}, whose channels are those of the classifier or of linear "
                "and attention layers, which are always kept whole. Remove it from prune.layer_ratios."
            )
        if shares.setdefault(owners[0].root, ratio) != ratio:
            raise ConfigError(
                f"prune.layer_ratios gives {name!r} {ratio}, but a layer that is added to it {shares[owners[0].root]}"
                f"; {', '.join(owners[0].cut_outputs)} only lose channels together. Give one share to all."
            )
    return shares


def check_layer_names(
    layer_ratios: Mapping[str, float], network: "nn.Module", layers: Collection[str] | None = None
) -> None:
    """Raise ConfigError when `layer_ratios` names the classifier, or none of `layers` (None: convolutions)."""
    from torch import nn

    classifier = str(network.classifier_layer)
    convs = [name for name, layer in network.named_modules() if isinstance(layer, nn.Conv2d)]
    kind, known = ("convolution", convs) if layers is None else ("convolution or linear layer", layers)
    if classifier in layer_ratios:
        raise ConfigError(
            f"prune.layer_ratios names the classifier {classifier!r}, which is never pruned: its channels are "
            "the classes. Remove it from prune.layer_ratios."
        )
    unknown = [name for name in layer_ratios if name not in known]
    if unknown:
        raise ConfigError(
            f"prune.layer_ratios names {unknown[0]!r}, which is no {kind} of the network. There are: "
            f"{', '.join(name for name in known if name != classifier)}."
        )


def check_multiple(widths: Mapping[str, int], multiple: int) -> None:
    """Raise ConfigError when none of the layers, given with their channels, has more than one multiple of them."""
    widest = max(widths, key=lambda name: widths[name], default=None)
    if widest is not None and widths[widest] <= multiple:
        raise ConfigError(
            f"prune.channel_multiple is {multiple}, and the widest layer that may be cut, {widest!r}, has only "
            f"{widths[widest]} channels; each layer keeps at least one multiple. Set prune.channel_multiple below "
            f"{widths[widest]}, or train a wider network (network.width)."
        )


def _log_narrow(widths: Mapping[str, int], multiple: int) -> None:
    """Name the layers that have no channels to lose."""
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
) -> dict[str, list[int]]:
    """Cut the `ordered` shares (by root), then take portions of channels, cheapest first, down to `limit` MACs.

    Returns root -> indices of the channels to remove. `widths` are the channels before any pruning.
    """
    portions: list[tuple[float, int, list[int]]] = []
    cuts: dict[str, list[int]] = {group.root: [] for group in groups}
    for index, group in enumerate(groups):
        width = widths[group.root]
        if group.root in ordered:
            cuts[group.root] = _ordered_cut(group, width, ordered[group.root], cfg.channel_multiple)
        else:
            portions += [(score, index, channels) for score, channels in _portions(group, width, cfg)]
    portions.sort(key=lambda portion: portion[:2])
    macs = _macs_after(groups, convs, cuts)
    for _, index, channels in portions:
        if macs <= limit:
            return cuts
        cuts[groups[index].root] += channels
        macs = _macs_after(groups, convs, cuts)
    if macs > limit:
        raise GateFailed(
            f"Pruning reaches {macs} MACs at the most, {limit:.0f} are wanted (prune.target_macs_ratio "
            f"{cfg.target_macs_ratio}). Raise prune.target_macs_ratio or prune.max_layer_ratio "
            f"({cfg.max_layer_ratio}), or lower prune.channel_multiple ({cfg.channel_multiple})."
            f"{_describe_kept(groups, convs)}"
        )
    return cuts


def _describe_kept(groups: list[ChannelGroup], convs: Mapping[str, ConvSize]) -> str:
    """Say how much of the network no group touches; nothing where all layers belong to one."""
    touched = {name for group in groups for name in (*group.cut_outputs, *group.cut_inputs)}
    kept = {name: conv for name, conv in convs.items() if name not in touched}
    if not kept:
        return ""
    share = total_macs(kept) / total_macs(convs)
    return (
        f" {len(kept)} layers with {share:.0%} of the MACs are kept whole: linear and attention layers, and what is "
        f"coupled to them. {_OTHER_WAYS}"
    )


def _ordered_cut(group: ChannelGroup, width: int, share: float, multiple: int) -> list[int]:
    """Return the least important channels so that a whole multiple is left and at most `share` of `width` goes."""
    left = max(multiple, math.ceil(round(width * (1 - share) / multiple, 6)) * multiple)
    return _by_importance(group)[: max(0, len(group.importance) - left)]


def _by_importance(group: ChannelGroup) -> list[int]:
    return sorted(range(len(group.importance)), key=lambda channel: (group.importance[channel], channel))


def _portions(group: ChannelGroup, width: int, cfg: ChannelPruning) -> list[tuple[float, list[int]]]:
    """Split a group's removable channels, least important first, into portions with a rising score.

    The first portion brings the rest to a whole multiple, each further one takes one multiple.
    """
    found = len(group.importance)
    order = _by_importance(group)
    floor = max(cfg.channel_multiple, math.ceil(width * (1 - cfg.max_layer_ratio)))
    portions: list[tuple[float, list[int]]] = []
    start = 0
    while True:
        left = found - start
        end = start + (left % cfg.channel_multiple or cfg.channel_multiple)
        if found - end < floor:
            return portions
        channels = order[start:end]
        if cfg.ranking is Ranking.uniform:
            score = (width - (found - end)) / width
        else:
            score = sum(group.importance[channel] for channel in channels) / len(channels)
        portions.append((score, channels))
        start = end


def _macs_after(
    groups: list[ChannelGroup], convs: Mapping[str, ConvSize], cuts: Mapping[str, list[int]]
) -> int:
    """Count the MACs that would remain; positions and kernels do not change."""
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


def _cut(graph: Any, network: "nn.Module", group: ChannelGroup, channels: list[int]) -> None:
    """Remove channels of one group from all of its layers."""
    with tracing_errors():
        coupled = _coupled_layers(graph, network.get_submodule(group.root), sorted(channels))
        is_allowed = graph.check_pruning_group(coupled)
        if is_allowed:
            coupled.prune()
    if not is_allowed:
        raise ArtifactError(
            f"Removing {len(channels)} channels of {group.root!r} would empty a coupled layer."
        )


def check_runs(network: "nn.Module", height: int, width: int, num_classes: int) -> None:
    """Raise ArtifactError when the pruned network does not give logits of the right shape."""
    import torch

    try:
        with torch.inference_mode():
            found = tuple(network(torch.zeros(1, 3, height, width)).shape)
    except RuntimeError as error:
        raise ArtifactError(f"The pruned network does not run at {height}x{width}: {error}") from error
    if found != (1, num_classes, height, width):
        raise ArtifactError(
            f"The pruned network's logits are {found} at {height}x{width}, {num_classes} classes."
        )


def list_groups(network: "nn.Module", size: tuple[int, int]) -> list[ChannelGroup]:
    """List the groups that may be cut, with the L1 importance of their channels; `size` is (height, width)."""
    return _find_groups(_trace(network, size), network)


def cut_group(network: "nn.Module", group: ChannelGroup, num_channels: int, *, size: tuple[int, int]) -> None:
    """Remove the least important channels of one group, in place."""
    _cut(_trace(network, size), network, group, _by_importance(group)[:num_channels])
