"""Pruning of networks with InstanceNorm and GroupNorm, through the stage and as networks of the user's own."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tasks.core.errors import GateFailed
from tasks.parts.networks.build import build_network
from tasks.parts.networks.checkpoint import load_checkpoint, save_checkpoint
from tasks.parts.networks.config import NetworkConfig, NetworkName
from tasks.parts.networks.foreign_code import code_sha256
from tasks.parts.networks.model_card import ModelCard
from tasks.parts.onnx_graphs.export import export_graph
from tasks.parts.onnx_graphs.macs import conv_macs
from tasks.parts.pruning.channel_groups import cut_group, layers_kept_whole, list_groups
from tasks.prune import prune
from tests.tasks.test_prune import CLASSES, CONFIG, NO_DATA, count_macs

SIZE = (64, 64)
UNET = """
import torch
from torch import nn

NORMS = {
    "instance": lambda channels: nn.InstanceNorm2d(channels, affine=True),
    "plain instance": nn.InstanceNorm2d,
    "group": lambda channels: nn.GroupNorm(8, channels),
    "plain group": lambda channels: nn.GroupNorm(4, channels, affine=False),
    "layer": lambda channels: nn.GroupNorm(1, channels),
    "many groups": lambda channels: nn.GroupNorm(channels, channels),
}


def block(before, after, norm, stride=1):
    layers = [nn.Conv2d(before, after, 3, stride, 1), norm(after), nn.LeakyReLU(0.01)]
    return nn.Sequential(*layers, nn.Conv2d(after, after, 3, 1, 1), norm(after), nn.PReLU(after))


class Unet(nn.Module):
    def __init__(self, num_classes, norm):
        super().__init__()
        widths = (16, 32, 64)
        self.down = nn.ModuleList(
            block(before, after, norm, stride)
            for before, after, stride in zip((3, *widths), widths, (1, 2, 2), strict=False)
        )
        self.up = nn.ModuleList(nn.ConvTranspose2d(w, v, 2, 2) for w, v in ((64, 32), (32, 16)))
        self.fuse = nn.ModuleList(block(2 * width, width, norm) for width in (32, 16))
        self.head = nn.Conv2d(16, num_classes, 1)

    def forward(self, x):
        skips = []
        for stage in self.down:
            x = stage(x)
            skips.append(x)
        for up, fuse, skip in zip(self.up, self.fuse, skips[-2::-1], strict=True):
            x = fuse(torch.cat([up(x), skip], 1))
        return self.head(x)


def build(num_classes, norm):
    return Unet(num_classes, NORMS[norm])
