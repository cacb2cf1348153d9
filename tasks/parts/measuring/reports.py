"""What the measuring stages report of engines: latency, and the races between rungs."""

from dataclasses import dataclass

from tasks.parts.measuring.batch_latency import BatchLatency
from tasks.parts.measuring.machine_state import MachineState


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
    reference_sha256: str
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
class RungRatio:
    """How many times as fast one engine file is as another, at batch 1."""

    faster: str
    """Variant of the engine whose time divides."""
    slower: str
    """Variant of the engine whose time is divided. The names say the order, not who won."""
    factor: float
    """Median over the rounds."""
    low: float
    """Lower end of the 95 % bootstrap interval."""
    high: float


@dataclass(frozen=True)
class RaceReport:
    """The race of a target's rungs; those that are the same file ran once, under the name of the first."""

    engine_sha256: dict[str, str]
    """Variant -> its engine file, where it was built."""
    latency_ms_p50: dict[str, float]
    """Variant -> its latency at batch 1."""
    ratios: tuple[RungRatio, ...]
    """The later rung over the earlier one, for each two different files."""
    aa_ratio_spread: float | None
    """Largest distance from 1 of the 95 % interval of the first rung / itself; None where nothing ran."""
    num_rounds: int
