"""What ``flows.gc`` takes from a real DVC cache, and what it leaves because an engine in MLflow was picked."""

import json
import os
import re
import shutil
import time
from pathlib import Path

import pytest
import yaml

from benchmarks.trivial_pipeline import write_workspace
from flows.gc import remove_old_kernels
from tasks.core.execute import LEFTOVER_AGE_S
from tasks.core.tracking.config import TrackingConfig
from tasks.core.tracking.log import log_pipeline
from tasks.core.tracking.records import RunRecord
from tasks.parts.engines.frame_engine.jit import DRAFT, kernels_file, write_kernels
from tasks.parts.engines.tensorrt_options import RUNTIME_CACHE
from tests.conftest import Workspace

pytestmark = pytest.mark.slow

BUILD = "build_engine-v00-t00"
OUTPUT = Path("artifacts/build_engine/v00/t00")


def set_params(space: Workspace, **values: object) -> None:
    file = space.path / "params.yaml"
    params = yaml.safe_load(file.read_text())
    for section in (params["quantize_ptq"], params["track"]):
        section.update({name: value for name, value in values.items() if name in section})
    file.write_text(yaml.safe_dump(params))


def build(space: Workspace, salt: int) -> list[str]:
    """Let DVC make the engine of a configuration; return the stages that it had to run."""
    set_params(space, salt=salt)
    return space.reproduce(BUILD)


def key(space: Workspace) -> str:
    return str(json.loads((space.path / OUTPUT / "key.json").read_text())["key"])


def test_picked_engine_can_be_built_again_without_its_trainings_and_others_go(tmp_path: Path) -> None:
    folder = tmp_path / "space"
    write_workspace(folder, num_variants=1, num_targets=1, seconds=0)
    space = Workspace(folder)
    uri = f"sqlite:///{tmp_path}/mlflow.db"
    set_params(space, enabled=True, uri=uri)
    assert build(space, 0) == ["prepare_data", "import_onnx", "quantize_ptq", BUILD]
    tags = {"variant": "v00", "target": "t00", "key_build_engine": key(space)}
    engine = RunRecord("v00-t00", {}, tags, (("engine", space.path / OUTPUT / "engine/model.bin"),))
    log_pipeline(
        TrackingConfig(enabled=True, uri=uri, experiment="trivial"),
        pipeline=RunRecord("pipeline", {}, {}, ()),
        candidates=[engine],
        picks={"trivial-t00": "v00-t00"},
    )
    for salt in (1, 2):
        assert build(space, salt) == ["quantize_ptq", BUILD]
    results = folder / ".prefect/storage"
    results.mkdir(parents=True)
    two_days_ago = time.time() - 2 * 86400
    for name in ("0" * 32, key(space)):
        (results / name).write_text("{}")
        os.utime(results / name, (two_days_ago, two_days_ago))

    tried = space.run("python", "-m", "flows.gc", "--dry")
    assert tried.returncode == 0, tried.stderr
    done = space.run("python", "-m", "flows.gc")
    assert done.returncode == 0, done.stderr
    assert re.search(r"v00 on t00: \d+ objects kept", done.stdout)
    assert [file.name for file in results.iterdir()] == [key(space)]
    assert build(space, 0) == []  # of the picked engine: all from the cache
    assert key(space) == tags["key_build_engine"]
    assert build(space, 2) == []  # of the workspace
    assert build(space, 1) == ["quantize_ptq", BUILD]  # of neither


def test_nothing_goes_while_mlflow_cannot_say_what_was_picked(tmp_path: Path) -> None:
    folder = tmp_path / "space"
    write_workspace(folder, num_variants=1, num_targets=1, seconds=0)
    space = Workspace(folder)
    (tmp_path / "mlflow.db").write_bytes(b"this is no database" * 100)
    set_params(space, enabled=True, uri=f"sqlite:///{tmp_path}/mlflow.db")
    unused = folder / ".dvc/cache/files/md5/00/000000000000000000000000000000"
    unused.parent.mkdir(parents=True)
    unused.write_bytes(b"")
    refused = space.run("python", "-m", "flows.gc")
    assert refused.returncode == 1 and "TrackingUnavailable" in refused.stderr
    assert "Traceback" not in refused.stderr and unused.is_file()


@pytest.mark.parametrize("lock", ["dvc.lock", "artifacts/.deployed/dvc.lock"])
def test_nothing_goes_while_a_damaged_lock_cannot_say_what_is_needed(tmp_path: Path, lock: str) -> None:
    folder = tmp_path / "space"
    write_workspace(folder, num_variants=1, num_targets=1, seconds=0)
    space = Workspace(folder)
    unused = folder / ".dvc/cache/files/md5/00/000000000000000000000000000000"
    for file in (unused, folder / lock):
        file.parent.mkdir(parents=True, exist_ok=True)
    unused.write_bytes(b"")
    (folder / lock).write_text("schema: '2.0'\nstages:\n  prepare_data:\n    cmd: python -m tasks prep")
    refused = space.run("python", "-m", "flows.gc")
    assert refused.returncode == 1 and "Traceback" not in refused.stderr
    assert (
        f"CollectionFailed: Nothing is removed, as nobody can say what is needed: {lock} is" in refused.stderr
    )
    assert unused.is_file()


def test_outputs_of_stages_that_params_leave_out_stay(tmp_path: Path) -> None:
    folder = tmp_path / "space"
    write_workspace(folder, num_variants=1, num_targets=2, seconds=0)
    space = Workspace(folder)
    other = BUILD.replace("t00", "t01")
    assert space.run("dvc", "repro", BUILD, other).returncode == 0
    pipeline = folder / "dvc.yaml"
    both = pipeline.read_text()
    stages = yaml.safe_load(both)["stages"]
    del stages[other]  # as with a target that params.yaml does not name today
    pipeline.write_text(yaml.safe_dump({"stages": stages}))
    done = space.run("python", "-m", "flows.gc")
    assert done.returncode == 0, done.stderr
    pipeline.write_text(both)
    shutil.rmtree(folder / "artifacts/build_engine")
    again = space.run("dvc", "checkout", BUILD, other)
    assert again.returncode == 0, again.stderr
    assert (folder / "artifacts/build_engine/v00/t01/engine/model.bin").is_file()


def test_kernels_of_plans_that_are_gone_are_removed_after_a_day(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    here, gone = "a" * 64, "b" * 64
    manifest = OUTPUT / "engine" / "manifest.json"
    manifest.parent.mkdir(parents=True)
    manifest.write_text(json.dumps({"sha256": here}))
    day_ago = time.time() - LEFTOVER_AGE_S - 1
    files = {}
    for name, sha256, age in (("used", here, day_ago), ("old", gone, day_ago), ("new", gone, time.time())):
        files[name] = kernels_file(
            RUNTIME_CACHE, gpu=name, capability="8.9", version="1.7.1.116", driver=13020, sha256=sha256
        )
        write_kernels(files[name], b"kernels")
        os.utime(files[name], (age, age))
    (draft := RUNTIME_CACHE / f"{DRAFT}killed").mkdir()
    (draft / "half").touch()
    os.utime(draft, (day_ago, day_ago))
    remove_old_kernels()
    assert not draft.exists()
    assert [name for name, file in files.items() if file.is_file()] == ["used", "new"]
