"""Cover a large image by overlapping windows: the overlap-tile strategy of U-Net (Ronneberger et al., 2015).

Each pixel is owned by the window in which it lies most central. Where masks are set to IGNORED outside of what
their window owns, every pixel of the original counts once, so sums over windows, such as a confusion matrix, are
those of the stitched prediction at the original size. A pixel that a window owns has at least half the overlap of
context on each side, or all that the image has.

H height, W width, C channels.
"""

import itertools
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from .rules import IGNORED


@dataclass(frozen=True)
class Span:
    """A window along one axis: where it starts, and what it owns, in pixels of the image."""

    start: int
    first: int
    """First pixel that it owns."""
    end: int
    """Pixel after the last that it owns."""


@dataclass(frozen=True)
class Window:
    """A window of an image."""

    rows: Span
    columns: Span


def cover(
    height: int,
    width: int,
    *,
    window_height: int,
    window_width: int,
    overlap: int,
    is_owned_once: bool,
) -> tuple[Window, ...]:
    """Return windows that cover an image, row by row; along an axis on which it is smaller there is one.

    Consecutive windows overlap by at least `overlap` pixels; the last one is moved inward to end with the image.
    Each pixel is owned by one window, or, without `is_owned_once`, by all in which it lies.
    """
    rows = _spans(height, window_height, overlap, is_owned_once)
    columns = _spans(width, window_width, overlap, is_owned_once)
    return tuple(Window(*spans) for spans in itertools.product(rows, columns))


def cut_image(image_HWC: NDArray[np.uint8], window: Window, *, height: int, width: int) -> NDArray[np.uint8]:
    """Return a window of an image; outside of the image it is black."""
    return _cut(image_HWC, window, height, width, fill=0)


def cut_mask(mask_HW: NDArray[np.uint8], window: Window, *, height: int, width: int) -> NDArray[np.uint8]:
    """Return a window of a mask; what the window does not own is ignored."""
    rows, columns = window.rows, window.columns
    owned_HW = np.full_like(mask_HW, IGNORED)
    owned = np.s_[rows.first : rows.end, columns.first : columns.end]
    owned_HW[owned] = mask_HW[owned]
    return _cut(owned_HW, window, height, width, fill=IGNORED)


def _cut(
    array: NDArray[np.uint8], window: Window, height: int, width: int, *, fill: int
) -> NDArray[np.uint8]:
    top, left = window.rows.start, window.columns.start
    inside = array[top : top + height, left : left + width]
    missing = [(0, height - inside.shape[0]), (0, width - inside.shape[1])]
    return np.pad(inside, missing + [(0, 0)] * (array.ndim - 2), constant_values=fill)


def _spans(length: int, window: int, overlap: int, is_owned_once: bool) -> list[Span]:
    last = max(0, length - window)
    starts = [*range(0, last, window - overlap), last]
    if not is_owned_once:
        return [Span(start, start, min(start + window, length)) for start in starts]
    # A pixel that is as central in two windows is owned by the first.
    middles = [(one + two + window - 1) // 2 + 1 for one, two in itertools.pairwise(starts)]
    return [
        Span(start, first, end)
        for start, first, end in zip(starts, [0, *middles], [*middles, length], strict=True)
    ]
