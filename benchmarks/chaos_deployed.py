"""Run the pipeline as a deployment: the driver ``deployed`` of benchmarks/chaos.py.

``python -m benchmarks.chaos_deployed --device DIR --device-log FILE [override ...]`` runs ``optimize/smoke`` to its
end, in the checkout of the pipeline. It starts the Prefect server of this checkout, a worker of ``pipeline`` here
and one of ``cpu`` in the checkout of the device; whichever of them is killed is started again, as systemd would. Ends
with 0 if the run is Completed, and with 1 if it is not or if its process is gone. No worker outlives it.
"""

import argparse
import contextlib
import os
import subprocess
import sys
import time
import uuid
from pathlib import Path
from typing import IO, Any

import psutil
import requests
import yaml

from flows import local_server

MARK = "ENGINEWRIGHT_CHAOS"
"""An environment variable of the workers and of all that they start: the checkout of the pipeline."""
TARGETS = ("cpu_torch", "cpu_onnxruntime", "cpu_openvino", "cpu_openvino_bf16")
"""Those of the default configuration, so that the keys are those of the other drivers."""
HEARTBEAT_S = 30
PIPELINE, DEVICE = "pipeline", "cpu"
"""The work pools."""
_POLL_S = 1.0
_GONE_S = 30.0
"""A run without a process is lost after this; a worker takes a few seconds to start one."""
_FINAL = ("COMPLETED", "FAILED", "CRASHED", "CANCELLED")


