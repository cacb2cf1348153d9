"""The networks: sizes, counts against a second count by hand, export.

`Tally` adds up parameters and MACs layer by layer from the tables in the papers; it shares no code with the
networks. Flops come from torch's own counter (2 flops a MAC).
"""

import importlib
import subprocess
import sys
from collections import Counter
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from tasks.core.errors import ConfigError
from tasks.parts.networks.batchnorm_folding import fold_batchnorm
from tasks.parts.networks.blocks import pool_to_bins, resize_to
from tasks.parts.networks.branched_conv import BranchedConv
from tasks.parts.networks.build import build_network
from tasks.parts.networks.config import OWN_NETWORKS, SEGFORMER_SIZES, NetworkConfig, NetworkName
from tasks.parts.networks.ddrnet import DDRNet
from tasks.parts.networks.depthwise import to_depthwise_separable
from tasks.parts.networks.model_card import ModelCard
from tasks.parts.onnx_graphs.export import export_graph

NUM_CLASSES = 6


@pytest.fixture(autouse=True)
def one_thread(threads_as_before: None) -> None:
    """On a busy machine two threads wait for each other longer than these small layers take."""
    torch.set_num_threads(1)


class Tally:
    """Parameters and MACs, added up while walking through a network's table for a 64x64 image."""

    def __init__(self) -> None:
        self.parameters = 0
        self.macs = 0

    def conv(self, inputs: int, outputs: int, kernel: int, side: int, *, norm: bool = True) -> None:
        """A plain convolution with `side` x `side` outputs, then BatchNorm (2 parameters) or a bias (1)."""
        self.parameters += inputs * outputs * kernel**2 + outputs * (2 if norm else 1)
        self.macs += inputs * outputs * kernel**2 * side**2

    def depthwise(self, channels: int, side: int) -> None:
        self.parameters += channels * 9 + 2 * channels
        self.macs += channels * 9 * side**2

    def grouped(self, inputs: int, outputs: int, side: int) -> None:
        """A 1x1 convolution of four groups, then BatchNorm."""
        self.conv(inputs // 4, outputs, 1, side)

    def branched(self, inputs: int, outputs: int, side: int, *, has_identity: bool) -> None:
        """A 3x3 and a 1x1 convolution, and the map itself, each with BatchNorm."""
        self.conv(inputs, outputs, 3, side)
        self.conv(inputs, outputs, 1, side)
        self.parameters += 2 * outputs * has_identity

    def linear(self, inputs: int, outputs: int, tokens: int) -> None:
        self.parameters += inputs * outputs + outputs
        self.macs += inputs * outputs * tokens

    def layer_norm(self, channels: int) -> None:
        self.parameters += 2 * channels

    def attention(self, channels: int, tokens: int, keys: int) -> None:
        """Four projections and the two products of queries, keys and values."""
        for read in (tokens, keys, keys, tokens):
            self.linear(channels, channels, read)
        self.macs += 2 * tokens * keys * channels

    def separable(self, inputs: int, outputs: int, side: int) -> None:
        self.depthwise(inputs, side)
        self.conv(inputs, outputs, 1, side)

    def bottleneck(self, inputs: int, outputs: int, side_in: int, side_out: int, expansion: int = 6) -> None:
        hidden = inputs * expansion
        if expansion > 1:
            self.conv(inputs, hidden, 1, side_in)
        self.depthwise(hidden, side_out)
        self.conv(hidden, outputs, 1, side_out)


def tally_fast_scnn() -> Tally:
    tally = Tally()
    tally.conv(3, 32, 3, 32)
    tally.separable(32, 48, 16)
    tally.separable(48, 64, 16)
    inputs, side = 64, 16
    for outputs, stride in ((64, 2), (96, 2), (128, 1)):
        for index in range(3):
            before, side = side, side // (stride if index == 0 else 1)
            tally.bottleneck(inputs, outputs, before, side)
            inputs = outputs
    for bins in (1, 2, 4):
        tally.conv(128, 32, 1, bins, norm=bins > 1)
    tally.conv(128 + 3 * 32, 128, 1, 4)
    tally.conv(64, 128, 1, 16)
    tally.separable(128, 128, 16)
    for _ in range(2):
        tally.separable(128, 128, 16)
    tally.conv(128, NUM_CLASSES, 1, 16, norm=False)
    return tally


def tally_deeplabv3plus() -> Tally:
    tally = Tally()
    tally.conv(3, 24, 3, 32)
    tally.conv(24, 24, 3, 32)
    inputs = 24
    for outputs, side in ((48, 16), (96, 8), (192, 4)):
        tally.conv(inputs, outputs, 3, side)
        tally.conv(inputs, outputs, 1, side)
        for _ in range(3):
            tally.conv(outputs, outputs, 3, side)
        inputs = outputs
    tally.conv(192, 96, 1, 4)
    for _ in range(3):
        tally.conv(192, 96, 3, 4)
    tally.conv(192, 96, 1, 1, norm=False)
    tally.conv(5 * 96, 96, 1, 4)
    tally.conv(48, 32, 1, 16)
    tally.separable(96 + 32, 96, 16)
    tally.separable(96, 96, 16)
    tally.conv(96, NUM_CLASSES, 1, 16, norm=False)
    return tally


def tally_bisenetv2() -> Tally:
    tally = Tally()
    for inputs, outputs, side, repeats in ((3, 64, 32, 1), (64, 64, 16, 2), (64, 128, 8, 2)):
        tally.conv(inputs, outputs, 3, side)
        for _ in range(repeats):
            tally.conv(outputs, outputs, 3, side)
    tally.conv(3, 16, 3, 32)
    tally.conv(16, 8, 1, 32)
    tally.conv(8, 16, 3, 16)
    tally.conv(32, 16, 3, 16)
    for inputs, outputs, side, repeats in ((16, 32, 8, 1), (32, 64, 4, 1), (64, 128, 2, 3)):
        hidden = 6 * inputs
        tally.conv(inputs, inputs, 3, 2 * side)
        tally.conv(inputs, hidden, 1, 2 * side)
        tally.depthwise(hidden, side)
        tally.depthwise(hidden, side)
        tally.conv(hidden, outputs, 1, side)
        tally.depthwise(inputs, side)
        tally.conv(inputs, outputs, 1, side)
        for _ in range(repeats):
            tally.conv(outputs, outputs, 3, side)
            tally.conv(outputs, 6 * outputs, 1, side)
            tally.depthwise(6 * outputs, side)
            tally.conv(6 * outputs, outputs, 1, side)
    tally.conv(128, 128, 1, 1, norm=False)
    tally.conv(128, 128, 3, 2)
    tally.depthwise(128, 8)
    tally.conv(128, 128, 1, 8, norm=False)
    tally.conv(128, 128, 3, 4)
    tally.conv(128, 128, 3, 2)
    tally.depthwise(128, 2)
    tally.conv(128, 128, 1, 2, norm=False)
    tally.conv(128, 128, 3, 8)
    tally.conv(128, 128, 3, 8)
    tally.conv(128, NUM_CLASSES, 1, 8, norm=False)
    return tally


def tally_ddrnet() -> Tally:
    """DDRNet-23-slim of arXiv:2101.06085: 32 channels, stages of two blocks, a bottleneck behind each branch."""
    tally = Tally()

    def stage(inputs: int, outputs: int, side: int) -> None:
        tally.conv(inputs, outputs, 3, side)
        for _ in range(3):
            tally.conv(outputs, outputs, 3, side)
        if inputs != outputs:
            tally.conv(inputs, outputs, 1, side)

    def bottleneck(channels: int, side: int) -> None:
        tally.conv(channels, channels, 1, side)
        tally.conv(channels, channels, 3, side)
        tally.conv(channels, 2 * channels, 1, side)
        tally.conv(channels, 2 * channels, 1, side)

    tally.conv(3, 32, 3, 32)
    tally.conv(32, 32, 3, 16)
    stage(32, 32, 16)
    stage(32, 64, 8)
    stage(64, 128, 4)
    stage(64, 64, 8)
    tally.conv(64, 128, 3, 4)
    tally.conv(128, 64, 1, 4)
    stage(128, 256, 2)
    stage(64, 64, 8)
    tally.conv(64, 128, 3, 4)
    tally.conv(128, 256, 3, 2)
    tally.conv(256, 64, 1, 2)
    bottleneck(64, 8)
    bottleneck(256, 2)
    tally.conv(512, 128, 1, 2)
    for _ in range(4):
        tally.conv(
            512, 128, 1, 1, norm=False
        )  # windows of 5, 9, 17 and all positions leave one average of 2x2
        tally.conv(128, 128, 3, 2)
    tally.conv(5 * 128, 128, 1, 2)
    tally.conv(512, 128, 1, 2)
    tally.conv(128, 64, 3, 8)
    tally.conv(64, NUM_CLASSES, 1, 8, norm=False)
    return tally


def tally_espnetv2_unit(tally: Tally, inputs: int, outputs: int, side_in: int, side: int) -> None:
    """EESP of arXiv:1811.11431: a grouped reduction, four depthwise branches, a grouped expansion."""
    tally.grouped(inputs, outputs // 4, side_in)
    for _ in range(4):
        tally.depthwise(outputs // 4, side)
    tally.grouped(outputs, outputs, side)


def tally_espnetv2_level(tally: Tally, inputs: int, outputs: int, side: int, num_units: int) -> None:
    """A strided unit beside the average, a branch of 3 channels for the image, then units."""
    tally_espnetv2_unit(tally, inputs, outputs - inputs, 2 * side, side)
    tally.conv(3, 3, 3, side)
    tally.conv(3, outputs, 1, side)
    for _ in range(num_units):
        tally_espnetv2_unit(tally, outputs, outputs, side, side)


def tally_espnetv2() -> Tally:
    """Levels of arXiv:1811.11431 for s = 1 without the last level; decoder as in the authors' code."""
    tally = Tally()
    tally.conv(3, 32, 3, 32)
    tally_espnetv2_level(tally, 32, 64, 16, 0)
    tally_espnetv2_level(tally, 64, 128, 8, 3)
    tally_espnetv2_level(tally, 128, 256, 4, 7)
    tally.conv(256, 128, 1, 4)
    tally_espnetv2_unit(tally, 256, 128, 8, 8)
    for side in (4, 2, 1, 1):
        tally.depthwise(128, side)
        tally.parameters -= 2 * 128  # no BatchNorm
    tally.conv(5 * 128, 128, 1, 8)
    tally.conv(128, NUM_CLASSES, 1, 8)
    tally.conv(64 + NUM_CLASSES, NUM_CLASSES, 1, 16)
    tally.conv(32 + NUM_CLASSES, NUM_CLASSES, 1, 32, norm=False)
    return tally


def tally_mobile_unet() -> Tally:
    tally = Tally()
    tally.conv(3, 32, 3, 32)
    inputs, side = 32, 32
    table = (
        (1, 16, 1, 1),
        (6, 24, 2, 2),
        (6, 32, 3, 2),
        (6, 64, 4, 2),
        (6, 96, 3, 1),
        (6, 160, 3, 2),
        (6, 320, 1, 1),
    )
    for expansion, outputs, repeats, stride in table:
        for index in range(repeats):
            before, side = side, side // (stride if index == 0 else 1)
            tally.bottleneck(inputs, outputs, before, side, expansion)
            inputs = outputs
    for skip, outputs, side in ((96, 96, 4), (32, 64, 8), (24, 48, 16), (16, 32, 32)):
        tally.separable(inputs + skip, outputs, side)
        inputs = outputs
    tally.conv(32, NUM_CLASSES, 1, 32, norm=False)
    return tally


def tally_mobilevit() -> Tally:
    """MobileViT-S of arXiv:2110.02178 at output stride 16; head of section 3.3 of arXiv:1706.05587."""
    tally = Tally()
    tally.conv(3, 16, 3, 32)
    tally.bottleneck(16, 32, 32, 32, 4)
    for inputs, before in ((32, 32), (64, 16), (64, 16)):
        tally.bottleneck(inputs, 64, before, 16, 4)
    for inputs, outputs, channels, num_layers, before, side in (
        (64, 96, 144, 2, 16, 8),
        (96, 128, 192, 4, 8, 4),
        (128, 160, 240, 3, 4, 4),
    ):
        tally.bottleneck(inputs, outputs, before, side, 4)
        tally.conv(outputs, outputs, 3, side)
        tally.conv(outputs, channels, 1, side)
        tally.parameters -= 2 * channels  # neither BatchNorm nor bias
        for _ in range(num_layers):
            tally.layer_norm(channels)
            for _ in range(4):
                tally.attention(channels, side**2 // 4, side**2 // 4)
            tally.parameters -= (
                3 * 4 * (channels**2 + channels)
            )  # the four places of a patch share the weights
            tally.layer_norm(channels)
            tally.linear(channels, 2 * channels, side**2)
            tally.linear(2 * channels, channels, side**2)
        tally.layer_norm(channels)
        tally.conv(channels, outputs, 1, side)
        tally.conv(2 * outputs, outputs, 3, side)
    tally.conv(160, 256, 1, 4)
    for _ in range(3):
        tally.conv(160, 256, 3, 4)
    tally.conv(160, 256, 1, 1, norm=False)
    tally.conv(5 * 256, 256, 1, 4)
    tally.conv(256, NUM_CLASSES, 1, 4, norm=False)
    return tally


def tally_repvgg(*, is_merged: bool = False) -> Tally:
    """RepVGG-A0 of arXiv:2101.03697 without its last stage; then laterals of 64 channels and a head."""
    tally = Tally()

    def block(inputs: int, outputs: int, side: int, *, has_identity: bool) -> None:
        if is_merged:
            tally.conv(inputs, outputs, 3, side, norm=False)
        else:
            tally.branched(inputs, outputs, side, has_identity=has_identity)

    block(3, 48, 32, has_identity=False)
    inputs = 48
    for outputs, side, num_blocks in ((48, 16, 2), (96, 8, 4), (192, 4, 14)):
        block(inputs, outputs, side, has_identity=False)
        for _ in range(num_blocks - 1):
            block(outputs, outputs, side, has_identity=True)
        tally.conv(outputs, 64, 1, side, norm=not is_merged)
        inputs = outputs
    block(64, 64, 16, has_identity=True)
    tally.conv(64, NUM_CLASSES, 1, 16, norm=False)
    return tally


def tally_segformer(
    head: int = 32, blocks: tuple[int, ...] = (2, 2, 2, 2), decoder: int = 256, num_classes: int = NUM_CLASSES
) -> Tally:
    """Table 6 of arXiv:2105.15203, B0 unless said otherwise."""
    tally = Tally()
    inputs = 3
    stages = zip(
        (head, 2 * head, 5 * head, 8 * head), (7, 3, 3, 3), (16, 8, 4, 2), (8, 4, 2, 1), blocks, strict=True
    )
    for channels, kernel, side, shrink, num_blocks in stages:
        tally.conv(inputs, channels, kernel, side, norm=False)
        tally.layer_norm(channels)
        for _ in range(num_blocks):
            tally.layer_norm(channels)
            if shrink > 1:
                tally.conv(channels, channels, shrink, side // shrink, norm=False)
                tally.layer_norm(channels)
            tally.attention(channels, side**2, (side // shrink) ** 2)
            tally.layer_norm(channels)
            tally.linear(channels, 4 * channels, side**2)
            tally.depthwise(4 * channels, side)
            tally.parameters -= 4 * channels  # a bias instead of BatchNorm
            tally.linear(4 * channels, channels, side**2)
        tally.layer_norm(channels)
        tally.linear(channels, decoder, side**2)
        inputs = channels
    tally.conv(4 * decoder, decoder, 1, 16)
    tally.conv(decoder, num_classes, 1, 16, norm=False)
    return tally


def tally_dinov2() -> Tally:
    tally = Tally()
    tally.conv(3, 384, 14, 8, norm=False)
    tally.parameters += 384 + (37**2 + 1) * 384  # class token, positions
    for _ in range(12):
        tally.layer_norm(384)
        tally.attention(384, 65, 65)
        tally.layer_norm(384)
        tally.linear(384, 4 * 384, 65)
        tally.linear(4 * 384, 384, 65)
        tally.parameters += 2 * 384  # layer scale
    tally.layer_norm(384)
    tally.conv(384, 128, 3, 8)
    tally.conv(128, NUM_CLASSES, 1, 8, norm=False)
    return tally


TALLIES: dict[NetworkName, Callable[[], Tally]] = {
    NetworkName.deeplabv3plus: tally_deeplabv3plus,
    NetworkName.fast_scnn: tally_fast_scnn,
    NetworkName.bisenetv2: tally_bisenetv2,
    NetworkName.ddrnet: tally_ddrnet,
    NetworkName.espnetv2: tally_espnetv2,
    NetworkName.mobile_unet: tally_mobile_unet,
    NetworkName.mobilevit: tally_mobilevit,
    NetworkName.repvgg: tally_repvgg,
    NetworkName.segformer: tally_segformer,
    NetworkName.dinov2: tally_dinov2,
}
TRANSFORMERS = (NetworkName.segformer, NetworkName.dinov2)
ATTENDING = (*TRANSFORMERS, NetworkName.mobilevit)
every_network = pytest.mark.parametrize("name", OWN_NETWORKS)


def build(name: NetworkName, *, width: float = 1.0, depth: float = 1.0, depthwise: bool = False) -> nn.Module:
    torch.manual_seed(0)
    return build_network(NetworkConfig(name, width, depth, depthwise), NUM_CLASSES).eval()


def count_parameters(network: nn.Module) -> int:
    return sum(parameter.numel() for parameter in network.parameters())


def count_macs(network: nn.Module, side: int = 64) -> int:
    """Count with attention as matrix products, because torch's counter does not know its fused form on a CPU."""
    with sdpa_kernel(SDPBackend.MATH), torch.no_grad(), FlopCounterMode(display=False) as counter:
        network(torch.zeros(1, 3, side, side))
    return counter.get_total_flops() // 2


@every_network
@pytest.mark.parametrize("size", [(64, 64), (256, 256), (96, 160), (32, 64)])
def test_logits_have_the_size_of_the_image(name: NetworkName, size: tuple[int, int]) -> None:
    network = build(name, width=0.5)
    with torch.no_grad():
        assert network(torch.randn(2, 3, *size)).shape == (2, NUM_CLASSES, *size)


@every_network
def test_one_image_can_be_trained_on(name: NetworkName) -> None:
    network = build(name, width=0.25).train()
    network(torch.randn(1, 3, 64, 64)).square().mean().backward()
    assert all(parameter.grad is not None for parameter in network.parameters())


@every_network
def test_parameters_agree_with_the_papers_table(name: NetworkName) -> None:
    assert count_parameters(build(name)) == TALLIES[name]().parameters


@every_network
def test_macs_agree_with_the_papers_table(name: NetworkName) -> None:
    assert count_macs(build(name)) == TALLIES[name]().macs


def test_ddrnet_has_the_size_of_the_published_one() -> None:
    """arXiv:2101.06085, results on Cityscapes (19 classes): 5.7 million parameters, 36.3 GMACs at 1024x2048."""
    with torch.device("meta"), torch.no_grad(), FlopCounterMode(display=False) as counter:
        network = DDRNet(19, width=1.0, depth=1.0, deep_stride=64).eval()
        network(torch.zeros(1, 3, 1024, 2048))
    assert round(count_parameters(network) / 1e6, 1) == 5.7
    assert round(counter.get_total_flops() / 2e9, 1) == 36.3


@pytest.mark.parametrize(
    ("size", "head", "blocks", "decoder", "millions"),
    [
        ("b0", 32, (2, 2, 2, 2), 256, 3.8),
        ("b1", 64, (2, 2, 2, 2), 256, 13.7),
        ("b2", 64, (3, 4, 6, 3), 768, 27.5),
        ("b3", 64, (3, 4, 18, 3), 768, 47.3),
        ("b4", 64, (3, 8, 27, 3), 768, 64.1),
        ("b5", 64, (3, 6, 40, 3), 768, 84.7),
    ],
)
def test_sizes_of_segformer_are_those_of_the_paper(
    size: str, head: int, blocks: tuple[int, ...], decoder: int, millions: float
) -> None:
    """Parameters for the 150 classes of ADE20K as in the results of arXiv:2105.15203, and by table 6."""
    config = NetworkConfig(NetworkName.segformer, 1.0, 1.0, False, arguments={"size": size})
    with torch.device("meta"), torch.no_grad(), FlopCounterMode(display=False) as counter:
        network = build_network(config, 150).eval()
        with sdpa_kernel(SDPBackend.MATH):
            network(torch.zeros(1, 3, 64, 64))
    tally = tally_segformer(head, blocks, decoder, num_classes=150)
    assert (count_parameters(network), counter.get_total_flops() // 2) == (tally.parameters, tally.macs)
    assert tally.parameters / 1e6 == pytest.approx(millions, abs=0.1)


def test_width_and_depth_scale_every_size_of_segformer() -> None:
    config = NetworkConfig(NetworkName.segformer, 0.25, 0.5, False, arguments={"size": "b2"})
    network = build_network(config, NUM_CLASSES)
    assert count_parameters(network) == tally_segformer(16, (2, 2, 3, 2), 192).parameters


def test_the_sizes_that_the_configuration_knows_are_those_of_the_network() -> None:
    from tasks.parts.networks.segformer import SIZES

    assert tuple(SIZES) == SEGFORMER_SIZES


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        (
            NetworkName.segformer,
            {"size": "b6"},
            r"arguments\.size is 'b6', expected one of b0, b1.*segformer_b2",
        ),
        (NetworkName.segformer, {"blocks": 3}, r"arguments belong to networks of your own"),
        (NetworkName.fast_scnn, {"size": "b0"}, r"arguments belong to networks of your own"),
    ],
)
def test_unknown_arguments_are_refused(name: NetworkName, arguments: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        NetworkConfig(name, 1.0, 1.0, False, arguments=arguments)


def test_levels_of_espnetv2_add_up_to_the_published_classifier() -> None:
    """arXiv:1811.11431, results on ImageNet, s = 1: 1.67 million parameters and 86 MFLOPs (one a MAC) at 224x224.

    Beside the levels: the last one, two convolutions, the classes, and a slope of PReLU for each channel.
    """
    tally = Tally()
    tally.conv(3, 32, 3, 112)
    for inputs, side, units in ((32, 56, 0), (64, 28, 3), (128, 14, 7)):
        tally_espnetv2_level(tally, inputs, 2 * inputs, side, units)
    tally_espnetv2_unit(tally, 256, 256, 14, 7)
    for _ in range(3):
        tally_espnetv2_unit(tally, 512, 512, 7, 7)
    tally.depthwise(512, 7)
    tally.grouped(512, 1024, 7)
    tally.linear(1024, 1000, 1)
    assert tally.macs / 1e6 == pytest.approx(86, abs=1)
    assert tally.parameters / 1e6 == pytest.approx(1.67, abs=0.03)


def test_merged_repvgg_has_the_size_of_the_published_classifier() -> None:
    """arXiv:2101.03697, results on ImageNet, RepVGG-A0: 8.30 million parameters, 1.4 GMACs at 224x224."""
    tally = Tally()
    inputs = 3
    for outputs, side, num_blocks in ((48, 112, 1), (48, 56, 2), (96, 28, 4), (192, 14, 14), (1280, 7, 1)):
        for _ in range(num_blocks):
            tally.conv(inputs, outputs, 3, side, norm=False)
            inputs = outputs
    tally.linear(1280, 1000, 1)
    assert round(tally.parameters / 1e6, 1) == 8.3
    assert round(tally.macs / 1e9, 1) == 1.4


def test_export_leaves_one_convolution_of_each_repvgg_block() -> None:
    network = build(NetworkName.repvgg)
    folded, tally = fold_batchnorm(network, torch.zeros(2, 3, 64, 64)), tally_repvgg(is_merged=True)
    assert (count_parameters(folded), count_macs(folded)) == (tally.parameters, tally.macs)
    text = importlib.import_module("tasks.parts.networks.repvgg").__doc__ or ""
    assert f"{tally.parameters:,} parameters, {tally.macs / 1e6:.4g} MMACs\nare left" in text
    card = ModelCard(
        NetworkConfig(NetworkName.repvgg, 1.0, 1.0, False), tuple("abcdef"), (0.5,) * 3, (0.2,) * 3, 64, 64
    )
    graph = export_graph(network, card, height=64, width=64, opset=20)
    kinds = Counter(node.op_type for node in graph.graph.node)
    assert kinds == {"Conv": 1 + 20 + 3 + 1 + 1, "Relu": 1 + 20 + 1 + 1, "Add": 2, "Resize": 3}


@every_network
def test_documented_counts_are_the_real_ones(name: NetworkName) -> None:
    text = importlib.import_module(f"tasks.parts.networks.{name.value}").__doc__ or ""
    tally = TALLIES[name]()
    assert f"{tally.parameters:,} parameters, {tally.macs / 1e6:.4g} MMACs at 64x64" in text


@every_network
def test_width_and_depth_change_the_counts(name: NetworkName) -> None:
    full = build(name)
    narrow, shallow, deep = build(name, width=0.5), build(name, depth=0.5), build(name, depth=2.0)
    # Most MACs grow with the square of the width; stem, depthwise filters and classifier only with the width.
    assert 0.25 < count_macs(narrow) / count_macs(full) < 0.4
    assert count_parameters(shallow) < count_parameters(full) < count_parameters(deep)
    assert count_macs(shallow) < count_macs(full) < count_macs(deep)


@every_network
def test_named_layers_lead_from_features_to_logits(name: NetworkName) -> None:
    network = build(name, width=0.5)
    classifier = network.get_submodule(str(network.classifier_layer))
    assert isinstance(classifier, nn.Conv2d)
    assert classifier.out_channels == NUM_CLASSES
    seen: list[torch.Tensor] = []
    network.get_submodule(str(network.feature_layer)).register_forward_hook(
        lambda _m, _i, out: seen.append(out)
    )
    image_NCHW = torch.randn(1, 3, 64, 64)
    with torch.no_grad():
        logits = network(image_NCHW)
        from_features = F.interpolate(
            classifier(seen[0]), size=(64, 64), mode="bilinear", align_corners=False
        )
    torch.testing.assert_close(logits, from_features)


@every_network
@pytest.mark.parametrize("depthwise", [False, True])
def test_folding_leaves_no_batchnorm_and_the_same_logits(name: NetworkName, depthwise: bool) -> None:
    network = build(name, width=0.25, depth=0.5, depthwise=depthwise)
    for norm in network.modules():
        if isinstance(norm, nn.BatchNorm2d):
            assert norm.running_mean is not None and norm.running_var is not None
            nn.init.uniform_(norm.weight, 0.5, 1.5)
            nn.init.normal_(norm.bias, std=0.2)
            nn.init.normal_(norm.running_mean, std=0.2)
            nn.init.uniform_(norm.running_var, 0.5, 1.5)
    nn.init.normal_(network.get_submodule(str(network.classifier_layer)).weight, std=0.3)
    images_NCHW = torch.randn(2, 3, 64, 64)
    folded = fold_batchnorm(network, images_NCHW)
    kinds = {type(module) for module in folded.modules()}
    assert not kinds & {nn.BatchNorm2d, BranchedConv}
    with torch.no_grad():
        expected_NCHW, found_NCHW = network(images_NCHW), folded(images_NCHW)
    assert (found_NCHW - expected_NCHW).abs().max() < 1e-5 * expected_NCHW.abs().max()


def test_depthwise_conversion_saves_what_the_mobilenets_paper_says() -> None:
    plain = nn.Sequential(nn.Conv2d(64, 96, 3, stride=2, padding=2, dilation=2, bias=False))
    image_NCHW = torch.randn(1, 64, 32, 32)

    def macs(network: nn.Module) -> int:
        with torch.no_grad(), FlopCounterMode(display=False) as counter:
            network(image_NCHW)
        return counter.get_total_flops() // 2

    before, shape = macs(plain), plain(image_NCHW).shape
    converted = to_depthwise_separable(plain)
    assert converted(image_NCHW).shape == shape
    # Section 3.1 of arXiv:1704.04861: 1 / N + 1 / D_K^2
    assert macs(converted) / before == pytest.approx(1 / 96 + 1 / 9, rel=1e-12)


@pytest.mark.parametrize("name", [NetworkName.deeplabv3plus, NetworkName.bisenetv2])
def test_depthwise_networks_keep_no_plain_convolution_but_the_stem(name: NetworkName) -> None:
    network = build(name, depthwise=True)
    plain = [
        m for m in network.modules() if isinstance(m, nn.Conv2d) and m.groups == 1 and m.kernel_size[0] > 1
    ]
    assert {conv.in_channels for conv in plain} == {3}
    assert count_macs(network) < 0.3 * count_macs(build(name))


def test_depthwise_conversion_leaves_separable_networks_alone() -> None:
    assert count_parameters(build(NetworkName.fast_scnn, depthwise=True)) == tally_fast_scnn().parameters


@pytest.mark.parametrize("side", [1, 2, 3, 4, 5, 6, 16])
@pytest.mark.parametrize("bins", [1, 2, 3, 4, 6])
def test_pooling_gives_the_bins_and_covers_the_map(side: int, bins: int) -> None:
    maps_NCHW = torch.zeros(1, 1, side, 2 * side, requires_grad=True)
    pooled = pool_to_bins(maps_NCHW, bins)
    assert pooled.shape[2:] == (min(bins, side), min(bins, 2 * side))
    pooled.sum().backward()
    assert maps_NCHW.grad is not None
    assert bool((maps_NCHW.grad > 0).all())


def test_resizing_by_factor_equals_resizing_by_size() -> None:
    maps_NCHW = torch.randn(2, 3, 4, 6)
    expected = F.interpolate(maps_NCHW, size=(16, 18), mode="bilinear", align_corners=False)
    torch.testing.assert_close(resize_to(maps_NCHW, (16, 18)), expected)


def test_networks_of_convolutions_do_not_import_transformers() -> None:
    code = (
        "import sys; from tasks.parts.networks.build import build_network;"
        "from tasks.parts.networks.config import NetworkConfig, NetworkName;"
        "build_network(NetworkConfig(NetworkName.fast_scnn, 0.25, 1.0, False), 3);"
        "print('transformers' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


@pytest.mark.slow
def test_transformers_are_built_without_network_and_torchvision() -> None:
    code = (
        "import socket, sys\n"
        "def refuse(*_): raise AssertionError('a connection was tried')\n"
        "socket.socket.connect = socket.getaddrinfo = refuse\n"
        "from tasks.parts.networks.build import build_network\n"
        "from tasks.parts.networks.config import NetworkConfig, NetworkName\n"
        "for name in (NetworkName.segformer, NetworkName.dinov2):\n"
        "    build_network(NetworkConfig(name, 0.25, 0.1, False), 3)\n"
        "print('torchvision' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_one_class_is_refused() -> None:
    with pytest.raises(ConfigError, match="num_classes is 1"):
        build_network(NetworkConfig(NetworkName.fast_scnn, 1.0, 1.0, False), 1)
