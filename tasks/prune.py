"""Make a network smaller or sparser: remove channels or residual blocks, or set weights to zero."""

import copy
import csv
import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from tasks.core.bounds import Between, LessThan, MoreThan
from tasks.core.environment import versions
from tasks.core.errors import ArtifactError, ConfigError
from tasks.parts.pruning.channel_importance import BatchLosses
from tasks.parts.pruning.config import ChannelPruning, Importance, Ranking
from tasks.parts.pruning.macs import ConvSize
from tasks.parts.training.config import TrainerConfig

if TYPE_CHECKING:
    from torch import nn

    from tasks.parts.networks.model_card import ModelCard
    from tasks.parts.pruning.sensitivity import GroupCost

logger = logging.getLogger(__name__)


class Method(StrEnum):
    """What is removed."""

    channels = "channels"
    """Whole channels: every runtime gets faster (tasks/parts/pruning/channels.py)."""
    blocks = "blocks"
    """Whole residual blocks: every runtime gets faster (tasks/parts/pruning/blocks.py)."""
    weights = "weights"
    """Single weights become zero: smaller when compressed, no faster on most runtimes."""
    two_of_four = "two_of_four"
    """Two of four consecutive input channels become zero: faster with TensorRT's SPARSE_WEIGHTS."""


@dataclass(frozen=True)
class Recovery:
    """How a network is trained between two pruning steps, on the labels only."""

    trainer: TrainerConfig
    """Schedule, optimizer and device; one process only."""


@dataclass(frozen=True)
class Config(ChannelPruning):
    """What is removed, how much, and in how many steps with training in between."""

    method: Method
    """What is removed: channels, blocks or single weights."""
    from_search: bool
    """Whether method channels takes the ratio that search_pruning chose by measured latency, instead of
    target_macs_ratio."""
    weight_sparsity: Annotated[float, MoreThan(0), LessThan(1)]
    """Share of the weights that become zero, over all convolutions and linear layers except the classifier, for
    method weights."""
    num_images: Annotated[int, Between(1, 10**9)]
    """Images on which importance taylor (training split) and method blocks (calibration split) are measured."""
    batch_size: Annotated[int, Between(1, 10**6)]
    """Images in one batch of importance taylor and method blocks."""
    iterations: Annotated[int, Between(1, 100)]
    """Pruning steps. With more than one, each is followed by training."""
    min_val_score_ratio: Annotated[float, Between(0, 1)]
    """Minimum val score after a step, relative to that of the unpruned network; for several iterations."""
    recovery: Recovery
    """Training after each step, for several iterations."""

    def __post_init__(self) -> None:
        """Reject settings that the chosen method would ignore."""
        channels, weights = Method.channels, Method.weights
        for key, neutral, methods in (
            ("importance", Importance.l1, [channels]),
            (
                "ranking",
                Ranking.across_layers,
                [channels] if self.ranking is Ranking.sensitivity else [channels, weights],
            ),
            ("layer_ratios", {}, [channels, weights]),
            ("iterations", 1, [channels, Method.blocks, weights]),
            ("from_search", False, [channels]),
        ):
            value = getattr(self, key)
            if value != neutral and self.method not in methods:
                raise ConfigError(
                    f"{key} is {value}, which only method {' and '.join(methods)} can use; method is "
                    f"{self.method}. Set {key} to {neutral}."
                )
        trainer = self.recovery.trainer
        if self.iterations > 1 and trainer.num_devices * trainer.num_nodes > 1:
            raise ConfigError(
                f"recovery.trainer has {trainer.num_devices} devices on {trainer.num_nodes} nodes; the "
                "short trainings between steps run in one process. Set num_devices and num_nodes to 1."
            )

    @property
    def needs_data(self) -> bool:
        """Whether the data set is read at all."""
        return self.iterations > 1 or self.method is Method.blocks or self.importance is Importance.taylor


@dataclass(frozen=True)
class Step:
    """One step of pruning, with the training after it."""

    step: int
    """Number of the step, counted from 1."""
    macs_ratio: float
    """MACs after this step / MACs of the unpruned network."""
    weight_sparsity: float
    """Share of the weights of convolutions and linear layers that are zero."""
    val_score: float | None
    """Score after the training, on the validation split; None with a single step, which is not trained here."""
    is_kept: bool
    """Whether val_score reached the floor."""


