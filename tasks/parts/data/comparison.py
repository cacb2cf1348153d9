"""Compare the scores of two predictors on the same images, with intervals.

N images, K groups of images that belong together, C classes, B resamples.
"""

import math
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np
from numpy.typing import NDArray

from tasks.core.errors import ArtifactError
from tasks.parts.data.accuracy import ScoreLoss, Similarity, Standing
from tasks.parts.data.class_table import IGNORE_INDEX
from tasks.parts.data.input_card import Task
from tasks.parts.data.metrics import boundaries

RESULTS_FILE = "images.npz"

_NUM_RESAMPLES = 2000
_SEED = 0
"""The same for all predictors, so that their resampled scores are paired."""
_TAIL = 0.025
"""Share of an interval's error at each end: intervals are of 95 %."""
_TAIL_OF_CHANGED = 0.001
"""The part of `_TAIL` that is spent on the share of images that change at all."""
_MOST_AT_STAKE = 0.9
"""Share of its money that a bet may lose at most."""
_TINY = 1e-12
_MAX_SQNR_DB = 200.0
"""The ratio of equal values, as for the layers of an engine."""
_NUM_SHARES = 4
"""Shares of changed images at which a probability is evaluated to find its maximum."""
_BISECTIONS = 16
_DRAWS_PER_BLOCK = 1 << 22
_MAX_FACTOR = 1024.0
"""Estimates of the images needed end at this multiple of those at hand."""


@dataclass(frozen=True)
class ImageResults:
    """What a predictor got right in each image of a split.

    The score of the split, and of every resample of it, follows from this. In classification C is 1, and a hit is an
    image whose class is right. For values C is the number of outputs: `labels_NC` and `union_NC` are the energy of
    the true values, `hits_NC` is this energy less that of the difference. With a metric of the user's own C is 1,
    `hits_NC` holds its scores, the others hold ones. For Boundary IoU only pixels on a boundary count.
    """

    hits_NC: NDArray[Any]
    """Correct pixels of each class."""
    union_NC: NDArray[Any]
    """Pixels of each class in the label, the prediction, or both."""
    labels_NC: NDArray[Any]
    """Pixels of each class in the label."""
    groups_N: NDArray[np.int64]
    """Number of each image's group, 0 .. K - 1. Images of one video, for example, are one group."""

    @property
    def num_images(self) -> int:
        """Number of images N."""
        return len(self.hits_NC)

    @property
    def num_groups(self) -> int:
        """Number of groups K."""
        return int(self.groups_N.max()) + 1

    @property
    def score(self) -> float:
        """MIoU over the classes that occur in the labels, share of hits or of signal; 0 without labels."""
        return float(_scores(*(counts_NC.sum(axis=0, keepdims=True) for counts_NC in self.counts))[0])

    @property
    def class_scores(self) -> tuple[float | None, ...]:
        """Hits / union of each class; None for a class in neither labels nor predictions."""
        hits_C, union_C = self.hits_NC.sum(axis=0), self.union_NC.sum(axis=0)
        return tuple(
            float(hits / union) if union else None for hits, union in zip(hits_C, union_C, strict=True)
        )

    @cached_property
    def resampled_scores(self) -> NDArray[np.float64]:
        """Scores [B] of resamples of the groups, the same resamples for all predictors of a split."""
        by_group = []
        for counts_NC in self.counts:
            counts_KC = np.zeros((self.num_groups, counts_NC.shape[1]))
            np.add.at(counts_KC, self.groups_N, counts_NC)
            by_group.append(counts_KC)
        blocks = [
            _scores(*(times_BK @ counts_KC for counts_KC in by_group)) for times_BK in _draws(self.num_groups)
        ]
        return np.concatenate(blocks)

    @property
    def counts(self) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any]]:
        """`hits_NC`, `union_NC` and `labels_NC`."""
        return self.hits_NC, self.union_NC, self.labels_NC

    @property
    def is_right_or_wrong(self) -> bool:
        """Whether each image is either right or wrong and counts as much as any other, as in top-1 accuracy."""
        is_one = self.hits_NC.shape[1] == 1 and bool((self.union_NC == 1).all())
        return is_one and bool(np.isin(self.hits_NC, (0, 1)).all())


