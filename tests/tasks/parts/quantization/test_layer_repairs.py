"""Bias correction and weight rounding, which compare layers one after the other."""

import copy
import functools

import numpy as np
import pytest
from onnx import ModelProto, TensorProto, helper, numpy_helper

from tasks.parts.onnx_graphs.signal_to_noise import difference
from tasks.parts.onnx_session import open_session
from tasks.parts.quantization.bias_correction import correct_biases, correctable_layers
from tasks.parts.quantization.layer_steps import LayerSteps
from tasks.parts.quantization.qdq import (
    INT8_MAX,
    TensorRange,
    insert_qdq,
    weight_levels,
)
from tasks.parts.quantization.weight_rounding import round_rows, round_weights
from tests.tasks import tiny_networks as tiny

NETWORKS = (tiny.Straight, tiny.Branched, tiny.Shared)
make_quantized = functools.cache(tiny.quantized)


def int8_levels(quantized: ModelProto) -> dict[str, np.ndarray]:
    return {
        item.name.removesuffix(":int8"): numpy_helper.to_array(item)
        for item in quantized.graph.initializer
        if item.name.endswith(":int8")
    }


def ranges_of(graph: ModelProto, images_NCHW: np.ndarray, share: float) -> dict[str, TensorRange]:
    """Return ranges that cut off a part of each tensor, so that INT8 has something to repair."""
    return {
        name: TensorRange(share * limits.low, share * limits.high)
        for name, limits in tiny.ranges_of(graph, images_NCHW, tiny.OP_TYPES).items()
    }


def test_sizes_that_earlier_nodes_computed_reach_later_layers_b2() -> None:
    """As SegFormer with a dynamic batch: Resize and Reshape read a shape that was computed layers before."""
    weight = numpy_helper.from_array(np.eye(3, dtype=np.float32)[:, :, None, None], "weight")
    ends = (
        numpy_helper.from_array(np.array([2], np.int64), "from"),
        numpy_helper.from_array(np.array([4], np.int64), "to"),
    )
    nodes = [
        helper.make_node("Shape", ["image"], ["shape"], name="shape"),
        helper.make_node("Conv", ["image", "weight"], ["first"], name="first", strides=[2, 2]),
        helper.make_node("Shape", ["first"], ["small"], name="small"),
        helper.make_node("Slice", ["small", "zero", "from"], ["head"], name="head"),
        helper.make_node("Slice", ["shape", "from", "to"], ["tail"], name="tail"),
        helper.make_node("Concat", ["head", "tail"], ["sizes"], name="sizes", axis=0),
        helper.make_node("Conv", ["first", "weight"], ["second"], name="second"),
        helper.make_node("Resize", ["second", "", "", "sizes"], ["large"], name="large", mode="nearest"),
        helper.make_node("Reshape", ["large", "shape"], ["again"], name="again"),
        helper.make_node("Conv", ["again", "weight"], ["third"], name="third"),
    ]
    image, third = (
        helper.make_tensor_value_info(name, TensorProto.FLOAT, ["N", 3, "H", "W"])
        for name in ("image", "third")
    )
    zero = numpy_helper.from_array(np.array([0], np.int64), "zero")
    graph = helper.make_graph(nodes, "sizes", [image], [third], [weight, zero, *ends])
    model = helper.make_model(graph, ir_version=10, opset_imports=[helper.make_opsetid("", 20)])
    batches = [np.random.default_rng(0).random((size, 3, 8, 6), dtype=np.float32) for size in (2, 1)]
    steps = LayerSteps(model, batches)
    for name in ("first", "second"):
        assert [values.shape for values in steps.read_output(name)] == [(2, 3, 4, 3), (1, 3, 4, 3)]
    expected = [open_session(model).run(None, {"image": images})[0] for images in batches]
    for found, exact in zip(steps.read_output("third"), expected, strict=True):
        np.testing.assert_allclose(found, exact, atol=1e-6)


