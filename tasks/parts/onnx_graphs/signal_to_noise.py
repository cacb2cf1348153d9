"""How far two versions of a tensor lie apart."""

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from numpy.typing import NDArray

_SQNR_CEILING_DB = 200.0

MAX_AGREEMENT_DB = 150.0
"""Given for logits that are equal bit by bit."""

MAX_SQNR_DB = 120.0
"""Given for tensors that are equal to the last bit of float32."""


@dataclass(frozen=True)
class Difference:
    """How far the logits of two programs lie apart on one batch."""

    batch_size: int
    """Images."""
    max_abs: float
    """Largest absolute difference of a logit."""
    sqnr_db: float
    """Signal to noise power ratio; 200 stands for "equal"."""


def difference(reference: "NDArray[Any]", found: "NDArray[Any]") -> Difference:
    """Compare the logits of one batch."""
    import numpy as np

    signal = reference.astype(np.float64)
    noise = found.astype(np.float64) - signal
    noise_power, signal_power = float((noise**2).mean()), float((signal**2).mean())
    ratio = signal_power / noise_power if noise_power > 0 else np.inf
    sqnr_db = 10 * np.log10(ratio) if ratio > 0 else -_SQNR_CEILING_DB
    return Difference(
        batch_size=len(reference),
        max_abs=float(np.abs(noise).max()),
        sqnr_db=float(np.clip(sqnr_db, -_SQNR_CEILING_DB, _SQNR_CEILING_DB)),
    )


def signal_to_noise_db(expected: "NDArray[Any]", found: "NDArray[Any]") -> float:
    """Return 10 log10(signal power / noise power), at most MAX_AGREEMENT_DB."""
    import numpy as np

    signal = float(np.square(expected, dtype=np.float64).sum())
    noise = float(np.square(found.astype(np.float64) - expected).sum())
    if noise == 0:
        return MAX_AGREEMENT_DB
    if signal == 0:
        return -MAX_AGREEMENT_DB
    return min(MAX_AGREEMENT_DB, 10 * float(np.log10(signal / noise)))


def sqnr_db(signal: float, noise: float) -> float:
    """Return 10 log10(signal / noise) within +-MAX_SQNR_DB; the worst for noise that is not finite."""
    if noise == 0:
        return MAX_SQNR_DB
    if signal == 0 or not math.isfinite(noise):
        return -MAX_SQNR_DB
    return max(-MAX_SQNR_DB, min(MAX_SQNR_DB, 10 * math.log10(signal / noise)))
