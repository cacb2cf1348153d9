"""Wait until nothing else runs on the machine, and record what disturbed a measurement.

The kernel's counters are read on Linux; elsewhere, and where the machine does not provide one, the value is None and
nothing waits for it.
"""

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from tasks.core.bounds import AtLeast, MoreThan
from tasks.parts.measuring.machine_state import MachineState, read_machine_state

logger = logging.getLogger(__name__)

_SAMPLE_S = 0.3
_PAUSE_S = 1.0
_PROC_STAT = Path("/proc/stat")
_CPUS = Path("/sys/devices/system/cpu")
_IDLE, _IO_WAIT, _STEAL = 3, 4, 7
"""Positions in a line of /proc/stat: proc_stat(5)."""


@dataclass(frozen=True)
class QuietLimits:
    """When the machine counts as quiet, and how long to wait for that."""

    max_busy_cores: Annotated[float, MoreThan(0)]
    """Cores that other processes, or other virtual machines (steal), may keep busy."""
    max_wait_s: Annotated[float, AtLeast(0)]
    """How long to wait for a quiet machine; then the measurement starts anyway. 0 only looks once."""


@dataclass(frozen=True)
class CpuTimes:
    """Time of all cores since the system started, in ticks of the kernel, and the number of thermal slowdowns."""

    busy: int
    steal: int
    """Time in which another virtual machine had the core."""
    total: int
    num_cores: int
    num_throttles: int | None
    """Times that the CPU slowed down because of heat; None if it does not report them."""


@dataclass(frozen=True)
class Quiet:
    """What was seen before a measurement, while none of its engines ran."""

    is_quiet: bool | None
    """Whether the machine became quiet in time; None if it cannot be told."""
    waited_s: float
    busy_cores: float | None
    """Cores that others kept busy when the wait ended."""


@dataclass(frozen=True)
class Surroundings:
    """What else happened on the machine before and during a measurement."""

    quiet: Quiet
    steal_share: float | None
    """Share of the CPU time that other virtual machines took during the measurement."""
    num_throttles: int | None
    """Thermal slowdowns of the CPU during the measurement."""
    before: MachineState
    """The machine after warm-up, before the first round."""
    after: MachineState
    """The machine right after the last measurement."""


@dataclass(frozen=True)
class Watch:
    """The start of a measurement."""

    quiet: Quiet
    device: str
    times: CpuTimes | None
    before: MachineState

    def finish(self) -> Surroundings:
        """Return what happened since."""
        now = read_cpu_times()
        steal_share = num_throttles = None
        if now is not None and self.times is not None:
            steal_share = (now.steal - self.times.steal) / max(1, now.total - self.times.total)
            num_throttles = _new_throttles(self.times, now)
        return Surroundings(
            self.quiet, steal_share, num_throttles, self.before, read_machine_state(self.device)
        )


def start_watch(quiet: Quiet, device: str) -> Watch:
    """Begin to watch the machine."""
    return Watch(quiet, device, read_cpu_times(), read_machine_state(device))


def read_cpu_times(stat: Path = _PROC_STAT, cpus: Path = _CPUS) -> CpuTimes | None:
    """Read the counters of the kernel; None on systems without /proc/stat."""
    if not stat.is_file():
        return None
    lines = [line.split() for line in stat.read_text(encoding="ascii").splitlines()]
    of_all = next(words for words in lines if words[0] == "cpu")
    ticks = [int(word) for word in of_all[1 : 2 + _STEAL]]  # guests are part of user and nice
    counts = [int(file.read_text()) for file in cpus.glob("cpu[0-9]*/thermal_throttle/core_throttle_count")]
    return CpuTimes(
        busy=sum(ticks) - ticks[_IDLE] - ticks[_IO_WAIT] - ticks[_STEAL],
        steal=ticks[_STEAL],
        total=sum(ticks),
        num_cores=sum(words[0].startswith("cpu") and words[0] != "cpu" for words in lines),
        num_throttles=sum(counts) if counts else None,
    )


def wait_until_quiet(limits: QuietLimits, read: Callable[[], CpuTimes | None] = read_cpu_times) -> Quiet:
    """Wait until others leave the CPU alone, at most `max_wait_s`; this process must not compute meanwhile."""
    start = time.monotonic()
    while True:
        first = read()
        if first is None:
            return Quiet(None, 0.0, None)
        time.sleep(_SAMPLE_S)
        second = read()
        assert second is not None
        busy_cores = _taken_cores(first, second)
        is_quiet = busy_cores <= limits.max_busy_cores and not _new_throttles(first, second)
        waited_s = time.monotonic() - start
        if is_quiet or waited_s >= limits.max_wait_s:
            break
        time.sleep(_PAUSE_S)
    if not is_quiet:
        logger.warning(
            "others keep %.2f cores busy after %.0f s of waiting, expected %g or less (benchmark.quiet)",
            busy_cores,
            waited_s,
            limits.max_busy_cores,
        )
    return Quiet(is_quiet, round(waited_s, 3), round(busy_cores, 3))


def _taken_cores(first: CpuTimes, second: CpuTimes) -> float:
    taken = second.busy + second.steal - first.busy - first.steal
    return second.num_cores * taken / max(1, second.total - first.total)


def _new_throttles(first: CpuTimes, second: CpuTimes) -> int | None:
    if first.num_throttles is None or second.num_throttles is None:
        return None
    return second.num_throttles - first.num_throttles
