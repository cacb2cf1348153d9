"""Write a folder with everything that is needed to run an engine without this repository.

infer.py            reads images, writes classes or values; needs only numpy and the runtime
requirements.txt    the packages that it needs, in the versions that were measured
model.json          file, sha256, classes, image size, normalisation, batches, options of the runtime
report.json         the engine's row of engines.json
<engine file>
SHA256SUMS          of all of these, for `sha256sum -c`
triton/<name>/      a Triton model repository
"""

import dataclasses
import json
import shutil
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tasks.core.reports import write_json
from tasks.parts.engines import bundle_infer
from tasks.parts.engines.machine import needs_vnni
from tasks.parts.engines.manifest import GRAPH_FILE, EngineManifest, read_engine_manifest, sha256_of
from tasks.parts.engines.openvino.compile import compile_options
from tasks.parts.engines.runtimes import CUDA, Precision, Runtime
from tasks.parts.engines.target import Target
from tasks.parts.onnx_session import PROVIDER_OPTIONS

if TYPE_CHECKING:
    from onnx import GraphProto

BUNDLED_RUNTIMES = (Runtime.onnxruntime, Runtime.openvino, Runtime.tensorrt)
"""Eager PyTorch needs the code of the network, so it has no bundle."""


def _has_bundle(target: Target) -> bool:
    """Return whether engines of a target get a bundle.

    A TensorRT plan for ONNX Runtime gets none: a target with runtime tensorrt needs one library less.
    """
    return target.runtime in BUNDLED_RUNTIMES and target.compiler is target.runtime


def write_bundle(engine: Path, row: dict[str, Any], out: Path) -> bool:
    """Write the bundle of a built engine into the new folder `out`; return False if its runtime has none."""
    manifest = read_engine_manifest(engine)
    if not _has_bundle(manifest.target):
        return False
    write_companions(engine, row, out)
    shutil.copyfile(engine / manifest.file, out / manifest.file)
    name = f"{row['variant']}-{row['target']}"
    _write_triton(out / "triton" / name, name, engine, manifest)
    files = sorted(path for path in out.rglob("*") if path.is_file())
    sums = [f"{sha256_of(path)}  {path.relative_to(out)}" for path in files]
    (out / "SHA256SUMS").write_text("\n".join(sums) + "\n", encoding="utf-8")
    return True


def write_companions(engine: Path, row: dict[str, Any], out: Path) -> list[Path]:
    """Write the files that an engine file needs to run; return them, or none if its runtime has no bundle."""
    manifest = read_engine_manifest(engine)
    if not _has_bundle(manifest.target):
        return []
    out.mkdir(parents=True)
    shutil.copyfile(bundle_infer.__file__, out / "infer.py")
    write_json(out / "model.json", describe_engine(manifest))
    write_json(out / "report.json", row)
    packages = [f"{_package(manifest)}=={manifest.runtime_version}", f"numpy=={version('numpy')}"]
    if manifest.target.runtime is Runtime.tensorrt:
        packages.append("pycuda")
    (out / "requirements.txt").write_text("\n".join(packages) + "\n", encoding="utf-8")
    return sorted(out.iterdir())


def describe_engine(manifest: EngineManifest) -> dict[str, Any]:
    """Return the content of model.json, the only description that infer.py reads."""
    target, card = manifest.target, manifest.card
    batches, options = [[1, target.max_batch]], {}
    if target.tensorrt is not None:
        assert manifest.gpu is not None
        batches = [[profile.min, profile.max] for profile in target.tensorrt.profiles_for(target.max_batch)]
        options = {
            "gpu": dataclasses.asdict(manifest.gpu),
            "version_compatible": target.tensorrt.version_compatible,
            "hardware_compatibility": target.tensorrt.hardware_compatibility,
        }
    elif target.runtime is Runtime.openvino:
        options = {"properties": compile_options(target), "isa": manifest.isa}
    else:
        options = {
            "provider": manifest.provider,
            "provider_options": PROVIDER_OPTIONS.get(manifest.provider, {}),
            "num_threads": target.num_threads,
            "needs_vnni": needs_vnni(manifest),
        }
    return {
        "runtime": target.runtime,
        "package": _package(manifest),
        "runtime_version": manifest.runtime_version,
        "file": manifest.file,
        "sha256": manifest.sha256,
        "task": card.task,
        "classes": card.classes,
        "height": card.height,
        "width": card.width,
        "logits_shape": card.logits_shape,
        "outputs": card.outputs,
        "mean": card.mean,
        "std": card.std,
        "batches": batches,
        "options": options,
    }


