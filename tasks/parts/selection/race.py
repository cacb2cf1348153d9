"""Read what race_rungs measured: how many times as fast one rung of a target is as another."""

import json
from dataclasses import dataclass
from pathlib import Path

from tasks.core.errors import ArtifactError
from tasks.parts.selection.engine_row import EngineRow


@dataclass(frozen=True)
class RungRatio:
    """Of two engine files, measured in the same rounds."""

    factor: float
    low: float
    """Lower end of the 95 % interval."""
    high: float
    aa_ratio_spread: float
    """What the A/A control differs by: no smaller difference means anything."""


@dataclass(frozen=True)
class Race:
    """One target."""

    engine_sha256: dict[str, str]
    ratios: dict[tuple[str, str], RungRatio]
    """(sha256 of the later rung, sha256 of the earlier one) -> how many times as fast the later one is."""

    def ratio(self, row: EngineRow, below: EngineRow) -> RungRatio:
        """Return how many times as fast a rung is as one below it; raise ArtifactError for other files."""
        for one in (row, below):
            if self.engine_sha256.get(one.variant) != one.engine_sha256:
                raise ArtifactError(
                    f"race_rungs measured another engine file of {one.name} than the one that was built. Run it "
                    f"again: dvc repro race_rungs@{one.target}."
                )
        assert row.engine_sha256 and below.engine_sha256
        return self.ratios[row.engine_sha256, below.engine_sha256]


def read_race(folder: Path) -> Race:
    """Read the report of race_rungs; raise ArtifactError where it is missing or damaged."""
    try:
        report = json.loads((folder / "report.json").read_text(encoding="utf-8"))
        sha256 = report["engine_sha256"]
        ratios = {
            (sha256[one["faster"]], sha256[one["slower"]]): RungRatio(
                one["factor"], one["low"], one["high"], report["aa_ratio_spread"]
            )
            for one in report["ratios"]
        }
        return Race(sha256, ratios)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ArtifactError(
            f"{folder / 'report.json'}: missing, damaged or of another version ({error!r}). Run it again: "
            f"dvc repro race_rungs@{folder.name}."
        ) from error
