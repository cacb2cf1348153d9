"""Confidence intervals of latencies and of their ratios.

Rounds that follow each other closely are not independent: a slow phase of the machine covers several of them. A
bootstrap that draws single rounds ignores this, and its intervals are too narrow.

Ratios: some rounds are disturbed for one engine only, as where another virtual machine shares the core. The interval
of their median lies between two order statistics, which such rounds do not move (Conover, "Practical Nonparametric
Statistics", 3rd edition, section 3.2). It is the one for independent rounds, widened by the autocorrelation of the
signs of the deviations.

Percentiles of latencies: consecutive rounds form 5 to 10 batches of equal length. The statistic of a batch differs
from that of all rounds by the noise of many rounds, and is nearly independent of the next batch, so the spread of the
batches tells how far the statistic of all rounds may be from the truth (Schmeiser, "Batch size effects in the
analysis of simulation output", Operations Research 30, 1982; Law, "Simulation Modeling and Analysis", 5th edition,
section 9.5.3).

``benchmarks/coverage.py`` simulates how often the intervals hold the truth.
"""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

LEVEL = 0.95
"""How often the intervals hold the truth."""
MIN_SAMPLES_OF_P99 = 1000
"""The p99 of fewer latencies rests on fewer than ten of them, and is not reported."""
_FEWEST_BATCHES, _MOST_BATCHES = 5, 10
_ROUNDS_PER_BATCH = 5
"""Rounds in a batch as long as there can be more batches."""
_CAUTION = 0.3
"""Standard errors that are added to the measured autocorrelation, which varies and would often be too small."""
_MOST_CORRELATED = 0.9


@dataclass(frozen=True)
class Interval:
    """Interval that holds the truth with probability LEVEL."""

    low: float
    high: float


@dataclass(frozen=True)
class Estimate:
    """A value and the ends of its interval."""

    value: float
    low: float
    high: float

    @property
    def spread(self) -> float:
        """Largest distance of the interval from 1; for the ratio of two equal engines this is noise."""
        return max(abs(self.low - 1), abs(self.high - 1))


def estimate_ratio(ratios: Sequence[float], *, num_comparisons: int = 1) -> Estimate:
    """Return the median of one ratio per round, with its interval; computed on logarithms.

    Of `num_comparisons` such intervals, all hold the truth with probability LEVEL (Bonferroni's correction: each is
    computed for an error of (1 - LEVEL) / num_comparisons). Needs at least two rounds, in the order of time. An
    interval that the rounds are too few for is the range of the ratios, stretched around the median.
    """
    import numpy as np
    from scipy.special import ndtri

    count = len(ratios)
    _check_count(count)
    logs = np.log(np.asarray(ratios, dtype=float))
    median = float(np.median(logs))
    signs = np.sign(logs - median)
    measured = float((signs[1:] * signs[:-1]).sum()) / count
    correlation = min(max(0.0, measured + 1 / count + _CAUTION / math.sqrt(count)), _MOST_CORRELATED)
    deviation = (
        math.sqrt(count * (1 + correlation) / (1 - correlation)) / 2
    )  # of the number of rounds below the truth
    reach = float(ndtri(1 - (1 - LEVEL) / num_comparisons / 2)) * deviation
    farthest = (count - 1) / 2
    ranks = farthest + min(reach, farthest) * np.array([-1, 1])
    ends = median + max(1.0, reach / farthest) * (np.interp(ranks, np.arange(count), np.sort(logs)) - median)
    return Estimate(math.exp(median), *(math.exp(end) for end in ends))


def percentile_intervals(rounds: Sequence[Sequence[float]], percents: Sequence[float]) -> list[Interval]:
    """Return the interval of each percentile of all values of the rounds, which are in the order of time."""
    import numpy as np

    _check_count(len(rounds))
    values = np.concatenate(rounds)
    of_batches = [np.percentile(np.concatenate(rounds[batch]), percents) for batch in _batches(len(rounds))]
    intervals = []
    for number, centre in enumerate(np.percentile(values, percents)):
        reach = _reach([float(found[number]) for found in of_batches], float(centre))
        intervals.append(Interval(max(float(centre) - reach, 0.0), float(centre) + reach))
    return intervals


def student_t(level: float, degrees: int) -> float:
    """Return the t for which a variable of Student's distribution is between -t and t with probability `level`."""
    from scipy.special import stdtrit

    return float(stdtrit(degrees, (1 + level) / 2))


def _check_count(num_rounds: int) -> None:
    if num_rounds < 2:
        raise ValueError(f"{num_rounds} rounds, expected two or more: the interval follows from their spread")


def _batches(num_rounds: int) -> list[slice]:
    """Return the rounds of each batch; their numbers differ by one at the most."""
    most = max(_FEWEST_BATCHES, min(_MOST_BATCHES, num_rounds // _ROUNDS_PER_BATCH))
    count = min(num_rounds, most)
    ends = [num_rounds * number // count for number in range(count + 1)]
    return [slice(start, end) for start, end in itertools.pairwise(ends)]


def _reach(of_batches: Sequence[float], centre: float) -> float:
    """Return half the length of the interval around the statistic of all rounds.

    The deviations are taken from that statistic and not from the mean of the batches, whose percentiles are biased
    ("sectioning": Nakayama, "Confidence intervals for quantiles using sectioning", ACM TOMACS 24, 2014).
    """
    count = len(of_batches)
    deviation = math.sqrt(sum((value - centre) ** 2 for value in of_batches) / (count - 1))
    return student_t(LEVEL, count - 1) * deviation / math.sqrt(count)
