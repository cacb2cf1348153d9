"""Regain accuracy that INT8 loses, without training: equalize channels, correct biases, round weights by outputs.

Each repair changes the float graph before the Q/DQ pairs are inserted, and is kept if the INT8 graph is better on the
validation images: by its score, and above the float graph's score by its agreement with it. Rounding, the slowest, is
tried only while the gates do not hold. If the INT8 graph of quantize_ptq holds the gates for certain, or as measured
and is as good as the float graph, nothing is tried and nothing runs. A repair that fails is left out. If the best
graph certainly misses a gate, so that some layers have to stay in float, repairs that were fitted to the errors of
INT8 in all layers are not kept.
"""

import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from tasks.core.bounds import AtLeast, LessThan, MoreThan
from tasks.core.environment import versions
from tasks.core.errors import ArtifactError, BuildFailed, first_line
from tasks.parts.cpu import int8_sums
from tasks.parts.data.accuracy import ScoreLoss, Standing
from tasks.parts.onnx_session import ONNXRUNTIME
from tasks.parts.quantization.config import OpTypes

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from onnx import ModelProto

    from tasks.parts.data.comparison import ImageResults
    from tasks.parts.progress import TimeBudget
    from tasks.parts.quantization.config import Activations, Calibrator
    from tasks.parts.quantization.evaluation import GraphEvaluator
    from tasks.parts.quantization.gates import AccuracyGates
    from tasks.parts.quantization.qdq import TensorRange

logger = logging.getLogger(__name__)

_SEED = 0


class Repair(StrEnum):
    """A change of the float graph that helps INT8."""

    none = "none"
    """The graph of quantize_ptq."""
    equalization = "equalization"
    """Channels of activations get similar magnitudes; the float graph stays the same function."""
    equalization_without_limits = "equalization_without_limits"
    """The same, after each ReLU6 became a ReLU, which channels can be scaled through."""
    bias_correction = "bias_correction"
    """Biases make up for the mean error of each layer."""
    weight_rounding = "weight_rounding"
    """Weights are fitted and rounded so that the outputs of each layer change least; biases are corrected too."""


_Changed = tuple["ModelProto", Mapping[str, "TensorRange"]]
"""A repaired float graph and its ranges."""

_FITTED = {Repair.bias_correction, Repair.weight_rounding}
"""Repairs that make up for errors of earlier layers. They harm where quantize_partial leaves these in float."""


@dataclass(frozen=True)
class Config:
    """The gates, and the images that repairs learn from."""

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
    num_images: Annotated[int, AtLeast(1)]
    """Calibration images for the ranges of an equalized graph, as in quantize_ptq."""
    num_layer_images: Annotated[int, AtLeast(1)]
    """Calibration images on which layers are compared to correct biases and round weights, fewer where their
    activations do not fit into 512 MiB. More: better, slower, and more memory."""
    num_val_images: Annotated[int, AtLeast(0), "0 takes all"]
    """Validation images on which graphs are evaluated."""
    batch_size: Annotated[int, AtLeast(1)]
    """Images in one batch; changes memory and speed only."""
    exhaustive: bool
    """Whether every repair is tried also where PTQ leaves nothing to regain."""
    max_minutes: Annotated[float, MoreThan(0)]
    """After this time no further repair is begun, and one that is under way stops at the layer it is at."""


@dataclass(frozen=True)
class Step:
    """One repair that was tried."""

    repair: Repair
    score: float | None
    """Score of the INT8 graph on the validation images, in the worst type of activations; None if it failed."""
    kept: bool
    """Whether it is a part of the written graph."""
    standing: Standing | None
    """Whether its losses are within all gates; None if it failed."""
    reason: str
    """Why it failed; empty if it did not."""


