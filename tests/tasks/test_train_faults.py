"""Processes of a training that are killed, stopped or orphaned: real signals to real processes."""

import contextlib
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
import torch
import yaml
from torch import nn

from tasks.core.execute import prepare_call
from tasks.parts.networks.build import build_network
from tasks.parts.training.loop import train_network
from tasks.parts.training.losses import LabelLoss
from tasks.parts.training.module import Batch, LabelObjective
from tests.conftest import REPOSITORY, Workspace
from tests.tasks.conftest import Workshop
from tests.tasks.core.test_execute import PREPARE, TINY_SCENES, TRAIN, change_params
from tests.tasks.test_train import PLAIN, STUDENT, TRAINER

STOPPED_WITHIN_S = 60
ENDED_WITHIN_S = 60


def prepare(space: Workspace, **trainer: object) -> None:
    """Make a tiny data set, and settings whose training a signal hits long before its end."""
    trainer = {"accelerator": "cpu", "max_epochs": 30, "batch_size": 4} | trainer
    change_params(space, **{f"prepare_data.scenes.{name}": count for name, count in TINY_SCENES.items()})
    change_params(space, **{f"train.baseline.trainer.{name}": value for name, value in trainer.items()})
    change_params(space, **{"train.baseline.network.width": 0.25})
    assert space.run(*PREPARE).returncode == 0


def start(space: Workspace) -> tuple[subprocess.Popen[str], list[psutil.Process]]:
    """Start the training, wait for its next checkpoint, and return it with all its descendants."""
    before = last_checkpoint(space)
    process = space.start(*TRAIN)
    deadline = time.monotonic() + 240
    while last_checkpoint(space) <= before and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.005)
    assert process.poll() is None, process.communicate()[0]
    return process, psutil.Process(process.pid).children(recursive=True)


def last_checkpoint(space: Workspace) -> int:
    times = [path.stat().st_mtime_ns for path in drafts(space).glob("train.baseline-*/resume/last.ckpt")]
    return max(times, default=0)


def drafts(space: Workspace) -> Path:
    return space.path / "artifacts" / ".drafts"


def check_only_resume_is_left(space: Workspace) -> None:
    [draft] = drafts(space).iterdir()
    assert [path.name for path in draft.iterdir()] == ["resume"]


def check_all_end(processes: list[psutil.Process]) -> None:
    _, alive = psutil.wait_procs(processes, timeout=STOPPED_WITHIN_S)
    assert not alive


@pytest.mark.slow
def test_ranks_end_together_and_the_next_run_resumes(workspace: Workspace) -> None:
    prepare(workspace, num_devices=2, strategy="ddp")
    process, descendants = start(workspace)
    [rank] = [child for child in descendants if child.environ().get("LOCAL_RANK") == "1"]
    rank.kill()
    output = process.communicate(timeout=STOPPED_WITHIN_S)[0]
    assert process.returncode == 1
    assert output.count("ProcessDied") == 1 and "Traceback" not in output, output
    assert f"ProcessDied: Rank 1 of 2 (process {rank.pid}) was killed by SIGKILL" in output, output
    assert "to resume from the last complete checkpoint" in output
    check_all_end(descendants)
    check_only_resume_is_left(workspace)

    for end in (signal.SIGKILL, signal.SIGTERM):
        process = workspace.start(*TRAIN)
        while len(ranks := psutil.Process(process.pid).children()) < 2:
            assert process.poll() is None, process.communicate()[0]
            time.sleep(0.005)
        process.send_signal(end)
        process.communicate(timeout=ENDED_WITHIN_S)
        assert process.returncode == (-end if end == signal.SIGKILL else 128 + end)
        check_all_end(ranks)
    check_only_resume_is_left(workspace)

    finished = workspace.run(*TRAIN)
    assert finished.returncode == 0, finished.stderr
    assert "resuming after epoch" in finished.stderr
    report = yaml.safe_load((workspace.path / "artifacts/train/baseline/report.json").read_text())
    assert report["num_epochs"] == 30
    assert not list(drafts(workspace).iterdir())


