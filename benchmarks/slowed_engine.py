"""Run an engine in its own process, each of its inferences followed by a busy wait.

As tasks/parts/measuring/engine_process.py, which does everything else. The child is
``python -m benchmarks.slowed_engine <engine> <parent pid> <wait in ns>``.
"""

import os
import subprocess
import sys
import time
from pathlib import Path

from benchmarks.ladder import REPOSITORY
from tasks.parts.engines import open_engine as opening
from tasks.parts.engines.manifest import FloatArray, read_engine_manifest
from tasks.parts.engines.runner import Runner
from tasks.parts.engines.tuning import Tuning
from tasks.parts.measuring import engine_process
from tasks.parts.measuring.engine_process import EngineProcess
from tasks.parts.measuring.reports import Timed


class SlowedProcess(EngineProcess):
    """The parent's end of a process that waits `wait_ns` after each inference."""

    def __init__(self, engine: Path, *, wait_ns: int, timeout_s: float) -> None:
        self._engine, self._timeout_s, self._unread = engine, timeout_s, b""
        self.num_threads = read_engine_manifest(engine).target.num_threads
        self._process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.slowed_engine", str(engine), str(os.getpid()), str(wait_ns)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=os.environ | {"PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": str(self.num_threads)},
        )


def main(folder: str, parent_pid: str, wait_ns: str) -> None:
    """Run the child."""
    open_engine = opening.open_engine

    def open_slowed(engine: Path, tuning: Tuning | None = None) -> Runner:
        runner = open_engine(engine, tuning)
        run, clock, wait = runner.run, time.perf_counter_ns, int(wait_ns)

        def run_and_wait(images_NCHW: FloatArray) -> FloatArray:
            logits_NCHW = run(images_NCHW)
            end = clock() + wait
            while clock() < end:
                pass
            return logits_NCHW

        runner.run = run_and_wait  # type: ignore[method-assign]
        return runner

    opening.open_engine = open_slowed
    engine_process.main(folder, parent_pid, Timed.frame)


if __name__ == "__main__":
    main(*sys.argv[1:])
