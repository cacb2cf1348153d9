"""Choose the pruning ratio by the latency and the accuracy that each ratio gives on a target.

MACs do not predict latency, so the network is pruned to each ratio, trained briefly, built and timed. Every network,
the unpruned one included, gets the same short training, so the scores are comparable only with each other. All
engines are timed in one process in interleaved rounds, because latencies of separate measurements vary by more than
the ratios differ.
"""

import copy
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from tasks.core.bounds import AtLeast, Distinct, LessThan, MinItems, MoreThan
from tasks.core.environment import versions
from tasks.core.errors import ArtifactError, BuildFailed, ConfigError, GateFailed, TargetMismatch
from tasks.parts.engines.machine import target_environment
from tasks.parts.engines.runtimes import CHECKPOINT_RUNTIMES
from tasks.parts.engines.target import Target
from tasks.parts.measuring.machine_state import measuring_environment
from tasks.parts.pruning.config import ChannelPruning, Ranking
from tasks.parts.training.config import TrainerConfig

if TYPE_CHECKING:
    from torch import nn

    from tasks.parts.networks.model_card import ModelCard

logger = logging.getLogger(__name__)

UNPRUNED = 1.0
CONTROL = "control"


@dataclass(frozen=True)
class Config:
    """Which ratios, on which target, and how much work goes into each."""

    target: Target
    """Target on which latency is measured."""
    target_macs_ratios: Annotated[
        list[Annotated[float, MoreThan(0), LessThan(1)]],
        MinItems(1),
        Distinct(),
        "the unpruned network is always measured",
    ]
    """Shares of the MACs that may remain; each is tried. More: finer curve, slower."""
    pruning: ChannelPruning
    """How channels are chosen; its own target_macs_ratio is replaced by each of target_macs_ratios."""
    num_images: Annotated[int, AtLeast(1)]
    """Images of the train split, on which importance taylor is measured; the same as in prune."""
    batch_size: Annotated[int, AtLeast(1)]
    """Images in one batch of importance taylor."""
    trainer: TrainerConfig
    """Short training after each cut, on the labels only."""
    num_train_images: Annotated[int, AtLeast(1)]
    """Images of the train split that each recovery sees. More: closer to a full fine-tuning, slower."""
    num_val_images: Annotated[int, AtLeast(1)]
    """Images of the val split, on which each network is evaluated. More: steadier score, slower."""
    num_rounds: Annotated[int, AtLeast(5)]
    """Rounds of timing; each engine runs one burst per round. More: narrower intervals."""
    opset: int
    """ONNX operator set of the graphs."""
    max_minutes: Annotated[float, MoreThan(0)]
    """After this time no further ratio is trained; the choice is made among those that were."""

    def __post_init__(self) -> None:
        if self.trainer.num_devices * self.trainer.num_nodes > 1:
            raise ConfigError(
                f"trainer has num_devices {self.trainer.num_devices} and num_nodes {self.trainer.num_nodes}, "
                "expected 1 and 1: the recoveries are short and run one after the other."
            )


@dataclass(frozen=True)
class Candidate:
    """Measurements of one ratio; None if it cannot be reached."""

    target_macs_ratio: float
    """Share of the MACs that should remain; 1 is the unpruned network."""
    macs: int | None
    """MACs that remain, for one image of the training size."""
    macs_ratio: float | None
    """Share of the MACs that remains."""
    latency_ms_p50: float | None
    """Median latency at batch 1."""
    latency_ratio: float | None
    """Latency relative to the unpruned network: median over the rounds."""
    latency_ratio_low: float | None
    """Lower end of the 95 % interval of latency_ratio, corrected for the number of ratios."""
    latency_ratio_high: float | None
    """Upper end of the 95 % interval of latency_ratio."""
    val_score: float | None
    """Score on the validation images after the short recovery, in torch."""
    is_knee: bool
    """Whether this is the knee of the Pareto front of latency and score."""
    note: str
    """Why the ratio cannot be reached; empty if it can."""


