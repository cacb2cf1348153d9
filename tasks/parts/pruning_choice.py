"""The ratio that search_pruning chose, in a file of its own: latencies change from run to run, the choice seldom."""

import json
from pathlib import Path

from tasks.core.errors import ArtifactError

_KEY = "target_macs_ratio"


def write_choice(path: Path, target_macs_ratio: float) -> None:
    """Write the share of the MACs that shall remain."""
    path.write_text(json.dumps({_KEY: target_macs_ratio}) + "\n", encoding="utf-8")


def read_choice(path: Path) -> float:
    """Return the share of the MACs that shall remain, between 0 and 1.

    Raises ArtifactError when the file is missing or holds none.
    """
    try:
        ratio = float(json.loads(path.read_text(encoding="utf-8"))[_KEY])
        if not 0.0 < ratio < 1.0:
            raise ValueError(f"{_KEY} is {ratio}")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ArtifactError(
            f"{path}: no chosen ratio ({error!r}), expected {{{_KEY!r}: a number between 0 and 1}}. Run "
            "search_pruning again, or set prune.target_macs_ratio."
        ) from error
    return ratio
