"""What machines exchange through a DVC remote, and a remote that cannot take it."""

import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from flows.dvc_command import DvcFailed, run_dvc
from flows.exchange import merge_entries, pull, pull_inputs, push
from flows.optimize_on_pools import optimize_on_pools
from tasks.core.errors import ArtifactError, DiskError
from tasks.core.fingerprint import SCHEMA_VERSION, digest
from tasks.core.reports import KEY_FILE
from tasks.core.store import restore, write_record
from tests.conftest import Workspace

FILE_BYTES = 40_000


@pytest.mark.slow
def test_full_disk_of_the_remote_is_named_and_the_next_push_sends_the_rest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mount_disk: Callable[[Path, str], None]
) -> None:
    remote, checkout = tmp_path / "remote", tmp_path / "checkout"
    mount_disk(remote, "size=64k")
    (checkout / "engines").mkdir(parents=True)
    for number in range(4):
        (checkout / "engines" / str(number)).write_bytes(bytes([number]) * FILE_BYTES)
    monkeypatch.chdir(checkout)
    subprocess.run(["git", "init", "-q"], check=True)
    for command in (["init", "-q"], ["remote", "add", "-q", "--default", "store", str(remote)]):
        subprocess.run([sys.executable, "-m", "dvc", *command], check=True)
    run_dvc("add", "engines")
    with pytest.raises(DiskError, match=r"`dvc push`: the disk .* is full.*No space left on device"):
        run_dvc("push")
    for file in checkout.glob("engines/*"):
        md5 = digest(file)
        assert file.read_bytes() == (checkout / ".dvc/cache/files/md5" / md5[:2] / md5[2:]).read_bytes()
    subprocess.run(["mount", "-o", "remount,size=1m", remote], check=True)
    run_dvc("push")
    sent = [file for file in remote.rglob("*") if file.is_file() and not file.name.startswith(".")]
    assert len(sent) == 5  # four files and the list of their folder
    assert all(digest(file) == (file.parent.name + file.name).removesuffix(".dir") for file in sent)


