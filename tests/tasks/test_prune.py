"""Pruning: the target is met by an independent count, the file loads again, mistakes are named."""

import copy
import csv
import dataclasses
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from tasks.core.errors import ArtifactError, ConfigError, GateFailed
from tasks.parts.networks.build import build_network
from tasks.parts.networks.checkpoint import load_checkpoint, save_checkpoint
from tasks.parts.networks.config import OWN_NETWORKS, NetworkConfig, NetworkName
from tasks.parts.networks.model_card import CARD_KEY, ModelCard, read_card
from tasks.parts.networks.residual import residual_blocks
from tasks.parts.networks.zeros import is_two_of_four
from tasks.parts.onnx_graphs.export import export_graph
from tasks.parts.onnx_graphs.graph import node_sources
from tasks.parts.pruning.blocks import logit_changes, prune_blocks
from tasks.parts.pruning.channel_groups import cut_group, list_groups
from tasks.parts.pruning.channels import prune_channels
from tasks.parts.pruning.chosen_ratio import write_choice
from tasks.parts.pruning.config import Importance, Ranking
from tasks.parts.pruning.macs import measure_convs, total_macs
from tasks.parts.pruning.recovery import measure_val_score, read_batches
from tasks.parts.pruning.sensitivity import read_costs
from tasks.parts.tables import write_table
from tasks.parts.training.config import Strategy
from tasks.prune import Config, Method, Recovery, Report, _save_loadable, prune
from tasks.rank_groups import Config as RankGroups
from tasks.rank_groups import GroupCut, rank_groups
from tests.conftest import checked
from tests.tasks.conftest import CLASSES as WORKSHOP_CLASSES
from tests.tasks.conftest import Workshop
from tests.tasks.test_train import TRAINER

CONFIG = Config(
    method=Method.channels,
    target_macs_ratio=0.6,
    from_search=False,
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
    min_val_score_ratio=0.0,
    recovery=Recovery(TRAINER),
)
NO_DATA = Path("nowhere")
CLASSES = ("background", "a", "b", "c")
TRANSFORMERS = (NetworkName.segformer, NetworkName.dinov2)
CUTTABLE_LAYER = {
    NetworkName.segformer: "decode_head.linear_fuse",
    NetworkName.dinov2: "head.conv",
    NetworkName.espnetv2: "pooled.fuse.conv",
}
"""The only layer of eight channels or more that is not coupled to attention or to grouped convolutions."""
CONVOLUTIONAL = [name for name in OWN_NETWORKS if name not in CUTTABLE_LAYER]


@pytest.fixture(autouse=True)
def one_thread(threads_as_before: None) -> None:
    """On a busy machine two threads wait for each other longer than these small layers take."""
    torch.set_num_threads(1)


def make_checkpoint(
    path: Path,
    name: NetworkName,
    *,
    classes: tuple[str, ...] = CLASSES,
    width: float = 0.5,
    depth: float = 0.5,
    depthwise: bool = False,
) -> None:
    """A network whose BatchNorm is not the fresh one, so that a lost statistic would show."""
    torch.manual_seed(3)
    config = NetworkConfig(name, width, depth, depthwise)
    network = build_network(config, len(classes)).train()
    for layer in network.modules():
        if isinstance(layer, nn.BatchNorm2d):
            nn.init.uniform_(layer.weight, 0.5, 1.5)
    for _ in range(3):
        network(torch.randn(4, 3, 64, 64))
    save_checkpoint(path, network, ModelCard(config, classes, (0.5, 0.5, 0.5), (0.2, 0.2, 0.2), 64, 64))


def count_macs(path: Path) -> int:
    network, _ = load_checkpoint(path)
    with torch.no_grad(), sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        network(torch.zeros(1, 3, 64, 64))
    return counter.get_total_flops() // 2


def run(cfg: Config, checkpoint: Path, out: Path, data: Path = NO_DATA) -> tuple[Path, Report]:
    out.mkdir()
    report = prune(cfg, checkpoint=checkpoint, choice=NO_DATA, sensitivity=NO_DATA, data=data, out=out)
    return out / "model.safetensors", report


def test_the_ratio_of_the_search_is_taken_on_request(tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "source.safetensors", NetworkName.deeplabv3plus)
    write_choice(tmp_path / "choice.json", 0.8)
    for from_search, least, most in ((True, 0.65, 0.8), (False, 0.45, 0.6)):
        out = tmp_path / str(from_search)
        out.mkdir()
        cfg = dataclasses.replace(CONFIG, from_search=from_search)
        report = prune(
            cfg,
            checkpoint=tmp_path / "source.safetensors",
            choice=tmp_path / "choice.json",
            sensitivity=NO_DATA,
            data=NO_DATA,
            out=out,
        )
        assert least < report.macs_ratio <= most
    with pytest.raises(ArtifactError, match=r"no chosen ratio .* prune\.target_macs_ratio"):
        run(dataclasses.replace(CONFIG, from_search=True), tmp_path / "source.safetensors", tmp_path / "out")
    for method in (Method.blocks, Method.weights, Method.two_of_four):
        with pytest.raises(ConfigError, match=r"^from_search is True, which only method channels"):
            dataclasses.replace(CONFIG, from_search=True, method=method)


