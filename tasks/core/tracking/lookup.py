"""Find logged engines in MLflow, fetch their files, and promote one."""

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from tasks.core.errors import ArtifactError
from tasks.core.tracking.client import client_of, find_aliases, make_version
from tasks.core.tracking.config import TrackingConfig, experiments_page, registered_name
from tasks.core.tracking.records import (
    CANDIDATE_ALIAS,
    CHAMPION_ALIAS,
    ENGINE_FOLDER,
    PARENT_TAG,
    PIPELINE_TAG,
    VIEW,
    TrackedEngine,
)

if TYPE_CHECKING:
    from mlflow.entities import Run


_MODELS_PER_PAGE = 1000
"""The most that MLflow returns at once."""


def find_engines(config: TrackingConfig, target: str) -> list[TrackedEngine]:
    """Return the runs of a target's engines in one pipeline: the candidate's, else the latest.

    Raises TrackingUnavailable when MLflow does not answer.
    """
    with client_of(config) as client:
        experiment = client.get_experiment_by_name(config.experiment)
        if experiment is None:
            return []
        of_target = f"tags.target = '{target}' and attributes.status = 'FINISHED'"
        version = (find_aliases(client, registered_name(config, target)) or {}).get(CANDIDATE_ALIAS)
        if version is None:
            order = ["attributes.start_time DESC"]
            runs = client.search_runs([experiment.experiment_id], of_target, order_by=order, max_results=1)
            pipelines = [run.data.tags[PARENT_TAG] for run in runs]
        else:
            candidate = client.get_model_version(registered_name(config, target), version)
            pipelines = [candidate.tags[PIPELINE_TAG]] if PIPELINE_TAG in candidate.tags else []
        if not pipelines:
            return []
        same = f"{of_target} and tags.`{PARENT_TAG}` = '{pipelines[0]}'"
        return [_tracked(run) for run in client.search_runs([experiment.experiment_id], same)]


def find_engine(config: TrackingConfig, sha256: str) -> TrackedEngine | None:
    """Return the latest run of the engine file whose sha256 starts with the given digits.

    Raises TrackingUnavailable when MLflow does not answer.
    """
    with client_of(config) as client:
        experiment = client.get_experiment_by_name(config.experiment)
        if experiment is None:
            return None
        runs = client.search_runs(
            [experiment.experiment_id],
            f"tags.engine_sha256 LIKE '{sha256}%' and attributes.status = 'FINISHED'",
            order_by=["attributes.start_time DESC"],
            max_results=1,
        )
        return _tracked(runs[0]) if runs else None


def find_picked_engines(config: TrackingConfig) -> list[TrackedEngine]:
    """Return the runs of all engines that an alias of a registered model points to.

    Raises TrackingUnavailable when MLflow does not answer.
    """
    with client_of(config) as client:
        picked: set[str] = set()
        page = client.search_registered_models(max_results=_MODELS_PER_PAGE)
        while page:
            picked |= {
                run_id
                for model in page
                for version in model.aliases.values()
                if (run_id := client.get_model_version(model.name, version).run_id)
            }
            if not page.token:
                break
            page = client.search_registered_models(max_results=_MODELS_PER_PAGE, page_token=page.token)
        return [_tracked(client.get_run(run_id)) for run_id in sorted(picked)]


def _tracked(run: "Run") -> TrackedEngine:
    return TrackedEngine(run.info.experiment_id, run.info.run_id, run.data.tags, run.data.metrics)


def read_pipeline_file(config: TrackingConfig, engine: TrackedEngine, name: str) -> str:
    """Return a file of the run of the pipeline that made an engine, such as params.yaml.

    Raises TrackingUnavailable when MLflow does not answer, ArtifactError if its run has no such file.
    """
    with client_of(config) as client, tempfile.TemporaryDirectory() as folder:
        pipeline = engine.tags[PARENT_TAG]
        if name not in {file.path for file in client.list_artifacts(pipeline)}:
            raise ArtifactError(
                f"MLflow's run {pipeline} has no {name}: an earlier version logged it. Run the pipeline again in an "
                "experiment of its own (track.experiment)."
            )
        return Path(client.download_artifacts(pipeline, name, folder)).read_text(encoding="utf-8")


def page_of(config: TrackingConfig, engine: TrackedEngine) -> str | None:
    """Return the address of the page that lists the engines accepted on an engine's target, fastest first.

    None without a server. `log_pipeline` stores the view of this page in the experiment.
    """
    page = experiments_page(config.uri)
    if page is None:
        return None
    view = VIEW.format(target=engine.tags["target"])
    return f"{page}/{engine.experiment_id}/runs?workflowType=machine_learning&viewStateShareKey={view}"


def download_engine(config: TrackingConfig, run_id: str, folder: Path) -> Path:
    """Copy the engine of a run and the files beside it into `folder`; return the path of the copy.

    Raises TrackingUnavailable when MLflow does not answer.
    """
    with client_of(config) as client:
        return Path(client.download_artifacts(run_id, ENGINE_FOLDER, str(folder)))


def promote(config: TrackingConfig, target: str, run_id: str) -> str:
    """Make the engine of a run the champion of its target; return the version of the registered model.

    Raises TrackingUnavailable when MLflow does not answer, TrackingRefused without the permission for the model.
    """
    model = registered_name(config, target)
    with client_of(config) as client:
        if find_aliases(client, model) is None:
            client.create_registered_model(model, tags={"kind": "engine"})
        version, _ = make_version(client, model, client.get_run(run_id))
        client.set_registered_model_alias(model, CHAMPION_ALIAS, version)
        return version
