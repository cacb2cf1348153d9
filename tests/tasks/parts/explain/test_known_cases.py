"""Cases that people ask about, each with a small network that is quantized, built and profiled by the product.

docs/explain.md has a row for each. The roofs and the time of a layer are made up, so that no machine decides.
"""

import functools
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from onnx import ModelProto, TensorProto, helper, numpy_helper
from torch import Tensor, nn

from tasks.parts.builders.build import build
from tasks.parts.cpu import read_cpu_flags
from tasks.parts.engines.manifest import EngineStatus, read_engine_manifest
from tasks.parts.engines.open_engine import load_runner
from tasks.parts.engines.target import Target
from tasks.parts.explain.advice import advise
from tasks.parts.explain.causes import CauseKind, find_causes
from tasks.parts.explain.engine_view import EngineView, view_engines
from tasks.parts.measuring.batch_latency import BatchLatency
from tasks.parts.measuring.reports import BenchmarkReport, EngineMeasurement, Latency, Timed
from tasks.parts.measuring.tables import write_layers
from tasks.parts.networks.blocks import InvertedResidual, resize_to
from tasks.parts.networks.mobile_unet import UpBlock
from tasks.parts.onnx_graphs.graph import write_graph
from tasks.parts.onnx_graphs.half_precision import to_half
from tasks.parts.roofs.roofs import MemoryRoof
from tests.tasks.conftest import Workshop
from tests.tasks.parts.explain.engines import MACHINE, ROOFS, rate
from tests.tasks.tiny_networks import OP_TYPES, SIZE, conv_norm, images, quantized, upsample

BOTH = pytest.mark.parametrize("target", ["cpu_onnxruntime", "cpu_openvino"])
LAYER_MS, CALL_MS = 0.02, 0.01
SLOW = replace(ROOFS, memory=(MemoryRoof(1 << 28, rate(2e9)),), layer_ms=rate(0.008), profiled_layer_ms=0.008)
"""2 GB/s, and 8 us to start a layer: small layers wait for memory, and 40 % of LAYER_MS is overhead."""


