"""What a deployed run leaves in the checkout of a worker."""

import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from flows.exchange import merge_entries, names_of_stages, read_entries
from flows.lock_file import read_lock
from flows.workspace import keep_records, mend_lock
from tasks.core.errors import ArtifactError
from tests.conftest import REPOSITORY

_KILLED = """
import os, pathlib, signal, sys
from flows.workspace import keep_records
with keep_records():
    pathlib.Path("dvc.lock").write_text(sys.argv[1])
    os.kill(os.getpid(), signal.SIGKILL)
"""

LOCK, PARAMS = Path("dvc.lock"), Path("params.yaml")
KEPT = Path("artifacts/.deployed/dvc.lock")


def lock(words: str) -> str:
    """Return a dvc.lock that says where it comes from."""
    output = f"    - path: artifacts/made\n      hash: md5\n      md5: {'a' * 32}\n      size: 1\n"
    return f"schema: '2.0'\nstages:\n  make:\n    cmd: python -m tasks {words}\n    outs:\n{output}"


CUT_OFF = (
    "",
    "schema: '2.0'\n",
    "schema: '2.0'\nstages:\n  make:\n",
    "schema: '2.0'\nstages:\n  make:\n    cmd: python -m tasks train",
    lock("of the run").partition("path")[0],
    lock("of the run").partition("md5: a")[0],
    lock("of the run").partition("a" * 32)[0] + "aa",
    "schema: '2.0'\nstages: [make]\n",
    lock("of the run") + "<<<<<<< HEAD\n",
    "\0\0\0\0",
)


