"""List a Hugging Face data set on disk: what `save_to_disk` writes, or Parquet files. Only pyarrow is needed.

<root>/dataset_dict.json, <split>/state.json, <split>/*.arrow   a DatasetDict; a Dataset has no folder of splits
<root>/**/<split>-*.parquet, or <split>/*.parquet               Parquet, as it is on the hub
<root>/classes.yaml                                             see class_list.py

A cell of the column of images or masks holds {bytes, path}, as the feature Image is stored. Rows of Arrow files are
read where they lie on disk; of Parquet files, a row group is read for each image, so small ones are faster. Splits
are train (or training), validation (val, valid, dev) and test (testing), in letters of any case; without test,
validation is test and val is taken from train. If there is one split only, its rows are divided among train, val and
test; of several, each must be one of these.
"""

from __future__ import annotations

import bisect
import functools
import itertools
import json
import re
import threading
from collections import Counter, OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from tasks.core.errors import ConfigError, DataError
from tasks.parts.data.image_files import UnreadableImage
from tasks.parts.data.masks import MaskFile
from tasks.parts.sources.class_list import check_relative_name, read_class_list
from tasks.parts.sources.config import ColumnsConfig, FolderConfig
from tasks.parts.sources.file_names import list_files
from tasks.parts.sources.links import check_link
from tasks.parts.sources.pairs import Listing, Pair

if TYPE_CHECKING:
    import pyarrow as pa
    import pyarrow.parquet as pq

_IMAGE_COLUMNS = ("image", "images", "img", "pixel_values")
_MASK_COLUMNS = (
    "mask",
    "masks",
    "label",
    "labels",
    "annotation",
    "annotations",
    "segmentation",
    "segmentation_mask",
    "semantic_segmentation",
)
_SPLIT_NAMES = {
    "train": "train",
    "training": "train",
    "validation": "val",
    "val": "val",
    "valid": "val",
    "dev": "val",
    "test": "test",
    "testing": "test",
}
_COLUMNS_IN_MEMORY = 8
"""Columns of row groups of Parquet files that are kept in memory."""


@dataclass(frozen=True)
class Cell:
    """An encoded image in a table."""

    table: Table
    column: str
    row: int

    def __str__(self) -> str:
        return f"{self.table.file}: row {self.row} of column '{self.column}'"

    def read_bytes(self) -> bytes:
        """Return the bytes of the image file; raise UnreadableImage if the cell holds none."""
        import pyarrow as pa

        try:
            value = self.table.cell(self.column, self.row)
        except (pa.ArrowException, OSError) as error:
            raise UnreadableImage(f"{self}: cannot be read ({error}). Restore the file.") from error
        content = value.get("bytes") if isinstance(value, dict) else value
        if content is None and isinstance(value, dict) and value.get("path"):
            return self._read_path(str(value["path"]))
        if not isinstance(content, bytes):
            raise UnreadableImage(f"{self}: holds no bytes of an image, expected {{bytes, path}}.")
        return content

    def _read_path(self, name: str) -> bytes:
        """Read a file that the cell only names: it must lie inside the root."""
        check_relative_name(name, source=self.table.file)
        path = self.table.root / name
        check_link(path, self.table.root)
        try:
            return path.read_bytes()
        except OSError as error:
            raise UnreadableImage(f"{self}: names {path}, which cannot be read ({error}).") from error


class Table(Protocol):
    """A file of rows, which are read when they are asked for."""

    file: Path
    root: Path
    num_rows: int
    schema: pa.Schema

    def cell(self, column: str, row: int) -> Any:
        """Return the content of a cell."""

    def empty_rows(self, column: str) -> set[int]:
        """Return the rows that hold neither bytes nor the path of an image."""


