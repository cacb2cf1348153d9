"""Groups of channels that can only be removed together, from the dependency graph of torch-pruning."""

import math
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from tasks.core.errors import ArtifactError
from tasks.parts.pruning.channel_importance import BatchLosses, score_channels, tracing_errors
from tasks.parts.pruning.config import Importance

if TYPE_CHECKING:
    from torch import Tensor, nn

ALTERNATIVES = (
    "Train a network of convolutions (network.name), set prune.method to weights, or leave pruning out "
    "(steps.pruning=false)."
)


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
    unit: int = 1
    """Consecutive channels that go together: those that a GroupNorm normalises together, so that what is left is
    normalised as before."""

    def multiple(self, channel_multiple: int) -> int:
        """Return of which number a multiple of channels has to be left, and removed after that."""
        return math.lcm(self.unit, channel_multiple)

    def least(self, channel_multiple: int) -> int:
        """Return how many channels have to be left.

        A GroupNorm keeps two groups: a single one could be a norm of all channels, which may lose any of them.
        """
        return max(self.multiple(channel_multiple), 2 * self.unit if self.unit > 1 else 1)


def trace_dependencies(network: "nn.Module", size: tuple[int, int]) -> Any:
    """Build torch-pruning's dependency graph.

    Groups end at what cannot lose channels, because they stay whole anyway: behind the reshapes of an attention,
    torch-pruning would follow each pixel of each channel.
    """
    import torch
    import torch_pruning

    from tasks.parts.networks.blocks import image_channels
    from tasks.parts.networks.foreign import all_logits

    network.eval()
    with tracing_errors(), _single_operators(network):
        graph = torch_pruning.DependencyGraph().build_dependency(
            network,
            torch.zeros(1, image_channels(network), *size),
            forward_fn=all_logits,
            verbose=False,
        )
        _let_go_of_results(network)
        if network.get_submodule(str(network.classifier_layer)) not in graph.module2node:
            raise ValueError(f"{network.classifier_layer} is not found from the logits back")
    for module, node in graph.module2node.items():
        if not _can_lose_channels(module):
            node.dependencies.clear()
    return graph


@contextmanager
def _single_operators(network: "nn.Module") -> Iterator[None]:
    """Let InstanceNorm and PReLU be one operator, whose channels can be followed, in place of some with reshapes."""
    from torch import nn

    def forward(images_NCHW: "Tensor") -> "Tensor":
        return images_NCHW.clone()

    layers = [layer for layer in network.modules() if isinstance(layer, nn.InstanceNorm2d | nn.PReLU)]
    for layer in layers:
        layer.forward = forward  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        for layer in layers:
            del layer.forward


def _let_go_of_results(network: "nn.Module") -> None:
    """Detach results that modules keep as attributes, such as maps of attention: those could not be copied."""
    import torch

    for module in network.modules():
        for name, value in list(vars(module).items()):
            if isinstance(value, torch.Tensor) and value.grad_fn is not None:
                setattr(module, name, value.detach())