@pytest.mark.slow
@pytest.mark.parametrize("name", CONVOLUTIONAL)
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
    report = prune(cfg, checkpoint=source, choice=NO_DATA, sensitivity=NO_DATA, data=NO_DATA, out=out)
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


@pytest.mark.parametrize("name", CONVOLUTIONAL)
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


def count_macs_with_torch(path: Path) -> int:
    """With the products of attention, which torch does not count where they are fused."""
    network, _ = load_checkpoint(path)
    with torch.no_grad(), sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        network(torch.zeros(1, 3, 64, 64))
    return counter.get_total_flops() // 2


@pytest.mark.parametrize("name", CUTTABLE_LAYER)
@pytest.mark.parametrize("ranking", [Ranking.across_layers, Ranking.uniform])
def test_layers_of_attention_and_groups_keep_their_channels(
    name: NetworkName, ranking: Ranking, tmp_path: Path
) -> None:
    source = tmp_path / "source"
    make_checkpoint(source, name, width=0.25, depth=0.1)
    cfg = dataclasses.replace(CONFIG, ranking=ranking, target_macs_ratio=0.96)
    model, report = run(cfg, source, tmp_path / "out")
    assert report.macs_before == count_macs_with_torch(source)
    assert report.macs_after == count_macs_with_torch(model) < 0.96 * report.macs_before
    rows = csv.DictReader((model.parent / "removed.csv").open())
    cut = [row["layer"] for row in rows if row["channels_removed"] != "0"]
    assert cut == [CUTTABLE_LAYER[name]]


@pytest.mark.parametrize("name", CUTTABLE_LAYER)
def test_network_with_too_little_to_cut_says_what_is_kept_whole(name: NetworkName, tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "source", name, width=0.25, depth=0.1)
    cfg = dataclasses.replace(CONFIG, target_macs_ratio=0.1)
    with pytest.raises(
        GateFailed,
        match=r"Raise prune\.target_macs_ratio.*grouped conv.*attention layers.*network\.name.*method to weights",
    ):
        run(cfg, tmp_path / "source", tmp_path / "out")
    cfg = dataclasses.replace(CONFIG, method=Method.weights)
    _, report = run(cfg, tmp_path / "source", tmp_path / "weights")
    assert report.macs_ratio == 1.0 and report.weight_sparsity > 0.45


class AttentionInFrontOfClassifier(nn.Module):
    """All of its convolutions are read by a linear layer, or make the logits."""

    classifier_layer = "classifier"

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, 16, 4, stride=4)
        self.mix = nn.Linear(16, 16)
        self.classifier = nn.Conv2d(16, 2, 1)

    def forward(self, images_NCHW: torch.Tensor) -> torch.Tensor:
        map_NCHW = self.patches(images_NCHW)
        mixed_NTC = self.mix(map_NCHW.flatten(2).transpose(1, 2))
        logits: torch.Tensor = self.classifier(mixed_NTC.transpose(1, 2).reshape(map_NCHW.shape))
        return logits


def test_network_with_nothing_to_cut_is_refused() -> None:
    with pytest.raises(
        ArtifactError, match=r"no convolution that may be pruned.*attention layers.*network\.name"
    ):
        prune_channels(AttentionInFrontOfClassifier(), CONFIG, size=(32, 32))


@pytest.mark.parametrize(
    ("layer", "message"),
    [
        (
            "segformer.stages.0.patch_embeddings.proj",
            r"attention layers, which are always kept whole\. Remove",
        ),
        ("segformer.stages.0.blocks.0.attention.q_proj", r"not a convolution of the network"),
    ],
)
def test_layer_ratios_of_attention_are_refused(layer: str, message: str, tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "source", NetworkName.segformer, width=0.25, depth=0.1)
    with pytest.raises(ConfigError, match=message):
        run(dataclasses.replace(CONFIG, layer_ratios={layer: 0.5}), tmp_path / "source", tmp_path / "out")


def test_a_network_that_would_not_load_again_is_not_kept(tmp_path: Path) -> None:
    network = build_network(NetworkConfig(NetworkName.segformer, 0.25, 0.1, False), len(CLASSES))
    norm: Any = network.get_submodule("segformer.stages.2.layer_norm")
    norm.weight = nn.Parameter(norm.weight[:-8].clone())
    card = ModelCard(
        NetworkConfig(NetworkName.segformer, 0.25, 0.1, False), CLASSES, (0.5,) * 3, (0.2,) * 3, 64, 64
    )
    with pytest.raises(ArtifactError, match=r"cannot be loaded again, so it is not kept: .*LayerNorm"):
        _save_loadable(tmp_path / "model.safetensors", network, card)
    assert list(tmp_path.iterdir()) == []


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


