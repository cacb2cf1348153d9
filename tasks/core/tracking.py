"""Log measured candidates to MLflow, once: the only code that talks to it.

One parent run stands for the pipeline, one child run for each candidate, with a logged model for its engine; the
chosen candidates become versions of registered models. Every run names the data set, and carries a digest of its
content, so that logging the same content again adds nothing and a killed logging is continued. Each target has a view
of the runs page to pick from. MLflow is imported in functions: it takes seconds.

What MLflow does not take is kept in ``artifacts/.pending``; the next logging sends it first, and so does
``python -m tasks.core.tracking``.
"""

import contextlib
import dataclasses
import fcntl
import functools
import hashlib
import json
import logging
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from tasks.core.bounds import Matches
from tasks.core.config import PARAMS_FILE, find_section, read_params, typed_config
from tasks.core.errors import ArtifactError, ConfigError, EnginewrightError, TrackingUnavailable

if TYPE_CHECKING:
    from mlflow.entities import DatasetInput, Run
    from mlflow.tracking import MlflowClient

logger = logging.getLogger(__name__)

CANDIDATE_ALIAS = "candidate"
"""The alias of the version of a registered model that the latest pipeline picked."""

CHAMPION_ALIAS = "champion"
"""The alias of the version that a person promoted: the one to deploy."""

ENGINE_FOLDER = "engine"
"""The folder of a candidate's run that a registered version hands out."""

UNKNOWN_COMMIT, UNCOMMITTED = "unknown", " and uncommitted changes"
_CODE = ("tasks", "dvc.yaml")

PENDING = Path("artifacts/.pending")
"""What MLflow did not take yet: one folder for each pipeline, with copies of the files."""

_PENDING_RECORD = "record.json"

_DIGEST_TAG = "content_digest"
_PARENT_TAG = "mlflow.parentRunId"
_PIPELINE_TAG = "pipeline_run_id"
"""Of a version: the latest pipeline that picked it; its own run may be of an earlier one with the same content."""
_VIEW = "pick-{target}"
_VIEW_TAG = "mlflow.sharedViewState." + _VIEW
"""Of the experiment: how MLflow's page keeps a view that is shared by a link."""
_VIEW_METRICS = ("latency_ms_p50", "latency_ms_p99", "miou", "top1", "size_bytes")
_VIEW_TAGS = ("picked", "verdict", "variant", "precision", "target")
_ACCEPTED = "ACCEPT"
"""The verdict of an engine that holds all gates."""
_MODEL_PARAMS = ("variant", "target", "precision")
_MAX_TAG_CHARS = 5000
_MAX_METRICS_PER_BATCH = 900
_MAX_CHILDREN = 50_000
"""What MLflow gives at once."""
_DATABASE_TIMEOUT_S = 5
_SQLITE = "sqlite:///"
_CREDENTIALS = re.compile(r"(?<=://)[^\s'\"]*@")
_PASSWORD = re.compile(r"(?i)(password=)[^&\s]+")
_ENVIRONMENT = {
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "4",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",
    "MLFLOW_HTTP_REQUEST_BACKOFF_FACTOR": "1",
    "MLFLOW_SQLALCHEMYSTORE_POOL_PRE_PING": "true",
    "MLFLOW_ALLOW_PICKLE_DESERIALIZATION": "false",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
    "MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR": "false",
    "GIT_PYTHON_REFRESH": "quiet",
}
"""A server that is gone blocks one call for four minutes with the defaults, under ten seconds with these."""


@dataclass(frozen=True)
class TrackingConfig:
    """Where runs are logged."""

    enabled: bool
    """Whether runs are logged; without it MLflow is not needed."""
    uri: str
    """``sqlite:///mlflow.db`` is a file in the working directory; a server is ``http://host:port``."""
    experiment: Annotated[str, Matches(r"(?s).*\S.*", "the name of an experiment")]
    """Experiment that gets the runs; made when it does not exist."""

    def __post_init__(self) -> None:
        if not self.uri.startswith((_SQLITE, "http://", "https://", "postgresql")):
            raise ConfigError(
                f"uri is {mask_credentials(self.uri)!r}, expected sqlite:///<file>, http://<host>:<port>, "
                "https://... or postgresql://..."
            )


def read_tracking_config(uri: str | None = None) -> TrackingConfig:
    """Return what params.yaml says of tracking, with another `uri` where one is given."""
    section = find_section(read_params(), "select_engine")[1]["tracking"]
    config: TrackingConfig = typed_config(TrackingConfig, section, "select_engine.tracking")
    return config if uri is None else dataclasses.replace(config, uri=uri)


