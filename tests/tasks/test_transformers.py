"""A tiny SegFormer through every stage behind training, and DINOv2 as its teacher."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tasks import distill, train
from tasks.build_engine import build_engine
from tasks.core.errors import ArtifactError
from tasks.diff_layers import BisectionConfig, diff_layers
from tasks.diff_layers import Config as DiffConfig
from tasks.export_onnx import Config as ExportConfig
from tasks.export_onnx import export_onnx
from tasks.parts.data.dataset import calibration_images, read_manifest
from tasks.parts.networks.build import build_network
from tasks.parts.networks.checkpoint import load_checkpoint, save_checkpoint
from tasks.parts.networks.config import NetworkConfig, NetworkName
from tasks.parts.networks.model_card import ModelCard
from tasks.parts.onnx_graphs.graph import MOVES_VALUES, node_sources, read_graph
from tasks.parts.onnx_graphs.macs import conv_macs
from tasks.parts.quantization.config import Activations, Calibrator
from tasks.quantize_aware_train import quantize_aware_train
from tasks.quantize_ptq import Config as QuantizeConfig
from tasks.quantize_ptq import quantize_ptq
from tests.tasks.conftest import CLASSES, HEIGHT, WIDTH, Workshop
from tests.tasks.test_quantize_aware_train import config as training_config
from tests.tasks.test_train import ALL_LOSSES, FRESH, TRAINER, run

SEGFORMER = NetworkConfig(NetworkName.segformer, 0.25, 0.1, False)
DINOV2 = NetworkConfig(NetworkName.dinov2, 0.25, 0.1, False)
OP_TYPES = ["Conv", "MatMul", "Gemm", "Add", "Mul", "Concat", "Resize"]


def write_network(path: Path, network: NetworkConfig, data: Path, classes: tuple[str, ...] = CLASSES) -> Path:
    """Write a network with weights that no simplification takes for zeros or ones, as training leaves them."""
    manifest = read_manifest(data)
    torch.manual_seed(0)
    model = build_network(network, len(classes)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.02 * torch.randn_like(parameter))
    save_checkpoint(path, model, ModelCard(network, classes, manifest.mean, manifest.std, HEIGHT, WIDTH))
    return path


@dataclass(frozen=True)
class Shop:
    """Files of the tiny SegFormer."""

    data: Path
    checkpoint: Path
    graph: Path
    quantized: Path
    ranges: Path
    exported: Any
    ptq: Any


@pytest.fixture(scope="module")
def shop(workshop: Workshop, tmp_path_factory: pytest.TempPathFactory) -> Shop:
    root = tmp_path_factory.mktemp("segformer")
    checkpoint = write_network(root / "model.safetensors", SEGFORMER, workshop.data)
    export, quantize = root / "export", root / "ptq"
    export.mkdir()
    quantize.mkdir()
    exporting = ExportConfig(opset=20, batch_sizes=[1, 3], max_abs_difference=1e-3, min_sqnr_db=80.0, seed=0)
    exported = export_onnx(exporting, checkpoint=checkpoint, out=export)
    config = QuantizeConfig([Calibrator.minmax], [100.0], 4, 4, 0, 20.0, OP_TYPES, [Activations.uint8])
    ptq = quantize_ptq(config, model=export / "model.onnx", data=workshop.data, out=quantize)
    graph, quantized = export / "model.onnx", quantize / "model.onnx"
    return Shop(workshop.data, checkpoint, graph, quantized, quantize / "ranges.json", exported, ptq)


def test_export_names_module_and_line_and_folds_batchnorm(shop: Shop) -> None:
    graph = read_graph(shop.graph)
    sources = node_sources(graph)
    assert len(sources) == len(graph.graph.node)
    module, source = sources["segformer.stages.1.blocks.0.attention.q_proj/MatMul"]
    assert module == "segformer.stages.1.blocks.0.attention.q_proj"
    assert source.startswith("transformers/models/segformer/modeling_segformer.py:")
    assert sources["decode_head.linear_fuse/Conv"][1].startswith("tasks/parts/networks/segformer.py:")
    assert not any(node.op_type == "BatchNormalization" for node in graph.graph.node)
    assert min(found.sqnr_db for found in shop.exported.differences) > 100


def test_macs_of_the_graph_are_those_of_torch(shop: Shop) -> None:
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.utils.flop_counter import FlopCounterMode

    network, _ = load_checkpoint(shop.checkpoint)
    with sdpa_kernel(SDPBackend.MATH), torch.no_grad(), FlopCounterMode(display=False) as counter:
        network(torch.zeros(1, 3, HEIGHT, WIDTH))
    assert sum(conv_macs(read_graph(shop.graph)).values()) == counter.get_total_flops() // 2


def test_int8_reads_layers_with_weights_and_leaves_attention_and_residuals_in_float(shop: Shop) -> None:
    graph = read_graph(shop.quantized)
    made_by = {name: node.op_type for node in graph.graph.node for name in node.output}
    num_layers = 0
    for node in graph.graph.node:
        is_int8 = {made_by.get(name) == "DequantizeLinear" for name in node.input[:2]}
        is_attention = node.name.rpartition("/")[0].endswith("attention")
        if node.op_type == "Conv" or (node.op_type == "MatMul" and not is_attention):
            assert is_int8 == {True}, node.name
            num_layers += 1
        elif node.op_type not in (*MOVES_VALUES, "Concat", "Resize", "Relu", "DequantizeLinear"):
            assert is_int8 == {False}, node.name
    assert num_layers == 13 + 28
    assert shop.ptq.agreement > 0.5


@pytest.mark.slow
@pytest.mark.parametrize("target", ["cpu_onnxruntime", "cpu_openvino"])
@pytest.mark.parametrize("variant", ["float", "quantized"])
def test_engines_compute_what_the_graph_says(
    shop: Shop, workshop: Workshop, tmp_path: Path, variant: str, target: str
) -> None:
    model = shop.quantized if variant == "quantized" else shop.graph
    report = build_engine(
        workshop.target(target), model=model, images=calibration_images(shop.data), out=tmp_path
    )
    assert report.status == "built" and report.is_precision_ok, report.reason + report.precision_note
    assert report.num_layers_quantized == (41 if variant == "quantized" else 0)
    out = tmp_path / "diff"
    out.mkdir()
    found = diff_layers(
        DiffConfig("calibration", 2, 10.0, BisectionConfig(False, 0.0, 0, 4)),
        engine=tmp_path / "engine",
        model=model,
        float_graph=shop.graph,
        data=shop.data,
        out=out,
    )
    assert found.differences is not None
    assert found.differences.logits_sqnr_db > (10 if variant == "quantized" else 60)


@pytest.mark.parametrize(
    ("teacher", "student"),
    [
        (DINOV2, SEGFORMER),
        (SEGFORMER, NetworkConfig(NetworkName.fast_scnn, 0.25, 0.34, False)),
    ],
)
def test_all_losses_train_a_student_whose_maps_have_another_size(
    workshop: Workshop, tmp_path: Path, teacher: NetworkConfig, student: NetworkConfig
) -> None:
    checkpoint = write_network(tmp_path / "teacher.safetensors", teacher, workshop.data)
    config = distill.Config(distill.Start.fresh, student, ALL_LOSSES, replace(TRAINER, max_epochs=1), FRESH)
    report = run(
        distill.distill, config, tmp_path / "a", teacher=checkpoint, start=checkpoint, data=workshop.data
    )
    network, card = load_checkpoint(tmp_path / "a" / "model.safetensors")
    assert card.network == student and not network.training
    assert report.num_parameters == sum(p.numel() for p in network.parameters())


@pytest.mark.parametrize("network", [SEGFORMER, DINOV2])
def test_activation_checkpoints_train_a_transformer(
    workshop: Workshop, tmp_path: Path, network: NetworkConfig
) -> None:
    trainer = replace(TRAINER, activation_checkpoints=["*"], max_epochs=1)
    config = train.Config(network, trainer, FRESH)
    assert run(train.train, config, tmp_path / "a", data=workshop.data).num_epochs == 1


def test_transformer_teacher_of_other_classes_is_refused_with_both_lists(
    workshop: Workshop, tmp_path: Path
) -> None:
    classes = ("background", "one", "zero")
    teacher = write_network(tmp_path / "teacher.safetensors", DINOV2, workshop.data, classes)
    with pytest.raises(
        ArtifactError, match=r"\['background', 'one', 'zero'\].*\['background', 'zero', 'one'\]"
    ):
        config = distill.Config(distill.Start.fresh, SEGFORMER, ALL_LOSSES, TRAINER, FRESH)
        run(distill.distill, config, tmp_path / "a", teacher=teacher, start=teacher, data=workshop.data)


@pytest.mark.parametrize("network", [SEGFORMER, DINOV2])
def test_checkpoint_gives_back_the_same_logits(
    workshop: Workshop, tmp_path: Path, network: NetworkConfig
) -> None:
    path = write_network(tmp_path / "a.safetensors", network, workshop.data)
    first, card = load_checkpoint(path)
    save_checkpoint(tmp_path / "b.safetensors", first, card)
    assert (tmp_path / "b.safetensors").read_bytes() == path.read_bytes()
    images_NCHW = torch.randn(2, 3, HEIGHT, WIDTH)
    with torch.no_grad():
        logits_NCHW = first(images_NCHW)
        assert torch.equal(logits_NCHW, load_checkpoint(path)[0](images_NCHW))
    assert bool(torch.isfinite(logits_NCHW).all())


def test_checkpoint_with_pruned_attention_says_that_heads_cannot_be_cut(
    workshop: Workshop, tmp_path: Path
) -> None:
    path = write_network(tmp_path / "a.safetensors", SEGFORMER, workshop.data)
    network, card = load_checkpoint(path)
    norm = network.get_submodule("segformer.stages.2.layer_norm")
    norm.weight, norm.bias = (torch.nn.Parameter(item[:-8].clone()) for item in (norm.weight, norm.bias))
    save_checkpoint(path, network, card)
    with pytest.raises(
        ArtifactError, match=r"LayerNorm has 32 channels, segformer normalises 40.*network\.name"
    ):
        load_checkpoint(path)


@pytest.mark.slow
def test_training_in_simulated_int8_gives_the_graph_that_was_trained(shop: Shop, tmp_path: Path) -> None:
    config = replace(training_config(max_epochs=1), op_types=OP_TYPES)
    report = quantize_aware_train(
        config,
        checkpoint=shop.checkpoint,
        teacher=shop.checkpoint,
        model=shop.graph,
        ranges=shop.ranges,
        data=shop.data,
        out=tmp_path,
    )
    assert report.agreement > 0.95
    assert report.best_epoch == 1
