"""What compose.yaml starts works together: the same commands, variables and health checks, as processes."""

import base64
import dataclasses
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from flows.pick import main as pick
from tasks.core.errors import TrackingRefused, TrackingUnavailable
from tasks.core.tracking.config import TrackingConfig
from tasks.core.tracking.lookup import find_engine, find_engines, promote, read_pipeline_file
from tasks.core.tracking.pending import PENDING, has_pending, log_or_keep, send_pending
from tasks.core.tracking.records import RunRecord
from tests.conftest import REPOSITORY, SMOKE, Workspace
from tests.flows.test_pick import TARGET, log, record
from tests.services import (
    BUCKET,
    PASSWORD,
    PostgreSQL,
    S3Server,
    Server,
    find_postgres,
    free_port,
    postgres,
    running,
    s3_server,
    server_environment,
)

pytestmark = pytest.mark.slow

DOCKER = REPOSITORY / "docker"
SERVICES: dict[str, dict[str, Any]] = yaml.safe_load((DOCKER / "compose.yaml").read_text())["services"]
BINARIES = Path(sys.executable).parent

PREFECT_PORT, MLFLOW_PORT, WORKER_PORT = "4200", "5000", "8080"
"""In the containers."""


@dataclass(frozen=True)
class Stack:
    """The running servers."""

    folder: Path
    postgres: PostgreSQL
    s3: S3Server
    prefect: Server
    mlflow: Server
    places: dict[str, str]
    """What stands in compose.yaml, and what stands for it on this machine."""

    def secret(self, name: str) -> str:
        return (self.folder / "secrets" / name).read_text()

    def ask(self, path: str, body: str | None = None, **headers: str) -> str:
        """Ask the Prefect server, with its auth string unless there are other headers."""
        token = base64.b64encode(self.secret("prefect_auth_string").encode()).decode()
        request = urllib.request.Request(
            f"{self.prefect.url}/api{path}",
            data=None if body is None else body.encode(),
            headers={"Content-Type": "application/json", **(headers or {"Authorization": f"Basic {token}"})},
        )
        with urllib.request.urlopen(request, timeout=30) as answer:
            return str(answer.read().decode())


def from_compose(name: str, folder: Path, places: dict[str, str], port: str, command: list[str]) -> Server:
    """Return the service as a process that listens on a free port instead of `port`."""
    own = str(free_port())
    places = places | {port: own, "${PREFECT_PORT:-4200}": own}

    def here(text: str) -> str:
        return re.sub("|".join(map(re.escape, places)), lambda there: places[there[0]], text)

    service = SERVICES[name]
    health = [sys.executable, *map(here, service["healthcheck"]["test"][2:])]

    def find_problem() -> str | None:
        asked = subprocess.run(health, capture_output=True, text=True, check=False)
        return None if asked.returncode == 0 else asked.stderr.strip().splitlines()[-1]

    environment = {variable: here(value) for variable, value in service["environment"].items()}
    environment["PATH"] = f"{BINARIES}{os.pathsep}{os.environ['PATH']}"
    environment["HOME"] = str(folder)
    with_secrets = ["sh", str(DOCKER / "with_secrets.sh"), *command]
    return Server(
        name, with_secrets, environment, folder / f"{name}.log", find_problem, f"http://127.0.0.1:{own}"
    )


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    folder = tmp_path_factory.mktemp("stack")
    secrets = folder / "secrets"
    subprocess.run(["sh", DOCKER / "make_secrets.sh", secrets], check=True)
    with ExitStack() as servers:
        database = servers.enter_context(postgres(folder))
        create_databases(database, secrets)
        store = servers.enter_context(s3_server(folder))
        rules = (DOCKER / "mlflow_auth.ini").read_text()
        (folder / "auth.ini").write_text(rules.replace("postgres:5432", f"127.0.0.1:{database.port}"))
        places = {
            "postgres:5432": f"127.0.0.1:{database.port}",
            "http://s3:8333": store.url,
            "/run/secrets": str(secrets),
            "/etc/mlflow_auth.ini": str(folder / "auth.ini"),
            "/tmp/prefect_ui": str(folder / "prefect_ui"),
            "0.0.0.0": "127.0.0.1",
        }
        started = []
        for name, port in (("prefect", PREFECT_PORT), ("mlflow", MLFLOW_PORT)):
            script = "/create_mlflow_worker.py"
            command = [part.replace(script, f"{DOCKER}{script}") for part in SERVICES[name]["command"]]
            server = from_compose(name, folder, places, port, command)
            servers.enter_context(running(server))
            started.append(server)
        yield Stack(folder, database, store, *started, places)


