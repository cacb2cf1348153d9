"""Lock the checkout for one flow at a time, and commit its outputs to DVC."""

import json
import os
from contextlib import AbstractContextManager
from pathlib import Path

from flows.dvc_command import run_dvc
from tasks.core.execute import ARTIFACTS
from tasks.core.fingerprint import digest
from tasks.core.locks import hold_lock
from tasks.core.reports import KEY_FILE


def hold_workspace() -> AbstractContextManager[None]:
    """Lock this checkout for one flow; a second one waits."""
    words = "Another flow (process {}) is running in this folder; waiting until it ends."
    return hold_lock(
        ARTIFACTS / ".locks" / "flow",
        str(os.getpid()),
        before_waiting=lambda pid: print(words.format(pid), flush=True),
    )


def commit_outputs() -> None:
    """Commit the outputs to DVC, so that ``dvc status`` is clean and ``dvc repro`` runs nothing.

    Skipped if dvc.lock and the keys of all outputs are unchanged since the latest commit.

    Raises DvcFailed with DVC's own message; DiskError if the cache has no space.
    """
    stamp = ARTIFACTS / ".committed"
    content = _commit_stamp()
    if stamp.is_file() and stamp.read_text(encoding="utf-8") == content:
        return
    run_dvc("commit", "--force")
    stamp.write_text(_commit_stamp(), encoding="utf-8")


def _commit_stamp() -> str:
    keys = {path.as_posix(): digest(path) for path in sorted(ARTIFACTS.glob(f"[!.]*/**/{KEY_FILE}"))}
    lock = Path("dvc.lock")
    return json.dumps({"keys": keys, "lock": lock.read_text(encoding="utf-8") if lock.is_file() else None})
