"""The difference between two versions of a tensor."""

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from numpy.typing import NDArray

MAX_SQNR_DB = 200.0
"""The ratio of two equal tensors; above any ratio that float32 tensors that differ can have."""

_NEAR_ZERO = 1e-6
"""Values that are no larger are what rounding leaves of zeros."""


@dataclass(frozen=True)
class Difference:
    """The difference between the logits of two programs on one batch."""

    batch_size: int
    """Number of images in the batch."""
    max_abs: float
    """Largest absolute difference of a logit."""
    sqnr_db: float
    """Signal-to-noise ratio in dB; 200 means that the logits are equal."""


def difference(expected: "NDArray[Any]", found: "NDArray[Any]", least_power: float = 0.0) -> Difference:
    """Compare the logits of one batch; the signal counts with this mean square at least."""
    import numpy as np

    signal = expected.astype(np.float64)
    noise = found.astype(np.float64) - signal
    return Difference(
        batch_size=len(expected),
        max_abs=float(np.abs(noise).max()),
        sqnr_db=sqnr_db(max(least_power, float((signal**2).mean())), float((noise**2).mean())),
    )


def agreement_db(expected: "NDArray[Any]", found: "NDArray[Any]") -> float:
    """Return the signal-to-noise ratio of two tensors of one shape in dB; tensors near zero are equal."""
    import numpy as np

    if max(np.abs(expected).max(initial=0), np.abs(found).max(initial=0)) <= _NEAR_ZERO:
        return MAX_SQNR_DB
    return difference(expected, found).sqnr_db


def sqnr_db(signal: float, noise: float) -> float:
    """Return 10 log10(signal / noise) of two energies, or powers, within +-MAX_SQNR_DB.

    Noise that is not finite gives the worst ratio.
    """
    if noise == 0:
        return MAX_SQNR_DB
    if signal == 0 or not math.isfinite(noise):
        return -MAX_SQNR_DB
    return max(-MAX_SQNR_DB, min(MAX_SQNR_DB, 10 * math.log10(signal / noise)))
