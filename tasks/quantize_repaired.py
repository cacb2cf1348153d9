"""Regain accuracy that INT8 loses, without training: equalize channels, correct biases, round weights by outputs.

Each repair changes the float graph before the Q/DQ pairs are inserted, and is kept if the INT8 graph is better on the
validation images: by its score, and above the float graph's score by its agreement with it. Rounding, the slowest, is
tried only while the gates do not hold. If the INT8 graph of quantize_ptq is as good as the float graph, nothing is
tried. If the best graph certainly misses a gate, so that some layers have to stay in float, repairs that were fitted
to the errors of INT8 in all layers are not kept.
"""

import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from tasks.core.bounds import AtLeast, LessThan, MoreThan
from tasks.core.environment import versions
from tasks.parts.cpu import int8_sums
from tasks.parts.data.accuracy import ScoreLoss, Standing
from tasks.parts.onnx_session import ONNXRUNTIME
from tasks.parts.quantization.config import OpTypes

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from onnx import ModelProto

    from tasks.parts.quantization.config import Activations, Calibrator
    from tasks.parts.quantization.evaluation import Evaluation, GraphEvaluator
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
    """Calibration images on which layers are compared to correct biases and round weights. More: better, slower, and
    more memory."""
    num_val_images: Annotated[int, AtLeast(0), "0 takes all"]
    """Validation images on which graphs are evaluated."""
    batch_size: Annotated[int, AtLeast(1)]
    """Images in one batch; changes memory and speed only."""


@dataclass(frozen=True)
class Step:
    """One repair that was tried."""

    repair: Repair
    score: float
    """Score of the INT8 graph on the validation images, in the worst type of activations."""
    kept: bool
    """Whether it is a part of the written graph."""
    standing: Standing
    """Whether its losses are within all gates."""


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


@dataclass(frozen=True)
class _Candidate:
    repairs: tuple[Repair, ...]
    graph: "ModelProto"
    """The repaired float graph."""
    ranges: "Mapping[str, TensorRange]"
    evaluation: "Evaluation"
    """Of its INT8 graph."""

    @property
    def score(self) -> float:
        return self.evaluation.score


def environment(_: Config) -> dict[str, str]:
    """Return what the output depends on besides inputs, configuration and code."""
    return versions("onnx", *ONNXRUNTIME) | {"int8_sums": int8_sums()}


def quantize_repaired(
    cfg: Config, *, model: Path, reference: Path, ranges: Path, data: Path, out: Path
) -> Report:
    """Write ``model.onnx`` (U8S8 Q/DQ), ``float.onnx`` (the float graph it was made from), ``ranges.json`` and
    ``steps.csv``.

    `reference` is the float graph whose accuracy counts as 100 %, `ranges` is the file of quantize_ptq for `model`.
    """
    from tasks.parts.data.class_limits import ClassLimits
    from tasks.parts.onnx_graphs.graph import read_graph, write_graph
    from tasks.parts.quantization.gates import open_gates
    from tasks.parts.quantization.qdq import insert_qdq, read_calibrator, read_ranges, write_ranges
    from tasks.parts.tables import write_table

    graph, (activations, known) = read_graph(model), read_ranges(ranges)
    evaluator, gates = open_gates(
        graph,
        read_graph(reference),
        data,
        max_score_rel_loss=cfg.max_score_rel_loss,
        max_parent_rel_loss=cfg.max_parent_rel_loss,
        class_limits=ClassLimits(cfg.class_limits, cfg.class_floors),
        stage="quantize_repaired",
        num_images=cfg.num_val_images,
        batch_size=cfg.batch_size,
        activations=activations,
    )
    tried = _try_repairs(
        cfg, graph, known, evaluator, gates, calibrator=read_calibrator(ranges)[1:], data=data
    )
    best = _choose(tried, evaluator, gates)
    steps = [
        Step(
            found.repairs[-1],
            found.score,
            found.repairs[-1] in best.repairs,
            gates.standing(found.evaluation.results),
        )
        for found in tried
    ]
    write_graph(insert_qdq(best.graph, best.ranges, op_types=cfg.op_types), out / "model.onnx")
    write_graph(best.graph, out / "float.onnx")
    write_ranges(out / "ranges.json", read_calibrator(ranges)[0], activations, best.ranges)
    write_table(out / "steps.csv", steps)
    results = best.evaluation.results
    open_classes = gates.open_classes(results)
    for text in open_classes:
        logger.warning("quantize_repaired: %s", text)
    logger.info(
        "quantize_repaired: val score %.4f (PTQ %.4f, float %.4f)",
        best.score,
        tried[0].score,
        evaluator.float_score,
    )
    return Report(
        standing=gates.standing(results),
        metric=evaluator.metric,
        reference_score=gates.reference.score,
        float_score=evaluator.float_score,
        ptq_score=tried[0].score,
        score=best.score,
        score_rel_loss=gates.score_rel_loss(results),
        parent_rel_loss=gates.parent_rel_loss(results),
        open_classes=open_classes,
        repairs=best.repairs[1:],
        steps=tuple(steps),
    )


