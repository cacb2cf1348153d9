"""Make the engine of a graph or checkpoint for one target, and prove that it is what it claims to be."""

import logging
import re
import shutil
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from tasks.core.errors import ArtifactError, BuildFailed
from tasks.parts.cuda_driver import find_gpus
from tasks.parts.engine_truth import LAYERS_FILE, EngineTruth, find_truth, join_fused, list_rows
from tasks.parts.runners.contract import (
    EngineLayer,
    EngineManifest,
    EngineStatus,
    FloatArray,
    InputCard,
    Precisions,
    count_precisions,
    sha256_of,
    write_engine_manifest,
)
from tasks.parts.target import (
    CHECKPOINT_RUNTIMES,
    CUDA,
    Precision,
    Runtime,
    Target,
    check_gpu,
    missing_cpu_flags,
    read_isa,
)

if TYPE_CHECKING:
    from onnx import ModelProto

logger = logging.getLogger(__name__)

ENGINE_FOLDER = "engine"
NUM_GOLDEN_IMAGES = 2
_ROUNDS_OF_BUILDS = 20
MAX_AGREEMENT_DB = 150.0
"""Given for logits that are equal bit by bit."""

_MIN_SHARE = 0.5
"""The declared precision must hold for at least this share of the layers that should have it."""

_LAYER_TYPES = ("Conv", "ConvTranspose", "MatMul", "Gemm")
_LAYER_WORDS = re.compile(r"conv(?!ert)|matmul|gemm|fullyconnected", re.IGNORECASE)
"""In the runtimes' own names of these operators."""


@dataclass(frozen=True)
class EngineBuild:
    """How the build ended, and what the runtime really made of the graph."""

    status: EngineStatus
    reason: str
    """Why there is no engine; empty if there is one."""
    runtime: Runtime
    runtime_version: str
    provider: str
    """Where the runtime really placed the graph, in its own words."""
    file: str
    size_bytes: int
    engine_sha256: str
    is_quantized: bool
    num_layers_quantized: int
    """Convolutions and matrix products of the graph between Q/DQ pairs."""
    num_layers_int8: int
    """Convolutions and matrix products that the runtime really runs in int8."""
    precisions: Precisions
    precision_ok: bool
    precision_note: str
    """What contradicts the declared precision; empty if nothing does."""
    agreement_db: float | None
    """Signal-to-noise of the engine's logits on drawn images, against the unoptimised graph, or against the float32
    network on the CPU where the runtime reads checkpoints; None without engine."""
    truth: EngineTruth | None
    """What the layers of the engine come to, engine/layers.csv shows them one by one; None for torch and
    aotinductor, of which only `precisions` is known: by module and weights, by exported operator and input."""
    build_latencies_ms: tuple[float, ...]
    """Median latency of each build at batch 1, where TensorRT built several times; the fastest was kept."""


def build(target: Target, *, model: Path, out: Path) -> EngineBuild:
    """Build `out/engine` from an ONNX graph (for runtimes torch and aotinductor: from a checkpoint).

    A CPU without a declared flag ends in status "skipped", a graph that the runtime refuses or computes
    wrongly in "failed", both with the reason, so that the other targets go on. Raises TargetMismatch on a
    machine whose runtime is not the declared one, ArtifactError for a damaged model.
    """
    from tasks.parts.runners.open_engine import check_versions

    logger.info("build_engine: %s for target %s", model, target.name)
    check_gpu(target)
    version = check_versions(target)
    engine = out / ENGINE_FOLDER
    engine.mkdir()
    card = _read_card(target, model)
    target = replace(target, max_batch=card.fit_batch(target.max_batch))
    missing = missing_cpu_flags(target)
    if missing:
        reason = f"this CPU lacks {', '.join(missing)} (target.{target.name}.cpu_flags)"
        return _end_without_engine(target, EngineStatus.skipped, reason, version, card, engine)
    try:
        if target.runtime in CHECKPOINT_RUNTIMES:
            report = _build_from_checkpoint(target, model, card, version, engine)
        else:
            report = _build_from_graph(target, model, card, version, engine)
    except BuildFailed as error:
        for leftover in engine.iterdir():
            leftover.unlink()
        return _end_without_engine(target, EngineStatus.failed, str(error), version, card, engine)
    logger.info(
        "build_engine: %s, %d bytes, precision ok: %s", report.file, report.size_bytes, report.precision_ok
    )
    return report


