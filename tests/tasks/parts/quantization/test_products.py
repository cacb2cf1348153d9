"""Products of two activations in INT8, in a small vision transformer with random weights."""

import io
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from onnx import ModelProto
from torch import Tensor, nn

from tasks.parts.builders.build import build
from tasks.parts.cpu import int8_sums_saturate
from tasks.parts.data.input_card import InputCard, Task
from tasks.parts.engines.manifest import ENGINE_FOLDER, LAYERS_FILE
from tasks.parts.onnx_graphs.graph import CARD_KEY, name_nodes, write_graph
from tasks.parts.onnx_graphs.macs import conv_macs, quantized_layers
from tasks.parts.onnx_graphs.signal_to_noise import difference
from tasks.parts.onnx_session import open_session
from tasks.parts.quantization.calibration import choose_ranges, collect_statistics
from tasks.parts.quantization.config import Activations, Calibrator
from tasks.parts.quantization.qdq import TensorRange, add_quantized_twins, insert_qdq, quantizable_tensors
from tasks.parts.tables import read_table
from tests.tasks.conftest import Workshop

SIDE, TOKENS, CHANNELS, HEADS = 32, 65, 64, 4
WEIGHTED = ["Conv", "MatMul", "Gemm"]
WITH_PRODUCTS = [*WEIGHTED, "BatchMatMul"]
RUNTIMES = ["cpu_onnxruntime", "cpu_openvino"]


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        from transformers import ViTConfig, ViTForImageClassification

        self.network = ViTForImageClassification(
            ViTConfig(
                hidden_size=CHANNELS,
                num_hidden_layers=1,
                num_attention_heads=HEADS,
                intermediate_size=128,
                image_size=SIDE,
                patch_size=4,
                num_labels=5,
            )
        )

    def forward(self, images_NCHW: Tensor) -> Tensor:
        logits: Tensor = self.network(images_NCHW).logits
        return logits


@pytest.fixture(scope="module")
def images() -> np.ndarray:
    return np.random.default_rng(0).normal(size=(8, 3, SIDE, SIDE)).astype(np.float32)


@pytest.fixture(scope="module")
def graph() -> ModelProto:
    torch.manual_seed(0)
    file = io.BytesIO()
    torch.onnx.export(
        Classifier().eval(),
        (torch.randn(2, 3, SIDE, SIDE),),
        file,
        dynamo=False,
        opset_version=17,
        input_names=["image"],
        output_names=["logits"],
        dynamic_axes={"image": {0: "batch"}, "logits": {0: "batch"}},
    )
    model = onnx.load_from_string(file.getvalue())
    card = InputCard(tuple("abcde"), (0.5,) * 3, (0.25,) * 3, SIDE, SIDE, Task.classification)
    del model.metadata_props[:]
    model.metadata_props.add(key=CARD_KEY, value=card.to_json())
    name_nodes(model)
    return model


@pytest.fixture(scope="module")
def ranges(graph: ModelProto, images: np.ndarray) -> dict[str, TensorRange]:
    seen = collect_statistics(graph, lambda: [images], quantizable_tensors(graph, WITH_PRODUCTS))
    return choose_ranges(graph, seen, Calibrator.minmax, percentile=100, activations=Activations.uint8)


@pytest.fixture(scope="module")
def with_products(graph: ModelProto, ranges: dict[str, TensorRange]) -> ModelProto:
    return insert_qdq(graph, ranges, op_types=WITH_PRODUCTS)


def products_of(model: ModelProto) -> list[str]:
    """Return the names of both products of attention, which have no weight."""
    return [
        node.name
        for node in model.graph.node
        if node.name.endswith(("attention/MatMul", "attention/MatMul_1"))
    ]


def run(model: ModelProto, images_NCHW: np.ndarray) -> np.ndarray:
    return np.asarray(open_session(model).run(None, {"image": images_NCHW})[0])


def test_products_are_quantized_only_where_they_are_named_a6(
    graph: ModelProto, ranges: dict[str, TensorRange], with_products: ModelProto, images: np.ndarray
) -> None:
    products = set(products_of(graph))
    macs = conv_macs(graph)
    assert {macs[name] for name in products} == {TOKENS * TOKENS * CHANNELS}
    without = insert_qdq(graph, ranges, op_types=WEIGHTED)
    before, after = ({node.name for node in quantized_layers(model)} for model in (without, with_products))
    assert len(products) == 2 and after - before == products and not before - after
    partial = insert_qdq(graph, ranges, op_types=WITH_PRODUCTS, float_nodes=products)
    assert {node.name for node in quantized_layers(partial)} == before
    exact = run(graph, images)
    assert difference(exact, run(with_products, images)).sqnr_db > 25


def test_operands_of_products_have_zero_point_0_and_attention_weights_all_levels_a6(
    with_products: ModelProto,
) -> None:
    constants = {
        tensor.name: onnx.numpy_helper.to_array(tensor) for tensor in with_products.graph.initializer
    }
    makers = {name: node for node in with_products.graph.node for name in node.output}
    types = []
    for node in with_products.graph.node:
        if node.name in products_of(with_products):
            for name in node.input:
                zero_point = constants[makers[name].input[2]]
                assert zero_point == 0
                types.append(str(zero_point.dtype))
    assert types == ["int8", "int8", "uint8", "int8"]  # queries, keys; behind the softmax; values


def test_noise_of_products_is_measured_for_the_ranking_a6(
    graph: ModelProto, ranges: dict[str, TensorRange], images: np.ndarray
) -> None:
    twinned, noise_of, signal_of = add_quantized_twins(graph, ranges, op_types=WITH_PRODUCTS)
    session = open_session(twinned)
    for name in products_of(graph):
        noise, signal = session.run([noise_of[name], signal_of[name]], {"image": images})
        assert 0 < noise < 0.01 * signal


@pytest.mark.parametrize("target", RUNTIMES)
def test_engines_compute_products_in_int8_or_say_that_they_do_not_a6(
    workshop: Workshop, with_products: ModelProto, tmp_path: Path, target: str
) -> None:
    """A CPU without VNNI may have no INT8 kernel for them."""
    write_graph(with_products, tmp_path / "model.onnx")
    images_NHWC = np.random.default_rng(0).integers(0, 256, (2, SIDE, SIDE, 3), np.uint8)
    np.save(tmp_path / "images.npy", images_NHWC)
    out = tmp_path / target
    out.mkdir()
    declared = workshop.target(target, max_batch=1)
    report = build(declared, model=tmp_path / "model.onnx", images=tmp_path / "images.npy", out=out)
    assert report.executed is not None, report.reason
    rows = read_table(out / ENGINE_FOLDER / LAYERS_FILE, "layer", stage="build_engine").values()
    products = set(products_of(with_products))
    precisions = {row["precision"] for row in rows if products & set(row["nodes"].split())}
    if int8_sums_saturate():
        left = {node.node for node in report.executed.not_in_int8}
        assert precisions == {"int8"} or left & products
    else:
        assert precisions == {"int8"} and not products & {node.node for node in report.executed.not_in_int8}