@pytest.mark.parametrize("network_type", NETWORKS)
def test_layer_by_layer_gives_what_the_whole_graph_gives(network_type: type) -> None:
    graph, quantized, images_NCHW = make_quantized(network_type, tiny.OP_TYPES)
    steps = LayerSteps(quantized, [images_NCHW[:5], images_NCHW[5:]])
    layers = correctable_layers(graph, tiny.OP_TYPES)
    marked = ModelProto()
    marked.CopyFrom(quantized)
    del marked.graph.output[:]
    marked.graph.output.extend(
        value for value in graph.graph.value_info if value.name == layers[-1].output[0]
    )
    expected = open_session(marked, is_optimised=False).run(None, {"image": images_NCHW})[0]
    for node in layers[:-1]:
        assert [len(batch) for batch in steps.read_output(node.name)] == [5, 3]
    found = np.concatenate(steps.read_output(layers[-1].name))
    assert difference(expected, found).sqnr_db > 35  # a value between two levels may be rounded to either


@pytest.mark.parametrize("network_type", NETWORKS)
def test_corrected_layers_have_the_means_of_the_float_graph(network_type: type) -> None:
    graph, _, images_NCHW = make_quantized(network_type, tiny.OP_TYPES)
    ranges = ranges_of(graph, images_NCHW, 0.5)
    quantized = insert_qdq(graph, ranges, op_types=tiny.OP_TYPES)
    corrected = correct_biases(graph, quantized, [images_NCHW], op_types=tiny.OP_TYPES)

    def shift(model: ModelProto) -> float:
        """Return the largest difference of a channel's mean, as a share of its deviation."""
        exact = LayerSteps(graph, [images_NCHW])
        steps = LayerSteps(insert_qdq(model, ranges, op_types=tiny.OP_TYPES), [images_NCHW])
        shares = []
        for node in correctable_layers(graph, tiny.OP_TYPES):
            expected, found = exact.read_output(node.name)[0], steps.read_output(node.name)[0]
            means = (expected - found).mean(axis=(0, 2, 3))
            shares.append(float(np.abs(means / expected.std(axis=(0, 2, 3))).max()))
        return max(shares)

    assert shift(graph) > 0.05, "or else there is nothing to correct"
    assert shift(corrected) < 0.01


def test_a_convolution_without_a_bias_gets_one() -> None:
    graph, quantized, images_NCHW = make_quantized(tiny.Straight, tiny.OP_TYPES)
    graph, quantized = copy.deepcopy((graph, quantized))
    for model in (graph, quantized):
        del next(node for node in model.graph.node if node.name == "classifier/Conv").input[2:]
    corrected = correct_biases(graph, quantized, [images_NCHW], op_types=tiny.OP_TYPES)
    node = next(node for node in corrected.graph.node if node.name == "classifier/Conv")
    bias = next(item for item in corrected.graph.initializer if item.name == node.input[2])
    assert list(bias.dims) == [3] and numpy_helper.to_array(bias).any()
    assert np.isfinite(open_session(corrected).run(None, {"image": images_NCHW})[0]).all()


def test_rounded_rows_give_outputs_nearer_to_those_of_the_weights() -> None:
    """Inputs depend on each other, so the errors of several weights can make up for each other."""
    random = np.random.default_rng(0)
    inputs_PK = random.normal(size=(500, 6)) @ random.normal(size=(6, 30)) + 0.1 * random.normal(
        size=(500, 30)
    )
    weights_OK = random.normal(size=(8, 30))
    scales_O = np.abs(weights_OK).max(axis=1) / INT8_MAX
    energy_KK = inputs_PK.T @ inputs_PK / 500
    levels_OK = round_rows(weights_OK[None], energy_KK[None] + 1e-3 * np.eye(30), scales_O[None])[0]
    nearest_OK = np.rint(weights_OK / scales_O[:, None])

    def error(found_OK: np.ndarray) -> float:
        return float(np.square(inputs_PK @ (found_OK * scales_O[:, None] - weights_OK).T).sum())

    assert error(levels_OK) < 0.5 * error(nearest_OK)
    np.testing.assert_array_equal(np.abs(levels_OK).max(axis=1), INT8_MAX)
    np.testing.assert_array_equal(levels_OK, np.rint(levels_OK))