class Worker:
    """A worker of a pool that works in a checkout."""

    def __init__(self, pool: str, checkout: Path, log: IO[str]) -> None:
        self._pool, self._checkout, self._log = pool, checkout, log
        self._start()

    def keep_alive(self) -> None:
        """Start it again if it has ended."""
        code = self._process.poll()
        if code is not None:
            print(f"the worker of {self._pool} ended with {code}; starting it again", flush=True)
            self._start()

    def _start(self) -> None:
        others = {name: value for name, value in os.environ.items() if not name.startswith("PREFECT_")}
        self._process = subprocess.Popen(
            [
                *(sys.executable, "-m", "prefect", "worker", "start"),
                *("--pool", self._pool, "--name", f"{self._pool}-worker", "--limit", "1"),
            ],
            cwd=self._checkout,
            env={
                **others,
                MARK: str(Path.cwd()),
                "PYTHONPATH": str(self._checkout),
                "PREFECT_API_URL": os.environ["PREFECT_API_URL"],
                "PREFECT_API_AUTH_STRING": os.environ["PREFECT_API_AUTH_STRING"],
                "PREFECT_HOME": str(self._checkout.with_name(f"home-{self._pool}")),
                "PREFECT_WORKER_QUERY_SECONDS": "1",
                "PREFECT_FLOWS_HEARTBEAT_FREQUENCY": str(HEARTBEAT_S),
                "DO_NOT_TRACK": "1",
            },
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


def is_worker(process: psutil.Process) -> bool:
    """Return whether a process is a worker."""
    return process.cmdline()[1:4] == ["-m", "prefect", "worker"]


def is_stage(process: psutil.Process) -> bool:
    """Return whether a process is a stage."""
    return process.cmdline()[1:3] == ["-m", "tasks"]


def is_run(process: psutil.Process) -> bool:
    """Return whether a process is a run of a flow."""
    return any(word.startswith("prefect.") for word in process.cmdline()[1:]) and not is_worker(process)


def processes_of(workspace: Path) -> list[psutil.Process]:
    """Return the workers of a workspace and all that they started."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.environ().get(MARK) == str(workspace) and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


def end_all(workspace: Path) -> None:
    """Kill the workers of a workspace and all that they started."""
    while left := processes_of(workspace):
        for process in left:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(left, timeout=10)


def ask(path: str, content: dict[str, Any] | None = None, method: str = "POST") -> Any:
    """Ask the Prefect server, until one answers; None for what it does not know."""
    user, _, password = os.environ["PREFECT_API_AUTH_STRING"].partition(":")
    while True:
        with contextlib.suppress(requests.ConnectionError, requests.Timeout):
            answer = requests.request(
                method,
                f"{os.environ['PREFECT_API_URL']}{path}",
                json=content,
                auth=(user, password),
                timeout=30,
            )
            if answer.status_code == 404:
                return None
            if answer.status_code < 500:  # it is above where it starts, or its disk is full
                answer.raise_for_status()
                return answer.json() if answer.content else {}
        time.sleep(_POLL_S)


def register() -> None:
    """Register the deployments unless the server has the last one of them; nothing is to start by itself."""
    listed = yaml.safe_load(Path("prefect.yaml").read_text(encoding="utf-8"))["deployments"]
    flow = listed[-1]["entrypoint"].rpartition(":")[2]
    if ask(f"/deployments/name/{flow}/{listed[-1]['name']}", method="GET") is None:
        done = subprocess.run([sys.executable, "-m", "flows.deploy"], check=False)
        if done.returncode:  # the server was killed, or the disk is full
            sys.exit("the deployments could not be registered")
    nightly = ask("/deployments/name/optimize/nightly", method="GET")
    ask(f"/deployments/{nightly['id']}", {"paused": True}, method="PATCH")


def start_run(overrides: list[str]) -> str:
    """Start the deployment optimize/smoke in place of runs that a killed driver left, and return the run's id."""
    deployment = ask("/deployments/name/optimize/smoke", method="GET")
    unfinished = {
        "flow_runs": {
            "deployment_id": {"any_": [deployment["id"]]},
            "state": {"type": {"not_any_": list(_FINAL)}},
        }
    }
    for left in ask("/flow_runs/filter", unfinished):
        state = {"type": "CRASHED", "message": "its driver was killed"}
        ask(f"/flow_runs/{left['id']}/set_state", {"state": state, "force": True})
    run = ask(
        f"/deployments/{deployment['id']}/create_flow_run",
        {
            "parameters": {"targets": TARGETS, "overrides": overrides},
            "state": {"type": "SCHEDULED"},
            "idempotency_key": str(uuid.uuid4()),
        },
    )
    return str(run["id"])


def follow(run_id: str, workers: list[Worker]) -> bool:
    """Keep the workers alive until a run ends or is lost; return whether it is Completed."""
    seen_s = time.monotonic()
    while True:
        state = ask(f"/flow_runs/{run_id}", method="GET")["state"]
        if state["type"] in _FINAL:
            print(f"optimize: {state['name']}: {state['message']}", flush=True)
            return bool(state["type"] == "COMPLETED")
        for worker in workers:
            worker.keep_alive()
        if state["type"] == "SCHEDULED" or _has_process(Path.cwd()):
            seen_s = time.monotonic()
        elif time.monotonic() - seen_s > _GONE_S:
            print(f"optimize: {state['name']}, but its process is gone", flush=True)
            return False
        time.sleep(_POLL_S)


def _has_process(checkout: Path) -> bool:
    """Return whether a run of a flow works in a checkout."""
    for process in processes_of(Path.cwd()):
        with contextlib.suppress(psutil.Error):
            if is_run(process) and process.cwd() == str(checkout):
                return True
    return False


def main() -> int:
    """Start what is needed, run the deployment and return the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", type=Path, required=True, help="the checkout of the device")
    parser.add_argument("--device-log", type=Path, required=True, help="what its worker says goes here")
    parser.add_argument("overrides", nargs="*", help="of Hydra")
    options = parser.parse_args()
    local_server.prepare_environment()
    local_server.begin_start()
    local_server.wait_until_ready()
    try:
        with local_server.kept_alive(), options.device_log.open("a", encoding="utf-8") as log:
            register()
            workers = [Worker(PIPELINE, Path.cwd(), sys.stdout), Worker(DEVICE, options.device, log)]
            return 0 if follow(start_run(options.overrides), workers) else 1
    finally:
        end_all(Path.cwd())


if __name__ == "__main__":
    sys.exit(main())
