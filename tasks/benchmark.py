"""Measure the latency, throughput and memory of an engine file.

Two processes of the same engine, the second as the A/A control, run short bursts in rounds, in random order within a
round. Any difference between the two is noise of the machine. Rounds continue until the last three windows agree or
the time is up. How much faster one engine is than another is measured by race_engines.
"""

import csv
import logging
import os
import random
import statistics
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from tasks.core.bounds import AtLeast, MoreThan
from tasks.parts.engines.machine import read_cpu_model
from tasks.parts.engines.runtimes import CUDA
from tasks.parts.measuring.batch_latency import BatchLatency, Round, Windows, summarise
from tasks.parts.measuring.machine_state import read_gpu_memory_mib, read_machine_state, read_versions
from tasks.parts.measuring.reports import Latency, LatencyReport, Throughput

if TYPE_CHECKING:
    from tasks.parts.engines.manifest import EngineManifest
    from tasks.parts.measuring.engine_process import EngineProcess, Memory

logger = logging.getLogger(__name__)

ENGINE, CONTROL = "engine", "control"
_ROUNDS_AT_ANY_COST = 3
_LOAD_WINDOWS = 3
_PROFILED = 10
"""Inferences over which the time of each layer is averaged."""
_TIMED_ON_DEVICE = 50
"""Inferences timed with CUDA events."""


@dataclass(frozen=True)
class Config:
    """What `benchmark` reads from params.yaml."""

    seed: Annotated[int, AtLeast(0)]
    """Fixes the order of the processes within the rounds."""
    batch_sizes: list[Annotated[int, AtLeast(2)]]
    """Batch sizes measured after batch 1; those above the target's max_batch are skipped."""
    warm_up_ms: Annotated[float, AtLeast(0)]
    """How long each process warms up at each batch size before it is measured."""
    burst_ms: Annotated[float, MoreThan(0)]
    """Length of one burst. Longer: fewer rounds, and a slow phase of the machine less often covers a whole round."""
    min_calls: Annotated[int, AtLeast(1)]
    """Minimum number of inferences in a burst, for engines slower than burst_ms / min_calls."""
    min_rounds: Annotated[int, AtLeast(_ROUNDS_AT_ANY_COST)]
    """Minimum number of rounds, even beyond the time budget, up to twice that budget."""
    windows: Windows
    """When a measurement may end before its time budget."""
    budget_s: Annotated[float, MoreThan(0)]
    """Time for the rounds at batch 1. More: narrower interval."""
    budget_batch_s: Annotated[float, MoreThan(0)]
    """Time for the rounds at each of batch_sizes."""
    concurrencies: list[Annotated[int, AtLeast(1)]]
    """Numbers of concurrent threads for the throughput at batch 1. Empty: not measured."""
    throughput_s: Annotated[float, MoreThan(0)]
    """Time for each of concurrencies."""
    max_aa_spread: Annotated[float, MoreThan(0)]
    """A/A spread above which a measurement is repeated once, then reported as inconclusive. 0.05 is 5 %."""
    timeout_s: Annotated[float, MoreThan(0)]
    """How long to wait for an answer from an engine's process."""


Report = LatencyReport


@dataclass(frozen=True)
class _Measured:
    """What was measured in the engine's processes."""

    latency: Latency
    rounds: dict[int, list[Round]]
    """Rounds by batch size."""
    layers_ms: dict[str, float]
    description: dict[str, Any]
    """The description that the engine's runner returns."""


def benchmark(cfg: Config, *, engine: Path, out: Path) -> Report:
    """Write latencies.csv and layers.csv, and return latency, throughput and memory.

    If the engine was skipped or failed, the report has that status. Raises ArtifactError if a process dies.
    """
    from tasks.parts.engines.manifest import read_engine_manifest

    manifest = read_engine_manifest(engine)
    load_before = os.getloadavg()[0] if hasattr(os, "getloadavg") else None
    if not manifest.is_built:
        logger.warning("benchmark: %s has no engine: %s", engine, manifest.reason)
        return _report(manifest, None, load_before)
    logger.info("benchmark: %s of target %s", manifest.file, manifest.target.name)
    measured = _measure(cfg, manifest, engine)
    _write_latencies(measured.rounds, out / "latencies.csv")
    _write_layers(engine, measured.layers_ms, out)
    first = measured.latency.at_batch_1
    logger.info(
        "benchmark: p50 %.3f ms, A/A spread %.1f %%, %s after %d rounds",
        first.latency_ms_p50,
        100 * first.aa_ratio_spread,
        "stable" if first.is_stable else "not stable",
        first.num_rounds,
    )
    return _report(manifest, measured, load_before)


