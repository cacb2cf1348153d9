"""FP16 and BF16 around INT8: the types that TensorRT's operators demand, and the same function."""

import functools
from collections.abc import Mapping
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import ModelProto, NodeProto, TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator

from tasks.core.errors import ArtifactError
from tasks.parts.onnx_graphs.graph import node_sources
from tasks.parts.onnx_graphs.half_precision import (
    BF16,
    FP16,
    Magnitudes,
    find_float32_nodes,
    magnitudes_of,
    measure_tensors,
    rounded_in_float32,
    to_half,
)
from tasks.parts.onnx_graphs.int8_activations import activations_to_int8
from tasks.parts.onnx_graphs.macs import quantized_layers
from tasks.parts.onnx_graphs.signal_to_noise import difference
from tasks.parts.onnx_session import open_session
from tests.tasks import tiny_networks as tiny

FP32 = TensorProto.FLOAT
FLOATS = {FP32, FP16, BF16}


@functools.cache
def quantized(network_type: type) -> tuple[ModelProto, ModelProto, np.ndarray]:
    """Return a float graph, its twin with symmetric int8 pairs, and images."""
    graph, pairs, images_NCHW = tiny.quantized(network_type, tiny.OP_TYPES)
    return graph, activations_to_int8(pairs), images_NCHW


@pytest.fixture(scope="module", params=[tiny.Straight, tiny.Branched, tiny.Shared])
def int8(request: pytest.FixtureRequest) -> tuple[ModelProto, np.ndarray]:
    """Return a graph with symmetric int8 pairs, and images."""
    return quantized(request.param)[1:]


def copied(model: ModelProto) -> ModelProto:
    copy = ModelProto()
    copy.CopyFrom(model)
    return copy


def kept_names(model: ModelProto, seen: Mapping[str, Magnitudes], **options: Any) -> list[str]:
    return [node.name for node in find_float32_nodes(model, seen, max_abs=32752.0, **options)]


def types_of(model: ModelProto) -> dict[str, int]:
    """Infer the type of each tensor; raises for operators that do not take theirs."""
    onnx.checker.check_model(model, full_check=True)
    graph = onnx.shape_inference.infer_shapes(model, check_type=True, strict_mode=True).graph
    values = (*graph.value_info, *graph.input, *graph.output)
    return {value.name: value.type.tensor_type.elem_type for value in values} | {
        tensor.name: tensor.data_type for tensor in graph.initializer
    }


def find_faults(model: ModelProto) -> list[str]:
    """Return what a strongly typed network of TensorRT does not take.

    Its operator pages: Quantize has input and scale of one type (float16, bfloat16 or float32) and an int8 output,
    Dequantize an int8 input, and a scale of its output's type; zero points are 0, scales positive constants (the ONNX
    parser checks it). Convolution and the others have inputs, weights and bias of one type.
    """
    kinds = types_of(model)
    constants = {tensor.name: numpy_helper.to_array(tensor) for tensor in model.graph.initializer}
    faults = []
    for node in model.graph.node:
        if node.op_type in ("QuantizeLinear", "DequantizeLinear"):
            is_quantizer = node.op_type == "QuantizeLinear"
            real, levels = (
                (node.input[0], node.output[0]) if is_quantizer else (node.output[0], node.input[0])
            )
            scale = constants.get(node.input[1])
            if kinds[real] != kinds[node.input[1]] or kinds[levels] != TensorProto.INT8:
                faults.append(f"{node.name}: types")
            if scale is None or not (scale.astype(np.float64) > 0).all() or constants[node.input[2]].any():
                faults.append(f"{node.name}: values")
        elif node.op_type not in ("Cast", "Resize"):  # the scales of Resize are float32
            found = {kinds[name] for name in (*node.input, *node.output) if kinds.get(name) in FLOATS}
            if len(found) > 1:
                faults.append(f"{node.name}: {found}")
    return faults


def op_types(model: ModelProto) -> list[str]:
    return [node.op_type for node in model.graph.node]