@dataclass(frozen=True)
class Report:
    """The curve and the ratio that was chosen on it."""

    target: str
    metric: str
    """Metric of the scores: mIoU, or the user's own (model.metric)."""
    target_macs_ratio: float | None
    """The choice among the pruned networks on the front that are faster than the unpruned one: the knee, otherwise
    the one with the highest score. None if there is no such network."""
    reason: str
    """Why there is no choice; empty if there is one."""
    has_knee: bool
    """Whether the choice is the knee. If not, no pruned network stands out, and a larger ratio or no pruning may do
    as well."""
    aa_ratio_spread: float | None
    """Largest distance from 1 of the 95 % interval of the latency ratio of the unpruned engine to itself: smaller
    differences in latency are noise. None if no ratio can be reached, so that nothing was timed."""
    candidates: tuple[Candidate, ...]
    """All candidates by rising ratio, the unpruned network last if it was timed."""


@dataclass(frozen=True)
class _Latency:
    """Latency of one engine, and its ratio to that of the unpruned one, with the interval of the ratio."""

    ms_p50: float
    ratio: float
    low: float
    high: float


def environment(cfg: Config) -> dict[str, str] | None:
    """Return what networks, engines and latencies depend on; None without the target's GPU or runtime."""
    engine = target_environment(cfg.target)
    networks = versions("lightning", "torch", "torch-pruning", "transformers", *cfg.trainer.extra_packages)
    return None if engine is None else {**networks, **engine, **measuring_environment()}


def measures(_: Config) -> bool:
    """Return True: while this runs, nothing else may be measured on this machine."""
    return True


def search_pruning(cfg: Config, *, checkpoint: Path, sensitivity: Path, data: Path, out: Path) -> Report:
    """Write ``curve.csv``, ``curve.png`` and ``choice.json`` for a network that is to be pruned.

    ``sensitivity``, the table of rank_groups, is read only for that ranking.

    The choice is the knee of the front of latency and score (Kneedle, `measuring.pareto.find_knee`). If no ratio can
    be reached, nothing is timed or drawn, and the report gives the reason; this is no error, because a run may prune
    in another way. Raises TargetMismatch or BuildFailed when the target cannot be built here, ConfigError when the
    layer ratios do not fit the network, ArtifactError for weights that are not finite, a data set with other
    classes or the table of another network.
    """
    from tasks.parts.data.dataset import read_manifest
    from tasks.parts.data.input_card import Task, check_same_classes
    from tasks.parts.data.judge import metric_name
    from tasks.parts.networks.checkpoint import load_checkpoint
    from tasks.parts.pruning.chosen_ratio import write_choice
    from tasks.parts.pruning.macs import measure_convs, total_macs
    from tasks.parts.tables import write_table

    network, card = load_checkpoint(checkpoint)
    manifest = read_manifest(data)
    check_same_classes(checkpoint, card.classes, manifest.classes, "distill")
    metric = metric_name(manifest, Task.segmentation)
    ratios, size = sorted(cfg.target_macs_ratios), (card.height, card.width)
    logger.info("search_pruning: %s on %s, ratios %s", checkpoint, cfg.target.name, ratios)
    networks, notes = _prune_all(cfg, network, size, data, sensitivity)
    scores, latencies, aa_ratio_spread = (
        _measure(cfg, networks, card, data, out) if networks else ({}, {}, None)
    )
    late = f"there was no time for it within {cfg.max_minutes:g} min (search_pruning.max_minutes)"
    notes |= dict.fromkeys((ratio for ratio in networks if ratio not in scores), late)
    macs = {ratio: total_macs(measure_convs(networks[ratio], size)) for ratio in scores}
    candidates = _candidates(notes, macs, scores, latencies)
    choice = _choose(candidates)
    ratio, reason = (choice.target_macs_ratio, "") if choice else (None, _why_none(candidates))
    write_table(out / "curve.csv", candidates)
    if networks:
        _plot_curve(out / "curve.png", candidates, choice, cfg.target.name, metric)
    write_choice(out / "choice.json", ratio, reason)
    if choice:
        logger.info(
            "search_pruning: chosen %g of the MACs, %.2f of the latency%s; A/A spread %.1f %%",
            ratio,
            choice.latency_ratio,
            "" if choice.is_knee else " (no knee: the most accurate of the faster networks)",
            100 * (aa_ratio_spread or 0.0),
        )
    else:
        logger.warning("search_pruning: no ratio was chosen: %s", reason)
    return Report(
        target=cfg.target.name,
        metric=metric,
        target_macs_ratio=ratio,
        reason=reason,
        has_knee=choice is not None and choice.is_knee,
        aa_ratio_spread=aa_ratio_spread,
        candidates=tuple(candidates),
    )


