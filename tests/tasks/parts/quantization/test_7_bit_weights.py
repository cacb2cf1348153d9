"""Weights of 7 bits, for x86 CPUs without VNNI, in every stage that judges INT8 graphs."""

import numpy as np
import onnx
import pytest
import torch
from onnx import ModelProto

from tasks.parts.cpu import int8_sums_saturate
from tasks.parts.networks.batchnorm_folding import fold_batchnorm
from tasks.parts.onnx_graphs.int8_weights import INT7_MAX, weights_to_7_bits
from tasks.parts.onnx_graphs.signal_to_noise import difference
from tasks.parts.onnx_session import open_session
from tasks.parts.quantization.config import Activations
from tasks.parts.quantization.evaluation import weight_bits, with_activations
from tasks.parts.quantization.fake_quantization import fake_quantize
from tasks.parts.quantization.qdq import insert_qdq
from tasks.parts.quantization.weight_rounding import round_weights
from tests.tasks import tiny_networks as tiny


@pytest.fixture
def without_vnni(monkeypatch: pytest.MonkeyPatch) -> None:
    """An x86 CPU of before 2019, as far as the product asks; its kernels cannot exist here."""
    monkeypatch.setattr("tasks.parts.cpu.read_cpu_flags", lambda: frozenset({"ssse3", "avx2"}))


def logits(model: ModelProto, images_NCHW: np.ndarray) -> np.ndarray:
    """Return the logits as the graph is written: integer kernels add in 16 bits on a CPU without VNNI."""
    return np.asarray(open_session(model, is_optimised=False).run(None, {"image": images_NCHW})[0])


def int8_weights(model: ModelProto) -> dict[str, np.ndarray]:
    """Return the int8 weights of each convolution that reads a quantized activation."""
    constants = {tensor.name: onnx.numpy_helper.to_array(tensor) for tensor in model.graph.initializer}
    makers = {name: node for node in model.graph.node for name in node.output}
    found = {}
    for node in model.graph.node:
        inputs = [makers.get(name) for name in node.input[:2]]
        if node.op_type == "Conv" and all(maker and maker.op_type == "DequantizeLinear" for maker in inputs):
            assert inputs[1]
            found[node.name] = constants[inputs[1].input[0]]
    return found


@pytest.mark.parametrize("network_type", [tiny.Straight, tiny.Branched])
def test_sums_of_two_products_fit_16_bits_with_weights_of_7(network_type: type) -> None:
    _, wide, images_NCHW = tiny.quantized(network_type, tiny.OP_TYPES)
    narrow = weights_to_7_bits(wide)
    before, after = int8_weights(wide), int8_weights(narrow)
    assert before and before.keys() == after.keys()
    for name, weights in after.items():
        assert np.abs(before[name]).max() == 127
        assert 2 * 255 * np.abs(weights.astype(int)).max() <= np.iinfo(np.int16).max
    assert difference(logits(wide, images_NCHW), logits(narrow, images_NCHW)).sqnr_db > 25


@pytest.mark.usefixtures("without_vnni")
def test_graphs_are_judged_with_the_weights_that_will_run() -> None:
    _, wide, _ = tiny.quantized(tiny.Straight, tiny.OP_TYPES)
    assert int8_sums_saturate()
    assert (weight_bits(Activations.uint8), weight_bits(Activations.int8)) == (7, 8)
    assert with_activations(wide, Activations.uint8) == weights_to_7_bits(wide)
    assert (
        max(np.abs(found).max() for found in int8_weights(with_activations(wide, Activations.int8)).values())
        == 127
    )


def test_rounded_weights_of_7_bits_are_found_again() -> None:
    """They pass through the 8 bits that a graph is stored with."""
    graph, wide, images_NCHW = tiny.quantized(tiny.Straight, tiny.OP_TYPES)
    ranges = tiny.ranges_of(graph, images_NCHW, tiny.OP_TYPES)
    rounded = round_weights(graph, weights_to_7_bits(wide), [images_NCHW], op_types=tiny.OP_TYPES, num_bits=7)
    found = int8_weights(weights_to_7_bits(insert_qdq(rounded, ranges, op_types=tiny.OP_TYPES)))
    before = int8_weights(weights_to_7_bits(wide))
    assert any((found[name] != before[name]).any() for name in before)
    constants = {item.name: onnx.numpy_helper.to_array(item) for item in rounded.graph.initializer}
    weight_of = {node.name: node.input[1] for node in rounded.graph.node if node.op_type == "Conv"}
    for name, levels in found.items():
        weight = constants[weight_of[name]]
        scales = np.abs(weight).max(axis=(1, 2, 3), keepdims=True) / INT7_MAX
        np.testing.assert_allclose(weight, levels * scales, rtol=1e-5)


def test_training_simulates_weights_of_7_bits() -> None:
    graph, wide, images_NCHW = tiny.quantized(tiny.Straight, tiny.OP_TYPES)
    ranges = tiny.ranges_of(graph, images_NCHW, tiny.OP_TYPES)
    found = logits(weights_to_7_bits(wide), images_NCHW)
    db = {}
    for bits in (7, 8):
        folded = fold_batchnorm(tiny.make(tiny.Straight), tiny.images(2))
        simulated = fake_quantize(folded, graph, ranges, op_types=tiny.OP_TYPES, weight_bits=bits).eval()
        with torch.no_grad():
            db[bits] = difference(simulated(torch.from_numpy(images_NCHW)).numpy(), found).sqnr_db
    assert db[7] > db[8] + 3
