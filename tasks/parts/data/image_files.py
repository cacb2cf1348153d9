"""Decode image files of a data set, and bring images and masks to one size, by the code of every bundle (reading).

What is wrong with a file is a DataError here, which names the key of prepare_data. H height, W width, C channels.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Protocol

from tasks.core.errors import DataError
from tasks.parts.reading import files, sizes
from tasks.parts.reading.files import EncodedImage, png_depth
from tasks.parts.reading.rules import Advice, ReadingError, ResizeMode, Rules
from tasks.parts.reading.rules import OversizedImage as TooManyPixels
from tasks.parts.reading.rules import UnscaledValues as WithoutRange
from tasks.parts.reading.rules import WrongChannels as OtherChannels

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from PIL import Image

__all__ = ["EncodedImage", "ResizeMode", "png_depth"]

IMAGE_SUFFIXES = (".png", ".jpg", ".jpeg", ".tif", ".tiff", ".npy")
MASK_SUFFIXES = (".png", ".tif", ".tiff")

FILES_PER_BATCH = 64
"""Number of files that are decoded at once."""

_ADVICE = Advice(
    channels="Set prepare_data.folder.channels to {found}, or save the bands that you need.",
    value_range="Set prepare_data.folder.value_range to the lowest and the highest value that the images can have.",
    max_pixels="Cut it into tiles, or raise prepare_data.folder.max_megapixels.",
)


class DecodingRules(Protocol):
    """What decides how a file becomes values, besides the file."""

    @property
    def channels(self) -> int:
        """Channels of an image: 1 for grey, 3 for RGB, any number for .npy and TIFF files."""
        ...

    @property
    def max_pixels(self) -> int:
        """Largest number of pixels that an image may have."""
        ...

    @property
    def value_range(self) -> Sequence[float] | None:
        """Lowest and highest value of images of more than 8 bits, or None."""
        ...


class UnreadableImage(DataError):
    """A file is empty, truncated, or not of the type in its name."""


class OversizedImage(DataError):
    """An image has more pixels than allowed."""


class WrongChannels(DataError):
    """An image has other channels than configured."""


class UnscaledValues(WrongChannels):
    """An image has values of more than 8 bits, and no range says what they mean."""

    def __init__(self, text: str, *, dtype: str = "", low: float = 0.0, high: float = 0.0) -> None:
        """Take what was found: numpy's name of the type, the lowest and the highest value; a copy may lack them."""
        super().__init__(text)
        self.dtype, self.low, self.high = dtype, low, high


def thread_pool() -> ThreadPoolExecutor:
    """Return a thread pool that decodes images in parallel."""
    return ThreadPoolExecutor(max_workers=min(8, os.cpu_count() or 1))


@contextmanager
def pillow_without_own_cap() -> Iterator[None]:
    """Turn off Pillow's pixel limit, which is fixed and partly only a warning; the configured one applies."""
    from PIL import Image

    Image.preinit()
    cap, Image.MAX_IMAGE_PIXELS = Image.MAX_IMAGE_PIXELS, None
    try:
        yield
    finally:
        Image.MAX_IMAGE_PIXELS = cap


def read_image(image: EncodedImage, config: DecodingRules) -> NDArray[np.uint8]:
    """Decode an image to image_HWC; raise UnreadableImage, OversizedImage, WrongChannels or UnscaledValues."""
    with _as_data_errors():
        return files.read_image(image, _rules(config))


def read_values(image: EncodedImage, config: DecodingRules) -> NDArray[Any]:
    """Decode an image to values_HWC of the type that the file has; `read_image` scales these to 8 bits."""
    with _as_data_errors():
        return files.read_values(image, _rules(config))


def scale_image(values_HWC: NDArray[Any], config: DecodingRules, place: object) -> NDArray[np.uint8]:
    """Bring what `read_values` gave to 8 bits and the configured channels."""
    with _as_data_errors():
        return files.scale_image(values_HWC, _rules(config), place)


def fit_image(image_HWC: NDArray[np.uint8], *, height: int, width: int, mode: str) -> NDArray[np.uint8]:
    """Bring an image to a size: stretched, or cropped and padded with black."""
    return sizes.fit_image(image_HWC, height=height, width=width, mode=mode)


def fit_mask(
    mask_HW: NDArray[np.uint8], *, height: int, width: int, mode: str, fill: int
) -> NDArray[np.uint8]:
    """Bring a mask to a size: nearest neighbour, or cropped and padded with the value `fill`."""
    return sizes.fit_mask(mask_HW, height=height, width=width, mode=mode, fill=fill)


@contextmanager
def decoded(source: EncodedImage, max_pixels: int) -> Iterator[Image.Image]:
    """Open an image file, check its kind and size from the header, then decode it."""
    rules = Rules(channels=3, max_pixels=max_pixels, value_range=None, advice=_ADVICE)
    with _as_data_errors(), files.decoded(source, rules) as image:
        yield image


def check_pixels(source: object, width: int, height: int, max_pixels: int) -> None:
    """Raise OversizedImage for an image of too many pixels."""
    with _as_data_errors():
        files.check_pixels(source, width, height, Rules(3, max_pixels, None, _ADVICE))


def _rules(config: DecodingRules) -> Rules:
    low_high = config.value_range
    value_range = None if low_high is None else (low_high[0], low_high[1])
    return Rules(config.channels, config.max_pixels, value_range, _ADVICE)


@contextmanager
def _as_data_errors() -> Iterator[None]:
    """Turn what the reading raises into the DataError of the same meaning and text."""
    try:
        yield
    except WithoutRange as error:
        raise UnscaledValues(str(error), dtype=error.dtype, low=error.low, high=error.high) from error
    except OtherChannels as error:
        raise WrongChannels(str(error)) from error
    except TooManyPixels as error:
        raise OversizedImage(str(error)) from error
    except ReadingError as error:
        raise UnreadableImage(str(error)) from error