@dataclass(frozen=True)
class Report:
    """What was removed.

    MACs are for one image of the training size, of all calls of each layer and of all products of activations, and
    include those of zero weights.
    """

    macs_before: int
    macs_after: int
    macs_ratio: float
    """macs_after / macs_before."""
    num_parameters_before: int
    num_parameters_after: int
    num_layers: int
    """Convolutions and linear layers in the network."""
    num_layers_pruned: int
    """Layers with fewer output channels than before."""
    num_channels_removed: int
    """Output channels, summed over all layers."""
    blocks_removed: tuple[str, ...]
    """Names of the removed residual blocks."""
    weight_sparsity: float
    """Share of the weights of convolutions and linear layers that are zero."""
    layers_kept_whole: dict[str, str]
    """Methods that remove channels: layers that can lose none, with the layer or operator that prevents it."""
    dense_layers: tuple[str, ...]
    """Method two_of_four: layers that stay dense because their input channels are not a multiple of 4."""
    val_score_before: float | None
    """Score of the unpruned network on the validation split, in the data set's metric; None with a single step."""
    is_stopped_at_floor: bool
    """Whether a step fell below min_val_score_ratio; the state before that step was written."""
    steps: tuple[Step, ...]
    """All steps in order; the network after the last kept step was written."""


def environment(cfg: Config) -> dict[str, str]:
    """Return what the output depends on besides inputs, configuration and code."""
    return versions(
        "lightning", "torch", "torch-pruning", "transformers", *cfg.recovery.trainer.extra_packages
    )


def prune(cfg: Config, *, checkpoint: Path, choice: Path, sensitivity: Path, data: Path, out: Path) -> Report:
    """Prune a network and write ``model.safetensors``, ``removed.csv`` and ``steps.csv``.

    ``data`` is read only for importance taylor, method blocks and several iterations; ``choice``, the output of
    search_pruning, only with ``from_search``; ``sensitivity``, the table of rank_groups, only for that ranking.

    Raises GateFailed when the target is out of reach or the search chose none, ConfigError when all layers are as
    narrow as the multiple or the layer ratios do not fit the network, ArtifactError when the network cannot be
    traced or does not run after the cut, or when the table is that of another network.
    """
    from tasks.parts.networks.checkpoint import load_checkpoint
    from tasks.parts.networks.zeros import layer_weights
    from tasks.parts.pruning.channels import check_layer_names, check_runs
    from tasks.parts.pruning.chosen_ratio import read_choice
    from tasks.parts.pruning.macs import measure_convs
    from tasks.parts.pruning.sensitivity import read_costs
    from tasks.parts.tables import write_table

    if cfg.from_search:
        cfg = replace(cfg, target_macs_ratio=read_choice(choice))
    network, card = load_checkpoint(checkpoint)
    size = (card.height, card.width)
    logger.info("%s: pruning %s to %g of the MACs", checkpoint, cfg.method, cfg.target_macs_ratio)
    before = measure_convs(network, size)
    if cfg.method is Method.weights:
        check_layer_names(cfg.layer_ratios, network, layer_weights(network))
    else:
        check_layer_names(cfg.layer_ratios, network)
    if cfg.needs_data:
        from tasks.parts.data.dataset import read_manifest
        from tasks.parts.data.input_card import check_same_classes

        check_same_classes(checkpoint, card.classes, read_manifest(data).classes, "distill")
    costs = read_costs(sensitivity) if cfg.ranking is Ranking.sensitivity else {}
    cut = Cut(cfg, data, size, before, costs)
    if cfg.iterations == 1:
        pruned = copy.deepcopy(network)
        cut.apply(pruned, progress=1.0)
        score_before, steps = None, [cut.describe(pruned, step=1, val_score=None, is_kept=True)]
    else:
        pruned, score_before, steps = _prune_step_by_step(cut, network, card, out / "resume")
    check_runs(pruned, *size, len(card.classes))
    if not card.network.name.is_foreign:  # which may have a fixed size
        check_runs(pruned, 2 * size[0], 2 * size[1], len(card.classes))
    after = measure_convs(pruned, size)
    _save_loadable(out / "model.safetensors", pruned, card)
    _write_removed(out / "removed.csv", before, after)
    write_table(out / "steps.csv", steps)
    report = _report(cfg, network, pruned, size, before, after, score_before, steps)
    logger.info(
        "pruned %.1f -> %.1f MMACs, %d channels, %.0f %% zeros",
        report.macs_before / 1e6,
        report.macs_after / 1e6,
        report.num_channels_removed,
        report.weight_sparsity * 100,
    )
    if report.layers_kept_whole:
        named = "; ".join(f"{layer} ({why})" for layer, why in report.layers_kept_whole.items())
        logger.info("%d layers keep all channels: %s", len(report.layers_kept_whole), named)
    return report


