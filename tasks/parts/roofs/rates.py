"""What the measurements through graphs and through networks of torch share."""

import logging
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from tasks.parts.engines.gpu import find_gpus
from tasks.parts.engines.manifest import FloatArray
from tasks.parts.engines.rounds import Network, rounds_ms
from tasks.parts.engines.runtimes import CUDA
from tasks.parts.engines.target import Target
from tasks.parts.measuring.machine_state import Machine, read_machine_state
from tasks.parts.roofs.datasheets import stated_bandwidth, stated_peak
from tasks.parts.roofs.peaks import highest_possible, theoretical_peak
from tasks.parts.roofs.roofs import ComputeRoof, MemoryRoof, Rate

logger = logging.getLogger(__name__)

_AGREEMENT = 1.5
"""A rate that is higher than its repetition by more than this factor is not a roof."""
_ABOVE_DATA_SHEET = 1.25
"""A GPU may run above the clock of its data sheet, by less than this factor."""


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


def cost_of_calls(
    chains: Mapping[int, Network], images_NCHW: FloatArray, num_rounds: int
) -> tuple[Rate, Rate]:
    """Return the cost of a layer and of a call in ms, from two chains, by length, of layers that do next to nothing.

    Both run in every round; what comes out below 0 is noise and counts as 0.
    """
    rounds = rounds_ms({str(length): chain for length, chain in chains.items()}, images_NCHW, num_rounds)
    short, long = sorted(chains)
    layers_ms, calls_ms = [], []
    for few, many in zip(rounds[str(short)], rounds[str(long)], strict=True):
        few_ms, many_ms = statistics.median(few), statistics.median(many)
        layers_ms.append(max(0.0, (many_ms - few_ms) / (long - short)))
        calls_ms.append(max(0.0, few_ms - short * layers_ms[-1]))
    return rate_of(layers_ms), rate_of(calls_ms)


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
        highest = None if peak is None else _ABOVE_DATA_SHEET * peak
    else:
        clock_mhz = read_machine_state(target.device).cpu_mhz
        peak, formula = theoretical_peak(
            machine.cpu_flags, precision, clock_mhz=clock_mhz, num_threads=target.num_threads
        )
        highest = highest_possible(machine.cpu_flags, precision, num_threads=target.num_threads)
    return ComputeRoof(precision, is_depthwise, rate, probe, peak, formula, highest)


def choose_roof(
    candidates: Sequence[ComputeRoof], repeat: Callable[[ComputeRoof], Rate | None]
) -> ComputeRoof | None:
    """Return the fastest of several probes that is possible and that `repeat`, a new measurement, confirms.

    One that is not confirmed counts with what its repetition gave. None if no probe is left.
    """
    left, repeated = list(candidates), set[str]()
    while left:
        best = max(left, key=lambda roof: roof.macs_per_s.value)
        left.remove(best)
        if not best.is_possible:
            _refuse(best, f"no device of this kind reaches {(best.highest_macs_per_s or 0) / 1e9:.0f}")
        elif best.probe in repeated:
            return best
        elif (again := repeat(best)) is None:
            _refuse(best, "its repetition gave none")
        elif best.macs_per_s.value <= _AGREEMENT * again.value:
            return best
        else:
            _refuse(best, f"repeated it is {again.value / 1e9:.0f}")
            left.append(replace(best, macs_per_s=again))
            repeated.add(best.probe)
    return None


def _refuse(roof: ComputeRoof, reason: str) -> None:
    logger.warning(
        "%s: %.0f GMAC/s in %s are no roof: %s", roof.probe, roof.macs_per_s.value / 1e9, roof.name, reason
    )


def memory_roof(target: Target, working_set_bytes: int, rate: Rate) -> MemoryRoof:
    """Put the data sheet's bandwidth of the GPU's memory beside a measured one, which may be a cache's."""
    stated = stated_bandwidth(find_gpus()[0].name) if target.device == CUDA else None
    return MemoryRoof(working_set_bytes, rate, stated)