class ArrowTable:
    """An Arrow file, mapped into memory: only what is asked for is read."""

    def __init__(self, file: Path, root: Path) -> None:
        """Map the file; it is a stream, as `save_to_disk` writes it, or a file with an index."""
        import pyarrow as pa

        self.file, self.root = file, root
        mapped = pa.memory_map(str(file))
        try:
            self._rows = pa.ipc.open_stream(mapped).read_all()
        except pa.ArrowInvalid:
            self._rows = pa.ipc.open_file(mapped).read_all()
        self.num_rows, self.schema = self._rows.num_rows, self._rows.schema

    def cell(self, column: str, row: int) -> Any:
        """Return the content of a cell."""
        return self._rows[column][row].as_py()

    def empty_rows(self, column: str) -> set[int]:
        """Return the rows that hold neither bytes nor the path of an image."""
        return _empty_rows(self._rows[column])


class ParquetTable:
    """A Parquet file, read by row groups."""

    def __init__(self, file: Path, root: Path, cache: RowGroups) -> None:
        """Read the footer."""
        import pyarrow.parquet as pq

        self.file, self.root, self._cache = file, root, cache
        with pq.ParquetFile(file) as opened:
            metadata, self.schema = opened.metadata, opened.schema_arrow
        self.num_rows = metadata.num_rows
        groups = [metadata.row_group(group) for group in range(metadata.num_row_groups)]
        self._starts = list(itertools.accumulate((group.num_rows for group in groups), initial=0))
        self._full_columns = [_full_columns(group) for group in groups]

    def cell(self, column: str, row: int) -> Any:
        """Return the content of a cell; reads its row group unless it was read lately."""
        group = bisect.bisect_right(self._starts, row) - 1
        return self._cache.read(self.file, group, column)[row - self._starts[group]].as_py()

    def empty_rows(self, column: str) -> set[int]:
        """Return the rows that hold neither bytes nor the path of an image."""
        return {
            start + row
            for group, start in enumerate(self._starts[:-1])
            if not self._full_columns[group] & {column, f"{column}.bytes"}
            for row in _empty_rows(self._cache.read(self.file, group, column))
        }


def _full_columns(group: pq.RowGroupMetaData) -> set[str]:
    """Return the columns, such as ``image.bytes``, in which no row is null, as far as statistics tell."""
    columns = [group.column(index) for index in range(group.num_columns)]
    return {
        column.path_in_schema
        for column in columns
        if column.statistics is not None and column.statistics.null_count == 0
    }


class RowGroups:
    """The columns of row groups that were read last."""

    def __init__(self) -> None:
        """Begin without any."""
        self._columns: OrderedDict[tuple[Path, int, str], pa.ChunkedArray] = OrderedDict()
        self._lock = threading.Lock()

    def read(self, file: Path, group: int, column: str) -> pa.ChunkedArray:
        """Return one column of a row group."""
        import pyarrow.parquet as pq

        key = (file, group, column)
        with self._lock:  # threads that wait for the same row group shall not read it again
            if key not in self._columns:
                with pq.ParquetFile(file) as opened:
                    self._columns[key] = opened.read_row_group(group, columns=[column])[column]
                while len(self._columns) > _COLUMNS_IN_MEMORY:
                    self._columns.popitem(last=False)
            self._columns.move_to_end(key)
            return self._columns[key]


def list_hf_dataset(root: Path, config: FolderConfig) -> Listing:
    """List the rows of all splits."""
    columns = config.columns
    assert columns is not None
    table = read_class_list(root)
    rows = {split: _list_rows(split, tables, columns) for split, tables in sorted(_open_tables(root).items())}
    warnings = []
    if len(rows) > 1 and "test" in rows and all(pair.mask is None for pair in rows["test"]):
        warnings.append(f"the test split of {root} has no masks, and is left out.")
        del rows["test"]
    pairs = tuple(pair for listed in rows.values() for pair in listed)
    if not pairs:
        raise DataError(f"{root}: its tables have no rows (prepare_data.root).")
    return Listing(table, pairs, _official_splits(root, rows), tuple(warnings))


