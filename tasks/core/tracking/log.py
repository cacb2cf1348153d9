"""Log measured candidates to MLflow, once.

The pipeline gets a parent run, and each candidate a child run with a logged model for its engine; the chosen
candidates become versions of registered models. Every run names the data set and carries a digest of its content, so
that logging the same content again adds nothing, and logging resumes after a kill. Each target has a view of the runs
page to pick from. MLflow is imported inside functions because the import takes seconds.
"""

import hashlib
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import yaml

from tasks.core.config import PARAMS_FILE
from tasks.core.environment import ENVIRONMENT_FILE
from tasks.core.tracking.client import client_of, find_aliases, make_version, patient_uploads
from tasks.core.tracking.config import TrackingConfig, database_file, model_name
from tasks.core.tracking.notes import Origin, describe_changes, describe_pipeline, training_tag
from tasks.core.tracking.records import (
    CANDIDATE_ALIAS,
    DIGEST_TAG,
    NOTE_TAG,
    PARENT_TAG,
    PIPELINE_TAG,
    UNKNOWN_COMMIT,
    VIEW,
    DataSet,
    RunRecord,
    Tracked,
)

if TYPE_CHECKING:
    from mlflow.entities import DatasetInput, Run
    from mlflow.tracking import MlflowClient

_VIEW_TAG = "mlflow.sharedViewState." + VIEW
"""The experiment tag in which MLflow's page stores a view that is shared by a link."""

_VIEW_METRICS = (
    "latency_ms_p50",
    "latency_ms_p99",
    "throughput_per_s_within_p99",
    "throughput_ms_p99",
    "knee_per_s",
    "other_score",
    "miou",
    "boundary_iou",
    "top1",
    "size_bytes",
)
_VIEW_TAGS = ("picked", "verdict", "variant", "precision", "target")
_ACCEPTED = "ACCEPT"
"""The verdict of an engine that passes all gates."""
_MODEL_PARAMS = ("variant", "target", "precision")
_MAX_TAG_CHARS = 5000
_MAX_METRICS_PER_BATCH = 900
_MAX_PARAMS_PER_BATCH, _MAX_PARAM_CHARS = 100, 6000
_NO_CONFIGURATION = ("engines", "pipeline")
"""Sections of params.yaml with names and paths that follow from the others."""
_MAX_CHILDREN = 50_000
"""The most runs that MLflow returns at once."""


def log_pipeline(
    config: TrackingConfig,
    *,
    pipeline: RunRecord,
    candidates: Sequence[RunRecord],
    picks: Mapping[str, str | None],
) -> Tracked:
    """Log the pipeline, its candidates and the chosen ones, unless the same content is already logged.

    ``picks`` maps the name of a registered model to the name of the chosen candidate. Without a chosen
    candidate the alias is removed from the model, so that nobody deploys an engine that no longer passes.

    Raises TrackingUnavailable when MLflow does not answer, within about ten seconds; TrackingRefused when it does not
    take the content; ArtifactError when a file of a record cannot be read.
    """
    digests = {record.name: record.content_digest() for record in candidates}
    whole = hashlib.sha256("\n".join([pipeline.content_digest(), *sorted(digests.values())]).encode())
    with client_of(config) as client:
        experiment_id = find_or_create_experiment(client, config)
        parent, is_new = _parent_run(client, experiment_id, pipeline, candidates, whole.hexdigest())
        children = _child_runs(client, experiment_id, parent)
        missing = [record for record in candidates if digests[record.name] not in children]
        for record in missing:
            child = _log_candidate(client, experiment_id, parent, record, digests[record.name])
            children[digests[record.name]] = child
        pointed = {
            model: _point_alias(client, model, None if name is None else children[digests[name]], parent)
            for model, name in picks.items()
        }
        for target in sorted({record.tags["target"] for record in candidates}):
            view = _view(target, parent, candidates)
            client.set_experiment_tag(experiment_id, _VIEW_TAG.format(target=target), json.dumps(view))
        if parent.info.status != "FINISHED":
            _log_content(client, parent, pipeline)
            log_params(client, parent, _configuration(pipeline))
            client.log_text(parent.info.run_id, pipeline.params, PARAMS_FILE.name)
            client.log_text(parent.info.run_id, pipeline.environment, ENVIRONMENT_FILE.name)
            client.set_terminated(parent.info.run_id, "FINISHED")
    return Tracked(
        experiment_id,
        parent.info.run_id,
        num_runs_added=len(missing) + is_new,
        num_versions_added=sum(is_added for _, is_added in pointed.values()),
        candidates={model: version for model, (version, _) in pointed.items()},
    )


