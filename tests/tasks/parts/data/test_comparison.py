"""Losses with intervals: coverage, exactness, groups, and the number of images that would decide."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from tasks.core.errors import ArtifactError
from tasks.parts.data.accuracy import ScoreLoss, Standing, worst
from tasks.parts.data.comparison import (
    ImageResults,
    boundaries_of,
    compare_boundaries,
    compare_with_labels,
    groups_needed,
    join_results,
    read_results,
    score_loss,
    write_results,
)
from tasks.parts.data.input_card import Task
from tasks.parts.data.metrics import mean_iou


def images(is_right_N: NDArray[np.bool_], groups_N: NDArray[np.int64] | None = None) -> ImageResults:
    labels_N = np.zeros(len(is_right_N), np.int64)
    return compare_with_labels((~is_right_N).astype(np.int64), labels_N, 2, Task.classification, groups_N)


def masks(seed: int, num_images: int, share_wrong: float, base: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return masks in which a share of the pixels is another class; images differ in how hard they are."""
    generator = np.random.default_rng(seed)
    hardness_N = 2 * share_wrong * generator.random(num_images)
    is_wrong = generator.random(base.shape) < hardness_N[:, None, None]
    return np.where(is_wrong, (base + 1) % 3, base)


def test_the_score_is_the_miou_of_the_split_and_batches_join() -> None:
    labels = np.random.default_rng(0).integers(0, 3, (7, 8, 8))
    labels[0, 0] = 255
    predicted = masks(1, 7, 0.2, labels % 3)
    whole = compare_with_labels(predicted, labels, 3, Task.segmentation)
    assert whole.score == pytest.approx(mean_iou(predicted, labels, 3), abs=1e-12)
    parts = [
        compare_with_labels(predicted[part], labels[part], 3, Task.segmentation)
        for part in (slice(0, 4), slice(4, 7))
    ]
    joined = join_results(parts, np.arange(7))
    for one, other in zip(joined.counts, whole.counts, strict=True):
        np.testing.assert_array_equal(one, other)


def test_a_stray_pixel_of_a_class_that_no_label_has_is_not_a_class() -> None:
    labels = np.zeros((1, 10, 10), np.int64)
    labels[:, 5:] = 1
    predicted = labels.copy()
    predicted[0, 0, 0] = 4
    results = compare_with_labels(predicted, labels, 5, Task.segmentation)
    assert results.score == pytest.approx((49 / 50 + 1) / 2)
    assert mean_iou(predicted, labels, 5) == pytest.approx(results.score)


def test_the_interval_covers_the_true_loss_of_miou() -> None:
    labels = np.random.default_rng(0).integers(0, 3, (60, 8, 8))

    def loss(seed: int, repeats: int) -> ScoreLoss:
        many = np.tile(labels, (repeats, 1, 1))
        reference = masks(seed, len(many), 0.2, many)
        engine = masks(seed + 10_000, len(many), 0.02, reference)
        compared = (compare_with_labels(each, many, 3, Task.segmentation) for each in (engine, reference))
        return score_loss(*compared)

    truth = loss(1, 60).rel_loss
    covered = [
        low <= truth <= high
        for low, high in ((each.low, each.high) for each in map(loss, range(200), [1] * 200))
    ]
    assert 0.90 <= np.mean(covered) <= 0.99  # 95 % within three standard errors of 200 draws


def draw_groups(
    generator: np.random.Generator, num_groups: int, sizes: Sequence[int], loss: float
) -> tuple[ImageResults, ImageResults]:
    """Return an engine and its reference on groups of frames; an engine loses `loss` of the IoU of 3 classes.

    Groups differ in how much they lose, by a standard deviation of 0.02, and have one of the `sizes`. Their frames
    are alike, and summed here.
    """
    frames_K1 = generator.choice(sizes, (num_groups, 1))
    labels_KC = frames_K1 * generator.uniform(2e5, 4e5, (num_groups, 3))
    iou_K1 = generator.uniform(0.7, 0.9, (num_groups, 1))
    lost_K1 = loss + 0.02 * generator.standard_normal((num_groups, 1))
    engine, reference = (
        ImageResults(labels_KC * iou, labels_KC, labels_KC, np.arange(num_groups))
        for iou in (iou_K1 * (1 - lost_K1), iou_K1)
    )
    return engine, reference


@pytest.mark.parametrize("sizes", [(1,), (1, 2, 4, 8, 16, 32)])
@pytest.mark.parametrize("num_groups", [2, 3, 4, 6])
def test_few_groups_cover_the_true_loss_and_are_rarely_accepted_at_the_limit_c1(
    num_groups: int, sizes: tuple[int, ...]
) -> None:
    generator = np.random.default_rng(num_groups)
    found = [score_loss(*draw_groups(generator, num_groups, sizes, 0.03)) for _ in range(1000)]
    covered = [loss.low <= 0.03 <= loss.high for loss in found]
    accepted = [loss.standing(0.03) is Standing.within for loss in found]
    assert np.mean(covered) >= 0.93
    assert np.mean(accepted) <= 0.035