def write_sensitivity(
    folder: Path,
    network: nn.Module,
    size: tuple[int, int],
    *,
    drop_at: Callable[[str, float], float] = lambda _, ratio: ratio**2,
    ratios: tuple[float, ...] = (0.25, 0.5, 0.75),
    prefix: str = "",
) -> Path:
    """Write a table as rank_groups does, with the given drop for each group and ratio."""
    path = folder / "sensitivity.csv"
    cuts = [
        GroupCut(
            f"{prefix}{group.root}",
            group.root,
            count,
            int(count * ratio),
            ratio,
            0.1,
            drop_at(group.root, ratio),
        )
        for group in list_groups(network, size)
        if (count := len(group.importance)) >= 8
        for ratio in ratios
    ]
    write_table(path, cuts)
    return path


SENSITIVITY = dataclasses.replace(CONFIG, ranking=Ranking.sensitivity, channel_multiple=4)


def cut_by_table(cfg: Config, source: Path, table: Path, out: Path) -> tuple[dict[str, float], Report]:
    """Return the share of its channels that each layer lost."""
    out.mkdir()
    report = prune(cfg, checkpoint=source, choice=NO_DATA, sensitivity=table, data=NO_DATA, out=out)
    rows = csv.DictReader((out / "removed.csv").open())
    return {row["layer"]: int(row["channels_removed"]) / int(row["channels_before"]) for row in rows}, report


def test_layers_that_cost_nothing_go_before_those_that_cost_something(tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "source", NetworkName.deeplabv3plus)
    network, _ = load_checkpoint(tmp_path / "source")
    free = {"backbone.0.0.first.conv", "pyramid.fuse.conv", "decoder.1.pointwise.conv"}
    table = write_sensitivity(
        tmp_path, network, (64, 64), drop_at=lambda group, ratio: 0.0 if group in free else ratio
    )
    lost, report = cut_by_table(
        dataclasses.replace(SENSITIVITY, target_macs_ratio=0.9), tmp_path / "source", table, tmp_path / "few"
    )
    followers = {"decoder.0.depthwise.conv", "decoder.1.depthwise.conv"}
    assert {layer for layer, share in lost.items() if share} - followers <= free
    assert 0.8 < report.macs_ratio <= 0.9
    # Equal losses are spread over the groups instead of emptying the first one.
    shares = [lost[group] for group in free]
    assert min(shares) > 0 and max(shares) < 0.75
    lost, report = cut_by_table(
        dataclasses.replace(SENSITIVITY, target_macs_ratio=0.5), tmp_path / "source", table, tmp_path / "more"
    )
    assert all(lost[group] == 0.75 for group in free) and 0.4 < report.macs_ratio <= 0.5
    assert any(share for layer, share in lost.items() if layer not in free)


