"""The local Prefect server: whom it answers, and which process is stopped."""

import base64
import contextlib
import json
import stat
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import psutil
import pytest

from flows import local_server
from tests.conftest import REPOSITORY, Workspace, prepare_server
from tests.services import wait_for


@contextlib.contextmanager
def answering(path: str = "") -> Iterator[str]:
    """Answer every request, as another Prefect server on the port of one that died would, or only those of a path.

    Yields the address.
    """

    class Answer(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if not self.path.endswith(path):
                self.close_connection = True
                return
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Answer) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/api"
        server.shutdown()


def test_process_that_has_the_number_of_a_dead_server_is_not_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local_server, "HOME", tmp_path)
    command = [sys.executable, "-c", "import sys; sys.stdin.read()"]
    with answering() as url, subprocess.Popen(command, stdin=subprocess.PIPE) as innocent:
        started_s = psutil.Process(innocent.pid).create_time() - psutil.boot_time()
        record = {"url": url, "pid": innocent.pid, "started_s": started_s}
        (tmp_path / "server.json").write_text(json.dumps(record))
        assert local_server.answers(url)
        assert not local_server.stop()
        with pytest.raises(subprocess.TimeoutExpired):
            innocent.wait(0.5)


def test_server_that_dies_after_its_first_answer_was_ready(monkeypatch: pytest.MonkeyPatch) -> None:
    class OneAnswer(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), OneAnswer)
    url = f"http://127.0.0.1:{server.server_port}/api"
    monkeypatch.setenv("PREFECT_API_URL", url)

    def answer_once() -> None:
        server.handle_request()
        server.server_close()

    threading.Thread(target=answer_once).start()
    assert local_server.wait_until_ready() == url
    with pytest.raises(local_server.ServerUnavailable, match="No Prefect server answers"):
        local_server.wait_until_ready()


@pytest.fixture
def space(tmp_path: Path) -> Iterator[Workspace]:
    """A folder in which the local server of a checkout runs."""
    prepare_server(tmp_path / ".prefect")
    space = Workspace(tmp_path)
    started = space.run("python", "-m", "flows.local_server", PYTHONPATH=str(REPOSITORY))
    try:
        assert started.returncode == 0, started.stderr
        assert "its pages ask for the text in .prefect/auth_string" in started.stdout
        yield space
    finally:
        space.run("python", "-m", "flows.local_server", "--stop", PYTHONPATH=str(REPOSITORY))


def status(url: str, auth_string: str | None = None) -> int:
    """Return the HTTP status of a page."""
    request = urllib.request.Request(url)
    if auth_string is not None:
        request.add_header("Authorization", f"Basic {base64.b64encode(auth_string.encode()).decode()}")
    try:
        with urllib.request.urlopen(request, timeout=30) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code


def allowed_origin(url: str, origin: str) -> str | None:
    """Ask as a browser does before a page of another origin may call the server; return the origin it allows."""
    asked = {
        "Origin": origin,
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": "content-type",
    }
    request = urllib.request.Request(url, headers=asked, method="OPTIONS")
    try:
        with urllib.request.urlopen(request, timeout=30) as answer:
            return answer.headers["Access-Control-Allow-Origin"]
    except urllib.error.HTTPError as error:
        return error.headers["Access-Control-Allow-Origin"]


ASK = """
from flows import local_server
local_server.prepare_environment()
local_server.begin_start()
local_server.wait_until_ready()
from prefect import get_client
with get_client(sync_client=True) as client:
    print(client.read_flows())
"""


@pytest.mark.slow
def test_server_answers_this_checkout_alone_and_stops_as_itself_only(space: Workspace) -> None:
    file, secret = space.path / ".prefect/server.json", space.path / ".prefect/auth_string"
    record = json.loads(file.read_text())
    version = f"{record['url']}/admin/version"
    assert [status(version), status(version, "user:wrong"), status(version, secret.read_text())] == [
        401,
        401,
        200,
    ]
    assert stat.S_IMODE(secret.stat().st_mode) == 0o600
    own = record["url"].removesuffix("/api")
    assert allowed_origin(version, own) == own
    assert allowed_origin(version, "http://example.org") is None
    asked = space.run("python", "-c", ASK, PYTHONPATH=str(REPOSITORY))
    assert asked.returncode == 0 and asked.stdout == "[]\n", asked.stderr
    assert json.loads(file.read_text()) == record

    server = psutil.Process(record["pid"])
    file.write_text(json.dumps(record | {"started_s": record["started_s"] - 100}))
    stop = ("python", "-m", "flows.local_server", "--stop")
    assert "no Prefect server was running" in space.run(*stop, PYTHONPATH=str(REPOSITORY)).stdout
    assert status(version, secret.read_text()) == 200
    file.write_text(json.dumps(record))
    assert "stopped the Prefect server" in space.run(*stop, PYTHONPATH=str(REPOSITORY)).stdout
    wait_for(lambda: not server.is_running() or server.status() == psutil.STATUS_ZOMBIE, "the server's end")


@pytest.mark.slow
def test_checkouts_that_start_a_server_at_once_get_ports_of_their_own(tmp_path: Path) -> None:
    """A server binds its port seconds after it was chosen."""
    spaces = [Workspace(tmp_path / name) for name in "ab"]
    for each in spaces:
        each.path.mkdir()
    begin = "from flows import local_server as it; it.prepare_environment(); it.begin_start()"
    try:
        for each in spaces:
            begun = each.run("python", "-c", begin, PYTHONPATH=str(REPOSITORY))
            assert begun.returncode == 0, begun.stderr
        for each in spaces:
            asked = each.run("python", "-c", ASK, PYTHONPATH=str(REPOSITORY))
            assert asked.returncode == 0 and asked.stdout == "[]\n", asked.stderr
    finally:
        for each in spaces:
            each.run("python", "-m", "flows.local_server", "--stop", PYTHONPATH=str(REPOSITORY))


@pytest.mark.slow
def test_server_that_died_is_started_again_for_who_has_its_address(space: Workspace) -> None:
    """As in a shell in which PREFECT_API_URL was exported; another address is left to its owner."""
    file = space.path / ".prefect/server.json"
    record = json.loads(file.read_text())
    psutil.Process(record["pid"]).kill()
    ask = ("python", "-c", ASK)
    elsewhere = space.run(*ask, PYTHONPATH=str(REPOSITORY), PREFECT_API_URL="http://127.0.0.1:9/api")
    assert "No Prefect server answers at http://127.0.0.1:9/api" in elsewhere.stderr
    assert json.loads(file.read_text()) == record
    asked = space.run(*ask, PYTHONPATH=str(REPOSITORY), PREFECT_API_URL=record["url"])
    assert asked.returncode == 0 and asked.stdout == "[]\n", asked.stderr
    again = json.loads(file.read_text())
    assert again["url"] == record["url"] and again["pid"] != record["pid"]


@pytest.mark.slow
def test_server_that_goes_away_while_deployments_are_registered_is_one_line(tmp_path: Path) -> None:
    with answering("/health") as url:
        settings = {"PREFECT_API_URL": url, "PREFECT_CLIENT_MAX_RETRIES": "0", "PYTHONPATH": str(REPOSITORY)}
        failed = Workspace(tmp_path).run("python", "-m", "flows.deploy", **settings)
    assert failed.returncode == 1 and "Traceback" not in failed.stderr
    assert f"The Prefect server at {url} stopped answering" in failed.stderr and "again" in failed.stderr
