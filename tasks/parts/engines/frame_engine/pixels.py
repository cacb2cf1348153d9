"""What is done outside engines that read normalised images or give logits.

Shape letters: N batch, C channels or classes, H height, W width.
"""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]


def scale_and_shift(mean: Sequence[float], std: Sequence[float]) -> tuple[Array, Array]:
    """Return float32 [C] and [C] with which (value / 255 - mean) / std is value * scale + shift."""
    std_C = np.asarray(std, np.float64)
    scale_C = (1.0 / (255.0 * std_C)).astype(np.float32)
    return scale_C, (-np.asarray(mean, np.float64) / std_C).astype(np.float32)


def normalise(frames_NHWC: Array, mean: Sequence[float], std: Sequence[float]) -> Array:
    """Return float32 [N, C, H, W] as (value / 255 - mean) / std, of uint8 frames."""
    scale_C, shift_C = scale_and_shift(mean, std)
    images_NCHW = np.ascontiguousarray(np.moveaxis(frames_NHWC, -1, 1), dtype=np.float32)
    images_NCHW *= scale_C[:, None, None]
    images_NCHW += shift_C[:, None, None]
    return images_NCHW


def lead_of_first(threshold: float) -> float:
    """Return what the first of two logits gets on top, so that the second one is larger above the threshold."""
    return math.log(threshold / (1 - threshold))


def find_classes(logits: Array, threshold: float | None = None) -> Array:
    """Return the class of the largest logit along axis 1, as uint8, or uint16 for more than 256 classes.

    With a threshold, the second of two classes wins where its probability is above it.
    """
    if threshold is not None:
        logits = logits.copy()
        logits[:, 0] += np.float32(lead_of_first(threshold))
    classes: Array = logits.argmax(axis=1).astype(dtype_of_classes(logits.shape[1]))
    return classes


def dtype_of_classes(num_classes: int) -> np.dtype[Any]:
    """Return uint8, or uint16 for more than 256 classes."""
    return np.min_scalar_type(max(1, num_classes - 1))
