"""The flow ``optimize``: from a data set to one picked engine per target.

``python -m flows.optimize [hydra override ...]``, for example ``python -m flows.optimize debug=smoke``.
"""

import contextlib
import fcntl
import json
import logging
import os
import subprocess
import sys
import time
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

from flows import local_server
from flows.dvc_command import run_dvc
from flows.flow_record import close_killed_flow_run, record_flow_run, recorded_flow
from flows.params import compose_params, write_params
from flows.pipeline import RecordedStages, run_pipeline
from tasks.core.config import typed_config
from tasks.core.errors import ConfigError, EnginewrightError
from tasks.core.execute import ARTIFACTS, check_writable, explained_full_disk, remove_leftovers
from tasks.core.fingerprint import digest
from tasks.core.tracking import PENDING, database_file, mask_credentials
from tasks.parts.engines.machine import check_gpu
from tasks.parts.engines.target import Target

DVC_CACHE = Path(".dvc/cache")


def optimize(params: dict[str, Any]) -> Path:
    """Run the pipeline as a Prefect flow and return the folder of ``select_engine``."""
    from prefect import flow

    from flows.run_page import publish_progress, publish_result
    from flows.stage_task import TaskStages, task_runner

    @flow(name="optimize", validate_parameters=False, task_runner=task_runner())
    def run() -> Path:
        record_flow_run()
        stages = TaskStages(params, count_calls(params), publish_progress())
        folder = run_pipeline(stages, params)
        publish_result(folder, params, {})
        print(f"stages run: {stages.num_executed} of {stages.num_calls}")
        return folder

    with recorded_flow():
        return run()


def check_folders(params: dict[str, Any]) -> None:
    """Check before the first stage that everything the flow writes can be written.

    Raises DiskError.
    """
    outputs = _outputs(params)
    check_writable(*outputs, *(output.parent for output in outputs))
    check_writable(*(ARTIFACTS / name for name in (".drafts", ".locks")), local_server.HOME)
    check_writable(DVC_CACHE, DVC_CACHE / "files/md5", Path(".dvc/tmp"))
    tracking = params["select_engine"]["tracking"]
    database = database_file(tracking["uri"])
    if tracking["enabled"] and database:
        check_writable(database, database.parent, database.with_name("mlruns"))


def check_gpus(params: dict[str, Any], targets: Collection[str]) -> None:
    """Check before the first stage that this machine has the GPU of these targets.

    Raises TargetMismatch.
    """
    for name in targets:
        section = params["build_engine"][name]
        if section["gpu"] is not None:
            check_gpu(typed_config(Target, section, f"target.{name}"))


def check_models(params: dict[str, Any]) -> None:
    """Check before the first stage that the user's model can be read and fits the images of the data set.

    Raises ConfigError, ArtifactError.
    """
    for name in params["pipeline"]["imports"].values():
        if not Path(name).exists():
            raise ConfigError(f"{name} is missing, expected an ONNX file, or a folder with one (model.path).")
        if (ARTIFACTS / "import_onnx" / "report.json").is_file():
            continue  # was read before; the stage sees what has changed
        from tasks.parts.onnx_graphs.foreign_rewrite import read_image_size

        section, data = params["import_onnx"], params["prepare_data"]
        output = None if section["output"] is None else str(section["output"])
        height, width = read_image_size(
            Path(name), height=section["height"], width=section["width"], output=output
        )
        if (data["height"], data["width"]) != (height, width):
            raise ConfigError(
                f"{name} reads images of {height}x{width}, prepare_data makes them {data['height']}x{data['width']}. "
                f"Set prepare_data.height={height} prepare_data.width={width}."
            )


def send_pending_runs(params: dict[str, Any]) -> None:
    """Log what MLflow did not take from earlier flows; the command says what became of it."""
    if params["select_engine"]["tracking"]["enabled"] and _has_pending_runs():
        subprocess.run([sys.executable, "-m", "tasks.core.tracking"], check=False)


def _has_pending_runs() -> bool:
    return any(PENDING.glob("*/record.json"))


def count_calls(params: dict[str, Any]) -> int:
    """Return how many stage calls the pipeline has."""
    return len(_outputs(params))


def _outputs(params: dict[str, Any]) -> list[Path]:
    plan = RecordedStages()
    run_pipeline(plan, params)
    return [ARTIFACTS.joinpath(*address.split(".")) for address in plan.calls]