def test_the_loss_counts_per_mac_that_it_saves(tmp_path: Path) -> None:
    """Where all groups cost the same, the one whose channels have the most MACs goes first."""
    make_checkpoint(tmp_path / "source", NetworkName.deeplabv3plus)
    network, _ = load_checkpoint(tmp_path / "source")
    table = write_sensitivity(tmp_path, network, (64, 64), drop_at=lambda _, ratio: ratio)
    cfg = dataclasses.replace(SENSITIVITY, target_macs_ratio=0.99, num_steps=1)
    lost, _ = cut_by_table(cfg, tmp_path / "source", table, tmp_path / "out")
    saved = {}
    for group in list_groups(network, (64, 64)):
        if len(group.importance) >= 8:
            smaller = copy.deepcopy(network)
            cut_group(smaller, group, len(group.importance) // 4, size=(64, 64))
            saved[group.root] = total_macs(measure_convs(smaller, (64, 64)))
    assert lost[min(saved, key=lambda root: saved[root])] > 0


def test_limits_of_layers_hold_beside_the_table(tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "source", NetworkName.deeplabv3plus)
    network, _ = load_checkpoint(tmp_path / "source")
    table = write_sensitivity(tmp_path, network, (64, 64))
    ratios = {"pyramid.fuse.conv": 0.0, "decoder.1.pointwise.conv": 0.5}
    cfg = dataclasses.replace(SENSITIVITY, layer_ratios=ratios, max_layer_ratio=0.5, channel_multiple=8)
    lost, report = cut_by_table(cfg, tmp_path / "source", table, tmp_path / "out")
    assert lost["pyramid.fuse.conv"] == 0 and lost["decoder.1.pointwise.conv"] == 0.5
    assert max(lost.values()) <= 0.5 and report.macs_ratio <= 0.6
    widths = {name: conv.out_channels for name, conv in measure_convs(network, (64, 64)).items()}
    for layer, share in lost.items():
        assert share == 0 or widths[layer] * (1 - share) % 8 == 0


def test_no_layer_loses_more_channels_than_the_table_has(tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "source", NetworkName.deeplabv3plus)
    network, _ = load_checkpoint(tmp_path / "source")
    table = write_sensitivity(tmp_path, network, (64, 64), ratios=(0.25,))
    cfg = dataclasses.replace(SENSITIVITY, target_macs_ratio=0.8)
    lost, _ = cut_by_table(cfg, tmp_path / "source", table, tmp_path / "out")
    assert 0 < max(lost.values()) <= 0.25
    cfg = dataclasses.replace(cfg, target_macs_ratio=0.4)
    with pytest.raises(GateFailed, match=r"than rank_groups tried: higher rank_groups\.ratios allow more"):
        cut_by_table(cfg, tmp_path / "source", table, tmp_path / "far")


def test_table_is_also_followed_step_by_step(tmp_path: Path) -> None:
    """The costs are those of the unpruned network, also after the first step."""
    make_checkpoint(tmp_path / "source", NetworkName.deeplabv3plus)
    network, _ = load_checkpoint(tmp_path / "source")
    costs = read_costs(write_sensitivity(tmp_path, network, (64, 64)))
    original = measure_convs(network, (64, 64))
    for progress in (0.5, 1.0):
        prune_channels(network, SENSITIVITY, size=(64, 64), original=original, progress=progress, costs=costs)
    after = measure_convs(network, (64, 64))
    assert 0.5 < total_macs(after) / total_macs(original) <= 0.6
    for name, cost in costs.items():
        assert original[name].out_channels - after[name].out_channels <= cost.removed[-1]


def test_table_of_rank_groups_is_what_prune_reads(workshop: Workshop, tmp_path: Path) -> None:
    cfg = RankGroups(
        ratios=[0.5], channel_multiple=4, num_train_images=4, num_val_images=4, batch_size=4, max_minutes=60
    )
    ranked = rank_groups(cfg, checkpoint=workshop.checkpoint, data=workshop.data, out=tmp_path)
    table = tmp_path / "sensitivity.csv"
    target = dataclasses.replace(SENSITIVITY, target_macs_ratio=0.7)
    lost, report = cut_by_table(target, workshop.checkpoint, table, tmp_path / "out")
    assert report.macs_ratio <= 0.7
    tried = {cut.group: cut.ratio for cut in ranked.cuts}
    assert all(lost[group] <= ratio for group, ratio in tried.items())
    make_checkpoint(tmp_path / "other", NetworkName.deeplabv3plus)
    with pytest.raises(
        ArtifactError, match=r"measured on another network\. Run rank_groups on the checkpoint"
    ):
        cut_by_table(target, tmp_path / "other", table, tmp_path / "wrong")
    with pytest.raises(ArtifactError, match=r"no table of cuts"):
        cut_by_table(target, workshop.checkpoint, NO_DATA, tmp_path / "missing")


def test_multiple_wider_than_every_layer_is_refused(tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "source", NetworkName.fast_scnn)
    cfg = dataclasses.replace(CONFIG, channel_multiple=1024)
    with pytest.raises(
        ConfigError,
        match=r"prune\.channel_multiple is 1024, and the widest layer .*'.*', has only \d+ channels",
    ):
        run(cfg, tmp_path / "source", tmp_path / "out")
    assert list((tmp_path / "out").iterdir()) == []


@pytest.mark.parametrize(
    ("name", "width"),
    [(NetworkName.bisenetv2, 1.0), (NetworkName.mobile_unet, 0.5), (NetworkName.fast_scnn, 0.25)],
)
def test_layers_that_are_too_narrow_stay_whole_and_are_named_once(
    name: NetworkName, width: float, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    make_checkpoint(tmp_path / "source", name, width=width)
    cfg = dataclasses.replace(CONFIG, channel_multiple=16, target_macs_ratio=0.8)
    model, report = run(cfg, tmp_path / "source", tmp_path / "out")
    assert report.macs_ratio <= 0.8
    rows = list(csv.DictReader((model.parent / "removed.csv").open()))
    narrow = [row for row in rows if int(row["channels_before"]) <= 16]
    assert narrow and all(row["channels_removed"] == "0" for row in narrow)
    (said,) = [record.getMessage() for record in caplog.records if "stay whole" in record.getMessage()]
    assert "prune.channel_multiple = 16" in said and said.split(": ")[1].split(", ")[0] in {
        row["layer"] for row in narrow
    }


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


def test_layers_that_cannot_be_traced_stay_whole() -> None:
    with pytest.raises(ArtifactError, match=r"has no convolution that may be pruned"):
        prune_channels(Untraceable(hides_output=False), CONFIG, size=(32, 32))


def labelled_by(checkpoint: Path, workshop: Workshop, folder: Path) -> Path:
    """The data set with the network's own answers as labels: its mIoU is 1, and every change costs some."""
    data = Path(shutil.copytree(workshop.data, folder))
    network, _ = load_checkpoint(checkpoint)
    for split in ("train", "val"):
        with torch.no_grad():
            answers = [
                network(images_NCHW).argmax(1) for images_NCHW, _ in read_batches(data, split, batch_size=4)
            ]
        np.save(data / f"{split}_masks.npy", torch.cat(answers).to(torch.uint8).numpy())
    return data


@pytest.mark.parametrize("importance", list(Importance))
def test_every_importance_removes_a_channel_that_does_nothing_first(
    importance: Importance, tmp_path: Path, workshop: Workshop
) -> None:
    network, _ = load_checkpoint(workshop.checkpoint)
    block = network.get_submodule("context.1")
    idle = list(range(0, block.expand.conv.out_channels, 6))
    kept = [index for index in range(block.expand.conv.out_channels) if index not in idle]
    with torch.no_grad():
        for layer in (block.expand.conv, block.expand.norm, block.depthwise.conv, block.depthwise.norm):
            layer.weight[idle] *= 1e-6
        block.project.conv.weight[:, idle] *= 1e-6
    expected = block.expand.conv.weight[kept].clone()
    cfg = dataclasses.replace(
        CONFIG,
        importance=importance,
        channel_multiple=1,
        target_macs_ratio=0.999,
        layer_ratios={"pyramid.branches.0.0": 0.0},
        num_steps=1,
    )
    save_checkpoint(tmp_path / "source", network, read_card(workshop.checkpoint))
    data = workshop.data if importance is Importance.taylor else NO_DATA
    model, report = run(cfg, tmp_path / "source", tmp_path / "out", data)
    found = load_checkpoint(model)[0].get_parameter("context.1.expand.conv.weight")
    gone = report.num_channels_removed // 2  # each goes in the expanding and in the depthwise convolution
    assert 0 < gone <= len(idle)
    assert len(found) == len(kept) + len(idle) - gone
    assert all(any(torch.equal(row, other) for other in found) for row in expected)


def test_batchnorm_scale_needs_a_batchnorm(tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "source", NetworkName.fast_scnn)
    cfg = dataclasses.replace(CONFIG, importance=Importance.batchnorm_scale)
    with pytest.raises(
        ConfigError, match=r"no BatchNorm follows layer 'pyramid\.branches\.0\.0'.*layer_ratios="
    ):
        run(cfg, tmp_path / "source", tmp_path / "out")


def test_named_layers_lose_their_own_share(tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "source", NetworkName.fast_scnn)
    ratios = {"context.1.expand.conv": 0.3, "context.3.depthwise.conv": 0.5, "head.1.pointwise.conv": 0.0}
    cfg = dataclasses.replace(CONFIG, target_macs_ratio=0.8, layer_ratios=ratios)
    model, _ = run(cfg, tmp_path / "source", tmp_path / "out")
    rows = {row["layer"]: row for row in csv.DictReader((model.parent / "removed.csv").open())}
    # Whole multiples of 8 stay, and no more than the share goes: 192 * 0.7 = 134.4 -> 136, 288 * 0.5 = 144.
    for layer, before, after in (
        ("context.1.expand.conv", 192, 136),
        ("context.1.depthwise.conv", 192, 136),
        ("context.3.expand.conv", 288, 144),
        ("head.1.pointwise.conv", 64, 64),
    ):
        assert (rows[layer]["channels_before"], rows[layer]["channels_after"]) == (str(before), str(after))
    assert count_macs(model) <= 0.8 * count_macs(tmp_path / "source")


@pytest.mark.parametrize("method", [Method.channels, Method.weights])
@pytest.mark.parametrize(
    ("ratios", "message"),
    [
        ({"classifier": 0.5}, r"names the classifier 'classifier', which is never pruned"),
        (
            {"context.9": 0.5},
            r"'context\.9', which is not a convolution.*Choose from: downsample\.0\.conv, .*head\.1",
        ),
    ],
)
def test_layer_ratios_of_no_prunable_layer_are_refused(
    ratios: dict[str, float], message: str, method: Method, tmp_path: Path
) -> None:
    make_checkpoint(tmp_path / "source", NetworkName.fast_scnn)
    cfg = dataclasses.replace(CONFIG, method=method, layer_ratios=ratios)
    with pytest.raises(ConfigError, match=message):
        run(cfg, tmp_path / "source", tmp_path / "out")


def test_different_shares_of_layers_that_are_added_are_refused(tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "source", NetworkName.fast_scnn)
    ratios = {"fusion.detail.conv": 0.5, "fusion.context.conv": 0.25}
    with pytest.raises(
        ConfigError, match=r"'fusion\.context\.conv' 0\.25, but a layer that is added to it 0\.5"
    ):
        run(dataclasses.replace(CONFIG, layer_ratios=ratios), tmp_path / "source", tmp_path / "out")


def test_layer_that_follows_several_is_refused_with_their_names(tmp_path: Path) -> None:
    """A depthwise convolution over a concatenation has the channels of two convolutions."""
    make_checkpoint(tmp_path / "source", NetworkName.deeplabv3plus)
    cfg = dataclasses.replace(CONFIG, layer_ratios={"decoder.0.depthwise.conv": 0.5})
    with pytest.raises(ConfigError, match=r"those of pyramid\.fuse\.conv, skip\.conv\. Name these"):
        run(cfg, tmp_path / "source", tmp_path / "out")


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in CONVOLUTIONAL if name is not NetworkName.repvgg])
def test_block_that_matters_least_goes_first_and_stays_away(
    name: NetworkName, tmp_path: Path, workshop: Workshop
) -> None:
    checkpoint = tmp_path / "source"
    make_checkpoint(checkpoint, name, depth=1.0, classes=WORKSHOP_CLASSES)
    network, card = load_checkpoint(checkpoint)
    images_NCHW = next(iter(read_batches(workshop.data, "calibration", batch_size=4)))[0]
    changes = {block: change_without(network, block, images_NCHW) for block in residual_blocks(network)}
    assert len(changes) >= 2
    cfg = dataclasses.replace(CONFIG, method=Method.blocks, target_macs_ratio=0.999)
    model, report = run(cfg, checkpoint, tmp_path / "out", workshop.data)
    assert report.blocks_removed == (min(changes, key=lambda block: changes[block]),)
    assert report.macs_after == count_macs(model)
    dropped = report.blocks_removed[0]
    rows = {row["layer"]: row for row in csv.DictReader((model.parent / "removed.csv").open())}
    assert {row["channels_after"] for layer, row in rows.items() if layer.startswith(f"{dropped}.")} == {"0"}
    loaded, loaded_card = load_checkpoint(model)
    assert loaded_card == card
    with torch.no_grad():
        assert torch.equal(loaded(images_NCHW), logits_without(network, dropped, images_NCHW))
    again, _ = run(CONFIG, model, tmp_path / "again")
    assert count_macs(again) <= 0.6 * count_macs(model)


