"""Measure all engines of one target and the engine that speed-ups refer to, side by side.

Each different engine file runs in its own process, from uint8 frames to answers: what the engine leaves outside,
normalisation or argmax, counts. At batch 1 all of them run in the same rounds, with a second
process of one of them as the A/A control: ranks, ratios and latencies come from these rounds. Then each engine by
itself is measured at larger batches, with several requests at once, and layer by layer.
"""

import logging
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated, Any

from tasks.core.bounds import AtLeast, MoreThan
from tasks.core.errors import ArtifactError
from tasks.parts.engines.gpu import Gpu
from tasks.parts.engines.machine import has_gpu
from tasks.parts.engines.runtimes import CUDA
from tasks.parts.measuring.batch_latency import Bursts, Windows, summarise
from tasks.parts.measuring.energy import shortest_metered_s
from tasks.parts.measuring.frame_files import write_frames
from tasks.parts.measuring.machine_state import measuring_environment, read_gpu_memory_mib, read_machine
from tasks.parts.measuring.race import CONTROL, FEWEST_ROUNDS, RaceOptions, engine_folder
from tasks.parts.measuring.reports import (
    REFERENCE,
    BenchmarkReport,
    EngineMeasurement,
    Latency,
    Throughput,
)
from tasks.parts.measuring.surroundings import Surroundings

if TYPE_CHECKING:
    from tasks.parts.engines.manifest import EngineManifest
    from tasks.parts.engines.target import Target
    from tasks.parts.measuring.engine_process import EngineProcess, Load, WarmUp
    from tasks.parts.measuring.engine_race import Rounds

logger = logging.getLogger(__name__)

_LOAD_WINDOWS = 3
_PROFILES = 3
"""Profiles of an engine, from which the time of each layer is taken."""
_PROFILED, _PROFILED_S = (4, 16), 0.5
"""Fewest and most inferences of each, and what they may take in between."""
_TIMED_FRAMES, _TIMED_FRAMES_S = (20, 100), 2.0
"""Fewest and most frames of which each phase is timed, and what they may take in between."""
_IMAGES = 16
"""Images that a stream of frames repeats."""
_LONGEST_CALL_S = 5.0
"""Batches with which a call of the slowest engine would take longer are not measured."""
_STREAM_S = 0.25
"""Time for a stream of frames."""
_TIMED_ON_DEVICE = 50
"""Inferences timed with CUDA events."""


@dataclass(frozen=True)
class Config(RaceOptions):
    """Which engines are measured, and for how long."""

    target: str
    """Name of the target of the engines."""
    gpu: Gpu | None
    """The GPU that the target declares."""
    variants: list[str]
    """Variants that are built for the target, the rungs of the ladder first and in its order."""
    batch_sizes: list[Annotated[int, AtLeast(2)]]
    """Batch sizes measured after batch 1. Skipped: above the target's max_batch, or with calls of more than 5 s."""
    windows: Windows
    """When an engine counts as stable, and when the rounds at a larger batch end before their time budget."""
    budget_batch_s: Annotated[float, MoreThan(0)]
    """Time for the bursts of an engine at each of batch_sizes."""
    concurrencies: list[Annotated[int, AtLeast(1)]]
    """Numbers of concurrent threads for the throughput at batch 1. Empty: not measured."""
    throughput_s: Annotated[float, MoreThan(0)]
    """Time for each of concurrencies; at least as long as the counter of the device's energy needs."""


Report = BenchmarkReport


@dataclass(frozen=True)
class _Field:
    """The engines of a target, and the name under which each different file is measured."""

    engines: Mapping[str, Path]
    """Folder by variant."""
    manifests: Mapping[str, "EngineManifest"]
    """By variant."""
    measured_as: Mapping[str, str]
    """By variant, if it was built."""
    reference: Path
    reference_sha256: str
    reference_target: str

    @property
    def names(self) -> list[str]:
        """The names of the files of this target that are measured."""
        return list(dict.fromkeys(self.measured_as.values()))

    @property
    def device(self) -> str:
        """The device of the target."""
        return self._target.device

    @property
    def max_batch(self) -> int:
        """The largest batch of the target."""
        return self._target.max_batch

    @property
    def _target(self) -> "Target":
        return next(iter(self.manifests.values())).target

    @property
    def racing(self) -> dict[str, Path]:
        """The files that run in the rounds, the reference first."""
        own = {name: self.engines[name] for name in self.names if name != REFERENCE}
        return {REFERENCE: self.reference, **own}


