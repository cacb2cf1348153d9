"""Encodings: the same function by other operators, and left alone where it would not be the same."""

import copy
from dataclasses import replace

import numpy as np
import onnx
import pytest
from onnx import ModelProto, helper

from tasks.parts.builders.graph_rewrites import (
    encode_for,
    fix_batch,
    fuse_activations,
    rewrite_for,
    round_rest,
    stem_in_float,
    token_depthwise_in_float,
)
from tasks.parts.builders.interpolation import MAX_MACS_PER_VALUE, resize_as_matmul
from tasks.parts.data.dataset import normalise
from tasks.parts.data.input_card import Task
from tasks.parts.engines.runtimes import Precision
from tasks.parts.onnx_graphs.foreign_half import has_half
from tasks.parts.onnx_graphs.graph import is_quantized, read_card_of_graph, read_graph
from tasks.parts.onnx_graphs.macs import quantized_layers
from tasks.parts.onnx_graphs.signal_to_noise import difference
from tasks.parts.onnx_session import open_session
from tasks.parts.quantization.calibration import choose_ranges, collect_statistics
from tasks.parts.quantization.config import Activations, Calibrator
from tasks.parts.quantization.qdq import insert_qdq
from tests.tasks import tiny_networks as tiny
from tests.tasks.conftest import Workshop


def op_types(model: ModelProto) -> list[str]:
    return [node.op_type for node in model.graph.node]


def run(model: ModelProto, images_NCHW: np.ndarray) -> np.ndarray:
    onnx.checker.check_model(model, full_check=True)
    """Return the logits as the graph is written: integer kernels add in 16 bits on a CPU without VNNI."""
    return np.asarray(open_session(model, is_optimised=False).run(None, {"image": images_NCHW})[0])


def only_resize(
    height: int, width: int, factor: int | tuple[float, float], **attributes: object
) -> ModelProto:
    by_axis = factor if isinstance(factor, tuple) else (factor, factor)
    scales = onnx.numpy_helper.from_array(np.array([1, 1, *by_axis], np.float32), "scales")
    node = helper.make_node("Resize", ["image", "", "scales"], ["logits"], "resize", **attributes)
    shapes = [[1, 2, height, width], [1, 2, int(height * by_axis[0]), int(width * by_axis[1])]]
    image, logits = (
        helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, shape)
        for name, shape in zip(("image", "logits"), shapes, strict=True)
    )
    graph = helper.make_graph([node], "resize", [image], [logits], [scales])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)


@pytest.mark.parametrize(("height", "width", "factor"), [(16, 16, 4), (5, 9, 2), (1, 3, 8), (7, 2, 1)])
def test_matrix_products_interpolate_as_resize_does(height: int, width: int, factor: int) -> None:
    resize = only_resize(height, width, factor, mode="linear")
    images_NCHW = np.random.default_rng(0).normal(size=(1, 2, height, width)).astype(np.float32)
    product = resize_as_matmul(resize)
    assert op_types(product) == ["MatMul", "MatMul"]
    assert [value.name for value in product.graph.output] == ["logits"]
    np.testing.assert_allclose(run(product, images_NCHW), run(resize, images_NCHW), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("size", "scales"), [((14, 14), (4.6, 4.6)), ((9, 16), (2.6, 3.3)), ((16, 8), (0.7, 1.5))]
)
def test_scales_that_give_no_whole_size_are_those_of_the_coordinates_a3(
    size: tuple[int, int], scales: tuple[float, float]
) -> None:
    """14 x 4.6 is 64.4: ONNX makes 64 rows whose places follow 4.6, and not 64 / 14."""
    resize = only_resize(*size, scales, mode="linear")
    images_NCHW = np.random.default_rng(0).normal(size=(1, 2, *size)).astype(np.float32)
    product = resize_as_matmul(resize)
    assert op_types(product) == ["MatMul", "MatMul"]
    assert difference(run(resize, images_NCHW), run(product, images_NCHW)).sqnr_db > 100