def _read_card(target: Target, model: Path) -> InputCard:
    if target.runtime in CHECKPOINT_RUNTIMES:
        if model.suffix == ".onnx":
            raise ArtifactError(
                f"{model}: an ONNX graph, expected a .safetensors checkpoint: target {target.name} of runtime "
                f"{target.runtime} is built from the network. Quantized variants have no such engine; take "
                "them out of this target's variants."
            )
        from tasks.parts.model_card import read_card

        return read_card(model).for_input()
    from tasks.parts.onnx_graph import read_card_of_graph, read_graph

    return read_card_of_graph(read_graph(model))


def _end_without_engine(
    target: Target, status: EngineStatus, reason: str, version: str, card: InputCard, engine: Path
) -> EngineBuild:
    logger.warning("build_engine: target %s %s: %s", target.name, status, reason)
    manifest = _manifest(target, version, card, status=status, reason=reason)
    write_engine_manifest(engine, manifest)
    return _report(manifest, num_layers_quantized=0, note="", agreement_db=None)


def _build_from_checkpoint(
    target: Target, checkpoint: Path, card: InputCard, version: str, engine: Path
) -> EngineBuild:
    import torch

    from tasks.parts.checkpoint import load_checkpoint
    from tasks.parts.network_precision import precisions_of
    from tasks.parts.runners import aotinductor, torch_eager
    from tasks.parts.runners.torch_runner import set_up_torch

    set_up_torch(target)
    if target.runtime is Runtime.aotinductor:
        from tasks.parts.aotinductor_build import build_package

        file = engine / aotinductor.ENGINE_FILE
        precisions = build_package(checkpoint, target, file)
    else:
        file = engine / torch_eager.ENGINE_FILE
        shutil.copyfile(checkpoint, file)
        precisions = precisions_of(torch_eager.load_network(file, target))
    manifest = _manifest(target, version, card, file=file)
    images_NCHW = draw_golden_images(card)[: target.max_batch]
    with torch.inference_mode():
        expected_NCHW = load_checkpoint(checkpoint)[0](torch.from_numpy(images_NCHW)).numpy()
    agreement_db, provider = _measure_agreement(expected_NCHW, images_NCHW, manifest, file)
    no_layers = LayerCounts(0, 0, 0)
    return _publish(manifest, precisions, provider, engine, no_layers, agreement_db=agreement_db)


def _build_from_graph(
    target: Target, model: Path, card: InputCard, version: str, engine: Path
) -> EngineBuild:
    from tasks.parts.encoding import GRAPH_FILE, encode_for
    from tasks.parts.onnx_graph import is_quantized, read_graph, write_graph
    from tasks.parts.tables import write_table

    graph = read_graph(model)
    _check_weights(graph, model)
    _check_operators(graph, target)
    encoded = encode_for(target, graph)
    layers: tuple[EngineLayer, ...]
    build_latencies_ms: tuple[float, ...] = ()
    if target.runtime is Runtime.openvino:
        from tasks.parts.runners import openvino

        file = engine / openvino.ENGINE_FILE
        compiled = openvino.compile_graph(encoded.SerializeToString(deterministic=True), target)
        file.write_bytes(openvino.export_blob(compiled))
        layers = openvino.layers_of(compiled)
    elif target.compiler is Runtime.tensorrt:
        file, layers, build_latencies_ms = _build_plans(target, graph, model, card, engine)
        if target.runtime is Runtime.onnxruntime:
            file = _wrap_plan(file, graph)
    else:
        from tasks.parts.runners import onnxruntime

        file = engine / onnxruntime.ENGINE_FILE
        write_graph(encoded, file)
        layers = onnxruntime.layers_of(
            file, provider=onnxruntime.provider_of(target), num_threads=target.num_threads
        )
        if target.device == CUDA:
            _check_placement(file, target, card)
    if target.compiler is not Runtime.onnxruntime:
        write_graph(encoded, engine / GRAPH_FILE)
    manifest = _manifest(target, version, card, file=file)
    images_NCHW = draw_golden_images(card)[: target.max_batch]
    agreement_db, provider = _measure_agreement(
        _run_graph(graph, images_NCHW, target), images_NCHW, manifest, file, is_int8=is_quantized(graph)
    )
    layers = join_fused(layers, graph, _LAYER_TYPES)
    write_table(engine / LAYERS_FILE, list_rows(layers, graph))
    return _publish(
        manifest,
        count_precisions(layers),
        provider,
        engine,
        count_layers(graph),
        agreement_db=agreement_db,
        truth=find_truth(layers, graph),
        build_latencies_ms=build_latencies_ms,
    )


