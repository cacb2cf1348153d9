"""The single door: fresh outputs, drafts, locks, kills. All with real stages in real processes."""

import contextlib
import csv
import dataclasses
import errno
import importlib
import json
import logging
import os
import random
import re
import shutil
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml

from flows.params import compose_params
from tasks import build_engine
from tasks.core import fingerprint
from tasks.core.config import find_section, typed_config
from tasks.core.errors import ArtifactError, ConfigError, DiskError
from tasks.core.execute import (
    MEASURING_LOCK,
    Call,
    execute,
    is_fresh,
    load_stage,
    prepare_call,
    remove_leftovers,
)
from tasks.core.fingerprint import SCHEMA_VERSION, digest
from tasks.core.store import write_record
from tasks.core.tracking import curves
from tasks.core.tracking.client import client_of
from tasks.core.tracking.config import TrackingConfig
from tests.conftest import REPOSITORY, Workspace

TINY_SCENES = {"num_train": 24, "num_val": 8, "num_test": 8, "num_calibration": 8}
PREPARE = ("python", "-m", "tasks", "prepare_data", "root=data/digit_scenes")
TRAIN = ("python", "-m", "tasks", "train.baseline", "data=artifacts/prepare_data/dataset")
WEIGHTS = Path("artifacts/train/baseline/model.safetensors")
MountDisk = Callable[[Path, str], None]


@pytest.fixture
def tiny(workspace: Workspace) -> Workspace:
    """A workspace whose params.yaml asks for a tiny data set and a tiny training."""
    change_params(workspace, **{f"prepare_data.scenes.{name}": count for name, count in TINY_SCENES.items()})
    change_params(workspace, **{"train.baseline.network.width": 0.25, "train.baseline.trainer.batch_size": 8})
    return workspace


def change_params(space: Workspace, **values: object) -> None:
    path = space.path / "params.yaml"
    params = yaml.safe_load(path.read_text())
    for name, value in values.items():
        *sections, key = name.split(".")
        section = params
        for part in sections:
            section = section[part]
        section[key] = value
    path.write_text(yaml.safe_dump(params))


@pytest.mark.slow
def test_fresh_output_is_not_made_again(tiny: Workspace) -> None:
    first = tiny.run(*PREPARE)
    assert first.returncode == 0, first.stderr
    made = (tiny.path / "artifacts/prepare_data/report.json").stat().st_mtime_ns
    assert "fresh, nothing to run" in tiny.run(*PREPARE).stderr
    assert (tiny.path / "artifacts/prepare_data/report.json").stat().st_mtime_ns == made


@pytest.mark.slow
def test_output_follows_configuration_forth_and_back(tiny: Workspace) -> None:
    tiny.run(*PREPARE)
    before = digest(tiny.path / "artifacts/prepare_data/dataset")
    change_params(tiny, **{"prepare_data.seed": 1})
    tiny.run(*PREPARE)
    assert digest(tiny.path / "artifacts/prepare_data/dataset") != before
    change_params(tiny, **{"prepare_data.seed": 0})
    tiny.run(*PREPARE)
    assert digest(tiny.path / "artifacts/prepare_data/dataset") == before


@pytest.mark.slow
def test_changed_output_is_noticed_and_made_again(tiny: Workspace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tiny.path)
    params = yaml.safe_load((tiny.path / "params.yaml").read_text())
    call = prepare_call("prepare_data", {"root": Path("data/digit_scenes")}, params)
    folder = execute(call)
    assert is_fresh(call)
    masks = folder / "dataset" / "val_masks.npy"
    content = bytearray(masks.read_bytes())
    content[-1] ^= 1
    masks.write_bytes(bytes(content))
    assert not is_fresh(call)
    with pytest.raises(ArtifactError, match=r"val_masks\.npy is not the file that its stage wrote"):
        prepare_call("train.baseline", {"data": folder / "dataset"}, params)
    execute(call)
    assert is_fresh(call)


@dataclass(frozen=True)
class Copied:
    num_bytes: int


