"""Find and read a user's images and masks, and bring them to one size. H height, W width, C channels.

Image files become 8-bit RGB, or grey for one channel: grey is repeated, transparent pixels are composited on black,
16-bit values keep their high byte, Pillow converts CMYK and colours, and the EXIF orientation is applied. Images with
any number of channels are read from .npy files, uint8 [H, W, C], as they are. Masks are read as stored: grey or
palette indices.
"""

from __future__ import annotations

import os
import struct
import unicodedata
import zlib
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tasks.core.errors import DataError
from tasks.parts.sources.class_list import check_relative_name
from tasks.parts.sources.config import ResizeMode

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from PIL import Image

_FORMATS = {".png": ("PNG",), ".jpg": ("JPEG", "MPO"), ".jpeg": ("JPEG", "MPO")}
_ARRAY_SUFFIX = ".npy"
IMAGE_SUFFIXES = (*_FORMATS, _ARRAY_SUFFIX)
_DECODER_ERRORS = (OSError, SyntaxError, ValueError, TypeError, EOFError, KeyError, struct.error, zlib.error)
"""Exceptions that Pillow raises for damaged files."""

FILES_PER_BATCH = 64
"""Number of files that are decoded at once."""


class UnreadableImage(DataError):
    """A file is empty, truncated, or not of the type in its name."""


class OversizedImage(DataError):
    """An image has more pixels than allowed."""


class WrongChannels(DataError):
    """An image has other channels than configured."""


class ColourMask(DataError):
    """A mask holds colours instead of class indices."""


def list_files(folder: Path, suffixes: Iterable[str]) -> dict[str, Path]:
    """Map the name of each file below a folder to its path, without hidden files and other suffixes."""
    if not folder.is_dir() or folder.is_symlink():
        raise DataError(
            f"{folder}: not a folder. Expected images/ and masks/ in prepare_data.root, and no symbolic links."
        )
    paths: dict[str, Path] = {}
    for parent, folders, files in os.walk(folder):
        for entry in (*folders, *files):
            path = Path(parent, entry)
            if not file_name_is_text(path):
                raise DataError(f"{os.fsencode(path)!r}: the file name is not UTF-8. Rename it.")
            if path.is_symlink():
                raise DataError(
                    f"{path}: is a symbolic link, which is refused. Replace it by the file itself."
                )
        folders[:] = [name for name in folders if not name.startswith(".")]
        for path in (Path(parent, name) for name in files if not name.startswith(".")):
            if path.suffix.lower() not in suffixes:
                continue
            # macOS stores é as two characters; without normalisation, image and mask names might not match.
            name = unicodedata.normalize("NFC", path.relative_to(folder).with_suffix("").as_posix())
            check_relative_name(name, source=folder)
            if name in paths:
                raise DataError(
                    f"{path}: has the same name as {paths[name]}. Each mask belongs to one image: rename one."
                )
            paths[name] = path
    return paths


def file_name_is_text(path: str | os.PathLike[str]) -> bool:
    """Return whether a file name is valid UTF-8, so that logs, reports and manifests can hold it."""
    try:
        os.fspath(path).encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


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


def read_image(path: Path, *, max_pixels: int, channels: int) -> NDArray[np.uint8]:
    """Decode an image to image_HWC; raise UnreadableImage, OversizedImage or WrongChannels."""
    from PIL import ImageOps

    if path.suffix.lower() == _ARRAY_SUFFIX:
        return _read_array(path, max_pixels, channels)
    if channels not in (1, 3):
        raise WrongChannels(
            f"{path}: an image file, and prepare_data.folder.channels is {channels}; image files give 1 or 3. "
            "Save the image with numpy.save as uint8 [height, width, channels], or set channels to 1 or 3."
        )
    with _decoded(path, max_pixels) as image:
        return _to_8_bits(ImageOps.exif_transpose(image), is_grey=channels == 1)


def read_mask(path: Path, *, max_pixels: int) -> NDArray[np.uint16]:
    """Decode an index mask to mask_HW; raise UnreadableImage, OversizedImage or ColourMask."""
    import numpy as np

    with _decoded(path, max_pixels) as image:
        if image.mode in ("1", "L", "P"):
            return np.asarray(image).astype(np.uint16)
        if image.mode.startswith("I"):
            return np.asarray(image).astype(np.uint16)
        raise ColourMask(_colour_mask_text(path, image))


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
    import numpy as np
    from PIL import Image

    if mask_HW.shape == (height, width):
        return image_HWC, mask_HW
    if mode is ResizeMode.crop:
        return _crop(image_HWC, height, width, 0), _crop(mask_HW, height, width, fill)
    parts = [image_HWC] if image_HWC.shape[2] == 3 else list(np.moveaxis(image_HWC, -1, 0))
    resized = [
        _as_array(Image.fromarray(part).resize((width, height), Image.Resampling.BILINEAR)) for part in parts
    ]
    mask = Image.fromarray(mask_HW).resize((width, height), Image.Resampling.NEAREST)
    return np.dstack(resized), _as_array(mask)


