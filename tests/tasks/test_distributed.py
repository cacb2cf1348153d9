"""Two processes with gloo on the CPU: Lightning's launcher through the stage command."""

import pytest
import yaml

from tests.conftest import Workspace
from tests.tasks.core.test_execute import PREPARE, TINY_SCENES, TRAIN, change_params


@pytest.mark.slow
def test_two_ranks_train_and_only_one_publishes(workspace: Workspace) -> None:
    change_params(workspace, **{f"prepare_data.scenes.{name}": count for name, count in TINY_SCENES.items()})
    trainer = "train.baseline.trainer"
    change_params(workspace, **{f"{trainer}.num_devices": 2, f"{trainer}.strategy": "ddp"})
    change_params(workspace, **{f"{trainer}.accelerator": "cpu", f"{trainer}.max_epochs": 2})
    change_params(workspace, **{f"{trainer}.batch_size": 4, "train.baseline.network.width": 0.25})
    assert workspace.run(*PREPARE).returncode == 0
    trained = workspace.run(*TRAIN, timeout_s=400)
    assert trained.returncode == 0, trained.stderr[-4000:]
    folder = workspace.path / "artifacts" / "train" / "baseline"
    assert yaml.safe_load((folder / "report.json").read_text())["num_epochs"] == 2
    assert "Traceback" not in trained.stderr
    assert not list((workspace.path / "artifacts" / ".drafts").iterdir())
    assert "fresh, nothing to run" in workspace.run(*TRAIN).stderr
