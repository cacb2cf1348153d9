"""Which kernels the runtimes choose for the Q/DQ graphs of other people's architectures."""

from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import ModelProto

from benchmarks.placement import (
    IMAGES,
    MEAN,
    NETWORKS,
    SIDE,
    STD,
    as_imported,
    configuration,
    draw_images,
    imported,
    quantized,
)
from tasks.parts.builders.build import build
from tasks.parts.builders.graph_rewrites import drop_pairs_between_moves, encode_for, fuse_activations
from tasks.parts.builders.report import EngineBuild
from tasks.parts.data.dataset import normalise
from tasks.parts.onnx_graphs.graph import write_graph
from tasks.parts.onnx_graphs.half_precision import to_half
from tasks.parts.onnx_graphs.signal_to_noise import difference
from tasks.parts.onnx_session import open_session

IMAGES_NCHW = normalise(draw_images(4), MEAN, STD)


@dataclass(frozen=True)
class Graphs:
    """A network as imported, and its Q/DQ form."""

    exact: ModelProto
    int8: ModelProto


@pytest.fixture(scope="module", params=list(NETWORKS))
def graphs(request: pytest.FixtureRequest) -> Graphs:
    exact = imported(NETWORKS[request.param])
    return Graphs(exact, quantized(exact, IMAGES_NCHW))


def build_for(target: str, graph: ModelProto, out: Path) -> EngineBuild:
    write_graph(graph, out / "model.onnx")
    np.save(out / IMAGES, draw_images(4))
    return build(
        configuration(f"build_engine.{target}"), model=out / "model.onnx", images=out / IMAGES, out=out
    )


def logits(graph: ModelProto) -> np.ndarray:
    """Return the logits as the graph is written: integer kernels add in 16 bits on a CPU without VNNI."""
    found: np.ndarray = open_session(graph, is_optimised=False).run(None, {"image": IMAGES_NCHW})[0]
    return found


