"""Measure the sensitivity of each group of coupled channels to pruning by cutting one group at a time.

The method is that of Li et al., "Pruning Filters for Efficient ConvNets", 2017, arXiv:1608.08710, section 3.2,
without any training after the cut, but with the BatchNorm statistics of the network that is left (Li et al.,
"EagleEye", 2020, arXiv:2007.02491): with those of the whole network a drop also tells how far the activations
shift, which any training mends. Its cost grows linearly with the number of groups: one pass over training and
validation images per group and ratio.
"""

import copy
import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from tasks.core.bounds import AtLeast, Distinct, LessThan, MinItems, MoreThan
from tasks.core.environment import versions
from tasks.core.errors import ArtifactError

if TYPE_CHECKING:
    from torch import nn

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Config:
    """How much of each group is cut, and on how many images each cut is evaluated."""

    ratios: Annotated[list[Annotated[float, MoreThan(0), LessThan(1)]], MinItems(1), Distinct()]
    """Shares of its channels that a group loses; each is tried."""
    channel_multiple: Annotated[int, AtLeast(1)]
    """The kept channels are rounded to the nearest multiple of this number, at least one; the same as in prune."""
    num_train_images: Annotated[int, AtLeast(2)]
    """Images of the train split, on which the BatchNorm statistics are measured after each cut. More: closer to
    those of a training, slower. Networks without BatchNorm read none."""
    num_val_images: Annotated[int, AtLeast(1)]
    """Images of the val split, on which each cut is evaluated. More: steadier, slower."""
    batch_size: Annotated[int, AtLeast(2)]
    """Images in one batch. More: faster, more memory; the BatchNorm statistics are means over batches."""
    max_minutes: Annotated[float, MoreThan(0)]
    """After this time the groups that are left count as ones that cannot be cut."""


@dataclass(frozen=True)
class GroupCut:
    """Savings and cost of one cut of one group."""

    group: str
    """Convolution that names the group."""
    layers: str
    """All convolutions that lose output channels, separated by spaces."""
    channels: int
    """Number of channels before the cut."""
    channels_removed: int
    ratio: float
    """Share of the channels that is removed: channels_removed / channels."""
    macs_saved_share: float
    """Share of the MACs of the network that the cut saves, 0..1."""
    score_drop: float
    """Loss of the network's score with new BatchNorm statistics, without training; negative if the score rose."""


@dataclass(frozen=True)
class Report:
    """The scan; cuts are in the order of the network's modules."""

    metric: str
    """Metric of the scores: mIoU, or the user's own (model.metric)."""
    score: float
    """Score of the uncut network on the same images, with BatchNorm statistics of the same images as the cut ones."""
    num_val_images: int
    num_groups: int
    num_groups_uncut: int
    """Number of groups that are too narrow to lose a multiple of channels."""
    num_evaluations: int
    """Number of passes over the images: one per cut, and one for the uncut network."""
    cuts: tuple[GroupCut, ...]
    reason: str
    """Why no group can be cut; empty if one can."""
    left_out: str
    """What there was no time for; empty if all was measured."""


def environment(_: Config) -> dict[str, str]:
    """Return what the output depends on besides inputs, configuration and code."""
    return versions("lightning", "torch", "torch-pruning", "transformers")


