"""Decode image files. H height, W width, C channels.

Image files become 8-bit RGB, or grey for one channel: grey is repeated, transparent pixels are composited on black,
Pillow converts CMYK, palettes and colours, and the EXIF orientation is applied. Images with any number of channels
are read from .npy files, [H, W, C] or [H, W], and TIFF files (tiff.py), as they are. Values of more than 8 bits are
scaled from `value_range` to 0..255, and refused without it.
"""

from __future__ import annotations

import io
import struct
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Protocol

from .packages import pillow
from .rules import OversizedImage, Rules, UnreadableImage, WrongChannels
from .tiff import open_pages, read_bands
from .values import scale_values

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
    ".bmp": ("BMP",),
    ".webp": ("WEBP",),
}
_ANY_FORMAT = ("PNG", "JPEG", "MPO", "TIFF", "BMP", "WEBP")
TIFF_SUFFIXES = (".tif", ".tiff")
_TIFF_STARTS = (b"II*\0", b"MM\0*", b"II+\0", b"MM\0+")
_GREY_ALPHA = "grey with alpha"
HIGH_BYTES_OF_PNG: dict[tuple[int, int] | None, str] = {
    (16, 2): "colours",
    (16, 4): _GREY_ALPHA,
    (16, 6): "colours",
}
"""Bits and colour type of PNG files of which Pillow gives the high byte alone -> what such files hold."""
ARRAY_SUFFIX = ".npy"
PILLOW_SUFFIXES = tuple(_FORMATS)
"""What Pillow decodes; TIFF files that it cannot decode are tifffile's."""
_DECODER_ERRORS = (OSError, SyntaxError, ValueError, TypeError, EOFError, KeyError, struct.error, zlib.error)
"""Exceptions that Pillow raises for damaged files."""


class EncodedImage(Protocol):
    """An encoded image: a path, or what lies inside a larger file. As text it names its place."""

    def read_bytes(self) -> bytes:
        """Return the bytes of an image file."""


def read_image(image: EncodedImage, rules: Rules) -> NDArray[np.uint8]:
    """Decode an image to image_HWC; raise UnreadableImage, OversizedImage, WrongChannels or UnscaledValues."""
    return scale_image(read_values(image, rules), rules, image)


def scale_image(values_HWC: NDArray[Any], rules: Rules, place: object) -> NDArray[np.uint8]:
    """Bring what `read_values` gave, or a frame that was decoded elsewhere, to 8 bits and the channels of the rules.

    A single band becomes three, and three become grey; raise WrongChannels for others.
    """
    import numpy as np

    num_bands = values_HWC.shape[2]
    if num_bands != rules.channels and (rules.channels, num_bands) not in ((3, 1), (1, 3)):
        raise WrongChannels(
            f"{place}: has {num_bands} channel(s), expected {rules.channels}. {rules.advice.on_channels(num_bands)}"
        )
    image_HWC = scale_values(values_HWC, rules, place)
    if num_bands == rules.channels:
        return image_HWC
    if num_bands == 1:
        return np.repeat(image_HWC, 3, axis=2)
    return np.asarray(pillow().Image.fromarray(image_HWC).convert("L"), np.uint8)[..., None]


def read_values(image: EncodedImage, rules: Rules) -> NDArray[Any]:
    """Decode an image to values_HWC of the type in the file, which `scale_image` brings to 8 bits."""
    suffix = Path(str(image)).suffix.lower()
    if suffix == ARRAY_SUFFIX:
        return _read_array(image, rules)
    image = image if isinstance(image, Path) else _Content(str(image), image.read_bytes())
    if is_tiff(image):
        bands_HWC = _read_tiff(image, rules)
        if bands_HWC is not None:
            return bands_HWC
    if rules.channels not in (1, 3):
        raise WrongChannels(
            f"{image}: an image file, which gives 1 or 3 channels, expected {rules.channels}. Save it as TIFF of so "
            f"many bands, or with numpy.save as [height, width, channels]. {rules.advice.on_channels(3)}"
        )
    if (kind := HIGH_BYTES_OF_PNG.get(png_depth(image))) is not None:
        raise WrongChannels(
            f"{image}: {kind} of 16 bits, of which only the high byte can be read from PNG, expected grey of 16 "
            f"bits or colours of 8. Save the image {'without' if kind == _GREY_ALPHA else 'as TIFF, without'} alpha."
        )
    with decoded(image, rules) as opened:
        pillow().ImageOps.exif_transpose(opened, in_place=True)
        return _values_of(opened, rules)


