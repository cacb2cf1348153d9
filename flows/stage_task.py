"""The bridge: one stage call becomes one cached Prefect task."""

import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from prefect import task
from prefect.cache_policies import CacheKeyFnPolicy

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
def run_stage(address: str, command: list[str], key: str) -> dict[str, str]:
    """Run a stage in its own process and return a small manifest; the outputs themselves stay in artifacts/."""
    code = subprocess.run([sys.executable, *command[1:]], check=False).returncode
    if code != 0:
        raise StageFailed(f"{address} ended with exit code {code}. Mend what it says above and run again.")
    return {"address": address, "key": key}


class StageRunner:
    """Runs stage calls as Prefect tasks and says on the terminal what each one took."""

    def __init__(self, params: Mapping[str, Any], num_calls: int) -> None:
        self._params = params
        self.num_calls = num_calls
        self._num_done = 0
        self.num_executed = 0
        self.executed_s = 0.0

    def __call__(self, address: str, **inputs: Path) -> Path:
        """Make sure that a call's output is fresh and return its folder."""
        call = prepare_call(address, inputs, self._params)
        fresh = is_fresh(call)
        started = time.perf_counter()
        self._num_done += 1
        place = f"[{self._num_done:3d}/{self.num_calls}]"
        if not fresh:
            print(f"{place} {address}: running", flush=True)
        record = _cached_stage(call, fresh)
        if record["key"] != call.key or not (fresh or is_fresh(call)):
            raise StageFailed(
                f"{address}: inputs, code or params.yaml changed while it ran. Nothing wrong is kept; run again."
            )
        if not fresh:
            seconds = time.perf_counter() - started
            self.num_executed += 1
            self.executed_s += seconds
            print(f"{place} {address}: done in {seconds:.1f} s", flush=True)
        return call.folder


def _cached_stage(call: Call, fresh: bool) -> dict[str, str]:
    """Run the task, or record an output that the other driver made as its result, or take Prefect's record.

    ``refresh_cache`` follows the files on disk: after configuration A, then B, then A again, Prefect would still
    answer from its record of A while the folder holds B.
    """
    named = run_stage.with_options(name=call.address, task_run_name=call.address, refresh_cache=not fresh)
    command = stage_command(call.address, call.inputs)
    return named(call.address, command, call.key)
