"""Compare the scores of two predictors on the same images, with intervals.

N images, K groups of images that belong together, C classes.
"""

import math
import zlib
from collections.abc import Mapping, Sequence
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

_SEED = 0
LEVEL = 0.95
"""How often the intervals hold the truth, unless another level is asked for."""
_TAIL_OF_CHANGED = 0.04
"""The part of an end's error that is spent on the share of images that change at all."""
_MOST_AT_STAKE = 0.9
"""Share of its money that a bet may lose at most."""
_TINY = 1e-12
_MAX_SQNR_DB = 200.0
"""The ratio of equal values, as for the layers of an engine."""
_NUM_SHARES = 4
"""Shares of changed images at which a probability is evaluated to find its maximum."""
_BISECTIONS = 16
_KEPT_BACK, _KEPT_BACK_FOR = 0.2, 20
"""Share of an interval's error that is kept back for groups whose losses are skewed, with up to so many groups."""
_FEWEST_GROUPS = 1.001
"""Fewer than so many groups of equal weight are one, whose spread is unknown."""
_MAX_FACTOR = 1024.0
"""Estimates of the groups needed end at this multiple of those at hand."""


GroupCounts = tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.float64]]
"""Sums of hits, union and labels in each group, [K, C] each."""


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
    class_N: NDArray[Any] | None = None
    """True class of each image in classification; else None."""
    by_class: "ImageResults | None" = None
    """The same images class by class, if the score is that of a metric of the user's own; else None."""

    @property
    def num_images(self) -> int:
        """Number of images N."""
        return len(self.hits_NC)

    @property
    def num_groups(self) -> int:
        """Number of groups K."""
        return int(self.groups_N.max()) + 1

    @property
    def are_grouped(self) -> bool:
        """Whether some of the images belong together."""
        return self.num_groups < self.num_images

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
    def counts_of_groups(self) -> GroupCounts:
        """The sums of hits, union and labels in each group, [K, C]."""
        by_group = []
        for counts_NC in self.counts:
            counts_KC = np.zeros((self.num_groups, counts_NC.shape[1]))
            np.add.at(counts_KC, self.groups_N, counts_NC)
            by_group.append(counts_KC)
        hits_KC, union_KC, labels_KC = by_group
        return hits_KC, union_KC, labels_KC

    def of_class(self, number: int) -> "ImageResults":
        """Return the results of one class alone, whose score is its IoU."""
        only = slice(number, number + 1)
        return ImageResults(
            self.hits_NC[:, only], self.union_NC[:, only], self.labels_NC[:, only], self.groups_N
        )

    def of_images(self, rows_N: NDArray[np.int64]) -> "ImageResults":
        """Return the results of some images, in this order."""
        return ImageResults(
            self.hits_NC[rows_N],
            self.union_NC[rows_N],
            self.labels_NC[rows_N],
            np.unique(self.groups_N[rows_N], return_inverse=True)[1],
            None if self.class_N is None else self.class_N[rows_N],
            None if self.by_class is None else self.by_class.of_images(rows_N),
        )

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
        signal_NC, noise_NC = energies(prediction, labels, output_sizes)
        return ImageResults(signal_NC - noise_NC, signal_NC, signal_NC, groups_N)
    if task is Task.classification:
        ones_NC = np.ones((num_images, 1), np.int64)
        hits_NC = (prediction == labels).astype(np.int64)[:, None]
        return ImageResults(hits_NC, ones_NC, ones_NC, groups_N, class_N=np.asarray(labels))
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


