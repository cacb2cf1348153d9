"""Models of an image and something else, tensors inside a graph as its output, and sequences of classes."""

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import ModelProto, TensorProto, helper, numpy_helper

from tasks.attach_metric import Config as MetricConfig
from tasks.attach_metric import attach_metric
from tasks.core.errors import ArtifactError
from tasks.label_images import Config as LabelConfig
from tasks.label_images import label_images
from tasks.parts.data.dataset import normalise, open_images
from tasks.parts.data.input_card import Task
from tasks.parts.onnx_graphs.foreign_output import OutputKind
from tasks.parts.onnx_graphs.graph import read_card_of_graph, read_graph
from tasks.parts.quantization.evaluation import open_evaluator
from tests.tasks.test_import_onnx import CONFIG, images, run

RANDOM = np.random.default_rng(0)


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return images(tmp_path_factory.mktemp("small"), 32)


def graph_of(
    nodes: list[Any], inputs: dict[str, Any], outputs: dict[str, Any], constants: dict[str, Any]
) -> ModelProto:
    values = [
        [
            helper.make_tensor_value_info(
                name, TensorProto.INT64 if name == "classes" else TensorProto.FLOAT, shape
            )
            for name, shape in group.items()
        ]
        for group in (inputs, outputs)
    ]
    tensors = [numpy_helper.from_array(np.asarray(value), name) for name, value in constants.items()]
    graph = helper.make_graph(nodes, "graph", values[0], values[1], tensors)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def prompted() -> ModelProto:
    """Return an encoder of the image, and a decoder that weighs its channels by a prompt, for each pixel."""
    weights = RANDOM.normal(size=(4, 3, 2, 2)).astype(np.float32)
    head = RANDOM.normal(size=(3, 4, 1, 1)).astype(np.float32)
    nodes = [
        helper.make_node("Conv", ["pixels", "W"], ["maps"], "encoder", strides=[2, 2]),
        helper.make_node("Relu", ["maps"], ["embedding"], "relu"),
        helper.make_node("Mul", ["embedding", "prompt"], ["weighed"], "weigh"),
        helper.make_node("Conv", ["weighed", "H"], ["masks"], "decoder"),
    ]
    inputs = {"pixels": ["n", 3, 32, 32], "prompt": [1, 4, 1, 1]}
    return graph_of(nodes, inputs, {"masks": ["n", 3, 16, 16]}, {"W": weights, "H": head})


def inputs_of(data: Path) -> Any:
    return normalise(np.asarray(open_images(data, "test")), tuple(CONFIG.mean), tuple(CONFIG.std))


def test_encoder_of_a_prompted_model_is_cut_out(small: Path, tmp_path: Path) -> None:
    onnx.save(prompted(), tmp_path / "model.onnx")
    text = (
        r"2 inputs \('pixels' .*'prompt' float32 \[1, 4, 1, 1\]\), expected one image.*"
        r"Measure the part that reads the image alone: model\.output=embedding\. Or give the others constant values: "
        r"numpy\.savez\('inputs\.npz', prompt=\.\.\.\) beside the model"
    )
    with pytest.raises(ArtifactError, match=text):
        run(tmp_path / "model.onnx", small, tmp_path / "out")
    changes = {"output": "embedding", "output_kind": OutputKind.values}
    report = run(tmp_path / "model.onnx", small, tmp_path / "cut", **changes)
    assert (report.task, report.outputs) == (Task.values, ("embedding",))
    assert min(found.sqnr_db for found in report.differences) > 100
    written = read_graph(tmp_path / "cut/model.onnx").graph
    assert [node.op_type for node in written.node] == ["Conv", "Relu"]
    assert [value.name for value in written.input] == ["pixels"]


