import dataclasses
import gzip
import json
import math
import shutil
import tracemalloc

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper
from onnxruntime.capi import onnxruntime_pybind11_state
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.flop_counter import FlopCounterMode

from tasks.build_engine import build_engine
from tasks.core.environment import _version
from tasks.core.errors import ArtifactError, TargetMismatch
from tasks.core.execute import execute, is_current, is_fresh, prepare_call
from tasks.core.reports import read_report
from tasks.parts.builders import agreement
from tasks.parts.builders.agreement import fitting_batches, probe_batches, read_probe_images
from tasks.parts.builders.contract import macs_of_network
from tasks.parts.builders.report import EngineBuild, LayerCounts, count_layers, find_precision_fault
from tasks.parts.cpu import read_cpu_flags
from tasks.parts.data.dataset import normalise
from tasks.parts.engines.machine import installed_version, missing_cpu_flags
from tasks.parts.engines.manifest import EngineStatus, read_engine_manifest, sha256_of
from tasks.parts.engines.runtimes import Precision, Runtime
from tasks.parts.engines.tensorrt_options import BatchProfile
from tasks.parts.networks.checkpoint import load_checkpoint
from tasks.parts.onnx_graphs.graph import read_card_of_graph, read_graph
from tasks.parts.onnx_graphs.signal_to_noise import MAX_SQNR_DB, difference
from tasks.parts.onnx_session import open_session


def changed_graph(workshop, tmp_path, change):
    graph = onnx.load(workshop.graph)
    change(graph)
    path = tmp_path / "changed.onnx"
    path.write_bytes(graph.SerializeToString())
    return path


def built(workshop, target, model, tmp_path):
    out = tmp_path / f"out-{target.name}"
    out.mkdir(parents=True)
    return build_engine(target, model=model, images=workshop.images, out=out), out / "engine"


@pytest.mark.parametrize(
    ("target", "beside"),
    [
        ("cpu_torch", []),
        ("cpu_onnxruntime", ["layers.csv"]),
        ("cpu_openvino", ["graph.onnx", "layers.csv"]),
    ],
)
def test_float_engine_is_one_file_with_its_digest(workshop, tmp_path, target, beside):
    model = workshop.checkpoint if target == "cpu_torch" else workshop.graph
    report, engine = built(workshop, workshop.target(target), model, tmp_path)
    manifest = read_engine_manifest(engine)
    assert sorted(file.name for file in engine.iterdir()) == sorted(["manifest.json", report.file, *beside])
    assert (report.status, report.reason, report.is_precision_ok, report.is_quantized) == (
        "built",
        "",
        True,
        False,
    )
    assert report.engine_sha256 == manifest.sha256 == sha256_of(engine / report.file)
    assert report.size_bytes == manifest.size_bytes == (engine / report.file).stat().st_size
    assert manifest.card.classes == ("background", "zero", "one")
    assert report.agreement_db > 60


@pytest.mark.parametrize("target", ["cpu_torch", "cpu_onnxruntime", "cpu_openvino"])
def test_cost_of_an_engine_is_that_of_its_file_and_its_network(workshop, tmp_path, target):
    """The expected size comes from Python's gzip, the MACs from torch's own counter."""
    model = workshop.checkpoint if target == "cpu_torch" else workshop.graph
    report, engine = built(workshop, workshop.target(target), model, tmp_path)
    content = (engine / report.file).read_bytes()
    assert report.cost.compressed_bytes == len(gzip.compress(content, 6)) < len(content)
    network, _ = load_checkpoint(workshop.checkpoint)
    with FlopCounterMode(display=False) as counter:
        network(torch.zeros(1, 3, 64, 96))
    assert report.cost.macs == counter.get_total_flops() // 2 > 0
    assert report.cost.build_s > 0


