import csv
import json
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load, save

from tasks import prune
from tasks.core.errors import ArtifactError, BuildFailed, ConfigError, GateFailed, TargetMismatch
from tasks.parts.data.dataset import read_manifest
from tasks.parts.networks.checkpoint import load_checkpoint, save_checkpoint
from tasks.parts.networks.model_card import CARD_KEY
from tasks.parts.pruning.chosen_ratio import read_choice
from tasks.parts.pruning.config import ChannelPruning, Importance, Ranking
from tasks.parts.training.config import Strategy
from tasks.search_pruning import (
    Config,
    Report,
    _candidates,
    _choose,
    _Latency,
    _prune_all,
    _why_none,
    search_pruning,
)
from tests.conftest import checked
from tests.tasks.conftest import Workshop
from tests.tasks.test_prune import write_sensitivity
from tests.tasks.test_train import TRAINER

ONE_EPOCH = replace(TRAINER, max_epochs=1, horizontal_flip=0.0, brightness=0.0)
PRUNING = ChannelPruning(
    target_macs_ratio=0.5,
    channel_multiple=4,
    ranking=Ranking.across_layers,
    max_layer_ratio=0.75,
    num_steps=1,
    importance=Importance.l1,
    layer_ratios={},
)

NO_TABLE = Path("nowhere")


@pytest.fixture(autouse=True)
def one_thread(threads_as_before: None) -> None:
    torch.set_num_threads(1)


def config(workshop: Workshop, target: str = "cpu_torch", /, **changes: Any) -> Config:
    return Config(
        target=workshop.target(target, **changes),
        target_macs_ratios=[0.7],
        pruning=PRUNING,
        num_images=4,
        batch_size=2,
        trainer=ONE_EPOCH,
        num_train_images=6,
        num_val_images=3,
        num_rounds=5,
        opset=20,
        max_minutes=60.0,
    )


def search(cfg: Config, workshop: Workshop, out: Path) -> Report:
    return search_pruning(
        cfg, checkpoint=workshop.checkpoint, sensitivity=NO_TABLE, data=workshop.data, out=out
    )


def rows_of(path: Path) -> list[dict[str, str]]:
    with path.open(encoding="utf-8") as file:
        return list(csv.DictReader(file))


@pytest.fixture(scope="module")
def searched(workshop: Workshop, tmp_path_factory: pytest.TempPathFactory) -> tuple[Report, Path]:
    torch.set_num_threads(1)
    out = tmp_path_factory.mktemp("search")
    cfg = replace(config(workshop, "cpu_onnxruntime"), target_macs_ratios=[0.5, 0.01])
    return search(cfg, workshop, out), out


def test_every_ratio_is_a_row_and_one_is_chosen(searched: tuple[Report, Path]) -> None:
    report, out = searched
    rows = rows_of(out / "curve.csv")
    assert [float(row["target_macs_ratio"]) for row in rows] == [0.01, 0.5, 1.0]
    for row, candidate in zip(rows[1:], report.candidates[1:], strict=True):
        assert 0 < float(row["macs_ratio"]) <= float(row["target_macs_ratio"])
        assert float(row["latency_ms_p50"]) > 0 and 0 <= float(row["val_score"]) <= 1
        assert float(row["latency_ratio_low"]) <= float(row["latency_ratio_high"])
        assert row["note"] == "" and candidate.macs == int(row["macs"])
    assert float(rows[-1]["latency_ratio"]) == 1
    assert report.target == "cpu_onnxruntime"
    choice = json.loads((out / "choice.json").read_text())
    assert choice["target_macs_ratio"] == report.target_macs_ratio
    assert report.target_macs_ratio in (0.5, None)  # faster or not, as the clock said
    assert choice.get("reason", "") == report.reason and (report.reason == "") == (
        report.target_macs_ratio == 0.5
    )
    assert (out / "curve.png").read_bytes().startswith(b"\x89PNG")


def test_ratios_without_time_are_rows_that_say_so_b1(workshop: Workshop, tmp_path: Path) -> None:
    report = search(replace(config(workshop), max_minutes=1e-9), workshop, tmp_path)
    late = "there was no time for it within 1e-09 min (search_pruning.max_minutes)"
    assert [(row.target_macs_ratio, row.note) for row in report.candidates] == [(0.7, late), (1.0, "")]
    assert report.target_macs_ratio is None and report.reason.endswith(late)


def test_ratio_out_of_reach_is_a_row_that_says_so(searched: tuple[Report, Path]) -> None:
    row = rows_of(searched[1] / "curve.csv")[0]
    assert row["macs"] == row["latency_ms_p50"] == row["val_score"] == "" and row["is_knee"] == "False"
    assert "Pruning reaches" in row["note"] and "0.01" in row["note"]


def test_only_the_first_images_are_used_and_no_engine_is_kept(searched: tuple[Report, Path]) -> None:
    _, out = searched
    assert read_manifest(out / "resume" / "dataset").counts == {"train": 6, "val": 3}
    assert sorted(path.name for path in out.iterdir()) == ["choice.json", "curve.csv", "curve.png", "resume"]


