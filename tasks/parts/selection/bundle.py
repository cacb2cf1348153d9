"""Write a folder with everything that is needed to run an engine without this repository.

infer.py            reads frames, writes classes or values; needs only numpy and the runtime
frame_engine/       its modules, which benchmark and validate run as well
cpp/                a C++ program that does the same, for engines on the CPU that read frames
engine.txt          what it has to know of the engine
requirements.txt    the packages that it needs, in the versions that were measured
model.json          file, sha256, classes, image size, normalisation, batches, options of the runtime
report.json         the engine's row of engines.json
<engine file>
operators/          libraries with custom operators, of engines that have some
SHA256SUMS          of all of these, for `sha256sum -c`
deepstream/         the configuration of Gst-nvinfer, for plans of segmentation networks that it can run
triton/<name>/      a Triton model repository, of engines without custom operators
"""

import json
import logging
import shutil
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tasks.core.reports import write_json
from tasks.parts.custom_operators import OPERATORS_FOLDER
from tasks.parts.engines import frame_engine
from tasks.parts.engines.description import describe_engine, package_of
from tasks.parts.engines.frame_engine_cpp.write import write_cpp
from tasks.parts.engines.manifest import (
    GRAPH_FILE,
    EngineManifest,
    engine_libraries,
    read_engine_manifest,
    sha256_of,
)
from tasks.parts.engines.runtimes import CUDA, Precision, Runtime
from tasks.parts.engines.target import Gives, Reads, Target
from tasks.parts.selection.deepstream import write_deepstream

if TYPE_CHECKING:
    from onnx import GraphProto, ValueInfoProto

logger = logging.getLogger(__name__)

BUNDLED_RUNTIMES = (Runtime.onnxruntime, Runtime.openvino, Runtime.tensorrt)
"""Eager PyTorch needs the code of the network, so it has no bundle."""


INFER = '''"""Run the engine of this folder: `python infer.py --help`."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

from frame_engine.command import main

if __name__ == "__main__":
    main()
'''


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
    if not manifest.target.custom_operators:
        _write_triton(out / "triton" / name, name, engine, manifest)
    if manifest.target.runtime is Runtime.tensorrt and (reason := write_deepstream(manifest, out)):
        logger.info("%s gets no configuration for DeepStream: %s", name, reason)
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
    (out / "infer.py").write_text(INFER, encoding="utf-8")
    package = Path(frame_engine.__file__).parent
    shutil.copytree(package, out / package.name, ignore=shutil.ignore_patterns("__pycache__"))
    card = describe_engine(manifest)
    write_json(out / "model.json", card)
    write_cpp(card, out)
    write_json(out / "report.json", row)
    for library in engine_libraries(engine / manifest.file, manifest.target):
        (out / OPERATORS_FOLDER).mkdir(exist_ok=True)
        shutil.copyfile(library, out / OPERATORS_FOLDER / library.name)
    packages = [f"{package_of(manifest)}=={manifest.runtime_version}", f"numpy=={version('numpy')}"]
    if manifest.target.runtime is Runtime.tensorrt:
        packages.append("pycuda")
    (out / "requirements.txt").write_text("\n".join(packages) + "\n", encoding="utf-8")
    return sorted(path for path in out.rglob("*") if path.is_file())


_TRITON_FORMS = {
    Reads.normalised: (
        "# Requests hold images, RGB for three channels, as (value / 255 - mean) / std, with mean and std from",
        "# model.json.",
    ),
    Reads.frames: ("# Requests hold frames, uint8, RGB for three channels.",),
    Reads.bgr_frames: ("# Requests hold frames, uint8, in the order blue, green, red.",),
    Gives.logits: (
        "# Responses hold one score per class for each pixel, or for the image, or the model's values.",
    ),
    Gives.classes: ("# Responses hold the class of each pixel, or of the image, or the model's values.",),
}


def configure_triton(name: str, manifest: EngineManifest, graph: "GraphProto") -> str:
    """Return Triton's configuration of an engine, as text of model_config.proto; `graph` names input and output."""
    target = manifest.target
    backends = {
        Runtime.onnxruntime: _triton_onnxruntime,
        Runtime.openvino: _triton_openvino,
        Runtime.tensorrt: _triton_tensorrt,
    }
    reads, gives = graph.input[0], graph.output[0]
    image, logits = (
        [axis.dim_value for axis in value.type.tensor_type.shape.dim[1:]] for value in (reads, gives)
    )
    if _is_batch_fixed(manifest) or target.runtime is Runtime.openvino:
        batch = 1 if _is_batch_fixed(manifest) else -1
        image, logits = [batch, *image], [batch, *logits]
    # Triton takes no output without an axis, as the class of an image is: it gets one of length 1.
    shape = f"dims: {logits}" if logits else "dims: [ 1 ] reshape: { shape: [ ] }"
    lines = [
        "# Serve it with: tritonserver --model-repository=triton",
        *_TRITON_FORMS[target.reads],
        *_TRITON_FORMS[target.gives],
        f'name: "{name}"',
        f'input [ {{ name: "{reads.name}" data_type: {_triton_type(reads)} dims: {image} }} ]',
        f'output [ {{ name: "{gives.name}" data_type: {_triton_type(gives)} {shape} }} ]',
        *backends[target.runtime](manifest),
    ]
    return "\n".join(lines) + "\n"


def _triton_type(value: "ValueInfoProto") -> str:
    """Return Triton's name of a tensor's type."""
    from onnx import TensorProto

    name = TensorProto.DataType.Name(value.type.tensor_type.elem_type)
    return f"TYPE_{'FP32' if name == 'FLOAT' else name}"


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
