"""Build the engine of a graph or checkpoint for one target, and verify it."""

import importlib
import logging
import time
from dataclasses import replace
from pathlib import Path

from tasks.core.errors import BuildFailed
from tasks.parts.builders.agreement import measure_agreement
from tasks.parts.builders.contract import Built, CheckpointSource, GraphSource, read_source
from tasks.parts.builders.executed_layers import join_nodes, list_rows, sum_up_layers
from tasks.parts.builders.report import BuildCost, EngineBuild, compressed_size, new_manifest, publish
from tasks.parts.engines.machine import check_gpu, check_versions, missing_cpu_flags
from tasks.parts.engines.manifest import ENGINE_FOLDER, LAYERS_FILE, EngineManifest, EngineStatus
from tasks.parts.engines.target import Target
from tasks.parts.tables import write_table

logger = logging.getLogger(__name__)


def build(target: Target, *, model: Path, images: Path, out: Path) -> EngineBuild:
    """Build `out/engine` from an ONNX graph (for runtimes torch and aotinductor: from a checkpoint).

    The engine is held against it on some of the calibration images, a .npy file of the data set.

    The status is "skipped" if the CPU lacks a declared flag, and "failed" if the runtime refuses the graph or
    computes it wrongly, both with the reason, so that the other targets continue. Raises TargetMismatch if the
    machine's runtime is not the declared one, ArtifactError for a damaged model or for images of another size.
    """
    logger.info("build_engine: %s for target %s", model, target.name)
    check_gpu(target)
    version = check_versions(target)
    engine = out / ENGINE_FOLDER
    engine.mkdir()
    source = read_source(target, model, images)
    target = replace(target, max_batch=source.card.fit_batch(target.max_batch))
    manifest = new_manifest(target, version, source.card)
    missing = missing_cpu_flags(target)
    if missing:
        reason = f"this CPU lacks {', '.join(missing)} (target.{target.name}.cpu_flags)"
        return publish(replace(manifest, status=EngineStatus.skipped, reason=reason), engine)
    try:
        source.check(target)
        importlib.import_module(target.runtime.traits.module)
        builder = importlib.import_module(f"tasks.parts.builders.{target.runtime}")
        start = time.monotonic()
        built = builder.build_file(target, source, engine)
        return _prove(built, source, manifest, engine, build_s=time.monotonic() - start)
    except BuildFailed as error:
        for leftover in engine.iterdir():
            leftover.unlink()
        return publish(replace(manifest, status=EngineStatus.failed, reason=str(error)), engine)


def _prove(
    built: Built,
    source: GraphSource | CheckpointSource,
    manifest: EngineManifest,
    engine: Path,
    *,
    build_s: float,
) -> EngineBuild:
    """Compare the engine file with its source and record what it really runs."""
    target = manifest.target
    manifest = new_manifest(target, manifest.runtime_version, source.card, file=built.file)
    agreement_db, provider = measure_agreement(
        source.compute_logits(target), source.images_NCHW, manifest, built.file, is_int8=source.is_quantized
    )
    executed = None
    if built.graph is not None and built.layers:
        layers = join_nodes(built.layers, built.graph)
        write_table(engine / LAYERS_FILE, list_rows(layers, built.graph))
        executed = sum_up_layers(layers, built.graph)
    return publish(
        replace(manifest, precisions=built.precisions, provider=provider),
        engine,
        source.count_layers(),
        agreement_db=agreement_db,
        executed=executed,
        build_latencies_ms=built.build_latencies_ms,
        cost=BuildCost(build_s, compressed_size(built.file), source.count_macs()),
    )
