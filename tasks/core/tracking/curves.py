"""Show the curves of a training in MLflow while it runs, with the load of the machine.

A process of its own follows the table that the training writes (``python -m tasks.core.tracking.curves``, started by
`shown`), so that an MLflow that is slow, hangs or comes back later costs the training nothing. A training that is
resumed continues its run, which is found by the key of the stage call. The run of a finished one has the table, the
plots beside it, and ``key.json``, which names the md5 of every file of the output: from a curve to the bytes in DVC's
cache.
"""

import contextlib
import csv
import dataclasses
import io
import json
import logging
import os
import select
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from tasks.core.config import find_section, read_params
from tasks.core.errors import ArtifactError, EnginewrightError, TrackingRefused, TrackingUnavailable
from tasks.core.fingerprint import digest
from tasks.core.reports import KEY_FILE
from tasks.core.tracking.client import client_of
from tasks.core.tracking.config import TrackingConfig, tracking_config
from tasks.core.tracking.log import data_input, find_or_create_experiment, log_params
from tasks.core.tracking.notes import describe_training
from tasks.core.tracking.records import NOTE_TAG, DataSet, git_commit

if TYPE_CHECKING:
    from mlflow.entities import Run
    from mlflow.tracking import MlflowClient

logger = logging.getLogger(__name__)

DELAY_S = 20.0
"""A training that ends sooner is not shown: the import of MLflow would take a core for a good part of it."""
_POLL_S = 2.0
_RETRY_S = 60.0
_NICENESS = 10
_STEP = "epoch"
_FINISHED, _FAILED, _KILLED = "FINISHED", "FAILED", "KILLED"
"""How a run ends in MLflow."""


@dataclass(frozen=True)
class Training:
    """A stage call whose curves are shown."""

    address: str
    key: str
    config: Mapping[str, Any]
    """Its section of params.yaml."""
    data: str | None
    """The path of its data set."""
    table: str
    """The CSV file that grows by a row per epoch, in the draft."""
    published_table: str
    delay_s: float
    commit: str = ""
    """The commit of the code that trains; `shown` fills it in, since the checkout may change meanwhile."""
    data_digest: str = ""
    """DVC's md5 of the data; `shown` fills it in, too. Empty where there is none."""


@contextlib.contextmanager
def shown(training: Training) -> Iterator[None]:
    """Show the curves of a training that runs inside; nothing waits for MLflow.

    Of the nodes of a training on several, only the first one shows them.
    """
    if not _is_first_node():
        yield
        return
    training = _as_it_starts(training)
    command = [sys.executable, "-m", "tasks.core.tracking.curves", json.dumps(dataclasses.asdict(training))]
    follower = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)
    threading.Thread(target=follower.wait, daemon=True).start()
    ending = _KILLED
    try:
        yield
        ending = _FINISHED
    except Exception:
        ending = _FAILED
        raise
    finally:
        assert follower.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # nothing is logged
            follower.stdin.write(ending.encode())
            follower.stdin.close()


def _is_first_node() -> bool:
    """Return whether this is node 0, by the variables that Lightning reads; importing it would take seconds."""
    return os.environ.get("NODE_RANK", os.environ.get("GROUP_RANK", "0")) == "0"


def _as_it_starts(training: Training) -> Training:
    """Return a training with its commit and the digest of its data, which may be others when MLflow is back.

    The files are not read again: the key of the call took the digest in this process.
    """
    data_digest = ""
    with contextlib.suppress(ArtifactError, OSError):  # the stage says what is wrong with its data
        data_digest = digest(Path(training.data)) if training.data else ""
    return dataclasses.replace(training, commit=git_commit(), data_digest=data_digest)


class _Parent:
    """The process of the training, which says how it ended; one that was killed says nothing."""

    ending: str | None = None

    def wait(self, seconds: float) -> str | None:
        """Wait until the training ended, or so long; return how it ended."""
        if self.ending is None and select.select([sys.stdin], [], [], seconds)[0]:
            self.ending = os.read(sys.stdin.fileno(), 64).decode() or _KILLED
            _release_output()
        return self.ending


def _release_output() -> None:
    """Let go of the output of the stage: who reads it waits until every process has closed it."""
    with Path(os.devnull).open("wb") as nowhere:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
            os.dup2(nowhere.fileno(), stream.fileno())


class _Table:
    """The table of a training, which stays readable when the draft is published."""

    def __init__(self, training: Training) -> None:
        self._training = training
        self._file: IO[str] | None = None

    def rows(self, ending: str | None) -> list[dict[str, str]]:
        """Return the complete rows."""
        text = self.text(ending)
        return list(csv.DictReader(io.StringIO(text[: text.rfind("\n") + 1])))

    def text(self, ending: str | None) -> str:
        """Return the content; nothing before the first epoch is done."""
        if self._file is None:
            paths = [self._training.table, *[self._training.published_table] * (ending == _FINISHED)]
            found = next(filter(os.path.exists, paths), None)
            if found is None:
                return ""
            self._file = Path(found).open(encoding="utf-8")  # noqa: SIM115
        self._file.seek(0)
        return self._file.read()


