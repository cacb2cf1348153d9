"""The importance of each channel, by torch-pruning's importance classes."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from tasks.core.errors import ArtifactError, ConfigError
from tasks.parts.pruning.config import Importance

if TYPE_CHECKING:
    from torch import Tensor, nn

BatchLosses = Callable[["nn.Module"], Iterable["Tensor"]]
"""Yields the training loss of a network on a few batches, one by one."""


def score_channels(
    importance: Importance, groups: Sequence[Any], network: "nn.Module", batch_losses: BatchLosses | None
) -> "list[Tensor]":
    """Score each channel of torch-pruning's groups, one vector per group; only taylor needs `batch_losses`.

    Raises ConfigError for batchnorm_scale when a group has no BatchNorm, and for taylor without losses.
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
    """Convert the exceptions of torch-pruning on a graph that it cannot trace to ArtifactError."""
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
    """Sum the first-order change of the loss over batches: |sum of weight times gradient|.

    This is a sum of magnitudes over batches, not the magnitude of a sum, because near a minimum gradients cancel.
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
