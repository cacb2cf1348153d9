"""Bursts of known latencies: what is said about them follows from the numbers."""

from collections.abc import Sequence

import numpy as np
import pytest

from tasks.parts.engines.runner import DeviceTimes
from tasks.parts.measuring.batch_latency import BatchLatency, Windows, summarise

WINDOWS = Windows(num_rounds=2, tolerance=0.05)


def summary(
    bursts_ms: Sequence[Sequence[float]], *, batch: int = 1, device: DeviceTimes | None = None
) -> BatchLatency:
    return summarise(bursts_ms, batch=batch, windows=WINDOWS, device=device)


def test_percentiles_are_those_of_all_calls() -> None:
    result = summary([[1.0, 2.0, 3.0, 4.0], [5.0, 6.0, 7.0, 8.0]] * 3, batch=2)
    values = np.repeat(np.arange(1.0, 9.0), 3)
    found = [result.latency_ms_p50, result.latency_ms_p90, result.latency_ms_p95]
    assert found == pytest.approx(np.percentile(values, [50, 90, 95]))
    assert result.latency_ms_mean == pytest.approx(4.5)
    assert result.throughput_per_s == pytest.approx(2 * 1000 / 4.5)
    assert result.latency_ms_intervals["p50"].low < 4.5 < result.latency_ms_intervals["p50"].high
    assert (result.num_rounds, result.num_samples, result.num_windows) == (6, 24, 3)


def test_p99_needs_a_thousand_samples() -> None:
    calls = [float(number) for number in range(1, 167)]
    few, enough = summary([calls] * 6), summary([calls] * 7)  # 996 and 1,162 samples
    assert few.latency_ms_p99 is None and "p99" not in few.latency_ms_intervals
    assert enough.latency_ms_p99 == pytest.approx(np.percentile(calls * 7, 99))
    assert "p99" in enough.latency_ms_intervals


def test_the_clock_of_the_gpu_stands_beside_that_of_the_host() -> None:
    device = DeviceTimes(total_ms=[0.5, 0.6, 0.7], compute_ms=[0.3, 0.2, 0.4])
    result = summary([[1.0]] * 3, device=device)
    assert (result.device_ms_p50, result.device_compute_ms_p50) == (0.6, 0.3)
    assert summary([[1.0]] * 3).device_ms_p50 is None


@pytest.mark.parametrize(
    ("engine_ms", "is_stable"),
    [
        ([1, 1, 1, 1, 1, 1], True),
        ([9, 9, 1, 1, 1.04, 1.04, 1.02, 1.02], True),  # only the last three count
        ([1, 1, 1.03, 1.03, 1.06, 1.06], False),
        ([1, 1, 1, 1, 1], False),  # two windows and a half
    ],
)
def test_stable_means_that_three_windows_agree(engine_ms: list[float], is_stable: bool) -> None:
    assert WINDOWS.are_stable([[value] * 3 for value in engine_ms]) is is_stable
