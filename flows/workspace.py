"""The checkout that a flow works in: one flow at a time, and its outputs handed to DVC."""

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
    """Let one flow at a time work in this checkout; a second one waits."""
    words = "Another flow (process {}) works in this folder; waiting until it ends."
    return hold_lock(
        ARTIFACTS / ".locks" / "flow",
        str(os.getpid()),
        before_waiting=lambda pid: print(words.format(pid), flush=True),
    )


def commit_outputs() -> None:
    """Tell DVC about the outputs, so that ``dvc status`` is clean and ``dvc repro`` runs nothing.

    Skipped while dvc.lock and the keys of all outputs are those of the latest commit.

    Raises DvcFailed with DVC's own words; DiskError where the cache has no room.
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