def test_the_unchanged_network_runs_once_a_batch_while_blocks_are_compared(tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "source", NetworkName.fast_scnn, depth=1.0)
    network, _ = load_checkpoint(tmp_path / "source")
    batches = [torch.randn(2, 3, 64, 64), torch.randn(1, 3, 64, 64)]
    blocks = residual_blocks(network)
    calls: list[int] = []
    network.register_forward_hook(lambda *_: calls.append(1))
    changes = logit_changes(network, blocks, batches)
    assert len(calls) == len(batches) * (1 + len(blocks)) and residual_blocks(network) == blocks
    for block, change in changes.items():
        noise = sum(change_without(network, block, images_NCHW) ** 2 for images_NCHW in batches)
        with torch.no_grad():
            signal = sum(float(network(images_NCHW).square().sum()) for images_NCHW in batches)
        assert change == pytest.approx((noise / signal) ** 0.5, rel=1e-4)


def test_a_limit_that_holds_already_drops_nothing_even_without_blocks(tmp_path: Path) -> None:
    """An earlier step may have dropped more than it had to, and the last block."""
    make_checkpoint(tmp_path / "source", NetworkName.deeplabv3plus)
    network, _ = load_checkpoint(tmp_path / "source")
    limit_macs = count_macs(tmp_path / "source")
    assert prune_blocks(network, batches=[], size=(64, 64), limit_macs=limit_macs) == []
    with pytest.raises(ArtifactError, match="no residual block"):
        prune_blocks(network, batches=[], size=(64, 64), limit_macs=limit_macs - 1)


