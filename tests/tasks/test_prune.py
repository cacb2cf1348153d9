"""Pruning: the target is met by an independent count, the file loads again, mistakes are named."""

import csv
import dataclasses
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from tasks.core.errors import ArtifactError, ConfigError, GateFailed
from tasks.parts.channel_importance import Importance
from tasks.parts.channel_pruning import Ranking, prune_channels
from tasks.parts.checkpoint import load_checkpoint, save_checkpoint
from tasks.parts.model_card import ModelCard
from tasks.parts.networks.build import build_network
from tasks.parts.networks.config import NetworkConfig, NetworkName
from tasks.prune import Config, Method, Recovery, Report, prune
from tests.tasks.test_train import TRAINER

CONFIG = Config(
    method=Method.channels,
    target_macs_ratio=0.6,
    weight_sparsity=0.5,
    channel_multiple=8,
    ranking=Ranking.across_layers,
    max_layer_ratio=0.75,
    num_steps=2,
    importance=Importance.l1,
    layer_ratios={},
    num_images=4,
    batch_size=2,
    iterations=1,
    min_val_miou_ratio=0.0,
    recovery=Recovery(TRAINER),
)
NO_DATA = Path("nowhere")
CLASSES = ("background", "a", "b", "c")


@pytest.fixture(autouse=True)
def one_thread(threads_as_before: None) -> None:
    """On a busy machine two threads wait for each other longer than these small layers take."""
    torch.set_num_threads(1)


def make_checkpoint(path: Path, name: NetworkName, *, width: float = 0.5, depthwise: bool = False) -> None:
    """A network whose BatchNorm is not the fresh one, so that a lost statistic would show."""
    torch.manual_seed(3)
    config = NetworkConfig(name, width, 0.5, depthwise)
    network = build_network(config, len(CLASSES)).train()
    for layer in network.modules():
        if isinstance(layer, nn.BatchNorm2d):
            nn.init.uniform_(layer.weight, 0.5, 1.5)
    for _ in range(3):
        network(torch.randn(4, 3, 64, 64))
    save_checkpoint(path, network, ModelCard(config, CLASSES, (0.5, 0.5, 0.5), (0.2, 0.2, 0.2), 64, 64))


def count_macs(path: Path) -> int:
    network, _ = load_checkpoint(path)
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        network(torch.zeros(1, 3, 64, 64))
    return counter.get_total_flops() // 2


def run(cfg: Config, checkpoint: Path, out: Path, data: Path = NO_DATA) -> tuple[Path, Report]:
    out.mkdir()
    report = prune(cfg, checkpoint=checkpoint, data=data, out=out)
    return out / "model.safetensors", report


@pytest.mark.parametrize("name", list(NetworkName))
@pytest.mark.parametrize(
    ("ranking", "channel_multiple"),
    [(Ranking.across_layers, 8), (Ranking.uniform, 4), (Ranking.across_layers, 1)],
)
def test_target_is_met_by_an_independent_count(
    name: NetworkName, ranking: Ranking, channel_multiple: int, tmp_path: Path
) -> None:
    source = tmp_path / "source.safetensors"
    make_checkpoint(source, name)
    bytes_before = source.read_bytes()
    cfg = dataclasses.replace(CONFIG, ranking=ranking, channel_multiple=channel_multiple)
    out = tmp_path / "out"
    out.mkdir()
    report = prune(cfg, checkpoint=source, data=NO_DATA, out=out)
    assert source.read_bytes() == bytes_before
    assert sorted(path.name for path in out.iterdir()) == ["model.safetensors", "removed.csv", "steps.csv"]
    assert report.macs_before == count_macs(source)
    assert report.macs_after == count_macs(out / "model.safetensors")
    assert 0.45 < report.macs_ratio == report.macs_after / report.macs_before <= 0.6
    network, _ = load_checkpoint(out / "model.safetensors")
    assert report.num_parameters_after == sum(p.numel() for p in network.parameters())
    for height, width in ((64, 64), (96, 160)):
        with torch.no_grad():
            assert network(torch.randn(2, 3, height, width)).shape == (2, len(CLASSES), height, width)
    for row in csv.DictReader((out / "removed.csv").open()):
        assert int(row["channels_before"]) - int(row["channels_after"]) == int(row["channels_removed"])
        if row["layer"] == "classifier":
            assert row["channels_after"] == str(len(CLASSES))
        elif row["channels_removed"] != "0":
            assert int(row["channels_after"]) % channel_multiple == 0


@pytest.mark.parametrize("name", list(NetworkName))
def test_file_gives_the_outputs_of_the_network_that_was_pruned(name: NetworkName, tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "source", name)
    network, card = load_checkpoint(tmp_path / "source")
    prune_channels(network, CONFIG, size=(64, 64))
    model, _ = run(CONFIG, tmp_path / "source", tmp_path / "out")
    loaded, loaded_card = load_checkpoint(model)
    images_NCHW = torch.randn(2, 3, 64, 64)
    with torch.no_grad():
        assert torch.equal(loaded(images_NCHW), network(images_NCHW))
    assert loaded_card == card


@pytest.mark.parametrize("name", [NetworkName.deeplabv3plus, NetworkName.bisenetv2])
def test_depthwise_networks_can_be_pruned(name: NetworkName, tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "source", name, depthwise=True)
    model, _ = run(CONFIG, tmp_path / "source", tmp_path / "out")
    assert count_macs(model) <= 0.6 * count_macs(tmp_path / "source")