def database_file(uri: str) -> Path | None:
    """Return the file of a SQLite store; None for a server."""
    return Path(uri.removeprefix(_SQLITE)) if uri.startswith(_SQLITE) else None


@functools.cache
def git_commit() -> str:
    """Return the commit of the checkout that this code lies in, or "unknown".

    UNCOMMITTED follows it where the stages' code was changed since.
    """
    try:
        commit = _git("rev-parse", "HEAD")
        changes = _git("status", "--porcelain", "--", *_CODE)
    except (OSError, subprocess.SubprocessError):
        return UNKNOWN_COMMIT
    return commit + (UNCOMMITTED if changes else "")


def _git(*arguments: str) -> str:
    root = Path(__file__).parents[2]
    done = subprocess.run(
        ["git", *arguments], cwd=root, capture_output=True, text=True, check=True, timeout=10
    )
    return done.stdout.strip()


def _params_text() -> str:
    """Return params.yaml without passwords: what is logged is read by others."""
    return mask_credentials(PARAMS_FILE.read_text(encoding="utf-8")) if PARAMS_FILE.is_file() else ""


@dataclass(frozen=True)
class DataSet:
    """The data that engines were made from and measured on."""

    name: str
    digest: str
    """DVC's md5."""
    path: str
    """Where it lies in a checkout."""


@dataclass(frozen=True)
class RunRecord:
    """What one run in MLflow is to hold."""

    name: str
    metrics: Mapping[str, float]
    tags: Mapping[str, str]
    artifacts: tuple[tuple[str, Path], ...]
    """Pairs of (folder inside the run, file)."""
    data: DataSet | None = None
    """None in what an earlier version kept."""
    commit: str = field(default_factory=git_commit)
    """The code that made it; no part of the content."""
    params: str = field(default_factory=_params_text)
    """The content of params.yaml; no part of the content either. The pipeline's run keeps it."""

    def content_digest(self) -> str:
        """Return a digest of everything in the record, the files' bytes included."""
        content = {
            "name": self.name,
            "metrics": dict(self.metrics),
            "tags": dict(self.tags),
            "artifacts": [[folder, file.name, _sha256(file)] for folder, file in self.artifacts],
            "data": self.data and dataclasses.asdict(self.data),
        }
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


@dataclass(frozen=True)
class Tracked:
    """What a call of ``log_pipeline`` found and added."""

    experiment_id: str
    parent_run_id: str
    num_runs_added: int
    num_versions_added: int


@dataclass(frozen=True)
class TrackedEngine:
    """An engine as its run in MLflow describes it."""

    experiment_id: str
    run_id: str
    tags: Mapping[str, str]
    """Of the run: variant, verdict, reason, engine_sha256 and so on."""
    metrics: Mapping[str, float]


def log_or_keep(
    config: TrackingConfig,
    *,
    pipeline: RunRecord,
    candidates: Sequence[RunRecord],
    picks: Mapping[str, str | None],
) -> Tracked | None:
    """Log what is pending and then this pipeline; what MLflow does not take is kept on disk, and None returned."""
    try:
        send_pending(config)
        return log_pipeline(config, pipeline=pipeline, candidates=candidates, picks=picks)
    except TrackingUnavailable as error:
        _keep((pipeline, *candidates), picks)
        logger.warning("%s %s", error, _pending_text())
        return None


def send_pending(config: TrackingConfig) -> int:
    """Log what is pending, oldest first, and forget it; return the number of runs that were added.

    Raises TrackingUnavailable when MLflow does not answer; the rest stays pending.
    """
    num_added = 0
    if not PENDING.is_dir():
        return num_added
    with _only_process():
        for file, runs, picks in _read_pending():
            num_added += log_pipeline(
                config, pipeline=runs[0], candidates=runs[1:], picks=picks
            ).num_runs_added
            file.unlink()
            shutil.rmtree(file.parent)
    return num_added