def _measure(cfg: Config, manifest: "EngineManifest", engine: Path) -> _Measured:
    from tasks.parts.measuring.engine_process import open_processes

    batch_sizes = sorted({batch for batch in cfg.batch_sizes if batch <= manifest.target.max_batch})
    device = manifest.target.device
    with open_processes({ENGINE: engine, CONTROL: engine}, timeout_s=cfg.timeout_s) as processes:
        descriptions = {name: process.wait_until_loaded() for name, process in processes.items()}
        memory = _warm_up(cfg, processes, 1)
        gpu_memory_mib = read_gpu_memory_mib(processes[ENGINE].pid) if device == CUDA else None
        machine_before = read_machine_state(device)
        by_batch = {1: _measure_batch(cfg, processes, 1, cfg.budget_s)}
        for batch in batch_sizes:
            _warm_up(cfg, processes, batch)
            by_batch[batch] = _measure_batch(cfg, processes, batch, cfg.budget_batch_s)
        machine_after = read_machine_state(device)
        throughputs = tuple(_measure_load(cfg, processes[ENGINE], count) for count in cfg.concurrencies)
        layers_ms = processes[ENGINE].profile(num_iterations=_PROFILED)
    batches = tuple(result for result, _ in by_batch.values())
    latency = Latency(
        batches=batches,
        throughputs=throughputs,
        is_inconclusive=batches[0].aa_ratio_spread > cfg.max_aa_spread,
        memory_mib=memory.engine,
        memory_total_mib=memory.total,
        gpu_memory_mib=gpu_memory_mib,
        machine_before=machine_before,
        machine_after=machine_after,
    )
    rounds_by_batch = {batch: rounds for batch, (_, rounds) in by_batch.items()}
    return _Measured(latency, rounds_by_batch, layers_ms, descriptions[ENGINE])


def _warm_up(cfg: Config, processes: dict[str, "EngineProcess"], batch: int) -> "Memory":
    """Warm up every process and return the memory of the engine's."""
    used = {
        name: process.warm_up(batch, seconds=cfg.warm_up_ms / 1000) for name, process in processes.items()
    }
    return used[ENGINE]


def _measure_batch(
    cfg: Config, processes: dict[str, "EngineProcess"], batch: int, budget_s: float
) -> tuple[BatchLatency, list[Round]]:
    """Measure one batch size; at batch 1, repeat the measurement once if the A/A spread is too large."""
    for num_repeats in (0, 1) if batch == 1 else (0,):
        rounds = _run_rounds(cfg, processes, batch, budget_s, seed=cfg.seed + num_repeats)
        result = summarise(
            rounds,
            batch=batch,
            windows=cfg.windows,
            device=processes[ENGINE].time_on_device(batch, num_iterations=_TIMED_ON_DEVICE),
            num_repeats=num_repeats,
        )
        if result.aa_ratio_spread <= cfg.max_aa_spread:
            break
        logger.warning("benchmark: A/A spread %.1f %% at batch %d", 100 * result.aa_ratio_spread, batch)
    return result, rounds


def _run_rounds(
    cfg: Config, processes: dict[str, "EngineProcess"], batch: int, budget_s: float, *, seed: int
) -> list[Round]:
    from tasks.parts.measuring.engine_process import run_round

    shuffler, rounds, start = random.Random(seed), list[Round](), time.monotonic()
    while not _is_over(cfg, rounds, (time.monotonic() - start) / budget_s):
        rounds.append(
            Round(**run_round(processes, batch, shuffler, burst_ms=cfg.burst_ms, min_calls=cfg.min_calls))
        )
    return rounds


def _is_over(cfg: Config, rounds: list[Round], share_of_budget: float) -> bool:
    if len(rounds) < _ROUNDS_AT_ANY_COST:
        return False
    if len(rounds) < cfg.min_rounds:
        return share_of_budget >= 2
    return share_of_budget >= 1 or cfg.windows.are_stable(rounds)


def _measure_load(cfg: Config, process: "EngineProcess", concurrency: int) -> Throughput:
    seconds = cfg.throughput_s / _LOAD_WINDOWS
    load = process.load(1, concurrency=concurrency, seconds=seconds, num_windows=_LOAD_WINDOWS)
    return Throughput(
        concurrency=concurrency,
        throughput_per_s=statistics.median(load.calls_per_s),
        throughput_per_s_low=min(load.calls_per_s),
        throughput_per_s_high=max(load.calls_per_s),
        latency_ms_p50=statistics.median(load.latencies_ns) / 1e6,
    )


def _write_latencies(rounds: dict[int, list[Round]], path: Path) -> None:
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(["batch", "round", "process", "latency_ms"])
        for batch, of_batch in rounds.items():
            for number, bursts in enumerate(of_batch):
                for name in (ENGINE, CONTROL):
                    writer.writerows([batch, number, name, f"{value:.5f}"] for value in getattr(bursts, name))


def _write_layers(engine: Path, layers_ms: dict[str, float], out: Path) -> None:
    """Write the layer table of build_engine with the time of each layer; eager PyTorch has no such table.

    The time is empty if the runtime's profiler does not report the layer.
    """
    from tasks.parts.engines.manifest import LAYERS_FILE

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


def _report(manifest: "EngineManifest", measured: _Measured | None, load_before: float | None) -> Report:
    description = measured.description if measured else {}
    return Report(
        status=manifest.status,
        reason=manifest.reason,
        engine_sha256=manifest.sha256,
        size_bytes=manifest.size_bytes,
        latency=measured.latency if measured else None,
        runtime=manifest.target.runtime,
        runtime_version=str(description.get("runtime_version", manifest.runtime_version)),
        provider=description.get("provider", manifest.provider),
        num_threads=description.get("num_threads", manifest.target.num_threads),
        options=description.get("options", {}),
        precisions=manifest.precisions,
        cpu_model=read_cpu_model(),
        versions=read_versions(manifest.target.device),
        load_average_before=load_before,
    )
