"""Reports of the measuring stages: the latency of an engine, and the race of a target's engines."""

from dataclasses import dataclass

from tasks.parts.measuring.batch_latency import BatchLatency
from tasks.parts.measuring.machine_state import MachineState

REFERENCE = "reference"
"""Name in a race of the engine that all speed-ups refer to."""


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


@dataclass(frozen=True)
class Latency:
    """What was measured in the processes of one engine."""

    batches: tuple[BatchLatency, ...]
    """Batch 1 first, then each of benchmark.batch_sizes that the engine takes."""
    throughputs: tuple[Throughput, ...]
    is_inconclusive: bool
    """Whether the A/A spread at batch 1 stayed above benchmark.max_aa_spread: the machine was too noisy."""
    memory_mib: float
    """Resident memory of the runtime, weights and buffers."""
    memory_total_mib: float
    """Peak of the whole process, including Python."""
    gpu_memory_mib: float | None
    """GPU memory of the process; None on a CPU, or if NVML does not report it."""
    machine_before: MachineState
    """The machine after warm-up, before the first round."""
    machine_after: MachineState
    """The machine right after the last round."""

    @property
    def at_batch_1(self) -> BatchLatency:
        """The latency at batch 1, used wherever no batch size is named."""
        return self.batches[0]

    @property
    def throughput_per_s_batched(self) -> float | None:
        """Images per second at the largest batch; None if only batch 1 was measured."""
        return self.batches[-1].throughput_per_s if len(self.batches) > 1 else None


@dataclass(frozen=True)
class LatencyReport:
    """Speed and size of one engine file."""

    status: str
    """"built", or why there was nothing to measure: "skipped", "failed"."""
    reason: str
    engine_sha256: str
    size_bytes: int
    latency: Latency | None
    """None if there is no engine."""
    runtime: str
    runtime_version: str
    provider: str
    num_threads: int
    options: dict[str, str | int | bool]
    """Active options that affect latency, such as a captured CUDA graph, by the runtime's own names."""
    precisions: dict[str, dict[str, int]]
    cpu_model: str
    versions: dict[str, str]
    load_average_before: float | None


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


@dataclass(frozen=True)
class RaceReport:
    """The race of a target's engines and the reference; identical files ran once, under the name of the first."""

    engine_sha256: dict[str, str]
    """Variant -> sha256 of its engine file, if it was built."""
    raced_as: dict[str, str]
    """Variant -> the name that its file ran under: an earlier variant's if the files are identical, or REFERENCE."""
    reference_sha256: str
    """The engine file that all speed-ups refer to."""
    latency_ms_p50: dict[str, float]
    """Name -> latency at batch 1 of each file that ran."""
    ratios: tuple[SpeedRatio, ...]
    """The later engine over the earlier one, for each pair of different files; the reference is the first."""
    aa_ratio: SpeedRatio | None
    """The A/A control over the same file; None if nothing ran."""
    level: float
    """How often all `num_comparisons` intervals that decide hold the truth."""
    num_comparisons: int
    """Pairs that can decide; the interval of each ratio is corrected for that many (Bonferroni)."""
    num_rounds: int

    @property
    def aa_ratio_spread(self) -> float:
        """The spread of the A/A control; smaller differences are not significant."""
        return self.aa_ratio.spread if self.aa_ratio else 0.0

    def ratio(self, faster: str, slower: str) -> SpeedRatio:
        """Return how many times as fast one engine is as another; both are variants, or REFERENCE."""
        first, second = (self.raced_as.get(name, name) for name in (faster, slower))
        if first == second:
            return SpeedRatio(faster, slower, 1.0, 1.0, 1.0)
        ratio = next(ratio for ratio in self.ratios if {ratio.faster, ratio.slower} == {first, second})
        return ratio if ratio.faster == first else ratio.inverse
