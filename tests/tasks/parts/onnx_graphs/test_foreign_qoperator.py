"""Files whose operators compute with integers themselves, as ONNX Runtime's quantizer writes them."""

from collections import Counter
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import ModelProto, TensorProto, helper, numpy_helper
from onnxruntime.quantization import QuantFormat

from benchmarks.peers import quantize_with_onnxruntime
from tasks.core.errors import ArtifactError
from tasks.parts.onnx_graphs.foreign_qdq import check_quantization
from tasks.parts.onnx_graphs.foreign_qoperator import write_pairs
from tasks.parts.onnx_graphs.signal_to_noise import difference
from tasks.parts.onnx_session import open_session

IMAGES_NCHW = np.random.default_rng(1).normal(size=(6, 3, 8, 8)).astype(np.float32)


def float_graph(alpha: float = 1.0) -> ModelProto:
    """A network with each operator that the quantizer writes for integers; `alpha` is that of its Gemm."""
    random = np.random.default_rng(0)
    shapes = {
        "kernel": (4, 3, 3, 3),
        "bias": (4,),
        "deep": (4, 4, 3, 3),
        "mix": (8, 8),
        "head": (5, 8),
        "shift": (5,),
    }
    nodes = [
        helper.make_node("Conv", ["image", "kernel", "bias"], ["maps"], "first", pads=[1] * 4),
        helper.make_node("LeakyRelu", ["maps"], ["bent"], "bend", alpha=0.1),
        helper.make_node("Conv", ["bent", "deep"], ["more"], "second", pads=[1] * 4),
        helper.make_node("Sigmoid", ["more"], ["gates"], "gate"),
        helper.make_node("Mul", ["more", "gates"], ["gated"], "scale"),
        helper.make_node("Add", ["gated", "bent"], ["sum"], "residual"),
        helper.make_node("Concat", ["sum", "maps"], ["both"], "join", axis=1),
        helper.make_node("AveragePool", ["both"], ["halved"], "halve", kernel_shape=[2, 2], strides=[2, 2]),
        helper.make_node("GlobalAveragePool", ["halved"], ["means"], "mean"),
        helper.make_node("Flatten", ["means"], ["features"], "flatten"),
        helper.make_node("MatMul", ["features", "mix"], ["mixed"], "mix"),
        helper.make_node("Softmax", ["mixed"], ["shares"], "share"),
        helper.make_node("Gemm", ["shares", "head", "shift"], ["values"], "head", transB=1, alpha=alpha),
    ]
    image = helper.make_tensor_value_info("image", TensorProto.FLOAT, ["n", 3, 8, 8])
    values = helper.make_tensor_value_info("values", TensorProto.FLOAT, ["n", 5])
    tensors = [
        numpy_helper.from_array(random.normal(size=shape).astype(np.float32) / 2, name)
        for name, shape in shapes.items()
    ]
    graph = helper.make_graph(nodes, "all", [image], [values], tensors)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def quantized(folder: Path, form: QuantFormat, alpha: float = 1.0) -> ModelProto:
    onnx.save(float_graph(alpha), folder / "float.onnx")
    quantize_with_onnxruntime(folder / "float.onnx", IMAGES_NCHW, folder / "quantized.onnx", form)
    return onnx.load(folder / "quantized.onnx")


@pytest.mark.parametrize("alpha", [1.0, 0.5])
def test_operators_of_integers_become_float_operators_between_pairs(tmp_path: Path, alpha: float) -> None:
    given = quantized(tmp_path, QuantFormat.QOperator, alpha)
    integer = [node for node in given.graph.node if node.op_type.startswith("Q") and len(node.input) > 3]
    assert len({node.op_type for node in integer}) >= 9
    written = onnx.load(tmp_path / "quantized.onnx")
    assert write_pairs(written) == len(integer)
    onnx.checker.check_model(written, full_check=True)
    kinds = Counter(node.op_type for node in written.graph.node)
    assert not any(kind.startswith(("QLinear", "QGemm")) for kind in kinds)
    assert {node.op_type for node in float_graph().graph.node} <= set(kinds)
    expected, found = (
        open_session(model, is_optimised=False).run(None, {"image": IMAGES_NCHW})[0]
        for model in (given, written)
    )
    assert difference(expected, found).sqnr_db > 30
    assert write_pairs(written) == 0


def test_weights_keep_a_scale_for_each_channel(tmp_path: Path) -> None:
    """Held against the file that the same quantizer writes with pairs."""
    written, pairs = (quantized(tmp_path, form) for form in (QuantFormat.QOperator, QuantFormat.QDQ))
    write_pairs(written)
    constants = {tensor.name: numpy_helper.to_array(tensor) for tensor in written.graph.initializer}
    axes = {
        constants[node.input[0]].shape: [item.i for item in node.attribute if item.name == "axis"]
        for node in written.graph.node
        if node.op_type == "DequantizeLinear"
        and node.input[0] in constants
        and constants[node.input[1]].size > 1
    }
    assert axes.pop((4, 3, 3, 3)) == axes.pop((4, 4, 3, 3)) == axes.pop((4,)) == [0]
    assert set(map(tuple, axes.values())) <= {(0,), (1,)}
    expected, found = (
        open_session(model, is_optimised=False).run(None, {"image": IMAGES_NCHW})[0]
        for model in (pairs, written)
    )
    assert difference(expected, found).sqnr_db > 30


def test_what_cannot_be_written_between_pairs_stays_and_is_refused(tmp_path: Path) -> None:
    given = quantized(tmp_path, QuantFormat.QOperator)
    [pool] = [node for node in given.graph.node if node.op_type == "QLinearAveragePool"]
    del pool.attribute[:]
    pool.attribute.append(helper.make_attribute("channels_last", 1))
    first = next(node for node in given.graph.node if node.op_type == "QLinearConv")
    given.graph.node.insert(0, helper.make_node("Identity", [first.input[1]], ["computed"], "computed"))
    first.input[1] = "computed"
    write_pairs(given)
    left = [node.op_type for node in given.graph.node if node.op_type.startswith("QLinear")]
    assert sorted(left) == ["QLinearAveragePool", "QLinearConv"]
    with pytest.raises(ArtifactError, match="QLinearConv, which computes with integers itself"):
        check_quantization(given, Path("model.onnx"), is_quantized=True)
