"""What the values in image files are, before images are decoded: their types, and the range of deep ones.

Types come from the headers of all files, ranges from the values of a sample. H height, W width, C channels.
"""

from __future__ import annotations

import io
import logging
import math
import struct
import zlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tasks.core.errors import DataError
from tasks.parts.data.image_files import (
    EncodedImage,
    UnreadableImage,
    pillow_without_own_cap,
    png_depth,
    thread_pool,
)
from tasks.parts.reading.files import HIGH_BYTES_OF_PNG, is_tiff
from tasks.parts.sources.config import FolderConfig
from tasks.parts.sources.other_formats import name_other_format

if TYPE_CHECKING:
    from numpy.typing import NDArray

logger = logging.getLogger(__name__)

_EIGHT_BITS = ("bool", "uint8")
_MOST_SAMPLED = 64
"""Number of images whose values are looked at; the files are taken from the whole list."""
_MOST_VALUES = 1 << 20
"""Number of values of an image of which percentiles are taken, from all of it."""
_PERCENTILES = (0.1, 99.9)
_LEAST_SHARE = 1 / 8
"""Images whose values fill less of the value range than this have less than 32 of 256 levels."""
_MOST_OUTSIDE = 0.01
"""Share of the values of an image that may lie outside of the value range."""
_MOST_BITS = 16
_PNG_KINDS_WITH_ALPHA = (3, 4, 6)
"""Colour types of PNG: palette, grey with alpha, colours with alpha."""
_OPAQUE = 255
_LEAST_FILLED = 1 / 8
"""A range of whole bits is proposed if the values fill as much of it."""


@dataclass(frozen=True)
class StoredValues:
    """Types of the values in the files of a data set."""

    types: tuple[str, ...]
    """numpy's names of the types, sorted."""
    warnings: tuple[str, ...]


@dataclass(frozen=True)
class _Extent:
    """How far the values of an image reach."""

    lowest: float
    highest: float
    low: float
    """Below it are 0.1 % of the values."""
    high: float
    """Above it are 0.1 % of the values."""
    is_whole: bool
    """Whether the values are whole numbers."""
    share_outside: float
    """Share of the values outside of the configured range."""


class DeepValues(DataError):
    """Images have more than 8 bits, and no range says which values are black and white."""


