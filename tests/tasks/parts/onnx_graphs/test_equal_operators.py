import numpy as np
import onnx
import pytest
from onnx import ModelProto, TensorProto, helper, numpy_helper

from tasks.parts.onnx_graphs.equal_operators import replace_operators
from tasks.parts.onnx_session import open_session


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


@pytest.mark.parametrize("model", KEPT)
def test_other_axes_and_overlapping_windows_stay(model: ModelProto) -> None:
    before = ModelProto()
    before.CopyFrom(model)
    assert replace_operators(model) == []
    assert model == before
