"""Two processes with gloo on the CPU: Lightning's launcher through the stage command."""

from pathlib import Path

import pytest
import torch
import yaml

from tasks.parts.networks.checkpoint import load_checkpoint
from tasks.parts.pruning.recovery import measure_val_score
from tests.conftest import Workspace, copy_repository
from tests.services import free_port
from tests.tasks.core.test_execute import PREPARE, TINY_SCENES, TRAIN, change_params


def prepare(workspace: Workspace, **trainer: int | str) -> None:
    """Configure a tiny training with DDP on the CPU."""
    change_params(workspace, **{f"prepare_data.scenes.{name}": count for name, count in TINY_SCENES.items()})
    settings = {"strategy": "ddp", "accelerator": "cpu", "max_epochs": 2, "batch_size": 4, **trainer}
    change_params(workspace, **{f"train.baseline.trainer.{name}": value for name, value in settings.items()})
    change_params(workspace, **{"train.baseline.network.width": 0.25})


@pytest.mark.slow
def test_two_nodes_train_and_only_the_first_publishes(tmp_path: Path) -> None:
    nodes = []
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
        nodes.append(copy_repository(tmp_path / name))
        prepare(nodes[-1], num_nodes=2, max_epochs=1)
        assert nodes[-1].run(*PREPARE).returncode == 0
    where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    second = nodes[1].start(*TRAIN, NODE_RANK="1", **where)
    first = nodes[0].run(*TRAIN, NODE_RANK="0", timeout_s=400, **where)
    said, _ = second.communicate(timeout=100)
    assert first.returncode == 0, first.stderr[-4000:]
    assert second.returncode == 0, said[-4000:]
    published = [(node.path / "artifacts/train/baseline/model.safetensors").exists() for node in nodes]
    assert published == [True, False]


@pytest.mark.slow
def test_two_ranks_train_count_each_image_once_and_only_one_publishes_c7(workspace: Workspace) -> None:
    """Without a GPU the default accelerator, auto, is the CPU, which has no SyncBatchNorm."""
    prepare(workspace, num_devices=2, accelerator="auto")
    change_params(workspace, **{"prepare_data.scenes.num_val": 5})
    assert workspace.run(*PREPARE).returncode == 0
    trained = workspace.run(*TRAIN, timeout_s=400)
    assert trained.returncode == 0, trained.stderr[-4000:]
    folder = workspace.path / "artifacts" / "train" / "baseline"
    report = yaml.safe_load((folder / "report.json").read_text())
    assert report["num_epochs"] == 2
    network, card = load_checkpoint(folder / "model.safetensors")
    data = workspace.path / "artifacts/prepare_data/dataset"
    assert report["val_score"] == pytest.approx(
        measure_val_score(network, card, data, 4), abs=2e-4
    )  # ranks have other threads
    assert "Traceback" not in trained.stderr
    if not torch.cuda.is_available():
        assert "BatchNorm has the statistics of each process's own batch of 4 images" in trained.stderr
    assert not list((workspace.path / "artifacts" / ".drafts").iterdir())
    assert "fresh, nothing to run" in workspace.run(*TRAIN).stderr