def log_pipeline(
    config: TrackingConfig,
    *,
    pipeline: RunRecord,
    candidates: Sequence[RunRecord],
    picks: Mapping[str, str | None],
) -> Tracked:
    """Log the pipeline, its candidates and the chosen ones, unless the same content is there already.

    ``picks`` maps the name of a registered model to the name of the chosen candidate. Without a chosen
    candidate the alias is taken from the model, so that nobody deploys what no longer passes.

    Raises TrackingUnavailable when MLflow does not answer, within about ten seconds.
    """
    with client_of(config) as client:
        experiment_id = _experiment(client, config)
        digests = {record.name: record.content_digest() for record in candidates}
        whole = hashlib.sha256("\n".join([pipeline.content_digest(), *sorted(digests.values())]).encode())
        parent, is_new = _parent_run(client, experiment_id, pipeline, whole.hexdigest())
        children = _child_runs(client, experiment_id, parent)
        missing = [record for record in candidates if digests[record.name] not in children]
        for record in missing:
            child = _log_candidate(client, experiment_id, parent, record, digests[record.name])
            children[digests[record.name]] = child
        num_versions = sum(
            _point_alias(client, model, None if name is None else children[digests[name]], parent)
            for model, name in picks.items()
        )
        for target in sorted({record.tags["target"] for record in candidates}):
            view = _view(target, parent, candidates)
            client.set_experiment_tag(experiment_id, _VIEW_TAG.format(target=target), json.dumps(view))
        if parent.info.status != "FINISHED":
            _log_content(client, parent, pipeline)
            client.log_text(parent.info.run_id, pipeline.params, PARAMS_FILE.name)
            client.set_terminated(parent.info.run_id, "FINISHED")
    return Tracked(experiment_id, parent.info.run_id, len(missing) + is_new, num_versions)


def registered_name(config: TrackingConfig, target: str) -> str:
    """Return the name of the registered model whose versions are the engines of a target."""
    return re.sub(r"[/:.%\"']", "-", f"{config.experiment}-{target}")  # what MLflow allows in no name


def find_engines(config: TrackingConfig, target: str) -> list[TrackedEngine]:
    """Return the logged runs of a target's engines in one pipeline: that of its candidate, else the latest.

    Raises TrackingUnavailable when MLflow does not answer.
    """
    with client_of(config) as client:
        experiment = client.get_experiment_by_name(config.experiment)
        if experiment is None:
            return []
        of_target = f"tags.target = '{target}' and attributes.status = 'FINISHED'"
        version = (_aliases(client, registered_name(config, target)) or {}).get(CANDIDATE_ALIAS)
        if version is None:
            order = ["attributes.start_time DESC"]
            runs = client.search_runs([experiment.experiment_id], of_target, order_by=order, max_results=1)
            pipelines = [run.data.tags[_PARENT_TAG] for run in runs]
        else:
            candidate = client.get_model_version(registered_name(config, target), version)
            pipelines = [candidate.tags[_PIPELINE_TAG]] if _PIPELINE_TAG in candidate.tags else []
        if not pipelines:
            return []
        same = f"{of_target} and tags.`{_PARENT_TAG}` = '{pipelines[0]}'"
        found = client.search_runs([experiment.experiment_id], same)
        return [_tracked(run) for run in found]


def find_engine(config: TrackingConfig, sha256: str) -> TrackedEngine | None:
    """Return the latest run of the engine file whose sha256 begins like this.

    Raises TrackingUnavailable when MLflow does not answer.
    """
    with client_of(config) as client:
        experiment = client.get_experiment_by_name(config.experiment)
        if experiment is None:
            return None
        found = client.search_runs(
            [experiment.experiment_id],
            f"tags.engine_sha256 LIKE '{sha256}%' and attributes.status = 'FINISHED'",
            order_by=["attributes.start_time DESC"],
            max_results=1,
        )
        return _tracked(found[0]) if found else None


def find_picked_engines(config: TrackingConfig) -> list[TrackedEngine]:
    """Return the runs of all engines that an alias of a registered model shows to.

    Raises TrackingUnavailable when MLflow does not answer.
    """
    with client_of(config) as client:
        picked = {
            run_id
            for model in client.search_registered_models(max_results=1000)
            for version in model.aliases.values()
            if (run_id := client.get_model_version(model.name, version).run_id)
        }
        return [_tracked(client.get_run(run_id)) for run_id in sorted(picked)]


