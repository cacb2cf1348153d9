"""Limits of single classes beside that of the whole score."""

from typing import Any

import numpy as np
import pytest

from tasks.core.errors import ConfigError
from tasks.parts.data.accuracy import Standing
from tasks.parts.data.class_limits import ClassLimits, check_classes, class_warnings
from tasks.parts.data.comparison import (
    ImageResults,
    compare_with_labels,
    join_results,
    read_results,
    results_of_scores,
    score_loss,
    write_results,
)
from tasks.parts.data.input_card import Task

NUM_IMAGES, PIXELS = 60, 10_000
NAMES = tuple(f"class{number}" for number in range(19))
NO_LIMITS: dict[str, float] = {}


def masks(ious_C: Any, *, spread: float = 0.0, seed: int = 0, num_images: int = NUM_IMAGES) -> ImageResults:
    """Return results whose classes have these IoUs, up to a spread from image to image."""
    noise_NC = np.random.default_rng(seed).normal(0, 1, (num_images, len(ious_C)))
    hits_NC = np.rint(PIXELS * np.clip(np.asarray(ious_C) + spread * noise_NC, 0, 1)).astype(np.int64)
    total_NC = np.full_like(hits_NC, PIXELS)
    return ImageResults(hits_NC, total_NC, total_NC, np.arange(num_images))


def check(engine: ImageResults, reference: ImageResults, limits: ClassLimits, names: Any = NAMES) -> Any:
    return check_classes(engine, reference, names, limits, "distilled-cpu_torch")


def test_a_class_that_loses_a_quarter_is_named_though_the_mean_hardly_moves_c2() -> None:
    reference = masks([0.8] * 19)
    engine = masks([0.6, *[0.8] * 18])
    assert score_loss(engine, reference).rel_loss == pytest.approx(0.25 / 19)
    assert score_loss(engine, reference).standing(0.02) is Standing.within, "the gate of the mean holds"
    first, *others = check(engine, reference, ClassLimits({"*": 0.1}, {}))
    assert first.standing is Standing.beyond
    assert {other.standing for other in others} == {Standing.within} and len(others) == 18
    assert str(first) == (
        "IoU of class0 0.6000, 25.00 % below distilled-cpu_torch (0.8000, 99.74 %: -25.00 to -25.00 %), "
        "allowed are 10 % (class_limits.class0)"
    )
    loose, *_ = check(engine, reference, ClassLimits({"*": 0.1, "class0": 0.3}, {}))
    assert (loose.limit, loose.standing) == (0.3, Standing.within), "a class of its own leaves the others"


def test_the_interval_of_a_floor_stays_between_0_and_1_c2() -> None:
    alone = masks([0.8], num_images=1)
    [floor] = check(alone, alone, ClassLimits({}, {"*": 0.5}), NAMES[:1])
    assert floor.standing is Standing.unproven
    assert str(floor) == "IoU of class0 0.8000 (95 %: 0.0000 to 1.0000), wanted are 0.5 (class_floors.class0)"


def test_intervals_of_several_classes_hold_together_c2() -> None:
    """Every class loses exactly what is allowed: at 95 % each, 1 - 0.975 ** 8 = 18 % of draws would break a gate."""
    generator, names, broken, num_draws = np.random.default_rng(0), NAMES[:8], 0, 400
    for _ in range(num_draws):
        lost_NC = generator.normal(0.08, 0.05, (40, 8))
        total_NC = np.full((40, 8), PIXELS)
        reference = ImageResults(np.full((40, 8), 8000), total_NC, total_NC, np.arange(40))
        hits_NC = np.rint(PIXELS * (0.8 - lost_NC)).astype(np.int64)
        engine = ImageResults(hits_NC, total_NC, total_NC, np.arange(40))
        checks = check(engine, reference, ClassLimits({"*": 0.1}, {}), names)
        broken += any(one.standing is Standing.beyond for one in checks)
    assert broken / num_draws < 0.025 + 3 * np.sqrt(0.025 * 0.975 / num_draws)


def test_a_floor_is_held_by_the_interval_of_the_class_itself_c2() -> None:
    engine = masks([0.52, 0.9], spread=0.1)
    names, limits = NAMES[:2], ClassLimits({}, {"class0": 0.5, "class1": 0.5})
    low, high = check(engine, engine, limits, names)
    assert (low.standing, high.standing) == (Standing.unproven, Standing.within)
    assert low.groups_needed is not None and low.groups_needed > NUM_IMAGES
    assert "wanted are 0.5 (class_floors.class0)" in str(low)
    [dead] = check(masks([0.0, 0.9]), engine, ClassLimits({}, {"class0": 0.1}), names)
    assert dead.standing is Standing.beyond


def test_a_class_that_the_reference_does_not_find_has_nothing_to_lose_c2() -> None:
    dead = masks([0.0, 0.9])
    [found] = check(dead, masks([0.0, 0.8]), ClassLimits({"class0": 0.1}, {}), NAMES[:2])
    assert found.standing is Standing.within


