"""Several machines: the pipeline and a target's device in checkouts of their own, with real servers between them."""

import contextlib
import json
import math
import shutil
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import requests
import yaml

from flows.deploy import DEPLOYMENTS, pools
from flows.deploy_target import Handover, deploy_target, find_place
from flows.optimize_on_pools import Outcome, TargetResult, _without_own_reference
from flows.params import CONF, compose_params, keep_targets
from flows.pipeline import RecordedStages, run_pipeline, run_targets
from tasks.core.errors import ConfigError
from tests.conftest import Workspace, copy_repository
from tests.services import BUCKET, Server, free_port, postgres, prefect_server, running, s3_server, wait_for


@pytest.mark.slow
def test_every_target_has_a_deployment_on_its_work_pool() -> None:
    declared = {
        file.stem: yaml.safe_load(file.read_text(encoding="utf-8"))["work_pool"]
        for file in (CONF / "target").glob("*.yaml")
    }
    deployments = yaml.safe_load(DEPLOYMENTS.read_text(encoding="utf-8"))["deployments"]
    deployed = {item["name"]: item for item in deployments if item["tags"] == ["deploy_target"]}
    assert {name: item["work_pool"]["name"] for name, item in deployed.items()} == declared
    assert set(declared.values()) | {"pipeline"} == set(pools())
    for name, item in deployed.items():
        assert item["parameters"]["target"] == name
        assert name in compose_params(item["parameters"]["overrides"])["build_engine"]


def test_nightly_run_is_the_default_configuration() -> None:
    deployments = yaml.safe_load(DEPLOYMENTS.read_text(encoding="utf-8"))["deployments"]
    nightly = next(item for item in deployments if item["name"] == "nightly")
    assert nightly["parameters"]["targets"] == list(compose_params()["build_engine"])


def test_leaving_out_a_target_changes_no_other_call() -> None:
    params = compose_params(["target=[cpu_torch,cpu_openvino,cuda_torch,h200_tensorrt]"])
    kept = keep_targets(params, ["cpu_torch", "cpu_openvino"])
    assert kept["prune"]["channel_multiple"] == params["prune"]["channel_multiple"] == 32
    plans = [RecordedStages(), RecordedStages()]
    for plan, content in zip(plans, (params, kept), strict=True):
        run_pipeline(plan, content)
    left_out = set(plans[0].calls) - set(plans[1].calls)
    assert {address.split(".")[-1] for address in left_out} == {"cuda_torch", "h200_tensorrt"}
    assert kept["pipeline"]["references"].keys() == kept["benchmark"].keys()
    assert {item["target"] for item in kept["select_engine"]["engines"]} == {"cpu_torch", "cpu_openvino"}


@pytest.mark.parametrize("outcome", [Outcome.WAITING, Outcome.FAILED])
def test_target_whose_reference_has_no_engine_shares_its_outcome_and_the_others_go_on(
    outcome: Outcome,
) -> None:
    results = {
        "cpu_torch": TargetResult(Outcome.DONE, "", {}),
        "cuda_torch": TargetResult(outcome, "pool gpu has no worker.", {}),
    }
    reference_of = {"cpu_openvino": "cpu_torch", "h200_tensorrt": "cuda_torch"}
    found = _without_own_reference(list(reference_of), reference_of, results)
    assert found.keys() == {"h200_tensorrt"} and found["h200_tensorrt"].outcome is outcome
    assert found["h200_tensorrt"].words == (
        f"its speed-ups refer to cuda_torch, which is {outcome.upper()}. pool gpu has no worker."
    )


def test_worker_on_a_gpu_gets_the_reference_of_its_device() -> None:
    params = compose_params(["target=[cpu_torch,cuda_torch,l4_tensorrt]"])
    plan = RecordedStages()
    run_targets(plan, params, ["l4_tensorrt"])
    engine = Path("artifacts/build_engine/baseline/cuda_torch/engine")
    assert plan.calls["benchmark.l4_tensorrt"]["reference"] == engine


