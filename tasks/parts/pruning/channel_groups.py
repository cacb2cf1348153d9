"""Groups of channels that can only be removed together, from the dependency graph of torch-pruning."""

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from tasks.core.errors import ArtifactError
from tasks.parts.pruning.channel_importance import BatchLosses, score_channels, tracing_errors
from tasks.parts.pruning.config import Importance

if TYPE_CHECKING:
    from torch import nn

ALTERNATIVES = "Train a network of convolutions (network.name), or set prune.method to weights."


@dataclass(frozen=True)
class ChannelGroup:
    """Channels of several layers that can only be removed together; counts are per removed channel of `root`."""

    root: str
    """Convolution that names the group."""
    importance: tuple[float, ...]
    """Importance of each channel, comparable between groups; zeros if the group is kept whole."""
    cut_outputs: Mapping[str, int]
    """Convolution -> output channels that it loses."""
    cut_inputs: Mapping[str, int]
    """Convolution -> input channels that it loses."""


def trace_dependencies(network: "nn.Module", size: tuple[int, int]) -> Any:
    """Build torch-pruning's dependency graph."""
    import torch
    import torch_pruning

    network.eval()
    with tracing_errors():
        return torch_pruning.DependencyGraph().build_dependency(
            network, torch.zeros(1, 3, *size), verbose=False
        )


def find_groups(
    graph: Any,
    network: "nn.Module",
    importance: Importance = Importance.l1,
    *,
    kept: Collection[str] = (),
    batch_losses: BatchLosses | None = None,
) -> list[ChannelGroup]:
    """List the groups that may be cut, in the order of the network's modules.

    Groups with a layer in `kept` stay whole, so their importance is not measured but zero.
    """
    import torch

    groups = _coupled_groups(graph, network)
    scored = [
        (group, coupled) for group, coupled in groups if not any(name in kept for name in group.cut_outputs)
    ]
    values = score_channels(importance, [coupled for _, coupled in scored], network, batch_losses)
    # Importance is relative to the mean, which is NaN for a group of zeros.
    scores = {
        group.root: tuple(torch.nan_to_num(value, nan=0.0).tolist())
        for (group, _), value in zip(scored, values, strict=True)
    }
    return [replace(group, importance=scores.get(group.root, group.importance)) for group, _ in groups]


def by_importance(group: ChannelGroup) -> list[int]:
    """Return the channels of a group, least important first."""
    return sorted(range(len(group.importance)), key=lambda channel: (group.importance[channel], channel))


def list_groups(network: "nn.Module", size: tuple[int, int]) -> list[ChannelGroup]:
    """List the groups that may be cut, with the L1 importance of their channels; `size` is (height, width)."""
    return find_groups(trace_dependencies(network, size), network)


def cut_group(network: "nn.Module", group: ChannelGroup, num_channels: int, *, size: tuple[int, int]) -> None:
    """Remove the least important channels of one group, in place."""
    cut_channels(trace_dependencies(network, size), network, group, by_importance(group)[:num_channels])


def cut_channels(graph: Any, network: "nn.Module", group: ChannelGroup, channels: list[int]) -> None:
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


def _coupled_groups(graph: Any, network: "nn.Module") -> list[tuple[ChannelGroup, Any]]:
    """Return the groups that consist of convolutions only, without the classifier's, each with torch-pruning's group.

    Each group starts at a plain convolution, whose channels are independent; depthwise ones only follow.
    """
    from torch import nn
    from torch_pruning import ops

    cuttable = (nn.Conv2d, nn.BatchNorm2d, ops._ElementWiseOp, ops._ConcatOp, ops._SplitOp)
    names = {module: name for name, module in network.named_modules()}
    groups: list[tuple[ChannelGroup, Any]] = []
    seen = {str(network.classifier_layer)}
    for root, name in names.items():
        if not isinstance(root, nn.Conv2d) or root.groups > 1 or name in seen:
            continue
        with tracing_errors():
            coupled = _coupled_layers(graph, root, list(range(root.out_channels)))
            group = _describe_group(graph, names, coupled)
        is_classifier = str(network.classifier_layer) in group.cut_outputs
        seen.update(group.cut_outputs)
        if not is_classifier and all(isinstance(item.target.module, cuttable) for item, _ in coupled):
            groups.append((group, coupled))
    if not groups:
        raise ArtifactError(
            "The network has no convolution that may be pruned: the classifier is kept whole, and so are linear and "
            f"attention layers with all that is coupled to them. {ALTERNATIVES}"
        )
    return groups


def _coupled_layers(graph: Any, root: "nn.Module", channels: list[int]) -> Any:
    """Return torch-pruning's group of all layers that lose channels when `root` loses these output channels."""
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
