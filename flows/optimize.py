"""The flow ``optimize``: from a data set to one picked engine per target.

``python -m flows.optimize [hydra override ...]``, for example ``python -m flows.optimize debug=smoke``.
"""

import importlib
import logging
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from flows import local_server
from flows.environment import write_environment
from flows.flow_record import close_killed_flow_run, record_flow_run, recorded_flow
from flows.params import compose_params, write_params
from flows.pipeline import run_pipeline
from flows.preflight import (
    check_folders,
    check_gpus,
    check_models,
    check_operators,
    count_calls,
    send_pending_runs,
)
from flows.result_table import print_ranking, print_result
from flows.workspace import commit_outputs, hold_workspace
from tasks.core.errors import EnginewrightError
from tasks.core.execute import ARTIFACTS, explained_full_disk, remove_leftovers
from tasks.core.store import cache_folder
from tasks.core.tracking.config import mask_credentials, tracking_config
from tasks.core.tracking.pending import has_pending

_MAX_LOST_SERVERS = 5


def optimize(params: dict[str, Any]) -> Path:
    """Run the pipeline as a Prefect flow and return the folder of ``select_engine``."""
    from prefect import flow
    from prefect.settings import PREFECT_FLOWS_HEARTBEAT_FREQUENCY, temporary_settings

    from flows.run_page import publish_progress, publish_result
    from flows.stage_task import TaskStages, task_runner

    @flow(name="optimize", validate_parameters=False, task_runner=task_runner())
    def run(configuration: dict[str, Any]) -> Path:
        record_flow_run()
        stages = TaskStages(configuration, count_calls(configuration), publish_progress())
        folder = run_pipeline(stages, configuration)
        publish_result(folder, ARTIFACTS / "race_picks", configuration, {})
        print(f"stages run: {stages.num_executed} of {stages.num_calls}")
        return folder

    # A flow waits for the end of its heartbeat, up to a second. On our server nothing listens to it.
    changes = {PREFECT_FLOWS_HEARTBEAT_FREQUENCY: None} if local_server.is_ours() else {}
    with temporary_settings(changes):
        return run(params)


def run_flow(params: dict[str, Any]) -> Path:
    """Run the flow, alone in this workspace, and return the folder of ``select_engine``."""
    with explained_full_disk(ARTIFACTS), hold_workspace():
        local_server.prepare_environment()
        local_server.begin_start()
        with local_server.kept_alive():
            importlib.import_module("prefect")  # takes a second, in which the server starts
            if replaced := write_params(params):
                print(
                    f"params.yaml: other values than before in {', '.join(replaced)}. `dvc repro` runs them, too."
                )
            write_environment(params)
            send_pending_runs(params)
            local_server.wait_until_ready()
            folder = _optimize_despite_lost_servers(params)
        with explained_full_disk(cache_folder()):
            commit_outputs()
        remove_leftovers()
    return folder


def _optimize_despite_lost_servers(params: dict[str, Any]) -> Path:
    """Run the pipeline; if our server was killed where Prefect does not try again, go on in another flow run."""
    num_lost = 0
    while True:
        try:
            with recorded_flow():
                close_killed_flow_run()
                return optimize(params)
        except local_server.ServerUnavailable:
            num_lost += 1
            if num_lost > _MAX_LOST_SERVERS or not local_server.is_ours():
                raise
        local_server.wait_until_ready()


def main(overrides: Sequence[str]) -> int:
    """Run the flow and return the exit code: 0 done, 1 an error that the user can fix, 130 or 143 interrupted."""
    # The root logger would also print Prefect's records.
    logging.getLogger("tasks").addHandler(logging.StreamHandler())
    signal.signal(signal.SIGTERM, _interrupt)
    started = time.perf_counter()
    try:
        params = compose_params(overrides)
        check_gpus(params, params["build_engine"])
        check_operators(params, params["build_engine"])
        check_models(params)
        check_folders(params)
        folder = run_flow(params)
        print_result(folder)
        print_ranking(ARTIFACTS / "race_picks")
    except EnginewrightError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt as interrupt:
        print(
            "Interrupted. Finished stages and the checkpoints of a training are kept in artifacts/. Run the same "
            "command again to continue.",
            file=sys.stderr,
        )
        return 128 + (interrupt.args[0] if interrupt.args else signal.SIGINT)
    print(f"MLflow: {_how_to_open(tracking_config(params).uri)}")
    if has_pending():
        print("MLflow: runs are pending; the next flow sends them, or `python -m tasks.core.tracking`.")
    print(f"Prefect: {local_server.how_to_open()}")
    print(f"total: {time.perf_counter() - started:.1f} s")
    return 0


def _how_to_open(uri: str) -> str:
    """Return the address of MLflow, and how to see it if it is the file that ``make ui`` opens."""
    hint = " (`make ui` opens it on http://127.0.0.1:5000)" if uri == "sqlite:///mlflow.db" else ""
    return f"{mask_credentials(uri)}{hint}"


def _interrupt(number: int, _frame: FrameType | None) -> NoReturn:
    """Let SIGTERM end the flow as Ctrl-C does."""
    raise KeyboardInterrupt(number)


if __name__ == "__main__":
    local_server.leave(main(sys.argv[1:]))
