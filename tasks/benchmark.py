"""Measure the latency of an engine file against a reference engine, so that the ratio survives a noisy
machine.

Three processes: the reference, the engine, and the engine once more (the A/A control). They run short bursts
in rounds, in random order within a round. The speed-up is the median over the rounds of the ratio of burst
medians, so that slow phases of the machine hit both sides. What the two equal processes differ by is the
smallest difference that may be claimed. (Blocks one after the other differ by 10 % on a shared machine,
rounds by 1-2 %.)
"""

import csv
import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from tasks.core.errors import ArtifactError, ConfigError

if TYPE_CHECKING:
    from tasks.parts.runners.burst_process import BurstProcess, Memory
    from tasks.parts.runners.contract import EngineManifest

logger = logging.getLogger(__name__)

REFERENCE, ENGINE, CONTROL = "reference", "engine", "control"
_ROUNDS_AT_ANY_COST = 3
_PROFILED = 10
"""Inferences that the time of each layer is the mean of."""


@dataclass(frozen=True)
class Config:
    """What `benchmark` reads from params.yaml."""

    seed: int
    """Order of the processes within the rounds, and the bootstrap."""
    batch_size: int
    """Second batch size that is measured, besides 1; left out where the target's max_batch is smaller."""
    warm_up_ms: float
    """Per process and batch size, before anything counts."""
    burst_ms: float
    """Length of one burst. Longer: fewer rounds, and slow phases of the machine fit less well into one
    round."""
    min_calls: int
    """Inferences per burst at least, for engines slower than burst_ms / min_calls."""
    min_rounds: int
    """Rounds at least, even past the time budget, up to twice that budget."""
    budget_s: float
    """Time for the rounds at batch 1. More: narrower interval."""
    budget_batch_s: float
    """Time for the rounds at batch_size."""
    max_aa_spread: float
    """A/A spread over which a measurement is void: repeated once, then called inconclusive. 0.05 is 5 %."""
    timeout_s: float
    """How long an engine's process may stay silent before it is given up."""

    def __post_init__(self) -> None:
        """Raise ConfigError for impossible values."""
        for name in ("batch_size", "min_calls"):
            self._require(getattr(self, name) >= 1, name, "1 or more")
        at_least = _ROUNDS_AT_ANY_COST
        self._require(self.min_rounds >= at_least, "min_rounds", f"{at_least} or more")
        for name in ("burst_ms", "budget_s", "budget_batch_s", "max_aa_spread", "timeout_s"):
            self._require(getattr(self, name) > 0, name, "more than 0")
        self._require(self.warm_up_ms >= 0, "warm_up_ms", "0 or more")
        self._require(self.seed >= 0, "seed", "0 or more")

    def _require(self, is_met: bool, field: str, allowed: str) -> None:
        if not is_met:
            raise ConfigError(f"benchmark.{field} is {getattr(self, field)!r}, allowed: {allowed}.")


@dataclass(frozen=True)
class BatchResult:
    """Latency at one batch size."""

    batch: int
    latency_ms_p50: float
    latency_ms_p90: float
    latency_ms_p99: float
    latency_ms_mean: float
    throughput_per_s: float
    """Images per second."""
    reference_latency_ms_p50: float
    speedup_vs_reference: float
    """Reference time / engine time: median over rounds."""
    speedup_vs_reference_low: float
    """Lower end of the 95 % bootstrap interval."""
    speedup_vs_reference_high: float
    aa_ratio_spread: float
    """Largest distance from 1 of the 95 % interval of engine / same engine. Smaller differences may not be
    claimed."""
    num_rounds: int
    num_samples: int
    """Timed inferences of the engine (both processes)."""
    num_repeats: int
    """1 if the measurement was void once and done again."""


@dataclass(frozen=True)
class Report:
    """Speed and size of one engine file; None where there is no engine."""

    status: str
    """"built", or why there was nothing to measure: "skipped", "failed"."""
    reason: str
    engine_sha256: str
    reference_sha256: str
    size_bytes: int
    latency_ms_p50: float | None
    """At batch 1, like all numbers of this class that name no batch."""
    latency_ms_p90: float | None
    latency_ms_p99: float | None
    latency_ms_mean: float | None
    throughput_per_s: float | None
    """Images per second at batch 1."""
    throughput_per_s_batched: float | None
    """Images per second at benchmark.batch_size."""
    speedup_vs_reference: float | None
    speedup_vs_reference_low: float | None
    speedup_vs_reference_high: float | None
    aa_ratio_spread: float | None
    inconclusive: bool
    """Whether the A/A spread at batch 1 stayed over benchmark.max_aa_spread: the machine was too noisy."""
    memory_mib: float | None
    """Resident memory that runtime, weights and buffers take."""
    memory_total_mib: float | None
    """Peak of the whole process, with Python."""
    batches: tuple[BatchResult, ...]
    runtime: str
    runtime_version: str
    provider: str
    num_threads: int
    precisions: dict[str, dict[str, int]]
    cpu_model: str
    load_average_before: float | None


