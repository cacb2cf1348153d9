"""What MLflow does not take is kept, and sent once."""

import dataclasses
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks.picking import free_port, served
from tasks.core.errors import ArtifactError
from tasks.core.tracking.client import patient_uploads
from tasks.core.tracking.config import TrackingConfig
from tasks.core.tracking.lookup import download_engine
from tasks.core.tracking.pending import PENDING, describe_pending, has_pending, log_or_keep, send_pending
from tests.tasks.core.tracking.conftest import client_of, record, runs_of


@pytest.fixture
def stopped(config, tmp_path, monkeypatch) -> TrackingConfig:
    """A server that nobody started."""
    monkeypatch.chdir(tmp_path)
    return dataclasses.replace(config, uri=f"http://127.0.0.1:{free_port()}")


def test_runs_that_were_not_taken_are_logged_once_by_the_next_run(
    config, stopped, pipeline, candidates, caplog
) -> None:
    picks = {"enginewright-cpu": "b"}
    assert log_or_keep(stopped, pipeline=pipeline, candidates=candidates, picks=picks) is None
    assert "3 runs are pending" in caplog.text and "python -m tasks.core.tracking" in caplog.text
    contents = {candidate.content_digest() for candidate in candidates}
    for _, file in (*pipeline.artifacts, *candidates[0].artifacts):
        file.unlink()  # the next run of the stages replaces the originals

    assert send_pending(config) == 3
    assert send_pending(config) == 0
    runs = {run.info.run_name: run for run in runs_of(config)}
    assert {runs["a"].data.tags["content_digest"], runs["b"].data.tags["content_digest"]} == contents
    assert (
        client_of(config).get_model_version_by_alias("enginewright-cpu", "candidate").tags["variant"] == "b"
    )
    assert len(runs_of(config)) == 3 and not list(PENDING.iterdir())


def test_pending_runs_are_logged_before_newer_ones(config, stopped, pipeline, candidates, tmp_path) -> None:
    picks = {"enginewright-cpu": "a"}
    log_or_keep(stopped, pipeline=pipeline, candidates=candidates, picks=picks)
    log_or_keep(stopped, pipeline=pipeline, candidates=candidates, picks=picks)  # the same again: kept once
    changed = [candidates[0], record(tmp_path, "b", 0.5)]
    tracked = log_or_keep(config, pipeline=pipeline, candidates=changed, picks={"enginewright-cpu": "b"})

    assert tracked is not None and tracked.num_runs_added == 3
    assert len(runs_of(config)) == 6 and not list(PENDING.iterdir())
    assert (
        client_of(config).get_model_version_by_alias("enginewright-cpu", "candidate").tags["variant"] == "b"
    )


@pytest.mark.slow
def test_what_a_stopped_server_missed_is_sent_when_it_is_back(
    config, pipeline, candidates, tmp_path, monkeypatch
) -> None:
    monkeypatch.chdir(tmp_path)
    port, changed = free_port(), record(tmp_path, "b", 0.5)
    with served(config, tmp_path, port) as server:
        log_or_keep(server, pipeline=pipeline, candidates=candidates, picks={"enginewright-cpu": "a"})
    runs_before = len(runs_of(config))

    missed = [candidates[0], changed]
    assert log_or_keep(server, pipeline=pipeline, candidates=missed, picks={"enginewright-cpu": "b"}) is None
    changed.artifacts[0][1].write_bytes(b"of a later run")
    with served(config, tmp_path, port):
        assert send_pending(server) == 3
        assert send_pending(server) == 0
        version = client_of(server).get_model_version_by_alias("enginewright-cpu", "candidate")
        engine = download_engine(server, version.run_id, tmp_path) / "b.engine"

    assert (runs_before, len(runs_of(config))) == (3, 6) and not list(PENDING.iterdir())
    assert engine.read_bytes() == b"b"


def test_sending_that_was_killed_before_it_could_forget_adds_nothing(
    config, stopped, pipeline, candidates, tmp_path
) -> None:
    log_or_keep(stopped, pipeline=pipeline, candidates=candidates, picks={})
    shutil.copytree(PENDING, tmp_path / "as_it_was", copy_function=shutil.copy2)
    assert send_pending(config) == 3
    shutil.copytree(tmp_path / "as_it_was", PENDING, dirs_exist_ok=True)
    assert send_pending(config) == 0
    assert len(runs_of(config)) == 3 and not list(PENDING.iterdir())


def cut_off(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:100])


def add_field_of_another_version(file: Path) -> None:
    content = json.loads(file.read_text())
    content["runs"][1]["mood"] = "good"
    file.write_text(json.dumps(content))


def replace_metrics(file: Path) -> None:
    content = json.loads(file.read_text())
    content["runs"][1]["metrics"] = {"miou": "high"}
    file.write_text(json.dumps(content))


def forget_runs(file: Path) -> None:
    file.write_text(json.dumps({"runs": [], "picks": {}}))


