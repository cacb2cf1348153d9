"""The roofs of a machine as a runtime reaches them: multiply-adds, bytes and calls per second.

The roofline model (Williams, Waterman and Patterson, "Roofline: An Insightful Visual Performance Model for Multicore
Architectures", CACM 52(4), 2009) bounds the speed of a layer by two roofs, arithmetic and memory. At batch 1 a third
one rules small layers: what the runtime needs to start any layer at all.
"""

from dataclasses import dataclass
from enum import StrEnum

from tasks.parts.measuring.machine_state import Machine

BAND = 1.25
"""Two roofs whose times differ by less than this factor bound a layer together."""


class Bound(StrEnum):
    """What bounds the speed of a layer."""

    compute = "compute"
    memory = "memory"
    overhead = "overhead"
    mixed = "mixed"
    unknown = "unknown"
    """The runtime does not report what the layer moves, and it has no multiply-adds."""


@dataclass(frozen=True)
class Rate:
    """A rate or a time, measured in several rounds."""

    value: float
    """Median of the rounds."""
    low: float
    """The smallest one."""
    high: float
    """The largest one."""


@dataclass(frozen=True)
class ComputeRoof:
    """The most multiply-adds per second that the runtime reaches in a precision.

    Depthwise convolutions have a roof of their own: of what they read, they use each value for one channel only, so
    their kernels spend their time loading and reach a fraction of the others' rate, even from the first cache.
    """

    precision: str
    is_depthwise: bool
    macs_per_s: Rate
    probe: str
    """The graph that reached it."""
    theoretical_macs_per_s: float | None
    """Clock x multiply-adds per cycle x threads, or the data sheet of the GPU; None if one of them is not known."""
    formula: str
    """How the theoretical one comes about."""

    highest_macs_per_s: float | None = None
    """What no device of this kind exceeds; None if that is not known."""

    @property
    def is_possible(self) -> bool:
        """Whether the measured rate can be: a profiler that gives a layer's time to another one reports any."""
        return self.highest_macs_per_s is None or self.macs_per_s.value <= self.highest_macs_per_s

    @property
    def name(self) -> str:
        """The precision, and whether the roof is that of depthwise convolutions."""
        return f"{self.precision} depthwise" if self.is_depthwise else self.precision


@dataclass(frozen=True)
class MemoryRoof:
    """Bytes per second that the runtime moves if a layer reads and writes this much."""

    working_set_bytes: int
    bytes_per_s: Rate
    theoretical_bytes_per_s: float | None = None
    """What the data sheet states for the memory of the GPU, behind its caches; None for a CPU."""


@dataclass(frozen=True)
class Roofs:
    """What the runtime of a target reaches on this machine, with the target's options, at batch 1."""

    target: str
    runtime_version: str
    num_threads: int
    machine: Machine
    compute: tuple[ComputeRoof, ...]
    """By precision; empty if nothing could be measured."""
    memory: tuple[MemoryRoof, ...]
    """Small working sets first."""
    layer_ms: Rate | None
    """What one more layer costs that computes next to nothing."""
    call_ms: Rate | None
    """What a call costs besides its layers."""
    profiled_layer_ms: float
    """What the runtime's profiler reports for such a layer; the difference to `layer_ms` is the profiler's own."""
    reason: str
    """Why nothing was measured; empty otherwise."""

    def peak(self, precision: str, *, is_depthwise: bool = False) -> ComputeRoof | None:
        """Return the roof of a precision; None if the target was not measured in it."""
        wanted = precision, is_depthwise
        return next((roof for roof in self.compute if (roof.precision, roof.is_depthwise) == wanted), None)

    def bandwidth(self, working_set_bytes: int) -> MemoryRoof:
        """Return the roof of the smallest measured working set that holds these bytes, else of the largest."""
        fitting = (roof for roof in self.memory if roof.working_set_bytes >= working_set_bytes)
        return next(fitting, self.memory[-1])


@dataclass(frozen=True)
class Limits:
    """The least time that each roof leaves to a layer, in ms."""

    compute_ms: float
    memory_ms: float
    overhead_ms: float

    @property
    def attainable_ms(self) -> float:
        """The time of a layer that reaches its roof: arithmetic hides behind memory or the other way round."""
        return max(self.compute_ms, self.memory_ms) + self.overhead_ms

    @property
    def bound(self) -> Bound:
        """The roof that leaves the most time, if it is certainly the one."""
        times = {
            Bound.compute: self.compute_ms,
            Bound.memory: self.memory_ms,
            Bound.overhead: self.overhead_ms,
        }
        first, second, _ = sorted(times, key=lambda bound: -times[bound])
        return first if times[first] >= BAND * times[second] else Bound.mixed


def limits_of(
    roofs: Roofs, *, precision: str, macs: int, moved_bytes: int, is_depthwise: bool = False
) -> Limits:
    """Return what the roofs leave to a layer of `macs` multiply-adds that reads and writes `moved_bytes`.

    A depthwise convolution without a roof of its own is held against that of its precision, and a precision without
    one, as of layers that compute in none, against the fastest.
    """
    assert roofs.layer_ms is not None and roofs.compute and roofs.memory
    peak = (
        roofs.peak(precision, is_depthwise=is_depthwise)
        or roofs.peak(precision)
        or max(roofs.compute, key=lambda roof: roof.macs_per_s.value)
    )
    bandwidth = roofs.bandwidth(moved_bytes).bytes_per_s.value
    return Limits(
        compute_ms=1000 * macs / peak.macs_per_s.value,
        memory_ms=1000 * moved_bytes / bandwidth,
        overhead_ms=roofs.layer_ms.value,
    )
