"""Simulate how often intervals of speed ratios and of accuracy losses hold the truth.

``python -m benchmarks.coverage`` needs numpy and scipy only and measures nothing on the machine. It takes a few
minutes, prints its tables and writes ``benchmarks/results/coverage.json``; with ``--tables losses`` or ``races`` the
others stay as they are there.

Coverage: the share of simulated races whose 95 % interval holds the true ratio, for the order statistics of
``tasks/parts/measuring/intervals.py``, a bootstrap that draws single rounds (Efron 1979) and one that draws blocks of
consecutive rounds (Kuensch 1989). The noise of an engine follows a first-order autoregressive process;
``correlation`` is that of one round with the next. Real races showed 0.04 on average, and 0.36 at the most.
``disturbed`` is the share of an engine's rounds that take 40 % longer, because something else runs on the core, as
in a virtual machine with noisy neighbours. ``length`` is the median length of the interval by order statistics.

Percentiles: the same for the percentiles of all latencies of an engine, whose rounds are slow or fast as a whole (a
deviation of 3 %, correlated by 0.2) and of whose calls 3 % take up to twice as long.

Null test: races of seven engines, two of which are the same under two names. The share of races in which one of the
two is called faster should be far below 1 - level, as the intervals are corrected for the pairs that decide. The
races end by the rule of ``tasks/parts/measuring/race.py``, which looks at the intervals several times.

Power: the share of such races in which a difference of 3 % between two of seven engines is found. The noise of a
ratio from round to round is that of a quiet machine up to 0.02, besides the disturbed rounds.

Losses, drawn from what real engines got right in each frame of 200 videos (``benchmarks/video_records.py``): data
sets of 2 to 20 videos with 4 frames each (``equal``) or 1 to 32 (``unequal``), or of as many frames of different
videos (``single``). ``coverage`` is the share of intervals that hold the true loss, ``false_accept`` the share that
end below it, which is what a gate at the true loss accepts. Each has the exact binomial interval of its draws; the
bounds are 93 % and 3.5 %. Without a loss (each group is drawn as it is, or with the engine and the reference
exchanged) a gate of 2 % should ACCEPT. The oracle is Student's t of someone who knows the scores of all videos, and
so how far each group moves the loss. Methods: the same for other intervals, ``bootstrap`` being that of earlier
versions.
"""

import argparse
import itertools
import json
import math
from collections.abc import Callable, Sequence
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.special import ndtri

from benchmarks import loss_coverage
from tasks.parts.measuring.intervals import LEVEL, estimate_ratio, percentile_intervals
from tasks.parts.measuring.race import CONTROL, StoppingRule, compare_all, run_race
from tasks.parts.measuring.reports import SpeedRatio

RESULTS = Path(__file__).parent / "results" / "coverage.json"

NUM_ROUNDS = (20, 40, 100)
CORRELATIONS = (0.0, 0.2, 0.4, 0.6)
DISTURBED = (0.0, 0.2, 0.35)
PERCENTS = (50, 90, 95, 99)
CALLS_PER_ROUND = 50
NUM_ROUNDS_OF_TRUTH = 100_000
NUM_SIMULATIONS = 1000
NUM_RESAMPLES = 400
NUM_NULL_RACES = 200
SPEEDS = (1.0, 1.0, 1.1, 1.3, 1.6, 3.0, 9.0)
"""Latency of each engine of a race; the first two are one engine under two names."""
NOISES = (0.01, 0.02, 0.03, 0.05)
"""Standard deviation of the ratio of two engines from round to round."""
FOUND_DIFFERENCE = 1.03
MIN_ROUNDS, RESOLUTION = 20, 0.015
"""As in conf/benchmark."""
BUDGETS_S = (12.0, 24.0)
"""The budget of conf/benchmark, and that of a repeated race."""
ROUND_S = 0.2
"""Eight processes with a burst of 20 ms and its overhead."""

_SLOWDOWN = math.log(1.4)
"""Of a round that something else disturbs."""
_START = 50
"""Rounds after which the process has forgotten its first value."""

Ends = tuple[float, float]
Rounds = NDArray[np.float64]


def simulate_noise(
    generator: np.random.Generator, num_rounds: int, correlation: float, num_series: int
) -> Rounds:
    """Return normal noise of unit variance, [num_rounds, num_series], each round correlated with the one before."""
    steps = generator.standard_normal((_START + num_rounds, num_series))
    for number in range(1, len(steps)):
        steps[number] = correlation * steps[number - 1] + math.sqrt(1 - correlation**2) * steps[number]
    return steps[_START:]


def simulate_logs(
    generator: np.random.Generator,
    num_rounds: int,
    num_series: int,
    *,
    noise: float,
    correlation: float,
    disturbed: float,
) -> Rounds:
    """Return logarithms of times relative to those without noise, [num_rounds, num_series].

    `noise` is the standard deviation of the ratio of two undisturbed engines.
    """
    steady = simulate_noise(generator, num_rounds, correlation, num_series)
    neighbour = simulate_noise(generator, num_rounds, correlation, num_series)
    return noise / math.sqrt(2) * steady + np.where(neighbour < ndtri(disturbed), _SLOWDOWN, 0.0)