def test_resize_to_a_size_and_resize_of_named_axes_are_interpolated_alike_a3() -> None:
    to_size, of_axes = (only_resize(10, 8, (2.5, 2.0), mode="linear") for _ in range(2))
    to_size.graph.initializer.append(onnx.numpy_helper.from_array(np.array([1, 2, 25, 16]), "sizes"))
    to_size.graph.node[0].input[:] = ["image", "", "", "sizes"]
    of_axes.graph.node[0].attribute.append(helper.make_attribute("axes", [3, 2]))
    scales = onnx.numpy_helper.from_array(np.array([2.0, 2.5], np.float32), "scales")
    of_axes.graph.initializer[0].CopyFrom(scales)
    images_NCHW = np.random.default_rng(0).normal(size=(1, 2, 10, 8)).astype(np.float32)
    for resize in (to_size, of_axes):
        product = resize_as_matmul(resize)
        assert op_types(product) == ["MatMul", "MatMul"]
        assert difference(run(resize, images_NCHW), run(product, images_NCHW)).sqnr_db > 100


def test_blocks_need_a_whole_scale_and_not_a_whole_ratio_of_sizes_a3() -> None:
    """40 x 2.01 is 80.4, so the sizes alone look like a factor of 2."""
    resize = only_resize(40, 40, (2.01, 2.01), mode="linear")
    assert resize_as_matmul(resize, in_blocks=True) == resize


@pytest.mark.parametrize(
    "attributes",
    [
        {"mode": "nearest"},
        {"mode": "cubic"},
        {"mode": "linear", "coordinate_transformation_mode": "align_corners"},
        {"mode": "linear", "antialias": 1},
    ],
)
def test_another_interpolation_is_left_alone(attributes: dict[str, object]) -> None:
    resize = only_resize(4, 4, 2, **attributes)
    assert resize_as_matmul(resize) == resize


@pytest.mark.parametrize(("height", "width", "scale"), [(32, 40, 2), (40, 32, 3), (64, 64, 4), (48, 88, 8)])
def test_large_maps_are_interpolated_block_by_block(height: int, width: int, scale: int) -> None:
    resize = only_resize(height, width, scale, mode="linear")
    assert resize_as_matmul(resize) == resize
    blocks = resize_as_matmul(resize, in_blocks=True)
    assert op_types(blocks) == ["Gather", "Reshape", "MatMul", "Reshape"] * 2
    images_NCHW = np.random.default_rng(0).normal(size=(1, 2, height, width)).astype(np.float32)
    np.testing.assert_allclose(run(blocks, images_NCHW), run(resize, images_NCHW), rtol=1e-4, atol=1e-5)


def test_large_maps_without_blocks_and_open_sizes_are_left_alone() -> None:
    large = only_resize(MAX_MACS_PER_VALUE + 1, MAX_MACS_PER_VALUE, 4, mode="linear")
    assert resize_as_matmul(large, in_blocks=True) == large
    open_size = only_resize(4, 4, 2, mode="linear")
    for value in (*open_size.graph.input, *open_size.graph.output):
        value.type.tensor_type.shape.dim[2].dim_param = "height"
    assert resize_as_matmul(open_size) == open_size