def rank_groups(cfg: Config, *, checkpoint: Path, data: Path, out: Path) -> Report:
    """Write ``sensitivity.csv`` and ``sensitivity.png``; cost grows linearly with groups times ratios.

    The channels with the smallest L1 norm are cut, whatever prune.importance is. The uncut network is judged like
    each cut one: with BatchNorm statistics of the same training images. Ratios that give the same number of
    channels in a group are measured once. If no group can be cut, the table is empty, nothing is drawn, and the
    report gives the reason; this is no error, because a run may prune in another way. Groups for which there is no
    time are missing, and are not pruned by this table. Raises ArtifactError for weights that are not finite or a data
    set with other classes.
    """
    from tasks.parts.data.dataset import read_manifest
    from tasks.parts.data.input_card import Task, check_same_classes
    from tasks.parts.data.judge import metric_name
    from tasks.parts.data.subsets import open_chosen_images
    from tasks.parts.networks.checkpoint import load_checkpoint
    from tasks.parts.progress import TimeBudget, tracked
    from tasks.parts.pruning.channel_groups import ChannelGroup, cut_group, list_groups
    from tasks.parts.pruning.macs import measure_convs, total_macs
    from tasks.parts.pruning.recovery import recalibrate_batchnorm
    from tasks.parts.tables import write_empty_table, write_table
    from tasks.parts.training.predict import measure_score, open_labelled_images

    budget = TimeBudget(cfg.max_minutes)
    network, card = load_checkpoint(checkpoint)
    manifest = read_manifest(data)
    check_same_classes(checkpoint, card.classes, manifest.classes, "distill")
    labelled = open_labelled_images(data, "val", num_images=cfg.num_val_images)
    train_NHWC = open_chosen_images(data, "train", cfg.num_train_images)

    def judge(candidate: "nn.Module") -> float:
        recalibrate_batchnorm(candidate, train_NHWC, card, batch_size=cfg.batch_size)
        return measure_score(candidate, labelled, card, batch_size=cfg.batch_size)

    size = (card.height, card.width)
    groups: list[ChannelGroup] = []
    reason = ""
    try:
        groups = list_groups(network, size)
    except ArtifactError as error:
        reason = str(error)
    work = [
        (group, num_channels)
        for group in groups
        for num_channels in cut_sizes(
            len(group.importance),
            cfg.ratios,
            multiple=group.multiple(cfg.channel_multiple),
            least=group.least(cfg.channel_multiple),
        )
    ]
    if not work:
        reason = reason or (
            f"rank_groups.channel_multiple is {cfg.channel_multiple}, and none of the {len(groups)} groups has "
            "enough channels to lose any. Lower it, or train a wider network."
        )
        logger.warning("rank_groups: no group can be cut: %s", reason)
    logger.info("rank_groups: %d cuts of %d groups of %s", len(work), len(groups), checkpoint)
    macs = total_macs(measure_convs(network, size))
    score = judge(network)
    metric = metric_name(manifest, Task.segmentation)
    cuts = []
    for group, num_channels in tracked(work, "rank_groups", budget):
        smaller = copy.deepcopy(network)
        cut_group(smaller, group, num_channels, size=size)
        cuts.append(
            GroupCut(
                group=group.root,
                layers=" ".join(group.cut_outputs),
                channels=len(group.importance),
                channels_removed=num_channels,
                ratio=num_channels / len(group.importance),
                macs_saved_share=1 - total_macs(measure_convs(smaller, size)) / macs,
                score_drop=score - judge(smaller),
            )
        )
    if cuts:
        write_table(out / "sensitivity.csv", cuts)
        _plot_sensitivity(out / "sensitivity.png", cuts, metric)
        largest = max(cut.score_drop for cut in cuts)
        logger.info("rank_groups: %s %.4f; largest drop %.4f", metric, score, largest)
    else:
        write_empty_table(out / "sensitivity.csv", GroupCut)
    left_out = ""
    if budget.has_cut:
        spent = f"time was up after {cfg.max_minutes:g} min (rank_groups.max_minutes)"
        left_out = f"{spent} and {len(cuts)} of {len(work)} cuts"
    num_uncut = len(groups) - len({cut.group for cut in cuts})
    return Report(
        metric,
        score,
        len(labelled.images_NHWC),
        len(groups),
        num_uncut,
        len(cuts) + 1,
        tuple(cuts),
        reason or ("" if cuts else left_out),
        left_out,
    )


def cut_sizes(channels: int, ratios: Sequence[float], *, multiple: int, least: int) -> list[int]:
    """Return how many channels each ratio removes, without duplicates; `least` or more are left, a whole multiple."""
    sizes = set()
    for ratio in ratios:
        left = max(least, math.floor(channels * (1 - ratio) / multiple + 0.5) * multiple)
        if left < channels:
            sizes.add(channels - left)
    return sorted(sizes)


def _plot_sensitivity(path: Path, cuts: Sequence[GroupCut], metric: str) -> None:
    """Plot the drop of the score and the saved MACs of each cut, group by group, coloured by ratio."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    groups = list(dict.fromkeys(cut.group for cut in cuts))
    figure = Figure(figsize=(min(24, max(8, 0.32 * len(groups) + 3)), 6.5), layout="constrained")
    FigureCanvasAgg(figure)
    upper, lower = figure.subplots(2, 1, sharex=True)
    positions = [groups.index(cut.group) for cut in cuts]
    ratios = [cut.ratio for cut in cuts]
    for axes, values in (
        (upper, [100 * cut.score_drop for cut in cuts]),
        (lower, [100 * cut.macs_saved_share for cut in cuts]),
    ):
        points = axes.scatter(positions, values, c=ratios, cmap="viridis_r", vmin=0, vmax=1, s=36)
        axes.grid(alpha=0.3)
        axes.set_axisbelow(True)
    upper.set_ylabel(f"drop of {metric} (points)")
    upper.set_title(
        "Cost of cutting one group of channels at a time, with new BatchNorm statistics, without training"
    )
    lower.set_ylabel("MACs saved (%)")
    lower.set_xticks(range(len(groups)), [group[-32:] for group in groups], rotation=90, fontsize=7)
    figure.colorbar(points, ax=[upper, lower], label="share of its channels removed")
    figure.savefig(path, dpi=110, metadata={"Software": None})
