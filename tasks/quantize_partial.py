"""Keep as few layers in float as the accuracy gate requires, and quantize the others to INT8.

This is a greedy search with a final elimination, guided by the ranking of rank_layers (the scheme of NNCF's
quantize_with_accuracy_control): while the INT8 graph loses more than the gate allows, the most promising layers are
tried in float one by one, on the real metric, and the best of them stays in float; these measurements re-rank the
others. Of a graph with many layers the first ones of the ranking move to float together, as few as the gate needs.
Once the gate holds, each float layer is tried in INT8 again and stays there if the gate still holds.
It starts from the graph of quantize_repaired. If that holds the gates, nothing is searched and nothing runs. A set of
layers whose graph does not run is left out.
"""

import logging
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from tasks.core.bounds import AtLeast, LessThan, MoreThan
from tasks.core.environment import versions
from tasks.core.errors import ArtifactError, BuildFailed, ConfigError
from tasks.parts.cpu import int8_sums
from tasks.parts.data.accuracy import ScoreLoss, Standing
from tasks.parts.onnx_session import ONNXRUNTIME
from tasks.parts.quantization.config import MANY_LAYERS, OpTypes

if TYPE_CHECKING:
    from onnx import ModelProto

    from tasks.parts.data.comparison import ImageResults
    from tasks.parts.progress import TimeBudget
    from tasks.parts.quantization.config import Activations
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
    exhaustive: bool
    """Whether the graph of quantize_repaired is judged again also where its recorded results hold the gates."""
    max_minutes: Annotated[float, MoreThan(0)]
    """After this time the search ends with the best graph so far."""


@dataclass(frozen=True)
class Step:
    """One step of the search."""

    action: str
    """``start``, ``float`` (a layer moved to float), ``together`` (so many layers from the top of the ranking were
    tried in float), ``int8`` (a layer moved back to INT8) or ``back`` (return to the best graph, because the gate
    never held)."""
    node: str
    """Name of the layer; empty for ``start``, ``together`` and ``back``."""
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
    score_in_int8: float | None
    """Score that the final graph would have if this layer ran in INT8 too; None if there was no time to tell, or if
    that graph does not run."""
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
    left_out: str
    """What was not searched, and why; empty if nothing was left out."""


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
    results: Path,
    ranking: Path,
    data: Path,
    out: Path,
) -> Report:
    """Write ``model.onnx`` (U8S8 Q/DQ, except for some layers), ``steps.csv`` and ``left_out.txt``.

    `repaired`, `ranges` and `results` (``images.npz``) are files of quantize_repaired, `ranking` is that of
    rank_layers, all for the same `model`; an empty ranking stands for the order of the graph. `reference` is the
    float graph whose accuracy counts as 100 %. If `model` itself certainly loses more than a gate allows, nothing is
    searched, and the graph is that of quantize_repaired.
    Raises ArtifactError when they are not those of the ranking, ConfigError for a name in `keep_float` that is not.
    """
    from tasks.parts.onnx_graphs.graph import read_graph
    from tasks.parts.quantization.left_out import LEFT_OUT_FILE
    from tasks.parts.quantization.qdq import insert_qdq, quantizable_nodes, read_ranges

    graph, (activations, known) = read_graph(repaired), read_ranges(ranges)
    ranked = _read_ranking(ranking, [node.name for node in quantizable_nodes(graph, cfg.op_types)])
    _check_kept(cfg, ranked)
    preset = {*cfg.keep_float, *_excluded(cfg, graph)}
    report = None if cfg.exhaustive or preset else _without_search(cfg, graph, results, data, len(ranked))
    kept: set[str] = set()
    if report is None:
        search = _open_search(cfg, graph, known, activations, model=model, reference=reference, data=data)
        kept, steps = _choose_float_layers(cfg, search, ranked, preset)
        report = _report(cfg, search, graph, ranked, preset, kept, steps)
    _write(insert_qdq(graph, known, op_types=cfg.op_types, float_nodes=kept), report, out)
    (out / LEFT_OUT_FILE).write_text(report.left_out, encoding="utf-8")
    for text in report.open_classes:
        logger.warning("quantize_partial: %s", text)
    if report.left_out:
        logger.info("quantize_partial: %s", report.left_out)
    logger.info(
        "quantize_partial: %d of %d layers in float, val score %.4f (float %.4f)",
        len(kept),
        len(ranked),
        report.score,
        report.float_score,
    )
    return report