def begin_project(folder: Path, remote: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make a DVC project with a remote, and work in it."""
    folder.mkdir()
    monkeypatch.chdir(folder)
    subprocess.run(["git", "init", "-q"], check=True)
    for command in (["init", "-q"], ["remote", "add", "-q", "--default", "store", str(remote)]):
        subprocess.run([sys.executable, "-m", "dvc", *command], check=True)


@pytest.mark.slow
def test_one_stage_costs_what_it_holds_however_many_runs_there_were(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    remote, maker, taker = (tmp_path / name for name in ("remote", "maker", "taker"))
    begin_project(maker, remote, monkeypatch)
    dvc = [sys.executable, "-m", "dvc"]
    stage = {"cmd": "cp given made", "deps": ["given"], "outs": ["made"]}
    Path("dvc.yaml").write_text(yaml.safe_dump({"stages": {"copy": stage}}), encoding="utf-8")
    for content in ("first", "second"):
        Path("given").write_text(content, encoding="utf-8")
        subprocess.run([*dvc, "repro", "-q"], check=True)
    assert len([file for file in Path(".dvc/cache/runs").rglob("*") if file.is_file()]) == 2
    shutil.copytree(maker, taker, ignore=shutil.ignore_patterns("cache", "made"))
    push.fn(["copy"])
    assert [file.read_text() for file in remote.rglob("*") if file.is_file()] == ["second"]

    subprocess.run([*dvc, "push", "-q", "--run-cache"], check=True)  # by hand
    monkeypatch.chdir(taker)
    pull.fn(["copy"])
    assert Path("made").read_text() == "second" and not Path(".dvc/cache/runs").exists()


def publish(folder: Path, key: str) -> None:
    """Write an output as a stage publishes it; it holds its key."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "model.bin").write_text(key, encoding="utf-8")
    record = {
        "schema": SCHEMA_VERSION,
        "address": folder.name,
        "key": key,
        "environment": {},
        "files": {"model.bin": digest(folder / "model.bin")},
    }
    write_record(folder / KEY_FILE, record)


@pytest.mark.slow
def test_pull_stores_an_output_before_dvc_replaces_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin_project(tmp_path / "checkout", tmp_path / "remote", monkeypatch)
    folder = Path("artifacts/build")
    stage = {"cmd": "python -m tasks build", "outs": [folder.as_posix()]}
    Path("dvc.yaml").write_text(yaml.safe_dump({"stages": {"build": stage}}), encoding="utf-8")
    publish(folder, "pulled")
    run_dvc("commit", "--force", "build")
    push.fn(["build"])
    publish(folder, "replaced")  # the cache has no copy of it: it was damaged there
    pull.fn(["build"])
    assert (folder / "model.bin").read_text(encoding="utf-8") == "pulled"
    assert restore("replaced", tmp_path / "restored", "build", folder)
    assert (tmp_path / "restored/model.bin").read_text(encoding="utf-8") == "replaced"


@pytest.mark.slow
def test_data_that_a_new_pointer_names_is_fetched_and_own_changes_are_not_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    remote, maker, taker = (tmp_path / name for name in ("remote", "maker", "taker"))
    begin_project(maker, remote, monkeypatch)
    dvc, images = [sys.executable, "-m", "dvc"], Path("data/images")
    images.mkdir(parents=True)
    (images / "1.png").write_bytes(b"of version 1")
    subprocess.run([*dvc, "add", "-q", str(images)], check=True)
    subprocess.run([*dvc, "push", "-q"], check=True)
    shutil.copytree(maker, taker)
    (images / "2.png").write_bytes(b"of version 2")
    subprocess.run([*dvc, "add", "-q", str(images)], check=True)
    subprocess.run([*dvc, "push", "-q"], check=True)

    monkeypatch.chdir(taker)
    before = digest(images)
    pull_inputs({"prepare_data": {"root": str(images)}})
    assert digest(images) == before
    shutil.copy(maker / "data/images.dvc", "data/images.dvc")  # as `git pull` does
    with pytest.raises(ArtifactError, match="is not the data that"):
        digest(images)
    pull_inputs({"prepare_data": {"root": str(images)}})
    assert (images / "2.png").read_bytes() == b"of version 2" and digest(images) != before

    (images / "own.png").write_bytes(b"never added")
    with pytest.raises(DvcFailed):
        pull_inputs({"prepare_data": {"root": str(images)}})
    assert (images / "own.png").read_bytes() == b"never added"


@pytest.mark.slow
def test_models_and_weights_that_were_added_are_fetched_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    remote, maker, taker = (tmp_path / name for name in ("remote", "maker", "taker"))
    begin_project(maker, remote, monkeypatch)
    dvc = [sys.executable, "-m", "dvc"]
    files = [Path(name) for name in ("data/images/1.png", "mine.onnx", "weights/teacher.pt", "unused.onnx")]
    for file in files:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(str(file))
    subprocess.run([*dvc, "add", "-q", "data/images", "mine.onnx", "weights", "unused.onnx"], check=True)
    subprocess.run([*dvc, "push", "-q"], check=True)
    shutil.copytree(maker, taker, ignore=shutil.ignore_patterns("cache", "*.png", "*.onnx", "*.pt"))
    monkeypatch.chdir(taker)
    for folder in ("data/images", "weights"):
        Path(folder).rmdir()
    params = {
        "prepare_data": {"root": "data/images", "names": ["a " * 2000, "/", "", "mine"]},
        "pipeline": {"imports": {"model": "mine.onnx"}},
        "train": {"teacher": {"pretrained": {"file": "weights/teacher.pt", "sha256": None}}},
    }
    pull_inputs(params)
    assert [file.is_file() and file.read_text() for file in files] == [*map(str, files[:3]), False]


@pytest.mark.slow
def test_deployed_flow_fetches_the_model_before_it_looks_at_it(
    workspace: Workspace, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(workspace.path)
    dvc = [sys.executable, "-m", "dvc"]
    subprocess.run(
        [*dvc, "remote", "add", "-q", "--local", "--default", "store", str(tmp_path / "r")], check=True
    )
    Path("mine.onnx").write_bytes(b"no graph")
    subprocess.run([*dvc, "add", "-q", "mine.onnx"], check=True)
    subprocess.run([*dvc, "push", "-q", "mine.onnx"], check=True)
    for path in (Path("mine.onnx"), Path(".dvc/cache")):
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    overrides = ["model=onnx", "model.path=mine.onnx", "data=images", "prepare_data.root=data/digit_scenes"]
    with pytest.raises(ArtifactError, match=r"^mine\.onnx: 8 bytes that are not an ONNX model"):
        optimize_on_pools.fn(["cpu_onnxruntime"], overrides)
    assert Path("mine.onnx").read_bytes() == b"no graph"


def test_merge_that_is_killed_leaves_the_lock_and_nothing_that_git_sees(
    workspace: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(workspace.path)
    before = Path("dvc.lock").read_bytes() if Path("dvc.lock").is_file() else None

    def die(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "replace", die)
    with pytest.raises(KeyboardInterrupt):
        merge_entries({"prepare_data": {"cmd": "python", "outs": [{"path": "a", "md5": "0" * 32}]}})
    assert (Path("dvc.lock").read_bytes() if Path("dvc.lock").is_file() else None) == before
    assert not list(Path().glob("*dvc.lock?*"))
    assert "dvc.lock." not in workspace.run("git", "status", "--porcelain").stdout
