"""Intervals hold the truth about as often as they say; benchmarks/coverage.py measures it more finely."""

import math

import numpy as np
import pytest

from tasks.parts.measuring.intervals import Interval, estimate_ratio, percentile_intervals, student_t


@pytest.mark.parametrize(
    ("level", "degrees", "expected"),  # Abramowitz and Stegun, table 26.10
    [
        (0.95, 1, 12.706),
        (0.95, 4, 2.776),
        (0.95, 9, 2.262),
        (0.99, 2, 9.925),
        (0.99, 9, 3.250),
        (0.998, 5, 5.893),
    ],
)
def test_quantiles_of_student_s_distribution_are_those_of_the_table(
    level: float, degrees: int, expected: float
) -> None:
    assert student_t(level, degrees) == pytest.approx(expected, abs=5e-4)


def test_interval_of_a_ratio_lies_between_two_order_statistics() -> None:
    logs = np.arange(-50, 51) / 1000  # rounds in turn above and below the median: no positive autocorrelation
    order = [number for pair in zip(range(51, 101), range(49, -1, -1), strict=True) for number in pair]
    found = estimate_ratio(np.exp(logs[[50, *order]]).tolist())
    caution = 1 / 101 + 0.3 / math.sqrt(101)
    alternating = -99 / 101  # pairs of neighbours with different signs
    assert alternating + caution < 0
    reach = 1.959964 * math.sqrt(101) / 2  # ranks, by the normal approximation of the binomial distribution
    assert found.value == pytest.approx(1.0)
    assert math.log(found.high) == pytest.approx(reach / 1000)
    assert math.log(found.low) == pytest.approx(-reach / 1000)
    assert found.spread == pytest.approx(found.high - 1)


def test_few_rounds_are_stretched_beyond_their_range() -> None:
    found = estimate_ratio([0.9, 1.0, 1.1, 0.95, 1.05], num_comparisons=70)
    assert found.low < 0.9 and found.high > 1.1 and found.value == 1.0


def test_disturbed_rounds_widen_the_interval_little() -> None:
    random = np.random.default_rng(0)
    logs = np.log(1.03) + 0.004 * random.standard_normal(100)
    disturbed = logs + np.where(random.random(100) < 0.3, random.choice([-0.35, 0.35], 100), 0.0)
    calm, found = estimate_ratio(np.exp(logs).tolist()), estimate_ratio(np.exp(disturbed).tolist())
    assert found.low > 1 and found.high < 1.035
    assert found.high - found.low < 4 * (calm.high - calm.low)


def test_rounds_that_follow_their_predecessors_count_less() -> None:
    logs = np.random.default_rng(0).standard_normal(60) / 20
    shuffled, in_phases = (
        estimate_ratio(np.exp(logs).tolist()),
        estimate_ratio(np.exp(np.sort(logs)).tolist()),
    )
    assert in_phases.high - in_phases.low > 2 * (shuffled.high - shuffled.low)


def test_swapped_engines_have_the_inverse_interval() -> None:
    ratios = np.random.default_rng(0).lognormal(0.1, 0.05, 40)
    forwards, backwards = estimate_ratio(ratios.tolist()), estimate_ratio((1 / ratios).tolist())
    assert (backwards.low, backwards.high) == pytest.approx((1 / forwards.high, 1 / forwards.low))


def test_more_comparisons_need_wider_intervals() -> None:
    ratios = np.random.default_rng(0).lognormal(0, 0.05, 50).tolist()
    one, six = estimate_ratio(ratios), estimate_ratio(ratios, num_comparisons=6)
    assert six.low < one.low < one.value == six.value < one.high < six.high


@pytest.mark.parametrize("num_rounds", [20, 40, 100])
def test_correlated_rounds_are_covered(num_rounds: int) -> None:
    random, hits = np.random.default_rng(num_rounds), 0
    for _ in range(600):
        noise = random.standard_normal(num_rounds + 20)
        for number in range(1, len(noise)):  # as strong as the strongest correlation that races showed
            noise[number] += 0.36 * noise[number - 1]
        found = estimate_ratio(np.exp(0.05 * noise[20:]).tolist())
        hits += found.low <= 1 <= found.high
    assert 0.9 <= hits / 600 <= 0.98


def test_interval_of_a_percentile_counts_rounds_and_not_calls() -> None:
    random, hits = np.random.default_rng(2), 0
    for _ in range(200):  # each round is fast or slow as a whole
        slowness = random.lognormal(0, 0.1, 25)
        rounds = [list(one * random.lognormal(0, 0.01, 20)) for one in slowness]
        [found] = percentile_intervals(rounds, [50])
        hits += found.low <= 1 <= found.high
    assert 0.9 <= hits / 200 <= 0.99


def test_equal_rounds_leave_no_doubt() -> None:
    [found] = percentile_intervals([[3.0, 1.0, 2.0]] * 7, [50])
    assert found == Interval(2.0, 2.0)


def test_a_single_round_has_no_interval() -> None:
    with pytest.raises(ValueError, match="1 rounds, expected two or more"):
        estimate_ratio([1.0])