def read_pipeline_params(config: TrackingConfig, engine: TrackedEngine) -> str:
    """Return the params.yaml of the pipeline that made an engine.

    Raises TrackingUnavailable when MLflow does not answer, ArtifactError where its run has no such file.
    """
    with client_of(config) as client, tempfile.TemporaryDirectory() as folder:
        pipeline = engine.tags[_PARENT_TAG]
        if PARAMS_FILE.name not in {file.path for file in client.list_artifacts(pipeline)}:
            raise ArtifactError(
                f"MLflow's run {pipeline} holds no {PARAMS_FILE}: an earlier version logged it. Run the pipeline "
                "again in an experiment of its own (select_engine.tracking.experiment)."
            )
        return Path(client.download_artifacts(pipeline, PARAMS_FILE.name, folder)).read_text(encoding="utf-8")


def _tracked(run: "Run") -> TrackedEngine:
    return TrackedEngine(run.info.experiment_id, run.info.run_id, run.data.tags, run.data.metrics)


def page_of(config: TrackingConfig, engine: TrackedEngine) -> str | None:
    """Return the address of the page that shows what was accepted on an engine's target, fastest first.

    None without a server. What the page shows, `log_pipeline` left in the experiment.
    """
    page = experiments_page(config.uri)
    if page is None:
        return None
    view = _VIEW.format(target=engine.tags["target"])
    return f"{page}/{engine.experiment_id}/runs?workflowType=machine_learning&viewStateShareKey={view}"


def experiments_page(uri: str) -> str | None:
    """Return the address of the page of a server's experiments; None for a database."""
    return f"{_CREDENTIALS.sub('', uri).rstrip('/')}/#/experiments" if uri.startswith("http") else None


def download_engine(config: TrackingConfig, run_id: str, folder: Path) -> Path:
    """Copy the engine of a run with what lies beside it into `folder` and return where it is.

    Raises TrackingUnavailable when MLflow does not answer.
    """
    with client_of(config) as client:
        return Path(client.download_artifacts(run_id, ENGINE_FOLDER, str(folder)))


def promote(config: TrackingConfig, target: str, run_id: str) -> str:
    """Let the champion of a target be the engine of a run; return the version of its registered model.

    Raises TrackingUnavailable when MLflow does not answer.
    """
    model = registered_name(config, target)
    with client_of(config) as client:
        if _aliases(client, model) is None:
            client.create_registered_model(model, tags={"kind": "engine"})
        version, _ = _version(client, model, client.get_run(run_id))
        client.set_registered_model_alias(model, CHAMPION_ALIAS, version)
        return version


@contextlib.contextmanager
def client_of(config: TrackingConfig) -> Iterator["MlflowClient"]:
    """Give a client that gives up within about ten seconds, and turn its errors into TrackingUnavailable."""
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    with _explained(config):
        _quieten()
        yield _connect(config)


def mask_credentials(uri: str) -> str:
    """Replace user and password of a URI, for texts that are shown or logged."""
    return _PASSWORD.sub(r"\1***", _CREDENTIALS.sub("***@", uri))


