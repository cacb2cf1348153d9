"""Find out by measurement why INT8 costs too much accuracy.

Do the first and the last layer tolerate INT8? Which classes lost accuracy? Are there enough calibration images, and
do they cover the values seen in training? Does the batch size matter, the calibrator, or the type of the activations?
Which layers are suspect?
"""

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from tasks.core.bounds import AtLeast, LessThan, MoreThan
from tasks.core.environment import versions
from tasks.core.errors import ArtifactError
from tasks.parts.cpu import int8_sums
from tasks.parts.onnx_session import ONNXRUNTIME
from tasks.parts.quantization.config import Activations, OpTypes

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from onnx import ModelProto

    from tasks.parts.data.input_card import Task
    from tasks.parts.quantization.evaluation import GraphEvaluator
    from tasks.parts.quantization.qdq import TensorRange

logger = logging.getLogger(__name__)

NUM_SUSPECTS = 3
_NOT_RANKED = (
    "not measured: rank_layers ranked nothing, since no layer has to stay in float; "
    "quantize_repaired.exhaustive=true asks for it"
)
_MAX_CLASSES = 12
"""Number of classes that are listed: those that lost most."""


@dataclass(frozen=True)
class Config:
    """How many images to use, and the thresholds above which an answer is suspect."""

    op_types: OpTypes
    """ONNX operators whose inputs are INT8, the same as in quantize_ptq."""
    num_images: Annotated[int, AtLeast(2)]
    """Calibration images, as in quantize_ptq."""
    num_train_images: Annotated[int, AtLeast(1)]
    """Training images with which the calibrated ranges are compared, evenly spread over the split."""
    num_val_images: Annotated[int, AtLeast(0), "0 takes all"]
    """Validation images on which scores are measured."""
    batch_size: Annotated[int, AtLeast(2)]
    """Images in one batch, whose predictions are compared with those of batch 1."""
    suspect_loss: Annotated[float, MoreThan(0), LessThan(1)]
    """Loss of the score (mIoU or accuracy), overall or of one class, above which an answer is suspect."""
    suspect_clipped_share: Annotated[float, MoreThan(0), LessThan(1)]
    """Excess of training over calibration images in a tensor's share of values beyond its range, above which an
    answer is suspect."""


@dataclass(frozen=True)
class Answer:
    """One line of the checklist."""

    question: str
    is_suspect: bool
    found: str
    """The measurement, as text."""
    advice: str
    """What to change, with the config key."""


@dataclass(frozen=True)
class Report:
    """The checklist."""

    metric: str
    """Metric of the scores."""
    float_score: float
    """Score of the float graph on the validation images."""
    score: float
    """Score of the INT8 graph on the validation images."""
    num_suspect: int
    answers: tuple[Answer, ...]


def environment(_: Config) -> dict[str, str]:
    """Return what the output depends on besides inputs, configuration and code."""
    return versions("onnx", *ONNXRUNTIME) | {"int8_sums": int8_sums()}