def _build_plans(
    target: Target, graph: "ModelProto", model: Path, card: InputCard, engine: Path
) -> tuple[Path, tuple[EngineLayer, ...], tuple[float, ...]]:
    """Build as often as the target declares and keep the fastest plan; TensorRT picks kernels by timing them."""
    from tasks.parts.runners import tensorrt
    from tasks.parts.runners.open_engine import installed_version
    from tasks.parts.tensorrt_build import build_plan
    from tasks.parts.tensorrt_commands import Build, write_commands
    from tasks.parts.tensorrt_inspector import read_layers

    version = installed_version(Runtime.tensorrt)
    target = replace(target, runtime=Runtime.tensorrt)  # here TensorRT itself runs the plan
    assert target.tensorrt is not None
    gpu = find_gpus()[0]
    file = engine / tensorrt.ENGINE_FILE
    files = []
    for number in range(1, target.tensorrt.num_builds + 1):
        logger.info("build_engine: build %d of %d", number, target.tensorrt.num_builds)
        files.append(engine / f"{number}.plan")
        is_cache_read = target.tensorrt.num_builds == 1  # what the cache knows would make all builds the same
        files[-1].write_bytes(build_plan(graph, target, card, gpu, is_cache_read=is_cache_read))
    latencies_ms = _time_builds(files, target, version, card) if len(files) > 1 else ()
    files[int(np.argmin(latencies_ms)) if latencies_ms else 0].rename(file)
    for other in files:
        other.unlink(missing_ok=True)
    with tensorrt.PrimaryContext():
        layers = read_layers(tensorrt.inspect(tensorrt.load_plan(file.read_bytes(), target), target, card))
    write_commands(engine, target, Build(model, graph.graph.input[0].name, card, gpu, version))
    return file, layers, latencies_ms


def _wrap_plan(file: Path, graph: "ModelProto") -> Path:
    """Replace a plan by the graph that has ONNX Runtime run it."""
    from tasks.parts.ep_context import wrap_plan
    from tasks.parts.onnx_graph import write_graph
    from tasks.parts.runners import onnxruntime

    wrapped = file.with_name(onnxruntime.ENGINE_FILE)
    write_graph(wrap_plan(file.read_bytes(), graph), wrapped)
    file.unlink()
    return wrapped


def _time_builds(files: list[Path], target: Target, version: str, card: InputCard) -> tuple[float, ...]:
    """Return the median latency of each build of the same graph, in ms at batch 1, measured in turns."""
    from contextlib import ExitStack

    from tasks.parts.latency import rounds_ms
    from tasks.parts.runners.open_engine import load_runner

    with ExitStack() as stack:
        runners = {
            file.name: stack.enter_context(load_runner(file, _manifest(target, version, card, file=file)))
            for file in files
        }
        calls = {name: runner.run for name, runner in runners.items()}
        rounds = rounds_ms(calls, draw_golden_images(card)[:1], _ROUNDS_OF_BUILDS)
    return tuple(float(np.median(np.concatenate(rounds[file.name]))) for file in files)