@contextmanager
def _decoded(path: Path, max_pixels: int) -> Iterator[Image.Image]:
    """Open a file, check its kind and size from the header, then decode it."""
    from PIL import Image

    formats = _FORMATS[path.suffix.lower()]
    try:
        if path.stat().st_size == 0:
            raise UnreadableImage(f"{path}: 0 bytes. Restore the file, or remove it with its mask.")
        with Image.open(path, formats=("PNG", "JPEG")) as image:
            if image.format not in formats:
                raise UnreadableImage(
                    f"{path}: the content is {image.format}, but the name says {formats[0]}. Rename or convert "
                    "it."
                )
            if image.width * image.height > max_pixels:
                raise OversizedImage(
                    f"{path}: {image.width} x {image.height} pixels, at most {max_pixels / 1e6:g} megapixels "
                    "are allowed. Cut it into tiles, or raise prepare_data.folder.max_megapixels."
                )
            image.load()
            yield image
    except _DECODER_ERRORS as error:
        raise UnreadableImage(
            f"{path}: cannot be decoded as {formats[0]} ({error}). Restore the file, or remove it with its "
            "mask."
        ) from error


def _read_array(path: Path, max_pixels: int, channels: int) -> NDArray[np.uint8]:
    import numpy as np

    try:
        image: NDArray[np.uint8] = np.load(path, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise UnreadableImage(
            f"{path}: cannot be read as .npy ({error}). Restore the file, or remove it."
        ) from error
    if image.ndim == 2:
        image = image[..., None]
    if image.dtype != np.uint8 or image.ndim != 3 or image.shape[2] != channels or not image.size:
        raise WrongChannels(
            f"{path}: holds {image.dtype} {list(image.shape)}, expected uint8 [height, width, {channels}]. Scale the "
            "values to 0..255, or set prepare_data.folder.channels."
        )
    if image.shape[0] * image.shape[1] > max_pixels:
        raise OversizedImage(
            f"{path}: {image.shape[1]} x {image.shape[0]} pixels, at most {max_pixels / 1e6:g} megapixels are "
            "allowed. Cut it into tiles, or raise prepare_data.folder.max_megapixels."
        )
    return np.ascontiguousarray(image)


def _to_8_bits(image: Image.Image, *, is_grey: bool) -> NDArray[np.uint8]:
    import numpy as np
    from PIL import Image

    if image.mode.startswith("I"):
        grey_HW = (np.asarray(image).astype(np.int64) >> 8).clip(0, 255).astype(np.uint8)
        return np.repeat(grey_HW[..., None], 1 if is_grey else 3, axis=2)
    if image.has_transparency_data:
        black = Image.new("RGBA", image.size, (0, 0, 0, 255))
        image = Image.alpha_composite(black, image.convert("RGBA"))
    return _as_array(image.convert("L"))[..., None] if is_grey else _as_array(image.convert("RGB"))


def _as_array(image: Image.Image) -> NDArray[np.uint8]:
    import numpy as np

    return np.array(image, dtype=np.uint8)


def _crop(array: NDArray[Any], height: int, width: int, fill: int) -> NDArray[Any]:
    """Crop to the centre of the first two axes, padded if the array is smaller."""
    import numpy as np

    top, left = max(0, array.shape[0] - height) // 2, max(0, array.shape[1] - width) // 2
    centre = array[top : top + height, left : left + width]
    missing_y, missing_x = height - centre.shape[0], width - centre.shape[1]
    padding = [(missing_y // 2, missing_y - missing_y // 2), (missing_x // 2, missing_x - missing_x // 2)]
    return np.pad(centre, padding + [(0, 0)] * (array.ndim - 2), constant_values=fill)


def _colour_mask_text(path: Path, image: Image.Image) -> str:
    colours = image.convert("RGB").getcolors(maxcolors=4096)
    if colours is None:
        content = "more than 4096 colours (is it a photo?)"
    else:
        most = sorted(colours, key=lambda entry: (-entry[0], entry[1]))[:6]
        content = f"{len(colours)} colours, such as " + ", ".join(str(colour) for _, colour in most)
    return (
        f"{path}: a {image.mode} image with {content}; expected one channel with the class index of each "
        "pixel. Map each colour to its index and save as 8-bit grey, for example index[(mask == "
        "colour).all(axis=-1)] = class_index for every row of classes.yaml."
    )
