"""Quantize a float graph to INT8 without training: try several calibrators and keep the best one.

That is the one with the best score; of those that score as well as the float graph or better, the one that agrees
most with it.
"""

import hashlib
import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from tasks.core.bounds import AtLeast, AtMost, Distinct, LessThan, MinItems, MoreThan
from tasks.core.environment import versions
from tasks.core.errors import ArtifactError, DataError
from tasks.parts.cpu import int8_sums
from tasks.parts.onnx_session import ONNXRUNTIME
from tasks.parts.quantization.config import Activations, Calibrator, OpTypes, coarsest

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from onnx import ModelProto

    from tasks.parts.quantization.evaluation import Evaluation, GraphEvaluator
    from tasks.parts.quantization.qdq import TensorRange

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Config:
    """Which images, which calibrators, and what runs in INT8."""

    calibrators: Annotated[list[Calibrator], MinItems(1), Distinct()]
    """Ways to choose the ranges; each is tried. The best score is kept; of those as good as the float graph, the one
    that agrees most with it; on a tie the first. One that a part of the images shows to be worse gets no others."""
    percentiles: Annotated[list[Annotated[float, MoreThan(50), AtMost(100)]], MinItems(1)]
    """Percentages of a tensor's magnitudes that calibrator percentile keeps in range; each is tried. Lower: finer
    steps, more clipping."""
    num_images: Annotated[int, AtLeast(1)]
    """Images of the calibration split, from its start."""
    batch_size: Annotated[int, AtLeast(1)]
    """Images in one batch; changes memory and speed only."""
    num_val_images: Annotated[int, AtLeast(0), "0 takes all"]
    """Validation images on which calibrators are evaluated."""
    max_abs_input: Annotated[float, MoreThan(0), LessThan(1e6)]
    """Largest allowed magnitude of a normalised value in a calibration image; larger ones raise DataError."""
    op_types: OpTypes
    """ONNX operators whose inputs become INT8. Fewer: more conversions between layers, slower."""
    activations: Annotated[list[Activations], MinItems(1), Distinct()]
    """Types of activations in the engines of the chosen targets. Calibrators, and the later stages that quantize,
    judge graphs with each type, by the worst score."""


@dataclass(frozen=True)
class Trial:
    """Result of one calibrator."""

    calibrator: str
    """Name of the calibrator, with the percentile if it has one."""
    score: float
    """Score on the validation images, in ONNX Runtime; the worst of all types of activations."""
    agreement: float
    """Share of pixels, or images, with the class that the float graph predicts."""
    rel_loss: float
    """Share of the float graph's score that is lost."""
    rel_loss_low: float
    """Lower end of its 95 % interval."""
    rel_loss_high: float
    num_images: int
    """Validation images that all of this is of; fewer than all where they show for certain that the calibrator before
    it is better."""


@dataclass(frozen=True)
class _Candidate:
    trial: Trial
    quantized: "ModelProto"
    ranges: "Mapping[str, TensorRange]"
    evaluation: "Evaluation"


@dataclass(frozen=True)
class Report:
    """All trials, and the one that was kept."""

    metric: str
    """Metric of the scores: mIoU or top-1 accuracy, against the labels or as agreement with the float model."""
    calibrator: str
    """Calibrator whose ranges were kept, with the percentile if it has one."""
    score: float
    """Score of the kept graph on the validation images."""
    float_score: float
    """Score of the float graph on the same images."""
    agreement: float
    """Share of pixels, or images, on which the kept graph predicts the class of the float graph."""
    num_images: int
    """Number of calibration images used; fewer than configured if the split has no more."""
    num_images_in_test: int
    """Number of calibration images that are also in the test split and make the measured accuracy too optimistic."""
    num_quantized_tensors: int
    """Number of activations with a Q/DQ pair."""
    dead_tensors: tuple[str, ...]
    """Activations with a pair that are 0 on all calibration images, of layers that died in training."""
    weight_bits: int
    """Bits of the weights of the graphs that were judged: 7 beside uint8 activations on an x86 CPU without VNNI,
    where sums of two products of 8 bits saturate."""
    trials: tuple[Trial, ...]
    """All trials in the configured order."""


def environment(_: Config) -> dict[str, str]:
    """Return what the output depends on besides inputs, configuration and code."""
    return versions("onnx", *ONNXRUNTIME) | {"int8_sums": int8_sums()}


