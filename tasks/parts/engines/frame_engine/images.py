"""Answer images of any size in their own size, as the network was trained to read them.

Images of another size than the engine's are resized, cropped or letterboxed, and the mask is brought back; or windows
cover them, of which each gives the pixels that lie most central in it. H height, W width, C channels.
"""

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np

from ...reading.rules import LETTERBOX, Reading, ResizeMode
from ...reading.sizes import fit_image, restore_mask
from ...reading.windows import Span, Window, cover, cut_image

Array = np.ndarray[Any, Any]
AnswerBatch = Callable[[Array], Array]
"""Takes frames uint8 [N, H, W, C] of the engine's size, as many as the engine accepts; returns their answers."""

RESIZE_MODES = (*map(str, ResizeMode), LETTERBOX)


class Image(Protocol):
    """An image uint8 [H, W, C], in memory or read in parts: numpy arrays are images."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Height, width and channels."""
        ...

    def __getitem__(self, rows: slice, /) -> Array:
        """Return some rows."""
        ...


@dataclass(frozen=True)
class MaskBands:
    """The mask of an image that is read in parts: it is computed as its bands are read, once."""

    shape: tuple[int, int]
    dtype: np.dtype[Any]
    bands: Iterator[Array]
    """Rows [h, W] from the top to the bottom."""


def read_reading(card: dict[str, Any]) -> Reading:
    """Return how a network was trained to read images, from model.json; raise ValueError if it does not say."""
    missing = "reading" if "reading" not in card else None
    try:
        if missing is None:
            return Reading.from_fields(card["reading"])
    except KeyError as error:
        missing = f"reading.{error.args[0]}"
    raise ValueError(
        f"model.json has no '{missing}', which says how image files become what the network reads: it was written "
        "by an older version. Build the bundle again, or run it with its own infer.py."
    )


def changed_reading(
    reading: Reading,
    *,
    resize: str | None,
    value_range: tuple[float, float] | None,
    overlap: int | None,
    size: tuple[int, int],
) -> tuple[Reading, str]:
    """Return the reading with what options of a command change, and how it differs; empty if it does not.

    `size` is (height, width) of the engine. Raises ValueError for options that do not fit together.
    """
    changed = replace(
        reading,
        resize_mode=resize or reading.resize_mode,
        value_range=value_range or reading.value_range,
        window_overlap=reading.window_overlap if overlap is None else overlap,
    )
    if changed.resize_mode != ResizeMode.windows:
        if overlap is not None:
            raise ValueError(
                f"--overlap is for windows, and images are read by {changed.resize_mode}. Leave it out."
            )
    elif changed.window_overlap is None:
        raise ValueError(
            "windows share pixels with their neighbours. Say how many with --overlap, such as 32."
        )
    elif changed.window_overlap >= min(size):
        raise ValueError(
            f"the overlap is {changed.window_overlap} pixels, expected less than a window of {size[0]} x {size[1]}. "
            "Lower --overlap."
        )
    pairs = {
        "resize": (changed.resize_mode, reading.resize_mode),
        "value range": (changed.value_range, reading.value_range),
        "overlap": (changed.window_overlap, reading.window_overlap),
    }
    if changed.resize_mode != ResizeMode.windows:
        del pairs["overlap"]
    differences = [f"{name} {now}, measured {was}" for name, (now, was) in pairs.items() if now != was]
    return changed, f"reads otherwise than it was measured: {'; '.join(differences)}" if differences else ""


def is_cut(shape: Sequence[int], size: tuple[int, int], reading: Reading) -> bool:
    """Return whether an image of this shape is covered by windows; one of the engine's size is a frame."""
    return reading.resize_mode == ResizeMode.windows and tuple(shape[:2]) != size


def fit_frame(image_HWC: Array, *, size: tuple[int, int], mode: str) -> Array:
    """Bring an image that is not cut into windows to the engine's size (height, width)."""
    if image_HWC.shape[:2] == size:
        return image_HWC
    return fit_image(image_HWC, height=size[0], width=size[1], mode=mode)


def answer_fitted(image_HWC: Array, answer: AnswerBatch, *, card: dict[str, Any], mode: str) -> Array:
    """Return the answer to one image that is brought to the engine's size; a mask in the image's own size."""
    found: Array = answer(fit_frame(image_HWC, size=(card["height"], card["width"]), mode=mode)[None])[0]
    if card["task"] != "segmentation":
        return found
    return restore_mask(found, size=image_HWC.shape[:2], mode=mode)


def answer_windows(image: Image, answer: AnswerBatch, *, card: dict[str, Any], overlap: int) -> MaskBands:
    """Return the mask of one image that windows cover; row by row of windows, so that no more of it is in memory.

    Raises ValueError for engines that give no masks.
    """
    if card["task"] != "segmentation":
        raise ValueError(
            f"windows are for masks, and the engine gives {card['task']}. Choose another --resize."
        )
    height, width = image.shape[:2]
    windows = cover(
        height,
        width,
        window_height=card["height"],
        window_width=card["width"],
        overlap=overlap,
        is_owned_once=True,
    )
    bands = (
        _answer_row(image, list(row), answer, card)
        for _, row in itertools.groupby(windows, key=lambda window: window.rows)
    )
    first = next(bands)
    return MaskBands((height, width), first.dtype, itertools.chain([first], bands))


def cut_batches(num_images: int, ranges: list[list[int]]) -> Iterator[slice]:
    """Split the images into the largest batches that the engine accepts; `ranges` are (lowest, highest) pairs."""
    start = 0
    while start < num_images:
        left = num_images - start
        size = max(min(highest, left) for lowest, highest in ranges if lowest <= left)
        yield slice(start, start + size)
        start += size


def joined(mask: MaskBands) -> Array:
    """Return a mask as one array."""
    mask_HW = np.empty(mask.shape, mask.dtype)
    top = 0
    for band in mask.bands:
        mask_HW[top : top + len(band)] = band
        top += len(band)
    return mask_HW


def _answer_row(image: Image, windows: list[Window], answer: AnswerBatch, card: dict[str, Any]) -> Array:
    """Return the rows of the mask that a row of windows owns."""
    height, width, rows = card["height"], card["width"], windows[0].rows
    strip = image[rows.start : rows.start + height]
    inside = slice(rows.first - rows.start, rows.end - rows.start)
    band: Array | None = None
    for part in cut_batches(len(windows), card["batches"]):
        batch = windows[part]
        frames = [
            cut_image(strip, Window(Span(0, 0, 0), window.columns), height=height, width=width)
            for window in batch
        ]
        masks = answer(np.stack(frames))
        band = np.empty((rows.end - rows.first, image.shape[1]), masks.dtype) if band is None else band
        for window, mask in zip(batch, masks, strict=True):
            columns = window.columns
            owned = mask[inside, columns.first - columns.start : columns.end - columns.start]
            band[:, columns.first : columns.end] = owned
    assert band is not None
    return band