def run(model: ModelProto, images_NCHW: np.ndarray) -> np.ndarray:
    return np.asarray(open_session(model, is_optimised=False).run(None, {"image": images_NCHW})[0])


def constant(model: ModelProto, name: str) -> TensorProto:
    return next(tensor for tensor in model.graph.initializer if tensor.name == name)


def scaled(model: ModelProto, name: str, factor: float) -> None:
    """Multiply a constant, in place."""
    tensor = constant(model, name)
    tensor.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(tensor) * np.float32(factor), name))


def dequantizer(model: ModelProto, name: str) -> NodeProto:
    return next(node for node in model.graph.node if name in node.output)


@pytest.mark.parametrize("half", [FP16, BF16])
def test_everything_between_the_pairs_is_half_as_strong_types_demand(
    int8: tuple[ModelProto, np.ndarray], half: int
) -> None:
    before, after = int8[0], to_half(int8[0], half=half)
    assert find_faults(after) == []
    kinds = types_of(after)
    assert {kinds[value.name] for value in (*after.graph.input, *after.graph.output)} == {FP32}
    wide = [name for name, kind in kinds.items() if kind == FP32]
    outside = {after.graph.input[0].name, after.graph.output[0].name}
    scales = {name for node in after.graph.node if node.op_type == "Resize" for name in node.input[1:]}
    image_scale = {node.input[1] for node in after.graph.node if outside & set(node.input)}
    assert set(wide) == outside | (scales & set(wide)) | image_scale
    assert [node.name for node in quantized_layers(after)] == [node.name for node in quantized_layers(before)]
    assert op_types(after).count("Cast") == 1  # of the logits
    assert node_sources(before).items() <= node_sources(after).items()
    assert after.metadata_props == before.metadata_props


def test_a_scale_of_another_type_is_found(int8: tuple[ModelProto, np.ndarray]) -> None:
    half = to_half(int8[0])
    for name in {node.input[1] for node in half.graph.node if node.op_type == "QuantizeLinear"}:
        tensor = constant(half, name)
        tensor.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(tensor).astype(np.float32), name))
    with pytest.raises(onnx.shape_inference.InferenceError):
        assert find_faults(half) == []
        raise AssertionError


def test_fp16_graph_computes_nearly_the_same(int8: tuple[ModelProto, np.ndarray]) -> None:
    graph, images_NCHW = int8
    assert difference(run(graph, images_NCHW), run(to_half(graph), images_NCHW)).sqnr_db > 25


def test_bf16_graph_computes_nearly_the_same(int8: tuple[ModelProto, np.ndarray]) -> None:
    """By ONNX's own evaluator: ONNX Runtime has no BF16 convolution on the CPU."""
    graph, images_NCHW = int8[0], int8[1][:2]
    logits = ReferenceEvaluator(to_half(graph, half=BF16)).run(None, {"image": images_NCHW})[0]
    assert difference(run(graph, images_NCHW), np.asarray(logits)).sqnr_db > 15


def test_layer_whose_output_fp16_cannot_hold_stays_in_float32_and_in_int8() -> None:
    """Its input is read by another layer too, which gets a DequantizeLinear of its own."""
    graph, images_NCHW = copied(quantized(tiny.Branched)[1]), quantized(tiny.Branched)[2]
    layers = quantized_layers(graph)
    large = next(
        node for node in layers if sum(node.input[0] in other.input for other in graph.graph.node) > 1
    )
    scaled(graph, dequantizer(graph, large.input[1]).input[1], 1e6)
    kept = kept_names(graph, measure_tensors(graph, np.split(images_NCHW, 8)))
    assert large.name in kept
    half = to_half(graph, float32_nodes=kept)
    assert find_faults(half) == [] and types_of(half)[large.output[0]] == FP32
    assert [node.name for node in quantized_layers(half)] == [node.name for node in layers]
    both = [node for node in half.graph.node if node.op_type == "DequantizeLinear"]
    assert {types_of(half)[node.output[0]] for node in both} == {FP16, FP32}
    assert len({node.input[0] for node in both}) < len(both)
    exact, found = run(graph, images_NCHW), run(half, images_NCHW)
    assert np.isfinite(found).all() and difference(exact, found).sqnr_db > 25


