"""Bootstrap intervals of latencies and of their ratios."""

from collections.abc import Sequence

import numpy as np

_NUM_RESAMPLES = 2000
_NUM_RESAMPLES_OF_ROUNDS = 500


def bootstrap_interval(ratios: Sequence[float], *, seed: int) -> tuple[float, float]:
    """Return the 95 % percentile bootstrap interval of the median (Efron 1979)."""
    values = np.asarray(ratios)
    drawn = np.random.default_rng(seed).integers(0, len(values), (_NUM_RESAMPLES, len(values)))
    low, high = np.percentile(np.median(values[drawn], axis=1), [2.5, 97.5])
    return float(low), float(high)


def ratio_spread(ratios: Sequence[float], *, seed: int) -> float:
    """Return how far the interval of the ratios extends from 1: how much two equal engines seem to differ."""
    return max(abs(end - 1) for end in bootstrap_interval(ratios, seed=seed))


def percentile_intervals(
    rounds: Sequence[Sequence[float]], percents: Sequence[float], *, seed: int
) -> list[tuple[float, float]]:
    """Return the 95 % bootstrap interval of each percentile of all values, drawing whole rounds.

    The values of one round are not independent, so drawing single values would give intervals that are too narrow
    (cluster bootstrap: Davison and Hinkley 1997, section 3.8).
    """
    values = np.concatenate(rounds)
    order = np.argsort(values)
    values, round_of = values[order], np.repeat(np.arange(len(rounds)), [*map(len, rounds)])[order]
    generator, quantiles = np.random.default_rng(seed), np.asarray(percents) / 100
    drawn = np.empty((_NUM_RESAMPLES_OF_ROUNDS, len(percents)))
    for resample in drawn:
        times_drawn = np.bincount(generator.integers(0, len(rounds), len(rounds)), minlength=len(rounds))
        ends = np.cumsum(times_drawn[round_of])  # the sorted resample holds values[i] up to position ends[i]
        positions = quantiles * (ends[-1] - 1)
        below, above = (
            values[np.searchsorted(ends, end(positions), side="right")] for end in (np.floor, np.ceil)
        )
        resample[:] = below + (above - below) * (positions - np.floor(positions))
    return [(float(low), float(high)) for low, high in np.percentile(drawn, [2.5, 97.5], axis=0).T]
