import numpy as np
import onnx
import pytest
from onnx import ModelProto, TensorProto, helper, numpy_helper

from tasks.parts.onnx_graphs.equal_operators import replace_operators
from tasks.parts.onnx_graphs.macs import conv_macs
from tasks.parts.onnx_graphs.signal_to_noise import difference
from tasks.parts.onnx_session import open_session
from tasks.parts.quantization.qdq import quantizable_nodes


def one_node(
    op_type: str, constants: dict[str, np.ndarray], opset: int = 17, **attributes: object
) -> ModelProto:
    """Return a graph with one operator that reads an image [N, 6, 5, 7] and these constants."""
    graph = helper.make_graph(
        [helper.make_node(op_type, ["image", *constants], ["logits"], "node", **attributes)],
        "one",
        [helper.make_tensor_value_info("image", TensorProto.FLOAT, ["batch", 6, 5, 7])],
        [helper.make_tensor_value_info("logits", TensorProto.FLOAT, None)],
        [numpy_helper.from_array(values, name) for name, values in constants.items()],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=9)
    return onnx.shape_inference.infer_shapes(model)


def random(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).standard_normal(shape).astype(np.float32)


MEANS = [one_node("ReduceMean", {}, axes=[2, 3], keepdims=keepdims) for keepdims in (0, 1)] + [
    one_node("ReduceMean", {"axes": np.array([-1, -2])}, opset=18, keepdims=0),
    one_node("AveragePool", {}, kernel_shape=[5, 7]),
    # EfficientNet's last pool as transformers writes it
    one_node(
        "AveragePool", {}, 19, kernel_shape=[80, 80], strides=[80, 80], ceil_mode=1, count_include_pad=1
    ),
]
TRANSPOSED = [
    one_node("ConvTranspose", {"weight": random(6, 4, 2, 2)}, strides=[2, 2]),
    one_node("ConvTranspose", {"weight": random(6, 4, 3, 3), "bias": random(4)}, strides=[3, 3]),
]
EINSUMS = [
    one_node("Einsum", {"weight": random(*shape)}, equation=equation)
    for equation, shape in (
        ("bchw,cd->bdhw", (6, 4)),
        ("bchw,dc->bhwd", (4, 6)),
        ("bchw,wd", (7, 4)),
        ("...w, wd -> ...d", (7, 4)),
        ("bchw,cwde->bhde", (6, 7, 2, 3)),
        ("bchw,dwce->ebhd", (2, 7, 6, 3)),
    )
]
"""Equations with one and two axes that are summed, or that the weight adds, in any order."""
KEPT = [
    one_node("ReduceMean", {}, axes=[1, 2], keepdims=0),
    one_node("AveragePool", {}, kernel_shape=[5, 5]),
    one_node("AveragePool", {}, kernel_shape=[7, 9], pads=[1, 1, 1, 1]),
    one_node(
        "AveragePool", {}, kernel_shape=[9, 9], strides=[9, 9], auto_pad="SAME_UPPER", count_include_pad=1
    ),
    one_node("ConvTranspose", {"weight": random(6, 4, 3, 3)}, strides=[2, 2]),
    one_node("ConvTranspose", {"weight": random(6, 2, 2, 2)}, strides=[2, 2], group=3),
    one_node("ConvTranspose", {"weight": random(6, 4, 2, 2)}, strides=[2, 2], pads=[1, 1, 0, 0]),
    one_node("Einsum", {"weight": random(6, 7, 4)}, equation="bchw,cwd->bchd"),  # a product for each c
    one_node("Einsum", {"weight": random(7, 4)}, equation="bchw,wd->bcd"),  # h is summed alone
    one_node("Einsum", {"weight": random(6)}, equation="bchw,c->bchw"),
]


@pytest.mark.parametrize("model", MEANS + TRANSPOSED)
def test_the_replacement_computes_the_same(model: ModelProto) -> None:
    before, images_NCHW = ModelProto(), random(2, 6, 5, 7)
    before.CopyFrom(model)
    assert len(replace_operators(model)) == 1
    onnx.checker.check_model(model, full_check=True)
    assert not {node.op_type for node in model.graph.node} & {"AveragePool", "ConvTranspose", "ReduceMean"}
    expected, found = (open_session(graph).run(None, {"image": images_NCHW})[0] for graph in (before, model))
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("model", EINSUMS)
def test_an_einsum_with_a_constant_weight_becomes_a_matmul_that_int8_can_read_a6(model: ModelProto) -> None:
    before, images_NCHW = ModelProto(), random(2, 6, 5, 7)
    before.CopyFrom(model)
    assert replace_operators(model) == ["1 Einsum with a constant weight written as MatMul"]
    onnx.checker.check_model(model, full_check=True)
    [product] = quantizable_nodes(model, ["MatMul"])
    assert product.name == "node" and conv_macs(model) == conv_macs(before)
    expected, found = (open_session(graph).run(None, {"image": images_NCHW})[0] for graph in (before, model))
    assert difference(expected, found).sqnr_db > 120


def test_an_einsum_whose_first_operand_is_the_weight_becomes_a_matmul_a6() -> None:
    model = one_node("Einsum", {"weight": random(6, 4)}, equation="cd,bchw->bdhw")
    model.graph.node[0].input[:] = ["weight", "image"]
    before = ModelProto()
    before.CopyFrom(model)
    assert len(replace_operators(model)) == 1
    expected, found = (open_session(m).run(None, {"image": random(2, 6, 5, 7)})[0] for m in (before, model))
    assert difference(expected, found).sqnr_db > 120


@pytest.mark.parametrize("model", KEPT)
def test_other_axes_and_overlapping_windows_stay(model: ModelProto) -> None:
    before = ModelProto()
    before.CopyFrom(model)
    assert replace_operators(model) == []
    assert model == before
