"""Ask MLflow whether it still has what was logged, without importing it: that takes seconds, these queries do not."""

import contextlib
import os
import sqlite3
import urllib.parse
from collections.abc import Mapping
from typing import Any

from tasks.core.errors import TrackingRefused, TrackingUnavailable
from tasks.core.tracking.config import TrackingConfig, database_file
from tasks.core.tracking.records import CANDIDATE_ALIAS

_TIMEOUT_S = 2.0
_FINISHED, _ACTIVE = "FINISHED", "active"


def is_logged(config: TrackingConfig, run_id: str, candidates: Mapping[str, str | None]) -> bool:
    """Return whether MLflow has a finished run, and the alias ``candidate`` of these models at these versions.

    False also where MLflow does not answer: logging again says why.
    """
    if file := database_file(config.uri):
        return _is_in_database(str(file), run_id, candidates)
    if config.uri.startswith("http"):
        return _is_on_server(config.uri, run_id, candidates)
    return _is_known_to_client(config, run_id, candidates)


def _is_in_database(file: str, run_id: str, candidates: Mapping[str, str | None]) -> bool:
    try:
        with contextlib.closing(
            sqlite3.connect(f"file:{urllib.parse.quote(file)}?mode=ro", uri=True, timeout=_TIMEOUT_S)
        ) as database:
            run = database.execute(
                "SELECT status, lifecycle_stage FROM runs WHERE run_uuid = ?", (run_id,)
            ).fetchone()
            aliases = database.execute(
                "SELECT name, version FROM registered_model_aliases WHERE alias = ?", (CANDIDATE_ALIAS,)
            ).fetchall()
    except sqlite3.Error:
        return False
    found = {name: str(version) for name, version in aliases}
    return run == (_FINISHED, _ACTIVE) and all(
        found.get(model) == version for model, version in candidates.items()
    )


def _is_on_server(uri: str, run_id: str, candidates: Mapping[str, str | None]) -> bool:
    try:
        info = _get(uri, "runs/get", run_id=run_id)["run"]["info"]
        if (info["status"], info["lifecycle_stage"]) != (_FINISHED, _ACTIVE):
            return False
        return all(_alias_on_server(uri, model) == version for model, version in candidates.items())
    except (OSError, ValueError, KeyError):
        return False


def _alias_on_server(uri: str, model: str) -> str | None:
    import requests

    try:
        known = _get(uri, "registered-models/get", name=model)["registered_model"]
    except requests.HTTPError as error:
        if error.response is not None and error.response.status_code == requests.codes.not_found:
            return None
        raise
    versions = (item["version"] for item in known.get("aliases", ()) if item["alias"] == CANDIDATE_ALIAS)
    return next(versions, None)


def _get(uri: str, method: str, **values: str) -> Any:
    """Call MLflow's REST API; who asks is in the address or in the environment, as for MLflow's own client."""
    import requests

    user, password, token = (
        os.environ.get(f"MLFLOW_TRACKING_{name}") for name in ("USERNAME", "PASSWORD", "TOKEN")
    )
    answer = requests.get(
        f"{uri.rstrip('/')}/api/2.0/mlflow/{method}",
        params=values,
        auth=(user, password) if user and password else None,
        headers={"Authorization": f"Bearer {token}"} if token and not user else None,
        timeout=_TIMEOUT_S,
    )
    answer.raise_for_status()
    return answer.json()


def _is_known_to_client(config: TrackingConfig, run_id: str, candidates: Mapping[str, str | None]) -> bool:
    from tasks.core.tracking.client import client_of, find_aliases

    try:
        with client_of(config) as client:
            info = client.get_run(run_id).info
            is_there = (info.status, info.lifecycle_stage) == (_FINISHED, _ACTIVE)
            return is_there and all(
                (find_aliases(client, model) or {}).get(CANDIDATE_ALIAS) == version
                for model, version in candidates.items()
            )
    except (TrackingUnavailable, TrackingRefused):
        return False
