import csv
import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnx import ModelProto, helper, numpy_helper

from tasks.core.errors import ArtifactError
from tasks.parts.data.accuracy import Standing
from tasks.parts.data.class_limits import ClassLimits
from tasks.parts.data.comparison import write_results
from tasks.parts.data.dataset import open_images
from tasks.parts.onnx_graphs.graph import read_card_of_graph, read_graph, write_graph
from tasks.parts.onnx_graphs.predict import predict_classes
from tasks.parts.quantization import equalization
from tasks.parts.quantization.channels import ScalableChannels
from tasks.parts.quantization.evaluation import open_evaluator
from tasks.parts.quantization.gates import FLOAT, INT8, read_gates
from tasks.parts.quantization.qdq import insert_qdq, read_calibrator, read_ranges
from tasks.quantize_repaired import Repair, Report, quantize_repaired
from tests.tasks.conftest import OP_TYPES, loose_repairs

CONFIG = loose_repairs()


def repair(files: Any, out: Path, **changes: Any) -> Report:
    return quantize_repaired(
        replace(CONFIG, **changes),
        model=files.graph,
        reference=files.graph,
        ranges=files.ranges,
        results=files.results,
        data=files.data,
        out=out,
    )


@pytest.fixture(scope="module")
def repaired(unbalanced: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[Report, Path]:
    folder = tmp_path_factory.mktemp("repaired")
    return repair(unbalanced, folder), folder


def test_a_graph_that_int8_ruins_passes_after_its_repair(repaired: tuple[Report, Path]) -> None:
    report, folder = repaired
    assert 1 - report.ptq_score / report.float_score > CONFIG.max_score_rel_loss  # PTQ fails the gate
    assert report.steps[0].standing is not Standing.within
    assert report.standing is Standing.within
    assert report.score_rel_loss.high <= CONFIG.max_score_rel_loss
    assert Repair.equalization in report.repairs
    with (folder / "steps.csv").open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert [row["repair"] for row in rows if row["kept"] == "True"] == [Repair.none, *report.repairs]
    assert Repair.weight_rounding not in [row["repair"] for row in rows], "the gates held without it"


def test_the_int8_graph_is_made_of_the_written_float_graph_and_ranges(
    unbalanced: Any, repaired: tuple[Report, Path]
) -> None:
    _, folder = repaired
    known = read_ranges(folder / "ranges.json")[1]
    written = read_graph(folder / "float.onnx")
    assert insert_qdq(written, known, op_types=OP_TYPES) == read_graph(folder / "model.onnx")
    assert read_calibrator(folder / "ranges.json") == read_calibrator(unbalanced.ranges)
    assert [node.name for node in written.graph.node] == [
        node.name for node in read_graph(unbalanced.graph).graph.node
    ]


def test_weights_are_rounded_anew_where_the_gates_do_not_hold(unbalanced: Any, tmp_path: Path) -> None:
    report = repair(unbalanced, tmp_path, max_score_rel_loss=0.0)
    assert [step.repair for step in report.steps] == [
        Repair.none,
        Repair.equalization,
        Repair.bias_correction,
        Repair.weight_rounding,
    ]
    assert report.standing is Standing.beyond
    assert report.score == max(step.score for step in report.steps[:2]), "fitted to layers that leave INT8"
    assert not {Repair.bias_correction, Repair.weight_rounding} & set(report.repairs)


def test_repairs_go_on_while_a_class_is_below_its_floor_c2(unbalanced: Any, tmp_path: Path) -> None:
    """Without the floor the graph of quantize_ptq holds these gates, and weights are not rounded anew."""
    name = read_card_of_graph(read_graph(unbalanced.graph)).classes[0]
    report = repair(unbalanced, tmp_path, max_score_rel_loss=0.99, class_floors={name: 0.999})
    assert Repair.weight_rounding in [step.repair for step in report.steps]
    assert report.standing is not Standing.within
    assert [text.rpartition("(")[2] for text in report.open_classes] == [f"class_floors.{name})"]


def test_nothing_is_tried_where_int8_is_as_good_as_float(unbalanced: Any, tmp_path: Path) -> None:
    """The labels are what the INT8 graph predicts."""
    graph, known = read_graph(unbalanced.graph), read_ranges(unbalanced.ranges)[1]
    int8 = insert_qdq(graph, known, op_types=OP_TYPES)
    data = Path(shutil.copytree(unbalanced.data, tmp_path / "dataset"))
    np.save(data / "val_masks.npy", predict_classes(int8, open_images(data, "val"), batch_size=4))
    evaluator = open_evaluator(graph, data, num_images=0, batch_size=4)
    ptq = evaluator.evaluate(int8).results
    write_results(tmp_path / "images.npz", {FLOAT: evaluator.float_results, INT8: ptq})
    report = repair(replace(unbalanced, data=data, results=tmp_path / "images.npz"), tmp_path)
    assert [step.repair for step in report.steps] == [Repair.none] and report.repairs == ()
    assert report.score == report.ptq_score > report.float_score
    assert read_graph(tmp_path / "model.onnx") == int8
    assert read_graph(tmp_path / "float.onnx") == graph


def test_nothing_is_tried_and_nothing_runs_where_ptq_holds_the_gates_for_certain_b1(
    unbalanced: Any, tmp_path: Path
) -> None:
    """The images are missing, so that a session would fail; INT8 is far below float, but within these gates."""
    data = tmp_path / "dataset"
    data.mkdir()
    shutil.copy(unbalanced.data / "manifest.json", data)
    files = replace(unbalanced, data=data)
    report = repair(files, tmp_path, max_score_rel_loss=0.99)
    assert [step.repair for step in report.steps] == [Repair.none] and report.standing is Standing.within
    assert report.left_out == (
        "no repair was tried: the INT8 graph of quantize_ptq holds all gates for certain "
        "(quantize_repaired.exhaustive=true tries all)"
    )
    assert (tmp_path / "left_out.txt").read_text(encoding="utf-8") == report.left_out
    known = read_ranges(unbalanced.ranges)[1]
    assert read_graph(tmp_path / "model.onnx") == insert_qdq(
        read_graph(unbalanced.graph), known, op_types=OP_TYPES
    )
    gates, int8 = read_gates(
        tmp_path / "images.npz",
        (),
        max_score_rel_loss=0.99,
        max_parent_rel_loss=0.99,
        class_limits=ClassLimits({}, {}),
        stage="quantize_partial",
    )
    assert (gates.parent.score, int8.score) == (report.float_score, report.score)
    with pytest.raises(ArtifactError, match="val_images"):
        repair(files, tmp_path, max_score_rel_loss=0.99, exhaustive=True)


def test_no_repair_is_begun_once_the_time_is_up_b1(unbalanced: Any, tmp_path: Path) -> None:
    report = repair(unbalanced, tmp_path, max_minutes=1e-9)
    assert [step.repair for step in report.steps] == [Repair.none] and report.score == report.ptq_score
    assert report.left_out == (
        "time was up after 1e-09 min (quantize_repaired.max_minutes), without equalization, bias_correction, "
        "weight_rounding"
    )


def test_a_repair_that_fails_is_left_out_with_its_reason_b2(
    unbalanced: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """An If hands the image on: a graph that runs as a whole, and not layer by layer."""
    graph = read_graph(unbalanced.graph)
    for node in graph.graph.node:
        node.input[:] = ["chosen" if name == "image" else name for name in node.input]
    value = helper.make_empty_tensor_value_info("inner")
    branches = [
        helper.make_graph([helper.make_node(op, ["image"], ["inner"], name=op)], op, [], [value])
        for op in ("Identity", "Neg")
    ]
    names = dict(zip(("then_branch", "else_branch"), branches, strict=True))
    graph.graph.node.insert(0, helper.make_node("If", ["yes"], ["chosen"], name="choose", **names))
    graph.graph.initializer.append(numpy_helper.from_array(np.array(True), "yes"))
    write_graph(graph, tmp_path / "float.onnx")
    known = json.loads(unbalanced.ranges.read_text(encoding="utf-8"))
    known["ranges"]["chosen"] = known["ranges"]["image"]
    (tmp_path / "ranges.json").write_text(json.dumps(known), encoding="utf-8")
    files = replace(unbalanced, graph=tmp_path / "float.onnx", ranges=tmp_path / "ranges.json")
    (tmp_path / "out").mkdir()
    report = repair(files, tmp_path / "out", max_score_rel_loss=0.0)
    failed = [step for step in report.steps if step.reason]
    assert [step.repair for step in failed] == [Repair.bias_correction, Repair.weight_rounding]
    assert all(step.score is step.standing is None and not step.kept for step in failed)
    assert report.score >= report.ptq_score
    assert "quantize_repaired: bias_correction failed and is left out: ONNX Runtime " in caplog.text
    with (tmp_path / "out/steps.csv").open(encoding="utf-8") as file:
        assert [row["reason"] for row in csv.DictReader(file)] == [step.reason for step in report.steps]


def test_ranges_of_an_unknown_calibrator_are_refused(unbalanced: Any, tmp_path: Path) -> None:
    text = unbalanced.ranges.read_text(encoding="utf-8").replace("minmax", "guess")
    (tmp_path / "ranges.json").write_text(text, encoding="utf-8")
    with pytest.raises(ArtifactError, match=r"no readable calibrator .*'guess'.*Run quantize_ptq again"):
        repair(replace(unbalanced, ranges=tmp_path / "ranges.json"), tmp_path)


def test_an_equalization_that_is_another_function_is_left_out_with_a_warning_a3(
    unbalanced: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A factor that reaches the layers behind the channels, and not those before them."""
    scale = equalization._scale

    def forgets_biases(model: ModelProto, channels: ScalableChannels, factors_G: np.ndarray) -> ModelProto:
        scaled = scale(model, channels, factors_G)
        own = {tensor.name: tensor for tensor in model.graph.initializer}
        for tensor in scaled.graph.initializer:
            if len(tensor.dims) == 1:
                tensor.CopyFrom(own[tensor.name])
        return scaled

    monkeypatch.setattr(equalization, "_scale", forgets_biases)
    report = repair(unbalanced, tmp_path, num_val_images=2)
    tried = {step.repair: step.score for step in report.steps}
    assert tried[Repair.equalization] == tried[Repair.none]
    assert Repair.equalization not in report.repairs
    assert "the rewrite equalization changes what the graph computes: they agree by" in caplog.text


def test_a_black_frame_counts_in_no_repair_c4(
    unbalanced: Any, repaired: tuple[Report, Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As in quantize_ptq: the mean of a layer's outputs and the ranges are those of real images."""
    data, out = tmp_path / "data", tmp_path / "out"
    shutil.copytree(unbalanced.data, data)
    out.mkdir()
    num_images = CONFIG.num_images
    images_NHWC = np.load(data / "calibration_images.npy")[:num_images]
    with_black_NHWC = np.concatenate([np.zeros_like(images_NHWC[:1]), images_NHWC])
    (data / "calibration_images.npy").unlink()
    np.save(data / "calibration_images.npy", with_black_NHWC)
    manifest = json.loads((data / "manifest.json").read_text())
    manifest["counts"]["calibration"] = len(with_black_NHWC)
    (data / "manifest.json").write_text(json.dumps(manifest))
    found = quantize_repaired(
        replace(CONFIG, num_images=num_images + 1),
        model=unbalanced.graph,
        reference=unbalanced.graph,
        ranges=unbalanced.ranges,
        results=unbalanced.results,
        data=data,
        out=out,
    )
    assert found == repaired[0]
    assert caplog.text.count("calibration images hold one value only") == 1
