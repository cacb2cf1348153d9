"""Build changed engines, and race them against the unchanged one."""

import logging
import random
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

from onnx import ModelProto

from tasks.parts.builders.build import build
from tasks.parts.engines.runtimes import CPU
from tasks.parts.engines.target import Target
from tasks.parts.measuring.batch_latency import Bursts
from tasks.parts.measuring.engine_process import open_processes
from tasks.parts.measuring.intervals import estimate_ratio
from tasks.parts.measuring.pinning import pinned
from tasks.parts.measuring.race import CONTROL, RaceOptions, StoppingRule, round_medians, run_race
from tasks.parts.measuring.surroundings import wait_until_quiet
from tasks.parts.onnx_graphs.graph import write_graph
from tasks.parts.what_if.change import Change, ChangeKind, turned_on
from tasks.parts.what_if.float_nodes import leave_int8
from tasks.parts.what_if.widths import with_widths

logger = logging.getLogger(__name__)

UNCHANGED = "unchanged"
"""Name in the race of the engine that would be changed."""


@dataclass(frozen=True)
class Lap:
    """The measured time of a changed engine relative to the unchanged one."""

    factor: float
    """Time for one image over that of the unchanged engine: below 1 it is faster."""
    low: float
    """Lower end of the interval."""
    high: float


@dataclass(frozen=True)
class Trials:
    """What the race of changed engines told."""

    laps: Mapping[int, Lap]
    """By number of the change; without those that could not be built."""
    reasons: Mapping[int, str]
    """Why a change could not be built, by its number."""
    aa_spread: float
    """How much two processes of the unchanged engine seemed to differ."""
    num_rounds: int


def changed_source(change: Change, graph: ModelProto, target: Target) -> tuple[ModelProto, Target]:
    """Return the graph and the target of a change."""
    match change.kind:
        case ChangeKind.back_to_float:
            return leave_int8(graph, change.nodes, keeps_pairs=target.pairs_before_activations), target
        case ChangeKind.wider | ChangeKind.narrower:
            return with_widths(graph, change.widths), target
        case ChangeKind.scheme:
            return graph, turned_on(target, change.switch)
        case ChangeKind.batch:
            return graph, replace(target, max_batch=max(change.batch, target.max_batch))


def try_changes(
    changes: Sequence[Change],
    engine: Path,
    graph: ModelProto,
    target: Target,
    *,
    images: Path,
    folder: Path,
    options: RaceOptions,
) -> Trials:
    """Build each changed engine in a folder of its own below `folder`, and race them in common rounds.

    If the A/A spread is too large, they race again for twice the time, and the better race counts.
    """
    engines, batches, reasons = {UNCHANGED: engine}, {UNCHANGED: 1, CONTROL: 1}, {}
    for number, change in enumerate(changes):
        source, changed_target = changed_source(change, graph, target)
        place = folder / str(number)
        place.mkdir(parents=True)
        write_graph(source, place / "model.onnx")
        report = build(changed_target, model=place / "model.onnx", images=images, out=place)
        if report.reason:
            reasons[number] = report.reason
            continue
        engines[str(number)], batches[str(number)] = place / "engine", change.batch
    if len(engines) == 1:
        return Trials({}, reasons, 0.0, 0)
    raced, longer = {**engines, CONTROL: engine}, replace(options, budget_s=2 * options.budget_s)
    trials = _sum_up(_race(raced, batches, options, device=target.device), reasons)
    if trials.aa_spread > options.max_aa_spread:
        logger.warning(
            "try_changes: A/A spread %.1f %%, racing again for twice the time", 100 * trials.aa_spread
        )
        again = _sum_up(_race(raced, batches, longer, device=target.device), reasons)
        trials = min((trials, again), key=lambda found: found.aa_spread)
    return trials


def _sum_up(bursts_ms: Mapping[str, Bursts], reasons: Mapping[int, str]) -> Trials:
    medians = {name: round_medians(bursts) for name, bursts in bursts_ms.items()}
    changed = [name for name in medians if name not in (UNCHANGED, CONTROL)]

    def lap(name: str, num_comparisons: int) -> Lap:
        ratios = [ours / base for ours, base in zip(medians[name], medians[UNCHANGED], strict=True)]
        found = estimate_ratio(ratios, num_comparisons=num_comparisons)
        return Lap(found.value, found.low, found.high)

    control = lap(CONTROL, 1)
    return Trials(
        laps={int(name): lap(name, len(changed)) for name in changed},
        reasons=reasons,
        aa_spread=max(abs(control.low - 1), abs(control.high - 1)),
        num_rounds=len(medians[UNCHANGED]),
    )


def _race(
    engines: Mapping[str, Path], batches: Mapping[str, int], options: RaceOptions, *, device: str
) -> dict[str, list[list[float]]]:
    """Return the milliseconds per image of each engine, by round and call; the engines may run different batches."""
    rule = StoppingRule(
        contenders=[name for name in engines if name != CONTROL],
        controlled=UNCHANGED,
        num_comparisons=max(1, len(engines) - 2),
        min_rounds=options.min_rounds,
        budget_s=options.budget_s,
        resolution=options.resolution,
    )
    shuffler = random.Random(options.seed)
    wait_until_quiet(options.quiet)
    with ExitStack() as stack:
        processes = stack.enter_context(
            open_processes(engines, timeout_s=options.timeout_s, timed=options.timed)
        )
        for process in processes.values():
            process.wait_until_loaded()
        for name, process in processes.items():
            process.warm_up(batches[name], seconds=options.warm_up_ms / 1000)
        threads = {process.pid: process.num_threads for process in processes.values()}
        stack.enter_context(pinned(threads if device == CPU else {}))

        def run_round() -> dict[str, list[float]]:
            found = {}
            for name in shuffler.sample(list(processes), len(processes)):
                calls_ns = processes[name].burst(
                    batches[name], seconds=options.burst_ms / 1000, min_calls=options.min_calls
                )
                found[name] = [value / 1e6 / batches[name] for value in calls_ns]
            return {name: found[name] for name in processes}

        return run_race(run_round, rule)
