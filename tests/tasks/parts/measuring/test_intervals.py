import numpy as np
import pytest

from tasks.parts.measuring.intervals import bootstrap_interval, percentile_intervals, ratio_spread


def test_bootstrap_interval_covers_the_median_about_as_often_as_it_says():
    random = np.random.default_rng(1)
    hits = 0
    for seed in range(200):
        low, high = bootstrap_interval(random.lognormal(0, 0.1, 25), seed=seed)
        hits += low <= 1 <= high
    assert 0.88 <= hits / 200 <= 0.99


def test_spread_of_ratios_is_the_further_end_of_their_interval():
    assert ratio_spread([0.9] * 8, seed=0) == pytest.approx(0.1)
    assert ratio_spread([1.2] * 8, seed=0) == pytest.approx(0.2)


def test_percentiles_of_resampled_rounds_are_numpy_s():
    rounds = [[3.0, 1.0, 2.0, 10.0]] * 5  # every resample is the same
    expected = np.percentile(np.concatenate(rounds), [50, 90, 99])
    for (low, high), value in zip(percentile_intervals(rounds, [50, 90, 99], seed=0), expected, strict=True):
        assert low == pytest.approx(value) and high == pytest.approx(value)


def test_interval_of_a_percentile_counts_rounds_and_not_calls():
    random = np.random.default_rng(2)
    hits = 0
    for seed in range(100):  # each round is fast or slow as a whole
        slowness = random.lognormal(0, 0.1, 25)
        rounds = [list(one * random.lognormal(0, 0.01, 20)) for one in slowness]
        [(low, high)] = percentile_intervals(rounds, [50], seed=seed)
        hits += low <= 1 <= high
    assert hits / 100 >= 0.85