@dataclass(frozen=True)
class Cut:
    """What is to be removed from one network, in one step or several."""

    cfg: Config
    data: Path
    size: tuple[int, int]
    """Height and width for which MACs are counted."""
    before: Mapping[str, ConvSize]
    """The layers of the unpruned network."""
    costs: "Mapping[str, GroupCost]"
    """What the channels of each group cost, for ranking sensitivity."""

    def apply(self, network: "nn.Module", *, progress: float) -> None:
        """Prune in place until the given share of the whole cut is done."""
        from tasks.parts.pruning.channels import prune_channels
        from tasks.parts.pruning.macs import macs_budget

        cfg = self.cfg
        match cfg.method:
            case Method.channels:
                losses = self._batch_losses() if cfg.importance is Importance.taylor else None
                prune_channels(
                    network,
                    cfg,
                    size=self.size,
                    original=self.before,
                    progress=progress,
                    batch_losses=losses,
                    costs=self.costs,
                )
            case Method.blocks:
                from tasks.parts.pruning.blocks import prune_blocks
                from tasks.parts.pruning.recovery import read_batches

                sample = read_batches(
                    self.data, "calibration", batch_size=cfg.batch_size, num_images=cfg.num_images
                )
                limit_macs = macs_budget(self.before, cfg.target_macs_ratio, progress)
                batches = [images_NCHW for images_NCHW, _ in sample]
                prune_blocks(network, batches=batches, size=self.size, limit_macs=limit_macs)
            case Method.weights:
                _zero_weights(network, cfg, progress)
            case Method.two_of_four:
                from tasks.parts.pruning.weights import prune_two_of_four

                prune_two_of_four(network)

    def _batch_losses(self) -> BatchLosses:
        from tasks.parts.pruning.recovery import batch_losses

        return partial(
            batch_losses,
            data=self.data,
            trainer=self.cfg.recovery.trainer,
            num_images=self.cfg.num_images,
            batch_size=self.cfg.batch_size,
        )

    def describe(self, network: "nn.Module", *, step: int, val_score: float | None, is_kept: bool) -> Step:
        """Return the measurements of a network after a step."""
        from tasks.parts.pruning.macs import measure_convs, total_macs

        macs_ratio = total_macs(measure_convs(network, self.size)) / total_macs(self.before)
        return Step(step, macs_ratio, _sparsity(network), val_score, is_kept)


def _prune_step_by_step(
    cut: Cut, network: "nn.Module", card: "ModelCard", resume: Path
) -> "tuple[nn.Module, float, list[Step]]":
    """Prune a part, train, prune the next part; stop before the step that falls below the floor.

    Returns the network after the last kept step, the val score before the first, and all steps.
    """
    from tasks.parts.pruning.recovery import measure_val_score, recover

    cfg = cut.cfg
    batch_size = cfg.recovery.trainer.batch_size
    cut.apply(copy.deepcopy(network), progress=1.0)  # an impossible target fails before any training
    score_before = measure_val_score(network, card, cut.data, batch_size)
    floor = cfg.min_val_score_ratio * score_before
    kept, steps = network, []
    for step in range(1, cfg.iterations + 1):
        candidate = copy.deepcopy(kept)
        cut.apply(candidate, progress=step / cfg.iterations)
        recover(candidate, cut.data, cfg.recovery.trainer, resume / f"step_{step}")
        val_score = measure_val_score(candidate, card, cut.data, batch_size)
        steps.append(cut.describe(candidate, step=step, val_score=val_score, is_kept=val_score >= floor))
        logger.info(
            "step %d/%d: %.2f of the MACs, %.2f zeros, val score %.4f (floor %.4f)",
            step,
            cfg.iterations,
            steps[-1].macs_ratio,
            steps[-1].weight_sparsity,
            val_score,
            floor,
        )
        if val_score < floor:
            logger.warning("step %d is below the floor (prune.min_val_score_ratio) and is not kept", step)
            break
        kept = candidate
    return kept, score_before, steps


