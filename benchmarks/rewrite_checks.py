"""Measure what it costs to hold rewritten graphs against their source, as a share of each build.

``python -m benchmarks.rewrite_checks``. Engines of the default network, untrained, as float and as INT8 graph with
MinMax ranges, for two targets on the CPU. Median CPU seconds of several builds with the checks, and of the checks
in them: the time of `GraphSource.rewritten`, minus that of the rewrites alone and of the source's logits, which a
build computes in any case. Also the agreement that the checks find. Prints a table and writes
``benchmarks/results/rewrite_checks.json``.
"""

import json
import statistics
import tempfile
import time
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import openvino
import torch
from onnx import ModelProto

from benchmarks.runtimes import stage_config
from tasks.build_engine import build_engine
from tasks.core.config import PARAMS_FILE, read_params
from tasks.parts.builders.contract import GraphSource, read_source
from tasks.parts.builders.graph_rewrites import rewrite_for
from tasks.parts.engines.machine import read_cpu_model
from tasks.parts.networks.build import build_network
from tasks.parts.networks.model_card import ModelCard
from tasks.parts.onnx_graphs.export import export_graph
from tasks.parts.onnx_graphs.foreign_qdq import float_form
from tasks.parts.onnx_graphs.graph import is_quantized, write_graph
from tasks.parts.onnx_graphs.signal_to_noise import agreement_db
from tasks.parts.onnx_session import open_session
from tasks.parts.quantization.calibration import choose_range, collect_statistics
from tasks.parts.quantization.config import Calibrator
from tasks.parts.quantization.qdq import insert_qdq, quantizable_tensors

RESULTS = Path(__file__).parent / "results" / "rewrite_checks.json"
TARGETS = ("cpu_onnxruntime", "cpu_openvino")
NUM_BUILDS = 5
CLASSES = tuple("0123456789")


def main() -> None:
    """Measure, print and write the table."""
    with tempfile.TemporaryDirectory() as folder:
        graphs = write_graphs(Path(folder))
        rows = [measure(graph, target, Path(folder)) for graph in graphs for target in TARGETS]
    for row in rows:
        print(
            f"{row['graph']:>6} {row['target']:>16}: build {row['build_cpu_s']:.2f} s, "
            f"checks {row['checks_cpu_s']:.2f} s ({row['share']:.0%}); "
            f"{row['agreement_db']:.1f} dB, float forms {row['float_form_db']:.1f} dB"
        )
    record = {
        "date": date.today().isoformat(),
        "cpu_model": read_cpu_model(),
        "onnxruntime": onnxruntime.__version__,
        "openvino": openvino.__version__,
        "rows": rows,
    }
    RESULTS.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")


def write_graphs(folder: Path) -> list[Path]:
    """Write images, the float graph and the INT8 graph of the default network; return the graphs."""
    params = read_params(Path(PARAMS_FILE))
    size = params["prepare_data"]["height"], params["prepare_data"]["width"]
    config = stage_config("train.baseline").network
    torch.manual_seed(0)
    coarse_NCHW = torch.nn.functional.interpolate(torch.rand(8, 3, 8, 8), size, mode="bilinear")
    images_NHWC = (255 * coarse_NCHW).permute(0, 2, 3, 1).numpy().astype(np.uint8)
    np.save(folder / "images.npy", images_NHWC)
    images_NCHW = (coarse_NCHW - 0.5) / 0.25
    network = build_network(config, len(CLASSES)).train()
    with torch.no_grad():
        for _ in range(10):  # running statistics of these images instead of 0 and 1
            network(images_NCHW)
    card = ModelCard(config, CLASSES, (0.5,) * 3, (0.25,) * 3, *size)
    graph = export_graph(network.eval(), card, height=size[0], width=size[1], opset=20)
    op_types = stage_config("quantize_ptq").op_types
    statistics_of = collect_statistics(
        graph, lambda: [images_NCHW.numpy()], quantizable_tensors(graph, op_types)
    )
    ranges = {
        name: choose_range(found, Calibrator.minmax, percentile=100.0)
        for name, found in statistics_of.items()
    }
    write_graph(graph, folder / "float.onnx")
    write_graph(insert_qdq(graph, ranges, op_types=op_types), folder / "int8.onnx")
    return [folder / "float.onnx", folder / "int8.onnx"]


def measure(graph: Path, name: str, folder: Path) -> dict[str, Any]:
    """Return the seconds of a build for a target, and of the checks in it."""
    target = stage_config(f"build_engine.{name}")
    builds_s, checks_s = [], []
    for number in range(NUM_BUILDS):
        out = folder / f"{graph.stem}-{name}-{number}"
        out.mkdir()
        start = time.process_time()
        report = build_engine(target, model=graph, images=folder / "images.npy", out=out)
        builds_s.append(time.process_time() - start)
        assert report.status == "built", report.reason
        source = read_source(target, graph, folder / "images.npy")
        assert isinstance(source, GraphSource)
        source.compute_logits(target)
        start = time.process_time()
        rewritten = source.rewritten(target)
        middle = time.process_time()
        rewrite_for(target, source.graph)
        checks_s.append(2 * middle - start - time.process_time())
    before, after = source.graph, rewritten
    pairs = [(before, after)]
    pairs.append((float_form(before), float_form(after)) if is_quantized(before) else (before, after))
    rounded_db, exact_db = (agreement_db(*(run(one, source) for one in pair)) for pair in pairs)
    build_s, check_s = statistics.median(builds_s), statistics.median(checks_s)
    return {
        "graph": graph.stem,
        "target": name,
        "build_cpu_s": round(build_s, 3),
        "checks_cpu_s": round(check_s, 3),
        "share": round(check_s / build_s, 3),
        "agreement_db": round(rounded_db, 1),
        "float_form_db": round(exact_db, 1),
    }


def run(graph: ModelProto, source: GraphSource) -> np.ndarray:
    """Return the logits of a graph as it is written."""
    session = open_session(graph, is_optimised=False)
    name = session.get_inputs()[0].name
    return np.concatenate([session.run(None, {name: image[None]})[0] for image in source.images_NCHW])


if __name__ == "__main__":
    main()