@dataclass(frozen=True)
class _Measured:
    """What was measured of one engine file."""

    latency: Latency
    bursts_ms: Mapping[int, Bursts]
    """By batch size."""
    layers_ms: Mapping[str, float]
    description: Mapping[str, Any]
    """The description that the engine's runner returns."""


def environment(cfg: Config) -> dict[str, str] | None:
    """Return the machine; None without the GPU of the target."""
    return measuring_environment() if cfg.gpu is None or has_gpu(cfg.gpu) else None


def measures(_: Config) -> bool:
    """Return True: while this runs, nothing else may be measured on this machine."""
    return True


def reads(cfg: Config, *, builds: Path, **_: Path) -> dict[str, list[Path]]:
    """Return the engines of this configuration; another one may have left more of them."""
    return {"builds": [engine_folder(builds, variant) for variant in cfg.variants]}


def benchmark(cfg: Config, *, builds: Path, reference: Path, images: Path, out: Path) -> Report:
    """Write latencies.csv and layers.csv into a folder for each variant, and return latencies and speed ratios.

    ``builds`` has a ``*`` in place of the variant, so that other targets, which other machines may build, are not
    inputs; ``images`` is the file of the calibration images, which are decoded and streamed. Identical files are
    measured once; the reference and the control have a latencies.csv of their own.
    Raises ArtifactError if the reference was not built, if an engine takes images of another size than the reference,
    or if a process dies.
    """
    field = _line_up(cfg, builds, reference)
    machine = read_machine(field.device)
    if not field.measured_as:
        logger.warning("benchmark: target %s has no engine", cfg.target)
        return Report(
            engines=_describe_all(field, {}),
            reference_sha256=field.reference_sha256,
            reference_target=field.reference_target,
            timed=cfg.timed,
            race=None,
            is_inconclusive=False,
            machine=machine,
            surroundings=None,
        )
    logger.info("benchmark: %d different engines of target %s", len(field.names), cfg.target)
    with TemporaryDirectory() as folder:
        write_frames(images, Path(folder), limit=_IMAGES)
        rounds, measured, surroundings = _measure(cfg, field, Path(folder))
    _write_tables(field, measured, rounds, out)
    race = rounds.race
    logger.info(
        "benchmark: %s, A/A spread %.1f %% after %d rounds, %d pairs undecided",
        cfg.target,
        100 * race.aa_ratio.spread,
        race.num_rounds,
        len(race.undecided),
    )
    return Report(
        engines=_describe_all(field, measured),
        reference_sha256=field.reference_sha256,
        reference_target=field.reference_target,
        timed=cfg.timed,
        race=race,
        is_inconclusive=race.aa_ratio.spread > cfg.max_aa_spread,
        machine=machine,
        surroundings=surroundings,
    )


def _line_up(cfg: Config, builds: Path, reference: Path) -> _Field:
    from tasks.parts.engines.manifest import read_engine_manifest

    engines = {variant: engine_folder(builds, variant) for variant in cfg.variants}
    manifests = {variant: read_engine_manifest(engine) for variant, engine in engines.items()}
    base = read_engine_manifest(reference)
    files = {variant: manifest.sha256 for variant, manifest in manifests.items() if manifest.is_built}
    for variant in files:
        _check_comparable(manifests[variant], base, engines[variant], reference)
    first = {sha256: variant for variant, sha256 in reversed(files.items())}
    if base.target.name == cfg.target:  # else it is another engine: eager PyTorch on CPU and GPU
        first[base.sha256] = REFERENCE
    measured_as = {variant: first[sha256] for variant, sha256 in files.items()}
    return _Field(engines, manifests, measured_as, reference, base.sha256, base.target.name)


