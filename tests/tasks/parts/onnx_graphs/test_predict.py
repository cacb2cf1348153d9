"""Answers of graphs, held against others."""

import numpy as np
import pytest

from tasks.parts.onnx_graphs.predict import Agreement, agreement


def test_agreement_of_batches_is_that_of_all() -> None:
    random = np.random.default_rng(0)
    values = random.normal(size=(10, 4)).astype(np.float32)
    for expected, found in (
        (values, values + random.normal(size=values.shape).astype(np.float32) / 10),
        (values.argmax(axis=1), np.where(np.arange(10) < 3, 9, values.argmax(axis=1))),
    ):
        counted = Agreement()
        for start in (0, 4, 8):
            counted.add(found[start : start + 4], expected[start : start + 4])
        assert counted.share == pytest.approx(agreement(found, expected), rel=1e-12)
        assert 0.5 < counted.share < 1


def test_agreement_of_values_that_are_not_finite_is_none() -> None:
    values = np.ones((2, 3), np.float32)
    assert agreement(values * np.float32(np.nan), values) == 0
    assert agreement(np.zeros_like(values), np.zeros_like(values)) == 1
