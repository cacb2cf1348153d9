"""Serve requests that arrive at their own times, whether or not earlier ones are done: an open load.

A closed load sends a request when the last one is answered, so a stall of the server also stops the requests, and
those that would have arrived meanwhile are never measured (coordinated omission: Gil Tene, "How NOT to Measure
Latency", 2013). Here the times are drawn beforehand, and a latency counts from the time that was drawn.
"""

import math
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


@dataclass(frozen=True)
class Served:
    """What became of the arrivals, in their order."""

    latencies_ns: list[int]
    """From the time at which a request was to arrive to its answer: waiting and service."""
    services_ns: list[int]
    """Of that, the call alone."""
    late_ns: list[int]
    """How long after both its arrival and the last answer of its lane a call began: what sleeping too long adds to
    a latency. Well below the latencies, else the generator is measured and not the engine."""
    achieved_per_s: float
    """Answers per second, from the start to the last answer. Far below the rate of the arrivals: a queue grew."""


def draw_arrivals(rate_per_s: float, seconds: float, seed: int) -> "NDArray[np.int64]":
    """Return the times in ns, from 0, at which the requests of a Poisson process arrive within `seconds`.

    The gaps are exponential: users who do not know of each other.
    """
    import numpy as np

    expected = rate_per_s * seconds
    generator, times = np.random.default_rng(seed), np.empty(0)
    while not len(times) or times[-1] < seconds:
        gaps = generator.exponential(1 / rate_per_s, math.ceil(expected + 5 * math.sqrt(expected)) + 1)
        times = np.concatenate([times, np.cumsum(gaps) + (times[-1] if len(times) else 0.0)])
    return (1e9 * times[times < seconds]).astype(np.int64)


def serve_arrivals(
    offsets_ns: "Sequence[int] | NDArray[np.int64]",
    calls: Sequence[Callable[[], Any]],
    *,
    lanes: Sequence[AbstractContextManager[Any]] = (),
    clock: Callable[[], int] = time.perf_counter_ns,
    sleep: Callable[[float], None] = time.sleep,
) -> Served:
    """Answer each arrival by the next call that is free, first come first served, and return the latencies.

    `offsets_ns`: ascending, from the start. Each of `calls` has a thread of its own, in which the one of `lanes` with
    the same number, if there are any, is open; each runs once before the start. The first error of a call ends all.
    """
    due_ns = [int(offset) for offset in offsets_ns]
    entered = lanes or [ExitStack() for _ in calls]
    latencies_ns, services_ns, late_ns = ([0] * len(due_ns) for _ in range(3))
    start_ns = 0
    waiting, entry = iter(range(len(due_ns))), threading.Lock()

    def set_clock() -> None:
        nonlocal start_ns
        start_ns = clock()

    start, end = threading.Barrier(len(calls), action=set_clock), threading.Barrier(len(calls))

    def drive(lane: AbstractContextManager[Any], call: Callable[[], Any]) -> int:
        with ExitStack() as stack:
            with entry:  # one at a time: some runtimes cannot open contexts in two threads at once
                stack.enter_context(lane)
                call()
            start.wait()
            free_ns = start_ns
            while True:
                with entry:
                    number = next(waiting, None)
                if number is None:
                    break
                arrived_ns = start_ns + due_ns[number]
                while (left_ns := arrived_ns - clock()) > 0:
                    sleep(left_ns / 1e9)
                begun_ns = clock()
                call()
                done_ns = clock()
                latencies_ns[number] = done_ns - arrived_ns
                services_ns[number] = done_ns - begun_ns
                late_ns[number] = begun_ns - max(arrived_ns, free_ns)
                free_ns = done_ns
            end.wait()  # closing a lane would disturb the others
            return free_ns

    with ThreadPoolExecutor(len(calls)) as pool:
        futures = [pool.submit(drive, *each) for each in zip(entered, calls, strict=True)]
        for future in as_completed(futures):
            if error := future.exception():
                waiting = iter(())  # nothing is left to do for the other lanes
                start.abort()
                end.abort()
                raise error
    end_ns = max(future.result() for future in futures)
    return Served(latencies_ns, services_ns, late_ns, 1e9 * len(due_ns) / max(1, end_ns - start_ns))
