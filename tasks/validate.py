"""Measure the accuracy of an engine by running every labelled image of two splits through the deployed file itself.

One split decides which engine is picked. The other stays unseen: its results are only read for picked engines.
"""

import csv
import logging
import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from tasks.core.bounds import AtLeast
from tasks.core.errors import ConfigError, GateFailed
from tasks.parts.data.accuracy import Accuracy, AccuracyReport

if TYPE_CHECKING:
    from tasks.parts.data.answers import Answers
    from tasks.parts.data.comparison import ImageResults
    from tasks.parts.data.input_card import InputCard
    from tasks.parts.data.judge import Judge
    from tasks.parts.engines.runner import Runner

logger = logging.getLogger(__name__)

_MAX_BYTES = 1 << 29
"""Limit for the outputs of one inference together with what counting them takes."""
_BYTES_PER_PIXEL = 64
"""Of a mask, for its classes, its boundaries and their counts."""
_BYTES_PER_VALUE = 24
"""For three copies in float64: the true value, the difference, its square."""


@dataclass(frozen=True)
class Config:
    """What `validate` reads from params.yaml."""

    split: Literal["train", "val", "test"]
    """Split that the gates and the pick are decided on."""
    unseen_split: Literal["train", "val", "test"]
    """Split that is reported once, for the picked engines. Nothing is decided on it."""
    batch_size: Annotated[int, AtLeast(1)]
    """Images that are read, inferred and counted at once; at most the target's max_batch, and at most as many as have
    outputs that fit in half a gigabyte. Larger: faster, more memory; same result."""

    def __post_init__(self) -> None:
        if self.split == self.unseen_split:
            raise ConfigError(
                f"split and unseen_split are both {self.split}, expected two splits: the pick would be reported on "
                "the images that it was chosen on."
            )


Report = AccuracyReport


def validate(cfg: Config, *, engine: Path, data: Path, out: Path) -> Report:
    """Write `confusion.csv` (rows: truth, columns: prediction, in pixels or images) and return the scores on `split`.

    Values that are no classes have no confusion. `images.npz` holds what was right in each image of both splits, of
    masks also on their boundaries alone, and in the original files of `split` at their own sizes, where those are
    known (see tasks/parts/data/comparison.py). `answers.npz` holds the class of each image of `split`, or its mask,
    for people to look at. For an engine that was skipped
    or failed, the report has that status.

    Every image goes through the engine as a frame, with whatever it leaves outside. A metric of the user's own reads
    logits: if the engine gives classes, its twin is run in its place. Raises ArtifactError when engine and data set
    differ in their classes, GateFailed for logits that are not finite; those of an engine that gives classes are
    looked at in its twin, for the first batch_size images of each split.
    """
    from tasks.parts.data.answers import ANSWERS_FILE, write_answers
    from tasks.parts.data.comparison import RESULTS_FILE, boundaries_of, frames_of, write_results
    from tasks.parts.data.frame_score import score_frames
    from tasks.parts.data.judge import open_judge
    from tasks.parts.engines.description import on_frames
    from tasks.parts.engines.manifest import plain_engine, read_engine_manifest
    from tasks.parts.engines.open_engine import open_engine
    from tasks.parts.engines.target import Gives

    manifest = read_engine_manifest(engine)
    if not manifest.is_built:
        logger.warning("validate: %s has no engine: %s", engine, manifest.reason)
        return Report(manifest.status, manifest.reason, "", cfg.split, cfg.unseen_split, 0, None)
    card, target = manifest.card, manifest.target
    judge, unseen_judge = (open_judge(data, split, card) for split in (cfg.split, cfg.unseen_split))
    logger.info("validate: %s of target %s, split %s", manifest.file, target.name, cfg.split)
    has_own_metric = judge.score_images is not None and bool(card.classes)
    if has_own_metric and target.coarse_classes:
        raise ConfigError(
            f"target.{target.name}.coarse_classes is true, and {data} has a metric of its own, which reads logits: "
            "such an engine has none. Set it to false."
        )
    with open_engine(plain_engine(engine) if has_own_metric else engine) as runner:
        measured = _run_split(runner, data, cfg.split, cfg.batch_size, judge)
        unseen = _run_split(runner, data, cfg.unseen_split, cfg.batch_size, unseen_judge)
        frames = score_frames(data, cfg.split, card, on_frames(runner).answer_image, measured.results.score)
    if target.gives is Gives.classes and card.classes and not has_own_metric:
        with open_engine(plain_engine(engine)) as twin:
            for split in (cfg.split, cfg.unseen_split):
                _check_twin(twin, data, split, cfg.batch_size)
    results: dict[str, ImageResults] = {cfg.split: measured.results, cfg.unseen_split: unseen.results}
    for split, found in ((cfg.split, measured.boundaries), (cfg.unseen_split, unseen.boundaries)):
        if found is not None:
            results[boundaries_of(split)] = found
    if frames.results is not None:
        results[frames_of(cfg.split)] = frames.results
    if frames.note:
        logger.log(logging.INFO if frames.results is None else logging.WARNING, "validate: %s", frames.note)
    write_results(out / RESULTS_FILE, results)
    if card.classes:
        _write_confusion(measured.confusion_CC, card.classes, out / "confusion.csv")
        write_answers(out / ANSWERS_FILE, measured.answers)
    accuracy = _accuracy(measured, card, judge)
    logger.info("validate: %s %s on %d images", accuracy.metric, accuracy.score, measured.results.num_images)
    return Report(
        manifest.status,
        "",
        manifest.sha256,
        cfg.split,
        cfg.unseen_split,
        measured.results.num_images,
        accuracy,
        None if frames.results is None else frames.results.score,
        frames.note,
    )