@pytest.mark.slow
def test_dropped_block_is_not_in_the_exported_graph(tmp_path: Path, workshop: Workshop) -> None:
    make_checkpoint(tmp_path / "source", NetworkName.fast_scnn, classes=WORKSHOP_CLASSES)
    cfg = dataclasses.replace(CONFIG, method=Method.blocks, target_macs_ratio=0.999)
    model, report = run(cfg, tmp_path / "source", tmp_path / "out", workshop.data)
    network, card = load_checkpoint(model)
    graph = export_graph(network, card, height=64, width=64, opset=20)
    modules = {module for module, _ in node_sources(graph).values()}
    assert "context.0.expand.conv" in modules
    assert not any(module.startswith(f"{report.blocks_removed[0]}.") for module in modules)


def logits_without(network: nn.Module, block: str, images_NCHW: torch.Tensor) -> torch.Tensor:
    """What the network computes when a block hands on its input."""
    hook = network.get_submodule(block).register_forward_hook(lambda _module, inputs, _output: inputs[0])
    with torch.no_grad():
        logits_NCHW: torch.Tensor = network(images_NCHW)
    hook.remove()
    return logits_NCHW


def change_without(network: nn.Module, block: str, images_NCHW: torch.Tensor) -> float:
    with torch.no_grad():
        expected_NCHW = network(images_NCHW)
    return float((logits_without(network, block, images_NCHW) - expected_NCHW).norm())


def test_blocks_that_are_not_enough_are_listed(tmp_path: Path, workshop: Workshop) -> None:
    make_checkpoint(tmp_path / "source", NetworkName.fast_scnn, classes=WORKSHOP_CLASSES)
    cfg = dataclasses.replace(CONFIG, method=Method.blocks, target_macs_ratio=0.1)
    with pytest.raises(
        GateFailed, match=r"Without its 3 residual blocks.*context\.1.*Raise prune\.target_macs"
    ):
        run(cfg, tmp_path / "source", tmp_path / "out", workshop.data)


def test_network_without_residual_blocks_is_refused(tmp_path: Path, workshop: Workshop) -> None:
    make_checkpoint(tmp_path / "source", NetworkName.deeplabv3plus, classes=WORKSHOP_CLASSES)
    with pytest.raises(
        ArtifactError, match=r"no residual block whose shortcut is the identity.*network\.depth"
    ):
        run(
            dataclasses.replace(CONFIG, method=Method.blocks),
            tmp_path / "source",
            tmp_path / "out",
            workshop.data,
        )


