"""Rank the layers of a float graph by their sensitivity to INT8, quantizing one layer at a time.

Each layer gets two measures: the SQNR of its own output when its inputs are exact (one run of a graph that computes
each layer twice covers all of them), and the change of the network's predictions when this layer alone runs in INT8
(one pass over a subset of the validation images per layer, those with the lowest SQNR first). Of many layers, a few
images tell which ones change the outputs most, and only these get their passes. If the graph of quantize_repaired
holds the gates, quantize_partial needs no ranking, and nothing runs.
"""

import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeVar

from tasks.core.bounds import AtLeast, LessThan, MoreThan
from tasks.core.environment import versions
from tasks.core.errors import ArtifactError, BuildFailed
from tasks.parts.cpu import int8_sums
from tasks.parts.onnx_session import ONNXRUNTIME
from tasks.parts.quantization.config import MANY_LAYERS, OpTypes

if TYPE_CHECKING:
    from onnx import ModelProto, NodeProto

    from tasks.parts.progress import TimeBudget
    from tasks.parts.quantization.evaluation import Evaluation, GraphEvaluator
    from tasks.parts.quantization.qdq import TensorRange

logger = logging.getLogger(__name__)

Measure = TypeVar("Measure")

_NUM_TOGETHER = 8
"""Layers that are tried in one session, each alone in INT8. More: fewer passes over what is in front of all of them,
more memory."""
_SCREENED = 256
"""Of more than MANY_LAYERS so many, whose own SQNR is lowest, are tried on a few images."""
_FEW_IMAGES = 4
_MOST = 8
"""So many of these, which change the outputs most, are tried on all images."""


@dataclass(frozen=True)
class Config:
    """Which layers to rank, and on how many images."""

    op_types: OpTypes
    """ONNX operators that count as layers, the same as in quantize_ptq."""
    num_images: Annotated[int, AtLeast(1)]
    """Calibration images for the SQNR."""
    num_val_images: Annotated[int, AtLeast(0), "0 takes all"]
    """Validation images for the predictions. More: steadier, slower (one pass per layer)."""
    batch_size: Annotated[int, AtLeast(1)]
    """Images in one batch; changes memory and speed only."""
    max_score_rel_loss: Annotated[float, AtLeast(0), LessThan(1)]
    """Gate: share of the reference's validation score that may be lost, as in quantize_partial."""
    max_parent_rel_loss: Annotated[float, AtLeast(0), LessThan(1)]
    """Gate: share of the validation score of the float graph itself that may be lost, as in quantize_partial."""
    class_limits: dict[str, Annotated[float, AtLeast(0), LessThan(1)]]
    """Gate: class, or ``*`` -> share of its IoU or recall in the reference that may be lost, likewise."""
    class_floors: dict[str, Annotated[float, MoreThan(0), LessThan(1)]]
    """Gate: class, or ``*`` -> IoU or recall that it has to reach, likewise."""
    exhaustive: bool
    """Whether the layers are ranked also where no layer has to stay in float."""
    max_minutes: Annotated[float, MoreThan(0)]
    """After this time the layers that are left are ranked by their SQNR alone."""


@dataclass(frozen=True)
class RankedLayer:
    """Sensitivity of one layer to INT8."""

    node: str
    """Name of the node in the graph."""
    op_type: str
    module: str
    """Dotted name of the layer's module in the torch network."""
    source: str
    """Line of the network's code that creates the layer, as file:line."""
    macs_share: float
    """Share of the multiply-accumulates of the graph, 0..1."""
    sqnr_db: float
    """Signal-to-noise ratio of the layer's own output, fed exact inputs, in dB."""
    score_drop: float | None
    """Loss of the network's score when this layer alone runs in INT8; negative if the score rose. None if there was
    no time for it, or if that graph does not run."""
    disagreement: float | None
    """Share of pixels, or images, whose class changes when this layer alone runs in INT8, 0..1; None likewise."""


