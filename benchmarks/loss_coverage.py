"""Simulate how often the intervals of accuracy losses hold the truth, with few groups; see ``benchmarks.coverage``.

D draws, K groups, P groups of the population, C classes.
"""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.special import betaincinv, ndtr, stdtrit

from tasks.parts.data.comparison import LEVEL, ImageResults, jackknife_reach, read_results

RECORDS = Path(__file__).parent / "results" / "video_records"
SPLIT, REFERENCE = "val", "float"
ENGINES = ("int8", "narrow")
METRICS = ("mIoU", "mean of frames")
NUM_GROUPS = (2, 3, 4, 6, 10, 20)
SIZES = {"equal": (4,), "unequal": (1, 2, 4, 8, 16, 32), "single": (1,)}
"""Frames of a group, each as likely; ``single`` are frames of different videos, which belong to no group."""
LIMIT = 0.02
"""Of the loss, as in conf/select_engine."""
LEAST_COVERAGE, MOST_FALSE_ACCEPTS = 0.93, 0.035
NUM_DRAWS = 24_000
MANY_IMAGES = (50, 200, 800)
NUM_DRAWS_OF_METHODS, NUM_RESAMPLES = 1000, 400

Counts = tuple[NDArray[np.float64], ...]
"""Hits and union of the engine, hits and union of the reference, labels."""
Ends = tuple[NDArray[np.float64], NDArray[np.float64]]


def measure_losses(records: Path, num_draws: int) -> list[dict[str, Any]]:
    """Return a row for each metric, engine, kind of size and number of groups."""
    rows = []
    for metric, engine, sizes in _populations():
        population = read_population(records, engine, metric, sizes)
        for num_groups in NUM_GROUPS:
            cell = {"metric": metric, "engine": engine, "sizes": sizes, "groups": num_groups}
            rows.append(cell | measure_cell(population, num_groups, num_draws))
    return rows


def _populations() -> list[tuple[str, str, str]]:
    return [(metric, engine, sizes) for metric in METRICS for engine in ENGINES for sizes in SIZES]


def measure_cell(population: Counts, num_groups: int, num_draws: int) -> dict[str, Any]:
    """Return coverage and rates of verdicts at a limit that is the true loss, and without a loss at `LIMIT`.

    The binomial intervals are those of Clopper and Pearson. ``judged`` is ``holds`` if both of the cell's rates are
    within their bounds with their whole intervals, ``fails`` if one is beyond with its whole interval, else ``open``.
    """
    truth = float(losses(tuple(counts.sum(axis=0) for counts in population)))
    lossy = draw(population, num_groups, num_draws)
    ends = intervals(lossy)
    covered = int(((ends[0] <= truth) & (truth <= ends[1])).sum())
    accepted = int((ends[1] <= truth).sum())
    coverage, false = binomial_interval(covered, num_draws), binomial_interval(accepted, num_draws)
    within = coverage[0] >= LEAST_COVERAGE and false[1] <= MOST_FALSE_ACCEPTS
    beyond = coverage[1] < LEAST_COVERAGE or false[0] > MOST_FALSE_ACCEPTS
    lossless = with_no_loss(population)
    equal = draw(lossless, num_groups, num_draws)
    found, oracle = intervals(equal), oracle_intervals(lossless, equal)
    return {
        "true_loss": round(truth, 4),
        "coverage": _rounded(covered / num_draws),
        "coverage_interval": [*map(_rounded, coverage)],
        "false_accept": _rounded(accepted / num_draws),
        "false_accept_interval": [*map(_rounded, false)],
        "judged": "holds" if within else "fails" if beyond else "open",
        "coverage_without_loss": _rounded(np.mean((found[0] <= 0) & (found[1] >= 0))),
        "accept": _rounded(np.mean(found[1] <= LIMIT)),
        "unproven": _rounded(np.mean((found[0] <= LIMIT) & (found[1] > LIMIT))),
        "width": round(float(np.mean(found[1] - found[0])), 4),
        "oracle_coverage": _rounded(np.mean((oracle[0] <= 0) & (oracle[1] >= 0))),
        "oracle_accept": _rounded(np.mean(oracle[1] <= LIMIT)),
        "oracle_width": round(float(np.mean(oracle[1] - oracle[0])), 4),
    }


