"""Digests and keys."""

import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from flows.params import compose_params
from tasks.core import fingerprint
from tasks.core.digest_index import FileVersion, enter_md5
from tasks.core.errors import ArtifactError
from tasks.core.execute import prepare_call
from tasks.core.fingerprint import code_digests, digest, stage_key
from tests.conftest import REPOSITORY


@pytest.fixture
def dvc_folder(tmp_path: Path) -> Path:
    subprocess.run([sys.executable, "-m", "dvc", "init", "--no-scm", "-q"], cwd=tmp_path, check=True)
    return tmp_path


def test_digest_of_a_file_and_a_folder_equal_dvc(dvc_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = dvc_folder / "data"
    for name in ("b.txt", "a/z.txt", "a.txt", "a/ä.txt", "A/1.bin"):
        path = data / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(name.encode() * 1000 + b"\r\n")
    single = dvc_folder / "single.bin"
    single.write_bytes(b"\x00\r\n" * 5000)
    ours = {path: digest(path) for path in (data, single)}
    subprocess.run(
        [sys.executable, "-m", "dvc", "add", "-q", "data", "single.bin"], cwd=dvc_folder, check=True
    )
    for path, found in ours.items():
        pointer = path.with_name(path.name + ".dvc").read_text()
        assert f"md5: {found}\n" in pointer


@pytest.fixture
def added(dvc_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of small files that was added to DVC, and whose digest was taken since."""
    monkeypatch.chdir(dvc_folder)
    Path("artifacts").mkdir()
    data = Path("data/cells")
    data.mkdir(parents=True)
    for number in range(3):
        (data / f"{number}.png").write_bytes(b"an image %d" % number)
    time.sleep(2.1)  # the index takes no file that may change within one tick of the clock
    subprocess.run([sys.executable, "-m", "dvc", "add", "-q", "data/cells"], check=True)
    time.sleep(2.1)  # DVC linked the files
    digest(data)
    return data


def test_added_data_that_did_not_change_is_not_read_again(added: Path) -> None:
    file = added / "0.png"
    enter_md5(str(file), FileVersion.from_status(file.stat()), "0" * 32)
    fingerprint._md5_of_version.cache_clear()
    with pytest.raises(ArtifactError, match="is not the data that"):  # it was found in the index
        digest(added)


def test_data_that_is_not_what_its_pointer_names_is_refused(added: Path) -> None:
    pointer = Path("data/cells.dvc")
    before = digest(added)
    file = added / "1.png"
    file.unlink()  # it may be a link into DVC's cache
    file.write_bytes(b"another one")
    with pytest.raises(
        ArtifactError, match=r"data/cells is not the data that data/cells\.dvc names"
    ) as refused:
        digest(added)
    for command in ("dvc checkout data/cells.dvc", "dvc pull data/cells.dvc", "dvc add data/cells"):
        assert f"`{command}`" in str(refused.value)
    subprocess.run([sys.executable, "-m", "dvc", "checkout", "-q", "--force", str(pointer)], check=True)
    assert digest(added) == before

    shutil.rmtree(added)
    assert digest(added) == before
    with pytest.raises(ArtifactError, match=r"Fetch it: `dvc pull data/cells\.dvc`"):
        prepare_call("prepare_data", {"root": added}, compose_params())


def test_missing_path_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match="Run the stage that makes it"):
        digest(tmp_path / "nothing")


def test_a_changed_file_changes_the_digest_even_at_equal_size(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"one")
    first = digest(path)
    path.write_bytes(b"two")
    assert digest(path) != first


def test_code_of_a_stage_covers_imports_inside_functions() -> None:
    found = code_digests("tasks.train")
    assert "tasks/train.py" in found
    assert "tasks/core/errors.py" in found
    assert "tasks/parts/training" in found  # imported inside the function
    assert "tasks/parts/networks" in found  # imported by an import
    assert "tasks/distill.py" not in found


def test_code_of_trainings_is_that_of_what_trains_and_of_no_export_or_build() -> None:
    importers = {
        path.stem
        for path in (REPOSITORY / "tasks").glob("[!_]*.py")
        if "tasks/parts/training" in code_digests(f"tasks.{path.stem}")
    }
    assert {"train", "distill", "finetune", "prune", "search_pruning", "quantize_aware_train"} <= importers
    assert {"export_onnx", "build_engine"}.isdisjoint(importers)


def test_code_of_a_stage_covers_whole_packages_and_the_packages_in_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, text in {
        "tasks/train.py": "from tasks.parts.engines.torch.runner import run\nfrom tasks.parts import tables\n",
        "tasks/parts/tables.py": "",
        "tasks/parts/engines/torch/runner.py": "",
        "tasks/parts/engines/torch/unused.py": "from tasks.parts.data import dataset\n",
        "tasks/parts/engines/openvino/runner.py": "",
        "tasks/parts/data/dataset.py": "",
    }.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    monkeypatch.setattr(fingerprint, "SOURCE_ROOT", tmp_path)
    code_digests.cache_clear()
    found = code_digests("tasks.train")
    assert list(found) == ["tasks/parts/engines", "tasks/parts/tables.py", "tasks/train.py"]
    for name in ("openvino/runner.py", "torch/unused.py"):  # not imported, but in the folder
        (tmp_path / "tasks/parts/engines" / name).write_text("one = 1\n")
        code_digests.cache_clear()
        changed = code_digests("tasks.train")
        assert changed["tasks/parts/engines"] != found["tasks/parts/engines"]
        found = changed
    code_digests.cache_clear()


def test_module_that_is_named_at_run_time_stands_for_all_that_it_may_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    call = 'importlib.import_module(f"tasks.parts.engines.{runtime}.runner")'
    for name, text in {
        "tasks/train.py": f"import importlib\n\n\ndef load(runtime):\n    return {call}\n",
        "tasks/parts/engines/torch/runner.py": "from tasks.parts.networks import zeros\n",
        "tasks/parts/engines/openvino/runner.py": "from tasks.parts import tables\n",
        "tasks/parts/engines/openvino/compile.py": "from tasks.parts.data import dataset\n",
        "tasks/parts/networks/zeros.py": "",
        "tasks/parts/data/dataset.py": "",
        "tasks/parts/tables.py": "",
    }.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    monkeypatch.setattr(fingerprint, "SOURCE_ROOT", tmp_path)
    code_digests.cache_clear()
    parts = ["tasks/parts/engines", "tasks/parts/networks", "tasks/parts/tables.py"]
    assert list(code_digests("tasks.train")) == [*parts, "tasks/train.py"]
    code_digests.cache_clear()


def test_key_depends_on_config_inputs_facts_and_stage_but_not_on_names_of_folders(tmp_path: Path) -> None:
    one, two = tmp_path / "one.bin", tmp_path / "elsewhere" / "two.bin"
    two.parent.mkdir()
    one.write_bytes(b"same")
    two.write_bytes(b"same")
    key = stage_key("prune", {"ratio": 0.5}, {"checkpoint": one}, {"torch": "2.13"})
    assert key == stage_key("prune", {"ratio": 0.5}, {"checkpoint": two}, {"torch": "2.13"})
    assert key != stage_key("prune", {"ratio": 0.6}, {"checkpoint": one}, {"torch": "2.13"})
    assert key != stage_key("prune", {"ratio": 0.5}, {"checkpoint": one}, {"torch": "2.14"})
    assert key != stage_key("finetune", {"ratio": 0.5}, {"checkpoint": one}, {"torch": "2.13"})
    two.write_bytes(b"other")
    assert key != stage_key("prune", {"ratio": 0.5}, {"checkpoint": two}, {"torch": "2.13"})