def _prune_all(
    cfg: Config, network: "nn.Module", size: tuple[int, int], data: Path, sensitivity: Path
) -> tuple[dict[float, "nn.Module"], dict[float, str]]:
    """Return ratio -> network, the unpruned one last, and ratio -> reason for the ratios that cannot be reached.

    If no ratio can be reached, no network is returned at all.
    """
    from tasks.parts.pruning.channel_groups import list_groups
    from tasks.parts.pruning.channels import check_layer_names, check_multiple, prune_channels
    from tasks.parts.pruning.recovery import batch_losses
    from tasks.parts.pruning.sensitivity import check_costs, read_costs

    check_layer_names(cfg.pruning.layer_ratios, network)
    losses = partial(
        batch_losses,
        data=data,
        trainer=cfg.trainer,
        num_images=cfg.num_images,
        batch_size=cfg.batch_size,
    )
    networks: dict[float, nn.Module] = {}
    notes: dict[float, str] = {}
    ratios = sorted(cfg.target_macs_ratios)
    try:
        widths = {group.root: len(group.importance) for group in list_groups(network, size)}
        check_multiple(widths, cfg.pruning.channel_multiple)
    except (ArtifactError, ConfigError) as error:
        return networks, dict.fromkeys(ratios, str(error))
    costs = read_costs(sensitivity) if cfg.pruning.ranking is Ranking.sensitivity else {}
    check_costs(costs, widths)
    for ratio in ratios:
        pruned = copy.deepcopy(network)
        try:
            prune_channels(
                pruned,
                replace(cfg.pruning, target_macs_ratio=ratio),
                size=size,
                batch_losses=losses,
                costs=costs,
            )
        except (ArtifactError, GateFailed) as error:
            logger.warning("search_pruning: ratio %g cannot be reached: %s", ratio, error)
            notes[ratio] = str(error)
        else:
            networks[ratio] = pruned
    return networks | ({UNPRUNED: network} if networks else {}), notes


def _measure(
    cfg: Config, networks: Mapping[float, "nn.Module"], card: "ModelCard", data: Path, out: Path
) -> tuple[dict[float, float], dict[float, _Latency], float]:
    """Return the score and the latency of each ratio, and the A/A spread; of those for which there was time.

    The unpruned engine is built first, before any training, so that a target that cannot be built fails early.
    """
    from tempfile import TemporaryDirectory

    from tasks.parts.progress import TimeBudget
    from tasks.parts.pruning.recovery import recover

    budget = TimeBudget(cfg.max_minutes)
    with TemporaryDirectory(dir=out) as scratch:
        engines = {UNPRUNED: _build(cfg, networks[UNPRUNED], card, data, Path(scratch, f"{UNPRUNED}"))}
        small_data = _chosen_images(cfg, data, out / "resume" / "dataset")
        scores = {}
        for number, (ratio, network) in enumerate(networks.items(), 1):
            if budget.is_spent and ratio != UNPRUNED:
                logger.warning("search_pruning: no time is left for ratio %g", ratio)
                continue
            logger.info("search_pruning: network %d of %d, ratio %g", number, len(networks), ratio)
            scores[ratio] = recover(network, small_data, cfg.trainer, out / "resume" / f"{ratio}")
            if ratio != UNPRUNED:
                engines[ratio] = _build(cfg, network, card, data, Path(scratch, f"{ratio}"))
        logger.info("search_pruning: timing %d engines", len(engines))
        latencies, aa_ratio_spread = _measure_latencies(engines, data, cfg.num_rounds)
    return scores, latencies, aa_ratio_spread


