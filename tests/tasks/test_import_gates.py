"""How the import judges what it wrote: against the file's own spread, in front of sigmoids, and by the answers."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import ModelProto, TensorProto, helper, numpy_helper

from tasks.core.errors import GateFailed
from tasks.parts.data.dataset import open_images
from tasks.parts.onnx_graphs.foreign_compare import Gate, compare
from tasks.parts.onnx_graphs.foreign_output import OutputForm, OutputKind
from tasks.parts.onnx_graphs.foreign_rewrite import Imported, Quantization, rewrite
from tasks.parts.onnx_graphs.graph import read_graph
from tests.tasks.test_import_onnx import CONFIG, images, run, segmenter

GATE = Gate(80.0, "import_onnx.min_sqnr_db")


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return images(tmp_path_factory.mktemp("small"), 32)


def chain(
    nodes: list[tuple[str, list[str], dict[str, Any]]],
    constants: dict[str, Any],
    shape: tuple[Any, ...] = ("n", 3, 32, 32),
    opset: int = 17,
) -> ModelProto:
    """Return a graph in which each node reads the one before it, beside its constants."""
    tensor, made = "pixels", []
    for number, (operator, names, attributes) in enumerate(nodes):
        output = f"t{number}" if number + 1 < len(nodes) else "answer"
        made.append(helper.make_node(operator, [tensor, *names], [output], output, **attributes))
        tensor = output
    pixels = helper.make_tensor_value_info("pixels", TensorProto.FLOAT, shape)
    answer = helper.make_tensor_value_info("answer", TensorProto.FLOAT, [shape[0], "c", "h", "w"])
    tensors = [numpy_helper.from_array(np.asarray(value), name) for name, value in constants.items()]
    graph = helper.make_graph(made, "chain", [pixels], [answer], tensors)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=8)


def cancelling(offset_C: list[float], gain_C: list[float], *after: str) -> ModelProto:
    """Return a convolution of large values whose mean a BatchNormalization takes away again: rounding is left."""
    random, size = np.random.default_rng(0), len(offset_C)
    constants = {
        "W": random.normal(size=(size, 3, 1, 1)).astype(np.float32),
        "b": np.array(offset_C, np.float32),
        "scale": np.array(gain_C, np.float32),
        "shift": np.zeros(size, np.float32),
        "mean": np.array(offset_C, np.float32),
        "var": np.ones(size, np.float32),
    }
    layers: list[tuple[str, list[str], dict[str, Any]]] = [
        ("Conv", ["W", "b"], {}),
        ("BatchNormalization", ["scale", "shift", "mean", "var"], {"epsilon": 0.0}),
    ]
    return chain([*layers, *((operator, [], {}) for operator in after)], constants)


def written(model: Path, **declared: Any) -> Imported:
    output = OutputForm(None, CONFIG.output_layout, None, declared.pop("kind", OutputKind.classes))
    return rewrite(
        onnx.load(model),
        path=model,
        form=CONFIG.form,
        height=None,
        width=None,
        output=output,
        quantization=Quantization.none,
        is_batch_freed=True,
    )


def scaled(imported: Imported, factor: float) -> Imported:
    """Return a graph whose weights are wrong by a factor."""
    graph = ModelProto()
    graph.CopyFrom(imported.graph)
    for tensor in graph.graph.initializer:
        values = numpy_helper.to_array(tensor)
        tensor.CopyFrom(numpy_helper.from_array(values * np.float32(factor), tensor.name))
    return replace(imported, graph=graph)


def test_spread_of_the_file_itself_is_the_limit_b4(small: Path, tmp_path: Path) -> None:
    """ONNX Runtime folds the normalisation into the convolution: other sums, other rounding."""
    path, pixels = tmp_path / "model.onnx", np.asarray(open_images(small, "test"))
    onnx.save(cancelling([2e5] * 3, [1.0] * 3), path)
    near = compare(path, scaled(written(path), 1.003), CONFIG.form, GATE, pixels, [1, 2])
    assert near.differences[0].sqnr_db == pytest.approx(20 * np.log10(1 / 0.003), abs=0.5)
    assert near.spread_db is not None and 40 < near.spread_db < 56 and near.same_answers is not None
    text = (
        r"expected at least \d\d\.\d dB \(import_onnx.min_sqnr_db; the file differs from itself by \d+\.\d dB"
    )
    with pytest.raises(GateFailed, match=text):
        compare(path, scaled(written(path), 1.1), CONFIG.form, GATE, pixels, [1])


def test_rounding_of_float32_is_no_difference_however_small_the_outputs_are_b4(
    small: Path, tmp_path: Path
) -> None:
    path, pixels = tmp_path / "model.onnx", np.asarray(open_images(small, "test"))
    onnx.save(cancelling([0.0] * 3, [2e-5] * 3), path)
    found = compare(path, scaled(written(path), 1.0005), CONFIG.form, GATE, pixels, [1])
    assert found.spread_db is None and found.differences[0].sqnr_db < 70
    assert 1e-9 < found.differences[0].max_abs < 2**-23
    with pytest.raises(GateFailed, match=r"SQNR 40\.0 dB"):
        compare(path, scaled(written(path), 1.01), CONFIG.form, GATE, pixels, [1])


@pytest.mark.parametrize("kind", list(OutputKind))
def test_values_are_compared_in_front_of_the_last_sigmoid_b4(
    small: Path, tmp_path: Path, kind: OutputKind
) -> None:
    """Probabilities of 0.0003 have the rounding of their logits as a whole: 20 dB less than these logits of -8."""
    model = cancelling([2e3] * 3, [1.0] * 3, "Sigmoid")
    model.graph.initializer[3].CopyFrom(numpy_helper.from_array(np.full(3, -30, np.float32), "shift"))
    onnx.save(model, tmp_path / "model.onnx")
    report = run(tmp_path / "model.onnx", small, tmp_path / "out", output_kind=kind)
    assert report.spread_db is None and report.differences[0].sqnr_db > 80
    assert report.differences[0].max_abs > 1e-6


def test_answers_have_to_be_the_same_where_the_spread_sets_the_limit_b4(small: Path, tmp_path: Path) -> None:
    """A class that never wins hides with its large values that two others are exchanged."""
    model = cancelling([2e6, 0.0, 0.0], [1.0, 2e-2, 2e-2])
    model.graph.initializer[3].CopyFrom(numpy_helper.from_array(np.array([-40, 0, 0], np.float32), "shift"))
    onnx.save(model, tmp_path / "model.onnx")
    right = written(tmp_path / "model.onnx")
    pixels = np.asarray(open_images(small, "test"))
    assert compare(tmp_path / "model.onnx", right, CONFIG.form, GATE, pixels, [2]).same_answers == 1
    swapped = ModelProto()
    swapped.CopyFrom(right.graph)
    for tensor in swapped.graph.initializer:
        values = numpy_helper.to_array(tensor)
        if values.shape[:1] == (3,):
            tensor.CopyFrom(numpy_helper.from_array(values[[0, 2, 1]], tensor.name))
    with pytest.raises(GateFailed, match=r"gives \d+ of 2048 images or pixels another class than the file"):
        compare(tmp_path / "model.onnx", replace(right, graph=swapped), CONFIG.form, GATE, pixels, [2])


def test_advice_blames_the_opset_only_where_it_was_converted_b4(small: Path, tmp_path: Path) -> None:
    for opset, is_blamed in ((17, False), (9, True)):
        model = segmenter([("Conv", {})], np.ones((5, 4, 1, 1)))
        model.graph.node[-1].input.pop()
        model.opset_import[0].version = opset
        path = tmp_path / f"{opset}.onnx"
        onnx.save(model, path)
        wrong = scaled(written(path), 2.0)
        with pytest.raises(GateFailed, match=r"batch of 1: the written graph differs") as raised:
            compare(path, wrong, CONFIG.form, GATE, np.asarray(open_images(small, "test")), [1])
        assert ("than in opset 9, from which it was converted" in str(raised.value)) is is_blamed
        assert "first node that differs is Conv" in str(raised.value)


@pytest.mark.parametrize(("operator", "opset"), [("Upsample", 9), ("Resize", 10)])
@pytest.mark.parametrize("mode", ["linear", "nearest"])
@pytest.mark.parametrize("factor", [2.0, 1.5])
def test_resize_of_an_old_opset_keeps_its_coordinates_b5(
    small: Path, tmp_path: Path, operator: str, opset: int, mode: str, factor: float
) -> None:
    random = np.random.default_rng(0)
    constants = {
        "W": random.normal(size=(4, 3, 2, 2)).astype(np.float32),
        "scales": np.array([1, 1, factor, factor], np.float32),
    }
    layers: list[Any] = [("Conv", ["W"], {"strides": [2, 2]}), (operator, ["scales"], {"mode": mode})]
    onnx.save(chain(layers, constants, opset=opset), tmp_path / "model.onnx")
    report = run(tmp_path / "model.onnx", small, tmp_path / "out", output_kind=OutputKind.values)
    assert min(found.sqnr_db for found in report.differences) > 100 and report.spread_db is None
    [resize] = [
        node for node in read_graph(tmp_path / "out/model.onnx").graph.node if node.op_type == "Resize"
    ]
    attributes = {item.name: item.s for item in resize.attribute}
    assert attributes["coordinate_transformation_mode"] == b"asymmetric"
