"""One number for how right predictions are, and its name: mIoU of masks, top-1 accuracy of images."""

from enum import StrEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tasks.parts.input_card import Task
from tasks.parts.metrics import confusion_matrix, mean_iou, scores

FLOAT_MODEL = "float_model"
"""Source of a data set whose truth is what the float model predicts."""

NO_LABEL = -1
"""What no label is: every image counts."""


class Metric(StrEnum):
    """What a score is."""

    miou = "mIoU"
    top1 = "top-1 accuracy"
    miou_agreement = "agreement with the float model (mIoU)"
    top1_agreement = "agreement with the float model (top-1)"


def metric_of(task: Task, source: str) -> Metric:
    """Return the metric of a task on the data set of a source (`Manifest.source`)."""
    is_agreement = source == FLOAT_MODEL
    if task is Task.segmentation:
        return Metric.miou_agreement if is_agreement else Metric.miou
    return Metric.top1_agreement if is_agreement else Metric.top1


def score(prediction: NDArray[Any], truth: NDArray[Any], num_classes: int, task: Task) -> float:
    """Return mIoU of masks [N, H, W], or the share of right images of labels [N], 0..1."""
    if task is Task.segmentation:
        return mean_iou(prediction, truth, num_classes)
    return float((prediction == truth).mean())


def class_scores(
    prediction: NDArray[Any], truth: NDArray[Any], num_classes: int, task: Task
) -> tuple[float | None, ...]:
    """Return the IoU of each class, or the share of its images that are right; None for a class that is absent."""
    if task is Task.segmentation:
        return scores(confusion_matrix(prediction, truth, num_classes)).iou
    confusion_CC = confusion_matrix(prediction, truth, num_classes, ignore_index=NO_LABEL)
    return tuple(
        float(right / count) if count else None
        for right, count in zip(np.diag(confusion_CC), confusion_CC.sum(axis=1), strict=True)
    )
