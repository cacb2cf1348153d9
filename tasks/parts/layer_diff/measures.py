"""Measure how two versions of a tensor differ, accumulated image by image in bounded memory."""

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tasks.parts.layer_diff.table import Difference
from tasks.parts.onnx_graphs.signal_to_noise import sqnr_db

NUM_BINS = 64
MAX_VALUES = 2**14
"""Values per image that the histograms sample, evenly spread and at the same positions in both versions."""

_LARGEST = float(np.finfo(np.float32).max)


@dataclass
class Histograms:
    """Histograms of two versions of a tensor: equal bins over the range of the first image, one beyond each end."""

    low: float
    width: float
    expected: NDArray[np.int64] = field(default_factory=lambda: np.zeros(NUM_BINS + 2, np.int64))
    actual: NDArray[np.int64] = field(default_factory=lambda: np.zeros(NUM_BINS + 2, np.int64))

    def count(self, values: NDArray[Any]) -> NDArray[np.int64]:
        """Count some values of a tensor by bin; NaN counts as below."""
        step = (
            math.ceil(values.size / MAX_VALUES) | 1
        )  # odd, so that it does not stay in the same columns of a map
        bins = (values.ravel()[::step] - self.low) * (NUM_BINS / self.width)
        bins = np.fmin(np.fmax(bins, -1), NUM_BINS) + 1
        return np.bincount(bins.astype(np.intp), minlength=NUM_BINS + 2)

    @property
    def overlap(self) -> float:
        """Return the intersection of the two normalised histograms, 0..1."""
        p, q = self.expected / self.expected.sum(), self.actual / self.actual.sum()
        return float(np.minimum(p, q).sum())


@dataclass
class PairSums:
    """Running sums over images, for one tensor in two versions."""

    signal: float = 0.0
    noise: float = 0.0
    actual: float = 0.0
    max_abs: float = 0.0
    histograms: Histograms | None = None

    def add(self, expected: NDArray[Any], actual: NDArray[Any]) -> None:
        """Add one image."""
        a, b = expected.ravel().astype(np.float64), actual.ravel().astype(np.float64)
        if self.histograms is None:
            low, high = float(a.min()), float(a.max())
            self.histograms = Histograms(low, (high - low) or 1.0)
        self.histograms.expected += self.histograms.count(a)
        self.histograms.actual += self.histograms.count(b)
        # einsum instead of @: BLAS threads would compete with those of the runtimes.
        self.signal += float(np.einsum("i,i", a, a))
        self.actual += float(np.einsum("i,i", b, b))
        a -= b
        self.noise += float(np.einsum("i,i", a, a))
        largest = max(float(a.max()), -float(a.min()))
        self.max_abs = max(self.max_abs, largest if math.isfinite(largest) else _LARGEST)

    @property
    def difference(self) -> Difference:
        """Compute the measures from the sums."""
        overlap = self.histograms.overlap if self.histograms else 1.0
        return Difference(sqnr_db(self.signal, self.noise), self._cosine, self.max_abs, overlap)

    @property
    def _cosine(self) -> float:
        norm = math.sqrt(self.signal * self.actual)
        if not math.isfinite(norm):
            return 0.0
        product = (self.signal + self.actual - self.noise) / 2
        return product / norm if norm > 0 else float(self.noise == 0)
