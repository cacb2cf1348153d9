"""What was published is found by its key, whatever ran in between; nothing damaged is handed out."""

import json
import logging
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from flows.forget import forget_outputs
from tasks.core import store
from tasks.core.errors import ConfigError
from tasks.core.execute import Call, execute, is_fresh, recall, remove_damaged
from tasks.core.fingerprint import digest
from tasks.core.store import cache_folder, object_file, remove_incomplete, write_record

A, B = "a" * 32, "b" * 32


@dataclass(frozen=True)
class Report:
    """What the stage below reports."""

    run: int


@dataclass
class Stage:
    """Counts its runs, and writes another output each time."""

    num_runs: int = 0

    def __call__(self, _: None, *, out: Path) -> Report:
        """Write two files, one of them in a folder."""
        self.num_runs += 1
        (out / "engine").mkdir()
        (out / "engine/model.bin").write_text(f"run {self.num_runs}")
        (out / "same").write_text("the same each time")
        return Report(self.num_runs)

    def call(self, key: str, address: str = "prepare_data") -> Call:
        """Return a call with a key."""
        return Call(address, self, None, {}, {}, key)


Stage.__module__ = "tasks.prepare_data"  # which has no still_holds


@pytest.fixture
def stage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Stage:
    """A stage in an empty DVC project."""
    monkeypatch.chdir(tmp_path)
    Path(".dvc").mkdir()
    return Stage()


def model(call: Call) -> Path:
    return call.folder / "engine/model.bin"


def kept(call: Call, name: str) -> Path:
    md5 = json.loads((call.folder / "key.json").read_text())["files"][name]
    return Path(".dvc/cache/files/md5", md5[:2], md5[2:])


def test_going_forth_and_back_runs_nothing_twice(stage: Stage, caplog: pytest.LogCaptureFixture) -> None:
    a, b = stage.call(A), stage.call(B)
    execute(a)
    before = {path: path.read_bytes() for path in a.folder.rglob("*") if path.is_file()}
    execute(b)
    assert model(b).read_text() == "run 2"
    with caplog.at_level(logging.INFO):
        for call in (a, b, a):
            execute(call)
            assert is_fresh(call)
    assert stage.num_runs == 2 and "prepare_data: made before, restored from the store" in caplog.text
    assert {path: path.read_bytes() for path in a.folder.rglob("*") if path.is_file()} == before
    assert all(path.stat().st_mode & 0o200 for path in a.folder.rglob("*"))


def test_another_address_with_the_same_key_gets_the_same_files(stage: Stage) -> None:
    twin = stage.call(A, "train.teacher")
    assert not recall(twin)
    execute(stage.call(A, "train.baseline"))
    assert recall(twin) and is_fresh(twin) and stage.num_runs == 1
    assert json.loads((twin.folder / "key.json").read_text())["address"] == "train.teacher"


def test_damaged_output_comes_back_from_the_store(stage: Stage) -> None:
    call = stage.call(A)
    execute(call)
    model(call).write_text("changed")
    assert not is_fresh(call)
    execute(call)
    assert model(call).read_text() == "run 1" and stage.num_runs == 1


def test_damaged_store_is_named_and_hands_out_nothing(stage: Stage, caplog: pytest.LogCaptureFixture) -> None:
    a, b = stage.call(A), stage.call(B)
    execute(a)
    damaged = kept(a, "engine/model.bin")
    execute(b)
    damaged.chmod(0o644)
    damaged.write_text("RUN 1")
    execute(a)
    assert f"removing {damaged}, which was changed" in caplog.text
    assert model(a).read_text() == "run 3" and stage.num_runs == 3


def test_store_is_mended_from_an_output_that_goes(stage: Stage) -> None:
    a, b = stage.call(A), stage.call(B)
    execute(a)
    damaged = kept(a, "engine/model.bin")
    damaged.chmod(0o644)
    damaged.write_text("RUN 1")
    execute(b)
    execute(a)
    assert model(a).read_text() == "run 1" and stage.num_runs == 2


@pytest.mark.parametrize("change", ["same", "files", A])
def test_output_that_lost_a_file_is_restored_by_its_own_record_if_the_store_lost_its_copy(
    stage: Stage, change: str, caplog: pytest.LogCaptureFixture
) -> None:
    call = stage.call(A)
    execute(call)
    [file] = Path(".dvc/cache/keys").glob("*/*.json")
    intact = file.read_text()
    file.write_text(intact.replace(change, f"{change[:-1]}?"))
    model(call).write_text("RUN 1")
    assert recall(call) and f"ignoring {file}, which is damaged" in caplog.text
    assert model(call).read_text() == "run 1" and (call.folder / "same").is_file()
    assert file.read_text() == intact


@pytest.mark.parametrize("way_out", ["another takes its place", "it is removed"])
def test_record_of_a_damaged_output_is_kept_if_the_store_lost_its_copy(stage: Stage, way_out: str) -> None:
    a = stage.call(A)
    execute(a)
    shutil.rmtree(".dvc/cache/keys")
    model(a).write_text("RUN 1")
    if way_out == "it is removed":
        assert remove_damaged() == [a.folder]
    else:
        execute(stage.call(B))
    assert recall(a) and model(a).read_text() == "run 1"


