"""Rank the layers of a float graph by their sensitivity to INT8, quantizing one layer at a time.

Each layer gets two measures: the SQNR of its own output when its inputs are exact (one run of a graph that computes
each layer twice covers all of them), and the change of the network's predictions when this layer alone runs in INT8
(one pass over a subset of the validation images per layer). The cost of both grows linearly with the number of
layers.
"""

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from tasks.core.bounds import AtLeast
from tasks.core.environment import versions
from tasks.core.errors import ArtifactError
from tasks.parts.cpu import int8_sums
from tasks.parts.onnx_session import ONNXRUNTIME
from tasks.parts.quantization.config import OpTypes

if TYPE_CHECKING:
    from onnx import ModelProto

    from tasks.parts.quantization.evaluation import GraphEvaluator
    from tasks.parts.quantization.qdq import TensorRange

logger = logging.getLogger(__name__)


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
    score_drop: float
    """Loss of the network's score when this layer alone runs in INT8; negative if the score rose."""
    disagreement: float
    """Share of pixels, or images, whose class changes when this layer alone runs in INT8, 0..1."""


@dataclass(frozen=True)
class Report:
    """The ranking."""

    metric: str
    """Metric of the scores."""
    float_score: float
    """Score of the float graph on the same validation images."""
    num_val_images: int
    num_passes: int
    """Passes over the validation images: one per layer, and one in float."""
    layers: tuple[RankedLayer, ...]
    """The layers, most sensitive first: by disagreement, then by SQNR."""


def environment(_: Config) -> dict[str, str]:
    """Return what the output depends on besides inputs, configuration and code."""
    return versions("onnx", *ONNXRUNTIME) | {"int8_sums": int8_sums()}


def rank_layers(cfg: Config, *, model: Path, ranges: Path, data: Path, out: Path) -> Report:
    """Write ``ranking.csv`` and ``ranking.png`` for the float graph `model` and the ranges of quantize_ptq.

    Raises ArtifactError when the graph is quantized already or a layer has no range.
    """
    from tasks.parts.onnx_graphs.graph import is_quantized, node_sources, read_graph
    from tasks.parts.onnx_graphs.macs import conv_macs
    from tasks.parts.quantization.evaluation import open_evaluator
    from tasks.parts.quantization.qdq import quantizable_nodes, read_ranges
    from tasks.parts.tables import write_table

    graph, (activations, known) = read_graph(model), read_ranges(ranges)
    if is_quantized(graph):
        raise ArtifactError(f"{model}: already has Q/DQ, expected the float graph of export_onnx.")
    evaluator = open_evaluator(
        graph, data, num_images=cfg.num_val_images, batch_size=cfg.batch_size, activations=activations
    )
    nodes = quantizable_nodes(graph, cfg.op_types)
    logger.info("rank_layers: %d layers of %s", len(nodes), model)
    sqnr_db = _own_sqnr_db(cfg, graph, known, data)
    costs = _costs_alone(cfg, graph, known, evaluator)
    macs, sources = conv_macs(graph), node_sources(graph)
    layers = [
        RankedLayer(
            node=node.name,
            op_type=node.op_type,
            module=sources.get(node.name, ("", ""))[0],
            source=sources.get(node.name, ("", ""))[1],
            macs_share=macs.get(node.name, 0) / sum(macs.values()),
            sqnr_db=sqnr_db[node.name],
            score_drop=costs[node.name][0],
            disagreement=costs[node.name][1],
        )
        for node in nodes
    ]
    layers.sort(key=lambda layer: (-layer.disagreement, layer.sqnr_db, layer.node))
    write_table(out / "ranking.csv", layers)
    _plot_ranking(out / "ranking.png", layers)
    return Report(
        evaluator.metric, evaluator.float_score, len(evaluator.images_NHWC), len(nodes) + 1, tuple(layers)
    )


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


def _costs_alone(
    cfg: Config, graph: "ModelProto", ranges: Mapping[str, "TensorRange"], evaluator: "GraphEvaluator"
) -> dict[str, tuple[float, float]]:
    """Return layer -> (drop of the network's score, disagreement) when this layer alone runs in INT8."""
    from tasks.parts.progress import tracked
    from tasks.parts.quantization.qdq import insert_qdq, quantizable_nodes

    names = [node.name for node in quantizable_nodes(graph, cfg.op_types)]
    costs = {}
    for name in tracked(names, "rank_layers"):
        others = set(names) - {name}
        evaluation = evaluator.evaluate(insert_qdq(graph, ranges, op_types=cfg.op_types, float_nodes=others))
        costs[name] = (evaluator.float_score - evaluation.score, 1 - evaluation.agreement)
    return costs


def _plot_ranking(path: Path, layers: Sequence[RankedLayer]) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(min(24, max(9, 0.16 * len(layers) + 3)), 7), layout="constrained")
    FigureCanvasAgg(figure)
    upper, lower = figure.subplots(2, 1, sharex=True)
    positions = range(len(layers))
    upper.bar(positions, [100 * layer.disagreement for layer in layers], color="#1f5fa8")
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
