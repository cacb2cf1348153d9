"""Compare the pick with other tools' quantization of the same float graph.

``python -m benchmarks.peers`` after a run of the pipeline (NNCF is in the extra ``dev``). Same graph, calibration
images, validation and test split, one thread, one process; latencies in interleaved rounds at batch 1. A ratio over 1
means that the pick is faster. Prints a table and writes ``benchmarks/results/peers.json``.

- NNCF ``quantize`` with its defaults, and ``quantize_with_accuracy_control`` with the pipeline's gate, in OpenVINO;
- ONNX Runtime ``quantize_static`` with its defaults.
"""

import argparse
import json
import platform
import sys
import tempfile
from collections.abc import Iterable
from datetime import date
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import openvino
from onnxruntime.quantization import CalibrationDataReader, quantize_static

from benchmarks.runtimes import (
    DATA,
    images,
    in_onnxruntime,
    in_target,
    openvino_target,
    read_selection,
    requests_of,
)
from tasks.core.config import read_params
from tasks.parts.data.dataset import open_split, read_manifest
from tasks.parts.data.metrics import confusion_matrix, scores
from tasks.parts.engines.machine import read_cpu_model
from tasks.parts.engines.openvino.compile import compile_options
from tasks.parts.engines.rounds import Network, rounds_ms
from tasks.parts.measuring.intervals import estimate_ratio
from tasks.parts.onnx_graphs.graph import read_graph

RESULTS = Path(__file__).parent / "results" / "peers.json"
BATCH_SIZE = 32


def main() -> None:
    """Measure, print and write the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=150, help="interleaved rounds")
    options = parser.parse_args()
    if find_spec("nncf") is None:
        sys.exit(
            "NNCF is not installed. Install the tools that the benchmarks compare with: pip install -e '.[dev]'"
        )
    params = read_params()
    picks = read_selection("picks.json")
    pick = min(picks.values(), key=lambda row: row["latency_ms_p50"])
    engine = params["engines"][f"{pick['variant']}-{pick['target']}"]
    float_graph, num_images = Path(params["pipeline"]["graph"]), params["quantize_ptq"]["num_images"]
    networks = {f"float on {pick['target']}": in_target(read_graph(float_graph), pick["target"])} | peers(
        float_graph, images("calibration", num_images), params["select_engine"]["max_score_rel_loss"]
    )
    ours = f"Enginewright: {pick['variant']} on {pick['target']}"
    networks[ours] = in_target(read_graph(Path(engine["model"])), pick["target"])
    bursts = rounds_ms(networks, images("test", 1), options.rounds)
    medians = {name: np.array([np.median(burst) for burst in found]) for name, found in bursts.items()}
    rows = []
    for name, network in networks.items():
        ratio = estimate_ratio(medians[name] / medians[ours], num_comparisons=len(networks) - 1)
        rows.append(
            {
                "name": name,
                "miou": round(miou(network, "test"), 4),
                "latency_ms_p50": round(float(np.median(np.concatenate(bursts[name]))), 4),
                "ratio_to_ours": round(ratio.value, 3),
                "ratio_low": round(ratio.low, 3),
                "ratio_high": round(ratio.high, 3),
            }
        )
    for row in rows:
        print(
            f"{row['name']:>50}  mIoU {row['miou']:.4f}  p50 {row['latency_ms_p50']:.3f} ms  "
            f"{row['ratio_to_ours']:.2f} ({row['ratio_low']:.2f} to {row['ratio_high']:.2f}) of ours"
        )
    record = {
        "date": date.today().isoformat(),
        "cpu_model": read_cpu_model(),
        "python": platform.python_version(),
        **{name: version(name) for name in ("nncf", "openvino", "onnxruntime")},
        "rows": rows,
    }
    RESULTS.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")


def peers(float_graph: Path, images_NCHW: np.ndarray, max_rel_loss: float) -> dict[str, Network]:
    """Quantize the float graph with each of the other tools."""
    import nncf

    float_model = openvino.Core().read_model(float_graph)
    calibration = nncf.Dataset([image_CHW[None] for image_CHW in images_NCHW])
    val_images_NCHW, val_masks_NHW = images("val"), open_split(DATA, "val")[1]
    pairs = [
        (val_images_NCHW[index : index + 1], val_masks_NHW[index]) for index in range(len(val_masks_NHW))
    ]
    plain = nncf.quantize(float_model, calibration, subset_size=len(images_NCHW))
    controlled = nncf.quantize_with_accuracy_control(
        float_model,
        calibration,
        nncf.Dataset(pairs, lambda pair: pair[0]),
        validate,
        subset_size=len(images_NCHW),
        max_drop=max_rel_loss,
        drop_type=nncf.DropType.RELATIVE,
    )
    with tempfile.TemporaryDirectory() as folder:
        static = Path(folder) / "static.onnx"
        quantize_static(float_graph, static, Reader(images_NCHW))
        graph = read_graph(static)
    return {
        "NNCF quantize, OpenVINO": compiled(plain),
        "NNCF quantize_with_accuracy_control, OpenVINO": compiled(controlled),
        "quantize_static, ONNX Runtime": in_onnxruntime(graph),
    }


class Reader(CalibrationDataReader):
    """Hands the calibration images to ONNX Runtime one by one."""

    def __init__(self, images_NCHW: np.ndarray) -> None:
        self._images = iter(images_NCHW)

    def get_next(self) -> dict[str, np.ndarray] | None:
        """Return the next image, or None at the end."""
        image_CHW = next(self._images, None)
        return None if image_CHW is None else {"image": image_CHW[None]}


def validate(model: Any, pairs: Iterable[tuple[np.ndarray, np.ndarray]]) -> tuple[float, None]:
    """Return the mIoU for NNCF's accuracy control."""
    num_classes = len(read_manifest(DATA).classes)
    confusion_CC = np.zeros((num_classes, num_classes), np.int64)
    for image_NCHW, mask_HW in pairs:
        classes_NHW = model([image_NCHW])[0].argmax(axis=1)
        confusion_CC += confusion_matrix(classes_NHW, mask_HW[None], num_classes)
    return scores(confusion_CC).miou or 0.0, None


def compiled(model: Any) -> Network:
    """Compile a model of NNCF with the options of ``cpu_openvino``."""
    target = openvino_target()
    shape = model.input(0).partial_shape
    shape[0] = openvino.Dimension(1, target.max_batch)
    model.reshape({0: shape})
    return requests_of(openvino.Core().compile_model(model, "CPU", compile_options(target)))


def miou(network: Network, split: str) -> float:
    """Return the mIoU over a split."""
    images_NCHW, masks_NHW = images(split), open_split(DATA, split)[1]
    classes_NHW = np.concatenate(
        [
            network(images_NCHW[start : start + BATCH_SIZE]).argmax(axis=1)
            for start in range(0, len(images_NCHW), BATCH_SIZE)
        ]
    )
    found = scores(confusion_matrix(classes_NHW, masks_NHW, len(read_manifest(DATA).classes))).miou
    assert found is not None
    return found


if __name__ == "__main__":
    main()
