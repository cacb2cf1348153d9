"""Time engines against each other in common rounds, until it is decided which of two neighbours is faster.

In each round every engine runs one burst, in random order, so that slow phases of the machine affect all of them. A
second process of one engine, the A/A control, shows how much two equal engines seem to differ.
"""

import itertools
import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from tasks.core.bounds import AtLeast, MoreThan
from tasks.parts.measuring.batch_latency import Bursts
from tasks.parts.measuring.intervals import Estimate, estimate_ratio
from tasks.parts.measuring.reports import SpeedRatio, Timed
from tasks.parts.measuring.surroundings import QuietLimits

CONTROL = "control"
"""Name in a race of the second process of one engine."""
FEWEST_ROUNDS = 5
"""Rounds at any cost: the fewest batches of an interval."""
_GROWTH = 1.5
_STRICTNESS_OF_LOOKS = 10
"""Before the time is up an order has to be this many times as certain as at the end."""


RunRound = Callable[[], Mapping[str, Sequence[float]]]
"""Runs one burst of every engine and returns the latencies in ms by name."""


@dataclass(frozen=True)
class RaceOptions:
    """How a stage races engines at batch 1."""

    seed: Annotated[int, AtLeast(0)]
    """Fixes the order of the engines within the rounds."""
    warm_up_ms: Annotated[float, AtLeast(0)]
    """How long each process warms up at each batch size before it is measured."""
    burst_ms: Annotated[float, MoreThan(0)]
    """Length of one burst. Longer: fewer rounds, and a slow phase of the machine less often covers a whole round."""
    min_calls: Annotated[int, AtLeast(1)]
    """Minimum number of inferences in a burst, for engines slower than burst_ms / min_calls."""
    min_rounds: Annotated[int, AtLeast(FEWEST_ROUNDS)]
    """Minimum number of rounds at batch 1, even beyond the time budget, up to twice that budget."""
    budget_s: Annotated[float, MoreThan(0)]
    """Time for the rounds at batch 1, which end earlier if the order of the engines is decided."""
    resolution: Annotated[float, MoreThan(0)]
    """Engines that differ by less than this count as equally fast. 0.015 is 1.5 %. Lower: more rounds."""
    max_aa_spread: Annotated[float, MoreThan(0)]
    """A/A spread above which the rounds are repeated with twice the budget, and above which the better of the two
    is reported as inconclusive. 0.05 is 5 %."""
    quiet: QuietLimits
    """When the machine is quiet enough to begin."""
    timed: Timed
    """What the race decides by: the time from a frame to its answer, or that of the engine alone."""
    timeout_s: Annotated[float, MoreThan(0)]
    """How long to wait for an answer from an engine's process."""


def engine_folder(builds: Path, *names: str) -> Path:
    """Return one of the folders that ``builds`` matches, with a name in place of each ``*``."""
    missing = iter(names)
    return Path(*(next(missing) if part == "*" else part for part in builds.parts))


@dataclass(frozen=True)
class StoppingRule:
    """When a race ends."""

    contenders: Sequence[str]
    """Engines whose order matters; the reference of another target is none of them."""
    controlled: str
    """The engine that the A/A control is a second process of."""
    num_comparisons: int
    """Pairs that can decide, for Bonferroni's correction."""
    min_rounds: int
    """Minimum number of rounds, even beyond `budget_s`, up to twice that time."""
    budget_s: float
    """Time for all rounds."""
    resolution: float
    """Engines that certainly differ by less than this are equally fast; 0.015 is 1.5 %."""


