import csv
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load, save

from tasks.core.errors import ArtifactError
from tasks.parts.networks.checkpoint import load_checkpoint, save_checkpoint
from tasks.parts.networks.model_card import CARD_KEY
from tasks.rank_groups import Config, Report, cut_sizes, rank_groups
from tests.tasks.conftest import Workshop

CONFIG = Config(
    ratios=[0.25, 0.5],
    channel_multiple=4,
    num_train_images=8,
    num_val_images=4,
    batch_size=4,
    max_minutes=60.0,
)


@pytest.fixture(autouse=True)
def one_thread(threads_as_before: None) -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def weakened(workshop: Workshop, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint in which half of the channels of one group do nothing: their weights are zero."""
    network, card = load_checkpoint(workshop.checkpoint)
    block: Any = network.get_submodule("context.0")
    with torch.no_grad():
        for layer in (block.expand.conv, block.expand.norm, block.depthwise.conv, block.depthwise.norm):
            layer.weight[::2] = 0
        for norm in (block.expand.norm, block.depthwise.norm):
            norm.bias[::2] = 0
        block.project.conv.weight[:, ::2] = 0
    path = tmp_path_factory.mktemp("weakened") / "model.safetensors"
    save_checkpoint(path, network, card)
    return path


@pytest.fixture(scope="module")
def ranked(
    workshop: Workshop, weakened: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Report, Path]:
    torch.set_num_threads(1)
    out = tmp_path_factory.mktemp("groups")
    return rank_groups(CONFIG, checkpoint=weakened, data=workshop.data, out=out), out


def test_groups_without_time_are_missing_and_the_report_says_so_b1(
    ranked: tuple[Report, Path], workshop: Workshop, weakened: Path, tmp_path: Path
) -> None:
    cfg = replace(CONFIG, max_minutes=1e-9)
    report = rank_groups(cfg, checkpoint=weakened, data=workshop.data, out=tmp_path)
    assert report.cuts == () and ranked[0].left_out == ""
    assert (
        report.reason
        == report.left_out
        == (f"time was up after 1e-09 min (rank_groups.max_minutes) and 0 of {len(ranked[0].cuts)} cuts")
    )


def test_every_group_has_a_row_for_each_number_of_channels(ranked: tuple[Report, Path]) -> None:
    report, out = ranked
    groups = {cut.group for cut in report.cuts}
    assert len(groups) == report.num_groups - report.num_groups_uncut > 10
    assert report.num_evaluations == len(report.cuts) + 1 and report.reason == ""
    for cut in report.cuts:
        multiple = CONFIG.channel_multiple
        assert cut.channels_removed in cut_sizes(
            cut.channels, CONFIG.ratios, multiple=multiple, least=multiple
        )
        assert cut.group in cut.layers.split() and 0 < cut.macs_saved_share < 1
    assert len({(cut.group, cut.channels_removed) for cut in report.cuts}) == len(report.cuts)
    with (out / "sensitivity.csv").open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert [row["group"] for row in rows] == [cut.group for cut in report.cuts]
    assert [float(row["score_drop"]) for row in rows] == pytest.approx(
        [cut.score_drop for cut in report.cuts], abs=1e-6
    )
    assert (out / "sensitivity.png").read_bytes().startswith(b"\x89PNG")


def test_channels_that_do_nothing_cost_nothing_and_others_do(ranked: tuple[Report, Path]) -> None:
    drops = {(cut.group, round(cut.ratio, 2)): cut.score_drop for cut in ranked[0].cuts}
    assert drops["context.0.expand.conv", 0.5] == 0
    assert max(drops.values()) > 0.01


def test_cut_that_only_shifts_the_activations_costs_nothing(workshop: Workshop, tmp_path: Path) -> None:
    """Half of the channels of one group are constant: without them the mean in front of a BatchNorm is another.

    With the statistics of the uncut network that would ruin the mIoU.
    """
    network, card = load_checkpoint(workshop.checkpoint)
    block: Any = network.get_submodule("context.0")
    with torch.no_grad():
        for layer in (block.expand.conv, block.expand.norm, block.depthwise.conv, block.depthwise.norm):
            layer.weight[::2] = 0
        block.depthwise.norm.bias[::2] = 100
        block.project.conv.weight[:, ::2] = 0.01
        block.project.norm.running_mean += 100 * block.project.conv.weight[:, ::2].sum((1, 2, 3))
    path = tmp_path / "model.safetensors"
    save_checkpoint(path, network, card)
    report = rank_groups(CONFIG, checkpoint=path, data=workshop.data, out=tmp_path)
    drops = {(cut.group, round(cut.ratio, 2)): cut.score_drop for cut in report.cuts}
    assert abs(drops["context.0.expand.conv", 0.5]) < 0.005


def test_the_same_inputs_give_the_same_scan(
    ranked: tuple[Report, Path], weakened: Path, workshop: Workshop, tmp_path: Path
) -> None:
    before = weakened.read_bytes()
    assert rank_groups(CONFIG, checkpoint=weakened, data=workshop.data, out=tmp_path) == ranked[0]
    assert weakened.read_bytes() == before


@pytest.mark.parametrize(
    ("channels", "multiple", "least", "ratios", "sizes"),
    [
        (64, 16, 16, [0.25, 0.5, 0.75], [16, 32, 48]),
        (64, 16, 32, [0.25, 0.5, 0.75], [16, 32]),
        (48, 16, 16, [0.25, 0.5, 0.75], [16, 32]),  # 36 left is rounded to 32, as 24 is; 12 to 16
        (24, 16, 16, [0.25, 0.75], [8]),
        (16, 16, 16, [0.5], []),
        (10, 1, 1, [0.25], [2]),
        (8, 4, 4, [0.01], []),
    ],
)
def test_what_is_left_is_the_nearest_multiple(
    channels: int, multiple: int, least: int, ratios: list[float], sizes: list[int]
) -> None:
    assert cut_sizes(channels, ratios, multiple=multiple, least=least) == sizes


def test_network_that_cannot_be_cut_gives_an_empty_table_and_the_reason(
    workshop: Workshop, tmp_path: Path
) -> None:
    cfg = replace(CONFIG, channel_multiple=1024)
    report = rank_groups(cfg, checkpoint=workshop.checkpoint, data=workshop.data, out=tmp_path)
    assert re.search(r"rank_groups\.channel_multiple is 1024, and none of the \d+ groups", report.reason)
    assert report.cuts == () and report.num_groups == report.num_groups_uncut > 10
    assert [path.name for path in tmp_path.iterdir()] == ["sensitivity.csv"]
    assert (tmp_path / "sensitivity.csv").read_text().startswith("group,layers,channels,")


def test_weights_that_are_not_finite_are_refused(workshop: Workshop, tmp_path: Path) -> None:
    _, card = load_checkpoint(workshop.checkpoint)
    tensors = load(workshop.checkpoint.read_bytes())
    tensors["classifier.weight"] = np.full_like(tensors["classifier.weight"], np.nan)
    (tmp_path / "nan.safetensors").write_bytes(save(tensors, metadata={CARD_KEY: card.to_json()}))
    with pytest.raises(ArtifactError, match=r"NaN or infinite weights.*classifier\.weight"):
        rank_groups(CONFIG, checkpoint=tmp_path / "nan.safetensors", data=workshop.data, out=tmp_path)


def test_other_classes_than_those_of_the_data_are_refused(workshop: Workshop, tmp_path: Path) -> None:
    network, card = load_checkpoint(workshop.checkpoint)
    path = tmp_path / "model.safetensors"
    save_checkpoint(path, network, replace(card, classes=("background", "zero", "two")))
    with pytest.raises(ArtifactError, match=r"has the classes .*'two'.*the data .*'one'"):
        rank_groups(CONFIG, checkpoint=path, data=workshop.data, out=tmp_path)
