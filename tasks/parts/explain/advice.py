"""One sentence about two engines: what the second one brings, and what keeps it from bringing more."""

from tasks.parts.explain.causes import CauseKind, find_causes
from tasks.parts.explain.engine_view import INT8, EngineView
from tasks.parts.roofs.roofs import Bound

_WORTH_A_WORD = 0.03
"""A share of the latency below this is not mentioned."""
_WORDS = {
    CauseKind.EMULATED_PRECISION: "the CPU does not compute in its precision",
    CauseKind.S8_ACTIVATIONS: "its activations are int8 instead of uint8",
    CauseKind.WRONG_ISA: "the CPU has no dot products of 8-bit integers",
    CauseKind.WEIGHT_QUANTIZED_AT_RUNTIME: "weights are converted in every inference",
    CauseKind.FUSION_LOST: "layers lost their fusion",
}
"""Causes that are named whatever time they take, because a switch or another target removes them."""


def advise(before: EngineView, after: EngineView, speedup: float) -> str:
    """Return the sentence; `speedup` is measured, first engine's time over the second one's."""
    first = f"{after.name} {_verb(speedup)} {before.name}"
    reasons = [*_reasons_before(before), *_reasons_after(before, after)]
    return f"{first}{_promise(before, after)}{': ' + ', '.join(reasons) if reasons else ''}."


def _verb(speedup: float) -> str:
    return f"brings {speedup:.2f}x over" if speedup >= 1 else f"is {1 / speedup:.2f}x slower than"


def _promise(before: EngineView, after: EngineView) -> str:
    """Return what the arithmetic alone would bring, from the measured roofs of this machine."""
    if not after.manifest.is_quantized or before.manifest.is_quantized:
        return ""
    lowered = after.roofs.peak(INT8)
    peak = before.roofs.peak(before.manifest.target.precision.value)
    if lowered is None or peak is None or not (lowered.is_possible and peak.is_possible):
        return ""
    factor = lowered.macs_per_s.value / peak.macs_per_s.value
    return f", where the arithmetic of this machine is {factor:.1f}x as fast in INT8"


def _reasons_before(before: EngineView) -> list[str]:
    """Return the shares of the first engine's time that a lower precision cannot make faster."""
    shares = before.share_by_bound
    words = {Bound.overhead: "overhead", Bound.memory: "bound by memory"}
    return [
        f"{shares[bound]:.0%} of the time of {before.name} was {word}"
        for bound, word in words.items()
        if shares.get(bound, 0.0) >= _WORTH_A_WORD
    ]


def _reasons_after(before: EngineView, after: EngineView) -> list[str]:
    """Return what the second engine spends on anything but the work itself."""
    reasons = []
    num_conversions = sum(layer.is_conversion for layer in after.layers)
    more_ms = after.conversions_ms - before.conversions_ms
    if more_ms / after.latency_ms >= _WORTH_A_WORD:
        reasons.append(f"{more_ms / after.latency_ms:.0%} went into {num_conversions} conversions")
    in_float = sorted(after.left_in_float, key=lambda layer: -after.times_ms[layer.name])
    float_ms = sum(after.times_ms[layer.name] for layer in in_float)
    if not before.manifest.is_quantized and float_ms / after.latency_ms >= _WORTH_A_WORD:
        operators = list(dict.fromkeys(" ".join(layer.operators) or layer.kind for layer in in_float))
        named = ", ".join(operators[:3]) + (", ..." if len(operators) > 3 else "")
        reasons.append(f"{float_ms / after.latency_ms:.0%} stayed in float ({named})")
    new = {cause.kind for cause in find_causes(after, before)} - {cause.kind for cause in find_causes(before)}
    return [*reasons, *(words for kind, words in _WORDS.items() if kind in new)]
