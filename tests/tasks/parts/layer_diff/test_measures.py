import math

import numpy as np
import pytest

from tasks.parts.layer_diff.measures import PairSums
from tasks.parts.layer_diff.table import Difference
from tasks.parts.onnx_graphs.signal_to_noise import MAX_SQNR_DB


def measure(*pairs):
    sums = PairSums()
    for expected, found in pairs:
        sums.add(np.array([expected], np.float32), np.array([found], np.float32))
    return sums.difference


def test_measures_follow_their_formulas():
    found = measure(([3.0, 4.0], [3.5, 4.0]))
    assert found.sqnr_db == pytest.approx(20.0)  # 10 log10(25 / 0.25)
    assert found.cosine == pytest.approx((3 * 3.5 + 16) / (5 * math.hypot(3.5, 4)))
    assert found.max_abs == 0.5
    assert measure(([0, 0], [0, 0])) == Difference(MAX_SQNR_DB, 1.0, 0.0, 1.0)


def test_images_add_up():
    found = measure(([3.0], [3.5]), ([4.0], [3.0]))
    assert found.sqnr_db == pytest.approx(10 * math.log10(25 / 1.25))
    assert found.cosine == pytest.approx((3 * 3.5 + 12) / (5 * math.hypot(3.5, 3)))
    assert found.max_abs == 1.0


def test_histogram_overlap_is_the_intersection_of_the_distributions():
    assert measure(([0, 0, 1, 1], [0, 1, 1, 1])).histogram_overlap == pytest.approx(0.75)
    assert measure(([0, 1, 2, 3], [3, 2, 1, 0])).histogram_overlap == 1.0  # says nothing of places
    assert measure(([0, 0, 0, 0], [0.3, 0.3, 0.3, 0.3])).histogram_overlap == 0.0
    assert measure(([0, 1], [0, 1]), ([0, 1], [-7, 9])).histogram_overlap == pytest.approx(0.5 + 0.25)


def test_maps_larger_than_the_sample_are_judged_at_the_same_places():
    random = np.random.default_rng(0)
    values = random.normal(size=(1, 8, 128, 128)).astype(np.float32)
    sums = PairSums()
    sums.add(values, values)
    assert sums.difference.histogram_overlap == 1.0
    sums.add(values, values + 8)
    assert sums.difference.histogram_overlap == pytest.approx(0.5, abs=0.01)


def test_infinite_and_undefined_outputs_are_the_worst_ones():
    for value in (np.inf, np.nan):
        found = measure(([3.0, 4.0], [value, 4.0]))
        assert (found.sqnr_db, found.cosine) == (-MAX_SQNR_DB, 0.0)
        assert found.max_abs == np.finfo(np.float32).max
        assert found.histogram_overlap == pytest.approx(0.5)
