"""Fixtures that several test files share: real workspaces in temporary folders."""

import compileall
import dataclasses
import functools
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from xdist.scheduler import LoadScopeScheduling

import tasks.parts.engines  # noqa: F401  # before OpenVINO: it keeps that from sending events
from tasks.core.config import typed_config

REPOSITORY = Path(__file__).resolve().parents[1]

SMOKE = ("debug=smoke", "target=[cpu_torch,cpu_onnxruntime]")
"""The true program, small enough for a test."""


_MACHINE_ID = Path("/etc/machine-id")

SERVER_PORT = "PREFECT_SERVER_API_PORT"

READERS_OF_THE_RUN = (
    "tests/flows/test_deployments.py",
    "tests/flows/test_optimize.py",
    "tests/test_agreement.py",
    "tests/test_controls.py",
    "tests/test_decisions.py",
    "tests/test_questions.py",
    "tests/test_readme.py",
    "tests/test_services.py",
    "tests/test_smoke.py",
)
"""Tests that share `smoke_run`, which takes minutes to make."""
READERS_OF_A_COMPILED_ENGINE = (
    "tests/tasks/parts/engines/test_runners.py",
    "tests/tasks/parts/timelines/test_engine_timelines.py",
    "tests/tasks/test_aotinductor.py",
)
"""Tests that share an engine of AOTInductor, which compiles C++ for most of a minute."""


class FilesByRun(LoadScopeScheduling):
    """Lets each file run in any process, and those that share a run of the pipeline in one."""

    def _split_scope(self, nodeid: str) -> str:
        file = nodeid.partition("::")[0]
        for readers in (READERS_OF_THE_RUN, READERS_OF_A_COMPILED_ENGINE):
            if file in readers:
                return readers[0]
        return file


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> LoadScopeScheduling:
    """Return the scheduler of the tests that run in several processes."""
    config.option.loadscopereorder = False
    return FilesByRun(config, log)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put files with slow tests first, so that no process has to wait for a long one of the other at the end."""
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: item.path not in slow)


class FailuresAtOnce:
    """Prints a failure when it happens: a run of an hour that is cut short has told it then."""

    def __init__(self, config: pytest.Config) -> None:
        self._plugins = config.pluginmanager
        self._start = time.monotonic()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Print the name of a failed test and how it failed."""
        if report.failed:
            terminal = self._plugins.getplugin("terminalreporter")
            minutes = (time.monotonic() - self._start) / 60
            terminal.write_sep("-", f"failed after {minutes:.0f} min: {report.nodeid} ({report.when})")
            terminal.write_line(report.longreprtext[-6000:])


def pytest_configure(config: pytest.Config) -> None:
    """Let the servers of each process prefer a port of its own: one that is started again wants the one it had."""
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(FailuresAtOnce(config))
    number = os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")
    os.environ[SERVER_PORT] = str(4200 + 50 * int(number))
    if (
        not _MACHINE_ID.is_file() or not _MACHINE_ID.read_bytes().strip()
    ):  # a container of continuous integration
        os.environ.setdefault("ENGINEWRIGHT_MACHINE_ID", platform.node())


def checked(config: Any, section: str, **changes: Any) -> Any:
    """Return a config with changes, built and checked as a section of params.yaml."""
    return typed_config(type(config), dataclasses.asdict(config) | changes, section)


