"""Results that a benchmark writes row by row, so that a second start continues."""

import json
from collections.abc import Iterable, Mapping
from datetime import date
from pathlib import Path
from typing import Any


def open_record(results: Path, conditions: Mapping[str, Any], parts: Iterable[str]) -> dict[str, Any]:
    """Return what was measured so far, or a new record with empty lists `parts`.

    Exits if it was measured under other conditions.
    """
    if not results.is_file():
        return {"date": date.today().isoformat(), "conditions": conditions} | {part: [] for part in parts}
    record: dict[str, Any] = json.loads(results.read_text(encoding="utf-8"))
    if other := [name for name, value in conditions.items() if record["conditions"].get(name) != value]:
        raise SystemExit(
            f"{results} was measured with other {', '.join(other)} than there are now. Delete it to begin again, or "
            "name another file with --results."
        )
    return record


def write_record(results: Path, record: Mapping[str, Any]) -> None:
    """Write the results; a kill leaves the old file or the new one."""
    draft = results.with_suffix(".draft")
    draft.write_text(json.dumps(record, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    draft.replace(results)
