"""A data set that is no copy: lists of the files of its source, which are decoded when they are read.

    dataset/reading.json           ReadingRules: what turns a file into an array
    dataset/<split>_files.csv      one line per image: files relative to the root, their sha256, and the window if
                                   images are cut into windows
    dataset/<split>_originals.csv  the same of a split that is a copy, one line per file of images: validate runs
                                   engines on them, too

Each file is verified by its sha256 whenever it is read. H height, W width, C channels.
"""

from __future__ import annotations

import csv
import dataclasses
import hashlib
import json
import multiprocessing
import threading
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import dacite
import numpy as np
from numpy.typing import NDArray

from tasks.core.errors import ArtifactError
from tasks.parts.data.class_table import IGNORE_INDEX, ClassTable
from tasks.parts.data.image_files import (
    ResizeMode,
    fit_image,
    fit_mask,
    pillow_without_own_cap,
    read_image,
    read_values,
    thread_pool,
)
from tasks.parts.data.masks import MaskFile
from tasks.parts.reading.windows import Span, Window, cut_image, cut_mask

RULES_FILE = "reading.json"

_MAX_KEPT_BYTES = 128 << 20
"""Memory for decoded files that are kept, as the next window may be of the same; the last file is always kept."""

_COLUMNS = ("image", "image_sha256", "mask", "mask_sha256")
_WINDOW_COLUMNS = ("top", "first_row", "end_row", "left", "first_column", "end_column")


@dataclass(frozen=True)
class ReadingRules:
    """What turns the files of a source into arrays; it is also what `read_image` takes as its rules."""

    root: str
    """Folder of the source, absolute or relative to the repository."""
    height: int
    width: int
    resize_mode: ResizeMode
    channels: int
    max_pixels: int
    value_range: list[float] | None
    table: ClassTable | None
    """None if the images have no masks."""
    background: int | None
    """Class of all pixels of an image without a mask; IGNORE_INDEX if it is unlabelled."""


@dataclass(frozen=True)
class SourceFile:
    """A file of the source, as it was when the data set was prepared."""

    path: str
    """Path below the root."""
    sha256: str


@dataclass(frozen=True)
class SourceRow:
    """What one image of a split is read from."""

    image: SourceFile
    mask: SourceFile | None
    window: Window | None


@dataclass(frozen=True)
class VerifiedFile:
    """A file that is read as a whole and must be what it was; an EncodedImage."""

    path: Path
    sha256: str

    def __str__(self) -> str:
        return str(self.path)

    def read_bytes(self) -> bytes:
        """Return the content; raise ArtifactError if it is missing or has changed."""
        try:
            content = self.path.read_bytes()
        except OSError as error:
            raise ArtifactError(
                f"{self.path}: cannot be read ({error.strerror}), and it is read where it lies, as the data "
                "set is no copy (prepare_data.copy=false) or engines are judged on the original. Restore the "
                "file, start from the folder of the repository, or run prepare_data again."
            ) from error
        found = hashlib.sha256(content).hexdigest()
        if found != self.sha256:
            raise ArtifactError(
                f"{self.path}: changed since prepare_data read it: sha256 {found[:12]}, expected {self.sha256[:12]}. "
                "Restore the file, or run prepare_data again."
            )
        return content


