from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

from tasks.core.errors import ArtifactError
from tasks.parts.data.input_card import InputCard
from tasks.parts.onnx_graphs.export import export_graph
from tasks.parts.onnx_graphs.graph import (
    drop_unused,
    index_graph,
    is_quantized,
    join_equal_constants,
    read_card_of_graph,
    read_graph,
    replace_nodes,
    set_node_source,
    write_graph,
)
from tasks.parts.onnx_graphs.int8_activations import activations_to_int8
from tasks.parts.onnx_graphs.signal_to_noise import difference
from tasks.parts.onnx_session import open_session
from tests.tasks import tiny_networks as tiny


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("graph") / "model.onnx"
    graph = export_graph(tiny.make(tiny.Straight), tiny.card(), height=tiny.SIZE, width=tiny.SIZE, opset=20)
    write_graph(graph, path)
    return path


@pytest.mark.slow
@pytest.mark.parametrize("network_type", [tiny.Straight, tiny.Branched, tiny.Spoilt])
@pytest.mark.parametrize("op_types", [("Conv",), tiny.OP_TYPES])
def test_int8_activations_compute_nearly_what_uint8_ones_do(
    network_type: type, op_types: tuple[str, ...]
) -> None:
    graph, unsigned, images_NCHW = tiny.quantized(network_type, op_types)
    signed = activations_to_int8(unsigned)
    onnx.checker.check_model(signed, full_check=True)
    feed = {"image": images_NCHW}
    exact, left, right = (
        open_session(model, is_optimised=False).run(None, feed)[0] for model in (graph, signed, unsigned)
    )
    assert difference(left, right).sqnr_db > 20
    assert difference(exact, right).sqnr_db > difference(exact, left).sqnr_db - 1


def test_int8_activations_cover_the_range_symmetrically() -> None:
    _, unsigned, _ = tiny.quantized(tiny.Branched, tiny.OP_TYPES)
    signed = activations_to_int8(unsigned)
    before, after = (
        {tensor.name: numpy_helper.to_array(tensor) for tensor in model.graph.initializer}
        for model in (unsigned, signed)
    )
    pairs = [
        (left, right)
        for left, right in zip(unsigned.graph.node, signed.graph.node, strict=True)
        if left.op_type == "QuantizeLinear"
    ]
    assert len(pairs) > 5
    for left, right in pairs:
        scale, zero_point = (before[name] for name in left.input[1:3])
        assert zero_point.dtype == np.uint8 and after[right.input[2]].dtype == np.int8
        assert after[right.input[2]] == 0
        amax = scale * max(int(zero_point), 255 - int(zero_point))
        assert 127 * after[right.input[1]] == pytest.approx(amax, rel=1e-5)
    for left, right in zip(unsigned.graph.node, signed.graph.node, strict=True):
        if left.op_type == "DequantizeLinear" and left.input[0] in before:
            assert left == right  # a weight


def test_onnxruntime_runs_all_convolutions_in_integers(tmp_path: Path) -> None:
    import onnxruntime

    _, quantized, _ = tiny.quantized(tiny.Branched, tiny.OP_TYPES)
    options = onnxruntime.SessionOptions()
    options.optimized_model_filepath = str(tmp_path / "optimized.onnx")
    options.log_severity_level = 3
    onnxruntime.InferenceSession(quantized.SerializeToString(), options)
    kinds = [node.op_type for node in onnx.load(tmp_path / "optimized.onnx").graph.node]
    assert kinds.count("QLinearConv") == 6
    assert "Relu" not in kinds
    assert {"QLinearAdd", "QLinearConcat", "QLinearMul", "QLinearSigmoid"} <= set(kinds)


def test_is_quantized_and_the_card_survive_quantization() -> None:
    graph, quantized, _ = tiny.quantized(tiny.Straight, ("Conv",))
    assert (is_quantized(graph), is_quantized(quantized)) == (False, True)
    assert read_card_of_graph(activations_to_int8(quantized)) == InputCard.from_json(tiny.card().to_json())


def test_a_whole_file_is_read_back_equal(written: Path) -> None:
    graph = read_graph(written)
    assert graph.SerializeToString(deterministic=True) == written.read_bytes()


def test_missing_and_empty_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match="no such file"):
        read_graph(tmp_path / "model.onnx")
    (tmp_path / "model.onnx").touch()
    with pytest.raises(ArtifactError, match="0 bytes"):
        read_graph(tmp_path / "model.onnx")


def test_a_file_cut_anywhere_is_refused(written: Path, tmp_path: Path) -> None:
    whole = written.read_bytes()
    torn = tmp_path / "torn.onnx"
    for length in [*range(1, len(whole), 397), len(whole) - 1]:
        torn.write_bytes(whole[:length])
        with pytest.raises(ArtifactError, match=r"torn\.onnx"):
            read_graph(torn)


def test_a_file_of_another_kind_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "picture.onnx"
    path.write_bytes(b"\x89PNG\r\n\x1a\n" + bytes(range(256)))
    with pytest.raises(ArtifactError, match=r"picture\.onnx"):
        read_graph(path)


