"""Models whose outputs are no classes, and metrics of a user's own."""

import json
import re
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from torch import nn

from flows.params import compose_params
from tasks.attach_metric import Config as MetricConfig
from tasks.attach_metric import attach_metric
from tasks.build_engine import build_engine
from tasks.check_int8 import Config as CheckConfig
from tasks.check_int8 import check_int8
from tasks.convert_precision import Config as ConvertConfig
from tasks.convert_precision import convert_precision
from tasks.core.config import typed_config
from tasks.core.errors import ArtifactError, ConfigError, DataError
from tasks.core.execute import prepare_call
from tasks.label_images import Config as LabelConfig
from tasks.label_images import label_images
from tasks.parts.data.comparison import RESULTS_FILE, read_results, score_loss
from tasks.parts.data.dataset import (
    METRIC_FILE,
    METRIC_PACKAGES_FILE,
    calibration_images,
    open_images,
    open_labels,
    read_manifest,
)
from tasks.parts.data.input_card import Task
from tasks.parts.layer_diff.measures import PairSums
from tasks.parts.onnx_graphs.foreign_output import OutputKind
from tasks.parts.onnx_graphs.graph import read_card_of_graph, read_graph
from tasks.parts.quantization.evaluation import open_evaluator
from tasks.parts.selection.bundle import write_bundle
from tasks.parts.selection.findings import score_of
from tasks.quantize_ptq import Config as PtqConfig
from tasks.quantize_ptq import quantize_ptq
from tasks.rank_layers import Config as RankConfig
from tasks.rank_layers import rank_layers
from tasks.validate import Config as ValidateConfig
from tasks.validate import validate
from tests.tasks.test_import_onnx import classifier, images, run, target

VALIDATION = ValidateConfig("test", "val", 3)
CHANGES = {"output_kind": OutputKind.values, "mean": [0.5] * 2, "std": [0.25] * 2}


