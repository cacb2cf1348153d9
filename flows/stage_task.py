"""Run each stage call as one cached Prefect task."""

import contextlib
import gc
import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from prefect import get_run_logger, runtime, task
from prefect.cache_policies import CacheKeyFnPolicy
from prefect.exceptions import TerminationSignal
from prefect.futures import PrefectFuture
from prefect.task_runners import ThreadPoolTaskRunner

from flows.pipeline import Calls
from tasks.core.errors import EnginewrightError
from tasks.core.execute import (
    ARTIFACTS,
    Call,
    is_current,
    is_fresh,
    output_folder,
    prepare_call,
    recall,
    recorded_facts,
)
from tasks.core.tracking.config import mask_credentials

MAX_SIDE_BY_SIDE = 4
"""The maximum number of stages that run at once; each loads libraries of up to a gigabyte."""


_GC_THRESHOLDS = (50_000, 20, 100)
"""A tenth of a cached call was garbage collection with Python's (700, 10, 10)."""


class StageFailed(EnginewrightError):
    """A stage failed; its own message is above on the terminal."""


def stage_command(address: str, inputs: Mapping[str, Path]) -> list[str]:
    """Return the command line of a stage call, the same as in dvc.yaml."""
    return ["python", "-m", "tasks", address, *(f"{name}={path}" for name, path in inputs.items())]


def print_line(line: str) -> None:
    """Print a line in one write: another thread may print between a line and the newline that ``print`` adds."""
    print(f"{line}\n", end="", flush=True)


@task(
    task_run_name="{address}",
    cache_policy=CacheKeyFnPolicy(cache_key_fn=lambda _, arguments: str(arguments["key"])),
    persist_result=True,
    result_serializer="json",
    refresh_cache=True,
)
def run_stage(address: str, command: list[str], key: str, fresh: bool, keeps_words: bool) -> str:
    """Run a stage in its own process and return the key; the outputs themselves stay in artifacts/.

    With ``fresh``, the other driver already made the output, and only the key is recorded. With ``keeps_words``,
    Prefect logs the output of the stage; else it goes straight to the terminal.
    """
    if not fresh:
        print_line(f"{address}: running")
        code = (_run_and_log if keeps_words else _run)([sys.executable, *command[1:]])
        if code != 0:
            raise StageFailed(f"{address} ended with exit code {code}. Fix the error above and run again.")
    return key


_recall_stage = run_stage.with_options(refresh_cache=False)
"""The same task, which returns Prefect's record if there is one.

The files on disk decide which of the two is called: Prefect would still return its record of an output that was
damaged or lost since.
"""


_processes: set[subprocess.Popen[str]] = set()
"""Stages that run now."""
_is_ending = threading.Event()
"""Set once the flow was interrupted."""


def _run(command: list[str]) -> int:
    with _tracked(subprocess.Popen(command, text=True)) as process:
        return process.wait()


def _run_and_log(command: list[str]) -> int:
    logger = get_run_logger()
    started = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    with _tracked(started) as process:
        assert process.stdout is not None
        for line in process.stdout:
            logger.info(mask_credentials(line.rstrip()))
    return process.returncode


@contextlib.contextmanager
def _tracked(started: subprocess.Popen[str]) -> Iterator[subprocess.Popen[str]]:
    """Wait for a stage at the end, and kill it if this thread is interrupted."""
    with started as process:
        _processes.add(process)
        try:
            if _is_ending.is_set():
                process.terminate()
            yield process
        except BaseException:
            process.kill()
            raise
        finally:
            _processes.discard(process)


def _end_stages() -> None:
    """End the stages of all threads: SIGTERM, unlike Ctrl-C, reaches this process alone."""
    _is_ending.set()
    for process in list(_processes):
        process.terminate()


def _make_tasks_cheap() -> None:
    """Spare the garbage collector what was imported, and Prefect's page a line that a task's state says as well."""
    gc.freeze()
    gc.set_threshold(*_GC_THRESHOLDS)
    if runtime.deployment.id is None:  # else the words of the stages are lines of this logger
        logging.getLogger("prefect.task_runs").setLevel(logging.WARNING)


def task_runner() -> Any:
    """Return the runner of independent stages: one more than there are cores, which loads in the meantime."""
    return ThreadPoolTaskRunner(min(MAX_SIDE_BY_SIDE, 1 + (os.cpu_count() or 1)))