def git(*arguments: str) -> str:
    author = ("-c", "user.name=Test", "-c", "user.email=test@localhost")
    return subprocess.run(["git", *author, *arguments], check=True, capture_output=True, text=True).stdout


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A clone whose upstream goes on."""
    upstream, clone = tmp_path / "upstream", tmp_path / "clone"
    upstream.mkdir()
    monkeypatch.chdir(upstream)
    LOCK.write_text(lock("committed"))
    PARAMS.write_text("committed")
    Path(".gitignore").write_text("artifacts/")
    git("init", "-q")
    git("add", ".")
    git("commit", "-qm", "First")
    git("clone", "-q", str(upstream), str(clone))
    LOCK.write_text(lock("of upstream"))
    git("commit", "-qam", "Second")
    monkeypatch.chdir(clone)
    return clone


def run(*, content: str, expected: str) -> None:
    with keep_records():
        assert LOCK.read_text() == lock(expected)
        LOCK.write_text(lock(content))
        PARAMS.write_text(content)


def kill_run(content: str) -> None:
    """Start a run, and kill it after it wrote this dvc.lock."""
    command = [sys.executable, "-c", _KILLED, content.replace("\0", "\1")]
    killed = subprocess.run(command, check=False, env={"PYTHONPATH": str(REPOSITORY)})
    assert killed.returncode == -signal.SIGKILL and git("status", "--porcelain") != ""


@pytest.mark.usefixtures("checkout")
def test_checkout_is_clean_after_a_run_and_the_next_goes_on_from_it() -> None:
    run(content="of the first run", expected="committed")
    assert git("status", "--porcelain") == "" and LOCK.read_text() == lock("committed")
    git("pull", "-q")
    assert LOCK.read_text() == lock("of upstream")
    run(content="of the second run", expected="of the first run")
    assert git("status", "--porcelain") == "" and LOCK.read_text() == lock("of upstream")


@pytest.mark.usefixtures("checkout")
def test_run_that_fails_or_is_killed_leaves_no_changes_either() -> None:
    with pytest.raises(RuntimeError), keep_records():
        LOCK.write_text(lock("of the run that failed"))
        raise RuntimeError
    assert git("status", "--porcelain") == ""
    kill_run(lock("of the run that was killed"))
    run(content="of the next run", expected="of the run that was killed")
    assert git("status", "--porcelain") == ""


@pytest.mark.usefixtures("checkout")
def test_changes_of_a_person_stay(capsys: pytest.CaptureFixture[str]) -> None:
    PARAMS.write_text("written by a person")
    run(content="of the run", expected="committed")
    assert (LOCK.read_text(), PARAMS.read_text()) == (lock("of the run"), "of the run")
    assert "dvc.lock or params.yaml has changes that are not committed" in capsys.readouterr().out


def test_file_that_git_does_not_track_is_removed(checkout: Path) -> None:
    git("rm", "-q", str(LOCK))
    git("commit", "-qm", "Without a lock")
    with keep_records():
        LOCK.write_text(lock("of the run"))
    assert git("status", "--porcelain") == "" and not (checkout / LOCK).exists()
    assert (checkout / KEPT).read_text() == lock("of the run")


@pytest.mark.usefixtures("checkout")
@pytest.mark.parametrize("content", CUT_OFF)
def test_lock_that_was_cut_off_is_put_back_and_never_kept(
    content: str, capsys: pytest.CaptureFixture[str]
) -> None:
    run(content="of the first run", expected="committed")
    LOCK.write_text(content)
    run(content="of the second run", expected="of the first run")
    assert git("status", "--porcelain") == ""
    said = capsys.readouterr().out
    assert "putting dvc.lock back as git has it" in said and "dvc.lock is damaged (" in said

    kill_run(content)
    run(content="of the third run", expected="of the second run")
    with keep_records():
        LOCK.write_text(content)
    assert git("status", "--porcelain") == "" and KEPT.read_text() == lock("of the third run")
    assert "not copying dvc.lock: dvc.lock is damaged (" in capsys.readouterr().out

    KEPT.write_text(content)
    run(content="of the last run", expected="committed")
    assert KEPT.read_text() == lock("of the last run")
    assert f"not copying {KEPT}: {KEPT} is damaged (" in capsys.readouterr().out


@pytest.mark.usefixtures("checkout")
def test_damaged_lock_that_git_does_not_have_intact_is_removed(capsys: pytest.CaptureFixture[str]) -> None:
    LOCK.write_text("schema: '2.0'\n")
    git("commit", "-qam", "Damaged")
    assert mend_lock() and not LOCK.exists()
    assert "removing dvc.lock, which DVC writes again" in capsys.readouterr().out
    assert not mend_lock()


@pytest.mark.parametrize("content", CUT_OFF)
@pytest.mark.parametrize("use", [names_of_stages, lambda: read_entries(["make"]), lambda: merge_entries({})])
def test_damaged_lock_is_named_and_not_written_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: str, use: Callable[[], object]
) -> None:
    monkeypatch.chdir(tmp_path)
    LOCK.write_text(content)
    with pytest.raises(
        ArtifactError, match=r"^dvc\.lock is damaged \(.+\), expected .*`git checkout dvc\.lock`"
    ):
        use()
    assert LOCK.read_text() == content


def test_stage_that_a_user_added_needs_no_outputs(tmp_path: Path) -> None:
    added = "  publish:\n    cmd: ./publish.sh\n"
    (tmp_path / LOCK).write_text(lock("made") + added)
    assert read_lock(tmp_path / LOCK)["stages"].keys() == {"make", "publish"}


def test_lock_of_this_repository_is_intact() -> None:
    assert read_lock(REPOSITORY / LOCK)["stages"]


@pytest.mark.parametrize("has_git", [True, False])
def test_without_git_the_run_leaves_its_records_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], has_git: bool
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    if not has_git:
        monkeypatch.setenv("PATH", str(tmp_path))
    LOCK.write_text(lock("as copied"))
    run(content="of the run", expected="as copied")
    assert (LOCK.read_text(), PARAMS.read_text()) == (lock("of the run"), "of the run")
    said = capsys.readouterr().out
    assert "git does not know this folder: the run leaves dvc.lock and params.yaml as it writes them" in said
    assert "not committed" not in said