@dataclass(frozen=True)
class Report:
    """The ranking."""

    metric: str
    """Metric of the scores."""
    float_score: float | None
    """Score of the float graph on the same validation images; None if nothing was ranked."""
    num_val_images: int
    num_passes: int
    """Passes over the validation images: one per layer that was tried on all of them, and one in float."""
    layers: tuple[RankedLayer, ...]
    """The layers, most sensitive first: by disagreement, then by SQNR. Those without a disagreement are last, by what
    they change in the outputs of a few images, if that was tried, and by SQNR."""
    left_out: str
    """What was not ranked, and why; empty if nothing was left out."""


def environment(_: Config) -> dict[str, str]:
    """Return what the output depends on besides inputs, configuration and code."""
    return versions("onnx", *ONNXRUNTIME) | {"int8_sums": int8_sums()}


def rank_layers(cfg: Config, *, model: Path, ranges: Path, results: Path, data: Path, out: Path) -> Report:
    """Write ``ranking.csv`` and ``ranking.png`` for the float graph `model` and the ranges of quantize_ptq.

    `results` (``images.npz``) is what the graph of quantize_repaired gets right; if that leaves nothing to search,
    the table has no rows and nothing is drawn.
    Raises ArtifactError when the graph is quantized already or a layer has no range.
    """
    from tasks.parts.onnx_graphs.graph import is_quantized, read_graph
    from tasks.parts.progress import TimeBudget
    from tasks.parts.quantization.evaluation import open_evaluator
    from tasks.parts.quantization.qdq import quantizable_nodes, read_ranges
    from tasks.parts.tables import write_empty_table, write_table

    graph, (activations, known) = read_graph(model), read_ranges(ranges)
    if is_quantized(graph):
        raise ArtifactError(f"{model}: already has Q/DQ, expected the float graph of export_onnx.")
    why = "" if cfg.exhaustive else _why_nothing(cfg, graph, results)
    if why:
        logger.info("rank_layers: %s", why)
        write_empty_table(out / "ranking.csv", RankedLayer)
        return Report(_metric(graph, data), None, 0, 0, (), why)
    budget = TimeBudget(cfg.max_minutes)
    evaluator = open_evaluator(
        graph,
        data,
        num_images=cfg.num_val_images,
        batch_size=cfg.batch_size,
        activations=activations,
        num_together=_NUM_TOGETHER + 1,
    )
    nodes = quantizable_nodes(graph, cfg.op_types)
    logger.info("rank_layers: %d layers of %s", len(nodes), model)
    sqnr_db = _own_sqnr_db(cfg, graph, known, data)
    alone = _Alone(cfg, graph, known, evaluator, budget)
    names = sorted(sqnr_db, key=sqnr_db.__getitem__)
    changes = alone.changes(names[:_SCREENED]) if len(names) > MANY_LAYERS else {}
    order = sorted(names, key=lambda name: -changes.get(name, 0.0))
    costs = alone.costs(order[:_MOST] if changes else order)
    layers = _layers(graph, nodes, sqnr_db, costs, changes)
    write_table(out / "ranking.csv", layers)
    _plot_ranking(out / "ranking.png", layers)
    return Report(
        evaluator.metric,
        evaluator.float_score,
        len(evaluator.images_NHWC),
        len(costs) + 1,
        tuple(layers),
        _left_out(cfg, len(costs), len(nodes), is_cut=budget.has_cut, is_screened=bool(changes)),
    )


def _why_nothing(cfg: Config, graph: "ModelProto", results: Path) -> str:
    """Return why no layers have to be ranked, in a sentence; empty if they have to."""
    from tasks.parts.data.class_limits import ClassLimits
    from tasks.parts.onnx_graphs.graph import read_card_of_graph
    from tasks.parts.quantization.gates import read_gates

    gates, int8 = read_gates(
        results,
        read_card_of_graph(graph).classes,
        max_score_rel_loss=cfg.max_score_rel_loss,
        max_parent_rel_loss=cfg.max_parent_rel_loss,
        class_limits=ClassLimits(cfg.class_limits, cfg.class_floors),
        stage="rank_layers",
    )
    why = gates.why_no_search(int8)
    return f"no layer was ranked: {why} (quantize_repaired.exhaustive=true asks for it)" if why else ""


