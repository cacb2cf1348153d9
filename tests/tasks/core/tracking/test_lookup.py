"""Finding engines in MLflow."""

from pathlib import Path

import pytest
from mlflow.tracking import MlflowClient

from tasks.core.tracking import lookup
from tasks.core.tracking.config import TrackingConfig


def test_picked_engines_of_all_pages_are_found(
    config: TrackingConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = MlflowClient(config.uri, config.uri)
    experiment = client.create_experiment("engines", artifact_location=str(tmp_path))
    runs = set()
    for name in ("first", "second", "third"):
        run = client.create_run(experiment)
        client.create_registered_model(name)
        version = client.create_model_version(name, source=run.info.artifact_uri, run_id=run.info.run_id)
        client.set_registered_model_alias(name, "champion", version.version)
        runs.add(run.info.run_id)
    monkeypatch.setattr(lookup, "_MODELS_PER_PAGE", 2)
    found = lookup.find_picked_engines(config)
    assert {engine.run_id for engine in found} == runs
