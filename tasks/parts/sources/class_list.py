"""Read classes.yaml of a data set: its classes, and the ids or colours that stand for them in masks.

[road, car]                                              a name for each mask value, from 0 upward
{0: road, 1: car, ignore_index: 255}                     the same with indices
classes:                                                 rows: ids, colours or both
- {name: road, ids: [7, 8], colour: [128, 64, 128]}
- {name: car, ids: [26], colour: [0, 0, 142]}
ignore_ids: [0, 255]                                     ids that are ignored
ignore_colours: [[0, 0, 0]]                              colours that are ignored
ignore_rest: false                                       true: so is everything that no row names
"""

from collections.abc import Iterable, Mapping
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any

from tasks.core.errors import DataError
from tasks.parts.data.class_table import MAX_ID, ClassTable, Colour
from tasks.parts.data.dataset import MAX_CLASSES
from tasks.parts.sources.links import check_link

CLASSES_FILE = "classes.yaml"

_OPTIONS = ("ignore_index", "ignore_ids", "ignore_colours", "ignore_rest")
_ROW_KEYS = ("name", "ids", "colour")


def read_class_list(root: Path, *, max_classes: int = MAX_CLASSES) -> ClassTable:
    """Read `root/classes.yaml`.

    Raises DataError for a missing or damaged file, gaps in the indices, repeated or unsafe names, ids or colours of
    two classes.
    """
    path = root / CLASSES_FILE
    content = _read_yaml(path, root)
    options: dict[str, Any] = {}
    if isinstance(content, dict):
        options = {key: content[key] for key in _OPTIONS if key in content}
        if "classes" in content:
            unknown = sorted(str(key) for key in content if key not in ("classes", *_OPTIONS))
            if unknown:
                raise DataError(
                    f"{path}: unknown key '{unknown[0]}'. Allowed: classes, {', '.join(_OPTIONS)}."
                )
            content = content["classes"]
        else:
            content = {key: value for key, value in content.items() if key not in _OPTIONS}
    names, ids, colours = _rows(path, content)
    table = ClassTable(
        names,
        str(path),
        ids,
        colours,
        ignore_ids=_ignored_ids(path, options, ids),
        ignore_colours=frozenset(
            _colour(path, colour, "ignore_colours") for colour in _items(path, options, "ignore_colours")
        ),
        is_rest_ignored=_flag(path, options.get("ignore_rest", False)),
    )
    check_table(table, max_classes)
    return table


def has_class_list(root: Path) -> bool:
    """Return whether the root has a classes.yaml, which replaces the classes that a layout brings along."""
    path = root / CLASSES_FILE
    return path.exists() or path.is_symlink()


def check_table(table: ClassTable, max_classes: int = MAX_CLASSES) -> None:
    """Raise DataError for too many classes, repeated names, and ids or colours of two classes."""
    if len(table.names) > max_classes:
        raise DataError(
            f"{table.place}: {len(table.names)} classes, at most {max_classes} are possible. Unite classes by the "
            f"ids of rows in {CLASSES_FILE}."
        )
    repeated = _repeated(table.names)
    if repeated is not None:
        raise DataError(
            f"{table.place}: class name '{repeated}' appears twice. Give each index its own name."
        )
    for what, rows, ignored in (
        ("id", [*(table.ids or ())], table.ignore_ids),
        ("colour", [(colour,) for colour in table.colours or ()], table.ignore_colours),
    ):
        owner: dict[Any, str] = dict.fromkeys(ignored, f"ignore_{what}s")
        for name, row in zip(table.names, rows, strict=False):
            for value in row:
                if value in owner:
                    raise DataError(
                        f"{table.place}: {what} {_shown(value)} stands for '{owner[value]}' and for '{name}'. "
                        f"Give each {what} to one of them."
                    )
                owner[value] = name


def check_relative_name(name: str, *, source: Path) -> None:
    """Raise DataError for a name from a text file that could escape its folder."""
    posix, windows = PurePosixPath(name), PureWindowsPath(name)
    is_outside = posix.is_absolute() or windows.is_absolute() or bool(windows.drive) or ".." in windows.parts
    if not name or is_outside or any(ord(character) < 32 for character in name):
        raise DataError(
            f"{source}: {name!r} is refused. Allowed are names inside the folder: not absolute, without "
            "'..', NUL or other control characters."
        )


def check_class_name(name: Any, *, source: Path) -> str:
    """Return the name of a class; raise DataError if it is no text, or could be a path."""
    if not isinstance(name, str):
        raise DataError(f"{source}: class name {name!r} is not text. Put it in quotes.")
    check_relative_name(name, source=source)
    if "/" in name or "\\" in name or name.strip() in ("", "."):
        raise DataError(
            f"{source}: class name {name!r} is refused: names must not be empty or '.', or contain '/' or '\\'."
        )
    return name


def in_quotes(names: Iterable[str]) -> str:
    """Return names of classes as text; they may hold spaces, commas and letters of any script."""
    return ", ".join(f"'{name}'" for name in names)


