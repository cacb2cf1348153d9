"""The networks: sizes, counts against a second count by hand, export.

`Tally` adds up parameters and MACs layer by layer from the tables in the papers; it shares no code with the
networks. Flops come from torch's own counter (2 flops a MAC).
"""

import importlib
import subprocess
import sys
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import numpy as np
import onnxruntime
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

from tasks.core.errors import ConfigError
from tasks.parts.networks.blocks import pool_to_bins, resize_to
from tasks.parts.networks.build import build_network
from tasks.parts.networks.config import NetworkConfig, NetworkName
from tasks.parts.networks.depthwise import to_depthwise_separable

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


def tally_segformer() -> Tally:
    tally = Tally()
    inputs = 3
    for channels, kernel, side, shrink in ((32, 7, 16, 8), (64, 3, 8, 4), (160, 3, 4, 2), (256, 3, 2, 1)):
        tally.conv(inputs, channels, kernel, side, norm=False)
        tally.layer_norm(channels)
        for _ in range(2):
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
        tally.linear(channels, 256, side**2)  # of the decoder
        inputs = channels
    tally.conv(4 * 256, 256, 1, 16)
    tally.conv(256, NUM_CLASSES, 1, 16, norm=False)
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
    NetworkName.mobile_unet: tally_mobile_unet,
    NetworkName.segformer: tally_segformer,
    NetworkName.dinov2: tally_dinov2,
}
TRANSFORMERS = (NetworkName.segformer, NetworkName.dinov2)
every_network = pytest.mark.parametrize("name", list(NetworkName))


def build(name: NetworkName, *, width: float = 1.0, depth: float = 1.0, depthwise: bool = False) -> nn.Module:
    torch.manual_seed(0)
    return build_network(NetworkConfig(name, width, depth, depthwise), NUM_CLASSES).eval()


def count_parameters(network: nn.Module) -> int:
    return sum(parameter.numel() for parameter in network.parameters())


def count_macs(network: nn.Module, side: int = 64) -> int:
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
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
def test_every_batchnorm_follows_the_convolution_it_folds_into(name: NetworkName) -> None:
    leaves = [
        m
        for m in build(name, width=0.5, depthwise=True).modules()
        if isinstance(m, nn.Conv2d | nn.BatchNorm2d)
    ]
    for before, norm in pairwise(leaves):
        if isinstance(norm, nn.BatchNorm2d):
            assert isinstance(before, nn.Conv2d)
            assert before.out_channels == norm.num_features


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


@pytest.mark.slow
@every_network
def test_exported_graph_agrees_for_any_batch(name: NetworkName, tmp_path: Path) -> None:
    network = build(name, width=0.5, depth=0.1 if name in TRANSFORMERS else 0.5)
    nn.init.normal_(network.get_submodule(str(network.classifier_layer)).weight)  # logits of a real size
    path = tmp_path / "model.onnx"
    batch = torch.export.Dim("batch", min=1, max=64)
    program = torch.onnx.export(
        network,
        (torch.zeros(2, 3, 64, 64),),
        dynamo=True,
        dynamic_shapes=({0: batch},),
        input_names=["image"],
        output_names=["logits"],
        opset_version=20,
        verbose=False,
    )
    assert program is not None
    program.save(path)
    known = {"Conv", "Relu", "Add", "Mul", "Sigmoid", "AveragePool", "MaxPool", "Resize", "Concat"}
    if name in TRANSFORMERS:
        known |= {"MatMul", "Gemm", "LayerNormalization", "Gelu", "Softmax", "Reshape", "Transpose"}
        known |= {"Pad", "Slice", "Identity", "Shape"}
    assert {node.op_type for node in program.model.graph} <= known
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    for num_images in (1, 2, 5):
        images_NCHW = torch.randn(num_images, 3, 64, 64)
        with torch.no_grad():
            expected = network(images_NCHW).numpy()
        found = session.run(None, {"image": images_NCHW.numpy()})[0]
        largest = np.abs(expected).max()
        assert largest > 0.1
        np.testing.assert_allclose(found, expected, atol=1e-4 * max(1, largest))


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
