import csv
import math
import shutil
from dataclasses import replace

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

from tasks.build_engine import build_engine
from tasks.core.errors import ArtifactError, ConfigError
from tasks.diff_layers import MAX_SQNR_DB, Config, _Sums, diff_layers, find_guilty, match_tensors, rank_layers
from tasks.parts.onnx_graph import read_graph
from tasks.parts.runners.contract import read_engine_manifest, write_engine_manifest

CONFIG = Config(split="calibration", num_images=2, collapse_db=10.0)


def compare(workshop, out, engine, model):
    return diff_layers(
        CONFIG, engine=engine, model=model, float_graph=workshop.graph, data=workshop.data, out=out
    )


@pytest.mark.parametrize("target", ["cpu_onnxruntime", "cpu_openvino"])
def test_float_engine_equals_the_float_graph_in_every_layer(workshop, tmp_path, target):
    report = compare(workshop, tmp_path, workshop.engine("float", target), workshop.graph)
    assert report.num_layers > 20
    assert report.worst_sqnr_db > 70
    assert report.logits_cosine == pytest.approx(1, abs=1e-4)
    assert report.first_collapse is None
    assert report.marked_agreement_db > 70


def test_eager_network_equals_the_float_graph_behind_folded_batchnorms(workshop, tmp_path):
    report = compare(workshop, tmp_path, workshop.engine("float", "cpu_torch"), workshop.checkpoint)
    num_convs = sum(node.op_type == "Conv" for node in read_graph(workshop.graph).graph.node)
    assert report.num_layers >= num_convs - 1
    assert report.worst_sqnr_db > 70


@pytest.mark.parametrize("target", ["cpu_onnxruntime", "cpu_openvino"])
def test_quantized_engine_is_compared_behind_its_dequantizers(workshop, tmp_path, target):
    report = compare(workshop, tmp_path, workshop.engine("quantized", target), workshop.quantized)
    with (tmp_path / "layers.csv").open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == report.num_layers > 15
    assert "Relu" in {row["op_type"] for row in rows}
    assert 3 < report.logits_sqnr_db < MAX_SQNR_DB
    assert report.marked_agreement_db > 10
    assert report.largest_own_drop is not None and report.largest_own_drop.added_noise > 0
    assert (tmp_path / "layers.png").stat().st_size > 10_000
    assert all(math.isfinite(float(row["sqnr_db"])) for row in rows)