def create_databases(database: PostgreSQL, secrets: Path) -> None:
    environment = {
        "PATH": f"{find_postgres()}{os.pathsep}{os.environ['PATH']}",
        "PGHOST": "127.0.0.1",
        "PGPORT": str(database.port),
        "PGPASSWORD": PASSWORD,
        "SECRETS": str(secrets),
    }
    subprocess.run(
        ["sh", DOCKER / "create_databases.sh"], env=server_environment(environment), cwd="/", check=True
    )


def sign_in(monkeypatch: pytest.MonkeyPatch, user: str, password: str) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_USERNAME", user)
    monkeypatch.setenv("MLFLOW_TRACKING_PASSWORD", password)


@pytest.fixture
def signed_in(stack: Stack, monkeypatch: pytest.MonkeyPatch) -> TrackingConfig:
    """The tracking of a user of the server, who has signed in as its workers do."""
    sign_in(monkeypatch, "worker", stack.secret("mlflow_worker_password"))
    return TrackingConfig(enabled=True, uri=stack.mlflow.url, experiment="enginewright")


@pytest.fixture
def logged(stack: Stack, signed_in: TrackingConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder in which a pipeline was logged to the server."""
    monkeypatch.chdir(tmp_path)
    shutil.copy(REPOSITORY / "params.yaml", tmp_path)
    records = [record(tmp_path, "ptq", 1.0, 0.60, picked=True), record(tmp_path, "float", 4.0, 0.66)]
    log(signed_in, tmp_path, records, {f"enginewright-{TARGET}": f"ptq-{TARGET}"})
    return tmp_path


def test_each_server_has_a_database_of_its_own_that_the_other_cannot_enter(stack: Stack) -> None:
    import psycopg2

    for name, other in (("prefect", "mlflow"), ("mlflow", "prefect")):
        password = stack.secret(f"{name}_database_password")
        with psycopg2.connect(stack.postgres.address(name, name, password)) as connection:
            cursor = connection.cursor()
            cursor.execute("SELECT count(*) FROM information_schema.tables WHERE table_schema = 'public'")
            assert cursor.fetchone()[0] > 10
        connection.close()
        with pytest.raises(psycopg2.OperationalError, match="permission denied for database"):
            psycopg2.connect(stack.postgres.address(other, name, password))


def test_prefect_keeps_its_data_in_postgresql_and_goes_on_after_its_restart(stack: Stack) -> None:
    stack.ask("/flows/", '{"name": "kept"}')
    assert stack.postgres.run("SELECT name FROM flow", "prefect") == [("kept",)]
    stack.postgres.restart()
    wait_until(lambda: '"kept"' in stack.ask("/flows/name/kept"), stack.prefect)
    wait_until(lambda: '"later"' in stack.ask("/flows/", '{"name": "later"}'), stack.prefect)


def test_prefect_answers_only_who_has_its_auth_string_and_no_page_of_others(stack: Stack) -> None:
    for authorization in ("", "Basic d3Jvbmc="):
        with pytest.raises(urllib.error.HTTPError, match="401"):
            stack.ask("/flows/filter", "{}", Authorization=authorization)
    for origin, allowed in ((stack.prefect.url, stack.prefect.url), ("http://example.org", None)):
        asked = {"Origin": origin, "Access-Control-Request-Method": "POST"}
        request = urllib.request.Request(f"{stack.prefect.url}/api/flows/", headers=asked, method="OPTIONS")
        try:
            answer: Any = urllib.request.urlopen(request, timeout=30)
        except urllib.error.HTTPError as error:
            answer = error
        with answer:
            assert answer.headers["Access-Control-Allow-Origin"] == allowed


def wait_until(is_so: Callable[[], bool], server: Server) -> None:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        try:
            if is_so():
                return
        except urllib.error.URLError:
            pass
        time.sleep(0.2)
    pytest.fail(server.log.read_text()[-4000:])


@pytest.mark.parametrize("password", [None, "", "wrong-password-1"])
def test_mlflow_refuses_who_has_not_signed_in(
    stack: Stack, password: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("MLFLOW_TRACKING_USERNAME", "MLFLOW_TRACKING_PASSWORD"):
        monkeypatch.delenv(name, raising=False)
    if password is not None:
        monkeypatch.setenv("MLFLOW_TRACKING_USERNAME", "admin")
        monkeypatch.setenv("MLFLOW_TRACKING_PASSWORD", password)
    stranger = TrackingConfig(enabled=True, uri=stack.mlflow.url, experiment="enginewright")
    with pytest.raises(TrackingUnavailable, match="MLFLOW_TRACKING_USERNAME"):
        find_engines(stranger, TARGET)


def test_engine_is_logged_picked_and_downloaded_through_the_server(
    stack: Stack, signed_in: TrackingConfig, logged: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--target", TARGET, "--tracking-uri", signed_in.uri]
    assert (
        pick([*options, "--max-latency-ms", "8", "--min-miou", "0.5", "--download", "mine", "--promote"]) == 0
    )
    assert f"ptq on {TARGET}" in capsys.readouterr().out
    assert (logged / f"mine/engine/ptq.{TARGET}.blob").read_bytes() == f"ptq {TARGET}".encode()
    assert [key for key in stored(stack) if key.endswith(f"engine/ptq.{TARGET}.blob")]
    assert all(key.startswith("mlflow/") for key in stored(stack))
    num_runs = stack.postgres.run("SELECT count(*) FROM runs", "mlflow")[0][0]
    assert num_runs == 3  # the pipeline and two engines
    stack.postgres.restart(signal.SIGQUIT)  # a crash
    engines = find_engines(signed_in, TARGET)
    assert len(engines) == 2
    for engine in engines:  # what `flows.reproduce` asks the server
        assert find_engine(signed_in, engine.tags["engine_sha256"][:12]) == engine
        assert yaml.safe_load(read_pipeline_file(signed_in, engine, "params.yaml"))["prepare_data"]


def test_user_of_the_team_reads_what_there_is_and_promotes_nothing(
    stack: Stack, signed_in: TrackingConfig, logged: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mlflow.server import get_app_client

    sign_in(monkeypatch, "admin", stack.secret("mlflow_admin_password"))
    get_app_client("basic-auth", signed_in.uri).create_user("ada", "a-long-password")
    sign_in(monkeypatch, "ada", "a-long-password")
    engines = find_engines(signed_in, TARGET)
    assert len(engines) == 2
    with pytest.raises(TrackingRefused, match=r"Permission denied.*give ada the permission EDIT"):
        promote(signed_in, TARGET, engines[0].run_id)


def test_worker_changes_what_it_made_and_neither_users_nor_what_others_made(
    stack: Stack, signed_in: TrackingConfig, logged: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mlflow import MlflowClient
    from mlflow.exceptions import MlflowException
    from mlflow.server import get_app_client

    client = MlflowClient(signed_in.uri, signed_in.uri)
    promote(signed_in, TARGET, find_engines(signed_in, TARGET)[0].run_id)
    sign_in(monkeypatch, "admin", stack.secret("mlflow_admin_password"))
    foreign = client.create_experiment("of the administrator")
    sign_in(monkeypatch, "worker", stack.secret("mlflow_worker_password"))
    assert client.get_experiment(foreign).name == "of the administrator"
    for forbidden in (
        lambda: client.delete_experiment(foreign),
        lambda: client.create_run(foreign),
        lambda: get_app_client("basic-auth", signed_in.uri).create_user("mallory", "a-long-password"),
        lambda: get_app_client("basic-auth", signed_in.uri).update_user_admin("worker", True),
    ):
        with pytest.raises(MlflowException, match="Permission denied"):
            forbidden()


def test_pending_runs_of_an_experiment_of_others_are_set_aside_and_stop_nothing(
    stack: Stack, signed_in: TrackingConfig, logged: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mlflow import MlflowClient

    sign_in(monkeypatch, "admin", stack.secret("mlflow_admin_password"))
    MlflowClient(signed_in.uri, signed_in.uri).create_experiment("of another team")
    sign_in(monkeypatch, "worker", "wrong-password-1")
    runs = {"pipeline": RunRecord("pipeline", {}, {}, ()), "candidates": [], "picks": {}}
    assert log_or_keep(signed_in, **runs) is None
    foreign = dataclasses.replace(signed_in, experiment="of another team")
    with pytest.raises(TrackingUnavailable):
        send_pending(foreign)
    assert has_pending()
    sign_in(monkeypatch, "worker", stack.secret("mlflow_worker_password"))
    assert send_pending(foreign) == 0 and not has_pending()
    [reason] = PENDING.glob("refused/*/reason.txt")
    assert "give worker the permission EDIT for the experiment 'of another team'" in reason.read_text()
    reason.parent.rename(PENDING / "again")
    assert send_pending(signed_in) == 1


def test_password_of_the_worker_follows_its_secret(
    stack: Stack, signed_in: TrackingConfig, logged: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def restart_with(password: str) -> None:
        environment = {**stack.mlflow.environment, "MLFLOW_WORKER_PASSWORD": password}
        command = ["sh", DOCKER / "with_secrets.sh", sys.executable, DOCKER / "create_mlflow_worker.py"]
        environment.pop("SECRET_MLFLOW_WORKER_PASSWORD")
        subprocess.run(command, env=server_environment(environment), check=True)

    restart_with("another-long-password")
    with pytest.raises(TrackingUnavailable, match="MLFLOW_TRACKING_PASSWORD"):
        find_engines(signed_in, TARGET)
    sign_in(monkeypatch, "worker", "another-long-password")
    assert find_engines(signed_in, TARGET)
    restart_with(stack.secret("mlflow_worker_password"))


def stored(stack: Stack) -> dict[str, bytes]:
    """Return the content of the bucket."""
    client = stack.s3.client()
    keys = [entry["Key"] for entry in client.list_objects_v2(Bucket=BUCKET).get("Contents", [])]
    return {key: client.get_object(Bucket=BUCKET, Key=key)["Body"].read() for key in keys}


def test_worker_starts_in_a_checkout_of_its_own(stack: Stack, workspace: Workspace, tmp_path: Path) -> None:
    checkout = tmp_path / "checkout"
    checkout.mkdir()
    places = stack.places | {
        "http://prefect:4200": stack.prefect.url,
        "/repository": str(workspace.path),
        "/workspace": str(checkout),
    }
    start = ["sh", str(DOCKER / "start_worker.sh")]
    worker = from_compose("cpu-worker", tmp_path, places, WORKER_PORT, start)
    worker.environment = {**worker.environment, "WORKSPACE": str(checkout), "PYTHONPATH": str(checkout)}
    worker.stop_signal = signal.SIGKILL  # it takes half a minute to end, and has nothing to save
    with running(worker):
        wait_until(lambda: '"ONLINE"' in stack.ask("/work_pools/cpu/workers/filter", "{}"), worker)
    assert (checkout / "flows/optimize.py").is_file()
    assert "s3://enginewright/dvc" in (checkout / ".dvc/config.local").read_text()
    worker.start()  # finds the checkout
    worker.stop()


def test_secrets_of_the_servers_are_in_no_log_run_or_artifact(stack: Stack, logged: Path) -> None:
    secrets = {file.name: file.read_text() for file in (stack.folder / "secrets").iterdir()}
    texts = {file.name: file.read_text() for file in stack.folder.glob("*.log")}
    texts |= {key: content.decode(errors="replace") for key, content in stored(stack).items()}
    for database in ("mlflow", "prefect"):
        command = [find_postgres() / "pg_dump", "--dbname", stack.postgres.address(database)]
        texts[database] = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    for name, secret in secrets.items():
        assert not [place for place, text in texts.items() if secret in text], name


def test_planted_passwords_are_nowhere_after_a_run(smoke_run: tuple[Workspace, str]) -> None:
    space, _ = smoke_run
    assert space.run("python", "-m", "flows.local_server").returncode == 0
    planted = {
        "MLFLOW_TRACKING_USERNAME": "planted-user-1",
        "MLFLOW_TRACKING_PASSWORD": "planted-password-2",
        "PREFECT_API_AUTH_STRING": "planted-user-3:planted-password-4",
        "PREFECT_API_DATABASE_CONNECTION_URL": "postgresql+asyncpg://prefect:planted-password-5@127.0.0.1:9/prefect",
        "AWS_ACCESS_KEY_ID": "planted-key-6",
        "AWS_SECRET_ACCESS_KEY": "planted-password-7",
        "PGPASSWORD": "planted-password-8",
    }
    changed = "select_engine.min_speedup_factor=1.4"
    done = space.run("python", "-m", "flows.optimize", *SMOKE, changed, **planted)
    assert done.returncode == 0 and "select_engine: running" in done.stdout, done.stdout + done.stderr
    refused = space.run(
        "python",
        "-m",
        "flows.optimize",
        *SMOKE,
        "track.uri=http://planted-user-9:planted-password-9@127.0.0.1:9",
    )
    assert refused.returncode == 1 and "MLFLOW_TRACKING_PASSWORD" in refused.stderr, refused.stderr
    assert "planted" not in done.stdout + done.stderr + refused.stdout + refused.stderr
    apart = {"tests", ".venv"}  # this text, also in checkouts that `flows.reproduce` left
    files = [
        file
        for file in space.path.rglob("*")
        if file.is_file() and not apart & {*file.relative_to(space.path).parts}
    ]
    assert len(files) > 100
    assert not [file for file in files if b"planted" in file.read_bytes()]
    assert space.flow().returncode == 0  # back to what the other tests of the session expect
