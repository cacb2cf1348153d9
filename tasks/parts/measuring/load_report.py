"""The report of `measure_load`: images per second within a latency bound, closed and open."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from tasks.parts.engines.tuning import Tuning
from tasks.parts.measuring.machine_state import Machine
from tasks.parts.measuring.reports import Timed
from tasks.parts.measuring.surroundings import Surroundings


@dataclass(frozen=True)
class Setting:
    """How an engine is called: one cell of the grid."""

    batch: int
    """Images of one call."""
    lanes: int
    """Calls at the same time."""
    tuning: Tuning

    def describe(self) -> str:
        """Return the setting in words: ``batch 4, 2 lanes of 1 thread``."""
        return f"batch {self.batch}, {self.lanes} lane{'' if self.lanes == 1 else 's'} of {self.tuning.describe()}"


@dataclass(frozen=True)
class LoadCell:
    """What an engine does in one setting, each lane with its next call as soon as the last one is answered."""

    setting: Setting
    throughput_per_s: float
    """Images per second of all lanes: median of the windows."""
    throughput_per_s_low: float
    """The slowest window."""
    throughput_per_s_high: float
    latency_ms_p50: float
    """Of one call, with all images of its batch."""
    latency_ms_p99: float | None
    """None for fewer than 1,000 calls."""
    num_calls: int


@dataclass(frozen=True)
class TriedTuning:
    """A setting of the CPU beside the one without it, in windows that took turns."""

    tuning: Tuning
    factor: float
    """Images per second over those without it: median over the rounds."""
    low: float
    """Lower end of the 95 % interval."""
    high: float
    latency_ms_p99: float | None
    is_accepted: bool
    """Whether it is certainly faster, by more than the A/A spread, and within the bound."""


@dataclass(frozen=True)
class ArrivalStep:
    """Images that arrived one by one at one rate, as a Poisson process, whether or not earlier ones were answered."""

    rate_per_s: float
    arrived_per_s: float
    """The rate that was drawn."""
    achieved_per_s: float
    """Answers per second until the last one; below the arrivals if a queue grew."""
    latency_ms_p50: float
    """From the time at which an image was to arrive to its answer."""
    latency_ms_p99: float | None
    """None for fewer than 1,000 arrivals."""
    service_ms_p99: float
    """Of the call alone: what a closed loop would have reported."""
    late_ms_p99: float
    """What the generator of the arrivals itself added."""
    num_arrivals: int
    is_held: bool
    """Whether the p99 is within the bound and no queue grew."""


@dataclass(frozen=True)
class Arrivals:
    """Open arrivals at rising rates, with the lanes and threads of the best cell and one image a call."""

    setting: Setting
    capacity_per_s: float
    """Images per second of these lanes in a closed loop."""
    max_p99_ms: float | None
    """The bound: the given one, or a multiple of the p99 at the lowest rate. None if that is not known."""
    steps: tuple[ArrivalStep, ...]
    """In the order in which they ran."""
    knee_per_s: float | None
    """The largest rate that held, and held again with other arrivals; None if none did."""
    note: str
    """Why there is no knee, or what it does not tell; empty otherwise."""


@dataclass(frozen=True)
class EngineLoad:
    """What one engine file does under load."""

    engine_sha256: str
    measured_as: str
    """The variant under which the file was measured: an earlier one's if the files are identical."""
    cells: tuple[LoadCell, ...]
    """The grid, most images per second first."""
    aa_spread: float | None
    """How much two processes of this engine in the best cell differ; None if no cell holds the bound."""
    tried: tuple[TriedTuning, ...]
    """Settings of the CPU that were tried in the best cell."""
    best: LoadCell | None
    """The cell with the largest images per second within the bound, measured again after it was chosen, with the
    tuning that was accepted. None if no cell holds the bound."""
    arrivals: Arrivals | None
    """None without a best cell."""

    @property
    def front(self) -> tuple[LoadCell, ...]:
        """The best cell, as it was measured last, and those that could be the best for another bound."""
        best = self.best
        if best is None:
            return tuple(front_of(self.cells))
        others = [cell for cell in self.cells if _place(cell) != _place(best)]
        front = front_of([best, *others])
        return tuple(front if best in front else [best, *front])


@dataclass(frozen=True)
class Together:
    """One of several engines at batch 1 in one lane, alone and while the others do the same in their processes."""

    variant: str
    alone_per_s: float
    alone_ms_p99: float | None
    """None for fewer than 1,000 calls."""
    together_per_s: float
    together_ms_p99: float | None


@dataclass(frozen=True)
class LoadReport:
    """What engines of a target do under load."""

    target: str
    max_p99_ms: float | None
    """The bound; None if images per second alone decided."""
    timed: Timed
    num_cpus: int
    """CPUs that the engines could use."""
    engines: dict[str, EngineLoad]
    """By variant, as far as it was built."""
    together: tuple[Together, ...]
    """Engines that ran at the same time; empty if none was asked for."""
    machine: Machine
    surroundings: Surroundings | None
    """None if nothing was measured."""


def front_of(cells: Sequence[LoadCell]) -> list[LoadCell]:
    """Return the cells with a p99 that no other one beats in both images per second and p99, the fastest first."""
    front: list[LoadCell] = []
    lowest_ms = math.inf
    for cell in sorted(cells, key=lambda cell: -cell.throughput_per_s):
        if cell.latency_ms_p99 is not None and cell.latency_ms_p99 < lowest_ms:
            front.append(cell)
            lowest_ms = cell.latency_ms_p99
    return front


def _place(cell: LoadCell) -> tuple[int, int, int]:
    return cell.setting.batch, cell.setting.lanes, cell.setting.tuning.num_threads


def within(cells: Sequence[LoadCell], max_p99_ms: float | None) -> list[LoadCell]:
    """Return the cells whose p99 is known and within the bound, most images per second first.

    Without a bound these are all.
    """
    held = [
        cell
        for cell in cells
        if max_p99_ms is None or (cell.latency_ms_p99 is not None and cell.latency_ms_p99 <= max_p99_ms)
    ]
    return sorted(held, key=lambda cell: -cell.throughput_per_s)
