"""Distributed training on one machine: start one process per device, monitor them and end them together."""

import os
import signal
import subprocess
import sys
import time

from tasks.core.errors import ProcessDied

SUPERVISOR = "ENGINEWRIGHT_SUPERVISOR"
"""Environment variable that tells a rank which process started it."""

_POLL_INTERVAL_S = 0.1


def is_rank() -> bool:
    """Return whether this process was started by ``run_ranks``."""
    return SUPERVISOR in os.environ


def run_ranks(num_ranks: int, *, main_address: str, main_port: int) -> None:
    """Run the command of this process once per device, and wait until all of them are done.

    This process computes nothing, so that it can end the ranks at any time: ranks that wait for a dead one inside a
    collective operation react to no signal but SIGKILL.

    Raises ProcessDied as soon as a rank fails; the other ranks are killed.
    """
    num_threads = max(1, (os.cpu_count() or 1) // num_ranks)
    environment = {"OMP_NUM_THREADS": str(num_threads)} | os.environ
    environment |= {SUPERVISOR: str(os.getpid()), "MASTER_ADDR": main_address, "MASTER_PORT": str(main_port)}
    command = [sys.executable, "-m", "tasks", *sys.argv[1:]]
    ranks: list[subprocess.Popen[bytes]] = []
    try:
        for rank in range(num_ranks):
            ranks.append(subprocess.Popen(command, env=environment | {"LOCAL_RANK": str(rank)}))
        while None in [process.poll() for process in ranks]:
            _check(ranks)
            time.sleep(_POLL_INTERVAL_S)
        _check(ranks)
    finally:
        for process in ranks:
            process.kill()
        for process in ranks:
            process.wait()


def _check(ranks: list[subprocess.Popen[bytes]]) -> None:
    failed = [process for process in ranks if process.returncode]
    if not failed:
        return
    first = min(failed, key=lambda process: process.returncode)  # a signal before the errors that it causes
    if first.returncode < 0:
        end = f"was killed by {signal.Signals(-first.returncode).name}"
        remedy = "If memory ran out, lower trainer.batch_size; with other settings the training starts over."
    else:
        end = f"ended with exit code {first.returncode}"
        remedy = "See its own message above."
    raise ProcessDied(
        f"Rank {ranks.index(first)} of {len(ranks)} (process {first.pid}) {end}; the other ranks were stopped. "
        f"Run the same command again to resume from the last complete checkpoint. {remedy}"
    )