def _check_comparable(
    manifest: "EngineManifest", base: "EngineManifest", engine: Path, reference: Path
) -> None:
    if not base.is_built:
        raise ArtifactError(
            f"{reference}: the reference engine was not built ({base.status}: {base.reason}), but all speed-ups "
            "refer to it. Fix its build first."
        )
    size, expected = (manifest.card.height, manifest.card.width), (base.card.height, base.card.width)
    if size != expected:
        raise ArtifactError(
            f"{engine}: takes images of {size}, but the reference {reference} takes images of {expected} "
            "(height, width). Build both from variants of the same data set."
        )


def _measure(cfg: Config, field: _Field, frames: Path) -> tuple["Rounds", dict[str, _Measured], Surroundings]:
    """Measure every file in its process; the result is by name."""
    from tasks.parts.measuring.engine_race import open_race

    with open_race(cfg, field.racing, device=field.device) as race:
        rounds = race.run(contenders=field.names)
        batches, measured = _larger_batches(cfg, field, rounds), {}
        for name in field.names:
            runner = race.runners[name]
            latency, bursts_ms = _measure_alone(
                cfg, field, runner.process, rounds.bursts_ms[name], batches, runner.warm_up, frames
            )
            layers_ms = _time_layers(cfg, runner.process, latency.at_batch_1.latency_ms_p50)
            measured[name] = _Measured(latency, bursts_ms, layers_ms, runner.description)
        return rounds, measured, race.surroundings()


def _larger_batches(cfg: Config, field: _Field, rounds: "Rounds") -> list[int]:
    """Return the batches that the engines take and that no engine needs too long for."""
    slowest_ms = max(
        statistics.median(call_ms for burst_ms in rounds.bursts_ms[name] for call_ms in burst_ms)
        for name in field.names
    )
    fitting = sorted({batch for batch in cfg.batch_sizes if batch <= field.max_batch})
    measured = [batch for batch in fitting if batch * slowest_ms <= 1000 * _LONGEST_CALL_S]
    if measured != fitting:
        logger.warning(
            "benchmark: batches of %s are not measured, since one image takes %.0f ms",
            ", ".join(map(str, fitting[len(measured) :])),
            slowest_ms,
        )
    return measured


def _measure_alone(
    cfg: Config,
    field: _Field,
    process: "EngineProcess",
    at_batch_1_ms: Bursts,
    batches: Sequence[int],
    start: "WarmUp",
    frames: Path,
) -> tuple[Latency, dict[int, Bursts]]:
    """Measure an engine at larger batches and under load while the others wait; return also all its bursts."""
    gpu_memory_mib = read_gpu_memory_mib(process.pid) if field.device == CUDA else None
    bursts_ms: dict[int, Bursts] = {1: at_batch_1_ms}
    for batch in batches:
        process.warm_up(batch, seconds=cfg.warm_up_ms / 1000)
        bursts_ms[batch] = _run_bursts(cfg, process, batch)
    latencies = tuple(
        summarise(
            bursts,
            batch=batch,
            windows=cfg.windows,
            device=process.time_on_device(batch, num_iterations=_TIMED_ON_DEVICE),
        )
        for batch, bursts in bursts_ms.items()
    )
    loads = {count: _measure_load(cfg, process, count, field.device) for count in cfg.concurrencies}
    num_frames = _number_in(_TIMED_FRAMES_S, latencies[0].latency_ms_p50, *_TIMED_FRAMES)
    stream = process.time_frames(frames, num_frames=num_frames, seconds=_STREAM_S)
    latency = Latency(
        batches=latencies,
        throughputs=tuple(_sum_up_load(count, load) for count, load in loads.items()),
        phases_ms={
            name: statistics.median(durations_ns) / 1e6 for name, durations_ns in stream.phases_ns.items()
        },
        frames_per_s=stream.frames_per_s,
        load_ms=start.load_ms,
        first_call_ms=start.first_call_ms,
        memory_mib=start.memory_mib,
        memory_total_mib=start.memory_total_mib,
        gpu_memory_mib=gpu_memory_mib,
        energy_note=loads[max(loads)].energy_note if loads else "benchmark.concurrencies is empty",
    )
    return latency, bursts_ms