def find_or_create_experiment(client: "MlflowClient", config: TrackingConfig) -> str:
    """Return the id of the experiment of a configuration; one that was deleted is restored."""
    experiment = client.get_experiment_by_name(config.experiment)
    if experiment is None:
        return str(client.create_experiment(config.experiment, artifact_location=_artifact_location(config)))
    if experiment.lifecycle_stage != "active":
        client.restore_experiment(experiment.experiment_id)
    return str(experiment.experiment_id)


def _artifact_location(config: TrackingConfig) -> str | None:
    """Keep the files beside a local database; a server decides for itself."""
    file = database_file(config.uri)
    return (file.resolve().parent / "mlruns").as_uri() if file else None


def _parent_run(
    client: "MlflowClient",
    experiment_id: str,
    record: RunRecord,
    candidates: Sequence[RunRecord],
    digest: str,
) -> tuple["Run", bool]:
    """Return the run with this content, and whether it was created."""
    same = client.search_runs([experiment_id], f"tags.{DIGEST_TAG} = '{digest}'", max_results=1)
    if same:
        return same[0], False
    tags = {
        **record.tags,
        **{training_tag(address): key for address, key in record.trainings.items()},
        "git_commit": record.commit,
        DIGEST_TAG: digest,
        NOTE_TAG: describe_pipeline(record, _changes(client, experiment_id, record, candidates)),
    }
    return client.create_run(experiment_id, run_name=record.name, tags=_fitting(tags)), True


def _changes(
    client: "MlflowClient", experiment_id: str, record: RunRecord, candidates: Sequence[RunRecord]
) -> str:
    """Describe what is different from the pipeline that was logged last; nothing for the first one."""
    of_pipelines = f"attributes.run_name = '{record.name}' and attributes.status = 'FINISHED'"
    order = ["attributes.start_time DESC"]
    for run in client.search_runs([experiment_id], of_pipelines, order_by=order, max_results=1):
        tags, prefix = run.data.tags, training_tag("")
        inputs = run.inputs.dataset_inputs if run.inputs else ()
        of_run = f"tags.`{PARENT_TAG}` = '{run.info.run_id}' and attributes.status = 'FINISHED'"
        engines = client.search_runs([experiment_id], of_run, max_results=_MAX_CHILDREN)
        before = Origin(
            commit=tags.get("git_commit", UNKNOWN_COMMIT),
            data_digest=next((item.dataset.digest for item in inputs), ""),
            params=run.data.params,
            trainings={
                name.removeprefix(prefix): key for name, key in tags.items() if name.startswith(prefix)
            },
            engines=_built({engine.info.run_name: engine.data.tags for engine in engines}),
        )
        now = Origin(
            commit=record.commit,
            data_digest=record.data.digest if record.data else "",
            params=dict(_params(_configuration(record))),
            trainings=record.trainings,
            engines=_built({candidate.name: candidate.tags for candidate in candidates}),
        )
        return describe_changes(run.info.run_id, before, now)
    return ""


def _built(tags: Mapping[str, Mapping[str, str]]) -> dict[str, str]:
    return {name: sha256 for name, of_run in tags.items() if (sha256 := of_run.get("engine_sha256"))}


def _configuration(pipeline: RunRecord) -> dict[str, Any]:
    sections = yaml.safe_load(pipeline.params) or {}
    return {name: content for name, content in sections.items() if name not in _NO_CONFIGURATION}


def _child_runs(client: "MlflowClient", experiment_id: str, parent: "Run") -> dict[str, "Run"]:
    """Return the finished child runs by content digest; delete the unfinished ones that a kill left behind."""
    children: dict[str, Run] = {}
    of_parent = f"tags.`{PARENT_TAG}` = '{parent.info.run_id}'"
    for run in client.search_runs([experiment_id], of_parent, max_results=_MAX_CHILDREN):
        if run.info.status == "FINISHED":
            children[run.data.tags[DIGEST_TAG]] = run
            continue
        for model in client.search_logged_models([experiment_id], f"source_run_id = '{run.info.run_id}'"):
            client.delete_logged_model(model.model_id)
        client.delete_run(run.info.run_id)
    return children


def _log_candidate(
    client: "MlflowClient", experiment_id: str, parent: "Run", record: RunRecord, digest: str
) -> "Run":
    tags = {
        **record.tags,
        "git_commit": record.commit,
        DIGEST_TAG: digest,
        PARENT_TAG: parent.info.run_id,
    }
    run = client.create_run(experiment_id, run_name=record.name, tags=_fitting(tags))
    if record.metrics:
        _log_engine(client, run, record)
    else:  # nothing was built
        _log_content(client, run, record)
    client.set_terminated(run.info.run_id, "FINISHED")
    return run


