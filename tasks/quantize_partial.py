"""Keep as few layers in float as the accuracy gate requires, and quantize the others to INT8.

This is a greedy search with a final elimination, guided by the ranking of rank_layers (the scheme of NNCF's
quantize_with_accuracy_control): while the INT8 graph loses more than the gate allows, the most promising layers are
tried in float one by one, on the real metric, and the best of them stays in float; these measurements re-rank the
others. Once the gate holds, each float layer is tried in INT8 again and stays there if the gate still holds.
It starts from the graph of quantize_repaired.
"""

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from tasks.core.bounds import AtLeast, LessThan, MoreThan
from tasks.core.environment import versions
from tasks.core.errors import ArtifactError, ConfigError
from tasks.parts.cpu import int8_sums
from tasks.parts.data.accuracy import ScoreLoss, Standing
from tasks.parts.onnx_session import ONNXRUNTIME
from tasks.parts.quantization.config import OpTypes

if TYPE_CHECKING:
    from onnx import ModelProto

    from tasks.parts.data.comparison import ImageResults
    from tasks.parts.quantization.evaluation import Evaluation, GraphEvaluator
    from tasks.parts.quantization.gates import AccuracyGates
    from tasks.parts.quantization.qdq import TensorRange

logger = logging.getLogger(__name__)


class Exclusion(StrEnum):
    """Layers that practitioners often leave in float without measuring."""

    first = "first"
    """The layers that read the image."""
    logits = "logits"
    """The last layers with weights before the output."""
    resize_neighbours = "resize_neighbours"
    """Resize, and the layers directly before and after it."""


@dataclass(frozen=True)
class Config:
    """The gate, and the limits of the search."""

    op_types: OpTypes
    """ONNX operators whose inputs become INT8, the same as in quantize_ptq."""
    max_score_rel_loss: Annotated[float, AtLeast(0), LessThan(1)]
    """Gate: share of the reference's validation score that may be lost, as in select_engine."""
    max_parent_rel_loss: Annotated[float, AtLeast(0), LessThan(1)]
    """Gate: share of the validation score of the float graph itself that may be lost, as in select_engine."""
    class_limits: dict[str, Annotated[float, AtLeast(0), LessThan(1)]]
    """Gate: class, or ``*`` -> share of its IoU or recall in the reference that may be lost, as in select_engine."""
    class_floors: dict[str, Annotated[float, MoreThan(0), LessThan(1)]]
    """Gate: class, or ``*`` -> IoU or recall that it has to reach, as in select_engine."""
    num_candidates: Annotated[int, AtLeast(1)]
    """Layers tried in each step, from the top of the ranking. More: better choice, slower."""
    max_float_layers: Annotated[int, AtLeast(0)]
    """Number of layers in float at which the search gives up; the best graph found is still written: highest score
    (above the float graph's: most agreement with it), then fewest layers in float."""
    keep_float: list[str]
    """Names of nodes that always stay in float. Empty: the search alone decides."""
    exclusions: list[Exclusion]
    """Kinds of layers that always stay in float."""
    num_val_images: Annotated[int, AtLeast(0), "0 takes all"]
    """Validation images on which graphs are evaluated."""
    batch_size: Annotated[int, AtLeast(1)]
    """Images in one batch; changes memory and speed only."""


@dataclass(frozen=True)
class Step:
    """One step of the search."""

    action: str
    """``start``, ``float`` (a layer moved to float), ``int8`` (it moved back to INT8) or ``back`` (return to the best
    graph, because the gate never held)."""
    node: str
    """Name of the layer; empty for ``start`` and ``back``."""
    score: float
    """Score of the graph on the validation images."""
    num_float_layers: int


@dataclass(frozen=True)
class FloatLayer:
    """A layer that the search kept in float, and why."""

    node: str
    module: str
    source: str
    macs_share: float
    """Share of the multiply-accumulates of the graph, 0..1."""
    score_in_int8: float
    """Score that the final graph would have if this layer ran in INT8 too."""
    reason: str


@dataclass(frozen=True)
class Report:
    """Result of the search."""

    standing: Standing
    """Whether the losses of the written graph are within all gates; unproven if there are too few images to tell."""
    metric: str
    """Metric of the scores."""
    reference_score: float
    """Score of the reference graph on the validation images."""
    float_score: float
    """Score of the float graph that is quantized, on the validation images."""
    score: float
    """Score of the written graph on the validation images."""
    score_rel_loss: ScoreLoss
    """Share of the reference's score that the written graph loses."""
    parent_rel_loss: ScoreLoss
    """Share of the float graph's score that the written graph loses."""
    open_classes: tuple[str, ...]
    """Limits of classes that the written graph does not hold for certain, in words."""
    num_layers: int
    """Number of layers that can be quantized."""
    float_macs_share: float
    """Share of the multiply-accumulates that run in float."""
    num_judged: int
    """Number of graphs that were evaluated on the validation images."""
    float_layers: tuple[FloatLayer, ...]
    steps: tuple[Step, ...]


