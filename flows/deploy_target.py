"""The flow ``deploy_target``: the engines of one target, built and measured on a worker of the target's pool.

The worker has its own checkout. The models arrive through the DVC remote, and the engines go back the same way.
"""

import socket
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from prefect import flow
from prefect.artifacts import Artifact
from pydantic import Field

from flows.environment import write_environment
from flows.exchange import (
    Entries,
    check_remote,
    commit,
    makers_of,
    merge_entries,
    names_of_stages,
    pull,
    push,
    read_entries,
)
from flows.flow_record import close_killed_flow_run, record_flow_run, recorded_flow
from flows.params import CONF, compose_params, write_params
from flows.pipeline import RecordedStages, run_targets
from flows.preflight import check_gpus, check_operators
from flows.run_page import publish_progress
from flows.stage_task import TaskStages, task_runner
from flows.workspace import hold_workspace, keep_records
from tasks.core.errors import ArtifactError, ConfigError
from tasks.core.execute import ARTIFACTS, explained_full_disk, prepare_call
from tasks.core.tracking.records import git_commit

if TYPE_CHECKING:
    TargetName = str
else:
    TargetName = Literal[tuple(sorted(file.stem for file in (CONF / "target").glob("*.yaml")))]
    """The targets in conf/target/, which the form of a Prefect run offers."""

Overrides = Annotated[
    list[Annotated[str, Field(pattern=r"^[+~]{0,2}[A-Za-z_][\w@./]*(=.*)?$")]],
    Field(description="Hydra overrides, for example debug=smoke or train.baseline.trainer.max_epochs=40"),
]

ENTRIES_ARTIFACT = "enginewright-dvc-lock"
"""The Prefect artifact of a run that holds the dvc.lock entries of its engines."""


@dataclass(frozen=True)
class Handover:
    """What the machine that made the models passes to the one that builds engines from them."""

    commit: str
    """The commit of the code that made the models."""
    place: str
    """The checkout that made the models, as ``find_place`` names it."""
    entries: Entries
    """The dvc.lock entries of the models and the data, which are in the DVC remote."""
    keys: dict[str, str]
    """The key of every build without facts of its surroundings, by address: the same code, configuration and models
    give the same keys."""


@flow(name="deploy_target", log_prints=True, task_runner=task_runner())
def deploy_target(target: TargetName, overrides: Overrides, models: Handover | None = None) -> None:
    """Build, check and measure the engines of a target and push them to the DVC remote.

    Without `models`, those in dvc.lock of this checkout are used.

    Raises ConfigError, TargetMismatch, DvcFailed; ArtifactError if the checkouts differ.
    """
    if models is not None and models.place == find_place():
        raise ConfigError(
            f"This worker runs in {Path.cwd()}, the checkout of the pipeline, which is waiting for it. Start "
            "the workers of targets from a checkout of their own (docs/deployments.md)."
        )
    params = compose_params(overrides)
    if target not in params["build_engine"]:
        raise ConfigError(
            f"{target} is not in target, which is [{', '.join(params['build_engine'])}]. Add it."
        )
    check_gpus(params, [target])
    check_operators(params, [target])
    check_remote()
    with explained_full_disk(ARTIFACTS), hold_workspace(), keep_records(), recorded_flow():
        close_killed_flow_run()
        record_flow_run()
        write_params(params)
        write_environment(params)
        calls, needed, made = plan_target(params, target)
        if models is not None:
            merge_entries(models.entries)
        pull(needed)
        if models is not None:
            _check_keys(calls, params, models)
        run_targets(TaskStages(params, len(calls), publish_progress()), params, [target])
        commit(made)
        push(made)
        Artifact(type=ENTRIES_ARTIFACT, data=read_entries(made)).create()


def find_place() -> str:
    """Return a name that distinguishes this checkout from those of other workers."""
    return f"{socket.gethostname()}:{Path.cwd()}"


def plan_target(
    params: Mapping[str, Any], target: str
) -> tuple[dict[str, dict[str, Path]], list[str], list[str]]:
    """Return a target's stage calls, the DVC names of the stages that they need, and their own DVC names."""
    plan = RecordedStages()
    run_targets(plan, params, [target])
    names = names_of_stages()
    made = [names[address] for address in plan.calls]
    makers = makers_of((path for inputs in plan.calls.values() for path in inputs.values()), names)
    return plan.calls, [name for name in makers if name not in made], made


def _check_keys(calls: Mapping[str, Mapping[str, Path]], params: Mapping[str, Any], models: Handover) -> None:
    """Refuse to build engines that the pipeline's machine would not accept as fresh."""
    for address, key in models.keys.items():
        if prepare_call(address, calls[address], params, environment={}).key != key:
            raise ArtifactError(
                f"{address} would be a different engine here: the code or conf/ of this worker's checkout "
                f"(commit {git_commit()}) differs from the pipeline's (commit {models.commit}). Bring both checkouts "
                "to one commit and run again."
            )
