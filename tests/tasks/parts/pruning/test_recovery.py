"""New statistics after a cut, and the short training between two steps of pruning."""

import csv
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from tasks.parts.data.dataset import normalise
from tasks.parts.networks.checkpoint import load_checkpoint
from tasks.parts.networks.config import NetworkConfig, NetworkName
from tasks.parts.networks.model_card import ModelCard
from tasks.parts.networks.zeros import count_zeros
from tasks.parts.pruning.recovery import recalibrate_batchnorm, recover
from tasks.parts.pruning.weights import prune_two_of_four
from tests.tasks.conftest import Workshop
from tests.tasks.test_train import TRAINER


class Pooled(nn.Module):
    """A BatchNorm on the map, one behind a global pooling, and dropout between them."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm2d(3, momentum=0.3)
        self.dropout = nn.Dropout(0.5)
        self.pooled = nn.BatchNorm2d(3)

    def forward(self, images_NCHW: Tensor) -> Tensor:
        logits: Tensor = self.pooled(self.dropout(self.norm(images_NCHW)).mean((2, 3), keepdim=True))
        return logits


CARD = ModelCard(
    NetworkConfig(NetworkName.fast_scnn, 1.0, 1.0, False), ("a", "b", "c"), (0.4,) * 3, (0.2,) * 3, 8, 8
)


def test_new_statistics_are_means_over_batches_and_nothing_else_changes() -> None:
    network = Pooled()
    norms = (network.norm, network.pooled)
    for norm in norms:
        nn.init.constant_(norm.running_mean, 7.0)
    images_NHWC = np.random.default_rng(0).integers(0, 256, (5, 8, 8, 3), np.uint8)
    recalibrate_batchnorm(network, images_NHWC, CARD, batch_size=2)  # the fifth image would be alone
    images_NCHW = torch.from_numpy(normalise(images_NHWC[:4], CARD.mean, CARD.std))
    torch.testing.assert_close(network.norm.running_mean, images_NCHW.mean((0, 2, 3)))
    variances = torch.stack([batch.var((0, 2, 3)) for batch in images_NCHW.split(2)])
    torch.testing.assert_close(network.norm.running_var, variances.mean(0))
    # Each batch is normalised by its own statistics, so its pooled means are 0 on average: no dropout.
    torch.testing.assert_close(network.pooled.running_mean, torch.zeros(3), atol=1e-6, rtol=0)
    assert [norm.momentum for norm in norms] == [0.3, 0.1]
    assert not any(module.training for module in network.modules())
    assert all(parameter.grad is None for parameter in network.parameters())


def test_network_without_batchnorm_is_left_alone() -> None:
    recalibrate_batchnorm(
        nn.Conv2d(3, 3, 99), np.zeros((2, 8, 8, 3), np.uint8), CARD, batch_size=2
    )  # too large to run


def test_recovered_network_keeps_its_own_forward_and_its_zeros(workshop: Workshop, tmp_path: Path) -> None:
    torch.set_num_threads(1)
    network, _ = load_checkpoint(workshop.checkpoint)
    prune_two_of_four(network)
    zeros = count_zeros(network)
    before = network.get_parameter("classifier.weight").detach().clone()
    val_score = recover(
        network, workshop.data, replace(TRAINER, activation_checkpoints=["*"]), tmp_path / "out"
    )
    with (tmp_path / "out" / "history.csv").open() as file:
        best = max(float(row["val_miou"]) for row in csv.DictReader(file))
    assert val_score == pytest.approx(best, abs=1e-6)
    assert not torch.equal(network.get_parameter("classifier.weight"), before)
    assert count_zeros(network) == zeros and sum(zeros.values()) > 1000
    assert not any("forward" in vars(module) for module in network.modules())