@pytest.mark.parametrize("network_type", [tiny.Straight, tiny.Branched])
def test_resize_inside_a_network_keeps_its_node_sources_and_logits(network_type: type) -> None:
    graph, _, images_NCHW = tiny.quantized(network_type, tiny.OP_TYPES)
    product = resize_as_matmul(graph)
    assert op_types(product).count("MatMul") == 2
    assert product.graph.node[-1].metadata_props == graph.graph.node[-1].metadata_props
    np.testing.assert_allclose(run(product, images_NCHW), run(graph, images_NCHW), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("network_type", [tiny.Straight, tiny.Branched])
def test_fixed_batch_knows_every_shape_and_keeps_the_logits(network_type: type) -> None:
    _, graph, images_NCHW = tiny.quantized(network_type, tiny.OP_TYPES)
    fixed = fix_batch(graph)
    values = [*fixed.graph.input, *fixed.graph.output, *fixed.graph.value_info]
    shapes = [[dim.dim_value for dim in value.type.tensor_type.shape.dim] for value in values]
    assert shapes[0][0] == shapes[1][0] == 1 and all(all(shape) for shape in shapes)
    assert len(values) > len(fixed.graph.node)
    one_NCHW = images_NCHW[:1]
    np.testing.assert_array_equal(run(fixed, one_NCHW), run(graph, one_NCHW))


@pytest.mark.slow
@pytest.mark.parametrize("network_type", [tiny.Straight, tiny.Branched])
def test_only_the_convolution_that_reads_the_image_becomes_float(network_type: type) -> None:
    graph, unsigned, images_NCHW = tiny.quantized(network_type, tiny.OP_TYPES)
    encoded = stem_in_float(unsigned)
    assert op_types(encoded).count("Conv") == op_types(unsigned).count("Conv")
    assert op_types(encoded).count("QuantizeLinear") == op_types(unsigned).count("QuantizeLinear") - 1
    # The image's Q/DQ and the DQ of one weight are gone.
    assert op_types(encoded).count("DequantizeLinear") == op_types(unsigned).count("DequantizeLinear") - 2
    exact, before, after = (run(model, images_NCHW) for model in (graph, unsigned, encoded))
    assert difference(exact, after).sqnr_db > difference(exact, before).sqnr_db - 0.5
    assert difference(before, after).sqnr_db > 20


def test_a_float_graph_and_wide_stems_are_left_alone() -> None:
    graph, signed, _ = tiny.quantized(tiny.Straight, ("Conv",))
    assert not is_quantized(graph) and stem_in_float(graph) == graph
    wide = ModelProto()
    wide.CopyFrom(signed)
    weight = next(tensor for tensor in wide.graph.initializer if list(tensor.dims) == [8, 3, 3, 3])
    levels = np.zeros((8, 6, 3, 3), np.int8)
    weight.CopyFrom(onnx.numpy_helper.from_array(levels, weight.name))
    assert stem_in_float(wide) == wide


def test_stem_whose_weights_are_quantized_in_the_graph_is_left_alone() -> None:
    """As in exports of fake-quantized networks that nobody folded."""
    _, signed, _ = tiny.quantized(tiny.Straight, ("Conv",))
    unfolded = ModelProto()
    unfolded.CopyFrom(signed)
    weight = next(tensor for tensor in unfolded.graph.initializer if list(tensor.dims) == [8, 3, 3, 3])
    dequantize = next(node for node in unfolded.graph.node if node.input[0] == weight.name)
    levels = weight.name
    weight.CopyFrom(onnx.numpy_helper.from_array(np.ones((8, 3, 3, 3), np.float32), "float_weight"))
    quantize = helper.make_node(
        "QuantizeLinear", ["float_weight", *dequantize.input[1:]], [levels], "late", axis=0
    )
    unfolded.graph.node.insert(0, quantize)
    assert stem_in_float(unfolded) == unfolded


def test_weights_without_zero_point_are_dequantized() -> None:
    """The operator's default is 0."""
    _, signed, _ = tiny.quantized(tiny.Straight, ("Conv",))
    expected = stem_in_float(signed)
    weight = next(tensor for tensor in signed.graph.initializer if list(tensor.dims) == [8, 3, 3, 3])
    dequantize = next(node for node in signed.graph.node if node.input[0] == weight.name)
    del dequantize.input[2:]
    found = stem_in_float(signed)
    assert [tensor.raw_data for tensor in found.graph.initializer] == [
        tensor.raw_data for tensor in expected.graph.initializer
    ]


def test_readers_of_the_image_beside_the_stem_keep_its_quantization() -> None:
    _, signed, images_NCHW = tiny.quantized(tiny.Straight, ("Conv",))
    image_levels = next(node.output[0] for node in signed.graph.node if node.op_type == "QuantizeLinear")
    image_again = next(
        node.output[0]
        for node in signed.graph.node
        if node.op_type == "DequantizeLinear" and node.input[0] == image_levels
    )
    second = helper.make_node("ReduceMax", [image_again], ["largest"], "second", keepdims=0)
    signed.graph.node.append(second)
    signed.graph.output.append(helper.make_tensor_value_info("largest", onnx.TensorProto.FLOAT, []))
    encoded = stem_in_float(signed)
    assert op_types(encoded).count("QuantizeLinear") == op_types(signed).count("QuantizeLinear")
    session = open_session(encoded)
    assert np.isfinite(session.run(None, {"image": images_NCHW})[1])


def test_class_logits_of_a_convolution_are_rounded_where_the_runtime_needs_it(workshop: Workshop) -> None:
    """Without a pair behind it, ONNX Runtime would dequantize the largest maps and convolve them in float."""
    graph, quantized, images_NCHW = tiny.quantized(tiny.FullSize, tiny.OP_TYPES)
    assert [value.name for value in quantized.graph.output] == [value.name for value in graph.graph.output]
    onnxruntime, openvino = (
        encode_for(workshop.target(name), quantized) for name in ("cpu_onnxruntime", "cpu_openvino")
    )
    for encoded, last in ((onnxruntime, "DequantizeLinear"), (openvino, "Conv")):
        [maker] = [node for node in encoded.graph.node if encoded.graph.output[0].name in node.output]
        assert maker.op_type == last
    found = run(onnxruntime, images_NCHW)
    assert len(np.unique(found)) <= 256 < len(np.unique(run(openvino, images_NCHW)))
    assert difference(run(graph, images_NCHW), found).sqnr_db > 30
    largest = run(graph, images_NCHW).max()
    statistics = collect_statistics(graph, lambda: [images_NCHW], [graph.graph.output[0].name])
    clipping = choose_ranges(
        graph, statistics, Calibrator.percentile, percentile=60.0, activations=Activations.uint8
    )
    assert [limits.high for limits in clipping.values()] == [pytest.approx(largest, rel=1e-6)]


def test_the_last_resize_reads_logits_that_were_rounded_where_the_runtime_needs_it(
    workshop: Workshop,
) -> None:
    graph, quantized, images_NCHW = tiny.quantized(tiny.Straight, tiny.OP_TYPES)
    for name, expected in (("cpu_onnxruntime", "DequantizeLinear"), ("cpu_openvino", "Conv")):
        encoded = encode_for(workshop.target(name), quantized)
        [resize] = [node for node in encoded.graph.node if node.op_type == "Resize"]
        [maker] = [node for node in encoded.graph.node if resize.input[0] in node.output]
        assert maker.op_type == expected
        assert difference(run(graph, images_NCHW), run(encoded, images_NCHW)).sqnr_db > 25


def test_convolutions_around_tokens_run_in_int8_where_that_is_faster(workshop: Workshop) -> None:
    """ONNX Runtime needs a pair behind them, also in front of a LayerNormalization; OpenVINO is faster without."""
    graph, quantized, images_NCHW = tiny.quantized(tiny.Tokens, (*tiny.OP_TYPES, "MatMul", "Gemm"))
    for name, expected, int8 in (
        ("cpu_onnxruntime", {"QuantizeLinear"}, {"embedding/Conv", "depthwise/Conv"}),
        ("cpu_openvino", {"Reshape"}, {"embedding/Conv"}),
    ):
        encoded = rewrite_for(workshop.target(name, stem_in_float=False), quantized)
        convolutions = {node.output[0]: node.name for node in encoded.graph.node if node.op_type == "Conv"}
        readers = {node.op_type for node in encoded.graph.node if convolutions.keys() & set(node.input)}
        assert readers == expected
        assert {node.name for node in quantized_layers(encoded) if node.op_type == "Conv"} == int8
        assert difference(run(graph, images_NCHW), run(encoded, images_NCHW)).sqnr_db > 20


def test_numbers_that_are_no_classes_stay_exact() -> None:
    graph, _, images_NCHW = tiny.quantized(tiny.FullSize, tiny.OP_TYPES)
    numbers = copy.deepcopy(graph)
    card = read_card_of_graph(graph)
    shape = (3, tiny.SIZE, tiny.SIZE)
    numbers.metadata_props[0].value = replace(
        card, classes=(), task=Task.values, values_shape=shape
    ).to_json()
    ranges = tiny.ranges_of(numbers, images_NCHW, tiny.OP_TYPES)
    quantized = insert_qdq(numbers, ranges, op_types=tiny.OP_TYPES)
    assert len(np.unique(run(quantized, images_NCHW))) > 256


@pytest.mark.parametrize("variant", ["graph", "quantized"])
def test_tensorrt_gets_the_declared_precision_around_int8(workshop: Workshop, variant: str) -> None:
    """The float32 graph and the one in FP16 compute the same layers from the same inputs."""
    target = workshop.target("h200_tensorrt")
    encoded = encode_for(target, read_graph(getattr(workshop, variant)))
    card = read_card_of_graph(encoded)
    images_NCHW = normalise(np.load(workshop.images)[:4], card.mean, card.std)
    half = round_rest(target, encoded, images_NCHW)
    assert has_half(half) and not has_half(encoded)
    assert [node.name for node in quantized_layers(half)] == [node.name for node in quantized_layers(encoded)]
    assert op_types(half).count("Cast") <= 2  # the image, if it is not quantized, and the logits
    exact = run(read_graph(workshop.graph), images_NCHW)
    db = {
        name: difference(exact, run(model, images_NCHW)).sqnr_db
        for name, model in (("f32", encoded), ("f16", half))
    }
    assert db["f16"] > (40 if variant == "graph" else db["f32"] - 1)  # beside INT8 it costs next to nothing
    assert round_rest(target, half, images_NCHW) is half
    assert round_rest(workshop.target("h200_tensorrt_f32"), encoded, images_NCHW) is encoded
    wide = round_rest(replace(target, precision=Precision.bf16), encoded, images_NCHW)
    kinds = {tensor.data_type for tensor in wide.graph.initializer}
    assert onnx.TensorProto.BFLOAT16 in kinds and onnx.TensorProto.FLOAT16 not in kinds


def test_node_with_little_room_below_the_largest_number_stays_in_float32(workshop: Workshop) -> None:
    """Other images may have larger values than the few that a build looks at."""
    target, graph = workshop.target("h200_tensorrt"), read_graph(workshop.graph)
    card = read_card_of_graph(graph)
    images_NCHW = normalise(np.load(workshop.images)[:4], card.mean, card.std)
    largest = np.abs(run(graph, images_NCHW)).max()
    classifier = next(node for node in graph.graph.node if node.name == "classifier/Conv")
    for name in classifier.input[1:]:
        tensor = next(tensor for tensor in graph.graph.initializer if tensor.name == name)
        values = onnx.numpy_helper.to_array(tensor) * np.float32(20000 / largest)
        tensor.CopyFrom(onnx.numpy_helper.from_array(values, name))
    half = round_rest(target, graph, images_NCHW)
    weights = {tensor.name: tensor.data_type for tensor in half.graph.initializer}
    read = {node.name: [weights.get(name) for name in node.input] for node in half.graph.node}
    assert onnx.TensorProto.FLOAT in read["classifier/Conv"]
    assert sum(onnx.TensorProto.FLOAT16 in kinds for kinds in read.values()) > 10


def tensor_of(values: object, name: str) -> onnx.TensorProto:
    return onnx.numpy_helper.from_array(np.asarray(values), name)


def pair(source: str, name: str) -> list[onnx.NodeProto]:
    """Return a pair that rounds `source` to `name`, with the constants of `small_graph`."""
    return [
        helper.make_node(kind, [read, "scale", "zero"], [made], f"{made}/{kind}")
        for kind, read, made in (
            ("QuantizeLinear", source, f"{name}:int8"),
            ("DequantizeLinear", f"{name}:int8", name),
        )
    ]


def small_graph(nodes: list[onnx.NodeProto], **constants: object) -> ModelProto:
    """Return a graph of images [N, 3, 4, 4], with the constants of `pair` and int8 weights [2, 3, 1, 1]."""
    levels = np.arange(-60, 60, 20, dtype=np.int8).reshape(2, 3, 1, 1)
    known = {"scale": np.float32(0.1), "zero": np.int8(0), "levels": levels} | constants
    image, logits = (
        helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, ["N", channels, 4, 4])
        for name, channels in (("image", 3), ("logits", 2))
    )
    tensors = [tensor_of(values, name) for name, values in known.items()]
    graph = helper.make_graph(nodes, "small", [image], [logits], tensors)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)


