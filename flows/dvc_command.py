"""Run DVC as a command, and quote its output in the error if it fails."""

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from tasks.core.errors import DiskError, EnginewrightError
from tasks.core.execute import is_full_disk
from tasks.core.tracking.config import mask_credentials

_DVC_FOOTER = "Having any troubles?"  # DVC prints this and a support link below the error

_LOCKS = Path(".dvc/tmp/rwlock")
"""In which running DVC commands name what they read and write."""
_LOCKS_CUT_OFF = "Unable to read RWLock-file"


class DvcFailed(EnginewrightError):
    """DVC failed; the message quotes its output."""


def run_dvc(*arguments: str) -> str:
    """Run a DVC command silently and return its output.

    Raises DvcFailed; DiskError if the disk of this machine or of the remote is full.
    """
    done = _run(arguments)
    if _LOCKS_CUT_OFF in done.stderr:  # DVC was killed, or had no space, while it wrote it
        print(f"removing {_LOCKS}, which is damaged")
        _LOCKS.unlink(missing_ok=True)
        done = _run(arguments)
    if done.returncode != 0:
        words = mask_credentials((done.stderr or done.stdout).partition(_DVC_FOOTER)[0].strip())
        command = f"`dvc {' '.join(arguments[:2])}`"
        failed = DvcFailed(f"{command} failed. Nothing is lost; run again. DVC says: {words}")
        if is_full_disk(failed):
            raise DiskError(
                f"{command}: the disk or its quota is full, here or at the remote. Free some space and run again: "
                f"finished outputs and transfers are kept. DVC says: {words}"
            )
        raise failed
    return done.stdout


def _run(arguments: Sequence[str]) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-m", "dvc", *arguments], capture_output=True, text=True, check=False
    )
