"""Exchange artifacts between machines: the DVC remote holds the files, and entries of dvc.lock identify them.

Each machine has its own checkout. Outputs that another machine needs go through ``push`` and ``pull``; their dvc.lock
entries, which contain the digests, travel with the Prefect run.
"""

import contextlib
import os
import shlex
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml
from prefect import task
from prefect.cache_policies import NO_CACHE
from prefect.client.schemas.objects import State, TaskRun
from prefect.tasks import exponential_backoff

from flows.dvc_command import DvcFailed, run_dvc
from flows.lock_file import LOCK_FILE, read_lock
from tasks.core.errors import ArtifactError, ConfigError
from tasks.core.execute import ARTIFACTS, keep_outputs
from tasks.core.fingerprint import digest

Entries = dict[str, dict[str, Any]]
"""Entries of dvc.lock by the DVC name of a stage: the command, and the path and md5 of each output."""

STAGE_COMMAND = ["python", "-m", "tasks"]

_NUM_RETRIES = 4
"""Retries follow after 4, 8, 16 and 32 s: a network or a store may be unavailable for a minute."""


def check_remote() -> None:
    """Check before the first stage that there is a remote to exchange artifacts through.

    Raises ConfigError.
    """
    from dvc.config import Config

    if not Config.from_cwd()["core"].get("remote"):
        raise ConfigError(
            "DVC has no default remote (core.remote), through which machines exchange artifacts. Add one that all "
            "of them can reach: `dvc remote add --local --default store s3://bucket/path`, or a shared folder."
        )


def names_of_stages() -> dict[str, str]:
    """Return the DVC name of each stage by its address.

    Raises ArtifactError for a damaged dvc.lock, which DVC reads too.
    """
    from dvc.repo import Repo

    _read_lock()
    with Repo() as repo:
        commands = ((stage, shlex.split(stage.cmd)) for stage in repo.index.stages if stage.cmd)
        return {words[3]: stage.addressing for stage, words in commands if words[:3] == STAGE_COMMAND}


def makers_of(inputs: Iterable[Path], names: Mapping[str, str]) -> list[str]:
    """Return the DVC names of the stages whose output folders hold these inputs."""
    folders = {ARTIFACTS.joinpath(*address.split(".")): name for address, name in names.items()}
    return sorted({folders[place] for path in inputs for place in (path, *path.parents) if place in folders})


def read_entries(names: Collection[str]) -> Entries:
    """Return the dvc.lock entries of these stages.

    Raises ArtifactError for a stage without an entry, or for a damaged dvc.lock.
    """
    stages = _read_lock()["stages"]
    missing = [name for name in names if name not in stages]
    if missing:
        raise ArtifactError(
            f"{LOCK_FILE} does not name the outputs of {', '.join(missing)}. First run the `optimize` deployment, "
            "which makes and pushes them."
        )
    return {name: {key: stages[name][key] for key in ("cmd", "outs")} for name in names}


def pull_inputs(params: Mapping[str, Any]) -> None:
    """Fetch what the configuration names and a pointer file of ``dvc add`` stands for: data, models, weights.

    Raises DvcFailed, also where something that was changed here and never added would be lost.
    """
    named = {place for text in _texts(params) for place in (Path(text), *Path(text).parents)}
    for path in sorted(named):
        _pull_added(path)


def _texts(content: Any) -> Iterator[str]:
    """Yield all texts in a part of the configuration."""
    if isinstance(content, str):
        yield content
    elif isinstance(content, Mapping | list):
        for part in content.values() if isinstance(content, Mapping) else content:
            yield from _texts(part)


def _pull_added(path: Path) -> None:
    """Fetch what was added to DVC, unless it is there already."""
    pointer = Path(f"{path}.dvc")
    if not os.path.isfile(pointer):  # noqa: PTH113 - Path.is_file raises for a text that is too long for a path
        return
    if path.exists():
        with contextlib.suppress(ArtifactError):  # it is not what the pointer names
            digest(path)
            return
    run_dvc("pull", str(pointer))


def merge_entries(entries: Entries) -> None:
    """Add the entries of another machine to dvc.lock."""
    lock = _read_lock()
    lock["stages"].update(entries)
    draft = Path(".dvc/tmp", f"{LOCK_FILE.name}.{os.getpid()}")  # git ignores what a kill leaves there
    draft.parent.mkdir(parents=True, exist_ok=True)
    draft.write_text(yaml.safe_dump(lock, sort_keys=False), encoding="utf-8")
    draft.replace(LOCK_FILE)


def _read_lock() -> dict[str, Any]:
    return read_lock() if LOCK_FILE.is_file() else {"schema": "2.0", "stages": {}}


def commit(names: Collection[str]) -> None:
    """Commit to DVC those outputs of these stages that it does not have yet.

    ``dvc commit --force`` does the same, but parses and writes dvc.lock once per name, which takes seconds.

    Raises DvcFailed.
    """
    from dvc.exceptions import DvcException
    from dvc.repo import Repo

    known = _read_lock()["stages"]
    changed = {
        name
        for name in names
        if name not in known or any(digest(Path(out["path"])) != out["md5"] for out in known[name]["outs"])
    }
    if not changed:
        return
    try:
        with Repo() as repo, repo.lock:
            stages = [stage for stage in repo.index.stages if stage.addressing in changed]
            for stage in stages:
                stage.save()
                stage.commit()
            stages[0].dvcfile.dump_stages(stages, update_pipeline=False)
    except DvcException as error:
        raise DvcFailed(f"DVC could not commit {', '.join(sorted(changed))}: {error}") from error


def _is_worth_a_retry(_task: object, _run: TaskRun, state: State[Any]) -> bool:
    return isinstance(state.result(raise_on_failure=False), DvcFailed)


@task(
    cache_policy=NO_CACHE,
    retries=_NUM_RETRIES,
    retry_delay_seconds=exponential_backoff(4),
    retry_condition_fn=_is_worth_a_retry,
)
def push(names: list[str]) -> None:
    """Push the outputs of these stages (without names: of all stages) to the remote."""
    run_dvc("push", *names)


@task(
    cache_policy=NO_CACHE,
    retries=_NUM_RETRIES,
    retry_delay_seconds=exponential_backoff(4),
    retry_condition_fn=_is_worth_a_retry,
)
def pull(names: list[str]) -> None:
    """Pull the missing outputs of these stages from the remote, in the versions of dvc.lock.

    Outputs of which DVC's cache has no intact copy are stored first, since DVC deletes what it replaces.
    """
    keep_outputs()
    run_dvc("pull", "--force", *names)
