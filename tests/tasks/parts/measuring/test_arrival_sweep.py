"""The knee of open arrivals, on queues in virtual time."""

from dataclasses import replace

import numpy as np
import pytest

from tasks.parts.engines.tuning import Tuning
from tasks.parts.measuring.arrival_sweep import summarise_step, sweep
from tasks.parts.measuring.arrivals import Served, draw_arrivals, serve_arrivals
from tasks.parts.measuring.load_report import Arrivals, Setting
from tests.tasks.parts.measuring.test_arrivals import VirtualTime

MS = 1_000_000
SHARES = [0.2, 0.4, 0.6, 0.7, 0.8, 0.9, 1.0, 1.1]


class Queue:
    """One lane that takes 1 ms for each image, except the slow ones."""

    def __init__(self, slow_share: float = 0.0, slow_ms: float = 0.0) -> None:
        self._slow_share, self._slow_ms = slow_share, slow_ms
        self.seeds: list[int] = []

    def __call__(self, rate_per_s: float, seconds: float, seed: int) -> Served:
        self.seeds.append(seed)
        offsets_ns, clock = draw_arrivals(rate_per_s, seconds, seed), VirtualTime()
        is_slow = np.random.default_rng(seed).random(len(offsets_ns)) < self._slow_share
        services_ns = np.where(is_slow, self._slow_ms * MS, MS).astype(np.int64).tolist()
        call = clock.serve(iter([0, *services_ns]))
        return serve_arrivals(offsets_ns, [call], clock=clock, sleep=clock.sleep)


def find(queue: Queue, max_p99_ms: float | None, *, seconds: float = 20.0, **changes: float) -> Arrivals:
    options = {"capacity_per_s": 1000.0, "unloaded_factor": 3.0, "max_seconds": 60.0} | changes
    return sweep(
        queue,
        Setting(1, 1, Tuning(1)),
        max_p99_ms=max_p99_ms,
        shares=SHARES,
        num_refinements=4,
        min_seconds=seconds,
        seed=7,
        **options,  # type: ignore[arg-type]
    )


def p99_of_md1(load: float) -> float:
    """Return the p99 of an M/D/1 queue in service times, by Lindley's recursion over many arrivals."""
    gaps = np.random.default_rng(99).exponential(1 / load, 400_000)
    wait, waits = 0.0, []
    for gap in gaps.tolist():
        wait = max(0.0, wait + 1 - gap)
        waits.append(wait)
    return float(np.percentile(waits, 99)) + 1


@pytest.mark.parametrize("max_p99_ms", [4.0, 10.0])
def test_knee_is_the_rate_at_which_the_p99_of_the_queue_reaches_the_bound(max_p99_ms: float) -> None:
    queue = Queue()
    found = find(queue, max_p99_ms)
    assert found.knee_per_s is not None and not found.note and found.max_p99_ms == max_p99_ms
    assert (
        p99_of_md1(0.93 * found.knee_per_s / 1000) < max_p99_ms < p99_of_md1(1.07 * found.knee_per_s / 1000)
    )
    assert len(set(queue.seeds)) == len(found.steps)  # the knee was tried again with other arrivals
    assert found.steps[-1].rate_per_s == found.knee_per_s and found.steps[-1].is_held
    rising = [step.rate_per_s for step in found.steps[: len(SHARES)]]
    assert rising[:3] == sorted(rising[:3])


def test_calls_alone_show_nothing_of_the_queue() -> None:
    overloaded = find(Queue(), 10.0).steps
    broken = next(step for step in overloaded if not step.is_held)
    assert broken.latency_ms_p99 is not None and broken.latency_ms_p99 > 10
    assert broken.service_ms_p99 == pytest.approx(1.0)  # what a closed loop reports


def test_without_a_bound_it_is_a_multiple_of_the_p99_at_the_lowest_rate() -> None:
    found = find(Queue(), None, unloaded_factor=2.0)
    assert found.max_p99_ms is not None and found.steps[0].latency_ms_p99 is not None
    assert found.max_p99_ms == pytest.approx(2 * found.steps[0].latency_ms_p99)
    assert found.knee_per_s is not None and 200 < found.knee_per_s < 1000


def test_growing_queue_is_no_hold_however_loose_the_bound() -> None:
    found = find(Queue(), 1e6)
    assert found.knee_per_s is not None and found.knee_per_s <= 1040
    assert [step.is_held for step in found.steps if step.rate_per_s >= 1100] == [False]


def test_rate_that_holds_up_to_the_end_is_named_as_a_lower_end() -> None:
    found = find(Queue(), 10.0, capacity_per_s=500.0)
    assert found.knee_per_s == pytest.approx(550) and "above" in found.note


def test_lowest_rate_that_breaks_has_no_knee() -> None:
    found = find(Queue(slow_share=0.03, slow_ms=50.0), 10.0)
    assert found.knee_per_s is None and len(found.steps) == 1
    assert found.note == "the lowest rate, 200 images per second, does not hold"


def test_rates_that_take_too_long_for_a_p99_are_left_out() -> None:
    found = find(Queue(), 10.0, seconds=0.1, max_seconds=2.0)
    assert found.steps[0].rate_per_s == 600  # 1,120 arrivals at 400 take 2.8 s
    assert all(step.num_arrivals >= 1000 and step.latency_ms_p99 is not None for step in found.steps)
    found = find(Queue(), 10.0, max_seconds=0.5)
    assert not found.steps and found.knee_per_s is None and "Raise max_arrivals_s" in found.note


def test_few_arrivals_have_no_p99_and_hold_nothing() -> None:
    served = Queue()(500.0, 1.0, 0)
    step = summarise_step(served, 500.0, 1.0, 1e6)
    assert step.num_arrivals < 1000 and step.latency_ms_p99 is None and not step.is_held
    assert replace(step, is_held=True) != step
