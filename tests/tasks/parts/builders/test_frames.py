"""Engines that read frames and give classes answer as the plain engine does with numpy around it."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from tasks.build_engine import build_engine
from tasks.core.errors import BuildFailed, ConfigError, DataError
from tasks.parts.builders.frames import drop_last_resize, give_classes, read_frames
from tasks.parts.data.dataset import normalise, open_split
from tasks.parts.data.input_card import InputCard, Task
from tasks.parts.engines.description import describe_engine, on_frames
from tasks.parts.engines.frame_engine.pixels import find_classes
from tasks.parts.engines.frame_engine.pixels import normalise as normalise_alone
from tasks.parts.engines.manifest import plain_engine, read_engine_manifest
from tasks.parts.engines.open_engine import open_engine
from tasks.parts.onnx_graphs.graph import CARD_KEY, read_card_of_graph, read_graph, write_graph
from tasks.parts.onnx_session import open_session
from tests.tasks.conftest import Workshop

TARGETS = ["cpu_onnxruntime", "cpu_openvino", "cpu_openvino_batch"]
FORMS = [
    ("frames", "classes"),
    ("bgr_frames", "classes"),
    ("frames", "logits"),
    ("normalised", "classes"),
]


def build(workshop: Workshop, out: Path, target: str, model: Path, **changes: Any) -> Path:
    """Build an engine; return its folder."""
    declared = workshop.target(target, **changes)
    if target == "cpu_openvino":
        declared = dataclasses.replace(declared, max_batch=1)
    report = build_engine(declared, model=model, images=workshop.images, out=out)
    assert report.status == "built", report.reason
    return out / "engine"


def frames_of(workshop: Workshop, count: int) -> np.ndarray:
    return np.ascontiguousarray(open_split(workshop.data, "test")[0][:count])


def run(model: onnx.ModelProto, values: np.ndarray) -> np.ndarray:
    session = open_session(model, is_optimised=False)
    return np.asarray(session.run(None, {session.get_inputs()[0].name: values})[0])


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("variant", ["float", "quantized"])
@pytest.mark.parametrize(("reads", "gives"), FORMS)
def test_engine_on_frames_answers_as_its_plain_twin(
    workshop: Workshop, tmp_path: Path, target: str, variant: str, reads: str, gives: str
) -> None:
    model = workshop.graph if variant == "float" else workshop.quantized
    folder = build(workshop, tmp_path, target, model, reads=reads, gives=gives)
    frames_NHWC = frames_of(workshop, 6)
    with open_engine(folder) as runner, open_engine(plain_engine(folder)) as twin:
        assert twin.manifest.target.is_plain and not runner.manifest.target.is_plain
        answers_NHW = on_frames(runner).predict(frames_NHWC)
        expected_NHW = on_frames(twin).predict(frames_NHWC)
    assert answers_NHW.dtype == expected_NHW.dtype == np.uint8
    np.testing.assert_array_equal(answers_NHW, expected_NHW)
    assert len(np.unique(answers_NHW)) > 1


def test_graph_normalises_as_numpy_does(workshop: Workshop) -> None:
    graph, frames_NHWC = read_graph(workshop.graph), frames_of(workshop, 4)
    card = read_card_of_graph(graph)
    images_NCHW = normalise(frames_NHWC, card.mean, card.std)
    np.testing.assert_array_equal(images_NCHW, normalise_alone(frames_NHWC, card.mean, card.std))
    expected = run(graph, images_NCHW)
    np.testing.assert_array_equal(run(read_frames(graph, card), frames_NHWC), expected)
    reversed_NHWC = np.ascontiguousarray(frames_NHWC[..., ::-1])
    np.testing.assert_array_equal(run(read_frames(graph, card, is_bgr=True), reversed_NHWC), expected)
    np.testing.assert_array_equal(run(give_classes(graph, card), images_NCHW), find_classes(expected))


def test_tensors_of_the_user_s_may_have_the_names_of_frames_and_classes(workshop: Workshop) -> None:
    graph, frames_NHWC = read_graph(workshop.graph), frames_of(workshop, 2)
    card = read_card_of_graph(graph)
    expected = run(give_classes(read_frames(graph, card), card), frames_NHWC)
    renamed = {graph.graph.input[0].name: "frames", graph.graph.output[0].name: "classes"}
    for value in (*graph.graph.input, *graph.graph.output):
        value.name = renamed[value.name]
    for node in graph.graph.node:
        for names in (node.input, node.output):
            names[:] = [renamed.get(name, name) for name in names]
    found = run(give_classes(read_frames(graph, card), card), frames_NHWC)
    np.testing.assert_array_equal(found, expected)


def classifier(num_classes: int) -> tuple[onnx.ModelProto, InputCard]:
    """Return a graph whose logits [N, C] are its input."""
    scores = helper.make_tensor_value_info("scores", TensorProto.FLOAT, ["batch", num_classes])
    logits = helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["batch", num_classes])
    same = helper.make_node("Identity", ["scores"], ["logits"])
    graph = helper.make_graph([same], "same", [scores], [logits])
    card = InputCard(tuple(map(str, range(num_classes))), (0.5,), (0.5,), 8, 8, task=Task.classification)
    return helper.make_model(graph, ir_version=8, opset_imports=[helper.make_opsetid("", 17)]), card


@pytest.mark.parametrize(("num_classes", "dtype"), [(2, np.uint8), (256, np.uint8), (257, np.uint16)])
def test_classes_of_images_have_the_smallest_type(num_classes: int, dtype: type) -> None:
    graph, card = classifier(num_classes)
    scores = np.random.default_rng(0).normal(size=(50, num_classes)).astype(np.float32)
    scores[0] = 0.0  # of equal logits the first class wins
    scores[1, -1] = 99.0
    found = run(give_classes(graph, card), scores)
    assert found.dtype == dtype and found[0] == 0 and found[1] == num_classes - 1
    np.testing.assert_array_equal(found, find_classes(scores))


@pytest.mark.parametrize("threshold", [0.02, 0.5, 0.9])
def test_threshold_decides_between_two_classes(threshold: float) -> None:
    graph, card = classifier(2)
    scores = np.random.default_rng(0).normal(size=(500, 2)).astype(np.float32) * 2
    probability_N = 1 / (1 + np.exp(scores[:, 0] - scores[:, 1]))
    expected = (probability_N > threshold).astype(np.uint8)
    np.testing.assert_array_equal(find_classes(scores, threshold), expected)
    np.testing.assert_array_equal(run(give_classes(graph, card, threshold), scores), expected)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("variant", ["float", "quantized"])
def test_coarse_classes_are_those_before_the_last_resize(
    workshop: Workshop, tmp_path: Path, target: str, variant: str
) -> None:
    model = workshop.graph if variant == "float" else workshop.quantized
    declared = workshop.target(target, reads="frames", gives="classes", coarse_classes=True)
    report = build_engine(declared, model=model, images=workshop.images, out=tmp_path)
    assert report.status == "built", report.reason
    assert report.answers_agreement is not None and 0.8 < report.answers_agreement < 1
    graph, frames_NHWC = read_graph(model), frames_of(workshop, 4)
    card = read_card_of_graph(graph)
    coarse = run(drop_last_resize(declared, graph), normalise(frames_NHWC, card.mean, card.std))
    factor = card.height // coarse.shape[2]
    expected_NHW = find_classes(coarse).repeat(factor, axis=1).repeat(factor, axis=2)
    with open_engine(tmp_path / "engine") as runner:
        answers_NHW = on_frames(runner).predict(frames_NHWC)
    assert factor > 1
    assert (answers_NHW == expected_NHW).mean() > (0.99 if variant == "float" else 0.95)  # other Q/DQ pairs


def test_coarse_classes_need_a_last_resize(workshop: Workshop) -> None:
    graph, _ = classifier(3)
    declared = workshop.target("cpu_onnxruntime", reads="frames", gives="classes", coarse_classes=True)
    with pytest.raises(BuildFailed, match="the logits come from Identity, expected Resize"):
        drop_last_resize(declared, graph)
    with pytest.raises(ConfigError, match="coarse_classes is True, expected false for gives logits"):
        workshop.target("cpu_onnxruntime", coarse_classes=True)


def test_bgr_frames_need_three_channels(workshop: Workshop, tmp_path: Path) -> None:
    graph = read_graph(workshop.graph)
    card = dataclasses.replace(read_card_of_graph(graph), mean=(0.5,), std=(0.5,))
    del graph.metadata_props[:]
    graph.metadata_props.add(key=CARD_KEY, value=card.to_json())
    write_graph(graph, tmp_path / "grey.onnx")
    np.save(tmp_path / "images.npy", np.zeros((2, card.height, card.width, 1), np.uint8))
    declared = workshop.target("cpu_onnxruntime", reads="bgr_frames", gives="classes")
    with pytest.raises(ConfigError, match=r"reads is bgr_frames, and .* reads 1 channels, expected 3"):
        build_engine(declared, model=tmp_path / "grey.onnx", images=tmp_path / "images.npy", out=tmp_path)


def test_threshold_needs_two_classes(workshop: Workshop, tmp_path: Path) -> None:
    declared = workshop.target("cpu_onnxruntime", threshold=0.5)
    with pytest.raises(ConfigError, match=r"target\.cpu_onnxruntime\.threshold is 0\.5, .* has 3 classes"):
        build_engine(declared, model=workshop.graph, images=workshop.images, out=tmp_path)


def test_frames_of_another_type_or_size_are_refused(workshop: Workshop, tmp_path: Path) -> None:
    folder = build(workshop, tmp_path, "cpu_onnxruntime", workshop.graph, reads="frames", gives="classes")
    with open_engine(folder) as runner:
        for wrong in (np.zeros((1, 64, 96, 3), np.float32), np.zeros((1, 3, 64, 96), np.uint8)):
            with pytest.raises(DataError, match=r"expected uint8 \[1\.\.4, 64, 96, 3\], RGB"):
                runner.infer(wrong)
        with pytest.raises(
            ValueError, match=r"images are uint8 \[1, 32, 96, 3\], expected uint8 \[N, 64, 96, 3\]"
        ):
            on_frames(runner).predict(np.zeros((1, 32, 96, 3), np.uint8))


def test_twin_is_kept_beside_the_engine_and_not_described(workshop: Workshop, tmp_path: Path) -> None:
    folder = build(workshop, tmp_path, "cpu_onnxruntime", workshop.quantized, reads="frames", gives="classes")
    manifest, twin = read_engine_manifest(folder), read_engine_manifest(plain_engine(folder))
    assert manifest.sha256 != twin.sha256 and twin.is_precision_ok and manifest.is_precision_ok
    card = json.loads(json.dumps(describe_engine(manifest)))
    assert (card["reads"], card["gives"], card["sha256"]) == ("frames", "classes", manifest.sha256)


def test_runtime_that_takes_no_frames_is_named(workshop: Workshop) -> None:
    with pytest.raises(ConfigError, match=r"reads is frames, expected normalised for runtime torch"):
        workshop.target("cpu_torch", reads="frames")
    with pytest.raises(ConfigError, match=r"gives is classes, expected logits for runtime torch"):
        workshop.target("cpu_torch", gives="classes")
