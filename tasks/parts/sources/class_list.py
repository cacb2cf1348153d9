"""Read classes.yaml of a data set, which maps indices to classes."""

from dataclasses import dataclass
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any

from tasks.core.errors import DataError
from tasks.parts.data.dataset import MAX_CLASSES

CLASSES_FILE = "classes.yaml"


@dataclass(frozen=True)
class ClassList:
    """Class names in the order of their indices."""

    names: tuple[str, ...]
    ignore_index: int | None
    """Mask value of ignored pixels, or None."""


def read_class_list(root: Path, *, max_classes: int = MAX_CLASSES) -> ClassList:
    """Read `root/classes.yaml`: a list of names or a map index -> name, optionally under `classes:`.

    Raises DataError for a missing or damaged file, gaps in the indices, repeated or unsafe names.
    """
    import yaml

    path = root / CLASSES_FILE
    if path.is_symlink():
        raise DataError(f"{path}: is a symbolic link. Replace it by the file itself.")
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise DataError(
            f"{path}: not found. Expected a YAML list of class names, in the order of their mask values "
            "(prepare_data.root)."
        ) from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise DataError(f"{path}: not valid YAML in UTF-8 ({error}).") from error
    ignore_index = None
    if isinstance(content, dict) and "classes" in content:
        unknown = sorted(str(key) for key in content if key not in ("classes", "ignore_index"))
        if unknown:
            raise DataError(f"{path}: unknown key '{unknown[0]}'. Allowed: classes, ignore_index.")
        ignore_index = content.get("ignore_index")
        content = content["classes"]
    elif isinstance(content, dict) and "ignore_index" in content:
        content = dict(content)
        ignore_index = content.pop("ignore_index")
    names = _names_in_order(path, content, max_classes)
    _check_ignore_index(path, ignore_index, len(names))
    return ClassList(names, ignore_index)


def check_relative_name(name: str, *, source: Path) -> None:
    """Raise DataError for a name from a text file that could escape its folder."""
    posix, windows = PurePosixPath(name), PureWindowsPath(name)
    is_outside = posix.is_absolute() or windows.is_absolute() or bool(windows.drive) or ".." in windows.parts
    if not name or is_outside or any(ord(character) < 32 for character in name):
        raise DataError(
            f"{source}: {name!r} is refused. Allowed are names inside the folder: not absolute, without "
            "'..', NUL or other control characters."
        )


def _names_in_order(path: Path, content: Any, max_classes: int) -> tuple[str, ...]:
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
    if len(content) > max_classes:
        raise DataError(f"{path}: {len(content)} classes, at most {max_classes} are possible.")
    names = tuple(content[index] for index in range(len(content)))
    for name in names:
        if not isinstance(name, str):
            raise DataError(f"{path}: class name {name!r} is not text. Put it in quotes.")
        check_relative_name(name, source=path)
        if "/" in name or "\\" in name or name.strip() in ("", "."):
            raise DataError(
                f"{path}: class name {name!r} is refused: names must not be empty or '.', or contain '/' or '\\'."
            )
    repeated = [name for index, name in enumerate(names) if name in names[:index]]
    if repeated:
        raise DataError(f"{path}: class name '{repeated[0]}' appears twice. Give each index its own name.")
    return names


def _check_ignore_index(path: Path, ignore_index: Any, num_classes: int) -> None:
    if ignore_index is None:
        return
    if isinstance(ignore_index, bool) or not isinstance(ignore_index, int) or not 0 <= ignore_index <= 65535:
        raise DataError(f"{path}: ignore_index is {ignore_index!r}, expected a mask value from 0 to 65535.")
    if ignore_index < num_classes:
        raise DataError(
            f"{path}: ignore_index {ignore_index} is also a class (there are {num_classes}). Choose a value "
            f"from {num_classes} up, for example 255."
        )


def _shortened(values: list[Any]) -> str:
    return str(values) if len(values) <= 12 else f"{values[:12]} and {len(values) - 12} more"
