"""A selection in MLflow: logged once, pointed to, and noticed when MLflow no longer has it."""

import dataclasses
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from benchmarks.picking import free_port, served
from flows.pick import best_point
from tasks.core.config import typed_config
from tasks.core.errors import ArtifactError, ConfigError
from tasks.core.fingerprint import digest
from tasks.core.tracking.config import TrackingConfig
from tasks.core.tracking.lookup import find_engines
from tasks.core.tracking.pending import send_pending
from tasks.core.tracking.records import LOAD_FRONT_TAG
from tasks.parts.engines.manifest import EngineStatus
from tasks.track import Config, Report, still_holds, track
from tests.tasks.test_select_engine import Artifacts, artifacts, run, write_load

__all__ = ["artifacts"]

pytestmark = pytest.mark.slow

MODEL = "engines-cpu_onnxruntime"


@pytest.fixture
def cfg(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Config:
    monkeypatch.chdir(tmp_path)
    return Config(
        enabled=True, uri=f"sqlite:///{tmp_path}/mlflow.db", experiment="engines", data_name="data/scenes"
    )


def select(made: Artifacts, name: str, **changes: object) -> Path:
    """Return the output of select_engine."""
    folder = made.root.parent / name
    run(made, folder, **changes)
    return folder


def logged(cfg: Config, made: Artifacts, selection: Path) -> Report:
    data = made.root / "dataset"
    data.mkdir(exist_ok=True)
    (data / "manifest.json").write_text("{}")
    out = made.root.parent / "out"
    out.mkdir(exist_ok=True)
    splits = made.root / "splits.csv"
    splits.write_text("path,split,group\nimages/1.png,train,\n")
    return track(cfg, selection=selection, **made.inputs(), data=data, splits=splits, out=out)


def client_of(cfg: Config):
    from mlflow.tracking import MlflowClient

    return MlflowClient(cfg.uri, cfg.uri)


def test_every_engine_is_one_run_however_often_it_is_logged(cfg, artifacts) -> None:
    artifacts.add_without_engine("pruned", "cpu_openvino", EngineStatus.skipped, "no such CPU")
    artifacts.set_boundary_iou(0.4, "distilled-cpu_torch", "pruned_qat-cpu_onnxruntime")
    selection = select(artifacts, "selection")
    first, second = logged(cfg, artifacts, selection), logged(cfg, artifacts, selection)

    client = client_of(cfg)
    experiment = client.get_experiment_by_name("engines")
    runs = {run.info.run_name: run for run in client.search_runs([experiment.experiment_id])}
    assert len(client.search_runs([experiment.experiment_id])) == len(runs) == 1 + 7
    best = runs["pruned_qat-cpu_onnxruntime"]
    assert best.data.metrics["latency_ms_p50"] == 0.66
    assert (best.data.metrics["boundary_iou"], best.data.metrics["boundary_iou_rel_loss"]) == (0.4, 0.0)
    assert best.data.tags["verdict"] == "ACCEPT"
    assert best.data.tags["pareto"] == "true"
    assert best.data.tags["precision"] == "int8+f32"
    assert best.data.tags["key_build_engine"] == "key of pruned_qat"
    assert len(best.data.tags["engine_sha256"]) == 64
    files = {file.path for file in client.list_artifacts(best.info.run_id, "engine")}
    runs_alone = {"infer.py", "model.json", "report.json", "requirements.txt"}
    runs_alone.add("frame_engine")
    assert files == {f"engine/{name}" for name in ("manifest.json", "model.engine", *runs_alone)}
    assert [file.path for file in client.list_artifacts(best.info.run_id, "benchmark")] == [
        f"benchmark/{name}" for name in ("key.json", "latencies.csv", "report.json")
    ]
    assert best.data.tags["key_benchmark"] == "key of cpu_onnxruntime"
    pipeline = runs["pipeline"]
    assert first.run == second.run == f"{experiment.experiment_id}/runs/{pipeline.info.run_id}"
    assert pipeline.data.tags["best"] == "pruned_qat-cpu_onnxruntime"
    assert pipeline.data.metrics["num_engines"] == 7 and pipeline.data.metrics["best_latency_ms_p50"] == 0.66
    pages = {file.path for file in client.list_artifacts(pipeline.info.run_id)}
    assert pages == {
        "report.html",
        "report.md",
        "pareto.png",
        "engines.json",
        "picks.json",
        "splits.csv",
        "params.yaml",
        "environment.json",
    }
    version = client.get_model_version_by_alias(MODEL, "candidate")
    assert version.run_id == best.info.run_id and first.candidates[MODEL] == str(version.version)
    assert len(client.search_model_versions(f"name = '{MODEL}'")) == 1
    assert "latency_ms_p50" not in runs["pruned-cpu_openvino"].data.metrics
    [data] = best.inputs.dataset_inputs
    assert (data.dataset.name, data.dataset.digest) == ("data/scenes", digest(artifacts.root / "dataset"))


def test_engine_under_load_has_its_metrics_and_the_cells_that_pick_reads(cfg, artifacts) -> None:
    write_load(artifacts, "pruned_qat-cpu_onnxruntime")
    logged(cfg, artifacts, select(artifacts, "selection", loaded=["cpu_onnxruntime"]))
    runs = {run.tags["variant"]: run for run in find_engines(cfg, "cpu_onnxruntime")}
    metrics = runs["pruned_qat"].metrics
    assert (metrics["throughput_per_s_within_p99"], metrics["throughput_ms_p99"]) == (512.3, 17.5)
    assert metrics["knee_per_s"] == 234.5
    point = best_point(runs["pruned_qat"], 10.0)
    assert (
        point is not None
        and point.throughput_per_s == 130.0
        and point.setting == "batch 1, 1 lane of 1 thread"
    )
    others = [run for variant, run in runs.items() if variant != "pruned_qat"]
    assert others and not any(LOAD_FRONT_TAG in run.tags or "knee_per_s" in run.metrics for run in others)


def test_run_of_the_pipeline_has_the_key_of_each_training_and_of_no_leftover(cfg, artifacts) -> None:
    Path("params.yaml").write_text(
        yaml.safe_dump({"train": {"teacher": {"seed": 0}}, "distill": {"seed": 0}})
    )
    for number, output in enumerate(("train/teacher", "train/old", "distill", "finetune")):
        folder = artifacts.root / output
        folder.mkdir(parents=True)
        (folder / "key.json").write_text(json.dumps({"key": f"key {number}"}))
    pipeline = logged(cfg, artifacts, select(artifacts, "selection")).run.rpartition("/")[2]
    tags = client_of(cfg).get_run(pipeline).data.tags
    keys = {name: key for name, key in tags.items() if name.startswith("key_")}
    assert keys == {"key_train.teacher": "key 0", "key_distill": "key 2"}


def test_candidate_goes_forth_and_back_with_the_selection(cfg, artifacts) -> None:
    accurate = select(artifacts, "accurate")
    strict = select(artifacts, "strict", max_score_rel_loss=0.01)
    first = logged(cfg, artifacts, accurate)
    assert still_holds(cfg, first)
    between = logged(cfg, artifacts, strict)
    assert first.candidates[MODEL] != between.candidates[MODEL]
    assert still_holds(cfg, between) and not still_holds(cfg, first)
    again = logged(cfg, artifacts, accurate)
    assert again == first and still_holds(cfg, first) and not still_holds(cfg, between)


def test_lost_store_is_noticed_and_filled_again(cfg, artifacts, tmp_path) -> None:
    selection = select(artifacts, "selection")
    first = logged(cfg, artifacts, selection)
    (tmp_path / "empty").mkdir()
    empty = dataclasses.replace(cfg, uri=f"sqlite:///{tmp_path}/empty/mlflow.db")
    assert not still_holds(empty, first)
    again = logged(empty, artifacts, selection)
    assert again.run != first.run and still_holds(empty, again)
    client_of(empty).delete_run(again.run.rpartition("/")[2])
    assert not still_holds(empty, again)


@pytest.fixture
def server(cfg: Config, tmp_path: Path) -> Iterator[Config]:
    """A real server over the same database."""
    with served(cfg, tmp_path, free_port()) as config:
        yield Config(**vars(config) | {"data_name": "data/scenes"})


def test_server_is_asked_as_the_file_is(cfg, server, artifacts) -> None:
    selection = select(artifacts, "selection")
    first = logged(server, artifacts, selection)
    assert still_holds(server, first) and still_holds(cfg, first)
    client = client_of(server)
    client.delete_registered_model_alias(MODEL, "candidate")
    assert not still_holds(server, first)
    assert still_holds(server, logged(server, artifacts, selection))


def test_nothing_is_imported_to_ask(cfg, artifacts) -> None:
    first = logged(cfg, artifacts, select(artifacts, "selection"))
    asked = (
        "import sys; from tasks.track import Config, Report, still_holds\n"
        f"print(still_holds({cfg!r}, {first!r}), 'mlflow' in sys.modules)"
    )
    command = [sys.executable, "-c", asked]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=Path(__file__).parents[2])
    assert done.stdout.split() == ["True", "False"], done.stderr


