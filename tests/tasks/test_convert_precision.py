"""FP16 by graph conversion: what it changes, what it leaves, and what the CPU runtimes make of it."""

import importlib.util
import json
import logging
import shutil
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnx import TensorProto, helper, numpy_helper

from tasks.build_engine import build_engine
from tasks.convert_precision import Config, Method, Report, convert_precision
from tasks.core.errors import ArtifactError, ConfigError, DataError
from tasks.parts.builders.report import count_layers
from tasks.parts.data.dataset import normalise, open_split
from tasks.parts.onnx_graphs.float32_nodes import Cause
from tasks.parts.onnx_graphs.graph import node_sources, read_card_of_graph, read_graph, write_graph
from tasks.parts.onnx_graphs.judging import judging_provider
from tasks.parts.onnx_graphs.signal_to_noise import difference
from tasks.parts.onnx_session import open_session
from tests.wheels import unpack_wheel

CONFIG = Config(
    method=Method.converter,
    num_images=4,
    batch_size=2,
    num_val_images=0,
    max_abs=32752.0,
    float32_op_types=[],
    min_sqnr_db=30.0,
)


AUTOCAST_PACKAGES = {"lief": "lief", "onnx-graphsurgeon": "onnx_graphsurgeon"}
"""Of the extra autocast: package -> module."""


@pytest.fixture(scope="module", params=Method)
def config(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Config]:
    """A configuration of each method; what AutoCast needs and is not installed is fetched."""
    with pytest.MonkeyPatch.context() as patch:
        if request.param is Method.autocast:
            for package, module in AUTOCAST_PACKAGES.items():
                if importlib.util.find_spec(module) is None:
                    patch.syspath_prepend(unpack_wheel(package, tmp_path_factory.mktemp(module)))
        yield replace(CONFIG, method=request.param)


