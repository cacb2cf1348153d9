"""Measure the CPU seconds of each edit of a graph, on chains of 1,000, 2,500 and 5,000 nodes and on a real export.

``python -m benchmarks.graph_scale``. A chain is residual blocks of two convolutions; the real export is SegFormer of
this package at twice its width and depth. Ranges and magnitudes are drawn: nothing is run on images, so that the time
is that of the edits alone. Prints and writes ``benchmarks/results/graph_scale.json`` row by row; a second start
continues. `exponent` is that of the power law between the two longer chains: 1 is linear.
"""

import argparse
import gc
import json
import math
import os
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxslim
import torch
from onnx import ModelProto, TensorProto, helper, numpy_helper

from benchmarks.foreign import config
from benchmarks.records import open_record
from flows.params import compose_params
from tasks.parts.builders.graph_rewrites import rewrite_for
from tasks.parts.engines.machine import read_cpu_model
from tasks.parts.networks.build import build_network
from tasks.parts.networks.config import NetworkConfig, NetworkName
from tasks.parts.networks.model_card import ModelCard
from tasks.parts.onnx_graphs.equal_operators import replace_operators
from tasks.parts.onnx_graphs.export import export_graph
from tasks.parts.onnx_graphs.foreign_form import ChannelOrder, InputForm, Layout, Values
from tasks.parts.onnx_graphs.foreign_output import OutputForm, OutputKind
from tasks.parts.onnx_graphs.foreign_qdq import float_form
from tasks.parts.onnx_graphs.foreign_rewrite import Quantization, rewrite
from tasks.parts.onnx_graphs.graph import read_graph, write_graph
from tasks.parts.onnx_graphs.half_precision import Magnitudes, find_float32_nodes, to_half
from tasks.parts.onnx_graphs.int8_activations import activations_to_int8
from tasks.parts.onnx_graphs.int8_weights import weights_to_7_bits
from tasks.parts.onnx_graphs.macs import conv_macs
from tasks.parts.quantization.bias_correction import add_to_biases, correctable_layers
from tasks.parts.quantization.channels import find_scalable_channels
from tasks.parts.quantization.equalization import equalize, scalable_tensors
from tasks.parts.quantization.qdq import (
    QdqInserter,
    TensorRange,
    add_quantized_twins,
    insert_qdq,
    quantizable_nodes,
    quantizable_tensors,
)

RESULTS = Path(__file__).parent / "results" / "graph_scale.json"
CHAINS = (1000, 2500, 5000)
SIDE, CHANNELS, NUM_TOGGLES, NUM_CALLS = 16, 8, 20, 3
CLASSES = tuple("01234567")


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure what is not in the record yet; print and write the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--chains", type=int, nargs="*", default=CHAINS)
    parser.add_argument("--without-export", action="store_true")
    parser.add_argument("--results", type=Path, default=RESULTS)
    options = parser.parse_args(arguments)
    conditions = {"cpu_model": read_cpu_model(), "onnx": onnx.__version__, "onnxslim": onnxslim.__version__}
    record = open_record(options.results, conditions, ["rows"])
    graphs: dict[str, Callable[[], ModelProto]] = {
        f"chain of {num_nodes}": partial(make_chain, num_nodes) for num_nodes in options.chains
    }
    if not options.without_export:
        graphs["segformer"] = export_segformer
    for title, make in graphs.items():
        if title in {row["graph"] for row in record["rows"]}:
            continue
        graph = make()
        seconds = measure(graph)
        record["rows"].append(
            {"graph": title, "num_nodes": len(graph.graph.node), "cpu_s": seconds}
            | {"total_cpu_s": round(sum(seconds.values()), 2)}
        )
        record["exponent"] = exponents(record["rows"])
        options.results.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
        print(json.dumps(record["rows"][-1], indent=1), flush=True)


