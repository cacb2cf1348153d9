"""Run a stage unless its output is fresh. The stage writes into a draft, which is published as a whole.

An address names one stage call everywhere: ``build_engine.pruned_qat.cpu_openvino`` is the function
``tasks.build_engine.build_engine``, its section of params.yaml, and the folder
``artifacts/build_engine/pruned_qat/cpu_openvino``.
"""

import contextlib
import dataclasses
import errno
import functools
import importlib
import itertools
import logging
import os
import re
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tasks.core.config import find_section, typed_config
from tasks.core.environment import Facts
from tasks.core.errors import ArtifactError, ConfigError, DiskError, WorkspaceBusy
from tasks.core.fingerprint import (
    SCHEMA_VERSION,
    code_digests,
    digest,
    file_md5,
    is_pattern,
    matches,
    stage_key,
)
from tasks.core.locks import hold_lock, try_lock
from tasks.core.reports import KEY_FILE, REPORT_FILE, read_report, write_json
from tasks.core.store import forget_damaged, keep, read_record, restore, write_record

logger = logging.getLogger(__name__)

ARTIFACTS = Path("artifacts")
RESUME_FOLDER = "resume"
"""The folder inside ``out`` that survives a kill, so that a stage can resume from it. It is not published."""

_ADDRESS = re.compile(r"[a-z0-9_]+(\.[a-z0-9_]+)*")
_REPLACED = "replaced"
MEASURING_LOCK = "ENGINEWRIGHT_MEASURING_LOCK"
"""Environment variable with the file whose lock a measurement holds; containers of one machine share it in a volume.
Without it, it is a file of this user in the folder for temporary files."""
LEFTOVER_AGE_S = 24 * 3600.0
"""How long the leftovers of a killed run are kept, so that a stage can resume from them."""
_DISK_IS_FULL = re.compile(r"no space left on device|quota exceeded|disk is full", re.IGNORECASE)


@dataclass(frozen=True)
class Call:
    """One stage call, with everything that its key covers."""

    address: str
    function: Callable[..., Any]
    config: Any
    inputs: Mapping[str, Path]
    environment: Facts
    key: str

    @property
    def folder(self) -> Path:
        """Where the output is published, relative to the workspace."""
        return output_folder(self.address)

    @property
    def draft(self) -> Path:
        """Where the stage writes before its output is published."""
        return ARTIFACTS / ".drafts" / f"{self.address}-{self.key[:12]}"


def output_folder(address: str) -> Path:
    """Return where the output of a stage call is published, relative to the workspace."""
    return ARTIFACTS.joinpath(*address.split("."))


def load_stage(address: str) -> tuple[Callable[..., Any], type[Any]]:
    """Return the function and the ``Config`` class of an address.

    Raises ConfigError when there is no such stage.
    """
    if not _ADDRESS.fullmatch(address):
        raise ConfigError(f"{address!r} is not an address. Expected lower-case words joined by dots.")
    stage = address.split(".")[0]
    try:
        module = importlib.import_module(f"tasks.{stage}")
        return getattr(module, stage), module.Config
    except (ModuleNotFoundError, AttributeError) as error:
        if isinstance(error, ModuleNotFoundError) and error.name != f"tasks.{stage}":
            raise
        raise ConfigError(
            f"{address}: there is no stage tasks/{stage}.py with a function {stage}."
        ) from error


def resolve(address: str, params: Mapping[str, Any]) -> tuple[Callable[..., Any], Any]:
    """Return the function of an address and its typed configuration.

    Raises ConfigError when there is no such stage, or for a bad section.
    """
    function, config_class = load_stage(address)
    name, section = find_section(params, address)
    return function, typed_config(config_class, section, name)


def prepare_call(
    address: str,
    inputs: Mapping[str, Path],
    params: Mapping[str, Any],
    *,
    environment: Facts | None = None,
) -> Call:
    """Resolve an address into a call: typed configuration, checked inputs, key.

    `environment` is given for an output of another machine; otherwise the surroundings are those of this one.

    Raises ConfigError for a bad section, ArtifactError for a missing or damaged input.
    """
    function, config = resolve(address, params)
    if environment is None:
        environment = find_facts(function, config, output_folder(address)) or {}
    key = _find_key(function, config, inputs, environment)
    return Call(address, function, config, dict(inputs), environment, key)