def _time_layers(cfg: Config, process: "EngineProcess", latency_ms: float) -> dict[str, float]:
    """Return the typical milliseconds of each layer in an inference of `latency_ms`; empty without a profiler.

    The clock of a machine changes between the rounds and a profile. So each profile stands between two bursts, and
    its times are multiplied by the latency in the rounds over that of these bursts.
    """
    found: dict[str, list[float]] = {}
    num_profiled = _number_in(_PROFILED_S, latency_ms, *_PROFILED)
    for _ in range(_PROFILES):
        beside_ns = process.burst(1, seconds=cfg.burst_ms / 1000, min_calls=cfg.min_calls)
        profile_ms = process.profile(num_iterations=num_profiled)
        if not profile_ms:
            return {}
        beside_ns += process.burst(1, seconds=cfg.burst_ms / 1000, min_calls=cfg.min_calls)
        scale = latency_ms / (statistics.median(beside_ns) / 1e6)
        for name, milliseconds in profile_ms.items():
            found.setdefault(name, []).append(scale * milliseconds)
    return {name: statistics.median(times_ms) for name, times_ms in found.items()}


def _number_in(seconds: float, call_ms: float, fewest: int, most: int) -> int:
    """Return how many calls fit into a time, within limits."""
    return min(most, max(fewest, int(1000 * seconds / call_ms)))


def _run_bursts(cfg: Config, process: "EngineProcess", batch: int) -> list[list[float]]:
    bursts_ms: list[list[float]] = []
    end = time.monotonic() + cfg.budget_batch_s
    while len(bursts_ms) < FEWEST_ROUNDS or (
        time.monotonic() < end and not cfg.windows.are_stable(bursts_ms)
    ):
        burst_ns = process.burst(batch, seconds=cfg.burst_ms / 1000, min_calls=cfg.min_calls)
        bursts_ms.append([value / 1e6 for value in burst_ns])
    return bursts_ms


def _measure_load(cfg: Config, process: "EngineProcess", concurrency: int, device: str) -> "Load":
    seconds = max(cfg.throughput_s, shortest_metered_s(device)) / _LOAD_WINDOWS
    return process.load(1, concurrency=concurrency, seconds=seconds, num_windows=_LOAD_WINDOWS)


def _sum_up_load(concurrency: int, load: "Load") -> Throughput:
    return Throughput(
        concurrency=concurrency,
        throughput_per_s=statistics.median(load.calls_per_s),
        throughput_per_s_low=min(load.calls_per_s),
        throughput_per_s_high=max(load.calls_per_s),
        latency_ms_p50=statistics.median(load.latencies_ns) / 1e6,
        energy_mj_per_image=None if load.joules is None else 1000 * load.joules / len(load.latencies_ns),
    )


def _describe_all(field: _Field, measured: Mapping[str, _Measured]) -> dict[str, EngineMeasurement]:
    """Return what is known of every variant; `measured` is by the name of the file."""
    names = {variant: field.measured_as.get(variant, "") for variant in field.manifests}
    return {
        variant: _describe(manifest, names[variant], measured.get(names[variant]))
        for variant, manifest in field.manifests.items()
    }


def _describe(manifest: "EngineManifest", name: str, measured: _Measured | None) -> EngineMeasurement:
    description = measured.description if measured else {}
    return EngineMeasurement(
        status=manifest.status,
        reason=manifest.reason,
        engine_sha256=manifest.sha256,
        measured_as=name,
        latency=measured.latency if measured else None,
        runtime=manifest.target.runtime,
        runtime_version=str(description.get("runtime_version", manifest.runtime_version)),
        provider=description.get("provider", manifest.provider),
        num_threads=description.get("num_threads", manifest.target.num_threads),
        options=dict(description.get("options", {})),
    )


def _write_tables(field: _Field, measured: Mapping[str, _Measured], rounds: "Rounds", out: Path) -> None:
    """Write the tables of every variant, and the latencies of the reference and of the control."""
    from tasks.parts.measuring.tables import write_latencies, write_layers

    for name in (REFERENCE, CONTROL):
        write_latencies({1: rounds.bursts_ms[name]}, out / name)
    for variant, name in field.measured_as.items():
        write_latencies(measured[name].bursts_ms, out / variant)
        write_layers(field.engines[variant], measured[name].layers_ms, out / variant)
