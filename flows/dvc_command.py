"""Run DVC as a command; when it fails, the error quotes its words."""

import subprocess
import sys
from pathlib import Path

from tasks.core.errors import DiskError, EnginewrightError
from tasks.core.execute import is_full_disk
from tasks.core.tracking.config import mask_credentials

DVC_CACHE = Path(".dvc/cache")

_DVC_FOOTER = "Having any troubles?"  # and its address of support, below the error


class DvcFailed(EnginewrightError):
    """DVC ended with an error; its own words are in the message."""


def run_dvc(*arguments: str) -> str:
    """Run a DVC command without showing its output, which is returned.

    Raises DvcFailed; DiskError where this machine's or the remote's disk is full.
    """
    done = subprocess.run(
        [sys.executable, "-m", "dvc", *arguments], capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        words = mask_credentials((done.stderr or done.stdout).partition(_DVC_FOOTER)[0].strip())
        command = f"`dvc {' '.join(arguments[:2])}`"
        failed = DvcFailed(f"{command} failed. Nothing is lost; run again. DVC says: {words}")
        if is_full_disk(failed):
            raise DiskError(
                f"{command}: the disk or its quota is full, here or where the remote lies. Free some space there and "
                f"run again: what is made and what was transferred are kept. DVC says: {words}"
            )
        raise failed
    return done.stdout
