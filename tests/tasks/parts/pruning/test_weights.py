"""Zeros: the smallest weights become zero, the pattern is the one of sparse tensor cores, training keeps it."""

import numpy as np
import pytest
import torch
from torch import nn

from tasks.parts.networks.zeros import count_zeros, is_two_of_four, keep_zeros, layers_without_pattern
from tasks.parts.pruning.weights import prune_two_of_four, zero_smallest_weights


@pytest.fixture
def network() -> nn.Sequential:
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 3, groups=8), nn.Conv2d(8, 12, 3))
    with torch.no_grad():
        layers[2].weight *= 0.1
    return layers


def test_the_smallest_weights_of_all_layers_go_first(network: nn.Sequential) -> None:
    before = [layer.weight.detach().clone() for layer in network]
    zero_smallest_weights(network, ["0", "2"], 0.4)
    threshold = torch.cat([before[0].flatten(), before[2].flatten()]).abs().quantile(0.4)
    for index in (0, 2):
        expected = torch.where(before[index].abs() > threshold, before[index], 0.0)
        assert torch.equal(network[index].weight, expected)
        assert isinstance(network[index].weight, nn.Parameter), "permanent: no mask is left beside it"
    assert torch.equal(network[1].weight, before[1])
    zeros = count_zeros(network)
    assert zeros["2"] > zeros["0"] and zeros["1"] == 0


def test_more_zeros_later_keep_the_earlier_ones(network: nn.Sequential) -> None:
    zero_smallest_weights(network, ["2"], 0.25)
    first = network[2].weight == 0
    zero_smallest_weights(network, ["2"], 0.5)
    second = network[2].weight == 0
    assert int(second.sum()) == network[2].weight.numel() // 2
    assert bool(second[first].all())


def test_two_largest_of_four_input_channels_stay(network: nn.Sequential) -> None:
    before = network[2].weight.detach().clone()
    assert layers_without_pattern(network) == ["0", "1"]
    prune_two_of_four(network)
    for output in range(12):
        for row in range(3):
            for column in range(3):
                for start in (0, 4):
                    old = before[output, start : start + 4, row, column]
                    new = network[2].weight[output, start : start + 4, row, column]
                    kept = old.abs().topk(2).indices
                    expected = torch.zeros(4).index_copy(0, kept, old[kept])
                    assert torch.equal(new, expected)
    assert count_zeros(network) == {"0": 0, "1": 0, "2": before.numel() // 2}


def test_equal_weights_are_thinned_to_two_as_well() -> None:
    layer = nn.Sequential(nn.Conv2d(8, 4, 1))
    nn.init.ones_(layer[0].weight)
    prune_two_of_four(layer)
    assert layer[0].weight.sum() == 16


def test_linear_layers_are_thinned_and_counted_too() -> None:
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(8, 3), nn.Linear(6, 3))
    before = network[0].weight.detach().clone()
    assert layers_without_pattern(network) == ["1"]
    prune_two_of_four(network)
    assert count_zeros(network) == {"0": 12, "1": 0}
    for row, old in zip(network[0].weight.detach(), before, strict=True):
        for start in (0, 4):
            kept = old[start : start + 4].abs().topk(2).indices + start
            assert torch.equal(row[kept], old[kept])
    assert is_two_of_four(network[0].weight.detach().numpy())
    assert not is_two_of_four(before.numpy())


@pytest.mark.parametrize(
    ("weights", "expected"),
    [
        ([1, 1, 0, 0], True),
        ([0, 0, 0, 1], True),
        ([0, 1, 1, 1], False),
        ([1, 1, 0, 0, 0, 0, 1, 1], True),
        ([0, 1, 1, 0, 1, 1, 1, 0], False),
        ([1, 0, 0], False),
        ([0], False),
    ],
)
def test_pattern_is_recognised(weights: list[int], expected: bool) -> None:
    assert is_two_of_four(np.array(weights, np.float32).reshape(1, -1, 1, 1)) is expected


@pytest.mark.parametrize(
    "optimizer_type",
    [
        lambda parameters: torch.optim.AdamW(parameters, lr=0.1, weight_decay=0.1, fused=True),
        lambda parameters: torch.optim.SGD(parameters, lr=0.1, weight_decay=0.1, momentum=0.9, nesterov=True),
    ],
)
def test_zeros_survive_weight_decay_and_momentum(network: nn.Sequential, optimizer_type: object) -> None:
    head = nn.Sequential(network, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(12, 2))
    zero_smallest_weights(network, ["0", "2"], 0.5)
    with torch.no_grad():
        head[3].weight[:, ::2] = 0
    start = {name: value.detach().clone() for name, value in head.named_parameters()}
    num_zeros = sum(count_zeros(network).values()) + 12
    assert keep_zeros(head) == num_zeros
    optimizer = optimizer_type(head.parameters())  # type: ignore[operator]
    for _ in range(5):
        optimizer.zero_grad()
        head(torch.randn(2, 3, 8, 8)).square().sum().backward()
        optimizer.step()
    for name, value in head.named_parameters():
        zeros = start[name] == 0
        if name.endswith("weight"):
            assert bool((value[zeros] == 0).all()), name
        assert not torch.equal(value[~zeros], start[name][~zeros]), name


def test_overflowed_gradient_of_a_zero_is_zero_and_not_nan() -> None:
    layer = nn.Linear(2, 1)
    with torch.no_grad():
        layer.weight[:] = torch.tensor([[0.0, 1.0]])
    keep_zeros(layer)
    (layer(torch.ones(1, 2)) * float("inf")).sum().backward()
    assert layer.weight.grad is not None
    assert layer.weight.grad.tolist() == [[0.0, float("inf")]]
