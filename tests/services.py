"""Real servers for tests: processes on 127.0.0.1 with ports of their own.

Each context manager waits until its server answers, and at its end stops the process that it started and nothing
else. The log lies in the given folder. What compose.yaml starts in containers, ``tests/test_services.py`` starts so.
"""

import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from flows.local_server import find_problem
from tests.conftest import prepare_server

PASSWORD = "correct-horse-9"
"""Of PostgreSQL's superuser and of MLflow's administrator."""

BUCKET = "enginewright"

_START_TIMEOUT_S = 120.0
_STOP_TIMEOUT_S = 30.0
_PATIENCE_S = 900.0
_OF_SERVICES = ("PREFECT_", "MLFLOW_", "AWS_", "PG")


@dataclass
class Server:
    """A process that serves, and how to reach it."""

    name: str
    command: Sequence[str]
    environment: Mapping[str, str]
    """On top of that of the tests, without what configures other servers."""
    log: Path
    find_problem: Callable[[], str | None]
    """Tells why the server does not answer, None where it does."""
    url: str = ""
    user: str | None = None
    """The user to run as; None for the one of the tests."""
    stop_signal: signal.Signals = signal.SIGTERM
    process: "subprocess.Popen[bytes] | None" = field(default=None, init=False)

    def start(self) -> None:
        """Start the process and wait until it answers."""
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                self.command,
                env=server_environment(self.environment),
                cwd=self.log.parent if self.user is None else "/",
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                **_as_user(self.user),
            )
        deadline = time.monotonic() + _START_TIMEOUT_S
        while (problem := self.find_problem()) is not None:
            if self.process.poll() is not None or time.monotonic() > deadline:
                self.stop()
                pytest.fail(f"{self.name} does not answer ({problem}):\n{self.log.read_text()[-6000:]}")
            time.sleep(0.1)

    def stop(self, how: signal.Signals | None = None) -> None:
        """End the process and its children, in its own orderly way where no signal is given."""
        if self.process is None:
            return
        _signal_group(self.process.pid, how or self.stop_signal)
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(_STOP_TIMEOUT_S)
        _signal_group(self.process.pid, signal.SIGKILL)  # children that outlived it
        self.process.wait()
        self.process = None

    def restart(self, how: signal.Signals | None = None) -> None:
        """Stop and start again, on the same port with the same data."""
        self.stop(how)
        self.start()


@dataclass
class PostgreSQL(Server):
    """A PostgreSQL server; SIGQUIT ends it as a crash does."""

    port: int = 0

    def address(self, database: str = "postgres", user: str = "postgres", password: str = PASSWORD) -> str:
        """Return ``postgresql://...``: what PostgreSQL's own programs and psycopg2 take."""
        return f"postgresql://{user}:{password}@127.0.0.1:{self.port}/{database}"

    def async_address(self, database: str = "postgres") -> str:
        """Return ``postgresql+asyncpg://...``: what Prefect takes."""
        return self.address(database).replace("postgresql", "postgresql+asyncpg", 1)

    def run(self, statement: str, database: str = "postgres") -> list[tuple[object, ...]]:
        """Run one statement and return its rows."""
        import psycopg2

        with closing(psycopg2.connect(self.address(database))) as connection:
            connection.autocommit = True
            with connection.cursor() as cursor:
                cursor.execute(statement)
                return [] if cursor.description is None else cursor.fetchall()

    def create_database(self, database: str) -> str:
        """Create a database and return its address for SQLAlchemy: what MLflow takes."""
        self.run(f'CREATE DATABASE "{database}"')
        return self.address(database).replace("postgresql", "postgresql+psycopg2", 1)


@dataclass
class S3Server(Server):
    """A server with Amazon's S3 interface; moto keeps everything in memory, so a restart forgets it."""

    def start(self) -> None:
        """Start it with an empty bucket."""
        super().start()
        self.client().create_bucket(Bucket=BUCKET)

    def client(self) -> Any:
        """Return a client of boto3."""
        import boto3

        return boto3.client(
            "s3",
            endpoint_url=self.url,
            aws_access_key_id=self.environment["AWS_ACCESS_KEY_ID"],
            aws_secret_access_key=self.environment["AWS_SECRET_ACCESS_KEY"],
            region_name=self.environment["AWS_DEFAULT_REGION"],
        )


