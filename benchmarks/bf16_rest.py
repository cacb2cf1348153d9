"""Race OpenVINO with float32 and with BF16 around INT8, and in float alone.

``python -m benchmarks.bf16_rest`` after a run of the pipeline, on a CPU with AVX512-BF16. Engines of ``cpu_openvino``
and ``cpu_openvino_bf16`` from the same graphs: the default network (`pruned`, `pruned_ptq`), SegFormer with random
weights (its attention stays in float), and networks of benchmarks/placement.py; batch 1, one thread, in the same
interleaved rounds. Says in which precision the MACs and the layers run, the SQNR of the logits against the float
graph, and the ratio of latencies (below 1: BF16 is faster). Prints the rows and writes
``benchmarks/results/bf16_rest.json``.
"""

import argparse
import json
import logging
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import ExitStack
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
import openvino
from onnx import ModelProto

from benchmarks import placement
from benchmarks.placement import IMAGES, MEAN, NETWORKS, STD, draw_images, engine_of, imported, quantized
from benchmarks.runtimes import DATA, in_onnxruntime, random_graph
from tasks.core.execute import ARTIFACTS
from tasks.parts.data.dataset import normalise, open_images
from tasks.parts.engines.machine import read_cpu_model
from tasks.parts.engines.rounds import rounds_ms
from tasks.parts.measuring.intervals import estimate_ratio
from tasks.parts.networks.config import NetworkConfig, NetworkName
from tasks.parts.onnx_graphs.graph import read_card_of_graph, read_graph, write_graph
from tasks.parts.onnx_graphs.signal_to_noise import difference

RESULTS = Path(__file__).parent / "results" / "bf16_rest.json"
F32, BF16 = "cpu_openvino", "cpu_openvino_bf16"
PLACED = ("relu", "hardswish", "squeeze_excite", "residual")
NUM_ROUNDS = 60


def main() -> None:
    """Measure, print and write the rows."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=NUM_ROUNDS, help="interleaved rounds")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    rows = []
    for name, graph, int8, images_NHWC in cases():
        rows.append(measure(name, graph, int8, images_NHWC, options.rounds))
        print(json.dumps(rows[-1]), flush=True)
    record = {
        "date": date.today().isoformat(),
        "cpu_model": read_cpu_model(),
        "openvino": openvino.__version__,
        "num_rounds": options.rounds,
        "rows": rows,
    }
    RESULTS.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")


def cases() -> Iterator[tuple[str, ModelProto, ModelProto, np.ndarray]]:
    """Yield name, float graph, Q/DQ graph and calibration images of each network."""
    own = open_images(DATA, "calibration")[: placement.NUM_IMAGES]
    yield (
        "default, trained",
        read_graph(ARTIFACTS / "export_onnx" / "pruned" / "model.onnx"),
        read_graph(ARTIFACTS / "quantize_ptq" / "model.onnx"),
        own,
    )
    segformer = random_graph(NetworkConfig(name=NetworkName.segformer, width=1.0, depth=1.0, depthwise=False))
    card = read_card_of_graph(segformer)
    yield "segformer", segformer, quantized(segformer, normalise(own, card.mean, card.std)), own
    drawn = draw_images(placement.NUM_IMAGES)
    for name in PLACED:
        graph = imported(NETWORKS[name])
        yield name, graph, quantized(graph, normalise(drawn, MEAN, STD)), drawn


def measure(
    name: str, graph: ModelProto, int8: ModelProto, images_NHWC: np.ndarray, num_rounds: int
) -> dict[str, Any]:
    """Return the row of one network."""
    card = read_card_of_graph(graph)
    images_NCHW = normalise(images_NHWC, card.mean, card.std)
    expected = in_onnxruntime(graph)(images_NCHW)
    row: dict[str, Any] = {"network": name}
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        np.save(folder / IMAGES, images_NHWC)
        networks = {}
        for kind, source in (("float", graph), ("int8", int8)):
            write_graph(source, folder / f"{kind}.onnx")
            for target in (F32, BF16):
                engine = f"{kind} on {target}"
                report, networks[engine] = engine_of(folder / f"{kind}.onnx", target, folder / engine, stack)
                assert report.executed is not None
                logits = np.concatenate([networks[engine](image[None]).copy() for image in images_NCHW])
                row[engine] = {
                    "macs_share": {
                        precision: round(share, 3) for precision, share in report.executed.macs_share.items()
                    },
                    "num_layers": count(report.precisions),
                    "sqnr_db": round(difference(expected, logits).sqnr_db, 1),
                    "is_precision_ok": report.is_precision_ok,
                }
        bursts = rounds_ms(networks, images_NCHW[:1], num_rounds)
    medians = {engine: np.array([np.median(burst) for burst in found]) for engine, found in bursts.items()}
    for engine, found in medians.items():
        row[engine]["latency_ms_p50"] = round(float(np.median(found)), 4)
    for kind in ("float", "int8"):
        ratio = estimate_ratio(
            list(medians[f"{kind} on {BF16}"] / medians[f"{kind} on {F32}"]), num_comparisons=2
        )
        row[f"bf16_to_f32_{kind}"] = [round(value, 3) for value in (ratio.value, ratio.low, ratio.high)]
    return row


def count(precisions: dict[str, dict[str, int]]) -> dict[str, int]:
    """Return the number of layers in each precision."""
    found: dict[str, int] = {}
    for counts in precisions.values():
        for precision, number in counts.items():
            found[precision] = found.get(precision, 0) + number
    return found


if __name__ == "__main__":
    main()
