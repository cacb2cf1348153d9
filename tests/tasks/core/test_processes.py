"""A child goes when its parent has gone."""

import os
import signal
import subprocess
import sys

import pytest

PROGRAM = (
    "import signal, sys; from tasks.core.processes import die_with_parent\n"
    "die_with_parent(int(sys.argv[1]), signal.Signals(int(sys.argv[2]))); print('lives')"
)


@pytest.mark.parametrize("death_signal", [signal.SIGTERM, signal.SIGKILL])
def test_child_whose_parent_has_gone_already_exits_at_once(death_signal: signal.Signals) -> None:
    def start(parent_pid: int) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-c", PROGRAM, str(parent_pid), str(int(death_signal))]
        return subprocess.run(command, capture_output=True, text=True, check=False)

    orphan = start(os.getppid())
    assert (orphan.returncode, orphan.stdout) == (128 + death_signal, "")
    assert start(os.getpid()).stdout == "lives\n"
