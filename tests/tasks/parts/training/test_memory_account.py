"""What a training keeps in memory: bytes that can be computed by hand, and those that autograd really saves."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tasks.core.errors import ConfigError
from tasks.parts.networks.build import build_network
from tasks.parts.networks.config import NetworkConfig, NetworkName
from tasks.parts.training.activations import save_activation_memory
from tasks.parts.training.config import Optimizer, Precision, TrainerConfig
from tasks.parts.training.losses import LabelLoss
from tasks.parts.training.memory_account import account_memory
from tasks.parts.training.module import Batch, LabelObjective
from tests.tasks.test_train import PLAIN, TRAINER

FLOAT = 4
MAP = 2 * 8 * 8 * FLOAT
"""Bytes of one channel of a batch of 2 images of 8x8."""
NUM_WEIGHTS = 3 * 4 * 9 + 4 * 4 * 9 + 4 * 2


class Sum(nn.Module):
    """An objective that saves nothing."""

    def forward(self, network: nn.Module, batch: Batch) -> Tensor:
        total: Tensor = network(batch.images_NCHW).sum()
        return total


def tiny_network() -> nn.Module:
    """Two convolutions with ReLU, each of which keeps its input, then a classifier; no bias."""
    body = nn.Sequential(
        nn.Conv2d(3, 4, 3, padding=1, bias=False),
        nn.ReLU(),
        nn.Conv2d(4, 4, 3, padding=1, bias=False),
        nn.ReLU(),
    )
    return nn.Sequential(body, nn.Conv2d(4, 2, 1, bias=False))


def random_batch(num_images: int = 2, size: int = 8) -> Batch:
    torch.manual_seed(0)
    masks_NHW = torch.randint(0, 3, (num_images, size, size))
    indices_N = torch.arange(num_images)
    return Batch(torch.randn(num_images, 3, size, size), masks_NHW, indices_N, torch.zeros_like(indices_N))


def config(**changes: Any) -> TrainerConfig:
    return replace(TRAINER, **({"optimizer": Optimizer.adamw, "ema_decay": 0.0} | changes))


def test_bytes_of_a_tiny_network_are_those_of_the_formula() -> None:
    found = account_memory(tiny_network(), Sum(), random_batch(), config())
    assert found.weight_bytes == found.gradient_bytes == NUM_WEIGHTS * FLOAT
    assert found.optimizer_bytes == 2 * NUM_WEIGHTS * FLOAT and found.average_bytes == 0
    assert found.activation_bytes == (3 + 4 + 4) * MAP  # the image, and the output of each ReLU
    assert found.recomputed_bytes == 0
    assert found.total_bytes == 4 * NUM_WEIGHTS * FLOAT + 11 * MAP


def test_activations_grow_with_the_batch_and_nothing_else_does() -> None:
    small, large = (account_memory(tiny_network(), Sum(), random_batch(n), config()) for n in (2, 6))
    assert large == replace(small, activation_bytes=3 * small.activation_bytes)


def test_a_checkpointed_module_keeps_its_input_and_output() -> None:
    found = account_memory(tiny_network(), Sum(), random_batch(), config(activation_checkpoints=["0"]))
    assert found.activation_bytes == (3 + 4) * MAP
    assert found.recomputed_bytes == 4 * MAP


@pytest.mark.parametrize(
    ("changes", "num_moments", "num_averages"),
    [
        ({"optimizer": Optimizer.sgd, "momentum": 0.9}, 1, 0),
        ({"optimizer": Optimizer.sgd, "momentum": 0.0}, 0, 0),
        ({"ema_decay": 0.99}, 2, 1),
    ],
)
def test_optimizer_and_average_count_as_they_keep(
    changes: dict[str, Any], num_moments: int, num_averages: int
) -> None:
    found = account_memory(tiny_network(), Sum(), random_batch(), config(**changes))
    assert found.optimizer_bytes == num_moments * found.weight_bytes
    assert found.average_bytes == num_averages * found.weight_bytes


def test_frozen_layers_keep_no_gradient_and_no_activation() -> None:
    found = account_memory(tiny_network(), Sum(), random_batch(), config(layer_rates={"0": 0.0}))
    assert found.gradient_bytes == 4 * 2 * FLOAT and found.optimizer_bytes == 2 * found.gradient_bytes
    assert found.activation_bytes == 4 * MAP  # the input of the classifier


def test_unknown_module_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"activation_checkpoints names 'spine'"):
        account_memory(tiny_network(), Sum(), random_batch(), config(activation_checkpoints=["spine"]))


@pytest.mark.parametrize("precision", [Precision.fp32, Precision.bf16_mixed])
@pytest.mark.parametrize(
    ("name", "patterns"),
    [
        (NetworkName.deeplabv3plus, ["stem.*", "backbone.*.*", "pyramid"]),
        (NetworkName.mobile_unet, ["*"]),
        (NetworkName.segformer, ["segformer.stages.*"]),
    ],
)
def test_account_is_what_autograd_saves_of_a_network_with_checkpoints(
    name: NetworkName, patterns: list[str], precision: Precision
) -> None:
    torch.manual_seed(0)
    network = build_network(NetworkConfig(name, 0.5, 0.5, depthwise=False), 3).train()
    objective, batch = LabelObjective(LabelLoss(PLAIN, torch.ones(3))), random_batch(size=64)
    plain = config(precision=precision)
    frugal = replace(plain, activation_checkpoints=patterns)
    before = {key: value.clone() for key, value in network.state_dict().items()}
    found, without = (account_memory(network, objective, batch, each) for each in (frugal, plain))
    assert all(torch.equal(value, before[key]) for key, value in network.state_dict().items())
    assert found.activation_bytes + found.recomputed_bytes < without.activation_bytes

    save_activation_memory(network, patterns, [])
    network.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    images_NCHW = batch.images_NCHW.contiguous(memory_format=torch.channels_last)
    held = {each.untyped_storage().data_ptr() for each in (*network.parameters(), *network.buffers())}
    held.add(objective.label_loss.weights_C.untyped_storage().data_ptr())
    saved = {}

    def note(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        saved[storage.data_ptr()] = storage
        return tensor

    with (
        torch.autocast("cpu", torch.bfloat16, enabled=precision is Precision.bf16_mixed),
        torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor),
    ):
        loss = objective(network, batch._replace(images_NCHW=images_NCHW))
    really = sum(storage.nbytes() for address, storage in saved.items() if address not in held)
    assert loss.isfinite() and found.activation_bytes == pytest.approx(really, rel=0.01)


class Pyramid(nn.Module):
    """A decoder of a list of maps, such as that of a transformer."""

    def __init__(self) -> None:
        super().__init__()
        self.weights_C = nn.Parameter(torch.ones(4, 1, 1))

    def forward(self, maps: list[Tensor]) -> Tensor:
        return maps[0] * self.weights_C + maps[1]


class Pyramids(nn.Module):
    """Two maps for a decoder that keeps but one of them."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 4, 1, bias=False)
        self.decoder = Pyramid()

    def forward(self, images_NCHW: Tensor) -> Tensor:
        map_NCHW = self.stem(images_NCHW)
        found: Tensor = self.decoder([map_NCHW, map_NCHW + 1])
        return found


def test_maps_that_a_checkpointed_decoder_takes_as_a_list_are_kept() -> None:
    plain, frugal = (
        account_memory(Pyramids(), Sum(), random_batch(), config(activation_checkpoints=patterns))
        for patterns in ([], ["decoder"])
    )
    assert plain.activation_bytes == (3 + 4) * MAP
    assert (frugal.activation_bytes, frugal.recomputed_bytes) == ((3 + 4 + 4) * MAP, 0)