def compare_methods(records: Path, num_draws: int) -> list[dict[str, Any]]:
    """Return coverage, false ACCEPTs and mean width of other intervals, for INT8 and mIoU."""
    rows = []
    for sizes, numbers in (("equal", NUM_GROUPS), ("unequal", NUM_GROUPS), ("single", MANY_IMAGES)):
        population = read_population(records, ENGINES[0], METRICS[0], sizes)
        truth = float(losses(tuple(counts.sum(axis=0) for counts in population)))
        for num_groups in numbers:
            drawn = draw(population, num_groups, num_draws)
            row: dict[str, Any] = {"sizes": sizes, "groups": num_groups}
            ends = {name: method(drawn) for name, method in METHODS.items()}
            (low, high), (other_low, other_high) = ends["bootstrap"], ends["t"]
            ends["t or bootstrap"] = np.minimum(low, other_low), np.maximum(high, other_high)
            for name, (low, high) in ends.items():
                row[name] = _rounded(np.mean((low <= truth) & (truth <= high)))
                row[f"{name}, false ACCEPT"] = _rounded(np.mean(high <= truth))
                row[f"{name}, width"] = round(float(np.mean(high - low)), 4)
            rows.append(row)
    return rows


def read_population(records: Path, engine: str, metric: str, sizes: str) -> Counts:
    """Return the counts of groups [P, C] from which a cell draws.

    Each video is there once for each size: with its first frames, and where these end with those of the next videos.
    """
    compared = [read_results(records / f"{name}.npz", SPLIT) for name in (engine, REFERENCE)]
    counts_NC = [counts for results in compared for counts in _counts(results, metric)]
    frames = [np.flatnonzero(compared[0].groups_N == video) for video in range(compared[0].num_groups)]
    if sizes == "single":
        groups = [frame for video in frames for frame in video[:, None]]
    else:
        groups = [
            np.concatenate([*frames[video:], *frames[:video]])[:size]
            for video in range(len(frames))
            for size in SIZES[sizes]
        ]
    hits, union, base_hits, base_union, labels = (
        np.array([counts[group].sum(axis=0) for group in groups], dtype=float)
        for counts in (*counts_NC[:2], *counts_NC[3:])
    )
    return hits, union, base_hits, base_union, labels


def _counts(results: ImageResults, metric: str) -> tuple[NDArray[Any], ...]:
    """Return hits, union and labels, of mIoU or of a metric that scores each frame by its mean IoU."""
    if metric == METRICS[0]:
        return results.counts
    is_there = results.labels_NC > 0
    shares = np.divide(results.hits_NC, results.union_NC, out=np.zeros(is_there.shape), where=is_there)
    scores_N = shares.sum(axis=1) / np.maximum(is_there.sum(axis=1), 1)
    ones_NC = np.ones((results.num_images, 1))
    return scores_N[:, None], ones_NC, ones_NC


def with_no_loss(population: Counts) -> Counts:
    """Return the population with every group a second time, where engine and reference are exchanged."""
    hits, union, base_hits, base_union, labels = population
    pairs = ((hits, base_hits), (union, base_union), (base_hits, hits), (base_union, union), (labels, labels))
    return tuple(np.concatenate(pair) for pair in pairs)


def draw(population: Counts, num_groups: int, num_draws: int) -> Counts:
    """Return the counts of `num_draws` data sets of so many groups, [D, K, C]."""
    generator = np.random.default_rng(num_groups)
    index_DK = generator.integers(0, len(population[0]), (num_draws, num_groups))
    return tuple(counts[index_DK] for counts in population)


def intervals(drawn: Counts) -> Ends:
    """Return the ends of the intervals of the product, [D] each."""
    hits, union, base_hits, base_union, labels = drawn
    reach = jackknife_reach((hits, union, labels), (base_hits, base_union, labels))
    loss = losses(tuple(counts.sum(axis=1) for counts in drawn))
    return loss - reach, loss + reach


def oracle_intervals(population: Counts, drawn: Counts) -> Ends:
    """Return the t intervals of someone who knows the scores, and how far each group moves the true loss."""
    of_all = [counts.sum(axis=0) for counts in population]
    score, base = (_scores(hits, union, of_all[4]) for hits, union in (of_all[:2], of_all[2:4]))
    is_there = of_all[4] > 0

    def influence(hits: NDArray[Any], union: NDArray[Any], number: int) -> NDArray[Any]:
        all_hits, all_union = (np.where(is_there, counts, 1.0) for counts in of_all[number : number + 2])
        moved = (hits - all_hits / all_union * union) / all_union * is_there
        return np.asarray(len(population[0]) * moved.sum(axis=-1) / is_there.sum())

    moved, base_moved = influence(drawn[0], drawn[1], 0), influence(drawn[2], drawn[3], 2)
    values_DK = 1 - score / base - moved / base + score / base**2 * base_moved
    num_groups = values_DK.shape[1]
    reach = _student(num_groups - 1) * values_DK.std(axis=1, ddof=1) / math.sqrt(num_groups)
    return values_DK.mean(axis=1) - reach, values_DK.mean(axis=1) + reach