@pytest.mark.slow
def test_killed_search_continues_and_ends_with_the_same_accuracy(workshop: Workshop, tmp_path: Path) -> None:
    """What a kill leaves is the folder ``resume``; the recoveries in it are over."""
    cfg = config(workshop)
    first = search(cfg, workshop, tmp_path)
    histories = {path: path.stat().st_mtime_ns for path in (tmp_path / "resume").glob("*/history.csv")}
    again = search(cfg, workshop, tmp_path)
    assert [row.val_score for row in again.candidates] == [row.val_score for row in first.candidates]
    assert len(histories) == 2
    assert {path: path.stat().st_mtime_ns for path in histories} == histories


@pytest.mark.slow
@pytest.mark.parametrize(
    ("target", "changes", "error", "text"),
    [
        (
            "cpu_torch",
            {"cpu_flags": ["avx_imaginary"]},
            TargetMismatch,
            "build skipped: this CPU lacks avx_imaginary",
        ),
        (
            "cpu_onnxruntime",
            {"opsets": [13, 14]},
            BuildFailed,
            "build failed: .* opset 20, allowed are 13..14",
        ),
        ("cpu_torch", {"runtime_version": "1.2"}, TargetMismatch, r"target\.cpu_torch\.runtime_version"),
    ],
)
def test_target_that_cannot_be_built_is_refused_before_any_training(
    target: str,
    changes: dict[str, Any],
    error: type[Exception],
    text: str,
    workshop: Workshop,
    tmp_path: Path,
) -> None:
    with pytest.raises(error, match=text):
        search(config(workshop, target, **changes), workshop, tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"target_macs_ratios": [0.01, 0.02]}, r"^none of the ratios.*largest: Pruning reaches .* 0\.02"),
        (
            {"pruning": replace(PRUNING, channel_multiple=1024)},
            r"channel_multiple is 1024, and the widest layer",
        ),
    ],
)
def test_no_ratio_in_reach_ends_without_a_choice_and_without_any_training(
    changes: dict[str, Any], reason: str, workshop: Workshop, tmp_path: Path
) -> None:
    report = search(replace(config(workshop), **changes), workshop, tmp_path)
    assert report.target_macs_ratio is None and report.aa_ratio_spread is None and not report.has_knee
    assert re.search(reason, report.reason)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["choice.json", "curve.csv"]
    rows = rows_of(tmp_path / "curve.csv")
    assert rows and all(row["macs"] == "" and row["note"] in report.reason for row in rows[-1:])
    with pytest.raises(GateFailed, match=r"prune\.from_search is true, but search_pruning chose no ratio"):
        read_choice(tmp_path / "choice.json")


def test_layer_ratios_of_unknown_layers_are_refused(workshop: Workshop, tmp_path: Path) -> None:
    cfg = replace(config(workshop), pruning=replace(PRUNING, layer_ratios={"nowhere": 0.5}))
    with pytest.raises(ConfigError, match=r"prune\.layer_ratios names 'nowhere'"):
        search(cfg, workshop, tmp_path)


@pytest.mark.parametrize(
    "choice",
    [{"importance": Importance.taylor}, {"ranking": Ranking.sensitivity}],
    ids=["taylor", "sensitivity"],
)
def test_search_cuts_the_channels_that_the_stage_prune_cuts(
    choice: dict[str, Any], workshop: Workshop, tmp_path: Path
) -> None:
    pruning = replace(PRUNING, target_macs_ratio=0.7, **choice)
    network, card = load_checkpoint(workshop.checkpoint)
    table = write_sensitivity(tmp_path, network, (card.height, card.width))
    cfg = replace(config(workshop), pruning=pruning)
    networks, notes = _prune_all(cfg, network, (card.height, card.width), workshop.data, table)
    assert notes == {}
    cut_by_prune = prune.Config(
        **vars(pruning),
        method=prune.Method.channels,
        from_search=False,
        weight_sparsity=0.5,
        num_images=cfg.num_images,
        batch_size=cfg.batch_size,
        iterations=1,
        min_val_score_ratio=0.0,
        recovery=prune.Recovery(cfg.trainer),
    )
    prune.prune(
        cut_by_prune,
        checkpoint=workshop.checkpoint,
        choice=tmp_path,
        sensitivity=table,
        data=workshop.data,
        out=tmp_path,
    )
    expected = load_checkpoint(tmp_path / "model.safetensors")[0].state_dict()
    for name, tensor in networks[0.7].state_dict().items():
        assert torch.equal(tensor, expected[name]), name


