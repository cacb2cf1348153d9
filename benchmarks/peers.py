"""Compare the pick with other tools' quantization of the same float graph.

``python -m benchmarks.peers`` after a run of the pipeline (NNCF is in the extra ``dev``). Same graph, calibration
images, validation and test split, one thread, one process; latencies in interleaved rounds at batch 1. A ratio over 1
means that the pick is faster. Prints a table and writes ``benchmarks/results/peers.json``.

- NNCF ``quantize`` with its defaults, and ``quantize_with_accuracy_control`` with the pipeline's gate, in OpenVINO;
- ONNX Runtime ``quantize_static`` with its defaults, and at its best settings for x86.

benchmarks/zoo.py races the same tools on architectures of others.
"""

import argparse
import json
import platform
import sys
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import date
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import openvino
from onnxruntime.quantization import CalibrationDataReader, QuantFormat, QuantType, quantize_static
from onnxruntime.quantization.shape_inference import quant_pre_process

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
from tasks.parts.cpu import int8_sums_saturate
from tasks.parts.data.comparison import compare_with_labels
from tasks.parts.data.dataset import open_split, read_manifest
from tasks.parts.data.input_card import Task
from tasks.parts.data.metrics import confusion_matrix, scores
from tasks.parts.engines.machine import read_cpu_model
from tasks.parts.engines.openvino.compile import PROVIDER, compile_options
from tasks.parts.engines.rounds import Network, rounds_ms
from tasks.parts.engines.target import Target
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
    val_images_NCHW, val_masks_NHW = images("val"), open_split(DATA, "val")[1]
    num_classes, target = len(read_manifest(DATA).classes), openvino_target()
    controlled = quantize_with_accuracy_control(
        float_graph,
        images_NCHW,
        list(zip(val_images_NCHW, val_masks_NHW, strict=True)),
        Scorer(Task.segmentation, num_classes),
        max_rel_loss,
    )
    with tempfile.TemporaryDirectory() as folder:
        plain, best = Path(folder) / "plain.onnx", Path(folder) / "best.onnx"
        quantize_static(float_graph, plain, Reader(images_NCHW, input_name(float_graph)))
        quantize_with_onnxruntime(float_graph, images_NCHW, best, QuantFormat.QDQ)
        return {
            "NNCF quantize, OpenVINO": requests_of(
                compiled(quantize_with_nncf(float_graph, images_NCHW), target)
            ),
            "NNCF quantize_with_accuracy_control, OpenVINO": requests_of(compiled(controlled, target)),
            "quantize_static, ONNX Runtime": in_onnxruntime(read_graph(plain)),
            "quantize_static at its best settings, ONNX Runtime": in_onnxruntime(read_graph(best)),
        }


def quantize_with_onnxruntime(
    float_graph: Path, images_NCHW: np.ndarray, out: Path, quant_format: QuantFormat
) -> None:
    """Quantize with ``quantize_static`` as its documentation recommends for x86: U8S8, per channel, preprocessed.

    The weights get 7 bits on a CPU without VNNI. The symbolic shape inference of the preprocessing is skipped: it
    serves graphs whose shapes are unknown.
    """
    with tempfile.TemporaryDirectory() as folder:
        prepared = Path(folder) / "prepared.onnx"
        quant_pre_process(float_graph, prepared, skip_symbolic_shape=True)
        quantize_static(
            prepared,
            out,
            Reader(images_NCHW, input_name(float_graph)),
            quant_format=quant_format,
            per_channel=True,
            reduce_range=int8_sums_saturate(),
            activation_type=QuantType.QUInt8,
            weight_type=QuantType.QInt8,
        )


def quantize_with_nncf(float_graph: Path, images_NCHW: np.ndarray, **settings: Any) -> Any:
    """Return OpenVINO's model, quantized by ``nncf.quantize``."""
    import nncf

    return nncf.quantize(
        openvino.Core().read_model(float_graph),
        nncf.Dataset([image_CHW[None] for image_CHW in images_NCHW]),
        subset_size=len(images_NCHW),
        **settings,
    )


def quantize_with_accuracy_control(
    float_graph: Path,
    images_NCHW: np.ndarray,
    pairs: Sequence[tuple[np.ndarray, Any]],
    scorer: "Scorer",
    max_rel_loss: float,
    **settings: Any,
) -> Any:
    """Return OpenVINO's model, quantized by ``nncf.quantize_with_accuracy_control``.

    The pairs are a validation image [3, H, W] and its label each. NNCF keeps layers in float until the score has
    lost no more than `max_rel_loss` of that of the float model.
    """
    import nncf

    return nncf.quantize_with_accuracy_control(
        openvino.Core().read_model(float_graph),
        nncf.Dataset([image_CHW[None] for image_CHW in images_NCHW]),
        nncf.Dataset(list(pairs), lambda pair: pair[0][None]),
        scorer,
        subset_size=len(images_NCHW),
        max_drop=max_rel_loss,
        drop_type=nncf.DropType.RELATIVE,
        **settings,
    )


@dataclass(frozen=True)
class Scorer:
    """Returns the score of a compiled model for NNCF's accuracy control."""

    task: Task
    num_classes: int

    def __call__(self, model: Any, pairs: Iterable[tuple[np.ndarray, Any]]) -> tuple[float, None]:
        """Return mIoU or top-1 accuracy over some images and labels."""
        classes, labels = [], []
        for image_CHW, label in pairs:
            classes.append(model([image_CHW[None]])[0].argmax(axis=1)[0])
            labels.append(label)
        results = compare_with_labels(np.stack(classes), np.stack(labels), self.num_classes, self.task)
        return results.score, None


class Reader(CalibrationDataReader):
    """Hands the calibration images to ONNX Runtime one by one."""

    def __init__(self, images_NCHW: np.ndarray, name: str) -> None:
        self._images, self._name = iter(images_NCHW), name

    def get_next(self) -> dict[str, np.ndarray] | None:
        """Return the next image, or None at the end."""
        image_CHW = next(self._images, None)
        return None if image_CHW is None else {self._name: image_CHW[None]}


def input_name(graph: Path) -> str:
    """Return the name of a graph's image."""
    return str(read_graph(graph).graph.input[0].name)


def compiled(model: Any, target: Target) -> Any:
    """Compile a model of NNCF with the options and the batch sizes of a target."""
    shape = model.input(0).partial_shape
    shape[0] = openvino.Dimension(1, target.max_batch)
    model.reshape({0: shape})
    return openvino.Core().compile_model(model, PROVIDER, compile_options(target))


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
