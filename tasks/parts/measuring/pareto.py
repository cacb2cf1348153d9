"""The Pareto front of points with a cost (lower is better) and a gain (higher is better)."""

from collections.abc import Sequence

_MIN_RISE = 1e-9


def pareto_front(points: Sequence[tuple[float, float]]) -> tuple[bool, ...]:
    """Return for each (cost, gain) whether no other point is at least as good in both and better in one.

    Equal points are either all on the front or all off it.
    """
    return tuple(not any(_dominates(other, point) for other in points) for point in points)


def find_knee(points: Sequence[tuple[float, float]]) -> int | None:
    """Return the index of the (cost, gain) after which more cost gives little more gain.

    Costs and gains of the front are scaled to 0..1; the knee is the point farthest above the chord from the cheapest
    point to the most expensive one. Returns None if no point is above the chord: fewer than three points, a straight
    front, or one that bends the other way. Of equal points, the first is returned.

    This is Kneedle (Satopaa et al., "Finding a 'Kneedle' in a Haystack", ICDCS Workshops 2011) without its smoothing,
    which is meant for many noisy points.
    """
    front = [index for index, is_kept in enumerate(pareto_front(points)) if is_kept]
    if len({points[index] for index in front}) < 3:
        return None
    costs, gains = ([points[index][axis] for index in front] for axis in (0, 1))

    def rise(index: int) -> float:
        cost, gain = points[index]
        return (gain - min(gains)) / (max(gains) - min(gains)) - (cost - min(costs)) / (
            max(costs) - min(costs)
        )

    best = max(front, key=rise)
    return best if rise(best) > _MIN_RISE else None


def _dominates(other: tuple[float, float], point: tuple[float, float]) -> bool:
    return other[0] <= point[0] and other[1] >= point[1] and other != point