def test_worker_in_the_checkout_of_the_pipeline_is_refused() -> None:
    models = Handover(commit="0", place=find_place(), entries={}, keys={})
    with pytest.raises(ConfigError, match="the checkout of the pipeline"):
        deploy_target.fn("cpu_torch", ["target=[cpu_torch]"], models)


class Road:
    """The only way to the store: a forwarder of TCP connections that can be closed."""

    def __init__(self, destination: int) -> None:
        self.port = free_port()
        self._destination = destination
        self._open: set[socket.socket] = set()
        self._door: socket.socket | None = None
        self._bytes_left = math.inf
        self._counting = threading.Lock()

    def open(self, *, until_bytes: float = math.inf) -> None:
        """Let connections through, until so much went over them."""
        self._bytes_left = until_bytes
        self._door = socket.create_server(("127.0.0.1", self.port))
        threading.Thread(target=self._serve, args=(self._door,), daemon=True).start()

    def close(self) -> None:
        """Cut every connection and take no new one."""
        assert self._door is not None
        door, self._door = self._door, None
        for end in (door, *tuple(self._open)):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()
        self._open.clear()

    @property
    def is_open(self) -> bool:
        """Tell whether connections get through."""
        return self._door is not None

    def _serve(self, door: socket.socket) -> None:
        while True:
            try:
                near, _ = door.accept()
                far = socket.create_connection(("127.0.0.1", self._destination))
            except OSError:
                return
            self._open |= {near, far}
            threading.Thread(target=self._connect, args=(near, far), daemon=True).start()

    def _connect(self, near: socket.socket, far: socket.socket) -> None:
        with near, far:
            back = threading.Thread(target=self._carry, args=(far, near), daemon=True)
            back.start()
            self._carry(near, far)
            back.join()
        self._open -= {near, far}

    def _carry(self, source: socket.socket, sink: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                sink.sendall(data)
                with self._counting:
                    self._bytes_left -= len(data)
                    if self._bytes_left < 0 and self.is_open:
                        self.close()
            sink.shutdown(socket.SHUT_WR)


@dataclass(frozen=True)
class Site:
    """Two checkouts, the servers that they share, and what tells clients where those are."""

    pipeline: Workspace
    device: Workspace
    api: str
    environment: Mapping[str, str]
    road: Road
    logs: Path

    def ask(self, path: str, **content: Any) -> Any:
        """Ask the Prefect server."""
        answer = requests.post(f"{self.api}{path}", json=content, timeout=30)
        answer.raise_for_status()
        return answer.json()

    def get(self, path: str) -> Any:
        """Read from the Prefect server."""
        answer = requests.get(f"{self.api}{path}", timeout=30)
        answer.raise_for_status()
        return answer.json()

    def start_run(self, **parameters: Any) -> str:
        """Start the deployment optimize/smoke for few engines and return the id of its run."""
        deployment = self.get("/deployments/name/optimize/smoke")
        overrides = [*deployment["parameters"]["overrides"], *_FEW_ENGINES]
        run = self.ask(
            f"/deployments/{deployment['id']}/create_flow_run",
            parameters={**deployment["parameters"], "overrides": overrides, **parameters},
            state={"type": "SCHEDULED"},
        )
        return str(run["id"])

    def finish(self, run_id: str) -> dict[str, Any]:
        """Wait until a run has ended and return its state."""
        wait_for(lambda: self.has_ended(run_id), "the end of a run", every_s=1.0)  # the server has other work
        state: dict[str, Any] = self.get(f"/flow_runs/{run_id}")["state"]
        return state

    def has_ended(self, run_id: str) -> bool:
        """Tell whether a run has ended."""
        return self.get(f"/flow_runs/{run_id}")["state"]["type"] not in _UNFINISHED

    def logs_of(self, run_id: str) -> str:
        """Return what a run said."""
        found = self.ask(
            "/logs/filter", logs={"flow_run_id": {"any_": [run_id]}}, sort="TIMESTAMP_ASC", limit=200
        )
        return "\n".join(entry["message"] for entry in found)

    @contextlib.contextmanager
    def worker(self, space: Workspace, pool: str) -> Iterator[Server]:
        """Start a worker that works in a checkout."""

        def find_problem() -> str | None:
            workers = self.ask(f"/work_pools/{pool}/workers/filter")
            here = [worker for worker in workers if worker["name"] == f"{pool}-worker"]
            return None if here and here[0]["status"] == "ONLINE" else "not online"

        server = Server(
            f"worker of {pool}",
            [
                *(sys.executable, "-m", "prefect", "worker", "start"),
                *("--pool", pool, "--name", f"{pool}-worker", "--limit", "1"),
            ],
            {
                **self.environment,
                "PREFECT_HOME": str(self.logs / f"home-{pool}"),
                "PREFECT_WORKER_QUERY_SECONDS": "1",
                "PYTHONPATH": str(space.path),
            },
            self.logs / f"{pool}.log",
            find_problem,
            stop_signal=signal.SIGKILL,  # it takes half a minute to end, and has nothing to save
        )
        with running(server):
            yield server


_FEW_ENGINES = (
    *(f"~pipeline.exports.{name}" for name in ("teacher", "baseline")),
    *(f"~variants.{name}" for name in ("teacher", "baseline", "pruned_fp16")),
    *(f"~variants.{name}" for name in ("pruned_repaired", "pruned_partial", "pruned_qat")),
    "select_engine.ladder=[distilled,pruned,pruned_ptq]",
    "select_engine.techniques=[]",
)
"""Two engines for cpu_torch and three for cpu_onnxruntime; all networks are those of the smoke run."""

_OF_TARGETS = (
    ".*",
    *("build_engine", "validate", "diff_layers", "benchmark", "measure_machine", "explain"),
    *("select_engine", "race_picks"),
)
"""What is left to make where the models are there."""

_IN_THE_MIDDLE_OF_A_PUSH = 200_000
"""Bytes; the models are some times as large."""

_UNFINISHED = ("SCHEDULED", "PENDING", "RUNNING", "CANCELLING")


def picks(space: Workspace) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((space.path / "artifacts/select_engine/picks.json").read_text())
    return content


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory, smoke_run: tuple[Workspace, str]) -> Iterator[Site]:
    """A pipeline's checkout, with trained models, and a device's, each with a worker; the pool ``edge`` has none."""
    folder = tmp_path_factory.mktemp("site")
    spaces = []
    for name in ("pipeline", "device"):
        (folder / name).mkdir()
        spaces.append(copy_repository(folder / name))
    made = smoke_run[0].path / "artifacts"
    shutil.copytree(made, spaces[0].path / "artifacts", ignore=shutil.ignore_patterns(*_OF_TARGETS))
    for space in spaces:
        for file, old, new in (
            ("conf/target/cpu_onnxruntime.yaml", "work_pool: cpu", "work_pool: edge"),
            (
                "prefect.yaml",
                "name: cpu_onnxruntime\n  work_pool: {name: cpu}",
                "name: cpu_onnxruntime\n  work_pool: {name: edge}",
            ),
        ):
            text = (space.path / file).read_text()
            assert old in text
            (space.path / file).write_text(text.replace(old, new))
        space.run("python", "-m", "dvc", "remote", "add", "--default", "folder", str(folder / "remote"))
    with (
        postgres(folder) as database,
        s3_server(folder) as store,
        prefect_server(folder, database.async_address(_new_database(database))) as server,
    ):
        road = Road(int(store.url.rpartition(":")[2]))
        road.open()
        environment = {**store.environment, "PREFECT_API_URL": server.url}
        registered = spaces[0].run(
            "python", "-m", "flows.deploy", PYTHONPATH=str(spaces[0].path), **environment
        )
        assert registered.returncode == 0, registered.stdout + registered.stderr
        here = Site(spaces[0], spaces[1], server.url, environment, road, folder)
        with here.worker(here.pipeline, "pipeline"), here.worker(here.device, "cpu"):
            yield here