@dataclass(frozen=True)
class _Measured:
    """What an engine answers for the images of a split."""

    results: "ImageResults"
    boundaries: "ImageResults | None"
    """The same on the boundaries of masks alone; None for classes of images and for values."""
    confusion_CC: Any
    """Counts of (true class, predicted class) in pixels or images; empty for values."""
    energy_C: Any
    """Sum of the squares of the values of each output; empty for classes."""
    answers: "Answers"
    """The class of each image, or its mask; empty for values."""


def _accuracy(measured: _Measured, card: "InputCard", judge: "Judge") -> Accuracy:
    from tasks.parts.data.comparison import similarity_of_values
    from tasks.parts.data.input_card import Task
    from tasks.parts.data.metrics import scores

    own = None if judge.score_images is None else measured.results.score
    if card.task is Task.values:
        if own is not None:
            return Accuracy(judge.metric, None, None, None, {}, other_score=own)
        found = similarity_of_values(measured.results, measured.energy_C)
        return Accuracy(
            judge.metric,
            None,
            None,
            None,
            {},
            other_score=measured.results.score,
            sqnr_db=min(output.sqnr_db for output in found),
            cosine=min(output.cosine for output in found),
            outputs=dict(zip(card.outputs, found, strict=True)) if card.outputs else {},
        )
    result = scores(measured.confusion_CC)
    if card.task is Task.classification:
        return Accuracy(judge.metric, None, result.pixel_accuracy, None, {}, other_score=own)
    boundaries = measured.boundaries
    assert boundaries is not None
    return Accuracy(
        judge.metric,
        result.miou,
        None,
        result.pixel_accuracy,
        dict(zip(card.classes, result.iou, strict=True)),
        other_score=own,
        boundary_iou=boundaries.score if boundaries.labels_NC.any() else None,
        boundary_iou_by_class=dict(zip(card.classes, boundaries.class_scores, strict=True)),
    )


