"""What a search left out and why, in one sentence that select_engine shows beside the engines of the rung."""

from enum import StrEnum
from pathlib import Path

from tasks.core.errors import ArtifactError

LEFT_OUT_FILE = "left_out.txt"
"""Empty if nothing was left out."""


def read_left_out(path: Path) -> str:
    """Return what a search left out; raise ArtifactError if its file cannot be read."""
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ArtifactError(
            f"{path}: not readable ({error!r}), expected a sentence. Run {path.parent.name} again."
        ) from error


class Search(StrEnum):
    """A stage that searches for a better INT8 graph, unless there is nothing to gain."""

    quantize_repaired = "quantize_repaired"
    quantize_partial = "quantize_partial"