def _write(quantized: "ModelProto", report: Report, out: Path) -> None:
    from tasks.parts.onnx_graphs.graph import write_graph
    from tasks.parts.tables import write_table

    write_graph(quantized, out / "model.onnx")
    write_table(out / "steps.csv", report.steps)


def _without_search(
    cfg: Config, graph: "ModelProto", results: Path, data: Path, num_layers: int
) -> Report | None:
    """Return the report of the repaired graph as it is, by its recorded results; None if it has to be searched."""
    from tasks.parts.data.class_limits import ClassLimits
    from tasks.parts.data.dataset import read_manifest
    from tasks.parts.data.judge import metric_name
    from tasks.parts.onnx_graphs.graph import read_card_of_graph
    from tasks.parts.quantization.gates import read_gates

    card = read_card_of_graph(graph)
    gates, int8 = read_gates(
        results,
        card.classes,
        max_score_rel_loss=cfg.max_score_rel_loss,
        max_parent_rel_loss=cfg.max_parent_rel_loss,
        class_limits=ClassLimits(cfg.class_limits, cfg.class_floors),
        stage="quantize_partial",
    )
    why = gates.why_no_search(int8)
    if not why:
        return None
    return Report(
        standing=gates.standing(int8),
        metric=metric_name(read_manifest(data), card.task),
        reference_score=gates.reference.score,
        float_score=gates.parent.score,
        score=int8.score,
        score_rel_loss=gates.score_rel_loss(int8),
        parent_rel_loss=gates.parent_rel_loss(int8),
        open_classes=gates.open_classes(int8),
        num_layers=num_layers,
        float_macs_share=0.0,
        num_judged=0,
        float_layers=(),
        steps=(Step("start", "", int8.score, 0),),
        left_out=f"no layer was tried in float: {why}",
    )


def _open_search(
    cfg: Config,
    graph: "ModelProto",
    ranges: Mapping[str, "TensorRange"],
    activations: Sequence["Activations"],
    *,
    model: Path,
    reference: Path,
    data: Path,
) -> "_Search":
    from tasks.parts.data.class_limits import ClassLimits
    from tasks.parts.onnx_graphs.graph import read_graph
    from tasks.parts.progress import TimeBudget
    from tasks.parts.quantization.gates import open_gates

    budget, parent = TimeBudget(cfg.max_minutes), read_graph(model)
    evaluator, gates = open_gates(
        parent,
        parent if model.samefile(reference) else read_graph(reference),
        data,
        max_score_rel_loss=cfg.max_score_rel_loss,
        max_parent_rel_loss=cfg.max_parent_rel_loss,
        class_limits=ClassLimits(cfg.class_limits, cfg.class_floors),
        stage="quantize_partial",
        num_images=cfg.num_val_images,
        batch_size=cfg.batch_size,
        activations=activations,
    )
    return _Search(cfg, graph, ranges, evaluator, gates, budget)


def _report(
    cfg: Config,
    search: "_Search",
    graph: "ModelProto",
    ranked: Sequence[str],
    preset: set[str],
    kept: set[str],
    steps: Sequence[Step],
) -> Report:
    evaluator, gates, results = search.evaluator, search.gates, search.results(kept)
    layers = _float_layers(search, graph, [node for node in ranked if node in kept], preset, kept)
    left_out = ""
    if search.budget.has_cut:
        left_out = (
            f"time was up after {cfg.max_minutes:g} min (quantize_partial.max_minutes) and "
            f"{search.num_judged} graphs; this is the best of them"
        )
    return Report(
        standing=gates.standing(results),
        metric=evaluator.metric,
        reference_score=gates.reference.score,
        float_score=evaluator.float_score,
        score=results.score,
        score_rel_loss=gates.score_rel_loss(results),
        parent_rel_loss=gates.parent_rel_loss(results),
        open_classes=gates.open_classes(results),
        num_layers=len(ranked),
        float_macs_share=sum(layer.macs_share for layer in layers),
        num_judged=search.num_judged,
        float_layers=layers,
        steps=tuple(steps),
        left_out=left_out,
    )


