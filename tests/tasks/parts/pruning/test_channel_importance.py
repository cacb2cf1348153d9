"""Every importance against its formula, on a convolution with BatchNorm that one other convolution reads."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch_pruning
from torch import Tensor, nn

from tasks.core.errors import ConfigError
from tasks.parts.pruning.channel_importance import score_channels
from tasks.parts.pruning.channels import prune_channels
from tasks.parts.pruning.config import ChannelPruning, Importance, Ranking


class Pair(nn.Module):
    classifier_layer = "classifier"

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 6, 3)
        self.norm = nn.BatchNorm2d(6)
        self.classifier = nn.Conv2d(6, 2, 1)
        nn.init.uniform_(self.norm.weight, -1.5, 1.5)

    def forward(self, images_NCHW: Tensor) -> Tensor:
        logits: Tensor = self.classifier(torch.relu(self.norm(self.first(images_NCHW))))
        return logits


@pytest.fixture
def pair() -> Pair:
    torch.manual_seed(0)
    network = Pair().eval()
    return network


def batch_losses(network: nn.Module) -> Iterator[Tensor]:
    for seed in range(3):
        images_NCHW = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(seed))
        yield network(images_NCHW).square().mean()


def score(network: nn.Module, importance: Importance, layer: nn.Module) -> Tensor:
    graph = torch_pruning.DependencyGraph().build_dependency(network, torch.zeros(1, 3, 8, 8), verbose=False)
    prune_outputs = graph.get_pruner_of_module(layer).prune_out_channels
    group: Any = graph.get_pruning_group(layer, prune_outputs, list(range(layer.weight.shape[0])))
    return score_channels(importance, [group], network, batch_losses)[0]


def relative(values: Tensor) -> Tensor:
    return values / values.mean()


def test_magnitudes_follow_their_formulas(pair: Pair) -> None:
    own, scale, read = pair.first.weight.data, pair.norm.weight.data, pair.classifier.weight.data
    l1 = own.abs().sum((1, 2, 3)) + scale.abs() + read.abs().sum((0, 2, 3))
    squares = own.square().sum((1, 2, 3)) + scale.square() + read.square().sum((0, 2, 3))
    for importance, expected in (
        (Importance.l1, relative(l1)),
        (Importance.l2, relative(own.square().sum((1, 2, 3)))),
        (Importance.group_norm, relative(squares)),
        (Importance.batchnorm_scale, scale.abs()),
    ):
        torch.testing.assert_close(score(pair, importance, pair.first), expected, msg=str(importance))


def test_taylor_adds_what_each_batch_would_lose(pair: Pair) -> None:
    """Molchanov et al. 2019, equation 9 without the square: |sum of weight times gradient| of each filter."""
    expected = torch.zeros(6)
    for loss in batch_losses(pair):
        own, read = torch.autograd.grad(loss, [pair.first.weight, pair.classifier.weight])
        expected += (own * pair.first.weight).sum((1, 2, 3)).abs().detach()
        expected += (read * pair.classifier.weight).sum((0, 2, 3)).abs().detach()
    torch.testing.assert_close(score(pair, Importance.taylor, pair.first), expected)
    assert all(parameter.grad is None for parameter in pair.parameters())


def test_taylor_without_images_is_refused(pair: Pair) -> None:
    with pytest.raises(ConfigError, match=r"taylor, which needs labelled images"):
        score_channels(Importance.taylor, [], pair, None)


def test_failure_of_a_batch_is_not_called_a_failure_to_trace(pair: Pair) -> None:
    def out_of_memory(_network: nn.Module) -> Iterator[Tensor]:
        raise torch.OutOfMemoryError("no memory left")
        yield

    pruning = ChannelPruning(0.5, 1, Ranking.across_layers, 0.75, 1, Importance.taylor, {})
    with pytest.raises(torch.OutOfMemoryError, match="no memory left"):
        prune_channels(pair, pruning, size=(8, 8), batch_losses=out_of_memory)


def test_layer_without_batchnorm_has_no_batchnorm_scale() -> None:
    network = nn.Sequential(nn.Conv2d(3, 6, 3), nn.ReLU(), nn.Conv2d(6, 2, 1))
    with pytest.raises(ConfigError, match=r"no BatchNorm follows layer '0'.*layer_ratios=\{0: 0\.0\}"):
        score(network, Importance.batchnorm_scale, network[0])