def _official_splits(root: Path, rows: Mapping[str, Sequence[Pair]]) -> dict[str, tuple[str, ...]]:
    """Return the names by split: validation is test if there is no test; empty if train is the only one."""
    names = {split: tuple(pair.name for pair in listed) for split, listed in rows.items()}
    if len(names) == 1 or not names.keys() & {"val", "test"}:
        return {}
    if "train" not in names:
        raise DataError(
            f"{root}: holds the splits {', '.join(names)}, expected train too. Add it, or name all images in "
            "train.txt, val.txt and test.txt."
        )
    if "test" not in names:
        names["test"] = names.pop("val")
    return names


def _list_rows(split: str, tables: Sequence[Table], columns: ColumnsConfig) -> list[Pair]:
    pairs: list[Pair] = []
    for table in tables:
        image = _find_column(table, columns.image, "image", _IMAGE_COLUMNS)
        mask = _find_column(table, columns.mask, "mask", _MASK_COLUMNS)
        empty = table.empty_rows(mask)
        for row in range(table.num_rows):
            reader = None if row in empty else MaskFile(Cell(table, mask, row))
            pairs.append(Pair(f"{split}/{len(pairs):06}", Cell(table, image, row), reader))
    return pairs


def _find_column(table: Table, configured: str | None, kind: str, usual: Sequence[str]) -> str:
    """Return the column of the images or masks; raise DataError if it is missing, no image, or not the only one."""
    types = {field.name: field.type for field in table.schema}
    found = [name for name in ([configured] if configured else usual) if name in types]
    images = [name for name in found if _holds_images(types[name])]
    if len(images) == 1:
        return images[0]
    listed = ", ".join(f"{name} ({_short(type_)})" for name, type_ in types.items())
    if len(images) > 1:
        raise ConfigError(
            f"prepare_data.folder.columns.{kind} is null, and {table.file} has several such columns: "
            f"{', '.join(images)}. Choose one."
        )
    wanted = f"'{configured}'" if configured else f"named {', '.join(usual)}"
    fault = "is no column of images" if found else "is missing"
    raise DataError(
        f"{table.file}: the {kind} column {wanted} {fault}. It has {listed}; expected bytes, or bytes and path. Set "
        f"prepare_data.folder.columns.{kind}."
    )


def _holds_images(type_: pa.DataType) -> bool:
    import pyarrow.types as kinds

    if kinds.is_struct(type_):
        return any(type_.field(index).name == "bytes" for index in range(type_.num_fields))
    return bool(kinds.is_binary(type_) or kinds.is_large_binary(type_))


def _short(type_: pa.DataType) -> str:
    text = str(type_)
    return text if len(text) <= 40 else f"{text[:39]}…"


def _empty_rows(column: pa.ChunkedArray) -> set[int]:
    import pyarrow.compute as pc
    import pyarrow.types as kinds

    if not len(column):
        return set()  # pyarrow ends the process where a column of no rows has no chunks
    is_empty = column.is_null()
    if kinds.is_struct(column.type):
        names = {column.type.field(index).name for index in range(column.type.num_fields)}
        parts = [pc.is_null(pc.struct_field(column, name)) for name in names & {"bytes", "path"}]
        is_empty = pc.or_(is_empty, functools.reduce(pc.and_, parts))
    return set(pc.indices_nonzero(is_empty).to_pylist())


def _open_tables(root: Path) -> dict[str, list[Table]]:
    """Return the tables by split: train, val, test, or another name."""
    import pyarrow as pa

    cache = RowGroups()
    opened: dict[str, list[Table]] = {}
    for split, files in _find_files(root).items():
        for file in files:
            check_link(file, root)
            try:
                table: Table = (
                    ParquetTable(file, root, cache) if file.suffix == ".parquet" else ArrowTable(file, root)
                )
            except (pa.ArrowException, OSError) as error:
                raise DataError(
                    f"{file}: cannot be read as {file.suffix[1:]} ({error}). Restore the file."
                ) from error
            opened.setdefault(split, []).append(table)
    return opened


