"""Reports on disk become the dataclasses that they were, or an error that says what is wrong with the file."""

import dataclasses
import json
import re
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

import pytest

from tasks.core.errors import ArtifactError
from tasks.core.reports import read_key, read_report, write_json


class Status(StrEnum):
    built = "built"


@dataclass(frozen=True)
class Part:
    ratio: float
    note: str | None


@dataclass(frozen=True)
class Report:
    status: Status
    parts: tuple[Part, ...]
    by_name: dict[str, Part | None]


REPORT = Report(Status.built, (Part(0.5, None), Part(1.0, "b")), {"a": Part(2.0, None), "b": None})


def content() -> dict[str, Any]:
    parsed: dict[str, Any] = json.loads(json.dumps(dataclasses.asdict(REPORT)))
    return parsed


def test_report_is_read_as_it_was_written(tmp_path: Path) -> None:
    write_json(tmp_path / "report.json", dataclasses.asdict(REPORT))
    assert read_report(Report, tmp_path) == REPORT


def without_note() -> dict[str, Any]:
    changed = content()
    del changed["parts"][1]["note"]
    return changed


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"status": "built", "parts": []}, "has no field 'by_name'"),
        (without_note(), "has no field 'parts.1.note'"),
        (
            content() | {"parts": [{"ratio": "1", "note": None}]},
            "has the field 'parts.ratio' = '1', expected float",
        ),
        (
            content() | {"status": "burnt"},
            "is damaged or from another version ('burnt' is not a valid Status)",
        ),
        (content() | {"more": 1}, "is damaged or from another version"),
        ([], "is damaged or from another version (a list, expected an object)"),
    ],
)
def test_report_of_another_version_is_refused(tmp_path: Path, changed: Any, words: str) -> None:
    write_json(tmp_path / "report.json", changed)
    with pytest.raises(ArtifactError, match=re.escape(f"{tmp_path / 'report.json'} {words}") + ".*dvc repro"):
        read_report(Report, tmp_path)


def test_missing_report_and_damaged_key_are_named(tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match=r"report\.json is missing\. Run the stage that writes it"):
        read_report(Report, tmp_path)
    (tmp_path / "key.json").write_text("{")
    with pytest.raises(ArtifactError, match=r"key\.json is damaged"):
        read_key(tmp_path)
