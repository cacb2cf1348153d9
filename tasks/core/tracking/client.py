"""Open an MLflow client with short timeouts, and manage registered models with it."""

import contextlib
import logging
import os
from collections.abc import Iterator
from typing import TYPE_CHECKING

from tasks.core.errors import TrackingRefused, TrackingUnavailable
from tasks.core.locks import hold_lock
from tasks.core.tracking.config import TrackingConfig, database_file, mask_credentials
from tasks.core.tracking.records import DIGEST_TAG, ENGINE_FOLDER

if TYPE_CHECKING:
    from mlflow.entities import Run
    from mlflow.tracking import MlflowClient

_DATABASE_TIMEOUT_S = 5

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
"""An unreachable server blocks a call for four minutes with the defaults, under ten seconds with these."""


_DENIED = "PERMISSION_DENIED"
_REFUSALS = ("INVALID_PARAMETER_VALUE", "BAD_REQUEST", "MALFORMED_REQUEST", _DENIED)
"""Codes of errors that would be the same the next time. That of a wrong password (UNAUTHENTICATED) is none: it says
nothing about the content."""

_REFUSED_UPLOADS = {400: "BAD_REQUEST", 403: _DENIED, 413: "BAD_REQUEST"}
"""The code of each HTTP status with which a server, or the proxy before it, refuses a file (413: it is too large)."""

_UPLOAD_TIMEOUT_S = "600"
"""An engine of a gigabyte takes minutes on a slow line, and a server answers only when it has stored it."""


@contextlib.contextmanager
def patient_uploads() -> Iterator[None]:
    """Give requests the time that files take."""
    name = "MLFLOW_HTTP_REQUEST_TIMEOUT"
    before = os.environ[name]
    os.environ[name] = _UPLOAD_TIMEOUT_S
    try:
        yield
    finally:
        os.environ[name] = before


@contextlib.contextmanager
def client_of(config: TrackingConfig) -> Iterator["MlflowClient"]:
    """Yield a client that gives up within about ten seconds.

    Raises TrackingRefused for content that MLflow does not take, or not from this user; TrackingUnavailable for all
    other errors of it. Every OSError in the block counts as one of MLflow, so read own files outside of it.
    """
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    with _explained(config):
        _quieten()
        yield _connect(config)


@contextlib.contextmanager
def _explained(config: TrackingConfig) -> Iterator[None]:
    from mlflow.exceptions import MlflowException
    from sqlalchemy.exc import SQLAlchemyError

    try:
        yield
    except (MlflowException, SQLAlchemyError, OSError) as error:
        cause = (mask_credentials(str(error)).splitlines() or [type(error).__name__])[0][:300]
        if (code := _error_code(error)) in _REFUSALS:
            advice = _how_to_get_permission(config) if code == _DENIED else ""
            raise TrackingRefused(
                f"MLflow at {mask_credentials(config.uri)} refused it: {cause}{advice}"
            ) from error
        raise TrackingUnavailable(
            f"MLflow at {mask_credentials(config.uri)} cannot be used: {cause} Start it (`make ui`), correct "
            "track.uri (a server with authentication also needs MLFLOW_TRACKING_USERNAME and "
            "MLFLOW_TRACKING_PASSWORD), or turn it off: track.enabled=false."
        ) from error


def _error_code(error: Exception) -> str | None:
    """Return the code of an error that MLflow answered with; None if it did not answer."""
    from mlflow.exceptions import MlflowException
    from requests import HTTPError

    if isinstance(error, MlflowException):
        return str(error.error_code)
    if isinstance(error, HTTPError) and error.response is not None:  # of an upload
        return _REFUSED_UPLOADS.get(error.response.status_code)
    return None


def _how_to_get_permission(config: TrackingConfig) -> str:
    user = os.environ.get("MLFLOW_TRACKING_USERNAME", "this user")
    return (
        f" Let an administrator give {user} the permission EDIT for the experiment {config.experiment!r} and its "
        "registered models, or name another experiment: track.experiment."
    )


def _quieten() -> None:
    for name in ("alembic", "mlflow.tracking", "mlflow.store.model_registry", "mlflow.system_metrics"):
        logging.getLogger(name).setLevel(logging.WARNING)
    # It would print the traceback of an error of the database, which it raises as well.
    logging.getLogger("mlflow.store.db.utils").setLevel(logging.CRITICAL)


def _connect(config: TrackingConfig) -> "MlflowClient":
    from mlflow.tracking import MlflowClient

    if file := database_file(config.uri):
        file.resolve().parent.mkdir(parents=True, exist_ok=True)
        # Two processes that both create the tables of a new database would both fail.
        with hold_lock(
            file.with_name(f"{file.name}.lock"), str(os.getpid()), before_waiting=lambda note: None
        ):
            _probe_database(config.uri, {"timeout": _DATABASE_TIMEOUT_S}, "BEGIN IMMEDIATE")
            return MlflowClient(tracking_uri=config.uri, registry_uri=config.uri)
    if config.uri.startswith("postgresql"):
        _probe_database(config.uri, {"connect_timeout": _DATABASE_TIMEOUT_S}, "SELECT 1")
    return MlflowClient(tracking_uri=config.uri, registry_uri=config.uri)


def _probe_database(uri: str, options: dict[str, int], statement: str) -> None:
    """Fail at once if a database is unreachable, locked or damaged; MLflow would retry for a hundred seconds."""
    import sqlalchemy

    engine = sqlalchemy.create_engine(uri, connect_args=options)
    try:
        with engine.connect() as connection:
            connection.exec_driver_sql(statement)
            connection.rollback()
    finally:
        engine.dispose()


def find_aliases(client: "MlflowClient", model: str) -> dict[str, str] | None:
    """Return the version of each alias of a registered model; None if there is no such model."""
    known = next(iter(client.search_registered_models(f"name = '{model}'")), None)
    return None if known is None else {alias: str(version) for alias, version in known.aliases.items()}


def make_version(client: "MlflowClient", model: str, run: "Run") -> tuple[str, bool]:
    """Return the model version that holds a run's engine, and whether it was created."""
    tags = client.get_run(run.info.run_id).data.tags
    for version in client.search_model_versions(f"name = '{model}'"):
        if version.tags.get(DIGEST_TAG) == tags[DIGEST_TAG]:
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