def _can_lose_channels(module: object) -> bool:
    """Whether a layer or operator may be in a group: of grouped convolutions only depthwise ones."""
    from torch import nn
    from torch_pruning import ops

    if isinstance(module, nn.Conv2d | nn.ConvTranspose2d):
        return module.groups == 1 or module.groups == module.in_channels == module.out_channels
    if isinstance(module, nn.InstanceNorm2d):
        return not module.track_running_stats  # which torch-pruning leaves as they are
    return isinstance(
        module,
        nn.BatchNorm2d | nn.GroupNorm | nn.PReLU | ops._ElementWiseOp | ops._ConcatOp | ops._SplitOp,
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
    return [
        replace(group, importance=_mean_of_units(scores.get(group.root, group.importance), group.unit))
        for group, _ in groups
    ]


def _mean_of_units(importance: tuple[float, ...], unit: int) -> tuple[float, ...]:
    """Give all channels of a unit the same importance, so that they stay together in any order by it."""
    starts = range(0, len(importance), unit)
    means = [sum(importance[start : start + unit]) / unit for start in starts]
    return tuple(mean for mean in means for _ in range(unit)) if unit > 1 else importance


def by_importance(group: ChannelGroup) -> list[int]:
    """Return the channels of a group, least important first."""
    return sorted(range(len(group.importance)), key=lambda channel: (group.importance[channel], channel))


def layers_kept_whole(network: "nn.Module", size: tuple[int, int]) -> dict[str, str]:
    """Return the convolutions that can lose no channels, with the layer or operator that prevents it."""
    graph = trace_dependencies(network, size)
    whole = {}
    for group, coupled in _all_groups(graph, network):
        preventing = _find_preventing(graph, network, group, coupled)
        if preventing:
            whole[group.root] = preventing
    return whole


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
            norms = {norm: _unit(norm) for norm in _group_norms(coupled)}
            coupled.prune()
            for norm, unit in norms.items():
                norm.num_groups = norm.num_channels // unit if norm.num_groups > 1 else 1
    if not is_allowed:
        raise ArtifactError(
            f"Removing {len(channels)} channels of {group.root!r} would empty a coupled layer."
        )


def _coupled_groups(graph: Any, network: "nn.Module") -> list[tuple[ChannelGroup, Any]]:
    """Return the groups of convolutions and norms only, without the classifier's, each with torch-pruning's group.

    Each group starts at a plain convolution, whose channels are independent; depthwise ones only follow.
    """
    groups = [item for item in _all_groups(graph, network) if not _find_preventing(graph, network, *item)]
    if not groups:
        raise ArtifactError(
            "The network has no convolution that may be pruned: the classifier is kept whole, and so are grouped "
            f"convolutions, linear and attention layers with all that is coupled to them. {ALTERNATIVES}"
        )
    return groups


def _all_groups(graph: Any, network: "nn.Module") -> Iterator[tuple[ChannelGroup, Any]]:
    """Yield the group of each plain convolution that runs, in the order of the network's modules."""
    from torch import nn

    names = {module: name for name, module in network.named_modules()}
    seen = {str(network.classifier_layer)}
    for root, name in names.items():
        is_plain = isinstance(root, nn.Conv2d | nn.ConvTranspose2d) and root.groups == 1
        if is_plain and root in graph.module2node and name not in seen:
            with tracing_errors():
                coupled = _coupled_layers(graph, root, list(range(root.out_channels)))
                group = _describe_group(graph, names, coupled)
            seen.update(group.cut_outputs)
            yield group, coupled


def _find_preventing(graph: Any, network: "nn.Module", group: ChannelGroup, coupled: Any) -> str:
    """Return the layer or operator because of which a group can lose no channels; empty if it can."""
    if str(network.classifier_layer) in group.cut_outputs:
        return f"{network.classifier_layer}, the classifier"
    nodes = [
        item.target
        for item, channels in coupled
        if not _can_lose_channels(item.target.module)
        or _is_narrower(graph, item, channels)
        or _is_part_of_norm(item, channels)
    ]
    if not nodes:
        return "" if group.cut_inputs else "an output of the network"
    for name, parameter in network.named_parameters():
        if parameter is nodes[0].module:  # torch-pruning numbers those that no layer owns
            return f"{name}, a parameter of shape {list(parameter.shape)}"
    return str(nodes[0].name).replace("\n", " ")


def _is_narrower(graph: Any, item: Any, channels: list[int]) -> bool:
    """Whether a layer has fewer channels than its group, such as a gate of one map that scales all others."""
    from torch import nn

    layer = item.target.module
    if not isinstance(
        layer, nn.Conv2d | nn.ConvTranspose2d | nn.BatchNorm2d | nn.GroupNorm | nn.InstanceNorm2d
    ):
        return False
    is_output = graph.is_out_channel_pruning_fn(item.handler)
    count = graph.get_out_channels(layer) if is_output else graph.get_in_channels(layer)
    return bool(max(channels) >= count)


def _is_part_of_norm(item: Any, channels: list[int]) -> bool:
    """Whether a GroupNorm normalises channels of other groups, too, as behind a concatenation."""
    from torch import nn

    layer = item.target.module
    return isinstance(layer, nn.GroupNorm) and list(channels) != list(range(layer.num_channels))


def _group_norms(coupled: Any) -> "list[nn.GroupNorm]":
    from torch import nn

    return [item.target.module for item, _ in coupled if isinstance(item.target.module, nn.GroupNorm)]


def _unit(norm: "nn.GroupNorm") -> int:
    """Return how many channels only go together; with a single group, which has no neighbour, any channel goes."""
    return norm.num_channels // norm.num_groups if norm.num_groups > 1 else 1


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
        if isinstance(layer, nn.Conv2d | nn.ConvTranspose2d):
            is_output = graph.is_out_channel_pruning_fn(dependency.handler)
            (outputs if is_output else inputs)[names[layer]] += len(idxs) // num_channels
    root = names[coupled[0].dep.target.module]
    unit = math.lcm(*(_unit(norm) for norm in _group_norms(coupled)))
    return ChannelGroup(root, (0.0,) * num_channels, outputs, inputs, unit)
