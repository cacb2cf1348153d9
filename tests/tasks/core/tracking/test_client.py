"""A store that cannot be used is given up soon."""

import contextlib
import dataclasses
import http.server
import socket
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.picking import free_port
from tasks.core.errors import EnginewrightError, TrackingRefused, TrackingUnavailable
from tasks.core.tracking.client import client_of
from tasks.core.tracking.config import TrackingConfig
from tasks.core.tracking.log import log_pipeline
from tasks.core.tracking.records import RunRecord
from tasks.core.tracking.state import _is_known_to_client
from tests.conftest import REPOSITORY


def test_a_closed_port_is_reported_soon_and_without_credentials(config, pipeline, candidates) -> None:
    uri = f"http://user:secret@127.0.0.1:{free_port()}"
    gone = dataclasses.replace(config, uri=uri)
    started = time.monotonic()
    with pytest.raises(TrackingUnavailable, match=r"track\.uri") as caught:
        log_pipeline(gone, pipeline=pipeline, candidates=candidates, picks={})
    assert "secret" not in str(caught.value)
    assert time.monotonic() - started < 15


@pytest.fixture
def silent_port() -> Iterator[int]:
    """A server that takes connections and never answers."""
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen(8)
        kept: list[socket.socket] = []
        stop = threading.Event()

        def accept() -> None:
            server.settimeout(0.1)
            while not stop.is_set():
                try:
                    kept.append(server.accept()[0])
                except TimeoutError:
                    continue

        thread = threading.Thread(target=accept)
        thread.start()
        yield int(server.getsockname()[1])
        stop.set()
        thread.join()
        for connection in kept:
            connection.close()


@pytest.mark.slow
def test_a_server_that_never_answers_is_given_up_within_the_limit(
    config, pipeline, candidates, silent_port
) -> None:
    import mlflow.tracking  # noqa: F401  (its import is no part of the waiting)

    silent = dataclasses.replace(config, uri=f"http://127.0.0.1:{silent_port}")
    started = time.monotonic()
    with pytest.raises(TrackingUnavailable):
        log_pipeline(silent, pipeline=pipeline, candidates=candidates, picks={})
    assert time.monotonic() - started < 15


@pytest.mark.slow
@pytest.mark.parametrize("damage", ["folder", "text", "locked"])
def test_a_database_that_cannot_be_used_is_reported_soon(
    config, pipeline, candidates, tmp_path, damage
) -> None:
    import mlflow.tracking  # noqa: F401

    file = tmp_path / "broken.db"
    holder = sqlite3.connect(tmp_path / "other.db")
    if damage == "folder":
        file.mkdir()
    elif damage == "text":
        file.write_text("this is no database" * 100)
    else:
        holder = sqlite3.connect(file)
        holder.execute("BEGIN EXCLUSIVE")
    broken = dataclasses.replace(config, uri=f"sqlite:///{file}")
    started = time.monotonic()
    with pytest.raises(TrackingUnavailable, match="cannot be used"):
        log_pipeline(broken, pipeline=pipeline, candidates=candidates, picks={})
    assert time.monotonic() - started < 15
    holder.close()


def test_error_of_the_database_is_raised_and_not_printed_as_well(
    config, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(TrackingUnavailable, match="no such table"), client_of(config) as client:
        with sqlite3.connect(config.uri.removeprefix("sqlite:///")) as database:
            database.execute("DROP TABLE latest_metrics")
        client.search_runs(["0"])
        run = client.create_run("0")
        client.log_metric(run.info.run_id, "loss", 1.0)
    assert not [record for record in caplog.records if record.exc_info]


@contextlib.contextmanager
def answering(status: int) -> Iterator[str]:
    """A server that answers every request with this status, as a proxy does."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.rfile.read(int(self.headers.get("Content-Length", 0)))
            self.send_error(status)

        do_POST = do_PUT = do_GET

        def log_message(self, *_: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()
            thread.join()


@pytest.mark.parametrize(
    ("status", "error_class", "words"),
    [
        (400, TrackingRefused, "refused it"),
        (401, TrackingUnavailable, "MLFLOW_TRACKING_PASSWORD"),
        (403, TrackingRefused, "give ada the permission EDIT for the experiment 'engines'"),
        (404, TrackingUnavailable, "cannot be used"),
    ],
)
def test_only_answers_that_would_be_the_same_next_time_are_refusals(
    config, monkeypatch, status: int, error_class: type[EnginewrightError], words: str
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_USERNAME", "ada")
    monkeypatch.setenv("MLFLOW_TRACKING_PASSWORD", "secret")
    with answering(status) as uri, pytest.raises(error_class, match=words):
        log_pipeline(
            dataclasses.replace(config, uri=uri),
            pipeline=RunRecord("pipeline", {}, {}, ()),
            candidates=[],
            picks={},
        )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("status", "error_class"),
    [(400, TrackingRefused), (401, TrackingUnavailable), (403, TrackingRefused), (413, TrackingRefused)],
)
def test_file_that_a_server_does_not_take_is_refused(
    config, tmp_path, status: int, error_class: type[EnginewrightError]
) -> None:
    with answering(status) as uri, pytest.raises(error_class), client_of(config) as client:
        run = client.create_run(client.create_experiment("proxied", artifact_location=f"{uri}/files"))
        client.log_text(run.info.run_id, "of an engine", "engine.txt")


def test_question_that_is_refused_is_no_reason_to_stop(config) -> None:
    with pytest.raises(TrackingRefused), client_of(config) as client:
        client.get_run("no/run")
    assert not _is_known_to_client(config, "no/run", {})


def test_a_database_in_a_new_folder_is_made(tmp_path, pipeline, candidates) -> None:
    new = TrackingConfig(enabled=True, uri=f"sqlite:///{tmp_path}/new/mlflow.db", experiment="engines")
    assert log_pipeline(new, pipeline=pipeline, candidates=candidates, picks={}).num_runs_added == 3


@pytest.mark.slow
def test_processes_that_start_together_share_a_new_database(tmp_path: Path) -> None:
    program = (
        "import mlflow.tracking\n"
        "from tasks.core.tracking.client import client_of\n"
        "from tasks.core.tracking.config import TrackingConfig\n"
        "input()\n"
        f"with client_of(TrackingConfig(True, 'sqlite:///{tmp_path}/mlflow.db', 'engines')) as client:\n"
        "    print(len(client.search_experiments()))"
    )
    started = [
        subprocess.Popen(
            [sys.executable, "-c", program],
            cwd=REPOSITORY,
            text=True,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        for _ in range(3)
    ]
    for process in started:
        assert process.stdin is not None
        process.stdin.write("\n")
        process.stdin.flush()
    for process in started:
        output, errors = process.communicate()
        assert (process.returncode, output) == (0, "1\n"), errors
