"""What files of other tools hold besides plain float arithmetic: infinities, doubles, branches, small integers."""

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import onnxruntime
import pytest
import yaml
from onnx import ModelProto, TensorProto, helper, numpy_helper

from tasks.core.config import typed_config
from tasks.core.errors import ArtifactError
from tasks.parts.data.dataset import normalise, open_images
from tasks.parts.onnx_graphs.foreign_output import OutputKind
from tasks.parts.onnx_graphs.graph import read_graph
from tasks.quantize_ptq import Config as PtqConfig
from tasks.quantize_ptq import quantize_ptq
from tests.tasks.test_import_gates import chain
from tests.tasks.test_import_onnx import CONFIG, REPOSITORY, images, run

RANDOM = np.random.default_rng(0)
WEIGHTS_OIHW = RANDOM.normal(size=(4, 3, 3, 3)).astype(np.float32)
CONV: tuple[str, list[str], dict[str, Any]] = ("Conv", ["W"], {"pads": [1] * 4})
POOL: tuple[str, list[str], dict[str, Any]] = ("GlobalAveragePool", [], {})


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return images(tmp_path_factory.mktemp("small"), 32)


@pytest.fixture(scope="module")
def labelled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return images(tmp_path_factory.mktemp("labelled"), 32, classes=("a", "b", "c", "d"))


def check_same(file: Path, graph: Path, data: Path, least_db: float = 80.0) -> None:
    """Hold a written graph against its file, both in ONNX Runtime."""
    images_NCHW = normalise(np.asarray(open_images(data, "test")), tuple(CONFIG.mean), tuple(CONFIG.std))
    found, expected = (
        onnxruntime.InferenceSession(path).run(None, {"pixels": images_NCHW})[0] for path in (graph, file)
    )
    np.testing.assert_allclose(found.ravel(), expected.ravel(), atol=np.abs(expected).max() * 1e-4)


def attention(mask: float) -> ModelProto:
    """Return one head of attention over 64 places, of which each sees itself and those before it."""
    seen_TT = np.where(np.tril(np.ones((64, 64))) > 0, 0, mask).astype(np.float32)
    names = ("pixels", "W", "maps", "flat", "places", "scores", "masked", "shares", "mixed", "mean", "logits")
    pixels, weights, maps, flat, places, scores, masked, shares, mixed, mean, logits = names
    nodes = [
        helper.make_node("Conv", [pixels, weights], [maps], "conv", strides=[4, 4], pads=[1, 1, 0, 0]),
        helper.make_node("Reshape", [maps, "shape"], [flat], "reshape"),
        helper.make_node("Transpose", [flat], [places], "transpose", perm=[0, 2, 1]),
        helper.make_node("MatMul", [places, flat], [scores], "scores"),
        helper.make_node("Add", [scores, "mask"], [masked], "mask"),
        helper.make_node("Softmax", [masked], [shares], "softmax", axis=-1),
        helper.make_node("MatMul", [shares, places], [mixed], "mix"),
        helper.make_node("ReduceMean", [mixed], [mean], "mean", axes=[1], keepdims=0),
        helper.make_node("MatMul", [mean, "head"], [logits], "head"),
    ]
    constants = {
        "W": WEIGHTS_OIHW,
        "shape": np.array([0, 4, 64]),
        "mask": seen_TT,
        "head": RANDOM.normal(size=(4, 4)).astype(np.float32),
    }
    tensors = [numpy_helper.from_array(value, name) for name, value in constants.items()]
    values = [
        helper.make_tensor_value_info(name, TensorProto.FLOAT, shape)
        for name, shape in (("pixels", ["n", 3, 32, 32]), ("logits", ["n", 4]))
    ]
    graph = helper.make_graph(nodes, "attention", values[:1], values[1:], tensors)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def test_infinite_mask_is_accepted_and_calibrated_b6(labelled: Path, tmp_path: Path) -> None:
    file, graph = tmp_path / "model.onnx", tmp_path / "out/model.onnx"
    onnx.save(attention(-np.inf), file)
    report = run(file, labelled, tmp_path / "out")
    assert "infinity made 3.4e+38 in 1 constants" in report.rewritten
    assert min(found.sqnr_db for found in report.differences) > 80
    section = yaml.safe_load((REPOSITORY / "conf/quantize_ptq/default.yaml").read_text(encoding="utf-8"))
    changes = {"num_images": 4, "num_val_images": 4, "calibrators": ["minmax"], "activations": ["uint8"]}
    cfg: PtqConfig = typed_config(PtqConfig, {**section, **changes}, "quantize_ptq")
    (tmp_path / "ptq").mkdir()
    assert quantize_ptq(cfg, model=graph, data=labelled, out=tmp_path / "ptq").agreement == 1
    check_same(file, graph, labelled)


