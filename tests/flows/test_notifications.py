"""What the server does by itself after `flows.deploy`: schedule the nightly run, react to new data, send word."""

import http.server
import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import requests

from flows.run_page import GATE_FAILED_EVENT
from tests.conftest import REPOSITORY
from tests.services import Server, prefect_server, server_environment, wait_for

pytestmark = pytest.mark.slow

_MAKE_BLOCK = """
import sys
from prefect.blocks.notifications import CustomWebhookNotificationBlock
CustomWebhookNotificationBlock(
    name="engines", url=sys.argv[1], json_data={"subject": "{{subject}}", "body": "{{body}}"}
).save("engines")
"""


@contextmanager
def listener() -> Iterator[tuple[str, list[dict[str, str]]]]:
    """A web hook: its address, and what was sent to it so far."""
    heard: list[dict[str, str]] = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            heard.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(200)
            self.end_headers()

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/hook", heard
        server.shutdown()


def run(server: Server, home: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {"PREFECT_API_URL": server.url, "PREFECT_HOME": str(home)}
    return subprocess.run(
        [sys.executable, *arguments],
        env=server_environment(environment),
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        check=False,
    )


def test_nightly_run_is_scheduled_new_data_starts_one_and_failures_are_told(tmp_path: Path) -> None:
    with prefect_server(tmp_path) as server, listener() as (hook, heard):

        def ask(path: str, **content: Any) -> Any:
            answer = requests.post(f"{server.url}{path}", json=content, timeout=30)
            answer.raise_for_status()
            return answer.json()

        def runs(created_by: str) -> list[Any]:
            found = ask("/flow_runs/filter", deployments={"name": {"any_": ["nightly"]}})
            return [each for each in found if each["created_by"]["type"] == created_by]

        def emit(event: str, resource: str) -> None:
            payload = json.dumps({"reason": "none held"})
            command = ("prefect", "event", "emit", event, "--resource-id", resource, "--payload", payload)
            done = run(server, tmp_path, "-m", *command)
            assert done.returncode == 0, done.stderr

        made = run(server, tmp_path, "-c", _MAKE_BLOCK, hook)
        assert made.returncode == 0, made.stderr
        unknown = run(server, tmp_path, "-m", "flows.deploy", "--notify", "custom-webhook/nobody")
        assert unknown.returncode == 1
        assert unknown.stderr.startswith("ConfigError: --notify is custom-webhook/nobody"), unknown.stderr
        for _ in range(2):  # repeated, it makes nothing twice
            deployed = run(server, tmp_path, "-m", "flows.deploy", "--notify", "custom-webhook/engines")
            assert deployed.returncode == 0, deployed.stderr

        wait_for(lambda: runs("SCHEDULE"), "the nightly schedule")
        emit("enginewright.data-changed", "enginewright.data")
        [started] = wait_for(lambda: runs("AUTOMATION"), "a run because of new data")
        assert started["state_type"] == "SCHEDULED"
        emit(GATE_FAILED_EVENT, "enginewright.target.cpu_torch")
        wait_for(lambda: heard, "word of a failed gate")
        assert heard == [
            {
                "subject": "Enginewright: no engine to ship",
                "body": "enginewright.target.cpu_torch: none held",
            }
        ]
        failed = {"type": "FAILED", "name": "Failed", "message": "boom"}
        ask(f"/flow_runs/{started['id']}/set_state", state=failed, force=True)
        wait_for(lambda: len(heard) > 1, "word of a failed run")
        assert len(heard) == 2 and heard[1]["subject"] == "Enginewright: optimize failed"
        assert heard[1]["body"].startswith(f"{started['name']} is Failed: boom")
    assert "Traceback" not in (tmp_path / "prefect.log").read_text()
