"""Rounds of known latencies: what is said about them follows from the numbers."""

from collections.abc import Sequence

import numpy as np
import pytest

from tasks.parts.engines.runner import DeviceTimes
from tasks.parts.measuring.batch_latency import BatchLatency, Round, Windows, summarise

WINDOWS = Windows(num_rounds=2, tolerance=0.05)


def rounds_of(engine_ms: Sequence[float], control_ms: Sequence[float]) -> list[Round]:
    return [Round([e] * 3, [c] * 3) for e, c in zip(engine_ms, control_ms, strict=True)]


def summary(rounds: list[Round], *, batch: int = 1, device: DeviceTimes | None = None) -> BatchLatency:
    return summarise(rounds, batch=batch, windows=WINDOWS, device=device, num_repeats=0)


def test_slow_phases_of_the_machine_cancel_in_the_spread() -> None:
    slowness = np.array([1.0, 1.4, 1.0, 3.0, 1.1, 0.9])
    result = summary(rounds_of(slowness, slowness))
    assert result.aa_ratio_spread == pytest.approx(0)
    assert result.num_samples == 36
    assert not result.is_stable and result.num_windows == 3


def test_difference_between_equal_processes_is_the_spread() -> None:
    ones = np.ones(8)
    result = summary(rounds_of(1.1 * ones, ones), batch=2)
    assert result.aa_ratio_spread == pytest.approx(0.1)
    assert result.throughput_per_s == pytest.approx(2 * 1000 / 1.05)


def test_percentiles_are_those_of_both_processes_of_the_engine() -> None:
    rounds = [Round([1.0, 2.0], [3.0, 4.0]), Round([5.0, 6.0], [7.0, 8.0])] * 3
    result = summary(rounds)
    values = np.repeat(np.arange(1.0, 9.0), 3)
    found = [result.latency_ms_p50, result.latency_ms_p90, result.latency_ms_p95]
    assert found == pytest.approx(np.percentile(values, [50, 90, 95]))
    assert result.latency_ms_mean == pytest.approx(4.5)
    assert result.latency_ms_intervals["p50"].low < 4.5 < result.latency_ms_intervals["p50"].high


def test_p99_needs_a_thousand_samples() -> None:
    calls = [float(number) for number in range(1, 84)]
    few, enough = ([Round(calls, calls)] * count for count in (6, 7))  # 996 and 1,162 samples
    assert summary(few).latency_ms_p99 is None and "p99" not in summary(few).latency_ms_intervals
    assert summary(enough).latency_ms_p99 == pytest.approx(np.percentile(calls * 14, 99))
    assert "p99" in summary(enough).latency_ms_intervals


def test_the_clock_of_the_gpu_stands_beside_that_of_the_host() -> None:
    ones = np.ones(3)
    device = DeviceTimes(total_ms=[0.5, 0.6, 0.7], compute_ms=[0.3, 0.2, 0.4])
    result = summary(rounds_of(ones, ones), device=device)
    assert (result.device_ms_p50, result.device_compute_ms_p50) == (0.6, 0.3)
    assert summary(rounds_of(ones, ones)).device_ms_p50 is None


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
    assert WINDOWS.are_stable(rounds_of(engine_ms, engine_ms)) is is_stable