def _float_layers(
    search: "_Search", graph: "ModelProto", nodes: Sequence[str], preset: set[str], kept: set[str]
) -> tuple[FloatLayer, ...]:
    """Describe the layers in float; what each would cost in INT8 is measured while there is time."""
    from tasks.parts.onnx_graphs.graph import node_sources
    from tasks.parts.onnx_graphs.macs import conv_macs

    macs, sources = conv_macs(graph), node_sources(graph)
    total = sum(macs.values())
    layers = []
    for node in nodes:
        score = search.score_in_time(kept - {node})
        reason = (
            "it is not known what it would cost in INT8"
            if score is None
            else f"with it in INT8, the validation score would be {score:.4f}"
        )
        layers.append(
            FloatLayer(
                node=node,
                module=sources.get(node, ("", ""))[0],
                source=sources.get(node, ("", ""))[1],
                macs_share=macs.get(node, 0) / total,
                score_in_int8=score,
                reason="quantize_partial.keep_float or .exclusions" if node in preset else reason,
            )
        )
    return tuple(layers)


class _Search:
    """Evaluates each set of float layers once."""

    def __init__(
        self,
        cfg: Config,
        graph: "ModelProto",
        ranges: Mapping[str, "TensorRange"],
        evaluator: "GraphEvaluator",
        gates: "AccuracyGates",
        budget: "TimeBudget",
    ) -> None:
        from tasks.parts.progress import Progress
        from tasks.parts.quantization.qdq import QdqInserter

        self._cfg, self._inserter = cfg, QdqInserter(graph, ranges, op_types=cfg.op_types)
        self.evaluator, self.gates, self.budget = evaluator, gates, budget
        self._known: dict[frozenset[str], Evaluation | BuildFailed] = {}
        self._progress = Progress("quantize_partial")
        self.num_judged = 0

    def judge(self, kept: Iterable[str], rival: "Evaluation | None" = None) -> "Evaluation | BuildFailed":
        """Evaluate a graph with these layers in float; the error if it does not run.

        With a rival it may be evaluated on a part of the images alone, which show that it is worse.
        """
        names = frozenset(kept)
        if names in self._known:
            return self._known[names]
        most = self._cfg.max_float_layers * (self._cfg.num_candidates + 2) + 1
        self._progress.tell(self.num_judged, max(most, self.num_judged + 1), is_most=True)
        self.num_judged += 1
        try:
            found = self.evaluator.evaluate(self._inserter.insert(names), rival=rival)
        except BuildFailed as error:
            logger.warning("quantize_partial: %s in float is left out: %s", ", ".join(names), error)
            self._known[names] = error
            return error
        if found.is_complete:
            self._known[names] = found
        return found

    def results(self, kept: Iterable[str]) -> "ImageResults":
        """Return the results of a set; raise BuildFailed if it does not run."""
        found = self.judge(kept)
        if isinstance(found, BuildFailed):
            raise found
        return found.results

    def score_in_time(self, kept: Iterable[str]) -> float | None:
        """Return the score of a set; None if it does not run, or is not known and the time is up."""
        if frozenset(kept) not in self._known and self.is_over():
            return None
        found = self.judge(kept)
        return None if isinstance(found, BuildFailed) else found.score

    def holds(self, kept: Iterable[str]) -> bool:
        """Return whether a set runs and holds the gates."""
        found = self.judge(kept)
        return not isinstance(found, BuildFailed) and self.gates.hold(found.results)

    def rank(self, kept: Iterable[str]) -> tuple[float, ...]:
        """Return what sets are compared by; one that does not run is worse than any other."""
        found = self.judge(kept)
        if isinstance(found, BuildFailed):
            return (-math.inf,)
        return self.gates.rank(found, self.evaluator)

    def race(self, kept: set[str], nodes: Iterable[str]) -> tuple[str, dict[str, tuple[float, ...]]]:
        """Return the node that is best to keep in float besides `kept`, and the rank of each that runs.

        Those that a part of the images shows to be certainly worse than the best before them have the rank of that
        part. The node is empty if none runs, or no time is left.
        """
        best, rival = "", None
        ranks: dict[str, tuple[float, ...]] = {}
        for node in self.in_time(nodes):
            found = self.judge(kept | {node}, None if self.gates.class_limits else rival)
            if isinstance(found, BuildFailed):
                continue
            ranks[node] = self.gates.rank(found, self.evaluator)
            if found.is_complete and (not best or ranks[node] > ranks[best]):
                best, rival = node, found
        return best, ranks

    def in_time(self, nodes: Iterable[str]) -> Iterator[str]:
        """Yield the nodes until the time is up."""
        for node in nodes:
            if self.is_over():
                return
            yield node

    def is_over(self) -> bool:
        """Return whether the time is up; says so the first time."""
        if self.budget.is_spent and not self.budget.has_cut:
            logger.warning("quantize_partial: time is up after %d graphs", self.num_judged)
            self.budget.has_cut = True
        return self.budget.has_cut


