"""A real SQLite store, and a pipeline of two candidates to log there."""

import shutil
from pathlib import Path

import pytest

from tasks.core.tracking.config import TrackingConfig
from tasks.core.tracking.records import DataSet, RunRecord

DATA = DataSet("data/scenes", "0123456789abcdef0123456789abcdef.dir", "artifacts/prepare_data/dataset")


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
