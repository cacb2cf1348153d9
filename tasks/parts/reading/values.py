"""Bring the values of an image to 8 bits. H height, W width, C channels."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .rules import Rules, UnscaledValues, WrongChannels

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

_AS_THEY_ARE = "Give images like those: values of 8 bits are never scaled, not by --value-range either."


def scale_values(values: NDArray[Any], rules: Rules, place: object) -> NDArray[np.uint8]:
    """Return values as 8 bits: as they are, or `value_range` as 0..255, in float32 and rounded half to even.

    Raises UnscaledValues for more than 8 bits without a range, and for 8 bits where the rules are of other types.
    """
    import numpy as np

    if values.dtype.kind not in "uif":
        raise WrongChannels(f"{place}: holds values of type {values.dtype}, expected numbers. Convert them.")
    if values.dtype == np.uint8:
        if rules.types is not None and "uint8" not in rules.types:
            expected = f"expected {' or '.join(rules.types)} as in training"
            raise _unscaled(values, expected, _AS_THEY_ARE, place)
        return values
    if rules.value_range is None:
        expected = "expected uint8, or the lowest and the highest value"
        raise _unscaled(values, expected, rules.advice.value_range, place)
    low, high = rules.value_range
    scaled = values.astype(np.float32)  # a copy, which the next lines change in place
    scaled -= np.float32(low)
    scaled *= np.float32(255 / (high - low))
    np.nan_to_num(scaled, copy=False, nan=0.0, posinf=255.0, neginf=0.0)
    eight_bits: NDArray[np.uint8] = np.rint(scaled.clip(0, 255, out=scaled), out=scaled).astype(np.uint8)
    return eight_bits


def _unscaled(values: NDArray[Any], expected: str, advice: str, place: object) -> UnscaledValues:
    import numpy as np

    low, high = (float(bound(values)) if values.size else 0.0 for bound in (np.nanmin, np.nanmax))
    name = values.dtype.name
    return UnscaledValues(
        f"{place}: holds values of type {name} from {low:g} to {high:g}, {expected}. {advice}",
        dtype=name,
        low=low,
        high=high,
    )