class Boxes(nn.Module):
    """A head as detectors have it: seven numbers for each of 64 places, [N, 7, 64]."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(
            nn.Conv2d(2, 8, 3, 2, 1), nn.ReLU(), nn.Conv2d(8, 8, 3, 2, 1), nn.ReLU(), nn.Conv2d(8, 7, 1)
        )

    def forward(self, images_NCHW: torch.Tensor) -> torch.Tensor:
        return self.layers(images_NCHW).flatten(2)


def config(config_class: type, stage: str, **changes: object) -> object:
    section = compose_params(["model=onnx", "model.path=x.onnx", "data=images", "debug=smoke"])[stage]
    return typed_config(config_class, {**section, **changes}, stage)


@dataclass(frozen=True)
class Detector:
    """A model of values with images that its float graph answered, and its INT8 graph."""

    file: Path
    graph: Path
    images: Path
    labelled: Path
    quantized: Path
    ptq: object

    def measure(self, graph: Path, data: Path, out: Path, name: str = "cpu_onnxruntime") -> object:
        for part in ("build", "validated"):
            (out / part).mkdir()
        built = build_engine(
            replace(target(name), min_int8_macs_share=0.0, min_agreement_int8_db=0.0),
            model=graph,
            images=calibration_images(self.labelled),
            out=out / "build",
        )
        assert built.status == "built", built
        return validate(VALIDATION, engine=out / "build/engine", data=data, out=out / "validated")


@pytest.fixture(scope="module")
def detector(tmp_path_factory: pytest.TempPathFactory) -> Detector:
    folder = tmp_path_factory.mktemp("values")
    data = images(folder, 32, channels=2)
    file = folder / "model.onnx"
    names = {"input_names": ["pixels"], "output_names": ["boxes"], "dynamo": False}
    torch.onnx.export(Boxes().eval(), (torch.zeros(1, 2, 32, 32),), file, **names)
    report = run(file, data, folder / "imported", **CHANGES)
    assert (report.task, report.num_classes) == (Task.values, 0)
    graph = folder / "imported/model.onnx"
    (folder / "labelled").mkdir()
    label_images(LabelConfig(3), model=graph, data=data, out=folder / "labelled")
    (folder / "ptq").mkdir()
    labelled = folder / "labelled/dataset"
    ptq = quantize_ptq(config(PtqConfig, "quantize_ptq"), model=graph, data=labelled, out=folder / "ptq")
    return Detector(file, graph, data, labelled, folder / "ptq/model.onnx", ptq)


def expected_of(detector: Detector, split: str) -> np.ndarray:
    inputs = ((np.asarray(open_images(detector.images, split)) / 255 - 0.5) / 0.25).astype(np.float32)
    session = onnxruntime.InferenceSession(detector.file)
    return np.concatenate(
        [session.run(None, {"pixels": image.transpose(2, 0, 1)[None]})[0] for image in inputs]
    )


def test_values_of_the_float_model_are_the_labels(detector: Detector) -> None:
    card = read_card_of_graph(read_graph(detector.graph))
    assert (card.task, card.classes, card.logits_shape) == (Task.values, (), (7, 64))
    for split in ("train", "val", "test", "calibration"):
        labels = open_labels(detector.labelled, split, Task.values)
        assert (labels.shape, labels.dtype) == ((4, 7, 64), np.float32)
        np.testing.assert_allclose(labels, expected_of(detector, split), atol=1e-5)


@pytest.mark.parametrize("name", ["cpu_onnxruntime", "cpu_openvino"])
def test_values_of_an_engine_are_measured_in_signal_and_noise(
    detector: Detector, tmp_path: Path, name: str
) -> None:
    report = detector.measure(detector.quantized, detector.labelled, tmp_path, name)
    accuracy = report.accuracy
    assert accuracy.metric == "agreement with the float model (1 - noise / signal)"
    assert (accuracy.miou, accuracy.top1, accuracy.iou) == (None, None, {})
    sums, noise, signal = PairSums(), 0.0, 0.0
    session = (
        onnxruntime.InferenceSession(tmp_path / "build/engine/twin/engine.onnx") if "onnx" in name else None
    )
    results = read_results(tmp_path / "validated" / RESULTS_FILE, "test")
    assert accuracy.score == pytest.approx(results.score) and 0.9 < accuracy.score < 1
    assert accuracy.sqnr_db == pytest.approx(-10 * np.log10(1 - accuracy.score), abs=1e-6)
    assert not (tmp_path / "validated/confusion.csv").exists()
    if session is None:
        return
    inputs = ((np.asarray(open_images(detector.images, "test")) / 255 - 0.5) / 0.25).astype(np.float32)
    for image, expected in zip(inputs, expected_of(detector, "test"), strict=True):
        [found] = session.run(None, {session.get_inputs()[0].name: image.transpose(2, 0, 1)[None]})
        sums.add(expected, found[0])
        noise, signal = noise + ((found[0] - expected) ** 2).sum(), signal + (expected**2).sum()
    assert accuracy.score == pytest.approx(1 - noise / signal, abs=1e-5)
    assert accuracy.sqnr_db == pytest.approx(sums.difference.sqnr_db, abs=0.05)
    assert accuracy.cosine == pytest.approx(sums.difference.cosine, abs=1e-6)


def test_float_engine_of_values_loses_nothing_and_int8_loses_what_its_interval_holds(
    detector: Detector, tmp_path: Path
) -> None:
    for name, graph in (("float", detector.graph), ("int8", detector.quantized)):
        (tmp_path / name).mkdir()
        detector.measure(graph, detector.labelled, tmp_path / name)
    exact, noisy = (
        read_results(tmp_path / name / "validated" / RESULTS_FILE, "test") for name in ("float", "int8")
    )
    assert exact.score > 1 - 1e-8
    loss = score_loss(noisy, exact)
    assert loss.low < loss.rel_loss == pytest.approx(1 - noisy.score, abs=1e-7)
    assert loss.rel_loss < loss.high < 0.1


def test_every_stage_that_evaluates_takes_values(detector: Detector, tmp_path: Path) -> None:
    assert 0.9 < detector.ptq.score < 1 and detector.ptq.agreement == pytest.approx(detector.ptq.score)
    assert detector.ptq.float_score > 1 - 1e-8
    inputs = {"model": detector.graph, "data": detector.labelled}
    ranges = detector.quantized.with_name("ranges.json")
    for name in ("half", "ranked", "checked"):
        (tmp_path / name).mkdir()
    half = convert_precision(config(ConvertConfig, "convert_precision"), **inputs, out=tmp_path / "half")
    assert half.agreement > 0.9999
    ranking = rank_layers(
        config(RankConfig, "rank_layers", exhaustive=True),
        ranges=ranges,
        results=ranges,
        **inputs,
        out=tmp_path / "ranked",
    )
    assert [layer for layer in ranking.layers if 0 < layer.disagreement < 0.1] == list(ranking.layers)
    checklist = check_int8(
        config(CheckConfig, "check_int8"),
        **inputs,
        quantized=detector.quantized,
        ranges=ranges,
        trials=detector.quantized.with_name("calibrators.csv"),
        ranking=tmp_path / "ranked/ranking.csv",
        out=tmp_path / "checked",
    )
    assert "Which classes lost accuracy?" not in {answer.question for answer in checklist.answers}


@pytest.mark.parametrize("name", ["cpu_onnxruntime", "cpu_openvino"])
def test_bundle_of_values_gives_values(detector: Detector, tmp_path: Path, name: str) -> None:
    detector.measure(detector.graph, detector.labelled, tmp_path, name)
    row = {"variant": "imported", "target": name}
    assert write_bundle(tmp_path / "build/engine", row, tmp_path / "bundle")
    np.save(tmp_path / "images.npy", np.asarray(open_images(detector.images, "test")))
    command = [sys.executable, "-I", "bundle/infer.py", "images.npy", "values.npy"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = np.load(tmp_path / "values.npy")
    np.testing.assert_allclose(found, expected_of(detector, "test"), atol=1e-4)
    [native] = (tmp_path / "bundle/triton_native").rglob("config.pbtxt")
    assert re.search(r"output .* dims: \[(-1, |1, )?7, 64\]", native.read_text())
    [served] = (tmp_path / "bundle/triton").rglob("config.pbtxt")
    assert 'name: "values" data_type: TYPE_FP32 dims: [7, 64]' in served.read_text()


class TwoHeads(Boxes):
    """Boxes, and one small number for each image."""

    def forward(self, images_NCHW: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        boxes = super().forward(images_NCHW)
        return boxes, 0.01 * boxes.mean(dim=(1, 2)).sigmoid()[:, None]


@pytest.fixture(scope="module")
def two_heads(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("heads") / "model.onnx"
    names = {"input_names": ["pixels"], "output_names": ["boxes", "share"], "dynamo": False}
    torch.onnx.export(TwoHeads().eval(), (torch.zeros(1, 2, 32, 32),), file, **names)
    return file


def test_all_outputs_are_kept_and_measured_each(two_heads: Path, detector: Detector, tmp_path: Path) -> None:
    report = run(two_heads, detector.images, tmp_path / "imported", **CHANGES, output="*")
    assert report.outputs == ("boxes", "share")
    graph = tmp_path / "imported/model.onnx"
    card = read_card_of_graph(read_graph(graph))
    assert (card.outputs, card.logits_shape) == ({"boxes": (7, 64), "share": (1,)}, (449,))
    for name in ("labelled", "ptq"):
        (tmp_path / name).mkdir()
    label_images(LabelConfig(3), model=graph, data=detector.images, out=tmp_path / "labelled")
    data = tmp_path / "labelled/dataset"
    inputs = ((np.asarray(open_images(data, "test")) / 255 - 0.5) / 0.25).astype(np.float32)
    session = onnxruntime.InferenceSession(two_heads)
    expected = [session.run(None, {"pixels": image.transpose(2, 0, 1)[None]}) for image in inputs]
    labels = open_labels(data, "test", Task.values)
    np.testing.assert_allclose(labels[:, :448], [boxes.ravel() for boxes, _ in expected], atol=1e-5)
    np.testing.assert_allclose(labels[:, 448:], [share[0] for _, share in expected], atol=1e-5)

    quantize_ptq(config(PtqConfig, "quantize_ptq"), model=graph, data=data, out=tmp_path / "ptq")
    accuracy = detector.measure(tmp_path / "ptq/model.onnx", data, tmp_path).accuracy
    session = onnxruntime.InferenceSession(tmp_path / "build/engine/twin/engine.onnx")
    name = session.get_inputs()[0].name
    found = np.concatenate([session.run(None, {name: image.transpose(2, 0, 1)[None]})[0] for image in inputs])
    for output, part in (("boxes", slice(448)), ("share", slice(448, None))):
        signal, noise = (labels[:, part] ** 2).sum(), ((found - labels)[:, part] ** 2).sum()
        assert accuracy.outputs[output].sqnr_db == pytest.approx(10 * np.log10(signal / noise), abs=0.05)
    worst = min(accuracy.outputs.values(), key=lambda output: output.sqnr_db)
    assert accuracy.sqnr_db == worst.sqnr_db
    shares = [1 - 10 ** (-output.sqnr_db / 10) for output in accuracy.outputs.values()]
    assert accuracy.score == pytest.approx(np.mean(shares), abs=1e-6), (
        "small values count as much as large ones"
    )
    assert write_bundle(
        tmp_path / "build/engine", {"variant": "imported", "target": "cpu"}, tmp_path / "bundle"
    )
    described = json.loads((tmp_path / "bundle/model.json").read_text())
    assert described["outputs"] == {"boxes": [7, 64], "share": [1]}
    assert score_of(accuracy).count(" dB, cosine ") == 2 and "; share " in score_of(accuracy)


def test_all_outputs_are_no_classes(two_heads: Path, detector: Detector, tmp_path: Path) -> None:
    with pytest.raises(
        ArtifactError, match=r"Or keep all as values: model\.output=\* model\.output_kind=values"
    ):
        run(two_heads, detector.images, tmp_path / "out", **CHANGES)
    with pytest.raises(
        ConfigError, match=r"output is '\*', which keeps all outputs, and output_kind is classes"
    ):
        run(two_heads, detector.images, tmp_path / "classes", output="*")


@pytest.mark.parametrize(
    ("changes", "error", "text"),
    [
        ({"classes": ["a", "b"]}, ConfigError, r"output_kind is values, and classes is \['a', 'b'\]"),
        ({"threshold": 0.5}, ArtifactError, r"model\.threshold is 0\.5, which is for classes"),
        ({"output_kind": OutputKind.classes}, ArtifactError, r"or set model\.output_kind=values"),
    ],
)
def test_contradictory_output_is_refused(
    detector: Detector, tmp_path: Path, changes: dict[str, object], error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=text):
        run(detector.file, detector.images, tmp_path / "out", **{**CHANGES, **changes})


@pytest.mark.parametrize(
    ("operator", "shape", "text"),
    [
        ("NonZero", [3, None], r"before a NonMaxSuppression or NonZero, whose outputs have no fixed size"),
        ("ReduceSum", ["n"], r"expected \[N, \.\.\.\] with at least two axes .*without the Squeeze"),
    ],
)
def test_values_of_no_fixed_number_or_without_an_axis_are_refused(
    detector: Detector, tmp_path: Path, operator: str, shape: list[object], text: str
) -> None:
    graph = onnx.load(detector.file)
    inputs = [graph.graph.output[0].name]
    if operator == "ReduceSum":
        graph.graph.initializer.append(onnx.numpy_helper.from_array(np.array([1, 2]), "axes"))
        inputs.append("axes")
    nodes = [
        onnx.helper.make_node(operator, inputs, ["some"], **({"keepdims": 0} if len(inputs) == 2 else {})),
        onnx.helper.make_node("Cast", ["some"], ["found"], to=onnx.TensorProto.FLOAT),
    ]
    graph.graph.node.extend(nodes)
    del graph.graph.output[:]
    graph.graph.output.append(onnx.helper.make_tensor_value_info("found", onnx.TensorProto.FLOAT, shape))
    onnx.save(graph, tmp_path / "model.onnx")
    with pytest.raises(ArtifactError, match=text):
        run(tmp_path / "model.onnx", detector.images, tmp_path / "out", **CHANGES)


def test_model_that_returns_the_same_values_for_every_image_labels_nothing(tmp_path: Path) -> None:
    data, network = images(tmp_path, 32, channels=2), Boxes().eval()
    with torch.no_grad():
        network.layers[-1].weight.zero_()
    names = {"input_names": ["pixels"], "output_names": ["boxes"], "dynamo": False}
    torch.onnx.export(network, (torch.zeros(1, 2, 32, 32),), tmp_path / "model.onnx", **names)
    run(tmp_path / "model.onnx", data, tmp_path / "imported", **CHANGES)
    (tmp_path / "labelled").mkdir()
    with pytest.raises(DataError, match="the float model returns the same values for every image"):
        label_images(
            LabelConfig(4), model=tmp_path / "imported/model.onnx", data=data, out=tmp_path / "labelled"
        )


METRIC = """
import numpy as np

