"""Rewrites that change what a graph computes are named, and left out or refused, before a runtime sees the graph."""

import logging
from collections.abc import Callable

import numpy as np
import onnx
import pytest
from onnx import ModelProto, helper, numpy_helper

from tasks.core.errors import BuildFailed
from tasks.parts.builders.graph_rewrites import fuse_activations
from tasks.parts.onnx_graphs.checked_rewrite import Rewrite, apply, checked_rewrite
from tasks.parts.onnx_graphs.int8_activations import activations_to_int8
from tasks.parts.onnx_graphs.int8_weights import weights_to_7_bits
from tasks.parts.onnx_graphs.signal_to_noise import agreement_db
from tests.tasks import tiny_networks as tiny
from tests.tasks.parts.onnx_graphs.test_equal_operators import one_node

Graphs = tuple[ModelProto, ModelProto, np.ndarray]


@pytest.fixture(scope="module")
def graphs() -> Graphs:
    """A float graph, its Q/DQ graph and images."""
    return tiny.quantized(tiny.Branched, tiny.OP_TYPES)


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


def copied(graph: ModelProto) -> ModelProto:
    copy = ModelProto()
    copy.CopyFrom(graph)
    return copy


def other_bias(graph: ModelProto) -> ModelProto:
    """Change the biases of one layer by 1 %, which INT8 would hide."""
    changed = copied(graph)
    layer = [node for node in changed.graph.node if node.op_type == "Conv"][-2]
    bias = next(tensor for tensor in changed.graph.initializer if tensor.name == layer.input[2])
    bias.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(bias) * np.float32(1.01), bias.name))
    return changed


def lost_relu(graph: ModelProto) -> ModelProto:
    changed = copied(graph)
    relu = next(node for node in changed.graph.node if node.op_type == "Relu")
    relu.op_type = "Identity"
    return changed


def small_scale(graph: ModelProto) -> ModelProto:
    """Let one pair clip: the float form stays the same."""
    changed = copied(graph)
    pair = [node for node in changed.graph.node if node.op_type == "QuantizeLinear"][3]
    scale = next(tensor for tensor in changed.graph.initializer if tensor.name == pair.input[1])
    scale.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(scale) / np.float32(16), scale.name))
    return changed


def unreadable(graph: ModelProto) -> ModelProto:
    changed = copied(graph)
    changed.graph.node[-1].op_type = "Nonsense"
    return changed


def named_better(graph: ModelProto) -> ModelProto:
    changed = copied(graph)
    changed.graph.name = "better"
    return changed


@pytest.mark.parametrize(("index", "wrong", "node"), [(0, lost_relu, "Identity"), (1, other_bias, "Conv")])
def test_wrong_rewrite_is_left_out_and_the_others_stay_a3(
    graphs: Graphs,
    caplog: pytest.LogCaptureFixture,
    index: int,
    wrong: Callable[[ModelProto], ModelProto],
    node: str,
) -> None:
    graph, images_NCHW = graphs[index], graphs[2]
    rewrites = [
        Rewrite("named_better", named_better, is_optional=True),
        Rewrite("wrong", wrong, is_optional=True),
    ]
    with caplog.at_level(logging.WARNING):
        found = checked_rewrite(graph, rewrites, images_NCHW, where="Target cpu")
    assert found == named_better(graph)
    [message] = warnings_of(caplog)
    assert message.startswith("Target cpu: the rewrite wrong changes what the graph computes: they agree by ")
    assert "expected 80.0 dB or more on 2 calibration images" in message
    assert f"the first node that differs is {node} '" in message


def test_rewrite_that_a_target_needs_ends_with_its_name_the_node_and_the_difference_a3(
    graphs: Graphs,
) -> None:
    with pytest.raises(
        BuildFailed,
        match=r"Target gpu: the rewrite lost_relu changes.*agree by \d+\.\d dB, expected 80\.0 dB or more on 2 "
        r"calibration images; the first node that differs is Identity '.*Relu.*'.*another target",
    ):
        checked_rewrite(graphs[0], [Rewrite("lost_relu", lost_relu)], graphs[2], where="Target gpu")
    with pytest.raises(
        BuildFailed, match=r"the rewrite unreadable.*ONNX Runtime does not run it \(.*Nonsense"
    ):
        checked_rewrite(graphs[0], [Rewrite("unreadable", unreadable)], graphs[2], where="Target gpu")


def test_wrong_scale_shows_in_the_rounding_alone_a3(graphs: Graphs) -> None:
    _, quantized, images_NCHW = graphs
    with pytest.raises(
        BuildFailed, match=r"the rewrite small_scale.*agree by .* the first node that differs is"
    ):
        checked_rewrite(quantized, [Rewrite("small_scale", small_scale)], images_NCHW, where="Target gpu")


def shifted_weight(graph: ModelProto) -> ModelProto:
    """Give the last layer weights that are three levels too small: 10 dB hide that."""
    changed = weights_to_7_bits(graph)
    weight = [tensor for tensor in changed.graph.initializer if tensor.name.endswith(":7bit")][-2]
    levels = numpy_helper.to_array(weight)
    assert levels.dtype == np.int8
    weight.CopyFrom(numpy_helper.from_array(np.maximum(levels, -60) - np.int8(3), weight.name))
    return changed