class MobileBlocks(nn.Module):
    """Two inverted residuals, one of them with its sum, and a decoder that resizes, joins and convolves."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = conv_norm(3, 16, stride=2)
        self.down = InvertedResidual(16, 32, expansion=6, stride=2)
        self.residual = InvertedResidual(32, 32, expansion=6)
        self.decoder = UpBlock(32, 16, 16)
        self.classifier = nn.Conv2d(16, 3, 1)

    def forward(self, images_NCHW: Tensor) -> Tensor:
        skip_NCHW = torch.relu(self.stem(images_NCHW))
        maps_NCHW = self.decoder(self.residual(self.down(skip_NCHW)), skip_NCHW)
        return resize_to(self.classifier(maps_NCHW), (SIZE, SIZE))


class ShuffleBlock(nn.Module):
    """A unit of ShuffleNetV2 (Ma et al. 2018, arXiv:1807.11164, figure 3c): split, filter one half, join, shuffle."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = conv_norm(3, 32, stride=2)
        self.expand = conv_norm(16, 16, 1)
        self.depthwise = conv_norm(16, 16, groups=16)
        self.project = conv_norm(16, 16, 1)
        self.classifier = nn.Conv2d(32, 3, 1)

    def forward(self, images_NCHW: Tensor) -> Tensor:
        kept_NCHW, maps_NCHW = torch.relu(self.stem(images_NCHW)).chunk(2, dim=1)
        maps_NCHW = torch.relu(self.project(self.depthwise(torch.relu(self.expand(maps_NCHW)))))
        joined_NCHW = torch.cat([kept_NCHW, maps_NCHW], 1)
        num, channels, height, width = joined_NCHW.shape
        groups = joined_NCHW.reshape(num, 2, channels // 2, height, width).transpose(1, 2)
        return upsample(self.classifier(groups.reshape(num, channels, height, width)))


class Even(nn.Module):
    """Convolutions between widths that fill registers."""

    width = 32

    def __init__(self) -> None:
        super().__init__()
        self.stem = conv_norm(3, 32, stride=2)
        self.first, self.second = conv_norm(32, self.width), conv_norm(self.width, 32)
        self.classifier = nn.Conv2d(32, 3, 1)

    def forward(self, images_NCHW: Tensor) -> Tensor:
        maps_NCHW = torch.relu(self.first(torch.relu(self.stem(images_NCHW))))
        return upsample(self.classifier(torch.relu(self.second(maps_NCHW))))


class Odd(Even):
    width = 20


class Narrow(Even):
    width = 8


@functools.cache
def graphs_of(network: type[nn.Module]) -> tuple[ModelProto, ModelProto]:
    """Return the float graph of a network with random weights, and its Q/DQ graph."""
    float_graph, graph, _ = quantized(network, OP_TYPES)
    return float_graph, graph


def explained(graphs: dict[str, ModelProto], target: Target, folder: Path) -> dict[str, EngineView]:
    """Build the engines, profile them and view them as `explain` does, with LAYER_MS as the time of every layer."""
    builds, benchmark, measured = folder / "builds" / "*", folder / "benchmark", {}
    file = folder / "images.npy"
    np.save(file, np.random.default_rng(0).integers(0, 256, (4, SIZE, SIZE, 3), dtype=np.uint8))
    for name, graph in graphs.items():
        built, table = folder / "builds" / name, benchmark / name
        built.mkdir(parents=True)
        table.mkdir(parents=True)
        write_graph(graph, folder / f"{name}.onnx")
        build(target, model=folder / f"{name}.onnx", images=file, out=built)
        manifest = read_engine_manifest(built / "engine")
        assert manifest.is_built, manifest.reason
        with load_runner(built / "engine" / manifest.file, manifest) as runner:
            names = [time.name for time in runner.profile(images(1).numpy(), 3)]
        write_layers(built / "engine", dict.fromkeys(names, LAYER_MS), table)
        measured[name] = _measurement(LAYER_MS * len(names) + CALL_MS, manifest.sha256)
    report = BenchmarkReport(measured, "", "", Timed.frame, None, False, MACHINE, None)
    return view_engines(list(graphs), builds / "engine", benchmark, report, SLOW)


def _measurement(latency_ms: float, sha256: str) -> EngineMeasurement:
    batch = BatchLatency(
        1, latency_ms, latency_ms, latency_ms, None, latency_ms, {}, None, None, 1.0, True, 1, 1, 1
    )
    latency = Latency((batch,), (), {}, 1.0, 0.0, 0.0, 0.0, 0.0, None, "")
    return EngineMeasurement("built", "", sha256, "", latency, "", "", "", 1, {})


def details(kind: CauseKind, engine: EngineView, twin: EngineView | None = None) -> dict[str, str]:
    """Return layer -> detail of the causes of a kind."""
    return {cause.layer: cause.detail for cause in find_causes(engine, twin) if cause.kind is kind}


def test_mobile_network_in_int8_on_onnxruntime(workshop: Workshop, tmp_path: Path) -> None:
    """Its sums leave the convolutions, its Resize stays in float between two conversions, the rest is too small."""
    float_graph, graph = graphs_of(MobileBlocks)
    views = explained({"float": float_graph, "int8": graph}, workshop.target("cpu_onnxruntime"), tmp_path)
    before, after = views["float"], views["int8"]
    assert details(CauseKind.LEFT_IN_FLOAT, after)["decoder/Resize"] == "Resize runs in f32"
    conversions = details(CauseKind.CONVERSION, after).values()
    assert "QuantizeLinear between decoder/Resize and decoder/Concat" in conversions
    assert any("DequantizeLinear between residual" in detail for detail in conversions)
    [lost] = details(CauseKind.FUSION_LOST, after, before).values()
    assert lost.startswith("Add stands alone; in float it is part of ")
    depthwise = [layer.name for layer in after.layers if layer.is_depthwise]
    assert set(details(CauseKind.DEPTHWISE_MEMORY_BOUND, after)) == set(depthwise) and len(depthwise) == 3
    assert "layers at 8.0 us" in details(CauseKind.OVERHEAD_BOUND, after)[""]
    sentence = advise(before, after, 0.69)
    assert sentence.startswith("int8 is 1.45x slower than float")
    assert "conversions" in sentence and "Resize" in sentence and "layers lost their fusion" in sentence
    assert not details(CauseKind.LEFT_IN_FLOAT, before) | details(CauseKind.FUSION_LOST, before, before)
    assert not [detail for detail in details(CauseKind.CONVERSION, before).values() if "Resize and" in detail]
    assert not details(CauseKind.OVERHEAD_BOUND, replace(after, latency_ms=10 * after.latency_ms))


def test_openvino_keeps_the_sums_of_a_mobile_network_in_its_convolutions(
    workshop: Workshop, tmp_path: Path
) -> None:
    """And its conversions of integers around a Resize are no emulation."""
    float_graph, graph = graphs_of(MobileBlocks)
    views = explained({"float": float_graph, "int8": graph}, workshop.target("cpu_openvino"), tmp_path)
    assert not details(CauseKind.FUSION_LOST, views["int8"], views["float"])
    assert details(CauseKind.LEFT_IN_FLOAT, views["int8"])["decoder/Resize"] == "Resize runs in f32"
    for view in views.values():
        assert not details(CauseKind.EMULATED_PRECISION, view)


def test_shuffle_network_in_int8_transposes_around_its_integer_convolutions(
    workshop: Workshop, tmp_path: Path
) -> None:
    float_graph, graph = graphs_of(ShuffleBlock)
    graphs = {"float": float_graph, "int8": graph}
    for folder in ("onnxruntime", "openvino"):
        (tmp_path / folder).mkdir()
    views = explained(graphs, workshop.target("cpu_onnxruntime"), tmp_path / "onnxruntime")
    after = views["int8"]
    conversions = details(CauseKind.CONVERSION, after).values()
    assert "Transpose between network/Split and expand.0/Conv" in conversions
    assert "Transpose between project.0/Conv and network/Concat" in conversions
    moving = {"Split", "Concat", "Reshape", "Transpose"}
    in_float = details(CauseKind.LEFT_IN_FLOAT, after).values()
    assert not [detail for detail in in_float if moving & set(detail.split())]
    assert "conversions" in advise(views["float"], after, 0.8)
    other = explained(graphs, workshop.target("cpu_openvino"), tmp_path / "openvino")["int8"]
    assert not [text for text in details(CauseKind.CONVERSION, other).values() if "network/Split" in text]


@BOTH
def test_half_precision_graph_on_a_cpu_is_computed_in_32_bits(
    workshop: Workshop, tmp_path: Path, target: str
) -> None:
    graph = graphs_of(ShuffleBlock)[0]
    views = explained({"float": graph, "half": to_half(graph)}, workshop.target(target), tmp_path)
    found = [cause for cause in find_causes(views["half"]) if cause.kind is CauseKind.EMULATED_PRECISION]
    texts = [cause.detail for cause in found]
    assert "layers that are to compute in 16 bits run in f32" in texts
    assert {layer.precision for layer in views["half"].layers if layer.macs} == {"f32"}
    casts = [text for text in texts if text.startswith("casts between 16 and 32 bits: ")]
    if target == "cpu_onnxruntime":  # it has kernels in 16 bits for what only moves values
        assert len(casts) == 1 and "network/Split" in casts[0]
    else:
        assert not casts
        [resize] = [layer for layer in views["half"].layers if "Resize" in layer.operators]
        assert not resize.is_conversion and not resize.macs
    assert "the CPU does not compute in its precision" in advise(views["float"], views["half"], 0.5)
    assert not details(CauseKind.EMULATED_PRECISION, views["float"])


def test_bf16_without_the_instructions_is_named_and_by_default_not_built(
    workshop: Workshop, tmp_path: Path
) -> None:
    graph = graphs_of(Even)[0]
    forced = explained({"bf16": graph}, workshop.target("cpu_openvino_bf16", cpu_flags=[]), tmp_path)["bf16"]
    for isa, is_lacking in ((("avx2", "avx512f", "avx512_vnni"), True), (("avx2", "avx512_bf16"), False)):
        view = replace(forced, manifest=replace(forced.manifest, isa=isa, is_precision_ok=True))
        found = details(CauseKind.EMULATED_PRECISION, view)
        assert ("but this CPU has neither AVX512_BF16 nor AMX" in found.get("", "")) == is_lacking
    (tmp_path / "declared").mkdir()
    declared = build(
        workshop.target("cpu_openvino_bf16"),
        model=tmp_path / "bf16.onnx",
        images=tmp_path / "images.npy",
        out=tmp_path / "declared",
    )
    assert (declared.status is EngineStatus.skipped) == ("avx512_bf16" not in read_cpu_flags())


@BOTH
def test_channels_that_do_not_fill_registers(workshop: Workshop, tmp_path: Path, target: str) -> None:
    graphs = {network.__name__: graphs_of(network)[1] for network in (Even, Odd, Narrow)}
    views = explained(graphs, workshop.target(target), tmp_path)
    for name, kind, detail in (
        ("Odd", CauseKind.UNALIGNED_CHANNELS, "writes 20 channels, wants 32"),
        ("Narrow", CauseKind.SMALLER_THAN_VECTOR, "writes 8 channels, wants 16"),
    ):
        [layer] = [layer.name for layer in views[name].layers if "first.0/Conv" in layer.nodes]
        assert details(kind, views[name])[layer] == detail
    for kind in (CauseKind.UNALIGNED_CHANNELS, CauseKind.SMALLER_THAN_VECTOR):
        found = details(kind, views["Even"])  # the image has 3 channels, and there are 3 classes
        nodes = {node for layer in views["Even"].layers if layer.name in found for node in layer.nodes}
        assert not nodes & {"first.0/Conv", "second.0/Conv"}


def with_weights_quantized_in_the_graph(model: ModelProto) -> ModelProto:
    """Return the graph as trainers that fake-quantize export it: float weights, then QuantizeLinear."""
    graph = ModelProto()
    graph.CopyFrom(model)
    constants = {tensor.name: tensor for tensor in graph.graph.initializer}
    nodes = []
    for node in graph.graph.node:
        levels = constants.get(node.input[0]) if node.op_type == "DequantizeLinear" else None
        if levels is not None and levels.data_type == TensorProto.INT8:
            scales = numpy_helper.to_array(constants[node.input[1]])
            along = scales.reshape(-1, *[1] * (len(levels.dims) - 1))
            weight, zeros = f"{levels.name}:float", f"{levels.name}:zeros"
            values = (numpy_helper.to_array(levels) * along).astype(np.float32)
            graph.graph.initializer.append(numpy_helper.from_array(values, weight))
            graph.graph.initializer.append(numpy_helper.from_array(np.zeros(scales.shape, np.int8), zeros))
            rounded = f"{levels.name}:rounded"
            name = f"{node.name}:quantize"
            nodes.append(
                helper.make_node(
                    "QuantizeLinear", [weight, node.input[1], zeros], [rounded], name=name, axis=0
                )
            )
            node.input[0] = rounded
        nodes.append(node)
    del graph.graph.node[:]
    graph.graph.node.extend(nodes)
    return graph


def test_weights_that_are_dequantized_in_every_inference(workshop: Workshop, tmp_path: Path) -> None:
    """ONNX Runtime computes QuantizeLinear of a constant once, but not DequantizeLinear before a float layer."""
    float_graph, graph = graphs_of(Even)
    broken = ModelProto()
    broken.CopyFrom(graph)
    makers = {name: node for node in broken.graph.node for name in node.output}
    [second] = [node for node in broken.graph.node if node.name == "second.0/Conv"]
    second.input[0] = makers[makers[second.input[0]].input[0]].input[0]  # it reads float, its weight is int8
    graphs = {
        "float": float_graph,
        "broken": broken,
        "whole": graph,
        "rounded": with_weights_quantized_in_the_graph(graph),
    }
    target = workshop.target("cpu_onnxruntime", stem_in_float=False)  # import_onnx folds what that reads
    views = explained(graphs, target, tmp_path)
    found = details(CauseKind.WEIGHT_QUANTIZED_AT_RUNTIME, views["broken"])
    assert any(layer.startswith("second.0/Conv") for layer in found)
    assert all("bytes of weights in every inference" in detail for detail in found.values())
    assert "weights are converted in every inference" in advise(views["float"], views["broken"], 0.9)
    for name in ("whole", "rounded"):
        assert not details(CauseKind.WEIGHT_QUANTIZED_AT_RUNTIME, views[name])


def test_signed_activations_and_a_cpu_without_vnni_are_in_the_sentence(
    workshop: Workshop, tmp_path: Path
) -> None:
    float_graph, graph = graphs_of(Even)
    target = workshop.target("cpu_onnxruntime", uint8_activations=False)
    views = explained({"float": float_graph, "int8": graph}, target, tmp_path)
    signed = views["int8"]
    old = replace(signed, manifest=replace(signed.manifest, isa=("avx2",)))
    new = replace(signed, manifest=replace(signed.manifest, isa=("avx2", "avx_vnni")))
    assert "uint8_activations is false" in details(CauseKind.S8_ACTIVATIONS, new)[""]
    assert not details(CauseKind.WRONG_ISA, new) and details(CauseKind.WRONG_ISA, old)
    assert "its activations are int8 instead of uint8" in advise(views["float"], new, 1.1)
    in_float = details(CauseKind.LEFT_IN_FLOAT, new).values()
    assert "Conv Relu runs in f32" in in_float  # a ReLU is part of uint8 levels, not of int8 ones
    assert "no dot products of 8-bit integers" in advise(views["float"], old, 1.1)
    changed = replace(new, manifest=replace(new.manifest, target=replace(target, uint8_activations=True)))
    assert not details(CauseKind.S8_ACTIVATIONS, changed)