def _zero_weights(network: "nn.Module", cfg: Config, progress: float) -> None:
    """Set the smallest weights to zero: named layers by their own share, all others by `weight_sparsity`."""
    from tasks.parts.networks.zeros import layer_weights
    from tasks.parts.pruning.weights import zero_smallest_weights

    rest = [
        name
        for name in layer_weights(network)
        if name not in (str(network.classifier_layer), *cfg.layer_ratios)
    ]
    for name, ratio in cfg.layer_ratios.items():
        zero_smallest_weights(network, [name], ratio * progress)
    for names in [rest] if cfg.ranking is Ranking.across_layers else [[name] for name in rest]:
        if names:
            zero_smallest_weights(network, names, cfg.weight_sparsity * progress)


def _sparsity(network: "nn.Module") -> float:
    from tasks.parts.networks.zeros import count_zeros

    zeros = count_zeros(network)
    return sum(zeros.values()) / sum(network.get_parameter(f"{name}.weight").numel() for name in zeros)


def _report(
    cfg: Config,
    network: "nn.Module",
    pruned: "nn.Module",
    size: tuple[int, int],
    before: Mapping[str, ConvSize],
    after: Mapping[str, ConvSize],
    score_before: float | None,
    steps: list[Step],
) -> Report:
    from tasks.parts.networks.residual import residual_blocks
    from tasks.parts.networks.zeros import layers_without_pattern
    from tasks.parts.pruning.channel_groups import layers_kept_whole
    from tasks.parts.pruning.macs import total_macs

    removed = {name: _channels_removed(name, before, after) for name in before}
    left = residual_blocks(pruned)
    return Report(
        macs_before=total_macs(before),
        macs_after=total_macs(after),
        macs_ratio=total_macs(after) / total_macs(before),
        num_parameters_before=sum(parameter.numel() for parameter in network.parameters()),
        num_parameters_after=sum(parameter.numel() for parameter in pruned.parameters()),
        num_layers=sum(layer.has_channels for layer in before.values()),
        num_layers_pruned=sum(count > 0 for count in removed.values()),
        num_channels_removed=sum(removed.values()),
        blocks_removed=tuple(name for name in residual_blocks(network) if name not in left),
        weight_sparsity=_sparsity(pruned),
        layers_kept_whole=layers_kept_whole(network, size) if cfg.method is Method.channels else {},
        dense_layers=tuple(layers_without_pattern(pruned)) if cfg.method is Method.two_of_four else (),
        val_score_before=score_before,
        is_stopped_at_floor=not steps[-1].is_kept,
        steps=tuple(steps),
    )


def _save_loadable(path: Path, network: "nn.Module", card: "ModelCard") -> None:
    """Write a checkpoint and verify that it loads; delete it if it does not."""
    from tasks.parts.networks.checkpoint import load_checkpoint, save_checkpoint

    save_checkpoint(path, network, card)
    try:
        load_checkpoint(path)
    except ArtifactError as error:
        path.unlink()
        raise ArtifactError(
            f"The pruned network cannot be loaded again, so it is not kept: {error}"
        ) from error


def _channels_removed(name: str, before: Mapping[str, ConvSize], after: Mapping[str, ConvSize]) -> int:
    return before[name].out_channels - (after[name].out_channels if name in after else 0)


def _write_removed(path: Path, before: Mapping[str, ConvSize], after: Mapping[str, ConvSize]) -> None:
    """Write one row per layer, in the order of execution; layers of a removed block have 0 channels."""
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        columns = ("channels_before", "channels_after", "channels_removed", "macs_before", "macs_after")
        writer.writerow(("layer", *columns))
        for name, old in before.items():
            removed = _channels_removed(name, before, after)
            macs = after[name].macs if name in after else 0
            writer.writerow((name, old.out_channels, old.out_channels - removed, removed, old.macs, macs))