def _metric(graph: "ModelProto", data: Path) -> str:
    from tasks.parts.data.dataset import read_manifest
    from tasks.parts.data.judge import metric_name
    from tasks.parts.onnx_graphs.graph import read_card_of_graph

    return metric_name(read_manifest(data), read_card_of_graph(graph).task)


def _left_out(cfg: Config, num_measured: int, num_layers: int, *, is_cut: bool, is_screened: bool) -> str:
    tried = f"{num_measured} of {num_layers} layers were tried in INT8 on all images"
    others = "the others are ranked by a few images or by their own SQNR"
    if is_cut:
        return f"time was up after {cfg.max_minutes:g} min (rank_layers.max_minutes): {tried}, {others}"
    if is_screened:
        return (
            f"{tried}: of the {min(_SCREENED, num_layers)} with the lowest SQNR those that change the outputs of "
            f"{_FEW_IMAGES} images most; {others}"
        )
    return ""


def _layers(
    graph: "ModelProto",
    nodes: Sequence["NodeProto"],
    sqnr_db: Mapping[str, float],
    costs: Mapping[str, tuple[float, float] | None],
    changes: Mapping[str, float],
) -> list[RankedLayer]:
    """Join the measures, most sensitive layer first."""
    from tasks.parts.onnx_graphs.graph import node_sources
    from tasks.parts.onnx_graphs.macs import conv_macs

    macs, sources = conv_macs(graph), node_sources(graph)
    total, layers = sum(macs.values()), []
    for node in nodes:
        drop, disagreement = costs.get(node.name) or (None, None)
        layers.append(
            RankedLayer(
                node=node.name,
                op_type=node.op_type,
                module=sources.get(node.name, ("", ""))[0],
                source=sources.get(node.name, ("", ""))[1],
                macs_share=macs.get(node.name, 0) / total,
                sqnr_db=sqnr_db[node.name],
                score_drop=drop,
                disagreement=disagreement,
            )
        )

    def rank(layer: RankedLayer) -> tuple[float, float, float, str]:
        change = changes.get(layer.node, 0.0) if layer.disagreement is None else 0.0
        return -_known(layer.disagreement), -change, layer.sqnr_db, layer.node

    return sorted(layers, key=rank)


def _known(disagreement: float | None) -> float:
    """Return what layers are ranked by; without a measure they come last."""
    return -1.0 if disagreement is None else disagreement


def _own_sqnr_db(
    cfg: Config, graph: "ModelProto", ranges: Mapping[str, "TensorRange"], data: Path
) -> dict[str, float]:
    """Run each layer twice on the same exact inputs, in float and in INT8, and compare inside the graph."""
    import numpy as np

    from tasks.parts.data.dataset import normalised_batches
    from tasks.parts.data.subsets import open_chosen_images
    from tasks.parts.onnx_graphs.graph import read_card_of_graph
    from tasks.parts.onnx_graphs.signal_to_noise import sqnr_db
    from tasks.parts.onnx_session import open_session
    from tasks.parts.quantization.qdq import add_quantized_twins

    twinned, noise_of, signal_of = add_quantized_twins(graph, ranges, op_types=cfg.op_types)
    session, card = open_session(twinned), read_card_of_graph(graph)
    names = [*noise_of.values(), *signal_of.values()]
    images_NHWC = open_chosen_images(data, "calibration", cfg.num_images)
    energies = dict.fromkeys(names, 0.0)
    for images_NCHW in normalised_batches(images_NHWC, card, cfg.batch_size):
        batch_energies = session.run(names, {graph.graph.input[0].name: images_NCHW})
        for name, energy in zip(names, batch_energies, strict=True):
            energies[name] += float(np.sum(energy))
    return {node: sqnr_db(energies[signal_of[node]], energies[noise_of[node]]) for node in noise_of}


