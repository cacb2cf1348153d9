"""The deployed flow ``optimize``: models are made here, the engines of each target on a worker of its pool."""

import dataclasses
import enum
import json
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Annotated, Any
from uuid import UUID

from prefect import flow, get_client
from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.filters import (
    ArtifactFilter,
    ArtifactFilterFlowRunId,
    ArtifactFilterType,
    DeploymentFilter,
    DeploymentFilterName,
    FlowRunFilter,
    FlowRunFilterState,
    FlowRunFilterStateType,
    FlowRunFilterTags,
)
from prefect.client.schemas.objects import FlowRun, StateType, WorkerStatus
from prefect.deployments import run_deployment
from prefect.exceptions import ObjectNotFound
from prefect.settings import get_current_settings
from prefect.states import Cancelled, Cancelling, Crashed
from pydantic import Field

from flows.deploy_target import ENTRIES_ARTIFACT, Handover, Overrides, TargetName, find_place, plan_target
from flows.environment import write_environment
from flows.exchange import (
    Entries,
    check_remote,
    commit,
    merge_entries,
    names_of_stages,
    pull,
    pull_inputs,
    push,
    read_entries,
)
from flows.flow_record import close_killed_flow_run, record_flow_run, recorded_flow
from flows.params import compose_params, keep_targets, write_params
from flows.pipeline import RecordedStages, run_models, run_pipeline
from flows.preflight import check_folders, check_models, count_calls, send_pending_runs
from flows.run_page import publish_progress, publish_result
from flows.stage_task import TaskStages, task_runner
from flows.workspace import commit_outputs, hold_workspace, keep_records
from tasks.core.errors import ConfigError, EnginewrightError
from tasks.core.execute import (
    ARTIFACTS,
    explained_full_disk,
    is_current,
    output_folder,
    prepare_call,
    recorded_facts,
    remove_leftovers,
)
from tasks.core.tracking.records import git_commit

_FAN_OUT_TAG = "fan-out"
_POLL_S = 2.0
_WORKER_LOST_S = 120.0
"""A worker sends a heartbeat every 30 s; the server counts it as offline after three missed ones."""
_MISSED_HEARTBEATS = 2.5
"""A run that missed so many of its own is lost: its worker was killed with it, and was started again since."""


class TargetsFailed(EnginewrightError):
    """Some targets have no engines; the others are done."""


class Outcome(enum.StrEnum):
    """The outcome of a target."""

    DONE = enum.auto()
    WAITING = enum.auto()
    """The target's pool had no worker for it. Its run stays scheduled; the next pipeline uses what it makes."""
    FAILED = enum.auto()


@dataclass
class Clock:
    """Times of a target's run by ``time.monotonic``, in s."""

    worker_seen_s: float
    """The last time that its pool had a worker."""
    queued_s: float
    """Since when its pool works on nothing that this pipeline asked for."""
    heard_s: float
    """When its run is known to have lived."""
    started_s: float | None = None
    """The first time that it was seen running."""


@dataclass(frozen=True)
class TargetResult:
    """The outcome of one target, with a message and its dvc.lock entries."""

    outcome: Outcome
    words: str
    entries: Entries

    @property
    def line(self) -> str:
        """The outcome and its message."""
        return f"{self.outcome.upper()}. {self.words}".strip()


@flow(name="optimize", log_prints=True, task_runner=task_runner())
def optimize_on_pools(
    targets: Annotated[list[TargetName], Field(min_length=1, description="names in conf/target/")],
    overrides: Overrides,
    patience_s: Annotated[
        float, Field(gt=0, description="how long a target waits for a worker before the others go on, in s")
    ] = 60.0,
    timeout_s: Annotated[
        float,
        Field(
            gt=0,
            description="how long a target may take, and how long it waits while its pool does other work, in s",
        ),
    ] = 6 * 3600.0,
) -> None:
    """Make the models, build the engines of each target on its pool, and select.

    A target whose pool has no worker, or other work for long, is WAITING: the others finish, and its engines join
    in a later run.

    Raises ConfigError, ArtifactError, DvcFailed; TargetsFailed at the end, when the rest is done.
    """
    if any(override.startswith("target=") for override in overrides):
        raise ConfigError("overrides contain target=...; set the parameter targets instead.")
    overrides = [*overrides, f"target=[{','.join(targets)}]"]
    params = compose_params(overrides)
    check_folders(params)
    check_remote()
    with explained_full_disk(ARTIFACTS), hold_workspace(), keep_records(), recorded_flow():
        close_killed_flow_run()
        record_flow_run()
        write_params(params)
        pull_inputs(params)
        check_models(params)
        write_environment(params)
        send_pending_runs(params)
        stages = TaskStages(params, count_calls(params), publish_progress())
        run_models(stages, params)
        models = _names_of_models(params)
        commit(models)
        push(models)
        results = _make_engines(params, overrides, patience_s, timeout_s)
        done = [target for target, result in results.items() if result.outcome is Outcome.DONE]
        if params["select_engine"]["float_reference"]["target"] not in done:
            raise TargetsFailed(_without_reference(params, results))
        kept = keep_targets(params, done)
        write_params(kept)
        elsewhere = frozenset(address for target in done for address in plan_target(kept, target)[0])
        write_environment(kept, elsewhere)
        folder = run_pipeline(TaskStages(kept, count_calls(kept), elsewhere=elsewhere), kept)
        commit_outputs()
        push([])
        remove_leftovers()
    publish_result(
        folder, ARTIFACTS / "race_picks", kept, {target: result.line for target, result in results.items()}
    )
    failed = {target: result.words for target, result in results.items() if result.outcome is Outcome.FAILED}
    if failed:
        raise TargetsFailed(
            f"{len(failed)} of {len(targets)} targets failed, the others have their engines: "
            + "; ".join(f"{target}: {words}" for target, words in failed.items())
        )


