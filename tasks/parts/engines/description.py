"""Describe an engine for the code that runs it on frames, in a bundle and here."""

import dataclasses
from typing import Any

from tasks.parts.custom_operators import OPERATORS_FOLDER
from tasks.parts.engines.frame_engine.engine import Engine
from tasks.parts.engines.machine import needs_vnni
from tasks.parts.engines.manifest import EngineManifest
from tasks.parts.engines.onnxruntime.runner import session_options
from tasks.parts.engines.openvino.compile import compile_options
from tasks.parts.engines.runner import Runner
from tasks.parts.engines.runtimes import CUDA, Runtime


def on_frames(runner: Runner) -> Engine:
    """Return a loaded engine as one that reads frames and gives answers."""
    return Engine(describe_engine(runner.manifest), runner.run)


def describe_engine(manifest: EngineManifest) -> dict[str, Any]:
    """Return the content of model.json, the only description of an engine that frame_engine reads."""
    target, card = manifest.target, manifest.card
    batches: list[list[int]] = [[1, target.max_batch]]
    options: dict[str, Any] = {}
    if target.tensorrt is not None:
        assert manifest.gpu is not None
        batches = [[profile.min, profile.max] for profile in target.tensorrt.profiles_for(target.max_batch)]
        options = {
            "gpu": dataclasses.asdict(manifest.gpu),
            "version_compatible": target.tensorrt.version_compatible,
            "cuda_graph": target.tensorrt.cuda_graph,
            "hardware_compatibility": target.tensorrt.hardware_compatibility,
        }
    elif target.runtime is Runtime.openvino:
        options = {"properties": compile_options(target), "isa": manifest.isa}
    elif target.runtime is Runtime.onnxruntime:
        options = session_options(target, needs_vnni=needs_vnni(manifest))
    return {
        "runtime": target.runtime,
        "package": package_of(manifest),
        "runtime_version": manifest.runtime_version,
        "file": manifest.file,
        "sha256": manifest.sha256,
        "custom_operators": [
            {"file": f"{OPERATORS_FOLDER}/{library.name}", "sha256": library.sha256}
            for library in target.custom_operators
        ],
        "task": card.task,
        "classes": card.classes,
        "height": card.height,
        "width": card.width,
        "logits_shape": card.logits_shape,
        "outputs": card.outputs,
        "mean": card.mean,
        "std": card.std,
        "reading": dataclasses.asdict(card.reading),
        "reads": target.reads,
        "gives": target.gives,
        "threshold": target.threshold,
        "batches": batches,
        "options": options,
    }


def package_of(manifest: EngineManifest) -> str:
    """Return the PyPI name of the runtime that an engine was measured with."""
    target = manifest.target
    if target.runtime is Runtime.onnxruntime and target.device == CUDA:
        return "onnxruntime-gpu"
    return target.runtime.traits.distributions[0]