def test_pad_with_infinity_is_the_padding_of_the_pool_behind_b6(small: Path, tmp_path: Path) -> None:
    constants = {"W": WEIGHTS_OIHW, "pads": np.array([0, 0, 1, 1, 0, 0, 0, 1]), "low": np.float32(-np.inf)}
    layers = [
        CONV,
        ("Pad", ["pads", "low"], {}),
        ("MaxPool", [], {"kernel_shape": [3, 3], "strides": [2, 2]}),
    ]
    onnx.save(chain([*layers, POOL], constants), tmp_path / "model.onnx")
    run(tmp_path / "model.onnx", small, tmp_path / "out")
    graph = read_graph(tmp_path / "out/model.onnx").graph
    assert [node.op_type for node in graph.node] == ["Conv", "MaxPool", "GlobalAveragePool", "Flatten"]
    check_same(tmp_path / "model.onnx", tmp_path / "out/model.onnx", small)


def test_infinite_weight_of_a_layer_is_a_broken_checkpoint_b6(small: Path, tmp_path: Path) -> None:
    weights_OIHW = WEIGHTS_OIHW.copy()
    weights_OIHW[0, 0, 0, 0] = np.inf
    onnx.save(chain([CONV, POOL], {"W": weights_OIHW}), tmp_path / "model.onnx")
    with pytest.raises(ArtifactError, match="tensor 'W' holds NaN or infinity, expected finite weights"):
        run(tmp_path / "model.onnx", small, tmp_path / "out")


def test_mean_in_double_precision_is_accepted_b6(small: Path, tmp_path: Path) -> None:
    layers = [
        CONV,
        ("Cast", [], {"to": TensorProto.DOUBLE}),
        ("ReduceMean", [], {"axes": [2, 3], "keepdims": 1}),
        ("Cast", [], {"to": TensorProto.FLOAT}),
    ]
    onnx.save(chain(layers, {"W": WEIGHTS_OIHW}), tmp_path / "model.onnx")
    run(tmp_path / "model.onnx", small, tmp_path / "out")
    assert not any(
        item.i == TensorProto.DOUBLE
        for node in read_graph(tmp_path / "out/model.onnx").graph.node
        for item in node.attribute
        if item.name == "to"
    )
    check_same(tmp_path / "model.onnx", tmp_path / "out/model.onnx", small)


def branching(condition: str) -> ModelProto:
    """Return a convolution, and an If that flattens pooled maps of one row, as exports of Squeeze have."""
    outer = helper.make_tensor_value_info("flat", TensorProto.FLOAT, None)
    then = helper.make_graph(
        [helper.make_node("Flatten", ["pooled"], ["flat"], "flatten", axis=1)], "then", [], [outer]
    )
    other = helper.make_graph(
        [helper.make_node("Identity", ["pooled"], ["same"], "same")],
        "else",
        [],
        [helper.make_tensor_value_info("same", TensorProto.FLOAT, None)],
    )
    model = chain(
        [CONV, POOL], {"W": WEIGHTS_OIHW, "one": np.array(1), "row": np.array(2), "yes": np.array(True)}
    )
    graph = model.graph
    graph.node[-1].output[0] = "pooled"
    if condition == "computed":
        graph.node.extend(
            [
                helper.make_node("Shape", ["pooled"], ["sizes"], "sizes"),
                helper.make_node("Gather", ["sizes", "row"], ["rows"], "rows"),
                helper.make_node("Equal", ["rows", "one"], ["is_one"], "is_one"),
            ]
        )
    if condition == "batch":
        graph.node.extend(
            [
                helper.make_node("Shape", ["pooled"], ["sizes"], "sizes", end=1),
                helper.make_node("Squeeze", ["sizes"], ["number"], "number"),
                helper.make_node("Equal", ["number", "one"], ["is_one"], "is_one"),
            ]
        )
    name = "yes" if condition == "constant" else "is_one"
    graph.node.append(helper.make_node("If", [name], ["answer"], "if", then_branch=then, else_branch=other))
    return model


