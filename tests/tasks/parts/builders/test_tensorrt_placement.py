"""Where pairs stand in the graphs that TensorRT gets, in architectures of others."""

import logging

import numpy as np
import onnx
import pytest
from onnx import ModelProto, helper, numpy_helper

from benchmarks.placement import MEAN, NETWORKS, STD, draw_images, imported, quantized
from flows.params import compose_params
from tasks.core.config import typed_config
from tasks.parts.builders.graph_rewrites import rewrites_for
from tasks.parts.builders.tensorrt_placement import (
    equal_steps_at_concat,
    residual_pairs_alone,
    vector_products_in_float,
)
from tasks.parts.data.dataset import normalise
from tasks.parts.engines.target import Target
from tasks.parts.onnx_graphs.checked_rewrite import checked_rewrite
from tasks.parts.onnx_graphs.graph import index_graph
from tasks.parts.onnx_graphs.int8_activations import activations_to_int8
from tasks.parts.onnx_graphs.macs import quantized_layers
from tasks.parts.onnx_graphs.pairs import rounded_by_pair
from tasks.parts.onnx_graphs.signal_to_noise import difference
from tasks.parts.onnx_session import open_session

IMAGES_NCHW = normalise(draw_images(4), MEAN, STD)


def symmetric(network: str) -> ModelProto:
    return activations_to_int8(quantized(imported(NETWORKS[network]), IMAGES_NCHW))


def num_pairs_read(model: ModelProto, op_type: str) -> list[int]:
    """Return how many inputs of each node of a type come from a pair."""
    makers = index_graph(model.graph).makers
    nodes = [node for node in model.graph.node if node.op_type == op_type]
    return [sum(rounded_by_pair(name, makers) is not None for name in node.input) for node in nodes]


def logits(model: ModelProto) -> np.ndarray:
    onnx.checker.check_model(model, full_check=True)
    found: np.ndarray = open_session(model, is_optimised=False).run(None, {"image": IMAGES_NCHW})[0]
    return found


def test_residual_addition_reads_the_sums_of_its_convolution_and_the_shortcut_in_int8() -> None:
    graph = symmetric("residual")
    assert set(num_pairs_read(graph, "Add")) == {2}
    fused = residual_pairs_alone(graph)
    assert set(num_pairs_read(fused, "Add")) == {1}
    makers = index_graph(fused.graph).makers
    for node in fused.graph.node:
        if node.op_type == "Add":
            [exact] = [name for name in node.input if rounded_by_pair(name, makers) is None]
            assert makers[exact].op_type == "Conv"
    assert difference(logits(imported(NETWORKS["residual"])), logits(fused)).sqnr_db > 30
    assert len(quantized_layers(fused)) == len(quantized_layers(graph))


def test_sum_that_another_node_reads_rounded_keeps_its_pair() -> None:
    graph = symmetric("residual")
    index = index_graph(graph.graph)
    [first, *_] = [node for node in graph.graph.node if node.op_type == "Add"]
    for name in first.input:
        graph.graph.node.append(helper.make_node("Identity", [name], [f"{name}:too"], f"{name}:reader"))
        graph.graph.output.append(helper.make_tensor_value_info(f"{name}:too", onnx.TensorProto.FLOAT, None))
    kept = index_graph(residual_pairs_alone(graph).graph).makers[first.output[0]]
    assert kept.input == first.input and index.makers[first.input[0]].op_type == "DequantizeLinear"


@pytest.mark.parametrize(("network", "num_vectors"), [("squeeze_excite", 5), ("gemm", 2), ("residual", 1)])
def test_products_of_one_row_read_float(network: str, num_vectors: int) -> None:
    graph = symmetric(network)
    rewritten = vector_products_in_float(graph)
    assert len(quantized_layers(graph)) - len(quantized_layers(rewritten)) == num_vectors
    assert difference(logits(imported(NETWORKS[network])), logits(rewritten)).sqnr_db > 30
    index = index_graph(rewritten.graph)
    for node in rewritten.graph.node:
        if node.op_type in ("Flatten", "Reshape"):
            assert rounded_by_pair(node.input[0], index.makers) is None, "leads to the classifier alone"


def test_inputs_and_output_of_a_concat_have_one_scale() -> None:
    graph = symmetric("channel_shuffle")
    before, after = scales_at_concat(graph), scales_at_concat(equal_steps_at_concat(graph))
    assert any(len(set(scales)) > 1 for scales in before) and len(before) == len(after)
    for old, new in zip(before, after, strict=True):
        assert len(set(new)) == 1 and new[0] >= max(old)


def scales_at_concat(model: ModelProto) -> list[list[float]]:
    index = index_graph(model.graph)
    scale_of = {
        name: float(numpy_helper.to_array(index.constants[node.input[1]]))
        for node in model.graph.node
        if node.op_type in ("QuantizeLinear", "DequantizeLinear") and not index.constants[node.input[1]].dims
        for name in (node.input[0], node.output[0])
    }
    return [
        [scale_of[name] for name in (*node.input, *node.output)]
        for node in model.graph.node
        if node.op_type == "Concat"
    ]


@pytest.mark.parametrize("network", list(NETWORKS))
def test_no_placement_is_left_out(network: str, caplog: pytest.LogCaptureFixture) -> None:
    """Each is held against the graph without it, and one that computes something else would be left out."""
    graph = quantized(imported(NETWORKS[network]), IMAGES_NCHW)
    params = compose_params(["target=[cpu_torch,cuda_torch,h200_tensorrt]"])
    target: Target = typed_config(Target, params["build_engine"]["h200_tensorrt"], "target.h200_tensorrt")
    with caplog.at_level(logging.WARNING):
        rewritten = checked_rewrite(
            graph, rewrites_for(target, graph), IMAGES_NCHW, where="here", min_int8_db=10
        )
    assert not caplog.records
    assert set(num_pairs_read(rewritten, "Add")) <= {0, 1}