def _choose_float_layers(
    cfg: Config, search: _Search, ranked: Sequence[str], preset: set[str]
) -> tuple[set[str], list[Step]]:
    kept, waiting = set(preset), [node for node in ranked if node not in preset]
    steps = [Step("start", "", search.results(kept).score, len(kept))]
    if search.gates.standing_of_float is Standing.unproven:
        logger.warning(
            "quantize_partial: too few validation images to prove the gates; measured losses decide"
        )
    if search.gates.standing_of_float is Standing.beyond:
        logger.warning("quantize_partial: the float graph itself fails the gate; nothing to search for")
        return kept, steps
    if len(ranked) > MANY_LAYERS:
        kept, moved = _move_together(cfg, search, kept, waiting, steps)
    else:
        kept, moved = _move_one_by_one(cfg, search, kept, waiting, steps)
    if search.holds(kept):
        for node in search.in_time(moved):
            if search.holds(kept - {node}):
                kept.remove(node)
                steps.append(Step("int8", node, search.results(kept).score, len(kept)))
    return kept, steps


def _move_together(
    cfg: Config, search: _Search, preset: set[str], waiting: Sequence[str], steps: list[Step]
) -> tuple[set[str], list[str]]:
    """Find how many layers from the top of the ranking have to be in float, by doubling and bisection.

    Return the set with them, or the best that was tried, and these layers from the last to the first.
    """
    most = min(len(waiting), cfg.max_float_layers - len(preset))
    failed, held, tried = 0, most + 1, [preset]
    while held - failed > 1 and not search.holds(preset) and not search.is_over():
        num = (failed + held) // 2 if held <= most else min(max(1, 2 * failed), most)
        tried.append(preset | set(waiting[:num]))
        if search.holds(tried[-1]):
            held = num
        else:
            failed = num
        found = search.judge(tried[-1])
        if not isinstance(found, BuildFailed):
            steps.append(Step("together", "", found.score, len(tried[-1])))
            logger.info("quantize_partial: %d layers in float, val score %.4f", len(tried[-1]), found.score)
    best = preset | set(waiting[:held]) if held <= most else max(tried, key=search.rank)
    return best, [node for node in reversed(waiting) if node in best]


def _move_one_by_one(
    cfg: Config, search: _Search, preset: set[str], waiting: list[str], steps: list[Step]
) -> tuple[set[str], list[str]]:
    """Move the best of some candidates to float, until the gate holds or too many layers are in float.

    Return the set with them, or the best before it if no set holds the gate, and these layers in their order.
    """
    kept, best_kept = set(preset), set(preset)
    while not search.holds(kept) and waiting and len(kept) < cfg.max_float_layers:
        before, tried = search.rank(kept), waiting[: cfg.num_candidates]
        best, ranks = search.race(kept, tried)
        if search.budget.has_cut and not ranks:
            break
        waiting = waiting[cfg.num_candidates :]
        if not ranks:
            continue
        kept.add(best)
        best_kept = max(best_kept, set(kept), key=search.rank)  # on a tie the first: fewer layers
        steps.append(Step("float", best, search.results(kept).score, len(kept)))
        logger.info("quantize_partial: %s stays in float, val score %.4f", best, steps[-1].score)
        others = [node for node in ranks if node != best]
        helpful = sorted(
            (node for node in others if ranks[node] > before), key=ranks.__getitem__, reverse=True
        )
        useless = [node for node in others if ranks[node] <= before]
        waiting = [*helpful, *waiting, *useless]
    if not search.holds(kept) and best_kept != kept:
        kept = best_kept
        steps.append(Step("back", "", search.results(kept).score, len(kept)))
    return kept, [step.node for step in steps if step.action == "float"]


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
    """Return the node names, most sensitive first; in the order of the graph if nothing was ranked.

    Raises ArtifactError unless they are the layers of the graph.
    """
    from tasks.parts.tables import read_table

    ranked = list(read_table(path, "node", stage="rank_layers", may_be_empty=True))
    if not ranked:
        return list(layers)
    if sorted(ranked) != sorted(layers):
        raise ArtifactError(
            f"{path}: the {len(ranked)} ranked layers are not the {len(layers)} of the graph. Run rank_layers "
            "again on this graph, with the same op_types."
        )
    return ranked
