"""Record the running flow on disk, so that the next flow can close its Prefect run if it was killed."""

import contextlib
from collections.abc import Iterator
from uuid import UUID

from flows import local_server
from flows.local_server import ServerUnavailable

_RECORD = local_server.HOME / "flow_run"


@contextlib.contextmanager
def recorded_flow() -> Iterator[None]:
    """Delete the record when the flow ends, unless Prefect could not be reached.

    Raises ServerUnavailable if the server stops answering for about a minute.
    """
    import httpx

    try:
        yield
    except BaseException as error:
        lost = [each for each in (error, error.__cause__) if isinstance(each, httpx.HTTPError)]
        if lost:
            raise ServerUnavailable(
                f"The Prefect server stopped answering and did not come back: {lost[0]}. Finished stages are kept; "
                f"run again to continue. The log of the local server is {local_server.HOME / 'server.log'}."
            ) from error
        _RECORD.unlink(missing_ok=True)
        raise
    _RECORD.unlink(missing_ok=True)


def record_flow_run() -> None:
    """Record the id of the current flow run."""
    from prefect.runtime import flow_run

    _RECORD.parent.mkdir(mode=0o700, exist_ok=True)
    draft = _RECORD.with_suffix(".draft")
    draft.write_text(str(flow_run.id), encoding="utf-8")
    draft.rename(_RECORD)


def close_killed_flow_run() -> None:
    """Mark the killed run of this workspace and its tasks as crashed. The caller has to hold the workspace."""
    if not _RECORD.is_file():
        return
    from prefect.client.orchestration import get_client
    from prefect.client.schemas import filters
    from prefect.client.schemas.objects import StateType
    from prefect.exceptions import ObjectNotFound
    from prefect.states import Crashed

    run_id = UUID(_RECORD.read_text(encoding="utf-8"))
    unfinished = filters.TaskRunFilterStateType(any_=[StateType.PENDING, StateType.RUNNING])
    with get_client(sync_client=True) as client, contextlib.suppress(ObjectNotFound):
        tasks = client.read_task_runs(
            flow_run_filter=filters.FlowRunFilter(id=filters.FlowRunFilterId(any_=[run_id])),
            task_run_filter=filters.TaskRunFilter(state=filters.TaskRunFilterState(type=unfinished)),
        )
        for task in tasks:
            client.set_task_run_state(task.id, Crashed(message="The process was killed."), force=True)
        state = client.read_flow_run(run_id).state
        if state is None or not state.is_final():
            client.set_flow_run_state(run_id, Crashed(message="The process was killed."), force=True)
    _RECORD.unlink()
