"""The report and the key that every stage writes beside its own files."""

import dataclasses
import inspect
import json
from enum import StrEnum
from pathlib import Path
from typing import Any, TypeVar

import dacite

from tasks.core.errors import ArtifactError

REPORT_FILE = "report.json"
KEY_FILE = "key.json"

STRICT = dacite.Config(cast=[StrEnum, tuple], strict=True)
"""How JSON becomes a dataclass: no unknown fields; lists become tuples, strings become enumeration members."""

ReportT = TypeVar("ReportT")


def read_report(report_class: type[ReportT], folder: Path) -> ReportT:
    """Return the report in the output folder of a stage.

    Raises ArtifactError when it is missing or damaged, or when a field is missing, unknown or of the wrong type.
    """
    file = folder / REPORT_FILE
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
        if not isinstance(content, dict):
            raise TypeError(f"a {type(content).__name__}, expected an object")
        report = dacite.from_dict(report_class, content, STRICT)
        if absent := _absent_field(dataclasses.asdict(report), content):  # type: ignore[call-overload]
            raise dacite.MissingValueError(absent)
    except (OSError, ValueError, TypeError, dacite.DaciteError) as error:
        raise ArtifactError(f"{file} {_fault(error)}. Run the stage that writes it: `dvc repro`.") from error
    return report


def read_key(folder: Path) -> str:
    """Return the key under which a stage made its output; raise ArtifactError when it is missing or damaged."""
    file = folder / KEY_FILE
    try:
        return str(json.loads(file.read_text(encoding="utf-8"))["key"])
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise ArtifactError(f"{file} {_fault(error)}. Run the stage that writes it: `dvc repro`.") from error


def write_json(path: Path, content: Any) -> None:
    """Write human-readable JSON; raise ValueError for NaN and infinity."""
    text = json.dumps(content, indent=2, allow_nan=False, ensure_ascii=False)
    path.write_text(text + "\n", encoding="utf-8")


def _fault(error: Exception) -> str:
    if isinstance(error, FileNotFoundError):
        return "is missing"
    if isinstance(error, dacite.MissingValueError):
        return f"has no field '{error.field_path}'; it is from another version"
    if isinstance(error, dacite.WrongTypeError):
        expected = inspect.formatannotation(error.field_type)
        return f"has the field '{error.field_path}' = {error.value!r}, expected {expected}"
    return f"is damaged or from another version ({error})"


def _absent_field(report: Any, content: Any) -> str:
    """Return the path of a field that the file lacks: dacite fills in None where None is allowed."""
    is_sequence = isinstance(report, tuple | list)
    for key, value in enumerate(report) if is_sequence else getattr(report, "items", tuple)():
        if isinstance(content, dict) and key not in content:
            return str(key)
        if absent := _absent_field(value, content[key]):
            return f"{key}.{absent}"
    return ""