def find_facts(stage: Callable[..., Any], config: Any, folder: Path) -> Facts | None:
    """Return the facts of this machine's surroundings that shape the output of a stage; None if it declares none.

    On a machine that is not the declared one, they are those under which the output in `folder` was made.
    """
    declared = getattr(importlib.import_module(stage.__module__), "environment", None)
    if declared is None:
        return None
    facts: Facts | None = declared(config)
    return recorded_facts(folder) if facts is None else facts


def recorded_facts(folder: Path) -> Facts:
    """Return the facts under which an output was made; none if there is no output."""
    record = read_record(folder / KEY_FILE)
    facts: Facts = record["environment"] if record else {}
    return facts


def is_fresh(call: Call) -> bool:
    """Return whether running the call would give nothing new: its output is current and still holds.

    A stage whose result can depend on the machine decides that by a function ``still_holds(cfg, report)`` in its
    module, as `build_engine` does for failed and skipped builds.
    """
    return is_current(call) and _still_holds(call.function, call.config, call.folder)


def is_current(call: Call) -> bool:
    """Return whether the published output was made by this very call and is still intact.

    Every published file is compared with its recorded md5, since neither DVC nor Prefect checks its cache.
    """
    record = read_record(call.folder / KEY_FILE)
    if record is None or record["key"] != call.key:
        return False
    damaged = _damaged_files(call.folder, record["files"])
    if damaged:
        logger.warning("%s: %s was changed or deleted after it was made", call.address, damaged[0])
    return not damaged


def execute(call: Call) -> Path:
    """Run a call unless its output was made before, and return the output folder.

    The stage writes into a draft folder; report and key are added and the draft is renamed into place, so that a
    killed run leaves the previous output intact. Only one process at a time works on an address.

    Raises WorkspaceBusy when another process is making the same output with another key, DiskError when the
    output cannot be written, ArtifactError when an input changed meanwhile: nothing is published then.
    """
    with _alone(call):
        if _recall(call):
            return call.folder
        started = time.perf_counter()
        logger.info("%s: started", call.address)
        try:
            with _only_measurement(call), explained_full_disk(call.draft), _shown_curves(call):
                report = call.function(call.config, **call.inputs, out=call.draft)
                _check_unchanged(call)
                _finish_draft(call, report)
        except BaseException:
            _keep_only_resume(call.draft)
            raise
        _publish(call)
        logger.info("%s: finished in %.2f s", call.address, time.perf_counter() - started)
    return call.folder


def recall(call: Call) -> bool:
    """Publish what the store or a killed run has of a call, unless it is fresh; return whether there was an output.

    Variants with the same model file have the same key, so they share one engine, which is measured once.

    Raises the errors of ``execute``.
    """
    with _alone(call):
        return _recall(call)


def keep_outputs() -> None:
    """Put every output into the store, whose copy of a file or of the record may be missing or damaged.

    DVC deletes an output before it runs the stage that makes it anew.
    """
    for folder in _outputs():
        record = read_record(folder / KEY_FILE)
        if record is not None:
            keep(folder, record)


def remove_damaged() -> list[Path]:
    """Remove and return the outputs that were changed after they were made; those of another version stay.

    DVC takes a damaged output for good if it was damaged before DVC first hashed it.
    """
    removed = []
    for folder in _outputs():
        address = ".".join(folder.relative_to(ARTIFACTS).parts)
        with try_lock(ARTIFACTS / ".locks" / address, str(os.getpid())) as is_held:
            if is_held and _is_damaged(folder):
                logger.warning("removing %s, which was changed after it was made", folder)
                _discard(folder)
                removed.append(folder)
    return removed


def remove_obsolete(address: str, params: Mapping[str, Any]) -> None:
    """Remove an output that no longer holds, such as a failed build: DVC asks no stage, but makes what is missing.

    An output whose report another version of the code wrote stays: DVC makes it anew for the code's sake.
    """
    function, config = resolve(address, params)
    folder = output_folder(address)
    with (
        try_lock(ARTIFACTS / ".locks" / address, str(os.getpid())) as is_held,
        contextlib.suppress(ArtifactError),
    ):
        if is_held and folder.is_dir() and not _still_holds(function, config, folder):
            logger.warning("removing %s, which no longer holds, so that it is made again", folder)
            forget_damaged(folder)
            _discard(folder)