def order_statistics(logs: Rounds, _: np.random.Generator) -> Ends:
    """Return the interval that races use, of logarithms of ratios."""
    found = estimate_ratio(np.exp(logs).tolist())
    return math.log(found.low), math.log(found.high)


def bootstrap(logs: Rounds, generator: np.random.Generator) -> Ends:
    """Return the percentile interval of medians of rounds that were drawn singly."""
    return _percentile_interval(logs[generator.integers(0, len(logs), (NUM_RESAMPLES, len(logs)))])


def block_bootstrap(logs: Rounds, generator: np.random.Generator) -> Ends:
    """Return the percentile interval of medians of overlapping blocks as long as the cube root of the rounds."""
    length = round(len(logs) ** (1 / 3))
    num_blocks = math.ceil(len(logs) / length)
    starts = generator.integers(0, len(logs) - length + 1, (NUM_RESAMPLES, num_blocks))
    drawn = (starts[..., None] + np.arange(length)).reshape(NUM_RESAMPLES, -1)
    return _percentile_interval(logs[drawn[:, : len(logs)]])


def _percentile_interval(resamples: Rounds) -> Ends:
    tail = 50 * (1 - LEVEL)
    low, high = np.percentile(np.median(resamples, axis=1), [tail, 100 - tail])
    return float(low), float(high)


METHODS: dict[str, Callable[[Rounds, np.random.Generator], Ends]] = {
    "order statistics": order_statistics,
    "bootstrap": bootstrap,
    "block bootstrap": block_bootstrap,
}


def measure_coverage(
    num_rounds: int, correlation: float, disturbed: float, num_simulations: int
) -> dict[str, Any]:
    """Return the share of simulated races whose interval holds the true ratio, for each method."""
    generator = np.random.default_rng([num_rounds, round(100 * correlation), round(100 * disturbed)])
    first, second = (
        simulate_logs(
            generator,
            num_rounds,
            num_simulations,
            noise=NOISES[0],
            correlation=correlation,
            disturbed=disturbed,
        )
        for _ in range(2)
    )
    row: dict[str, Any] = {"rounds": num_rounds, "correlation": correlation, "disturbed": disturbed}
    lengths = {}
    for name, method in METHODS.items():
        ends = np.array([method(logs, generator) for logs in (second - first).T])
        row[name] = round(float(np.mean((ends[:, 0] <= 0) & (ends[:, 1] >= 0))), 3)
        lengths[name] = round(float(np.median(ends[:, 1] - ends[:, 0])), 4)
    return row | {"length": lengths["order statistics"]}


def measure_percentiles(num_rounds: int, num_simulations: int) -> dict[str, Any]:
    """Return the share of simulated engines whose interval holds the true percentile."""
    generator = np.random.default_rng(num_rounds)
    truth = np.percentile(simulate_latencies(generator, NUM_ROUNDS_OF_TRUTH), PERCENTS)
    hits = np.zeros(len(PERCENTS))
    for _ in range(num_simulations):
        found = percentile_intervals(list(simulate_latencies(generator, num_rounds)), PERCENTS)
        hits += [interval.low <= value <= interval.high for interval, value in zip(found, truth, strict=True)]
    shares = [round(float(share), 3) for share in hits / num_simulations]
    return {"rounds": num_rounds} | {f"p{p}": share for p, share in zip(PERCENTS, shares, strict=True)}


def simulate_latencies(generator: np.random.Generator, num_rounds: int) -> Rounds:
    """Return latencies with a median of about 1, [num_rounds, CALLS_PER_ROUND]."""
    slowness = np.exp(0.03 * simulate_noise(generator, num_rounds, 0.2, 1))
    calls = np.exp(0.02 * generator.standard_normal((num_rounds, CALLS_PER_ROUND)))
    is_slow = generator.random(calls.shape) < 0.03
    return slowness * calls * np.where(is_slow, generator.uniform(1.1, 2.0, calls.shape), 1.0)


def simulate_races(
    latencies_ms: Sequence[float],
    *,
    noise: float,
    correlation: float,
    disturbed: float,
    budget_s: float,
    num_races: int,
) -> tuple[int, float]:
    """Return in how many races the first two engines certainly differ, and the mean number of rounds."""
    seed = [round(1000 * noise), round(100 * correlation), round(100 * disturbed), round(budget_s)]
    generator = np.random.default_rng(seed)
    num_called, num_rounds = 0, 0
    for _ in range(num_races):
        most = math.ceil(budget_s / ROUND_S) + 1
        logs = simulate_logs(
            generator, most, 1 + len(latencies_ms), noise=noise, correlation=correlation, disturbed=disturbed
        )
        ratio, length = _simulate_race(np.asarray([*latencies_ms, latencies_ms[0]]) * np.exp(logs), budget_s)
        num_called += not ratio.low <= 1 <= ratio.high
        num_rounds += length
    return num_called, num_rounds / num_races


