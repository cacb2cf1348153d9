"""Compile a graph with OpenVINO, and read which layers it really executes."""

import io
from typing import TYPE_CHECKING, Any

from tasks.core.errors import BuildFailed
from tasks.parts.engines.machine import installed_version
from tasks.parts.engines.manifest import EngineLayer
from tasks.parts.engines.runtimes import Precision, Runtime
from tasks.parts.engines.target import Target

if TYPE_CHECKING:
    import openvino

ENGINE_FILE = "engine.blob"
PROVIDER = "CPU"

_PRECISION_NAMES = {"u8": "int8", "i8": "int8", "f32": "f32", "bf16": "bf16", "f16": "f16"}
_NO_WORK = {"Input", "Output", "Const", "Reshape", "ShapeOf"}
_CONVERSIONS = {"Reorder", "FakeQuantize", "Convert"}


def compile_options(target: Target) -> dict[str, Any]:
    """Return the OpenVINO properties of a target.

    The precision hint is pinned: on a CPU with bf16, OpenVINO defaults to bf16 even for a float32 graph.
    Threads are not pinned to cores: several engines may share a machine.
    """
    return {
        "PERFORMANCE_HINT": "LATENCY",
        "NUM_STREAMS": 1,
        "INFERENCE_NUM_THREADS": target.num_threads,
        "INFERENCE_PRECISION_HINT": "bf16" if target.precision is Precision.bf16 else "f32",
        "ENABLE_CPU_PINNING": False,
    }


def compile_graph(model: bytes, target: Target) -> "openvino.CompiledModel":
    """Compile an ONNX graph for batches 1..max_batch; raise BuildFailed if the runtime refuses it."""
    import openvino

    core = openvino.Core()
    try:
        graph = core.read_model(io.BytesIO(model))
        shape = graph.input(0).partial_shape
        shape[0] = openvino.Dimension(1, target.max_batch)
        graph.reshape({0: shape})
        return core.compile_model(graph, PROVIDER, compile_options(target))
    except RuntimeError as error:
        raise BuildFailed(
            f"OpenVINO {installed_version(Runtime.openvino)} refuses the graph: {cause_of(error)}"
        ) from error


def export_blob(compiled: "openvino.CompiledModel") -> bytes:
    """Return the self-contained file of a compiled graph."""
    blob = compiled.export_model()
    return blob if isinstance(blob, bytes) else bytes(blob.getvalue())


def layers_of(compiled: "openvino.CompiledModel") -> tuple[EngineLayer, ...]:
    """Read the graph that OpenVINO really executes, without nodes that depend only on constants."""
    layers, constants = [], set[str]()
    for node in compiled.get_runtime_model().get_ordered_ops():
        info = node.get_rt_info()
        kind = _text(info["layerType"])
        makers = {value.get_node().get_friendly_name() for value in node.input_values()}
        if kind == "Const" or (makers and makers <= constants):
            constants.add(node.get_friendly_name())
        elif kind not in _NO_WORK:
            layers.append(
                EngineLayer(
                    name=node.get_friendly_name(),
                    kind=kind,
                    precision=_PRECISION_NAMES.get(_text(info["runtimePrecision"]), ""),
                    nodes=tuple(name for name in _text(info["originalLayersNames"]).split(",") if name),
                    is_conversion=kind in _CONVERSIONS,
                )
            )
    return tuple(layers)


def _text(value: Any) -> str:
    return str(value.astype(str)) if hasattr(value, "astype") else str(value)


def cause_of(error: RuntimeError) -> str:
    """Return the part of OpenVINO's error text that names the cause, without the frames of its source."""
    lines = [line.strip() for line in str(error).strip().splitlines() if line.strip()]
    telling = [
        line for line in lines if not line.startswith(("Exception from", "Check '", "While validating"))
    ]
    return " ".join(telling or lines)[:400]