def execute_as_follower(call: Call) -> None:
    """Run only the stage function, into the draft of the process that launched this one.

    Training on several devices starts this command once per device; the process that starts them holds the lock
    and publishes.
    """
    call.function(call.config, **call.inputs, out=call.draft)


def check_writable(*paths: Path) -> None:
    """Check that these files and folders can be written, or created if they do not exist yet.

    Raises DiskError for the first one that cannot.
    """
    for path in paths:
        place = _nearest_existing(path)
        if not os.access(place, os.W_OK):
            raise DiskError(
                f"{path} cannot be written: {place.resolve()} is read-only or belongs to another user. Mount "
                "it writable or fix its permissions, then run again."
            )


@contextlib.contextmanager
def explained_full_disk(folder: Path) -> Iterator[None]:
    """Explain a full disk: how much the folder holds and how much space is free.

    Raises DiskError in place of the error that the full disk caused.
    """
    try:
        yield
    except BaseException as error:
        if isinstance(error, DiskError) or not is_full_disk(error):
            raise
        free_bytes = shutil.disk_usage(_nearest_existing(folder)).free
        raise DiskError(
            f"{folder}: the disk or its quota is full. The folder holds {_size_bytes(folder):,} bytes and needs "
            f"more; {free_bytes:,} bytes are free. Free some space and run again: finished stages and the "
            "previous output are kept."
        ) from error


def remove_leftovers() -> None:
    """Remove drafts that killed runs left at least a day ago, unless a process is working on their address."""
    for leftover in sorted((ARTIFACTS / ".drafts").glob("*-*/")):
        address, _, suffix = leftover.name.rpartition("-")
        with try_lock(ARTIFACTS / ".locks" / address, str(os.getpid())) as is_held:
            if is_held and (suffix == _REPLACED or _age_s(leftover) > LEFTOVER_AGE_S):
                logger.warning("removing %s, left by a killed run", leftover)
                _discard(leftover)


def _find_key(
    function: Callable[..., Any], config: Any, inputs: Mapping[str, Path], environment: Facts
) -> str:
    """Check the inputs and return the key."""
    for path in inputs.values():
        if not is_pattern(path):
            _check_input(path)
    read = _read_paths(function, config, inputs)
    for path in itertools.chain.from_iterable(read.values()):
        _check_input(path)
    return stage_key(function.__name__, dataclasses.asdict(config), {**inputs, **read}, environment)


def _read_paths(
    function: Callable[..., Any], config: Any, inputs: Mapping[str, Path]
) -> dict[str, list[Path]]:
    """Return what the inputs stand for that are patterns.

    If outputs of another configuration may be among the matches, the stage says which of them it reads by a function
    ``reads(cfg, **inputs)`` in its module, which returns the paths by the name of the input.
    """
    reads = getattr(importlib.import_module(function.__module__), "reads", None)
    if reads is not None:
        return dict(reads(config, **inputs))
    return {name: matches(path) for name, path in inputs.items() if is_pattern(path)}


def _check_input(path: Path) -> None:
    """Compare an input that a stage published with the digest in its record."""
    if not path.exists():
        if ARTIFACTS in path.parents:
            raise ArtifactError(f"{path} does not exist. Run the stage that makes it first, or `dvc repro`.")
        pointer = path.with_name(f"{path.name}.dvc")
        if pointer.is_file():
            raise ArtifactError(
                f"{path} does not exist, but {pointer} names it. Fetch it: `dvc pull {pointer}`."
            )
        raise ArtifactError(
            f"{path} does not exist. Put your data there, or name another folder (prepare_data.root)."
        )
    for folder in (path, *path.parents):
        record = read_record(folder / KEY_FILE)
        if record is not None:
            inside = path.relative_to(folder).as_posix()
            used = {
                name: md5
                for name, md5 in record["files"].items()
                if inside in (".", name) or name.startswith(f"{inside}/")
            }
            damaged = _damaged_files(folder, used)
            if damaged:
                raise ArtifactError(
                    f"{folder / damaged[0]} is not the file that its stage wrote (its md5 differs, or it is "
                    f"missing). Remove {folder} and run the pipeline again."
                )
            return


