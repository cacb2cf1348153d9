"""Where the stages put what belongs to one engine."""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class StageFolders:
    """The folders of the stages; each contains ``<variant>/<target>``, benchmarks ``<target>/<variant>``."""

    builds: Path
    validations: Path
    benchmarks: Path
    diffs: Path

    def of(self, variant: str, target: str) -> dict[str, Path]:
        """Return the folder of one engine in each stage; that of benchmark holds all engines of the target."""
        return {
            "build_engine": self.builds / variant / target,
            "validate": self.validations / variant / target,
            "benchmark": self.benchmarks / target,
            "diff_layers": self.diffs / variant / target,
        }

    def of_engines(self, names: Iterable[tuple[str, str]]) -> dict[str, list[Path]]:
        """Return the folders of engines, given as (variant, target), by the field that they are in."""
        every = [self.of(variant, target) for variant, target in names]
        fields = {
            "builds": "build_engine",
            "validations": "validate",
            "benchmarks": "benchmark",
            "diffs": "diff_layers",
        }
        return {field: sorted({of[stage] for of in every}) for field, stage in fields.items()}