def test_half_written_block_is_damage_and_not_a_dropped_block(tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "source", NetworkName.fast_scnn)
    tensors = load_file(tmp_path / "source")
    kept = {key: tensor for key, tensor in tensors.items() if not key.startswith("context.1.expand.")}
    save_file(kept, tmp_path / "torn", {CARD_KEY: read_card(tmp_path / "source").to_json()})
    with pytest.raises(ArtifactError, match=r"Missing \(\d+\): context\.1\.expand"):
        load_checkpoint(tmp_path / "torn")


@pytest.mark.parametrize("ranking", [Ranking.across_layers, Ranking.uniform])
def test_weights_become_zero_across_layers_or_in_each(ranking: Ranking, tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "source", NetworkName.fast_scnn)
    ratios = {"head.0.pointwise.conv": 0.9}
    cfg = dataclasses.replace(
        CONFIG, method=Method.weights, ranking=ranking, weight_sparsity=0.7, layer_ratios=ratios
    )
    model, report = run(cfg, tmp_path / "source", tmp_path / "out")
    weights = {key: tensor for key, tensor in load_file(model).items() if tensor.dim() == 4}
    shares = {
        key.removesuffix(".weight"): float((tensor == 0).float().mean()) for key, tensor in weights.items()
    }
    assert shares.pop("classifier") == 0
    assert shares.pop("head.0.pointwise.conv") == pytest.approx(0.9, abs=0.001)
    spread = max(shares.values()) - min(shares.values())
    assert spread < 0.05 if ranking is Ranking.uniform else spread > 0.3
    rest = [weights[f"{name}.weight"].flatten() for name in shares]
    assert float((torch.cat(rest) == 0).float().mean()) == pytest.approx(0.7, abs=0.005)
    num_zeros = sum(int((tensor == 0).sum()) for tensor in weights.values())
    assert report.weight_sparsity == pytest.approx(num_zeros / sum(t.numel() for t in weights.values()))
    assert report.macs_ratio == 1.0


def test_two_of_four_lists_the_layers_that_stay_dense(tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "source", NetworkName.fast_scnn)
    model, report = run(
        dataclasses.replace(CONFIG, method=Method.two_of_four), tmp_path / "source", tmp_path / "out"
    )
    before = load_file(tmp_path / "source")
    for key, tensor in load_file(model).items():
        if tensor.dim() == 4 and key.removesuffix(".weight") in report.dense_layers:
            assert tensor.shape[1] % 4 and torch.equal(tensor, before[key])
        elif tensor.dim() == 4:
            assert int((tensor.unflatten(1, (-1, 4)) != 0).sum(2).max()) == 2, key
        else:
            assert torch.equal(tensor, before[key])
    assert "downsample.0.conv" in report.dense_layers and "classifier" not in report.dense_layers


@pytest.mark.parametrize("name", TRANSFORMERS)
def test_linear_layers_of_a_transformer_get_zeros(name: NetworkName, tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "source", name, width=0.25, depth=0.1)
    source, _ = load_checkpoint(tmp_path / "source")
    linear = next(layer for layer, module in source.named_modules() if isinstance(module, nn.Linear))
    cfg = dataclasses.replace(CONFIG, method=Method.weights, layer_ratios={linear: 0.9})
    model, report = run(cfg, tmp_path / "source", tmp_path / "weights")
    zeros = load_file(model)[f"{linear}.weight"] == 0
    assert float(zeros.float().mean()) == pytest.approx(0.9, abs=0.01)
    assert report.weight_sparsity > 0.45
    model, report = run(
        dataclasses.replace(CONFIG, method=Method.two_of_four), tmp_path / "source", tmp_path / "two_of_four"
    )
    for layer, module in load_checkpoint(model)[0].named_modules():
        if isinstance(module, nn.Linear):
            assert is_two_of_four(module.weight.detach().numpy()) != (layer in report.dense_layers)


STEPS = dataclasses.replace(
    CONFIG,
    channel_multiple=1,
    iterations=2,
    recovery=Recovery(dataclasses.replace(TRAINER, learning_rate=1e-12, weight_decay=0.0, max_epochs=1)),
)


@pytest.mark.parametrize("method", [Method.channels, Method.weights, Method.blocks])
def test_steps_end_where_one_cut_would(method: Method, workshop: Workshop, tmp_path: Path) -> None:
    cfg = dataclasses.replace(
        STEPS, method=method, target_macs_ratio=0.6 if method is Method.channels else 0.9
    )
    checkpoint = workshop.checkpoint
    if method is Method.blocks:
        checkpoint = tmp_path / "source"
        make_checkpoint(checkpoint, NetworkName.mobile_unet, classes=WORKSHOP_CLASSES)
    model, report = run(cfg, checkpoint, tmp_path / "out", workshop.data)
    assert sorted(path.name for path in model.parent.iterdir()) == [
        "model.safetensors",
        "removed.csv",
        "resume",
        "steps.csv",
    ]
    first, second = report.steps
    assert (first.step, second.step) == (1, 2) and first.is_kept and second.is_kept
    rows = list(csv.DictReader((model.parent / "steps.csv").open()))
    assert [float(row["macs_ratio"]) for row in rows] == pytest.approx(
        [first.macs_ratio, second.macs_ratio], abs=1e-6
    )
    assert [float(row["val_score"]) for row in rows] == pytest.approx(
        [first.val_score, second.val_score], abs=1e-6
    )
    if method is Method.weights:
        assert 0.2 < first.weight_sparsity < 0.25 and 0.45 < second.weight_sparsity < 0.5
    else:
        assert (
            second.macs_ratio <= cfg.target_macs_ratio <= first.macs_ratio <= (1 + cfg.target_macs_ratio) / 2
        )
    found = measure_val_score(*load_checkpoint(model), workshop.data, 4)
    assert found == second.val_score
    assert report.macs_ratio == second.macs_ratio and not report.is_stopped_at_floor