@contextlib.contextmanager
def _only_process() -> Iterator[None]:
    """Let one process at a time work in the folder of pending runs."""
    PENDING.mkdir(parents=True, exist_ok=True)
    folder = os.open(PENDING, os.O_RDONLY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        yield
    finally:
        os.close(folder)


def _keep(runs: Sequence[RunRecord], picks: Mapping[str, str | None]) -> None:
    """Copy all that logging needs, since the next run replaces the originals; the record is written last."""
    digest = hashlib.sha256("".join(run.content_digest() for run in runs).encode()).hexdigest()
    content = {
        "runs": [
            dataclasses.asdict(run) | {"artifacts": [(folder, file.name) for folder, file in run.artifacts]}
            for run in runs
        ],
        "picks": dict(picks),
    }
    kept = PENDING / digest[:12]
    with _only_process():
        shutil.rmtree(kept, ignore_errors=True)
        try:
            for number, run in enumerate(runs):
                for folder, file in run.artifacts:
                    copy = kept / str(number) / folder / file.name
                    copy.parent.mkdir(parents=True, exist_ok=True)
                    shutil.copyfile(file, copy)
            (kept / "draft").write_text(json.dumps(content), encoding="utf-8")
            (kept / "draft").rename(kept / _PENDING_RECORD)
        except OSError:
            shutil.rmtree(kept, ignore_errors=True)
            raise


def _read_pending() -> list[tuple[Path, list[RunRecord], dict[str, str | None]]]:
    """Return the file, the runs and the picks of every pending pipeline, oldest first."""
    found = []
    for file in sorted(PENDING.glob(f"*/{_PENDING_RECORD}"), key=lambda file: file.stat().st_mtime_ns):
        try:
            content = json.loads(file.read_text(encoding="utf-8"))
        except ValueError:
            logger.warning("ignoring %s, which is damaged; remove %s", file, file.parent)
            continue
        runs = []
        for number, run in enumerate(content["runs"]):
            copies = (
                (folder, file.parent / str(number) / folder / name) for folder, name in run["artifacts"]
            )
            data = DataSet(**run["data"]) if run.get("data") else None
            runs.append(RunRecord(**(run | {"artifacts": tuple(copies), "data": data})))
        found.append((file, runs, content["picks"]))
    return found


def _pending_text() -> str:
    num_runs = sum(len(runs) for _, runs, _ in _read_pending())
    return (
        f"{num_runs} runs pending in {PENDING}: the next run sends them, and so does `python -m "
        "tasks.core.tracking`."
    )


@contextlib.contextmanager
def _explained(config: TrackingConfig) -> Iterator[None]:
    from mlflow.exceptions import MlflowException
    from sqlalchemy.exc import SQLAlchemyError

    try:
        yield
    except (MlflowException, SQLAlchemyError, OSError) as error:
        cause = mask_credentials(str(error)).splitlines()[0][:300]
        raise TrackingUnavailable(
            f"MLflow at {mask_credentials(config.uri)} does not take or give the runs: {cause} Start it (`make ui`), "
            "mend select_engine.tracking.uri (a server with authentication: MLFLOW_TRACKING_USERNAME and "
            "MLFLOW_TRACKING_PASSWORD), or go without it: select_engine.tracking.enabled=false."
        ) from error


def _quieten() -> None:
    for name in ("mlflow.store.db.utils", "alembic", "mlflow.tracking", "mlflow.store.model_registry"):
        logging.getLogger(name).setLevel(logging.WARNING)


def _connect(config: TrackingConfig) -> "MlflowClient":
    from mlflow.tracking import MlflowClient

    if file := database_file(config.uri):
        file.resolve().parent.mkdir(parents=True, exist_ok=True)
        _probe_database(config.uri, {"timeout": _DATABASE_TIMEOUT_S}, "BEGIN IMMEDIATE")
    elif config.uri.startswith("postgresql"):
        _probe_database(config.uri, {"connect_timeout": _DATABASE_TIMEOUT_S}, "SELECT 1")
    return MlflowClient(tracking_uri=config.uri, registry_uri=config.uri)


def _probe_database(uri: str, options: dict[str, int], statement: str) -> None:
    """Fail now if a database is closed, locked or damaged: MLflow would try for a hundred seconds."""
    import sqlalchemy

    engine = sqlalchemy.create_engine(uri, connect_args=options)
    try:
        with engine.connect() as connection:
            connection.exec_driver_sql(statement)
            connection.rollback()
    finally:
        engine.dispose()


def _experiment(client: "MlflowClient", config: TrackingConfig) -> str:
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
    client: "MlflowClient", experiment_id: str, record: RunRecord, digest: str
) -> tuple["Run", bool]:
    """Return the run of this content, and whether it had to be made."""
    found = client.search_runs([experiment_id], f"tags.{_DIGEST_TAG} = '{digest}'", max_results=1)
    if found:
        return found[0], False
    tags = {**record.tags, "git_commit": record.commit, _DIGEST_TAG: digest}
    return client.create_run(experiment_id, run_name=record.name, tags=_fitting(tags)), True


def _child_runs(client: "MlflowClient", experiment_id: str, parent: "Run") -> dict[str, "Run"]:
    """Return the finished children by content digest; what a killed logging left half done is deleted."""
    children: dict[str, Run] = {}
    of_parent = f"tags.`{_PARENT_TAG}` = '{parent.info.run_id}'"
    for run in client.search_runs([experiment_id], of_parent, max_results=_MAX_CHILDREN):
        if run.info.status == "FINISHED":
            children[run.data.tags[_DIGEST_TAG]] = run
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
        _DIGEST_TAG: digest,
        _PARENT_TAG: parent.info.run_id,
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
        name=re.sub(r"[/:.%\"']", "-", record.name),
        source_run_id=run.info.run_id,
        tags={**_fitting(record.tags), "mlflow.model.isExternal": "true"},
        params={name: record.tags[name] for name in _MODEL_PARAMS if name in record.tags},
        model_type="engine",
    )
    client.log_outputs(run.info.run_id, [LoggedModelOutput(model.model_id, step=0)])
    _log_content(client, run, record, model_id=model.model_id)
    client.finalize_logged_model(model.model_id, "READY")


