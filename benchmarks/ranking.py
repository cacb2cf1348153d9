"""Measure the cost of ``rank_layers``: one pass over the validation subset per layer, so linear in the layers.

``python -m benchmarks.ranking`` after a run of the pipeline, which made the data. DeepLabV3+ of several depths with
random weights is ranked with the run's settings. The cost is given in seconds and in units of one INT8 pass per
layer, measured in the same process: the quotient does not grow with the number of layers. Prints a table and writes
``benchmarks/results/ranking.json``.
"""

import json
import tempfile
import time
from dataclasses import replace
from datetime import date
from pathlib import Path
from typing import Any

from benchmarks.runtimes import DATA, random_graph, stage_config
from tasks.parts.engines.machine import read_cpu_model
from tasks.parts.networks.config import NetworkConfig, NetworkName
from tasks.parts.onnx_graphs.graph import read_graph, write_graph
from tasks.parts.quantization.config import Calibrator
from tasks.parts.quantization.evaluation import open_evaluator
from tasks.quantize_ptq import quantize_ptq
from tasks.rank_layers import rank_layers

RESULTS = Path(__file__).parent / "results" / "ranking.json"
DEPTHS = (0.5, 1.0, 2.0, 4.0)


def main() -> None:
    """Measure, print and write the table."""
    rows = []
    for depth in DEPTHS:
        with tempfile.TemporaryDirectory() as folder:
            rows.append(measure(depth, Path(folder)))
        print("  ".join(f"{name} {value}" for name, value in rows[-1].items()), flush=True)
    record = {"date": date.today().isoformat(), "cpu_model": read_cpu_model(), "rows": rows}
    RESULTS.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")


def measure(depth: float, folder: Path) -> dict[str, Any]:
    """Rank one network."""
    config = NetworkConfig(name=NetworkName.deeplabv3plus, width=0.5, depth=depth, depthwise=False)
    write_graph(random_graph(config), folder / "float.onnx")
    ptq = replace(stage_config("quantize_ptq"), calibrators=[Calibrator.minmax], num_val_images=16)
    quantize_ptq(ptq, model=folder / "float.onnx", data=DATA, out=folder)
    cfg = replace(stage_config("rank_layers"), exhaustive=True)
    graph = read_graph(folder / "float.onnx")
    evaluator = open_evaluator(graph, DATA, num_images=cfg.num_val_images, batch_size=cfg.batch_size)
    started = time.perf_counter()
    evaluator.evaluate(read_graph(folder / "model.onnx"))
    pass_s = time.perf_counter() - started
    started = time.perf_counter()
    report = rank_layers(
        cfg,
        model=folder / "float.onnx",
        ranges=folder / "ranges.json",
        results=folder / "images.npz",
        data=DATA,
        out=folder,
    )
    seconds = time.perf_counter() - started
    return {
        "depth": depth,
        "num_layers": len(report.layers),
        "num_passes": report.num_passes,
        "seconds": round(seconds, 2),
        "seconds_of_one_pass": round(pass_s, 3),
        "seconds_per_layer_and_pass": round(seconds / len(report.layers) / pass_s, 2),
    }


if __name__ == "__main__":
    main()