@dataclass(frozen=True)
class Report:
    """Which repairs were kept, and what they gained."""

    standing: Standing
    """Whether the losses of the written graph are within all gates; unproven if there are too few images to tell."""
    metric: str
    """Metric of the scores."""
    reference_score: float
    """Score of the reference graph on the validation images."""
    float_score: float
    """Score of the float graph that is quantized, on the validation images."""
    ptq_score: float
    """Score of the INT8 graph of quantize_ptq on the validation images."""
    score: float
    """Score of the written graph on the validation images."""
    score_rel_loss: ScoreLoss
    """Share of the reference's score that the written graph loses."""
    parent_rel_loss: ScoreLoss
    """Share of the float graph's score that the written graph loses."""
    open_classes: tuple[str, ...]
    """Limits of classes that the written graph does not hold for certain, in words."""
    repairs: tuple[Repair, ...]
    """Repairs that the written graph has, in order."""
    steps: tuple[Step, ...]
    """Everything that was tried, in order."""
    left_out: str
    """What was not tried, and why; empty if nothing was left out."""


@dataclass(frozen=True)
class _Candidate:
    repairs: tuple[Repair, ...]
    graph: "ModelProto"
    """The repaired float graph."""
    ranges: "Mapping[str, TensorRange]"
    results: "ImageResults"
    """Of its INT8 graph."""
    activations: "Activations"
    """Type of activations with which it scored them."""
    rank: tuple[float, ...]
    """Larger is better."""


@dataclass(frozen=True)
class _Failed:
    repair: Repair
    reason: str


@dataclass
class _Found:
    """What the search has found so far."""

    tried: "list[_Candidate | _Failed]"
    not_tried: list[Repair]
    """Repairs for which there was no time."""
    is_cut_short: bool = False
    """Whether the time was up before a repair reached the last layer."""

    @property
    def candidates(self) -> list[_Candidate]:
        return [item for item in self.tried if isinstance(item, _Candidate)]


def environment(_: Config) -> dict[str, str]:
    """Return what the output depends on besides inputs, configuration and code."""
    return versions("onnx", *ONNXRUNTIME) | {"int8_sums": int8_sums()}


def quantize_repaired(
    cfg: Config, *, model: Path, reference: Path, ranges: Path, results: Path, data: Path, out: Path
) -> Report:
    """Write ``model.onnx`` (U8S8 Q/DQ), ``float.onnx`` (the float graph it was made from), ``ranges.json``,
    ``steps.csv``, ``images.npz`` (results of reference, float and INT8 graph) and ``left_out.txt``.

    `reference` is the float graph whose accuracy counts as 100 %, `ranges` and `results` (``images.npz``) are files
    of quantize_ptq for `model`.
    """
    from tasks.parts.data.comparison import RESULTS_FILE, write_results
    from tasks.parts.onnx_graphs.graph import read_graph, write_graph
    from tasks.parts.quantization.gates import FLOAT, INT8, REFERENCE
    from tasks.parts.quantization.left_out import LEFT_OUT_FILE
    from tasks.parts.quantization.qdq import insert_qdq, read_calibrator, read_ranges, write_ranges
    from tasks.parts.tables import write_table

    graph, (activations, known) = read_graph(model), read_ranges(ranges)
    calibrator = read_calibrator(ranges)
    base = graph if model.samefile(reference) else read_graph(reference)
    gates, ptq, metric = _judged_before(cfg, graph, base, results, data)
    left_out = "" if cfg.exhaustive else _why_nothing(gates, ptq)
    if left_out:
        best = _Candidate((Repair.none,), graph, known, ptq, activations[0], ())
        found = _Found([best], [])
    else:
        gates, found = _search(cfg, graph, base, known, activations, calibrator=calibrator[1:], data=data)
        ptq, best = found.candidates[0].results, _choose(found.candidates, gates)
        left_out = _cut_short(cfg, found)
    steps = [_step(item, best, gates) for item in found.tried]
    write_graph(insert_qdq(best.graph, best.ranges, op_types=cfg.op_types), out / "model.onnx")
    write_graph(best.graph, out / "float.onnx")
    write_ranges(out / "ranges.json", calibrator[0], activations, best.ranges)
    write_table(out / "steps.csv", steps)
    write_results(out / RESULTS_FILE, {REFERENCE: gates.reference, FLOAT: gates.parent, INT8: best.results})
    (out / LEFT_OUT_FILE).write_text(left_out, encoding="utf-8")
    report = _report(metric, gates, ptq, best, steps, left_out)
    for text in report.open_classes:
        logger.warning("quantize_repaired: %s", text)
    if left_out:
        logger.info("quantize_repaired: %s", left_out)
    logger.info(
        "quantize_repaired: val score %.4f (PTQ %.4f, float %.4f)",
        report.score,
        report.ptq_score,
        report.float_score,
    )
    return report