@dataclass(frozen=True)
class _Round:
    """Latencies in ms of one burst of each process."""

    reference: list[float]
    engine: list[float]
    control: list[float]


def benchmark(cfg: Config, *, engine: Path, reference: Path, out: Path) -> Report:
    """Write latencies.csv and layers.csv, and return latency, throughput, memory and the speed-up over `reference`.

    An engine that was skipped or failed gives a report with that status. Raises ArtifactError when the
    reference was not built, when the two do not take the same images, or when a process dies.
    """
    from tasks.parts.runners.contract import read_engine_manifest

    manifest, base = read_engine_manifest(engine), read_engine_manifest(reference)
    load_before = os.getloadavg()[0] if hasattr(os, "getloadavg") else None
    if not manifest.is_built:
        logger.warning("benchmark: %s has no engine: %s", engine, manifest.reason)
        return _report(manifest, base, (), None, None, cfg, load_before)
    _check_comparable(manifest, base, engine, reference)
    logger.info(
        "benchmark: %s of target %s against %s", manifest.file, manifest.target.name, base.target.name
    )
    results, memory, description, rounds, layers_ms = _measure_all(cfg, manifest, base, engine, reference)
    _write_latencies(rounds, out / "latencies.csv")
    _write_layers(engine, layers_ms, out)
    report = _report(manifest, base, results, memory, description, cfg, load_before)
    logger.info(
        "benchmark: p50 %.3f ms, %.2f times the reference's speed, A/A spread %.1f %%",
        results[0].latency_ms_p50,
        results[0].speedup_vs_reference,
        100 * results[0].aa_ratio_spread,
    )
    return report


def _check_comparable(
    manifest: "EngineManifest", base: "EngineManifest", engine: Path, reference: Path
) -> None:
    if not base.is_built:
        raise ArtifactError(
            f"{reference}: the reference engine was {base.status} ({base.reason}); without it there is no "
            "speed-up. Mend its build first."
        )
    found, expected = (manifest.card.height, manifest.card.width), (base.card.height, base.card.width)
    if found != expected:
        raise ArtifactError(
            f"{engine}: takes images of {found}, the reference {reference} of {expected} (height, width). "
            "Build both from variants of the same data set."
        )


def _measure_all(
    cfg: Config, manifest: "EngineManifest", base: "EngineManifest", engine: Path, reference: Path
) -> tuple[tuple[BatchResult, ...], "Memory", dict[str, object], dict[int, list[_Round]], dict[str, float]]:
    from contextlib import ExitStack

    from tasks.parts.runners.burst_process import BurstProcess

    largest = min(manifest.target.max_batch, base.target.max_batch)
    budgets = {1: cfg.budget_s, cfg.batch_size: cfg.budget_batch_s} | {1: cfg.budget_s}
    with ExitStack() as stack:
        processes = {
            name: stack.enter_context(
                BurstProcess(folder, num_threads=card.target.num_threads, timeout_s=cfg.timeout_s)
            )
            for name, folder, card in (
                (REFERENCE, reference, base),
                (ENGINE, engine, manifest),
                (CONTROL, engine, manifest),
            )
        }
        descriptions = {name: process.wait_until_loaded() for name, process in processes.items()}
        memory: Memory | None = None
        results, rounds = [], {}
        for batch in sorted(batch for batch in budgets if batch <= largest):
            for name, process in processes.items():
                used = process.warm_up(batch, seconds=cfg.warm_up_ms / 1000)
                if name == ENGINE and memory is None:
                    memory = used
            result, rounds[batch] = _measure_batch(cfg, processes, batch, budgets[batch])
            results.append(result)
        layers_ms = processes[ENGINE].profile(num_iterations=_PROFILED)
    assert memory is not None
    return tuple(results), memory, descriptions[ENGINE], rounds, layers_ms


def _measure_batch(
    cfg: Config, processes: dict[str, "BurstProcess"], batch: int, budget_s: float
) -> tuple[BatchResult, list[_Round]]:
    """Measure, and at batch 1 once again if the A/A control says that the measurement is void."""
    for num_repeats in (0, 1) if batch == 1 else (0,):
        rounds = _run_rounds(cfg, processes, batch, budget_s, seed=cfg.seed + num_repeats)
        result = summarise(rounds, batch=batch, seed=cfg.seed, num_repeats=num_repeats)
        if result.aa_ratio_spread <= cfg.max_aa_spread:
            break
        logger.warning("benchmark: A/A spread %.1f %% at batch %d", 100 * result.aa_ratio_spread, batch)
    return result, rounds


def _run_rounds(
    cfg: Config, processes: dict[str, "BurstProcess"], batch: int, budget_s: float, *, seed: int
) -> list[_Round]:
    import random
    import time

    order, shuffler = list(processes), random.Random(seed)
    rounds: list[_Round] = []
    end = time.monotonic() + budget_s
    while (
        (now := time.monotonic()) < end
        or len(rounds) < _ROUNDS_AT_ANY_COST
        or (len(rounds) < cfg.min_rounds and now < end + budget_s)
    ):
        shuffler.shuffle(order)
        bursts = {
            name: processes[name].burst(batch, seconds=cfg.burst_ms / 1000, min_calls=cfg.min_calls)
            for name in order
        }
        rounds.append(
            _Round(*([value / 1e6 for value in bursts[name]] for name in (REFERENCE, ENGINE, CONTROL)))
        )
    return rounds