def test_layer_whose_scales_fp16_rounds_away_stays_in_float32() -> None:
    """BF16 has the range of float32, so nothing has to stay there."""
    graph = copied(quantized(tiny.Straight)[1])
    layer = quantized_layers(graph)[1]
    scale = dequantizer(graph, layer.input[1]).input[1]
    scaled(graph, scale, 1e-7)
    assert kept_names(graph, {}) == [layer.name]
    assert kept_names(graph, {}, half=BF16) == []
    half = to_half(graph, float32_nodes=[layer.name])
    assert find_faults(half) == []
    np.testing.assert_array_equal(
        numpy_helper.to_array(constant(half, scale)), numpy_helper.to_array(constant(graph, scale))
    )


@pytest.mark.parametrize(("half", "opset"), [(FP16, 19), (BF16, 22)])
def test_opset_is_raised_to_the_first_with_such_types(half: int, opset: int) -> None:
    graph, int8, _ = quantized(tiny.Straight)
    old = onnx.version_converter.convert_version(int8, 17)
    for node, source in zip(old.graph.node, int8.graph.node, strict=True):
        node.metadata_props.extend(source.metadata_props)
    raised = to_half(old, half=half)
    assert [entry.version for entry in raised.opset_import] == [opset]
    assert find_faults(raised) == []
    assert node_sources(raised).items() >= node_sources(old).items() != set()
    plain = onnx.version_converter.convert_version(graph, 17)
    assert [entry.version for entry in to_half(plain).opset_import] == [17]  # FP16 is as old as ONNX


def small(nodes: list[NodeProto], tensors: list[TensorProto], **changes: Any) -> ModelProto:
    image, logits = (helper.make_tensor_value_info(name, FP32, [1, 2, 3, 3]) for name in ("image", "logits"))
    graph = helper.make_graph(nodes, "small", [image], [logits], tensors)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10, **changes)


def test_constant_serves_readers_of_both_types_and_a_lost_one_keeps_its_node_in_float32() -> None:
    """1e-9 is 0 in FP16, and a division by it would be infinite."""
    tiny_value, one = (
        numpy_helper.from_array(np.array(value, np.float32), name)
        for value, name in ((1e-9, "epsilon"), (1.0, "one"))
    )
    model = small(
        [
            helper.make_node("Constant", [], ["two"], value=numpy_helper.from_array(np.float32(2))),
            helper.make_node("Mul", ["image", "two"], ["doubled"], "mul"),
            helper.make_node("Sub", ["doubled", "doubled"], ["zero"], "sub"),
            helper.make_node("Add", ["zero", "epsilon"], ["small"], "add"),
            helper.make_node("Div", ["small", "epsilon"], ["ones"], "div"),
            helper.make_node("Mul", ["ones", "two"], ["logits"], "double"),
        ],
        [tiny_value, one],
    )
    kept = kept_names(model, {})
    assert kept == ["add", "div"]
    image = np.ones((1, 2, 3, 3), np.float32)
    half = to_half(model, float32_nodes=[*kept, "double"])
    assert types_of(half)["doubled"] == FP16 and types_of(half)["two"] == FP32
    np.testing.assert_array_equal(run(half, image), np.full_like(image, 2))


def test_branch_that_reads_a_tensor_from_outside_gets_it_in_float32() -> None:
    branches = [
        helper.make_graph(
            [helper.make_node("Mul", ["doubled", name], ["product"])],
            name,
            [],
            [helper.make_tensor_value_info("product", FP32, [1, 2, 3, 3])],
        )
        for name in ("two", "three")
    ]
    model = small(
        [
            helper.make_node("Mul", ["image", "two"], ["doubled"], "mul"),
            helper.make_node(
                "If", ["yes"], ["chosen"], "if", then_branch=branches[0], else_branch=branches[1]
            ),
            helper.make_node("Add", ["chosen", "doubled"], ["logits"], "add"),
        ],
        [
            numpy_helper.from_array(np.array(2, np.float32), "two"),
            numpy_helper.from_array(np.array(3, np.float32), "three"),
            numpy_helper.from_array(np.array(False), "yes"),
        ],
    )
    half = to_half(model)
    assert types_of(half)["doubled:f16"] == FP16
    image = np.ones((1, 2, 3, 3), np.float32)
    np.testing.assert_array_equal(run(half, image), run(model, image))


