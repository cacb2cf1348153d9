"""MACs of every operator that computes, and operators whose MACs are not known."""

import math

import numpy as np
import pytest
from onnx import ModelProto, NodeProto, TensorProto, helper, numpy_helper

from tasks.parts.onnx_graphs.macs import conv_macs, einsum_labels, layer_sizes, uncounted_operators


def graph_of(
    nodes: list[NodeProto], constants: dict[str, np.ndarray], *, image: list[int], opset: int = 23
) -> ModelProto:
    """Return a graph that reads an image of this size for a dynamic batch and gives the last output."""
    graph = helper.make_graph(
        nodes,
        "graph",
        [helper.make_tensor_value_info("image", TensorProto.FLOAT, ["batch", *image])],
        [helper.make_empty_tensor_value_info(nodes[-1].output[0])],
        [numpy_helper.from_array(values, name) for name, values in constants.items()],
    )
    opsets = [helper.make_opsetid("", opset), helper.make_opsetid("com.example", 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=10)


def random(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).standard_normal(shape).astype(np.float32)


@pytest.mark.parametrize(
    ("equation", "constant", "macs"),
    [
        ("btc,cd->btd", (6, 8), 5 * 6 * 8),
        ("btc,dc", (8, 6), 5 * 6 * 8),
        ("...c,cd->...d", (6, 8), 5 * 6 * 8),
        ("btc,chd->bhtd", (6, 2, 4), 5 * 6 * 8),
        ("bqc,bkc->bqk", None, 5 * 5 * 6),
        ("btc,c->btc", (6,), 0),  # nothing is summed
        ("btc->bct", (), 0),
    ],
)
def test_macs_of_an_einsum_a6(equation: str, constant: tuple[int, ...] | None, macs: int) -> None:
    inputs = ["image", "image"] if constant is None else ["image", "weight"][: 1 + bool(constant)]
    node = helper.make_node("Einsum", inputs, ["product"], "einsum", equation=equation)
    model = graph_of([node], {"weight": random(*constant)} if constant else {}, image=[5, 6])
    assert conv_macs(model) == {"einsum": macs}


def test_an_einsum_of_three_operands_counts_two_products_from_the_left_a6() -> None:
    node = helper.make_node("Einsum", ["image", "a", "b"], ["y"], "einsum", equation="btc,cd,de->bte")
    model = graph_of([node], {"a": random(6, 7), "b": random(7, 3)}, image=[5, 6])
    assert conv_macs(model) == {"einsum": 5 * 6 * 7 + 5 * 7 * 3}


def test_labels_of_an_einsum_without_an_arrow_are_sorted_a6() -> None:
    assert einsum_labels("ba,...b", [[2, 3], [4, 5, 2]]) == (
        [["b", "a"], [".2", ".1", "b"]],
        [".2", ".1", "a"],
    )


@pytest.mark.parametrize(("operator", "gates"), [("RNN", 1), ("GRU", 3), ("LSTM", 4)])
@pytest.mark.parametrize("direction", ["forward", "bidirectional"])
def test_macs_of_recurrent_layers_a6(operator: str, gates: int, direction: str) -> None:
    """Each of 5 steps multiplies all weights: of 6 inputs and of 8 hidden values, for each gate."""
    ways = 2 if direction == "bidirectional" else 1
    weights = {"w": random(ways, gates * 8, 6), "r": random(ways, gates * 8, 8)}
    nodes = [
        helper.make_node("Transpose", ["image"], ["steps"], "transpose", perm=[1, 0, 2]),
        helper.make_node(operator, ["steps", "w", "r"], ["y"], "layer", hidden_size=8, direction=direction),
    ]
    sizes = layer_sizes(graph_of(nodes, weights, image=[5, 6]))
    assert sizes["layer"].macs == 5 * ways * gates * 8 * (6 + 8)
    assert (sizes["layer"].channels_in, sizes["layer"].channels_out) == (6, ways * 8)


@pytest.mark.parametrize("has_heads", [True, False])
def test_macs_of_attention_of_opset_23_are_those_of_its_two_products_a6(has_heads: bool) -> None:
    """4 heads of 8 channels; 10 queries, 10 keys."""
    attributes = {} if has_heads else {"q_num_heads": 4, "kv_num_heads": 4}
    node = helper.make_node("Attention", ["image"] * 3, ["y"], "attention", **attributes)
    model = graph_of([node], {}, image=[4, 10, 8] if has_heads else [10, 32])
    assert conv_macs(model) == {"attention": 4 * 10 * 10 * (8 + 8)}


def test_macs_of_integer_operators_and_deformable_convolutions_a6() -> None:
    """The same as those of the float operators."""
    levels = np.ones((8, 3, 3, 3), np.int8)
    scale, zero = np.float32(0.1), np.uint8(0)
    nodes = [
        helper.make_node("QuantizeLinear", ["image", "scale", "zero"], ["levels"], "quantize"),
        helper.make_node("ConvInteger", ["levels", "weight"], ["sums"], "conv_integer"),
        helper.make_node(
            "QLinearConv",
            ["levels", "scale", "zero", "weight", "scale", "zero8", "scale", "zero"],
            ["maps"],
            "qlinear_conv",
        ),
        helper.make_node("MatMulInteger", ["levels", "matrix"], ["products"], "matmul_integer"),
        helper.make_node(
            "QLinearMatMul",
            ["levels", "scale", "zero", "matrix", "scale", "zero8", "scale", "zero"],
            ["moved"],
            "qlinear_matmul",
        ),
        helper.make_node("DeformConv", ["image", "float_weight", "offsets"], ["y"], "deform"),
    ]
    constants = {
        "scale": np.array(scale),
        "zero": np.array(zero),
        "zero8": np.array(0, np.int8),
        "weight": levels,
        "matrix": np.ones((8, 4), np.int8),
        "float_weight": random(8, 3, 3, 3),
        "offsets": np.zeros((1, 18, 6, 6), np.float32),
    }
    conv, product = 8 * 27 * 6 * 6, 3 * 8 * 8 * 4
    assert conv_macs(graph_of(nodes, constants, image=[3, 8, 8])) == {
        "conv_integer": conv,
        "qlinear_conv": conv,
        "matmul_integer": product,
        "qlinear_matmul": product,
        "deform": conv,
    }


def test_operators_whose_macs_are_not_known_are_named_a6() -> None:
    matrix = numpy_helper.from_array(random(8, 8), "matrix")
    value = helper.make_tensor_value_info("z", TensorProto.FLOAT, None)
    works, moves = (
        helper.make_graph([helper.make_node(operator, inputs, ["z"], "inner")], name, [], [value])
        for name, operator, inputs in (
            ("works", "MatMul", ["image", "matrix"]),
            ("moves", "Identity", ["image"]),
        )
    )
    nodes = [
        helper.make_node("If", ["yes"], ["a"], "with work", then_branch=works, else_branch=moves),
        helper.make_node("If", ["yes"], ["b"], "without", then_branch=moves, else_branch=moves),
        helper.make_node("Fused", ["a"], ["c"], "fused", domain="com.example"),
        helper.make_node("MatMul", ["b", "matrix"], ["d"], "matmul"),
        helper.make_node("Add", ["c", "d"], ["y"], "add"),
    ]
    model = graph_of(nodes, {"yes": np.array(True)}, image=[4, 8])
    model.graph.initializer.append(matrix)
    assert uncounted_operators(model) == {"Fused": 1, "If": 1}


def test_sizes_that_the_graph_computes_are_found_by_running_it() -> None:
    nodes = [
        helper.make_node("Shape", ["image"], ["shape"], "shape"),
        helper.make_node("Mul", ["shape", "ones"], ["same"], "same"),
        helper.make_node("NonZero", ["image"], ["places"], "places"),
        helper.make_node("Expand", ["weight", "same"], ["wide"], "expand"),
        helper.make_node("MatMul", ["image", "wide"], ["y"], "matmul"),
    ]
    constants = {"ones": np.array([1, 1, 1], np.int64), "weight": random(1, 1, 1)}
    assert conv_macs(graph_of(nodes, constants, image=[6, 6])) == {"matmul": math.prod((6, 6, 6))}