def losses(counts: Counts) -> NDArray[np.float64]:
    """Return the loss of sets of groups whose counts are summed, [..] of [.., C]."""
    hits, union, base_hits, base_union, labels = counts
    base = _scores(base_hits, base_union, labels)
    return np.asarray(
        1 - np.divide(_scores(hits, union, labels), base, out=np.zeros_like(base), where=base > 0)
    )


def _scores(hits: NDArray[Any], union: NDArray[Any], labels: NDArray[Any]) -> NDArray[np.float64]:
    is_there = labels > 0
    shares = np.divide(hits, union, out=np.zeros(np.shape(hits)), where=is_there)
    return np.asarray(shares.sum(axis=-1) / np.maximum(is_there.sum(axis=-1), 1))


def bootstrap(drawn: Counts) -> Ends:
    """Return percentiles of resamples of the groups, expanded for few groups (Hesterberg 2015, section 5.3)."""
    num_groups = drawn[0].shape[1]
    indices = np.random.default_rng(0).integers(0, num_groups, (NUM_RESAMPLES, num_groups))
    times = np.array([np.bincount(index, minlength=num_groups) for index in indices], dtype=float)
    tail = float(ndtr(-math.sqrt(num_groups / (num_groups - 1)) * _student(num_groups - 1)))
    ends = [
        np.quantile(losses(tuple(times @ counts for counts in counts_of_draw)), [tail, 1 - tail])
        for counts_of_draw in zip(*drawn, strict=True)
    ]
    return np.array(ends)[:, 0], np.array(ends)[:, 1]


def _jackknife(drawn: Counts) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.float64]]:
    """Return the loss [D], its standard error [D], and the deviations of the losses without each group [D, K]."""
    num_groups = drawn[0].shape[1]
    total = tuple(counts.sum(axis=1) for counts in drawn)
    loss = losses(total)
    without = losses(tuple(all_[:, None] - counts for all_, counts in zip(total, drawn, strict=True)))
    deviations = without - loss[:, None]
    return loss, np.sqrt((num_groups - 1) / num_groups * np.square(deviations).sum(axis=1)), deviations


def plain_t(drawn: Counts) -> Ends:
    """Return t intervals of the jackknife with K - 1 degrees of freedom, however unequal the groups are."""
    loss, error, _ = _jackknife(drawn)
    reach = _student(drawn[0].shape[1] - 1) * error
    return loss - reach, loss + reach


def skewed_t(drawn: Counts) -> Ends:
    """Return these moved by the skewness of the groups (Johnson 1978), where that makes them wider."""
    loss, error, deviations = _jackknife(drawn)
    num_groups = drawn[0].shape[1]
    centred = deviations.mean(axis=1, keepdims=True) - deviations
    spread = np.square(centred).mean(axis=1) ** 1.5
    skewness = np.divide((centred**3).mean(axis=1), spread, out=np.zeros_like(spread), where=spread > 0)
    t = _student(num_groups - 1)
    shift = skewness / (6 * math.sqrt(num_groups)) * (1 + 2 * t**2) * error
    return loss - t * error + np.minimum(shift, 0), loss + t * error + np.maximum(shift, 0)


METHODS = {
    "product": intervals,
    "bootstrap": bootstrap,
    "t": plain_t,
    "t, skewness": skewed_t,
}


def binomial_interval(count: int, num: int) -> tuple[float, float]:
    """Return the exact 95 % interval of a share (Clopper and Pearson 1934)."""
    tail = (1 - LEVEL) / 2
    low = float(betaincinv(count, num - count + 1, tail)) if count else 0.0
    return low, float(betaincinv(count + 1, num - count, 1 - tail)) if count < num else 1.0


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Return the rows as text."""
    lines = [
        "metric, engine, sizes, groups: coverage, false ACCEPT; no loss: ACCEPT, UNPROVEN, width (oracle)"
    ]
    for row in rows:
        cell = f"{row['metric']:>14} {row['engine']:>6} {row['sizes']:>7} {row['groups']:>2}"
        rates = f"{row['coverage']:.3f} {row['false_accept']:.3f} {row['judged']:>5}"
        power = f"{row['accept']:.3f} {row['unproven']:.3f} {row['width']:.4f}"
        lines.append(f"{cell}: {rates}; {power} ({row['oracle_accept']:.3f} {row['oracle_width']:.4f})")
    return "\n".join(lines)


def _student(degrees: float) -> float:
    return float(stdtrit(degrees, (1 + LEVEL) / 2))


def _rounded(share: Any) -> float:
    return round(float(share), 4)
