"""Decode image files, and bring images and masks to one size. H height, W width, C channels.

Image files become 8-bit RGB, or grey for one channel: grey is repeated, transparent pixels are composited on black,
Pillow converts CMYK and colours, and the EXIF orientation is applied. Images with any number of channels are read
from .npy files, [H, W, C], and TIFF files (tiff.py), as they are. Values of more than 8 bits are scaled from
`value_range` to 0..255; without it, 16-bit values keep their high byte.
"""

from __future__ import annotations

import io
import os
import struct
import zlib
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Protocol

from tasks.core.errors import DataError
from tasks.parts.data.tiff import UnreadableTiff, open_pages, read_bands

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from PIL import Image

_FORMATS = {
    ".png": ("PNG",),
    ".jpg": ("JPEG", "MPO"),
    ".jpeg": ("JPEG", "MPO"),
    ".tif": ("TIFF",),
    ".tiff": ("TIFF",),
}
_ANY_FORMAT = ("PNG", "JPEG", "MPO", "TIFF")
_TIFF_SUFFIXES = (".tif", ".tiff")
_ARRAY_SUFFIX = ".npy"
IMAGE_SUFFIXES = (*_FORMATS, _ARRAY_SUFFIX)
MASK_SUFFIXES = (".png", ".tif", ".tiff")
_DECODER_ERRORS = (OSError, SyntaxError, ValueError, TypeError, EOFError, KeyError, struct.error, zlib.error)
"""Exceptions that Pillow raises for damaged files."""

FILES_PER_BATCH = 64
"""Number of files that are decoded at once."""


class ResizeMode(StrEnum):
    """How an image is brought to the size of the data set."""

    resize = "resize"
    """Stretched: images bilinear (smoothed when they shrink), masks nearest neighbour."""
    crop = "crop"
    """Cropped at the centre without scaling; padding is black and ignored."""
    windows = "windows"
    """Cut into overlapping windows without scaling, so that every pixel of the original is used and counted once."""


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


class EncodedImage(Protocol):
    """An encoded image: a path, or what lies inside a larger file. As text it names its place."""

    def read_bytes(self) -> bytes:
        """Return the bytes of an image file."""


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
    """Decode an image to image_HWC; raise UnreadableImage, OversizedImage or WrongChannels."""
    from PIL import ImageOps

    channels, suffix = config.channels, Path(str(image)).suffix.lower()
    if suffix == _ARRAY_SUFFIX:
        return _read_array(image, config)
    image = image if isinstance(image, Path) else _Content(str(image), image.read_bytes())
    if suffix in _TIFF_SUFFIXES:
        bands_HWC = _read_tiff(image, config)
        if bands_HWC is not None:
            return bands_HWC
    if channels not in (1, 3):
        raise WrongChannels(
            f"{image}: an image file, and prepare_data.folder.channels is {channels}; image files give 1 or 3. "
            "Save the image as TIFF of so many bands or with numpy.save as uint8 [height, width, channels], or set "
            "channels to 1 or 3."
        )
    if config.value_range is not None and _has_deep_colours(image):
        raise WrongChannels(
            f"{image}: colours of 16 bits, of which only the high byte can be read, and "
            "prepare_data.folder.value_range is set. Save the image as TIFF, or set it to null."
        )
    with decoded(image, config.max_pixels) as opened:
        ImageOps.exif_transpose(opened, in_place=True)
        return _to_8_bits(opened, config)


def fit(
    image_HWC: NDArray[np.uint8],
    mask_HW: NDArray[np.uint8],
    *,
    height: int,
    width: int,
    mode: ResizeMode,
    fill: int,
) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    """Bring an image and its mask to one size; mask pixels outside the image get the value `fill`."""
    return (
        fit_image(image_HWC, height=height, width=width, mode=mode),
        fit_mask(mask_HW, height=height, width=width, mode=mode, fill=fill),
    )


def fit_image(
    image_HWC: NDArray[np.uint8], *, height: int, width: int, mode: ResizeMode
) -> NDArray[np.uint8]:
    """Bring an image to a size: stretched, or cropped and padded with black."""
    import numpy as np
    from PIL import Image

    if image_HWC.shape[:2] == (height, width):
        return image_HWC
    if mode is ResizeMode.crop:
        return _crop(image_HWC, height, width, 0)
    parts = [image_HWC] if image_HWC.shape[2] == 3 else list(np.moveaxis(image_HWC, -1, 0))
    resized = [
        _as_array(Image.fromarray(part).resize((width, height), Image.Resampling.BILINEAR)) for part in parts
    ]
    return np.dstack(resized)


