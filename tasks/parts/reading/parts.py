"""Read rows of large TIFF and .npy files, so that the image is never in memory as a whole.

Values become what files.read_image gives for the whole file. H height, W width, C channels.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from .files import ARRAY_SUFFIX, TIFF_SUFFIXES, scale_image
from .packages import tifffile
from .rules import Rules, UnreadableImage
from .tiff import explained, open_pages

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from tifffile import TiffPage

_UPRIGHT, _ORIENTATION, _MIN_IS_BLACK, _RGB = 1, 274, 1, 2
_TILE = 256
_TYPES = ("u1", "u2", "u4", "i1", "i2", "i4", "f4", "f8")


@dataclass(frozen=True)
class ImageParts:
    """An image of which rows are read, uint8 [H, W, C]; close it at the end."""

    shape: tuple[int, int, int]
    read_rows: Callable[[int, int], NDArray[np.uint8]]
    """Takes the first row and the one after the last."""
    close: Callable[[], None]

    def __getitem__(self, rows: slice) -> NDArray[np.uint8]:
        """Return some rows; their slice may end behind the image."""
        first, end, _ = rows.indices(self.shape[0])
        return self.read_rows(first, end)


def open_parts(path: Path, rules: Rules, *, more_than: int) -> ImageParts | None:
    """Open an image of more than so many pixels; None for a smaller one, or one that is read as a whole only.

    In parts are read: .npy files, and TIFF files of grey values, RGB or bands, upright and without alpha.
    """
    if path.suffix.lower() == ARRAY_SUFFIX:
        return _open_array(path, rules, more_than)
    return _open_tiff(path, rules, more_than) if path.suffix.lower() in TIFF_SUFFIXES else None


def _open_array(path: Path, rules: Rules, more_than: int) -> ImageParts | None:
    import numpy as np

    try:
        mapped = np.lib.format.open_memmap(path, mode="r")
    except (OSError, ValueError, EOFError):
        return None  # the usual error says so
    height, width, *bands = mapped.shape if mapped.ndim > 1 else (0, 0)
    is_image = (bands or [1]) == [rules.channels] and not np.isfortran(mapped)
    if not is_image or height * width <= more_than:
        return None
    channels, dtype, offset = rules.channels, mapped.dtype, mapped.offset

    def read_rows(first: int, end: int) -> NDArray[np.uint8]:
        # Not through the map, whose pages would count as memory of this process.
        start, count = offset + first * width * channels * dtype.itemsize, (end - first) * width * channels
        values = np.fromfile(path, dtype, count, offset=start)
        if values.size != count:
            raise UnreadableImage(f"{path}: ends before row {end}. Restore the file.")
        return scale_image(values.reshape(end - first, width, channels), rules, path)

    return ImageParts((height, width, rules.channels), read_rows, lambda: None)


def _open_tiff(path: Path, rules: Rules, more_than: int) -> ImageParts | None:
    try:
        file = path.open("rb")
    except OSError:
        return None  # the usual error says so
    is_kept = False
    try:
        with open_pages(file, str(path)) as pages:
            height, width = pages[0].imagelength, pages[0].imagewidth
            if height * width <= more_than or not _is_read_in_parts(pages, rules):
                return None
            readers = [_PageRows(file, page, str(path)) for page in pages]
        is_kept = True
    finally:
        if not is_kept:
            file.close()

    def read_rows(first: int, end: int) -> NDArray[np.uint8]:
        import numpy as np

        bands = [reader.read(first, end) for reader in readers]
        return scale_image(bands[0] if len(bands) == 1 else np.concatenate(bands, axis=2), rules, path)

    return ImageParts((height, width, rules.channels), read_rows, file.close)


def _is_read_in_parts(pages: list[TiffPage], rules: Rules) -> bool:
    num_bands = sum(page.samplesperpixel for page in pages)
    are_bands = num_bands == rules.channels or (rules.channels, num_bands) in ((3, 1), (1, 3))
    kinds = {(page.imagewidth, page.imagelength, page.dtype) for page in pages}
    return are_bands and len(kinds) == 1 and all(map(_is_plain, pages))


def _is_plain(page: TiffPage) -> bool:
    orientation = page.tags[_ORIENTATION].value if _ORIENTATION in page.tags else _UPRIGHT
    return (
        page.dtype is not None
        and page.dtype.str[1:] in _TYPES
        and page.bitspersample == 8 * page.dtype.itemsize
        and page.photometric in (_MIN_IS_BLACK, _RGB)
        and orientation == _UPRIGHT
        and page.imagedepth == 1
    )


class _PageRows:
    """Reads rows of a page from its strips or tiles, of which those of the last rows are kept."""

    def __init__(self, file: BinaryIO, page: TiffPage, place: str) -> None:
        self._file, self._page, self._place = file, page, place
        self._kept: dict[int, tuple[Any, tuple[int, ...]]] = {}
        self._num_planes = page.samplesperpixel if page.planarconfig == 2 else 1
        self._segment_height = page.tilelength if page.is_tiled else min(page.rowsperstrip, page.imagelength)
        self._across = math.ceil(page.imagewidth / page.tilewidth) if page.is_tiled else 1

    def read(self, first: int, end: int) -> NDArray[Any]:
        """Return values [end - first, W, bands of the page]."""
        with explained(self._place):
            return self._copy(first, end) if self._page.is_contiguous else self._decode(first, end)

    def _copy(self, first: int, end: int) -> NDArray[Any]:
        """Return rows of a page without compression, whose values follow each other in the file."""
        import numpy as np

        page = self._page
        assert page.dtype is not None
        dtype = page.dtype.newbyteorder(page.parent.byteorder)
        per_pixel = page.samplesperpixel // self._num_planes
        row_bytes = page.imagewidth * per_pixel * dtype.itemsize
        planes = []
        for plane in range(self._num_planes):
            self._file.seek(page.dataoffsets[0] + (plane * page.imagelength + first) * row_bytes)
            content = self._file.read((end - first) * row_bytes)
            planes.append(np.frombuffer(content, dtype).reshape(end - first, page.imagewidth, per_pixel))
        return planes[0] if len(planes) == 1 else np.concatenate(planes, axis=2)

    def _decode(self, first: int, end: int) -> NDArray[Any]:
        import numpy as np

        page = self._page
        values = np.zeros((end - first, page.imagewidth, page.samplesperpixel), page.dtype)
        segments = range(first // self._segment_height, -(-end // self._segment_height))
        per_plane = self._across * -(-page.imagelength // self._segment_height)
        kept: dict[int, tuple[Any, tuple[int, ...]]] = {}
        for plane in range(self._num_planes):
            for row in segments:
                for column in range(self._across):
                    number = plane * per_plane + row * self._across + column
                    is_kept = number in self._kept
                    kept[number] = self._kept.pop(number) if is_kept else self._segment(number)
                    self._paste(*kept[number], values, first, end)
        self._kept = kept
        return values

    def _segment(self, number: int) -> tuple[Any, tuple[int, ...]]:
        """Return a decoded strip or tile [h, w, s], None for one that was left out, and its plane, row and column."""
        page = self._page
        self._file.seek(page.dataoffsets[number])
        content = self._file.read(page.databytecounts[number])
        tables = {} if page.jpegtables is None else {"jpegtables": page.jpegtables}
        values, (plane, _, top, left, _), _ = page.decode(content or None, number, **tables)
        if values is None:
            return None, (plane, top, left)
        return values[0, : page.imagelength - top, : page.imagewidth - left], (plane, top, left)

    @staticmethod
    def _paste(segment: Any, place: tuple[int, ...], values: NDArray[Any], first: int, end: int) -> None:
        if segment is None:
            return
        plane, top, left = place
        low, high = max(first, top), min(end, top + segment.shape[0])
        bands = slice(plane, plane + segment.shape[2])
        values[low - first : high - first, left : left + segment.shape[1], bands] = segment[
            low - top : high - top
        ]


def write_tiff(path: Path, shape: tuple[int, int], dtype: Any, bands: Iterator[NDArray[Any]]) -> None:
    """Write a mask whose bands [h, W] come one after the other, as TIFF in tiles (deflate)."""

    def tiles() -> Iterator[NDArray[Any]]:
        for rows in _in_rows_of(_TILE, bands):
            for left in range(0, shape[1], _TILE):
                yield rows[:, left : left + _TILE]

    tifffile().imwrite(
        path,
        tiles(),
        shape=shape,
        dtype=dtype,
        photometric="minisblack",
        compression="zlib",
        tile=(_TILE, _TILE),
        maxworkers=1,
    )


def _in_rows_of(height: int, bands: Iterator[NDArray[Any]]) -> Iterator[NDArray[Any]]:
    """Join bands, and cut them into others of one height; the last one is what is left."""
    import numpy as np

    waiting: list[NDArray[Any]] = []
    for band in bands:
        waiting.append(band)
        if sum(map(len, waiting)) >= height:
            rows = np.concatenate(waiting)
            num_whole = len(rows) // height
            for number in range(num_whole):
                yield rows[number * height : (number + 1) * height]
            waiting = [rows[num_whole * height :]]
    if sum(map(len, waiting)):
        yield np.concatenate(waiting)
