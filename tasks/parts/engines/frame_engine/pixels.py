"""What is done outside engines that read normalised images or give logits.

Shape letters: N batch, C channels or classes, H height, W width.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]


def normalise(frames_NHWC: Array, mean: Sequence[float], std: Sequence[float]) -> Array:
    """Return float32 [N, C, H, W] as (value / 255 - mean) / std, of uint8 frames."""
    std_C = np.asarray(std, np.float64)
    scale_C = (1.0 / (255.0 * std_C)).astype(np.float32)
    shift_C = (-np.asarray(mean, np.float64) / std_C).astype(np.float32)
    images_NCHW = np.ascontiguousarray(np.moveaxis(frames_NHWC, -1, 1), dtype=np.float32)
    images_NCHW *= scale_C[:, None, None]
    images_NCHW += shift_C[:, None, None]
    return images_NCHW


def find_classes(logits: Array) -> Array:
    """Return the class of the largest logit along axis 1, as uint8, or uint16 for more than 256 classes."""
    smallest = np.min_scalar_type(max(1, logits.shape[1] - 1))
    classes: Array = logits.argmax(axis=1).astype(smallest)
    return classes