def _check_placement(file: Path, target: Target, card: InputCard) -> None:
    """Raise BuildFailed where ONNX Runtime runs convolutions or matrix products on the CPU instead of the GPU."""
    from tasks.parts.runners import onnxruntime

    provider = onnxruntime.provider_of(target)
    events = onnxruntime.record_nodes(
        file, draw_golden_images(card)[:1], 1, provider=provider, num_threads=target.num_threads
    )
    elsewhere = onnxruntime.find_nodes_elsewhere(events, provider)
    layers = [f"{kind} '{name}'" for name, kind in elsewhere.items() if _LAYER_WORDS.search(kind)]
    if layers:
        raise BuildFailed(
            f"Target {target.name}: ONNX Runtime runs {len(layers)} convolutions or matrix products on the CPU, "
            f"expected all on the GPU: {', '.join(layers[:5])}. Take this variant out of the target, or build it for "
            "one of runtime tensorrt."
        )
    if elsewhere:
        logger.warning(
            "build_engine: target %s: %d small operators run on the CPU", target.name, len(elsewhere)
        )


def _check_weights(graph: "ModelProto", path: Path) -> None:
    """ONNX, its checker and the runtimes accept NaN weights; here they raise ArtifactError."""
    from onnx import numpy_helper

    for tensor in graph.graph.initializer:
        values = numpy_helper.to_array(tensor)
        if values.dtype.kind == "f" and not np.isfinite(values).all():
            raise ArtifactError(
                f"{path}: weight '{tensor.name}' holds NaN or infinity, expected finite values. The training "
                "that made it diverged: lower its learning rate and run it again."
            )


def _check_operators(graph: "ModelProto", target: Target) -> None:
    """Raise BuildFailed for an opset or an operator that the target's runtime does not know."""
    lowest, highest = target.opsets
    opset = next(entry.version for entry in graph.opset_import if entry.domain in ("", "ai.onnx"))
    if not lowest <= opset <= highest:
        raise BuildFailed(
            f"Target {target.name}: the graph has opset {opset}, allowed are {lowest}..{highest} "
            f"(target.{target.name}.opsets). Export it with export_onnx.opset in that range."
        )
    own = {(function.domain, function.name) for function in graph.functions}
    foreign = [
        f"{node.domain}::{node.op_type} ('{node.name}')"
        for node in graph.graph.node
        if node.domain not in ("", "ai.onnx") and (node.domain, node.op_type) not in own
    ]
    if foreign:
        raise BuildFailed(
            f"Target {target.name}: {target.runtime} knows {len(foreign)} nodes of the graph not: "
            f"{', '.join(foreign[:5])}. Replace these operators by standard ONNX ones in the network."
        )


