"""Read what Pillow cannot: TIFF files of any number of bands, of more than 8 bits, or of several pages (tifffile).

Pages of one band each, as microscopes write them, are bands too; smaller copies of an image are passed over.
H height, W width, C channels.
"""

from __future__ import annotations

import contextlib
import struct
import zlib
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, BinaryIO

from .packages import tifffile
from .rules import MissingPackage, UnreadableImage

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from tifffile import TiffPage

_ORIENTATION = 274
_UPRIGHT = 1
_MIN_IS_BLACK, _RGB = 1, 2
_TYPES = ("u1", "u2", "u4", "i1", "i2", "i4", "f4", "f8")


@contextlib.contextmanager
def open_pages(file: BinaryIO, place: str) -> Iterator[list[TiffPage]]:
    """Open the pages at full resolution, for as long as the context; raise UnreadableImage, which names the place."""
    with explained(place):
        tiff = tifffile().TiffFile(file)
        pages = [page.aspage() for page in tiff.pages]
        pages = [page for page in pages if not page.is_reduced]
    if not pages:
        raise UnreadableImage(f"{place}: a TIFF file without pages. Restore the file.")
    for page in pages:
        if page.dtype is None:
            raise UnreadableImage(
                f"{place}: its bands have {page.bitspersample} bits, expected one type for all."
            )
    yield pages


def read_bands(place: str, pages: Sequence[TiffPage]) -> NDArray[Any]:
    """Decode the bands of all pages to image_HWC; raise UnreadableImage for what is not read."""
    import numpy as np

    kinds = {(page.imagewidth, page.imagelength, page.dtype) for page in pages}
    if len(kinds) > 1:
        raise UnreadableImage(
            f"{place}: has {len(pages)} pages that differ in size or type, expected bands of one image. Save one "
            "image a file."
        )
    for page in pages:
        _refuse_unread(place, page)
    with explained(place):
        return np.concatenate([_decode(page) for page in pages], axis=2)


def _refuse_unread(place: str, page: TiffPage) -> None:
    orientation = page.tags[_ORIENTATION].value if _ORIENTATION in page.tags else _UPRIGHT
    faults = {
        f"values of type {page.dtype}": page.dtype is None or page.dtype.str[1:] not in _TYPES,
        f"colours of kind {int(page.photometric)}": page.photometric not in (_MIN_IS_BLACK, _RGB),
        f"orientation {int(orientation)}": orientation != _UPRIGHT,
    }
    found = [fault for fault, is_found in faults.items() if is_found]
    if found:
        raise UnreadableImage(
            f"{place}: a TIFF file with {found[0]}, which is not read for more than 8 bits or other than 1 or 3 "
            "bands. Save it upright, as grey values or RGB, or with numpy.save as [height, width, channels]."
        )


def _decode(page: TiffPage) -> NDArray[Any]:
    """Decode one page to [H, W, C]; tifffile gives no axis to a single band, and the first to separate planes."""
    import numpy as np

    image = page.asarray()
    if image.ndim == 2:
        return image[..., None]
    return np.moveaxis(image, 0, -1) if page.axes.startswith("S") else image


@contextlib.contextmanager
def explained(place: str) -> Iterator[None]:
    """Turn what tifffile and its codecs raise for damaged files into UnreadableImage."""
    damaged = tifffile().TiffFileError
    try:
        yield
    except (UnreadableImage, MissingPackage):
        raise
    except (
        damaged,
        OSError,
        RuntimeError,
        ValueError,
        TypeError,
        KeyError,
        IndexError,
        AttributeError,
        struct.error,
        zlib.error,
    ) as error:
        raise UnreadableImage(
            f"{place}: cannot be decoded as TIFF ({_first_line(error)}). Restore the file."
        ) from error


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines() or [repr(error)]
    return lines[0][:400]
