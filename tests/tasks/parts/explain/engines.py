"""Small real engines with one fault each, held against roofs that are made up, so that no machine decides."""

import importlib
import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from onnx import ModelProto, TensorProto, helper, numpy_helper

from tasks.parts.builders.contract import GraphSource
from tasks.parts.builders.executed_layers import join_nodes, list_rows
from tasks.parts.builders.report import new_manifest
from tasks.parts.data.input_card import InputCard, Task
from tasks.parts.engines.machine import check_versions
from tasks.parts.engines.manifest import LAYERS_FILE
from tasks.parts.engines.open_engine import load_runner
from tasks.parts.engines.target import Target
from tasks.parts.explain.engine_view import EngineView
from tasks.parts.explain.layers import read_layers
from tasks.parts.measuring.machine_state import Machine
from tasks.parts.measuring.tables import write_layers
from tasks.parts.onnx_graphs.graph import is_quantized
from tasks.parts.quantization.qdq import TensorRange, insert_qdq, quantizable_tensors
from tasks.parts.roofs.roofs import ComputeRoof, MemoryRoof, Rate, Roofs
from tasks.parts.tables import write_table

SIZE = 16
MACHINE = Machine("id", "a CPU", ("avx2",), None, {})


def rate(value: float) -> Rate:
    return Rate(value, 0.9 * value, 1.1 * value)


ROOFS = Roofs(
    target="cpu",
    runtime_version="1",
    num_threads=1,
    machine=MACHINE,
    compute=(
        ComputeRoof("f32", False, rate(50e9), "probe", None, ""),
        ComputeRoof("int8", False, rate(100e9), "probe", None, ""),
    ),
    memory=(MemoryRoof(64 << 10, rate(20e9)), MemoryRoof(1 << 28, rate(5e9))),
    layer_ms=rate(0.001),
    call_ms=rate(0.01),
    profiled_layer_ms=0.002,
    reason="",
)
"""50 GMAC/s in float, 100 in INT8, 20 GB/s from the cache and 5 from memory, 1 us a layer, 10 us a call."""


def convolutions(
    *widths: int, kernel: int = 3, groups: int = 1, size: int = SIZE, has_sum: bool = False
) -> ModelProto:
    """Return convolutions with ReLU between maps of these widths; the middle one may add what it reads."""
    random, nodes, constants = np.random.default_rng(0), [], []
    for number, (read, written) in enumerate(itertools.pairwise(widths)):
        weight = random.normal(0, 0.1, (written, read // groups, kernel, kernel)).astype(np.float32)
        constants.append(numpy_helper.from_array(weight, f"w{number}"))
        attributes = {"group": groups, "pads": [kernel // 2] * 4, "kernel_shape": [kernel, kernel]}
        source = f"r{number}" if number else "image"
        nodes.append(
            helper.make_node(
                "Conv", [source, f"w{number}"], [f"c{number}"], name=f"conv{number}", **attributes
            )
        )
        result = f"c{number}"
        if has_sum and number == 1:
            nodes.append(helper.make_node("Add", [result, source], [f"s{number}"], name="sum"))
            result = f"s{number}"
        nodes.append(helper.make_node("Relu", [result], [f"r{number + 1}"], name=f"relu{number}"))
    nodes[-1].output[0] = "values"
    graph = helper.make_graph(
        nodes,
        "faulty",
        [helper.make_tensor_value_info("image", TensorProto.FLOAT, (1, widths[0], size, size))],
        [helper.make_tensor_value_info("values", TensorProto.FLOAT, (1, widths[-1], size, size))],
        constants,
    )
    return helper.make_model(graph, ir_version=8, opset_imports=[helper.make_opsetid("", 17)])


def quantize(model: ModelProto, **options: Any) -> ModelProto:
    """Return the graph with Q/DQ pairs around its convolutions and sums."""
    types = ("Conv", "Add")
    ranges = {
        name: TensorRange(-4.0 if name == "image" else 0.0, 4.0) for name in quantizable_tensors(model, types)
    }
    return insert_qdq(model, ranges, op_types=types, **options)


def view(
    model: ModelProto, target: Target, folder: Path, *, name: str = "engine", latency_ms: float | None = None
) -> EngineView:
    """Build the engine and profile it; without `latency_ms` the latency is that of the layers and the call."""
    target = replace(target, max_batch=1, stem_in_float=False)
    shape = [axis.dim_value for axis in model.graph.input[0].type.tensor_type.shape.dim]
    values = [axis.dim_value for axis in model.graph.output[0].type.tensor_type.shape.dim]
    zeros = (0.0,) * shape[1]
    card = InputCard(
        (), zeros, (1.0,) * shape[1], shape[2], shape[3], Task.values, 1, values_shape=tuple(values[1:])
    )
    engine, tables = folder / name, folder / f"{name}-tables"
    engine.mkdir(parents=True)
    tables.mkdir()
    images_NCHW = np.random.default_rng(0).normal(size=shape).astype(np.float32)
    source = GraphSource(engine / "model.onnx", model, card, images_NCHW)
    built = importlib.import_module(f"tasks.parts.builders.{target.runtime}").build_file(
        target, source, engine
    )
    manifest = new_manifest(target, check_versions(target), card, file=built.file)
    manifest = replace(manifest, is_quantized=is_quantized(model), is_precision_ok=True)
    write_table(engine / LAYERS_FILE, list_rows(join_nodes(built.layers, built.graph), built.graph))
    with load_runner(built.file, manifest) as runner:
        times = {time.name: time.milliseconds for time in runner.profile(images_NCHW, 20)}
    write_layers(engine, times, tables)
    layers = read_layers(tables)
    found = EngineView(name, manifest, 1.0, layers, ROOFS)
    return replace(found, latency_ms=latency_ms or found.layers_ms + 0.01)