def test_rounded_weights_are_within_half_a_step_of_their_own_a3(graphs: Graphs) -> None:
    _, quantized, images_NCHW = graphs
    right = Rewrite("weights_to_7_bits", weights_to_7_bits, rounds_weights=True)
    found = checked_rewrite(quantized, [right], images_NCHW, where="Target cpu", min_int8_db=10)
    assert found == weights_to_7_bits(quantized) != quantized
    wrong = Rewrite("shifted_weight", shifted_weight, rounds_weights=True)
    with pytest.raises(
        BuildFailed, match=r"the rewrite shifted_weight.*weight '.*' changes by .* half a step"
    ):
        checked_rewrite(quantized, [wrong], images_NCHW, where="Target cpu", min_int8_db=10)
    wrong = Rewrite("other_bias", other_bias, rounds_weights=True)
    with pytest.raises(BuildFailed, match=r"the rewrite other_bias.*constant '.*' is another one"):
        checked_rewrite(quantized, [wrong], images_NCHW, where="Target cpu", min_int8_db=10)


def test_wrong_scale_beside_rounded_weights_shows_too_a3(graphs: Graphs) -> None:
    _, quantized, images_NCHW = graphs

    def both(graph: ModelProto) -> ModelProto:
        return small_scale(weights_to_7_bits(graph))

    rewrites = [
        Rewrite("weights_to_7_bits", weights_to_7_bits, rounds_weights=True),
        Rewrite("small_scale", small_scale),
    ]
    with pytest.raises(
        BuildFailed, match=r"the rewrite small_scale.*agree by .* the first node that differs is"
    ):
        checked_rewrite(quantized, rewrites, images_NCHW, where="Target cpu")
    assert apply(rewrites, quantized) == both(quantized)


@pytest.mark.parametrize("network_type", [tiny.Straight, tiny.Branched, tiny.Tokens, tiny.FullSize])
def test_encodings_that_round_otherwise_pass_a3(network_type: type, caplog: pytest.LogCaptureFixture) -> None:
    _, quantized, images_NCHW = tiny.quantized(network_type, (*tiny.OP_TYPES, "MatMul", "Gemm"))
    rewrites = [
        Rewrite("activations_to_int8", activations_to_int8),
        Rewrite("fuse_activations", fuse_activations, is_optional=True),
    ]
    found = checked_rewrite(quantized, rewrites, images_NCHW, where="Target gpu")
    assert found == apply(rewrites, quantized) and not warnings_of(caplog)


def test_outputs_near_zero_and_outputs_that_are_no_numbers_are_no_reason_a3() -> None:
    """Rounding of zeros is no difference, and a graph that gives NaN is refused by itself."""
    image = np.ones((1, 6, 5, 7), np.float32)
    tiny_values = one_node("Mul", {"factor": np.float32(1e-9).reshape(1)})

    def scaled(graph: ModelProto) -> ModelProto:
        changed = copied(graph)
        changed.graph.initializer[0].CopyFrom(numpy_helper.from_array(np.float32(3e-9).reshape(1), "factor"))
        return changed

    rewrites = [Rewrite("scaled", scaled)]
    assert checked_rewrite(tiny_values, rewrites, image, where="here") == scaled(tiny_values)
    undefined = one_node("Mul", {"factor": np.float32(np.nan).reshape(1)})
    assert checked_rewrite(undefined, rewrites, image, where="here") == scaled(undefined)
    assert agreement_db(np.zeros(3), np.full(3, 1e-7)) == 200 > agreement_db(np.zeros(3), np.full(3, 1e-5))
    numbers = one_node("Mul", {"factor": np.float32(1.0).reshape(1)})
    with pytest.raises(BuildFailed, match=r"the first node that differs is Mul 'node'"):
        checked_rewrite(numbers, rewrites, image, where="here")


def test_float_graph_may_differ_by_its_own_spread_a3() -> None:
    """A difference of large numbers cancels: the graph itself is another one at another level of optimisation."""
    nodes = [
        helper.make_node("Add", ["image", "large"], ["shifted"], "shifted"),
        helper.make_node("Sub", ["shifted", "large"], ["logits"], "logits"),
    ]
    large = numpy_helper.from_array(np.full(1, 1e4, np.float32), "large")
    image, logits = (
        helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, [1, 6, 5, 7])
        for name in ("image", "logits")
    )
    graph = helper.make_graph(nodes, "cancelling", [image], [logits], [large])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    values = np.random.default_rng(0).standard_normal((2, 6, 5, 7)).astype(np.float32)

    def without(graph: ModelProto) -> ModelProto:
        changed = copied(graph)
        del changed.graph.node[1:]
        changed.graph.node[0].op_type, changed.graph.node[0].output[0] = "Identity", "logits"
        del changed.graph.node[0].input[1:]
        return changed

    with pytest.raises(BuildFailed, match=r"agree by (6|7)\d\.\d dB, expected 80\.0 dB"):
        checked_rewrite(model, [Rewrite("without", without)], values, where="here")