def quantize_ptq(cfg: Config, *, model: Path, data: Path, out: Path) -> Report:
    """Write ``model.onnx`` (U8S8 Q/DQ), ``ranges.json``, ``calibrators.csv`` and ``images.npz``.

    The last holds what the float graph and the INT8 graph get right in each validation image. The loss of accuracy is
    not gated here but in `select_engine`, so that the pipeline goes on to the next technique.

    Raises DataError for calibration images that would distort the ranges, ArtifactError for a graph without layers.
    """
    from tasks.parts.data.comparison import RESULTS_FILE, write_results
    from tasks.parts.data.dataset import open_images
    from tasks.parts.data.subsets import open_chosen_images
    from tasks.parts.onnx_graphs.graph import is_quantized, read_graph, write_graph
    from tasks.parts.quantization.calibration import (
        choose_ranges,
        collect_statistics,
        without_blank_images,
    )
    from tasks.parts.quantization.evaluation import open_evaluator, weight_bits
    from tasks.parts.quantization.gates import FLOAT, INT8
    from tasks.parts.quantization.qdq import (
        insert_qdq,
        place_pairs,
        quantizable_tensors,
        weighted_nodes,
        write_ranges,
    )
    from tasks.parts.tables import write_table

    graph = read_graph(model)
    if is_quantized(graph):
        raise ArtifactError(f"{model}: already has Q/DQ, expected the float graph of export_onnx.")
    images_NHWC = without_blank_images(open_chosen_images(data, "calibration", cfg.num_images))
    num_images_in_test = _check_calibration_set(cfg, images_NHWC, open_images(data, "test"))
    logger.info("calibrating %s on %d images", model, len(images_NHWC))
    if not weighted_nodes(graph, cfg.op_types):
        found = ", ".join(sorted({node.op_type for node in graph.graph.node}))
        raise ArtifactError(
            f"{model}: nothing to quantize among {found}, expected a convolution or a matrix product with a constant "
            f"among quantize_ptq.op_types ({', '.join(cfg.op_types)}). Add the operator there, or remove the INT8 "
            "variants (`variants` in conf/model/)."
        )
    names = quantizable_tensors(graph, cfg.op_types)
    statistics = collect_statistics(graph, lambda: _batches(cfg, graph, images_NHWC), names)
    dead = tuple(name for name, seen in statistics.items() if not seen.amax)
    if dead:
        logger.warning(
            "%d tensors are 0 on all calibration images (first: '%s'): layers that died in training, or too few "
            "images (quantize_ptq.num_images)",
            len(dead),
            dead[0],
        )
    evaluator = open_evaluator(
        graph,
        data,
        num_images=cfg.num_val_images,
        batch_size=cfg.batch_size,
        activations=cfg.activations,
    )
    trials: list[Trial] = []
    best: _Candidate | None = None
    for title, calibrator, percentile in _calibrations(cfg):
        ranges = choose_ranges(
            graph, statistics, calibrator, percentile=percentile, activations=coarsest(cfg.activations)
        )
        quantized = insert_qdq(graph, ranges, op_types=cfg.op_types)
        evaluation = evaluator.evaluate(quantized, rival=best.evaluation if best else None)
        trials.append(_trial(title, evaluation, evaluator))
        if best is None or (
            evaluation.is_complete and evaluator.rank(evaluation) > evaluator.rank(best.evaluation)
        ):
            best = _Candidate(trials[-1], quantized, ranges, evaluation)
    assert best is not None  # a configuration has a calibrator
    kept = best.trial
    write_graph(best.quantized, out / "model.onnx")
    write_ranges(out / "ranges.json", kept.calibrator, cfg.activations, best.ranges)
    write_table(out / "calibrators.csv", trials)
    write_results(out / RESULTS_FILE, {FLOAT: evaluator.float_results, INT8: best.evaluation.results})
    logger.info(
        "%s kept: val score %.4f (float %.4f), agreement %.4f",
        kept.calibrator,
        kept.score,
        evaluator.float_score,
        kept.agreement,
    )
    return Report(
        metric=evaluator.metric,
        calibrator=kept.calibrator,
        score=kept.score,
        float_score=evaluator.float_score,
        agreement=kept.agreement,
        num_images=len(images_NHWC),
        num_images_in_test=num_images_in_test,
        num_quantized_tensors=len(place_pairs(graph, cfg.op_types).range_of),
        dead_tensors=dead,
        weight_bits=min(map(weight_bits, cfg.activations)),
        trials=tuple(trials),
    )


def _trial(title: str, evaluation: "Evaluation", evaluator: "GraphEvaluator") -> Trial:
    from tasks.parts.data.comparison import score_loss

    loss = score_loss(evaluation.results, evaluator.float_results_of(evaluation))
    num_images = evaluation.results.num_images
    logger.info(
        "%s: val score %.4f, agreement %.4f on %d images",
        title,
        evaluation.score,
        evaluation.agreement,
        num_images,
    )
    return Trial(
        title, evaluation.score, evaluation.agreement, loss.rel_loss, loss.low, loss.high, num_images
    )


def _calibrations(cfg: Config) -> Iterator[tuple[str, Calibrator, float]]:
    """Yield title, calibrator and percentile of each configured calibration."""
    for calibrator in cfg.calibrators:
        if calibrator is Calibrator.percentile:
            yield from ((f"percentile {share:g}", calibrator, share) for share in cfg.percentiles)
        else:
            yield calibrator.value, calibrator, 100.0


def _check_calibration_set(cfg: Config, images_NHWC: "NDArray[Any]", test_images_NHWC: "NDArray[Any]") -> int:
    """Raise DataError for an empty set, warn about a small one, return how many images are also in the test split."""
    if not len(images_NHWC):
        raise DataError(
            "the calibration split is empty, expected images. Run prepare_data with a larger one."
        )
    if len(images_NHWC) < cfg.num_images:
        logger.warning(
            "the calibration split has %d images, quantize_ptq.num_images asks for %d: ranges may be unstable",
            len(images_NHWC),
            cfg.num_images,
        )
    tested = {hashlib.sha256(image.tobytes()).digest() for image in test_images_NHWC}
    num_in_test = sum(hashlib.sha256(image.tobytes()).digest() in tested for image in images_NHWC)
    if num_in_test:
        logger.warning(
            "%d calibration images are also in the test split: the measured accuracy is too optimistic",
            num_in_test,
        )
    return num_in_test


def _batches(
    cfg: Config, graph: "ModelProto", images_NHWC: "NDArray[Any]"
) -> Iterator["NDArray[np.float32]"]:
    from tasks.parts.data.dataset import normalised_batches
    from tasks.parts.onnx_graphs.graph import read_card_of_graph
    from tasks.parts.quantization.calibration import check_images

    for images_NCHW in normalised_batches(images_NHWC, read_card_of_graph(graph), cfg.batch_size):
        check_images(images_NCHW, cfg.max_abs_input)
        yield images_NCHW
