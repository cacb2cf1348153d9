"""Read from ONNX Runtime which layers it really executes, in which precision, and how long each takes."""

import itertools
import json
import re
import tempfile
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from tasks.parts.custom_operators import OPERATORS_FOLDER, check_libraries, libraries_of
from tasks.parts.engines.manifest import EngineLayer, FloatArray
from tasks.parts.engines.runner import OperatorTime, typical_time
from tasks.parts.onnx_session import copy_without, open_session, size_of

if TYPE_CHECKING:
    from onnx import GraphProto, ModelProto, NodeProto

_INT8_TYPES = {2: "int8", 3: "int8"}  # TensorProto.UINT8, INT8
_FLOAT_TYPES = {1: "f32", 10: "f16", 16: "bf16"}  # TensorProto.FLOAT, FLOAT16, BFLOAT16
_CONVERSIONS = {
    "QuantizeLinear",
    "DequantizeLinear",
    "ReorderInput",
    "ReorderOutput",
    "Cast",
    "MemcpyFromHost",
    "MemcpyToHost",
}
_KERNEL_TIME = "_kernel_time"
"""What the profiler adds to the name of a node."""
_MOST_ADDED = 0.9
"""Share of a node's time in the profile that may be the profiler's own."""
_NUMBER = re.compile(r"_token_\d+")
_INSERTED = re.compile(r"Transpose(_token_\d+)?")
_ADDED_TO_NAMES = re.compile(r"^(InsertedPrecisionFreeCast_)+|(_nchwc|_quant|_token_\d+|/MatMulAddFusion)+$")
_BLOCKED = re.compile(r"^(.+)_nchwc(?:_token_\d+)?$")
"""Layers in the blocked layout are named after their output tensor, which has another name then."""
_SAME_TYPE_OPS = {
    "MaxPool",
    "Resize",
    "Reshape",
    "Transpose",
    "Concat",
    "Relu",
    "Clip",
    "Slice",
    "Squeeze",
    "Split",
}


@dataclass(frozen=True)
class _Recording:
    """Inferences that ONNX Runtime's profiler recorded."""

    optimised: "GraphProto"
    executed: dict[str, "NodeProto"]
    """Nodes of `optimised` in the order of the graph in the file, by names in which no number is by chance."""
    events: list[dict[str, Any]]
    """The profiler's record of each executed node, with these names."""


def record_nodes(
    file: Path, images_NCHW: FloatArray, num_iterations: int, *, provider: str, num_threads: int
) -> list[dict[str, Any]]:
    """Return the records of ONNX Runtime's profiler for every executed node, which is named as by ``layers_of``."""
    return _record(file, images_NCHW, num_iterations, provider=provider, num_threads=num_threads).events


def _record(
    file: Path,
    images_NCHW: FloatArray,
    num_iterations: int,
    *,
    provider: str,
    num_threads: int,
    model: "ModelProto | None" = None,
) -> _Recording:
    """Record inferences of the graph in a file; `model` is what `_read_nodes` reads of it."""
    import onnx

    model = _read_nodes(file) if model is None else model
    libraries = check_libraries(libraries_of(model), "its graph", file.parent / OPERATORS_FOLDER)
    with tempfile.TemporaryDirectory() as folder:
        optimised_file = Path(folder) / "optimised.onnx"
        session = open_session(
            file,
            provider=provider,
            num_threads=num_threads,
            optimised_file=optimised_file,
            profile_prefix=str(Path(folder) / "profile"),
            libraries=libraries,
        )
        for _ in range(num_iterations):
            session.run(None, {session.get_inputs()[0].name: images_NCHW})
        events = json.loads(Path(session.end_profiling()).read_text(encoding="utf-8"))
        optimised = onnx.load(optimised_file, load_external_data=False).graph
    executed = _in_order(optimised, model.graph)
    names = {node.name: name for name, node in executed.items()}
    nodes = (event for event in events if event.get("cat") == "Node" and event["name"].endswith(_KERNEL_TIME))
    named = []
    for event in nodes:
        name = event["name"].removesuffix(_KERNEL_TIME)
        named.append({**event, "name": names.get(name, name)})  # parts of a function have no other name
    return _Recording(optimised, executed, named)


def _read_nodes(file: Path) -> "ModelProto":
    """Return the graph in a file without its constants."""
    import onnx

    model = onnx.load(file, load_external_data=False)
    return copy_without(model, {tensor.name for tensor in model.graph.initializer})