def test_quantized_engine_has_the_macs_of_the_float_one_and_is_smaller(workshop, tmp_path):
    target = workshop.target("cpu_onnxruntime")
    costs = [
        built(workshop, target, model, tmp_path / model.stem)[0].cost
        for model in (workshop.graph, workshop.quantized)
    ]
    assert costs[0].macs == costs[1].macs
    assert costs[1].compressed_bytes < costs[0].compressed_bytes / 2


def test_fused_attention_counts_as_the_two_products_that_it_computes():
    """Queries with keys and weights with values: each heads * tokens * tokens * channels."""

    class Attention(torch.nn.Module):
        def forward(self, tokens_NHTC):
            return scaled_dot_product_attention(tokens_NHTC, tokens_NHTC, tokens_NHTC)

    assert macs_of_network(Attention(), (3, 64, 96)) == 2 * 3 * 64 * 64 * 96


@pytest.mark.parametrize("target", ["cpu_onnxruntime", "cpu_openvino"])
def test_quantized_engine_really_runs_int8(workshop, tmp_path, target):
    report, _ = built(workshop, workshop.target(target), workshop.quantized, tmp_path)
    num_quantized = count_layers(onnx.load(workshop.quantized)).num_quantized
    assert report.is_quantized and report.is_precision_ok and not report.precision_note
    assert report.num_layers_quantized == num_quantized > 10
    assert report.num_layers_int8 > num_quantized / 2
    assert report.agreement_db > 10


def test_activations_of_the_onnxruntime_engine_are_uint8(workshop):
    engine = workshop.engine("quantized", "cpu_onnxruntime")
    graph = onnx.load(engine / "engine.onnx").graph
    types = {tensor.name: tensor.data_type for tensor in graph.initializer}
    zero_points = {types[node.input[2]] for node in graph.node if node.op_type == "QuantizeLinear"}
    assert zero_points == {TensorProto.UINT8}


def test_int8_openvino_engine_without_uint8_encoding_is_refused_or_right(workshop, tmp_path):
    """OpenVINO 2026.4 follows int8 activations less closely; below the floor there must be no engine."""
    target = workshop.target("cpu_openvino", uint8_activations=False, min_agreement_int8_db=10.0)
    report, _ = built(workshop, target, workshop.quantized, tmp_path)
    if report.status == "built":
        assert report.agreement_db >= 10
    else:
        assert "(target.cpu_openvino.min_agreement_int8_db)" in report.reason


def test_engine_bytes_depend_on_the_graph_alone(workshop, tmp_path):
    report, _ = built(workshop, workshop.target("cpu_onnxruntime"), workshop.quantized, tmp_path)
    again = read_engine_manifest(workshop.engine("quantized", "cpu_onnxruntime"))
    assert report.engine_sha256 == again.sha256


def test_bf16_target_runs_bf16_and_f32_target_does_not(workshop, tmp_path):
    target = workshop.target("cpu_openvino_bf16")
    if missing_cpu_flags(target):
        pytest.skip(f"this CPU lacks {missing_cpu_flags(target)}")
    report, engine = built(workshop, target, workshop.graph, tmp_path)
    assert report.is_precision_ok and report.precisions["Convolution"].get("bf16", 0) > 10
    assert "bf16" not in json.dumps(read_engine_manifest(workshop.engine("float", "cpu_openvino")).precisions)
    assert report.agreement_db < MAX_SQNR_DB
    assert read_engine_manifest(engine).target.precision is Precision.bf16


@pytest.mark.parametrize(
    ("precisions", "counts", "is_fault"),
    [
        ({"FullyConnected": {"bf16": 10}}, LayerCounts(10, 0, 0), False),
        ({"FullyConnected": {"f32": 6, "bf16": 4}}, LayerCounts(10, 0, 0), True),
        # SegFormer: attention is fused into another kind of layer, and the logits are float32
        ({"FullyConnected": {"int8": 86}, "MatMul": {"f32": 1}}, LayerCounts(103, 86, 0), False),
        ({"FullyConnected": {"int8": 86, "f32": 16}}, LayerCounts(103, 86, 0), True),
    ],
)
def test_layers_that_are_not_quantized_run_in_the_declared_precision(workshop, precisions, counts, is_fault):
    fault = find_precision_fault(workshop.target("cpu_openvino_bf16"), precisions, counts)
    assert bool(fault) == is_fault