def environment(_: Config) -> dict[str, str]:
    """Return what the output depends on besides inputs, configuration and code."""
    return versions("onnx", *ONNXRUNTIME) | {"int8_sums": int8_sums()}


def quantize_partial(
    cfg: Config,
    *,
    model: Path,
    repaired: Path,
    reference: Path,
    ranges: Path,
    ranking: Path,
    data: Path,
    out: Path,
) -> Report:
    """Write ``model.onnx`` (U8S8 Q/DQ, except for some layers) and ``steps.csv``.

    `repaired` and `ranges` are the float graph and the ranges of quantize_repaired, `ranking` is the file of
    rank_layers, all for the same `model`. `reference` is the float graph whose accuracy counts as 100 %. If `model`
    itself certainly loses more than a gate allows, nothing is searched, and the graph is that of quantize_repaired.
    Raises ArtifactError when they are not those of the ranking, ConfigError for a name in `keep_float` that is not.
    """
    from tasks.parts.data.class_limits import ClassLimits
    from tasks.parts.onnx_graphs.graph import node_sources, read_graph, write_graph
    from tasks.parts.onnx_graphs.macs import conv_macs
    from tasks.parts.quantization.gates import open_gates
    from tasks.parts.quantization.qdq import insert_qdq, quantizable_nodes, read_ranges
    from tasks.parts.tables import write_table

    graph, (activations, known) = read_graph(repaired), read_ranges(ranges)
    ranked = _read_ranking(ranking, [node.name for node in quantizable_nodes(graph, cfg.op_types)])
    _check_kept(cfg, ranked)
    evaluator, gates = open_gates(
        read_graph(model),
        read_graph(reference),
        data,
        max_score_rel_loss=cfg.max_score_rel_loss,
        max_parent_rel_loss=cfg.max_parent_rel_loss,
        class_limits=ClassLimits(cfg.class_limits, cfg.class_floors),
        stage="quantize_partial",
        num_images=cfg.num_val_images,
        batch_size=cfg.batch_size,
        activations=activations,
    )
    search = _Search(cfg, graph, known, evaluator, gates)
    preset = {*cfg.keep_float, *_excluded(cfg, graph)}
    kept, steps = _choose_float_layers(cfg, search, ranked, preset)
    macs, sources = conv_macs(graph), node_sources(graph)
    total = sum(macs.values())
    layers = tuple(
        FloatLayer(
            node=node,
            module=sources.get(node, ("", ""))[0],
            source=sources.get(node, ("", ""))[1],
            macs_share=macs.get(node, 0) / total,
            score_in_int8=search.score(kept - {node}),
            reason="quantize_partial.keep_float or .exclusions"
            if node in preset
            else f"with it in INT8, the validation score would be {search.score(kept - {node}):.4f}",
        )
        for node in ranked
        if node in kept
    )
    write_graph(insert_qdq(graph, known, op_types=cfg.op_types, float_nodes=kept), out / "model.onnx")
    write_table(out / "steps.csv", steps)
    score = search.score(kept)
    report = Report(
        standing=gates.standing(search.results(kept)),
        metric=evaluator.metric,
        reference_score=gates.reference.score,
        float_score=evaluator.float_score,
        score=score,
        score_rel_loss=gates.score_rel_loss(search.results(kept)),
        parent_rel_loss=gates.parent_rel_loss(search.results(kept)),
        open_classes=gates.open_classes(search.results(kept)),
        num_layers=len(ranked),
        float_macs_share=sum(layer.macs_share for layer in layers),
        num_judged=search.num_judged,
        float_layers=layers,
        steps=tuple(steps),
    )
    for text in report.open_classes:
        logger.warning("quantize_partial: %s", text)
    logger.info(
        "quantize_partial: %d of %d layers in float, val score %.4f (float %.4f)",
        len(kept),
        len(ranked),
        score,
        evaluator.float_score,
    )
    return report


class _Search:
    """Evaluates each set of float layers once."""

    def __init__(
        self,
        cfg: Config,
        graph: "ModelProto",
        ranges: Mapping[str, "TensorRange"],
        evaluator: "GraphEvaluator",
        gates: "AccuracyGates",
    ) -> None:
        self._cfg, self._graph, self._ranges, self._evaluator = cfg, graph, ranges, evaluator
        self.gates = gates
        self._known: dict[frozenset[str], Evaluation] = {}

    @property
    def num_judged(self) -> int:
        return len(self._known)

    def _evaluation(self, kept: Iterable[str]) -> "Evaluation":
        from tasks.parts.quantization.qdq import insert_qdq

        names = frozenset(kept)
        if names not in self._known:
            candidate = insert_qdq(self._graph, self._ranges, op_types=self._cfg.op_types, float_nodes=names)
            self._known[names] = self._evaluator.evaluate(candidate)
        return self._known[names]

    def results(self, kept: Iterable[str]) -> "ImageResults":
        return self._evaluation(kept).results

    def score(self, kept: Iterable[str]) -> float:
        return self.results(kept).score

    def rank(self, kept: Iterable[str]) -> tuple[float, ...]:
        return self.gates.rank(self._evaluation(kept), self._evaluator)


