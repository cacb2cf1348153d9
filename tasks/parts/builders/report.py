"""Report how a build ended and in which precision the layers of the engine really run."""

import gzip
import logging
import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from tasks.parts.builders.executed_layers import LAYER_WORDS, ExecutedLayers
from tasks.parts.data.input_card import InputCard
from tasks.parts.engines.gpu import find_gpus
from tasks.parts.engines.machine import installed_version, read_isa
from tasks.parts.engines.manifest import (
    EngineManifest,
    EngineStatus,
    Precisions,
    sha256_of,
    write_engine_manifest,
)
from tasks.parts.engines.runtimes import Precision, Runtime
from tasks.parts.engines.target import Target

if TYPE_CHECKING:
    from onnx import ModelProto

logger = logging.getLogger(__name__)

_MIN_SHARE = 0.5
"""The declared precision must hold for at least this share of the layers that should have it."""

_MAX_NAMED = 5
"""Number of nodes that a reason names; the report has all."""

_GZIP_BLOCK = 1 << 24


@dataclass(frozen=True)
class BuildCost:
    """What an engine took to build, and what it is to carry and to compute."""

    build_s: float
    """Seconds that one build took, with the list of its layers; without importing the runtime, reading the source and
    proving the engine. For TensorRT all of its builds together; a filled timing cache makes them shorter."""
    compressed_bytes: int
    """Size of the engine file after gzip at level 6."""
    macs: int
    """Multiply-accumulates for one image of the variant's convolutions and matrix products, before the runtime
    changes them."""


@dataclass(frozen=True)
class EngineBuild:
    """How the build ended, and what the runtime made of the graph."""

    status: EngineStatus
    reason: str
    """Why there is no engine; empty if there is one."""
    runtime: Runtime
    runtime_version: str
    provider: str
    """Where the runtime really placed the graph, by its own name for it."""
    file: str
    size_bytes: int
    engine_sha256: str
    is_quantized: bool
    num_layers_quantized: int
    """Convolutions and matrix products of the graph between Q/DQ pairs."""
    num_layers_int8: int
    """Convolutions and matrix products that the runtime really runs in int8."""
    precisions: Precisions
    is_precision_ok: bool
    """Whether the runtime computes in the precision that graph and target declare. If not, select_engine gives the
    verdict PRECISION_MISMATCH."""
    precision_note: str
    """What contradicts the declared precision, with the operators by name; empty if nothing does."""
    agreement_db: float | None
    """Signal-to-noise ratio of the logits of the engine, or of its twin, on calibration images, against the
    unoptimised graph, or against the float32 network on the CPU if the runtime reads checkpoints; None without an
    engine."""
    answers_agreement: float | None
    """Share of the answers on frames of calibration images that equal those of the twin with normalised images and
    logits; None if the engine is that itself, or has no classes."""
    executed: ExecutedLayers | None
    """Summary of the engine's layers, which engine/layers.csv lists one by one; None for torch and aotinductor, of
    which only `precisions` is known: by module and weights, or by exported operator and input."""
    build_latencies_ms: tuple[float, ...]
    """Median latency of each build at batch 1 if TensorRT built several times; the fastest was kept."""
    kernel_units: dict[str, int] | None
    """Layers of a TensorRT plan by the units of the GPU that the name of their kernel tells: Tensor Cores, Tensor
    Cores with 2:4 sparsity, CUDA cores. Layers whose kernel's name does not tell count nowhere. None for other
    runtimes."""
    cost: BuildCost | None
    """None without an engine."""


@dataclass(frozen=True)
class LayerCounts:
    """Number of convolutions and matrix products of a graph, by the precision that it declares."""

    num: int
    """All layers of these kinds."""
    num_quantized: int
    """Layers whose input and weight both come from DequantizeLinear."""
    num_float16: int
    """Layers with FP16 weights."""


NO_LAYERS = LayerCounts(0, 0, 0)
"""The counts of a checkpoint, which declares no precision per layer."""


def count_layers(graph: "ModelProto") -> LayerCounts:
    """Count the convolutions and matrix products of a graph, or of its `light_copy`, by their precision."""
    from onnx import TensorProto

    from tasks.parts.onnx_graphs.macs import LAYER_TYPES, quantized_layers

    kinds = {tensor.name: tensor.data_type for tensor in graph.graph.initializer}
    kinds |= {value.name: value.type.tensor_type.elem_type for value in graph.graph.input}
    halves = {name for name, kind in kinds.items() if kind == TensorProto.FLOAT16}
    layers = [node for node in graph.graph.node if node.op_type in LAYER_TYPES]
    num_float16 = sum(node.input[1] in halves for node in layers)
    return LayerCounts(len(layers), len(quantized_layers(graph)), num_float16)