def test_int8_runs_inside_a_bf16_network(workshop, tmp_path):
    target = workshop.target("cpu_openvino_bf16")
    if missing_cpu_flags(target):
        pytest.skip(f"this CPU lacks {missing_cpu_flags(target)}")
    report, _ = built(workshop, target, workshop.quantized, tmp_path)
    assert report.is_precision_ok and report.executed.int8_share_of_quantized > 0.95
    used = {precision for counts in report.precisions.values() for precision in counts}
    assert {"int8", "bf16"} <= used


def test_cpu_without_a_declared_flag_ends_in_skipped_with_the_reason(workshop, tmp_path):
    target = workshop.target("cpu_openvino_bf16", cpu_flags=["avx_imaginary"])
    report, engine = built(workshop, target, workshop.graph, tmp_path)
    assert report.status == "skipped"
    assert report.reason == "this CPU lacks avx_imaginary (target.cpu_openvino_bf16.cpu_flags)"
    assert report.cost is None
    assert [file.name for file in engine.iterdir()] == ["manifest.json"]


def build_call(workshop, **changes):
    """Return the call that builds the float graph; the working directory is the workspace."""
    target = dataclasses.asdict(workshop.target("cpu_onnxruntime", **changes))
    return prepare_call(
        "build_engine.float.cpu",
        {"model": workshop.graph, "images": workshop.images},
        {"build_engine": {"cpu": target}},
    )


def run_out_of_memory(*args, **kwargs):
    """Fail as an ONNX Runtime session does on a machine without free memory, which a test cannot arrange."""
    raise onnxruntime_pybind11_state.RuntimeException("Failed to allocate memory for requested buffer")