@pytest.mark.parametrize("condition", ["constant", "computed"])
def test_branch_of_a_known_condition_is_taken_b6(small: Path, tmp_path: Path, condition: str) -> None:
    onnx.save(branching(condition), tmp_path / "model.onnx")
    report = run(tmp_path / "model.onnx", small, tmp_path / "out")
    assert "1 If with a known condition replaced by their branch" in report.rewritten
    graph = read_graph(tmp_path / "out/model.onnx").graph
    assert [node.op_type for node in graph.node] == ["Conv", "GlobalAveragePool", "Flatten"]
    check_same(tmp_path / "model.onnx", tmp_path / "out/model.onnx", small)


def test_branch_that_the_batch_decides_is_refused_b6(small: Path, tmp_path: Path) -> None:
    onnx.save(branching("batch"), tmp_path / "model.onnx")
    with pytest.raises(
        ArtifactError, match=r"1 nodes contain subgraphs .* image or the batch \(first: If 'if'\)"
    ):
        run(tmp_path / "model.onnx", small, tmp_path / "out")


LEVELS = {
    "int8": (np.int8, 100),
    "int4": (ml_dtypes.int4, 7),
    "float8": (ml_dtypes.float8_e4m3fn, 100),
}


def weight_only(kind: str, block: int = 0) -> ModelProto:
    """Return a convolution of 1x1 whose weights alone are quantized, per channel or in blocks of their inputs."""
    dtype, largest = LEVELS[kind]
    levels_OIHW = RANDOM.integers(-largest, largest, (4, 4, 1, 1)).astype(dtype)
    steps = RANDOM.uniform(0.01, 0.02, (4, 4 // block, 1, 1) if block else 4).astype(np.float32)
    model = chain(
        [("Conv", ["first"], {}), ("Conv", ["W"], {}), POOL], {"first": WEIGHTS_OIHW[..., :1, :1]}, opset=21
    )
    model.ir_version = 10
    constants = {"levels": levels_OIHW, "steps": steps}
    model.graph.initializer.extend(numpy_helper.from_array(value, name) for name, value in constants.items())
    attributes = {"axis": 1, "block_size": block} if block else {"axis": 0}
    model.graph.node.insert(
        0, helper.make_node("DequantizeLinear", ["levels", "steps"], ["W"], "dq", **attributes)
    )
    return model


@pytest.mark.parametrize(("kind", "block"), [("int8", 0), ("int4", 0), ("int4", 2), ("float8", 0)])
def test_quantized_weights_alone_become_floats_b6(small: Path, tmp_path: Path, kind: str, block: int) -> None:
    onnx.save(weight_only(kind, block), tmp_path / "model.onnx")
    report = run(tmp_path / "model.onnx", small, tmp_path / "out")
    assert "quantized weights made floats" in report.rewritten
    assert min(found.sqnr_db for found in report.differences) > 80
    graph = read_graph(tmp_path / "out/model.onnx").graph
    assert [node.op_type for node in graph.node] == ["Conv", "Conv", "GlobalAveragePool", "Flatten"]
    with pytest.raises(ArtifactError, match=r"only weights are quantized, .* Choose model=onnx "):
        run(tmp_path / "model.onnx", small, tmp_path / "quantized", is_quantized=True)


@pytest.mark.parametrize("is_quantized", [False, True])
@pytest.mark.parametrize(("kind", "name"), [("int4", "int4"), ("float8", "float8e4m3fn")])
def test_levels_that_engines_do_not_have_are_refused_in_one_sentence_b6(
    small: Path, tmp_path: Path, kind: str, name: str, is_quantized: bool
) -> None:
    model = weight_only(kind)
    zero = numpy_helper.from_array(np.zeros((), LEVELS[kind][0]), "zero")
    model.graph.initializer.extend([zero, numpy_helper.from_array(np.float32(0.1), "step")])
    pair = [
        helper.make_node("QuantizeLinear", ["t0", "step", "zero"], ["q"], "Q"),
        helper.make_node("DequantizeLinear", ["q", "step", "zero"], ["d"], "D"),
    ]
    model.graph.node[2].input[0] = "d"
    for node in reversed(pair):
        model.graph.node.insert(2, node)
    onnx.save(model, tmp_path / "model.onnx")
    text = rf"node 'Q' \(QuantizeLinear\) has levels of type {name}, expected int8.*Use the float file: model=onnx "
    with pytest.raises(ArtifactError, match=text):
        run(tmp_path / "model.onnx", small, tmp_path / "out", is_quantized=is_quantized)


@pytest.mark.parametrize("opset", [11, 13, 17, 18, 20])
def test_zeros_in_front_of_a_maximum_stay_there(opset: int, small: Path, tmp_path: Path) -> None:
    """ONNX Runtime moves them into the MaxPool, which pads with less than any number."""
    amounts, window = np.array([0, 0, 1, 1, 0, 0, 1, 1]), {"kernel_shape": [3, 3], "strides": [2, 2]}
    constants = {
        "W": WEIGHTS_OIHW,
        "b": np.full(4, -20, np.float32),
        "amounts": amounts,
        "zero": np.float32(0),
    }
    nodes = [
        ("Conv", ["W", "b"], {"pads": [1] * 4}),
        ("Pad", ["amounts", "zero"], {}),
        ("MaxPool", [], window),
    ]
    onnx.save(chain(nodes, constants, opset=opset), file := tmp_path / "model.onnx")
    report = run(file, small, tmp_path / "out", output_kind=OutputKind.values)
    graph = tmp_path / "out" / "model.onnx"
    images_NCHW = normalise(np.asarray(open_images(small, "test")), tuple(CONFIG.mean), tuple(CONFIG.std))
    plain = onnxruntime.SessionOptions()
    plain.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    expected = onnxruntime.InferenceSession(file, plain).run(None, {"pixels": images_NCHW})[0]
    found = onnxruntime.InferenceSession(graph).run(None, {"pixels": images_NCHW})[0]
    assert (expected[..., 0, :] == 0).all() and (expected[..., 1:, 1:] < 0).all()
    np.testing.assert_allclose(found.reshape(expected.shape), expected, rtol=1e-4, atol=1e-4)
    assert "1 Pad with zeros kept in front of the MaxPool behind" in report.rewritten


def test_zeros_between_a_relu_and_a_maximum_may_move(small: Path, tmp_path: Path) -> None:
    amounts, window = np.array([0, 0, 1, 1, 0, 0, 1, 1]), {"kernel_shape": [3, 3], "strides": [2, 2]}
    nodes = [CONV, ("Relu", [], {}), ("Pad", ["amounts"], {}), ("MaxPool", [], window)]
    model = chain(nodes, {"W": WEIGHTS_OIHW, "amounts": amounts}, opset=13)
    onnx.save(model, file := tmp_path / "model.onnx")
    report = run(file, small, tmp_path / "out", output_kind=OutputKind.values)
    graph = tmp_path / "out" / "model.onnx"
    assert report.opset == 13 and not any("kept in front" in change for change in report.rewritten)
    check_same(file, graph, small)
