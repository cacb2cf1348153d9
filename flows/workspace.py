"""Lock the checkout for one flow at a time, commit its outputs to DVC, and leave what git tracks as it was."""

import contextlib
import json
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path

from flows.dvc_command import DvcFailed, run_dvc
from flows.lock_file import LOCK_FILE, read_lock
from tasks.core.config import PARAMS_FILE
from tasks.core.environment import ENVIRONMENT_FILE
from tasks.core.errors import ArtifactError
from tasks.core.execute import ARTIFACTS, remove_damaged
from tasks.core.fingerprint import digest
from tasks.core.locks import hold_lock
from tasks.core.reports import KEY_FILE

_RECORDS = (LOCK_FILE, PARAMS_FILE)
"""Files of git that a run writes."""
_KEPT = ARTIFACTS / ".deployed"
KEPT_LOCK_FILE = _KEPT / LOCK_FILE
"""The dvc.lock of the last deployed run."""

_CUT_OFF = re.compile(r"dvc\.lock' (validation failed|is invalid)")
"""What DVC says of a dvc.lock that is no longer one."""


def hold_workspace() -> AbstractContextManager[None]:
    """Lock this checkout for one flow; a second one waits."""
    words = "Another flow (process {}) is running in this folder; waiting until it ends."
    return hold_lock(
        ARTIFACTS / ".locks" / "flow",
        str(os.getpid()),
        before_waiting=lambda pid: print(words.format(pid), flush=True),
    )


@contextlib.contextmanager
def keep_records() -> Iterator[None]:
    """Put the files of git back that a deployed run writes, so that `git pull` works in the checkout of a worker.

    The run goes on from those of the last one, and they are kept in artifacts/.deployed. Nothing is put back where a
    person had changed them, or without git. A damaged dvc.lock is mended first, and never kept.
    """
    is_mended = mend_lock()
    mark = _KEPT / "running"
    was_killed = mark.is_file()
    changes = _git("status", "--porcelain", "--", *map(str, _RECORDS))
    if changes is None:
        print(f"git does not know this folder: the run leaves {_names(' and ')} as it writes them")
    elif changes and not was_killed:
        print(f"{_names(' or ')} has changes that are not committed: the run writes into them")
    if changes is None or (changes and not was_killed):
        yield
        return
    mark.parent.mkdir(parents=True, exist_ok=True)
    mark.touch()
    if is_mended or not was_killed:
        _copy_records(_KEPT, Path())
    try:
        yield
    finally:
        _copy_records(Path(), _KEPT)
        for file in _RECORDS:
            committed = _git("show", f"HEAD:./{file}")
            if committed is None:
                file.unlink(missing_ok=True)
            else:
                file.write_bytes(committed)
        mark.unlink()


def mend_lock() -> bool:
    """Put a damaged dvc.lock back as git has it, or remove it; return whether it was damaged.

    The entries of what was made since the commit are added when DVC commits the outputs.
    """
    found = _find_damage(LOCK_FILE)
    if not found:
        return False
    committed = _git("show", f"HEAD:./{LOCK_FILE}")
    if committed is not None:
        LOCK_FILE.write_bytes(committed)
    if committed is None or _find_damage(LOCK_FILE):
        LOCK_FILE.unlink()
        print(f"removing {LOCK_FILE}, which DVC writes again: {found}")
    else:
        print(f"putting {LOCK_FILE} back as git has it; DVC adds what was made since: {found}")
    return True


def _find_damage(lock: Path) -> str:
    """Return what is wrong with a dvc.lock; empty if it is intact, or if there is none."""
    try:
        if lock.is_file():
            read_lock(lock)
    except ArtifactError as error:
        return str(error)
    return ""


def _copy_records(source: Path, target: Path) -> None:
    for file in _RECORDS:
        if file == LOCK_FILE and (found := _find_damage(source / file)):
            print(f"not copying {source / file}: {found}")
        elif (source / file).is_file():
            shutil.copyfile(source / file, target / file)


def _names(between: str) -> str:
    return between.join(map(str, _RECORDS))


def _git(*arguments: str) -> bytes | None:
    """Return what git prints; None if it refuses, or if there is no git."""
    try:
        command = ["git", "--no-optional-locks", *arguments]  # one that is killed must not stop `git pull`
        done = subprocess.run(command, capture_output=True, check=False)
    except FileNotFoundError:
        return None
    return None if done.returncode else done.stdout


def commit_outputs() -> None:
    """Commit the outputs to DVC, so that ``dvc status`` is clean and ``dvc repro`` runs nothing.

    Skipped if dvc.lock and the keys of all outputs are unchanged since the latest commit. A dvc.lock that was cut
    off, because DVC was killed or had no space while it wrote it in place, is written anew.

    Raises DvcFailed with DVC's own message; DiskError if the cache has no space; ArtifactError if an output was
    damaged meanwhile.
    """
    stamp = ARTIFACTS / ".committed"
    content = _commit_stamp()
    if stamp.is_file() and stamp.read_text(encoding="utf-8") == content:
        return
    try:
        run_dvc("commit", "--force")
    except DvcFailed as failed:
        if not _CUT_OFF.search(str(failed)):
            raise
        if not mend_lock():  # DVC reads YAML more strictly
            print(f"removing {LOCK_FILE}, which is damaged; DVC writes it again")
            LOCK_FILE.unlink()
        run_dvc("commit", "--force")
    if removed := remove_damaged():  # DVC hashes what it finds
        raise ArtifactError(
            f"{removed[0]} was changed after it was made and is removed. Run again: it is restored from the "
            "store, or made anew."
        )
    stamp.write_text(_commit_stamp(), encoding="utf-8")


def _commit_stamp() -> str:
    files = (ENVIRONMENT_FILE, *sorted(ARTIFACTS.glob(f"[!.]*/**/{KEY_FILE}")))
    keys = {path.as_posix(): digest(path) for path in files}
    lock = LOCK_FILE.read_text(encoding="utf-8", errors="replace") if LOCK_FILE.is_file() else None
    return json.dumps({"keys": keys, "lock": lock})