def test_skipped_build_is_fresh_only_while_the_cpu_lacks_the_flag(workshop, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    call = build_call(workshop, cpu_flags=["avx_imaginary"])
    execute(call)
    assert is_fresh(call)
    flags = read_cpu_flags() | {"avx_imaginary"}
    monkeypatch.setattr("tasks.parts.engines.machine.read_cpu_flags", lambda: flags)
    again = build_call(workshop, cpu_flags=["avx_imaginary"])
    assert not is_fresh(again)
    assert read_report(EngineBuild, execute(again)).status is EngineStatus.built
    assert is_fresh(again)


def test_other_version_of_the_runtime_or_other_cpu_makes_another_engine(workshop, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    execute(build_call(workshop))
    assert is_fresh(build_call(workshop))
    for name, there in (
        ("tasks.parts.engines.machine.installed_version", lambda runtime: "1.99"),
        ("tasks.parts.engines.machine.read_cpu_flags", lambda: read_cpu_flags() ^ {"avx512f"}),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(name, there)
            assert not is_fresh(build_call(workshop))


def test_engine_of_another_machine_is_fresh_where_the_target_cannot_be_built(workshop, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    execute(build_call(workshop))
    made_there = build_call(workshop).environment
    monkeypatch.setattr("tasks.parts.engines.machine.check_gpu", raise_mismatch)
    here = build_call(workshop)
    assert here.environment == made_there and is_fresh(here)
    shutil.rmtree(here.folder)
    assert build_call(workshop).environment == {}


def raise_mismatch(target):
    """Refuse as a machine does that has not the declared GPU."""
    raise TargetMismatch(f"Target {target.name} needs an NVIDIA GPU")


def test_failed_build_is_tried_again_and_is_no_twin(workshop, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    call = build_call(workshop)
    twin = dataclasses.replace(call, address="build_engine.other.cpu")
    with monkeypatch.context() as patch:
        patch.setattr(onnxruntime, "InferenceSession", run_out_of_memory)
        execute(call)
    assert "Failed to allocate memory" in read_report(EngineBuild, call.folder).reason
    assert is_current(call) and not is_fresh(call)
    assert read_report(EngineBuild, execute(twin)).status is EngineStatus.built
    assert read_report(EngineBuild, execute(call)).status is EngineStatus.built
    assert is_fresh(call) and is_fresh(twin)


def test_other_runtime_version_is_refused_with_the_place_to_run_it(workshop, tmp_path):
    target = workshop.target("cpu_onnxruntime", runtime_version="1.2")
    with pytest.raises(TargetMismatch, match=r"declares onnxruntime 1\.2, .* its work pool"):
        built(workshop, target, workshop.graph, tmp_path)


@pytest.mark.parametrize("target", ["cpu_onnxruntime", "cpu_openvino"])
def test_custom_operator_is_named_before_the_build_and_fails_this_target_only(workshop, tmp_path, target):
    def change(graph):
        graph.opset_import.append(helper.make_opsetid("com.example", 1))
        graph.graph.node.append(
            helper.make_node("Magic", [graph.graph.output[0].name], ["unused"], "wand", domain="com.example")
        )

    report, engine = built(
        workshop, workshop.target(target), changed_graph(workshop, tmp_path, change), tmp_path
    )
    assert report.status == "failed"
    assert "com.example::Magic ('wand')" in report.reason and target in report.reason
    assert [file.name for file in engine.iterdir()] == ["manifest.json"]


def test_opset_outside_the_target_s_range_fails_with_the_key(workshop, tmp_path):
    target = workshop.target("cpu_onnxruntime", opsets=[13, 14])
    report, _ = built(workshop, target, workshop.graph, tmp_path)
    assert report.status == "failed"
    assert "opset 20, allowed are 13..14 (target.cpu_onnxruntime.opsets)" in report.reason


def test_opset_from_the_future_is_refused(workshop, tmp_path):
    def change(graph):
        graph.opset_import[0].version = 99

    with pytest.raises(ArtifactError, match="opset 99"):
        built(
            workshop, workshop.target("cpu_onnxruntime"), changed_graph(workshop, tmp_path, change), tmp_path
        )


@pytest.mark.parametrize("length", [0, 1000])
def test_empty_or_torn_graph_is_refused(workshop, tmp_path, length):
    path = tmp_path / "torn.onnx"
    path.write_bytes(workshop.graph.read_bytes()[:length])
    with pytest.raises(ArtifactError, match=r"torn\.onnx"):
        built(workshop, workshop.target("cpu_openvino"), path, tmp_path)


def test_nan_weight_is_refused_by_name(workshop, tmp_path):
    names = []

    def change(graph):
        weight = next(tensor for tensor in graph.graph.initializer if len(tensor.dims) == 4)
        values = numpy_helper.to_array(weight).copy()
        values.flat[0] = np.nan
        weight.CopyFrom(numpy_helper.from_array(values, weight.name))
        names.append(weight.name)

    with pytest.raises(ArtifactError, match="holds NaN or infinity") as caught:
        built(
            workshop, workshop.target("cpu_onnxruntime"), changed_graph(workshop, tmp_path, change), tmp_path
        )
    assert names[0] in str(caught.value)


def test_card_with_other_number_of_classes_is_refused_with_both(workshop, tmp_path):
    def change(graph):
        entry = next(e for e in graph.metadata_props if e.key == "enginewright")
        card = json.loads(entry.value)
        card["classes"] = [*card["classes"], "two"]
        entry.value = json.dumps(card)

    with pytest.raises(ArtifactError, match=r"\[3, 64, 96\].*card says \[4, 64, 96\]"):
        built(
            workshop, workshop.target("cpu_onnxruntime"), changed_graph(workshop, tmp_path, change), tmp_path
        )


def test_engine_that_computes_something_else_fails(workshop, tmp_path):
    target = workshop.target("cpu_openvino", min_agreement_db=149.0)
    report, engine = built(workshop, target, workshop.graph, tmp_path)
    assert report.status == "failed"
    assert "expected 149 dB or more (target.cpu_openvino.min_agreement_db)" in report.reason
    assert [file.name for file in engine.iterdir()] == ["manifest.json"]


def test_engine_of_a_graph_that_picks_among_its_own_values_fails_with_the_node_that_does(workshop, tmp_path):
    def pick(graph):
        """Read the largest logit of each place as well, which changes nothing."""
        [logits] = graph.graph.output
        one = numpy_helper.from_array(np.array([1]), "one")
        graph.graph.initializer.append(one)
        graph.graph.node.append(
            helper.make_node("TopK", [logits.name, "one"], ["best", "place"], name="queries/TopK", axis=1)
        )

    target = workshop.target("cpu_openvino", min_agreement_db=149.0)
    report, _ = built(workshop, target, changed_graph(workshop, tmp_path, pick), tmp_path)
    assert "rounds otherwise and TopK 'queries/TopK' then picks other ones" in report.reason


def disturb_image(graph, index):
    """Add a constant to the logits of the image at one place of a batch, of 0 on."""
    [image], [logits] = graph.graph.input, graph.graph.output
    for node in graph.graph.node:
        node.output[:] = [f"{name}:right" if name == logits.name else name for name in node.output]
        node.input[:] = [f"{name}:right" if name == logits.name else name for name in node.input]
    constants = {"zero": np.array(0), "one": np.array(1), "index": np.array(index), "much": np.float32(1000)}
    constants["column"] = np.array([-1, 1, 1, 1])
    graph.graph.initializer.extend(numpy_helper.from_array(np.asarray(v), k) for k, v in constants.items())
    graph.graph.node.extend(
        [
            helper.make_node("Shape", [image.name], ["shape"], name="shape"),
            helper.make_node("Gather", ["shape", "zero"], ["batch"], name="batch"),
            helper.make_node("Range", ["zero", "batch", "one"], ["places"], name="places"),
            helper.make_node("Equal", ["places", "index"], ["is_wrong"], name="is_wrong"),
            helper.make_node("Cast", ["is_wrong"], ["wrong"], name="wrong", to=TensorProto.FLOAT),
            helper.make_node("Mul", ["wrong", "much"], ["error_N"], name="error_N"),
            helper.make_node("Reshape", ["error_N", "column"], ["error"], name="error"),
            helper.make_node("Add", [f"{logits.name}:right", "error"], [logits.name], name="disturbed"),
        ]
    )


@pytest.mark.parametrize("name", ["cpu_onnxruntime", "cpu_openvino_batch"])
def test_engine_that_is_wrong_only_at_the_end_of_the_largest_batch_fails(workshop, tmp_path, name):
    model = changed_graph(workshop, tmp_path, lambda graph: disturb_image(graph, 31))
    smaller, _ = built(workshop, workshop.target(name, max_batch=31), model, tmp_path / "smaller")
    assert smaller.status == "built", smaller.reason
    report, _ = built(workshop, workshop.target(name, max_batch=32, min_agreement_db=10.0), model, tmp_path)
    assert report.status == "failed" and "dB only at a batch of 32, expected 10 dB" in report.reason


@pytest.mark.parametrize(
    ("name", "changes", "batches"),
    [
        ("cpu_openvino", {"max_batch": 1}, [1]),
        ("cpu_openvino_batch", {"max_batch": 32}, [1, 2, 32]),
        ("h200_tensorrt", {"max_batch": 32}, [1, 2, 32]),
        ("h200_tensorrt", {"profiles": [(1, 1, 1), (2, 8, 16)], "max_batch": 16}, [1, 2, 8, 16]),
        ("h200_tensorrt", {"profiles": [(1, 1, 4), (2, 6, 8)], "max_batch": 8}, [1, 2, 4, 5, 6, 8]),
    ],
)
def test_engine_is_tried_at_every_end_of_its_batches(workshop, name, changes, batches):
    target = workshop.target(name, max_batch=changes["max_batch"])
    if "profiles" in changes:
        profiles = [BatchProfile(*profile) for profile in changes["profiles"]]
        target = dataclasses.replace(target, tensorrt=dataclasses.replace(target.tensorrt, profiles=profiles))
    assert probe_batches(target) == batches


def test_engine_with_large_logits_is_tried_on_few_images_at_a_time_b10(workshop):
    card = read_card_of_graph(read_graph(workshop.graph))
    large = dataclasses.replace(card, height=1024, width=2048, classes=tuple(map(str, range(19))))
    target = workshop.target("cpu_onnxruntime", max_batch=32)
    assert fitting_batches(target, card) == [1, 2, 32]
    assert fitting_batches(target, large) == [1, 2, 3]
    profiled = workshop.target("h200_tensorrt", max_batch=32)
    assert fitting_batches(profiled, large) == [1, 2]


def test_agreement_of_large_logits_takes_the_memory_of_few_images_b10(workshop, tmp_path, monkeypatch):
    target = dataclasses.replace(workshop.target("cpu_onnxruntime"), max_batch=32)
    _, engine = built(workshop, target.plain, workshop.graph, tmp_path)
    manifest = read_engine_manifest(engine)
    images_NCHW = read_probe_images(workshop.images, manifest.card)
    logits_NCHW = open_session(workshop.graph).run(None, {"image": images_NCHW})[0]

    def measure():
        tracemalloc.start()
        found_db, _ = agreement.measure_agreement(logits_NCHW, images_NCHW, manifest, engine / manifest.file)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return found_db, peak

    found_db, peak = measure()
    monkeypatch.setattr(agreement, "_MAX_BYTES", 8 * math.prod(manifest.card.logits_shape))
    less_db, less = measure()
    assert less_db > 80 and found_db > 80 and less < peak / 4


def test_engine_is_tried_on_images_from_the_whole_calibration_set(workshop, tmp_path):
    card = read_card_of_graph(read_graph(workshop.graph))
    images_NHWC = np.random.default_rng(0).integers(0, 256, (9, card.height, card.width, 3), np.uint8)
    np.save(tmp_path / "images.npy", images_NHWC)
    picked_NCHW = normalise(images_NHWC[[0, 2, 5, 8]], card.mean, card.std)
    np.testing.assert_array_equal(read_probe_images(tmp_path / "images.npy", card), picked_NCHW)
    np.save(tmp_path / "images.npy", images_NHWC[:1])
    assert len(read_probe_images(tmp_path / "images.npy", card)) == 1


def test_agreement_is_that_on_the_given_images(workshop, tmp_path):
    """On noise, far beyond the calibrated ranges, it is another one; it may be none at all."""
    noise_NHWC = 255 * np.random.default_rng(0).integers(0, 2, (4, 64, 96, 3), np.uint8)
    np.save(tmp_path / "noise.npy", noise_NHWC)
    target, agreements = workshop.target("cpu_openvino", min_agreement_int8_db=0.0), []
    for images in (workshop.images, tmp_path / "noise.npy"):
        out = tmp_path / images.stem
        out.mkdir()
        report = build_engine(target, model=workshop.quantized, images=images, out=out)
        agreements.append(report.agreement_db)
    assert agreements[0] > 10 and agreements[1] != agreements[0]


@pytest.mark.parametrize(
    ("images", "found"),
    [
        (np.zeros((2, 64, 64, 3), np.uint8), r"uint8 \(2, 64, 64, 3\), expected .* uint8 \(64, 96, 3\)"),
        (np.zeros((0, 64, 96, 3), np.uint8), r"uint8 \(0, 64, 96, 3\), expected one or more"),
        (np.zeros((2, 64, 96, 3), np.float32), r"float32 \(2, 64, 96, 3\), expected"),
        (None, "images.npy: cannot be read"),
    ],
)
def test_images_that_are_not_those_of_the_model_are_refused(workshop, tmp_path, images, found):
    if images is None:
        (tmp_path / "images.npy").write_bytes(workshop.images.read_bytes()[:100])
    else:
        np.save(tmp_path / "images.npy", images)
    target = workshop.target("cpu_onnxruntime")
    (tmp_path / "out").mkdir()
    with pytest.raises(ArtifactError, match=found):
        build_engine(target, model=workshop.graph, images=tmp_path / "images.npy", out=tmp_path / "out")


def test_torch_takes_no_onnx_graph(workshop, tmp_path):
    with pytest.raises(ArtifactError, match=r"an ONNX graph, expected a \.safetensors checkpoint"):
        built(workshop, workshop.target("cpu_torch"), workshop.quantized, tmp_path)


@pytest.mark.parametrize(
    ("precision", "precisions", "num_quantized", "num_float16", "fault"),
    [
        ("f32", {"Conv": {"f32": 10}}, 0, 0, ""),
        ("f32", {"QLinearConv": {"int8": 9}, "Conv": {"f32": 1}}, 10, 0, ""),
        ("f32", {"QLinearConv": {"int8": 2}, "FusedConv": {"f32": 8}}, 2, 0, ""),
        ("f32", {"FullyConnected": {"int8": 8}, "Convolution": {"f32": 2}}, 8, 0, ""),
        ("f32", {"Convolution": {"f32": 9, "bf16": 1}}, 0, 0, "f32 is declared"),
        ("bf16", {"Convolution": {"bf16": 10}}, 0, 0, ""),
        ("bf16", {"Convolution": {"f32": 10}}, 0, 0, "bf16 is declared"),
        ("bf16", {"Convolution": {"int8": 10}}, 10, 0, ""),
        ("f32", {"Convolution": {"f16": 10}}, 0, 10, ""),
        ("f32", {"Convolution": {"f32": 10}}, 0, 10, "10 of 10 layers are FP16, but"),
        ("f16", {"conv2d": {"f16": 10}}, 0, 0, ""),
        ("f16", {"conv2d": {"f32": 10}}, 0, 0, "f16 is declared"),
        ("bf16", {"conv2d": {"f16": 10}}, 0, 0, "bf16 is declared"),
    ],
)
def test_precision_in_use_is_held_against_the_declared_one(
    workshop, precision, precisions, num_quantized, num_float16, fault
):
    target = workshop.target("cpu_torch", precision=Precision(precision))
    found = find_precision_fault(target, precisions, LayerCounts(10, num_quantized, num_float16))
    assert fault in found if fault else found == ""


def test_signal_to_noise_follows_its_formula():
    expected = np.array([3.0, 4.0], np.float32)
    assert difference(expected, expected).sqnr_db == MAX_SQNR_DB
    assert difference(expected, expected + np.array([0.5, 0], np.float32)).sqnr_db == pytest.approx(20.0)


def test_two_packages_of_one_runtime_are_refused(tmp_path, monkeypatch):
    """As after `pip install onnxruntime-gpu` beside onnxruntime: which of them runs cannot be told."""
    (tmp_path / "onnxruntime_gpu-1.30.0.dist-info").mkdir()
    (tmp_path / "onnxruntime_gpu-1.30.0.dist-info" / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: onnxruntime-gpu\nVersion: 1.30.0\n", encoding="utf-8"
    )
    monkeypatch.syspath_prepend(tmp_path)
    _version.cache_clear()
    try:
        with pytest.raises(TargetMismatch, match=r"onnxruntime-gpu 1\.30\.0 are both installed"):
            installed_version(Runtime.onnxruntime)
    finally:
        _version.cache_clear()