def commit_outputs() -> None:
    """Tell DVC about the outputs, so that ``dvc status`` is clean and ``dvc repro`` runs nothing.

    Skipped while dvc.lock and the keys of all outputs are those of the latest commit.

    Raises DvcFailed with DVC's own words; DiskError where the cache has no room.
    """
    stamp = ARTIFACTS / ".committed"
    content = _commit_stamp()
    if stamp.is_file() and stamp.read_text(encoding="utf-8") == content:
        return
    run_dvc("commit", "--force")
    stamp.write_text(_commit_stamp(), encoding="utf-8")


def _commit_stamp() -> str:
    keys = {path.as_posix(): digest(path) for path in sorted(ARTIFACTS.glob("[!.]*/**/key.json"))}
    lock = Path("dvc.lock")
    return json.dumps({"keys": keys, "lock": lock.read_text(encoding="utf-8") if lock.is_file() else None})


@contextlib.contextmanager
def hold_workspace() -> Iterator[None]:
    """Let one flow at a time work in this checkout; a second one waits."""
    path = ARTIFACTS / ".locks" / "flow"
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a+", encoding="utf-8") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            print(
                f"Another flow (process {file.read()}) works in this folder; waiting until it ends.",
                flush=True,
            )
            fcntl.flock(file, fcntl.LOCK_EX)
        file.truncate(0)
        file.write(str(os.getpid()))
        file.flush()
        yield


def print_result(folder: Path) -> None:
    """Print every engine, the pick of each target, and where to look further."""
    from rich.console import Console
    from rich.table import Table

    engines = json.loads((folder / "engines.json").read_text(encoding="utf-8"))
    picks = json.loads((folder / "picks.json").read_text(encoding="utf-8"))
    metric = next((row["metric"] for row in engines if row["metric"]), "score")
    table = Table("target", "variant", metric, "loss %", "p50 ms", "p99 ms", "x ref.", "MB", "verdict")
    for row in sorted(engines, key=lambda row: (row["target"], row["latency_ms_p50"] or float("inf"))):
        picked = picks.get(row["target"], {}).get("variant") == row["variant"]
        loss = row["miou_rel_loss"]
        table.add_row(
            row["target"],
            row["variant"],
            _number(row["top1"] if row["miou"] is None else row["miou"], 4),
            _number(loss * 100 if loss is not None else None, 2),
            _number(row["latency_ms_p50"], 3),
            _number(row["latency_ms_p99"], 3),
            _number(row["speedup_vs_eager"], 1),
            _number(row["size_bytes"] / 1e6 if row["size_bytes"] else None, 2),
            f"{row['verdict']}{'  <- pick' if picked else ''}",
            style="bold green" if picked else None,
        )
    console = Console(width=None if sys.stdout.isatty() else 120)
    console.print(table)
    for target, row in picks.items():
        console.print(
            f"{target}: {row.get('variant') or 'no pick'}. {row.get('reason', '')}", highlight=False
        )
    console.print(f"report: {(folder / 'report.html').resolve()}", highlight=False, soft_wrap=True)


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def run_flow(params: dict[str, Any]) -> Path:
    """Run the flow in this workspace while no other one does, and return the folder of ``select_engine``."""
    with explained_full_disk(ARTIFACTS), hold_workspace():
        local_server.prepare_environment()
        local_server.begin_start()
        write_params(params)
        send_pending_runs(params)
        local_server.wait_until_ready()
        close_killed_flow_run()
        folder = optimize(params)
        with explained_full_disk(DVC_CACHE):
            commit_outputs()
        remove_leftovers()
    return folder


def main(overrides: Sequence[str]) -> int:
    """Run the flow and return the exit code: 0 done, 1 a problem that the user can mend, 130 interrupted."""
    logging.getLogger("tasks").addHandler(
        logging.StreamHandler()
    )  # the root would print Prefect's records too
    started = time.perf_counter()
    try:
        params = compose_params(overrides)
        check_gpus(params, params["build_engine"])
        check_models(params)
        check_folders(params)
        folder = run_flow(params)
        print_result(folder)
    except EnginewrightError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("Interrupted. Finished stages are kept; run again to go on.", file=sys.stderr)
        return 130
    tracking = params["select_engine"]["tracking"]["uri"]
    print(f"MLflow: {mask_credentials(tracking)} (`make ui` opens it on http://127.0.0.1:5000)")
    if _has_pending_runs():
        print("MLflow: runs are pending; the next flow sends them, or `python -m tasks.core.tracking`.")
    url = os.environ["PREFECT_API_URL"].removesuffix("/api")
    print(f"Prefect: {url} (`make stop` ends this local server)")
    print(f"total: {time.perf_counter() - started:.1f} s")
    return 0


if __name__ == "__main__":
    local_server.leave(main(sys.argv[1:]))
