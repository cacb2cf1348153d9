"""Measure images per second within a latency bound: a grid of batch, lanes and threads, and open arrivals.

Off unless `measure_load.variants` names engines, because each takes a minute or more. docs/load.md explains the
numbers.
"""

import logging
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from tasks.core.bounds import Distinct, MinItems
from tasks.parts.engines.gpu import Gpu
from tasks.parts.engines.machine import has_gpu
from tasks.parts.measuring.load_grid import LoadOptions
from tasks.parts.measuring.load_report import EngineLoad, LoadReport
from tasks.parts.measuring.machine_state import measuring_environment, read_machine
from tasks.parts.measuring.race import engine_folder
from tasks.parts.measuring.surroundings import QuietLimits

if TYPE_CHECKING:
    from tasks.parts.engines.manifest import EngineManifest

logger = logging.getLogger(__name__)

PAGE_FILE = "load.md"


@dataclass(frozen=True)
class Config(LoadOptions):
    """Which engines are measured, and how."""

    target: str
    """Name of the target of the engines."""
    gpu: Gpu | None
    """The GPU that the target declares."""
    variants: Annotated[list[str], MinItems(1), Distinct()]
    """Variants whose engines are measured."""
    together: Annotated[list[str], Distinct()]
    """Variants whose engines also run at the same time, each in its process. Empty: none do."""
    quiet: QuietLimits
    """When the machine is quiet enough to begin."""


Report = LoadReport


def environment(cfg: Config) -> dict[str, str] | None:
    """Return the machine; None without the GPU of the target."""
    return measuring_environment() if cfg.gpu is None or has_gpu(cfg.gpu) else None


def measures(_: Config) -> bool:
    """Return True: while this runs, nothing else may be measured on this machine."""
    return True


def reads(cfg: Config, *, builds: Path) -> dict[str, list[Path]]:
    """Return the engines of this configuration; another one may have left more of them."""
    return {"builds": [engine_folder(builds, name) for name in dict.fromkeys([*cfg.variants, *cfg.together])]}


def measure_load(cfg: Config, *, builds: Path, out: Path) -> Report:
    """Write load.md, and return what the engines do under load.

    ``builds`` has a ``*`` in place of the variant. Identical files are measured once. Raises ArtifactError if a
    process dies.
    """
    from tasks.parts.engines.manifest import read_engine_manifest
    from tasks.parts.measuring.load_grid import measure_together
    from tasks.parts.measuring.load_page import write_page
    from tasks.parts.measuring.surroundings import start_watch, wait_until_quiet

    names = list(dict.fromkeys([*cfg.variants, *cfg.together]))
    manifests = {name: read_engine_manifest(engine_folder(builds, name)) for name in names}
    built = {name: manifest for name, manifest in manifests.items() if manifest.is_built}
    engines: dict[str, EngineLoad] = {}
    together = [name for name in cfg.together if name in built]
    device = next(iter(manifests.values())).target.device
    quiet = wait_until_quiet(cfg.quiet)
    watch = start_watch(quiet, device) if built else None
    for name in (name for name in cfg.variants if name in built):
        same = next((each for each in engines.values() if each.engine_sha256 == built[name].sha256), None)
        engines[name] = same or measure_engine(cfg, engine_folder(builds, name), built[name], name)
    folders = {name: engine_folder(builds, name) for name in together}
    report = LoadReport(
        target=cfg.target,
        max_p99_ms=cfg.max_p99_ms,
        timed=cfg.timed,
        num_cpus=_num_cpus(),
        engines=engines,
        together=measure_together(folders, cfg, built[together[0]].target.num_threads) if together else (),
        machine=read_machine(device),
        surroundings=watch.finish() if watch else None,
    )
    (out / PAGE_FILE).write_text(write_page(report), encoding="utf-8")
    return report


def measure_engine(cfg: Config, engine: Path, manifest: "EngineManifest", name: str) -> EngineLoad:
    """Measure one engine: the grid, the best cell with each tuning, and the arrivals.

    Raises ArtifactError if a process dies.
    """
    from tasks.parts.measuring.load_grid import find_knee, measure_grid, open_bench, plan_grid, tune

    settings = plan_grid(manifest.target, cfg, num_cpus=_num_cpus())
    logger.info("measure_load: %s on %s, %d cells", name, cfg.target, len(settings))
    with open_bench(engine, cfg) as bench:
        cells = measure_grid(bench.measure, settings, cfg)
        tuned = tune(bench.measure, cells, cfg, manifest.target)
        arrivals = find_knee(bench, tuned.best.setting, cfg) if tuned else None
    load = EngineLoad(
        engine_sha256=manifest.sha256,
        measured_as=name,
        cells=tuple(cells),
        aa_spread=tuned.aa_spread if tuned else None,
        tried=tuned.tried if tuned else (),
        best=tuned.best if tuned else None,
        arrivals=arrivals,
    )
    logger.info("measure_load: %s on %s: %s", name, cfg.target, _in_words(load))
    return load


def _num_cpus() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _in_words(load: EngineLoad) -> str:
    if load.best is None:
        return "no cell holds the bound"
    knee = load.arrivals.knee_per_s if load.arrivals else None
    return (
        f"{load.best.throughput_per_s:.4g} images/s with {load.best.setting.describe()}, knee of open arrivals "
        + ("unknown" if knee is None else f"{knee:.4g} images/s")
    )