def test_tensor_that_is_not_finite_is_named() -> None:
    zero = numpy_helper.from_array(np.array(0, np.float32), "zero")
    model = small([helper.make_node("Div", ["image", "zero"], ["logits"], "div")], [zero])
    with pytest.raises(ArtifactError, match="tensor 'logits' reaches inf"):
        measure_tensors(model, [np.ones((1, 2, 3, 3), np.float32)])


def chain(*steps: tuple[str, str, float | list[float]]) -> ModelProto:
    """Return a graph that applies one operator with a constant after the other: (name, operator, constant)."""
    nodes, tensors, source = [], [], "image"
    for index, (name, operator, value) in enumerate(steps):
        output = "logits" if index == len(steps) - 1 else f"{name}:out"
        values = np.asarray(value, np.float32)
        tensors.append(
            numpy_helper.from_array(values.reshape(-1, 1, 1) if values.ndim else values, f"{name}:by")
        )
        nodes.append(helper.make_node(operator, [source, f"{name}:by"], [output], name))
        source = output
    return small(nodes, tensors)


def image_of(low: float = -1, high: float = 1) -> np.ndarray:
    return np.random.default_rng(0).uniform(low, high, (1, 2, 3, 3)).astype(np.float32)


@pytest.mark.parametrize("factor", [3e5, [3e5, 2.0]])
def test_a_scalar_or_vector_that_fp16_would_clip_stays_in_float32_a5(factor: float | list[float]) -> None:
    model = chain(("down", "Mul", 3e-6), ("up", "Mul", factor), ("half", "Mul", 0.5))
    image = image_of()
    kept = find_float32_nodes(model, measure_tensors(model, [image]), max_abs=32752.0)
    assert [(node.name, node.op_type, node.cause, node.tensor) for node in kept] == [
        ("down", "Mul", "small_constant", "down:by"),
        ("up", "Mul", "large_constant", "up:by"),
    ]
    assert kept[1].magnitude == pytest.approx(3e5)
    half = to_half(model, float32_nodes=[node.name for node in kept])
    assert {types_of(half)[node.output[0]] for node in half.graph.node if node.name in ("down", "up")} == {
        FP32
    }
    assert difference(run(model, image), run(half, image)).sqnr_db > 60


def test_nodes_whose_activations_underflow_stay_in_float32_a5() -> None:
    """Each factor fits FP16; what lies between them does not: rounded to steps of 2**-24 it has 35 dB."""
    model = chain(("a", "Mul", 1e-3), ("b", "Mul", 1e-3), ("c", "Mul", 1e3), ("d", "Mul", 1e3))
    image = image_of()
    kept = find_float32_nodes(model, measure_tensors(model, [image]), max_abs=32752.0)
    assert [(node.name, node.cause, node.tensor) for node in kept] == [
        ("b", "small_values", "b:out"),
        ("c", "small_values", "b:out"),
    ]
    exact, half = run(model, image), to_half(model)
    assert difference(exact, run(half, image)).sqnr_db > 60, "ONNX Runtime rounds nothing between these"
    assert difference(exact, run(rounded_in_float32(half), image)).sqnr_db < 40
    half = to_half(model, float32_nodes=[node.name for node in kept])
    assert difference(exact, run(rounded_in_float32(half), image)).sqnr_db > 60