def _log_content(client: "MlflowClient", run: "Run", record: RunRecord, model_id: str | None = None) -> None:
    """Log metrics, for the run and for a logged model, files, and the data set."""
    from mlflow.entities import Metric

    now_ms = int(time.time() * 1000)
    metrics = [
        Metric(name, value, now_ms, 0, model_id=model_id) for name, value in sorted(record.metrics.items())
    ]
    for start in range(0, len(metrics), _MAX_METRICS_PER_BATCH):
        client.log_batch(run.info.run_id, metrics=metrics[start : start + _MAX_METRICS_PER_BATCH])
    for folder, file in record.artifacts:
        client.log_artifact(run.info.run_id, str(file), folder or None)
    if record.data is not None:
        client.log_inputs(run.info.run_id, [_data_input(record.data)])


def _data_input(data: DataSet) -> "DatasetInput":
    from mlflow.entities import Dataset, DatasetInput, InputTag

    source = json.dumps({"uri": data.path})
    dataset = Dataset(data.name, data.digest, source_type="local", source=source)
    return DatasetInput(dataset, [InputTag("mlflow.data.context", "evaluation")])


def _view(target: str, parent: "Run", candidates: Sequence[RunRecord]) -> dict[str, object]:
    """Return the state of MLflow's runs page that shows what the pipeline accepted on a target, fastest first."""
    measured = {name for record in candidates for name in record.metrics}
    columns = [f"metrics.`{name}`" for name in _VIEW_METRICS if name in measured]
    columns += [f"tags.`{name}`" for name in _VIEW_TAGS]
    return {
        "searchFilter": f"tags.target = '{target}' and tags.verdict = '{_ACCEPTED}' "
        f"and tags.`{_PARENT_TAG}` = '{parent.info.run_id}'",
        "orderByKey": "metrics.`latency_ms_p50`",
        "orderByAsc": True,
        "selectedColumns": columns,
        "columnOrder": columns,
    }


def _aliases(client: "MlflowClient", model: str) -> dict[str, str] | None:
    """Return alias -> version of a registered model; None where there is none."""
    known = next(iter(client.search_registered_models(f"name = '{model}'")), None)
    return None if known is None else {alias: str(version) for alias, version in known.aliases.items()}


def _point_alias(client: "MlflowClient", model: str, run: "Run | None", parent: "Run") -> bool:
    """Let the alias of a registered model show to a run's engine; return whether a version was added."""
    known = _aliases(client, model)
    current = (known or {}).get(CANDIDATE_ALIAS)
    if run is None:
        if current is not None:
            client.delete_registered_model_alias(model, CANDIDATE_ALIAS)
        return False
    if known is None:
        client.create_registered_model(model, tags={"kind": "engine"})
    version, is_new = _version(client, model, run)
    client.set_model_version_tag(model, version, _PIPELINE_TAG, parent.info.run_id)
    if current != version:
        client.set_registered_model_alias(model, CANDIDATE_ALIAS, version)
    return is_new


def _version(client: "MlflowClient", model: str, run: "Run") -> tuple[str, bool]:
    """Return the version that holds a run's engine, and whether it had to be made."""
    tags = client.get_run(run.info.run_id).data.tags
    for version in client.search_model_versions(f"name = '{model}'"):
        if version.tags.get(_DIGEST_TAG) == tags[_DIGEST_TAG]:
            return str(version.version), False
    shown = {name: value for name, value in tags.items() if not name.startswith("mlflow.")}
    version = client.create_model_version(
        model,
        source=f"{run.info.artifact_uri}/{ENGINE_FOLDER}",
        run_id=run.info.run_id,
        tags=shown,
        description=shown.get("reason"),
    )
    return str(version.version), True


def _fitting(tags: Mapping[str, str]) -> dict[str, str]:
    return {name: value[:_MAX_TAG_CHARS] for name, value in tags.items()}


def _sha256(file: Path) -> str:
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


def main() -> int:
    """Send what is pending to where params.yaml says; return the exit code."""
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    try:
        num_added = send_pending(read_tracking_config())
    except TrackingUnavailable as error:
        logger.error("%s %s", error, _pending_text())
        return 1
    except EnginewrightError as error:
        logger.error("%s", error)
        return 1
    logger.info("MLflow has %d runs that were pending", num_added)
    return 0


if __name__ == "__main__":
    sys.exit(main())
