"""The atrous rates of DeepLabV3+: 1, 2, 3 unless others are set."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from flows.params import compose_params
from tasks.core.config import typed_config
from tasks.core.errors import ConfigError
from tasks.parts.networks.build import build_network
from tasks.parts.networks.checkpoint import load_checkpoint, save_checkpoint
from tasks.parts.networks.config import NetworkConfig, NetworkName
from tasks.parts.networks.deeplabv3plus import DeepLabV3Plus
from tasks.parts.networks.model_card import ModelCard

PLAIN = NetworkConfig(NetworkName.deeplabv3plus, 0.25, 0.1, False)


def dilations(network: nn.Module) -> list[int]:
    assert isinstance(network, DeepLabV3Plus)
    convs = [layer for layer in network.pyramid.atrous.modules() if isinstance(layer, nn.Conv2d)]
    return [conv.dilation[0] for conv in convs]


def test_rates_are_those_of_the_configuration_c5() -> None:
    key = "train.baseline.network.atrous_rates"
    for overrides, expected in (([], [1, 2, 3]), ([f"{key}=[6,12,18]"], [6, 12, 18])):
        section = compose_params(overrides)["train"]["baseline"]["network"]
        assert dilations(build_network(typed_config(NetworkConfig, section, "network"), 3)) == expected
    for wrong in ("[]", "[0,2]", "[1.5]"):
        with pytest.raises(ConfigError, match=r"train\.baseline\.network\.atrous_rates"):
            compose_params([f"{key}={wrong}"])
    other = ["network@train.baseline.network=fast_scnn", "+train.baseline.network.atrous_rates=[1,2]"]
    with pytest.raises(ConfigError, match=r"atrous_rates is \[1, 2\], and name is fast_scnn, which has none"):
        compose_params(other)


def test_a_checkpoint_comes_back_with_its_rates_c5(tmp_path: Path) -> None:
    values = (0.5,) * 3
    images_NCHW = torch.randn(1, 3, 64, 64)
    for config in (PLAIN, replace(PLAIN, atrous_rates=[1, 3])):
        network = build_network(config, 2).eval()
        card = ModelCard(config, ("a", "b"), values, values, 64, 64)
        assert ("atrous_rates" in card.to_json()) == (config is not PLAIN), "older cards stay as they are"
        save_checkpoint(tmp_path / "model.safetensors", network, card)
        loaded, found = load_checkpoint(tmp_path / "model.safetensors")
        assert found.network == config and dilations(loaded) == dilations(network)
        with torch.no_grad():
            assert torch.equal(loaded(images_NCHW), network(images_NCHW))
