"""Networks and weights of users, from the file to the pick, with stages left out."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.conftest import REPOSITORY, Workspace, copy_repository

pytestmark = pytest.mark.slow

SMALL = (
    "debug=smoke",
    "steps.teacher=false",
    "network@train.baseline.network=custom",
    "train.baseline.network.file=my_networks/gated.py",
    "train.baseline.network.factory=build",
    "+train.baseline.network.arguments={width: 16}",
    "prune.target_macs_ratio=0.85",
    "prune.channel_multiple=8",
    "search_pruning.target_macs_ratios=[0.85]",
    "prepare_data.height=32",
    "prepare_data.width=32",
    "target=[cpu_torch,cpu_onnxruntime]",
)
DICE = """
import numpy as np

def dice(logits, masks):
    found, count = logits.argmax(axis=1), logits.shape[1]
    scores = []
    for one, mask in zip(found, masks):
        pairs = [(one[mask < count] == n, mask[mask < count] == n) for n in range(1, count)]
        sizes = [(2 * (a & b).sum(), a.sum() + b.sum()) for a, b in pairs]
        scores.append(np.mean([hits / size for hits, size in sizes if size] or [1.0]))
    return np.array(scores)
"""
METRIC = "model.metric=metrics.py:dice"
GIT = ("git", "-c", "user.name=Tests", "-c", "user.email=tests@localhost")


@pytest.fixture
def space(tmp_path: Path) -> Iterator[Workspace]:
    space = copy_repository(tmp_path / "space")
    shutil.copytree(REPOSITORY / "tests/tasks/foreign_networks", space.path / "my_networks")
    yield space
    space.run("python", "-m", "flows.local_server", "--stop")


def optimized(space: Workspace, *overrides: str) -> str:
    done = space.run("python", "-m", "flows.optimize", *SMALL, *overrides)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-8000:]
    return done.stdout + done.stderr


def report(space: Workspace, stage: str) -> Any:
    return json.loads((space.path / "artifacts" / stage / "report.json").read_text())


def test_own_network_with_an_own_metric_and_then_its_finished_weights_c5(space: Workspace) -> None:
    (space.path / "metrics.py").write_text(DICE)
    untracked = space.run("python", "-m", "flows.optimize", *SMALL)
    assert untracked.returncode == 1
    assert "my_networks/gated.py is not tracked by git" in untracked.stderr, untracked.stderr
    for command in (("add", "my_networks", "metrics.py"), ("commit", "-q", "-m", "Network")):
        assert space.run(*GIT, *command).returncode == 0

    optimized(space, METRIC)
    pruned = report(space, "prune")
    assert pruned["macs_after"] < pruned["macs_before"]
    assert any("grouped" in name for name in pruned["layers_kept_whole"].values()), pruned
    rows = json.loads((space.path / "artifacts/select_engine/engines.json").read_text())
    built = {(row["variant"], row["target"]) for row in rows if row["engine_sha256"]}
    assert {row["metric"] for row in rows} == {"dice (own metric)"}
    stages = ("train/baseline", "rank_groups", "search_pruning", "finetune", "quantize_ptq")
    for stage in (*stages, "quantize_repaired", "quantize_partial", "quantize_aware_train"):
        assert report(space, stage)["metric"] == "dice (own metric)", stage
    history = (space.path / "artifacts/train/baseline/history.csv").read_text()
    assert history.startswith("epoch,loss,val_miou,val_dice,")
    for page in ("report.md", "report.html"):
        assert "dice (own metric)" in (space.path / "artifacts/select_engine" / page).read_text()
    assert {
        ("pruned", "cpu_torch"),
        ("pruned_ptq", "cpu_onnxruntime"),
        ("pruned_qat", "cpu_onnxruntime"),
    } <= built
    layers = (space.path / "artifacts/diff_layers/pruned_ptq/cpu_onnxruntime/layers.csv").read_text()
    assert "my_networks/gated.py:" in layers
    assert space.changed_stages() == {}

    tensors = load_file(space.path / "artifacts/train/baseline/model.safetensors")
    state = {name.removeprefix("network."): tensor for name, tensor in tensors.items()}
    torch.save({"state_dict": state, "epoch": 3}, space.path / "weights.pt")
    converted = space.run("python", "-m", "flows.convert_weights", "weights.pt", "weights.safetensors")
    assert f"{len(state)} tensors" in converted.stdout, converted.stderr
    trained = report(space, "train/baseline")
    network = space.path / "my_networks/gated.py"
    network.write_text(network.read_text() + "# edited, not committed\n")
    finished = ("train.baseline.checkpoint=weights.safetensors", "steps.pruning=false")
    optimized(space, METRIC, *finished, "steps.quantize_aware_train=false")
    imported = report(space, "import_checkpoint/baseline")
    assert imported["metric"] == trained["metric"] == "dice (own metric)"
    assert imported["val_score"] == pytest.approx(trained["val_score"])
    rows = json.loads((space.path / "artifacts/select_engine/engines.json").read_text())
    assert {row["variant"] for row in rows} == {
        "baseline",
        *(f"baseline_{rung}" for rung in ("fp16", "ptq", "repaired", "partial")),
    }

    [engine] = [row for row in rows if (row["variant"], row["target"]) == ("baseline", "cpu_onnxruntime")]
    again = space.run("python", "-m", "flows.reproduce", engine["engine_sha256"])
    assert again.returncode == 1 and "holds other code of the network" in again.stderr, again.stderr
