"""Each cause on a real engine that has exactly that fault, and silence on its healthy twin."""

from dataclasses import replace
from pathlib import Path

import pytest

from tasks.parts.explain.causes import Cause, CauseKind, find_causes
from tasks.parts.explain.engine_view import EngineView
from tasks.parts.onnx_graphs.half_precision import to_half
from tasks.parts.roofs.roofs import ComputeRoof
from tests.tasks.conftest import Workshop
from tests.tasks.parts.explain.engines import ROOFS, convolutions, quantize, rate, view

BOTH = pytest.mark.parametrize("target", ["cpu_onnxruntime", "cpu_openvino"])


def causes(kind: CauseKind, engine: EngineView, twin: EngineView | None = None) -> list[Cause]:
    return [cause for cause in find_causes(engine, twin) if cause.kind is kind]


@BOTH
def test_layer_left_in_float_and_the_conversions_around_it_are_named(
    workshop: Workshop, tmp_path: Path, target: str
) -> None:
    model, declared = convolutions(16, 32, 32, 32), workshop.target(target)
    island = view(quantize(model, float_nodes={"conv1"}), declared, tmp_path, name="island")
    whole = view(quantize(model), declared, tmp_path, name="whole")
    [layer] = [layer for layer in island.layers if "conv1" in layer.nodes]
    [left] = [cause for cause in causes(CauseKind.LEFT_IN_FLOAT, island) if cause.layer == layer.name]
    assert left.detail == "Conv Relu runs in f32" and left.milliseconds > 0
    assert not [cause for cause in causes(CauseKind.LEFT_IN_FLOAT, whole) if "Conv" in cause.detail]
    behind = f"between {layer.name} and conv2"
    assert [cause for cause in causes(CauseKind.CONVERSION, island) if behind in cause.detail]
    assert not [cause for cause in causes(CauseKind.CONVERSION, whole) if "and conv2" in cause.detail]


def test_sum_that_the_float_engine_computes_inside_a_convolution_is_a_lost_fusion(
    workshop: Workshop, tmp_path: Path
) -> None:
    model, declared = convolutions(16, 16, 16, 16, has_sum=True), workshop.target("cpu_onnxruntime")
    float_engine = view(model, declared, tmp_path, name="float")
    engine = view(quantize(model), declared, tmp_path, name="quantized")
    [lost] = causes(CauseKind.FUSION_LOST, engine, float_engine)
    assert lost.layer.startswith("sum") and "in float it is part of" in lost.detail
    assert not causes(CauseKind.FUSION_LOST, float_engine, float_engine)


@BOTH
@pytest.mark.parametrize(
    ("width", "kind", "wants"),
    [(24, CauseKind.UNALIGNED_CHANNELS, "wants 32"), (8, CauseKind.SMALLER_THAN_VECTOR, "wants 16")],
)
def test_channels_that_do_not_fill_registers_are_named_with_what_they_want(
    workshop: Workshop, tmp_path: Path, target: str, width: int, kind: CauseKind, wants: str
) -> None:
    declared = workshop.target(target)
    odd = view(convolutions(16, width, 16), declared, tmp_path, name="odd")
    even = view(convolutions(16, 32, 16), declared, tmp_path, name="even")
    found = causes(kind, odd)
    assert {cause.layer for cause in found} == {layer.name for layer in odd.layers if layer.macs}
    assert all(f"{width} channels, {wants}" in cause.detail for cause in found)
    assert not causes(CauseKind.UNALIGNED_CHANNELS, even) + causes(CauseKind.SMALLER_THAN_VECTOR, even)


@BOTH
def test_depthwise_convolution_waits_for_memory(workshop: Workshop, tmp_path: Path, target: str) -> None:
    declared = workshop.target(target)
    thin = view(convolutions(16, 16, 16, groups=16, size=64), declared, tmp_path, name="thin")
    dense = view(convolutions(16, 16, 16, size=64), declared, tmp_path, name="dense")
    assert len(causes(CauseKind.DEPTHWISE_MEMORY_BOUND, thin)) == 2
    assert not causes(CauseKind.DEPTHWISE_MEMORY_BOUND, dense)
    cached = replace(ROOFS, memory=tuple(replace(roof, bytes_per_s=rate(1e15)) for roof in ROOFS.memory))
    own = replace(cached, compute=(*ROOFS.compute, ComputeRoof("f32", True, rate(10e9), "probe", None, "")))
    assert not causes(CauseKind.DEPTHWISE_MEMORY_BOUND, replace(thin, roofs=cached))
    found = causes(CauseKind.DEPTHWISE_MEMORY_BOUND, replace(thin, roofs=own))
    assert len(found) == 2 and "computes 10e9 per second where others reach 50e9" in found[0].detail
    assert not causes(CauseKind.DEPTHWISE_MEMORY_BOUND, replace(dense, roofs=own))


