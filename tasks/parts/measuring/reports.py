"""What the measuring stages report of engines: latency, and the race of a target's engines."""

from dataclasses import dataclass

from tasks.parts.measuring.batch_latency import BatchLatency
from tasks.parts.measuring.machine_state import MachineState

REFERENCE = "reference"
"""What a race calls the engine that all speed-ups refer to."""


@dataclass(frozen=True)
class Throughput:
    """What an engine does at batch 1 while several threads keep it busy."""

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
    """What the processes of one engine gave."""

    batches: tuple[BatchLatency, ...]
    """Batch 1 first, then each of benchmark.batch_sizes that the engine takes."""
    throughputs: tuple[Throughput, ...]
    is_inconclusive: bool
    """Whether the A/A spread at batch 1 stayed over benchmark.max_aa_spread: the machine was too noisy."""
    memory_mib: float
    """Resident memory that runtime, weights and buffers take."""
    memory_total_mib: float
    """Peak of the whole process, with Python."""
    gpu_memory_mib: float | None
    """What the process holds on the GPU; None on a CPU, or where NVML does not tell."""
    machine_before: MachineState
    """The machine after warm-up, before the first round."""
    machine_after: MachineState
    """The machine right after the last round."""

    @property
    def at_batch_1(self) -> BatchLatency:
        """The numbers that name no batch elsewhere."""
        return self.batches[0]

    @property
    def throughput_per_s_batched(self) -> float | None:
        """Images per second at the largest batch; None where only batch 1 was measured."""
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
    """None where there is no engine."""
    runtime: str
    runtime_version: str
    provider: str
    num_threads: int
    options: dict[str, str | int | bool]
    """What was on that changes the time, such as a captured CUDA graph, by the runtime's own names."""
    precisions: dict[str, dict[str, int]]
    cpu_model: str
    versions: dict[str, str]
    load_average_before: float | None


@dataclass(frozen=True)
class SpeedRatio:
    """How many times as fast one engine file is as another at batch 1, from bursts in the same rounds."""

    faster: str
    """Name of the engine whose time divides."""
    slower: str
    """Name of the engine whose time is divided. The names say the order, not who won."""
    factor: float
    """Median over the rounds."""
    low: float
    """Lower end of the 95 % bootstrap interval."""
    high: float

    @property
    def spread(self) -> float:
        """The largest distance from 1 of the interval: how far two equal engines seem to differ."""
        return max(abs(self.low - 1), abs(self.high - 1))

    @property
    def inverse(self) -> "SpeedRatio":
        """The same comparison with the names exchanged."""
        return SpeedRatio(self.slower, self.faster, 1 / self.factor, 1 / self.high, 1 / self.low)


@dataclass(frozen=True)
class RaceReport:
    """The race of a target's engines and the reference; equal files ran once, under the name of the first."""

    engine_sha256: dict[str, str]
    """Variant -> its engine file, where it was built."""
    raced_as: dict[str, str]
    """Variant -> the name that its file ran under: an earlier variant's where the files are equal, or REFERENCE."""
    reference_sha256: str
    """The engine file that all speed-ups refer to."""
    latency_ms_p50: dict[str, float]
    """Name -> latency at batch 1 of each file that ran."""
    ratios: tuple[SpeedRatio, ...]
    """The later engine over the earlier one, for each two different files; the reference is the first."""
    aa_ratio: SpeedRatio | None
    """The A/A control over the same file; None where nothing ran."""
    num_rounds: int

    @property
    def aa_ratio_spread(self) -> float:
        """Smaller differences may not be claimed."""
        return self.aa_ratio.spread if self.aa_ratio else 0.0

    def ratio(self, faster: str, slower: str) -> SpeedRatio:
        """Return how many times as fast one engine is as another; both are variants, or REFERENCE."""
        first, second = (self.raced_as.get(name, name) for name in (faster, slower))
        if first == second:
            return SpeedRatio(faster, slower, 1.0, 1.0, 1.0)
        ratio = next(ratio for ratio in self.ratios if {ratio.faster, ratio.slower} == {first, second})
        return ratio if ratio.faster == first else ratio.inverse
