"""Measure each rewrite of tasks/parts/builders/graph_rewrites.py: latency in both runtimes, and their agreement.

``python -m benchmarks.encodings`` after a run of the pipeline. One quantized graph in encodings that differ in the
type of its activations and in the operators at its two ends, and the float graph: p50 of interleaved bursts
at batch 1 on one thread, and the agreement of OpenVINO's logits with those of ONNX Runtime on the same graph (SQNR
in dB, test images). Once for the trained variant ``pruned_ptq``, once for a Fast-SCNN of width 0.5 with random
weights. Prints a table and writes ``benchmarks/results/encodings.json``.
"""

import json
import tempfile
from dataclasses import replace
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import openvino
from onnx import ModelProto

from benchmarks.runtimes import (
    DATA,
    images,
    in_onnxruntime,
    in_openvino,
    random_graph,
    stage_config,
)
from tasks.core.execute import ARTIFACTS
from tasks.parts.builders.graph_rewrites import fix_batch, stem_in_float
from tasks.parts.builders.interpolation import resize_as_matmul
from tasks.parts.engines.machine import read_cpu_model
from tasks.parts.engines.rounds import rounds_ms
from tasks.parts.networks.config import NetworkConfig, NetworkName
from tasks.parts.onnx_graphs.graph import read_graph, write_graph
from tasks.parts.onnx_graphs.int8_activations import activations_to_int8
from tasks.parts.onnx_graphs.signal_to_noise import difference
from tasks.parts.quantization.config import Calibrator
from tasks.quantize_ptq import quantize_ptq

RESULTS = Path(__file__).parent / "results" / "encodings.json"
NUM_IMAGES = 16
NUM_ROUNDS = 100
MAX_BATCH = 32


def main() -> None:
    """Measure, print and write the table."""
    trained = ARTIFACTS / "export_onnx" / "pruned" / "model.onnx", ARTIFACTS / "quantize_ptq" / "model.onnx"
    with tempfile.TemporaryDirectory() as folder:
        random = random_graphs(Path(folder))
        rows = [*measure("trained", *trained), *measure("random weights", *random)]
    for row in rows:
        print(
            f"{row['network']:>15}  {row['encoding']:>30}  ONNX Runtime {row['onnxruntime_ms_p50']:.3f} ms, "
            f"OpenVINO {row['openvino_ms_p50']:.3f} ms, {row['openvino_sqnr_db']:.1f} dB"
        )
    record = {
        "date": date.today().isoformat(),
        "cpu_model": read_cpu_model(),
        "onnxruntime": onnxruntime.__version__,
        "openvino": openvino.__version__,
        "rows": rows,
    }
    RESULTS.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")


def measure(network: str, float_graph: Path, quantized_graph: Path) -> list[dict[str, Any]]:
    """Return one row for each encoding of a graph."""
    quantized = read_graph(quantized_graph)
    last_uint8, last_float = (
        resize_as_matmul(graph) for graph in (stem_in_float(quantized), read_graph(float_graph))
    )
    graphs = {
        "float": read_graph(float_graph),
        "int8": activations_to_int8(quantized),
        "uint8": quantized,
        "... and stem in float": stem_in_float(quantized),
        "... and resize as matmul": last_uint8,
        "... and a batch of 1": fix_batch(last_uint8),
        "float, resize as matmul": last_float,
        "float, ... and a batch of 1": fix_batch(last_float),
    }
    images_NCHW = images("test", NUM_IMAGES)
    onnxruntimes = {name: in_onnxruntime(graph) for name, graph in graphs.items()}
    openvinos = {name: in_openvino(graph, max_batch=max_batch_of(graph)) for name, graph in graphs.items()}
    onnxruntime_ms, openvino_ms = (
        {
            name: np.concatenate(bursts)
            for name, bursts in rounds_ms(networks, images_NCHW[:1], NUM_ROUNDS).items()
        }
        for networks in (onnxruntimes, openvinos)
    )
    return [
        {
            "network": network,
            "encoding": name,
            "onnxruntime_ms_p50": round(float(np.median(onnxruntime_ms[name])), 4),
            "openvino_ms_p50": round(float(np.median(openvino_ms[name])), 4),
            "openvino_sqnr_db": round(
                difference(
                    *(
                        np.concatenate([run[name](image[None]).copy() for image in images_NCHW])
                        for run in (onnxruntimes, openvinos)
                    )
                ).sqnr_db,
                1,
            ),
        }
        for name in graphs
    ]


def max_batch_of(graph: ModelProto) -> int:
    """Return the largest batch to compile a graph for: 1 if it takes no other."""
    return graph.graph.input[0].type.tensor_type.shape.dim[0].dim_value or MAX_BATCH


def random_graphs(folder: Path) -> tuple[Path, Path]:
    """Return the float and the quantized graph of a Fast-SCNN with random weights."""
    config = NetworkConfig(name=NetworkName.fast_scnn, width=0.5, depth=1.0, depthwise=False)
    write_graph(random_graph(config), folder / "float.onnx")
    cfg = replace(stage_config("quantize_ptq"), calibrators=[Calibrator.minmax])
    quantize_ptq(cfg, model=folder / "float.onnx", data=DATA, out=folder)
    return folder / "float.onnx", folder / "model.onnx"


if __name__ == "__main__":
    main()
