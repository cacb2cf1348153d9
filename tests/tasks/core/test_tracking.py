"""MLflow gets each candidate once, against a real SQLite store."""

import dataclasses
import shutil
import socket
import sqlite3
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.picking import free_port, served
from tasks.core.errors import ConfigError, TrackingUnavailable
from tasks.core.tracking import (
    PENDING,
    UNCOMMITTED,
    DataSet,
    RunRecord,
    TrackingConfig,
    download_engine,
    git_commit,
    log_or_keep,
    log_pipeline,
    mask_credentials,
    send_pending,
)
from tests.conftest import checked


@pytest.fixture(scope="module")
def empty_database(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A database with MLflow's tables and no content: making the tables takes seconds."""
    from mlflow.tracking import MlflowClient

    file = tmp_path_factory.mktemp("empty") / "mlflow.db"
    assert MlflowClient(f"sqlite:///{file}", f"sqlite:///{file}").get_experiment_by_name("engines") is None
    return file


@pytest.fixture
def config(tmp_path: Path, empty_database: Path) -> TrackingConfig:
    (tmp_path / "store").mkdir()
    shutil.copy(empty_database, tmp_path / "store" / "mlflow.db")
    return TrackingConfig(enabled=True, uri=f"sqlite:///{tmp_path}/store/mlflow.db", experiment="engines")


def client_of(config: TrackingConfig):
    from mlflow.tracking import MlflowClient

    return MlflowClient(tracking_uri=config.uri, registry_uri=config.uri)


def runs_of(config: TrackingConfig):
    client = client_of(config)
    experiment = client.get_experiment_by_name(config.experiment)
    return client.search_runs([experiment.experiment_id])


DATA = DataSet("data/scenes", "0123456789abcdef0123456789abcdef.dir", "artifacts/prepare_data/dataset")


def models_of(config: TrackingConfig):
    client = client_of(config)
    experiment = client.get_experiment_by_name(config.experiment)
    return {model.name: model for model in client.search_logged_models([experiment.experiment_id])}


def record(folder: Path, name: str, latency_ms: float) -> RunRecord:
    engine = folder / f"{name}.engine"
    engine.write_bytes(name.encode())
    return RunRecord(
        name=name,
        metrics={"latency_ms_p50": latency_ms, "miou": 0.5},
        tags={"variant": name, "target": "cpu", "reason": "fast enough"},
        artifacts=(("engine", engine),),
        data=DATA,
    )


@pytest.fixture
def pipeline(tmp_path: Path) -> RunRecord:
    page = tmp_path / "report.html"
    page.write_text("<p>all engines</p>")
    return RunRecord(
        name="pipeline", metrics={"num_engines": 2.0}, tags={"best": "a"}, artifacts=(("", page),), data=DATA
    )


@pytest.fixture
def candidates(tmp_path: Path) -> list[RunRecord]:
    return [record(tmp_path, "a", 2.0), record(tmp_path, "b", 1.0)]


def test_each_candidate_is_a_child_run_of_the_pipeline(config, pipeline, candidates) -> None:
    tracked = log_pipeline(config, pipeline=pipeline, candidates=candidates, picks={})

    assert tracked.num_runs_added == 3
    runs = {run.info.run_name: run for run in runs_of(config)}
    assert set(runs) == {"pipeline", "a", "b"}
    assert runs["b"].data.tags["mlflow.parentRunId"] == tracked.parent_run_id
    assert runs["b"].data.metrics == {"latency_ms_p50": 1.0, "miou": 0.5}
    assert runs["b"].data.tags["git_commit"] == git_commit()
    assert {run.info.status for run in runs.values()} == {"FINISHED"}
    client = client_of(config)
    assert [file.path for file in client.list_artifacts(runs["a"].info.run_id, "engine")] == [
        "engine/a.engine"
    ]
    of_pipeline = [file.path for file in client.list_artifacts(tracked.parent_run_id)]
    assert of_pipeline == ["params.yaml", "report.html"]


def test_every_metric_has_one_point(config, pipeline, candidates) -> None:
    log_pipeline(config, pipeline=pipeline, candidates=candidates, picks={})
    log_pipeline(config, pipeline=pipeline, candidates=candidates, picks={})

    client = client_of(config)
    for run in runs_of(config):
        for name in run.data.metrics:
            assert len(client.get_metric_history(run.info.run_id, name)) == 1


def test_the_model_table_sorts_by_latency(config, pipeline, candidates) -> None:
    log_pipeline(config, pipeline=pipeline, candidates=candidates, picks={})

    client = client_of(config)
    experiment = client.get_experiment_by_name(config.experiment)
    models = client.search_logged_models(
        [experiment.experiment_id],
        order_by=[{"field_name": "metrics.latency_ms_p50", "ascending": True}],
    )
    assert [model.name for model in models] == ["b", "a"]


def test_every_run_names_the_data_set_with_the_digest_of_dvc(config, pipeline, candidates) -> None:
    log_pipeline(config, pipeline=pipeline, candidates=candidates, picks={})

    for run in runs_of(config):
        [found] = run.inputs.dataset_inputs
        assert (found.dataset.name, found.dataset.digest) == (DATA.name, DATA.digest)
        assert DATA.path in found.dataset.source


def test_each_engine_is_a_ready_model_that_its_run_puts_out(config, pipeline, candidates) -> None:
    for _ in range(2):
        log_pipeline(config, pipeline=pipeline, candidates=candidates, picks={})

    runs, models = {run.info.run_name: run for run in runs_of(config)}, models_of(config)
    assert set(models) == {"a", "b"}
    for name, model in models.items():
        assert [output.model_id for output in runs[name].outputs.model_outputs] == [model.model_id]
        assert (model.status, model.model_type, model.source_run_id) == (
            "READY",
            "engine",
            runs[name].info.run_id,
        )
        assert {metric.key: metric.value for metric in model.metrics} == runs[name].data.metrics
        assert model.params == {"variant": name, "target": "cpu"} and model.tags["reason"] == "fast enough"


def test_what_was_not_built_is_a_run_and_no_model(config, pipeline, candidates) -> None:
    skipped = dataclasses.replace(candidates[0], metrics={})
    log_pipeline(config, pipeline=pipeline, candidates=[skipped, candidates[1]], picks={})
    assert set(models_of(config)) == {"b"} and len(runs_of(config)) == 3


def test_the_same_content_adds_no_run_and_no_version(config, pipeline, candidates) -> None:
    picks = {"enginewright-cpu": "b"}
    first = log_pipeline(config, pipeline=pipeline, candidates=candidates, picks=picks)
    second = log_pipeline(config, pipeline=pipeline, candidates=candidates, picks=picks)

    assert (first.num_runs_added, first.num_versions_added) == (3, 1)
    assert (second.num_runs_added, second.num_versions_added) == (0, 0)
    assert second.parent_run_id == first.parent_run_id
    assert len(runs_of(config)) == 3


def test_other_content_is_another_pipeline_run(config, pipeline, candidates, tmp_path) -> None:
    log_pipeline(config, pipeline=pipeline, candidates=candidates, picks={})
    changed = [candidates[0], record(tmp_path, "b", 0.5)]
    tracked = log_pipeline(config, pipeline=pipeline, candidates=changed, picks={})

    assert tracked.num_runs_added == 3
    assert len(runs_of(config)) == 6


def test_changed_bytes_of_an_artifact_are_other_content(candidates) -> None:
    before = candidates[0].content_digest()
    candidates[0].artifacts[0][1].write_bytes(b"other weights")
    assert candidates[0].content_digest() != before


def test_a_killed_logging_is_continued(config, pipeline, candidates) -> None:
    first = log_pipeline(config, pipeline=pipeline, candidates=candidates, picks={})
    client = client_of(config)
    half_done = next(run for run in runs_of(config) if run.info.run_name == "b")
    client.update_run(half_done.info.run_id, status="RUNNING")
    client.update_run(first.parent_run_id, status="RUNNING")
    models_before = list(models_of(config).values())

    second = log_pipeline(config, pipeline=pipeline, candidates=candidates, picks={})

    assert second.parent_run_id == first.parent_run_id
    assert second.num_runs_added == 1
    names = sorted(run.info.run_name for run in runs_of(config))
    assert names == ["a", "b", "pipeline"]
    [first_try] = [model for model in models_before if model.name == "b"]
    assert first_try.model_id not in {model.model_id for model in models_of(config).values()}
    assert set(models_of(config)) == {"a", "b"}
    assert {run.info.status for run in runs_of(config)} == {"FINISHED"}


def test_the_pick_is_a_version_that_hands_out_the_engine(config, pipeline, candidates, tmp_path) -> None:
    log_pipeline(config, pipeline=pipeline, candidates=candidates, picks={"enginewright-cpu": "b"})

    client = client_of(config)
    version = client.get_model_version_by_alias("enginewright-cpu", "candidate")
    assert version.tags["variant"] == "b"
    assert version.description == "fast enough"
    folder = Path(version.source.removeprefix("file://"))
    assert (folder / "b.engine").read_bytes() == b"b"


def test_the_alias_moves_to_a_new_pick_and_back_without_a_third_version(config, pipeline, candidates) -> None:
    for name in ("a", "b", "a"):
        log_pipeline(config, pipeline=pipeline, candidates=candidates, picks={"enginewright-cpu": name})
        version = client_of(config).get_model_version_by_alias("enginewright-cpu", "candidate")
        assert version.tags["variant"] == name
    assert len(client_of(config).search_model_versions("name = 'enginewright-cpu'")) == 2


def test_a_target_without_a_pick_loses_the_alias(config, pipeline, candidates) -> None:
    log_pipeline(config, pipeline=pipeline, candidates=candidates, picks={"enginewright-cpu": "a"})
    log_pipeline(config, pipeline=pipeline, candidates=candidates, picks={"enginewright-cpu": None})

    model = client_of(config).get_registered_model("enginewright-cpu")
    assert "candidate" not in model.aliases


def test_no_model_is_registered_for_a_target_that_never_had_a_pick(config, pipeline, candidates) -> None:
    log_pipeline(config, pipeline=pipeline, candidates=candidates, picks={"enginewright-cpu": None})
    assert list(client_of(config).search_registered_models()) == []


def test_a_deleted_experiment_is_used_again(config, pipeline, candidates) -> None:
    log_pipeline(config, pipeline=pipeline, candidates=candidates, picks={})
    client = client_of(config)
    client.delete_experiment(client.get_experiment_by_name(config.experiment).experiment_id)

    assert log_pipeline(config, pipeline=pipeline, candidates=candidates, picks={}).parent_run_id


def test_a_closed_port_is_reported_soon_and_without_credentials(config, pipeline, candidates) -> None:
    uri = f"http://user:secret@127.0.0.1:{free_port()}"
    gone = dataclasses.replace(config, uri=uri)
    started = time.monotonic()
    with pytest.raises(TrackingUnavailable, match=r"select_engine\.tracking\.uri") as caught:
        log_pipeline(gone, pipeline=pipeline, candidates=candidates, picks={})
    assert "secret" not in str(caught.value)
    assert time.monotonic() - started < 15


@pytest.fixture
def silent_port() -> Iterator[int]:
    """A server that takes connections and never answers."""
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen(8)
        kept: list[socket.socket] = []
        stop = threading.Event()

        def accept() -> None:
            server.settimeout(0.1)
            while not stop.is_set():
                try:
                    kept.append(server.accept()[0])
                except TimeoutError:
                    continue

        thread = threading.Thread(target=accept)
        thread.start()
        yield int(server.getsockname()[1])
        stop.set()
        thread.join()
        for connection in kept:
            connection.close()


def test_a_server_that_never_answers_is_given_up_within_the_limit(
    config, pipeline, candidates, silent_port
) -> None:
    import mlflow.tracking  # noqa: F401  (its import is no part of the waiting)

    silent = dataclasses.replace(config, uri=f"http://127.0.0.1:{silent_port}")
    started = time.monotonic()
    with pytest.raises(TrackingUnavailable):
        log_pipeline(silent, pipeline=pipeline, candidates=candidates, picks={})
    assert time.monotonic() - started < 15


@pytest.mark.parametrize("damage", ["folder", "text", "locked"])
def test_a_database_that_cannot_be_used_is_reported_soon(
    config, pipeline, candidates, tmp_path, damage
) -> None:
    import mlflow.tracking  # noqa: F401

    file = tmp_path / "broken.db"
    holder = sqlite3.connect(tmp_path / "other.db")
    if damage == "folder":
        file.mkdir()
    elif damage == "text":
        file.write_text("this is no database" * 100)
    else:
        holder = sqlite3.connect(file)
        holder.execute("BEGIN EXCLUSIVE")
    broken = dataclasses.replace(config, uri=f"sqlite:///{file}")
    started = time.monotonic()
    with pytest.raises(TrackingUnavailable, match="does not take or give the runs"):
        log_pipeline(broken, pipeline=pipeline, candidates=candidates, picks={})
    assert time.monotonic() - started < 15
    holder.close()


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
    assert "3 runs pending" in caplog.text and "python -m tasks.core.tracking" in caplog.text
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


def test_a_damaged_pending_record_is_named_and_stops_nothing(
    config, stopped, pipeline, candidates, caplog
) -> None:
    log_or_keep(stopped, pipeline=pipeline, candidates=candidates, picks={})
    [file] = PENDING.glob("*/record.json")
    file.write_bytes(file.read_bytes()[:100])
    assert log_or_keep(config, pipeline=pipeline, candidates=candidates, picks={}).num_runs_added == 3
    assert f"ignoring {file}, which is damaged" in caplog.text


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


def test_a_database_in_a_new_folder_is_made(tmp_path, pipeline, candidates) -> None:
    new = TrackingConfig(enabled=True, uri=f"sqlite:///{tmp_path}/new/mlflow.db", experiment="engines")
    assert log_pipeline(new, pipeline=pipeline, candidates=candidates, picks={}).num_runs_added == 3


def test_the_code_says_the_commit_of_its_checkout() -> None:
    commit = git_commit().removesuffix(UNCOMMITTED)
    assert commit == "unknown" or (len(commit) == 40 and int(commit, 16) >= 0)


@pytest.mark.parametrize(
    ("uri", "shown"),
    [
        ("http://user:pass@host:5000/x", "http://***@host:5000/x"),
        ("http://host:5000", "http://host:5000"),
        ("http://user:p/w@host", "http://***@host"),
        ("http://user:p@ss@host", "http://***@host"),
        ("postgresql://host/db?user=me&password=secret&x=1", "postgresql://host/db?user=me&password=***&x=1"),
        ("sqlite:///mlflow.db", "sqlite:///mlflow.db"),
    ],
)
def test_credentials_are_masked(uri: str, shown: str) -> None:
    assert mask_credentials(uri) == shown


@pytest.mark.parametrize("uri", ["", "mlruns", "file:///mlruns", "ftp://host"])
def test_an_unknown_kind_of_store_is_refused(uri: str) -> None:
    with pytest.raises(ConfigError, match=r"select_engine\.tracking\.uri"):
        checked(TrackingConfig(True, "sqlite:///mlflow.db", "engines"), "select_engine.tracking", uri=uri)