@pytest.mark.parametrize("target", ["cpu_onnxruntime", "cpu_openvino"])
def test_layers_run_in_int8(
    graphs: Graphs, target: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    """ONNX Runtime has no integer convolution with float logits."""
    is_float_end = request.node.callspec.params["graphs"] == "conv_transpose" and target == "cpu_onnxruntime"
    report = build_for(target, graphs.int8, tmp_path)
    assert report.executed is not None, report.reason
    assert report.executed.macs_share_quantized > 0.99
    assert report.executed.macs_share["int8"] > (0.9 if is_float_end else 0.99)


def test_onnx_runtime_computes_the_operators_between_the_layers_on_integers(
    graphs: Graphs, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    network = request.node.callspec.params["graphs"]
    file = tmp_path / "optimised.onnx"
    open_session(encode_for(configuration("build_engine.cpu_onnxruntime"), graphs.int8), optimised_file=file)
    kinds = Counter(node.op_type for node in onnx.load(file).graph.node)
    assert not kinds.keys() & {"Clip", "Relu", "LeakyRelu", "Concat", "Add", "MaxPool", "FusedConv"}
    expected = {
        "leaky_relu": {"QLinearLeakyRelu": 7},
        "silu": {"QLinearSigmoid": 7, "QLinearMul": 7},
        "channel_shuffle": {"QLinearConcat": 3},
        "squeeze_excite": {"QLinearMul": 2, "QLinearGlobalAveragePool": 3},
        "residual": {"QLinearAdd": 2},
        "gemm": {"NhwcMaxPool": 2, "QGemm": 1, "MatMulIntegerToFloat": 1},
    }.get(network, {})
    assert {kind: kinds[kind] for kind in expected} == expected


def test_pairs_and_their_removal_keep_the_logits(graphs: Graphs) -> None:
    exact = logits(graphs.exact)
    assert difference(exact, logits(graphs.int8)).sqnr_db > 20
    fused = fuse_activations(graphs.int8)
    onnx.checker.check_model(fused, full_check=True)
    assert difference(exact, logits(fused)).sqnr_db > 20


@pytest.mark.parametrize(
    ("network", "num_removed"), [("relu", 0), ("hardswish", 7), ("leaky_relu", 7), ("silu", 14)]
)
def test_only_pairs_between_layer_and_activation_are_removed(network: str, num_removed: int) -> None:
    graph = quantized(imported(NETWORKS[network]), IMAGES_NCHW)
    fused = fuse_activations(graph)
    before, after = ([node.op_type for node in found.graph.node] for found in (graph, fused))
    assert before.count("QuantizeLinear") - after.count("QuantizeLinear") == num_removed
    makers = {name: node.op_type for node in fused.graph.node for name in node.output}
    layers = [node for node in fused.graph.node if node.op_type in ("Conv", "Gemm")]
    assert {makers[node.input[0]] for node in layers} == {"DequantizeLinear"}


def test_openvino_shuffles_channels_in_one_kernel(tmp_path: Path) -> None:
    graph = quantized(imported(NETWORKS["channel_shuffle"]), IMAGES_NCHW)
    report = build_for("cpu_openvino", graph, tmp_path)
    assert report.precisions["ShuffleChannels"] == {"int8": 3} and "Transpose" not in report.precisions
    moved = drop_pairs_between_moves(graph)
    onnx.checker.check_model(moved, full_check=True)
    assert np.array_equal(logits(moved), logits(graph))
    before, after = ([node.op_type for node in found.graph.node] for found in (graph, moved))
    assert before.count("QuantizeLinear") - after.count("QuantizeLinear") == 8


def test_a_pair_between_moves_that_rounds_stays() -> None:
    graph = quantized(imported(NETWORKS["channel_shuffle"]), IMAGES_NCHW)
    [transpose, *_] = [node for node in graph.graph.node if node.op_type == "Transpose"]
    quantize = next(node for node in graph.graph.node if transpose.output[0] in node.input)
    scale = next(tensor for tensor in graph.graph.initializer if tensor.name == quantize.input[1])
    scale.CopyFrom(onnx.numpy_helper.from_array(2 * onnx.numpy_helper.to_array(scale), scale.name))
    kept = [node.name for node in drop_pairs_between_moves(graph).graph.node]
    assert quantize.name in kept


def test_a_moved_tensor_keeps_the_scale_of_its_source() -> None:
    graph = quantized(imported(NETWORKS["channel_shuffle"]), IMAGES_NCHW)
    constants = {tensor.name: onnx.numpy_helper.to_array(tensor) for tensor in graph.graph.initializer}
    readers = {name: node for node in graph.graph.node for name in node.input}
    makers = {name: node for node in graph.graph.node for name in node.output}
    moved = [node for node in graph.graph.node if node.op_type in ("Reshape", "Transpose", "Split")]
    assert len(moved) >= 9
    for node in moved:
        before = makers[node.input[0]]
        for name in node.output:
            after = readers[name]
            assert (before.op_type, after.op_type) == ("DequantizeLinear", "QuantizeLinear")
            assert [constants[item] for item in before.input[1:]] == [
                constants[item] for item in after.input[1:]
            ]


def reader() -> ModelProto:
    """Return a network that reads columns of features as a sequence, with the logits [N, 5] of their mean."""
    random = np.random.default_rng(0)
    shapes = {"kernel": (16, 3, 3, 3), "given": (1, 32, 16), "state": (1, 32, 8), "head": (8, 5)}
    constants = {name: random.normal(size=shape).astype(np.float32) / 4 for name, shape in shapes.items()} | {
        "rows": np.array([2]),
        "columns": np.array([1]),
    }
    node = onnx.helper.make_node
    nodes = [
        node("Conv", ["image", "kernel"], ["maps"], pads=[1, 1, 1, 1]),
        node("ReduceMean", ["maps", "rows"], ["columns_NCT"], keepdims=0),
        node("Transpose", ["columns_NCT"], ["columns_TNC"], perm=[2, 0, 1]),
        node("LSTM", ["columns_TNC", "given", "state"], ["states_TDNC"], hidden_size=8),
        node("Squeeze", ["states_TDNC", "columns"], ["states_TNC"]),
        node("Transpose", ["states_TNC"], ["states_NTC"], perm=[1, 0, 2]),
        node("MatMul", ["states_NTC", "head"], ["answers_NTC"]),
        node("ReduceMean", ["answers_NTC", "columns"], ["logits"], keepdims=0),
    ]
    declare = onnx.helper.make_tensor_value_info
    graph = onnx.helper.make_graph(
        nodes,
        "reader",
        [declare("image", onnx.TensorProto.FLOAT, ["n", 3, SIDE, SIDE])],
        [declare("logits", onnx.TensorProto.FLOAT, ["n", 5])],
        [onnx.numpy_helper.from_array(values, name) for name, values in constants.items()],
    )
    return onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 18)], ir_version=9)


def test_runtime_that_dies_of_a_graph_fails_the_engine_and_not_the_run(tmp_path: Path) -> None:
    """ONNX Runtime 1.31 ends with SIGSEGV when it optimises an LSTM in FP16 for the CPU. OpenVINO does not."""
    graph = to_half(as_imported(reader(), SIDE))
    found = {}
    for target in ("cpu_onnxruntime", "cpu_openvino"):
        (tmp_path / target).mkdir()
        found[target] = build_for(target, graph, tmp_path / target)
    assert found["cpu_onnxruntime"].status == "failed"
    assert "ends with SIGSEGV while it optimises the graph" in found["cpu_onnxruntime"].reason
    assert found["cpu_openvino"].status == "built", found["cpu_openvino"].reason
