"""The gates of the searches: intervals decide with enough groups, measured losses with few."""

import numpy as np

from tasks.parts.data.accuracy import Standing
from tasks.parts.data.comparison import ImageResults
from tasks.parts.quantization.gates import AccuracyGates


def results(loss: float, num_groups: int) -> ImageResults:
    """Return results that lose so much of 0.8, a little more and less by turns."""
    ones_NC = np.ones((num_groups, 1))
    turns_NC = np.where(np.arange(num_groups)[:, None] % 2, 1, -1)
    return ImageResults(0.8 * (1 - loss * (1 + turns_NC / 4)), ones_NC, ones_NC, np.arange(num_groups))


def gates(num_groups: int) -> AccuracyGates:
    return AccuracyGates(results(0.0, num_groups), 0.02, results(0.0, num_groups), 0.02)


def test_the_measured_loss_decides_a_search_with_few_groups_c1() -> None:
    """A search that waits for a proof of two groups would leave all layers in float."""
    lost = results(0.01, 2)
    assert gates(2).standing(lost) is Standing.unproven
    assert gates(2).standing_of_float is Standing.unproven
    assert gates(2).hold(lost) and not gates(2).hold(results(0.03, 2))


def test_the_interval_decides_a_search_with_enough_groups() -> None:
    assert gates(20).standing_of_float is Standing.within
    assert gates(20).hold(results(0.01, 20)) and not gates(20).hold(results(0.0199, 20))
