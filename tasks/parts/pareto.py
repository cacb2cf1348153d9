"""The Pareto front of points that cost something (lower is better) and give something (higher is better)."""

from collections.abc import Sequence


def pareto_front(points: Sequence[tuple[float, float]]) -> tuple[bool, ...]:
    """Tell for each (cost, gain) whether no other point is at least as good in both and better in one.

    Points that are equal in both stand or fall together.
    """
    return tuple(not any(_dominates(other, point) for other in points) for point in points)


def _dominates(other: tuple[float, float], point: tuple[float, float]) -> bool:
    return other[0] <= point[0] and other[1] >= point[1] and other != point