def test_runs_stay_pending_while_mlflow_does_not_answer(cfg, artifacts, tmp_path, caplog) -> None:
    database = tmp_path / "mlflow.db"
    database.write_text("this is no database" * 100)
    selection = select(artifacts, "selection")
    missed = logged(cfg, artifacts, selection)
    assert "7 runs are pending" in caplog.text
    assert missed == Report(None, {}) and not still_holds(cfg, missed)

    database.unlink()
    assert send_pending(cfg) == 7
    assert still_holds(cfg, logged(cfg, artifacts, selection))
    experiment = client_of(cfg).get_experiment_by_name("engines")
    assert len(client_of(cfg).search_runs([experiment.experiment_id])) == 7


def test_engine_that_was_changed_after_it_was_measured_is_not_logged(cfg, artifacts) -> None:
    selection = select(artifacts, "selection")
    file = artifacts.root / "build_engine" / "pruned" / "cpu_onnxruntime" / "engine" / "model.engine"
    file.write_bytes(b"other code")
    with pytest.raises(ArtifactError, match="not the file that was measured"):
        logged(cfg, artifacts, selection)


def test_turned_off_it_logs_nothing_and_holds(cfg, artifacts) -> None:
    off = dataclasses.replace(cfg, enabled=False)
    report = logged(off, artifacts, select(artifacts, "selection"))
    assert report == Report(None, {}) and still_holds(off, report) and not Path("mlflow.db").exists()


def test_address_comes_from_the_configuration_then_the_environment_then_is_a_file(monkeypatch) -> None:
    section = yaml.safe_load((Path(__file__).parents[2] / "conf/track/default.yaml").read_text())
    section["data_name"] = "data"
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    assert typed_config(Config, section, "track").uri == "sqlite:///mlflow.db"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://mlflow:5000")
    assert typed_config(Config, section, "track").uri == "http://mlflow:5000"
    assert TrackingConfig(enabled=True, uri="sqlite:///own.db", experiment="e").uri == "sqlite:///own.db"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "databricks")
    with pytest.raises(ConfigError, match=r"track\.uri is 'databricks'"):
        typed_config(Config, section, "track")
