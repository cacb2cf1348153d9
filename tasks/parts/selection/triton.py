"""Write Triton model repositories of an engine.

``triton/``         the Python backend runs the bundle's engine with its frame_engine, as it was measured
``triton_native/``  the runtime's own backend runs the graph or plan. A server that lacks that backend refuses a whole
                    repository for it, so it is not in the other one

Configurations are text of Triton's model_config.proto.
"""

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np

from tasks.core.bounds import AtLeast
from tasks.parts.data.input_card import Task
from tasks.parts.engines.frame_engine.sessions import CPU_PROVIDER
from tasks.parts.engines.manifest import GRAPH_FILE, EngineManifest
from tasks.parts.engines.runtimes import CUDA, Precision, Runtime
from tasks.parts.engines.target import Gives, Reads

if TYPE_CHECKING:
    from onnx import GraphProto, ValueInfoProto


@dataclass(frozen=True)
class Serving:
    """How a Triton server runs an engine."""

    instances: Annotated[int, AtLeast(1)] = 1
    """Processes that run it side by side, each with a copy in memory and the threads that were measured."""
    max_batch: Annotated[int, AtLeast(1)] | None = None
    """Frames that the server puts into one call, at most. None: as many as the engine takes. More: a call runs the
    engine several times, which saves time between server and model, but its first frame waits for its last."""
    queue_delay_us: Annotated[int, AtLeast(0)] = 0
    """How long a frame may wait for others, in microseconds. 0: a call takes what waits when an instance is free."""


_MODEL = '''"""Serve the engine of the bundle that this file lies in."""

import sys
from pathlib import Path

BUNDLE = Path(__file__).resolve().parents[3]
if not (BUNDLE / "frame_engine").is_dir():
    raise FileNotFoundError(
        f"{BUNDLE}: holds no frame_engine, expected the bundle that this model was written with. Start the server "
        "with --model-repository=<bundle>/triton in place of a copy of that folder."
    )
sys.path.insert(0, str(BUNDLE))

from frame_engine.triton_model import TritonPythonModel  # noqa: F401
'''


def write_served(folder: Path, name: str, card: dict[str, Any], serving: Serving) -> None:
    """Write the model of a repository for the Python backend; `card` is the content of model.json."""
    (folder / "1").mkdir(parents=True)
    (folder / "1" / "model.py").write_text(_MODEL, encoding="utf-8")
    (folder / "config.pbtxt").write_text(configure_served(name, card, serving), encoding="utf-8")


def configure_served(name: str, card: dict[str, Any], serving: Serving) -> str:
    """Return the configuration for the Python backend, whose model reads frames and gives answers."""
    max_batch = serving.max_batch or max(int(high) for _, high in card["batches"])
    channels = len(card["mean"])
    frame = f"data_type: TYPE_UINT8 dims: {[card['height'], card['width'], channels]}"
    warmups = [
        f'  {{ name: "batch of {size}" batch_size: {size} inputs '
        f'{{ key: "frames" value: {{ {frame} zero_data: true }} }} }}'
        for size in range(1, max_batch + 1)
    ]
    lines = [
        "# Serve it with: tritonserver --model-repository=triton",
        *_FORMS[Reads.frames],
        *_FORMS[Gives.classes],
        f'name: "{name}"',
        'backend: "python"',
        f"max_batch_size: {max_batch}",
        "# Frames of any size; those of the engine's run in batches, others one by one.",
        f'input [ {{ name: "frames" data_type: TYPE_UINT8 dims: [ -1, -1, {channels} ] }} ]',
        f"output [ {{ {_answers(card)} }} ]",
        f"dynamic_batching {{ max_queue_delay_microseconds: {serving.queue_delay_us} }}",
        f"instance_group [ {{ {_device_of(card)} count: {serving.instances} }} ]",
        _parameter("sha256", card["sha256"]),
        "# A runtime prepares itself for each batch size when it first meets it.",
        "model_warmup [\n" + ",\n".join(warmups) + "\n]",
    ]
    return "\n".join(lines) + "\n"