def _check_unchanged(call: Call) -> None:
    """Check that the stage read the inputs and imported the code that its key names: neither can be locked."""
    if not call.inputs:
        return
    code_digests.cache_clear()
    if _find_key(call.function, call.config, call.inputs, call.environment) != call.key:
        inputs = ", ".join(map(str, call.inputs.values()))
        raise ArtifactError(
            f"{call.address}: an input ({inputs}) or the code of the stage changed while it ran. Its output is not "
            "kept, but the checkpoints of a training are: run again, with the input or code as it was to resume."
        )


def _damaged_files(folder: Path, files: Mapping[str, str]) -> list[str]:
    return [name for name, md5 in files.items() if file_md5(f"{folder}/{name}") != md5]


def _still_holds(function: Callable[..., Any], config: Any, folder: Path) -> bool:
    module = importlib.import_module(function.__module__)
    still_holds = getattr(module, "still_holds", None)
    return still_holds is None or bool(still_holds(config, read_report(module.Report, folder)))


@contextlib.contextmanager
def _alone(call: Call) -> Iterator[None]:
    """Let this process alone work on the address of a call."""
    check_writable(call.folder, call.folder.parent, call.draft.parent)
    with explained_full_disk(call.folder), _lock(call):
        yield


def _recall(call: Call) -> bool:
    holds = functools.partial(_still_holds, call.function, call.config)
    if is_current(call):  # the store has nothing else
        if holds(call.folder):
            logger.info("%s: fresh, nothing to run", call.address)
            return True
    elif _is_complete(call) and holds(call.draft):
        _publish(call)
        return True
    else:
        _clear_drafts(call)
        if restore(call.key, call.draft, call.address, call.folder) and holds(call.draft):
            shutil.rmtree(call.draft / RESUME_FOLDER, ignore_errors=True)
            _publish(call)
            logger.info("%s: made before, restored from the store", call.address)
            return True
    _clear_drafts(call)
    return False


def _is_complete(call: Call) -> bool:
    """Return whether the draft is finished: a kill before its rename leaves such a draft."""
    record = read_record(call.draft / KEY_FILE)
    return (
        record is not None and record["key"] == call.key and not _damaged_files(call.draft, record["files"])
    )


def _outputs() -> list[Path]:
    return [file.parent for file in sorted(ARTIFACTS.glob(f"[!.]*/**/{KEY_FILE}"))]


def _is_damaged(folder: Path) -> bool:
    """Return whether an output is not what its record says; without a readable one it may be of another version."""
    record = read_record(folder / KEY_FILE)
    return record is not None and bool(_damaged_files(folder, record["files"]))


def _clear_drafts(call: Call) -> None:
    """Remove what killed runs left for this address, but keep what this very call can resume from."""
    for leftover in call.draft.parent.glob(f"{call.address}-*"):
        if leftover != call.draft:
            _discard(leftover)
    _keep_only_resume(call.draft)
    call.draft.mkdir(parents=True, exist_ok=True)


def _keep_only_resume(draft: Path) -> None:
    if not draft.is_dir():
        return
    for path in draft.iterdir():
        if path.is_dir() and path.name != RESUME_FOLDER:
            shutil.rmtree(path)
        elif path.is_file():
            path.unlink()
    with contextlib.suppress(OSError):  # not empty: there is something to resume from
        draft.rmdir()


def _finish_draft(call: Call, report: Any) -> None:
    shutil.rmtree(call.draft / RESUME_FOLDER, ignore_errors=True)
    write_json(call.draft / REPORT_FILE, dataclasses.asdict(report))
    names = sorted(
        path.relative_to(call.draft).as_posix() for path in call.draft.rglob("*") if path.is_file()
    )
    for name in names:
        _sync(call.draft / name)
    record = {
        "schema": SCHEMA_VERSION,
        "address": call.address,
        "key": call.key,
        "environment": dict(call.environment),
        "files": {name: digest(call.draft / name) for name in names},
    }
    write_record(call.draft / KEY_FILE, record)
    _sync(call.draft / KEY_FILE)


