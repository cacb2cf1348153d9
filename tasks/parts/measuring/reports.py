"""The report of `benchmark`: latencies and speed ratios of the engines of a target."""

from dataclasses import dataclass
from enum import StrEnum

from tasks.parts.measuring.batch_latency import BatchLatency
from tasks.parts.measuring.machine_state import Machine
from tasks.parts.measuring.surroundings import Surroundings

REFERENCE = "reference"
"""Name in a race of the engine that all speed-ups refer to."""


class Timed(StrEnum):
    """What is timed."""

    frame = "frame"
    """From a uint8 frame to the answer, with what the engine leaves outside."""
    run = "run"
    """The engine alone."""


@dataclass(frozen=True)
class Throughput:
    """Throughput and latency of an engine at batch 1 while several threads keep it busy."""

    concurrency: int
    throughput_per_s: float
    """Images per second: median of the windows."""
    throughput_per_s_low: float
    """The slowest window."""
    throughput_per_s_high: float
    latency_ms_p50: float
    """Latency of one inference under this load."""
    energy_mj_per_image: float | None
    """Energy of the whole device, other processes and idle power included, per image, in millijoules; None if the
    machine does not tell: `Latency.energy_note`."""


@dataclass(frozen=True)
class Latency:
    """What was measured in the process of one engine."""

    batches: tuple[BatchLatency, ...]
    """Batch 1 first, in the rounds of all engines; then each of benchmark.batch_sizes that the engine takes."""
    throughputs: tuple[Throughput, ...]
    phases_ms: dict[str, float]
    """Median time of each phase from an image file to the answer, one frame after the other and apart from the
    rounds: "decode", what stands before the engine ("pre"), the engine ("run"), what stands behind it ("post")."""
    frames_per_s: float
    """Over a stream of image files, as infer.py runs it: decoding, running and finishing overlap."""
    load_ms: float
    """From the engine file, in the page cache, to a loaded engine, in a process that has imported the runtime. A
    single load, while the processes of the other engines wait."""
    first_call_ms: float
    """The first inference after that."""
    memory_mib: float
    """Resident memory of the runtime, weights and buffers at batch 1."""
    memory_total_mib: float
    """Peak of the whole process, including Python."""
    gpu_memory_mib: float | None
    """GPU memory of the process; None on a CPU, or if NVML does not report it."""
    energy_note: str
    """What the energy of `throughputs` covers, or why it is None."""

    @property
    def at_batch_1(self) -> BatchLatency:
        """The latency at batch 1, used wherever no batch size is named."""
        return self.batches[0]

    @property
    def throughput_per_s_batched(self) -> float | None:
        """Images per second at the largest batch; None if only batch 1 was measured."""
        return self.batches[-1].throughput_per_s if len(self.batches) > 1 else None

    @property
    def energy_mj_per_image(self) -> float | None:
        """The energy at the largest of benchmark.concurrencies; None if it is not known."""
        busiest = max(self.throughputs, key=lambda load: load.concurrency, default=None)
        return busiest.energy_mj_per_image if busiest else None


@dataclass(frozen=True)
class EngineMeasurement:
    """Speed and memory of the engine file of one variant."""

    status: str
    """"built", or why there was nothing to measure: "skipped", "failed"."""
    reason: str
    engine_sha256: str
    measured_as: str
    """Name that the file was measured under: an earlier variant's if the files are identical, or REFERENCE. Empty if
    there is no engine."""
    latency: Latency | None
    """None if there is no engine."""
    runtime: str
    runtime_version: str
    provider: str
    num_threads: int
    options: dict[str, str | int | bool]
    """Active options that affect latency, such as a captured CUDA graph, by the runtime's own names."""