def without_first_runs(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Drop the first run of each node, which is slower."""
    seen: set[str] = set()
    later = []
    for event in events:
        if event["name"] in seen:
            later.append(event)
        seen.add(event["name"])
    return later


def find_nodes_elsewhere(events: list[dict[str, Any]], provider: str) -> dict[str, str]:
    """Return node -> operator type of nodes that ran on another provider; ONNX Runtime moves them silently."""
    return {
        event["name"]: event["args"]["op_name"]
        for event in events
        if event["args"].get("provider") != provider
    }


def layers_of(file: Path, *, provider: str, num_threads: int) -> tuple[EngineLayer, ...]:
    """Read what ONNX Runtime really executes of the graph in a file, in the order of the graph, by running it once.

    ONNX Runtime numbers and orders what it inserts differently each time. Neither is in the result, because the same
    graph is the same engine, which need not be measured again.
    """
    import onnx

    model = _read_nodes(file)
    image = model.graph.input[0].type.tensor_type
    kind = onnx.helper.tensor_dtype_to_np_dtype(image.elem_type)
    zeros = np.zeros([axis.dim_value or 1 for axis in image.shape.dim], kind)
    recording = _record(file, zeros, 1, provider=provider, num_threads=num_threads, model=model)
    optimised, sizes = recording.optimised, {event["name"]: event["args"] for event in recording.events}
    types = {tensor.name: tensor.data_type for tensor in optimised.initializer}
    types |= {
        value.name: value.type.tensor_type.elem_type for value in [*optimised.value_info, *optimised.input]
    }
    precisions = {node.name: _node_precision(node, types) for node in optimised.node}
    constants = {tensor.name: size_of(tensor) for tensor in optimised.initializer}
    layers = {
        name: node
        for name, node in recording.executed.items()
        if name in sizes or not constants.keys() >= set(node.input)  # else it is dequantized once
    }
    makers = {output: name for name, node in layers.items() for output in node.output}
    return tuple(
        EngineLayer(
            name=name,
            kind=node.op_type,
            precision=precisions[node.name],
            nodes=(_ADDED_TO_NAMES.sub("", node.name),),
            is_conversion=_is_conversion(node),
            outputs=_own_outputs(node),
            reads=tuple(dict.fromkeys(makers[value] for value in node.input if value in makers)),
            input_bytes=_read_size(sizes.get(name), "activation_size"),
            weight_bytes=sum(constants.get(value, 0) for value in node.input),
            output_bytes=_read_size(sizes.get(name), "output_size"),
        )
        for name, node in layers.items()
    )


def _read_size(event: dict[str, Any] | None, key: str) -> int | None:
    """Return a size from the record of a node; functions, which run as several nodes, have none."""
    return None if event is None else int(event[key])


def _in_order(optimised: "GraphProto", graph: "GraphProto") -> dict[str, "NodeProto"]:
    """Return the executed nodes in the order of the graph, by names in which no number is by chance."""
    places = {name: place for place, node in enumerate(graph.node) for name in node.output}
    found = []
    for node in optimised.node:
        place = max((places[name] for name in _own_outputs(node) if name in places), default=-1)
        if place < 0:  # inserted: it stands behind what it reads
            place = max((places.get(name, -1) for name in node.input), default=-1)
        places |= dict.fromkeys(node.output, place)
        found.append((place, _is_conversion(node), _NUMBER.sub("", node.name), node))
    named: dict[str, NodeProto] = {}
    for *_, name, node in sorted(found, key=lambda each: each[:3]):
        twins = (f"{name}_{number}" for number in itertools.count(2))
        named[next(each for each in itertools.chain([name], twins) if each not in named)] = node
    return named


def _own_outputs(node: "NodeProto") -> tuple[str, ...]:
    """Return the tensors of a node; one in the blocked layout has its name in the graph as well."""
    return (*node.output, *_BLOCKED.findall(node.name))


def _is_conversion(node: "NodeProto") -> bool:
    return node.op_type in _CONVERSIONS or bool(_INSERTED.fullmatch(node.name))


def _node_precision(node: Any, types: dict[str, int]) -> str:
    """Return the precision of a node and record the type of its outputs; call in topological order."""
    if node.op_type.startswith("QLinear") or node.op_type.endswith("Integer"):
        zero_point = types.get(node.input[-1] if node.op_type == "QLinearConcat" else node.input[2], 2)
        types.update(dict.fromkeys(node.output, zero_point if zero_point in _INT8_TYPES else 2))
        return "int8"
    if node.op_type == "QuantizeLinear":
        types[node.output[0]] = types.get(node.input[2], 2) if len(node.input) > 2 else 2
        return "f32"
    if node.op_type == "DequantizeLinear":
        types[node.output[0]] = 1
        return "f32"
    input_type = types.get(node.input[0], 0) if node.input else 0
    if node.op_type == "Cast":
        types[node.output[0]] = next(each.i for each in node.attribute if each.name == "to")
    elif node.op_type in _SAME_TYPE_OPS or input_type in _FLOAT_TYPES:
        types.update({name: input_type for name in node.output if name not in types})
    return _INT8_TYPES.get(input_type) or _FLOAT_TYPES.get(input_type) or ""


def operator_times(events: list[dict[str, Any]], num_iterations: int) -> tuple[OperatorTime, ...]:
    """Return the typical time of each node, slowest first."""
    milliseconds: dict[tuple[str, str], list[float]] = defaultdict(list)
    for event in events:
        milliseconds[event["name"], event["args"].get("op_name", "")].append(event["dur"] / 1000)
    times = [
        OperatorTime(name, op_type, typical_time(values, num_iterations))
        for (name, op_type), values in milliseconds.items()
    ]
    return tuple(sorted(times, key=lambda time: -time.milliseconds))


def without_profiler(times: Sequence[OperatorTime], nodes_ms: float) -> tuple[OperatorTime, ...]:
    """Take what the profiler adds off the times of all nodes, which take `nodes_ms` together without it.

    It formats names, types and shapes while the clock of a node runs, and so displaces the caches: some microseconds
    a node, which is more than a small layer takes. Every node gives the same amount, but none more than `_MOST_ADDED`
    of its time.
    """
    added_ms, num_left = sum(time.milliseconds for time in times) - nodes_ms, len(times)
    share_ms = 0.0
    for limit_ms in sorted(_MOST_ADDED * time.milliseconds for time in times):
        share_ms = max(0.0, added_ms / num_left)
        if share_ms <= limit_ms:
            break
        added_ms, num_left = added_ms - limit_ms, num_left - 1
    return tuple(
        replace(time, milliseconds=time.milliseconds - min(share_ms, _MOST_ADDED * time.milliseconds))
        for time in times
    )
