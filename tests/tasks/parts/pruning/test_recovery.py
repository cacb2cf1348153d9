"""The short training between two steps of pruning."""

import csv
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tasks.parts.networks.checkpoint import load_checkpoint
from tasks.parts.networks.zeros import count_zeros
from tasks.parts.pruning.recovery import recover
from tasks.parts.pruning.weights import prune_two_of_four
from tests.tasks.conftest import Workshop
from tests.tasks.test_train import TRAINER


def test_recovered_network_keeps_its_own_forward_and_its_zeros(workshop: Workshop, tmp_path: Path) -> None:
    torch.set_num_threads(1)
    network, _ = load_checkpoint(workshop.checkpoint)
    prune_two_of_four(network)
    zeros = count_zeros(network)
    before = network.get_parameter("classifier.weight").detach().clone()
    val_miou = recover(
        network, workshop.data, replace(TRAINER, activation_checkpoints=["*"]), tmp_path / "out"
    )
    with (tmp_path / "out" / "history.csv").open() as file:
        best = max(float(row["val_miou"]) for row in csv.DictReader(file))
    assert val_miou == pytest.approx(best, abs=1e-6)
    assert not torch.equal(network.get_parameter("classifier.weight"), before)
    assert count_zeros(network) == zeros and sum(zeros.values()) > 1000
    assert not any("forward" in vars(module) for module in network.modules())