@pytest.mark.parametrize("leftover", ["prepare_data-replaced", f"prepare_data-{A[:12]}"])
def test_finished_output_that_a_kill_left_behind_is_kept(stage: Stage, leftover: str) -> None:
    """The kill came between the two renames, or before them."""
    a, b = stage.call(A), stage.call(B)
    execute(a)
    a.folder.rename(a.draft.with_name(leftover))
    shutil.rmtree(".dvc/cache")
    execute(b)
    execute(a)
    assert model(a).read_text() == "run 1" and stage.num_runs == 2


def test_output_that_dvc_fetched_is_kept_when_another_takes_its_place(stage: Stage) -> None:
    a, b = stage.call(A), stage.call(B)
    execute(a)
    shutil.rmtree(".dvc/cache/keys")  # as after `dvc pull` in a new clone
    execute(b)
    execute(a)
    assert stage.num_runs == 2


def test_damaged_output_is_not_kept(stage: Stage) -> None:
    a, b = stage.call(A), stage.call(B)
    execute(a)
    shutil.rmtree(".dvc/cache")
    model(a).write_text("RUN 1")
    execute(b)
    execute(a)
    assert model(a).read_text() == "run 3"


def test_output_of_another_version_stays_in_the_cache_of_dvc(stage: Stage) -> None:
    a, b = stage.call(A), stage.call(B)
    execute(a)
    record = json.loads((a.folder / "key.json").read_text())
    (a.folder / "key.json").write_text(json.dumps({**record, "schema": 2}))
    listing = object_file(cache_folder(), digest(a.folder))
    listing.parent.mkdir(parents=True, exist_ok=True)
    listing.touch()
    assert remove_damaged() == []
    execute(b)
    assert listing.exists()


@pytest.mark.parametrize("level", ["system", "global", "project", "local"])
def test_cache_is_where_dvc_has_it_whoever_configured_it(
    stage: Stage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, level: str
) -> None:
    for variable, folder in (("DVC_SYSTEM_CONFIG_DIR", "system"), ("DVC_GLOBAL_CONFIG_DIR", "global")):
        monkeypatch.setenv(variable, str(tmp_path / folder))
    monkeypatch.setattr(store, "_shared_configs", store._shared_configs.__wrapped__)
    places = {"system": "system/config", "global": "global/config", "project": ".dvc/config"}
    places["local"] = ".dvc/config.local"
    for name in list(places)[: list(places).index(level) + 1]:
        file = Path(places[name])
        file.parent.mkdir(exist_ok=True)
        file.write_text(f"[cache]\n    dir = {name}-cache\n", encoding="utf-8")
    subprocess.run(["git", "init", "-q"], check=True)
    command = [sys.executable, "-m", "dvc", "cache", "dir"]
    asked = subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()
    assert cache_folder().resolve() == Path(asked).resolve() == (file.parent / f"{level}-cache").resolve()


@pytest.mark.usefixtures("stage")
def test_full_disk_leaves_no_half_copy(mount_disk: Callable[[Path, str], None]) -> None:
    cache = Path(".dvc/cache")
    mount_disk(cache, "size=64k")
    big = Path("big")
    big.write_bytes(bytes(1 << 20))
    with pytest.raises(OSError, match="No space left"):
        store._copy(big, object_file(cache, "1" * 32))
    assert not any(path.is_file() for path in cache.rglob("*"))


@pytest.mark.parametrize("name", ["../elsewhere", "/tmp/elsewhere", "a/../../elsewhere"])
def test_record_that_names_files_elsewhere_is_ignored(
    stage: Stage, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    call = stage.call(A)
    execute(call)
    [file] = Path(".dvc/cache/keys").glob("*/*.json")
    record = json.loads(file.read_text())
    record["files"][name] = record["files"].pop("same")
    del record["checksum"]
    write_record(file, record)
    shutil.rmtree(call.folder)
    assert not recall(call) and f"ignoring {file}, which is damaged" in caplog.text


def test_checkouts_with_one_cache_share_the_store(
    stage: Stage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("one", "two"):
        (tmp_path / name / ".dvc").mkdir(parents=True)
        (tmp_path / name / ".dvc/config.local").write_text("[cache]\n    dir = ../../one_cache\n")
        monkeypatch.chdir(tmp_path / name)
        execute(stage.call(A))
    assert stage.num_runs == 1 and (tmp_path / "one_cache/keys").is_dir()


def test_what_the_cache_lost_is_made_again(stage: Stage) -> None:
    a, b = stage.call(A), stage.call(B)
    execute(a)
    lost = kept(a, "engine/model.bin")
    execute(b)
    lost.unlink()
    remove_incomplete()
    assert [path.stem for path in Path(".dvc/cache/keys").glob("*/*")] == [B[2:]]
    assert not recall(a) and recall(b)


def test_forgotten_outputs_are_made_again(stage: Stage) -> None:
    calls = [stage.call(key, f"train.{name}") for key, name in ((A, "teacher"), (B, "baseline"))]
    for call in calls:
        execute(call)
    assert forget_outputs("train") == ["train.baseline", "train.teacher"]
    assert not any(recall(call) for call in calls)
    with pytest.raises(ConfigError, match="nothing to forget"):
        forget_outputs("train.teacher")


def test_without_dvc_stages_run_and_nothing_is_kept(stage: Stage) -> None:
    Path(".dvc").rmdir()
    execute(stage.call(A))
    execute(stage.call(B))
    execute(stage.call(A))
    assert stage.num_runs == 3 and not Path(".dvc").exists()
