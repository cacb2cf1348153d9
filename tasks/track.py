"""Log the engines of a selection to MLflow, and point the alias ``candidate`` of each target to its pick.

The same content is logged once. The stage is fresh as long as MLflow has it and the aliases are where they were put:
a store that was lost is filled again, and an alias that moved because another configuration ran moves back.
"""

import logging
from dataclasses import dataclass
from pathlib import Path

from tasks.core.fingerprint import digest
from tasks.core.tracking.config import TrackingConfig
from tasks.core.tracking.records import DataSet
from tasks.core.tracking.state import is_logged
from tasks.parts.selection.stage_folders import StageFolders

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Config(TrackingConfig):
    """Where the engines are logged, and as what."""

    data_name: str
    """Name of the data set in MLflow."""


@dataclass(frozen=True)
class Report:
    """What MLflow has of the selection."""

    run: str | None
    """``<experiment id>/runs/<run id>`` of the pipeline; None if nothing is logged or MLflow did not answer."""
    candidates: dict[str, str | None]
    """Registered model -> version with the alias ``candidate``; None for a target without a pick."""


def still_holds(cfg: Config, report: Report) -> bool:
    """Return whether MLflow still has what was logged, without importing it where that takes no more than a query."""
    if not cfg.enabled:
        return True
    return report.run is not None and is_logged(cfg, report.run.rpartition("/")[2], report.candidates)


def reads(
    _: Config,
    *,
    selection: Path,
    builds: Path,
    validations: Path,
    benchmarks: Path,
    diffs: Path,
    **_data: Path,
) -> dict[str, list[Path]]:
    """Return the outputs of the engines that were judged; another configuration may have left more of them."""
    from tasks.parts.selection.engine_row import read_engine_names

    return StageFolders(builds, validations, benchmarks, diffs).of_engines(read_engine_names(selection))


def track(
    cfg: Config,
    *,
    selection: Path,
    builds: Path,
    validations: Path,
    benchmarks: Path,
    diffs: Path,
    data: Path,
    splits: Path,
    out: Path,
) -> Report:
    """Log a run for the pipeline and one for each engine, with files, and a model version for each pick.

    `splits` is the table of the files of each split, which the run of the pipeline holds. If MLflow does not answer,
    the runs stay pending on disk, and the next run sends them.

    Raises ArtifactError if an engine is not the file that was measured.
    """
    from tasks.parts.selection.run_records import log_selection

    if not cfg.enabled:
        logger.info("track: turned off (track.enabled)")
        return Report(None, {})
    data_set = DataSet(cfg.data_name, digest(data), data.as_posix(), _metric_sha256(data))
    folders = StageFolders(builds, validations, benchmarks, diffs)
    tracked = log_selection(cfg, selection, folders, data_set, splits)
    if tracked is None:
        return Report(None, {})
    logger.info(
        "track: MLflow has %d new runs and %d new versions",
        tracked.num_runs_added,
        tracked.num_versions_added,
    )
    return Report(f"{tracked.experiment_id}/runs/{tracked.parent_run_id}", dict(tracked.candidates))


def _metric_sha256(data: Path) -> str:
    from tasks.parts.data.dataset import METRIC_FILE
    from tasks.parts.engines.manifest import sha256_of

    file = data / METRIC_FILE
    return sha256_of(file) if file.is_file() else ""
