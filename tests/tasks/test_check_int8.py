import csv
import dataclasses
import itertools
import json
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnx import TensorProto, helper, numpy_helper

from tasks.check_int8 import Answer, Config, Report, check_int8
from tasks.core.errors import ArtifactError
from tasks.parts.cpu import int8_sums_saturate
from tasks.parts.data.dataset_writer import SplitBatches, write_dataset
from tasks.parts.data.input_card import InputCard, Task
from tasks.parts.onnx_graphs.graph import CARD_KEY, write_graph
from tasks.parts.quantization.config import Activations, Calibrator
from tasks.parts.tables import write_empty_table
from tasks.quantize_ptq import Config as QuantizeConfig
from tasks.quantize_ptq import quantize_ptq
from tasks.rank_layers import Config as RankConfig
from tasks.rank_layers import RankedLayer, rank_layers
from tests.tasks.conftest import ANYWAY

OP_TYPES = ["Conv", "Add", "Concat", "AveragePool", "Resize"]
CONFIG = Config(
    op_types=OP_TYPES,
    num_images=4,
    num_train_images=4,
    num_val_images=0,
    batch_size=4,
    suspect_loss=0.1,
    suspect_clipped_share=0.05,
)


def check(files: Any, out: Path, **changes: Any) -> Report:
    inputs = {
        "model": files.graph,
        "quantized": files.graph.parent / "model.onnx",
        "ranges": files.ranges,
        "trials": files.graph.parent / "calibrators.csv",
        "ranking": files.ranking,
        "data": files.data,
    }
    return check_int8(CONFIG, **(inputs | changes), out=out)


def answer(report: Report, word: str) -> Answer:
    return next(found for found in report.answers if word in found.question)


def test_a_ruined_layer_is_named_and_what_is_sound_is_not_suspect(unbalanced: Any, tmp_path: Path) -> None:
    report = check(unbalanced, tmp_path)
    assert report.float_score == 1.0
    assert report.score < 0.7
    suspect = answer(report, "Which layers")
    assert suspect.is_suspect
    assert suspect.found.startswith(unbalanced.node)
    assert answer(report, "classes").is_suspect
    assert not answer(report, "batch").is_suspect
    assert not answer(report, "calibrator").is_suspect  # one was tried
    assert report.num_suspect == sum(found.is_suspect for found in report.answers)
    lines = (tmp_path / "checklist.md").read_text(encoding="utf-8").splitlines()
    assert sum(line.startswith("- [") for line in lines) == len(report.answers)
    assert sum(line.startswith("  What to do:") for line in lines) == report.num_suspect