def _read_yaml(path: Path, root: Path) -> Any:
    import yaml

    check_link(path, root)
    try:
        return yaml.safe_load(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise DataError(
            f"{path}: not found. Expected a YAML list of class names, in the order of their mask values "
            "(prepare_data.root)."
        ) from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise DataError(f"{path}: not valid YAML in UTF-8 ({error}).") from error


def _rows(
    path: Path, content: Any
) -> tuple[tuple[str, ...], tuple[tuple[int, ...], ...] | None, tuple[Colour, ...] | None]:
    """Return names, ids and colours of the classes."""
    rows = _in_order(path, content)
    are_maps = [isinstance(row, dict) for row in rows]
    if not any(are_maps):
        names = tuple(check_class_name(row, source=path) for row in rows)
        return names, tuple((index,) for index in range(len(names))), None
    if not all(are_maps):
        raise DataError(
            f"{path}: holds names and rows, such as {rows[are_maps.index(False)]!r}. Write every class as "
            "{name: .., ids: [..], colour: [r, g, b]}, or each as a name."
        )
    for row in rows:
        unknown = [str(key) for key in row if key not in _ROW_KEYS]
        if unknown or "name" not in row:
            found = f"the key '{unknown[0]}'" if unknown else "no name"
            raise DataError(f"{path}: the row {row} has {found}. Allowed: {', '.join(_ROW_KEYS)}.")
    names = tuple(check_class_name(row["name"], source=path) for row in rows)
    ids, colours = _column(path, rows, "ids"), _column(path, rows, "colour")
    if ids is None and colours is None:
        return names, tuple((index,) for index in range(len(names))), None
    return (
        names,
        None if ids is None else tuple(_ids(path, row) for row in rows),
        None if colours is None else tuple(_colour(path, colour, "colour") for colour in colours),
    )


def _in_order(path: Path, content: Any) -> list[Any]:
    if isinstance(content, list):
        content = dict(enumerate(content))
    if not isinstance(content, dict) or not content:
        raise DataError(
            f"{path}: holds {type(content).__name__}, expected a list of names or a map index: name."
        )
    if sorted(content, key=str) != sorted(range(len(content)), key=str) or any(
        isinstance(index, bool) for index in content
    ):
        raise DataError(
            f"{path}: indices are {_shortened(list(content))}, expected 0 to {len(content) - 1} without "
            "gaps. Renumber the classes in it and in the masks."
        )
    return [content[index] for index in range(len(content))]


def _column(path: Path, rows: list[Mapping[str, Any]], key: str) -> list[Any] | None:
    """Return a key of all rows, or None if no row has it; raise DataError if only some have."""
    without = [row for row in rows if row.get(key) is None]
    if without and len(without) < len(rows):
        raise DataError(f"{path}: the row {without[0]} has no {key}, and others have. Add it to every row.")
    return None if without else [row[key] for row in rows]


def _ids(path: Path, row: Mapping[str, Any]) -> tuple[int, ...]:
    ids = row["ids"]
    if not isinstance(ids, list) or not ids or not all(_is_id(number) for number in ids):
        raise DataError(f"{path}: ids of '{row['name']}' are {ids!r}, expected a list of 0 to {MAX_ID}.")
    return tuple(ids)


def _colour(path: Path, value: Any, key: str) -> Colour:
    is_colour = isinstance(value, list) and len(value) == 3 and all(_is_id(part, 255) for part in value)
    if not is_colour:
        raise DataError(f"{path}: {key} holds {value!r}, expected [red, green, blue], each from 0 to 255.")
    red, green, blue = value
    return red, green, blue


def _ignored_ids(
    path: Path, options: Mapping[str, Any], ids: tuple[tuple[int, ...], ...] | None
) -> frozenset[int]:
    single = options.get("ignore_index")
    if single is not None:
        if not _is_id(single):
            raise DataError(f"{path}: ignore_index is {single!r}, expected a mask value from 0 to {MAX_ID}.")
        if (single,) in (ids or ()):
            raise DataError(
                f"{path}: ignore_index {single} is also a class. Choose a value that is none, for example 255."
            )
    several = _items(path, options, "ignore_ids")
    if not all(_is_id(number) for number in several):
        raise DataError(f"{path}: ignore_ids holds {several!r}, expected mask values from 0 to {MAX_ID}.")
    return frozenset(several if single is None else [*several, single])


def _items(path: Path, options: Mapping[str, Any], key: str) -> list[Any]:
    value = options.get(key)
    if value is not None and not isinstance(value, list):
        raise DataError(f"{path}: {key} is {value!r}, expected a list.")
    return value or []


def _flag(path: Path, value: Any) -> bool:
    if not isinstance(value, bool):
        raise DataError(f"{path}: ignore_rest is {value!r}, expected true or false.")
    return value


def _is_id(value: Any, largest: int = MAX_ID) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= largest


def _repeated(names: Iterable[str]) -> str | None:
    seen: set[str] = set()
    for name in names:
        if name in seen:
            return name
        seen.add(name)
    return None


def _shown(value: Any) -> str:
    return str(list(value)) if isinstance(value, tuple) else str(value)


def _shortened(values: list[Any]) -> str:
    return str(values) if len(values) <= 12 else f"{values[:12]} and {len(values) - 12} more"
