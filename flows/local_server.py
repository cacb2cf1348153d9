"""Find the local Prefect server of this checkout, or start it in the background on 127.0.0.1.

``python -m flows.local_server`` prints its address; with ``--stop`` it stops the server.
"""

import argparse
import base64
import http.client
import json
import logging
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.parse
import urllib.request
from pathlib import Path
from typing import NoReturn

from tasks.core.errors import EnginewrightError

HOME = Path(".prefect").resolve()
_PREFERRED_PORT = 4200
_START_TIMEOUT_S = 90.0


class ServerUnavailable(EnginewrightError):
    """No Prefect server answers and none could be started."""


def prepare_environment() -> None:
    """Set the environment variables that Prefect reads at import, except those that the user has set.

    Prefect's home and results stay in the checkout, telemetry is off, the console shows only the pipeline's lines.
    """
    HOME.mkdir(mode=0o700, exist_ok=True)
    HOME.chmod(0o700)  # whoever can write stored results can run code here
    defaults = {
        "PREFECT_HOME": str(HOME),
        "DO_NOT_TRACK": "1",
        "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
        "PREFECT_LOGGING_HANDLERS_CONSOLE_LEVEL": "CRITICAL",
        "PREFECT_CLI_PROMPT": "false",
    }
    for name, value in defaults.items():
        os.environ.setdefault(name, value)
    # Prefect would print a line for every batch of logs that it cannot send to a lost server.
    logging.raiseExceptions = False


def begin_start() -> None:
    """Unless PREFECT_API_URL is set, set it to our server; start that without waiting if it does not answer."""
    if "PREFECT_API_URL" in os.environ:
        return
    record = _read_record()
    if record is None or not answers(str(record["url"])):
        record = _start()
    os.environ["PREFECT_API_URL"] = str(record["url"])


def wait_until_ready() -> str:
    """Wait for the server at PREFECT_API_URL, if it is ours, and return the URL.

    Raises ServerUnavailable when nothing answers in time.
    """
    url = os.environ["PREFECT_API_URL"]
    record = _read_record()
    deadline = time.monotonic() + (_START_TIMEOUT_S if record and record["url"] == url else 0)
    while not answers(url) and time.monotonic() < deadline:
        time.sleep(0.1)
    if not answers(url):
        raise ServerUnavailable(
            f"No Prefect server answers at {url}. Unset PREFECT_API_URL to use a local one, or start yours; "
            f"the log of the local server is {HOME / 'server.log'}."
        )
    return url


def stop() -> bool:
    """Stop the server that this checkout started; return whether there was one."""
    record = _read_record()
    if record is None:
        return False
    _record_file().unlink()
    if not answers(str(record["url"])):
        return False
    os.kill(int(record["pid"]), signal.SIGTERM)
    return True


def leave(code: int) -> NoReturn:
    """Exit with a code, at once if the server is lost: Prefect would retry for minutes to send what it holds."""
    if code and not answers(os.environ.get("PREFECT_API_URL", "")):
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)


def _start() -> dict[str, str | int]:
    port = _free_port()
    environment = {**os.environ, "PREFECT_API_URL": f"http://127.0.0.1:{port}/api"}
    with (HOME / "server.log").open("ab") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "prefect", "server", "start", "--host", "127.0.0.1", "--port", str(port)],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    record: dict[str, str | int] = {"url": environment["PREFECT_API_URL"], "pid": process.pid}
    _record_file().write_text(json.dumps(record), encoding="utf-8")
    return record


def _record_file() -> Path:
    return HOME / "server.json"


def _read_record() -> dict[str, str | int] | None:
    try:
        record = json.loads(_record_file().read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError):
        return None
    return record if isinstance(record, dict) else None


def answers(url: str) -> bool:
    """Return whether a Prefect server answers at the address of its API."""
    return find_problem(f"{url}/health") is None


def find_problem(url: str, timeout_s: float = 5) -> str | None:
    """Return why a page cannot be fetched, None if it can; user and password of the address are sent along."""
    try:
        parts = urllib.parse.urlsplit(url)
        user, _, host = parts.netloc.rpartition("@")
        request = urllib.request.Request(urllib.parse.urlunsplit(parts._replace(netloc=host)))
        if user:
            token = base64.b64encode(urllib.parse.unquote(user).encode()).decode()
            request.add_header("Authorization", f"Basic {token}")
        with urllib.request.urlopen(request, timeout=timeout_s):
            return None
    except (urllib.error.URLError, http.client.HTTPException, OSError, ValueError) as error:
        return str(error)


def _free_port() -> int:
    """Return the port of the previous server, since a flow may be waiting for it, else the usual one or any other."""
    record = _read_record()
    before = [urllib.parse.urlsplit(str(record["url"])).port] if record else []
    for port in (*before, _PREFERRED_PORT, 0):
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as the server does
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return int(probe.getsockname()[1])
    raise ServerUnavailable("No free port on 127.0.0.1 for a Prefect server.")


def main(arguments: list[str]) -> int:
    """Print the server's address, or stop it."""
    parser = argparse.ArgumentParser(prog="python -m flows.local_server", description=__doc__)
    parser.add_argument("--stop", action="store_true", help="stop the server of this checkout")
    if parser.parse_args(arguments).stop:
        print("stopped the Prefect server" if stop() else "no Prefect server was running")
        return 0
    prepare_environment()
    begin_start()
    print(f"Prefect: {wait_until_ready().removesuffix('/api')}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