def _run_split(runner: "Runner", data: Path, split: str, batch_size: int, judge: "Judge") -> _Measured:
    """Run every image of a split that has labels through an engine."""
    import numpy as np

    from tasks.parts.data.answers import Answers
    from tasks.parts.data.class_table import IGNORE_INDEX
    from tasks.parts.data.comparison import energy
    from tasks.parts.data.input_card import Task
    from tasks.parts.data.metrics import NO_LABEL, confusion_matrix
    from tasks.parts.data.subsets import open_chosen_images
    from tasks.parts.engines.description import on_frames
    from tasks.parts.progress import tracked

    engine, card = on_frames(runner), runner.manifest.card
    images_NHWC = open_chosen_images(data, split, None)
    ignore_index = IGNORE_INDEX if card.task is Task.segmentation else NO_LABEL
    step = min(batch_size, runner.manifest.target.max_batch, _images_that_fit(card))
    confusion_CC, results = np.zeros((len(card.classes), len(card.classes)), np.int64), []
    energies_C, boundaries, shown = [], [], Answers.of(max(2, len(card.classes)))
    starts = range(0, len(images_NHWC), step)
    for start in tracked(starts, "validate"):
        frames_NHWC = np.ascontiguousarray(images_NHWC[start : start + step])
        outputs = runner.infer(engine.prepare(frames_NHWC))
        _check_finite(outputs, runner, split, start)
        answers = engine.finish(outputs)
        results.append(judge.compare(outputs, answers, start))
        if card.task is Task.segmentation:
            boundaries.append(judge.compare_boundaries(answers, start))
        if card.classes:
            shown.add(answers)
        if card.task is Task.values:
            energies_C.append(energy(outputs, card.output_sizes).sum(axis=0))
        else:
            labels = judge.labels[start : start + step]
            confusion_CC += confusion_matrix(answers, labels, len(card.classes), ignore_index)
    on_boundaries = judge.join(boundaries) if boundaries else None
    return _Measured(
        judge.join(results),
        on_boundaries,
        confusion_CC,
        np.sum(energies_C, axis=0),
        shown,
    )


def _images_that_fit(card: "InputCard") -> int:
    """Return of how many images the outputs and their counts fit into the memory that is set aside, one at least."""
    from tasks.parts.data.input_card import Task

    num_values = math.prod(card.logits_shape)
    num_bytes = 4 * num_values
    if card.task is Task.segmentation:
        num_bytes += _BYTES_PER_PIXEL * card.height * card.width
    elif card.task is Task.values:
        num_bytes += _BYTES_PER_VALUE * num_values
    return max(1, _MAX_BYTES // num_bytes)


def _check_twin(twin: "Runner", data: Path, split: str, num_images: int) -> None:
    """Check the logits of an engine that gives classes, which hide NaN, on the first images of a split."""
    import numpy as np

    from tasks.parts.data.dataset import open_images
    from tasks.parts.engines.description import on_frames

    engine, frames_NHWC = on_frames(twin), open_images(data, split)[:num_images]
    for number, frame_HWC in enumerate(np.asarray(frames_NHWC)):
        _check_finite(twin.infer(engine.prepare(frame_HWC[None])), twin, split, number)


def _check_finite(outputs: Any, runner: "Runner", split: str, start: int) -> None:
    """Raise GateFailed for NaN or infinity in the outputs for images from number `start` on."""
    import numpy as np

    if np.isfinite(outputs).all():
        return
    bad = int(np.flatnonzero(~np.isfinite(outputs).all(axis=tuple(range(1, outputs.ndim))))[0])
    raise GateFailed(
        f"Engine {runner.manifest.file} of target {runner.manifest.target.name}: NaN or infinity in the logits of "
        f"image {start + bad} of split '{split}' (validate.split, .unseen_split), expected finite values. The engine "
        "overflows; build the variant for a target with a higher precision."
    )


def _write_confusion(confusion_CC: Any, classes: tuple[str, ...], path: Path) -> None:
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(["truth \\ prediction", *classes])
        writer.writerows([name, *map(int, row)] for name, row in zip(classes, confusion_CC, strict=True))
