"""How much a network loses with each channel, by torch-pruning's importance classes."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from tasks.core.errors import ArtifactError, ConfigError
from tasks.parts.pruning.config import Importance

if TYPE_CHECKING:
    from torch import Tensor, nn

BatchLosses = Callable[["nn.Module"], Iterable["Tensor"]]
"""Gives the training loss of a network on a few batches, one by one."""


def score_channels(
    importance: Importance, groups: Sequence[Any], network: "nn.Module", batch_losses: BatchLosses | None
) -> "list[Tensor]":
    """Score each channel of torch-pruning's groups, one vector a group; `batch_losses` is for taylor alone.

    Raises ConfigError when BatchNorm scales are asked for and a group has none, or taylor without losses.
    """
    from torch_pruning.pruner.importance import BNScaleImportance, GroupMagnitudeImportance

    match importance:
        case Importance.l1:
            return _scores(groups, GroupMagnitudeImportance(p=1))
        case Importance.l2:
            return _scores(groups, GroupMagnitudeImportance(p=2, group_reduction="first"))
        case Importance.group_norm:
            return _scores(groups, GroupMagnitudeImportance(p=2))
        case Importance.batchnorm_scale:
            return _scores(groups, BNScaleImportance(normalizer=None))
        case Importance.taylor:
            return _taylor_scores(groups, network, batch_losses)


@contextmanager
def tracing_errors() -> Iterator[None]:
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


def _scores(groups: Sequence[Any], measure: Callable[[Any], "Tensor | None"]) -> "list[Tensor]":
    with tracing_errors():
        return [_score(measure, group).detach() for group in groups]


def _score(measure: Callable[[Any], "Tensor | None"], group: Any) -> "Tensor":
    score = measure(group)
    if score is None:  # only BatchNorm can be absent: every group has a convolution
        name = group[0].dep.target.name.split(" ")[0]
        raise ConfigError(
            f"prune.importance is batchnorm_scale, but no BatchNorm follows layer {name!r}. Keep that layer "
            f"whole with prune.layer_ratios={{{name}: 0.0}}, or set prune.importance to l1 or group_norm."
        )
    return score


def _taylor_scores(
    groups: Sequence[Any], network: "nn.Module", batch_losses: BatchLosses | None
) -> "list[Tensor]":
    """Add up, over batches, how much the loss would change to first order: |sum of weight times gradient|.

    A sum over batches of magnitudes, not the magnitude of a sum: near a minimum gradients cancel.
    """
    from torch_pruning.pruner.importance import GroupTaylorImportance

    if batch_losses is None:
        raise ConfigError(
            "prune.importance is taylor, which needs labelled images, and there are none here. Set it to l1, l2, "
            "group_norm or batchnorm_scale."
        )
    measure = GroupTaylorImportance(group_reduction="sum", normalizer=None, multivariable=True)
    totals: list[Tensor] = []
    for loss in batch_losses(network):
        network.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]
        scores = _scores(groups, measure)
        totals = [total + score for total, score in zip(totals, scores, strict=True)] if totals else scores
    network.zero_grad(set_to_none=True)
    return totals
