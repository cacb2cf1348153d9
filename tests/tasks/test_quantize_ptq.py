import csv
import json
import logging
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnx import numpy_helper

from tasks.core.errors import ArtifactError, DataError
from tasks.parts.data.comparison import ImageResults
from tasks.parts.data.dataset import open_images
from tasks.parts.onnx_graphs.graph import is_quantized, node_sources, read_graph, write_graph
from tasks.parts.onnx_graphs.predict import predict_classes
from tasks.parts.quantization.config import Activations, Calibrator
from tasks.parts.quantization.evaluation import Evaluation, GraphEvaluator
from tasks.quantize_ptq import Config, quantize_ptq
from tasks.quantize_repaired import Config as RepairConfig
from tasks.quantize_repaired import quantize_repaired
from tasks.rank_layers import Config as RankConfig
from tasks.rank_layers import rank_layers
from tests.tasks.conftest import ANYWAY

CONFIG = Config(
    calibrators=list(Calibrator),
    percentiles=[99.9, 99.99],
    num_images=4,
    batch_size=2,
    num_val_images=0,
    max_abs_input=20.0,
    op_types=["Conv", "Add", "Concat", "AveragePool", "Resize"],
    activations=[Activations.uint8],
)


TITLES = ["minmax", "entropy", "percentile 99.9", "percentile 99.99", "mse"]


