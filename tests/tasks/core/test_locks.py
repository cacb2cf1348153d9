"""One process at a time holds a lock."""

import subprocess
import sys
from pathlib import Path

import pytest

from tasks.core.locks import hold_lock

HOLD = (
    "import sys; from pathlib import Path; from tasks.core.locks import hold_lock\n"
    "with hold_lock(Path(sys.argv[1]), 'the first', before_waiting=print):\n"
    "    print('held', flush=True); sys.stdin.read()"
)


@pytest.fixture
def held(tmp_path: Path):
    """A lock in the hands of a process that ends when its stdin is closed."""
    file = tmp_path / "folder" / "lock"
    command = [sys.executable, "-c", HOLD, str(file)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout.readline() == "held\n"
        yield file, holder


def test_waiting_process_is_told_of_the_holder_and_gets_the_lock_when_that_one_is_killed(held) -> None:
    file, holder = held
    notes = []

    def end_holder(note: str) -> None:
        notes.append(note)
        holder.kill()

    with hold_lock(file, "the second", before_waiting=end_holder):
        assert notes == ["the first"]
        assert file.read_text() == "the second"


def test_what_is_raised_before_waiting_ends_it(held) -> None:
    file, _ = held

    def refuse(note: str) -> None:
        raise KeyError(note)

    with pytest.raises(KeyError, match="the first"), hold_lock(file, "", before_waiting=refuse):
        pass
    assert file.read_text() == "the first"