def _judged_before(
    cfg: Config, graph: "ModelProto", reference: "ModelProto", results: Path, data: Path
) -> "tuple[AccuracyGates, ImageResults, str]":
    """Return the gates, what PTQ gets right in each image, and the metric; only the reference runs, if it has to."""
    from tasks.parts.data.class_limits import ClassLimits
    from tasks.parts.data.comparison import read_results
    from tasks.parts.data.dataset import read_manifest
    from tasks.parts.data.judge import metric_name
    from tasks.parts.onnx_graphs.graph import read_card_of_graph
    from tasks.parts.quantization.evaluation import open_evaluator
    from tasks.parts.quantization.gates import FLOAT, INT8, AccuracyGates

    card, limits = read_card_of_graph(graph), ClassLimits(cfg.class_limits, cfg.class_floors)
    limits.check_names(card.classes, "quantize_repaired")
    parent, ptq = (read_results(results, name, stage="quantize_ptq") for name in (FLOAT, INT8))
    hundred = parent
    if reference is not graph:
        hundred = open_evaluator(
            reference, data, num_images=parent.num_images, batch_size=cfg.batch_size
        ).float_results
    gates = AccuracyGates(
        hundred, cfg.max_score_rel_loss, parent, cfg.max_parent_rel_loss, card.classes, limits
    )
    return gates, ptq, metric_name(read_manifest(data), card.task)


def _why_nothing(gates: "AccuracyGates", ptq: "ImageResults") -> str:
    """Return why no repair has to be tried; empty if they have to."""
    if not gates.hold(ptq):
        return ""
    if gates.standing(ptq) is Standing.within:
        why = "the INT8 graph of quantize_ptq holds all gates for certain"
    elif ptq.score >= gates.parent.score:
        why = "the INT8 graph of quantize_ptq holds all gates as measured and is as good as the float graph"
    else:
        return ""
    return f"no repair was tried: {why} (quantize_repaired.exhaustive=true tries all)"


def _cut_short(cfg: Config, found: _Found) -> str:
    """Return what there was no time for; empty if the search came to its end."""
    if not found.not_tried and not found.is_cut_short:
        return ""
    missing = ", ".join(found.not_tried) or "the rest of the last repair"
    return f"time was up after {cfg.max_minutes:g} min (quantize_repaired.max_minutes), without {missing}"


def _step(item: "_Candidate | _Failed", best: _Candidate, gates: "AccuracyGates") -> Step:
    if isinstance(item, _Failed):
        return Step(item.repair, None, False, None, item.reason)
    repair = item.repairs[-1]
    return Step(repair, item.results.score, repair in best.repairs, gates.standing(item.results), "")


def _report(
    metric: str,
    gates: "AccuracyGates",
    ptq: "ImageResults",
    best: _Candidate,
    steps: list[Step],
    left_out: str,
) -> Report:
    return Report(
        standing=gates.standing(best.results),
        metric=metric,
        reference_score=gates.reference.score,
        float_score=gates.parent.score,
        ptq_score=ptq.score,
        score=best.results.score,
        score_rel_loss=gates.score_rel_loss(best.results),
        parent_rel_loss=gates.parent_rel_loss(best.results),
        open_classes=gates.open_classes(best.results),
        repairs=best.repairs[1:],
        steps=tuple(steps),
        left_out=left_out,
    )


