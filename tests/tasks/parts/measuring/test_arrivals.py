"""Latencies under an open load, against queueing theory and against what each request must have waited."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import pytest
from numpy.typing import NDArray

from tasks.parts.measuring.arrivals import Served, draw_arrivals, serve_arrivals

MS = 1_000_000


class VirtualTime:
    """A clock that only sleeping and serving move on; for one lane, nothing else takes time."""

    def __init__(self) -> None:
        self.now_ns = 0

    def __call__(self) -> int:
        return self.now_ns

    def sleep(self, seconds: float) -> None:
        self.now_ns += max(1, round(1e9 * seconds))

    def serve(self, services_ns: Iterator[int]) -> Callable[[], None]:
        def call() -> None:
            self.now_ns += next(services_ns)

        return call


def serve_virtually(offsets_ns: NDArray[np.int64], services_ns: list[int]) -> Served:
    """Serve in one lane; the call before the start takes no time."""
    clock = VirtualTime()
    call = clock.serve(iter([0, *services_ns]))
    return serve_arrivals(offsets_ns, [call], clock=clock, sleep=clock.sleep)


def test_arrivals_are_a_poisson_process() -> None:
    offsets_ns = draw_arrivals(500.0, 200.0, seed=1)
    gaps_s = np.diff(offsets_ns) / 1e9
    assert len(offsets_ns) == pytest.approx(100_000, abs=4 * np.sqrt(100_000))
    assert gaps_s.mean() == pytest.approx(1 / 500, rel=0.02)
    assert gaps_s.std() == pytest.approx(gaps_s.mean(), rel=0.02)  # of an exponential distribution
    assert (gaps_s > 1 / 500).mean() == pytest.approx(np.exp(-1), abs=0.01)
    assert offsets_ns[-1] < 200 * 1e9


def test_arrivals_are_those_of_their_seed() -> None:
    first, again, other = (draw_arrivals(100.0, 3.0, seed) for seed in (4, 4, 5))
    assert first.tolist() == again.tolist()
    assert first.tolist()[:10] != other.tolist()[:10]


@pytest.mark.parametrize("load", [0.5, 0.8])
def test_the_mean_wait_is_that_of_an_m_d_1_queue(load: float) -> None:
    service_ns = 1 * MS
    offsets_ns = draw_arrivals(1000 * load, 200.0, seed=0)
    served = serve_virtually(offsets_ns, [service_ns] * len(offsets_ns))
    wait = np.mean(served.latencies_ns) / service_ns - 1
    # Pollaczek (1930) and Khinchin (1932): rho / (2 (1 - rho)) service times
    assert wait == pytest.approx(load / (2 * (1 - load)), rel=0.05)
    assert set(served.services_ns) == {service_ns}
    assert max(served.late_ns) <= 1
    assert served.achieved_per_s == pytest.approx(1000 * load, rel=0.02)


def test_each_latency_is_that_of_lindleys_recursion() -> None:
    random = np.random.default_rng(0)
    offsets_ns = draw_arrivals(800.0, 2.0, seed=3)
    services_ns = (random.exponential(1 * MS, len(offsets_ns)).astype(np.int64) + 1).tolist()
    free_ns, expected = 0, []
    for offset, service in zip(offsets_ns.tolist(), services_ns, strict=True):
        free_ns = max(free_ns, offset) + service  # Lindley, "The theory of queues with a single server", 1952
        expected.append(free_ns - offset)
    served = serve_virtually(offsets_ns, services_ns)
    assert served.latencies_ns == pytest.approx(expected, abs=2 * len(expected))  # sleeps are rounded up


def test_a_stall_delays_all_that_arrived_meanwhile() -> None:
    offsets_ns = np.arange(0, 100 * MS, 1 * MS)
    services_ns = [MS // 10] * len(offsets_ns)
    services_ns[10] = 50 * MS
    served = serve_virtually(offsets_ns, services_ns)
    late = [number for number, value in enumerate(served.latencies_ns) if value > MS]
    assert late == list(range(10, 10 + len(late)))
    assert len(late) >= 50  # a closed loop would have seen a single one
    assert served.latencies_ns[11] == pytest.approx(49.1 * MS, rel=0.001)
    assert served.latencies_ns[90] == MS // 10


def test_a_rate_above_the_capacity_is_not_achieved() -> None:
    offsets_ns = draw_arrivals(1500.0, 2.0, seed=0)
    served = serve_virtually(offsets_ns, [1 * MS] * len(offsets_ns))
    assert served.achieved_per_s == pytest.approx(1000, rel=0.01)
    assert served.latencies_ns[-1] > 100 * served.services_ns[-1]


def test_another_lane_answers_while_one_stalls() -> None:
    stalled, release = threading.Event(), threading.Event()
    answered: list[int] = []

    def stall() -> None:
        if not stalled.is_set():  # before the start
            stalled.set()
            return
        assert release.wait(60)

    def answer() -> None:
        answered.append(threading.get_ident())
        time.sleep(0.001)  # lets the other lane take a request
        if len(answered) == 30:
            release.set()

    served = serve_arrivals([0] * 40, [stall, answer])
    assert release.is_set()
    assert len(served.latencies_ns) == 40
    assert len(answered) >= 30
    assert len(set(answered)) == 1
    # the one that stalled waits for 29 others; they only wait for each other
    assert max(served.services_ns) > 5 * float(np.median(served.services_ns))


def test_lanes_are_open_in_the_thread_of_their_call_and_stay_open_until_the_end() -> None:
    opened: dict[int, int] = {}
    done: list[int] = []
    closed: list[tuple[int, int]] = []

    @contextmanager
    def lane(number: int) -> Iterator[None]:
        opened[number] = threading.get_ident()
        yield
        closed.append((threading.get_ident(), len(done)))

    def call(number: int) -> Callable[[], None]:
        def run() -> None:
            assert opened[number] == threading.get_ident()
            done.append(number)

        return run

    served = serve_arrivals(range(0, 20 * MS, MS), [call(0), call(1)], lanes=[lane(0), lane(1)])
    assert len(served.latencies_ns) == 20
    assert {thread for thread, _ in closed} == set(opened.values())
    assert [count for _, count in closed] == [22, 22]  # and the first call of each lane


def test_an_error_of_a_call_ends_all_lanes() -> None:
    calls = 0

    def fail() -> None:
        nonlocal calls
        calls += 1
        if calls == 3:
            raise ValueError("no answer")

    with pytest.raises(ValueError, match="no answer"):
        serve_arrivals([number * MS for number in range(10_000)], [fail, lambda: None])
    assert calls == 3


def test_an_error_before_the_start_ends_all_lanes() -> None:
    def fail() -> None:
        raise ValueError("no engine")

    with pytest.raises(ValueError, match="no engine"):
        serve_arrivals([0, 1], [lambda: None, fail])