def test_weights_outside_the_file_are_refused(written: Path, tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    onnx.save(onnx.load(written), path, save_as_external_data=True, location="weights.bin", size_threshold=0)
    with pytest.raises(ArtifactError, match="are outside the file"):
        read_graph(path)


@pytest.mark.parametrize(("opset", "ir_version", "text"), [(99, 10, "opset 99"), (20, 99, "IR version 99")])
def test_versions_out_of_range_are_refused(
    written: Path, tmp_path: Path, opset: int, ir_version: int, text: str
) -> None:
    graph = onnx.load(written)
    graph.opset_import[0].version, graph.ir_version = opset, ir_version
    path = tmp_path / "model.onnx"
    path.write_bytes(graph.SerializeToString())
    with pytest.raises(ArtifactError, match=text):
        read_graph(path)


def test_a_graph_without_card_is_refused(written: Path) -> None:
    graph = onnx.load(written)
    del graph.metadata_props[:]
    with pytest.raises(ArtifactError, match="expected 1 with classes"):
        read_card_of_graph(graph)


def test_nodes_that_nothing_reads_are_dropped_and_those_that_a_branch_reads_stay_a3() -> None:
    def value(name: str) -> onnx.ValueInfoProto:
        return helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, [2])

    branches = {
        f"{word}_branch": helper.make_graph(
            [helper.make_node("Add", ["scaled", "shift"], [word], word)], word, [], [value(word)]
        )
        for word in ("then", "else")
    }
    nodes = [
        helper.make_node("Mul", ["image", "factor"], ["scaled"], "scaled"),
        helper.make_node("Neg", ["image"], ["dead_1"], "dead_1"),
        helper.make_node("Add", ["dead_1", "unread"], ["dead_2"], "dead_2"),
        helper.make_node("If", ["condition"], ["logits"], "if", **branches),
        helper.make_node("Relu", ["logits"], ["dead_3"], "dead_3"),
    ]
    constants = {name: np.ones(2, np.float32) for name in ("factor", "shift", "unread")}
    tensors = [numpy_helper.from_array(item, name) for name, item in constants.items()]
    tensors.append(numpy_helper.from_array(np.array(True), "condition"))
    graph = helper.make_graph(nodes, "branches", [value("image")], [value("logits")], tensors)
    drop_unused(graph)
    assert [node.name for node in graph.node] == ["scaled", "if"]
    assert {tensor.name for tensor in graph.initializer} == {"factor", "shift", "condition"}


def chain(*nodes: onnx.NodeProto) -> onnx.GraphProto:
    image, values = (helper.make_tensor_value_info(name, 1, [1, 2]) for name in ("image", "values"))
    return helper.make_graph(nodes, "chain", [image], [values], [numpy_helper.from_array(np.ones(2), "one")])


def test_index_says_who_makes_and_who_reads_each_tensor() -> None:
    graph = chain(
        helper.make_node("Add", ["image", "one"], ["sum"], "add"),
        helper.make_node("Mul", ["sum", "sum"], ["square"], "square"),
        helper.make_node("Sub", ["square", "sum"], ["values"], "last"),
    )
    index = index_graph(graph)
    assert {name: node.name for name, node in index.makers.items()} == {
        "sum": "add",
        "square": "square",
        "values": "last",
    }
    assert [node.name for node in index.readers["sum"]] == ["square", "last"]
    assert "values" not in index.readers and index.outputs == {"values"} and list(index.constants) == ["one"]
    index.makers["sum"].op_type = "Sub"
    assert graph.node[0].op_type == "Sub"


def test_nodes_are_replaced_in_place_and_keep_the_origin() -> None:
    graph = chain(*(helper.make_node("Neg", [f"{i}"], [f"{i + 1}"], f"neg{i}") for i in range(4)))
    for node in graph.node:
        set_node_source(node, node.name, "net.py:1")
    new = [helper.make_node("Abs", ["1"], ["x"]), helper.make_node("Relu", ["x"], ["2"])]
    replace_nodes(graph, {"2": new, "4": []})
    assert [node.op_type for node in graph.node] == ["Neg", "Abs", "Relu", "Neg"]
    origins = [node.metadata_props[0].value for node in graph.node]
    assert origins == ["neg0", "neg1", "neg1", "neg2"]


def test_equal_small_constants_become_one() -> None:
    names = ["one", "same", "other_type", "other_shape"]
    graph = chain(
        *(
            helper.make_node("Op", [f"sum{i}", name], [f"sum{i + 1}"], f"add{i}")
            for i, name in enumerate(names)
        ),
        helper.make_node("Neg", ["sum4"], ["values"], "last"),
    )
    for name, values in zip(names[1:], (np.ones(2), np.ones(2, np.int64), np.ones((2, 1))), strict=True):
        graph.initializer.append(numpy_helper.from_array(values, name))
    join_equal_constants(graph)
    assert [node.input[1] for node in graph.node[:4]] == ["one", "one", "other_type", "other_shape"]
    assert [tensor.name for tensor in graph.initializer] == ["one", "other_type", "other_shape"]