def fit_mask(
    mask_HW: NDArray[np.uint8], *, height: int, width: int, mode: ResizeMode, fill: int
) -> NDArray[np.uint8]:
    """Bring a mask to a size: nearest neighbour, or cropped and padded with the value `fill`."""
    from PIL import Image

    if mask_HW.shape == (height, width):
        return mask_HW
    if mode is ResizeMode.crop:
        return _crop(mask_HW, height, width, fill)
    return _as_array(Image.fromarray(mask_HW).resize((width, height), Image.Resampling.NEAREST))


@contextmanager
def decoded(source: EncodedImage, max_pixels: int) -> Iterator[Image.Image]:
    """Open an image file, check its kind and size from the header, then decode it."""
    from PIL import Image

    formats = _FORMATS[source.suffix.lower()] if isinstance(source, Path) else _ANY_FORMAT
    try:
        content = source.read_bytes()
        if not content:
            raise UnreadableImage(f"{source}: 0 bytes. Restore the file, or remove it with its mask.")
        # Not by its path: Pillow would map an uncompressed TIFF, and mixes up its pixels when it turns them.
        with Image.open(io.BytesIO(content), formats=("PNG", "JPEG", "TIFF")) as image:
            if image.format not in formats:
                raise UnreadableImage(
                    f"{source}: the content is {image.format}, but the name says {formats[0]}. Rename or convert "
                    "it."
                )
            check_pixels(source, image.width, image.height, max_pixels)
            image.load()
            yield image
    except _DECODER_ERRORS as error:
        raise UnreadableImage(
            f"{source}: cannot be decoded as {formats[0]} ({error}). Restore the file, or remove it with its "
            "mask."
        ) from error


def check_pixels(source: object, width: int, height: int, max_pixels: int) -> None:
    """Raise OversizedImage for an image of too many pixels."""
    if width * height > max_pixels:
        raise OversizedImage(
            f"{source}: {width} x {height} pixels, at most {max_pixels / 1e6:g} megapixels are allowed. Cut it "
            "into tiles, or raise prepare_data.folder.max_megapixels."
        )


def _read_array(path: EncodedImage, config: DecodingRules) -> NDArray[np.uint8]:
    import numpy as np

    try:
        image: NDArray[Any] = (
            np.load(path, mmap_mode="r", allow_pickle=False)
            if isinstance(path, Path)
            else np.load(io.BytesIO(path.read_bytes()), allow_pickle=False)
        )
    except (OSError, ValueError, EOFError) as error:
        raise UnreadableImage(
            f"{path}: cannot be read as .npy ({error}). Restore the file, or remove it."
        ) from error
    if image.ndim == 2:
        image = image[..., None]
    is_scaled = config.value_range is not None and image.dtype.kind in "uif"
    is_readable = image.dtype == np.uint8 or is_scaled
    if not is_readable or image.ndim != 3 or image.shape[2] != config.channels or not image.size:
        raise WrongChannels(
            f"{path}: holds {image.dtype} {list(image.shape)}, expected uint8 [height, width, {config.channels}]. "
            "Scale the values to 0..255 or set prepare_data.folder.value_range, or set "
            "prepare_data.folder.channels."
        )
    check_pixels(path, image.shape[1], image.shape[0], config.max_pixels)
    return scale_values(np.ascontiguousarray(image), config)