@BOTH
def test_many_tiny_layers_are_bound_by_overhead(workshop: Workshop, tmp_path: Path, target: str) -> None:
    declared = workshop.target(target)
    tiny = view(convolutions(*[16] * 12, kernel=1, size=2), declared, tmp_path, name="tiny", latency_ms=0.05)
    large = view(convolutions(16, 64, 64), declared, tmp_path, name="large", latency_ms=1.0)
    tiny = replace(tiny, layers=tuple(replace(layer, milliseconds=0.001) for layer in tiny.layers))
    [overhead] = causes(CauseKind.OVERHEAD_BOUND, tiny)
    assert overhead.layer == "" and "layers at 1.0 us" in overhead.detail
    assert not causes(CauseKind.OVERHEAD_BOUND, large)


@BOTH
def test_signed_activations_and_missing_instructions_are_named(
    workshop: Workshop, tmp_path: Path, target: str
) -> None:
    model = quantize(convolutions(16, 32, 32))
    signed = view(model, workshop.target(target, uint8_activations=False), tmp_path, name="signed")
    unsigned = view(model, workshop.target(target, uint8_activations=True), tmp_path, name="unsigned")
    assert len(causes(CauseKind.S8_ACTIVATIONS, signed)) == 1
    assert not causes(CauseKind.S8_ACTIVATIONS, unsigned)
    old, new = (
        replace(unsigned, manifest=replace(unsigned.manifest, isa=isa))
        for isa in (("avx2",), ("avx2", "avx_vnni"))
    )
    [fault] = causes(CauseKind.WRONG_ISA, old)
    assert "neither VNNI nor AMX" in fault.detail
    assert not causes(CauseKind.WRONG_ISA, new)


def test_precision_that_the_cpu_lacks_is_emulated(workshop: Workshop, tmp_path: Path) -> None:
    model, declared = convolutions(16, 32, 32), workshop.target("cpu_onnxruntime")
    half = view(to_half(model), declared, tmp_path, name="half")
    single = view(model, declared, tmp_path, name="single")
    half = replace(half, manifest=replace(half.manifest, is_precision_ok=False))  # as build_engine finds
    [fault] = causes(CauseKind.EMULATED_PRECISION, half)
    assert fault.detail == "layers that are to compute in 16 bits run in f32"
    assert not causes(CauseKind.EMULATED_PRECISION, single)
    bf16 = replace(single.manifest, target=workshop.target("cpu_openvino_bf16"))
    old, new = (replace(single, manifest=replace(bf16, isa=isa)) for isa in (("avx2",), ("avx512_bf16",)))
    [hint] = causes(CauseKind.EMULATED_PRECISION, old)
    assert "precision is bf16, but this CPU" in hint.detail
    assert not causes(CauseKind.EMULATED_PRECISION, new)


def test_weights_that_are_dequantized_in_every_inference_are_named(
    workshop: Workshop, tmp_path: Path
) -> None:
    """ONNX Runtime does not fold the int8 weights of a layer whose output nothing quantizes."""
    model, declared = convolutions(16, 32, 32, 32), workshop.target("cpu_onnxruntime")
    island = view(quantize(model, float_nodes={"conv1"}), declared, tmp_path, name="island")
    [fault] = causes(CauseKind.WEIGHT_QUANTIZED_AT_RUNTIME, island)
    assert fault.detail == "DequantizeLinear of 4,768 bytes of weights in every inference"
    whole = view(quantize(model), declared, tmp_path, name="whole")
    assert not causes(CauseKind.WEIGHT_QUANTIZED_AT_RUNTIME, whole)