def check_int8(
    cfg: Config,
    *,
    model: Path,
    quantized: Path,
    ranges: Path,
    trials: Path,
    ranking: Path,
    data: Path,
    out: Path,
) -> Report:
    """Write ``checklist.md`` for the float graph `model` and the graph `quantized` that quantize_ptq made from it.

    `ranges` and `trials` (calibrators.csv) are files of quantize_ptq, `ranking` is that of rank_layers; the
    questions about single layers are not answered where it is empty. Raises ArtifactError when they do not belong
    together.
    """
    from tasks.parts.data.input_card import Task
    from tasks.parts.data.metrics import class_scores
    from tasks.parts.onnx_graphs.graph import read_graph
    from tasks.parts.onnx_graphs.predict import predict_classes
    from tasks.parts.quantization.evaluation import open_evaluator, with_activations
    from tasks.parts.quantization.qdq import read_ranges, weighted_nodes
    from tasks.parts.tables import read_table

    graph, (activations, known) = read_graph(model), read_ranges(ranges)
    layers = read_table(ranking, "node", stage="rank_layers", may_be_empty=True)
    weighted = [node.name for node in weighted_nodes(graph, cfg.op_types)]
    if layers and not set(weighted) <= set(layers):
        raise ArtifactError(
            f"{ranking}: ranks the layers of a graph other than {model}. Run rank_layers again."
        )
    evaluator = open_evaluator(
        graph, data, num_images=cfg.num_val_images, batch_size=cfg.batch_size, activations=activations
    )
    by_type = {
        kind: replace(evaluator, activations=(kind,)).evaluate(read_graph(quantized)) for kind in Activations
    }
    worst = min((by_type[kind] for kind in activations), key=evaluator.rank)
    int8 = with_activations(read_graph(quantized), worst.activations)
    judge, batch_size = evaluator.judge, max(2, evaluator.batch_size)
    by_class: tuple[Answer, ...] = ()
    if judge.task is not Task.values:
        classes = predict_classes(int8, evaluator.images_NHWC, batch_size=batch_size)
        before, after = (
            class_scores(predicted, judge.labels, judge.num_classes, judge.task)
            for predicted in (evaluator.float_answers, classes)
        )
        by_class = (_classes(cfg, data, judge.task, before, after),)
    answers = (
        _ends(cfg, weighted, layers),
        *by_class,
        _calibration_size(cfg, graph, ranges, known, data, evaluator, worst.score),
        _coverage(cfg, _clipped(cfg, graph, known, data)),
        _batch(cfg, int8, evaluator.images_NHWC[:batch_size]),
        _calibrators(cfg, trials),
        _activations(cfg, activations, {kind: found.score for kind, found in by_type.items()}),
        _suspects(cfg, layers),
    )
    _write_checklist(out / "checklist.md", answers, evaluator, worst.score)
    report = Report(
        evaluator.metric,
        evaluator.float_score,
        worst.score,
        sum(answer.is_suspect for answer in answers),
        answers,
    )
    logger.info("check_int8: %d of %d answers are suspect", report.num_suspect, len(answers))
    return report


def _ends(cfg: Config, weighted: Sequence[str], layers: Mapping[str, Mapping[str, str]]) -> Answer:
    """Check the first quantized layer with a weight, near the image, and the last one, near the logits."""
    ends = dict.fromkeys([*weighted[:1], *weighted[-1:]])
    drops = {name: _drop(layers[name]) for name in ends if layers}
    return Answer(
        question="Do the first and the last layer tolerate INT8?",
        is_suspect=max((drop for drop in drops.values() if drop is not None), default=0.0) > cfg.suspect_loss,
        found="; ".join(
            f"{name} alone in INT8: " + ("not measured" if drop is None else f"score {-drop:+.4f}")
            for name, drop in drops.items()
        )
        or (_NOT_RANKED if ends else "no convolution or matrix product is in INT8"),
        advice=f"keep them in float: quantize_partial.keep_float=[{','.join(ends)}]",
    )


def _drop(row: Mapping[str, str]) -> float | None:
    """Return the loss of the score that a layer causes; None if rank_layers had no time to measure it."""
    return float(row["score_drop"]) if row["score_drop"] else None


def _classes(
    cfg: Config, data: Path, task: "Task", before: Sequence[float | None], after: Sequence[float | None]
) -> Answer:
    from tasks.parts.data.dataset import read_manifest
    from tasks.parts.data.input_card import Task

    losses = {
        name: old - (new or 0.0)
        for name, old, new in zip(read_manifest(data).classes, before, after, strict=True)
        if old is not None
    }
    order = sorted(losses, key=lambda name: -losses[name])
    return Answer(
        question="Which classes lost accuracy?",
        is_suspect=losses[order[0]] > cfg.suspect_loss,
        found=("IoU " if task is Task.segmentation else "accuracy ")
        + ", ".join(f"{name} {-losses[name]:+.4f}" for name in order[:_MAX_CLASSES]),
        advice=f"check that the calibration split shows {order[0]!r}; else use quantize_partial or "
        "quantize_aware_train",
    )


