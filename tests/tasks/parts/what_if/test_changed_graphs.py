"""Graphs with other widths, and with nodes taken out of INT8, compute what they should."""

import numpy as np
import pytest
from onnx import ModelProto, TensorProto, helper, numpy_helper

from tasks.parts.onnx_graphs.macs import layer_sizes, quantized_layers
from tasks.parts.onnx_session import open_session
from tasks.parts.what_if.float_nodes import leave_int8
from tasks.parts.what_if.widths import find_width_groups, with_widths
from tests.tasks.parts.explain.engines import convolutions, quantize
from tests.tasks.tiny_networks import OP_TYPES, Branched, Straight, quantized


def run(model: ModelProto, images_NCHW: np.ndarray) -> np.ndarray:
    session = open_session(model, is_optimised=False)
    found: np.ndarray = session.run(None, {session.get_inputs()[0].name: images_NCHW})[0]
    return found


@pytest.fixture(scope="module", params=[Straight, Branched])
def graphs(request: pytest.FixtureRequest) -> tuple[ModelProto, ModelProto, np.ndarray]:
    """Float graph, Q/DQ graph and images of a network with depthwise layers, sums, gates and concatenation."""
    return quantized(request.param, OP_TYPES)


@pytest.mark.parametrize("index", [0, 1], ids=["float", "quantized"])
def test_padded_channels_change_nothing(
    graphs: tuple[ModelProto, ModelProto, np.ndarray], index: int
) -> None:
    model, images_NCHW = graphs[index], graphs[2][:1]
    groups = find_width_groups(model)
    assert groups and all(group.width == 8 for group in groups)
    padded = with_widths(model, {name: 16 for group in groups for name in group.layers})
    assert sum(size.macs for size in layer_sizes(padded).values()) > sum(
        size.macs for size in layer_sizes(model).values()
    )
    np.testing.assert_allclose(run(padded, images_NCHW), run(model, images_NCHW), rtol=1e-4, atol=1e-4)


def test_cut_channels_are_those_of_all_that_meet_in_a_sum() -> None:
    model = convolutions(16, 24, 24, 16, has_sum=True)
    groups = find_width_groups(model)
    assert [(set(group.layers), group.width) for group in groups] == [({"conv0", "conv1"}, 24)]
    cut = layer_sizes(with_widths(model, {"conv0": 16, "conv1": 16}))
    assert [(size.channels_in, size.channels_out) for size in cut.values()] == [(16, 16)] * 3
    run(with_widths(model, {"conv0": 16, "conv1": 16}), np.zeros((1, 16, 16, 16), np.float32))


def test_channels_of_the_output_stay() -> None:
    model = convolutions(16, 24, 24)
    assert [group.layers for group in find_width_groups(model)] == [("conv0",)]


def test_nodes_leave_int8_with_the_pairs_that_nothing_else_needs() -> None:
    model, images_NCHW = convolutions(16, 32, 32, 32, 32), np.ones((1, 16, 16, 16), np.float32)
    full = quantize(model)
    for keeps_pairs in (True, False):
        changed = leave_int8(full, {"conv1", "relu1", "conv2", "relu2"}, keeps_pairs=keeps_pairs)
        assert [node.name for node in quantized_layers(changed)] == ["conv0", "conv3"]
        pairs = [node.input[0] for node in changed.graph.node if node.op_type == "QuantizeLinear"]
        kept = ["image", "r1", "r3"] if keeps_pairs else ["image", "r3"]
        assert pairs == [*kept, "values:float"]
        np.testing.assert_allclose(
            run(changed, images_NCHW), run(full, images_NCHW), atol=0.2
        )  # rounding differs


def test_graph_without_int8_is_the_float_graph_with_rounded_weights(
    graphs: tuple[ModelProto, ModelProto, np.ndarray],
) -> None:
    model, full, images_NCHW = graphs
    changed = leave_int8(full, {node.name for node in model.graph.node}, keeps_pairs=True)
    assert not any(node.op_type == "QuantizeLinear" for node in changed.graph.node)
    expected, found = run(model, images_NCHW[:1]), run(changed, images_NCHW[:1])
    assert np.abs(found - expected).max() < 0.05 * np.abs(expected).max()


def test_weights_and_biases_with_one_scale_and_no_axis_leave_int8_b3() -> None:
    """As `quantize_static` without `per_channel` writes them: the axis is 1 where none is named, even of a vector."""
    constants = {
        "levels": np.array([[100, -50], [20, 127]], np.int8),
        "scale": np.array([0.01], np.float32),
        "zero": np.zeros(1, np.int8),
        "bias_levels": np.array([1000, -3000], np.int32),
        "bias_scale": np.array([0.001], np.float32),
        "bias_zero": np.zeros(1, np.int32),
    }
    nodes = [
        helper.make_node("QuantizeLinear", ["image", "scale", "zero"], ["image:q"], "image:q"),
        helper.make_node("DequantizeLinear", ["image:q", "scale", "zero"], ["image:r"], "image:r"),
        helper.make_node("DequantizeLinear", ["levels", "scale", "zero"], ["weight"], "weight"),
        helper.make_node("DequantizeLinear", ["bias_levels", "bias_scale", "bias_zero"], ["bias"], "bias"),
        helper.make_node("Gemm", ["image:r", "weight", "bias"], ["values"], "layer"),
    ]
    image, values = (
        helper.make_tensor_value_info(name, TensorProto.FLOAT, [1, 2]) for name in ("image", "values")
    )
    tensors = [numpy_helper.from_array(value, name) for name, value in constants.items()]
    graph = helper.make_graph(nodes, "gemm", [image], [values], tensors)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    changed = leave_int8(model, {"layer"}, keeps_pairs=True)
    assert [node.op_type for node in changed.graph.node] == ["Gemm"]
    np.testing.assert_allclose(run(changed, np.ones((1, 2), np.float32)), [[2.2, -2.23]], rtol=1e-6)