def run_race(
    run_round: RunRound, rule: StoppingRule, clock: Callable[[], float] = time.monotonic
) -> dict[str, list[list[float]]]:
    """Run rounds until the order of all neighbours on speed is decided or the time is up; return the bursts.

    The interval of the A/A control has to be as short as that of two equal engines, because no difference within it
    counts.

    The intervals are looked at after `min_rounds` rounds, and again whenever there are half as many more. Each look
    is one more chance to take noise for a difference, so an order that ends the race early has to be far more
    certain than one at the end (Haybittle, "Repeated assessment of results in clinical trials of cancer treatment",
    British Journal of Radiology 44, 1971).
    """
    rounds: list[Mapping[str, Sequence[float]]] = []
    start, next_look = clock(), max(rule.min_rounds, FEWEST_ROUNDS)
    while True:
        rounds.append(run_round())
        spent = (clock() - start) / rule.budget_s
        if len(rounds) < FEWEST_ROUNDS:
            continue
        if spent >= (1 if len(rounds) >= rule.min_rounds else 2):
            break
        if len(rounds) >= next_look:
            bursts_ms = _by_name(rounds)
            if _is_control_known(bursts_ms, rule) and not undecided_pairs(
                bursts_ms, rule, strictness=_STRICTNESS_OF_LOOKS
            ):
                break
            next_look = math.ceil(next_look * _GROWTH)
    return _by_name(rounds)


def undecided_pairs(
    bursts_ms: Mapping[str, Bursts], rule: StoppingRule, *, strictness: int = 1
) -> list[tuple[str, str]]:
    """Return the neighbours on speed, faster one first, of which neither order nor equality is certain.

    A `strictness` of 10 allows a tenth of the error for the order.
    """
    of_rounds = {name: round_medians(bursts_ms[name]) for name in rule.contenders}
    order = sorted(of_rounds, key=lambda name: statistics.median(of_rounds[name]))
    return [
        (faster, slower)
        for faster, slower in itertools.pairwise(order)
        if not _is_decided(of_rounds[faster], of_rounds[slower], rule, strictness)
    ]


def compare_all(
    bursts_ms: Mapping[str, Bursts], *, controlled: str, num_comparisons: int
) -> tuple[tuple[SpeedRatio, ...], SpeedRatio]:
    """Return the ratio of every two engines, the later one over the earlier one, and that of the A/A control.

    A verdict compares each of n engines with one other, so n - 1 pairs decide, whichever they are: the intervals are
    corrected for that many comparisons (Bonferroni). The control is one comparison of its own.
    """
    medians = {name: round_medians(bursts) for name, bursts in bursts_ms.items()}
    racing = [name for name in medians if name != CONTROL]

    def ratio(faster: str, slower: str, num_comparisons: int) -> SpeedRatio:
        found = _estimate(medians[faster], medians[slower], num_comparisons)
        return SpeedRatio(faster, slower, found.value, found.low, found.high)

    pairs = [(later, earlier) for number, later in enumerate(racing) for earlier in racing[:number]]
    return tuple(ratio(*pair, num_comparisons) for pair in pairs), ratio(CONTROL, controlled, 1)


def round_medians(bursts_ms: Bursts) -> list[float]:
    """Return the median latency of each round."""
    return [statistics.median(burst) for burst in bursts_ms]


def _estimate(faster_ms: Sequence[float], slower_ms: Sequence[float], num_comparisons: int) -> Estimate:
    ratios = [slower / faster for faster, slower in zip(faster_ms, slower_ms, strict=True)]
    return estimate_ratio(ratios, num_comparisons=num_comparisons)


def _is_control_known(bursts_ms: Mapping[str, Bursts], rule: StoppingRule) -> bool:
    control = _estimate(round_medians(bursts_ms[CONTROL]), round_medians(bursts_ms[rule.controlled]), 1)
    return control.high / control.low - 1 <= 2 * rule.resolution


def _is_decided(
    faster_ms: Sequence[float], slower_ms: Sequence[float], rule: StoppingRule, strictness: int
) -> bool:
    order = _estimate(faster_ms, slower_ms, rule.num_comparisons * strictness)
    equality = _estimate(faster_ms, slower_ms, rule.num_comparisons)
    return not order.low <= 1 <= order.high or equality.spread <= rule.resolution


def _by_name(rounds: Sequence[Mapping[str, Sequence[float]]]) -> dict[str, list[list[float]]]:
    return {name: [list(bursts[name]) for bursts in rounds] for name in rounds[0]}