def energies(
    found: NDArray[Any], expected: NDArray[Any], output_sizes: Sequence[int] = ()
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return the energies of the expected values of each image and of what is wrong in the found ones, [N, C].

    Nothing is right in values that are not finite.
    """
    signal_NC = energy(expected, output_sizes)
    noise_NC = energy(found.astype(np.float64) - expected, output_sizes)
    return signal_NC, np.where(np.isfinite(noise_NC), noise_NC, signal_NC)


def join_results(parts: Sequence[ImageResults], groups_N: NDArray[np.int64]) -> ImageResults:
    """Return the results of several batches as one, with the groups of all images."""
    hits_NC, union_NC, labels_NC = map(np.concatenate, zip(*(part.counts for part in parts), strict=True))
    classes = [part.class_N for part in parts if part.class_N is not None]
    by_class = [part.by_class for part in parts if part.by_class is not None]
    return ImageResults(
        hits_NC,
        union_NC,
        labels_NC,
        groups_N,
        np.concatenate(classes) if classes else None,
        join_results(by_class, groups_N) if by_class else None,
    )


def score_loss(engine: ImageResults, reference: ImageResults, *, level: float = LEVEL) -> ScoreLoss:
    """Return the loss of an engine against a reference on the same images, with its interval.

    `level` is how often the interval holds the true loss; of `num` losses all hold it with `LEVEL` if each interval
    is of 1 - (1 - LEVEL) / num (Bonferroni). The loss of one class: ``score_loss(engine.of_class(number), ..)``.

    mIoU, values and a metric of the user's own: Student's t around the measured loss, see `jackknife_reach`.
    Top-1 accuracy, and any metric that calls images right or wrong: exact, because without disagreements nothing
    deviates; see `_upper_bound`, and `_upper_bound_of_mean` for images in groups. The interval is that of the
    difference between the two accuracies, divided by the reference's accuracy as measured: the sampling error of this
    divisor, and of the mean size of a group, is not a part of it. (The jackknife includes that of the divisor.)
    A single group proves nothing: its interval reaches from -1 to 1.
    """
    _check_paired(engine, reference)
    return _loss(engine, reference, level, 1.0)


def groups_needed(
    engine: ImageResults, reference: ImageResults, max_rel_loss: float, *, level: float = LEVEL
) -> int | None:
    """Return how many groups would tell on which side of a limit the loss is, if it and their spread stay.

    An image that belongs to no group counts as one. None if more than 1024 times as many as there are.
    """

    def is_decided(factor: float) -> bool:
        return _loss(engine, reference, level, factor).standing(max_rel_loss) is not Standing.unproven

    high = 1.0
    while not is_decided(high):
        high *= 2
        if high > _MAX_FACTOR:
            return None
    low = high / 2
    while high - low > 0.02 * high:
        middle = (low + high) / 2
        low, high = (low, middle) if is_decided(middle) else (middle, high)
    return math.ceil(engine.num_groups * high)


def boundaries_of(split: str) -> str:
    """Return the name under which a split's results on boundaries are written."""
    return f"{split}_boundary"


def frames_of(split: str) -> str:
    """Return the name under which a split's results on the original files are written."""
    return f"{split}_frames"


def write_results(path: Path, splits: Mapping[str, ImageResults]) -> None:
    """Write the results of each split as arrays named ``<split>_hits``, ``_union``, ``_labels`` and ``_groups``.

    ``<split>_class`` are the true classes of images; the results class by class of a metric of the user's own are
    those of another split, ``<split>_by_class``.
    """
    arrays = {}
    parts = {_by_class(split): results.by_class for split, results in splits.items() if results.by_class}
    for split, results in {**splits, **parts}.items():
        if results.class_N is not None:
            arrays[f"{split}_class"] = results.class_N
        names = ("hits", "union", "labels", "groups")
        for name, array in zip(names, (*results.counts, results.groups_N), strict=True):
            arrays[f"{split}_{name}"] = array.astype(np.int32) if array.dtype.kind in "iu" else array
    np.savez_compressed(path, allow_pickle=False, **arrays)


def read_results(path: Path, split: str, *, stage: str = "validate") -> ImageResults:
    """Read the results of one split; raise ArtifactError if they are missing or damaged.

    `stage` is the one that writes the file.
    """
    try:
        with np.load(path, allow_pickle=False) as arrays:
            read = (arrays[f"{split}_{name}"] for name in ("hits", "union", "labels", "groups"))
            hits, union, labels, groups = (
                array.astype(np.int64) if array.dtype.kind in "iu" else array for array in read
            )
            class_N = arrays.get(f"{split}_class")
            has_classes = f"{_by_class(split)}_hits" in arrays
    except (OSError, ValueError, KeyError, EOFError, BadZipFile, zlib.error) as error:
        raise ArtifactError(
            f"{path}: no results of the images of split '{split}' ({error!r}). Run {stage} again."
        ) from error
    by_class = read_results(path, _by_class(split), stage=stage) if has_classes else None
    return ImageResults(hits, union, labels, groups, class_N, by_class)


def _by_class(split: str) -> str:
    return f"{split}_by_class"


def _loss(engine: ImageResults, reference: ImageResults, level: float, factor: float) -> ScoreLoss:
    """Return the loss with the interval that `factor` times as many groups would give."""
    score = reference.score
    loss = 1 - engine.score / score if score else 0.0
    if not score or _effective_groups(engine.counts_of_groups[2]) < _FEWEST_GROUPS:
        return ScoreLoss(loss, -1.0, 1.0)
    if engine.is_right_or_wrong and reference.is_right_or_wrong:
        low, high = _exact_interval(engine, reference, (1 - level) / 2, factor)
        return ScoreLoss(loss, low / score, high / score)
    reach = jackknife_reach(
        engine.counts_of_groups, reference.counts_of_groups, level=level, factor=factor
    ).item()
    return ScoreLoss(loss, loss - reach, loss + reach)


def jackknife_reach(
    engine: GroupCounts, reference: GroupCounts, *, level: float = LEVEL, factor: float = 1.0
) -> NDArray[np.float64]:
    """Return how far the interval of the loss reaches to each side, [..] of counts [.., K, C] of two or more groups.

    It is that of Student's t whose standard error is the jackknife's over groups (Tukey 1958). The loss is computed
    anew without each group in turn. A group that outweighs the others moves it most where it is left out, so unlike
    linearised contributions the jackknife does not take the spread of few and unequal groups for smaller than it is
    (Bell and McCaffrey, "Bias reduction in standard errors for linear regression with multi-stage samples", Survey
    Methodology 28, 2002). The degrees of freedom are those of as many equal groups as prove as much. With few groups,
    of which some lose far more than others, t misses the truth slightly too often: a part of the error is kept back
    for them, which shrinks with more groups.
    """
    from scipy.special import stdtrit

    num_groups = engine[0].shape[-2]
    totals, bases = ([counts.sum(axis=-2, keepdims=True) for counts in each] for each in (engine, reference))
    without, without_bases = (
        [total - counts for total, counts in zip(sums, each, strict=True)]
        for sums, each in ((totals, engine), (bases, reference))
    )
    deviations_K = _losses(without, without_bases) - _losses(totals, bases)
    variance = (num_groups - 1) / num_groups * np.square(deviations_K).sum(axis=-1) / factor
    degrees = np.maximum(1.0, factor * _effective_groups(engine[2]) - 1)
    kept_back = _KEPT_BACK * min(1.0, _KEPT_BACK_FOR / (factor * num_groups))
    tail = (1 - level) / 2 * (1 - kept_back)
    return np.asarray(stdtrit(degrees, 1 - tail) * np.sqrt(variance))


def _losses(engine: Sequence[NDArray[Any]], reference: Sequence[NDArray[Any]]) -> NDArray[np.float64]:
    """Return the loss [..] of hits, union and labels, [.., C] each; 1 where the reference scores nothing."""
    scores, bases = _scores(*engine), _scores(*reference)
    losses: NDArray[np.float64] = 1 - np.divide(scores, bases, out=np.zeros_like(scores), where=bases > 0)
    return losses


def _effective_groups(labels: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the number [..] of equal groups that prove as much as those of labels [.., K, C].

    From Kish, "Survey Sampling", 1965, section 11.7. A group weighs its share of the labels of a class, summed over
    the classes, as the score averages over them.
    """
    totals = labels.sum(axis=-2, keepdims=True)
    shares = np.divide(labels, totals, out=np.zeros_like(labels), where=totals > 0).sum(axis=-1)
    squares = np.square(shares).sum(axis=-1)
    return np.asarray(shares.sum(axis=-1) ** 2 / np.where(squares > 0, squares, 1.0))


def _exact_interval(
    engine: ImageResults, reference: ImageResults, tail: float, factor: float
) -> tuple[float, float]:
    """Return an interval of the lost accuracy that misses it on either side in at most `tail` of all cases."""
    lost_N = reference.hits_NC[:, 0] - engine.hits_NC[:, 0]  # 1, 0 or -1
    num = round(factor * engine.num_groups)
    if engine.num_groups == engine.num_images:
        lost, gained = (factor * int((lost_N == sign).sum()) for sign in (1, -1))
        return (
            -_upper_bound(math.ceil(gained), math.floor(lost), num, tail),
            _upper_bound(math.ceil(lost), math.floor(gained), num, tail),
        )
    sizes_K = np.bincount(engine.groups_N)
    lost_K = np.bincount(engine.groups_N, weights=lost_N) / sizes_K.max()
    scale = float(sizes_K.max() / sizes_K.mean())
    return -scale * _upper_bound_of_mean(-lost_K, num, tail), scale * _upper_bound_of_mean(lost_K, num, tail)


def _upper_bound_of_mean(values_K: NDArray[np.float64], num: int, tail: float) -> float:
    """Return an upper bound of the mean of independent values from -1 to 1, too low in at most `tail` of all cases.

    It is exact for any distribution: whoever bets that the values are smaller than a mean, and knows only the values
    before each, multiplies his money by more than 1 / tail in at most `tail` of all cases if that is the mean
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
    bet_T = np.sqrt(-2 * math.log(tail) / (num * known_T))

    def is_refuted(mean: float) -> bool:
        stake_T = np.minimum(bet_T, _MOST_AT_STAKE / max(1 - mean, _TINY))
        return float(np.log1p(stake_T * (mean - values_T)).sum()) >= -math.log(tail)

    low, high = float(values_T.mean()), 1.0
    for _ in range(_BISECTIONS):  # the money grows with the mean that is bet against
        middle = (low + high) / 2
        low, high = (low, middle) if is_refuted(middle) else (middle, high)
    return 2 * high - 1


def _upper_bound(lost: int, gained: int, num: int, tail: float) -> float:
    """Return the exact upper bound of the share of images lost minus the share gained; too low in `tail` of cases.

    Of all shares with which as few net losses as were seen are not too unlikely, it is the largest. The probability
    depends also on how many images change at all; its maximum is taken over the interval of that share, whose error
    is a part of the whole error (Berger and Boos 1994). It is evaluated at `_NUM_SHARES` values of the share, equally
    spaced from end to end of that interval, so the true maximum may be slightly larger.
    """
    from scipy.fft import next_fast_len
    from scipy.special import betaincinv

    changed, of_changed = lost + gained, _TAIL_OF_CHANGED * tail
    ends = (
        betaincinv(changed, num - changed + 1, of_changed / 2) if changed else 0.0,
        betaincinv(changed + 1, num - changed, 1 - of_changed / 2) if changed < num else 1.0,
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
        is_likely = probability(middle_G) > tail - of_changed
        low_G, high_G = np.where(is_likely, middle_G, low_G), np.where(is_likely, high_G, middle_G)
    return float(high_G.max())


def _check_paired(engine: ImageResults, reference: ImageResults) -> None:
    if not np.array_equal(engine.labels_NC, reference.labels_NC):
        raise ArtifactError(
            f"The results of {engine.num_images} and {reference.num_images} images have different labels, expected "
            "those of the same images in the same order. Validate both engines again."
        )


def _scores(hits: NDArray[Any], union: NDArray[Any], labels: NDArray[Any]) -> NDArray[np.float64]:
    """Return the mean of hits / union over the classes that occur in the labels, [..] of [.., C]."""
    is_present = labels > 0
    shares = np.divide(hits, union, out=np.zeros(hits.shape), where=is_present)
    mean: NDArray[np.float64] = shares.sum(axis=-1) / np.maximum(is_present.sum(axis=-1), 1)
    return mean