def summarise(rounds: Sequence[_Round], *, batch: int, seed: int, num_repeats: int) -> BatchResult:
    """Turn rounds into percentiles and ratios."""
    import numpy as np

    from tasks.parts.latency import bootstrap_interval

    latencies_ms = np.concatenate([[*r.engine, *r.control] for r in rounds])
    reference_ms = np.concatenate([r.reference for r in rounds])
    medians = np.array([[np.median(r.reference), np.median(r.engine), np.median(r.control)] for r in rounds])
    speedups = medians[:, 0] / np.sqrt(medians[:, 1] * medians[:, 2])
    low, high = bootstrap_interval(speedups, seed=seed)
    aa_low, aa_high = bootstrap_interval(medians[:, 1] / medians[:, 2], seed=seed)
    p50, p90, p99 = (float(value) for value in np.percentile(latencies_ms, [50, 90, 99]))
    mean = float(latencies_ms.mean())
    return BatchResult(
        batch=batch,
        latency_ms_p50=p50,
        latency_ms_p90=p90,
        latency_ms_p99=p99,
        latency_ms_mean=mean,
        throughput_per_s=1000 * batch / mean,
        reference_latency_ms_p50=float(np.median(reference_ms)),
        speedup_vs_reference=float(np.median(speedups)),
        speedup_vs_reference_low=low,
        speedup_vs_reference_high=high,
        aa_ratio_spread=max(abs(aa_low - 1), abs(aa_high - 1)),
        num_rounds=len(rounds),
        num_samples=len(latencies_ms),
        num_repeats=num_repeats,
    )


def _write_latencies(rounds: dict[int, list[_Round]], path: Path) -> None:
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(["batch", "round", "process", "latency_ms"])
        for batch, of_batch in rounds.items():
            for number, one in enumerate(of_batch):
                for name in (REFERENCE, ENGINE, CONTROL):
                    writer.writerows([batch, number, name, f"{value:.5f}"] for value in getattr(one, name))


def _write_layers(engine: Path, layers_ms: dict[str, float], out: Path) -> None:
    """Write what build_engine found out about each layer, and its time; eager PyTorch has no such table.

    The time is empty where the runtime's profiler has no line for the layer.
    """
    from tasks.parts.engine_truth import LAYERS_FILE

    if (engine / LAYERS_FILE).is_file():
        with (
            (engine / LAYERS_FILE).open(encoding="utf-8") as known,
            (out / LAYERS_FILE).open("w", encoding="utf-8") as timed,
        ):
            reader = csv.DictReader(known)
            writer = csv.DictWriter(timed, [*(reader.fieldnames or ()), "milliseconds"], lineterminator="\n")
            writer.writeheader()
            for row in reader:
                milliseconds = layers_ms.get(row["layer"])
                writer.writerow(
                    {**row, "milliseconds": "" if milliseconds is None else f"{milliseconds:.5f}"}
                )


def _report(
    manifest: "EngineManifest",
    base: "EngineManifest",
    results: tuple[BatchResult, ...],
    memory: "Memory | None",
    description: dict[str, object] | None,
    cfg: Config,
    load_before: float | None,
) -> Report:
    from tasks.parts.target import read_cpu_model

    first = results[0] if results else None
    used = description or {}
    return Report(
        status=manifest.status,
        reason=manifest.reason,
        engine_sha256=manifest.sha256,
        reference_sha256=base.sha256,
        size_bytes=manifest.size_bytes,
        latency_ms_p50=first.latency_ms_p50 if first else None,
        latency_ms_p90=first.latency_ms_p90 if first else None,
        latency_ms_p99=first.latency_ms_p99 if first else None,
        latency_ms_mean=first.latency_ms_mean if first else None,
        throughput_per_s=first.throughput_per_s if first else None,
        throughput_per_s_batched=results[-1].throughput_per_s if len(results) > 1 else None,
        speedup_vs_reference=first.speedup_vs_reference if first else None,
        speedup_vs_reference_low=first.speedup_vs_reference_low if first else None,
        speedup_vs_reference_high=first.speedup_vs_reference_high if first else None,
        aa_ratio_spread=first.aa_ratio_spread if first else None,
        inconclusive=bool(first and first.aa_ratio_spread > cfg.max_aa_spread),
        memory_mib=memory.engine if memory else None,
        memory_total_mib=memory.total if memory else None,
        batches=results,
        runtime=manifest.target.runtime,
        runtime_version=manifest.runtime_version,
        provider=str(used.get("provider", manifest.provider)),
        num_threads=int(str(used.get("num_threads", manifest.target.num_threads))),
        precisions=manifest.precisions,
        cpu_model=read_cpu_model(),
        load_average_before=load_before,
    )