def _log_engine(client: "MlflowClient", run: "Run", record: RunRecord) -> None:
    """Log a candidate and the entry of MLflow's model table that shares its metrics; the files stay in the run."""
    from mlflow.entities import LoggedModelOutput

    model = client.create_logged_model(
        run.info.experiment_id,
        name=model_name(record.name),
        source_run_id=run.info.run_id,
        tags={**_fitting(record.tags), "mlflow.model.isExternal": "true"},
        params={name: record.tags[name] for name in _MODEL_PARAMS if name in record.tags},
        model_type="engine",
    )
    client.log_outputs(run.info.run_id, [LoggedModelOutput(model.model_id, step=0)])
    _log_content(client, run, record, model_id=model.model_id)
    client.finalize_logged_model(model.model_id, "READY")


def _log_content(client: "MlflowClient", run: "Run", record: RunRecord, model_id: str | None = None) -> None:
    """Log the metrics (of the run and of a logged model), the files and the data set."""
    from mlflow.entities import Metric

    now_ms = int(time.time() * 1000)
    metrics = [
        Metric(name, value, now_ms, 0, model_id=model_id) for name, value in sorted(record.metrics.items())
    ]
    for start in range(0, len(metrics), _MAX_METRICS_PER_BATCH):
        client.log_batch(run.info.run_id, metrics=metrics[start : start + _MAX_METRICS_PER_BATCH])
    with patient_uploads():
        for folder, file in record.artifacts:
            client.log_artifact(run.info.run_id, str(file), folder or None)
    if record.data is not None:
        client.log_inputs(run.info.run_id, [data_input(record.data, "evaluation")])


def log_params(client: "MlflowClient", run: "Run", sections: Mapping[str, Any]) -> None:
    """Log configuration that a run does not have yet, so that MLflow's page compares runs by it."""
    from mlflow.entities import Param

    params = [Param(name, value) for name, value in _params(sections) if name not in run.data.params]
    for start in range(0, len(params), _MAX_PARAMS_PER_BATCH):
        client.log_batch(run.info.run_id, params=params[start : start + _MAX_PARAMS_PER_BATCH])


def _params(sections: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    for name, value in _flat(sections):
        yield name, value[:_MAX_PARAM_CHARS]


def _flat(section: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    for name, value in section.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value if isinstance(value, str) else json.dumps(value)


def data_input(data: DataSet, context: str) -> "DatasetInput":
    """Return a data set as the input of a run, which is used there for `context`."""
    from mlflow.entities import Dataset, DatasetInput, InputTag

    source = json.dumps({"uri": data.path})
    dataset = Dataset(data.name, data.digest, source_type="local", source=source)
    return DatasetInput(dataset, [InputTag("mlflow.data.context", context)])


def _view(target: str, parent: "Run", candidates: Sequence[RunRecord]) -> dict[str, object]:
    """Return the state of MLflow's runs page that lists the engines accepted on a target, fastest first."""
    measured = {name for record in candidates for name in record.metrics}
    columns = [f"metrics.`{name}`" for name in _VIEW_METRICS if name in measured]
    columns += [f"tags.`{name}`" for name in _VIEW_TAGS]
    return {
        "searchFilter": f"tags.target = '{target}' and tags.verdict = '{_ACCEPTED}' "
        f"and tags.`{PARENT_TAG}` = '{parent.info.run_id}'",
        "orderByKey": "metrics.`latency_ms_p50`",
        "orderByAsc": True,
        "selectedColumns": columns,
        "columnOrder": columns,
    }


def _point_alias(
    client: "MlflowClient", model: str, run: "Run | None", parent: "Run"
) -> tuple[str | None, bool]:
    """Point the alias of a registered model to a run's engine; return the version, and whether it was added."""
    known = find_aliases(client, model)
    current = (known or {}).get(CANDIDATE_ALIAS)
    if run is None:
        if current is not None:
            client.delete_registered_model_alias(model, CANDIDATE_ALIAS)
        return None, False
    if known is None:
        client.create_registered_model(model, tags={"kind": "engine"})
    version, is_new = make_version(client, model, run)
    client.set_model_version_tag(model, version, PIPELINE_TAG, parent.info.run_id)
    if current != version:
        client.set_registered_model_alias(model, CANDIDATE_ALIAS, version)
    return version, is_new


def _fitting(tags: Mapping[str, str]) -> dict[str, str]:
    return {name: value[:_MAX_TAG_CHARS] for name, value in tags.items()}