def _choose_float_layers(
    cfg: Config, search: _Search, ranked: Sequence[str], preset: set[str]
) -> tuple[set[str], list[Step]]:
    kept, waiting = set(preset), [node for node in ranked if node not in preset]
    best_kept = set(kept)
    steps = [Step("start", "", search.score(kept), len(kept))]
    if search.gates.standing_of_float is Standing.unproven:
        logger.warning(
            "quantize_partial: too few validation images to prove the gates; measured losses decide"
        )
    if search.gates.standing_of_float is Standing.beyond:
        logger.warning("quantize_partial: the float graph itself fails the gate; nothing to search for")
        return kept, steps
    while not search.gates.hold(search.results(kept)) and waiting and len(kept) < cfg.max_float_layers:
        before, tried = search.rank(kept), waiting[: cfg.num_candidates]
        ranks = {node: search.rank(kept | {node}) for node in tried}
        best = max(tried, key=ranks.__getitem__)
        kept.add(best)
        best_kept = max(best_kept, set(kept), key=search.rank)  # on a tie the first: fewer layers
        steps.append(Step("float", best, search.score(kept), len(kept)))
        logger.info("quantize_partial: %s stays in float, val score %.4f", best, search.score(kept))
        others = [node for node in tried if node != best]
        helpful = sorted(
            (node for node in others if ranks[node] > before), key=ranks.__getitem__, reverse=True
        )
        useless = [node for node in others if ranks[node] <= before]
        waiting = [*helpful, *waiting[cfg.num_candidates :], *useless]
    if not search.gates.hold(search.results(kept)) and best_kept != kept:
        kept = best_kept
        steps.append(Step("back", "", search.score(kept), len(kept)))
    if search.gates.hold(search.results(kept)):
        for node in [step.node for step in steps if step.action == "float"]:
            if search.gates.hold(search.results(kept - {node})):
                kept.remove(node)
                steps.append(Step("int8", node, search.score(kept), len(kept)))
    return kept, steps


def _excluded(cfg: Config, graph: "ModelProto") -> set[str]:
    """Return the layers that `exclusions` selects."""
    from tasks.parts.onnx_graphs.macs import LAYER_TYPES
    from tasks.parts.quantization.qdq import quantizable_nodes

    nodes = list(graph.graph.node)
    constants = {tensor.name for tensor in graph.graph.initializer}
    makers = {name: node for node in nodes for name in node.output}
    layers = {node.name for node in quantizable_nodes(graph, cfg.op_types)}
    excluded: set[str] = set()
    if Exclusion.first in cfg.exclusions:
        images = {value.name for value in graph.graph.input}
        excluded |= {node.name for node in nodes if images & set(node.input)}
    if Exclusion.logits in cfg.exclusions:
        waiting = [makers[value.name] for value in graph.graph.output]
        while waiting:
            node = waiting.pop()
            if node.op_type in LAYER_TYPES and node.input[1] in constants:
                excluded.add(node.name)
            else:
                waiting += [makers[name] for name in node.input if name in makers]
    if Exclusion.resize_neighbours in cfg.exclusions:
        resizes = [node for node in nodes if node.op_type == "Resize"]
        made = {name for node in resizes for name in node.output}
        excluded |= {node.name for node in resizes} | {node.name for node in nodes if made & set(node.input)}
        excluded |= {makers[node.input[0]].name for node in resizes if node.input[0] in makers}
    return excluded & layers


def _check_kept(cfg: Config, ranked: Sequence[str]) -> None:
    unknown = sorted(set(cfg.keep_float) - set(ranked))
    if unknown:
        raise ConfigError(
            f"quantize_partial.keep_float names {', '.join(unknown)}, expected layers of the graph: "
            f"{', '.join(sorted(ranked))}."
        )


def _read_ranking(path: Path, layers: Sequence[str]) -> list[str]:
    """Return the node names, most sensitive first; raise ArtifactError unless they are the layers of the graph."""
    from tasks.parts.tables import read_table

    ranked = list(read_table(path, "node", stage="rank_layers"))
    if sorted(ranked) != sorted(layers):
        raise ArtifactError(
            f"{path}: the {len(ranked)} ranked layers are not the {len(layers)} of the graph. Run rank_layers "
            "again on this graph, with the same op_types."
        )
    return ranked