def find_precision_fault(target: Target, precisions: Precisions, layers: LayerCounts) -> str:
    """Describe how the floating-point precision in use contradicts the declared one; empty if it does not.

    Shares and not counts are compared, because a runtime may fuse two layers into one.
    """
    used = _layer_precisions(precisions)
    num_used = max(1, sum(used.values()))
    if layers.num and not used:
        return "the runtime does not report the precision of its layers, so it cannot be verified"
    share_quantized = layers.num_quantized / max(1, layers.num)
    if used.get("f16", 0) / num_used < _MIN_SHARE * layers.num_float16 / max(1, layers.num):
        return f"{layers.num_float16} of {layers.num} layers are FP16, but the runtime computes {used}"
    if (
        target.precision is Precision.f32
        and not layers.num_float16
        and used.get("bf16", 0) + used.get("f16", 0)
    ):
        return f"f32 is declared, but layers run in {used}"
    if target.precision is not Precision.f32:
        num_right = used.get(target.precision, 0)
        num_wrong = (
            num_used - num_right - used.get("int8", 0)
        )  # neither counts fused attention, another kind of layer
        half_of_rest = _MIN_SHARE * (1 - share_quantized) * num_used
        if num_right < half_of_rest < num_wrong:
            return f"{target.precision} is declared, but layers run in {used}"
    return ""


def find_int8_fault(target: Target, executed: ExecutedLayers) -> str:
    """Describe which operators keep too many of the quantized MACs out of int8; empty if enough run in it."""
    share = executed.int8_share_of_quantized
    if share is None or share >= target.min_int8_macs_share:
        return ""
    named = [
        f"{node.op_type} '{node.node}' in {node.precision} ({node.macs / 1e6:.3g} MMACs)"
        for node in executed.not_in_int8[:_MAX_NAMED]
    ]
    num_more = len(executed.not_in_int8) - len(named)
    return (
        f"{share:.1%} of the quantized MACs run in int8, expected {target.min_int8_macs_share:.1%} or more "
        f"(target.{target.name}.min_int8_macs_share). The runtime computes {', '.join(named)}"
        f"{f' and {num_more} more' if num_more else ''}: engine/layers.csv shows what it made of them. Keep them in "
        "float (quantize_partial.keep_float), or build this variant for another target"
    )


def _layer_precisions(precisions: Precisions) -> dict[str, int]:
    used: dict[str, int] = {}
    for op_type, counts in precisions.items():
        if LAYER_WORDS.search(op_type):
            for precision, count in counts.items():
                used[precision] = used.get(precision, 0) + count
    return used


def new_manifest(
    target: Target, version: str, card: InputCard, *, file: Path | None = None
) -> EngineManifest:
    """Return a manifest with everything that is known before the runtime reports what it made of the model."""
    return EngineManifest(
        target=target,
        status=EngineStatus.built,
        reason="",
        file=file.name if file else "",
        sha256=sha256_of(file) if file else "",
        size_bytes=file.stat().st_size if file else 0,
        runtime_version=version,
        tensorrt_version=installed_version(target.compiler) if target.tensorrt else "",
        isa=read_isa(),
        gpu=None if target.gpu is None else find_gpus()[0],
        card=card,
        is_quantized=False,
        precisions={},
        is_precision_ok=False,
        provider="",
    )


def publish(
    manifest: EngineManifest,
    engine: Path,
    layers: LayerCounts = NO_LAYERS,
    *,
    agreement_db: float | None = None,
    answers_agreement: float | None = None,
    executed: ExecutedLayers | None = None,
    build_latencies_ms: tuple[float, ...] = (),
    kernel_units: dict[str, int] | None = None,
    cost: BuildCost | None = None,
) -> EngineBuild:
    """Decide whether the precision is the declared one, write the manifest and return the report."""
    target = manifest.target
    note = find_precision_fault(target, manifest.precisions, layers) if manifest.is_built else ""
    if executed is not None and not note:
        note = find_int8_fault(target, executed)
    manifest = replace(
        manifest,
        is_quantized=layers.num_quantized > 0,
        is_precision_ok=manifest.is_built and not note,
    )
    write_engine_manifest(engine, manifest)
    if manifest.is_built:
        logger.info("build_engine: %s, %d bytes", manifest.file, manifest.size_bytes)
    else:
        logger.warning("build_engine: target %s %s: %s", target.name, manifest.status, manifest.reason)
    if note:
        logger.warning("build_engine: target %s: PRECISION_MISMATCH: %s", target.name, note)
    return EngineBuild(
        status=manifest.status,
        reason=manifest.reason,
        runtime=target.runtime,
        runtime_version=manifest.runtime_version,
        provider=manifest.provider,
        file=manifest.file,
        size_bytes=manifest.size_bytes,
        engine_sha256=manifest.sha256,
        is_quantized=manifest.is_quantized,
        num_layers_quantized=layers.num_quantized,
        num_layers_int8=_layer_precisions(manifest.precisions).get("int8", 0),
        precisions=manifest.precisions,
        is_precision_ok=manifest.is_precision_ok,
        precision_note=note,
        agreement_db=agreement_db,
        answers_agreement=answers_agreement,
        executed=executed,
        build_latencies_ms=build_latencies_ms,
        kernel_units=kernel_units,
        cost=cost,
    )


def compressed_size(file: Path) -> int:
    """Return the bytes of a file after gzip at its default, level 6, in blocks at the same time, as pigz does."""
    with ThreadPoolExecutor(os.cpu_count()) as pool, file.open("rb") as reader:
        blocks = iter(partial(reader.read, _GZIP_BLOCK), b"")
        return sum(pool.map(lambda block: len(gzip.compress(block, 6)), blocks))
