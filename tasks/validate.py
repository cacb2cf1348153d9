"""Measure the accuracy of an engine by running every image of two splits through the deployed file itself.

One split decides which engine is picked. The other stays unseen: its results are only read for picked engines.
"""

import csv
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from tasks.core.bounds import AtLeast
from tasks.core.errors import ArtifactError, ConfigError, GateFailed
from tasks.parts.data.accuracy import Accuracy, AccuracyReport

if TYPE_CHECKING:
    from tasks.parts.data.comparison import ImageResults
    from tasks.parts.data.input_card import InputCard
    from tasks.parts.engines.manifest import EngineManifest
    from tasks.parts.engines.runner import Runner

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Config:
    """What `validate` reads from params.yaml."""

    split: Literal["train", "val", "test"]
    """Split that the gates and the pick are decided on."""
    unseen_split: Literal["train", "val", "test"]
    """Split that is reported once, for the picked engines. Nothing is decided on it."""
    batch_size: Annotated[int, AtLeast(1)]
    """Images that are read and counted at once; an inference takes at most the target's max_batch of them. Larger:
    faster, more memory; same result."""

    def __post_init__(self) -> None:
        if self.split == self.unseen_split:
            raise ConfigError(
                f"split and unseen_split are both {self.split}, expected two splits: the pick would be reported on "
                "the images that it was chosen on."
            )


Report = AccuracyReport


def validate(cfg: Config, *, engine: Path, data: Path, out: Path) -> Report:
    """Write `confusion.csv` (rows: truth, columns: prediction, in pixels or images) and return the scores on `split`.

    `images.npz` holds what was right in each image of both splits (see tasks/parts/data/comparison.py). For an engine
    that was skipped or failed, the report has that status. Raises ArtifactError when engine and data set differ in
    their classes, GateFailed for logits that are not finite.
    """
    from tasks.parts.data.comparison import RESULTS_FILE, write_results
    from tasks.parts.data.dataset import read_manifest
    from tasks.parts.data.metrics import metric_of
    from tasks.parts.engines.manifest import read_engine_manifest
    from tasks.parts.engines.open_engine import open_engine

    manifest = read_engine_manifest(engine)
    if not manifest.is_built:
        logger.warning("validate: %s has no engine: %s", engine, manifest.reason)
        return Report(manifest.status, manifest.reason, "", cfg.split, cfg.unseen_split, 0, None)
    dataset = read_manifest(data)
    _check_classes(manifest, engine, dataset.classes, data)
    logger.info("validate: %s of target %s, split %s", manifest.file, manifest.target.name, cfg.split)
    with open_engine(engine) as runner:
        confusion_CC, results = _run_split(runner, data, cfg.split, cfg.batch_size)
        _, unseen = _run_split(runner, data, cfg.unseen_split, cfg.batch_size)
    write_results(out / RESULTS_FILE, {cfg.split: results, cfg.unseen_split: unseen})
    _write_confusion(confusion_CC, manifest.card.classes, out / "confusion.csv")
    accuracy = _accuracy(confusion_CC, manifest.card, metric_of(manifest.card.task, dataset.source))
    logger.info("validate: %s %s on %d images", accuracy.metric, accuracy.score, results.num_images)
    return Report(
        manifest.status, "", manifest.sha256, cfg.split, cfg.unseen_split, results.num_images, accuracy
    )


def _accuracy(confusion_CC: Any, card: "InputCard", metric: str) -> Accuracy:
    from tasks.parts.data.input_card import Task
    from tasks.parts.data.metrics import scores

    result = scores(confusion_CC)
    if card.task is not Task.segmentation:
        return Accuracy(metric, miou=None, top1=result.pixel_accuracy, pixel_accuracy=None, iou={})
    iou = dict(zip(card.classes, result.iou, strict=True))
    return Accuracy(metric, miou=result.miou, top1=None, pixel_accuracy=result.pixel_accuracy, iou=iou)


def _check_classes(manifest: "EngineManifest", engine: Path, classes: tuple[str, ...], data: Path) -> None:
    if manifest.card.classes != classes:
        raise ArtifactError(
            f"{engine}: the engine has {len(manifest.card.classes)} classes "
            f"({', '.join(manifest.card.classes)}), {data} has {len(classes)} ({', '.join(classes)}); names "
            "and order must be equal. Train on this data set, or validate with the data set that the engine "
            "was trained on."
        )


def _run_split(runner: "Runner", data: Path, split: str, batch_size: int) -> "tuple[Any, ImageResults]":
    """Return the confusion matrix of a split, and what was right in each of its images."""
    import numpy as np

    from tasks.parts.data.comparison import compare_with_labels, join_results
    from tasks.parts.data.dataset import IGNORE_INDEX, normalise, open_groups, open_images, open_labels
    from tasks.parts.data.input_card import Task
    from tasks.parts.data.metrics import NO_LABEL, confusion_matrix
    from tasks.parts.progress import tracked

    card = runner.manifest.card
    images_NHWC, truth = open_images(data, split), open_labels(data, split, card.task)
    ignore_index = IGNORE_INDEX if card.task is Task.segmentation else NO_LABEL
    step = min(batch_size, runner.manifest.target.max_batch)
    confusion_CC, results = np.zeros((len(card.classes), len(card.classes)), np.int64), []
    starts = range(0, len(images_NHWC), batch_size)
    for start in tracked(starts, "validate"):
        images_NCHW = normalise(images_NHWC[start : start + batch_size], card.mean, card.std)
        parts = range(0, len(images_NCHW), step)
        logits = np.concatenate([runner.infer(images_NCHW[part : part + step]) for part in parts])
        if not np.isfinite(logits).all():
            bad = int(np.flatnonzero(~np.isfinite(logits).all(axis=tuple(range(1, logits.ndim))))[0])
            raise GateFailed(
                f"Engine {runner.manifest.file} of target {runner.manifest.target.name}: NaN or infinity in "
                f"the logits of image {start + bad} of split '{split}' (validate.split, .unseen_split), expected "
                "finite values. The engine overflows; build the variant for a target with a higher precision."
            )
        classes, labels = logits.argmax(axis=1), truth[start : start + batch_size]
        confusion_CC += confusion_matrix(classes, labels, len(card.classes), ignore_index)
        results.append(compare_with_labels(classes, labels, len(card.classes), card.task))
    return confusion_CC, join_results(results, open_groups(data, split))


def _write_confusion(confusion_CC: Any, classes: tuple[str, ...], path: Path) -> None:
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(["truth \\ prediction", *classes])
        writer.writerows([name, *map(int, row)] for name, row in zip(classes, confusion_CC, strict=True))