def test_table_of_another_network_is_refused_before_any_training(workshop: Workshop, tmp_path: Path) -> None:
    network, card = load_checkpoint(workshop.checkpoint)
    table = write_sensitivity(tmp_path, network, (card.height, card.width), prefix="other.")
    cfg = replace(config(workshop), pruning=replace(PRUNING, ranking=Ranking.sensitivity))
    (tmp_path / "out").mkdir()
    with pytest.raises(ArtifactError, match=r"has a group 'other\..* but the network has no such group"):
        search_pruning(
            cfg,
            checkpoint=workshop.checkpoint,
            sensitivity=table,
            data=workshop.data,
            out=tmp_path / "out",
        )
    assert list((tmp_path / "out").iterdir()) == []


def test_weights_that_are_not_finite_are_refused(workshop: Workshop, tmp_path: Path) -> None:
    _, card = load_checkpoint(workshop.checkpoint)
    tensors = load(workshop.checkpoint.read_bytes())
    tensors["classifier.weight"] = np.full_like(tensors["classifier.weight"], np.nan)
    path = tmp_path / "nan.safetensors"
    path.write_bytes(save(tensors, metadata={CARD_KEY: card.to_json()}))
    with pytest.raises(ArtifactError, match=r"NaN or infinite weights.*classifier\.weight"):
        search_pruning(
            config(workshop), checkpoint=path, sensitivity=NO_TABLE, data=workshop.data, out=tmp_path
        )


def test_other_classes_than_those_of_the_data_are_refused(workshop: Workshop, tmp_path: Path) -> None:
    network, card = load_checkpoint(workshop.checkpoint)
    path = tmp_path / "model.safetensors"
    save_checkpoint(path, network, replace(card, classes=("background", "zero", "two")))
    with pytest.raises(ArtifactError, match=r"has the classes .*'two'.*the data .*'one'"):
        search_pruning(
            config(workshop), checkpoint=path, sensitivity=NO_TABLE, data=workshop.data, out=tmp_path
        )


@pytest.mark.parametrize(
    ("latencies_and_mious", "knee", "choice"),
    [
        # 0.5 loses little accuracy for much latency.
        ({0.25: (0.3, 0.30), 0.5: (0.5, 0.54), 0.7: (0.9, 0.55), 1.0: (1.0, 0.56)}, 0.5, 0.5),
        # 0.7 is slower than the unpruned network and less accurate: it counts for nothing.
        ({0.25: (0.3, 0.30), 0.5: (0.5, 0.54), 0.7: (1.2, 0.50), 1.0: (1.0, 0.56)}, 0.5, 0.5),
        # A straight front has no knee: the faster one of the highest mIoU.
        ({0.25: (0.25, 0.25), 0.5: (0.5, 0.5), 1.0: (1.0, 1.0)}, None, 0.5),
        # Pruning buys nothing.
        ({0.25: (1.1, 0.30), 0.5: (1.2, 0.40), 1.0: (1.0, 0.56)}, None, None),
        # As fast as the unpruned one within the noise (half a tenth either way).
        ({0.25: (0.97, 0.30), 0.5: (0.98, 0.50), 1.0: (1.0, 0.56)}, 0.5, None),
        # More accurate, but not faster than the unpruned one.
        ({0.25: (0.3, 0.30), 0.5: (1.1, 0.60), 1.0: (1.0, 0.31)}, None, 0.25),
        # Faster, but another one is faster and more accurate.
        ({0.25: (0.3, 0.50), 0.5: (0.5, 0.40), 1.0: (1.0, 0.56)}, None, 0.25),
        # One ratio leaves no choice.
        ({0.25: (0.3, 0.30), 1.0: (1.0, 0.56)}, None, 0.25),
        # The knee is the unpruned network, which is no choice for a stage that prunes.
        ({0.25: (0.3, 0.30), 1.0: (0.4, 0.56), 0.5: (1.0, 0.57)}, 1.0, 0.25),
    ],
)
def test_choice_is_the_knee_or_else_the_most_accurate_of_the_faster_networks(
    latencies_and_mious: Mapping[float, tuple[float, float]], knee: float | None, choice: float | None
) -> None:
    rows = _candidates(
        notes={0.1: "out of reach"},
        macs={ratio: int(1000 * ratio) for ratio in latencies_and_mious},
        scores={ratio: miou for ratio, (_, miou) in latencies_and_mious.items()},
        latencies={
            ratio: _Latency(ms, ms, ms - 0.05, ms + 0.05) for ratio, (ms, _) in latencies_and_mious.items()
        },
    )
    assert [row.target_macs_ratio for row in rows if row.is_knee] == ([] if knee is None else [knee])
    chosen = _choose(rows)
    assert (chosen.target_macs_ratio if chosen else None) == choice
    assert "(latency_ratio_high below 1)" in _why_none(rows)


def test_recoveries_on_several_devices_are_refused(workshop: Workshop) -> None:
    with pytest.raises(ConfigError, match=r"search_pruning\.trainer has num_devices 2 .*expected 1 and 1"):
        checked(
            config(workshop),
            "search_pruning",
            trainer=replace(ONE_EPOCH, num_devices=2, strategy=Strategy.ddp),
        )
