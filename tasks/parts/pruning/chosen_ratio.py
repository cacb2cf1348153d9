"""The ratio that search_pruning chose, in a separate file: latencies change from run to run, the choice rarely."""

import json
from pathlib import Path

from tasks.core.errors import ArtifactError, GateFailed

_KEY, _REASON_KEY = "target_macs_ratio", "reason"


def write_choice(path: Path, target_macs_ratio: float | None, reason: str = "") -> None:
    """Write the share of the MACs that is to remain, or None with the reason."""
    content = {_KEY: target_macs_ratio} | ({_REASON_KEY: reason} if target_macs_ratio is None else {})
    path.write_text(json.dumps(content) + "\n", encoding="utf-8")


def read_choice(path: Path) -> float:
    """Return the share of the MACs that is to remain, between 0 and 1.

    Raises GateFailed when the search chose no ratio, ArtifactError when the file is missing or damaged.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        if content[_KEY] is None:
            raise GateFailed(
                f"prune.from_search is true, but search_pruning chose no ratio: {content[_REASON_KEY]}. Set "
                "prune.from_search=false and prune.target_macs_ratio, or search other ratios "
                "(search_pruning.target_macs_ratios)."
            )
        ratio = float(content[_KEY])
        if not 0.0 < ratio < 1.0:
            raise ValueError(f"{_KEY} is {ratio}")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ArtifactError(
            f"{path}: no chosen ratio ({error!r}), expected {{{_KEY!r}: a number between 0 and 1}}. Run "
            "search_pruning again, or set prune.target_macs_ratio."
        ) from error
    return ratio