@pytest.mark.slow
def test_data_workers_are_named_when_killed_and_end_with_the_training(workspace: Workspace) -> None:
    prepare(workspace, num_workers=1)
    process, descendants = start(workspace)
    workers = [child for child in descendants if "spawn_main" in " ".join(child.cmdline())]
    assert len(workers) == 2  # one for each split
    workers[0].kill()
    output = process.communicate(timeout=STOPPED_WITHIN_S)[0]
    assert process.returncode == 1 and "Traceback" not in output, output
    assert re.search(rf"ProcessDied: DataLoader worker \(pid(\(s\))? {workers[0].pid}\)", output), output
    assert re.search(r"held \d+ MiB when last seen.*trainer\.num_workers \(now 1\)", output), output
    check_all_end(descendants)
    check_only_resume_is_left(workspace)

    for end in (signal.SIGINT, signal.SIGTERM, signal.SIGKILL):
        process, descendants = start(workspace)
        group = os.getpgid(process.pid)
        interrupted = [child for child in descendants if os.getpgid(child.pid) == group]
        process.send_signal(end)
        for child in interrupted if end == signal.SIGINT else []:  # those to which a terminal sends Ctrl-C
            with contextlib.suppress(psutil.NoSuchProcess):
                child.send_signal(end)
        output = process.communicate(timeout=ENDED_WITHIN_S)[0]
        assert process.returncode == (-end if end == signal.SIGKILL else 128 + end)
        assert "resuming after epoch" in output and "Traceback" not in output, output
        check_all_end(descendants)
        if end != signal.SIGKILL:
            check_only_resume_is_left(workspace)


@pytest.mark.slow
@pytest.mark.parametrize("end", [signal.SIGINT, signal.SIGTERM])
def test_training_that_ends_while_a_data_worker_starts_shows_no_traceback(
    workspace: Workspace, end: signal.Signals
) -> None:
    prepare(workspace, num_workers=1)
    process = workspace.start(*TRAIN)
    starting: list[psutil.Process] = []
    while not starting:
        assert process.poll() is None, process.communicate()[0]
        time.sleep(0.005)
        with contextlib.suppress(psutil.NoSuchProcess):
            children = psutil.Process(process.pid).children()
            starting = [child for child in children if "spawn_main" in " ".join(child.cmdline())]
    time.sleep(0.3)  # it imports torch for some seconds
    for child in starting if end == signal.SIGINT else []:  # a terminal sends Ctrl-C to all
        child.send_signal(end)
    process.send_signal(end)
    output = process.communicate(timeout=ENDED_WITHIN_S)[0]
    assert process.returncode == 128 + end and "Traceback" not in output, output
    check_all_end(starting)


class KillsWorkers(LabelObjective):
    """Kills the data workers and fails as torch does where it is reading from one that has not ended yet."""

    num_steps = 0

    def forward(self, network: nn.Module, batch: Batch) -> torch.Tensor:
        self.num_steps += 1
        if self.num_steps == 3:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # torch learns of ended workers by its handler
            for worker in multiprocessing.active_children():
                worker.kill()
            raise ConnectionResetError(104, "Connection reset by peer")
        return super().forward(network, batch)


def train_and_kill(data: Path, out: Path) -> None:
    """Train until a data worker is killed; for a process of its own, which forks no threads of other tests."""
    config = replace(TRAINER, num_workers=1, batch_size=1)
    network, objective = build_network(STUDENT, 3), KillsWorkers(LabelLoss(PLAIN, torch.ones(3)))
    train_network(network, objective, data=data, config=config, out=out)


@pytest.mark.slow
def test_data_worker_killed_while_it_hands_over_a_batch_is_named(workshop: Workshop, tmp_path: Path) -> None:
    program = (
        "import sys; from tests.tasks.test_train_faults import *; train_and_kill(*map(Path, sys.argv[1:]))"
    )
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    (tmp_path / "out").mkdir()
    done = subprocess.run(
        [sys.executable, "-c", program, str(workshop.data), "out"],
        cwd=tmp_path,
        env=environment,
        text=True,
        capture_output=True,
        timeout=240,
        check=False,
    )
    message = (
        r"ProcessDied: .*DataLoader worker \(pid \d+\) was killed by SIGKILL; it held \d+ MiB when last seen"
    )
    assert done.returncode == 1 and re.search(message, done.stderr), done.stderr[-3000:]


def test_training_of_other_settings_does_not_resume_from_this_one(
    workspace: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(workspace.path)
    (workspace.path / "dataset").mkdir()
    params = yaml.safe_load((REPOSITORY / "params.yaml").read_text())
    trainer = params["train"]["baseline"]["trainer"] | {"strategy": "ddp"}
    folders = set()
    for change in ({}, {"batch_size": 3}, {"num_devices": 2}, {"num_nodes": 2}, {"max_epochs": 99}):
        params["train"]["baseline"]["trainer"] = trainer | change
        folders.add(prepare_call("train.baseline", {"data": Path("dataset")}, params).draft)
    assert len(folders) == 5
