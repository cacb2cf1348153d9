"""Build the engine of a graph or checkpoint for one target, and verify it."""

import importlib
import logging
import shutil
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from tasks.core.errors import BuildFailed, ConfigError
from tasks.parts.builders.agreement import compare_answers, measure_agreement, read_probe_frames
from tasks.parts.builders.contract import Built, CheckpointSource, GraphSource, read_source
from tasks.parts.builders.executed_layers import join_nodes, list_rows, sum_up_layers
from tasks.parts.builders.report import BuildCost, EngineBuild, compressed_size, new_manifest, publish
from tasks.parts.custom_operators import check_libraries, libraries_of
from tasks.parts.engines.machine import check_gpu, check_versions, missing_cpu_flags
from tasks.parts.engines.manifest import (
    ENGINE_FOLDER,
    LAYERS_FILE,
    TWIN_FOLDER,
    EngineManifest,
    EngineStatus,
    copy_libraries,
)
from tasks.parts.engines.runtimes import Runtime
from tasks.parts.engines.target import Reads, Target
from tasks.parts.tables import write_table

logger = logging.getLogger(__name__)


def build(target: Target, *, model: Path, images: Path, out: Path) -> EngineBuild:
    """Build `out/engine` from an ONNX graph (for runtimes torch and aotinductor: from a checkpoint).

    The engine is held against it on some of the calibration images, a .npy file of the data set.

    The status is "skipped" if the CPU lacks a declared flag, and "failed" if the runtime refuses the graph or
    computes it wrongly, both with the reason, so that the other targets continue. Raises TargetMismatch if the
    machine's runtime is not the declared one, ArtifactError for a damaged model, for images of another size, or for
    a library with another sha256 than the declared one.
    """
    logger.info("build_engine: %s for target %s", model, target.name)
    check_gpu(target)
    version = check_versions(target)
    engine = out / ENGINE_FOLDER
    engine.mkdir()
    source = read_source(target, model, images)
    target = replace(target, max_batch=source.card.fit_batch(target.max_batch))
    if (
        isinstance(source, GraphSource)
        and target.compiler is Runtime.onnxruntime
        and not target.custom_operators
    ):
        target = replace(target, custom_operators=libraries_of(source.graph))
    check_libraries(target.custom_operators, target.operators_key)
    if target.threshold is not None and len(source.card.classes) != 2:
        raise ConfigError(
            f"target.{target.name}.threshold is {target.threshold}, and {model} has {len(source.card.classes)} "
            "classes, expected 2. Set it to null: the class with the largest logit wins."
        )
    if target.reads is Reads.bgr_frames and len(source.card.mean) != 3:
        raise ConfigError(
            f"target.{target.name}.reads is bgr_frames, and {model} reads {len(source.card.mean)} channels, expected "
            "3. Set it to frames."
        )
    manifest = new_manifest(target, version, source.card)
    missing = missing_cpu_flags(target)
    if missing:
        reason = f"this CPU lacks {', '.join(missing)} (target.{target.name}.cpu_flags)"
        return publish(replace(manifest, status=EngineStatus.skipped, reason=reason), engine)
    try:
        source.check(target)
        importlib.import_module(target.runtime.traits.module)
        builder = importlib.import_module(f"tasks.parts.builders.{target.runtime}")
        copy_libraries(target, engine)
        start = time.monotonic()
        built = builder.build_file(target, source, engine)
        build_s = time.monotonic() - start
        twin = built if target.is_plain else _build_twin(builder, source, manifest, engine)
        source = source.with_logits(target)
        return _prove(built, twin, source, manifest, images, engine, build_s=build_s)
    except BuildFailed as error:
        shutil.rmtree(engine)
        engine.mkdir()
        return publish(replace(manifest, status=EngineStatus.failed, reason=str(error)), engine)


def _build_twin(
    builder: Any, source: GraphSource | CheckpointSource, manifest: EngineManifest, engine: Path
) -> Built:
    """Build the engine with normalised images and logits into the engine's folder."""
    folder = engine / TWIN_FOLDER
    folder.mkdir()
    copy_libraries(manifest.target, folder)
    built: Built = builder.build_file(manifest.target.plain, source, folder)
    return built


def _prove(
    built: Built,
    twin: Built,
    source: GraphSource | CheckpointSource,
    manifest: EngineManifest,
    images: Path,
    engine: Path,
    *,
    build_s: float,
) -> EngineBuild:
    """Compare the engine's twin with its source, and the engine with its twin; record what the engine really runs."""
    target = manifest.target
    manifest = new_manifest(target, manifest.runtime_version, source.card, file=built.file)
    plain = replace(manifest, target=target.plain)
    if twin is not built:
        plain = new_manifest(target.plain, manifest.runtime_version, source.card, file=twin.file)
    logits_NCHW = source.compute_logits(target)
    how: dict[str, Any] = {
        "is_int8": source.is_quantized,
        "usual_power": source.usual_power,
        "choice": source.choice,
    }
    agreement_db, provider = measure_agreement(logits_NCHW, source.images_NCHW, plain, twin.file, **how)
    answers_agreement = None
    if twin is not built:
        plain = replace(plain, precisions=twin.precisions, provider=provider)
        publish(plain, twin.file.parent, source.count_layers())
        frames_NHWC = read_probe_frames(images, source.card)
        answers_agreement = compare_answers(frames_NHWC, manifest, built.file, plain, twin.file, **how)
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
        answers_agreement=answers_agreement,
        executed=executed,
        build_latencies_ms=built.build_latencies_ms,
        kernel_units=built.kernel_units,
        cost=BuildCost(build_s, compressed_size(built.file), source.count_macs()),
    )
