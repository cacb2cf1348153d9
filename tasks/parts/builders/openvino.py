"""Engines for OpenVINO: the compiled blob of a graph, with the graph beside it."""

from pathlib import Path

from tasks.parts.builders.contract import Built, GraphSource
from tasks.parts.builders.frames import fit_frames
from tasks.parts.engines.manifest import GRAPH_FILE, count_precisions
from tasks.parts.engines.openvino.compile import ENGINE_FILE, compile_graph, export_blob, layers_of
from tasks.parts.engines.target import Target
from tasks.parts.onnx_graphs.graph import light_copy, write_graph
from tasks.parts.onnx_session import large_constants


def build_file(target: Target, source: GraphSource, engine: Path) -> Built:
    """Rewrite the graph for the target and compile it."""
    file, graph = (
        engine / ENGINE_FILE,
        fit_frames(target, source.rewritten(target), source.card),
    )
    written = engine / GRAPH_FILE
    write_graph(graph, written)
    is_large, graph = bool(large_constants(graph)), light_copy(graph)
    compiled = compile_graph(written if is_large else written.read_bytes(), target)
    file.write_bytes(export_blob(compiled))
    layers = layers_of(compiled)
    return Built(file, count_precisions(layers), graph, layers)