def _chosen_images(cfg: Config, data: Path, small_data: Path) -> Path:
    """Write the images that the recoveries use, unless an interrupted run has already written them."""
    import shutil

    from tasks.parts.data.dataset import MANIFEST_FILE
    from tasks.parts.data.dataset_writer import write_chosen_images

    if not (small_data / MANIFEST_FILE).is_file():
        shutil.rmtree(small_data, ignore_errors=True)
        write_chosen_images(data, small_data, {"train": cfg.num_train_images, "val": cfg.num_val_images})
    return small_data


def _build(cfg: Config, network: "nn.Module", card: "ModelCard", data: Path, out: Path) -> Path:
    """Build the engine of a network as build_engine does.

    Raises TargetMismatch when this machine cannot build it, BuildFailed when the runtime cannot.
    """
    import torch

    from tasks.parts.builders.build import build
    from tasks.parts.data.dataset import calibration_images
    from tasks.parts.engines.manifest import ENGINE_FOLDER, EngineStatus
    from tasks.parts.networks.checkpoint import save_checkpoint
    from tasks.parts.onnx_graphs.export import export_graph
    from tasks.parts.onnx_graphs.graph import write_graph

    out.mkdir()
    if cfg.target.runtime in CHECKPOINT_RUNTIMES:
        model = out / "model.safetensors"
        save_checkpoint(model, network, card)
    else:
        model = out / "model.onnx"
        write_graph(export_graph(network, card, height=card.height, width=card.width, opset=cfg.opset), model)
    num_threads = torch.get_num_threads()
    report = build(cfg.target.plain, model=model, images=calibration_images(data), out=out)
    torch.set_num_threads(num_threads)  # eager engines set the target's number
    if report.status is not EngineStatus.built:
        kind = TargetMismatch if report.status is EngineStatus.skipped else BuildFailed
        raise kind(
            f"search_pruning.target is {cfg.target.name}, build {report.status}: {report.reason}. Set "
            "search_pruning.target to a target that this machine can build."
        )
    return out / ENGINE_FOLDER


def _measure_latencies(
    engines: Mapping[float, Path], data: Path, num_rounds: int
) -> tuple[dict[float, _Latency], float]:
    """Time all engines, the unpruned one twice, in interleaved rounds; return latencies and A/A spread."""
    from contextlib import ExitStack

    import numpy as np

    from tasks.parts.builders.agreement import read_probe_images
    from tasks.parts.data.dataset import calibration_images
    from tasks.parts.engines.open_engine import open_engine
    from tasks.parts.engines.rounds import rounds_ms
    from tasks.parts.measuring.intervals import estimate_ratio

    folders = {f"{ratio}": folder for ratio, folder in engines.items()}
    unpruned = f"{UNPRUNED}"
    with ExitStack() as stack:
        runners = {
            name: stack.enter_context(open_engine(folder))
            for name, folder in (folders | {CONTROL: folders[unpruned]}).items()
        }
        calls = {name: runner.run for name, runner in runners.items()}
        images_NCHW = read_probe_images(calibration_images(data), runners[unpruned].manifest.card)[:1]
        rounds_ms(calls, images_NCHW, 1)  # warm-up
        rounds = rounds_ms(calls, images_NCHW, num_rounds)
    medians = {name: np.array([np.median(burst) for burst in bursts]) for name, bursts in rounds.items()}
    latencies = {}
    for ratio in engines:
        p50 = float(np.median(np.concatenate(rounds[f"{ratio}"])))
        relative = estimate_ratio(
            medians[f"{ratio}"] / medians[unpruned], num_comparisons=max(1, len(engines) - 1)
        )
        latencies[ratio] = _Latency(p50, relative.value, relative.low, relative.high)
    return latencies, estimate_ratio(medians[CONTROL] / medians[unpruned]).spread


