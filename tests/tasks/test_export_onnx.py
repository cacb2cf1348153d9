from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper

from tasks.core.errors import ArtifactError, GateFailed
from tasks.export_onnx import Config, export_onnx, two_of_four_macs_share
from tasks.parts.networks.checkpoint import load_checkpoint, save_checkpoint
from tasks.parts.networks.zeros import layers_without_pattern
from tasks.parts.onnx_graphs.graph import node_sources, read_card_of_graph, read_graph
from tasks.parts.onnx_graphs.macs import conv_macs
from tasks.parts.pruning.weights import prune_two_of_four

CONFIG = Config(opset=20, batch_sizes=[1, 3], max_abs_difference=1e-3, min_sqnr_db=80.0, seed=0)


@pytest.fixture(scope="module")
def exported(workshop: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    out = tmp_path_factory.mktemp("export")
    return export_onnx(CONFIG, checkpoint=workshop.checkpoint, out=out), out


def test_report_and_file_agree(exported: tuple[Any, Path]) -> None:
    report, out = exported
    graph = read_graph(out / "model.onnx")
    assert [path.name for path in out.iterdir()] == ["model.onnx"]
    assert report.size_bytes == (out / "model.onnx").stat().st_size
    assert report.num_nodes == len(graph.graph.node) == len(node_sources(graph))
    assert [found.batch_size for found in report.differences] == [1, 3]
    assert all(found.max_abs < 1e-4 and found.sqnr_db > 100 for found in report.differences)
    assert read_card_of_graph(graph).classes == ("background", "zero", "one")


@pytest.mark.slow
def test_the_same_checkpoint_gives_the_same_bytes(
    exported: tuple[Any, Path], workshop: Any, tmp_path: Path
) -> None:
    export_onnx(CONFIG, checkpoint=workshop.checkpoint, out=tmp_path)
    assert (tmp_path / "model.onnx").read_bytes() == (exported[1] / "model.onnx").read_bytes()


@pytest.mark.slow
def test_gate_stops_an_export_that_differs_from_torch(workshop: Any, tmp_path: Path) -> None:
    strict = replace(CONFIG, max_abs_difference=1e-12)
    with pytest.raises(GateFailed, match=r"batch of 1: .*export_onnx.max_abs_difference"):
        export_onnx(strict, checkpoint=workshop.checkpoint, out=tmp_path)
    assert not list(tmp_path.iterdir())


def test_checkpoint_with_nan_weights_is_refused(workshop: Any, tmp_path: Path) -> None:
    import safetensors
    import safetensors.torch

    tensors = safetensors.torch.load_file(workshop.checkpoint)
    with safetensors.safe_open(workshop.checkpoint, framework="pt") as file:
        metadata = file.metadata()
    tensors["classifier.weight"][0] = float("nan")
    safetensors.torch.save_file(tensors, tmp_path / "nan.safetensors", metadata)
    with pytest.raises(ArtifactError, match=r"classifier\.weight"):
        export_onnx(CONFIG, checkpoint=tmp_path / "nan.safetensors", out=tmp_path)


@pytest.mark.slow
def test_two_of_four_share_is_that_of_the_weights_in_the_graph(workshop: Any, tmp_path: Path) -> None:
    """Counted again here, with loops, on the folded weights that the runtime will read."""
    network, card = load_checkpoint(workshop.checkpoint)
    prune_two_of_four(network)
    with torch.no_grad():
        network.get_parameter("head.1.pointwise.conv.weight")[0, 4:7] = 1.0  # three of four: dense
    save_checkpoint(tmp_path / "sparse.safetensors", network, card)
    report = export_onnx(CONFIG, checkpoint=tmp_path / "sparse.safetensors", out=tmp_path)
    graph = read_graph(tmp_path / "model.onnx")
    weights = {item.name: numpy_helper.to_array(item) for item in graph.graph.initializer}
    macs, total, sparse, dense = conv_macs(graph), 0, 0, []
    for node in graph.graph.node:
        if node.op_type == "Conv":
            values = weights[node.input[1]]
            counts = [
                np.count_nonzero(values[:, start : start + 4], axis=1).max()
                for start in range(0, values.shape[1], 4)
            ]
            fits = values.shape[1] % 4 == 0 and max(counts) <= 2
            total, sparse = total + macs[node.name], sparse + fits * macs[node.name]
            dense += [] if fits else [node_sources(graph)[node.name][0]]
    assert set(dense) == {*layers_without_pattern(network), "head.1.pointwise.conv"}
    assert report.two_of_four_macs_share == pytest.approx(sparse / total)
    assert 0.3 < report.two_of_four_macs_share < 1


@pytest.mark.parametrize(("op_type", "trans_b"), [("MatMul", 0), ("Gemm", 0), ("Gemm", 1)])
def test_two_of_four_weights_of_a_matrix_product_are_found_along_their_inputs(
    op_type: str, trans_b: int
) -> None:
    weights_OI = np.zeros((6, 8), np.float32)
    weights_OI[:, [0, 3, 5, 6]] = 1
    for sparse_OI, expected in ((weights_OI, 1.0), (np.ones_like(weights_OI), 0.0)):
        constant = numpy_helper.from_array(sparse_OI if trans_b else sparse_OI.T.copy(), "weights")
        attributes = {"transB": 1} if trans_b else {}
        node = helper.make_node(op_type, ["tokens", "weights"], ["out"], "product", **attributes)
        tokens, out = (
            helper.make_tensor_value_info(name, TensorProto.FLOAT, [5, channels])
            for name, channels in (("tokens", 8), ("out", 6))
        )
        graph = helper.make_model(helper.make_graph([node], "graph", [tokens], [out], [constant]))
        assert two_of_four_macs_share(graph) == expected


def test_dense_network_has_no_two_of_four_weights(exported: tuple[Any, Path]) -> None:
    assert exported[0].two_of_four_macs_share == 0