def _read_tiff(image: EncodedImage, config: DecodingRules) -> NDArray[np.uint8] | None:
    """Decode a TIFF file that Pillow cannot: of several pages, other bands than 1 or 3, deep colours; else None."""
    import numpy as np
    from PIL import Image

    channels, place = config.channels, str(image)
    try:
        with _open(image) as file:
            if not file.read(1):
                return None  # the usual error says so
            file.seek(0)
            with open_pages(file, place) as pages:
                first, num_bands = pages[0], sum(page.samplesperpixel for page in pages)
                dtype = np.dtype(first.dtype)
                is_usual = len(pages) == 1 and (
                    dtype in (np.uint8, bool) or (num_bands == 1 and dtype == np.uint16)
                )
                if is_usual and channels in (1, 3):
                    return None
                check_pixels(place, first.imagewidth, first.imagelength, config.max_pixels)
                if channels != num_bands and (channels, num_bands) not in ((3, 1), (1, 3)):
                    raise WrongChannels(
                        f"{place}: has {num_bands} band(s) on {len(pages)} page(s), and prepare_data.folder.channels "
                        f"is {channels}. Set it to {num_bands}, or save the bands that you need."
                    )
                if config.value_range is None and dtype not in (np.uint8, np.uint16):
                    raise WrongChannels(
                        f"{place}: holds values of type {dtype.name}. Set prepare_data.folder.value_range to the "
                        "lowest and the highest value."
                    )
                values_HWC = scale_values(read_bands(place, pages), config)
    except UnreadableTiff as error:
        raise UnreadableImage(str(error)) from error
    if channels == num_bands:
        return values_HWC
    if channels == 3:
        return np.repeat(values_HWC, 3, axis=2)
    return _as_array(Image.fromarray(values_HWC).convert("L"))[..., None]


def png_depth(image: EncodedImage) -> tuple[int, int] | None:
    """Return the bits of a value and the colour type of a PNG file, from its header; None for another file."""
    with _open(image) as file:
        header = file.read(26)
    return (header[24], header[25]) if header[:4] == b"\x89PNG" and len(header) == 26 else None


def _has_deep_colours(image: EncodedImage) -> bool:
    """Return whether a PNG file has more than one channel of 16 bits."""
    return png_depth(image) in ((16, 2), (16, 6))


def _open(image: EncodedImage) -> BinaryIO:
    try:
        return image.open("rb") if isinstance(image, Path) else io.BytesIO(image.read_bytes())
    except OSError as error:
        raise UnreadableImage(f"{image}: cannot be read ({error}). Restore the file.") from error


@dataclass(frozen=True)
class _Content:
    """An encoded image that was read, so that it is read once."""

    place: str
    content: bytes

    def __str__(self) -> str:
        return self.place

    def read_bytes(self) -> bytes:
        return self.content


def scale_values(values: NDArray[Any], config: DecodingRules) -> NDArray[np.uint8]:
    """Return values as 8 bits: as they are, the high byte of 16 bits, or `value_range` as 0..255."""
    import numpy as np

    if values.dtype == np.uint8:
        return values
    if config.value_range is None:
        return (values.astype(np.int64) >> 8).clip(0, 255).astype(np.uint8)
    low, high = config.value_range
    scaled = (np.nan_to_num(values.astype(np.float32), nan=low) - low) * np.float32(255 / (high - low))
    eight_bits: NDArray[np.uint8] = np.rint(scaled.clip(0, 255)).astype(np.uint8)
    return eight_bits


def _to_8_bits(image: Image.Image, config: DecodingRules) -> NDArray[np.uint8]:
    import numpy as np
    from PIL import Image

    is_grey = config.channels == 1
    if image.mode.startswith("I"):
        grey_HW = scale_values(np.asarray(image), config)
        return np.repeat(grey_HW[..., None], 1 if is_grey else 3, axis=2)
    if image.has_transparency_data:
        black = Image.new("RGBA", image.size, (0, 0, 0, 255))
        image = Image.alpha_composite(black, image.convert("RGBA"))
    mode = "L" if is_grey else "RGB"
    values = _as_array(image if image.mode == mode else image.convert(mode))  # convert copies in any case
    return values[..., None] if is_grey else values


def _as_array(image: Image.Image) -> NDArray[np.uint8]:
    import numpy as np

    return np.asarray(image, dtype=np.uint8)


def _crop(array: NDArray[Any], height: int, width: int, fill: int) -> NDArray[Any]:
    """Crop to the centre of the first two axes, padded if the array is smaller."""
    import numpy as np

    top, left = max(0, array.shape[0] - height) // 2, max(0, array.shape[1] - width) // 2
    centre = array[top : top + height, left : left + width]
    missing_y, missing_x = height - centre.shape[0], width - centre.shape[1]
    padding = [(missing_y // 2, missing_y - missing_y // 2), (missing_x // 2, missing_x - missing_x // 2)]
    return np.pad(centre, padding + [(0, 0)] * (array.ndim - 2), constant_values=fill)