def _simulate_race(latencies_ms: Rounds, budget_s: float) -> tuple[SpeedRatio, int]:
    """Run one race, whose last engine is the control of the first one, with a clock that counts rounds.

    Returns the ratio of the first two engines, and the number of rounds.
    """
    names = [f"engine {number}" for number in range(latencies_ms.shape[1] - 1)]
    rounds = iter(latencies_ms)
    num_rounds = itertools.count()
    rule = StoppingRule(names, names[0], len(names) - 1, MIN_ROUNDS, budget_s, RESOLUTION)
    bursts_ms = run_race(
        lambda: {name: [float(value)] for name, value in zip([*names, CONTROL], next(rounds), strict=True)},
        rule,
        clock=lambda: ROUND_S * next(num_rounds),
    )
    pair = {name: bursts_ms[name] for name in (*names[:2], CONTROL)}
    [ratio], _ = compare_all(pair, controlled=names[0], num_comparisons=rule.num_comparisons)
    return ratio, len(bursts_ms[names[0]])


def null_test(num_races: int) -> list[dict[str, Any]]:
    """Return how often one of two equal engines is called faster."""
    rows = []
    for noise in NOISES:
        for correlation, disturbed in ((0.04, 0.0), (0.36, 0.0), (0.04, DISTURBED[-1])):
            num_called, num_rounds = simulate_races(
                SPEEDS,
                noise=noise,
                correlation=correlation,
                disturbed=disturbed,
                budget_s=BUDGETS_S[0],
                num_races=num_races,
            )
            row = {"noise": noise, "correlation": correlation, "disturbed": disturbed, "races": num_races}
            rows.append(row | {"called faster": num_called, "mean rounds": round(num_rounds, 1)})
    return rows


def measure_power(num_races: int) -> list[dict[str, Any]]:
    """Return how often a difference of 3 % is found, for several time budgets."""
    latencies_ms = (1.0, FOUND_DIFFERENCE, *SPEEDS[2:])
    rows = []
    for noise in NOISES:
        for disturbed, budget_s in itertools.product(DISTURBED, BUDGETS_S):
            num_found, num_rounds = simulate_races(
                latencies_ms,
                noise=noise,
                correlation=0.04,
                disturbed=disturbed,
                budget_s=budget_s,
                num_races=num_races,
            )
            row = {"noise": noise, "disturbed": disturbed, "budget_s": budget_s}
            found = round(num_found / num_races, 3)
            rows.append(row | {"found": found, "mean rounds": round(num_rounds, 1)})
    return rows


def main(arguments: Sequence[str] | None = None) -> None:
    """Simulate, print and write the tables."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--simulations", type=int, default=NUM_SIMULATIONS, help="of each cell of the coverage"
    )
    parser.add_argument("--races", type=int, default=NUM_NULL_RACES, help="of each row of the other tables")
    parser.add_argument(
        "--draws", type=int, default=loss_coverage.NUM_DRAWS, help="of each cell of the accuracy losses"
    )
    parser.add_argument("--records", type=Path, default=loss_coverage.RECORDS)
    parser.add_argument("--tables", choices=("races", "losses"), help="only these")
    parser.add_argument("--results", type=Path, default=RESULTS)
    options = parser.parse_args(arguments)
    tables: dict[str, list[dict[str, Any]]] = {}
    if options.tables != "losses":
        tables |= race_tables(options.simulations, options.races)
        for name, rows in tables.items():
            print(f"\n{name}\n" + "  ".join(f"{column:>15}" for column in rows[0]))
            for row in rows:
                print("  ".join(f"{value:>15}" for value in row.values()))
    if options.tables != "races":
        tables["losses"] = loss_coverage.measure_losses(options.records, options.draws)
        tables["methods"] = loss_coverage.compare_methods(
            options.records, min(options.draws, loss_coverage.NUM_DRAWS_OF_METHODS)
        )
        print(loss_coverage.table(tables["losses"]))
    record = json.loads(options.results.read_text(encoding="utf-8")) if options.results.is_file() else {}
    record |= {"date": date.today().isoformat(), "level": LEVEL, "numpy": np.__version__, **tables}
    options.results.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")


def race_tables(num_simulations: int, num_races: int) -> dict[str, list[dict[str, Any]]]:
    """Simulate intervals of ratios and percentiles, and whole races."""
    return {
        "coverage": [
            measure_coverage(num_rounds, correlation, disturbed, num_simulations)
            for num_rounds in NUM_ROUNDS
            for correlation, disturbed in [
                *itertools.product(CORRELATIONS, DISTURBED[:1]),
                *((0.2, share) for share in DISTURBED[1:]),
            ]
        ],
        "percentiles": [measure_percentiles(count, num_simulations) for count in NUM_ROUNDS],
        "null test": null_test(num_races),
        "power": measure_power(num_races),
    }


if __name__ == "__main__":
    main()