@dataclass(frozen=True)
class Workspace:
    """A copy of the repository to run commands in."""

    path: Path

    def run(
        self, *command: str, timeout_s: float = 900, **environment: str
    ) -> subprocess.CompletedProcess[str]:
        """Run a command to its end; ``python`` is the interpreter of the tests."""
        try:
            return subprocess.run(
                self._command(command),
                cwd=self.path,
                env=self._environment(environment),
                text=True,
                capture_output=True,
                timeout=timeout_s,
                check=False,
            )
        except subprocess.TimeoutExpired as late:
            printed = [(text or b"").decode(errors="replace")[-4000:] for text in (late.stdout, late.stderr)]
            pytest.fail(f"{' '.join(command)} still ran after {timeout_s:.0f} s:\n{printed[0]}\n{printed[1]}")

    def start(self, *command: str, **environment: str) -> subprocess.Popen[str]:
        """Start a command without waiting; it is killed if the test ends before it does."""
        process = subprocess.Popen(
            self._command(command),
            cwd=self.path,
            env=self._environment(environment),
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        _STARTED.append(process)
        return process

    def changed_stages(self) -> dict[str, Any]:
        """Return what ``dvc status`` says has changed, but for the stage that always counts as changed."""
        told = self.run("python", "-m", "dvc", "status", "--json", PYTHONPATH=str(self.path))
        assert told.returncode == 0, told.stderr
        changed = json.loads(told.stdout)
        assert changed.pop("environment", None) in (None, ["always changed"]), told.stdout
        return changed

    def reproduce(self, *stages: str) -> list[str]:
        """Let ``dvc repro`` finish; return the stages that it ran, but for the one that always runs."""
        done = self.run("dvc", "repro", *stages)
        assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
        return [name for name in re.findall(r"Running stage '(\S+)'", done.stdout) if name != "environment"]

    def flow(self, *overrides: str) -> subprocess.CompletedProcess[str]:
        """Run the flow in the smoke configuration."""
        return self.run("python", "-m", "flows.optimize", *SMOKE, *overrides)

    @staticmethod
    def _command(command: Sequence[str]) -> list[str]:
        return [sys.executable if command[0] == "python" else command[0], *command[1:]]

    @staticmethod
    def _environment(extra: dict[str, str]) -> dict[str, str]:
        kept = {
            name: value
            for name, value in os.environ.items()
            if name == SERVER_PORT or not name.startswith(("PREFECT_", "MLFLOW_"))
        }
        binaries = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        return {**kept, "PATH": binaries, **extra}


_STARTED: list["subprocess.Popen[str]"] = []
"""Processes that a test started and may have to wait for."""


@pytest.fixture(autouse=True)
def kill_what_is_left() -> Iterator[None]:
    """Kill what a test that failed did not wait for: it would hold locks that later tests wait for."""
    yield
    while _STARTED:
        process = _STARTED.pop()
        if process.poll() is None:
            process.kill()
            process.communicate()


def copy_repository(target: Path) -> Workspace:
    """Copy what git tracks or would track, as it is in the working tree, into a new git repository."""
    shutil.copytree(_make_copy().name, target, dirs_exist_ok=True)
    return Workspace(target)


@functools.cache
def _make_copy() -> "tempfile.TemporaryDirectory[str]":
    """Make the repository that all workspaces are copies of; its modules are compiled, once for all of them."""
    made = tempfile.TemporaryDirectory(prefix="enginewright-copy-")
    target = Path(made.name)
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=REPOSITORY,
        capture_output=True,
        check=True,
    )
    for name in filter(None, listed.stdout.decode().split("\0")):
        source = REPOSITORY / name
        if source.is_file() and name != "dvc.lock":
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, target / name)
    author = ["-c", "user.name=Tests", "-c", "user.email=tests@localhost"]
    for command in (["init", "-q"], ["add", "--all"], [*author, "commit", "-q", "-m", "As it is"]):
        subprocess.run(["git", *command], cwd=target, check=True)
    for package in ("flows", "tasks"):
        compileall.compile_dir(target / package, quiet=1)
    prepare_server(target / ".prefect")
    return made


def prepare_server(home: Path) -> None:
    """Put the tables of a Prefect server into a new PREFECT_HOME: to make them takes longer than to start one."""
    shutil.copytree(_make_tables().name, home)


@functools.cache
def _make_tables() -> "tempfile.TemporaryDirectory[str]":
    """Make the tables of a Prefect server that knows no run."""
    made = tempfile.TemporaryDirectory(prefix="enginewright-prefect-")
    home = {"PREFECT_HOME": made.name, "PREFECT_SERVER_ANALYTICS_ENABLED": "false"}
    upgrade = Workspace(REPOSITORY).run(
        "python", "-m", "prefect", "server", "database", "upgrade", "--yes", **home
    )
    upgrade.check_returncode()
    return made


@pytest.fixture
def workspace(tmp_path: Path) -> Iterator[Workspace]:
    """A copy of the repository in which nothing has run."""
    folder = tmp_path / "workspace"
    folder.mkdir()
    space = copy_repository(folder)
    yield space
    if (folder / ".prefect/server.json").is_file():
        space.run("python", "-m", "flows.local_server", "--stop")


@pytest.fixture(scope="session")
def smoke_run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Workspace, str]]:
    """A workspace in which the whole flow ran once, small, and what it printed.

    Every test leaves it so that the same flow has nothing to run.
    """
    space = copy_repository(tmp_path_factory.mktemp("smoke"))
    finished = space.flow()
    try:
        assert finished.returncode == 0, finished.stdout[-4000:] + finished.stderr[-8000:]
        yield space, finished.stdout + finished.stderr
    finally:
        space.run("python", "-m", "flows.local_server", "--stop")


@pytest.fixture(scope="session")
def tensorrt_builder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for PYTHONPATH whose `tensorrt` is TensorRT for RTX, NVIDIA's builder that needs no GPU."""
    from benchmarks.tensorrt_rtx import installed_builder

    try:
        return installed_builder(tmp_path_factory.mktemp("builder"))
    except OSError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="session")
def empty_database(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A database with MLflow's tables and no content: making the tables takes seconds."""
    from mlflow.tracking import MlflowClient

    file = tmp_path_factory.mktemp("empty") / "mlflow.db"
    assert MlflowClient(f"sqlite:///{file}", f"sqlite:///{file}").get_experiment_by_name("engines") is None
    return file


@pytest.fixture
def mount_disk() -> Iterator[Callable[[Path, str], None]]:
    """A function that mounts a small disk over a folder: ``size=1m``, or ``ro`` for one that cannot be written."""
    mounted: list[Path] = []

    def mount(folder: Path, options: str) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        if os.geteuid() != 0:
            pytest.skip("mounting a tmpfs needs root")
        done = subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", folder], check=False)
        if done.returncode != 0:
            pytest.skip("this sandbox does not allow mounting a tmpfs")
        mounted.append(folder)

    yield mount
    for folder in mounted:
        subprocess.run(["umount", "--lazy", folder], check=True)
