"""Raise the rate of open arrivals until the p99 breaks its bound, and find the largest rate that holds: the knee."""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from tasks.parts.measuring.intervals import MIN_SAMPLES_OF_P99
from tasks.parts.measuring.load_report import Arrivals, ArrivalStep, Setting

if TYPE_CHECKING:
    from tasks.parts.measuring.arrivals import Served

_SURELY_ENOUGH = 1.12
"""A Poisson process that is expected to have 1,120 arrivals has fewer than 1,000 once in 5,000 times."""
_KEEPS_UP = 0.97
"""Answers over arrivals, by rate, below which a queue has grown."""

Serve = Callable[[float, float, int], "Served"]
"""Serves arrivals at a rate per second, for so many seconds, drawn with a seed."""


def sweep(
    serve: Serve,
    setting: Setting,
    *,
    capacity_per_s: float,
    max_p99_ms: float | None,
    unloaded_factor: float,
    shares: Sequence[float],
    num_refinements: int,
    min_seconds: float,
    max_seconds: float,
    seed: int,
) -> Arrivals:
    """Serve arrivals at rising `shares` of the capacity until one does not hold, then between the last two.

    Each step has at least 1,000 arrivals: lower rates, which would take more than `max_seconds` for them, are left
    out. Without a bound it is `unloaded_factor` times the p99 at the lowest rate. The knee is tried again with other
    arrivals, because the largest of several noisy rates is one of the lucky ones.
    """
    numbers = itertools.count(seed)

    def step(rate_per_s: float, bound_ms: float | None) -> ArrivalStep:
        seconds = max(min_seconds, _SURELY_ENOUGH * MIN_SAMPLES_OF_P99 / rate_per_s)
        return summarise_step(serve(rate_per_s, seconds, next(numbers)), rate_per_s, seconds, bound_ms)

    rates = sorted(share * capacity_per_s for share in shares)
    fitting = [rate for rate in rates if _SURELY_ENOUGH * MIN_SAMPLES_OF_P99 / rate <= max_seconds]
    if not fitting:
        note = (
            f"at {rates[-1]:.3g} images per second, 1,000 arrivals take more than {max_seconds:g} s: no p99. Raise "
            "max_arrivals_s"
        )
        return Arrivals(setting, capacity_per_s, max_p99_ms, (), None, note)
    steps = [step(fitting[0], max_p99_ms)]
    bound_ms = max_p99_ms
    if bound_ms is None and steps[0].latency_ms_p99 is not None:
        bound_ms = unloaded_factor * steps[0].latency_ms_p99
        steps[0] = _judged(steps[0], bound_ms)
    for rate in fitting[1:]:
        if not steps[-1].is_held:
            break
        steps.append(step(rate, bound_ms))
    held = [each.rate_per_s for each in steps if each.is_held]
    broken = [each.rate_per_s for each in steps if not each.is_held]
    for _ in range(num_refinements if held and broken else 0):
        found = step((held[-1] + broken[-1]) / 2, bound_ms)
        steps.append(found)
        (held if found.is_held else broken).append(found.rate_per_s)
    knee = None
    for rate in reversed(held):
        steps.append(step(rate, bound_ms))
        if steps[-1].is_held:
            knee = rate
            break
    note = "" if broken or knee is None else "the highest rate held as well: the knee is above it"
    if knee is None:
        note = f"the lowest rate, {fitting[0]:.3g} images per second, does not hold"
    return Arrivals(setting, capacity_per_s, bound_ms, tuple(steps), knee, note)


def summarise_step(
    served: "Served", rate_per_s: float, seconds: float, bound_ms: float | None
) -> ArrivalStep:
    """Return the percentiles of the arrivals at a rate, and whether it holds."""
    import numpy as np

    latencies_ms = np.array(served.latencies_ns) / 1e6
    count = len(latencies_ms)
    has_p99 = count >= MIN_SAMPLES_OF_P99
    found = ArrivalStep(
        rate_per_s=rate_per_s,
        arrived_per_s=count / seconds,
        achieved_per_s=served.achieved_per_s,
        latency_ms_p50=float(np.median(latencies_ms)),
        latency_ms_p99=float(np.percentile(latencies_ms, 99)) if has_p99 else None,
        service_ms_p99=float(np.percentile(served.services_ns, 99)) / 1e6,
        late_ms_p99=float(np.percentile(served.late_ns, 99)) / 1e6,
        num_arrivals=count,
        is_held=False,
    )
    return _judged(found, bound_ms)


def _judged(step: ArrivalStep, bound_ms: float | None) -> ArrivalStep:
    p99_ms = step.latency_ms_p99
    is_within = p99_ms is not None and (bound_ms is None or p99_ms <= bound_ms)
    return replace(step, is_held=is_within and step.achieved_per_s >= _KEEPS_UP * step.arrived_per_s)