WEIGHT = helper.make_node("DequantizeLinear", ["levels", "scale", "zero"], ["weight"], "weight")


def test_the_pair_of_the_logits_goes_though_others_read_what_it_rounds_a3() -> None:
    """A second DequantizeLinear reads the rounded logits, and another node the exact ones."""
    nodes = [
        *pair("image", "rounded"),
        WEIGHT,
        helper.make_node("Conv", ["rounded", "weight"], ["maps"], "conv"),
        *pair("maps", "logits"),
        helper.make_node("DequantizeLinear", ["logits:int8", "scale", "zero"], ["again"], "again"),
        helper.make_node("Sub", ["maps", "again"], ["other"], "other"),
    ]
    model = small_graph(nodes)
    model.graph.output.append(helper.make_tensor_value_info("other", onnx.TensorProto.FLOAT, ["N", 2, 4, 4]))
    fused = fuse_activations(model)
    onnx.checker.check_model(fused, full_check=True)
    images_NCHW = np.random.default_rng(0).standard_normal((2, 3, 4, 4)).astype(np.float32)
    (rounded, difference), (exact, _) = (
        open_session(graph, is_optimised=False).run(None, {"image": images_NCHW}) for graph in (model, fused)
    )
    np.testing.assert_allclose(exact, rounded + difference, atol=1e-5)