def compare_with_labels(
    prediction: NDArray[Any],
    labels: NDArray[Any],
    num_classes: int,
    task: Task,
    groups_N: NDArray[np.int64] | None = None,
    *,
    output_sizes: Sequence[int] = (),
) -> ImageResults:
    """Return the results of masks [N, H, W], classes [N] or values [N, ...]; without groups each image is its own.

    `output_sizes` are the numbers of values of outputs that were joined; empty for one output.
    """
    num_images = len(labels)
    groups_N = np.arange(num_images) if groups_N is None else np.unique(groups_N, return_inverse=True)[1]
    if task is Task.values:
        signal_NC = energy(labels, output_sizes)
        noise_NC = energy(prediction.astype(np.float64) - labels, output_sizes)
        return ImageResults(signal_NC - noise_NC, signal_NC, signal_NC, groups_N)
    if task is Task.classification:
        ones_NC = np.ones((num_images, 1), np.int64)
        return ImageResults((prediction == labels).astype(np.int64)[:, None], ones_NC, ones_NC, groups_N)
    is_counted = labels != IGNORE_INDEX
    is_answered = is_counted & (prediction != IGNORE_INDEX)  # 255 is what a cropped image does not show
    return ImageResults(*_count_pixels(prediction, labels, num_classes, is_counted, is_answered), groups_N)


def compare_boundaries(
    prediction_NHW: NDArray[Any], labels_NHW: NDArray[Any], num_classes: int
) -> ImageResults:
    """Return the results of masks [N, H, W] on boundaries alone: their score is the mean Boundary IoU.

    The boundaries of a class's masks in the labels and in the prediction are intersected and united (Cheng et al.,
    "Boundary IoU: Improving Object-Centric Image Segmentation Evaluation", CVPR 2021), and their pixels are summed
    over the images as those of mIoU are. What is ignored in the labels is ignored in the prediction, too, and gives
    neither a contour.
    """
    is_counted = labels_NHW != IGNORE_INDEX
    of_labels, of_prediction = (
        is_counted & boundaries(classes, ~is_counted) for classes in (labels_NHW, prediction_NHW)
    )
    counts = _count_pixels(prediction_NHW, labels_NHW, num_classes, of_labels, of_prediction)
    return ImageResults(*counts, np.arange(len(labels_NHW)))