def _publish(call: Call) -> None:
    """Replace the previous output with a finished draft.

    A kill between the two renames leaves a complete draft, which the next run publishes without running the stage.
    """
    record = read_record(call.draft / KEY_FILE)
    assert record is not None
    call.folder.parent.mkdir(parents=True, exist_ok=True)
    replaced = call.draft.with_name(f"{call.address}-{_REPLACED}")
    _discard(replaced)
    if call.folder.exists():
        call.folder.rename(replaced)
    call.draft.rename(call.folder)
    keep(call.folder, record)
    _discard(replaced)


def _discard(folder: Path) -> None:
    """Remove an output, or what a killed run left. What is finished is stored first; DVC forgets what is damaged."""
    record = read_record(folder / KEY_FILE)
    if record is not None:
        keep(folder, record)
    if _is_damaged(folder):
        forget_damaged(folder)
    shutil.rmtree(folder, ignore_errors=True)


def is_full_disk(error: BaseException | None) -> bool:
    """Return whether an error or one of its causes is a full disk.

    safetensors, Lightning, SQLite and DVC report it only in their messages.
    """
    while error is not None:
        if getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT) or _DISK_IS_FULL.search(str(error)):
            return True
        error = error.__cause__ or error.__context__
    return False


def _nearest_existing(path: Path) -> Path:
    return next(place for place in (path, *path.parents) if os.access(place, os.F_OK))


def _size_bytes(folder: Path) -> int:
    size_bytes = 0
    for path in folder.rglob("*"):
        with contextlib.suppress(FileNotFoundError):  # other processes work in it
            size_bytes += path.lstat().st_size
    return size_bytes


def _age_s(folder: Path) -> float:
    """Return the time since the last write in a folder."""
    return time.time() - max(path.lstat().st_mtime for path in (folder, *folder.rglob("*")))


def _only_measurement(call: Call) -> contextlib.AbstractContextManager[None]:
    """Wait while something is measured on this machine, in another checkout or container, if the call measures.

    A stage says that by a function ``measures(cfg)`` in its module.
    """
    measures = getattr(importlib.import_module(call.function.__module__), "measures", None)
    if measures is None or not measures(call.config):
        return contextlib.nullcontext()
    file = os.environ.get(MEASURING_LOCK) or Path(
        tempfile.gettempdir(), f"enginewright-measuring-{os.getuid()}"
    )

    def explain(holder: str) -> None:
        logger.info("%s: waiting until %s was measured on this machine", call.address, holder)

    return hold_lock(Path(file), call.address, before_waiting=explain)


def _shown_curves(call: Call) -> contextlib.AbstractContextManager[None]:
    """Show a training in MLflow while it runs. A stage that trains names its table of epochs: ``CURVES``."""
    table = getattr(importlib.import_module(call.function.__module__), "CURVES", None)
    if table is None:
        return contextlib.nullcontext()
    from tasks.core.tracking import curves  # late, so that a small stage starts faster

    data = call.inputs.get("data")
    training = curves.Training(
        call.address,
        call.key,
        dataclasses.asdict(call.config),
        None if data is None else data.as_posix(),
        table=str(call.draft / table),
        published_table=str(call.folder / table),
        delay_s=curves.DELAY_S,
    )
    return curves.shown(training)


def _lock(call: Call) -> contextlib.AbstractContextManager[None]:
    """Lock the address; wait for a process that makes the same output, refuse to wait for one that makes another."""

    def compare_keys(note: str) -> None:
        holder, _, key = note.partition(" ")
        if key and key != call.key:
            raise WorkspaceBusy(
                f"{call.address} is being made by process {holder} from another configuration. Wait "
                "until it ends, or stop it, then run again."
            ) from None
        work = "is making the same output" if key else "removes leftovers"
        logger.info("%s: waiting for process %s, which %s", call.address, holder, work)

    file = ARTIFACTS / ".locks" / call.address
    return hold_lock(file, f"{os.getpid()} {call.key}", before_waiting=compare_keys)


def _sync(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())
