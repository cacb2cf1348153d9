"""The answers of an engine as small pictures, to be looked at: N images, H rows, W columns."""

import zlib
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np
from numpy.typing import NDArray

from tasks.core.errors import ArtifactError

ANSWERS_FILE = "answers.npz"

_MAX_SIDE = 64
"""Rows and columns of a small mask."""


def shrink(images: NDArray[Any]) -> NDArray[Any]:
    """Return every n-th pixel of images or masks [N, H, W, ...], so that no side is longer than 64 pixels."""
    step = -(-max(images.shape[1:3]) // _MAX_SIDE)
    return images[:, step // 2 :: step, step // 2 :: step]


def write_answers(path: Path, classes: NDArray[Any]) -> None:
    """Write the classes of images [N], or of the pixels of small masks [N, H, W]."""
    kind = np.uint8 if classes.max(initial=0) < 256 else np.uint16
    np.savez_compressed(path, allow_pickle=False, classes=classes.astype(kind))


def read_answers(path: Path) -> NDArray[np.int64]:
    """Return what `write_answers` wrote; raise ArtifactError if it is missing or damaged."""
    try:
        with np.load(path, allow_pickle=False) as arrays:
            return np.asarray(arrays["classes"], np.int64)
    except (OSError, ValueError, KeyError, EOFError, BadZipFile, zlib.error) as error:
        raise ArtifactError(f"{path}: no answers ({error!r}). Run validate again.") from error
