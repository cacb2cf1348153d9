"""Make the engine of a graph or checkpoint for one target, and prove that it is what it claims to be."""

import logging
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from tasks.core.errors import ArtifactError, BuildFailed
from tasks.parts.builders.agreement import draw_probe_images, measure_agreement, run_graph
from tasks.parts.builders.executed_layers import sum_up_layers, join_fused, list_rows
from tasks.parts.builders.report import (
    LAYER_TYPES,
    EngineBuild,
    count_layers,
    end_without_engine,
    new_manifest,
    publish,
)
from tasks.parts.data.input_card import InputCard
from tasks.parts.engines.machine import check_gpu, missing_cpu_flags
from tasks.parts.engines.manifest import (
    ENGINE_FOLDER,
    LAYERS_FILE,
    EngineLayer,
    EngineStatus,
    count_precisions,
)
from tasks.parts.engines.target import CHECKPOINT_RUNTIMES, CUDA, Runtime, Target

if TYPE_CHECKING:
    from onnx import ModelProto

logger = logging.getLogger(__name__)


def build(target: Target, *, model: Path, out: Path) -> EngineBuild:
    """Build `out/engine` from an ONNX graph (for runtimes torch and aotinductor: from a checkpoint).

    A CPU without a declared flag ends in status "skipped", a graph that the runtime refuses or computes
    wrongly in "failed", both with the reason, so that the other targets go on. Raises TargetMismatch on a
    machine whose runtime is not the declared one, ArtifactError for a damaged model.
    """
    from tasks.parts.engines.machine import check_versions

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
        return end_without_engine(target, EngineStatus.skipped, reason, version, card, engine)
    try:
        if target.runtime in CHECKPOINT_RUNTIMES:
            from tasks.parts.builders.torch_program import build_from_checkpoint

            report = build_from_checkpoint(target, model, card, version, engine)
        else:
            report = _build_from_graph(target, model, card, version, engine)
    except BuildFailed as error:
        for leftover in engine.iterdir():
            leftover.unlink()
        return end_without_engine(target, EngineStatus.failed, str(error), version, card, engine)
    logger.info(
        "build_engine: %s, %d bytes, precision ok: %s", report.file, report.size_bytes, report.is_precision_ok
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
        from tasks.parts.networks.model_card import read_card

        return read_card(model).for_input()
    from tasks.parts.onnx_graphs.graph import read_card_of_graph, read_graph

    return read_card_of_graph(read_graph(model))


def _build_from_graph(
    target: Target, model: Path, card: InputCard, version: str, engine: Path
) -> EngineBuild:
    from tasks.parts.builders.graph_rewrites import rewrite_for
    from tasks.parts.engines.manifest import GRAPH_FILE
    from tasks.parts.onnx_graphs.graph import is_quantized, read_graph, write_graph
    from tasks.parts.tables import write_table

    graph = read_graph(model)
    _check_weights(graph, model)
    _check_operators(graph, target)
    encoded = rewrite_for(target, graph)
    layers: tuple[EngineLayer, ...]
    build_latencies_ms: tuple[float, ...] = ()
    if target.runtime is Runtime.openvino:
        from tasks.parts.engines.openvino import compile as openvino

        file = engine / openvino.ENGINE_FILE
        compiled = openvino.compile_graph(encoded.SerializeToString(deterministic=True), target)
        file.write_bytes(openvino.export_blob(compiled))
        layers = openvino.layers_of(compiled)
    elif target.compiler is Runtime.tensorrt:
        from tasks.parts.builders.tensorrt_plan import build_plans

        file, layers, build_latencies_ms = build_plans(target, graph, model, card, engine)
        if target.runtime is Runtime.onnxruntime:
            from tasks.parts.builders.onnxruntime_graph import write_wrapped_plan

            file = write_wrapped_plan(file, graph)
    else:
        from tasks.parts.engines.onnxruntime.layers import layers_of
        from tasks.parts.engines.onnxruntime.runner import ENGINE_FILE, provider_of

        file = engine / ENGINE_FILE
        write_graph(encoded, file)
        layers = layers_of(file, provider=provider_of(target), num_threads=target.num_threads)
        if target.device == CUDA:
            from tasks.parts.builders.onnxruntime_graph import check_placement

            check_placement(file, target, card)
    if target.compiler is not Runtime.onnxruntime:
        write_graph(encoded, engine / GRAPH_FILE)
    manifest = new_manifest(target, version, card, file=file)
    images_NCHW = draw_probe_images(card)[: target.max_batch]
    agreement_db, provider = measure_agreement(
        run_graph(graph, images_NCHW, target), images_NCHW, manifest, file, is_int8=is_quantized(graph)
    )
    layers = join_fused(layers, graph, LAYER_TYPES)
    write_table(engine / LAYERS_FILE, list_rows(layers, graph))
    return publish(
        manifest,
        count_precisions(layers),
        provider,
        engine,
        count_layers(graph),
        agreement_db=agreement_db,
        executed=sum_up_layers(layers, graph),
        build_latencies_ms=build_latencies_ms,
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