def test_small_values_that_are_only_added_to_larger_ones_do_no_harm_a5() -> None:
    """A scale of 1e-6 in a residual branch, as ConvNeXt's LayerScale begins (Liu et al. 2022), and a small bias."""
    scale, bias = (
        numpy_helper.from_array(np.full((2, 1, 1), value, np.float32), name)
        for name, value in (("scale", 1e-6), ("bias", 1e-6))
    )
    model = small(
        [
            helper.make_node("Mul", ["image", "scale"], ["branch"], "scaled"),
            helper.make_node("Add", ["image", "branch"], ["sum"], "residual"),
            helper.make_node("Add", ["sum", "bias"], ["logits"], "biased"),
        ],
        [scale, bias],
    )
    image = image_of()
    assert kept_names(model, measure_tensors(model, [image])) == []
    assert difference(run(model, image), run(rounded_in_float32(to_half(model)), image)).sqnr_db > 60
    model.graph.node[1].op_type = "Mul"  # now its size matters
    found = kept_names(model, measure_tensors(model, [image]))
    assert found == ["scaled", "residual", "biased"]


def test_the_bound_of_a_clip_beyond_fp16_keeps_nothing_in_float32_a5() -> None:
    low, high = (
        numpy_helper.from_array(np.float32(value), name)
        for name, value in (("low", 0.0), ("high", np.finfo(np.float32).max))
    )
    model = small([helper.make_node("Clip", ["image", "low", "high"], ["logits"], "clip")], [low, high])
    image = image_of()
    assert kept_names(model, measure_tensors(model, [image])) == []
    np.testing.assert_allclose(run(to_half(model), image), run(model, image), rtol=1e-3)


def test_fp16_graph_rounded_in_float32_is_what_onnx_evaluates() -> None:
    """Kernels of ONNX's own evaluator store FP16. Overflow becomes infinite in both."""
    model = chain(
        ("a", "Mul", 1e-3), ("b", "Mul", 1e-3), ("c", "Mul", 1e3), ("d", "Mul", 6e4), ("e", "Mul", 2e3)
    )
    image = image_of()
    half = to_half(model)
    with np.errstate(over="ignore"):
        expected = np.asarray(ReferenceEvaluator(half).run(None, {"image": image})[0])
    found = run(rounded_in_float32(half), image)
    assert np.isinf(found).any() and np.isfinite(found).any()
    np.testing.assert_allclose(found, expected, rtol=2e-3)


def test_fp16_graph_whose_branches_read_fp16_is_not_rounded_in_float32() -> None:
    branch = helper.make_graph(
        [helper.make_node("Identity", ["doubled"], ["same"])],
        "branch",
        [],
        [helper.make_tensor_value_info("same", FP16, [1, 2, 3, 3])],
    )
    nodes = [
        helper.make_node("Cast", ["image"], ["half"], "cast", to=FP16),
        helper.make_node("Add", ["half", "half"], ["doubled"], "add"),
        helper.make_node("If", ["yes"], ["chosen"], "if", then_branch=branch, else_branch=branch),
        helper.make_node("Cast", ["chosen"], ["logits"], "back", to=FP32),
    ]
    model = small(nodes, [numpy_helper.from_array(np.array(True), "yes")])
    assert rounded_in_float32(model) == model
    np.testing.assert_allclose(run(model, image_of()), 2 * image_of(), rtol=1e-3)


def test_images_beyond_fp16_keep_their_readers_in_float32_a5() -> None:
    """Frames of 16 bits that the graph itself scales."""
    model = chain(("scale", "Mul", 1 / 65535), ("double", "Mul", 2.0))
    image = image_of(0, 65535)
    kept = find_float32_nodes(model, measure_tensors(model, [image]), max_abs=32752.0)
    assert [(node.name, node.cause, node.tensor) for node in kept] == [("scale", "large_values", "image")]


def test_magnitudes_are_those_of_values_that_are_not_zero() -> None:
    for factor in (1e-30, 1e-6, 1.0, 1e20):
        values = np.array([0, 0, 3, -4], np.float32) * np.float32(factor)
        found = magnitudes_of(values)
        assert found.largest == pytest.approx(4 * factor) and found.mean_square == pytest.approx(
            12.5 * factor**2
        )
    assert magnitudes_of(np.zeros(3, np.float32)) == Magnitudes(0.0, 0.0)
    assert magnitudes_of(np.zeros((0, 3), np.float32)) == Magnitudes(0.0, 0.0)
