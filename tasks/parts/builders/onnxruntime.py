"""Engines for ONNX Runtime: the graph itself, or a TensorRT plan wrapped into one."""

import logging
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

from onnx import ModelProto, helper

from tasks.core.errors import BuildFailed
from tasks.parts.builders.contract import Built, GraphSource
from tasks.parts.builders.executed_layers import LAYER_WORDS
from tasks.parts.builders.frames import fit_frames
from tasks.parts.custom_operators import check_libraries, declare_libraries
from tasks.parts.engines.manifest import count_precisions
from tasks.parts.engines.onnxruntime.layers import find_nodes_elsewhere, layers_of, record_nodes
from tasks.parts.engines.onnxruntime.runner import ENGINE_FILE, provider_of
from tasks.parts.engines.runtimes import CUDA
from tasks.parts.engines.target import Target
from tasks.parts.onnx_graphs.foreign_half import has_half
from tasks.parts.onnx_graphs.graph import light_copy, write_graph
from tasks.parts.onnx_session import PLAN_OPERATOR

logger = logging.getLogger(__name__)

_DOMAIN = "com.microsoft"
_OPEN = """
import sys, onnxruntime
options = onnxruntime.SessionOptions()
options.add_session_config_entry("session.disable_prepacking", "1")
for library in sys.argv[2:]:
    options.register_custom_ops_library(library)
onnxruntime.InferenceSession(sys.argv[1], options, providers=["CPUExecutionProvider"])
"""
_MAX_BYTES = 2**31 - 2**20
"""Size limit of a protobuf message, minus room for everything but the plan."""


def build_file(target: Target, source: GraphSource, engine: Path) -> Built:
    """Write the rewritten graph, or a graph that makes ONNX Runtime run a TensorRT plan."""
    file = engine / ENGINE_FILE
    if target.tensorrt is not None:
        from tasks.parts.builders import tensorrt

        built = tensorrt.build_file(target, source, engine)
        assert built.graph is not None
        write_graph(wrap_plan(built.file.read_bytes(), built.graph), file)
        built.file.unlink()
        return replace(built, file=file)
    graph = fit_frames(target, source.rewritten(target), source.card)
    declare_libraries(graph, target.custom_operators)
    write_graph(graph, file)
    graph = light_copy(graph)
    if target.device != CUDA and has_half(graph):
        check_survives(file, target)
    layers = layers_of(file, provider=provider_of(target), num_threads=target.num_threads)
    if target.device == CUDA:
        check_placement(file, target, source)
    return Built(file, count_precisions(layers), graph, layers)


def check_survives(file: Path, target: Target) -> None:
    """Raise BuildFailed if ONNX Runtime takes a process down, one of its own, when it opens the file for the CPU.

    Its optimisations for the CPU do that with FP16 graphs: an LSTM whose answer is transposed, for one (1.31).
    Whatever else is wrong with the file, the next session says.
    """
    import onnxruntime

    libraries = check_libraries(target.custom_operators, target.operators_key)
    opened = subprocess.run(
        [sys.executable, "-c", _OPEN, str(file), *map(str, libraries)],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        check=False,
    )
    if opened.returncode < 0:
        raise BuildFailed(
            f"ONNX Runtime {onnxruntime.__version__} ends with {signal.Signals(-opened.returncode).name} while it "
            "optimises the graph, which is a fault of the runtime. Export the network with other operators, or ship "
            "another variant or target."
        )


def wrap_plan(plan: bytes, graph: ModelProto) -> ModelProto:
    """Return a graph with the plan as its only node, and with the inputs and outputs of `graph`, its source.

    Raises BuildFailed for a plan of 2 GB or more.
    """
    if len(plan) > _MAX_BYTES:
        raise BuildFailed(
            f"The plan has {len(plan) / 2**30:.2f} GB, an ONNX file can hold less than 2. Build it for a target of "
            "runtime tensorrt."
        )
    node = helper.make_node(
        PLAN_OPERATOR,
        [value.name for value in graph.graph.input],
        [value.name for value in graph.graph.output],
        name=graph.graph.name,
        domain=_DOMAIN,
        embed_mode=1,
        ep_cache_context=plan,
    )
    wrapped = helper.make_graph([node], graph.graph.name, graph.graph.input, graph.graph.output)
    opsets = [entry for entry in graph.opset_import if entry.domain != _DOMAIN]
    return helper.make_model(
        wrapped, ir_version=graph.ir_version, opset_imports=[*opsets, helper.make_opsetid(_DOMAIN, 1)]
    )


def check_placement(file: Path, target: Target, source: GraphSource) -> None:
    """Raise BuildFailed if ONNX Runtime runs convolutions or matrix products on the CPU instead of the GPU."""
    provider = provider_of(target)
    events = record_nodes(file, source.images_NCHW[:1], 1, provider=provider, num_threads=target.num_threads)
    elsewhere = find_nodes_elsewhere(events, provider)
    layers = [f"{kind} '{name}'" for name, kind in elsewhere.items() if LAYER_WORDS.search(kind)]
    if layers:
        raise BuildFailed(
            f"Target {target.name}: ONNX Runtime runs {len(layers)} convolutions or matrix products on the CPU, "
            f"expected all on the GPU: {', '.join(layers[:5])}. Remove this variant from the target, or build it "
            "for a target of runtime tensorrt."
        )
    if elsewhere:
        logger.warning(
            "build_engine: target %s: %d small operators run on the CPU", target.name, len(elsewhere)
        )