def _find_files(root: Path) -> dict[str, list[Path]]:
    """Return the files by split."""
    if (root / "dataset_dict.json").is_file():
        names = [str(name) for name in _read_json(root / "dataset_dict.json", root, "splits")]
        for name in names:
            check_relative_name(name, source=root / "dataset_dict.json")
        return _by_split(root, {name: _arrow_files(root / name, root) for name in names})
    if (root / "state.json").is_file():
        return {"all": _arrow_files(root, root)}
    files: dict[str, list[Path]] = {}
    for _, path in sorted(list_files(root, (".parquet",), root=root).items()):
        files.setdefault(_own_split(path.relative_to(root)), []).append(path)
    if len(files) == 1:
        return {_SPLIT_NAMES.get(name, "all"): paths for name, paths in files.items()}
    if not files:
        raise DataError(
            f"{root}: holds no dataset_dict.json, state.json or *.parquet, expected what save_to_disk writes, or "
            "Parquet files (prepare_data.root)."
        )
    return _by_split(root, files)


def _by_split(root: Path, files: Mapping[str, list[Path]]) -> dict[str, list[Path]]:
    """Return files by train, val and test instead of their own names of splits; a single one may have any name."""
    split_of = {name: _SPLIT_NAMES.get(name.lower(), name) for name in files}
    counts = Counter(split_of.values())
    unknown = [name for name, split in split_of.items() if split not in _SPLIT_NAMES.values()]
    repeated = [name for name, split in split_of.items() if counts[split] > 1]
    if len(files) > 1 and (unknown or repeated):
        fault = (
            f"{unknown[0]} is no known name"
            if unknown
            else f"{repeated[0]} and {repeated[1]} both stand for '{split_of[repeated[0]]}'"
        )
        raise DataError(
            f"{root}: holds the splits {', '.join(files)}, of which {fault}; expected one each of train "
            "(training), validation (val, valid, dev) and test (testing). Rename the others, or take "
            "them out of prepare_data.root and its dataset_dict.json."
        )
    return {split_of[name]: paths for name, paths in files.items()}


def _own_split(path: Path) -> str:
    """Return the split that a Parquet file or its folder names; its place, without numbers, if they name none."""
    first, *others = re.split(r"[-._]", path.name.lower())
    if first in _SPLIT_NAMES:
        return first
    folders = (folder.lower() for folder in reversed(path.parts[:-1]))
    folder = next((folder for folder in folders if folder in _SPLIT_NAMES), "")
    named = [word for word in (folder, *others) if word in _SPLIT_NAMES]
    is_clear = len({_SPLIT_NAMES[word] for word in named}) == 1
    return named[0] if is_clear else re.sub(r"\d+(-of-\d+)?", "*", path.as_posix())


def _arrow_files(folder: Path, root: Path) -> list[Path]:
    check_link(folder, root)
    entries = _read_json(folder / "state.json", root, "_data_files")
    try:
        names = [str(entry["filename"]) for entry in entries]
    except (TypeError, KeyError) as error:
        raise DataError(
            f"{folder / 'state.json'}: _data_files holds {entries}, expected filename."
        ) from error
    for name in names:
        check_relative_name(name, source=folder / "state.json")
        if not (folder / name).is_file():
            raise DataError(f"{folder / 'state.json'}: names {name}, but {folder / name} does not exist.")
    return [folder / name for name in names]


def _read_json(file: Path, root: Path, key: str) -> list[Any]:
    check_link(file, root)
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise DataError(f"{file}: not found, expected it as save_to_disk writes it.") from error
    except ValueError as error:
        raise DataError(f"{file}: not valid JSON ({error}). Restore the file.") from error
    found = content.get(key) if isinstance(content, dict) else None
    if not isinstance(found, list) or not found:
        raise DataError(f"{file}: has no list '{key}', expected it as save_to_disk writes it.")
    return found
