"""The script that tries TensorRT for RTX on a GPU, as far as a machine without one goes."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import gpu_tensorrt
from tests.conftest import REPOSITORY, Workspace


def test_parts_of_a_file_are_joined_in_their_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_tensorrt, "PART_BYTES", 3)
    content = bytes(range(32))
    file = tmp_path / "some" / "libs.whl"
    file.parent.mkdir()
    file.write_bytes(content)
    gpu_tensorrt.split(file)
    sizes = [path.stat().st_size for path in file.parent.iterdir()]
    assert len(sizes) == 11 and max(sizes) == 3
    assert gpu_tensorrt.join(tmp_path) == [file] == [*file.parent.iterdir()]
    assert file.read_bytes() == content


@pytest.mark.trial
def test_run_is_packed_and_the_wheels_build_a_plan_where_there_is_no_gpu(
    smoke_run: tuple[Workspace, str], tmp_path: Path
) -> None:
    packed, out = tmp_path / "packed", tmp_path / "out"
    done = smoke_run[0].run("python", "-m", "benchmarks.gpu_tensorrt", "--pack", str(packed))
    assert done.returncode == 0, done.stderr
    assert max(path.stat().st_size for path in packed.rglob("*") if path.is_file()) <= 60 << 20
    command = [sys.executable, "-m", "benchmarks.gpu_tensorrt", "--packed", str(packed), "--out", str(out)]
    said = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    steps = json.loads((out / "steps.json").read_text(encoding="utf-8"))
    assert steps.keys() >= {"takes this GPU"}, said.stderr
    log = (out / "takes_this_GPU.log").read_text(encoding="utf-8")
    assert "built a plan of" in log
