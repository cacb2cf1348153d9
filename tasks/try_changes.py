"""Try what would make an engine faster: predict changes, build the most promising ones and race them.

Off unless `try_changes.variant` names an engine, because builds and race take a minute or more per target.
"""

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from tasks.core.bounds import AtLeast
from tasks.parts.engines.machine import target_environment
from tasks.parts.engines.target import Target
from tasks.parts.measuring.machine_state import measuring_environment
from tasks.parts.measuring.race import RaceOptions, engine_folder
from tasks.parts.what_if.report import WhatIf

logger = logging.getLogger(__name__)

PAGE_FILE = "what_if.md"
TABLE_FILE = "what_if.csv"


@dataclass(frozen=True)
class Config(RaceOptions):
    """Which engine is changed, how many changes are built, and how they are raced."""

    target: Target
    """The target of the engine."""
    variant: str
    """The variant whose engine is changed."""
    parent: str | None
    """The float variant that it was made from; None if it is one itself."""
    num_changes: Annotated[int, AtLeast(1)]
    """Changes that are built and raced, those with the largest predicted saving."""
    num_turns: Annotated[int, AtLeast(3)]
    """How often engine and float twin are profiled in turns; predictions rest on the fastest ones."""


Report = WhatIf


def environment(cfg: Config) -> dict[str, str] | None:
    """Return the machine, and what an engine depends on here; None without the GPU or the runtime of the target."""
    engine = target_environment(cfg.target)
    return None if engine is None else {**engine, **measuring_environment()}


def measures(_: Config) -> bool:
    """Return True: while this runs, nothing else may be measured on this machine."""
    return True


def reads(cfg: Config, *, builds: Path, **_: Path) -> dict[str, list[Path]]:
    """Return the engine and its float twin."""
    return {"builds": [engine_folder(builds, name) for name in (cfg.variant, cfg.parent) if name]}


def try_changes(cfg: Config, *, builds: Path, roofs: Path, model: Path, images: Path, out: Path) -> Report:
    """Write what_if.md and what_if.csv: changes of an engine with their predicted and measured saving.

    ``builds`` has a ``*`` in place of the variant. `roofs` is the output of measure_machine for the target, `model`
    the ONNX graph of the variant, `images` the file of the calibration images. Raises TargetMismatch if the machine's
    runtime is not the declared one, ArtifactError if a process dies.
    """
    import tempfile

    from tasks.core.reports import read_report
    from tasks.parts.engines.manifest import read_engine_manifest
    from tasks.parts.onnx_graphs.graph import name_nodes, read_graph
    from tasks.parts.roofs.roofs import Roofs
    from tasks.parts.tables import write_table
    from tasks.parts.what_if import trial
    from tasks.parts.what_if.predict import predict_changes
    from tasks.parts.what_if.report import sum_up, write_page
    from tasks.parts.what_if.timing import time_engines

    engines = {name: engine_folder(builds, name) for name in (cfg.variant, cfg.parent) if name}
    reached = read_report(Roofs, roofs)
    missing = [name for name, engine in engines.items() if not read_engine_manifest(engine).is_built]
    if missing or reached.reason:
        reason = reached.reason or f"{', '.join(missing)} was not built"
        report = WhatIf(cfg.target.name, cfg.variant, 0.0, (), (), 0.0, 0, reason)
    else:
        graph = read_graph(model)
        name_nodes(graph)
        views = time_engines(engines, reached, cfg, device=cfg.target.device, num_turns=cfg.num_turns)
        engine = views[cfg.variant]
        changes = predict_changes(engine, views.get(cfg.parent or ""), graph)
        with tempfile.TemporaryDirectory() as folder:
            trials = trial.try_changes(
                changes[: cfg.num_changes],
                engines[cfg.variant],
                graph,
                cfg.target,
                images=images,
                folder=Path(folder),
                options=cfg,
            )
        report = sum_up(engine, cfg.target.name, changes, trials)
    (out / PAGE_FILE).write_text(write_page(report), encoding="utf-8")
    if rows := [*report.tried, *report.not_tried]:
        write_table(out / TABLE_FILE, rows)
    for row in report.tried:
        measured = "not built" if row.measured_saving is None else f"{row.measured_saving:+.1%}"
        logger.info(
            "try_changes: %s: predicted %+.1f %%, measured %s",
            row.title,
            100 * row.predicted_saving,
            measured,
        )
    return report
