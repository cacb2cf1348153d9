"""Log a pipeline to MLflow: one run for the pipeline, and one for each engine."""

import dataclasses
import json
import tempfile
from collections.abc import Sequence
from pathlib import Path

from tasks.core.config import PARAMS_FILE, read_params
from tasks.core.reports import KEY_FILE, read_key
from tasks.core.tracking.config import TrackingConfig, registered_name
from tasks.core.tracking.pending import log_or_keep
from tasks.core.tracking.records import ENGINE_FOLDER, LOAD_FRONT_TAG, DataSet, RunRecord, Tracked
from tasks.parts.selection.bundle import write_companions
from tasks.parts.selection.engine_row import (
    ENGINES_FILE,
    REFERENCE_NAME,
    EngineRow,
    Verdict,
    fastest_first,
    flatten,
    measured_names,
    read_rows,
)
from tasks.parts.selection.headline import class_warnings_of
from tasks.parts.selection.stage_folders import StageFolders
from tasks.parts.selection.stage_reports import engine_file, stage_keys, written_files

_PAGES = ("report.html", "report.md", "pareto.png", ENGINES_FILE, "picks.json")

TRAININGS = ("train", "distill", "finetune", "quantize_aware_train")
"""The stages whose curves are runs in MLflow: those with a table of epochs (`CURVES`)."""

_TEXTS = (
    "metric",
    "iou",
    "boundary_iou_by_class",
    "outputs",
    "parent",
    "unseen_split",
    "unseen_verdict",
    "unseen_reason",
    "class_losses",
    "class_warnings",
    "frame_note",
    "is_inconclusive",
    "engine_sha256",
    "reference_sha256",
    "load_setting",
    "load_options",
    "load_front",
)
"""Measured values that are not numbers to compare runs by."""


def log_selection(
    tracking: TrackingConfig, selection: Path, folders: StageFolders, data: DataSet, splits: Path
) -> Tracked | None:
    """Log the pipeline with the table of the files of each split, its engines and its picks.

    Returns None if MLflow does not answer.

    Raises ArtifactError if an engine is not the file that was measured.
    """
    rows = read_rows(selection)
    picked = {row.target: row.name for row in rows if row.picked}
    artifacts = (*(("", selection / page) for page in _PAGES), ("", splits))
    best, metrics = _summary(rows)
    trainings = training_keys(folders.builds.parent)
    pipeline = RunRecord("pipeline", metrics, {"best": best}, artifacts, data, trainings=trainings)
    with tempfile.TemporaryDirectory() as companions:
        return log_or_keep(
            tracking,
            pipeline=pipeline,
            candidates=[_record(folders, row, data, Path(companions) / row.name) for row in rows],
            picks={registered_name(tracking, row.target): picked.get(row.target) for row in rows},
        )


def training_keys(outputs: Path) -> dict[str, str]:
    """Return the key of each training's output by its address, as far as params.yaml has a section for it.

    An output without one is a leftover of another pipeline.
    """
    params = read_params() if PARAMS_FILE.is_file() else {}
    keys = {}
    for stage in TRAININGS:
        for file in sorted((outputs / stage).glob(f"**/{KEY_FILE}")):
            section, parts = params, file.parent.relative_to(outputs).parts
            for part in parts:
                section = section.get(part) or {}
            if section:
                keys[".".join(parts)] = read_key(file.parent)
    return keys


def _summary(rows: Sequence[EngineRow]) -> tuple[str, dict[str, float]]:
    """Return the name of the fastest pick, and the metrics of the pipeline."""
    picks = [row for row in rows if row.picked and row.measured]
    num_accepted = sum(row.verdict is Verdict.ACCEPT for row in rows)
    metrics = {"num_engines": float(len(rows)), "num_accepted": float(num_accepted)}
    if not picks:
        return "none", metrics
    best = fastest_first(picks)[0]
    return best.name, metrics | {f"best_{name}": value for name, value in _metrics(best).items()}


def _record(folders: StageFolders, row: EngineRow, data: DataSet, companions: Path) -> RunRecord:
    artifacts = written_files(folders, row)
    if row.measured is not None:
        file = engine_file(folders, row)
        beside = write_companions(file.parent, flatten(row), companions)
        places = [(str(Path(ENGINE_FOLDER) / path.parent.relative_to(companions)), path) for path in beside]
        artifacts = ((ENGINE_FOLDER, file), *places, *artifacts)
    tags = {
        "variant": row.variant,
        "target": row.target,
        "metric": row.measured.accuracy.metric if row.measured else "",
        "precision": row.precision,
        "pareto": str(row.pareto).lower(),
        "picked": str(row.picked).lower(),
        "verdict": row.verdict,
        "reason": row.reason,
        "reference": row.conditions.get(REFERENCE_NAME, ""),
        "engine_sha256": row.measured.engine_sha256 if row.measured else "",
        "metric_sha256": data.metric_sha256,
    }
    if row.measured is not None and row.measured.load is not None:
        tags |= {
            "load_setting": row.measured.load.load_setting,
            LOAD_FRONT_TAG: json.dumps([dataclasses.asdict(each) for each in row.measured.load.load_front]),
        }
    losses, unseen = (row.measured.losses, row.measured.unseen) if row.measured else (None, None)
    if unseen is not None:
        tags |= {"unseen_verdict": unseen.unseen_verdict, "unseen_split": unseen.unseen_split}
    if losses is not None and losses.class_warnings:
        tags["class_warnings"] = class_warnings_of(row)
    keys = {f"key_{stage}": key for stage, key in stage_keys(folders, row).items()}
    return RunRecord(row.name, _metrics(row), tags | keys, artifacts, data)


def _metrics(row: EngineRow) -> dict[str, float]:
    numbers = {name: flatten(row)[name] for name in measured_names() if name not in _TEXTS}
    return {name: float(value) for name, value in numbers.items() if value is not None}