def test_last_state_above_the_floor_is_kept(workshop: Workshop, tmp_path: Path) -> None:
    data = labelled_by(workshop.checkpoint, workshop, tmp_path / "data")
    cfg = dataclasses.replace(STEPS, method=Method.weights, weight_sparsity=0.95, iterations=3)
    _, free = run(cfg, workshop.checkpoint, tmp_path / "free", data)
    mious = [step.val_score for step in free.steps if step.val_score is not None]
    assert free.val_score_before == 1.0 and mious[0] > mious[1], mious
    floor = (mious[0] + mious[1]) / 2
    model, report = run(
        dataclasses.replace(cfg, min_val_score_ratio=floor), workshop.checkpoint, tmp_path / "out", data
    )
    assert [step.is_kept for step in report.steps] == [True, False]
    assert report.is_stopped_at_floor
    assert report.weight_sparsity == report.steps[0].weight_sparsity < report.steps[1].weight_sparsity
    assert measure_val_score(*load_checkpoint(model), data, 4) == mious[0]
    model, report = run(
        dataclasses.replace(cfg, min_val_score_ratio=1.0), workshop.checkpoint, tmp_path / "none", data
    )
    assert [step.is_kept for step in report.steps] == [False]
    assert model.read_bytes() == workshop.checkpoint.read_bytes()


def test_run_that_was_killed_between_steps_ends_with_the_same_bytes(
    workshop: Workshop, tmp_path: Path
) -> None:
    cfg = dataclasses.replace(STEPS, recovery=Recovery(dataclasses.replace(TRAINER, max_epochs=1)))
    model, report = run(cfg, workshop.checkpoint, tmp_path / "out", workshop.data)
    expected = model.read_bytes()
    model.unlink()
    shutil.rmtree(tmp_path / "out" / "resume" / "step_2")
    assert (
        prune(
            cfg,
            checkpoint=workshop.checkpoint,
            choice=NO_DATA,
            sensitivity=NO_DATA,
            data=workshop.data,
            out=tmp_path / "out",
        )
        == report
    )
    assert model.read_bytes() == expected


def test_target_out_of_reach_fails_before_the_first_training(workshop: Workshop, tmp_path: Path) -> None:
    cfg = dataclasses.replace(STEPS, target_macs_ratio=0.01, max_layer_ratio=0.3)
    with pytest.raises(GateFailed, match=r"prune\.target_macs_ratio 0\.01"):
        run(cfg, workshop.checkpoint, tmp_path / "out", workshop.data)
    assert list((tmp_path / "out").iterdir()) == []


def test_data_of_other_classes_is_refused(workshop: Workshop, tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "source", NetworkName.fast_scnn)
    with pytest.raises(
        ArtifactError, match=r"\['background', 'a', 'b', 'c'\].*\['background', 'zero', 'one'\]"
    ):
        run(STEPS, tmp_path / "source", tmp_path / "out", workshop.data)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_not_finite_are_named(value: float, workshop: Workshop, tmp_path: Path) -> None:
    tensors = load_file(workshop.checkpoint)
    tensors["head.0.pointwise.conv.weight"][0] = value
    save_file(tensors, tmp_path / "source", {CARD_KEY: read_card(workshop.checkpoint).to_json()})
    with pytest.raises(ArtifactError, match=r"NaN or infinite weights.*head\.0\.pointwise\.conv\.weight"):
        run(CONFIG, tmp_path / "source", tmp_path / "out")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"method": Method.weights, "importance": Importance.taylor},
            r"prune\.importance is taylor.*Set .* to l1",
        ),
        ({"method": Method.blocks, "importance": Importance.l2}, r"only method channels can use"),
        ({"method": Method.two_of_four, "iterations": 2}, r"prune\.iterations is 2.*two_of_four"),
        ({"method": Method.two_of_four, "ranking": Ranking.uniform}, r"prune\.ranking is uniform"),
        (
            {"method": Method.weights, "ranking": Ranking.sensitivity},
            r"prune\.ranking is sensitivity, which only method channels can use; method is weights\.",
        ),
        ({"method": Method.blocks, "layer_ratios": {"a": 0.5}}, r"prune\.layer_ratios is \{'a': 0\.5\}"),
        (
            {
                "iterations": 2,
                "recovery": Recovery(dataclasses.replace(TRAINER, num_devices=2, strategy=Strategy.ddp)),
            },
            r"prune\.recovery\.trainer has 2 devices on 1 nodes.*num_devices .* to 1",
        ),
    ],
)
def test_values_that_make_no_sense_together_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        checked(CONFIG, "prune", **changes)
