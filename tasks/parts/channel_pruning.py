"""Remove whole channels of coupled layers.

Structured pruning by L1 norm: Li et al., "Pruning Filters for Efficient ConvNets", 2017, arXiv:1608.08710,
over the groups of coupled layers of Fang et al., "DepGraph: Towards Any Structural Pruning", 2023,
arXiv:2301.12900 (torch-pruning).
"""

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from tasks.core.errors import ArtifactError, ConfigError, GateFailed

if TYPE_CHECKING:
    from torch import Tensor, nn


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


@dataclass(frozen=True)
class ConvSize:
    """Of one convolution: its channels, and what one connection between channels costs."""

    in_channels: int
    out_channels: int
    macs_per_connection: int
    """Output positions times kernel positions."""
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
    """L1 norm over the group, one number a channel, mean 1."""
    cut_outputs: Mapping[str, int]
    """Convolution -> output channels that it loses."""
    cut_inputs: Mapping[str, int]
    """Convolution -> input channels that it loses."""


def prune_channels(network: "nn.Module", cfg: ChannelPruning, *, size: tuple[int, int]) -> None:
    """Prune in place, in `num_steps` portions, the last one ending at the target; the classifier is kept.

    `size` is the (height, width) for which MACs are counted. Raises GateFailed when the target is out of reach,
    ConfigError when the multiple does not fit the network, ArtifactError when it cannot be traced.
    """
    original = measure_convs(network, size)
    widths = {name: conv.out_channels for name, conv in original.items()}
    budget = cfg.target_macs_ratio * total_macs(original)
    for step in range(1, cfg.num_steps + 1):
        graph = _trace(network, size)
        groups = _find_groups(graph, network)
        narrowest = min(groups, key=lambda group: widths[group.root])
        if widths[narrowest.root] < cfg.channel_multiple:
            raise ConfigError(
                f"prune.channel_multiple is {cfg.channel_multiple}, but layer {narrowest.root!r} has only "
                f"{widths[narrowest.root]} channels. Set prune.channel_multiple to at most that, or train a "
                "wider network."
            )
        convs = measure_convs(network, size)
        limit = budget + (total_macs(original) - budget) * (1 - step / cfg.num_steps)
        cuts = _choose_cuts(groups, convs, widths, cfg, limit=limit)
        for group in groups:
            if cuts[group.root]:
                _cut(graph, network, group, cuts[group.root])