@pytest.mark.parametrize("place", ["data/raw/image", "artifacts/prepare_data/dataset/image"])
def test_input_that_changes_while_it_is_read_gives_no_output(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    monkeypatch.chdir(tmp_path)
    params = compose_params([])
    image = Path(place)
    image.parent.mkdir(parents=True)
    image.write_bytes(b"image")
    if place.startswith("artifacts"):
        record = {"schema": SCHEMA_VERSION, "address": "prepare_data", "key": "0" * 32, "environment": {}}
        record["files"] = {"dataset/image": digest(image)}
        write_record(Path("artifacts/prepare_data/key.json"), record)
    contents = [b"imagf", b"image"]

    def train(_: object, *, root: Path, out: Path) -> Copied:
        (root / "image").write_bytes(contents.pop(0))  # a bit flips before the stage reads it
        return Copied((out / "copy").write_bytes((root / "image").read_bytes()))

    call = dataclasses.replace(
        prepare_call("train.baseline", {"root": image.parent}, params, environment={}), function=train
    )
    with pytest.raises(ArtifactError, match=r"image is not the file|an input .* changed while it ran"):
        execute(call)
    assert not call.folder.exists() and not is_fresh(call)
    assert (execute(call) / "copy").read_bytes() == b"image"


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A copy of the stages, whose code the keys cover."""
    shutil.copytree(REPOSITORY / "tasks", tmp_path / "tasks", ignore=shutil.ignore_patterns("__*"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(fingerprint, "SOURCE_ROOT", tmp_path)
    fingerprint.code_digests.cache_clear()
    yield tmp_path
    fingerprint.code_digests.cache_clear()


def test_code_that_changes_while_its_stage_runs_gives_no_output(checkout: Path) -> None:
    """Modules are imported when they are needed, so the key that was found first may name others."""
    image = checkout / "image"
    image.touch()

    def train(_: object, *, root: Path, out: Path) -> Copied:
        with (checkout / "tasks/train.py").open("a") as file:
            file.write("# edited")
        return Copied((out / "copy").write_bytes(root.read_bytes()))

    call = dataclasses.replace(
        prepare_call("train.baseline", {"root": image}, compose_params([]), environment={}), function=train
    )
    with pytest.raises(ArtifactError, match="or the code of the stage changed while it ran"):
        execute(call)
    assert not call.folder.exists()


def test_engines_that_another_configuration_left_do_not_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    params = compose_params([])
    variants = params["benchmark"]["cpu_torch"]["variants"]
    files = [
        tmp_path / f"artifacts/build_engine/{name}/cpu_torch/engine/file" for name in (*variants, "left")
    ]
    inputs = {"builds": Path("artifacts/build_engine/*/cpu_torch/engine"), "reference": files[0].parent}

    def key() -> str:
        return prepare_call("benchmark.cpu_torch", inputs, params, environment={}).key

    for file in files[:-1]:
        file.parent.mkdir(parents=True)
        file.write_text("engine")
    before = key()
    files[-1].parent.mkdir(parents=True)
    files[-1].write_text("engine")
    assert key() == before
    files[1].write_text("another engine")
    assert key() != before
    shutil.rmtree(files[1].parent)
    with pytest.raises(ArtifactError, match=f"{variants[1]}/cpu_torch/engine does not exist. Run the stage"):
        key()


def test_input_folder_that_another_stage_published_is_compared_with_its_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    folder = Path("artifacts/validate/baseline/cpu_torch")
    folder.mkdir(parents=True)
    (folder / "report.json").write_text("{}")
    record = {"schema": SCHEMA_VERSION, "address": "validate", "key": "0" * 32, "environment": {}}
    write_record(folder / "key.json", {**record, "files": {"report.json": digest(folder / "report.json")}})
    call = prepare_call("train.baseline", {"data": folder}, compose_params([]), environment={})
    (folder / "report.json").write_text("[]")
    with pytest.raises(ArtifactError, match=r"report\.json is not the file that its stage wrote"):
        prepare_call("train.baseline", {"data": folder}, compose_params([]), environment={})
    assert call.key


def test_missing_input_names_the_way_out(tiny: Workspace) -> None:
    failed = tiny.run(*TRAIN)
    assert failed.returncode == 1
    assert "Run the stage that makes it first" in failed.stderr and "Traceback" not in failed.stderr
    failed = tiny.run("python", "-m", "tasks", "prepare_data", "root=data/cells")
    assert failed.returncode == 1 and "Traceback" not in failed.stderr
    assert "data/cells does not exist" in failed.stderr and "prepare_data.root" in failed.stderr


@pytest.mark.slow
def test_training_killed_twice_ends_with_the_same_bytes_as_an_undisturbed_one(tiny: Workspace) -> None:
    change_params(tiny, **{"train.baseline.trainer.max_epochs": 6})
    tiny.run(*PREPARE)
    assert tiny.run(*TRAIN).returncode == 0
    undisturbed = digest(tiny.path / WEIGHTS)
    history = computed_columns(tiny)
    forget_training(tiny)
    for num_checkpoints in (1, 2):
        kill_after_checkpoints(tiny, num_checkpoints)
        assert not (tiny.path / WEIGHTS).exists()
    resumed = tiny.run(*TRAIN)
    assert resumed.returncode == 0, resumed.stderr
    assert "resuming after epoch" in resumed.stderr
    assert digest(tiny.path / WEIGHTS) == undisturbed
    assert computed_columns(tiny) == history
    assert not list((tiny.path / "artifacts/.drafts").iterdir())


def computed_columns(space: Workspace) -> list[tuple[str, ...]]:
    """Return the epochs of a training without what is measured: speed, waits and memory."""
    with (space.path / WEIGHTS.with_name("history.csv")).open() as file:
        rows = [
            (row["epoch"], row["loss"], row["val_miou"], row["learning_rate"]) for row in csv.DictReader(file)
        ]
    assert rows
    return rows


@pytest.mark.slow
def test_training_has_a_run_in_mlflow_with_the_key_of_its_output(
    tiny: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tiny.path)
    monkeypatch.setattr(curves, "DELAY_S", 0.0)
    params = yaml.safe_load((tiny.path / "params.yaml").read_text())
    execute(prepare_call("prepare_data", {"root": Path("data/digit_scenes")}, params))
    data = Path("artifacts/prepare_data/dataset")
    call = prepare_call("train.baseline", {"data": data}, params)
    folder = execute(call)
    with (folder / "history.csv").open() as file:
        epochs = [(int(row["epoch"]), float(row["loss"])) for row in csv.DictReader(file)]
    config = TrackingConfig(True, "sqlite:///mlflow.db", "enginewright")
    deadline = time.monotonic() + 120
    while not (run := find_run(config)) or run.info.status != "FINISHED":
        assert time.monotonic() < deadline
        time.sleep(0.5)
    with client_of(config) as client:
        history = client.get_metric_history(run.info.run_id, "loss")
    assert sorted((point.step, point.value) for point in history) == epochs
    assert run.data.tags["key"] == json.loads((folder / "key.json").read_text())["key"] == call.key
    assert run.data.params["trainer.seed"] == "0"
    assert run.inputs.dataset_inputs[0].dataset.digest == digest(data)


def find_run(config: TrackingConfig):
    with client_of(config) as client:
        experiment = client.get_experiment_by_name(config.experiment)
        runs = [] if experiment is None else client.search_runs([experiment.experiment_id])
    return runs[0] if runs else None


def forget_training(space: Workspace) -> None:
    forgotten = space.run("python", "-m", "flows.forget", "train.baseline")
    assert forgotten.stdout == "forgotten: train.baseline\n", forgotten.stderr


def kill_after_checkpoints(space: Workspace, num_checkpoints: int) -> None:
    """Start the training and SIGKILL it once it has written so many checkpoints."""
    process = space.start(*TRAIN)
    seen: set[int] = set()
    deadline = time.monotonic() + 240
    while len(seen) < num_checkpoints and process.poll() is None and time.monotonic() < deadline:
        for path in (space.path / "artifacts/.drafts").glob("train.baseline-*/resume/last.ckpt"):
            seen.add(path.stat().st_mtime_ns)
        time.sleep(0.005)
    process.kill()
    output = process.communicate()[0]
    assert process.returncode == -signal.SIGKILL, output


@pytest.mark.slow
def test_torn_checkpoint_is_ignored_and_named(tiny: Workspace) -> None:
    change_params(tiny, **{"train.baseline.trainer.max_epochs": 4})
    tiny.run(*PREPARE)
    kill_after_checkpoints(tiny, 1)
    [checkpoint] = (tiny.path / "artifacts/.drafts").glob("train.baseline-*/resume/last.ckpt")
    checkpoint.write_bytes(checkpoint.read_bytes()[:1000])
    resumed = tiny.run(*TRAIN)
    assert resumed.returncode == 0, resumed.stderr
    assert "last.ckpt, which is not a complete checkpoint" in resumed.stderr


@pytest.mark.slow
def test_stage_killed_at_random_moments_leaves_whole_output_or_none(tiny: Workspace) -> None:
    generator = random.Random(0)
    for _ in range(4):
        process = tiny.start(*PREPARE)
        time.sleep(generator.uniform(0.1, 1.5))
        process.kill()
        process.communicate()
        folder = tiny.path / "artifacts/prepare_data"
        if folder.exists():
            record = json.loads((folder / "key.json").read_text())
            assert all(digest(folder / name) == md5 for name, md5 in record["files"].items())
    assert tiny.run(*PREPARE).returncode == 0
    assert not list((tiny.path / "artifacts/.drafts").iterdir())


@pytest.mark.slow
def test_finished_draft_of_a_killed_run_is_published_without_running(tiny: Workspace) -> None:
    assert tiny.run(*PREPARE).returncode == 0
    folder = tiny.path / "artifacts/prepare_data"
    key = json.loads((folder / "key.json").read_text())["key"]
    drafts = tiny.path / "artifacts/.drafts"
    folder.rename(drafts / f"prepare_data-{key[:12]}")
    again = tiny.run(*PREPARE)
    assert again.returncode == 0 and "started" not in again.stderr
    assert (folder / "key.json").is_file()


def test_sigterm_ends_soon_and_removes_the_draft(tiny: Workspace) -> None:
    change_params(tiny, **{"prepare_data.scenes.num_train": 500000})
    process = tiny.start(*PREPARE)
    drafts = tiny.path / "artifacts/.drafts"
    while process.poll() is None and not list(drafts.glob("prepare_data-*/dataset/*")):
        time.sleep(0.02)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGTERM
    assert not list(drafts.iterdir())


DEAF_AT_FIRST = """
import os, signal, time
from tasks.__main__ import _DEPARTURE

class Deaf:
    def __del__(self):
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0.1)