@contextmanager
def decoded(source: EncodedImage, rules: Rules) -> Iterator[Image.Image]:
    """Open an image file, check its kind and size from the header, then decode it."""
    image_module = pillow().Image
    formats = _FORMATS[source.suffix.lower()] if isinstance(source, Path) else _ANY_FORMAT
    try:
        content = source.read_bytes()
        if not content:
            raise UnreadableImage(f"{source}: 0 bytes. Restore the file, or remove it with its mask.")
        # Not by its path: Pillow would map an uncompressed TIFF, and mixes up its pixels when it turns them.
        with image_module.open(io.BytesIO(content), formats=("PNG", "JPEG", "TIFF", "BMP", "WEBP")) as image:
            if image.format not in formats:
                raise UnreadableImage(
                    f"{source}: the content is {image.format}, but the name says {formats[0]}. Rename or convert "
                    "it."
                )
            check_pixels(source, image.width, image.height, rules)
            image.load()
            yield image
    except (UnreadableImage, OversizedImage, WrongChannels):
        raise  # which are ValueErrors, as decoders raise them
    except (*_DECODER_ERRORS, image_module.DecompressionBombError) as error:
        raise UnreadableImage(
            f"{source}: cannot be decoded as {formats[0]} ({error}). Restore the file, or remove it with its "
            "mask."
        ) from error


def check_pixels(source: object, width: int, height: int, rules: Rules) -> None:
    """Raise OversizedImage for an image of too many pixels."""
    if width * height > rules.max_pixels:
        raise OversizedImage(
            f"{source}: {width} x {height} pixels, at most {rules.max_pixels / 1e6:g} megapixels are allowed. "
            f"{rules.advice.max_pixels}"
        )


def is_tiff(image: EncodedImage) -> bool:
    """Return whether an image is a TIFF file by its name or, of what is no file of its own, by its first bytes."""
    if Path(str(image)).suffix.lower() in TIFF_SUFFIXES:
        return True
    return not isinstance(image, Path) and image.read_bytes()[:4] in _TIFF_STARTS


def png_depth(image: EncodedImage) -> tuple[int, int] | None:
    """Return the bits of a value and the colour type of a PNG file, from its header; None for another file."""
    with open_file(image) as file:
        header = file.read(26)
    return (header[24], header[25]) if header[:4] == b"\x89PNG" and len(header) == 26 else None


def open_file(image: EncodedImage) -> BinaryIO:
    """Open an encoded image for reading."""
    try:
        return image.open("rb") if isinstance(image, Path) else io.BytesIO(image.read_bytes())
    except OSError as error:
        raise UnreadableImage(f"{image}: cannot be read ({error}). Restore the file.") from error


def _read_array(path: EncodedImage, rules: Rules) -> NDArray[Any]:
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
    is_readable = image.dtype == np.uint8 or (rules.value_range is not None and image.dtype.kind in "uif")
    if image.ndim != 3 or image.shape[2] != rules.channels or not image.size:
        raise WrongChannels(
            f"{path}: holds {image.dtype} {list(image.shape)}, expected uint8 [height, width, {rules.channels}]. "
            f"{'' if is_readable else rules.advice.value_range + ' '}{rules.advice.on_channels(image.shape[-1])}"
        )
    check_pixels(path, image.shape[1], image.shape[0], rules)
    return np.array(image)


def _read_tiff(image: EncodedImage, rules: Rules) -> NDArray[Any] | None:
    """Decode a TIFF file that Pillow cannot: of several pages, other bands than 1 or 3, deep colours; else None."""
    import numpy as np

    place = str(image)
    with open_file(image) as file:
        if not file.read(1):
            return None  # the usual error says so
        file.seek(0)
        with open_pages(file, place) as pages:
            first, num_bands = pages[0], sum(page.samplesperpixel for page in pages)
            dtype = np.dtype(first.dtype)
            is_usual = len(pages) == 1 and (
                dtype in (np.uint8, bool) or (num_bands == 1 and dtype == np.uint16)
            )
            if is_usual and rules.channels in (1, 3):
                return None
            check_pixels(place, first.imagewidth, first.imagelength, rules)
            if rules.channels != num_bands and (rules.channels, num_bands) not in ((3, 1), (1, 3)):
                raise WrongChannels(
                    f"{place}: has {num_bands} band(s) on {len(pages)} page(s), expected {rules.channels}. "
                    f"{rules.advice.on_channels(num_bands)}"
                )
            return read_bands(place, pages)


def _values_of(image: Image.Image, rules: Rules) -> NDArray[Any]:
    import numpy as np

    if image.mode.startswith("I"):
        return np.asarray(image)[..., None]
    if image.has_transparency_data:
        black = pillow().Image.new("RGBA", image.size, (0, 0, 0, 255))
        image = pillow().Image.alpha_composite(black, image.convert("RGBA"))
    mode = "L" if rules.channels == 1 else "RGB"
    # convert copies in any case
    values = np.asarray(image if image.mode == mode else image.convert(mode), np.uint8)
    return values[..., None] if rules.channels == 1 else values


@dataclass(frozen=True)
class _Content:
    """An encoded image that was read, so that it is read once."""

    place: str
    content: bytes

    def __str__(self) -> str:
        return self.place

    def read_bytes(self) -> bytes:
        return self.content