def measure_convs(network: "nn.Module", size: tuple[int, int]) -> dict[str, ConvSize]:
    """Count channels and MACs of each convolution in one forward pass of one image of `size` = (H, W).

    Raises ArtifactError when the layers do not fit together.
    """
    import torch
    from torch import nn

    sizes: dict[str, ConvSize] = {}

    def record(name: str) -> Callable[["nn.Module", Any, "Tensor"], None]:
        def hook(conv: "nn.Module", _inputs: Any, output: "Tensor") -> None:
            assert isinstance(conv, nn.Conv2d)
            positions = output.shape[2] * output.shape[3] * math.prod(conv.kernel_size)
            sizes[name] = ConvSize(conv.in_channels, conv.out_channels, positions, conv.groups > 1)

        return hook

    hooks = [
        module.register_forward_hook(record(name))
        for name, module in network.named_modules()
        if isinstance(module, nn.Conv2d)
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
    """Add up the MACs of all convolutions."""
    return sum(conv.macs for conv in convs.values())


@contextmanager
def _tracing_errors() -> Iterator[None]:
    """Turn what torch-pruning raises on a graph that it cannot follow into one error."""
    try:
        yield
    except (
        RuntimeError,
        ValueError,
        TypeError,
        KeyError,
        AttributeError,
        IndexError,
        AssertionError,
    ) as error:
        raise ArtifactError(
            f"The network cannot be traced for pruning ({type(error).__name__}: {error}). Each layer must "
            "run in forward, outside of data-dependent branches. Prune another network (network.name)."
        ) from error


def _trace(network: "nn.Module", size: tuple[int, int]) -> Any:
    """Build torch-pruning's dependency graph."""
    import torch
    import torch_pruning

    network.eval()
    with _tracing_errors():
        return torch_pruning.DependencyGraph().build_dependency(
            network, torch.zeros(1, 3, *size), verbose=False
        )


def _find_groups(graph: Any, network: "nn.Module") -> list[ChannelGroup]:
    """List the groups that may be cut, in the order of the network's modules.

    Each group starts at a plain convolution, where channels are independent; depthwise ones only follow.
    """
    from torch import nn
    from torch_pruning.pruner.importance import GroupMagnitudeImportance

    names = {module: name for name, module in network.named_modules()}
    importance = GroupMagnitudeImportance(p=1)
    groups: list[ChannelGroup] = []
    seen = {str(network.classifier_layer)}
    for root, name in names.items():
        if not isinstance(root, nn.Conv2d) or root.groups > 1 or name in seen:
            continue
        with _tracing_errors():
            coupled = _coupled_layers(graph, root, list(range(root.out_channels)))
            group = _describe_group(graph, names, coupled, importance(coupled).detach())
        is_kept = str(network.classifier_layer) in group.cut_outputs
        seen.update(group.cut_outputs)
        if not is_kept:
            groups.append(group)
    if not groups:
        raise ArtifactError("The network has no convolution that may be pruned, only its classifier.")
    return groups


def _coupled_layers(graph: Any, root: "nn.Module", channels: list[int]) -> Any:
    """Ask torch-pruning for all layers that lose something when `root` loses these output channels."""
    return graph.get_pruning_group(root, graph.get_pruner_of_module(root).prune_out_channels, channels)


def _describe_group(
    graph: Any, names: Mapping["nn.Module", str], coupled: Any, importance: "Tensor"
) -> ChannelGroup:
    import torch
    from torch import nn

    num_channels = len(coupled[0].idxs)
    outputs: Counter[str] = Counter()
    inputs: Counter[str] = Counter()
    for dependency, idxs in coupled:
        layer = dependency.target.module
        if isinstance(layer, nn.Conv2d):
            is_output = graph.is_out_channel_pruning_fn(dependency.handler)
            (outputs if is_output else inputs)[names[layer]] += len(idxs) // num_channels
    values = torch.nan_to_num(importance, nan=0.0).tolist()  # a group of zeros has no mean to divide by
    return ChannelGroup(names[coupled[0].dep.target.module], tuple(values), outputs, inputs)


def _choose_cuts(
    groups: list[ChannelGroup],
    convs: Mapping[str, ConvSize],
    widths: Mapping[str, int],
    cfg: ChannelPruning,
    *,
    limit: float,
) -> dict[str, list[int]]:
    """Take portions of channels, cheapest first, until at most `limit` MACs remain.

    Returns root -> indices of the channels to remove. `widths` are the channels before any pruning.
    """
    portions: list[tuple[float, int, list[int]]] = []
    for index, group in enumerate(groups):
        portions += [
            (score, index, channels) for score, channels in _portions(group, widths[group.root], cfg)
        ]
    portions.sort(key=lambda portion: portion[:2])
    cuts: dict[str, list[int]] = {group.root: [] for group in groups}
    macs = total_macs(convs)
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
        )
    return cuts


def _portions(group: ChannelGroup, width: int, cfg: ChannelPruning) -> list[tuple[float, list[int]]]:
    """Split a group's removable channels, least important first, into portions with a rising score.

    The first portion brings the rest to a whole multiple, each further one takes one multiple.
    """
    found = len(group.importance)
    order = sorted(range(found), key=lambda channel: (group.importance[channel], channel))
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
    with _tracing_errors():
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
    """List the groups that may be cut, with the importance of their channels; `size` is (height, width)."""
    return _find_groups(_trace(network, size), network)


def cut_group(network: "nn.Module", group: ChannelGroup, num_channels: int, *, size: tuple[int, int]) -> None:
    """Remove the least important channels of one group, in place."""
    order = sorted(range(len(group.importance)), key=lambda channel: (group.importance[channel], channel))
    _cut(_trace(network, size), network, group, order[:num_channels])
