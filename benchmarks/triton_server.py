"""Start the Triton server of the PyPI wheel nvidia-pytriton: no GPU, and no backend but that of Python.

Tests use it as well.
"""

import ctypes.util
import os
import shutil
import signal
import socket
import stat
import subprocess
import sys
import sysconfig
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from urllib.error import URLError
from urllib.request import urlopen

from tasks.core.processes import die_with_parent

WHEEL = "nvidia-pytriton==0.7.0"
"""Apache-2.0; holds tritonserver 2.51."""

_START_TIMEOUT_S = 120.0
_STOP_TIMEOUT_S = 30.0


@dataclass(frozen=True)
class Installed:
    """Where the server is, and what its processes need."""

    folder: Path
    """pytriton/tritonserver of the wheel."""
    environment: dict[str, str]


@dataclass(frozen=True)
class TritonServer:
    """A server that answers."""

    http: str
    """Its address as host:port, which is what tritonclient takes."""
    grpc: str
    log: Path


def install(site: Path) -> Installed:
    """Make the unpacked wheel in `site` ready for this interpreter, whose packages the models see.

    Raises FileNotFoundError where the wheel has no stub for this version of Python, or Python no shared library.
    """
    folder, python = site / "pytriton" / "tritonserver", "{}.{}".format(*sys.version_info[:2])
    stub = folder / "python_backend_stubs" / python / "triton_python_backend_stub"
    if not stub.is_file():
        raise FileNotFoundError(f"{WHEEL} has no stub for Python {python}.")
    placed = folder / "backends" / "python" / stub.name
    shutil.copyfile(stub, placed)
    for program in (placed, folder / "bin" / "tritonserver"):
        program.chmod(program.stat().st_mode | stat.S_IXUSR)
    libraries = [str(site / "nvidia_pytriton.libs"), *_find_libpython(python)]
    return Installed(
        folder,
        {
            "LD_LIBRARY_PATH": os.pathsep.join(libraries),
            "PYTHONPATH": sysconfig.get_path("purelib"),
            "OMP_WAIT_POLICY": "passive",
        },
    )


def _find_libpython(python: str) -> list[str]:
    """Return the folder of this interpreter's shared library, or none where the loader finds one by itself."""
    folder, name = sysconfig.get_config_var("LIBDIR"), f"libpython{python}.so.1.0"
    if (Path(folder) / name).is_file():
        return [folder]
    if ctypes.util.find_library(f"python{python}"):
        return []
    raise FileNotFoundError(
        f"{folder}/{name} does not exist: this Python was built without a shared library, which Triton's Python "
        f"backend needs. Install one (apt-get install libpython{python})."
    )


@contextmanager
def serve(
    installed: Installed, repositories: Sequence[Path], log: Path, *, is_verbose: bool = True
) -> Iterator[TritonServer]:
    """Start a server with all models of the repositories on 127.0.0.1, and end it; `log` gets what it prints; if
    `is_verbose` also which instance runs what.

    Raises RuntimeError with the end of the log if it does not become ready, as with a model that cannot be loaded.
    """
    (http, grpc), region = _free_ports(), f"triton-{uuid.uuid4().hex}-"
    with log.open("wb") as output:
        process = subprocess.Popen(
            [*_command(installed, repositories, http, grpc, region), f"--log-verbose={int(is_verbose)}"],
            env=os.environ | installed.environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
            preexec_fn=_die_with(os.getpid()),  # its stubs end when it does
        )
    try:
        _wait_until_ready(process, f"http://127.0.0.1:{http}/v2/health/ready", log)
        yield TritonServer(f"127.0.0.1:{http}", f"127.0.0.1:{grpc}", log)
    finally:
        _stop(process)
        for left in Path("/dev/shm").glob(
            f"{region}*"
        ):  # a server that fails to start leaves its shared memory
            left.unlink()


def _command(
    installed: Installed, repositories: Sequence[Path], http: int, grpc: int, region: str
) -> list[str]:
    return [
        str(installed.folder / "bin" / "tritonserver"),
        *(f"--model-repository={path}" for path in repositories),
        f"--backend-directory={installed.folder / 'backends'}",
        f"--backend-config=python,shm-region-prefix-name={region}",
        *(f"--http-address=127.0.0.1 --http-port={http}".split()),
        *(f"--grpc-address=127.0.0.1 --grpc-port={grpc}".split()),
        "--allow-metrics=false",
        "--exit-timeout-secs=5",
    ]


def _die_with(parent: int) -> Callable[[], None]:
    return lambda: die_with_parent(parent, signal.SIGKILL)


def _wait_until_ready(process: "subprocess.Popen[bytes]", url: str, log: Path) -> None:
    deadline = time.monotonic() + _START_TIMEOUT_S
    while True:
        with suppress(URLError, ConnectionError), urlopen(url, timeout=5):
            return
        if process.poll() is not None or time.monotonic() > deadline:
            raise RuntimeError(f"tritonserver is not ready:\n{log.read_text(errors='replace')[-6000:]}")
        time.sleep(0.1)


def _stop(process: "subprocess.Popen[bytes]") -> None:
    """End the server and its stubs, in its own orderly way if it can."""
    with suppress(ProcessLookupError):
        process.send_signal(signal.SIGTERM)
    with suppress(subprocess.TimeoutExpired):
        process.wait(_STOP_TIMEOUT_S)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _free_ports() -> tuple[int, int]:
    """Return two ports of 127.0.0.1 that nothing uses."""
    with socket.socket() as first, socket.socket() as second:
        for probe in (first, second):
            probe.bind(("127.0.0.1", 0))
        return int(first.getsockname()[1]), int(second.getsockname()[1])