def test_ten_groups_prove_that_nothing_is_lost_c1() -> None:
    """Student's t of 9 degrees and 96 %, 2.40, times 0.02 / 10 ** 0.5 reaches 0.015 from the mean of 10 groups."""
    generator = np.random.default_rng(0)
    found = [score_loss(*draw_groups(generator, 10, (1,), 0.0)) for _ in range(300)]
    assert np.mean([loss.standing(0.03) is Standing.within for loss in found]) >= 0.97
    assert np.mean([loss.high - loss.low for loss in found]) == pytest.approx(0.030, rel=0.1)


def test_the_interval_of_a_mean_is_that_of_student_with_caution_at_any_level() -> None:
    scores_N = np.array([0.9, 0.8, 0.95, 0.7, 0.85])
    ones_N1 = np.ones((5, 1))
    engine, reference = (
        ImageResults(hits_N1, ones_N1, ones_N1, np.arange(5)) for hits_N1 in (scores_N[:, None], ones_N1)
    )
    # Tables of Student's t, 4 degrees of freedom, 2 % and 1 % at each end: a fifth of 2.5 % and 1.25 % is kept back.
    for level, t in ((0.95, 2.998528), (0.975, 3.746947)):
        reach = t * scores_N.std(ddof=1) / 5**0.5
        loss = score_loss(engine, reference, level=level)
        assert (loss.low, loss.high) == pytest.approx((0.16 - reach, 0.16 + reach), abs=1e-6)


