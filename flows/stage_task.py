"""The bridge: one stage call becomes one cached Prefect task."""

import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from prefect import Task, task
from prefect.cache_policies import CacheKeyFnPolicy
from prefect.futures import PrefectFuture

from flows.pipeline import Calls
from tasks.core.errors import EnginewrightError
from tasks.core.execute import Call, is_fresh, prepare_call


class StageFailed(EnginewrightError):
    """A stage ended with an error; its own message stands above on the terminal."""


def stage_command(address: str, inputs: Mapping[str, Path]) -> list[str]:
    """Return the command line of a stage call, the same one that dvc.yaml holds."""
    return ["python", "-m", "tasks", address, *(f"{name}={path}" for name, path in inputs.items())]


@task(
    cache_policy=CacheKeyFnPolicy(cache_key_fn=lambda _, arguments: str(arguments["key"])),
    persist_result=True,
    result_serializer="json",
)
def run_stage(address: str, command: list[str], key: str, fresh: bool) -> dict[str, str]:
    """Run a stage in its own process and return a small manifest; the outputs themselves stay in artifacts/.

    With ``fresh``, the other driver made the output already, and the manifest is all there is to record.
    """
    if not fresh:
        print(f"{address}: running", flush=True)
        code = subprocess.run([sys.executable, *command[1:]], check=False).returncode
        if code != 0:
            raise StageFailed(
                f"{address} ended with exit code {code}. Mend what it says above and run again."
            )
    return {"address": address, "key": key}


class TaskStages:
    """Runs stage calls as Prefect tasks and says on the terminal what each one took."""

    def __init__(self, params: Mapping[str, Any], num_calls: int) -> None:
        self._params = params
        self._num_done = 0
        self.num_calls = num_calls
        self.num_executed = 0

    def run(self, address: str, **inputs: Path) -> Path:
        """Make sure that a call's output is fresh and return its folder."""
        call, fresh = self._prepare(address, inputs)
        started = time.perf_counter()
        record = _task_of(call, fresh)(call.address, stage_command(address, inputs), call.key, fresh)
        self._finish(call, fresh, record, f"done in {time.perf_counter() - started:.1f} s")
        return call.folder

    def run_side_by_side(self, calls: Calls) -> None:
        """Make sure that the outputs of independent calls are fresh, as many at once as the task runner takes."""
        pending: list[tuple[Call, bool, PrefectFuture[dict[str, str]]]] = []
        for address, inputs in calls.items():
            call, fresh = self._prepare(address, inputs)
            if fresh:
                self.run(address, **inputs)
            else:
                future = _task_of(call, fresh).submit(
                    address, stage_command(address, inputs), call.key, fresh
                )
                pending.append((call, fresh, future))
        for call, fresh, future in pending:
            self._finish(call, fresh, future.result(), "done")

    def _prepare(self, address: str, inputs: Mapping[str, Path]) -> tuple[Call, bool]:
        call = prepare_call(address, inputs, self._params)
        return call, is_fresh(call)

    def _finish(self, call: Call, fresh: bool, record: Mapping[str, str], what: str) -> None:
        if record["key"] != call.key or not (fresh or is_fresh(call)):
            raise StageFailed(
                f"{call.address}: inputs, code or params.yaml changed while it ran. Nothing wrong is kept; run again."
            )
        self._num_done += 1
        if not fresh:
            self.num_executed += 1
            print(f"[{self._num_done:3d}/{self.num_calls}] {call.address}: {what}", flush=True)


def _task_of(call: Call, fresh: bool) -> Task[[str, list[str], str, bool], dict[str, str]]:
    """Name the task after the call.

    ``refresh_cache`` follows the files on disk: after configuration A, then B, then A again, Prefect would still
    answer from its record of A while the folder holds B.
    """
    return run_stage.with_options(name=call.address, task_run_name=call.address, refresh_cache=not fresh)