def _new_database(database: Any) -> str:
    database.create_database("prefect")
    return "prefect"


@pytest.mark.slow
@pytest.mark.parametrize(
    "parameters", [{"targets": ["cpu_openvno"]}, {"targets": []}, {"overrides": ["rm -rf"]}]
)
def test_server_refuses_parameters_that_the_form_does_not_offer(
    site: Site, parameters: dict[str, Any]
) -> None:
    with pytest.raises(requests.HTTPError, match=r"Unprocessable|Conflict"):
        site.start_run(**parameters)


@pytest.mark.slow
def test_target_whose_pool_has_no_worker_waits_and_the_rest_finishes(site: Site) -> None:
    run = site.start_run(patience_s=5)
    state = site.finish(run)
    said = site.logs_of(run)
    assert state["type"] == "COMPLETED", said
    assert "cpu_onnxruntime: WAITING. pool edge has no worker" in said
    assert set(picks(site.pipeline)) == {"cpu_torch"}
    assert not (site.device.path / "artifacts/rank_layers").exists(), "a device gets what it needs"
    attached = site.ask("/artifacts/filter", artifacts={"key": {"any_": ["engines"]}})
    assert any("WAITING" in artifact["data"] for artifact in attached)
    records = ("dvc.lock", "params.yaml")
    for space in (site.pipeline, site.device):
        assert space.run("git", "status", "--porcelain", "--", *records).stdout == ""
    kept = site.pipeline.path / "artifacts/.deployed"
    committed = {
        file: file.read_bytes() for file in map(site.pipeline.path.joinpath, records) if file.exists()
    }
    for name in records:
        shutil.copy(kept / name, site.pipeline.path / name)
    assert site.pipeline.changed_stages() == {}
    for name in records:
        (site.pipeline.path / name).unlink()
    for file, content in committed.items():
        file.write_bytes(content)