def _count_pixels(
    prediction_NHW: NDArray[Any],
    labels_NHW: NDArray[Any],
    num_classes: int,
    of_labels: NDArray[np.bool_],
    of_prediction: NDArray[np.bool_],
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """Return `hits_NC`, `union_NC` and `labels_NC` of the pixels that count in the labels and in the prediction."""
    num_images = len(labels_NHW)
    image_NHW = np.broadcast_to(np.arange(num_images)[:, None, None], labels_NHW.shape)

    def count(classes: NDArray[Any], where: NDArray[np.bool_]) -> NDArray[np.int64]:
        keys = image_NHW[where] * num_classes + classes[where]
        return np.bincount(keys, minlength=num_images * num_classes).reshape(num_images, num_classes)

    hits_NC = count(labels_NHW, of_labels & of_prediction & (prediction_NHW == labels_NHW))
    labels_NC, predicted_NC = count(labels_NHW, of_labels), count(prediction_NHW, of_prediction)
    return hits_NC, labels_NC + predicted_NC - hits_NC, labels_NC


def results_of_scores(scores_N: NDArray[np.float64]) -> ImageResults:
    """Return the results of images that have a score each, 0..1; the score of a split is their mean."""
    ones_NC = np.ones((len(scores_N), 1))
    return ImageResults(scores_N[:, None], ones_NC, ones_NC, np.arange(len(scores_N)))


def similarity_of_values(results: ImageResults, found_C: NDArray[np.float64]) -> list[Similarity]:
    """Return how similar the values of each output, of these energies, are to the true ones, over all images."""
    similarities = []
    for signal, hits, found in zip(
        results.labels_NC.sum(axis=0), results.hits_NC.sum(axis=0), found_C, strict=True
    ):
        noise, norm = max(0.0, float(signal - hits)), math.sqrt(signal * found)
        cosine = min(1.0, float(signal + found - noise) / (2 * norm)) if norm else 0.0
        ratio = float(signal) / noise if noise else math.inf
        sqnr_db = 10 * math.log10(ratio) if ratio else -math.inf
        similarities.append(Similarity(max(-_MAX_SQNR_DB, min(_MAX_SQNR_DB, sqnr_db)), cosine))
    return similarities


def energy(values: NDArray[Any], output_sizes: Sequence[int] = ()) -> NDArray[np.float64]:
    """Return the sum of the squares of the values of each image, [N, C]: one for each joined output."""
    squares = np.square(values.reshape(len(values), -1), dtype=np.float64)
    starts = np.concatenate([[0], np.cumsum(output_sizes[:-1], dtype=np.int64)]).astype(np.int64)
    total_NC: NDArray[np.float64] = np.add.reduceat(squares, starts, axis=1)
    return total_NC


def join_results(parts: Sequence[ImageResults], groups_N: NDArray[np.int64]) -> ImageResults:
    """Return the results of several batches as one, with the groups of all images."""
    hits_NC, union_NC, labels_NC = map(np.concatenate, zip(*(part.counts for part in parts), strict=True))
    return ImageResults(hits_NC, union_NC, labels_NC, groups_N)


def score_loss(engine: ImageResults, reference: ImageResults) -> ScoreLoss:
    """Return the loss of an engine against a reference on the same images, with its 95 % interval.

    mIoU: bootstrap over groups, both scored on the same resamples (Efron and Tibshirani 1993), with percentiles that
    are expanded for few groups (Hesterberg 2015, "What Teachers Should Know About the Bootstrap", section 5.3). The
    same for values and for a metric of the user's own.
    Top-1 accuracy, and any metric that calls images right or wrong: exact, because a bootstrap without disagreements
    has no width; see `_upper_bound`, and `_upper_bound_of_mean` for images in groups. The interval is that of the
    difference between the two accuracies, divided by the reference's accuracy as measured: the sampling error of this
    divisor, and of the mean size of a group, is not a part of it. (The bootstrap resamples the divisor too.)
    A single group proves nothing: its interval reaches from -1 to 1.
    """
    _check_paired(engine, reference)
    return _loss(engine, reference, 1.0)


def images_needed(engine: ImageResults, reference: ImageResults, max_rel_loss: float) -> int | None:
    """Return how many images would tell on which side of a limit the loss is, if it stays what it is.

    None if more than 1024 times as many as there are. The width of a bootstrap interval is taken to shrink with the
    root of the number of images.
    """

    def is_decided(factor: float) -> bool:
        return _loss(engine, reference, factor).standing(max_rel_loss) is not Standing.unproven

    high = 1.0
    while not is_decided(high):
        high *= 2
        if high > _MAX_FACTOR:
            return None
    low = high / 2
    while high - low > 0.02 * high:
        middle = (low + high) / 2
        low, high = (low, middle) if is_decided(middle) else (middle, high)
    return math.ceil(engine.num_images * high)


def boundaries_of(split: str) -> str:
    """Return the name under which a split's results on boundaries are written."""
    return f"{split}_boundary"


def frames_of(split: str) -> str:
    """Return the name under which a split's results on the original files are written."""
    return f"{split}_frames"


def write_results(path: Path, splits: Mapping[str, ImageResults]) -> None:
    """Write the results of each split as arrays named ``<split>_hits``, ``_union``, ``_labels`` and ``_groups``."""
    arrays = {}
    for split, results in splits.items():
        names = ("hits", "union", "labels", "groups")
        for name, array in zip(names, (*results.counts, results.groups_N), strict=True):
            arrays[f"{split}_{name}"] = array.astype(np.int32) if array.dtype.kind in "iu" else array
    np.savez_compressed(path, allow_pickle=False, **arrays)


def read_results(path: Path, split: str) -> ImageResults:
    """Read the results of one split; raise ArtifactError if they are missing or damaged."""
    try:
        with np.load(path, allow_pickle=False) as arrays:
            read = (arrays[f"{split}_{name}"] for name in ("hits", "union", "labels", "groups"))
            hits, union, labels, groups = (
                array.astype(np.int64) if array.dtype.kind in "iu" else array for array in read
            )
    except (OSError, ValueError, KeyError, EOFError, BadZipFile, zlib.error) as error:
        raise ArtifactError(
            f"{path}: no results of the images of split '{split}' ({error!r}). Run validate again."
        ) from error
    return ImageResults(hits, union, labels, groups)


def _loss(engine: ImageResults, reference: ImageResults, factor: float) -> ScoreLoss:
    """Return the loss with the interval that `factor` times as many images would give."""
    score = reference.score
    if not score or engine.num_groups == 1:
        return ScoreLoss(1 - engine.score / score if score else 0.0, -1.0, 1.0)
    loss = 1 - engine.score / score
    if engine.is_right_or_wrong and reference.is_right_or_wrong:
        low, high = _exact_interval(engine, reference, factor)
        return ScoreLoss(loss, low / score, high / score)
    low, high = _bootstrap_interval(engine, reference)
    return ScoreLoss(loss, loss + (low - loss) / math.sqrt(factor), loss + (high - loss) / math.sqrt(factor))


def _bootstrap_interval(engine: ImageResults, reference: ImageResults) -> tuple[float, float]:
    from scipy.special import ndtr, stdtrit

    scores, bases = engine.resampled_scores, reference.resampled_scores
    losses = 1 - np.divide(scores, bases, out=np.ones_like(scores), where=bases > 0)
    num_groups = engine.num_groups
    tail = ndtr(math.sqrt(num_groups / (num_groups - 1)) * stdtrit(num_groups - 1, _TAIL))
    low, high = np.quantile(losses, [tail, 1 - tail])
    return float(low), float(high)


def _exact_interval(engine: ImageResults, reference: ImageResults, factor: float) -> tuple[float, float]:
    """Return an interval of the loss of top-1 accuracy that covers it in at least 95 % of all cases, for any N."""
    lost_N = reference.hits_NC[:, 0] - engine.hits_NC[:, 0]  # 1, 0 or -1
    num = round(factor * engine.num_groups)
    if engine.num_groups == engine.num_images:
        lost, gained = (factor * int((lost_N == sign).sum()) for sign in (1, -1))
        return (
            -_upper_bound(math.ceil(gained), math.floor(lost), num),
            _upper_bound(math.ceil(lost), math.floor(gained), num),
        )
    sizes_K = np.bincount(engine.groups_N)
    lost_K = np.bincount(engine.groups_N, weights=lost_N) / sizes_K.max()
    scale = float(sizes_K.max() / sizes_K.mean())
    return -scale * _upper_bound_of_mean(-lost_K, num), scale * _upper_bound_of_mean(lost_K, num)


def _upper_bound_of_mean(values_K: NDArray[np.float64], num: int) -> float:
    """Return an upper bound of the mean of independent values from -1 to 1 that is too low in at most 2.5 % of cases.

    It is exact for any distribution: whoever bets that the values are smaller than a mean, and knows only the values
    before each, multiplies his money by more than 1 / 0.025 in at most 2.5 % of cases if that is the mean
    (Waudby-Smith and Ramdas, "Estimating means of bounded random variables by betting", Journal of the Royal
    Statistical Society B 86, 2024). The bound is the largest mean at which he does not. For another `num` the values
    are repeated or cut.
    """
    shuffled_K = np.random.default_rng(_SEED).permutation(values_K)
    values_T = (1 + np.resize(shuffled_K, num)) / 2
    count_T = np.arange(2, num + 2)
    mean_T = (0.5 + np.cumsum(values_T)) / count_T
    spread_T = (0.25 / num + np.cumsum((values_T - mean_T) ** 2)) / count_T
    known_T = np.concatenate([[0.25 / num], spread_T[:-1]])
    bet_T = np.sqrt(-2 * math.log(_TAIL) / (num * known_T))

    def is_refuted(mean: float) -> bool:
        stake_T = np.minimum(bet_T, _MOST_AT_STAKE / max(1 - mean, _TINY))
        return float(np.log1p(stake_T * (mean - values_T)).sum()) >= -math.log(_TAIL)

    low, high = float(values_T.mean()), 1.0
    for _ in range(_BISECTIONS):  # the money grows with the mean that is bet against
        middle = (low + high) / 2
        low, high = (low, middle) if is_refuted(middle) else (middle, high)
    return 2 * high - 1


def _upper_bound(lost: int, gained: int, num: int) -> float:
    """Return the exact upper bound of the share of images lost minus the share gained.

    Of all shares with which as few net losses as were seen are not too unlikely, it is the largest. The probability
    depends also on how many images change at all; its maximum is taken over the interval of that share, whose error
    is a part of the whole error (Berger and Boos 1994). It is evaluated at `_NUM_SHARES` values of the share, equally
    spaced from end to end of that interval, so the true maximum may be slightly larger.
    """
    from scipy.fft import next_fast_len
    from scipy.special import betaincinv

    changed = lost + gained
    ends = (
        betaincinv(changed, num - changed + 1, _TAIL_OF_CHANGED / 2) if changed else 0.0,
        betaincinv(changed + 1, num - changed, 1 - _TAIL_OF_CHANGED / 2) if changed < num else 1.0,
    )
    changed_G = np.linspace(*ends, _NUM_SHARES)
    length = next_fast_len(2 * num + 1)
    angle = np.exp(2j * np.pi * np.arange(length) / length)

    def probability(net_G: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return the probability of at most `lost - gained` net losses, from their characteristic function."""
        up_G1, down_G1 = (changed_G + net_G)[:, None] / 2, (changed_G - net_G)[:, None] / 2
        density: NDArray[np.float64] = (
            np.fft.fft((1 - changed_G[:, None] + up_G1 * angle + down_G1 / angle) ** num).real / length
        )
        probability_G: NDArray[np.float64] = density[:, np.arange(-num, lost - gained + 1) % length].sum(
            axis=1
        )
        return probability_G

    low_G, high_G = -changed_G, changed_G.copy()
    for _ in range(_BISECTIONS):
        middle_G = (low_G + high_G) / 2
        is_likely = probability(middle_G) > _TAIL - _TAIL_OF_CHANGED
        low_G, high_G = np.where(is_likely, middle_G, low_G), np.where(is_likely, high_G, middle_G)
    return float(high_G.max())


def _check_paired(engine: ImageResults, reference: ImageResults) -> None:
    if not np.array_equal(engine.labels_NC, reference.labels_NC):
        raise ArtifactError(
            f"The results of {engine.num_images} and {reference.num_images} images have different labels, expected "
            "those of the same images in the same order. Validate both engines again."
        )


def _draws(num_groups: int) -> Iterator[NDArray[np.float64]]:
    """Yield how many times each group is drawn, [b, K], in blocks of resamples."""
    generator = np.random.default_rng(_SEED)
    size = max(1, _DRAWS_PER_BLOCK // num_groups)
    for start in range(0, _NUM_RESAMPLES, size):
        num = min(size, _NUM_RESAMPLES - start)
        drawn = generator.integers(0, num_groups, (num, num_groups)) + num_groups * np.arange(num)[:, None]
        times = np.bincount(drawn.ravel(), minlength=num * num_groups)
        yield times.reshape(num, num_groups).astype(np.float64)


def _scores(hits_BC: NDArray[Any], union_BC: NDArray[Any], labels_BC: NDArray[Any]) -> NDArray[np.float64]:
    """Return the mean of hits / union over the classes that occur in the labels, [B]."""
    is_present = labels_BC > 0
    shares = np.divide(hits_BC, union_BC, out=np.zeros(hits_BC.shape), where=is_present)
    mean: NDArray[np.float64] = shares.sum(axis=1) / np.maximum(is_present.sum(axis=1), 1)
    return mean
