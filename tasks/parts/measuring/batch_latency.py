"""Compute the latency of an engine at one batch size from rounds of bursts, with intervals and stability."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Annotated

from tasks.core.bounds import AtLeast, MoreThan
from tasks.parts.measuring.intervals import MIN_SAMPLES_OF_P99, Interval, percentile_intervals

if TYPE_CHECKING:
    from tasks.parts.engines.runner import DeviceTimes

_PERCENTS = (50, 90, 95, 99)
_EQUAL_WINDOWS = 3

Bursts = Sequence[Sequence[float]]
"""Latencies in ms of one engine, by round and call."""


@dataclass(frozen=True)
class Windows:
    """Groups of rounds: a measurement is stable if the medians of the last three groups agree."""

    num_rounds: Annotated[int, AtLeast(1)]
    """Rounds per window."""
    tolerance: Annotated[float, MoreThan(0)]
    """How much the medians may differ; 0.05 is 5 %. Lower: stops later, or only at the budget."""

    def count(self, bursts_ms: Bursts) -> int:
        """Return the number of full windows."""
        return len(bursts_ms) // self.num_rounds

    def are_stable(self, bursts_ms: Bursts) -> bool:
        """Return whether the last three full windows agree."""
        first = self.count(bursts_ms) - _EQUAL_WINDOWS
        if first < 0:
            return False
        starts = [number * self.num_rounds for number in range(first, first + _EQUAL_WINDOWS)]
        medians = [statistics.median(chain(*bursts_ms[start : start + self.num_rounds])) for start in starts]
        return max(medians) <= min(medians) * (1 + self.tolerance)


@dataclass(frozen=True)
class BatchLatency:
    """Latency at one batch size, timed on the host except for the fields named device."""

    batch: int
    latency_ms_p50: float
    latency_ms_p90: float
    latency_ms_p95: float
    latency_ms_p99: float | None
    """None for fewer than 1,000 samples: it would rest on fewer than ten of them."""
    latency_ms_mean: float
    latency_ms_intervals: dict[str, Interval]
    """95 % intervals of p50, p90, p95 and, if it is known, p99, by batches of rounds."""
    device_ms_p50: float | None
    """By CUDA events, copies to and from the GPU included; None on a CPU."""
    device_compute_ms_p50: float | None
    """By CUDA events, kernels alone."""
    throughput_per_s: float
    """Images per second, one inference after the other."""
    is_stable: bool
    """Whether the last three windows agreed."""
    num_windows: int
    num_rounds: int
    num_samples: int
    """Timed inferences."""


def summarise(
    bursts_ms: Bursts, *, batch: int, windows: Windows, device: "DeviceTimes | None"
) -> BatchLatency:
    """Turn the bursts of one engine into percentiles with intervals."""
    import numpy as np

    latencies_ms = np.concatenate(bursts_ms)
    percents = _PERCENTS if len(latencies_ms) >= MIN_SAMPLES_OF_P99 else _PERCENTS[:-1]
    values = dict(zip(percents, np.percentile(latencies_ms, percents).tolist(), strict=True))
    intervals = percentile_intervals(bursts_ms, percents)
    mean = float(latencies_ms.mean())
    return BatchLatency(
        batch=batch,
        latency_ms_p50=values[50],
        latency_ms_p90=values[90],
        latency_ms_p95=values[95],
        latency_ms_p99=values.get(99),
        latency_ms_mean=mean,
        latency_ms_intervals={
            f"p{percent}": interval for percent, interval in zip(percents, intervals, strict=True)
        },
        device_ms_p50=float(np.median(device.total_ms)) if device else None,
        device_compute_ms_p50=float(np.median(device.compute_ms)) if device else None,
        throughput_per_s=1000 * batch / mean,
        is_stable=windows.are_stable(bursts_ms),
        num_windows=windows.count(bursts_ms),
        num_rounds=len(bursts_ms),
        num_samples=len(latencies_ms),
    )
