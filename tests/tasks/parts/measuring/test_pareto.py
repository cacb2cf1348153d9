"""The knee of hand-made curves whose answer is known."""

import pytest

from tasks.parts.measuring.pareto import find_knee


@pytest.mark.parametrize(
    ("points", "knee"),
    [
        # y = sqrt(x) on 0..1: the distance sqrt(x) - x from the chord is largest at x = 1/4.
        ([(0.0, 0.0), (0.1, 0.1**0.5), (0.25, 0.5), (0.5, 0.5**0.5), (1.0, 1.0)], 2),
        # The same curve in other units and another order.
        ([(9.0, 60.0), (1.0, 40.0), (3.0, 50.0), (1.8, 40 + 20 * 0.1**0.5)], 2),
        ([(1.0, 0.1), (2.0, 0.8), (3.0, 0.9)], 1),
        # A dominated point may lie far from the others, and moves nothing.
        ([(1.0, 0.1), (2.0, 0.8), (3.0, 0.9), (9.0, 0.05)], 1),
        ([(9.0, 0.85), (1.0, 0.1), (2.0, 0.8), (3.0, 0.9)], 2),
        # Equal points count once, the first of them.
        ([(1.0, 0.1), (2.0, 0.8), (2.0, 0.8), (3.0, 0.9)], 1),
    ],
)
def test_knee_is_the_point_farthest_above_the_chord(points: list[tuple[float, float]], knee: int) -> None:
    assert find_knee(points) == knee


@pytest.mark.parametrize(
    "points",
    [
        [],
        [(1.0, 0.5)],
        [(1.0, 0.5), (2.0, 0.6)],
        [(1.0, 0.5), (2.0, 0.6), (3.0, 0.4)],  # the third is dominated: two remain
        [(1.0, 0.5), (1.0, 0.5), (1.0, 0.5)],
        [(1.0, 0.5), (1.0, 0.4), (2.0, 0.5)],  # one point dominates all
        [(0.1, 0.3), (0.2, 0.4), (0.3, 0.5), (0.4, 0.6)],  # straight
        [(0.0, 0.0), (0.5, 0.25), (1.0, 1.0)],  # bends the other way: y = x squared
    ],
)
def test_front_that_never_bends_has_no_knee(points: list[tuple[float, float]]) -> None:
    assert find_knee(points) is None