def _calibration_size(
    cfg: Config,
    graph: "ModelProto",
    ranges: Path,
    known: Mapping[str, "TensorRange"],
    data: Path,
    evaluator: "GraphEvaluator",
    reached: float,
) -> Answer:
    """Calibrate again, in the same way, on half of the images; a tensor that is 0 on them keeps its range."""
    from tasks.parts.data.subsets import open_chosen_images
    from tasks.parts.quantization.calibration import choose_ranges, collect_statistics
    from tasks.parts.quantization.config import coarsest
    from tasks.parts.quantization.qdq import insert_qdq, quantizable_tensors, read_calibrator

    title, calibrator, percentile = read_calibrator(ranges)
    images_NHWC = open_chosen_images(data, "calibration", cfg.num_images)
    half = max(1, len(images_NHWC) // 2)
    seen = collect_statistics(
        graph,
        partial(_batches, cfg, graph, images_NHWC[:half]),
        quantizable_tensors(graph, cfg.op_types),
    )
    fewer = dict(known) | choose_ranges(
        graph,
        {tensor: statistics for tensor, statistics in seen.items() if statistics.amax},
        calibrator,
        percentile=percentile,
        activations=coarsest(evaluator.activations),
    )
    change = evaluator.evaluate(insert_qdq(graph, fewer, op_types=cfg.op_types)).score - reached
    return Answer(
        question="Are there enough calibration images?",
        is_suspect=abs(change) > cfg.suspect_loss,
        found=f"with {half} of {len(images_NHWC)} images ({title}): score {change:+.4f}",
        advice="raise quantize_ptq.num_images until half of the images gives the same score",
    )


def _coverage(cfg: Config, clipped: Mapping[str, tuple[float, float]]) -> Answer:
    worst = max(clipped, key=lambda name: clipped[name][1] - clipped[name][0])
    calibration, training = clipped[worst]
    return Answer(
        question="Does the calibration split cover the values seen in training?",
        is_suspect=training - calibration > cfg.suspect_clipped_share,
        found=f"worst tensor '{worst}': {training:.2%} of its training values are beyond the range, "
        f"{calibration:.2%} of its calibration values",
        advice="use calibration images that resemble the training images: change the split in prepare_data, or "
        "quantize_ptq.num_images",
    )


def _batch(cfg: Config, int8: "ModelProto", images_NHWC: "NDArray[Any]") -> Answer:
    from tasks.parts.onnx_graphs.predict import agreement, predict_classes

    alone, together = (predict_classes(int8, images_NHWC, batch_size=size) for size in (1, len(images_NHWC)))
    share = 1 - agreement(alone, together)
    return Answer(
        question="Does the batch size change the predictions?",
        is_suspect=share > cfg.suspect_loss,
        found=f"{share:.2%} of the predictions change between batch 1 and {len(images_NHWC)}",
        advice="the graph mixes images of a batch: look for a mean or a reshape over the batch axis",
    )


def _calibrators(cfg: Config, trials: Path) -> Answer:
    from tasks.parts.tables import read_table

    tried = read_table(trials, "calibrator", stage="quantize_ptq")
    reached = {name: float(row["score"]) for name, row in tried.items()}
    best, worst = max(reached, key=lambda name: reached[name]), min(reached, key=lambda name: reached[name])
    spread = reached[best] - reached[worst]
    return Answer(
        question="Does the calibrator matter?",
        is_suspect=spread > cfg.suspect_loss,
        found=f"{len(reached)} tried: from {worst} {reached[worst]:.4f} to {best} {reached[best]:.4f}",
        advice="the result is sensitive to the ranges: try more quantize_ptq.percentiles, and look at the suspect "
        "layers",
    )


def _activations(
    cfg: Config, configured: Sequence[Activations], scores: Mapping[Activations, float]
) -> Answer:
    """Compare the types of activations, also those that no chosen target has."""
    from tasks.parts.quantization.evaluation import weight_bits

    spread = max(scores.values()) - min(scores[kind] for kind in configured)
    titles = {Activations.uint8: "uint8 with a zero point", Activations.int8: "symmetric int8"}
    return Answer(
        question="Does the type of the activations matter?",
        is_suspect=spread > cfg.suspect_loss,
        found=", ".join(
            titles[kind]
            + (f" and {weight_bits(kind)}-bit weights" if weight_bits(kind) < 8 else "")
            + f": score {score:.4f}"
            + ("" if kind in configured else " (no chosen target has it)")
            for kind, score in scores.items()
        ),
        advice="all rungs are judged by the worst type that quantize_ptq.activations names; a run without the "
        "targets that need it may keep better ranges for the others",
    )


def _suspects(cfg: Config, layers: Mapping[str, Mapping[str, str]]) -> Answer:
    """Name the first layers of the ranking.

    The ranking is by changed predictions, so its first layer is not always the one that costs most of the score.
    """
    first = list(layers.values())[:NUM_SUSPECTS]
    drops = [_drop(row) for row in first]
    return Answer(
        question="Which layers are suspect?",
        is_suspect=max((drop for drop in drops if drop is not None), default=0.0) > cfg.suspect_loss,
        found="; ".join(
            f"{row['node']} ({row['source']}): "
            + ("" if drop is None else f"score {-drop:+.4f}, ")
            + f"{float(row['sqnr_db']):.1f} dB"
            for row, drop in zip(first, drops, strict=True)
        )
        or _NOT_RANKED,
        advice="use quantize_partial, which keeps such layers in float; diff_layers, which runs later, shows where "
        "the noise grows in each engine of this graph: artifacts/diff_layers/<variant>/<target> (see conf/model)",
    )


def _clipped(
    cfg: Config, graph: "ModelProto", ranges: Mapping[str, "TensorRange"], data: Path
) -> dict[str, tuple[float, float]]:
    """Return tensor -> share of its values beyond its range, on calibration images and on training images."""
    import numpy as np

    from tasks.parts.data.dataset import open_images
    from tasks.parts.data.subsets import open_chosen_images
    from tasks.parts.quantization.calibration import shares_beyond

    train_NHWC, limits = open_images(data, "train"), {name: known.amax for name, known in ranges.items()}
    picked = np.unique(np.linspace(0, len(train_NHWC) - 1, cfg.num_train_images).astype(int))
    calibration, training = (
        shares_beyond(graph, _batches(cfg, graph, images_NHWC), limits)
        for images_NHWC in (open_chosen_images(data, "calibration", cfg.num_images), train_NHWC[picked])
    )
    return {name: (calibration[name], training[name]) for name in ranges}


def _batches(
    cfg: Config, graph: "ModelProto", images_NHWC: "NDArray[Any]"
) -> "Iterator[NDArray[np.float32]]":
    from tasks.parts.data.dataset import normalised_batches
    from tasks.parts.onnx_graphs.graph import read_card_of_graph

    return normalised_batches(images_NHWC, read_card_of_graph(graph), cfg.batch_size)


def _write_checklist(
    path: Path, answers: Sequence[Answer], evaluator: "GraphEvaluator", reached: float
) -> None:
    lines = [
        "# INT8 checklist",
        "",
        f"Validation {evaluator.metric}: {reached:.4f} in INT8, {evaluator.float_score:.4f} in float. Every answer "
        "was measured in this run.",
        "",
    ]
    for answer in answers:
        mark = "x" if not answer.is_suspect else " "
        lines.append(f"- [{mark}] **{answer.question}** {answer.found}.")
        if answer.is_suspect:
            lines.append(f"  What to do: {answer.advice}.")
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
