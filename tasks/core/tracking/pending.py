"""Keep runs on disk while MLflow is not available, and send them later."""

import contextlib
import dataclasses
import hashlib
import json
import logging
import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

from tasks.core.errors import TrackingRefused, TrackingUnavailable
from tasks.core.locks import hold_lock
from tasks.core.tracking.config import TrackingConfig
from tasks.core.tracking.log import log_pipeline
from tasks.core.tracking.records import DataSet, RunRecord, Tracked

logger = logging.getLogger(__name__)

PENDING = Path("artifacts/.pending")
"""The folder of pending runs: one folder for each pipeline, with copies of the files."""

_REFUSED = PENDING / "refused"
"""What MLflow refused: it is kept, and not sent again."""

_RECORD_FILE, _REASON_FILE = "record.json", "reason.txt"


def log_or_keep(
    config: TrackingConfig,
    *,
    pipeline: RunRecord,
    candidates: Sequence[RunRecord],
    picks: Mapping[str, str | None],
) -> Tracked | None:
    """Log pending runs, then this pipeline; if MLflow is not available, keep it on disk and return None.

    None also, with an error in the log, if MLflow refuses this pipeline.
    """
    try:
        send_pending(config)
        return log_pipeline(config, pipeline=pipeline, candidates=candidates, picks=picks)
    except TrackingUnavailable as error:
        _keep((pipeline, *candidates), picks)
        logger.warning("%s %s", error, describe_pending())
    except TrackingRefused as error:
        logger.error("%s", error)
    return None


def send_pending(config: TrackingConfig) -> int:
    """Log pending runs, oldest first, and delete them from disk; return the number of runs added.

    What MLflow refuses is set aside, so that it stops no others.

    Raises TrackingUnavailable when MLflow does not answer; the rest stays pending.
    """
    num_added = 0
    if not PENDING.is_dir():
        return num_added
    with _lock():
        for file, runs, picks in _read_pending():
            try:
                tracked = log_pipeline(config, pipeline=runs[0], candidates=runs[1:], picks=picks)
            except TrackingRefused as error:
                _set_aside(file.parent, str(error))
                continue
            num_added += tracked.num_runs_added
            file.unlink()
            shutil.rmtree(file.parent)
    return num_added


def _set_aside(folder: Path, reason: str) -> None:
    place = _REFUSED / folder.name
    shutil.rmtree(place, ignore_errors=True)
    place.parent.mkdir(exist_ok=True)
    folder.rename(place)
    (place / _REASON_FILE).write_text(f"{reason}\n", encoding="utf-8")
    logger.warning("%s Its runs are kept in %s and not sent again.", reason, place)


def has_pending() -> bool:
    """Return whether any runs are pending."""
    return any(PENDING.glob(f"*/{_RECORD_FILE}"))


def describe_pending() -> str:
    """Describe how many runs are pending and how to send them."""
    num_runs = sum(len(runs) for _, runs, _ in _read_pending())
    return (
        f"{num_runs} runs are pending in {PENDING}: the next run sends them, or `python -m "
        "tasks.core.tracking`."
    )


def _lock() -> contextlib.AbstractContextManager[None]:
    """Let one process at a time work in the folder of pending runs."""
    return hold_lock(
        PENDING.parent / ".locks" / "pending",
        str(os.getpid()),
        before_waiting=lambda pid: logger.info("waiting for process %s, which is using %s", pid, PENDING),
    )


def _keep(runs: Sequence[RunRecord], picks: Mapping[str, str | None]) -> None:
    """Copy everything that logging needs, since the next run replaces the originals; the record is written last."""
    digest = hashlib.sha256("".join(run.content_digest() for run in runs).encode()).hexdigest()
    content = {
        "runs": [
            dataclasses.asdict(run) | {"artifacts": [(folder, file.name) for folder, file in run.artifacts]}
            for run in runs
        ],
        "picks": dict(picks),
    }
    kept = PENDING / digest[:12]
    with _lock():
        shutil.rmtree(kept, ignore_errors=True)
        try:
            for number, run in enumerate(runs):
                for folder, file in run.artifacts:
                    copy = kept / str(number) / folder / file.name
                    copy.parent.mkdir(parents=True, exist_ok=True)
                    shutil.copyfile(file, copy)
            (kept / "draft").write_text(json.dumps(content), encoding="utf-8")
            (kept / "draft").rename(kept / _RECORD_FILE)
        except OSError:
            shutil.rmtree(kept, ignore_errors=True)
            raise


def _read_pending() -> list[tuple[Path, list[RunRecord], dict[str, str | None]]]:
    """Return the file, the runs and the picks of every pending pipeline, oldest first."""
    pipelines = []
    for file in sorted(PENDING.glob(f"*/{_RECORD_FILE}"), key=lambda file: file.stat().st_mtime_ns):
        try:
            content = json.loads(file.read_text(encoding="utf-8"))
        except ValueError:
            logger.warning("ignoring %s, which is damaged; remove %s", file, file.parent)
            continue
        runs = []
        for number, run in enumerate(content["runs"]):
            copies = (
                (folder, file.parent / str(number) / folder / name) for folder, name in run["artifacts"]
            )
            data = DataSet(**run["data"]) if run.get("data") else None
            runs.append(RunRecord(**(run | {"artifacts": tuple(copies), "data": data})))
        pipelines.append((file, runs, content["picks"]))
    return pipelines
