"""Packages that tests look into and that cannot be installed beside ours, fetched when they are wanted."""

import os
import subprocess
import sys
import zipfile
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.conftest import REPOSITORY


def unpack_wheel(requirement: str, folder: Path) -> Path:
    """Download the wheel of `requirement`, without what it depends on, and return the folder it is unpacked in.

    Skips the test, with pip's reason, where the wheel cannot be had.
    """
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:"]
    found = subprocess.run([*command, "-d", folder, requirement], capture_output=True, text=True, check=False)
    if found.returncode:
        pytest.skip(f"{requirement} cannot be downloaded: {found.stderr.strip().splitlines()[-1]}")
    [wheel] = folder.glob("*.whl")
    zipfile.ZipFile(wheel).extractall(folder / "site")
    return folder / "site"


def run_tests_over(file: str, environment: Mapping[str, str]) -> None:
    """Run a file of tests in a process whose PYTHONPATH has another package; fail with what it printed."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", file]
    done = subprocess.run(
        command,
        env={**os.environ, **environment},
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
