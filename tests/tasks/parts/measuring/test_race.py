"""When a race ends, and what it compares: bursts of known latencies instead of engines."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import pytest

from tasks.parts.measuring.race import CONTROL, RunRound, StoppingRule, compare_all, run_race, undecided_pairs
from tasks.parts.measuring.reports import Race, SpeedRatio

RULE = StoppingRule(
    ["slow", "fast"], "slow", num_comparisons=1, min_rounds=20, budget_s=1000, resolution=0.015
)


def rounds_of(latencies_ms: Mapping[str, float], noise: float) -> RunRound:
    """Return rounds of one call per engine, and of a control of the first one, with independent noise."""
    random = np.random.default_rng(0)
    with_control = {**latencies_ms, CONTROL: next(iter(latencies_ms.values()))}

    def run_round() -> dict[str, list[float]]:
        return {name: [value * random.lognormal(0, noise)] for name, value in with_control.items()}

    return run_round


def num_rounds(latencies_ms: Mapping[str, float], noise: float, rule: StoppingRule = RULE) -> int:
    return len(run_race(rounds_of(latencies_ms, noise), rule)["fast"])


def test_a_clear_order_needs_the_fewest_rounds() -> None:
    assert num_rounds({"slow": 2.0, "fast": 1.0}, 0.005) == 20


def test_a_small_difference_needs_more_rounds_and_is_looked_at_rarely() -> None:
    assert num_rounds({"slow": 1.03, "fast": 1.0}, 0.03) in (30, 45, 68, 102)


def test_equally_fast_engines_end_the_race_when_that_is_certain() -> None:
    assert num_rounds({"slow": 1.0, "fast": 1.0}, 0.01) in (20, 30, 45)


def test_a_race_goes_on_until_the_control_is_known_as_well() -> None:
    random = np.random.default_rng(0)

    def run_round() -> dict[str, list[float]]:
        return {"slow": [2.0], "fast": [1.0], CONTROL: [2 * random.lognormal(0, 0.05)]}

    assert len(run_race(run_round, RULE)["fast"]) > 30


def test_the_reference_of_another_target_needs_no_decision() -> None:
    assert num_rounds({"slow": 2.0, "fast": 1.0, "reference": 1.0}, 0.005) == 20


@pytest.mark.parametrize(("min_rounds", "expected"), [(5, 5), (20, 5), (2, 5)])
def test_a_spent_budget_ends_the_race_after_the_fewest_rounds(min_rounds: int, expected: int) -> None:
    rule = StoppingRule(["slow", "fast"], "slow", 1, min_rounds, budget_s=1e-9, resolution=0.015)
    assert num_rounds({"slow": 1.0, "fast": 1.0}, 0.5, rule) == expected


def test_undecided_neighbours_are_named_and_the_others_are_not() -> None:
    bursts = run_race(rounds_of({"slow": 9.0, "fast": 1.0, "equal": 1.0}, 0.2), RULE_OF_THREE)
    assert undecided_pairs(bursts, RULE_OF_THREE) in ([("fast", "equal")], [("equal", "fast")])


RULE_OF_THREE = StoppingRule(
    ["slow", "fast", "equal"], "slow", 2, min_rounds=20, budget_s=1e-9, resolution=0.015
)


def test_ratios_are_medians_over_the_rounds_and_the_control_is_one_comparison() -> None:
    slowness = np.array([1.0, 1.5, 1.0, 3.0, 1.1, 0.9, 1.0])  # slow phases of the machine cancel
    bursts: dict[str, Sequence[Sequence[float]]] = {
        name: [[factor * one] * 3 for one in slowness]
        for name, factor in (("reference", 8.0), ("float", 2.0), ("int8", 1.0), ("control", 2.2))
    }
    ratios, control = compare_all(bursts, controlled="float", num_comparisons=1)
    assert [(one.faster, one.slower, round(one.factor, 6)) for one in ratios] == [
        ("float", "reference", 4.0),
        ("int8", "reference", 8.0),
        ("int8", "float", 2.0),
    ]
    assert all(one.low == pytest.approx(one.high) for one in ratios)
    assert (control.faster, control.slower) == ("control", "float")
    assert control.spread == pytest.approx(1 - 1 / 1.1)


def test_a_certain_difference_counts_only_beyond_the_smallest_one() -> None:
    ratio = SpeedRatio("int8", "float", 1.02, 1.015, 1.025)
    assert ratio.is_faster(0.015) and not ratio.is_faster(0.021) and not ratio.inverse.is_faster(0.0)
    assert not SpeedRatio("int8", "float", 1.2, 0.99, 1.4).is_faster(0.015)
    control = SpeedRatio("control", "float", 1.004, 0.99, 1.006)
    race = Race((ratio,), control, 0.95, 1, 0.015, (), 1.0, 20, 0, ())
    assert race.smallest_difference == 0.015
    assert replace(race, resolution=0.001).smallest_difference == pytest.approx(0.01)


def test_more_comparisons_widen_all_ratios_but_not_the_control() -> None:
    bursts = run_race(rounds_of({"float": 1.0, "int8": 0.5}, 0.1), RULE_OF_CONTROL)
    few, control = compare_all(bursts, controlled="float", num_comparisons=1)
    many, same = compare_all(bursts, controlled="float", num_comparisons=6)
    assert many[0].high > few[0].high and many[0].low < few[0].low and control == same


RULE_OF_CONTROL = StoppingRule(["float", "int8"], "float", 1, min_rounds=20, budget_s=1000, resolution=0.015)