@pytest.fixture(scope="module")
def converted(config: Config, workshop: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[Report, Path]:
    out = tmp_path_factory.mktemp("fp16")
    return convert_precision(config, model=workshop.graph, data=workshop.data, out=out), out / "model.onnx"


def names_of(report: Report) -> set[str]:
    return {node.name for node in report.float32_nodes}


def test_weights_are_fp16_and_input_and_output_stay_fp32(
    converted: tuple[Report, Path], workshop: Any
) -> None:
    report, path = converted
    before, after = read_graph(workshop.graph), read_graph(path)
    types = {
        value.type.tensor_type.elem_type
        for graph in (before, after)
        for value in (graph.graph.input[0], graph.graph.output[0])
    }
    assert types == {TensorProto.FLOAT}
    assert count_layers(after).num_float16 == count_layers(after).num > 10
    assert report.num_nodes == len(before.graph.node) and report.float32_nodes == ()
    assert report.judged_on == judging_provider()
    assert path.stat().st_size < 0.75 * workshop.graph.stat().st_size
    assert read_card_of_graph(after) == read_card_of_graph(before)
    assert node_sources(before).items() <= node_sources(after).items()


def test_fp16_graph_computes_nearly_the_same(converted: tuple[Report, Path], workshop: Any) -> None:
    report, path = converted
    graph = read_graph(workshop.graph)
    card = read_card_of_graph(graph)
    images_NCHW = normalise(open_split(workshop.data, "test")[0], card.mean, card.std)
    exact, half = (
        open_session(model).run(None, {model.graph.input[0].name: images_NCHW})[0]
        for model in (graph, read_graph(path))
    )
    assert 40 < difference(exact, half).sqnr_db < 90  # 10 bits of fraction are about 60 dB a rounding
    assert report.agreement > 0.99
    assert abs(report.score - report.float_score) < 0.01


def test_nodes_beyond_the_range_of_fp16_stay_in_fp32(config: Config, workshop: Any, tmp_path: Path) -> None:
    """A convolution scaled up by 1e6, the next one down: the same function, but FP16 over- and underflows."""
    graph = read_graph(workshop.graph)
    first, second = [node for node in graph.graph.node if node.op_type == "Conv"][:2]
    constants = {tensor.name: tensor for tensor in graph.graph.initializer}
    for names, factor in ((first.input[1:], 1e6), (second.input[1:2], 1e-6)):
        for name in names:
            values = numpy_helper.to_array(constants[name]) * np.float32(factor)
            constants[name].CopyFrom(numpy_helper.from_array(values, name))
    model = tmp_path / "scaled.onnx"
    write_graph(graph, model)
    out = tmp_path / "out"
    out.mkdir()
    report = convert_precision(config, model=model, data=workshop.data, out=out)
    assert {first.name, second.name} <= names_of(report) and len(report.float32_nodes) <= 4
    assert report.agreement > 0.99
    named = convert_precision(
        replace(config, float32_op_types=["Resize"]), model=workshop.graph, data=workshop.data, out=out
    )
    resizes = {node.name for node in graph.graph.node if node.op_type == "Resize"}
    assert names_of(named) == resizes != set()
    assert {node.cause for node in named.float32_nodes} == {Cause.operator}


def test_what_is_clipped_or_underflows_in_fp16_stays_in_fp32_and_the_report_says_why_a5(
    config: Config, workshop: Any, tmp_path: Path
) -> None:
    """The image times 3e-6, then times 3e5, then divided by 0.9: one scalar is beyond FP16, the image underflows."""
    graph = read_graph(workshop.graph)
    image, stem = graph.graph.input[0].name, graph.graph.node[0]
    constants = {"down": 3e-6, "up": 3e5, "back": 0.9}
    graph.graph.initializer.extend(
        numpy_helper.from_array(np.float32(value), f"{name}:by") for name, value in constants.items()
    )
    sources = [image, "down:out", "up:out", "back:out"]
    for index, name in enumerate(constants):
        operator = "Div" if name == "back" else "Mul"
        node = helper.make_node(operator, [sources[index], f"{name}:by"], [sources[index + 1]], name)
        graph.graph.node.insert(index, node)
    stem.input[0] = sources[-1]
    write_graph(graph, tmp_path / "scaled.onnx")
    report = convert_precision(config, model=tmp_path / "scaled.onnx", data=workshop.data, out=tmp_path)
    assert [(node.name, node.cause, node.tensor) for node in report.float32_nodes] == [
        ("down", Cause.small_constant, "down:by"),
        ("up", Cause.large_constant, "up:by"),
    ]
    assert report.calibration_sqnr_db > 40 and report.agreement > 0.99


def test_an_fp16_graph_that_is_far_from_float_is_warned_of_a5(
    workshop: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = replace(CONFIG, min_sqnr_db=150.0)
    with caplog.at_level(logging.WARNING):
        report = convert_precision(config, model=workshop.graph, data=workshop.data, out=tmp_path)
    assert f"keeps {report.calibration_sqnr_db:.1f} dB of the float graph's outputs" in caplog.text


def test_logits_beyond_the_range_of_fp16_stay_finite(config: Config, workshop: Any, tmp_path: Path) -> None:
    graph = read_graph(workshop.graph)
    for tensor in graph.graph.initializer:
        if tensor.name in ("classifier/Conv:weight", "classifier/Conv:bias"):
            values = numpy_helper.to_array(tensor) * np.float32(1e7)
            tensor.CopyFrom(numpy_helper.from_array(values, tensor.name))
    write_graph(graph, tmp_path / "scaled.onnx")
    report = convert_precision(config, model=tmp_path / "scaled.onnx", data=workshop.data, out=tmp_path)
    assert graph.graph.node[-1].name in names_of(report)
    converted = read_graph(tmp_path / "model.onnx")
    assert [value.name for value in converted.graph.output] == [value.name for value in graph.graph.output]
    card = read_card_of_graph(graph)
    images_NCHW = normalise(open_split(workshop.data, "test")[0], card.mean, card.std)
    logits_NCHW = open_session(converted).run(None, {"image": images_NCHW})[0]
    assert np.isfinite(logits_NCHW).all() and np.abs(logits_NCHW).max() > 65504
    assert report.agreement > 0.99


def test_node_that_reads_what_fp16_cannot_hold_stays_in_fp32(
    config: Config, workshop: Any, tmp_path: Path
) -> None:
    """In FP16 the softmax of logits beyond its range is NaN, though its own output is at most 1."""
    graph = read_graph(workshop.graph)
    for tensor in graph.graph.initializer:
        if tensor.name in ("classifier/Conv:weight", "classifier/Conv:bias"):
            values = numpy_helper.to_array(tensor) * np.float32(1e7)
            tensor.CopyFrom(numpy_helper.from_array(values, tensor.name))
    resize = graph.graph.node[-1]
    resize.output[0] = "wide"
    graph.graph.node.append(helper.make_node("Softmax", ["wide"], ["logits"], "softmax", axis=1))
    write_graph(graph, tmp_path / "softmax.onnx")
    report = convert_precision(config, model=tmp_path / "softmax.onnx", data=workshop.data, out=tmp_path)
    assert {resize.name, "softmax"} <= names_of(report)
    assert report.agreement > 0.99


def test_autocast_without_its_packages_names_the_extra(
    workshop: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "modelopt.onnx.autocast", None)  # as if it could not be imported
    config = replace(CONFIG, method=Method.autocast)
    with pytest.raises(ConfigError, match=r"method is autocast, .* Install the extra autocast"):
        convert_precision(config, model=workshop.graph, data=workshop.data, out=tmp_path)


@pytest.mark.parametrize("target", ["cpu_onnxruntime", "cpu_openvino"])
def test_a_runtime_that_computes_fp16_in_another_precision_is_found_out(
    converted: tuple[Report, Path], workshop: Any, tmp_path: Path, target: str
) -> None:
    report = build_engine(workshop.target(target), model=converted[1], images=workshop.images, out=tmp_path)
    assert report.status == "built" and report.agreement_db is not None and report.agreement_db > 40
    assert not report.is_precision_ok
    assert "layers are FP16, but the runtime computes" in report.precision_note


def test_a_quantized_graph_is_refused(workshop: Any, tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match="already has Q/DQ"):
        convert_precision(CONFIG, model=workshop.quantized, data=workshop.data, out=tmp_path)


def test_an_empty_calibration_split_is_named(workshop: Any, tmp_path: Path) -> None:
    data = Path(shutil.copytree(workshop.data, tmp_path / "dataset"))
    manifest = json.loads((data / "manifest.json").read_text(encoding="utf-8"))
    manifest["counts"]["calibration"] = 0
    (data / "manifest.json").write_text(json.dumps(manifest), encoding="utf-8")
    for name in ("calibration_images", "calibration_masks"):
        np.save(data / f"{name}.npy", np.load(data / f"{name}.npy")[:0])
    with pytest.raises(DataError, match="calibration split"):
        convert_precision(CONFIG, model=workshop.graph, data=data, out=tmp_path)