def _make_engines(
    params: Mapping[str, Any], overrides: Sequence[str], patience_s: float, timeout_s: float
) -> dict[str, TargetResult]:
    """Build each target's engines on its pool, the references first: the others are measured beside their engines.

    A target whose reference has no engine is not started; without the float reference, no other one is.
    """
    base = params["select_engine"]["float_reference"]["target"]
    reference_of = {name: str(item["target"]) for name, item in params["pipeline"]["references"].items()}
    references = list(dict.fromkeys([base, *reference_of.values()]))
    results: dict[str, TargetResult] = {}
    for wave in (references, [target for target in params["build_engine"] if target not in references]):
        if wave is not references:
            if results[base].outcome is not Outcome.DONE:
                break
            results |= _without_own_reference(wave, reference_of, results)
            wave = [target for target in wave if target not in results]
        runs = {target: _start(params, target, overrides) for target in wave}
        results |= _wait(params, runs, patience_s, timeout_s)
        entries = {name: entry for target in wave for name, entry in results[target].entries.items()}
        if entries:
            merge_entries(entries)
            pull(sorted(entries))
        for target in wave:
            if results[target].outcome is Outcome.DONE:
                _check_current(params, target)
    return results


def _start(params: Mapping[str, Any], target: str, overrides: Sequence[str]) -> UUID:
    """Schedule the run of a target, in place of one that an earlier pipeline left waiting."""
    with get_client(sync_client=True) as client:
        waiting = client.read_flow_runs(
            deployment_filter=DeploymentFilter(name=DeploymentFilterName(any_=[target])),
            flow_run_filter=FlowRunFilter(
                tags=FlowRunFilterTags(all_=[_FAN_OUT_TAG]),
                state=FlowRunFilterState(type=FlowRunFilterStateType(any_=[StateType.SCHEDULED])),
            ),
        )
        for run in waiting:
            client.set_flow_run_state(run.id, Cancelled(message="replaced by a later pipeline"), force=True)
    calls, needed, _ = plan_target(params, target)
    builds = {address: inputs for address, inputs in calls.items() if address.startswith("build_engine.")}
    handover = Handover(
        commit=git_commit(),
        place=find_place(),
        entries=read_entries(needed),
        keys={
            address: prepare_call(address, inputs, params, environment={}).key
            for address, inputs in builds.items()
        },
    )
    try:
        started = run_deployment(
            f"deploy_target/{target}",
            parameters={
                "target": target,
                "overrides": list(overrides),
                "models": dataclasses.asdict(handover),
            },
            timeout=0,
            tags=[_FAN_OUT_TAG],
        )
    except ObjectNotFound as error:
        raise ConfigError(
            f"The server has no deployment deploy_target/{target}. Add it to prefect.yaml and register it: "
            "`python -m flows.deploy`."
        ) from error
    assert isinstance(started, FlowRun)  # not a coroutine
    return started.id


def _wait(
    params: Mapping[str, Any], runs: Mapping[str, UUID], patience_s: float, timeout_s: float
) -> dict[str, TargetResult]:
    """Wait until every run has ended or has waited too long for a worker."""
    results: dict[str, TargetResult] = {}
    began = time.monotonic()
    clocks = {target: Clock(worker_seen_s=began, queued_s=began, heard_s=began) for target in runs}
    pools = {name: str(params["pipeline"]["work_pools"][name]) for name in runs}
    with get_client(sync_client=True) as client:
        while len(results) < len(runs):
            asked = {name: client.read_flow_run(run_id) for name, run_id in runs.items()}
            at_work = {pools[name] for name, run in asked.items() if _is_at_work(run)}
            now = time.monotonic()
            for target in [name for name in runs if name not in results]:
                run, clock = asked[target], clocks[target]
                if _has_worker(client, pools[target]):
                    clock.worker_seen_s = now
                if pools[target] in at_work:
                    clock.queued_s = now
                if run.state and run.state.is_running() and clock.started_s is None:
                    clock.started_s = now
                if run.state and not run.state.is_running():
                    clock.heard_s = now
                elif now - clock.heard_s > _silent_s():
                    clock.heard_s = now - _heartbeat_age_s(client, run)
                result = _judge(client, run, pools[target], clock, now, patience_s, timeout_s)
                if result is not None:
                    results[target] = result
                    print(f"{target}: {result.line}")
            time.sleep(_POLL_S)
    return results


