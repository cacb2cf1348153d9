"""Time the rungs of the ladder on one target against each other.

A rung is accepted for being faster than the one below it. Speed-ups over a common reference, measured in different
minutes, differ on a shared machine by more than rungs do, so here all rungs run in the same rounds: a process for
each engine file, and one more of the first file as the A/A control.
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from tasks.core.bounds import AtLeast, MoreThan
from tasks.parts.measuring.reports import RaceReport, RungRatio

logger = logging.getLogger(__name__)

CONTROL = "control"
_FEWEST_ROUNDS = 5


@dataclass(frozen=True)
class Config:
    """Which rungs, and how long they race."""

    target: str
    """Name of the target that the rungs race on."""
    variants: list[str]
    """Rungs that are built for the target, in the order of the ladder."""
    seed: Annotated[int, AtLeast(0)]
    """Fixes the order of the engines within the rounds, and the bootstrap."""
    warm_up_ms: Annotated[float, AtLeast(0)]
    """How long each engine warms up before anything counts."""
    burst_ms: Annotated[float, MoreThan(0)]
    """Length of one burst."""
    min_calls: Annotated[int, AtLeast(1)]
    """Fewest inferences in a burst, for engines slower than a burst."""
    num_rounds: Annotated[int, AtLeast(_FEWEST_ROUNDS)]
    """Rounds, in each of which every engine has one burst. More: narrower intervals."""
    timeout_s: Annotated[float, MoreThan(0)]
    """How long an engine's process may stay silent before it is given up."""


Report = RaceReport


def race_rungs(cfg: Config, *, builds: Path, out: Path) -> Report:
    """Write ``latencies.csv`` and return the ratios of all rungs of a target.

    ``builds`` has a ``*`` for the variant: other targets, which other machines may build, are not its inputs.
    A target with fewer than two engine files has no race. Raises ArtifactError when a process dies.
    """
    import numpy as np

    from tasks.parts.engines.manifest import read_engine_manifest
    from tasks.parts.measuring.intervals import ratio_spread

    engines = {
        variant: Path(*(variant if part == "*" else part for part in builds.parts), "engine")
        for variant in cfg.variants
    }
    manifests = {variant: read_engine_manifest(engine) for variant, engine in engines.items()}
    built = {variant: manifest.sha256 for variant, manifest in manifests.items() if manifest.is_built}
    first = {sha256: variant for variant, sha256 in reversed(built.items())}
    racing = [variant for variant in built if first[built[variant]] == variant]
    if len(racing) < 2:
        logger.info("race_rungs: %s has %d engine files, no race", cfg.target, len(racing))
        return Report(built, {}, (), None, 0)
    rounds = _race(cfg, {variant: engines[variant] for variant in racing})
    _write_latencies(rounds, out / "latencies.csv")
    medians = {name: np.array([np.median(burst) for burst in bursts]) for name, bursts in rounds.items()}
    ratios = [
        _ratio(later, earlier, medians[earlier] / medians[later], cfg.seed)
        for number, later in enumerate(racing)
        for earlier in racing[:number]
    ]
    spread = ratio_spread(medians[racing[0]] / medians[CONTROL], seed=cfg.seed)
    logger.info("race_rungs: %s, %d engine files, A/A spread %.1f %%", cfg.target, len(racing), 100 * spread)
    return Report(
        engine_sha256=built,
        latency_ms_p50={name: float(np.median(np.concatenate(rounds[name]))) for name in racing},
        ratios=tuple(ratios),
        aa_ratio_spread=spread,
        num_rounds=cfg.num_rounds,
    )


def _race(cfg: Config, engines: Mapping[str, Path]) -> dict[str, list[list[float]]]:
    """Return the latencies in ms of each engine by round, and of the control."""
    import random

    from tasks.parts.measuring.engine_process import open_processes, run_round

    first = next(iter(engines))
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


def _ratio(faster: str, slower: str, factors: "Sequence[float]", seed: int) -> RungRatio:
    import numpy as np

    from tasks.parts.measuring.intervals import bootstrap_interval

    return RungRatio(faster, slower, float(np.median(factors)), *bootstrap_interval(factors, seed=seed))


def _write_latencies(rounds: Mapping[str, list[list[float]]], path: Path) -> None:
    import csv

    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["variant", "round", "latency_ms"])
        for name, bursts in rounds.items():
            for number, burst in enumerate(bursts):
                writer.writerows([name, number, f"{value:.5f}"] for value in burst)
