"""What the measurements through graphs and through networks of torch share."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from tasks.parts.engines.gpu import find_gpus
from tasks.parts.engines.runtimes import CUDA
from tasks.parts.engines.target import Target
from tasks.parts.measuring.machine_state import Machine, read_machine_state
from tasks.parts.roofs.datasheets import stated_bandwidth, stated_peak
from tasks.parts.roofs.peaks import theoretical_peak
from tasks.parts.roofs.roofs import ComputeRoof, MemoryRoof, Rate


@dataclass(frozen=True)
class Effort:
    """How long the roofs are measured."""

    num_rounds: int
    """Rounds that run every graph once; the spread is that of the rounds."""
    working_sets_bytes: Sequence[int]
    """What the layers read and write whose bandwidth is measured."""


def rate_of(values: Sequence[float]) -> Rate:
    """Return the median of the rounds with their spread."""
    return Rate(statistics.median(values), min(values), max(values))


def moved_rate(moved_bytes: int, times_ms: Sequence[float], profiled_ms: float) -> Rate | None:
    """Return bytes per second; what is reported for a layer without work is not the layer's own.

    Times of 0 are below the profiler's resolution; None if all of them are.
    """
    own_ms = [max(value - profiled_ms, value / 2) for value in times_ms if value]
    return rate_of([1000 * moved_bytes / value for value in own_ms]) if own_ms else None


def compute_roof(
    target: Target, machine: Machine, precision: str, rate: Rate, probe: str, *, is_depthwise: bool = False
) -> ComputeRoof:
    """Put beside a measured rate what the CPU's clock and vectors give, or what the data sheet of the GPU states."""
    if target.device == CUDA:
        is_tf32 = precision == "f32" and target.tensorrt is not None and target.tensorrt.tf32
        peak, formula = stated_peak(find_gpus()[0].name, "tf32" if is_tf32 else precision)
    else:
        clock_mhz = read_machine_state(target.device).cpu_mhz
        peak, formula = theoretical_peak(
            machine.cpu_flags, precision, clock_mhz=clock_mhz, num_threads=target.num_threads
        )
    return ComputeRoof(precision, is_depthwise, rate, probe, peak, formula)


def memory_roof(target: Target, working_set_bytes: int, rate: Rate) -> MemoryRoof:
    """Put the data sheet's bandwidth of the GPU's memory beside a measured one, which may be a cache's."""
    stated = stated_bandwidth(find_gpus()[0].name) if target.device == CUDA else None
    return MemoryRoof(working_set_bytes, rate, stated)