@pytest.mark.parametrize("network_type", NETWORKS)
def test_inserted_pairs_find_the_rounded_levels_again(network_type: type) -> None:
    graph, quantized, images_NCHW = make_quantized(network_type, tiny.OP_TYPES)
    rounded = round_weights(graph, quantized, [images_NCHW], op_types=tiny.OP_TYPES)
    again = round_weights(graph, quantized, [images_NCHW], op_types=tiny.OP_TYPES)
    assert rounded == again
    ranges = ranges_of(graph, images_NCHW, 1.0)
    found = int8_levels(insert_qdq(rounded, ranges, op_types=tiny.OP_TYPES))
    before = int8_levels(quantized)
    assert any((found[name] != before[name]).any() for name in before)
    constants = {item.name: numpy_helper.to_array(item) for item in rounded.graph.initializer}
    originals = {item.name: numpy_helper.to_array(item) for item in graph.graph.initializer}
    for name, levels in found.items():
        if not np.array_equal(constants[name], originals[name]):  # layers that share a weight keep it
            scales_O = weight_levels(constants[name])[1]
            np.testing.assert_allclose(constants[name], levels * scales_O[:, None, None, None], rtol=1e-6)


def test_rounded_weights_bring_the_logits_nearer_to_float_on_other_images() -> None:
    graph, _, images_NCHW = make_quantized(tiny.Branched, tiny.OP_TYPES)
    ranges = ranges_of(graph, images_NCHW, 0.7)
    quantized = insert_qdq(graph, ranges, op_types=tiny.OP_TYPES)
    rounded = round_weights(graph, quantized, [images_NCHW], op_types=tiny.OP_TYPES)
    others_NCHW = tiny.images(8, seed=2).numpy()
    expected, before, after = (
        open_session(model).run(None, {"image": others_NCHW})[0]
        for model in (graph, quantized, insert_qdq(rounded, ranges, op_types=tiny.OP_TYPES))
    )
    assert difference(expected, after).sqnr_db > difference(expected, before).sqnr_db + 1


@pytest.mark.parametrize("shape", [(), (1,), (1, 1), (1, 5)])
def test_bias_of_a_gemm_may_have_any_shape_that_broadcasts_b3(shape: tuple[int, ...]) -> None:
    """ONNX, Gemm: C is unidirectionally broadcastable to [rows, outputs]."""
    random = np.random.default_rng(0)
    weight = random.standard_normal((12, 5)).astype(np.float32)
    tensors = [numpy_helper.from_array(weight, "weight")]
    tensors.append(numpy_helper.from_array(np.full(shape, 0.5, np.float32), "bias"))
    image, values = (
        helper.make_tensor_value_info(name, TensorProto.FLOAT, ["batch", size])
        for name, size in (("image", 12), ("values", 5))
    )
    node = helper.make_node("Gemm", ["image", "weight", "bias"], ["values"], "layer")
    graph = helper.make_graph([node], "gemm", [image], [values], tensors)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    images = np.abs(random.standard_normal((64, 12))).astype(np.float32)
    quantized = insert_qdq(model, ranges_of_gemm(model, images), op_types=["Gemm"])
    exact = open_session(model).run(None, {"image": images})[0].mean(axis=0)
    repaired = [
        change(model, quantized, [images], op_types=["Gemm"]) for change in (correct_biases, round_weights)
    ]
    for changed in repaired:
        again = insert_qdq(changed, ranges_of_gemm(model, images), op_types=["Gemm"])
        found = open_session(again, is_optimised=False).run(None, {"image": images})[0].mean(axis=0)
        np.testing.assert_allclose(found, exact, atol=1e-4)


def ranges_of_gemm(model: ModelProto, images: np.ndarray) -> dict[str, TensorRange]:
    return {
        name: TensorRange(0.3 * limits.low, 0.3 * limits.high)  # clips, so that the mean moves
        for name, limits in tiny.ranges_of(model, images, ["Gemm"]).items()
    }
