"""Compile a graph with OpenVINO, and read which layers it really executes."""

import io
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tasks.core.errors import BuildFailed
from tasks.parts.custom_operators import check_libraries
from tasks.parts.engines.frame_engine.sessions import add_extension, openvino_core
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
_OPERATORS = {
    "Convolution",
    "GroupConvolution",
    "ConvolutionBackpropData",
    "GroupConvolutionBackpropData",
    "MatMul",
}
_ORIGIN, _TENSOR = "originalLayersNames", "tensor:"


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


def compile_graph(model: bytes | Path, target: Target) -> "openvino.CompiledModel":
    """Compile an ONNX graph for batches 1..max_batch; a file may have its weights beside it.

    Raises BuildFailed if the runtime refuses it, ArtifactError for a library that is not the one that was declared.
    """
    import openvino

    core, libraries = openvino_core(), check_libraries(target.custom_operators, target.operators_key)
    try:
        for library in libraries:
            add_extension(library)
        graph = core.read_model(model if isinstance(model, Path) else io.BytesIO(model))
        _mark_operators(graph)
        shape = graph.input(0).partial_shape
        shape[0] = openvino.Dimension(1, target.max_batch)
        graph.reshape({0: shape})
        return core.compile_model(graph, PROVIDER, compile_options(target))
    except RuntimeError as error:
        raise BuildFailed(
            f"OpenVINO {installed_version(Runtime.openvino)} refuses the graph: {cause_of(error)}"
        ) from error


def _mark_operators(graph: "openvino.Model") -> None:
    """Let convolutions and matrix products report the ONNX tensor that they compute.

    The CPU plugin keeps this mark when it fuses an operator into another one, for example with the multiplication of
    a BatchNorm, from which the fused layer takes its name.
    """
    for operator in graph.get_ordered_ops():
        if operator.get_type_name() not in _OPERATORS:
            continue
        output = operator.output(0)
        while not output.get_names() and len(readers := _readers_of(output)) == 1:
            output = readers[0].output(0)  # a bias is added by an operator of its own
        if names := sorted(output.get_names()):
            operator.get_rt_info()[_ORIGIN] = ",".join(_TENSOR + name for name in names)


def _readers_of(output: "openvino.Output") -> list[Any]:
    readers = [value.get_node() for value in output.get_target_inputs()]
    return [reader for reader in readers if reader.get_type_name() != "ShapeOf"]


def export_blob(compiled: "openvino.CompiledModel") -> bytes:
    """Return the self-contained file of a compiled graph."""
    blob = compiled.export_model()
    return blob if isinstance(blob, bytes) else bytes(blob.getvalue())


def layers_of(compiled: "openvino.CompiledModel") -> tuple[EngineLayer, ...]:
    """Read the graph that OpenVINO really executes, without nodes that depend only on constants."""
    layers, constants = [], set[str]()
    sources: dict[str, tuple[str, ...]] = {}
    """The layers that made the result of each node: itself, or those before a node that does no work."""
    for node in compiled.get_runtime_model().get_ordered_ops():
        info, name = node.get_rt_info(), node.get_friendly_name()
        kind = _text(info["layerType"])
        makers = [value.get_node().get_friendly_name() for value in node.input_values()]
        read = tuple(dict.fromkeys(layer for maker in makers for layer in sources.get(maker, ())))
        if kind == "Const" or (makers and constants.issuperset(makers)):
            constants.add(name)
        elif kind in _NO_WORK:
            sources[name] = read
        else:
            sources[name] = (name,)
            origins = [origin for origin in _text(info[_ORIGIN]).split(",") if origin]
            values = list(zip(makers, node.input_values(), strict=True))
            layers.append(
                EngineLayer(
                    name=name,
                    kind=kind,
                    precision=_PRECISION_NAMES.get(_text(info["runtimePrecision"]), ""),
                    nodes=tuple(origin for origin in origins if not origin.startswith(_TENSOR)),
                    is_conversion=kind in _CONVERSIONS,
                    outputs=tuple(
                        origin.removeprefix(_TENSOR) for origin in origins if origin.startswith(_TENSOR)
                    ),
                    kernel=_text(info["primitiveType"]),
                    reads=read,
                    input_bytes=sum(_bytes_of(value) for maker, value in values if maker not in constants),
                    weight_bytes=sum(_bytes_of(value) for maker, value in values if maker in constants),
                    output_bytes=sum(map(_bytes_of, node.outputs())),
                )
            )
    return tuple(layers)


def _bytes_of(value: "openvino.Output") -> int:
    """Return the size of a tensor, for one image if the batch is dynamic."""
    shape: list[int] = list(value.get_partial_shape().get_min_shape())
    return int(value.get_element_type().size) * math.prod(shape)


def _text(value: Any) -> str:
    return str(value.astype(str)) if hasattr(value, "astype") else str(value)


def cause_of(error: RuntimeError) -> str:
    """Return the part of OpenVINO's error text that names the cause, without the frames of its source."""
    lines = [line.strip() for line in str(error).strip().splitlines() if line.strip()]
    telling = [
        line for line in lines if not line.startswith(("Exception from", "Check '", "While validating"))
    ]
    return " ".join(telling or lines)[:400]
