"""Find the local Prefect server of this checkout, or start it in the background on 127.0.0.1.

``python -m flows.local_server`` prints its address; with ``--stop`` it stops the server. The server answers only to
who sends the text in ``.prefect/auth_string``, and to no page of another origin.
"""

import argparse
import base64
import contextlib
import http.client
import json
import logging
import os
import secrets
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from tasks.core.errors import EnginewrightError
from tasks.core.locks import hold_lock

if TYPE_CHECKING:
    import psutil

HOME = Path(".prefect").resolve()
AUTH_FILE = HOME / "auth_string"
"""What Prefect's clients and pages have to send: PREFECT_API_AUTH_STRING."""
_PREFERRED_PORT = int(os.environ.get("PREFECT_SERVER_API_PORT", "4200"))
_START_TIMEOUT_S = 90.0
_PORT_TIMEOUT_S = 10.0
_SAME_START_S = 1.0
_FIRST_WATCH_S = 1.0
_LAST_WATCH_S = 16.0


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
        "PREFECT_LOGGING_INTERNAL_LEVEL": "CRITICAL",  # a lost server would be a line for each event not sent
        "PREFECT_CLI_PROMPT": "false",
        # Else each state of a stage is a transaction of its own.
        "PREFECT_SERVER_SERVICES_TASK_RUN_RECORDER_BATCH_SIZE": "20",
        "PREFECT_SERVER_SERVICES_TASK_RUN_RECORDER_FLUSH_INTERVAL": "1",  # s; it is cut to an integer
    }
    for name, value in defaults.items():
        os.environ.setdefault(name, value)
    # Prefect would print a line for every batch of logs that it cannot send to a lost server.
    logging.raiseExceptions = False


def begin_start() -> None:
    """Unless PREFECT_API_URL names another server, set it to ours; start that without waiting if it does not run."""
    with _alone():
        record = _read_record()
        if record is None or _find_process(record) is None:
            if "PREFECT_API_URL" in os.environ and not is_ours():
                return
            record = _start()
    if os.environ.setdefault("PREFECT_API_URL", str(record["url"])) == record["url"]:
        os.environ["PREFECT_API_AUTH_STRING"] = _auth_string()


def wait_until_ready() -> str:
    """Wait for the server at PREFECT_API_URL, if it is ours, and return the URL.

    Raises ServerUnavailable when nothing answers in time.
    """
    url = os.environ["PREFECT_API_URL"]
    deadline = time.monotonic() + (_START_TIMEOUT_S if is_ours() else 0)
    while not answers(url):
        if time.monotonic() >= deadline:
            raise ServerUnavailable(
                f"No Prefect server answers at {url}. Unset PREFECT_API_URL to use a local one, or start yours; "
                f"the log of the local server is {HOME / 'server.log'}."
            )
        time.sleep(0.1)
    return url


def is_ours() -> bool:
    """Return whether the server at PREFECT_API_URL is the one of this checkout."""
    record = _read_record()
    return record is not None and record["url"] == os.environ.get("PREFECT_API_URL")


@contextlib.contextmanager
def kept_alive() -> Iterator[None]:
    """While a flow runs inside, start our server again when it is killed: Prefect's clients try for a minute."""
    is_over = threading.Event()

    def watch() -> None:
        wait_s = _FIRST_WATCH_S
        while not is_over.wait(wait_s):
            if _find_killed() is None:
                continue
            wait_s = min(2 * wait_s, _LAST_WATCH_S)  # it may be killed, or end by itself, each time
            try:
                _revive()
            except (OSError, ServerUnavailable) as error:
                print(f"Prefect: the server could not be started again: {error}", file=sys.stderr)

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    try:
        yield
    finally:
        is_over.set()
        watcher.join()


def _revive() -> None:
    """Start our server again at its address, unless another process did."""
    with _alone():
        record = _find_killed()
        if record is None:
            return
        print(f"Prefect: the server at {record['url']} was killed; starting it again", file=sys.stderr)
        deadline = time.monotonic() + _PORT_TIMEOUT_S
        while _bindable(_port(record)) is None and time.monotonic() < deadline:
            time.sleep(0.1)  # the kernel is still taking the killed process down
        _start()


def _find_killed() -> dict[str, str | int | float] | None:
    """Return the record of our server if it is the one at PREFECT_API_URL and no longer runs."""
    record = _read_record() if is_ours() else None
    return record if record and _find_process(record) is None else None


def stop() -> bool:
    """Stop the server that this checkout started; return whether there was one."""
    if not _record_file().is_file():
        return False
    with _alone():
        record = _read_record()
        _record_file().unlink(missing_ok=True)
        server = _find_process(record) if record else None
        if server is not None:
            server.terminate()
    return server is not None