def test_a_class_without_labels_is_unknown_where_it_is_named_and_left_out_of_the_rest_c2() -> None:
    results = masks([0.8, 0.8])
    labels_NC = results.labels_NC * [1, 0]
    results = ImageResults(results.hits_NC * [1, 0], results.union_NC, labels_NC, results.groups_N)
    [rest] = check(results, results, ClassLimits({"*": 0.1}, {}), NAMES[:2])
    assert rest.key == "class_limits.class0"
    [named] = check(results, results, ClassLimits({"class1": 0.1}, {}), NAMES[:2])
    assert named.standing is Standing.unproven
    assert str(named) == "IoU of class1 unknown: the class is in no label (class_limits.class1)"


def test_a_rare_class_is_judged_by_the_images_that_show_it_c2() -> None:
    """Two of sixty images show it: they prove little, however many others there are."""
    results = masks([0.8, 0.8])
    shows_N1 = (np.arange(NUM_IMAGES) < 2)[:, None]
    kept_NC = np.concatenate([np.ones((NUM_IMAGES, 1), bool), shows_N1], axis=1)
    reference = ImageResults(*(counts * kept_NC for counts in results.counts), results.groups_N)
    hits_NC = reference.hits_NC.copy()
    hits_NC[0, 1] -= 800
    engine = ImageResults(hits_NC, reference.union_NC, reference.labels_NC, reference.groups_N)
    [rare] = check(engine, reference, ClassLimits({"class1": 0.1}, {}), NAMES[:2])
    assert rare.loss.rel_loss == pytest.approx(0.05) and rare.standing is Standing.unproven


def test_classes_of_images_are_held_by_their_recall_c2(tmp_path: Any) -> None:
    labels_N = np.repeat(np.arange(3), 100).astype(np.uint16)
    right, wrong = labels_N.copy(), labels_N.copy()
    wrong[:60] = 1  # 60 of the 100 images of the first class
    reference, engine = (
        compare_with_labels(answers, labels_N, 3, Task.classification) for answers in (right, wrong)
    )
    first, second, third = check(engine, reference, ClassLimits({"*": 0.2}, {}), NAMES[:3])
    assert first.standing is Standing.beyond and first.subject == "recall of class0"
    assert first.loss.rel_loss == pytest.approx(0.6)
    assert {second.standing, third.standing} == {Standing.within}
    write_results(tmp_path / "images.npz", {"val": engine})
    read = read_results(tmp_path / "images.npz", "val")
    assert check(read, reference, ClassLimits({"*": 0.2}, {}), NAMES[:3])[0] == first
    assert class_warnings(engine, reference, NAMES[:3]) == [
        "recall of class0 is 0.4000, 60 % below the float reference (1.0000)"
    ]


def test_beside_a_metric_of_the_users_own_classes_keep_their_iou_c2(tmp_path: Any) -> None:
    labels_NHW = np.tile(np.array([[0, 0], [1, 1]]), (12, 1, 1))
    wrong_NHW = np.zeros_like(labels_NHW)

    def own(answers: Any) -> ImageResults:
        by_class = compare_with_labels(answers, labels_NHW, 2, Task.segmentation)
        scores = results_of_scores(np.full(12, 0.9))
        results = ImageResults(*scores.counts, scores.groups_N, by_class=by_class)
        return join_results([results], np.arange(12))

    write_results(tmp_path / "images.npz", {"val": own(wrong_NHW)})
    engine = read_results(tmp_path / "images.npz", "val")
    assert engine.score == pytest.approx(0.9)
    [lost] = check(engine, own(labels_NHW), ClassLimits({"class1": 0.1}, {}), NAMES[:2])
    assert lost.standing is Standing.beyond and lost.score == 0


def test_without_any_key_dead_and_dying_classes_are_warned_of_c2() -> None:
    reference = masks([0.8, 0.8, 0.8, 0.0], spread=0.05)
    engine = masks([0.0, 0.4, 0.7, 0.0], spread=0.05, seed=1)
    engine = ImageResults(engine.hits_NC * [0, 1, 1, 0], engine.union_NC, engine.labels_NC, engine.groups_N)
    reference = ImageResults(
        reference.hits_NC * [1, 1, 1, 0], reference.union_NC, reference.labels_NC, reference.groups_N
    )
    dead, dying, never = class_warnings(engine, reference, NAMES[:4])
    assert dead == "IoU of class0 is 0"
    assert dying.startswith("IoU of class1 is 0.39") and "below the float reference (0.8" in dying
    assert never == "IoU of class3 is 0, as in the float reference"
    few = masks([0.8], spread=0.4, num_images=4), masks([0.45], spread=0.4, num_images=4, seed=3)
    assert 1 - few[1].score / few[0].score > 1 / 3 and class_warnings(few[1], few[0], NAMES[:1]) == []


@pytest.mark.parametrize(
    ("classes", "message"),
    [
        (("background", "nucleus"), r"names nucleos, expected some of background, nucleus\. '\*' stands for"),
        ((), r"select_engine\.class_limits names nucleos, but the model has no classes"),
    ],
)
def test_limits_of_unknown_classes_are_refused_with_the_known_ones_c2(classes: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ClassLimits({"nucleos": 0.1}, {}).check_names(classes, "select_engine")
