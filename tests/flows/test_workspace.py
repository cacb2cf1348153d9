"""What a deployed run leaves in the checkout of a worker."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from flows.workspace import keep_records
from tests.conftest import REPOSITORY

_KILLED = """
import os, pathlib, signal
from flows.workspace import keep_records
with keep_records():
    pathlib.Path("dvc.lock").write_text("of the run that was killed")
    os.kill(os.getpid(), signal.SIGKILL)
"""

LOCK, PARAMS = Path("dvc.lock"), Path("params.yaml")


def git(*arguments: str) -> str:
    author = ("-c", "user.name=Test", "-c", "user.email=test@localhost")
    return subprocess.run(["git", *author, *arguments], check=True, capture_output=True, text=True).stdout


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A clone whose upstream goes on."""
    upstream, clone = tmp_path / "upstream", tmp_path / "clone"
    upstream.mkdir()
    monkeypatch.chdir(upstream)
    for file in (LOCK, PARAMS):
        file.write_text("committed")
    Path(".gitignore").write_text("artifacts/")
    git("init", "-q")
    git("add", ".")
    git("commit", "-qm", "First")
    git("clone", "-q", str(upstream), str(clone))
    LOCK.write_text("of upstream")
    git("commit", "-qam", "Second")
    monkeypatch.chdir(clone)
    return clone


def run(*, content: str, expected: str) -> None:
    with keep_records():
        assert LOCK.read_text() == expected
        for file in (LOCK, PARAMS):
            file.write_text(content)


@pytest.mark.usefixtures("checkout")
def test_checkout_is_clean_after_a_run_and_the_next_goes_on_from_it() -> None:
    run(content="of the first run", expected="committed")
    assert git("status", "--porcelain") == "" and LOCK.read_text() == "committed"
    git("pull", "-q")
    assert LOCK.read_text() == "of upstream"
    run(content="of the second run", expected="of the first run")
    assert git("status", "--porcelain") == "" and LOCK.read_text() == "of upstream"


@pytest.mark.usefixtures("checkout")
def test_run_that_fails_or_is_killed_leaves_no_changes_either() -> None:
    with pytest.raises(RuntimeError), keep_records():
        LOCK.write_text("of the run that failed")
        raise RuntimeError
    assert git("status", "--porcelain") == ""
    killed = subprocess.run([sys.executable, "-c", _KILLED], check=False, env={"PYTHONPATH": str(REPOSITORY)})
    assert killed.returncode == -signal.SIGKILL and git("status", "--porcelain") != ""
    run(content="of the next run", expected="of the run that was killed")
    assert git("status", "--porcelain") == ""


@pytest.mark.usefixtures("checkout")
def test_changes_of_a_person_stay(capsys: pytest.CaptureFixture[str]) -> None:
    PARAMS.write_text("written by a person")
    run(content="of the run", expected="committed")
    assert LOCK.read_text() == PARAMS.read_text() == "of the run"
    assert "dvc.lock or params.yaml has changes that are not committed" in capsys.readouterr().out


def test_file_that_git_does_not_track_is_removed(checkout: Path) -> None:
    git("rm", "-q", str(LOCK))
    git("commit", "-qm", "Without a lock")
    with keep_records():
        LOCK.write_text("of the run")
    assert git("status", "--porcelain") == "" and not (checkout / LOCK).exists()
    assert (checkout / "artifacts/.deployed" / LOCK).read_text() == "of the run"