def follow(training: Training) -> None:
    """Log a training until it ends; where MLflow does not answer, try again every minute.

    Raises ConfigError for a bad section ``track`` of params.yaml.
    """
    params = read_params()  # before waiting: it may be another one later
    config = tracking_config(params)
    parent = _Parent()
    if not config.enabled or parent.wait(training.delay_s):
        return
    data = None
    if training.data and training.data_digest:
        data_name = find_section(params, "track")[1]["data_name"]
        data = DataSet(data_name, training.data_digest, training.data)
    table = _Table(training)
    while True:
        is_last = parent.ending is not None
        try:
            with client_of(config) as client:
                _log(client, config, training, data, table, parent)
                return
        except TrackingUnavailable as error:
            logger.warning("%s: its curves are not in MLflow yet: %s", training.address, error)
            if is_last:
                return
            parent.wait(_RETRY_S)


def _log(
    client: "MlflowClient",
    config: TrackingConfig,
    training: Training,
    data: DataSet | None,
    table: _Table,
    parent: _Parent,
) -> None:
    from mlflow.system_metrics.system_metrics_monitor import SystemMetricsMonitor

    run = _open_run(client, config, training, data)
    run_id = run.info.run_id
    last_step = max((metric.step for metric in _metrics_of_table(run)), default=0)
    load: Any = SystemMetricsMonitor(run_id, resume_logging=True, tracking_uri=config.uri)  # type: ignore[no-untyped-call]
    load.start()
    try:
        while True:
            ending = parent.wait(_POLL_S)
            last_step = _log_rows(client, run_id, table.rows(ending), last_step)
            if ending is not None:
                break
    finally:
        load.finish()
    if ending == _FINISHED:
        _log_output(config, training, run_id, table.text(ending))
    client.set_terminated(run_id, ending)


def _log_output(config: TrackingConfig, training: Training, run_id: str, table: str) -> None:
    """Log the table and the key of a finished training; a store without room for files costs the curve nothing."""
    try:
        with client_of(config) as client:
            client.log_text(run_id, table, Path(training.table).name)
            if record := _read_key_file(training):
                client.log_text(run_id, record, KEY_FILE)
                _log_plots(client, run_id, training, json.loads(record)["files"])
    except (TrackingUnavailable, TrackingRefused) as error:
        logger.warning("%s: its run in MLflow has no %s: %s", training.address, KEY_FILE, error)


def _log_plots(client: "MlflowClient", run_id: str, training: Training, names: Iterable[str]) -> None:
    """Log the PNGs of the output that are beside the table, wherever the draft is by now."""
    with tempfile.TemporaryDirectory() as folder:
        for name in names:
            if Path(name).suffix == ".png" and Path(name).name == name:
                content = _read_output(training, name)
                if content is not None:
                    Path(folder, name).write_bytes(content)
        client.log_artifacts(run_id, folder)


def _read_output(training: Training, name: str) -> bytes | None:
    """Return a file of the output; None if it is gone.

    It is in the draft, or where the draft was renamed to: looking there second, it is not missed.
    """
    for table in (training.table, training.published_table):
        with contextlib.suppress(OSError):
            return Path(table).with_name(name).read_bytes()
    return None


def _read_key_file(training: Training) -> str | None:
    """Return the content of key.json; None if another output has taken its place.

    It is in the draft, or where the draft was renamed to: looking there second, it is not missed.
    """
    for table in (training.table, training.published_table):
        with contextlib.suppress(OSError, ValueError, KeyError):
            text = Path(table).with_name(KEY_FILE).read_text(encoding="utf-8")
            if json.loads(text)["key"] == training.key:
                return text
    return None


def _metrics_of_table(run: "Run") -> list[Any]:
    return [metric for metric in run.data._metric_objs if not metric.key.startswith("system/")]


def _open_run(
    client: "MlflowClient", config: TrackingConfig, training: Training, data: DataSet | None
) -> "Run":
    """Return the run of an interrupted training with this key, or a new one."""
    experiment_id = find_or_create_experiment(client, config)
    same = f"tags.`key` = '{training.key}' and tags.address = '{training.address}'"
    unfinished = f"{same} and attributes.status != '{_FINISHED}'"
    for run in client.search_runs([experiment_id], unfinished, max_results=1):
        client.update_run(run.info.run_id, status="RUNNING")
        return run
    tags = {
        "address": training.address,
        "key": training.key,
        "git_commit": training.commit,
        NOTE_TAG: describe_training(training.address, training.key, training.commit),
    }
    run = client.create_run(experiment_id, run_name=training.address, tags=tags)
    log_params(client, run, training.config)
    if data is not None:
        client.log_inputs(run.info.run_id, [data_input(data, "training")])
    return run


def _log_rows(client: "MlflowClient", run_id: str, rows: list[dict[str, str]], last_step: int) -> int:
    """Log the rows after a step; return the last step."""
    from mlflow.entities import Metric

    now_ms = int(time.time() * 1000)
    metrics = [
        Metric(name, float(value), now_ms, int(row[_STEP]))
        for row in rows
        if int(row[_STEP]) > last_step
        for name, value in row.items()
        if name != _STEP
    ]
    if metrics:
        client.log_batch(run_id, metrics=metrics)
    return max((metric.step for metric in metrics), default=last_step)


def main(arguments: list[str]) -> int:
    """Follow a training, which is given as JSON; return the exit code."""
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(name)s %(message)s", datefmt="%H:%M:%S")
    os.nice(_NICENESS)
    training = Training(**json.loads(arguments[0]))
    try:
        follow(training)
    except EnginewrightError as error:
        logger.warning("%s: its curves are not in MLflow: %s", training.address, error)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