def _search(
    cfg: Config,
    graph: "ModelProto",
    reference: "ModelProto",
    ranges: "Mapping[str, TensorRange]",
    activations: "tuple[Activations, ...]",
    *,
    calibrator: "tuple[Calibrator, float]",
    data: Path,
) -> "tuple[AccuracyGates, _Found]":
    """Return the gates, and the graph of quantize_ptq with each repair of the best graph before it."""
    from tasks.parts.data.class_limits import ClassLimits
    from tasks.parts.progress import TimeBudget
    from tasks.parts.quantization.gates import open_gates
    from tasks.parts.quantization.qdq import insert_qdq

    budget = TimeBudget(cfg.max_minutes)
    evaluator, gates = open_gates(
        graph,
        reference,
        data,
        max_score_rel_loss=cfg.max_score_rel_loss,
        max_parent_rel_loss=cfg.max_parent_rel_loss,
        class_limits=ClassLimits(cfg.class_limits, cfg.class_floors),
        stage="quantize_repaired",
        num_images=cfg.num_val_images,
        batch_size=cfg.batch_size,
        activations=activations,
    )

    def judge(
        repairs: tuple[Repair, ...], repaired: "ModelProto", known: "Mapping[str, TensorRange]"
    ) -> _Candidate:
        evaluation = evaluator.evaluate(insert_qdq(repaired, known, op_types=cfg.op_types))
        logger.info("%s: val score %.4f", repairs[-1], evaluation.score)
        rank = gates.rank(evaluation, evaluator)
        return _Candidate(repairs, repaired, known, evaluation.results, evaluation.activations, rank)

    found = _Found([judge((Repair.none,), graph, ranges)], [])
    _try_repairs(cfg, found, judge, evaluator, gates, calibrator=calibrator, data=data, budget=budget)
    found.is_cut_short = budget.has_cut
    return gates, found


def _try_repairs(
    cfg: Config,
    found: _Found,
    judge: "Callable[..., _Candidate]",
    evaluator: "GraphEvaluator",
    gates: "AccuracyGates",
    *,
    calibrator: "tuple[Calibrator, float]",
    data: Path,
    budget: "TimeBudget",
) -> None:
    """Add each repair to what was found; one that fails is left out with its reason."""
    from tasks.parts.quantization.config import coarsest
    from tasks.parts.quantization.equalization import without_upper_limits

    graph, images_NHWC = found.candidates[0].graph, _images(cfg, data)
    activations = coarsest(evaluator.activations)

    def attempt(repair: Repair, base: _Candidate, change: "Callable[[], _Changed | None]") -> None:
        if budget.is_spent:
            logger.warning("quantize_repaired: no time is left for %s", repair)
            found.not_tried.append(repair)
            return
        try:
            changed = change()
            if changed is not None:
                found.tried.append(judge((*base.repairs, repair), *changed))
        except (ArtifactError, BuildFailed) as error:
            logger.warning("quantize_repaired: %s failed and is left out: %s", repair, error)
            found.tried.append(_Failed(repair, first_line(error)))

    for repair, source in (
        (Repair.equalization, graph),
        (Repair.equalization_without_limits, without_upper_limits(graph)),
    ):
        if source is not None:
            attempt(
                repair,
                found.candidates[0],
                partial(_equalized, cfg, source, calibrator, activations, images_NHWC),
            )
    base = max(found.candidates, key=lambda candidate: candidate.rank)
    for repair in (Repair.bias_correction, Repair.weight_rounding):
        is_needed = cfg.exhaustive or not any(gates.hold(item.results) for item in found.candidates)
        if repair is Repair.bias_correction or is_needed:
            attempt(repair, base, partial(_fitted, cfg, repair, base, images_NHWC, budget))


