"""The content of a run in MLflow, and the names by which it is found."""

import dataclasses
import functools
import hashlib
import json
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from tasks.core.config import PARAMS_FILE
from tasks.core.environment import ENVIRONMENT_FILE
from tasks.core.errors import ArtifactError
from tasks.core.fingerprint import SOURCE_ROOT
from tasks.core.tracking.config import mask_credentials

CANDIDATE_ALIAS = "candidate"
"""The alias of the version of a registered model that the latest pipeline picked."""

CHAMPION_ALIAS = "champion"
"""The alias of the version that a person promoted: the one to deploy."""

ENGINE_FOLDER = "engine"
"""The folder of a candidate's run that a registered version points to."""

DIGEST_TAG = "content_digest"
PARENT_TAG = "mlflow.parentRunId"
LOAD_FRONT_TAG = "load_front"
"""JSON: images per second, p99 and setting of the cells of measure_load that are best for some bound."""
NOTE_TAG = "mlflow.note.content"
"""The description of a run on MLflow's page, in Markdown."""

PIPELINE_TAG = "pipeline_run_id"
"""The tag of a version that names the latest pipeline that picked it.

The run of the version may belong to an earlier pipeline with the same content.
"""

VIEW = "pick-{target}"
"""The name of the view of the runs page that shows the engines of a target."""

UNKNOWN_COMMIT, UNCOMMITTED = "unknown", " and uncommitted changes"
_CODE = ("tasks", "dvc.yaml")


@functools.cache
def git_commit() -> str:
    """Return the commit of the checkout that this code lies in, or "unknown".

    UNCOMMITTED is appended if the stages' code has uncommitted changes.
    """
    try:
        commit = _git("rev-parse", "HEAD")
        changes = _git("status", "--porcelain", "--", *_CODE)
    except (OSError, subprocess.SubprocessError):
        return UNKNOWN_COMMIT
    return commit + (UNCOMMITTED if changes else "")


def _git(*arguments: str) -> str:
    done = subprocess.run(
        ["git", "--no-optional-locks", *arguments],  # one that is killed must not stop `git pull`
        cwd=SOURCE_ROOT,
        capture_output=True,
        text=True,
        check=True,
        timeout=10,
    )
    return done.stdout.strip()


def _params_text() -> str:
    """Return params.yaml without passwords, since others read what is logged."""
    return mask_credentials(PARAMS_FILE.read_text(encoding="utf-8")) if PARAMS_FILE.is_file() else ""


def _environment_text() -> str:
    return ENVIRONMENT_FILE.read_text(encoding="utf-8") if ENVIRONMENT_FILE.is_file() else ""


@dataclass(frozen=True)
class DataSet:
    """The data that engines were made from and measured on."""

    name: str
    digest: str
    """The md5 that DVC gives the data."""
    path: str
    """The path of the data in a checkout."""
    metric_sha256: str = ""
    """Of the file with the user's own metric; empty without one."""


@dataclass(frozen=True)
class RunRecord:
    """The content of one run in MLflow."""

    name: str
    metrics: Mapping[str, float]
    tags: Mapping[str, str]
    artifacts: tuple[tuple[str, Path], ...]
    """The files of the run, as pairs of (folder inside the run, file)."""
    data: DataSet | None = None
    """The data set; None in a record that an earlier version wrote."""
    commit: str = field(default_factory=git_commit)
    """The commit of the code that made it; not part of the digest."""
    params: str = field(default_factory=_params_text)
    """The text of params.yaml, which the pipeline's run keeps; not part of the digest."""
    environment: str = field(default_factory=_environment_text)
    """The text of artifacts/environment.json, which the pipeline's run keeps; not part of the digest."""
    trainings: Mapping[str, str] = field(default_factory=dict)
    """The key of each training of the pipeline by its address, which leads to the run of its curves; not part of the
    digest."""

    def content_digest(self) -> str:
        """Return a digest of the content, including the bytes of the files.

        Raises ArtifactError if one of them cannot be read.
        """
        content = {
            "name": self.name,
            "metrics": dict(self.metrics),
            "tags": dict(self.tags),
            "artifacts": [[folder, file.name, _sha256(file)] for folder, file in self.artifacts],
            "data": self.data and dataclasses.asdict(self.data),
        }
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _sha256(file: Path) -> str:
    try:
        with file.open("rb") as opened:
            return hashlib.file_digest(opened, "sha256").hexdigest()
    except OSError as error:
        raise ArtifactError(
            f"{file} cannot be read ({error.strerror}), expected a file that a run in MLflow is to hold. Run the "
            "stage that writes it: `dvc repro`."
        ) from error


@dataclass(frozen=True)
class Tracked:
    """What a call of ``log_pipeline`` added, and where."""

    experiment_id: str
    parent_run_id: str
    num_runs_added: int
    num_versions_added: int
    candidates: Mapping[str, str | None]
    """Registered model -> version with the alias ``candidate``; None for a model without a pick."""


@dataclass(frozen=True)
class TrackedEngine:
    """An engine as its run in MLflow describes it."""

    experiment_id: str
    run_id: str
    tags: Mapping[str, str]
    """The tags of the run: variant, verdict, reason, engine_sha256 and so on."""
    metrics: Mapping[str, float]