def test_a_stem_without_a_pair_keeps_what_is_before_it_a3() -> None:
    """The weight alone is quantized; two operators stand where a pair would."""
    nodes = [
        helper.make_node("Neg", ["image"], ["negative"], "negative"),
        helper.make_node("Relu", ["negative"], ["positive"], "positive"),
        WEIGHT,
        helper.make_node("Conv", ["positive", "weight"], ["logits"], "conv"),
    ]
    assert list(stem_in_float(small_graph(nodes)).graph.node) == nodes


def test_a_depthwise_convolution_without_a_pair_keeps_what_is_before_it_a3() -> None:
    nodes = [
        helper.make_node("MatMul", ["image", "square"], ["tokens"], "tokens"),
        helper.make_node("Neg", ["tokens"], ["negative"], "negative"),
        helper.make_node("Relu", ["negative"], ["positive"], "positive"),
        helper.make_node("DequantizeLinear", ["each", "scale", "zero"], ["weight"], "weight"),
        helper.make_node("Conv", ["positive", "weight"], ["maps"], "conv", group=3),
        helper.make_node("Slice", ["maps", "start", "end", "axis"], ["logits"], "two"),
    ]
    constants = {name: np.array([value]) for name, value in (("start", 0), ("end", 2), ("axis", 1))}
    each = np.full((3, 1, 1, 1), 50, np.int8)
    model = small_graph(nodes, square=np.eye(4, dtype=np.float32), each=each, **constants)
    assert list(token_depthwise_in_float(model).graph.node) == nodes
