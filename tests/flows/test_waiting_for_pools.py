"""How long the pipeline waits for its targets: a real server, a real worker and runs that sleep."""

import contextlib
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from uuid import UUID

import psutil
import pytest
from prefect import get_client
from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.objects import WorkerStatus
from prefect.settings import (
    PREFECT_API_AUTH_STRING,
    PREFECT_API_URL,
    PREFECT_FLOWS_HEARTBEAT_FREQUENCY,
    temporary_settings,
)

from flows import optimize_on_pools
from flows.optimize_on_pools import Outcome, TargetResult, _wait
from tests.services import Server, prefect_server, running, server_environment, wait_for

POOL = "device"
AUTH_STRING = "tests:correct-horse-9"
TIMEOUT_S = 15.0
LONG_S = 3600.0

SLEEPER = """
import os, time
from pathlib import Path
from prefect import flow
from prefect.artifacts import Artifact
from flows.deploy_target import ENTRIES_ARTIFACT

@flow
def sleeper(seconds: float, name: str) -> None:
    Path(__file__).with_name(f"{name}.pid").write_text(str(os.getpid()))
    time.sleep(seconds)
    Artifact(type=ENTRIES_ARTIFACT, data={}).create()

if __name__ == "__main__":
    from prefect import get_client
    from prefect.client.schemas.actions import WorkPoolCreate
    from prefect.workers.process import ProcessWorker
    template = ProcessWorker.get_default_base_job_template()
    with get_client(sync_client=True) as client:
        client.create_work_pool(WorkPoolCreate(name="device", type="process", base_job_template=template))
    there = flow.from_source(source=str(Path(__file__).parent), entrypoint="sleeper.py:sleeper")
    print(there.deploy(name="sleeper", work_pool_name="device", print_next_steps=False))
"""


@dataclass(frozen=True)
class Device:
    """A pool whose worker takes one run at a time."""

    client: SyncPrefectClient
    deployment: UUID
    folder: Path
    worker: Server

    def start(self, name: str, seconds: float) -> UUID:
        """Schedule a run that sleeps."""
        parameters = {"seconds": seconds, "name": name}
        return self.client.create_flow_run_from_deployment(self.deployment, parameters=parameters).id

    def process_of(self, name: str) -> psutil.Process:
        """Wait until a run is at work and return its process."""
        file = self.folder / f"{name}.pid"
        return psutil.Process(int(wait_for(lambda: file.is_file() and file.read_text(), f"the run {name}")))

    def wait(self, **runs: UUID) -> dict[str, TargetResult]:
        """Wait for runs as the pipeline waits for its targets."""
        params = {"pipeline": {"work_pools": dict.fromkeys(runs, POOL)}}
        return _wait(params, runs, patience_s=60.0, timeout_s=TIMEOUT_S)


@pytest.fixture
def device(tmp_path: Path) -> Iterator[Device]:
    (tmp_path / "sleeper.py").write_text(SLEEPER)
    secrets = {"PREFECT_API_AUTH_STRING": AUTH_STRING, "PREFECT_SERVER_API_AUTH_STRING": AUTH_STRING}
    with prefect_server(tmp_path, **secrets) as server:
        environment = {
            "PREFECT_API_URL": server.url,
            "PREFECT_API_AUTH_STRING": AUTH_STRING,
            "PREFECT_HOME": str(tmp_path / "home"),
            "PREFECT_WORKER_QUERY_SECONDS": "1",
            "PREFECT_FLOWS_HEARTBEAT_FREQUENCY": "30",
            "PYTHONPATH": str(Path(__file__).resolve().parents[2]),
        }
        deployed = subprocess.run(
            [sys.executable, "sleeper.py"],
            env=server_environment(environment),
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=False,
        )
        assert deployed.returncode == 0, deployed.stderr
        settings = {
            PREFECT_API_URL: server.url,
            PREFECT_API_AUTH_STRING: AUTH_STRING,
            PREFECT_FLOWS_HEARTBEAT_FREQUENCY: 30,
        }
        with temporary_settings(settings), get_client(sync_client=True) as client:

            def find_problem() -> str | None:
                workers = client.read_workers_for_work_pool(POOL)
                return (
                    None if any(worker.status is WorkerStatus.ONLINE for worker in workers) else "not online"
                )

            worker = Server(
                "the worker",
                [sys.executable, "-m", "prefect", "worker", "start", "--pool", POOL, "--limit", "1"],
                environment,
                tmp_path / "worker.log",
                find_problem,
                stop_signal=signal.SIGKILL,  # it takes half a minute to end, and has nothing to save
            )
            try:
                with running(worker):
                    yield Device(
                        client, client.read_deployment_by_name("sleeper/sleeper").id, tmp_path, worker
                    )
            finally:
                end_sleepers(tmp_path)


def end_sleepers(folder: Path) -> None:
    """End the runs that still sleep."""
    for file in folder.glob("*.pid"):
        with contextlib.suppress(psutil.NoSuchProcess):
            process = psutil.Process(int(file.read_text()))
            if "prefect" in " ".join(process.cmdline()):
                process.kill()


@pytest.mark.slow
def test_time_in_the_queue_is_not_the_target_s_and_a_run_that_takes_too_long_is_ended(device: Device) -> None:
    too_long = device.start("too_long", LONG_S)
    process = device.process_of("too_long")
    queued = device.start("queued", 0.1)
    results = device.wait(too_long=too_long, queued=queued)
    assert results["too_long"] == TargetResult(Outcome.FAILED, "it took more than 15 s", {})
    assert results["queued"].outcome is Outcome.DONE, (
        "it began after the other one, which had the pool until then"
    )
    assert not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    ended = device.client.read_flow_run(too_long).state
    assert ended is not None and ended.is_cancelled()

    foreign = device.start("foreign", LONG_S)
    device.process_of("foreign")
    behind = device.start("behind", 0.1)
    results = device.wait(behind=behind)
    assert results["behind"].line == "WAITING. pool device has been busy with other work for more than 15 s."
    assert not device.client.read_flow_run(foreign).state.is_final()
    assert device.client.read_flow_run(behind).state.is_scheduled()


@pytest.mark.slow
def test_run_that_was_killed_with_its_worker_is_lost_though_the_worker_is_back(
    device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(optimize_on_pools, "_MISSED_HEARTBEATS", 0.2)
    killed = device.start("killed", LONG_S)
    process = device.process_of("killed")
    device.worker.stop()
    with contextlib.suppress(psutil.NoSuchProcess):
        process.kill()
    device.worker.start()
    assert device.wait(killed=killed)["killed"] == TargetResult(Outcome.FAILED, "its worker was lost", {})
    ended = device.client.read_flow_run(killed).state
    assert ended is not None and ended.is_crashed()