class FileReader:
    """Decodes images and masks of a list of files; of those that are cut into windows it keeps the last few."""

    def __init__(
        self, rules: ReadingRules, rows: Sequence[SourceRow], *, max_kept_bytes: int = _MAX_KEPT_BYTES
    ) -> None:
        self._rules, self._rows, self._max_kept_bytes = rules, rows, max_kept_bytes
        self._kept: OrderedDict[SourceFile, NDArray[np.uint8]] = OrderedDict()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def rules(self) -> ReadingRules:
        """What turns the files into arrays."""
        return self._rules

    def images(self, numbers: Sequence[int]) -> list[NDArray[np.uint8]]:
        """Return image_HWC of each of these rows."""
        return self._read(numbers, is_mask=False)

    def masks(self, numbers: Sequence[int]) -> list[NDArray[np.uint8]]:
        """Return mask_HW of each of these rows."""
        return self._read(numbers, is_mask=True)

    def whole_values(self, number: int) -> NDArray[Any]:
        """Return values_HWC of the file of a row, of its own size and type; raise ArtifactError if it has changed."""
        with pillow_without_own_cap():
            return read_values(self._verified(self._rows[number].image), self._rules)

    def whole_mask(self, number: int) -> NDArray[np.uint8]:
        """Return mask_HW of the file of a row, of its own size."""
        with pillow_without_own_cap():
            return self._whole_mask(self._rows[number])

    def _verified(self, file: SourceFile) -> VerifiedFile:
        return VerifiedFile(Path(self._rules.root, file.path), file.sha256)

    def _read(self, numbers: Sequence[int], *, is_mask: bool) -> list[NDArray[np.uint8]]:
        places: dict[SourceFile, list[int]] = {}
        for place, number in enumerate(numbers):
            places.setdefault(self._rows[number].image, []).append(place)
        read: dict[int, NDArray[np.uint8]] = {}

        def read_all_of(file: SourceFile) -> None:
            for place in places[file]:
                row = self._rows[numbers[place]]
                read[place] = self._mask(row) if is_mask else self._image(row)

        with pillow_without_own_cap():
            if len(places) == 1 or multiprocessing.parent_process():  # data workers are several already
                for file in places:
                    read_all_of(file)
            else:
                with thread_pool() as pool:
                    list(pool.map(read_all_of, places))
        return [read[place] for place in range(len(numbers))]

    def _image(self, row: SourceRow) -> NDArray[np.uint8]:
        rules = self._rules
        image_HWC = self._decoded(row.image, row, is_mask=False)
        if row.window:
            return cut_image(image_HWC, row.window, height=rules.height, width=rules.width)
        return fit_image(image_HWC, height=rules.height, width=rules.width, mode=rules.resize_mode)

    def _mask(self, row: SourceRow) -> NDArray[np.uint8]:
        rules, mask_HW = self._rules, self._whole_mask(row)
        if row.window:
            return cut_mask(mask_HW, row.window, height=rules.height, width=rules.width)
        return fit_mask(
            mask_HW, height=rules.height, width=rules.width, mode=rules.resize_mode, fill=IGNORE_INDEX
        )

    def _whole_mask(self, row: SourceRow) -> NDArray[np.uint8]:
        if row.mask:
            return self._decoded(row.mask, row, is_mask=True)
        assert self._rules.background is not None
        shape_HW = self._decoded(row.image, row, is_mask=False).shape[:2]
        return np.full(shape_HW, self._rules.background, np.uint8)

    def _decoded(self, file: SourceFile, row: SourceRow, *, is_mask: bool) -> NDArray[np.uint8]:
        with self._lock:
            if file in self._kept:
                self._kept.move_to_end(file)
                return self._kept[file]
        rules, source = self._rules, self._verified(file)
        if is_mask:
            assert rules.table is not None
            stored = MaskFile(source).read(rules.table, max_pixels=rules.max_pixels)
            array = rules.table.to_classes(stored).astype(np.uint8)
        else:
            array = read_image(source, rules)
        if row.window is None:
            return array
        with self._lock:
            self._kept[file] = array
            while (
                len(self._kept) > 1
                and sum(kept.nbytes for kept in self._kept.values()) > self._max_kept_bytes
            ):
                self._kept.popitem(last=False)
        return array


def list_name(split: str) -> str:
    """Return the name of the list of files of a split."""
    return f"{split}_files.csv"


def originals_name(split: str) -> str:
    """Return the name of the list of the files that a copied split was made from."""
    return f"{split}_originals.csv"


def write_rules(dataset: Path, rules: ReadingRules) -> None:
    """Write `reading.json`."""
    text = json.dumps(dataclasses.asdict(rules), indent=2, ensure_ascii=False, default=sorted)
    (dataset / RULES_FILE).write_text(text + "\n", encoding="utf-8")


def write_list(path: Path, rows: Iterable[SourceRow]) -> None:
    """Write a list of files."""
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow((*_COLUMNS, *_WINDOW_COLUMNS))
        for row in rows:
            mask = dataclasses.astuple(row.mask) if row.mask else ("", "")
            writer.writerow((*dataclasses.astuple(row.image), *mask, *_numbers(row.window)))


def open_reader(dataset: Path, split: str) -> FileReader:
    """Open the files of a split; raise ArtifactError if a list is damaged."""
    return FileReader(*_read_list(dataset, split, list_name(split)))


def open_originals(dataset: Path, split: str, *, is_listed: bool) -> FileReader:
    """Open the files that a split was made from, each once, in the order of its images; raise ArtifactError if a list
    is damaged."""
    rules, rows = _read_list(dataset, split, list_name(split) if is_listed else originals_name(split))
    whole = dict.fromkeys(SourceRow(row.image, row.mask, None) for row in rows)
    return FileReader(rules, list(whole))


def _read_list(dataset: Path, split: str, name: str) -> tuple[ReadingRules, list[SourceRow]]:
    try:
        rules = read_rules(dataset)
        with (dataset / name).open(newline="", encoding="utf-8") as file:
            rows = [_row(line) for line in csv.DictReader(file, strict=True)]
    except (OSError, ValueError, KeyError, TypeError, csv.Error, dacite.DaciteError) as error:
        raise ArtifactError(
            f"{dataset}: the list of files of '{split}' cannot be read ({error!r}). Run prepare_data again."
        ) from error
    return rules, rows


def read_rules(dataset: Path) -> ReadingRules:
    """Read `reading.json`."""
    fields: dict[str, Any] = json.loads((dataset / RULES_FILE).read_text(encoding="utf-8"))
    return dacite.from_dict(
        ReadingRules, fields, dacite.Config(cast=[ResizeMode, tuple, frozenset], strict=True)
    )


def _numbers(window: Window | None) -> tuple[int | str, ...]:
    if window is None:
        return ("",) * len(_WINDOW_COLUMNS)
    return (*dataclasses.astuple(window.rows), *dataclasses.astuple(window.columns))


def _row(line: Mapping[str, str]) -> SourceRow:
    numbers = [int(line[name]) for name in _WINDOW_COLUMNS if line[name]]
    return SourceRow(
        SourceFile(line["image"], line["image_sha256"]),
        SourceFile(line["mask"], line["mask_sha256"]) if line["mask"] else None,
        Window(Span(*numbers[:3]), Span(*numbers[3:])) if numbers else None,
    )
