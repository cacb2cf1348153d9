"""The curves of a training are in MLflow while it runs; real processes, a real SQLite store."""

import dataclasses
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from tasks.core.fingerprint import digest
from tasks.core.tracking.curves import Training, shown
from tasks.core.tracking.log import log_pipeline
from tasks.core.tracking.records import git_commit
from tests.conftest import REPOSITORY
from tests.tasks.core.tracking.conftest import client_of, runs_of

pytestmark = pytest.mark.slow

HEADER = "epoch,loss,val_miou,learning_rate\n"
_TIMEOUT_S = 120.0


@pytest.fixture
def training(config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Training:
    """A training whose workspace logs to the store."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(REPOSITORY))
    monkeypatch.setenv("MLFLOW_SYSTEM_METRICS_SAMPLING_INTERVAL", "1")
    section = {"enabled": True, "uri": config.uri, "experiment": config.experiment, "data_name": "data/cells"}
    Path("params.yaml").write_text(yaml.safe_dump({"track": section}))
    Path("dataset").mkdir()
    Path("dataset/image.png").write_bytes(b"pixels")
    return Training(
        "train.baseline",
        "abc123",
        {"trainer": {"max_epochs": 3}, "network": {"name": "unet"}},
        "dataset",
        table="draft/history.csv",
        published_table="published/history.csv",
        delay_s=0.0,
    )


def write_rows(num_rows: int, unfinished: str = "") -> None:
    Path("draft").mkdir(exist_ok=True)
    rows = "".join(f"{epoch},{1 / epoch:.3f},{0.1 * epoch:.1f},0.01\n" for epoch in range(1, num_rows + 1))
    Path("draft/history.csv").write_text(HEADER + rows + unfinished)


def wait_for(config, holds: Callable[[Any], bool]) -> Any:
    """Return the only run as soon as something holds for it."""
    deadline = time.monotonic() + _TIMEOUT_S
    while time.monotonic() < deadline:
        if client_of(config).get_experiment_by_name(config.experiment) is not None:
            runs = runs_of(config)
            assert len(runs) <= 1
            if runs and holds(runs[0]):
                return runs[0]
        time.sleep(0.2)
    raise AssertionError("it did not come to be in time")


def points(config, run, name: str) -> list[tuple[int, float]]:
    history = client_of(config).get_metric_history(run.info.run_id, name)
    return sorted((point.step, point.value) for point in history)


def test_epochs_are_in_mlflow_while_the_training_runs_with_the_load_of_the_machine(
    config, training, tmp_path
) -> None:
    with shown(training):
        write_rows(2, unfinished="3,0.3")
        run = wait_for(config, lambda run: "loss" in run.data.metrics)
        assert run.info.status == "RUNNING"
        assert points(config, run, "loss") == [(1, 1.0), (2, 0.5)]
        wait_for(config, lambda run: "system/cpu_utilization_percentage" in run.data.metrics)
        write_rows(3)
        files = {"history.csv": "md5", "training.png": "md5", "resume/other.png": "md5", "gone.png": "md5"}
        Path("draft/training.png").write_bytes(b"plot")
        Path("draft/key.json").write_text(json.dumps({"key": "abc123", "files": files}))
    Path("draft").rename("published")
    run = wait_for(config, lambda run: run.info.status == "FINISHED")
    client = client_of(config)
    assert {file.path for file in client.list_artifacts(run.info.run_id)} == {
        *("history.csv", "key.json", "training.png")
    }
    plot = client.download_artifacts(run.info.run_id, "training.png", str(tmp_path))
    assert Path(plot).read_bytes() == b"plot"
    kept = client.download_artifacts(run.info.run_id, "key.json", str(tmp_path))
    assert json.loads(Path(kept).read_text())["files"] == files
    assert points(config, run, "val_miou") == [(1, 0.1), (2, 0.2), (3, pytest.approx(0.3))]
    assert run.data.params == {"trainer.max_epochs": "3", "network.name": "unet"}
    assert run.info.run_name == run.data.tags["address"] == "train.baseline"
    assert run.data.tags["key"] == "abc123" and run.data.tags["git_commit"]
    data_set = run.inputs.dataset_inputs[0]
    assert data_set.dataset.name == "data/cells" and data_set.dataset.digest.endswith(".dir")
    assert data_set.tags[0].value == "training"


def test_training_that_was_killed_is_continued_in_its_run(config, training) -> None:
    program = (
        "import sys, time; from tasks.core.tracking.curves import Training, shown\n"
        f"with shown({training!r}): print('begun', flush=True); time.sleep(600)"
    )
    write_rows(2)
    killed = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, env=os.environ)
    first = wait_for(config, lambda run: "loss" in run.data.metrics)
    killed.kill()
    killed.wait()
    wait_for(config, lambda run: run.info.status == "KILLED")
    with pytest.raises(ValueError, match="diverged"), shown(training):
        write_rows(3)
        run = wait_for(config, lambda run: len(points(config, run, "loss")) == 3)
        assert run.info.run_id == first.info.run_id and run.info.status == "RUNNING"
        raise ValueError("diverged")
    run = wait_for(config, lambda run: run.info.status == "FAILED")
    assert [step for step, _ in points(config, run, "loss")] == [1, 2, 3]


def test_store_that_cannot_be_used_costs_the_training_nothing_but_a_line(
    config, training, capfd: pytest.CaptureFixture[str]
) -> None:
    Path(config.uri.removeprefix("sqlite:///")).write_bytes(b"no database")
    deadline = time.monotonic() + _TIMEOUT_S
    said = ""
    with shown(training):
        while "its curves are not in MLflow yet" not in said:
            said += capfd.readouterr().err
            assert time.monotonic() < deadline, said
            time.sleep(0.2)
    assert "train.baseline" in said and "Traceback" not in said


def test_short_training_is_not_shown(config, training) -> None:
    with shown(dataclasses.replace(training, delay_s=60.0)):
        write_rows(1)
    time.sleep(1)
    assert client_of(config).get_experiment_by_name(config.experiment) is None


def test_what_a_training_starts_from_is_logged_however_late(config, training) -> None:
    started = digest(Path("dataset"))
    with shown(dataclasses.replace(training, delay_s=1.0)):
        write_rows(1)
        Path("dataset/image.png").write_bytes(b"other pixels")
        run = wait_for(config, lambda run: "loss" in run.data.metrics)
    assert run.inputs.dataset_inputs[0].dataset.digest == started != digest(Path("dataset"))
    assert run.data.tags["git_commit"] == git_commit()


def test_run_of_a_training_says_how_to_go_on_from_it(config, training, pipeline, candidates) -> None:
    with shown(training):
        write_rows(1)
        note = wait_for(config, lambda run: "loss" in run.data.metrics).data.tags["mlflow.note.content"]
    wait_for(config, lambda run: run.info.status == "FINISHED")
    [condition] = re.findall("``(.*?)``", note)
    assert git_commit() in note and "key.json" in note
    made = dataclasses.replace(pipeline, trainings={training.address: training.key})
    tracked = log_pipeline(config, pipeline=made, candidates=candidates, picks={})
    [found] = client_of(config).search_runs([tracked.experiment_id], condition)
    assert found.info.run_id == tracked.parent_run_id

    [back] = re.findall("``(.*?)``", found.data.tags["mlflow.note.content"])
    [run] = client_of(config).search_runs([tracked.experiment_id], back)
    assert run.info.run_name == training.address


def test_missing_data_costs_the_training_nothing_but_the_name_of_its_data(config, training) -> None:
    with shown(dataclasses.replace(training, data="nowhere")):
        write_rows(1)
        run = wait_for(config, lambda run: "loss" in run.data.metrics)
    assert not run.inputs.dataset_inputs
    wait_for(config, lambda run: run.info.status == "FINISHED")


def test_key_of_another_output_at_the_same_place_is_not_logged(config, training) -> None:
    with shown(training):
        write_rows(1)
        Path("draft/key.json").write_text(json.dumps({"key": "other", "files": {"abc123": ""}}))
        wait_for(config, lambda run: "loss" in run.data.metrics)
    run = wait_for(config, lambda run: run.info.status == "FINISHED")
    assert [file.path for file in client_of(config).list_artifacts(run.info.run_id)] == ["history.csv"]


@pytest.mark.parametrize("name", ["NODE_RANK", "GROUP_RANK"])
def test_only_the_first_node_shows_curves(config, training, monkeypatch, name: str) -> None:
    earlier = followers()
    monkeypatch.setenv(name, "1")
    with shown(training):
        write_rows(1)
        assert followers() <= earlier
    monkeypatch.setenv(name, "0")
    with shown(training):
        wait_for(config, lambda run: "loss" in run.data.metrics)
    wait_for(config, lambda run: run.info.status == "FINISHED")


def followers() -> set[int]:
    """Return the processes that follow trainings of this one."""
    return {
        child.pid for child in psutil.Process().children() if "tasks.core.tracking.curves" in child.cmdline()
    }