def check_values(images: Sequence[EncodedImage], config: FolderConfig) -> StoredValues:
    """Return the types of the values in files; raise DeepValues for more than 8 bits without a `value_range`.

    The error proposes a range that it measured. With a range, images that fill little of it or exceed it are warned
    of. Files that cannot be read are passed over: decoding says what is wrong with them.
    """
    with pillow_without_own_cap(), thread_pool() as pool:
        found = zip(images, pool.map(lambda image: _header_of(image, config), images), strict=True)
        headers = [(image, header) for image, header in found if header]
    types = Counter(header.type for _, header in headers)
    deep = [(image, header) for image, header in headers if header.type not in _EIGHT_BITS]
    alpha = _alpha_warnings(headers) if config.channels in (1, 3) else []
    names = tuple(sorted({"uint8" if name in _EIGHT_BITS else name for name in types} or {"uint8"}))
    if not deep:
        return StoredValues(names, (*alpha, *_unused_range_warnings(headers, config.value_range)))
    small = [image for image, header in deep if header.num_pixels <= config.max_pixels]
    sample = small[:: max(1, -(-len(small) // _MOST_SAMPLED))]
    with thread_pool() as pool:
        extents = zip(sample, pool.map(lambda image: _extent_of(image, config), sample), strict=True)
        measured = [(image, extent) for image, extent in extents if extent]
    if config.value_range is None:
        raise DeepValues(_proposal([image for image, _ in deep], types, [extent for _, extent in measured]))
    warnings = [*_range_warnings(measured, config.value_range), *_mixed_type_warnings(types)]
    return StoredValues(names, (*alpha, *warnings))


def read_stored(image: EncodedImage) -> NDArray[Any]:
    """Decode the values of a .npy, TIFF or PNG file of more than 8 bits as they are stored."""
    import imagecodecs
    import numpy as np
    import tifffile

    suffix, content = Path(str(image)).suffix.lower(), image.read_bytes()
    if suffix == ".npy":
        array: NDArray[Any] = np.load(io.BytesIO(content), allow_pickle=False)
        return array
    if suffix == ".png" or content[:4] == b"\x89PNG":
        return np.asarray(imagecodecs.png_decode(content))
    return np.asarray(tifffile.imread(io.BytesIO(content)))


@dataclass(frozen=True)
class _Header:
    """What the header of a file says."""

    type: str
    """numpy's name of the type of the values."""
    num_pixels: int = 0
    """Height times width; 0 for 8 bits, where nobody asks."""
    is_opaque: bool | None = None
    """Whether all pixels are opaque; None without an alpha channel."""


def _header_of(image: EncodedImage, config: FolderConfig) -> _Header | None:
    """Read the header of a file; None for a file that cannot be read."""
    import numpy as np
    from tifffile import TiffFile, TiffFileError

    suffix = Path(str(image)).suffix.lower()
    try:
        if suffix == ".npy":
            array = (
                np.load(image, mmap_mode="r", allow_pickle=False)
                if isinstance(image, Path)
                else np.load(io.BytesIO(image.read_bytes()), allow_pickle=False)
            )
            return _Header(array.dtype.name, math.prod(array.shape[:2]))
        if is_tiff(image):
            with TiffFile(image if isinstance(image, Path) else io.BytesIO(image.read_bytes())) as tiff:
                page = tiff.pages[0].aspage()
            if page.dtype is None:
                return None
            name = str(np.dtype(page.dtype).name)
            has_alpha = name == "uint8" and page.samplesperpixel in (2, 4) and len(tiff.pages) == 1
            num_pixels = page.imagewidth * page.imagelength
            return _Header(name, num_pixels, _is_opaque(image, config) if has_alpha else None)
        depth = png_depth(image)
    except (OSError, ValueError, EOFError, TypeError, KeyError, IndexError, TiffFileError, UnreadableImage):
        name_other_format(image)
        return None
    if depth is None:
        name_other_format(image)
    if depth is None:
        return _Header("uint8")
    is_opaque = _is_opaque(image, config) if depth[1] in _PNG_KINDS_WITH_ALPHA else None
    return (
        _Header("uint16", _pixels_of_png(image), is_opaque)
        if depth[0] == 16
        else _Header("uint8", 0, is_opaque)
    )


def _pixels_of_png(image: EncodedImage) -> int:
    """Return height times width, which follow the name of the first chunk."""
    width, height = struct.unpack_from(">II", image.read_bytes(), 16)
    return int(width * height)


def _is_opaque(image: EncodedImage, config: FolderConfig) -> bool | None:
    """Return whether all pixels of an image are opaque; None without an alpha channel, or for an oversized image."""
    from PIL import Image

    try:
        with Image.open(io.BytesIO(image.read_bytes()), formats=("PNG", "TIFF")) as opened:
            if opened.width * opened.height > config.max_pixels or not opened.has_transparency_data:
                return None
            lowest, _ = opened.convert("RGBA").getchannel("A").getextrema()
    except (OSError, SyntaxError, ValueError, EOFError):
        return None  # decoding says what is wrong
    return lowest == _OPAQUE


def _extent_of(image: EncodedImage, config: FolderConfig) -> _Extent | None:
    """Return how far the values of an image reach; None if it cannot be decoded or holds no numbers."""
    import numpy as np

    try:
        stored = read_stored(image)
    except (OSError, ValueError, EOFError, TypeError, KeyError, IndexError, RuntimeError, zlib.error):
        return None  # decoding says what is wrong
    if stored.dtype.kind not in "uif":
        return None
    values = stored[np.isfinite(stored)] if stored.dtype.kind == "f" else stored.ravel()
    if not values.size:
        return None
    some = values[:: -(-values.size // _MOST_VALUES)].astype(np.float64)
    low, high = np.percentile(some, _PERCENTILES)
    bounds = config.value_range or (-np.inf, np.inf)
    return _Extent(
        lowest=float(values.min()),
        highest=float(values.max()),
        low=float(low),
        high=float(high),
        is_whole=stored.dtype.kind in "ui",
        share_outside=float(np.mean((some < bounds[0]) | (some > bounds[1]))),
    )


def _proposal(deep: Sequence[EncodedImage], types: Mapping[str, int], extents: Sequence[_Extent]) -> str:
    """Return the text that names the values that were found, and the range to set."""
    kinds = ", ".join(f"{count} of {name}" for name, count in sorted(types.items()))
    start = (
        f"{deep[0]}: values of more than 8 bits, in {len(deep)} image(s) ({kinds}), and "
        "prepare_data.folder.value_range is null, so nothing says which values are black and white."
    )
    unread = next((image for image in deep if png_depth_of(image) in HIGH_BYTES_OF_PNG), None)
    if not extents:
        return f"{start} Set it to the lowest and the highest value, such as value_range=[0, 4095]."
    low, high = proposed_range(extents)
    text = (
        f"{start} In {len(extents)} of them, values reach from {_number(min(each.lowest for each in extents))} to "
        f"{_number(max(each.highest for each in extents))}, and 99.8 % lie between "
        f"{_number(min(each.low for each in extents))} and {_number(max(each.high for each in extents))}. Set "
        f"prepare_data.folder.value_range=[{_number(low)}, {_number(high)}]; values outside become black or white."
    )
    if unread is not None:
        text += f" Save {unread} and other PNG files with colours or alpha of 16 bits as TIFF, without alpha."
    return text


def proposed_range(extents: Sequence[_Extent]) -> tuple[float, float]:
    """Return the range of the whole bits that the values need, if they fill it, else their percentiles."""
    low, high = min(each.low for each in extents), max(each.high for each in extents)
    lowest, highest = min(each.lowest for each in extents), max(each.highest for each in extents)
    if all(each.is_whole for each in extents):
        most = 2 ** max(9, int(highest).bit_length()) - 1
        if lowest >= 0 and most < 2**_MOST_BITS and high >= most * _LEAST_FILLED:
            return 0, most
        return float(round(low)), float(max(round(high), round(low) + 1))
    if low == high:
        return low, low + 1
    digits = 3 - len(str(int(high - low))) if high - low >= 1 else 4
    return round(low, max(0, digits)), round(high, max(0, digits))


def png_depth_of(image: EncodedImage) -> tuple[int, int] | None:
    """Return bits and colour type of a PNG file; None for another or an unreadable file."""
    try:
        return png_depth(image)
    except UnreadableImage:
        return None


def _range_warnings(
    measured: Sequence[tuple[EncodedImage, _Extent]], value_range: Sequence[float]
) -> list[str]:
    """Return warnings about images whose values fill little of the range, or exceed it."""
    width = value_range[1] - value_range[0]
    narrow = [found for found in measured if found[1].high - found[1].low < _LEAST_SHARE * width]
    beyond = [found for found in measured if found[1].share_outside > _MOST_OUTSIDE]
    text = f"prepare_data.folder.value_range=[{_number(value_range[0])}, {_number(value_range[1])}]"
    warnings = []
    for found, what in (
        (narrow, "fill less than an eighth of"),
        (beyond, "have over 1 % of their values outside"),
    ):
        if found:
            place, first = found[0]
            low, high = proposed_range([extent for _, extent in measured])
            warnings.append(
                f"{len(found)} of {len(measured)} images that were looked at {what} {text}, such as {place}, "
                f"whose values reach from {_number(first.lowest)} to {_number(first.highest)}. Those of all fit into "
                f"[{_number(low)}, {_number(high)}]."
            )
    return warnings


def _alpha_warnings(headers: Sequence[tuple[EncodedImage, _Header]]) -> list[str]:
    """Return a warning that counts the images with an alpha channel, which no network sees."""
    with_alpha = [(image, header) for image, header in headers if header.is_opaque is not None]
    if not with_alpha:
        return []
    text = f"{len(with_alpha)} image(s) have an alpha channel, which networks do not see"
    open_ones = [image for image, header in with_alpha if not header.is_opaque]
    if not open_ones:
        return [f"{text}; all their pixels are opaque."]
    return [
        f"{text}: pixels of {len(open_ones)} of them are not opaque and are laid on black, such as in "
        f"{open_ones[0]}. Save them without alpha if another background is meant."
    ]


def _unused_range_warnings(
    headers: Sequence[tuple[EncodedImage, _Header]], value_range: Sequence[float] | None
) -> list[str]:
    """Return a warning about a range where all images have 8 bits, which are taken as they are."""
    if value_range is None or not headers:
        return []
    return [
        f"prepare_data.folder.value_range is [{_number(value_range[0])}, {_number(value_range[1])}], and all images "
        f"have 8 bits, such as {headers[0][0]}: they are taken as they are. Set it to null, or bring the images of "
        "more bits."
    ]


def _mixed_type_warnings(types: Mapping[str, int]) -> list[str]:
    """Return a warning if some files have 8 bits and others more: the range is that of the others alone."""
    num_shallow = sum(count for name, count in types.items() if name in _EIGHT_BITS)
    if not num_shallow:
        return []
    return [
        f"{num_shallow} image(s) have 8 bits and {sum(types.values()) - num_shallow} more: only values of the "
        "latter are scaled by prepare_data.folder.value_range."
    ]


def _number(value: float) -> str:
    return f"{value:.6g}"
