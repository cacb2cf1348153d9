"""Packages that tests look into and that cannot be installed beside ours, fetched when they are wanted."""

import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from tests.conftest import REPOSITORY

DEBIAN_KEYS = "/usr/share/keyrings/debian-archive-keyring.gpg"


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


def unpack_debian(packages: Sequence[str], release: str, folder: Path) -> Path:
    """Download packages of Debian's section non-free, without what they depend on; return where they are unpacked.

    They come from the mirror that apt uses on this machine, and apt checks Debian's signature. Skips the test, with
    the reason, where they cannot be had.
    """
    if shutil.which("apt-get") is None:
        pytest.skip(f"no apt-get on this machine, which downloads {' and '.join(packages)}")
    targets = ["apt-get", "indextargets", "--format", "$(REPO_URI)"]
    mirrors = subprocess.run(targets, capture_output=True, text=True, check=True).stdout.split()
    mirror = next((mirror for mirror in mirrors if mirror.rstrip("/").endswith("/debian")), None)
    if mirror is None:
        pytest.skip(f"apt has no mirror of Debian on this machine, which has {' and '.join(packages)}")
    (folder / "lists" / "partial").mkdir(parents=True)
    (folder / "sources.list").write_text(f"deb [signed-by={DEBIAN_KEYS}] {mirror} {release} non-free\n")
    settings = {
        "APT::Sandbox::User": "",
        "APT::Update::Error-Mode": "any",
        "Acquire::http::Timeout": 30,
        "Dir::Cache": folder / "cache",
        "Dir::Etc::sourcelist": folder / "sources.list",
        "Dir::Etc::sourceparts": "-",
        "Dir::State::lists": folder / "lists",
    }
    apt = ["apt-get", "--quiet=2", *(f"--option={name}={value}" for name, value in settings.items())]
    for command in (["update"], ["download", *packages]):
        done = subprocess.run([*apt, *command], cwd=folder, capture_output=True, text=True, check=False)
        if done.returncode:
            reason = (done.stderr.strip().splitlines() or ["no message"])[-1]
            pytest.skip(f"{' and '.join(packages)} of Debian {release} cannot be downloaded: {reason}")
    for package in folder.glob("*.deb"):
        subprocess.run(["dpkg-deb", "--extract", package, folder / "site"], check=True)
        package.unlink()
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
