import itertools

import numpy as np
import pytest

from tasks.parts.layer_diff.bisection import bisect, minimal_set, quantized_nodes, with_float_layers
from tasks.parts.onnx_graphs.graph import is_quantized, read_graph
from tasks.parts.onnx_session import open_session
from tasks.parts.quantization.evaluation import open_evaluator
from tests.tasks.conftest import OP_TYPES


@pytest.mark.parametrize("needed", [{0}, {19}, {3, 4}, {2, 9, 17}, set(range(20))])
def test_exactly_the_needed_items_are_found(needed):
    assert set(minimal_set(range(20), lambda items: needed <= set(items))) == needed


def test_what_is_found_is_minimal_where_items_can_stand_for_each_other():
    def holds(items):
        return {1, 2} <= set(items) or {5, 6, 7} <= set(items) or len(items) > 15

    found = minimal_set(range(20), holds)
    assert holds(found)
    assert not any(holds(part) for part in itertools.combinations(found, len(found) - 1))


def test_likely_items_at_the_front_are_found_in_few_calls():
    calls = []

    def holds(items):
        calls.append(items)
        return 0 in items

    assert minimal_set(range(64), holds) == [0]
    assert len(calls) == 6  # halves of 64


def test_all_layers_in_float_are_the_float_graph_and_none_is_the_variant(workshop):
    graph, variant = read_graph(workshop.graph), read_graph(workshop.quantized)
    nodes = quantized_nodes(variant, graph)
    assert {node.op_type for node in graph.graph.node if node.name in nodes} == set(OP_TYPES)
    images_NCHW = np.random.default_rng(0).normal(size=(2, 3, 64, 96)).astype(np.float32)

    def logits(model):
        return open_session(model).run(None, {"image": images_NCHW})[0]

    in_float = with_float_layers(variant, graph, frozenset(nodes))
    assert not is_quantized(in_float)
    np.testing.assert_array_equal(logits(in_float), logits(graph))
    np.testing.assert_array_equal(logits(with_float_layers(variant, graph, frozenset())), logits(variant))


def test_layer_whose_float_input_the_variant_has_not_cannot_go_back(workshop):
    graph, variant = read_graph(workshop.graph), read_graph(workshop.quantized)
    nodes = quantized_nodes(variant, graph)
    relu = next(node for node in graph.graph.node if node.op_type == "Relu")
    readers = {node.name for node in graph.graph.node if relu.output[0] in node.input}
    for node in graph.graph.node:
        node.input[:] = ["renamed" if name == relu.output[0] else name for name in node.input]
    relu.output[0] = "renamed"
    assert readers & set(nodes)
    assert set(quantized_nodes(variant, graph)) == set(nodes) - readers


def test_search_ends_at_once_where_there_is_nothing_to_find(unbalanced):
    graph, variant = read_graph(unbalanced.graph), read_graph(unbalanced.graph.parent / "model.onnx")
    evaluator = open_evaluator(graph, unbalanced.data, num_images=0, batch_size=4)
    nodes = quantized_nodes(variant, graph)
    found, trials = bisect(variant, graph, nodes, evaluator, max_score_rel_loss=0.99)
    assert found.is_recovered and found.layers == () and len(trials) == 1
    innocent = [node for node in nodes if node != unbalanced.node]
    found, trials = bisect(variant, graph, innocent, evaluator, max_score_rel_loss=0.01)
    assert not found.is_recovered and found.layers == () and len(trials) == 2
    assert found.recovered_score < found.target_score
