import pytest
import torch
from onnx import ModelProto

from tasks.core.errors import ArtifactError
from tasks.parts.networks.batchnorm_folding import fold_batchnorm
from tasks.parts.onnx_graphs.export import export_graph
from tasks.parts.onnx_graphs.signal_to_noise import difference
from tasks.parts.onnx_session import open_session
from tasks.parts.quantization.fake_quantization import fake_quantize, float_weights
from tasks.parts.quantization.qdq import TensorRange, insert_qdq
from tests.tasks import tiny_networks as tiny


def calibrate(network_type: type) -> tuple[ModelProto, dict[str, TensorRange]]:
    graph = export_graph(tiny.make(network_type), tiny.card(), height=tiny.SIZE, width=tiny.SIZE, opset=20)
    return graph, tiny.ranges_of(graph, tiny.images(8).numpy(), tiny.OP_TYPES)


@pytest.mark.parametrize("network_type", [tiny.Straight, tiny.Branched])
def test_simulated_network_computes_what_the_graph_computes(network_type: type) -> None:
    graph, ranges = calibrate(network_type)
    network, images_NCHW = tiny.make(network_type), tiny.images(8)
    simulated = fake_quantize(
        fold_batchnorm(network, images_NCHW), graph, ranges, op_types=tiny.OP_TYPES
    ).eval()
    quantized = insert_qdq(graph, ranges, op_types=tiny.OP_TYPES)
    with torch.no_grad():
        expected_NCHW = simulated(images_NCHW).numpy()
    found_NCHW = open_session(quantized, is_optimised=False).run(None, {"image": images_NCHW.numpy()})[0]
    exact_NCHW = network(images_NCHW).detach().numpy()
    assert difference(expected_NCHW, found_NCHW).sqnr_db > difference(exact_NCHW, found_NCHW).sqnr_db + 6


@pytest.mark.slow
def test_simulated_network_trains_and_gives_its_weights_back() -> None:
    graph, ranges = calibrate(tiny.Branched)
    folded = fold_batchnorm(tiny.make(tiny.Branched), tiny.images(2))
    names = folded.state_dict().keys()
    simulated = fake_quantize(folded, graph, ranges, op_types=tiny.OP_TYPES)
    simulated(tiny.images(2)).square().mean().backward()
    gradients = {name: parameter.grad for name, parameter in simulated.named_parameters()}
    assert all(gradient is not None and gradient.abs().sum() > 0 for gradient in gradients.values())
    assert float_weights(simulated).keys() == names


def test_a_layer_called_twice_with_different_ranges_is_refused() -> None:
    graph, ranges = calibrate(tiny.Shared)
    folded = fold_batchnorm(tiny.make(tiny.Shared), tiny.images(2))
    with pytest.raises(ArtifactError, match=r"another call of the layer 'twice' with another range"):
        fake_quantize(folded, graph, ranges, op_types=tiny.OP_TYPES)


def test_ranges_of_another_graph_are_refused() -> None:
    graph, ranges = calibrate(tiny.Straight)
    folded = fold_batchnorm(tiny.make(tiny.Branched), tiny.images(2))
    with pytest.raises(ArtifactError, match="Run quantize_ptq"):
        fake_quantize(folded, graph, ranges, op_types=tiny.OP_TYPES)