@pytest.mark.parametrize("target", ["cpu_onnxruntime", "cpu_openvino"])
def test_layer_with_a_wrong_scale_is_named_with_module_and_line(workshop, tmp_path, target):
    graph = onnx.load(workshop.quantized)
    floats = {node.name: node for node in onnx.load(workshop.graph).graph.node}
    convs = [node for node in graph.graph.node if node.op_type == "Conv"]
    victim = convs[len(convs) // 2]
    dequantize = next(node for node in graph.graph.node if victim.input[1] in node.output)
    scale = next(tensor for tensor in graph.graph.initializer if tensor.name == dequantize.input[1])
    values = numpy_helper.to_array(scale) * np.float32(3)
    scale.CopyFrom(numpy_helper.from_array(values, scale.name))
    model = tmp_path / "broken.onnx"
    model.write_bytes(graph.SerializeToString())
    (tmp_path / "build").mkdir()
    built_anyway = workshop.target(target, min_agreement_int8_db=0.0, stem_in_float=False)
    build_engine(built_anyway, model=model, out=tmp_path / "build")
    report = compare(workshop, tmp_path, tmp_path / "build" / "engine", model)
    metadata = {entry.key: entry.value for entry in floats[victim.name].metadata_props}
    assert report.first_collapse is not None and report.largest_own_drop is not None
    # The convolution itself, or the activation behind it that the runtime fuses into it.
    readers = {node.name for node in floats.values() if floats[victim.name].output[0] in node.input}
    assert report.largest_own_drop.node in {victim.name} | readers
    assert report.first_collapse.node in {victim.name} | readers
    file, _, line = report.largest_own_drop.source.rpartition(":")
    assert file.startswith("tasks/parts/networks/") and line.isdigit()
    assert report.largest_own_drop.module.split(".")[0] == metadata["module"].split(".")[0]


def test_engine_that_was_skipped_gives_a_report_with_the_reason(workshop, tmp_path):
    (tmp_path / "build").mkdir()
    target = workshop.target("cpu_openvino_bf16", cpu_flags=["avx_imaginary"])
    build_engine(target, model=workshop.graph, out=tmp_path / "build")
    report = compare(workshop, tmp_path, tmp_path / "build" / "engine", workshop.graph)
    assert (report.status, report.num_layers, report.first_collapse) == ("skipped", 0, None)
    assert "avx_imaginary" in report.reason


def test_engine_whose_tensors_are_not_read_is_skipped_and_not_compared_with_another_runtime(
    workshop, tmp_path
):
    engine = workshop.engine("float", "cpu_openvino")
    shutil.copytree(engine, tmp_path / "engine")
    target = workshop.target("h200_tensorrt")
    write_engine_manifest(tmp_path / "engine", replace(read_engine_manifest(engine), target=target))
    report = compare(workshop, tmp_path, tmp_path / "engine", workshop.graph)
    assert (report.status, report.num_layers) == ("skipped", 0)
    assert report.reason == "the tensors inside an engine of tensorrt are not read yet"


def test_graphs_without_common_names_are_refused(workshop):
    graph = read_graph(workshop.graph)
    other = onnx.compose.add_prefix(graph, "other/")
    with pytest.raises(ArtifactError, match="no tensor names in common"):
        match_tensors(graph, other)


def test_float_convolution_is_left_out_when_its_quantized_activation_is_there(workshop):
    names = match_tensors(read_graph(workshop.graph), read_graph(workshop.quantized))
    quantized = read_graph(workshop.quantized)
    made = {name: node.op_type for node in quantized.graph.node for name in node.output}
    assert made[next(iter(names.values()))] == "DequantizeLinear"
    assert list(names)[-1] == "logits"


def test_sqnr_and_cosine_follow_their_formulas():
    sums = _Sums()
    sums.add(np.array([[3.0, 4.0]], np.float32), np.array([[3.5, 4.0]], np.float32))
    assert sums.sqnr_db == pytest.approx(20.0)
    assert sums.cosine == pytest.approx((3 * 3.5 + 16) / (5 * math.hypot(3.5, 4)))
    zero = _Sums()
    zero.add(np.zeros((1, 2), np.float32), np.zeros((1, 2), np.float32))
    assert (zero.sqnr_db, zero.cosine) == (MAX_SQNR_DB, 1.0)


def test_noise_that_was_there_before_is_not_a_layer_s_own(workshop):
    graph = read_graph(workshop.graph)
    names = [node.output[0] for node in graph.graph.node if node.op_type == "Conv"]
    sums = {}
    for index, name in enumerate([*names, graph.graph.output[0].name]):
        noise = 0.0 if index < 2 else 0.2
        sums[name] = _Sums(signal=1.0, noise=noise, product=1.0, found=1.0)
    first, worst = find_guilty(rank_layers(graph, sums), collapse_db=10.0)
    assert first is not None and worst is not None
    assert first.tensor == worst.tensor == names[2]


@pytest.mark.parametrize(
    "change", [{"split": "all"}, {"num_images": 0}, {"collapse_db": -1.0}, {"collapse_db": 500.0}]
)
def test_impossible_config_is_refused(change):
    fields = {"split": "val", "num_images": 1, "collapse_db": 10.0} | change
    with pytest.raises(ConfigError, match=rf"diff_layers\.{next(iter(change))} is .*allowed"):
        Config(**fields)