def configure_triton(name: str, manifest: EngineManifest, graph: "GraphProto") -> str:
    """Return Triton's configuration of an engine, as text of model_config.proto; `graph` names input and output."""
    target, card = manifest.target, manifest.card
    backends = {
        Runtime.onnxruntime: _triton_onnxruntime,
        Runtime.openvino: _triton_openvino,
        Runtime.tensorrt: _triton_tensorrt,
    }
    image, logits = list(card.image_shape), list(card.logits_shape)
    if _is_batch_fixed(manifest) or target.runtime is Runtime.openvino:
        batch = 1 if _is_batch_fixed(manifest) else -1
        image, logits = [batch, *image], [batch, *logits]
    lines = [
        "# Serve it with: tritonserver --model-repository=triton",
        "# Requests hold images, RGB for three channels, as (value / 255 - mean) / std, with mean and std from",
        "# model.json; responses hold one score per class for each pixel, or for the image, or the model's values.",
        f'name: "{name}"',
        f'input [ {{ name: "{graph.input[0].name}" data_type: TYPE_FP32 dims: {image} }} ]',
        f'output [ {{ name: "{graph.output[0].name}" data_type: TYPE_FP32 dims: {logits} }} ]',
        *backends[target.runtime](manifest),
    ]
    return "\n".join(lines) + "\n"


def _is_batch_fixed(manifest: EngineManifest) -> bool:
    """Return whether the served graph or plan takes exactly one image; plans of dynamic graphs have profiles."""
    is_rewritten = manifest.target.runtime is not Runtime.tensorrt
    return manifest.card.max_batch is not None or (is_rewritten and manifest.target.max_batch == 1)


def _write_triton(folder: Path, name: str, engine: Path, manifest: EngineManifest) -> None:
    from tasks.parts.onnx_graphs.graph import read_graph

    runtime = manifest.target.runtime
    graph = engine / (manifest.file if runtime is Runtime.onnxruntime else GRAPH_FILE)
    (folder / "1").mkdir(parents=True)
    if runtime is Runtime.tensorrt:
        shutil.copyfile(engine / manifest.file, folder / "1" / "model.plan")
    else:
        shutil.copyfile(graph, folder / "1" / "model.onnx")
    config = configure_triton(name, manifest, read_graph(graph).graph)
    (folder / "config.pbtxt").write_text(config, encoding="utf-8")


def _package(manifest: EngineManifest) -> str:
    """Return the PyPI name of the runtime that an engine was measured with."""
    target = manifest.target
    is_gpu_build = target.runtime is Runtime.onnxruntime and target.device == CUDA
    return "onnxruntime-gpu" if is_gpu_build else str(target.runtime)


def _triton_onnxruntime(manifest: EngineManifest) -> list[str]:
    return [
        'backend: "onnxruntime"',
        f"max_batch_size: {0 if _is_batch_fixed(manifest) else manifest.target.max_batch}",
        f"instance_group [ {{ kind: KIND_{'GPU' if manifest.target.device == CUDA else 'CPU'} count: 1 }} ]",
        _triton_parameter("intra_op_thread_count", manifest.target.num_threads),
    ]


def _triton_openvino(manifest: EngineManifest) -> list[str]:
    target = manifest.target
    lines = [
        "# The OpenVINO backend cannot load a compiled blob: model.onnx is the graph that the measured engine was",
        "# compiled from. The server compiles it with its own OpenVINO. On a CPU with bf16, this runs all but int8",
        "# layers in bf16, even if the target says f32, so report.json does not apply to it. The batch is in dims",
        "# because with max_batch_size the backend accepts no smaller batch (Triton 24.04 or later).",
        'backend: "openvino"',
        'default_model_filename: "model.onnx"',
        "max_batch_size: 0",
        "instance_group [ { kind: KIND_CPU count: 1 } ]",
        _triton_parameter("PERFORMANCE_HINT", "LATENCY"),
        _triton_parameter("NUM_STREAMS", 1),
        _triton_parameter("INFERENCE_NUM_THREADS", target.num_threads),
    ]
    return [*lines, _triton_parameter("HINT_BF16", "YES")] if target.precision is Precision.bf16 else lines


def _triton_tensorrt(manifest: EngineManifest) -> list[str]:
    options, gpu = manifest.target.tensorrt, manifest.gpu
    assert options is not None and gpu is not None
    profiles = options.profiles_for(manifest.target.max_batch)
    names = json.dumps([str(index) for index in range(len(profiles))])
    lines = [
        f"# Built by TensorRT {manifest.runtime_version} on {gpu.name} ({gpu.compute_capability}) with",
        f"# hardware_compatibility {options.hardware_compatibility}. Not run on real hardware.",
    ]
    if options.version_compatible:
        lines.append(
            "# A server with another TensorRT needs --backend-config=tensorrt,version-compatible=true."
        )
    return [
        *lines,
        'platform: "tensorrt_plan"',
        f"max_batch_size: {0 if _is_batch_fixed(manifest) else max(profile.max for profile in profiles)}",
        f"instance_group [ {{ kind: KIND_GPU count: 1 profile: {names} }} ]",
    ]


def _triton_parameter(key: str, value: int | str) -> str:
    return f'parameters [ {{ key: "{key}" value: {{ string_value: "{value}" }} }} ]'
