import csv
import math
import shutil
from dataclasses import replace

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

from tasks.build_engine import build_engine
from tasks.diff_layers import BisectionConfig, Config, diff_layers
from tasks.parts.engines.manifest import read_engine_manifest, write_engine_manifest
from tasks.parts.layer_diff.table import Compared, Difference, find_suspects, list_layers
from tasks.parts.onnx_graphs.graph import read_graph
from tasks.parts.onnx_graphs.signal_to_noise import MAX_SQNR_DB

NO_BISECTION = BisectionConfig(enabled=False, max_score_rel_loss=0.0, num_val_images=0, batch_size=4)
CONFIG = Config(split="calibration", num_images=2, collapse_db=10.0, bisection=NO_BISECTION)


def compare(workshop, out, engine, model):
    return diff_layers(
        CONFIG, engine=engine, model=model, float_graph=workshop.graph, data=workshop.data, out=out
    )


def read_rows(out):
    with (out / "layers.csv").open(encoding="utf-8") as file:
        return list(csv.DictReader(file))


def build_with_a_wrong_scale(workshop, folder, target):
    """Build from a Q/DQ graph with a scale of weights three times too large; return the layer's nodes and the engine.

    They are the convolution and the activation behind it that the runtime fuses into it.
    """
    graph = onnx.load(workshop.quantized)
    convs = [node for node in graph.graph.node if node.op_type == "Conv"]
    victim = convs[len(convs) // 2]
    dequantize = next(node for node in graph.graph.node if victim.input[1] in node.output)
    scale = next(tensor for tensor in graph.graph.initializer if tensor.name == dequantize.input[1])
    values = numpy_helper.to_array(scale) * np.float32(3)
    scale.CopyFrom(numpy_helper.from_array(values, scale.name))
    model = folder / "broken.onnx"
    model.write_bytes(graph.SerializeToString())
    (folder / "build").mkdir()
    built_anyway = workshop.target(target, min_agreement_int8_db=0.0, stem_in_float=False)
    build_engine(built_anyway, model=model, images=workshop.images, out=folder / "build")
    readers = {node.name for node in graph.graph.node if victim.output[0] in node.input}
    return {victim.name} | readers, folder / "build" / "engine"


@pytest.mark.parametrize("target", ["cpu_onnxruntime", "cpu_openvino"])
def test_float_engine_equals_the_float_graph_in_every_layer(workshop, tmp_path, target):
    differences = compare(workshop, tmp_path, workshop.engine("float", target), workshop.graph).differences
    assert differences.num_layers > 20
    assert differences.worst_sqnr_db > 70
    assert differences.logits_cosine == pytest.approx(1, abs=1e-4)
    assert differences.first_collapse is None
    assert differences.marked_agreement_db > 70
    assert differences.num_layers == differences.num_tensors - 1  # all but the image
    assert differences.variant_logits_sqnr_db is None and differences.runtime_logits_sqnr_db is None
    assert {
        row["own_sqnr_db"] + row["variant_sqnr_db"] + row["runtime_cosine"] for row in read_rows(tmp_path)
    } == {""}


def test_eager_network_equals_the_float_graph_behind_folded_batchnorms(workshop, tmp_path):
    differences = compare(
        workshop, tmp_path, workshop.engine("float", "cpu_torch"), workshop.checkpoint
    ).differences
    layers = [node for node in read_graph(workshop.graph).graph.node if node.op_type in ("Conv", "Relu")]
    assert differences.num_layers >= len(layers)
    assert differences.worst_sqnr_db > 70
    assert {"Conv", "Relu"} <= {row["op_type"] for row in read_rows(tmp_path)}


def test_runtime_that_does_not_follow_its_graph_is_told_apart_from_quantization(workshop, tmp_path):
    victim, engine = build_with_a_wrong_scale(workshop, tmp_path, "cpu_onnxruntime")
    differences = compare(
        workshop, tmp_path, engine, workshop.quantized
    ).differences  # not the graph of this engine
    rows = read_rows(tmp_path)
    names = [row["node"] for row in rows]
    broken = next(index for index, name in enumerate(names) if name in victim)
    assert all(float(row["runtime_sqnr_db"]) > 10 for row in rows[:broken])
    assert float(rows[broken]["runtime_sqnr_db"]) < 3 < 15 < float(rows[broken]["variant_sqnr_db"])
    assert float(rows[broken]["histogram_overlap"]) < float(rows[broken]["variant_histogram_overlap"])
    assert differences.runtime_logits_sqnr_db < differences.variant_logits_sqnr_db
    for row in rows:
        assert 0 < float(row["histogram_overlap"]) <= 1 and 0 < float(row["runtime_histogram_overlap"]) <= 1
        assert float(row["max_abs"]) > 0


@pytest.mark.parametrize("target", ["cpu_onnxruntime", "cpu_openvino"])
def test_quantized_engine_is_compared_behind_its_dequantizers(workshop, tmp_path, target):
    differences = compare(
        workshop, tmp_path, workshop.engine("quantized", target), workshop.quantized
    ).differences
    rows = read_rows(tmp_path)
    assert len(rows) == differences.num_layers > 15
    assert differences.num_fused > 5
    assert (
        differences.num_layers + differences.num_fused >= differences.num_tensors - 1
    )  # the image may stay in float
    assert "Relu" in {row["op_type"] for row in rows}
    assert 3 < differences.logits_sqnr_db < MAX_SQNR_DB
    assert differences.marked_agreement_db > 10
    assert differences.largest_own_drop is not None and differences.largest_own_drop.added_noise > 0
    assert (tmp_path / "layers.png").stat().st_size > 10_000
    assert all(math.isfinite(float(row["sqnr_db"])) for row in rows)


@pytest.mark.parametrize("target", ["cpu_onnxruntime", "cpu_openvino"])
def test_layer_with_a_wrong_scale_is_named_with_module_and_line(workshop, tmp_path, target):
    victim, engine = build_with_a_wrong_scale(workshop, tmp_path, target)
    differences = compare(workshop, tmp_path, engine, tmp_path / "broken.onnx").differences
    assert differences.first_collapse is not None and differences.largest_own_drop is not None
    assert differences.largest_own_drop.node in victim
    assert differences.first_collapse.node in victim
    assert differences.largest_own_drop.own_sqnr_db < 0
    rows = read_rows(tmp_path)
    behind = rows[[row["node"] for row in rows].index(differences.largest_own_drop.node) + 1 :]
    # The layers behind it inherit its noise and add little themselves.
    assert len(behind) > 5 and all(float(row["own_sqnr_db"]) > 15 for row in behind)
    file, _, line = differences.largest_own_drop.source.rpartition(":")
    assert file.startswith("tasks/parts/networks/") and line.isdigit()
    assert {differences.largest_own_drop.module.split(".")[0]} == {name.split(".")[0] for name in victim}


def test_engine_that_was_skipped_gives_a_report_with_the_reason(workshop, tmp_path):
    (tmp_path / "build").mkdir()
    target = workshop.target("cpu_openvino_bf16", cpu_flags=["avx_imaginary"])
    build_engine(target, model=workshop.graph, images=workshop.images, out=tmp_path / "build")
    report = compare(workshop, tmp_path, tmp_path / "build" / "engine", workshop.graph)
    assert (report.status, report.differences) == ("skipped", None)
    assert "avx_imaginary" in report.reason


def test_engine_whose_tensors_are_not_read_is_skipped_and_not_compared_with_another_runtime(
    workshop, tmp_path
):
    engine = workshop.engine("float", "cpu_openvino")
    shutil.copytree(engine, tmp_path / "engine")
    target = workshop.target("h200_tensorrt")
    write_engine_manifest(tmp_path / "engine", replace(read_engine_manifest(engine), target=target))
    report = compare(workshop, tmp_path, tmp_path / "engine", workshop.graph)
    assert (report.status, report.differences) == ("skipped", None)
    assert "tensorrt is not installed" in report.reason


def test_noise_that_was_there_before_is_not_a_layer_s_own(workshop):
    graph = read_graph(workshop.graph)
    names = [node.output[0] for node in graph.graph.node if node.op_type == "Conv"]
    compared = {}
    for index, name in enumerate([*names, graph.graph.output[0].name]):
        found = Difference(MAX_SQNR_DB if index < 2 else 7.0, 1.0, 0.1, 1.0)
        compared[name] = Compared(engine=found, variant=None, runtime=None, own_sqnr_db=None)
    first, worst = find_suspects(list_layers(graph, compared), collapse_db=10.0)
    assert first is not None and worst is not None
    assert first.tensor == worst.tensor == names[2]


def test_measured_own_noise_counts_more_than_the_rise_of_the_noise(workshop):
    graph = read_graph(workshop.graph)
    names = [node.output[0] for node in graph.graph.node if node.op_type == "Conv"]
    compared = {}
    for index, name in enumerate([*names, graph.graph.output[0].name]):
        found = Difference(7.0, 1.0, 0.1, 1.0)
        compared[name] = Compared(found, found, found, own_sqnr_db=20.0 if index == 4 else 40.0)
    _, worst = find_suspects(list_layers(graph, compared), collapse_db=10.0)
    assert worst is not None and worst.tensor == names[4]


def test_bisection_names_the_layer_that_has_to_run_in_float(unbalanced, workshop, tmp_path):
    (tmp_path / "build").mkdir()
    model = unbalanced.graph.parent / "model.onnx"
    build_engine(
        workshop.target("cpu_onnxruntime", min_agreement_int8_db=0.0),
        model=model,
        images=workshop.images,
        out=tmp_path / "build",
    )
    config = replace(CONFIG, bisection=replace(NO_BISECTION, enabled=True, max_score_rel_loss=0.35))
    report = diff_layers(
        config,
        engine=tmp_path / "build" / "engine",
        model=model,
        float_graph=unbalanced.graph,
        data=unbalanced.data,
        out=tmp_path,
    )
    found = report.differences.bisection
    assert found is not None and found.is_recovered
    assert found.variant_score < found.target_score <= found.recovered_score
    assert [layer.node for layer in found.layers] == [unbalanced.node]
    assert found.layers[0].source.startswith("tasks/parts/networks/")
    with (tmp_path / "bisection.csv").open(encoding="utf-8") as file:
        trials = list(csv.DictReader(file))
    assert len(trials) == found.num_trials < 2 + 2 * found.num_quantized_layers
    assert unbalanced.node in {trial["float_layers"] for trial in trials if trial["is_recovered"] == "True"}


def test_graph_without_qdq_is_not_bisected(workshop, tmp_path):
    config = replace(CONFIG, bisection=replace(NO_BISECTION, enabled=True))
    report = diff_layers(
        config,
        engine=workshop.engine("float", "cpu_onnxruntime"),
        model=workshop.graph,
        float_graph=workshop.graph,
        data=workshop.data,
        out=tmp_path,
    )
    assert report.differences.bisection is None and not (tmp_path / "bisection.csv").exists()
