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


def test_interval_of_a_ratio_is_that_of_its_batches() -> None:
    logs = np.log([1.0, 1.1, 0.9, 1.2, 1.05])  # one round a batch
    found = estimate_ratio(np.exp(logs).tolist())
    deviation = math.sqrt(np.sum((logs - np.median(logs)) ** 2) / 4)
    reach = 2.776445 * deviation / math.sqrt(5)
    assert found.value == pytest.approx(1.05)
    assert (found.low, found.high) == pytest.approx((1.05 * math.exp(-reach), 1.05 * math.exp(reach)))
    assert found.spread == pytest.approx(max(1 - found.low, found.high - 1))


def test_swapped_engines_have_the_inverse_interval() -> None:
    ratios = np.random.default_rng(0).lognormal(0.1, 0.05, 40)
    forwards, backwards = estimate_ratio(ratios.tolist()), estimate_ratio((1 / ratios).tolist())
    assert (backwards.low, backwards.high) == pytest.approx((1 / forwards.high, 1 / forwards.low))


def test_more_comparisons_need_wider_intervals() -> None:
    ratios = np.random.default_rng(0).lognormal(0, 0.05, 50).tolist()
    one, six = estimate_ratio(ratios), estimate_ratio(ratios, num_comparisons=6)
    widening = math.log(six.high / six.value) / math.log(one.high / one.value)
    assert widening == pytest.approx(student_t(1 - 0.05 / 6, 9) / student_t(0.95, 9))


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
