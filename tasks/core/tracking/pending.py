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
from typing import Any

import dacite

from tasks.core.errors import ArtifactError, TrackingRefused, TrackingUnavailable
from tasks.core.locks import hold_lock
from tasks.core.tracking.config import TrackingConfig
from tasks.core.tracking.log import log_pipeline
from tasks.core.tracking.records import RunRecord, Tracked

logger = logging.getLogger(__name__)

PENDING = Path("artifacts/.pending")
"""The folder of pending runs: one folder for each pipeline, with copies of the files."""

_REFUSED = PENDING / "refused"
"""What MLflow refused, or what cannot be read: it is kept, and not sent again."""

_RECORD_FILE, _REASON_FILE = "record.json", "reason.txt"

_AS_WRITTEN = dacite.Config(cast=[tuple], type_hooks={Path: Path}, strict=True)
"""How the JSON of a run becomes a record: no unknown fields, every value of its type."""


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

    What cannot be read, and what MLflow refuses, is set aside, so that it stops no others.

    Raises TrackingUnavailable when MLflow does not answer; the rest stays pending.
    """
    num_added = 0
    if not PENDING.is_dir():
        return num_added
    with _lock():
        for file in _pending_files():
            try:
                runs, picks = _read_pending(file)
                tracked = log_pipeline(config, pipeline=runs[0], candidates=runs[1:], picks=picks)
            except (ArtifactError, TrackingRefused) as error:
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
    logger.warning(
        "%s Its runs are kept in %s and not sent again. Once that is mended, move the folder to %s.",
        reason,
        place,
        PENDING,
    )


def has_pending() -> bool:
    """Return whether any runs are pending."""
    return any(PENDING.glob(f"*/{_RECORD_FILE}"))


def describe_pending() -> str:
    """Describe how many runs are pending and how to send them."""
    num_runs = 0
    for file in _pending_files():
        with contextlib.suppress(ArtifactError):  # sending it says what is wrong
            num_runs += len(_read_pending(file)[0])
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
            kept.mkdir(parents=True)
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


def _pending_files() -> list[Path]:
    """Return the record of every pending pipeline, oldest first."""
    return sorted(PENDING.glob(f"*/{_RECORD_FILE}"), key=lambda file: file.stat().st_mtime_ns)


def _read_pending(file: Path) -> tuple[list[RunRecord], dict[str, str | None]]:
    """Return the runs of a pending pipeline, the pipeline's own first, and its picks.

    Raises ArtifactError if the record is damaged, or if another version wrote it with other fields.
    """
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
        runs = [_read_run(run, file.parent / str(number)) for number, run in enumerate(content["runs"])]
        picks: dict[str, str | None] = dict(content["picks"])
        names = {run.name for run in runs[1:] if run.tags["target"]}
        if not runs or not names.issuperset(filter(None, picks.values())):
            raise ValueError(f"picks {', '.join(map(str, picks.values()))} out of {', '.join(sorted(names))}")
    except (OSError, ValueError, TypeError, KeyError, AttributeError, dacite.DaciteError) as error:
        raise ArtifactError(
            f"{file} is damaged or from another version ({type(error).__name__}: {error}), expected the runs of a "
            "pipeline. Run the pipeline again to log it anew."
        ) from error
    return runs, picks


def _read_run(run: dict[str, Any], copies: Path) -> RunRecord:
    """Return a run whose files are the copies in a folder."""
    files = [(folder, copies / folder / name) for folder, name in run["artifacts"]]
    return dacite.from_dict(RunRecord, run | {"artifacts": files}, _AS_WRITTEN)
