"""The single door: fresh outputs, drafts, locks, kills. All with real stages in real processes."""

import json
import os
import random
import signal
import time
from pathlib import Path

import pytest
import yaml

from tasks.core.config import find_section, typed_config
from tasks.core.errors import ArtifactError, ConfigError
from tasks.core.execute import execute, is_fresh, load_stage, prepare_call
from tasks.core.fingerprint import digest
from tests.conftest import REPOSITORY, Workspace

TINY_SCENES = {"num_train": 24, "num_val": 8, "num_test": 8, "num_calibration": 8}
PREPARE = ("python", "-m", "tasks", "prepare_data", "root=data/digit_scenes")
TRAIN = ("python", "-m", "tasks", "train.baseline", "data=artifacts/prepare_data/dataset")
WEIGHTS = Path("artifacts/train/baseline/model.safetensors")


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


def test_fresh_output_is_not_made_again(tiny: Workspace) -> None:
    first = tiny.run(*PREPARE)
    assert first.returncode == 0, first.stderr
    made = (tiny.path / "artifacts/prepare_data/report.json").stat().st_mtime_ns
    assert "fresh, nothing to run" in tiny.run(*PREPARE).stderr
    assert (tiny.path / "artifacts/prepare_data/report.json").stat().st_mtime_ns == made


def test_output_follows_configuration_forth_and_back(tiny: Workspace) -> None:
    tiny.run(*PREPARE)
    before = digest(tiny.path / "artifacts/prepare_data/dataset")
    change_params(tiny, **{"prepare_data.seed": 1})
    tiny.run(*PREPARE)
    assert digest(tiny.path / "artifacts/prepare_data/dataset") != before
    change_params(tiny, **{"prepare_data.seed": 0})
    tiny.run(*PREPARE)
    assert digest(tiny.path / "artifacts/prepare_data/dataset") == before


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


def test_missing_input_names_the_way_out(tiny: Workspace) -> None:
    failed = tiny.run(*TRAIN)
    assert failed.returncode == 1
    assert "Run the stage that makes it first" in failed.stderr and "Traceback" not in failed.stderr


def test_training_killed_twice_ends_with_the_same_bytes_as_an_undisturbed_one(tiny: Workspace) -> None:
    change_params(tiny, **{"train.baseline.trainer.max_epochs": 6})
    tiny.run(*PREPARE)
    assert tiny.run(*TRAIN).returncode == 0
    undisturbed = digest(tiny.path / WEIGHTS)
    history = (tiny.path / WEIGHTS.with_name("history.csv")).read_text()
    for path in (tiny.path / WEIGHTS.parent).iterdir():
        path.unlink()
    for num_checkpoints in (1, 2):
        kill_after_checkpoints(tiny, num_checkpoints)
        assert not (tiny.path / WEIGHTS).exists()
    resumed = tiny.run(*TRAIN)
    assert resumed.returncode == 0, resumed.stderr
    assert "resuming after epoch" in resumed.stderr
    assert digest(tiny.path / WEIGHTS) == undisturbed
    assert (tiny.path / WEIGHTS.with_name("history.csv")).read_text() == history
    assert not list((tiny.path / "artifacts/.drafts").iterdir())


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


def test_torn_checkpoint_is_ignored_and_named(tiny: Workspace) -> None:
    change_params(tiny, **{"train.baseline.trainer.max_epochs": 4})
    tiny.run(*PREPARE)
    kill_after_checkpoints(tiny, 1)
    [checkpoint] = (tiny.path / "artifacts/.drafts").glob("train.baseline-*/resume/last.ckpt")
    checkpoint.write_bytes(checkpoint.read_bytes()[:1000])
    resumed = tiny.run(*TRAIN)
    assert resumed.returncode == 0, resumed.stderr
    assert "last.ckpt, which is not a whole checkpoint" in resumed.stderr


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


def test_second_process_waits_for_the_same_output(tiny: Workspace) -> None:
    change_params(tiny, **{"prepare_data.scenes.num_train": 20000})
    first = tiny.start(*PREPARE)
    while not list((tiny.path / "artifacts").glob(".drafts/prepare_data-*")):
        assert first.poll() is None
        time.sleep(0.02)
    second = tiny.run(*PREPARE)
    first_output = first.communicate()[0]
    assert first.returncode == 0 and second.returncode == 0
    assert "started" in first_output
    assert "waiting for process" in second.stderr and "fresh, nothing to run" in second.stderr


def test_second_process_with_another_configuration_is_refused(tiny: Workspace) -> None:
    change_params(tiny, **{"prepare_data.scenes.num_train": 20000})
    first = tiny.start(*PREPARE)
    while not list((tiny.path / "artifacts").glob(".drafts/prepare_data-*")):
        assert first.poll() is None
        time.sleep(0.02)
    change_params(tiny, **{"prepare_data.seed": 7})
    second = tiny.run(*PREPARE)
    assert second.returncode == 1
    assert "WorkspaceBusy" in second.stderr and "another configuration" in second.stderr
    first.communicate()
    assert first.returncode == 0


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small tmpfs needs root")
def test_full_disk_names_the_free_space_and_keeps_what_was_there(tiny: Workspace) -> None:
    import subprocess

    artifacts = tiny.path / "artifacts"
    artifacts.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=3m", "tmpfs", artifacts], check=False)
    if mounted.returncode != 0:
        pytest.skip("this sandbox does not allow mounting a tmpfs")
    try:
        assert tiny.run(*PREPARE).returncode == 0
        before = digest(artifacts / "prepare_data" / "dataset")
        change_params(tiny, **{"prepare_data.scenes.num_train": 2000})
        failed = tiny.run(*PREPARE)
        assert failed.returncode == 1
        assert "MiB free" in failed.stderr and "No space left" in failed.stderr
        assert digest(artifacts / "prepare_data" / "dataset") == before
        assert not list((artifacts / ".drafts").glob("prepare_data-*"))
    finally:
        subprocess.run(["umount", artifacts], check=True)


def test_unknown_stage_and_odd_addresses_are_refused() -> None:
    for address in ("no_such_stage", "core", "../train", "train.", "Train"):
        with pytest.raises(ConfigError, match=r"no stage|no address"):
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
        ({"max_epochs": -1}, "max_epochs is -1, expected at least 1"),
        ({"max_epoch": 3}, "train.baseline.trainer.max_epoch is no key"),
        ({"precision": "fp8"}, "expected one of fp32, bf16_mixed, fp16_mixed"),
        ({"num_devices": 2}, "Set trainer.strategy=ddp"),
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