def _overlap(pattern: Sequence[str], folder: Sequence[str]) -> bool:
    """Return whether one of two paths lies in the other, or is it; ``*`` stands for any one name."""
    return all(expected in ("*", name) for expected, name in zip(pattern, folder, strict=False))


class TaskStages:
    """Runs stage calls as Prefect tasks and prints how long each one took."""

    def __init__(
        self,
        params: Mapping[str, Any],
        num_calls: int,
        show_progress: Callable[[int, int], None] = lambda num_done, num_all: None,
        elsewhere: Collection[str] = (),
    ) -> None:
        """`elsewhere` are addresses whose outputs other machines made: their surroundings are those on record."""
        _make_tasks_cheap()
        self._params = params
        self._num_done = 0
        self._keys: dict[Path, str] = {}
        """What the task of each output folder returned: Prefect knows by this object which task made it."""
        self._show_progress = show_progress
        self._elsewhere = elsewhere
        self._is_deployed = runtime.deployment.id is not None
        self.num_calls = num_calls
        self.num_executed = 0

    def run(self, address: str, **inputs: Path) -> Path:
        """Make sure that a call's output is fresh and return its folder."""
        call, fresh = self._prepare(address, inputs)
        return self._run(call, fresh)

    def run_side_by_side(self, calls: Calls) -> None:
        """Make sure that the outputs of independent calls are fresh, as many at once as the task runner allows.

        What has the same key, as the engines of variants with the same model file, is made once.
        """
        pending: dict[str, tuple[Call, PrefectFuture[str]]] = {}
        twins: list[str] = []
        try:
            for address, inputs in calls.items():
                call, fresh = self._prepare(address, inputs)
                if fresh:
                    self._run(call, fresh)
                elif call.key in pending:
                    twins.append(address)
                else:
                    command = stage_command(address, inputs)
                    makers = self._makers(inputs)
                    future = run_stage.submit(
                        address,
                        command,
                        call.key,
                        fresh,
                        self._is_deployed,
                        return_state=False,
                        wait_for=makers,
                    )
                    pending[call.key] = call, future
            for call, future in pending.values():
                self._finish(call, False, future.result(), "done")
            for address in twins:  # their output is in the store now
                self.run(address, **calls[address])
        except (KeyboardInterrupt, TerminationSignal):
            _end_stages()
            raise

    def _run(self, call: Call, fresh: bool) -> Path:
        started = time.perf_counter()
        command = stage_command(call.address, call.inputs)
        recorded_key = (_recall_stage if fresh else run_stage)(
            call.address, command, call.key, fresh, self._is_deployed, wait_for=self._makers(call.inputs)
        )
        self._finish(call, fresh, recorded_key, f"done in {time.perf_counter() - started:.1f} s")
        return call.folder

    def _prepare(self, address: str, inputs: Mapping[str, Path]) -> tuple[Call, bool]:
        recorded = recorded_facts(output_folder(address)) if address in self._elsewhere else None
        call = prepare_call(address, inputs, self._params, environment=recorded)
        if is_fresh(call):
            return call, True
        was_made = recall(call)
        if was_made:
            print_line(f"{address}: made before, restored from the store")
        return call, was_made

    def _makers(self, inputs: Mapping[str, Path]) -> list[str]:
        """Return what the tasks returned whose outputs are inputs: the edges of the graph on Prefect's page."""
        found: dict[Path, str] = {}
        for path in inputs.values():
            places = (path, *path.parents)
            maker = next((place for place in places if place in self._keys), None)
            if maker is not None:
                found[maker] = self._keys[maker]
            elif ARTIFACTS in places:  # it stands for many folders
                found |= {
                    folder: key for folder, key in self._keys.items() if _overlap(path.parts, folder.parts)
                }
        return [*found.values()]

    def _finish(self, call: Call, fresh: bool, recorded_key: str, what: str) -> None:
        if recorded_key != call.key or not (fresh or is_current(call)):
            raise StageFailed(
                f"{call.address}: inputs, code or params.yaml changed while it ran. "
                "No wrong output is used; run again."
            )
        self._keys[call.folder] = recorded_key
        self._num_done += 1
        if not fresh:
            self.num_executed += 1
            self._show_progress(self._num_done, self.num_calls)
            print_line(f"[{self._num_done:3d}/{self.num_calls}] {call.address}: {what}")