@pytest.mark.slow
def test_killed_worker_and_lost_remote_lose_nothing_and_the_next_run_completes(site: Site) -> None:
    trained = site.pipeline.path / "artifacts/train/teacher/key.json"
    before = trained.stat().st_mtime_ns
    with site.worker(site.device, "edge") as worker:  # takes up the run that waited
        drafts = site.device.path / "artifacts/.drafts"
        wait_for(lambda: any(drafts.glob("*-*")), "a stage at work")
        worker.stop(signal.SIGKILL)
    use_s3(site)
    site.road.close()
    site.road.open(until_bytes=_IN_THE_MIDDLE_OF_A_PUSH)
    with site.worker(site.device, "edge"):
        run = site.start_run(patience_s=60)
        wait_for(lambda: not site.road.is_open or site.has_ended(run), "a push that is cut", every_s=0.2)
        assert not site.road.is_open, site.logs_of(run)
        assert is_running(site, run, "push")
        time.sleep(5)  # tries, and DVC's own tries within them
        site.road.open()
        state = site.finish(run)
        assert state["type"] == "COMPLETED", site.logs_of(run)
    assert set(picks(site.pipeline)) == {"cpu_torch", "cpu_onnxruntime"}
    assert trained.stat().st_mtime_ns == before, "models are not made again"


def is_running(site: Site, run: str, name: str) -> bool:
    """Tell whether a run is at a task whose name begins so."""
    tasks = site.ask("/task_runs/filter", flow_runs={"id": {"any_": [run]}})
    return any(task["name"].startswith(name) and task["state"]["type"] == "RUNNING" for task in tasks)


def use_s3(site: Site) -> None:
    """Let both checkouts exchange artifacts through the S3 store from now on."""
    url, address = f"s3://{BUCKET}/enginewright", f"http://127.0.0.1:{site.road.port}"
    for space in (site.pipeline, site.device):
        for command in (
            ("add", "--default", "--force", "store", url),
            ("modify", "store", "endpointurl", address),
        ):
            done = space.run("python", "-m", "dvc", "remote", *command)
            assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_worker_with_other_code_is_refused_before_it_builds(site: Site) -> None:
    changed = site.device.path / "tasks/build_engine.py"
    shutil.copy(changed, site.logs / "build_engine.py")
    changed.write_text(changed.read_text() + "\n# another version\n")
    run = site.start_run()
    state = site.finish(run)
    shutil.copy(site.logs / "build_engine.py", changed)
    assert state["type"] == "FAILED"
    assert "Bring both checkouts to one commit" in state["message"], state["message"]
    assert "cpu_torch is FAILED" in state["message"]