def _fitted(
    cfg: Config, repair: Repair, base: _Candidate, images_NHWC: "NDArray[np.uint8]", budget: "TimeBudget"
) -> "_Changed":
    """Return a graph whose biases or weights are fitted to the errors of its INT8 graph, with the same ranges."""
    from tasks.parts.quantization.bias_correction import correct_biases
    from tasks.parts.quantization.evaluation import weight_bits, with_activations
    from tasks.parts.quantization.qdq import insert_qdq
    from tasks.parts.quantization.weight_rounding import round_weights

    quantized = with_activations(insert_qdq(base.graph, base.ranges, op_types=cfg.op_types), base.activations)
    change = correct_biases
    if repair is Repair.weight_rounding:
        change = partial(round_weights, num_bits=weight_bits(base.activations))
    batches = _layer_batches(cfg, base.graph, images_NHWC)
    return change(base.graph, quantized, batches, op_types=cfg.op_types, budget=budget), base.ranges


def _choose(tried: list[_Candidate], gates: "AccuracyGates") -> _Candidate:
    """Return the best candidate, on a tie the first; of those without fitted repairs if it is beyond a gate."""
    best = max(tried, key=lambda candidate: candidate.rank)
    if gates.standing(best.results) is not Standing.beyond:
        return best
    return max(
        (candidate for candidate in tried if not _FITTED.intersection(candidate.repairs)),
        key=lambda candidate: candidate.rank,
    )


def _equalized(
    cfg: Config,
    source: "ModelProto",
    calibrator: "tuple[Calibrator, float]",
    activations: "Activations",
    images_NHWC: "NDArray[np.uint8]",
) -> "_Changed | None":
    """Return the equalized graph with its ranges; None if no channel can be scaled."""
    from tasks.parts.onnx_graphs.checked_rewrite import Rewrite, checked_rewrite
    from tasks.parts.quantization.calibration import (
        choose_ranges,
        collect_channel_magnitudes,
        collect_statistics,
    )
    from tasks.parts.quantization.equalization import equalize, scalable_tensors
    from tasks.parts.quantization.qdq import quantizable_tensors

    axes = scalable_tensors(source, cfg.op_types)
    if not axes:
        return None
    magnitudes = collect_channel_magnitudes(source, _batches(cfg, source, images_NHWC), axes)
    rewrite = Rewrite(
        "equalization",
        partial(equalize, magnitudes=magnitudes, op_types=cfg.op_types),
        is_optional=True,
    )
    images_NCHW = next(_batches(cfg, source, images_NHWC))
    equalized = checked_rewrite(source, [rewrite], images_NCHW, where="quantize_repaired")
    names = quantizable_tensors(equalized, cfg.op_types)
    statistics = collect_statistics(equalized, partial(_batches, cfg, equalized, images_NHWC), names)
    kind, percentile = calibrator
    return equalized, choose_ranges(
        equalized, statistics, kind, percentile=percentile, activations=activations
    )


def _images(cfg: Config, data: Path) -> "NDArray[np.uint8]":
    """Return the calibration images as in quantize_ptq, without blank ones."""
    from tasks.parts.data.subsets import open_chosen_images
    from tasks.parts.quantization.calibration import without_blank_images

    return without_blank_images(open_chosen_images(data, "calibration", cfg.num_images))


def _batches(
    cfg: Config, graph: "ModelProto", images_NHWC: "NDArray[np.uint8]"
) -> "Iterator[NDArray[np.float32]]":
    """Yield images as the graph reads them."""
    from tasks.parts.data.dataset import normalised_batches
    from tasks.parts.onnx_graphs.graph import read_card_of_graph

    return normalised_batches(images_NHWC, read_card_of_graph(graph), cfg.batch_size)


def _layer_batches(
    cfg: Config, graph: "ModelProto", images_NHWC: "NDArray[np.uint8]"
) -> "list[NDArray[np.float32]]":
    """Return the images on which layers are compared, drawn from all: the first ones may show a single class."""
    import numpy as np

    from tasks.parts.onnx_graphs.live_memory import images_that_fit

    num_drawn = images_that_fit(graph, most=min(cfg.num_layer_images, len(images_NHWC)))
    drawn = np.sort(np.random.default_rng(_SEED).choice(len(images_NHWC), num_drawn, replace=False))
    return list(_batches(cfg, graph, images_NHWC[drawn]))
