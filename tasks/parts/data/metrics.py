"""Metrics of predictions: mIoU of masks and their boundaries, top-1 accuracy of images, agreement of values.

Shape letters: N images, H height, W width, C classes.
"""

import math
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tasks.core.errors import DataError
from tasks.parts.data.input_card import Task

FLOAT_MODEL = "float_model"
"""Source of a data set whose labels are predictions of the float model."""

NO_LABEL = -1
"""Index to ignore in classification: no label has it, so every image counts."""

BOUNDARY_RATIO = 0.02
"""Width of a boundary as a share of the image's diagonal, as Cheng et al. choose it."""

_BELOW_ALL, _OUTSIDE, _ABOVE_ALL = np.int16(-2), np.int16(-1), np.int16(32767)
"""Classes that stand for an ignored pixel where the highest is sought, for the outside of an image, and for an
ignored pixel where the lowest is sought."""


class Metric(StrEnum):
    """Metric of a score."""

    miou = "mIoU"
    top1 = "top-1 accuracy"
    miou_agreement = "agreement with the float model (mIoU)"
    top1_agreement = "agreement with the float model (top-1)"
    values_agreement = "agreement with the float model (1 - noise / signal)"
    """Energy of the difference to the float model's values, and energy of these values: 0.99 is 20 dB."""


def metric_of(task: Task, source: str) -> Metric:
    """Return the metric of a task on a data set with this source (`Manifest.source`)."""
    if task is Task.values:
        return Metric.values_agreement
    is_agreement = source == FLOAT_MODEL
    if task is Task.segmentation:
        return Metric.miou_agreement if is_agreement else Metric.miou
    return Metric.top1_agreement if is_agreement else Metric.top1


def score(prediction: NDArray[Any], labels: NDArray[Any], num_classes: int, task: Task) -> float:
    """Return the mIoU of masks [N, H, W], or the top-1 accuracy of labels [N], 0..1."""
    if task is Task.segmentation:
        return mean_iou(prediction, labels, num_classes)
    return float((prediction == labels).mean())


def class_scores(
    prediction: NDArray[Any], labels: NDArray[Any], num_classes: int, task: Task
) -> tuple[float | None, ...]:
    """Return the IoU of each class, or its accuracy in classification; None for a class that is absent."""
    if task is Task.segmentation:
        return scores(confusion_matrix(prediction, labels, num_classes)).iou
    confusion_CC = confusion_matrix(prediction, labels, num_classes, ignore_index=NO_LABEL)
    return tuple(
        float(right / count) if count else None
        for right, count in zip(np.diag(confusion_CC), confusion_CC.sum(axis=1), strict=True)
    )


@dataclass(frozen=True)
class Scores:
    """IoU of the classes and pixel accuracy; undefined numbers are None, never 0 or NaN."""

    miou: float | None
    """Mean IoU of the classes that occur in the labels, 0..1: a stray pixel of another class is not a class."""
    iou: tuple[float | None, ...]
    """Intersection over union per class; None for a class in neither labels nor predictions."""
    pixel_accuracy: float | None
    """Share of correct pixels among those that are not ignored."""


def confusion_matrix(
    prediction_NHW: NDArray[Any], mask_NHW: NDArray[Any], num_classes: int, ignore_index: int = 255
) -> NDArray[np.int64]:
    """Count pixels by (true class, predicted class) as [C, C]; matrices of several batches add up.

    Raises:
        DataError: the shapes differ, or a counted value is not a class (bincount would grow silently).
    """
    if prediction_NHW.shape != mask_NHW.shape:
        raise DataError(
            f"predictions have shape {prediction_NHW.shape}, masks {mask_NHW.shape}: both must be [N, H, W]. "
            "Run validate on the data set that the engine was built for."
        )
    mask_NHW = np.asarray(mask_NHW)  # those of a whole split may still lie in their files
    is_counted = mask_NHW != ignore_index
    labels = mask_NHW[is_counted].astype(np.int64)
    prediction = prediction_NHW[is_counted].astype(np.int64)
    for name, values in (("masks", labels), ("predictions", prediction)):
        if values.size and (values.min() < 0 or values.max() >= num_classes):
            raise DataError(
                f"{name} hold labels from {values.min()} to {values.max()}, expected 0 to {num_classes - 1}. "
                "Model and data set must have the same classes."
            )
    counts = np.bincount(labels * num_classes + prediction, minlength=num_classes**2)
    return counts.reshape(num_classes, num_classes)


