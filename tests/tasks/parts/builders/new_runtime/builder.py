"""Engines for ONNX's reference evaluator: the graph itself."""

from pathlib import Path

from tasks.parts.builders.contract import Built, GraphSource
from tasks.parts.engines.manifest import EngineLayer, count_precisions
from tasks.parts.engines.target import Target
from tasks.parts.onnx_graphs.graph import write_graph


def build_file(target: Target, source: GraphSource, engine: Path) -> Built:
    """Write the graph as the target wants it; the evaluator computes each node of it in float32."""
    graph, file = source.rewritten(target), engine / "engine.onnx"
    write_graph(graph, file)
    layers = tuple(
        EngineLayer(node.name, node.op_type, "f32", (node.name,), is_conversion=False)
        for node in graph.graph.node
    )
    return Built(file, count_precisions(layers), graph, layers)