def pick_what_is_not_there(file: Path) -> None:
    content = json.loads(file.read_text())
    content["picks"] = {"enginewright-cpu": "c"}
    file.write_text(json.dumps(content))


def write_a_list(file: Path) -> None:
    file.write_text("[]")


def remove_a_copy(file: Path) -> None:
    (file.parent / "1" / "engine" / "a.engine").unlink()


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (cut_off, "is damaged or from another version (JSONDecodeError"),
        (add_field_of_another_version, "mood"),
        (replace_metrics, "metrics"),
        (forget_runs, "expected the runs of a pipeline"),
        (pick_what_is_not_there, "picks c out of a, b"),
        (write_a_list, "TypeError"),
        (remove_a_copy, "a.engine cannot be read (No such file or directory)"),
    ],
)
def test_pending_record_that_cannot_be_read_is_set_aside_and_stops_nothing(
    config, stopped, pipeline, candidates, caplog, damage: Callable[[Path], None], words: str
) -> None:
    log_or_keep(stopped, pipeline=pipeline, candidates=candidates, picks={})
    [file] = PENDING.glob("*/record.json")
    damage(file)
    os.utime(file, (0, 0))  # it is the first in line
    log_or_keep(stopped, pipeline=dataclasses.replace(pipeline, name="next"), candidates=[], picks={})
    assert "runs are pending" in describe_pending()

    assert log_or_keep(config, pipeline=pipeline, candidates=candidates, picks={}).num_runs_added == 3
    assert sorted(run.info.run_name for run in runs_of(config)) == ["a", "b", "next", "pipeline"]
    [reason] = PENDING.glob("refused/*/reason.txt")
    assert words in reason.read_text() and f"kept in {reason.parent}" in caplog.text
    assert not has_pending()


def test_record_that_was_set_aside_is_sent_once_it_is_mended_and_moved_back(
    config, stopped, pipeline, candidates
) -> None:
    log_or_keep(stopped, pipeline=pipeline, candidates=candidates, picks={})
    [file] = PENDING.glob("*/record.json")
    remove_a_copy(file)
    assert send_pending(config) == 0
    [place] = (PENDING / "refused").iterdir()
    shutil.copy(candidates[0].artifacts[0][1], place / "1" / "engine" / "a.engine")
    place.rename(PENDING / place.name)
    assert send_pending(config) == 3 and not has_pending()


def test_file_of_a_run_that_is_missing_is_an_error_and_nothing_is_kept(
    config, stopped, pipeline, candidates
) -> None:
    candidates[0].artifacts[0][1].unlink()
    for anywhere in (config, stopped):
        with pytest.raises(ArtifactError, match=r"a\.engine cannot be read"):
            log_or_keep(anywhere, pipeline=pipeline, candidates=candidates, picks={})
    assert not has_pending()


def test_what_mlflow_refuses_is_set_aside_and_stops_nothing(
    config, stopped, pipeline, candidates, caplog
) -> None:
    refused = dataclasses.replace(candidates[0], metrics={"no*name": 1.0})
    log_or_keep(stopped, pipeline=pipeline, candidates=[refused], picks={})
    log_or_keep(stopped, pipeline=pipeline, candidates=candidates, picks={})
    assert send_pending(config) == 3
    [reason] = PENDING.glob("refused/*/reason.txt")
    assert "no*name" in reason.read_text() and f"kept in {reason.parent}" in caplog.text
    assert {path.name for path in PENDING.iterdir()} == {"refused"}
    assert send_pending(config) == 0

    assert log_or_keep(config, pipeline=pipeline, candidates=[refused], picks={}) is None
    assert caplog.records[-1].levelname == "ERROR" and "refused it" in caplog.text


def test_uploads_have_time_and_questions_do_not(monkeypatch) -> None:
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "4")
    with patient_uploads():
        assert float(os.environ["MLFLOW_HTTP_REQUEST_TIMEOUT"]) >= 60
    assert os.environ["MLFLOW_HTTP_REQUEST_TIMEOUT"] == "4"


def test_a_full_disk_under_the_database_leaves_the_runs_pending(
    config, pipeline, candidates, tmp_path, monkeypatch, mount_disk, empty_database, caplog
) -> None:
    monkeypatch.chdir(tmp_path)
    mount_disk(tmp_path / "small", "size=16m")
    shutil.copy(empty_database, tmp_path / "small" / "mlflow.db")
    small = dataclasses.replace(config, uri=f"sqlite:///{tmp_path}/small/mlflow.db")
    filler = tmp_path / "small" / "filler"
    filler.write_bytes(bytes(shutil.disk_usage(tmp_path / "small").free - 16384))

    assert log_or_keep(small, pipeline=pipeline, candidates=candidates, picks={}) is None
    assert "disk is full" in caplog.text or "No space left" in caplog.text
    filler.unlink()
    send_pending(small)
    assert sorted(run.info.run_name for run in runs_of(small)) == ["a", "b", "pipeline"]
    assert {run.info.status for run in runs_of(small)} == {"FINISHED"}