def test_other_inputs_have_the_values_of_a_file_beside_the_model(small: Path, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    onnx.save(prompted(), folder / "model.onnx")
    prompt = RANDOM.normal(size=(1, 4, 1, 1)).astype(np.float32)
    np.savez(folder / "inputs.npz", prompt=prompt)
    report = run(folder, small, tmp_path / "out")
    assert (report.task, report.num_classes) == (Task.segmentation, 3)
    assert min(found.sqnr_db for found in report.differences) > 100
    original = onnxruntime.InferenceSession(folder / "model.onnx")
    expected = original.run(None, {"pixels": inputs_of(small), "prompt": prompt})[0]
    written = onnxruntime.InferenceSession(tmp_path / "out/model.onnx").run(
        None, {"pixels": inputs_of(small)}
    )[0]
    assert (written[..., 1::2, 1::2].argmax(1) == expected.argmax(1)).mean() > 0.9  # resized to the image
    np.savez(folder / "inputs.npz", prompt=prompt[0])
    with pytest.raises(
        ArtifactError, match=r"inputs\.npz: 'prompt' is float32 \[4, 1, 1\], expected an array for an"
    ):
        run(folder, small, tmp_path / "wrong")
    (folder / "inputs.npz").write_bytes(b"no arrays")
    with pytest.raises(ArtifactError, match=r"inputs\.npz: no arrays can be read"):
        run(folder, small, tmp_path / "torn")


def test_logits_in_front_of_an_argmax_are_named_and_taken_b4(small: Path, tmp_path: Path) -> None:
    weights = RANDOM.normal(size=(5, 3, 3, 3)).astype(np.float32)
    nodes = [
        helper.make_node("Conv", ["pixels", "W"], ["logits"], "conv", pads=[1] * 4),
        helper.make_node("ArgMax", ["logits"], ["chosen"], "choose", axis=1, keepdims=1),
        helper.make_node("Squeeze", ["chosen", "one"], ["classes"], "squeeze"),
    ]
    constants = {"W": weights, "one": np.array([1])}
    model = graph_of(nodes, {"pixels": ["n", 3, 32, 32]}, {"classes": ["n", 32, 32]}, constants)
    onnx.save(model, tmp_path / "model.onnx")
    with pytest.raises(
        ArtifactError, match=r"int64 .*Set model\.output=logits, the logits in front of the ArgMax 'choose'"
    ):
        run(tmp_path / "model.onnx", small, tmp_path / "out")
    report = run(tmp_path / "model.onnx", small, tmp_path / "logits", output="logits")
    assert (report.task, report.num_classes, report.same_answers) == (Task.segmentation, 5, 1.0)


METRIC = """
def right_texts(outputs, labels):  # [N, T, C] of the engine and of the float model
    def texts(values):
        read = []
        for places in values.argmax(axis=2):  # the greedy reading of CTC: repeats united, class 0 left out
            kept = [now for before, now in zip([0, *places[:-1]], places) if now != before and now]
            read.append(tuple(kept))
        return read
    return [float(found == wanted) for found, wanted in zip(texts(outputs), texts(labels))]
"""


def test_sequences_of_classes_are_values_with_a_metric_of_their_own(small: Path, tmp_path: Path) -> None:
    """Text recognition: 16 places from left to right, each with the probabilities of six signs."""
    weights = RANDOM.normal(size=(6, 3, 32, 2)).astype(np.float32) / 5
    nodes = [
        helper.make_node("Conv", ["pixels", "W"], ["columns"], "columns", strides=[32, 2]),
        helper.make_node("Squeeze", ["columns", "two"], ["flat"], "flat"),
        helper.make_node("Transpose", ["flat"], ["places"], "places", perm=[0, 2, 1]),
        helper.make_node("Softmax", ["places"], ["signs"], "softmax", axis=2),
    ]
    constants = {"W": weights, "two": np.array([2])}
    file, graph = tmp_path / "model.onnx", tmp_path / "imported/model.onnx"
    onnx.save(graph_of(nodes, {"pixels": ["n", 3, 32, 32]}, {"signs": ["n", 16, 6]}, constants), file)
    with pytest.raises(ArtifactError, match=r"a sequence \[N, T, C\], which a metric of your own compares"):
        run(file, small, tmp_path / "classes")
    run(file, small, tmp_path / "imported", output_kind=OutputKind.values)
    assert read_card_of_graph(read_graph(graph)).logits_shape == (16, 6)
    for name in ("labelled", "attached"):
        (tmp_path / name).mkdir()
    label_images(LabelConfig(4), model=graph, data=small, out=tmp_path / "labelled")
    metric = tmp_path / "metrics.py"
    metric.write_text(METRIC)
    attach_metric(
        MetricConfig("right_texts", str(metric)),
        metric=metric,
        data=tmp_path / "labelled/dataset",
        out=tmp_path / "attached",
    )
    evaluator = open_evaluator(read_graph(graph), tmp_path / "attached/dataset", num_images=0, batch_size=4)
    assert evaluator.float_score == 1
    broken = read_graph(graph)
    for tensor in broken.graph.initializer:
        if len(tensor.dims) == 4:
            tensor.CopyFrom(numpy_helper.from_array(-numpy_helper.to_array(tensor), tensor.name))
    assert evaluator.evaluate(broken).score == 0
