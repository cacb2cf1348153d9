"""Tie the life of a child process to its parent."""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def die_with_parent(parent_pid: int, death_signal: signal.Signals) -> None:
    """Make Linux send this process a signal when its parent dies; exit now if it is already dead."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, death_signal)
    if os.getppid() != parent_pid:
        sys.exit(128 + death_signal)
