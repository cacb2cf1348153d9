"""Bring images and masks to one size, and masks back to the size of their image. H height, W width, C channels."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .packages import pillow
from .rules import IGNORED, LETTERBOX, ResizeMode

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


def fit_image(image_HWC: NDArray[np.uint8], *, height: int, width: int, mode: str) -> NDArray[np.uint8]:
    """Bring an image to a size: stretched, cropped and padded with black, or letterboxed."""
    if image_HWC.shape[:2] == (height, width):
        return image_HWC
    if mode == LETTERBOX:
        image_HWC = _resize(image_HWC, *letterbox_inside(image_HWC.shape[:2], (height, width)))
    return (
        _resize(image_HWC, height, width) if mode == ResizeMode.resize else _crop(image_HWC, height, width, 0)
    )


def fit_mask(
    mask_HW: NDArray[np.uint8], *, height: int, width: int, mode: str, fill: int
) -> NDArray[np.uint8]:
    """Bring a mask to a size: nearest neighbour, or cropped and padded with the value `fill`."""
    import numpy as np

    if mask_HW.shape == (height, width):
        return mask_HW
    if mode == ResizeMode.crop:
        return _crop(mask_HW, height, width, fill)
    image = pillow().Image
    return np.asarray(image.fromarray(mask_HW).resize((width, height), image.Resampling.NEAREST), np.uint8)


def restore_mask(mask_HW: NDArray[Any], *, size: tuple[int, int], mode: str) -> NDArray[Any]:
    """Bring the mask of a fitted image to the `size` (height, width) of that image; IGNORED where it was cut off.

    Of the pixels that were stretched, each takes the nearest: the one in which its centre lies.
    """
    import numpy as np

    if mask_HW.shape == size:
        return mask_HW
    if mode == ResizeMode.crop:
        return _crop(mask_HW, *size, IGNORED)
    if mode == LETTERBOX:
        mask_HW = _crop(mask_HW, *letterbox_inside(size, mask_HW.shape), 0)
    rows, columns = (
        (2 * np.arange(new) + 1) * old // (2 * new) for new, old in zip(size, mask_HW.shape, strict=True)
    )
    restored_HW: NDArray[Any] = mask_HW.take(columns, axis=1).take(rows, axis=0)
    return restored_HW


def letterbox_inside(size: tuple[int, ...], frame: tuple[int, ...]) -> tuple[int, int]:
    """Return the largest size (height, width) of the shape of `size` that fits into `frame`."""
    scale = min(frame[0] / size[0], frame[1] / size[1])
    return max(1, round(size[0] * scale)), max(1, round(size[1] * scale))


def _resize(image_HWC: NDArray[np.uint8], height: int, width: int) -> NDArray[np.uint8]:
    import numpy as np

    if image_HWC.shape[:2] == (height, width):
        return image_HWC
    image = pillow().Image
    parts = [image_HWC] if image_HWC.shape[2] == 3 else list(np.moveaxis(image_HWC, -1, 0))
    resized = [
        np.asarray(image.fromarray(part).resize((width, height), image.Resampling.BILINEAR), np.uint8)
        for part in parts
    ]
    return np.dstack(resized)


def _crop(array: NDArray[Any], height: int, width: int, fill: int) -> NDArray[Any]:
    """Crop to the centre of the first two axes, padded if the array is smaller. It is its own inverse."""
    import numpy as np

    top, left = max(0, array.shape[0] - height) // 2, max(0, array.shape[1] - width) // 2
    centre = array[top : top + height, left : left + width]
    missing_y, missing_x = height - centre.shape[0], width - centre.shape[1]
    padding = [(missing_y // 2, missing_y - missing_y // 2), (missing_x // 2, missing_x - missing_x // 2)]
    return np.pad(centre, padding + [(0, 0)] * (array.ndim - 2), constant_values=fill)