_DEPARTURE.prepare()
Deaf()
try:
    time.sleep(60)
finally:
    time.sleep(2.5)
    print("tidied up")
"""


@pytest.mark.slow
def test_sigterm_that_a_finalizer_swallowed_is_raised_again_but_not_into_the_tidying() -> None:
    done = subprocess.run(
        [sys.executable, "-c", DEAF_AT_FIRST], cwd=REPOSITORY, capture_output=True, text=True, check=False
    )
    assert "Exception ignored" in done.stderr
    assert (done.returncode, done.stdout) == (128 + signal.SIGTERM, "tidied up\n")


def test_child_dies_with_its_parent(tiny: Workspace) -> None:
    change_params(tiny, **{"prepare_data.scenes.num_train": 500000})
    script = "import subprocess,sys; p=subprocess.Popen(sys.argv[1:]); print(p.pid, flush=True); p.wait()"
    parent = tiny.start("python", "-c", script, "python", *PREPARE[1:])
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    drafts = tiny.path / "artifacts/.drafts"
    while not list(drafts.glob("prepare_data-*/dataset/*")):
        assert parent.poll() is None
        time.sleep(0.02)
    parent.kill()
    parent.wait()
    deadline = time.monotonic() + 60
    while _is_alive(child) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not _is_alive(child)


def _is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.slow
def test_second_process_waits_for_the_same_output_and_is_refused_with_another_configuration(
    tiny: Workspace,
) -> None:
    change_params(tiny, **{"prepare_data.scenes.num_train": 8000})
    first = tiny.start(*PREPARE)
    while not list((tiny.path / "artifacts").glob(".drafts/prepare_data-*")):
        assert first.poll() is None
        time.sleep(0.02)
    second = tiny.start(*PREPARE)
    assert second.stdout is not None
    waiting = next(line for line in second.stdout if "waiting for process" in line)
    change_params(tiny, **{"prepare_data.seed": 7})
    third = tiny.run(*PREPARE)
    first_output, second_output = first.communicate()[0], second.communicate()[0]
    assert first.returncode == 0 and second.returncode == 0
    assert "started" in first_output
    assert f"process {first.pid}" in waiting and "fresh, nothing to run" in second_output
    assert third.returncode == 1
    assert "WorkspaceBusy" in third.stderr and "another configuration" in third.stderr


@pytest.mark.slow
def test_full_disk_names_the_free_space_keeps_what_was_there_and_goes_on_when_freed(
    tiny: Workspace, mount_disk: MountDisk
) -> None:
    artifacts = tiny.path / "artifacts"
    mount_disk(artifacts, "size=3m")
    assert tiny.run(*PREPARE).returncode == 0
    before = digest(artifacts / "prepare_data" / "dataset")
    change_params(tiny, **{"prepare_data.scenes.num_train": 1000})
    failed = tiny.run(*PREPARE)
    assert failed.returncode == 1 and "Traceback" not in failed.stderr
    message = failed.stderr.splitlines()[-1]
    assert "DiskError" in message and "artifacts/.drafts/prepare_data-" in message
    needed, free = (
        int(number.replace(",", "")) for number in re.findall(r"([\d,]+) bytes (?:and|are)", message)
    )
    assert needed > 1_000_000 > free
    assert digest(artifacts / "prepare_data" / "dataset") == before
    assert not list((artifacts / ".drafts").iterdir())

    subprocess.run(["mount", "-o", "remount,size=64m", artifacts], check=True)
    assert tiny.run(*PREPARE).returncode == 0
    assert digest(artifacts / "prepare_data" / "dataset") != before


@pytest.mark.slow
def test_disk_full_in_a_checkpoint_keeps_the_other_one_to_resume_from(
    tiny: Workspace, mount_disk: MountDisk
) -> None:
    artifacts = tiny.path / "artifacts"
    mount_disk(artifacts, "size=64m")
    change_params(tiny, **{"train.baseline.trainer.max_epochs": 2})
    tiny.run(*PREPARE)
    assert tiny.run(*TRAIN).returncode == 0
    undisturbed = digest(tiny.path / WEIGHTS)
    weights_bytes = (tiny.path / WEIGHTS).stat().st_size
    forget_training(tiny)
    filler = artifacts / "filler"
    # A checkpoint holds the weights and two moments of each: there is room for one, but not for two.
    filler.write_bytes(bytes(shutil.disk_usage(artifacts).free - int(4.5 * weights_bytes)))
    failed = tiny.run(*TRAIN)
    assert failed.returncode == 1 and "Traceback" not in failed.stderr
    assert "DiskError" in failed.stderr.splitlines()[-1]
    assert not (tiny.path / WEIGHTS).exists()

    filler.unlink()
    resumed = tiny.run(*TRAIN)
    assert resumed.returncode == 0 and "resuming after epoch 1" in resumed.stderr, resumed.stderr
    assert digest(tiny.path / WEIGHTS) == undisturbed


def write_to_a_full_device(_: None, *, out: Path) -> None:
    (out / "large").write_bytes(b"part")
    Path("/dev/full").write_bytes(b"rest")


def exceed_a_quota(_: None, *, out: Path) -> None:
    raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT), str(out / "large"))


def fill_a_database(_: None, *, out: Path) -> None:
    with contextlib.closing(sqlite3.connect(out / "large.db")) as database:
        database.execute("pragma max_page_count = 2")
        database.executescript("create table a (b); create table c (d)")


@pytest.mark.parametrize("function", [write_to_a_full_device, exceed_a_quota, fill_a_database])
def test_full_disk_is_told_however_a_library_says_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, function: Callable[..., None]
) -> None:
    monkeypatch.chdir(tmp_path)
    call = Call("prepare_data", function, None, {}, {}, "0" * 32)
    with pytest.raises(DiskError, match=r"prepare_data-0+: the disk or its quota is full.*bytes are free"):
        execute(call)
    assert not call.folder.exists() and not call.draft.exists()


@pytest.mark.slow
@pytest.mark.parametrize("place", ["artifacts", "artifacts/train"])
def test_read_only_output_is_found_before_the_stage_runs(
    tiny: Workspace, mount_disk: MountDisk, place: str
) -> None:
    tiny.run(*PREPARE)
    data = tiny.path / "dataset"
    shutil.copytree(tiny.path / "artifacts/prepare_data/dataset", data)
    mount_disk(tiny.path / place, "ro")
    failed = tiny.run(*TRAIN[:-1], "data=dataset")
    assert failed.returncode == 1 and "Traceback" not in failed.stderr
    assert "started" not in failed.stderr
    assert "DiskError" in failed.stderr and f"{tiny.path / place} is read-only" in failed.stderr


@pytest.fixture
def made(tiny: Workspace, monkeypatch: pytest.MonkeyPatch) -> Call:
    """A call whose output is fresh."""
    monkeypatch.chdir(tiny.path)
    params = yaml.safe_load((tiny.path / "params.yaml").read_text())
    call = prepare_call("prepare_data", {"root": Path("data/digit_scenes")}, params)
    execute(call)
    assert is_fresh(call)
    return call


@pytest.mark.parametrize("num_bytes", [0, 1, 100])
def test_truncated_record_is_named_and_the_stage_runs_again(
    made: Call, caplog: pytest.LogCaptureFixture, num_bytes: int
) -> None:
    record = made.folder / "key.json"
    before = record.read_bytes()
    record.write_bytes(before[:num_bytes])
    assert not is_fresh(made)
    assert f"ignoring {record}, which is damaged" in caplog.text
    execute(made)
    assert record.read_bytes() == before


@dataclass(frozen=True)
class SmallReport:
    """The least that a stage reports."""

    num_files: int


def write_two_files(_: None, *, out: Path) -> SmallReport:
    (out / "first").write_bytes(b"content")
    (out / "second").write_bytes(b"more content")
    return SmallReport(2)


@pytest.mark.slow
def test_no_flipped_bit_of_a_record_passes_for_another_output(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    made = Call("prepare_data", write_two_files, None, {}, {}, "0123456789abcdef" * 2)
    execute(made)
    file = made.folder / "key.json"
    before = file.read_bytes()
    expected = json.loads(before)
    num_fresh = 0
    for position in range(8 * len(before)):
        flipped = bytearray(before)
        flipped[position // 8] ^= 1 << position % 8
        file.write_bytes(flipped)
        if is_fresh(made):
            num_fresh += 1
            assert json.loads(flipped) == expected
    assert num_fresh < len(before) / 10  # a few: in blanks
    execute(made)
    assert is_fresh(made)


@pytest.mark.parametrize("name", ["key.json", "report.json", "dataset/val_masks.npy", "dataset", "."])
def test_deleted_output_is_made_again(made: Call, name: str) -> None:
    before = digest(made.folder)
    path = made.folder / name
    shutil.rmtree(path) if path.is_dir() else path.unlink()
    assert not is_fresh(made)
    execute(made)
    assert digest(made.folder) == before


def test_old_leftovers_are_removed_unless_a_process_is_at_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    drafts = tmp_path / "artifacts/.drafts"
    two_days_ago = time.time() - 2 * 86400
    names = ("train.teacher-0", "train.baseline-0", "distill-0", "distill-replaced", "finetune-0", "prune-0")
    for name in names:
        (drafts / name / "resume").mkdir(parents=True)
        checkpoint = drafts / name / "resume/last.ckpt"
        checkpoint.write_text("a checkpoint")
        if name not in ("distill-0", "distill-replaced"):
            for path in (checkpoint, checkpoint.parent, drafts / name):
                os.utime(path, (two_days_ago, two_days_ago))
    os.utime(drafts / "finetune-0/resume/last.ckpt")  # the folder is old, what is in it is not
    (tmp_path / "artifacts/.locks").mkdir()
    hold = "import fcntl,sys; f=open(sys.argv[1],'a'); fcntl.flock(f,2); print('held',flush=True); sys.stdin.read()"
    command = [sys.executable, "-c", hold, "artifacts/.locks/train.teacher"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout is not None and owner.stdout.readline() == "held\n"
        remove_leftovers()
        assert {path.name for path in drafts.iterdir()} == {"train.teacher-0", "distill-0", "finetune-0"}
        owner.kill()
    remove_leftovers()
    assert {path.name for path in drafts.iterdir()} == {"distill-0", "finetune-0"}


AT_WORK = """
import shutil, sys
from tasks.core.execute import remove_leftovers

