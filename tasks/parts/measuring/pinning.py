"""Keep the processes of a race on the same CPUs.

Each CPU is disturbed by other work at other moments: interrupts, other processes, and in a virtual machine whatever
else the host runs on that core. Two engines on different CPUs then seem to differ. On the same ones they meet the
same conditions, as they run one after the other.
"""

import contextlib
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

_CPUS = Path("/sys/devices/system/cpu")


@contextmanager
def pinned(num_threads: Mapping[int, int]) -> Iterator[tuple[int, ...]]:
    """Pin each process to the first CPUs of one list, as many as it has threads; undo it at the end.

    `num_threads` is by process id. Yields the list, as long as the largest number of threads. It is empty, and
    nothing is pinned, without processes, on systems other than Linux, and if there are fewer CPUs than that.
    """
    cpus = choose_cpus(max(num_threads.values(), default=0))
    before = {pid: _affinities(pid) for pid in num_threads} if cpus else {}
    for pid, threads in before.items():
        own = set(cpus[: num_threads[pid]])
        _set_affinities(dict.fromkeys(threads, own))
    try:
        yield cpus
    finally:
        for threads in before.values():
            _set_affinities(threads)


def choose_cpus(count: int, cpus: Path = _CPUS) -> tuple[int, ...]:
    """Return CPUs of different cores, the fastest kind first and then the highest number; empty if there are too few.

    Cores of one machine may differ in speed, and CPU 0 often serves the interrupts.
    """
    if not hasattr(os, "sched_getaffinity"):
        return ()
    allowed = os.sched_getaffinity(0)

    def order(cpu: int) -> tuple[int, int, int]:
        place_in_core = _siblings(cpus / f"cpu{cpu}").index(cpu)
        return place_in_core, -_read_int(cpus / f"cpu{cpu}" / "cpufreq/cpuinfo_max_freq"), -cpu

    return tuple(sorted(allowed, key=order)[:count]) if len(allowed) >= count else ()


def _siblings(cpu: Path) -> list[int]:
    """Return the CPUs of the same core in ascending order; the kernel writes ``0,8`` or ``0-1``."""
    file = cpu / "topology/thread_siblings_list"
    if not file.is_file():
        return [int(cpu.name.removeprefix("cpu"))]
    numbers: list[int] = []
    for part in file.read_text(encoding="ascii").strip().split(","):
        first, _, last = part.partition("-")
        numbers += range(int(first), int(last or first) + 1)
    return numbers


def _read_int(file: Path) -> int:
    return int(file.read_text(encoding="ascii")) if file.is_file() else 0


def _affinities(pid: int) -> dict[int, set[int]]:
    """Return the CPUs of each thread of a process, by thread id."""
    found = {}
    for thread in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(ProcessLookupError):  # it ended meanwhile
            found[int(thread.name)] = os.sched_getaffinity(int(thread.name))
    return found


def _set_affinities(threads: Mapping[int, set[int]]) -> None:
    for thread, cpus in threads.items():
        with contextlib.suppress(ProcessLookupError):
            os.sched_setaffinity(thread, cpus)