def boundary_width(height: int, width: int) -> int:
    """Return how many pixels the boundary of an object reaches from its contour into it: at least one."""
    return max(1, round(BOUNDARY_RATIO * math.hypot(height, width)))


def boundaries(
    classes_NHW: NDArray[Any], is_ignored_NHW: NDArray[np.bool_] | None = None
) -> NDArray[np.bool_]:
    """Mark the pixels on the boundary of the mask of their own class, [N, H, W].

    Those are the pixels of a mask without its erosion by `boundary_width` pixels (3x3 element, the outside of the
    image belongs to no mask), as in the reference implementation of Boundary IoU (Cheng et al., CVPR 2021). A mask
    that is eroded keeps a pixel if the square around it holds no other class, that is if the lowest class in the
    square is the highest. So all classes take two passes together instead of one erosion each.

    Ignored pixels may belong to any mask, and so may the outside beside them: there is no contour along them, be it
    that of an object whose label is not known or that of the part which a window of a large image owns.
    """
    reach = boundary_width(*classes_NHW.shape[1:])
    if is_ignored_NHW is not None and is_ignored_NHW.any():
        return _known_boundaries(classes_NHW, is_ignored_NHW, reach)
    is_boundary_NHW = np.ones(classes_NHW.shape, np.bool_)
    lowest, highest = (_filter_squares(classes_NHW, of, 2 * reach + 1) for of in (np.minimum, np.maximum))
    is_boundary_NHW[:, reach:-reach, reach:-reach] = lowest != highest
    return is_boundary_NHW


def _known_boundaries(
    classes_NHW: NDArray[Any], is_ignored_NHW: NDArray[np.bool_], reach: int
) -> NDArray[np.bool_]:
    """Mark the pixels in whose square two of the known pixels differ; the outside is one more class."""
    around = [(0, 0), (reach, reach), (reach, reach)]
    is_ignored_NHW = np.pad(is_ignored_NHW, around, mode="edge")
    classes_NHW = np.pad(classes_NHW.astype(np.int16), around, constant_values=_OUTSIDE)
    lowest = _filter_squares(np.where(is_ignored_NHW, _ABOVE_ALL, classes_NHW), np.minimum, 2 * reach + 1)
    highest = _filter_squares(np.where(is_ignored_NHW, _BELOW_ALL, classes_NHW), np.maximum, 2 * reach + 1)
    is_boundary_NHW: NDArray[np.bool_] = lowest < highest
    return is_boundary_NHW


def _filter_squares(values_NHW: NDArray[Any], of: np.ufunc, size: int) -> NDArray[Any]:
    """Return the minimum or maximum of each square of `size` pixels that lies inside its image."""
    covered = 1
    while covered < size:  # what covers n pixels in a row covers up to 2 n with itself
        step = min(covered, size - covered)
        values_NHW = of(values_NHW[:, :-step], values_NHW[:, step:])
        values_NHW = of(values_NHW[:, :, :-step], values_NHW[:, :, step:])
        covered += step
    return values_NHW


def mean_iou(prediction_NHW: NDArray[Any], mask_NHW: NDArray[Any], num_classes: int) -> float:
    """Return the mIoU, 0..1; 0 if it is undefined, so that it can be compared."""
    return scores(confusion_matrix(prediction_NHW, mask_NHW, num_classes)).miou or 0.0


def scores(confusion_CC: NDArray[np.int64]) -> Scores:
    """Compute IoU per class, their mean and the pixel accuracy (rows of the matrix are the labels)."""
    hits_C = np.diag(confusion_CC)
    union_C = confusion_CC.sum(axis=0) + confusion_CC.sum(axis=1) - hits_C
    iou = tuple(float(hit / area) if area else None for hit, area in zip(hits_C, union_C, strict=True))
    areas_C = confusion_CC.sum(axis=1)
    in_labels = [value for value, area in zip(iou, areas_C, strict=True) if area and value is not None]
    total = int(confusion_CC.sum())
    return Scores(
        miou=sum(in_labels) / len(in_labels) if in_labels else None,
        iou=iou,
        pixel_accuracy=float(hits_C.sum() / total) if total else None,
    )