class _Alone:
    """Measures what each layer costs if it alone runs in INT8, some layers in one session."""

    def __init__(
        self,
        cfg: Config,
        graph: "ModelProto",
        ranges: Mapping[str, "TensorRange"],
        evaluator: "GraphEvaluator",
        budget: "TimeBudget",
    ) -> None:
        from tasks.parts.onnx_graphs.foreign_branches import branching_nodes
        from tasks.parts.quantization.qdq import QdqInserter, quantizable_nodes

        self._graph, self._evaluator, self._budget = graph, evaluator, budget
        self._inserter = QdqInserter(graph, ranges, op_types=cfg.op_types)
        self._names = {node.name for node in quantizable_nodes(graph, cfg.op_types)}
        self._step = 1 if branching_nodes(graph) else _NUM_TOGETHER

    def costs(self, names: Sequence[str]) -> dict[str, tuple[float, float] | None]:
        """Return layer -> (drop of the network's score, disagreement).

        None for a layer whose graph does not run. Layers for which there is no time are missing.
        """
        base = self._evaluator.float_score
        return {
            name: None if found is None else (base - found.score, 1 - found.agreement)
            for name, found in self._in_time(names, self._evaluate, "all images")
        }

    def changes(self, names: Sequence[str]) -> dict[str, float]:
        """Return layer -> share of the energy of the outputs that it changes on a few images.

        Layers whose graphs do not run, or for which there is no time, are missing, and all of a graph with branches,
        whose variants share no session.
        """
        if self._step == 1:
            return {}
        found = self._in_time(names, self._change, f"{_FEW_IMAGES} images")
        return {name: change for name, change in found if change is not None}

    def _evaluate(self, some: Sequence[str]) -> "list[Evaluation]":
        if len(some) > 1:
            return self._evaluator.evaluate_together(self._graph, self._graph_of, some)
        return [self._evaluator.evaluate(self._graph_of(some[0]))]

    def _change(self, some: Sequence[str]) -> list[float]:
        return self._evaluator.noise_together(self._graph, self._graph_of, some, _FEW_IMAGES)

    def _graph_of(self, name: str) -> "ModelProto":
        return self._inserter.insert(self._names - {name})

    def _in_time(
        self, names: Sequence[str], measure: "Callable[[Sequence[str]], Sequence[Measure]]", images: str
    ) -> "Iterator[tuple[str, Measure | None]]":
        from tasks.parts.progress import tracked

        chunks = [names[start : start + self._step] for start in range(0, len(names), self._step)]
        for chunk in tracked(chunks, f"rank_layers ({self._step} layers at a time, {images})", self._budget):
            yield from zip(chunk, self._if_it_runs(chunk, measure), strict=True)

    def _if_it_runs(
        self, some: Sequence[str], measure: "Callable[[Sequence[str]], Sequence[Measure]]"
    ) -> "list[Measure | None]":
        try:
            return [*measure(some)]
        except BuildFailed as error:
            if len(some) > 1:
                return [found for name in some for found in self._if_it_runs([name], measure)]
            logger.warning("rank_layers: %s alone in INT8 is left out: %s", some[0], error)
            return [None]


def _plot_ranking(path: Path, layers: Sequence[RankedLayer]) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(min(24, max(9, 0.16 * len(layers) + 3)), 7), layout="constrained")
    FigureCanvasAgg(figure)
    upper, lower = figure.subplots(2, 1, sharex=True)
    positions = range(len(layers))
    upper.bar(positions, [100 * (layer.disagreement or 0) for layer in layers], color="#1f5fa8")
    upper.set_ylabel("predictions that change (%)")
    upper.set_title("Cost of INT8 with one layer quantized at a time, most sensitive layer first")
    lower.bar(positions, [layer.sqnr_db for layer in layers], color="#9fb8d6")
    lower.set_ylabel("SQNR of its own output (dB)")
    step = max(1, math.ceil(len(layers) / 60))
    shown = range(0, len(layers), step)
    lower.set_xticks(
        list(shown),
        [(layers[index].module or layers[index].node)[-32:] for index in shown],
        rotation=90,
        fontsize=7,
    )
    for axes in (upper, lower):
        axes.grid(axis="y", alpha=0.3)
    figure.savefig(path, dpi=110, metadata={"Software": ""})