def measure(graph: ModelProto) -> dict[str, float]:
    """Return edit -> CPU seconds."""
    params = compose_params()
    op_types = config(params, "quantize_ptq").op_types
    targets = {name: config(params, f"build_engine.{name}") for name in ("cpu_onnxruntime", "cpu_openvino")}
    ranges = {name: TensorRange(-1.0, 3.0) for name in quantizable_tensors(graph, op_types)}
    tensors = [name for node in graph.graph.node for name in node.output]
    seen = {name: Magnitudes(1.0, 0.1) for name in tensors}
    layers = [node.name for node in quantizable_nodes(graph, op_types)]
    quantized = insert_qdq(graph, ranges, op_types=op_types)

    def toggle() -> None:
        inserter = QdqInserter(graph, ranges, op_types=op_types)
        for name in layers[:: max(1, len(layers) // NUM_TOGGLES)][:NUM_TOGGLES]:
            inserter.insert({*layers} - {name})

    def equalized() -> ModelProto:
        sizes = find_scalable_channels(graph).tensors
        magnitudes = {
            name: np.linspace(0.1, 1, len(sizes[name].groups_C)).astype(np.float32)
            for name in scalable_tensors(graph, op_types)
        }
        return equalize(graph, magnitudes, op_types=op_types)

    def with_biases() -> ModelProto:
        constants = {tensor.name: tensor for tensor in graph.graph.initializer}
        shifts = {
            node.name: np.zeros(
                constants[node.input[1]].dims[0 if node.op_type == "Conv" else -1], np.float32
            )
            for node in correctable_layers(graph, op_types)
        }
        return add_to_biases(graph, shifts)

    edits: dict[str, Callable[[], Any]] = {
        "write_graph, read_graph": lambda: written_and_read(graph),
        "import: rewrite": lambda: imported(graph),
        "import: replace_operators": lambda: replace_operators(copy_of(graph)),
        "convert_precision: to_half": lambda: to_half(
            graph, float32_nodes=[node.name for node in find_float32_nodes(graph, seen, max_abs=2.0)]
        ),
        "quantize_ptq: insert_qdq": lambda: insert_qdq(graph, ranges, op_types=op_types),
        "rank_layers: add_quantized_twins": lambda: add_quantized_twins(graph, ranges, op_types=op_types),
        f"rank_layers: {NUM_TOGGLES} toggles": toggle,
        "quantize_repaired: equalize": equalized,
        "quantize_repaired: add_to_biases": with_biases,
        "conv_macs": lambda: conv_macs(graph),
        "float_form": lambda: float_form(quantized),
        "activations_to_int8": lambda: activations_to_int8(quantized),
        "weights_to_7_bits": lambda: weights_to_7_bits(quantized),
    }
    for name, target in targets.items():
        edits[f"build: rewrite_for {name}"] = partial(rewrite_for, target, quantized)
    return {name: cpu_seconds(edit) for name, edit in edits.items()}


def cpu_seconds(edit: Callable[[], Any]) -> float:
    """Return the CPU seconds of a call in all threads, the least of three."""
    found = []
    for _ in range(NUM_CALLS):
        gc.collect()
        start = time.process_time()
        edit()
        found.append(time.process_time() - start)
    return round(min(found), 3)


def exponents(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Return edit -> exponent of the growth between the two longest chains, for edits of more than 0.1 s."""
    chains = sorted(
        (row for row in rows if row["graph"].startswith("chain")), key=lambda row: row["num_nodes"]
    )
    if len(chains) < 2:
        return {}
    short, long = chains[-2:]
    ratio = math.log(long["num_nodes"] / short["num_nodes"])
    return {
        name: round(math.log(seconds / short["cpu_s"][name]) / ratio, 2)
        for name, seconds in long["cpu_s"].items()
        if seconds > 0.1 and short["cpu_s"][name] > 0
    }


def copy_of(graph: ModelProto) -> ModelProto:
    copied = ModelProto()
    copied.CopyFrom(graph)
    return copied


def written_and_read(graph: ModelProto) -> ModelProto:
    """Write a graph to a file and read it back."""
    with tempfile.TemporaryDirectory() as folder:
        write_graph(graph, Path(folder, "model.onnx"))
        return read_graph(Path(folder, "model.onnx"))


def imported(graph: ModelProto) -> ModelProto:
    """Rewrite a graph as if it were a file of another tool."""
    return rewrite(
        graph,
        path=Path("model.onnx"),
        form=InputForm(Layout.nchw, ChannelOrder.bgr, Values.normalised, (0.5,) * 3, (0.25,) * 3),
        height=None,
        width=None,
        output=OutputForm(None, Layout.nchw, None, OutputKind.values),
        quantization=Quantization.none,
        is_batch_freed=True,
    ).graph


def make_chain(num_nodes: int) -> ModelProto:
    """Return a stem and residual blocks of Conv, Relu, Conv and Add, with a classifier behind them."""
    random = np.random.default_rng(0)
    tensors: list[TensorProto] = []
    nodes = []

    def conv(source: str, name: str, channels: int, kernel: int, made: int = CHANNELS) -> str:
        weights = random.standard_normal((made, channels, kernel, kernel)).astype(np.float32)
        tensors.append(numpy_helper.from_array(weights / kernel / channels, f"{name}:weight"))
        tensors.append(numpy_helper.from_array(np.zeros(made, np.float32), f"{name}:bias"))
        inputs, padding = [source, f"{name}:weight", f"{name}:bias"], [kernel // 2] * 4
        nodes.append(helper.make_node("Conv", inputs, [name], name, pads=padding))
        return name

    source = conv("image", "stem", 3, 3)
    for index in range((num_nodes - 3) // 4):
        first = conv(source, f"first{index}", CHANNELS, 3)
        nodes.append(helper.make_node("Relu", [first], [f"relu{index}"], f"relu{index}"))
        second = conv(f"relu{index}", f"second{index}", CHANNELS, 3)
        nodes.append(helper.make_node("Add", [source, second], [f"sum{index}"], f"sum{index}"))
        source = f"sum{index}"
    nodes.append(helper.make_node("Relu", [source], ["last"], "last"))
    conv("last", "values", CHANNELS, 1, len(CLASSES))
    image = helper.make_tensor_value_info("image", TensorProto.FLOAT, ["batch", 3, SIDE, SIDE])
    values = helper.make_tensor_value_info("values", TensorProto.FLOAT, ["batch", len(CLASSES), SIDE, SIDE])
    graph = helper.make_graph(nodes, "chain", [image], [values], tensors)
    model = helper.make_model(graph, ir_version=10, opset_imports=[helper.make_opsetid("", 20)])
    return onnx.shape_inference.infer_shapes(model)


def export_segformer() -> ModelProto:
    """Return SegFormer with drawn weights as `export_onnx` writes it."""
    network = NetworkConfig(NetworkName.segformer, 2.0, 2.0, False)
    card = ModelCard(network, CLASSES, (0.5,) * 3, (0.25,) * 3, 128, 128)
    torch.manual_seed(0)
    built = build_network(network, len(CLASSES)).eval()
    return export_graph(built, card, height=128, width=128, opset=20)


if __name__ == "__main__":
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    main()