"""
NORMS = ("instance", "plain instance", "group", "plain group", "layer", "many groups")


@pytest.fixture(autouse=True)
def workspace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("my_networks").mkdir()
    Path("my_networks/unet.py").write_text(UNET, encoding="utf-8")


def unet(norm: str) -> tuple[nn.Module, ModelCard]:
    torch.manual_seed(0)
    arguments: dict[str, Any] = {"norm": norm}
    config = NetworkConfig(NetworkName.custom, None, None, False, "my_networks/unet.py", "build", arguments)
    network = build_network(config, len(CLASSES), size=SIZE).eval()
    return network, ModelCard(config, CLASSES, (0.5,) * 3, (0.2,) * 3, *SIZE, code_sha256(config))


def outputs(network: nn.Module) -> Tensor:
    torch.manual_seed(1)
    with torch.no_grad():
        logits_NCHW: Tensor = network(torch.randn(2, 3, *SIZE))
    return logits_NCHW


@pytest.mark.parametrize("norm", NORMS)
def test_unet_is_pruned_to_its_target_loads_and_exports_a7(tmp_path: Path, norm: str) -> None:
    network, card = unet(norm)
    save_checkpoint(tmp_path / "unet.safetensors", network, card)
    (tmp_path / "out").mkdir()
    source, pruned = tmp_path / "unet.safetensors", tmp_path / "out/model.safetensors"
    report = prune(
        CONFIG, checkpoint=source, choice=NO_DATA, sensitivity=NO_DATA, data=NO_DATA, out=tmp_path / "out"
    )
    assert 0.45 < report.macs_ratio <= 0.6
    assert count_macs(pruned) / count_macs(source) == pytest.approx(report.macs_ratio)
    assert not report.layers_kept_whole
    loaded, _ = load_checkpoint(pruned)
    graph = export_graph(loaded, card, height=SIZE[0], width=SIZE[1], opset=20)
    assert sum(conv_macs(graph).values()) == report.macs_after


def test_what_a_group_norm_keeps_is_normalised_as_before_a7() -> None:
    """A network whose removed channels are zeros computes what it computes without them."""
    network, _ = unet("group")
    group = next(group for group in list_groups(network, SIZE) if group.root == "network.down.2.0")
    assert (group.unit, group.multiple(8), group.least(8), group.least(4)) == (8, 8, 16, 16)
    norm, following = network.get_submodule("network.down.2.1"), network.get_submodule("network.down.2.3")
    first = network.get_submodule("network.down.2.0")
    assert (
        isinstance(norm, nn.GroupNorm) and isinstance(following, nn.Conv2d) and isinstance(first, nn.Conv2d)
    )
    with torch.no_grad():
        for gone in (
            slice(8, 16),
            slice(40, 48),
        ):  # two of eight groups are the least important, and not used
            first.weight[gone] *= 1e-3
            following.weight[:, gone] = 0
    expected = outputs(network)
    cut_group(network, next(g for g in list_groups(network, SIZE) if g.root == group.root), 16, size=SIZE)
    assert (norm.num_groups, norm.num_channels, norm.weight.shape[0]) == (6, 48, 48)
    torch.testing.assert_close(outputs(network), expected, rtol=1e-4, atol=1e-5)


def test_a_group_norm_over_two_branches_and_running_statistics_keep_layers_whole_a7() -> None:
    body = """
from torch import nn
import torch

class Net(nn.Module):
    def __init__(self, num_classes):
        super().__init__()
        self.left, self.right = nn.Conv2d(3, 12, 1), nn.Conv2d(3, 20, 1)
        self.both, self.joined = nn.GroupNorm(4, 32), nn.Conv2d(32, 16, 1)
        self.tracking, self.free = nn.InstanceNorm2d(16, track_running_stats=True), nn.Conv2d(16, 16, 1)
        self.head = nn.Conv2d(16, num_classes, 1)

    def forward(self, x):
        x = self.both(torch.cat([self.left(x), self.right(x)], 1))
        return self.head(self.free(self.tracking(self.joined(x))))

def build(num_classes): return Net(num_classes)
"""
    Path("my_networks/both.py").write_text(body, encoding="utf-8")
    config = NetworkConfig(NetworkName.custom, None, None, False, "my_networks/both.py", "build", {})
    network = build_network(config, 3, size=SIZE)
    assert [group.root for group in list_groups(network, SIZE)] == ["network.free"]
    kept = layers_kept_whole(network, SIZE)
    assert set(kept) == {"network.left", "network.right", "network.joined"}
    assert "network.both" in kept["network.left"] and "network.tracking" in kept["network.joined"]


def test_target_out_of_reach_of_whole_groups_is_said_a7(tmp_path: Path) -> None:
    network, card = unet("group")
    save_checkpoint(tmp_path / "unet.safetensors", network, card)
    cfg = CONFIG.__class__(**{**vars(CONFIG), "target_macs_ratio": 0.1, "max_layer_ratio": 0.9})
    with pytest.raises(GateFailed, match="Pruning reaches"):
        prune(
            cfg,
            checkpoint=tmp_path / "unet.safetensors",
            choice=NO_DATA,
            sensitivity=NO_DATA,
            data=NO_DATA,
            out=tmp_path,
        )