@dataclass(frozen=True)
class SpeedRatio:
    """How many times as fast one engine file is as another at batch 1, from bursts in the same rounds."""

    faster: str
    """Name of the engine whose time is the denominator."""
    slower: str
    """Name of the engine whose time is the numerator. It may turn out to be the faster one."""
    factor: float
    """Median over the rounds."""
    low: float
    """Lower end of the interval, at the level of the race."""
    high: float

    @property
    def spread(self) -> float:
        """The largest distance of the interval from 1; for two equal engines this is noise."""
        return max(abs(self.low - 1), abs(self.high - 1))

    @property
    def inverse(self) -> "SpeedRatio":
        """The same comparison with the engines swapped."""
        return SpeedRatio(self.slower, self.faster, 1 / self.factor, 1 / self.high, 1 / self.low)

    def is_faster(self, smallest_difference: float) -> bool:
        """Return whether the first engine is certainly faster, and by more than `smallest_difference`."""
        return self.low > 1 and self.factor - 1 > smallest_difference


@dataclass(frozen=True)
class Race:
    """The rounds at batch 1 that all engines of a target ran together."""

    ratios: tuple[SpeedRatio, ...]
    """The later engine over the earlier one, for each pair of different files; the reference is the first."""
    aa_ratio: SpeedRatio
    """The A/A control over the same file."""
    level: float
    """How often all `num_comparisons` intervals that decide hold the truth."""
    num_comparisons: int
    """Pairs that can decide; the interval of each ratio is corrected for that many (Bonferroni)."""
    resolution: float
    """Engines that differ by less count as equally fast."""
    undecided: tuple[tuple[str, str], ...]
    """Neighbours on speed whose order was still open when the time was up, the faster one first."""
    reference_ms_p50: float
    """Latency of the reference engine in these rounds."""
    num_rounds: int
    num_repeats: int
    """1 if the race was repeated because of a large A/A spread; the one with the smaller spread is kept."""
    cpus: tuple[int, ...]
    """CPUs that the engines were pinned to, each to as many of the first ones as it has threads; empty if they were
    not, as those on a GPU."""

    @property
    def smallest_difference(self) -> float:
        """The smallest difference that counts: `resolution`, or the A/A spread if that is larger.

        Two processes of one engine differ a little, each as long as it lives, because of where its memory lies.
        """
        return max(self.resolution, self.aa_ratio.spread)

    def ratio(self, faster: str, slower: str) -> SpeedRatio:
        """Return how many times as fast one file is as another one."""
        ratio = next(ratio for ratio in self.ratios if {ratio.faster, ratio.slower} == {faster, slower})
        return ratio if ratio.faster == faster else ratio.inverse


@dataclass(frozen=True)
class BenchmarkReport:
    """Speed of all engines of a target, measured side by side; identical files were measured once."""

    engines: dict[str, EngineMeasurement]
    """By variant."""
    reference_sha256: str
    """The engine file that all speed-ups refer to; that of eager PyTorch, the checkpoint, is that of every device."""
    reference_target: str
    """The target of that engine."""
    timed: Timed
    """What all latencies and ratios are about."""
    race: Race | None
    """None if the target has no engine."""
    is_inconclusive: bool
    """Whether the A/A spread stayed above benchmark.max_aa_spread: the machine was too noisy."""
    machine: Machine
    surroundings: Surroundings | None
    """None if nothing was measured."""

    @property
    def aa_ratio_spread(self) -> float:
        """The spread of the A/A control."""
        return self.race.aa_ratio.spread if self.race else 0.0

    @property
    def smallest_difference(self) -> float:
        """The smallest difference of two engines that counts."""
        return self.race.smallest_difference if self.race else 0.0

    def ratio(self, faster: str, slower: str) -> SpeedRatio:
        """Return how many times as fast one engine is as another; both are built variants, or REFERENCE."""
        first, second = (
            self.engines[name].measured_as if name in self.engines else name for name in (faster, slower)
        )
        if first == second:
            return SpeedRatio(faster, slower, 1.0, 1.0, 1.0)
        assert self.race is not None
        return self.race.ratio(first, second)
