"""What the flow finds before it starts, and what it does about the leftovers of other runs."""

import os
import shutil
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from flows.optimize import _how_to_open
from tasks.parts.engines.gpu import find_gpus
from tests.conftest import REPOSITORY, SMOKE, Workspace

NUM_RUNS = 14
"""The pipeline's, and one for each of the 4 + 9 engines of the two smoke targets."""


def test_only_the_file_that_make_ui_opens_is_said_to_be_opened_by_it() -> None:
    assert _how_to_open("sqlite:///mlflow.db").endswith("(`make ui` opens it on http://127.0.0.1:5000)")
    assert _how_to_open("http://me:secret@mlflow:5000").endswith("mlflow:5000")
    assert _how_to_open("sqlite:///other.db") == "sqlite:///other.db"


def test_make_ui_names_the_server_that_the_runs_go_to(tmp_path: Path) -> None:
    called = tmp_path / "called"
    for name in ("python", "mlflow"):  # what make would start
        (tmp_path / name).write_text(f'#!/bin/sh\necho "{name} $*" >> {called}\n')
        (tmp_path / name).chmod(0o755)
    command = ["make", "-C", str(REPOSITORY), f"BIN={os.path.relpath(tmp_path, REPOSITORY)}", "ui"]
    old = ("--old-file", ".venv/.installed")

    def said(**variables: str) -> str:
        called.unlink(missing_ok=True)
        environment = {
            name: text for name, text in os.environ.items() if not name.startswith("M")
        } | variables
        return subprocess.run(
            [*command, *old], env=environment, check=True, capture_output=True, text=True
        ).stdout

    assert "MLflow: http://***@mlflow:5000 (MLFLOW_TRACKING_URI)" in said(
        MLFLOW_TRACKING_URI="http://me:secret@mlflow:5000"
    )
    assert called.read_text() == "python -m flows.local_server\n"
    assert "MLflow: http://127.0.0.1:5000" in said()
    assert "mlflow ui --backend-store-uri sqlite:///mlflow.db" in called.read_text()


@pytest.mark.parametrize("place", ["artifacts", "artifacts/benchmark", ".dvc/cache", "tracking", ".prefect"])
def test_read_only_folder_is_found_before_the_first_stage(
    workspace: Workspace, mount_disk: Callable[[Path, str], None], place: str
) -> None:
    mount_disk(workspace.path / place, "ro")
    failed = workspace.flow("track.uri=sqlite:///tracking/mlflow.db")
    assert failed.returncode == 1 and "Traceback" not in failed.stderr
    assert "DiskError" in failed.stderr
    assert f"{workspace.path / place} is read-only" in failed.stderr
    assert failed.stdout == ""
    assert not (workspace.path / ".prefect/server.json").exists()


@pytest.mark.skipif(bool(find_gpus()), reason="this machine has a GPU")
def test_gpu_that_is_not_here_is_found_before_the_first_stage(workspace: Workspace) -> None:
    failed = workspace.run("python", "-m", "flows.optimize", "target=[cpu_torch,h200_tensorrt,cuda_torch]")
    assert failed.returncode == 1 and "Traceback" not in failed.stderr
    assert failed.stderr.startswith("TargetMismatch: Target h200_tensorrt needs an NVIDIA GPU")
    assert failed.stdout == ""
    assert not (workspace.path / "artifacts").exists()


def test_full_disk_ends_the_flow_with_one_line(
    workspace: Workspace, mount_disk: Callable[[Path, str], None]
) -> None:
    artifacts = workspace.path / "artifacts"
    mount_disk(artifacts, "size=64k")
    (artifacts / "filler").write_bytes(bytes(shutil.disk_usage(artifacts).free))
    failed = workspace.flow()
    assert failed.returncode == 1 and "Traceback" not in failed.stderr
    assert failed.stderr.startswith("DiskError: artifacts: the disk or its quota is full")


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupted_flow_says_what_is_kept_and_how_to_go_on(
    workspace: Workspace, number: signal.Signals
) -> None:
    heard = f"--default-signal={number.name.removeprefix('SIG')}"  # background jobs of a shell ignore Ctrl-C
    flow = workspace.start("env", heard, sys.executable, "-m", "flows.optimize", *SMOKE)
    assert flow.stdout is not None
    assert any(line.startswith("prepare_data: running") for line in flow.stdout)
    flow.send_signal(number)
    output = flow.communicate(timeout=60)[0]
    assert flow.returncode == 128 + number
    assert "Finished stages" in output and "Run the same command again to continue." in output
    assert "Traceback" not in output, output[-3000:]


@pytest.mark.slow
def test_interrupted_flow_ends_the_stages_that_run_side_by_side(smoke_run: tuple[Workspace, str]) -> None:
    space, _ = smoke_run
    trained = space.path / "artifacts/quantize_aware_train"
    forgotten = space.run("python", "-m", "flows.forget", "quantize_aware_train", "rank_layers")
    assert forgotten.returncode == 0, forgotten.stderr
    flow = space.start(sys.executable, "-m", "flows.optimize", *SMOKE)
    assert flow.stdout is not None
    assert any(line.startswith("quantize_aware_train: running") for line in flow.stdout)
    flow.send_signal(signal.SIGTERM)
    output = flow.communicate(timeout=60)[0]
    assert flow.returncode == 128 + signal.SIGTERM, output[-3000:]
    assert "Traceback" not in output, output[-3000:]
    assert not trained.exists()  # it was ended, not waited for
    assert space.flow().returncode == 0 and trained.is_dir()


@pytest.mark.slow
def test_flow_goes_on_without_mlflow_and_the_next_one_logs_once(smoke_run: tuple[Workspace, str]) -> None:
    space, _ = smoke_run
    database, leftover = space.path / "mlflow.db", space.path / "artifacts/.drafts/train.teacher-0123456789ab"
    database.write_bytes(b"this is no database" * 100)
    leftover.mkdir()
    os.utime(leftover, (time.time() - 2 * 86400,) * 2)
    without = space.flow()
    assert without.returncode == 0 and "stages run: 1 of" in without.stdout, without.stderr
    assert f"{NUM_RUNS} runs are pending" in without.stderr and "MLflow: runs are pending" in without.stdout
    assert not leftover.exists()

    database.unlink()
    for is_first in (True, False):
        finished = space.flow()
        assert finished.returncode == 0 and f"stages run: {int(is_first)} of" in finished.stdout, (
            finished.stderr
        )
        assert (f"sent {NUM_RUNS} pending runs to MLflow" in finished.stderr) is is_first
        assert "are pending" not in finished.stdout
        with sqlite3.connect(database) as opened:
            assert opened.execute("select count(*) from runs").fetchone() == (NUM_RUNS,)
