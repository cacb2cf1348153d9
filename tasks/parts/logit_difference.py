"""How far the logits of two programs lie apart."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from numpy.typing import NDArray

_SQNR_CEILING_DB = 200.0


@dataclass(frozen=True)
class Difference:
    """How far the logits of two programs lie apart on one batch."""

    batch_size: int
    """Images."""
    max_abs: float
    """Largest absolute difference of a logit."""
    sqnr_db: float
    """Signal to noise power ratio; 200 stands for "equal"."""


def difference(reference: NDArray[Any], found: NDArray[Any]) -> Difference:
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