def _try_repairs(
    cfg: Config,
    graph: "ModelProto",
    ranges: "Mapping[str, TensorRange]",
    evaluator: "GraphEvaluator",
    gates: "AccuracyGates",
    *,
    calibrator: "tuple[Calibrator, float]",
    data: Path,
) -> list[_Candidate]:
    """Return the graph of quantize_ptq, and each repair of the best graph before it."""
    from tasks.parts.quantization.bias_correction import correct_biases
    from tasks.parts.quantization.config import coarsest
    from tasks.parts.quantization.evaluation import weight_bits, with_activations
    from tasks.parts.quantization.qdq import insert_qdq
    from tasks.parts.quantization.weight_rounding import round_weights

    def evaluate(
        repairs: tuple[Repair, ...], repaired: "ModelProto", known: "Mapping[str, TensorRange]"
    ) -> _Candidate:
        evaluation = evaluator.evaluate(insert_qdq(repaired, known, op_types=cfg.op_types))
        logger.info("%s: val score %.4f", repairs[-1], evaluation.score)
        return _Candidate(repairs, repaired, known, evaluation)

    def rank(candidate: _Candidate) -> tuple[float, ...]:
        return gates.rank(candidate.evaluation, evaluator)

    tried = [evaluate((Repair.none,), graph, ranges)]
    if tried[0].score >= evaluator.float_score and gates.hold(tried[0].evaluation.results):
        return tried
    images_NHWC, activations = _images(cfg, data), coarsest(evaluator.activations)
    for repair, equalized, known in _equalized(cfg, graph, calibrator, activations, images_NHWC):
        tried.append(evaluate((Repair.none, repair), equalized, known))
    base = max(tried, key=rank)
    round_to_levels = partial(round_weights, num_bits=weight_bits(base.evaluation.activations))
    for repair, change in (
        (Repair.bias_correction, correct_biases),
        (Repair.weight_rounding, round_to_levels),
    ):
        if repair is Repair.weight_rounding and any(
            gates.hold(candidate.evaluation.results) for candidate in tried
        ):
            break
        quantized = with_activations(
            insert_qdq(base.graph, base.ranges, op_types=cfg.op_types), base.evaluation.activations
        )
        repaired = change(
            base.graph,
            quantized,
            _layer_batches(cfg, graph, images_NHWC),
            op_types=cfg.op_types,
        )
        tried.append(evaluate((*base.repairs, repair), repaired, base.ranges))
    return tried


def _choose(tried: list[_Candidate], evaluator: "GraphEvaluator", gates: "AccuracyGates") -> _Candidate:
    """Return the best candidate, on a tie the first; of those without fitted repairs if it is beyond a gate."""

    def rank(candidate: _Candidate) -> tuple[float, ...]:
        return gates.rank(candidate.evaluation, evaluator)

    best = max(tried, key=rank)
    if gates.standing(best.evaluation.results) is not Standing.beyond:
        return best
    return max(
        (candidate for candidate in tried if not _FITTED.intersection(candidate.repairs)),
        key=rank,
    )


def _equalized(
    cfg: Config,
    graph: "ModelProto",
    calibrator: "tuple[Calibrator, float]",
    activations: "Activations",
    images_NHWC: "NDArray[np.uint8]",
) -> "Iterator[tuple[Repair, ModelProto, Mapping[str, TensorRange]]]":
    """Yield the equalized graphs with their ranges; none if no channel can be scaled."""
    from tasks.parts.onnx_graphs.checked_rewrite import Rewrite, checked_rewrite
    from tasks.parts.quantization.calibration import (
        choose_ranges,
        collect_channel_magnitudes,
        collect_statistics,
    )
    from tasks.parts.quantization.equalization import equalize, scalable_tensors, without_upper_limits
    from tasks.parts.quantization.qdq import quantizable_tensors

    kind, percentile = calibrator
    unlimited = without_upper_limits(graph)
    for repair, source in (
        (Repair.equalization, graph),
        (Repair.equalization_without_limits, unlimited),
    ):
        axes = {} if source is None else scalable_tensors(source, cfg.op_types)
        if source is None or not axes:
            continue
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
        yield (
            repair,
            equalized,
            choose_ranges(equalized, statistics, kind, percentile=percentile, activations=activations),
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

    num_drawn = min(cfg.num_layer_images, len(images_NHWC))
    drawn = np.sort(np.random.default_rng(_SEED).choice(len(images_NHWC), num_drawn, replace=False))
    return list(_batches(cfg, graph, images_NHWC[drawn]))
