"""Hold the outputs of a model against the labels of a split, in the metric of the data set.

N images, C classes, H rows, W columns. Outputs are logits [N, C] or [N, C, H, W], or values [N, ...].
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tasks.core.errors import ArtifactError
from tasks.parts.data.comparison import (
    ImageResults,
    compare_boundaries,
    compare_with_labels,
    join_results,
    results_of_scores,
)
from tasks.parts.data.dataset import (
    LABEL_FILES,
    METRIC_FILE,
    Manifest,
    has_labels,
    open_groups,
    open_labels,
    read_manifest,
)
from tasks.parts.data.input_card import InputCard, Task
from tasks.parts.data.lazy_array import part_of
from tasks.parts.data.metrics import FLOAT_MODEL, metric_of
from tasks.parts.data.own_metric import Scorer, open_metric
from tasks.parts.data.subsets import choose_rows


@dataclass(frozen=True)
class Judge:
    """The labels of chosen images of a split, and the metric."""

    labels: NDArray[Any]
    """masks_NHW, labels_N or values of the float model."""
    groups_N: NDArray[np.int64]
    """Group of each image."""
    num_classes: int
    task: Task
    """Task of the model."""
    metric: str
    """Name of the metric."""
    output_sizes: tuple[int, ...]
    """Numbers of values of the outputs that are joined; empty for one output."""
    score_images: Scorer | None
    """A metric of the user's own; None for that of the task."""

    def compare(self, outputs: NDArray[Any], answers: NDArray[Any], start: int) -> ImageResults:
        """Return the results of consecutive images from number `start` on; `answers` are `answers_of` the outputs."""
        labels = self.labels[start : start + len(outputs)]
        if self.score_images is not None:
            results = results_of_scores(self.score_images(outputs, labels))
            if self.task is Task.values:
                return results
            by_class = compare_with_labels(answers, labels, self.num_classes, self.task)
            return replace(results, by_class=by_class)
        return compare_with_labels(
            answers, labels, self.num_classes, self.task, output_sizes=self.output_sizes
        )

    def compare_boundaries(self, answers: NDArray[Any], start: int) -> ImageResults:
        """Return the results of consecutive masks from number `start` on, on boundaries alone."""
        return compare_boundaries(answers, self.labels[start : start + len(answers)], self.num_classes)

    def of_images(self, rows_N: NDArray[np.int64]) -> "Judge":
        """Return the judge of some of the images, in this order."""
        return replace(self, labels=part_of(self.labels, rows_N), groups_N=self.groups_N[rows_N])

    def join(self, parts: Sequence[ImageResults]) -> ImageResults:
        """Return the results of all images as one."""
        return join_results(parts, np.unique(self.groups_N, return_inverse=True)[1])


def answers_of(outputs: NDArray[Any], card: InputCard) -> NDArray[Any]:
    """Return the class of each pixel, [N, H, W], or of each image, [N]; values as they are."""
    if card.task is Task.values:
        return outputs
    smallest = np.min_scalar_type(len(card.classes) - 1)
    classes: NDArray[Any] = outputs.argmax(axis=1).astype(smallest)
    return classes


def open_judge(data: Path, split: str, card: InputCard, *, num_images: int | None = None) -> Judge:
    """Open the labels of all images of a split, or of so many (subsets.py chooses), for a model with this card.

    Raises ArtifactError when model and data set differ in their classes.
    """
    manifest = read_manifest(data)
    if card.task is not Task.values and card.classes != manifest.classes:
        raise ArtifactError(
            f"the model has {len(card.classes)} classes ({', '.join(card.classes)}), {data} has "
            f"{len(manifest.classes)} ({', '.join(manifest.classes)}); names and order must be equal. Use a model "
            "that was trained on this data set."
        )
    rows = choose_rows(data, split, num_images)
    labels = open_labels(data, split, _task_of_labels(manifest, split, card.task))
    return Judge(
        labels=part_of(labels, rows),
        groups_N=open_groups(data, split)[rows],
        num_classes=len(card.classes),
        task=card.task,
        metric=metric_name(manifest, card.task),
        output_sizes=card.output_sizes,
        score_images=open_metric(data / METRIC_FILE, manifest.metric) if manifest.metric else None,
    )


def metric_name(manifest: Manifest, task: Task) -> str:
    """Return the name of the metric of a model with this task on a data set."""
    if manifest.metric is None:
        return str(metric_of(task, manifest.source))
    against = ", against the float model" if manifest.source == FLOAT_MODEL else ""
    return f"{manifest.metric} (own metric{against})"


def _task_of_labels(manifest: Manifest, split: str, task: Task) -> Task:
    """Return which labels to compare with: a metric of the user's own holds values against any."""
    if task is not Task.values or manifest.metric is None:
        return task
    return next((kind for kind in LABEL_FILES if has_labels(manifest, split, kind)), task)