def _answers(card: dict[str, Any]) -> str:
    """Return name, type and shape of the output for one frame."""
    if card["task"] == Task.values:
        return f'name: "values" data_type: TYPE_FP32 dims: {list(card["logits_shape"])}'
    smallest = np.min_scalar_type(max(1, len(card["classes"]) - 1))
    dims = [-1, -1] if card["task"] == Task.segmentation else [1]
    return f'name: "classes" data_type: TYPE_{smallest.name.upper()} dims: {dims}'


def _device_of(card: dict[str, Any]) -> str:
    options = card["options"]
    is_cpu = "properties" in options or options.get("provider") == CPU_PROVIDER
    return "kind: KIND_CPU" if is_cpu else "kind: KIND_GPU gpus: [ 0 ]"


_FORMS = {
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


def write_native(folder: Path, name: str, engine: Path, manifest: EngineManifest) -> None:
    """Write the model of a repository for the backend of the engine's runtime, with a file that it loads."""
    from tasks.parts.onnx_graphs.graph import read_graph

    runtime = manifest.target.runtime
    graph = engine / (manifest.file if runtime is Runtime.onnxruntime else GRAPH_FILE)
    (folder / "1").mkdir(parents=True)
    if runtime is Runtime.tensorrt:
        shutil.copyfile(engine / manifest.file, folder / "1" / "model.plan")
    else:
        shutil.copyfile(graph, folder / "1" / "model.onnx")
    config = configure_native(name, manifest, read_graph(graph).graph)
    (folder / "config.pbtxt").write_text(config, encoding="utf-8")


def configure_native(name: str, manifest: EngineManifest, graph: "GraphProto") -> str:
    """Return the configuration for the backend of the engine's runtime; `graph` names input and output."""
    target = manifest.target
    backends = {
        Runtime.onnxruntime: _onnxruntime_lines,
        Runtime.openvino: _openvino_lines,
        Runtime.tensorrt: _tensorrt_lines,
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
        "# Serve it with: tritonserver --model-repository=triton_native",
        "# Checked against Triton's schema; no server was run with it. The model in triton/ is tested with one.",
        *_FORMS[target.reads],
        *_FORMS[target.gives],
        "# Their size is the engine's, and their values have 8 bits: ranges, other sizes and windows (see 'reading'",
        "# in model.json) and the way back for masks are left to the client. client.py and triton/ do that.",
        f'name: "{name}"',
        f'input [ {{ name: "{reads.name}" data_type: {_type_of(reads)} dims: {image} }} ]',
        f'output [ {{ name: "{gives.name}" data_type: {_type_of(gives)} {shape} }} ]',
        *backends[target.runtime](manifest),
    ]
    return "\n".join(lines) + "\n"


def _type_of(value: "ValueInfoProto") -> str:
    """Return Triton's name of a tensor's type."""
    from onnx import TensorProto

    name = TensorProto.DataType.Name(value.type.tensor_type.elem_type)
    return f"TYPE_{'FP32' if name == 'FLOAT' else name}"


def _is_batch_fixed(manifest: EngineManifest) -> bool:
    """Return whether the served graph or plan takes exactly one image."""
    return manifest.card.max_batch is not None or manifest.target.max_batch == 1


def _onnxruntime_lines(manifest: EngineManifest) -> list[str]:
    return [
        'backend: "onnxruntime"',
        f"max_batch_size: {0 if _is_batch_fixed(manifest) else manifest.target.max_batch}",
        f"instance_group [ {{ kind: KIND_{'GPU' if manifest.target.device == CUDA else 'CPU'} count: 1 }} ]",
        _parameter("intra_op_thread_count", manifest.target.num_threads),
    ]


def _openvino_lines(manifest: EngineManifest) -> list[str]:
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
        _parameter("PERFORMANCE_HINT", "LATENCY"),
        _parameter("NUM_STREAMS", 1),
        _parameter("INFERENCE_NUM_THREADS", target.num_threads),
    ]
    return [*lines, _parameter("HINT_BF16", "YES")] if target.precision is Precision.bf16 else lines


def _tensorrt_lines(manifest: EngineManifest) -> list[str]:
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


def _parameter(key: str, value: int | str) -> str:
    return f'parameters [ {{ key: "{key}" value: {{ string_value: "{value}" }} }} ]'