def test_the_loss_of_a_class_is_that_of_its_iou_and_one_group_proves_none() -> None:
    labels_NC = np.array([[100, 50], [80, 0], [120, 0], [90, 0]])
    reference = ImageResults(labels_NC, labels_NC, labels_NC, np.arange(4))
    engine = ImageResults(labels_NC * [[9, 8]] // 10, labels_NC, labels_NC, np.arange(4))
    common = score_loss(engine.of_class(0), reference.of_class(0))
    assert common.rel_loss == pytest.approx(0.1) and common.high < 0.11
    rare = score_loss(engine.of_class(1), reference.of_class(1))
    assert rare.rel_loss == pytest.approx(0.2) and (rare.low, rare.high) == (-1, 1)


@pytest.mark.slow
@pytest.mark.parametrize("num_images", [40, 300])
@pytest.mark.parametrize(("lost", "gained"), [(0.002, 0.0), (0.03, 0.03), (0.08, 0.01)])
def test_exact_interval_of_top1_covers_at_least_95_per_cent(
    num_images: int, lost: float, gained: float
) -> None:
    truth = 1 - (1 - lost) / (1 - gained)
    covered = []
    for seed in range(150):
        draw_N = np.random.default_rng(seed).random(num_images)
        loss = score_loss(images(draw_N >= lost), images((draw_N < lost) | (draw_N >= lost + gained)))
        covered.append(loss.low <= truth <= loss.high)
    assert np.mean(covered) >= 0.95


@pytest.mark.parametrize("num_groups", [20, 100])
@pytest.mark.parametrize(
    ("lost", "gained", "alike"), [(0.002, 0.0, 1.0), (0.03, 0.03, 0.0), (0.1, 0.02, 0.7)]
)
def test_exact_interval_of_groups_covers_at_least_95_per_cent(
    num_groups: int, lost: float, gained: float, alike: float
) -> None:
    """In a share of the groups, `alike`, all images lose or gain together."""
    truth = 1 - (1 - lost) / (1 - gained)
    covered = []
    for seed in range(150):
        generator = np.random.default_rng(seed)
        groups_N = np.repeat(np.arange(num_groups), 4)
        is_alike_N = (generator.random(num_groups) < alike)[groups_N]
        draw_N = np.where(
            is_alike_N, generator.random(num_groups)[groups_N], generator.random(4 * num_groups)
        )
        engine, reference = draw_N >= lost, (draw_N < lost) | (draw_N >= lost + gained)
        loss = score_loss(images(engine, groups_N), images(reference, groups_N))
        covered.append(loss.low <= truth <= loss.high)
    assert np.mean(covered) >= 0.95


def test_groups_of_different_sizes_weigh_as_many_images_as_they_have() -> None:
    sizes_K = np.resize([1, 4, 10], 300)
    groups_N = np.repeat(np.arange(300), sizes_K)
    is_right_N = np.random.default_rng(0).random(len(groups_N)) >= 0.05
    loss = score_loss(images(is_right_N, groups_N), images(np.ones(len(groups_N), bool), groups_N))
    assert loss.rel_loss == pytest.approx(1 - is_right_N.mean())
    assert loss.low < loss.rel_loss < loss.high
    assert loss.high - loss.low < 0.1


def test_images_without_disagreement_still_have_an_interval_that_shrinks() -> None:
    few, many = (score_loss(images(np.ones(num, bool)), images(np.ones(num, bool))) for num in (160, 1600))
    assert few.rel_loss == many.rel_loss == 0
    assert few.standing(0.02) is Standing.unproven and many.standing(0.02) is Standing.within
    assert 160 < (groups_needed(images(np.ones(160, bool)), images(np.ones(160, bool)), 0.02) or 0) < 400


def test_the_number_of_groups_needed_decides_when_there_are_as_many() -> None:
    labels = np.random.default_rng(0).integers(0, 3, (40, 8, 8))

    def results(num_images: int) -> tuple[ImageResults, ImageResults]:
        many = np.resize(labels, (num_images, 8, 8))
        reference = masks(3, num_images, 0.2, many)
        engine = masks(4, num_images, 0.02, reference)
        compared = [compare_with_labels(each, many, 3, Task.segmentation) for each in (engine, reference)]
        return compared[0], compared[1]

    engine, reference = results(40)
    limit = score_loss(engine, reference).high - 0.003
    assert score_loss(engine, reference).standing(limit) is Standing.unproven
    needed = groups_needed(engine, reference, limit)
    assert needed is not None and needed > 40
    assert score_loss(*results(2 * needed)).standing(limit) is Standing.within


def test_images_of_one_group_prove_less_than_as_many_others() -> None:
    is_right_N = np.ones(400, bool)
    is_right_N[:20] = False
    was_right_N = np.ones(400, bool)
    groups_N = np.repeat(np.arange(20), 20)
    alone = score_loss(images(is_right_N), images(was_right_N))
    together = score_loss(images(is_right_N, groups_N), images(was_right_N, groups_N))
    assert together.rel_loss == alone.rel_loss == pytest.approx(0.05)
    assert together.high - together.low > 3 * (alone.high - alone.low)
    one = score_loss(images(is_right_N, np.zeros(400, int)), images(was_right_N, np.zeros(400, int)))
    assert (one.low, one.high) == (-1, 1)


def test_results_of_other_images_are_refused() -> None:
    labels = np.random.default_rng(0).integers(0, 3, (4, 8, 8))
    first, second = (compare_with_labels(each, each, 3, Task.segmentation) for each in (labels, labels[::-1]))
    with pytest.raises(ArtifactError, match=r"the same images in the same order\. Validate both"):
        score_loss(first, second)


def test_results_are_read_as_they_were_written_and_damage_is_named(tmp_path: Path) -> None:
    results = images(np.array([True, False, True]), np.array([5, 5, 9]))
    write_results(tmp_path / "images.npz", {"val": results})
    read = read_results(tmp_path / "images.npz", "val")
    assert read.score == pytest.approx(2 / 3) and read.num_groups == 2
    with pytest.raises(ArtifactError, match=r"no results of the images of split 'test' .*Run validate again"):
        read_results(tmp_path / "images.npz", "test")
    (tmp_path / "images.npz").write_bytes(b"PK\x03\x04 torn")
    with pytest.raises(ArtifactError, match=r"Run validate again"):
        read_results(tmp_path / "images.npz", "val")


def test_several_limits_have_the_worst_standing() -> None:
    assert worst([Standing.within, Standing.unproven]) is Standing.unproven
    assert worst([Standing.beyond, Standing.unproven]) is Standing.beyond


def image(*objects: tuple[slice, slice], size: int = 10) -> NDArray[np.int64]:
    """Return one mask [1, size, size] whose objects are of class 1; boundaries are 1 pixel wide at 10 pixels."""
    mask_NHW = np.zeros((1, size, size), np.int64)
    for rows, columns in objects:
        mask_NHW[0, rows, columns] = 1
    return mask_NHW


def test_boundary_iou_of_a_rectangle_that_is_shifted_by_a_pixel() -> None:
    """Rings of 12 pixels share 6; the background's 36 at the image's border and 20 around the object share 46."""
    labels, predicted = image((slice(3, 7), slice(3, 7))), image((slice(3, 7), slice(4, 8)))
    results = compare_boundaries(predicted, labels, 2)
    assert results.labels_NC.tolist() == [[56, 12]]
    assert results.class_scores == pytest.approx((46 / 66, 6 / 18))
    assert results.score == pytest.approx(17 / 33)
    assert compare_with_labels(predicted, labels, 2, Task.segmentation).class_scores[1] == pytest.approx(0.6)


def test_every_pixel_of_a_thin_line_is_boundary() -> None:
    labels, half = image((slice(5, 6), slice(1, 9))), image((slice(5, 6), slice(1, 5)))
    beside = image((slice(6, 7), slice(1, 9)))
    assert compare_boundaries(half, labels, 2).class_scores[1] == pytest.approx(4 / 8)
    assert compare_boundaries(beside, labels, 2).class_scores[1] == 0.0


def test_what_is_predicted_on_ignored_pixels_moves_no_contour() -> None:
    """Of the 4x4 object one column is ignored: its ring counts, 12 pixels without 4 there and 2 that touch it alone.

    So do the 20 pixels of the background around it without the 6 that touch the ignored column alone.
    """
    predicted = image((slice(3, 7), slice(3, 7)))
    labels = predicted.copy()
    labels[0, 3:7, 6] = 255
    results = compare_boundaries(predicted, labels, 2)
    assert results.labels_NC.tolist() == results.hits_NC.tolist() == results.union_NC.tolist() == [[50, 8]]
    predicted[0, 4:6, 6] = 0
    assert compare_boundaries(predicted, labels, 2).score == 1.0


def test_an_absent_class_has_no_boundary_iou_and_one_that_no_label_has_is_not_averaged() -> None:
    labels = image((slice(3, 7), slice(3, 7)))
    predicted = labels.copy()
    predicted[0, 4, 4] = 2  # inside: the 4 inner pixels of class 1 are no longer inner ones
    results = compare_boundaries(predicted, labels, 4)
    assert results.class_scores == pytest.approx((1.0, 12 / 15, 0.0, None))
    assert results.score == pytest.approx((1.0 + 12 / 15) / 2)


def test_an_object_has_a_contour_where_it_touches_the_border_of_the_image() -> None:
    """4 of 10 rows have a ring of 24 pixels and 5 rows one of 26; they share row 0 and 6 pixels at the sides."""
    labels, predicted = image((slice(0, 4), slice(0, 10))), image((slice(0, 5), slice(0, 10)))
    results = compare_boundaries(predicted, labels, 2)
    assert results.labels_NC.tolist() == [[28, 24]]
    assert results.class_scores[1] == pytest.approx(16 / 34)


def test_a_thin_structure_that_is_lost_moves_boundary_iou_far_more_than_miou() -> None:
    """A 30x30 object and two lines of 20 pixels in 64x64, boundaries of 2 pixels.

    Object: the ring of the block, 900 - 26 * 26 = 224 pixels, and 40 of the lines. Background: 64 * 64 - 60 * 60 =
    496 at the image's border, 34 * 34 - 900 = 256 around the block and 2 * (24 * 5 - 20) = 200 around the lines.
    """
    block = slice(20, 50), slice(4, 34)
    lines = [(slice(20, 40), slice(column, column + 1)) for column in (42, 52)]
    labels, predicted = image(block, *lines, size=64), image(block, size=64)
    boundary = compare_boundaries(predicted, labels, 2)
    assert boundary.class_scores == pytest.approx((752 / 952, 224 / 264))
    loss = 1 - boundary.score
    loss_of_miou = 1 - mean_iou(predicted, labels, 2)
    assert loss_of_miou == pytest.approx(1 - (3156 / 3196 + 900 / 940) / 2)
    assert loss > 6 * loss_of_miou


def test_boundaries_of_batches_join_and_are_read_again(tmp_path: Path) -> None:
    labels = np.random.default_rng(0).integers(0, 3, (7, 2, 2)).repeat(8, axis=1).repeat(8, axis=2)
    labels[0, 0] = 255
    predicted = masks(1, 7, 0.05, labels % 3)
    whole = compare_boundaries(predicted, labels, 3)
    parts = [compare_boundaries(predicted[part], labels[part], 3) for part in (slice(0, 4), slice(4, 7))]
    joined = join_results(parts, np.arange(7))
    plain = compare_with_labels(predicted, labels, 3, Task.segmentation)
    write_results(tmp_path / "images.npz", {"val": plain, boundaries_of("val"): joined})
    read = read_results(tmp_path / "images.npz", boundaries_of("val"))
    for one, other in zip(read.counts, whole.counts, strict=True):
        np.testing.assert_array_equal(one, other)
    assert read_results(tmp_path / "images.npz", "val").score == pytest.approx(plain.score)
    assert read.score < plain.score


def test_values_that_are_not_finite_hit_nothing() -> None:
    expected = np.array([[1.0, 2.0], [3.0, 4.0]], np.float32)
    found = np.array([[1.0, np.nan], [3.0, np.inf]], np.float32)
    results = compare_with_labels(found, expected, 0, Task.values)
    assert results.score == 0 and compare_with_labels(expected, expected, 0, Task.values).score == 1
    found[1] = expected[1]
    assert compare_with_labels(found, expected, 0, Task.values).score == pytest.approx(25 / 30)
