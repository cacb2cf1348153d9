"""Small CSV tables between stages: one row per dataclass, one column per field."""

import csv
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from tasks.core.errors import ArtifactError


def write_table(path: Path, rows: Sequence[Any]) -> None:
    """Write one or more dataclasses of one type; floats get six decimals, so that equal rows give equal bytes."""
    names = [field.name for field in fields(rows[0])]
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(names)
        for row in rows:
            values = [getattr(row, name) for name in names]
            writer.writerow([f"{value:.6f}" if isinstance(value, float) else value for value in values])


def write_empty_table(path: Path, row_class: type[Any]) -> None:
    """Write the columns of a dataclass without a row."""
    path.write_text(",".join(field.name for field in fields(row_class)) + "\n", encoding="utf-8")


def read_table(path: Path, key: str, *, stage: str, may_be_empty: bool = False) -> dict[str, dict[str, str]]:
    """Return the rows by their value in the column `key`, in the order of the file.

    Raises ArtifactError, which names `stage` as the one to run again, when there is no such column, or no row where
    there has to be one.
    """
    try:
        with path.open(newline="", encoding="utf-8") as file:
            table = csv.DictReader(file)
            rows = {row[key]: row for row in table}
            if key not in (table.fieldnames or ()):
                raise KeyError(key)
    except (OSError, UnicodeDecodeError, KeyError, csv.Error) as error:
        raise ArtifactError(
            f"{path}: no readable table ({error!r}), expected a column '{key}'. Run {stage} again."
        ) from error
    if not rows and not may_be_empty:
        raise ArtifactError(f"{path}: no rows, expected at least one. Run {stage} again.")
    return rows