def how_to_open() -> str:
    """Return the address of the pages of the server at PREFECT_API_URL, and for ours what they ask for."""
    url = os.environ["PREFECT_API_URL"]
    page = url.removesuffix("/api")
    if not is_ours():
        return page
    secret = AUTH_FILE.relative_to(Path.cwd()) if AUTH_FILE.is_relative_to(Path.cwd()) else AUTH_FILE
    return f"{page} (its pages ask for the text in {secret}; `make stop` stops this local server)"


def leave(code: int) -> NoReturn:
    """Exit with a code, at once if the server is lost: Prefect would retry for minutes to send what it holds."""
    if code and not answers(os.environ.get("PREFECT_API_URL", "")):
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)


def _alone() -> contextlib.AbstractContextManager[None]:
    """Let this process alone look for the server and start it."""
    return hold_lock(HOME / "server.lock", str(os.getpid()), before_waiting=lambda note: None)


def _start() -> dict[str, str | int | float]:
    port, reservation = _reserve_port()
    url = f"http://127.0.0.1:{port}/api"
    auth_string = _auth_string()
    environment = {
        "PREFECT_SERVER_CORS_ALLOWED_ORIGINS": f"http://127.0.0.1:{port},http://localhost:{port}",
        **os.environ,
        "PREFECT_API_URL": url,
        "PREFECT_API_AUTH_STRING": auth_string,
        "PREFECT_SERVER_API_AUTH_STRING": auth_string,
    }
    with reservation, (HOME / "server.log").open("ab") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "prefect", *_arguments(url)],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
            pass_fds=[reservation.fileno()],
        )
    record: dict[str, str | int | float] = {
        "url": url,
        "pid": process.pid,
        "started_s": _started_s(process.pid),
    }
    draft = _record_file().with_suffix(".draft")
    try:
        draft.write_text(json.dumps(record), encoding="utf-8")
        draft.rename(_record_file())
    except OSError:
        process.terminate()  # nobody would find it
        raise
    return record


def _arguments(url: str) -> list[str]:
    """Return the arguments of ``prefect`` that start a server at an address."""
    return ["server", "start", "--host", "127.0.0.1", "--port", str(urllib.parse.urlsplit(url).port)]


def _auth_string() -> str:
    """Return what clients have to send; it is made once, for browsers keep it."""
    if not AUTH_FILE.is_file():
        draft = AUTH_FILE.with_suffix(f".{os.getpid()}")
        draft.touch(mode=0o600)
        draft.write_text(f"enginewright:{secrets.token_urlsafe(24)}", encoding="utf-8")
        draft.rename(AUTH_FILE)
    return AUTH_FILE.read_text(encoding="utf-8")


def _find_process(record: dict[str, str | int | float]) -> "psutil.Process | None":
    """Return the process of a record if it still is the server that was started, and no other with its number."""
    import psutil

    try:
        process = psutil.Process(int(record["pid"]))
        is_server = process.cmdline()[1:] == ["-m", "prefect", *_arguments(str(record["url"]))]
        same_start = abs(_started_s(process.pid) - float(record["started_s"])) < _SAME_START_S
    except (psutil.Error, KeyError):
        return None
    return process if is_server and same_start else None


def _started_s(pid: int) -> float:
    """Return when a process started, in seconds since the machine did: clocks are set, this stays."""
    import psutil

    return psutil.Process(pid).create_time() - psutil.boot_time()


def _record_file() -> Path:
    return HOME / "server.json"


def _read_record() -> dict[str, str | int | float] | None:
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


def _reserve_port() -> tuple[int, socket.socket]:
    """Return the port of the previous server, since a flow may be waiting for it, else the usual one or any other.

    With it comes a UDP socket of the same number: a server binds its port seconds after it was chosen, and while the
    socket is open, here or in the server, no other checkout chooses the same.
    """
    record = _read_record()
    before = [_port(record)] if record else []
    for port in (*before, _PREFERRED_PORT, 0):
        bindable = _bindable(port)
        if bindable is None:
            continue
        reservation = socket.socket(type=socket.SOCK_DGRAM)
        try:
            reservation.bind(("127.0.0.1", bindable))
        except OSError:
            reservation.close()
            continue
        return bindable, reservation
    raise ServerUnavailable("No free port on 127.0.0.1 for a Prefect server.")


def _bindable(port: int) -> int | None:
    """Return a port of 127.0.0.1 if a server can bind it now, and any other for 0."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as the server does
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return None
        return int(probe.getsockname()[1])


def _port(record: dict[str, str | int | float]) -> int:
    return urllib.parse.urlsplit(str(record["url"])).port or _PREFERRED_PORT


def main(arguments: list[str]) -> int:
    """Print the server's address, or stop it."""
    parser = argparse.ArgumentParser(prog="python -m flows.local_server", description=__doc__)
    parser.add_argument("--stop", action="store_true", help="stop the server of this checkout")
    if parser.parse_args(arguments).stop:
        print("stopped the Prefect server" if stop() else "no Prefect server was running")
        return 0
    prepare_environment()
    begin_start()
    wait_until_ready()
    print(f"Prefect: {how_to_open()}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
