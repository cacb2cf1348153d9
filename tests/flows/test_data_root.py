"""Data outside the repository: both drivers read it by its absolute path, and notice when it changes."""

import shutil
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from flows.params import compose_params, write_params
from tests.conftest import Workspace


@pytest.mark.slow
def test_data_outside_the_repository_is_prepared_once_by_both_drivers(
    workspace: Workspace, tmp_path: Path
) -> None:
    root = tmp_path / "elsewhere"
    for folder in ("images", "masks"):
        (root / folder).mkdir(parents=True)
    (root / "classes.yaml").write_text("[road, car]\n")
    for number in range(10):
        image = np.random.default_rng(number).integers(256, size=(16, 16, 3)).astype(np.uint8)
        Image.fromarray(image).save(root / f"images/{number}.png")
        Image.fromarray(np.eye(16, dtype=np.uint8)).save(root / f"masks/{number}.png")
    sizes = ["prepare_data.height=16", "prepare_data.width=16", "prepare_data.folder.num_calibration=2"]
    overrides = ["data=folder", f"prepare_data.root={root}", *sizes]
    write_params(compose_params(overrides), workspace.path / "params.yaml")
    assert workspace.reproduce("prepare_data") == ["prepare_data"]
    assert workspace.reproduce("prepare_data") == []
    fresh = workspace.run(
        "python", "-m", "tasks", "prepare_data", f"root={root}", PYTHONPATH=str(workspace.path)
    )
    assert fresh.returncode == 0 and "prepare_data: fresh, nothing to run" in fresh.stdout + fresh.stderr
    shutil.copy(root / "images/0.png", root / "images/1.png")
    assert workspace.reproduce("prepare_data") == ["prepare_data"]
