"""Name the nodes of an exported graph, and attach the module and line of code that each comes from."""

import ast
import re
import sysconfig
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import torch
from onnx import ModelProto, NodeProto

from tasks.parts.onnx_graphs.graph import set_node_source

ROOT_MODULE = "network"  # module name for code in the network's own forward

_REPOSITORY = Path(__file__).resolve().parents[3]
_PACKAGES = Path(sysconfig.get_paths()["purelib"]).resolve()
_NETWORKS = (_REPOSITORY / "tasks" / "parts" / "networks", _PACKAGES / "transformers" / "models")
_FOREIGN = _NETWORKS[0] / "foreign.py"
"""Calls networks that are not in this repository."""
_TORCH = str(Path(torch.__file__).resolve().parent)
_LIBRARIES = tuple(
    {str(Path(sysconfig.get_paths()[key]).resolve()) for key in ("stdlib", "purelib", "platlib")} | {_TORCH}
)
_FRAME = re.compile(r'File "(?P<file>.+?)", line (?P<line>\d+), in ')
_NO_MODULE = "_empty_nn_module_stack"  # torch's name for sizes that it reads before all modules


def read_sources(raw: ModelProto) -> dict[str, tuple[str, str]]:
    """Return tensor name -> (module, file:line), from the metadata of torch's exporter, in order of execution."""
    sources = {}
    for node in raw.graph.node:
        entries = {entry.key: entry.value for entry in node.metadata_props}
        scopes = ast.literal_eval(entries.get("pkg.torch.onnx.name_scopes", "[]"))
        line = _line_of_ours(entries.get("pkg.torch.onnx.stack_trace", ""))
        if scopes and line:
            module = scopes[-2] if len(scopes) > 1 and scopes[-2] else ROOT_MODULE
            if module.startswith(_NO_MODULE):
                continue
            sources.update(dict.fromkeys(node.output, (module, line)))
    return sources


def _line_of_ours(stack_trace: str) -> str | None:
    """Return file:line of the innermost frame in a network's code, otherwise in code outside of libraries.

    What `foreign.py` calls is a network's code, in the user's workspace or in an installed package.
    """
    frames = [(Path(match["file"]).resolve(), match["line"]) for match in _FRAME.finditer(stack_trace)]
    in_networks = [frame for frame in frames if any(frame[0].is_relative_to(root) for root in _NETWORKS)]
    own = [frame for frame in frames if not str(frame[0]).startswith(_LIBRARIES)]
    called = [frame for frame in frames if not str(frame[0]).startswith(_TORCH)]
    if in_networks and in_networks[-1][0] == _FOREIGN:
        in_networks = [frame for frame in own if frame[0] != _FOREIGN] or called
    if not in_networks and not own:
        return None
    file, line = (in_networks or own)[-1]
    root = next((root for root in (_PACKAGES, _REPOSITORY) if file.is_relative_to(root)), file.parent)
    return f"{file.relative_to(root).as_posix()}:{line}"


def name_nodes(model: ModelProto, sources: dict[str, tuple[str, str]]) -> None:
    """Name nodes and tensors `<module>/<operator>` and attach module and file:line to every node."""
    graph = model.graph
    origins = _complete_origins(graph.node, sources)
    kept_names = {value.name for value in [*graph.input, *graph.output]}
    parameters = {tensor.name for tensor in graph.initializer}
    executed = {name: index for index, name in enumerate(sources)}
    order = sorted(
        range(len(graph.node)), key=lambda index: executed.get(graph.node[index].output[0], len(executed))
    )
    renamed: dict[str, str] = {}
    counts: Counter[str] = Counter()
    for position in order:
        node, (module, source) = graph.node[position], origins[position]
        base = f"{module}/{node.op_type}"
        counts[base] += 1
        node.name = base if counts[base] == 1 else f"{base}_{counts[base]}"
        set_node_source(node, module, source)
        for index, name in enumerate(node.output):
            if name and name not in kept_names:
                renamed[name] = node.name if len(node.output) == 1 else f"{node.name}:{index}"
        for index, name in enumerate(node.input):
            if name in parameters and name not in renamed:
                renamed[name] = f"{node.name}:{_input_role(node, index)}"
    for node in graph.node:
        node.input[:] = [renamed.get(name, name) for name in node.input]
        node.output[:] = [renamed.get(name, name) for name in node.output]
    for item in [*graph.initializer, *graph.value_info]:
        item.name = renamed.get(item.name, item.name)


def _input_role(node: NodeProto, index: int) -> str:
    roles: dict[str, Sequence[str]] = {
        "Conv": ("x", "weight", "bias"),
        "Gemm": ("x", "weight", "bias"),
        "Clip": ("x", "min", "max"),
        "Resize": ("x", "roi", "scales", "sizes"),
    }
    names = roles.get(node.op_type, ())
    return names[index] if index < len(names) else f"constant{index}"


def _complete_origins(
    nodes: Sequence[NodeProto], sources: dict[str, tuple[str, str]]
) -> list[tuple[str, str]]:
    """Give nodes added by simplification the origin of the node that reads them, otherwise of the one before them."""
    origins: list[tuple[str, str] | None] = [
        next((sources[name] for name in node.output if name in sources), None) for node in nodes
    ]
    made_by = {name: index for index, node in enumerate(nodes) for name in node.output}
    for index in reversed(range(len(nodes))):
        for name in nodes[index].input:
            producer = made_by.get(name)
            if producer is not None and origins[producer] is None:
                origins[producer] = origins[index]
    for index, node in enumerate(nodes):
        if origins[index] is None:
            before = [origins[made_by[name]] for name in node.input if name in made_by]
            origins[index] = next((origin for origin in before if origin), (ROOT_MODULE, "unknown:0"))
    return [origin for origin in origins if origin is not None]
