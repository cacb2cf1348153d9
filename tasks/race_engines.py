"""Time all engines of one target against each other and against the engine that all speed-ups refer to.

On a shared machine, speed-ups measured minutes apart differ by more than the rungs of the ladder do. Therefore all
engines run in the same rounds: one process for each engine file, one for the reference, and one more for the first
file as the A/A control.
"""

import itertools
import logging
import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from tasks.core.bounds import AtLeast, MoreThan
from tasks.core.errors import ArtifactError
from tasks.parts.measuring.intervals import LEVEL, estimate_ratio
from tasks.parts.measuring.reports import REFERENCE, RaceReport, SpeedRatio

if TYPE_CHECKING:
    from tasks.parts.engines.manifest import EngineManifest

logger = logging.getLogger(__name__)

CONTROL = "control"
_FEWEST_ROUNDS = 5


@dataclass(frozen=True)
class Config:
    """Which engines race, and for how long."""

    target: str
    """Name of the target that the engines race on."""
    variants: list[str]
    """Variants that are built for the target, the rungs of the ladder first and in its order."""
    seed: Annotated[int, AtLeast(0)]
    """Fixes the order of the engines within the rounds."""
    warm_up_ms: Annotated[float, AtLeast(0)]
    """How long each engine warms up before it is measured."""
    burst_ms: Annotated[float, MoreThan(0)]
    """Length of one burst."""
    min_calls: Annotated[int, AtLeast(1)]
    """Minimum number of inferences in a burst, for engines slower than a burst."""
    num_rounds: Annotated[int, AtLeast(_FEWEST_ROUNDS)]
    """Number of rounds; every engine runs one burst per round. More: narrower intervals."""
    timeout_s: Annotated[float, MoreThan(0)]
    """How long to wait for an answer from an engine's process."""


Report = RaceReport


def race_engines(cfg: Config, *, builds: Path, reference: Path, out: Path) -> Report:
    """Write ``latencies.csv`` and return the ratios of all engines of a target.

    ``builds`` has a ``*`` in place of the variant, so that other targets, which other machines may build, are not
    inputs. Nothing runs if the target has no engine file except the reference's own. Raises ArtifactError if the
    reference was not built, if an engine takes images of another size than the reference, or if a process dies.
    """
    from tasks.parts.engines.manifest import read_engine_manifest

    engines = {
        variant: Path(*(variant if part == "*" else part for part in builds.parts))
        for variant in cfg.variants
    }
    manifests = {variant: read_engine_manifest(engine) for variant, engine in engines.items()}
    base = read_engine_manifest(reference)
    built = {variant: manifest for variant, manifest in manifests.items() if manifest.is_built}
    for variant, manifest in built.items():
        _check_comparable(manifest, base, engines[variant], reference)
    files = {variant: manifest.sha256 for variant, manifest in built.items()}
    first = {sha256: variant for variant, sha256 in reversed(files.items())}
    if (
        base.target.name == cfg.target
    ):  # on another target the same file is a different engine: eager PyTorch on CPU and GPU
        first[base.sha256] = REFERENCE
    raced_as = {variant: first[sha256] for variant, sha256 in files.items()}
    racing = [variant for variant, name in raced_as.items() if variant == name]
    if not racing:
        logger.info("race_engines: %s has no engine file to race", cfg.target)
        return Report(files, raced_as, base.sha256, {}, (), None, LEVEL, 0, 0)
    rounds = _race(cfg, {REFERENCE: reference, **{variant: engines[variant] for variant in racing}})
    _write_latencies(rounds, out / "latencies.csv")
    ratios, aa_ratio = _compare(rounds, num_comparisons=len(racing))
    report = Report(
        engine_sha256=files,
        raced_as=raced_as,
        reference_sha256=base.sha256,
        latency_ms_p50={
            name: statistics.median(itertools.chain(*rounds[name])) for name in (REFERENCE, *racing)
        },
        ratios=ratios,
        aa_ratio=aa_ratio,
        level=LEVEL,
        num_comparisons=len(racing),
        num_rounds=cfg.num_rounds,
    )
    logger.info(
        "race_engines: %s, %d engine files, A/A spread %.1f %%",
        cfg.target,
        len(racing),
        100 * report.aa_ratio_spread,
    )
    return report


def _check_comparable(
    manifest: "EngineManifest", base: "EngineManifest", engine: Path, reference: Path
) -> None:
    if not base.is_built:
        raise ArtifactError(
            f"{reference}: the reference engine was not built ({base.status}: {base.reason}), but all speed-ups "
            "refer to it. Fix its build first."
        )
    size, expected = (manifest.card.height, manifest.card.width), (base.card.height, base.card.width)
    if size != expected:
        raise ArtifactError(
            f"{engine}: takes images of {size}, but the reference {reference} takes images of {expected} "
            "(height, width). Build both from variants of the same data set."
        )


def _race(cfg: Config, engines: Mapping[str, Path]) -> dict[str, list[list[float]]]:
    """Return the latencies in ms of each engine and of the control, by round."""
    import random

    from tasks.parts.measuring.engine_process import open_processes, run_round

    first = next(name for name in engines if name != REFERENCE)
    starters = {**engines, CONTROL: engines[first]}
    with open_processes(starters, timeout_s=cfg.timeout_s) as processes:
        for process in processes.values():
            process.wait_until_loaded()
        for process in processes.values():
            process.warm_up(1, seconds=cfg.warm_up_ms / 1000)
        shuffler = random.Random(cfg.seed)
        rounds = [
            run_round(processes, 1, shuffler, burst_ms=cfg.burst_ms, min_calls=cfg.min_calls)
            for _ in range(cfg.num_rounds)
        ]
    return {name: [bursts[name] for bursts in rounds] for name in starters}


def _compare(
    rounds: Mapping[str, list[list[float]]], num_comparisons: int
) -> tuple[tuple[SpeedRatio, ...], SpeedRatio]:
    """Return the ratios of all pairs, the later engine over the earlier one, and the ratio of the control.

    Verdicts compare each of n engines with one other, so n - 1 pairs decide, whichever they are; the intervals are
    corrected for that many (Bonferroni). The control is one comparison of its own.
    """
    import numpy as np

    medians = {name: np.array([np.median(burst) for burst in bursts]) for name, bursts in rounds.items()}
    racing = [name for name in rounds if name != CONTROL]

    def ratio(faster: str, slower: str, num_comparisons: int = num_comparisons) -> SpeedRatio:
        found = estimate_ratio(medians[slower] / medians[faster], num_comparisons=num_comparisons)
        return SpeedRatio(faster, slower, found.value, found.low, found.high)

    pairs = [(later, earlier) for number, later in enumerate(racing) for earlier in racing[:number]]
    return tuple(ratio(*pair) for pair in pairs), ratio(CONTROL, racing[1], 1)


def _write_latencies(rounds: Mapping[str, list[list[float]]], path: Path) -> None:
    import csv

    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["engine", "round", "latency_ms"])
        for name, bursts in rounds.items():
            for number, burst in enumerate(bursts):
                writer.writerows([name, number, f"{value:.5f}"] for value in burst)