def test_a_layer_that_is_not_the_first_of_the_ranking_is_suspect(unbalanced: Any, tmp_path: Path) -> None:
    rows = list(csv.DictReader(unbalanced.ranking.open(encoding="utf-8")))
    assert float(rows[0]["score_drop"]) > CONFIG.suspect_loss > float(rows[-1]["score_drop"])
    with (tmp_path / "ranking.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows([rows[-1], *rows[:-1]])
    found = answer(check(unbalanced, tmp_path, ranking=tmp_path / "ranking.csv"), "Which layers")
    assert found.is_suspect
    assert "artifacts/diff_layers/<variant>/<target>" in found.advice


def test_calibration_images_unlike_those_of_training_are_found(unbalanced: Any, tmp_path: Path) -> None:
    data = Path(shutil.copytree(unbalanced.data, tmp_path / "dataset"))
    images_NHWC = np.load(data / "train_images.npy")
    np.save(data / "train_images.npy", 255 * (images_NHWC > 127).astype(np.uint8))  # far more contrast
    same = answer(check(unbalanced, tmp_path), "cover")
    found = answer(check(unbalanced, tmp_path, data=data), "cover")
    assert not same.is_suspect
    assert found.is_suspect
    assert "of its training values are beyond the range" in found.found


def test_one_calibration_image_is_enough_to_answer(unbalanced: Any, tmp_path: Path) -> None:
    data = Path(shutil.copytree(unbalanced.data, tmp_path / "dataset"))
    for kind in ("images", "masks"):
        values = np.load(data / f"calibration_{kind}.npy")
        np.save(data / f"calibration_{kind}.npy", values[:1])
    manifest = json.loads((data / "manifest.json").read_text(encoding="utf-8"))
    manifest["counts"]["calibration"] = 1
    (data / "manifest.json").write_text(json.dumps(manifest), encoding="utf-8")
    assert "with 1 of 1 images" in answer(check(unbalanced, tmp_path, data=data), "enough").found


def test_a_ranking_that_was_not_needed_leaves_its_questions_open_in_words_b1(
    unbalanced: Any, tmp_path: Path
) -> None:
    write_empty_table(tmp_path / "ranking.csv", RankedLayer)
    report = check(unbalanced, tmp_path, ranking=tmp_path / "ranking.csv")
    for question in ("first and the last", "Which layers"):
        found = answer(report, question)
        assert not found.is_suspect
        assert re.fullmatch(r"not measured: rank_layers ranked nothing.*exhaustive=true.*", found.found)


def test_a_ranking_that_had_no_time_names_suspects_by_their_noise_b1(unbalanced: Any, tmp_path: Path) -> None:
    rows = list(csv.DictReader(unbalanced.ranking.open(encoding="utf-8")))
    with (tmp_path / "ranking.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows({**row, "score_drop": "", "disagreement": ""} for row in rows)
    report = check(unbalanced, tmp_path, ranking=tmp_path / "ranking.csv")
    assert re.match(rf"{unbalanced.node} \(\S+\): \S+ dB; ", answer(report, "Which layers").found)
    assert "alone in INT8: not measured" in answer(report, "first and the last").found


def test_a_ranking_of_another_graph_is_refused(unbalanced: Any, tmp_path: Path) -> None:
    (tmp_path / "ranking.csv").write_text("node,score_drop\nother/Conv,0.1\n", encoding="utf-8")
    with pytest.raises(ArtifactError, match="Run rank_layers again"):
        check(unbalanced, tmp_path, ranking=tmp_path / "ranking.csv")


@pytest.mark.parametrize("text", ["", "a,b\n1,2\n"])
def test_a_damaged_table_is_refused(unbalanced: Any, tmp_path: Path, text: str) -> None:
    (tmp_path / "calibrators.csv").write_text(text, encoding="utf-8")
    with pytest.raises(ArtifactError, match="Run quantize_ptq again"):
        check(unbalanced, tmp_path, trials=tmp_path / "calibrators.csv")


SIDE, WIDTH, CLASSES = 8, 16, ("red", "green", "blue")


def linear_classifier(root: Path, num_hidden: int) -> Path:
    """Write a graph of linear layers alone, and ``dataset`` beside it: images of three colours."""
    random = np.random.default_rng(0)
    nodes, constants = [helper.make_node("Flatten", ["image"], ["x0"], "flatten")], []
    sizes = [3 * SIDE * SIDE, *[WIDTH] * num_hidden, len(CLASSES)]
    for number, (before, after) in enumerate(itertools.pairwise(sizes), start=1):
        is_last = number == num_hidden + 1
        weight = (random.normal(size=(before, after)) / np.sqrt(before)).astype(np.float32)
        constants.append(numpy_helper.from_array(weight, f"weight{number}"))
        output = "logits" if is_last else f"y{number}"
        nodes.append(helper.make_node("Gemm", [f"x{number - 1}", f"weight{number}"], [output], f"fc{number}"))
        if not is_last:
            nodes.append(helper.make_node("Relu", [output], [f"x{number}"], f"relu{number}"))
    graph = helper.make_graph(
        nodes,
        "linear",
        [helper.make_tensor_value_info("image", TensorProto.FLOAT, ["batch", 3, SIDE, SIDE])],
        [helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["batch", len(CLASSES)])],
        constants,
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)
    card = InputCard(CLASSES, (0.5,) * 3, (0.25,) * 3, SIDE, SIDE, Task.classification)
    model.metadata_props.add(key=CARD_KEY, value=card.to_json())
    write_graph(model, root / "float.onnx")
    splits = {}
    for split in ("train", "val", "test", "calibration"):
        images_NHWC = random.integers(0, 64, (6, SIDE, SIDE, 3), np.uint8)
        labels_N = (np.arange(6) % 3).astype(np.uint16)
        images_NHWC[np.arange(6), ..., labels_N] += 190
        splits[split] = SplitBatches(6, [(images_NHWC, labels_N)])
    write_dataset(
        root / "dataset",
        task=card.task,
        classes=CLASSES,
        height=SIDE,
        width=SIDE,
        source="test",
        splits=splits,
    )
    return root / "float.onnx"


def quantize(model: Path, op_type: str = "Gemm", activations: Activations = Activations.uint8) -> float:
    config = QuantizeConfig(
        calibrators=[Calibrator.minmax],
        percentiles=[100.0],
        num_images=4,
        batch_size=4,
        num_val_images=0,
        max_abs_input=20.0,
        op_types=[op_type],
        activations=[activations],
    )
    return quantize_ptq(config, model=model, data=model.parent / "dataset", out=model.parent).score


@pytest.mark.parametrize(("num_hidden", "ends"), [(0, ["fc1"]), (2, ["fc1", "fc3"])])
def test_graph_without_convolutions_is_checked_at_its_linear_layers(
    tmp_path: Path, num_hidden: int, ends: list[str]
) -> None:
    model = linear_classifier(tmp_path, num_hidden)
    quantize(model)
    found = answer(check_linear(model), "first and the last").found.split("; ")
    assert [text.split(" alone in INT8: score ")[0] for text in found] == ends


def test_the_checklist_tells_what_each_type_of_activations_costs(tmp_path: Path) -> None:
    model = linear_classifier(tmp_path, 2)
    scores = {kind: quantize(model, activations=kind) for kind in Activations}  # the last one is kept
    found = answer(check_linear(model), "type of the activations")
    narrow = " and 7-bit weights" if int8_sums_saturate() else ""
    assert found.found == (
        f"uint8 with a zero point{narrow}: score {scores[Activations.uint8]:.4f} (no chosen target has it), "
        f"symmetric int8: score {scores[Activations.int8]:.4f}"
    )
    assert found.is_suspect == (max(scores.values()) - scores[Activations.int8] > CONFIG.suspect_loss)


def check_linear(model: Path) -> Report:
    """Rank and check what `quantize` wrote beside a graph of linear layers."""
    root = model.parent
    data, ranges = root / "dataset", root / "ranges.json"
    config = RankConfig(["Gemm"], 4, 0, 4, **ANYWAY)
    results = root / "images.npz"
    rank_layers(config, model=model, ranges=ranges, results=results, data=data, out=root)
    return check_int8(
        dataclasses.replace(CONFIG, op_types=["Gemm"]),
        model=model,
        quantized=root / "model.onnx",
        ranges=ranges,
        trials=root / "calibrators.csv",
        ranking=root / "ranking.csv",
        data=data,
        out=root,
    )


def test_graph_with_nothing_to_quantize_is_refused_with_its_operators(tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match=r"nothing to quantize among Flatten, Gemm.*op_types \(Conv\)"):
        quantize(linear_classifier(tmp_path, 0), "Conv")