def _is_at_work(run: FlowRun) -> bool:
    """Return whether a worker is busy with a run, if only to end it."""
    return run.state is not None and (run.state.is_running() or run.state.is_cancelling())


def _judge(
    client: SyncPrefectClient,
    run: FlowRun,
    pool: str,
    clock: Clock,
    now_s: float,
    patience_s: float,
    timeout_s: float,
) -> TargetResult | None:
    """Return the outcome of a target's run; None while it may still finish."""
    assert run.state is not None
    unseen_s = now_s - clock.worker_seen_s
    if run.state.is_completed():
        return TargetResult(Outcome.DONE, "", _read_artifact(client, run.id))
    if run.state.is_final():
        return TargetResult(Outcome.FAILED, f"{run.state.name}: {run.state.message}", {})
    if run.state.is_scheduled() or run.state.is_pending():
        if unseen_s > patience_s:
            words = (
                f"pool {pool} has no worker; start one with `prefect worker start --pool {pool} --limit 1`."
            )
            return TargetResult(Outcome.WAITING, words, {})
        if now_s - clock.queued_s > timeout_s:
            words = f"pool {pool} has been busy with other work for more than {timeout_s:g} s."
            return TargetResult(Outcome.WAITING, words, {})
        return None
    if unseen_s > _WORKER_LOST_S or now_s - clock.heard_s > _silent_s():
        words = "its worker was lost"
        client.set_flow_run_state(run.id, Crashed(message=words), force=True)
        return TargetResult(Outcome.FAILED, words, {})
    if clock.started_s is not None and now_s - clock.started_s > timeout_s:
        words = f"it took more than {timeout_s:g} s"
        client.set_flow_run_state(
            run.id, Cancelling(message=words), force=True
        )  # its worker ends the process
        return TargetResult(Outcome.FAILED, words, {})
    return None


def _silent_s() -> float:
    """Return for how long a run that lives sends no heartbeat, in s."""
    frequency_s = get_current_settings().flows.heartbeat_frequency
    return math.inf if frequency_s is None else _MISSED_HEARTBEATS * frequency_s


def _heartbeat_age_s(client: SyncPrefectClient, run: FlowRun) -> float:
    """Return how long ago a run sent its last heartbeat, or started, in s."""
    wanted = {
        "event": {"name": ["prefect.flow-run.heartbeat"]},
        "resource": {"id": [f"prefect.flow-run.{run.id}"]},
        "order": "DESC",
    }
    found = client.request("POST", "/events/filter", json={"filter": wanted, "limit": 1}).json()["events"]
    heard = datetime.fromisoformat(found[0]["received"]) if found else run.start_time
    assert heard is not None  # it runs
    return (datetime.now(UTC) - heard).total_seconds()


def _has_worker(client: SyncPrefectClient, pool: str) -> bool:
    return any(worker.status is WorkerStatus.ONLINE for worker in client.read_workers_for_work_pool(pool))


def _read_artifact(client: SyncPrefectClient, run_id: UUID) -> Entries:
    artifacts = client.read_artifacts(
        artifact_filter=ArtifactFilter(
            flow_run_id=ArtifactFilterFlowRunId(any_=[run_id]),
            type=ArtifactFilterType(any_=[ENTRIES_ARTIFACT]),
        )
    )
    assert isinstance(artifacts[0].data, str)  # Prefect stores the data as JSON
    entries: Entries = json.loads(artifacts[0].data)
    return entries


def _check_current(params: Mapping[str, Any], target: str) -> None:
    """Check that a worker's outputs are current on this machine, so that none of them is made again here."""
    calls, _, _ = plan_target(params, target)
    stale = [
        address
        for address, inputs in calls.items()
        if not is_current(
            prepare_call(address, inputs, params, environment=recorded_facts(output_folder(address)))
        )
    ]
    if stale:
        raise TargetsFailed(
            f"{stale[0]} came from a worker with different code or inputs. Bring the checkouts of all workers to "
            f"one commit (here: {git_commit()}), and run again."
        )


def _names_of_models(params: Mapping[str, Any]) -> list[str]:
    plan = RecordedStages()
    run_models(plan, params)
    names = names_of_stages()
    return [names[address] for address in plan.calls]


def _without_own_reference(
    targets: Sequence[str], reference_of: Mapping[str, str], results: Mapping[str, TargetResult]
) -> dict[str, TargetResult]:
    """Return the outcome of each target that cannot be measured, because its reference is not done."""
    undone = {target: results[reference_of[target]] for target in targets}
    return {
        target: TargetResult(
            result.outcome, f"its speed-ups refer to {reference_of[target]}, which is {result.line}", {}
        )
        for target, result in undone.items()
        if result.outcome is not Outcome.DONE
    }


def _without_reference(params: Mapping[str, Any], results: Mapping[str, TargetResult]) -> str:
    reference = params["select_engine"]["float_reference"]["target"]
    return (
        f"{reference} is {results[reference].line} All losses refer to it "
        "(select_engine.float_reference), so nothing can be selected. The models are kept; run again."
    )