def _candidates(
    notes: Mapping[float, str],
    macs: Mapping[float, int],
    scores: Mapping[float, float],
    latencies: Mapping[float, _Latency],
) -> list[Candidate]:
    """Join the measurements, sorted by rising ratio, and mark the knee."""
    from tasks.parts.measuring.pareto import find_knee

    measured = sorted(macs)
    index = find_knee([(latencies[ratio].ratio, scores[ratio]) for ratio in measured])
    knee = None if index is None else measured[index]
    rows = [
        Candidate(
            target_macs_ratio=ratio,
            macs=macs[ratio],
            macs_ratio=macs[ratio] / macs[UNPRUNED],
            latency_ms_p50=latencies[ratio].ms_p50,
            latency_ratio=latencies[ratio].ratio,
            latency_ratio_low=latencies[ratio].low,
            latency_ratio_high=latencies[ratio].high,
            val_score=scores[ratio],
            is_knee=ratio == knee,
            note="",
        )
        for ratio in measured
    ]
    rows += [
        Candidate(ratio, None, None, None, None, None, None, None, False, note)
        for ratio, note in notes.items()
    ]
    return sorted(rows, key=lambda row: row.target_macs_ratio)


def _choose(candidates: Sequence[Candidate]) -> Candidate | None:
    """Return the knee, otherwise the highest score, among the pruned networks on the front that are faster.

    Faster means that the whole interval of the latency ratio to the unpruned network is below 1.
    """
    from tasks.parts.measuring.pareto import pareto_front

    measured = [row for row in candidates if row.macs is not None]
    front = pareto_front([(row.latency_ratio or 0.0, row.val_score or 0.0) for row in measured])
    faster = [
        row
        for row, is_on_front in zip(measured, front, strict=True)
        if is_on_front and row.target_macs_ratio != UNPRUNED and (row.latency_ratio_high or 0.0) < 1
    ]
    return max(faster, key=lambda row: (row.is_knee, row.val_score or 0.0), default=None)


def _why_none(candidates: Sequence[Candidate]) -> str:
    """Return the reason why no candidate can be chosen."""
    measured = [row.target_macs_ratio for row in candidates if row.target_macs_ratio != UNPRUNED and row.macs]
    notes = [row.note for row in candidates if row.note]
    if not measured:
        return f"none of the ratios can be reached. The reason for the largest: {notes[-1]}"
    return (
        f"none of the networks pruned to {measured} of the MACs is both on the front of latency and score and "
        "significantly faster than the unpruned one (latency_ratio_high below 1)"
    )


def _plot_curve(
    path: Path, candidates: Sequence[Candidate], choice: Candidate | None, target: str, metric: str
) -> None:
    """Draw the score over latency with the front, each point labelled with its share of the MACs."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    from tasks.parts.measuring.pareto import pareto_front

    figure = Figure(figsize=(7.2, 4.8), dpi=130, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    rows = [row for row in candidates if row.macs is not None]
    points = [(row.latency_ms_p50 or 0.0, row.val_score or 0.0) for row in rows]
    front = sorted(point for point, is_kept in zip(points, pareto_front(points), strict=True) if is_kept)
    axes.plot(*zip(*front, strict=True), color="#9fb8d6", linewidth=1.5, zorder=1)
    axes.plot(*zip(*points, strict=True), "o", color="#1f5fa8", markersize=8, zorder=3)
    if choice:
        chosen = choice.latency_ms_p50 or 0.0, choice.val_score or 0.0
        label = "knee" if choice.is_knee else "chosen (no knee)"
        axes.plot(*chosen, "o", ms=17, mfc="none", mec="#e07b39", mew=2, zorder=2, linestyle="", label=label)
        axes.legend(loc="lower right", frameon=False, fontsize=9)
    for row, point in zip(rows, points, strict=True):
        text = f"{row.macs_ratio:.0%} of the MACs"
        axes.annotate(text, point, xytext=(9, -12), textcoords="offset points", fontsize=8)
    axes.set_xlabel(f"latency p50 on {target}, batch 1 (ms)")
    axes.set_ylabel(f"val {metric} after the same short training")
    axes.margins(x=0.18, y=0.12)
    axes.grid(color="#e9e7e2", linewidth=0.7)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, metadata={"Software": None})