def test_pruned_model_can_be_pruned_again(tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "source", NetworkName.fast_scnn)
    once, _ = run(CONFIG, tmp_path / "source", tmp_path / "once")
    twice, _ = run(CONFIG, once, tmp_path / "twice")
    assert count_macs(twice) <= 0.6 * count_macs(once)


def test_pruning_twice_gives_equal_files(tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "source", NetworkName.fast_scnn)
    first, _ = run(CONFIG, tmp_path / "source", tmp_path / "first")
    torch.manual_seed(99)
    second, _ = run(CONFIG, tmp_path / "source", tmp_path / "second")
    for name in ("model.safetensors", "removed.csv"):
        assert (first.parent / name).read_bytes() == (second.parent / name).read_bytes()


def test_the_smallest_filters_are_removed(tmp_path: Path) -> None:
    """Eight hidden channels of one block get small weights: they go first (L1 norm)."""
    make_checkpoint(tmp_path / "source", NetworkName.fast_scnn)
    network, _ = load_checkpoint(tmp_path / "source")
    block = network.get_submodule("context.1")
    weak = [3, 7, 20, 21, 40, 50, 60, 61]
    kept = [index for index in range(block.expand.conv.out_channels) if index not in weak]
    with torch.no_grad():
        for layer in (block.expand.conv, block.expand.norm, block.depthwise.conv, block.depthwise.norm):
            layer.weight[weak] *= 1e-3
        block.project.conv.weight[:, weak] *= 1e-3
    expected = block.expand.conv.weight[kept].clone()
    prune_channels(network, dataclasses.replace(CONFIG, target_macs_ratio=0.999, num_steps=1), size=(64, 64))
    assert torch.equal(block.expand.conv.weight, expected)


def test_uniform_pruning_takes_the_same_share_of_each_layer(tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "source", NetworkName.deeplabv3plus)
    cfg = dataclasses.replace(CONFIG, ranking=Ranking.uniform, channel_multiple=1, num_steps=1)
    model, _ = run(cfg, tmp_path / "source", tmp_path / "out")
    rows = list(csv.DictReader((model.parent / "removed.csv").open()))
    shares = [
        int(r["channels_removed"]) / int(r["channels_before"]) for r in rows if r["layer"] != "classifier"
    ]
    # MACs fall with the square of the width: about 1 - sqrt(0.6) = 0.23 of the channels go, of 8 one or two.
    assert all(0.1 < share < 0.3 for share in shares)


@pytest.mark.parametrize("ratio", [0.0, 1.0, 1.5, -0.2, float("nan")])
def test_impossible_target_is_refused(ratio: float) -> None:
    with pytest.raises(ConfigError, match=r"prune\.target_macs_ratio is"):
        dataclasses.replace(CONFIG, target_macs_ratio=ratio)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("channel_multiple", 0),
        ("channel_multiple", 5000),
        ("max_layer_ratio", 1.0),
        ("max_layer_ratio", 0.0),
        ("num_steps", 0),
    ],
)
def test_impossible_value_names_its_key(key: str, value: float) -> None:
    with pytest.raises(ConfigError, match=rf"prune\.{key} is {value}; expected"):
        dataclasses.replace(CONFIG, **{key: value})  # type: ignore[arg-type]


def test_multiple_wider_than_a_layer_is_refused(tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "source", NetworkName.fast_scnn)
    cfg = dataclasses.replace(CONFIG, channel_multiple=64)
    with pytest.raises(
        ConfigError, match=r"prune\.channel_multiple is 64, but layer '.*' has only \d+ channels"
    ):
        run(cfg, tmp_path / "source", tmp_path / "out")
    assert list((tmp_path / "out").iterdir()) == []


def test_target_out_of_reach_writes_nothing(tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "source", NetworkName.fast_scnn)
    cfg = dataclasses.replace(CONFIG, target_macs_ratio=0.01, max_layer_ratio=0.3)
    with pytest.raises(GateFailed, match=r"prune\.target_macs_ratio 0\.01.*Raise prune\.target_macs_ratio"):
        run(cfg, tmp_path / "source", tmp_path / "out")
    assert list((tmp_path / "out").iterdir()) == []


class Untraceable(nn.Module):
    """Hides from autograd, which pruning follows, how its layers are linked."""

    classifier_layer = "classifier"

    def __init__(self, *, hides_output: bool) -> None:
        super().__init__()
        self.hides_output = hides_output
        self.first = nn.Conv2d(3, 16, 3, padding=1)
        self.classifier = nn.Conv2d(16, 2, 1)

    def forward(self, images_NCHW: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = self.first(images_NCHW)
        logits: torch.Tensor = self.classifier(hidden.detach())
        return logits.detach() if self.hides_output else logits


def test_network_that_cannot_be_traced_is_refused() -> None:
    with pytest.raises(ArtifactError, match="cannot be traced for pruning"):
        prune_channels(Untraceable(hides_output=True), CONFIG, size=(32, 32))


def test_network_traced_in_part_is_refused() -> None:
    with pytest.raises(ArtifactError, match=r"cannot be traced for pruning|does not run at 32x32"):
        prune_channels(Untraceable(hides_output=False), CONFIG, size=(32, 32))
