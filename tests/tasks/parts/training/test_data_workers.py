"""What data workers print when their training is gone."""

import subprocess
import sys

import pytest

PROGRAM = """
import socket, sys, time
from multiprocessing import reduction, resource_sharer
from tasks.parts.training.data_workers import prepare_worker
if sys.argv[1] == "hidden":
    prepare_worker(0)
handed_over = reduction.DupFd(1)  # as torch hands over a tensor: a thread waits for who takes it
taker = socket.socket(socket.AF_UNIX)
taker.connect(resource_sharer._resource_sharer._address)
taker.close()
time.sleep(1)
"""


@pytest.mark.slow
@pytest.mark.parametrize(("way", "is_shown"), [("plain", True), ("hidden", False)])
def test_connection_that_breaks_while_a_batch_is_handed_over_shows_no_traceback(
    way: str, is_shown: bool
) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, way], capture_output=True, text=True, timeout=120, check=True
    )
    assert ("Traceback" in done.stderr) == is_shown, done.stderr
