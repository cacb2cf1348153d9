"""A metric of the user's own: a Python function of one file that scores each image.

N images. The function gets the outputs of a model, float32 [N, ...], and the labels of the data set: masks uint8
[N, H, W] with IGNORE_INDEX, classes uint16 [N], or values float32 [N, ...]. It returns scores [N] from 0 to 1, better
ones higher. The score of a split is their mean.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tasks.core.errors import ConfigError, DataError

Scorer = Callable[[NDArray[Any], NDArray[Any]], NDArray[np.float64]]


def open_metric(file: Path, function: str) -> Scorer:
    """Return a function of a Python file, with a check of what it returns.

    Raises ConfigError if the file has no such function. The returned function raises DataError for scores of another
    shape, NaN or scores outside 0..1.
    """
    namespace: dict[str, Any] = {"__name__": file.stem, "__file__": str(file)}
    try:
        code = compile(file.read_text(encoding="utf-8"), str(file), "exec")
    except (SyntaxError, ValueError) as error:
        raise ConfigError(f"{file}: not a Python file ({error}). Correct it (model.metric).") from error
    try:
        exec(code, namespace)  # an import would write __pycache__ beside the data
    except Exception as error:
        raise ConfigError(
            f"{file}: cannot be run ({type(error).__name__}: {error}). Correct it, or install what it imports "
            "(model.metric)."
        ) from error
    found = namespace.get(function)
    if not callable(found):
        known = ", ".join(
            name for name, value in namespace.items() if callable(value) and name != "__builtins__"
        )
        raise ConfigError(
            f"{file}: has no function {function!r}, found: {known or 'none'}. Set model.metric=<file>:<function> to "
            "one that takes outputs and labels and returns a score from 0 to 1 for each image."
        )

    def score_images(outputs: NDArray[Any], labels: NDArray[Any]) -> NDArray[np.float64]:
        return _checked(found(outputs, labels), len(outputs), f"{file}: {function}")

    return score_images


def try_on_masks(score_images: Scorer, num_classes: int, height: int, width: int) -> None:
    """Let a metric score two images with stripes of all classes: one answered rightly, one with equal logits.

    Raises DataError as it would after the first epoch of a training.
    """
    stripes_W = np.arange(width) * num_classes // width
    labels_NHW = np.broadcast_to(stripes_W, (2, height, width)).astype(np.uint8)
    logits_NCHW = np.zeros((2, num_classes, height, width), np.float32)
    logits_NCHW[0] = 8 * (np.arange(num_classes)[:, None, None] == labels_NHW[0])
    score_images(logits_NCHW, labels_NHW)


def _checked(returned: object, num_images: int, who: str) -> NDArray[np.float64]:
    scores_N = np.asarray(returned)
    if scores_N.shape != (num_images,) or scores_N.dtype.kind not in "biuf":
        raise DataError(
            f"{who} (model.metric) returned {scores_N.dtype} {list(scores_N.shape)} for {num_images} images, "
            f"expected one number for each, [{num_images}]. Do not average over the images; their mean is taken here."
        )
    scores_N = scores_N.astype(np.float64)
    outside = scores_N[~((scores_N >= 0) & (scores_N <= 1))]
    if len(outside):
        raise DataError(
            f"{who} (model.metric) returned {outside[0]:g} for an image, expected a score from 0 (wrong) to 1 "
            "(right). Scale the scores, and decide what an image without objects scores."
        )
    return scores_N