def closeness(outputs, labels):
    worst = np.abs(outputs - labels).reshape(len(outputs), -1).max(axis=1)
    return 1 / (1 + worst)

def many(outputs, labels):
    return np.ones((len(outputs), 2))

def average(outputs, labels):
    return 0.5

def beyond(outputs, labels):
    return np.full(len(outputs), 1.5)

def undefined(outputs, labels):
    return np.full(len(outputs), np.nan)
"""


def attached(data: Path, folder: Path, function: str = "closeness", text: str = METRIC) -> Path:
    folder.mkdir()
    (folder / "metrics.py").write_text(text)
    out = folder / "attached"
    out.mkdir()
    file = folder / "metrics.py"
    report = attach_metric(MetricConfig(function, str(file)), metric=file, data=data, out=out)
    assert report.num_images["val"] == 4
    return out / "dataset"


def test_metric_of_the_user_s_own_scores_each_image(detector: Detector, tmp_path: Path) -> None:
    data = attached(detector.labelled, tmp_path / "metric")
    report = detector.measure(detector.quantized, data, tmp_path)
    session = onnxruntime.InferenceSession(tmp_path / "build/engine/twin/engine.onnx")
    inputs = ((np.asarray(open_images(detector.images, "test")) / 255 - 0.5) / 0.25).astype(np.float32)
    name = session.get_inputs()[0].name
    found = np.concatenate([session.run(None, {name: image.transpose(2, 0, 1)[None]})[0] for image in inputs])
    worst_N = np.abs(found - expected_of(detector, "test")).max(axis=(1, 2))
    assert report.accuracy.metric == "closeness (own metric, against the float model)"
    assert report.accuracy.score == pytest.approx((1 / (1 + worst_N)).mean(), abs=1e-4)
    assert report.accuracy.sqnr_db is None
    results = read_results(tmp_path / "validated" / RESULTS_FILE, "test")
    assert results.hits_NC[:, 0] == pytest.approx(1 / (1 + worst_N), abs=1e-4)
    evaluator = open_evaluator(read_graph(detector.graph), data, num_images=0, batch_size=3)
    evaluation = evaluator.evaluate(read_graph(detector.quantized))
    assert evaluator.float_score > 0.999 > evaluation.score > 0.5
    assert 0.9 < evaluation.agreement < 1, "the agreement is not in the user's metric"


def test_metric_for_classes_stands_beside_the_usual_one(tmp_path: Path) -> None:
    labelled = images(tmp_path, 32, classes=("cat", "dog", "hen"))
    text = "import numpy as np\ndef right(logits, labels):\n    return logits.argmax(1) == labels\n"
    data = attached(labelled, tmp_path / "metric", "right", text)
    onnx.save(classifier(), tmp_path / "model.onnx")
    run(tmp_path / "model.onnx", labelled, tmp_path / "imported")
    for part in ("build", "validated"):
        (tmp_path / part).mkdir()
    model = tmp_path / "imported/model.onnx"
    build_engine(
        target("cpu_onnxruntime"), model=model, images=calibration_images(data), out=tmp_path / "build"
    )
    report = validate(VALIDATION, engine=tmp_path / "build/engine", data=data, out=tmp_path / "validated")
    assert report.accuracy.metric == "right (own metric)"
    assert report.accuracy.other_score == report.accuracy.top1 == report.accuracy.score
    assert read_results(tmp_path / "validated" / RESULTS_FILE, "test").is_right_or_wrong


def test_edit_of_the_metric_changes_the_key_of_what_evaluates_and_of_nothing_else(
    detector: Detector, tmp_path: Path
) -> None:
    params = compose_params(["model=onnx", "model.path=x.onnx", "data=images"])
    keys = []
    for number, text in enumerate((METRIC, METRIC, METRIC + "# edited\n")):
        data = attached(detector.labelled, tmp_path / str(number), text=text)
        inputs = {"model": detector.graph, "data": data}
        built = {"model": detector.graph, "images": calibration_images(data)}
        keys.append(
            (
                prepare_call("quantize_ptq", inputs, params).key,
                prepare_call("build_engine.imported.cpu_openvino", built, params).key,
            )
        )
    assert keys[0] == keys[1] and keys[0][0] != keys[2][0] and keys[0][1] == keys[2][1]
    assert not list(tmp_path.rglob("__pycache__"))


@pytest.mark.parametrize(
    ("function", "error", "text"),
    [
        (
            "dice",
            ConfigError,
            r"has no function 'dice', found: closeness, many.*model\.metric=<file>:<function>",
        ),
        (
            "many",
            DataError,
            r"many \(model\.metric\) returned float64 \[4, 2\] for 4 images, expected one number",
        ),
        ("average", DataError, r"returned float64 \[\] for 4 images.*Do not average over the images"),
        ("beyond", DataError, r"returned 1\.5 for an image, expected a score from 0 \(wrong\) to 1"),
        ("undefined", DataError, r"returned nan for an image.*decide what an image without objects scores"),
    ],
)
def test_wrong_metric_is_refused(
    detector: Detector, tmp_path: Path, function: str, error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=text):
        data = attached(detector.labelled, tmp_path / "metric", function)
        open_evaluator(read_graph(detector.graph), data, num_images=0, batch_size=4)


def test_data_with_a_metric_names_the_packages_that_it_imports_a10(
    detector: Detector, tmp_path: Path
) -> None:
    """Their versions are in the data, so that each stage that evaluates has them in its key."""
    data = attached(detector.labelled, tmp_path / "metric")
    packages = json.loads((data / METRIC_PACKAGES_FILE).read_text())
    assert packages == {"numpy": np.__version__}
    assert METRIC_PACKAGES_FILE in read_manifest(data).files


def test_file_that_is_no_python_is_refused(detector: Detector, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"metrics\.py: not a Python file"):
        attached(detector.labelled, tmp_path / "metric", text="def dice(:\n")
    with pytest.raises(ConfigError, match=r"has no function 'dice', found: none"):
        attached(detector.labelled, tmp_path / "empty", "dice", "x = 1\n")
    with pytest.raises(
        ConfigError, match=r"cannot be run \(ModuleNotFoundError: .*'absent'\).* \(model\.metric\)"
    ):
        attached(detector.labelled, tmp_path / "import", "dice", "import absent\n")
    assert METRIC_FILE not in read_manifest(detector.labelled).files