def wait(*arguments, before=shutil.rmtree, **options):
    print("at work", flush=True)
    sys.stdin.read()
    return before(*arguments, **options)

shutil.rmtree = wait
remove_leftovers()
"""


def test_process_that_tidies_is_named_and_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.chdir(tmp_path)
    execute(Call("small.first", write_two_files, None, {}, {}, "1" * 32))
    (tmp_path / "artifacts/.drafts/small.first-replaced").mkdir()
    command = [sys.executable, "-c", AT_WORK]
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    with subprocess.Popen(
        command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdout is not None and other.stdin is not None
        assert other.stdout.readline() == "at work\n"

        class Ends(logging.Handler):
            def emit(self, record: logging.LogRecord) -> None:
                if "waiting" in record.getMessage() and other.stdin is not None:
                    other.stdin.close()

        waiting, logger = Ends(), logging.getLogger("tasks.core.execute")
        logger.addHandler(waiting)
        try:
            with caplog.at_level(logging.INFO):
                execute(Call("small.first", write_two_files, None, {}, {}, "2" * 32))
        finally:
            logger.removeHandler(waiting)
            other.kill()
    assert f"small.first: waiting for process {other.pid}, which removes leftovers" in caplog.text


def test_unknown_stage_and_odd_addresses_are_refused() -> None:
    for address in ("no_such_stage", "core", "../train", "train.", "Train"):
        with pytest.raises(ConfigError, match=r"no stage|not an address"):
            load_stage(address)


def test_section_of_an_address_is_found_by_descending() -> None:
    params = {"build_engine": {"cpu": {"a": 1}}, "export_onnx": {"opset": 20}}
    assert find_section(params, "build_engine.pruned_qat.cpu") == ("build_engine.cpu", {"a": 1})
    assert find_section(params, "export_onnx.pruned") == ("export_onnx", {"opset": 20})
    with pytest.raises(ConfigError, match="no section 'train'"):
        find_section(params, "train.teacher")


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"max_epochs": True}, "train.baseline.trainer.max_epochs"),
        ({"max_epochs": "3"}, "train.baseline.trainer.max_epochs"),
        ({"max_epochs": -1}, "max_epochs is -1, expected an integer of at least 1"),
        ({"max_epoch": 3}, "train.baseline.trainer.max_epoch is not a configuration key"),
        ({"precision": "fp8"}, "expected one of fp32, bf16_mixed, fp16_mixed"),
        ({"num_devices": 2}, "train.baseline.trainer.strategy is auto with 2 .*expected ddp"),
    ],
)
def test_bad_value_names_key_value_and_what_is_allowed(change: dict[str, object], expected: str) -> None:
    section = yaml.safe_load((REPOSITORY / "params.yaml").read_text())["train"]["baseline"]
    section["trainer"] |= change
    with pytest.raises(ConfigError, match=expected):
        typed_config(load_stage("train.baseline")[1], section, "train.baseline")


def test_missing_value_is_named() -> None:
    section = yaml.safe_load((REPOSITORY / "params.yaml").read_text())["train"]["baseline"]
    del section["trainer"]["seed"]
    with pytest.raises(ConfigError, match=r"train\.baseline\.trainer\.seed: missing value"):
        typed_config(load_stage("train.baseline")[1], section, "train.baseline")


def measures(_: None) -> bool:
    """Say that the small stages of this module measure."""
    return True


def test_only_one_checkout_measures_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv(MEASURING_LOCK, str(tmp_path / "shared/lock"))
    monkeypatch.chdir(tmp_path)
    hold = "import sys; from pathlib import Path; from tasks.core.locks import hold_lock\n" + (
        "with hold_lock(Path(sys.argv[1]), 'benchmark.cpu', before_waiting=print):\n"
        "    print('held', flush=True); sys.stdin.read()"
    )
    command = [sys.executable, "-c", hold, str(tmp_path / "shared/lock")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None and other.stdout.readline() == "held\n"
        release = threading.Timer(0.3, other.kill)
        release.start()
        with caplog.at_level(logging.INFO):
            execute(Call("small.first", write_two_files, None, {}, {}, "1" * 32))
        release.join()
    assert "small.first: waiting until benchmark.cpu was measured on this machine" in caplog.text
    assert (tmp_path / "shared/lock").read_text() == "small.first"


def test_stages_that_measure_say_so() -> None:
    params = compose_params(["target=[cpu_torch,cuda_torch,cpu_openvino,h200_tensorrt]"])
    said = {}
    for address in (
        "benchmark.cpu_openvino",
        "race_picks",
        "search_pruning",
        "build_engine.pruned.h200_tensorrt",
    ):
        config = typed_config(load_stage(address)[1], find_section(params, address)[1], address)
        said[address] = importlib.import_module(f"tasks.{address.split('.')[0]}").measures(config)
    assert all(said.values())
    section = find_section(params, "build_engine.pruned.cpu_openvino")[1]
    assert not build_engine.measures(typed_config(build_engine.Config, section, "build_engine"))
