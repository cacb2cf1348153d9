import onnx
import onnxruntime
import pytest
import torch
from onnx import ModelProto
from torch import Tensor, nn
from torch.nn import functional

from tasks.core.errors import ArtifactError
from tasks.parts.data.input_card import InputCard
from tasks.parts.networks.batchnorm_folding import fold_batchnorm
from tasks.parts.networks.build import build_network
from tasks.parts.networks.config import NetworkConfig, NetworkName
from tasks.parts.onnx_graphs.export import INPUT_NAME, _run_exporter, export_graph
from tasks.parts.onnx_graphs.graph import node_sources, read_card_of_graph
from tasks.parts.onnx_graphs.signal_to_noise import difference
from tests.tasks import tiny_networks as tiny


def export(network: nn.Module) -> ModelProto:
    return export_graph(network, tiny.card(), height=tiny.SIZE, width=tiny.SIZE, opset=20)


@pytest.fixture(scope="module")
def branched() -> ModelProto:
    return export(tiny.make(tiny.Branched))


def test_graph_computes_what_torch_computes_at_several_batch_sizes(branched: ModelProto) -> None:
    network = tiny.make(tiny.Branched)
    session = onnxruntime.InferenceSession(branched.SerializeToString())
    for batch_size in (1, 2, 5):
        images_NCHW = tiny.images(batch_size)
        found_NCHW = session.run(["logits"], {"image": images_NCHW.numpy()})[0]
        assert difference(network(images_NCHW).detach().numpy(), found_NCHW).sqnr_db > 100


def test_every_node_names_its_module_and_line_of_our_code(branched: ModelProto) -> None:
    sources = node_sources(branched)
    assert sources.keys() == {node.name for node in branched.graph.node}
    modules = dict(tiny.make(tiny.Branched).named_modules())
    for name, (module, source) in sources.items():
        assert module == "network" or module in modules, name
        file, line = source.split(":")
        assert file == "tests/tasks/tiny_networks.py"
        assert int(line) > 1
    assert sources["block.2.0/Conv"][0] == "block.2.0"


@pytest.mark.slow
def test_lines_of_networks_are_those_of_the_network_files() -> None:
    config = NetworkConfig(name=NetworkName.fast_scnn, width=0.25, depth=0.34, depthwise=False)
    network = build_network(config, 3).eval()
    graph = export_graph(network, tiny.card(), height=64, width=64, opset=20)
    files = {source.split(":")[0] for _, source in node_sources(graph).values()}
    assert files == {"tasks/parts/networks/fast_scnn.py", "tasks/parts/networks/blocks.py"}


@pytest.mark.slow
def test_names_do_not_depend_on_weights_and_equal_weights_give_equal_bytes(branched: ModelProto) -> None:
    same, other = export(tiny.make(tiny.Branched)), export(tiny.make(tiny.Branched, seed=3))
    assert same.SerializeToString(deterministic=True) == branched.SerializeToString(deterministic=True)
    assert other.SerializeToString(deterministic=True) != branched.SerializeToString(deterministic=True)
    names = [(node.name, *node.input, *node.output) for node in branched.graph.node]
    assert [(node.name, *node.input, *node.output) for node in other.graph.node] == names


def test_graph_has_no_batchnorm_no_shape_arithmetic_and_a_dynamic_batch(branched: ModelProto) -> None:
    kinds = {node.op_type for node in branched.graph.node}
    assert kinds == {
        "Conv", "Relu", "Add", "GlobalAveragePool", "Sigmoid", "Mul", "AveragePool", "Resize", "Concat",
    }  # fmt: skip
    (image,), (logits,) = branched.graph.input, branched.graph.output
    assert (image.name, logits.name) == ("image", "logits")
    assert [dim.dim_param or dim.dim_value for dim in image.type.tensor_type.shape.dim] == [
        "batch",
        3,
        32,
        32,
    ]
    assert [dim.dim_param or dim.dim_value for dim in logits.type.tensor_type.shape.dim] == [
        "batch",
        3,
        32,
        32,
    ]
    assert read_card_of_graph(branched) == InputCard.from_json(tiny.card().to_json())
    onnx.checker.check_model(branched, full_check=True)


def test_no_path_of_this_machine_is_in_the_file(branched: ModelProto) -> None:
    data = branched.SerializeToString()
    assert b"site-packages" not in data
    assert b"stack_trace" not in data


def test_folding_keeps_the_numbers_and_a_batchnorm_whose_convolution_has_another_reader() -> None:
    for kind, num_left in ((tiny.Straight, 0), (tiny.Branched, 0), (tiny.Spoilt, 1)):
        network = tiny.make(kind)
        folded = fold_batchnorm(network, tiny.images(2))
        assert sum(isinstance(module, nn.BatchNorm2d) for module in folded.modules()) == num_left
        assert all(parameter.requires_grad for parameter in folded.parameters())
        torch.testing.assert_close(folded(tiny.images(4)), network(tiny.images(4)), atol=1e-5, rtol=1e-4)


def test_weights_that_are_not_finite_are_refused() -> None:
    network = tiny.make(tiny.Straight)
    with torch.no_grad():
        network.get_parameter("classifier.weight")[0, 0] = torch.nan
    with pytest.raises(ArtifactError, match=r"NaN or infinite values \(first: 'classifier.weight'\)"):
        export(network)


class AttentionOfThreeAxes(nn.Module):
    """Attention of positions to positions without an axis of heads."""

    def forward(self, maps_NCHW: Tensor) -> Tensor:
        tokens_NTC = maps_NCHW.flatten(2).transpose(1, 2)
        seen_NTC = functional.scaled_dot_product_attention(tokens_NTC, tokens_NTC, tokens_NTC)
        return seen_NTC.transpose(1, 2).reshape(maps_NCHW.shape)


class Eigenvalues(nn.Module):
    """An operation that ONNX lacks."""

    def forward(self, maps_NCHW: Tensor) -> Tensor:
        return torch.linalg.eigvals(maps_NCHW).real


def test_attention_without_an_axis_of_heads_is_exported() -> None:
    images_NCHW = torch.randn(3, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    graph = _run_exporter(AttentionOfThreeAxes(), torch.zeros(2, 3, 8, 8), 20)
    session = onnxruntime.InferenceSession(graph.SerializeToString())
    (found_NCHW,) = session.run(None, {INPUT_NAME: images_NCHW.numpy()})
    torch.testing.assert_close(torch.from_numpy(found_NCHW), AttentionOfThreeAxes()(images_NCHW))


def test_operation_that_onnx_lacks_is_named() -> None:
    with pytest.raises(ArtifactError, match=r"cannot write this network as ONNX: .*linalg_eig"):
        _run_exporter(Eigenvalues(), torch.zeros(2, 3, 8, 8), 20)