@pytest.fixture(scope="module")
def quantized(workshop: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    out = tmp_path_factory.mktemp("ptq")
    return quantize_ptq(CONFIG, model=workshop.graph, data=workshop.data, out=out), out


@pytest.fixture
def data(workshop: Any, tmp_path: Path) -> Path:
    """Return a copy of the data set that a test may spoil."""
    return Path(shutil.copytree(workshop.data, tmp_path / "dataset"))


def test_the_best_calibrator_is_kept_and_all_are_reported(quantized: tuple[Any, Path]) -> None:
    report, out = quantized
    assert [trial.calibrator for trial in report.trials] == TITLES
    best = max(report.trials, key=lambda trial: (min(trial.score, report.float_score), trial.agreement))
    assert (report.calibrator, report.score, report.agreement) == (
        best.calibrator,
        best.score,
        best.agreement,
    )
    with (out / "calibrators.csv").open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert [row["calibrator"] for row in rows] == TITLES
    assert float(rows[0]["score"]) == pytest.approx(report.trials[0].score, abs=1e-6)


def test_above_the_float_score_agreement_decides_a8(workshop: Any, data: Path, tmp_path: Path) -> None:
    """Labels by which the calibrator that changes most answers scores best, and another one above float, too."""
    graph = read_graph(workshop.graph)
    images_NHWC = open_images(data, "val")
    trial = replace(CONFIG, calibrators=[Calibrator.percentile])
    labels_NHW = predict_classes(graph, images_NHWC, batch_size=2)
    float_NHW = labels_NHW.copy()
    for share in (99.99, 90.0):
        out = tmp_path / f"{share}"
        out.mkdir()
        quantize_ptq(replace(trial, percentiles=[share]), model=workshop.graph, data=data, out=out)
        int8_NHW = predict_classes(read_graph(out / "model.onnx"), images_NHWC, batch_size=2)
        labels_NHW = np.where(int8_NHW != float_NHW, int8_NHW, labels_NHW)
    np.save(data / "val_masks.npy", labels_NHW)
    report = quantize_ptq(
        replace(trial, percentiles=[90.0, 99.99]), model=workshop.graph, data=data, out=tmp_path
    )
    coarse, fine = report.trials
    assert coarse.score > fine.score > report.float_score and coarse.agreement < fine.agreement
    assert (report.calibrator, report.agreement) == ("percentile 99.99", fine.agreement)


@pytest.mark.parametrize(
    ("lost", "gained", "is_as_good"),
    [(0, 3, True), (3, 3, True), (4, 3, True), (1, 0, True), (9, 0, False), (60, 40, False)],
)
def test_a_loss_within_noise_counts_as_none_a8(lost: int, gained: int, is_as_good: bool) -> None:
    """2000 images: nine lost and none gained are a certain loss, 20 of 100 more than 0.1 %, one is chance."""
    right_N = np.arange(2000) % 10 != 0
    changed_N = right_N.copy()
    changed_N[np.flatnonzero(right_N)[:lost]] = False
    changed_N[np.flatnonzero(~right_N)[:gained]] = True
    ones = np.ones((2000, 1), np.int64)
    before, after = (
        ImageResults(found_N.astype(np.int64)[:, None], ones, ones, np.arange(2000))
        for found_N in (right_N, changed_N)
    )
    evaluator = GraphEvaluator(ones, None, ones, before, 1, (Activations.uint8,), "")  # type: ignore[arg-type]
    below, agreement = evaluator.rank(Evaluation(after, 0.9, Activations.uint8))
    assert agreement == 0.9 and (below == 0.0) is is_as_good


def test_graph_and_ranges_belong_together(quantized: tuple[Any, Path], workshop: Any) -> None:
    report, out = quantized
    graph, before = read_graph(out / "model.onnx"), read_graph(workshop.graph)
    assert is_quantized(graph)
    assert node_sources(before).items() <= node_sources(graph).items()
    content = json.loads((out / "ranges.json").read_text(encoding="utf-8"))
    assert content["calibrator"] == report.calibrator
    pairs = [node.input[0] for node in graph.graph.node if node.op_type == "QuantizeLinear"]
    assert content["activations"] == ["uint8"]
    assert content["ranges"].keys() < set(pairs)  # a Resize has the range of its input
    assert report.num_quantized_tensors == len(pairs)


def test_the_same_inputs_give_the_same_bytes(
    quantized: tuple[Any, Path], workshop: Any, tmp_path: Path
) -> None:
    quantize_ptq(CONFIG, model=workshop.graph, data=workshop.data, out=tmp_path)
    for name in ("model.onnx", "ranges.json", "calibrators.csv", "images.npz"):
        assert (tmp_path / name).read_bytes() == (quantized[1] / name).read_bytes()


def test_layer_that_died_in_training_does_not_keep_the_network_from_int8(
    workshop: Any, tmp_path: Path
) -> None:
    """As in the squeeze-and-excitation of a trained MobileNetV3: one ReLU is 0 for every image."""
    graph = read_graph(workshop.graph)
    makers = {name: node for node in graph.graph.node for name in node.output}
    branches = next(node for node in graph.graph.node if node.op_type == "Concat").input
    node = makers[branches[-1]]
    while node.op_type in ("Resize", "Relu"):
        node = makers[node.input[0]]
    bias = next(item for item in graph.graph.initializer if item.name == node.input[2])
    bias.CopyFrom(numpy_helper.from_array(np.full(bias.dims, -1e4, np.float32), bias.name))
    write_graph(graph, tmp_path / "dead.onnx")
    inputs = {"model": tmp_path / "dead.onnx", "data": workshop.data}
    for stage in ("ptq", "ranked", "repaired"):
        (tmp_path / stage).mkdir()
    report = quantize_ptq(CONFIG, **inputs, out=tmp_path / "ptq")
    assert report.dead_tensors and report.agreement > 0.5
    ranges = tmp_path / "ptq/ranges.json"
    [dead] = {tuple(json.loads(ranges.read_text())["ranges"][name]) for name in report.dead_tensors}
    assert dead == (0.0, 1.0)
    ranked = rank_layers(
        RankConfig(CONFIG.op_types, 4, 0, 2, **ANYWAY),
        **inputs,
        ranges=ranges,
        results=tmp_path / "ptq/images.npz",
        out=tmp_path / "ranked",
    )
    alone = next(layer for layer in ranked.layers if layer.node == node.name)
    assert alone.disagreement == 0
    repairs = RepairConfig(
        op_types=CONFIG.op_types,
        max_score_rel_loss=0.0,
        max_parent_rel_loss=0.0,
        class_limits={},
        class_floors={},
        num_images=4,
        num_layer_images=4,
        num_val_images=0,
        batch_size=2,
        exhaustive=False,
        max_minutes=60.0,
    )
    found = quantize_repaired(
        repairs,
        **inputs,
        reference=inputs["model"],
        ranges=ranges,
        results=tmp_path / "ptq/images.npz",
        out=tmp_path / "repaired",
    )
    assert found.score >= found.ptq_score


def test_a_wild_pixel_scale_is_refused_and_not_calibrated(workshop: Any, data: Path, tmp_path: Path) -> None:
    import onnx

    graph = onnx.load(workshop.graph)
    card = json.loads(graph.metadata_props[0].value)
    graph.metadata_props[0].value = json.dumps(card | {"std": [1e-6, 0.2, 0.2]})
    onnx.save(graph, tmp_path / "wild.onnx")
    with pytest.raises(DataError, match=r"quantize_ptq\.max_abs_input"):
        quantize_ptq(CONFIG, model=tmp_path / "wild.onnx", data=data, out=tmp_path)


def test_black_calibration_images_are_refused(workshop: Any, data: Path, tmp_path: Path) -> None:
    images_NHWC = np.load(data / "calibration_images.npy")
    images_NHWC[:] = 114
    np.save(data / "calibration_images.npy", images_NHWC)
    with pytest.raises(DataError, match="2 calibration images hold one value only"):
        quantize_ptq(replace(CONFIG, num_images=2), model=workshop.graph, data=data, out=tmp_path)


def test_calibration_images_of_the_test_split_and_a_small_split_are_warned_of(
    workshop: Any, data: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    images_NHWC = np.load(data / "calibration_images.npy")
    images_NHWC[:2] = np.load(data / "test_images.npy")[:2]
    np.save(data / "calibration_images.npy", images_NHWC)
    config = replace(CONFIG, num_images=100, calibrators=[Calibrator.minmax])
    with caplog.at_level(logging.WARNING):
        report = quantize_ptq(config, model=workshop.graph, data=data, out=tmp_path)
    assert (report.num_images, report.num_images_in_test) == (4, 2)
    assert "has 4 images, quantize_ptq.num_images asks for 100" in caplog.text
    assert "2 calibration images are also in the test split" in caplog.text


def test_a_graph_that_disagrees_is_written_all_the_same(workshop: Any, tmp_path: Path) -> None:
    config = replace(CONFIG, percentiles=[51.0], calibrators=[Calibrator.percentile])
    report = quantize_ptq(config, model=workshop.graph, data=workshop.data, out=tmp_path)
    assert report.agreement < 0.99 and (tmp_path / "model.onnx").is_file()  # select_engine judges it


def test_a_quantized_graph_is_refused(workshop: Any, tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match="already has Q/DQ"):
        quantize_ptq(CONFIG, model=workshop.quantized, data=workshop.data, out=tmp_path)


def test_other_classes_are_refused(workshop: Any, data: Path, tmp_path: Path) -> None:
    manifest = data / "manifest.json"
    manifest.write_text(manifest.read_text(encoding="utf-8").replace('"zero"', '"nine"'), encoding="utf-8")
    with pytest.raises(ArtifactError, match=r"zero.*nine"):
        quantize_ptq(CONFIG, model=workshop.graph, data=data, out=tmp_path)
