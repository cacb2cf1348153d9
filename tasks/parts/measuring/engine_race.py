"""Race engine files at batch 1: each in its own process, all of them in the same rounds."""

import logging
import random
import statistics
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tasks.parts.engines.runtimes import CPU
from tasks.parts.measuring.batch_latency import Bursts
from tasks.parts.measuring.engine_process import EngineProcess, WarmUp, open_processes, run_round
from tasks.parts.measuring.intervals import LEVEL
from tasks.parts.measuring.pinning import pinned
from tasks.parts.measuring.race import (
    CONTROL,
    RaceOptions,
    StoppingRule,
    compare_all,
    run_race,
    undecided_pairs,
)
from tasks.parts.measuring.reports import REFERENCE, Race
from tasks.parts.measuring.surroundings import Surroundings, Watch, start_watch, wait_until_quiet

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Rounds:
    """What all engines did in their common rounds."""

    race: Race
    bursts_ms: Mapping[str, Bursts]
    """By name, of the reference and the control as well."""


@dataclass(frozen=True)
class EngineRunner:
    """The process of one engine, warmed up."""

    process: EngineProcess
    description: Mapping[str, Any]
    """The description that the engine's runner returns."""
    warm_up: WarmUp


@dataclass(frozen=True)
class EngineRace:
    """Engines that are loaded and wait for the first round."""

    runners: Mapping[str, EngineRunner]
    """By name, the reference first and the control last."""
    _options: RaceOptions
    _watch: Watch

    def run(self, *, contenders: Sequence[str]) -> Rounds:
        """Run rounds until the order of the contenders is decided.

        If the A/A spread is too large, run them again with twice the time and keep the better ones.
        """
        first = self._run(contenders, num_repeats=0)
        spread = first.race.aa_ratio.spread
        if spread <= self._options.max_aa_spread:
            return first
        logger.warning("race: A/A spread %.1f %%, measuring again for up to twice the time", 100 * spread)
        second = self._run(contenders, num_repeats=1)
        kept = min((first, second), key=lambda rounds: rounds.race.aa_ratio.spread)
        return replace(kept, race=replace(kept.race, num_repeats=1))

    def surroundings(self) -> Surroundings:
        """Return what happened on the machine since the engines were loaded."""
        return self._watch.finish()

    def _run(self, contenders: Sequence[str], *, num_repeats: int) -> Rounds:
        options, shuffler = self._options, random.Random(self._options.seed + num_repeats)
        rule = StoppingRule(
            contenders=contenders,
            controlled=_controlled(list(self.runners)),
            num_comparisons=max(1, len(contenders) - 1),
            min_rounds=options.min_rounds,
            budget_s=options.budget_s * (1 + num_repeats),
            resolution=options.resolution,
        )
        processes = {name: runner.process for name, runner in self.runners.items()}
        threads = {process.pid: process.num_threads for process in processes.values()}
        with pinned(threads if self._watch.device == CPU else {}) as cpus:
            bursts_ms = run_race(
                lambda: run_round(
                    processes, 1, shuffler, burst_ms=options.burst_ms, min_calls=options.min_calls
                ),
                rule,
            )
        ratios, aa_ratio = compare_all(
            bursts_ms, controlled=rule.controlled, num_comparisons=rule.num_comparisons
        )
        race = Race(
            ratios=ratios,
            aa_ratio=aa_ratio,
            level=LEVEL,
            num_comparisons=rule.num_comparisons,
            resolution=rule.resolution,
            undecided=tuple(undecided_pairs(bursts_ms, rule)),
            reference_ms_p50=statistics.median(value for burst in bursts_ms[REFERENCE] for value in burst),
            num_rounds=len(bursts_ms[REFERENCE]),
            num_repeats=num_repeats,
            cpus=cpus,
        )
        return Rounds(race, bursts_ms)


@contextmanager
def open_race(options: RaceOptions, engines: Mapping[str, Path], *, device: str) -> Iterator[EngineRace]:
    """Wait for a quiet machine, then load and warm up the engines and the A/A control.

    `engines` maps names to folders, REFERENCE first. Raises ArtifactError if a process dies.
    """
    quiet = wait_until_quiet(options.quiet)
    starters = {**engines, CONTROL: engines[_controlled(list(engines))]}
    with open_processes(starters, timeout_s=options.timeout_s, timed=options.timed) as processes:
        for process in processes.values():
            process.wait_until_imported()
        descriptions = {name: process.wait_until_loaded() for name, process in processes.items()}
        runners = {
            name: EngineRunner(
                process, descriptions[name], process.warm_up(1, seconds=options.warm_up_ms / 1000)
            )
            for name, process in processes.items()
        }
        yield EngineRace(runners, options, start_watch(quiet, device))


def _controlled(names: Sequence[str]) -> str:
    """Return the engine that has a second process: the first one after the reference."""
    return names[1] if len(names) > 1 and names[1] != CONTROL else names[0]