@contextmanager
def postgres(folder: Path) -> Iterator[PostgreSQL]:
    """Start PostgreSQL, with its log in `folder`.

    Its data lies in a folder of its own: the server refuses to run as root, and no other user may enter pytest's.
    """
    binaries = find_postgres()
    user = "postgres" if os.geteuid() == 0 else None
    with tempfile.TemporaryDirectory(prefix="postgres-", ignore_cleanup_errors=True) as home:
        data, password, port = Path(home) / "data", Path(home) / "password", free_port()
        password.write_text(PASSWORD)
        if user is not None:
            for path in (Path(home), password):
                shutil.chown(path, user)
        made = subprocess.run(
            [
                binaries / "initdb",
                f"--pgdata={data}",
                "--username=postgres",
                f"--pwfile={password}",
                "--auth=scram-sha-256",
                "--encoding=UTF8",
                "--no-locale",
                "--no-sync",
            ],
            env=server_environment({}),
            cwd="/",
            capture_output=True,
            text=True,
            check=False,
            **_as_user(user),
        )
        assert made.returncode == 0, made.stdout + made.stderr
        options = {
            "listen_addresses": "127.0.0.1",
            "port": port,
            "unix_socket_directories": "",
            "fsync": "off",
        }
        server = PostgreSQL(
            "PostgreSQL",
            [
                str(binaries / "postgres"),
                *("-D", str(data)),
                *(part for name, value in options.items() for part in ("-c", f"{name}={value}")),
            ],
            {},
            folder / "postgres.log",
            find_problem=lambda: find_database_problem(f"postgresql://postgres:{PASSWORD}@127.0.0.1:{port}/"),
            user=user,
            stop_signal=signal.SIGINT,  # does not wait until clients leave
            port=port,
        )
        server.url = server.address()
        with running(server):
            yield server


@contextmanager
def s3_server(folder: Path) -> Iterator[S3Server]:
    """Start an S3 server with the empty bucket BUCKET; clients take ``environment`` of what is yielded."""
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    environment = {
        "AWS_ACCESS_KEY_ID": "enginewright",
        "AWS_SECRET_ACCESS_KEY": PASSWORD,
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_ENDPOINT_URL_S3": url,
    }
    command = [sys.executable, "-m", "moto.server", "--host", "127.0.0.1", "--port", str(port)]
    server = S3Server(
        "S3", command, environment, folder / "s3.log", lambda: find_problem(f"{url}/moto-api/"), url
    )
    with running(server):
        yield server


@contextmanager
def prefect_server(folder: Path, database_url: str | None = None, **environment: str) -> Iterator[Server]:
    """Start a Prefect server on SQLite, or on `database_url` (``postgresql+asyncpg://...``).

    ``url`` of what is yielded is for PREFECT_API_URL. What is in `environment` wins.
    """
    port = free_port()
    url = f"http://127.0.0.1:{port}/api"
    settings = {
        "PREFECT_HOME": str(folder / "prefect"),
        "PREFECT_API_URL": url,
        "PREFECT_SERVER_API_HOST": "127.0.0.1",
        "PREFECT_SERVER_API_PORT": str(port),
        "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
        "DO_NOT_TRACK": "1",
    }
    if database_url is None:
        prepare_server(folder / "prefect")
    else:
        settings["PREFECT_API_DATABASE_CONNECTION_URL"] = database_url
    server = Server(
        "Prefect",
        [sys.executable, "-m", "prefect", "server", "start"],
        settings | environment,
        folder / "prefect.log",
        lambda: find_problem(f"{url}/ready"),
        url,
    )
    with running(server):
        yield server


@contextmanager
def running(server: Server) -> Iterator[None]:
    """Start a server, and stop it at the end."""
    try:
        server.start()
        yield
    finally:
        server.stop()


def wait_for(happened: Callable[[], Any], what: str, every_s: float = 0.05) -> Any:
    """Wait until something happened, and return what tells of it."""
    deadline = time.monotonic() + _PATIENCE_S
    while not (found := happened()):
        assert time.monotonic() < deadline, f"waited in vain for {what}"
        time.sleep(every_s)
    return found


def find_postgres() -> Path:
    """Return the folder of PostgreSQL's programs, the newest; skip the test where there are none, fail in CI."""
    installed = sorted(
        Path("/usr/lib/postgresql").glob("*/bin/initdb"), key=lambda path: float(path.parts[-3])
    )
    on_path = shutil.which("initdb")
    found = [*([Path(on_path)] if on_path else []), *installed]
    if found:
        return found[-1].resolve().parent
    lack = "PostgreSQL is not installed: `make services` (apt-get install postgresql)"
    if "CI" in os.environ:
        pytest.fail(lack)
    pytest.skip(lack)


def find_database_problem(address: str) -> str | None:
    """Tell why a database does not answer, None where it does."""
    import psycopg2

    try:
        psycopg2.connect(address, connect_timeout=5).close()
    except psycopg2.OperationalError as error:
        return str(error)
    return None


def free_port() -> int:
    """Return a port of 127.0.0.1 that nothing uses."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def server_environment(extra: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of the tests without what configures servers and their clients, plus `extra`."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(_OF_SERVICES)}
    return {**kept, **extra}


def _as_user(user: str | None) -> dict[str, object]:
    return {} if user is None else {"user": user, "group": user, "extra_groups": []}


def _signal_group(leader: int, how: signal.Signals) -> None:
    with suppress(ProcessLookupError):
        os.killpg(leader, how)