def draw_golden_images(card: InputCard) -> FloatArray:
    """Draw a few deterministic normalised images with edges, gradients and noise, as photos have them."""
    from tasks.parts.data import normalise

    generator = np.random.default_rng(0)
    y_HW, x_HW = np.mgrid[0 : card.height, 0 : card.width] / max(card.height, card.width)
    images = []
    for _ in range(NUM_GOLDEN_IMAGES):
        slopes = generator.uniform(-1, 1, (2, 3))
        image_HWC = 0.5 + 0.5 * (y_HW[..., None] * slopes[0] + x_HW[..., None] * slopes[1])
        for _ in range(4):
            top, left = (
                generator.integers(0, card.height // 2 + 1),
                generator.integers(0, card.width // 2 + 1),
            )
            image_HWC[top : top + card.height // 3, left : left + card.width // 3] = generator.uniform(
                0, 1, 3
            )
        images.append(image_HWC + generator.normal(0, 0.05, image_HWC.shape))
    images_NHWC = (np.clip(np.stack(images), 0, 1) * 255).astype(np.uint8)
    return normalise(images_NHWC, card.mean, card.std)


def _run_graph(graph: "ModelProto", images_NCHW: FloatArray, target: Target) -> FloatArray:
    """Return the logits of the plain graph, by ONNX Runtime on the CPU."""
    from tasks.parts.runners import onnxruntime

    session = onnxruntime.open_session(
        graph.SerializeToString(),
        provider="CPUExecutionProvider",
        num_threads=target.num_threads,
        is_optimised=False,
    )
    logits_NCHW: FloatArray = session.run(None, {session.get_inputs()[0].name: images_NCHW})[0]
    return logits_NCHW


def _measure_agreement(
    expected_NCHW: FloatArray,
    images_NCHW: FloatArray,
    manifest: EngineManifest,
    file: Path,
    *,
    is_int8: bool = False,
) -> tuple[float, str]:
    """Return the engine's signal-to-noise against the logits that are expected, and its provider.

    Images go in one by one and as a batch. Raises BuildFailed below the target's floor.
    """
    from tasks.parts.runners.open_engine import load_runner

    target, card = manifest.target, manifest.card
    _check_logits(expected_NCHW, target, card)
    with load_runner(file, manifest) as runner:
        batched = runner.infer(images_NCHW)
        single = np.concatenate([runner.infer(image[None]) for image in images_NCHW])
        provider = runner.describe().provider
    _check_logits(batched, target, card)
    agreement_db = min(signal_to_noise_db(expected_NCHW, found) for found in (batched, single))
    floor_db = target.min_agreement_int8_db if is_int8 else target.min_agreement_db
    if agreement_db < floor_db:
        key = f"target.{target.name}.min_agreement{'_int8' if is_int8 else ''}_db"
        is_network = target.runtime in CHECKPOINT_RUNTIMES
        source = "float32 network" if is_network else "graph"
        advice = (
            f"another version of it or a wider target.{target.name}.precision may be right"
            if is_network
            else "diff_layers with that floor at 0 shows where; another version of the runtime may be right"
        )
        raise BuildFailed(
            f"Target {target.name}: the engine's logits agree with the {source} by {agreement_db:.1f} dB only, "
            f"expected {floor_db:g} dB or more ({key}). The runtime computes something else than the {source} says: "
            f"{advice}."
        )
    return agreement_db, provider


def _check_logits(logits: FloatArray, target: Target, card: InputCard) -> None:
    if logits.shape[1:] != card.logits_shape:
        raise ArtifactError(
            f"Target {target.name}: the model answers with {list(logits.shape[1:])} for an image, its card says "
            f"{list(card.logits_shape)} for {card.task} ({len(card.classes)} classes). Train or export it again "
            "for this data set."
        )
    if not np.isfinite(logits).all():
        raise BuildFailed(
            f"Target {target.name}: the engine answers with NaN or infinity to a plain image, expected "
            f"finite logits. Values overflow in {target.precision}; use a wider precision "
            f"(target.{target.name}.precision)."
        )


def signal_to_noise_db(expected: FloatArray, found: FloatArray) -> float:
    """Return 10 log10(signal power / noise power), at most MAX_AGREEMENT_DB."""
    signal = float(np.square(expected, dtype=np.float64).sum())
    noise = float(np.square(found.astype(np.float64) - expected).sum())
    if noise == 0:
        return MAX_AGREEMENT_DB
    if signal == 0:
        return -MAX_AGREEMENT_DB
    return min(MAX_AGREEMENT_DB, 10 * float(np.log10(signal / noise)))


@dataclass(frozen=True)
class LayerCounts:
    """What the graph wants of its convolutions and matrix products."""

    num: int
    num_quantized: int
    """Those whose input and weight both come from DequantizeLinear."""
    num_float16: int
    """Those with FP16 weights."""


def count_layers(graph: "ModelProto") -> LayerCounts:
    """Count the convolutions and matrix products of a graph by their precision."""
    from onnx import TensorProto

    halves = {tensor.name for tensor in graph.graph.initializer if tensor.data_type == TensorProto.FLOAT16}
    dequantized = {n.output[0] for n in graph.graph.node if n.op_type == "DequantizeLinear"}
    layers = [node for node in graph.graph.node if node.op_type in _LAYER_TYPES]
    quantized = [node for node in layers if node.input[0] in dequantized and node.input[1] in dequantized]
    return LayerCounts(len(layers), len(quantized), sum(node.input[1] in halves for node in layers))


def find_precision_fault(target: Target, precisions: Precisions, layers: LayerCounts) -> str:
    """Return how the floating-point precision in use contradicts the declared one, or an empty text.

    Whether enough runs in int8 is judged by select_engine, from the share of the MACs.
    Shares and not counts are compared, because a runtime may fuse two layers into one.
    """
    used = _layer_precisions(precisions)
    num_used = max(1, sum(used.values()))
    if layers.num and not used:
        return "the runtime does not tell the precision of its layers, so it is not proved"
    share_quantized = layers.num_quantized / max(1, layers.num)
    if used.get("f16", 0) / num_used < _MIN_SHARE * layers.num_float16 / max(1, layers.num):
        return f"{layers.num_float16} of {layers.num} layers are FP16, but the runtime computes {used}"
    if (
        target.precision is Precision.f32
        and not layers.num_float16
        and used.get("bf16", 0) + used.get("f16", 0)
    ):
        return f"declared is f32, but layers run in {used}"
    reduced = target.precision is not Precision.f32
    if reduced and used.get(target.precision, 0) / num_used < _MIN_SHARE * (1 - share_quantized):
        return f"declared is {target.precision}, but layers run in {used}"
    return ""


def _layer_precisions(precisions: Precisions) -> dict[str, int]:
    used: dict[str, int] = {}
    for op_type, counts in precisions.items():
        if _LAYER_WORDS.search(op_type):
            for precision, count in counts.items():
                used[precision] = used.get(precision, 0) + count
    return used


def _manifest(
    target: Target,
    version: str,
    card: InputCard,
    *,
    status: EngineStatus = EngineStatus.built,
    reason: str = "",
    file: Path | None = None,
) -> EngineManifest:
    """Return what is known before the runtime was asked what it made of the graph."""
    from tasks.parts.runners.open_engine import installed_version

    return EngineManifest(
        target=target,
        status=status,
        reason=reason,
        file=file.name if file else "",
        sha256=sha256_of(file) if file else "",
        size_bytes=file.stat().st_size if file else 0,
        runtime_version=version,
        tensorrt_version=installed_version(Runtime.tensorrt) if target.tensorrt else "",
        isa=read_isa(),
        gpu=None if target.gpu is None else find_gpus()[0],
        card=card,
        is_quantized=False,
        precisions={},
        precision_ok=False,
        provider="",
    )


def _publish(
    manifest: EngineManifest,
    precisions: Precisions,
    provider: str,
    engine: Path,
    layers: LayerCounts,
    *,
    agreement_db: float | None = None,
    truth: EngineTruth | None = None,
    build_latencies_ms: tuple[float, ...] = (),
) -> EngineBuild:
    note = find_precision_fault(manifest.target, precisions, layers)
    manifest = replace(
        manifest,
        is_quantized=layers.num_quantized > 0,
        precisions=precisions,
        precision_ok=not note,
        provider=provider,
    )
    write_engine_manifest(engine, manifest)
    if note:
        logger.warning("build_engine: target %s: %s", manifest.target.name, note)
    return _report(
        manifest,
        num_layers_quantized=layers.num_quantized,
        note=note,
        agreement_db=agreement_db,
        truth=truth,
        build_latencies_ms=build_latencies_ms,
    )


def _report(
    manifest: EngineManifest,
    *,
    num_layers_quantized: int,
    note: str,
    agreement_db: float | None,
    truth: EngineTruth | None = None,
    build_latencies_ms: tuple[float, ...] = (),
) -> EngineBuild:
    return EngineBuild(
        status=manifest.status,
        reason=manifest.reason,
        runtime=manifest.target.runtime,
        runtime_version=manifest.runtime_version,
        provider=manifest.provider,
        file=manifest.file,
        size_bytes=manifest.size_bytes,
        engine_sha256=manifest.sha256,
        is_quantized=manifest.is_quantized,
        num_layers_quantized=num_layers_quantized,
        num_layers_int8=_layer_precisions(manifest.precisions).get("int8", 0),
        precisions=manifest.precisions,
        precision_ok=manifest.precision_ok,
        precision_note=note,
        agreement_db=agreement_db,
        truth=truth,
        build_latencies_ms=build_latencies_ms,
    )
