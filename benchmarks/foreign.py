"""Import third-party models, and measure their INT8 agreement and latencies.

``python -m benchmarks.foreign`` imports six architectures of the onnx wheel (random weights, see light_models.py),
quantizes them with calibration on images of the default data set, drawn at 224x224, and builds float and INT8
engines for the CPU targets. Prints a table and writes ``benchmarks/results/foreign.json``.

With random weights the classes mean nothing. The agreement of INT8 with the float model still shows how far
quantization changes the predictions, and latencies depend only on the architecture.
"""

import json
import platform
import tempfile
from dataclasses import replace
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import openvino

from benchmarks.light_models import NAMES, SIDE, light_model, normalise_features
from flows.params import compose_params
from tasks.build_engine import build_engine
from tasks.core.config import find_section, typed_config
from tasks.core.execute import load_stage
from tasks.import_onnx import import_onnx
from tasks.label_images import label_images
from tasks.parts.data.dataset import calibration_images, normalise, open_images
from tasks.parts.data.dataset_writer import SplitBatches, write_dataset
from tasks.parts.engines.description import on_frames
from tasks.parts.engines.machine import read_cpu_model
from tasks.parts.engines.open_engine import open_engine
from tasks.parts.engines.rounds import rounds_ms
from tasks.parts.quantization.config import Calibrator
from tasks.parts.sources.config import ScenesConfig
from tasks.parts.sources.digit_scenes import draw_scenes
from tasks.quantize_ptq import quantize_ptq
from tasks.validate import validate

RESULTS = Path(__file__).parent / "results" / "foreign.json"
TARGETS = ("cpu_onnxruntime", "cpu_openvino")
NUM_IMAGES = {"train": 1, "val": 32, "test": 64, "calibration": 32}
NUM_ROUNDS = 30
NUM_NORMALISING = 8
"""Images for the statistics of random features; more images are slower, one pass per BatchNorm."""


def main() -> None:
    """Measure every architecture, print and write the table."""
    params = compose_params(["model=onnx", "model.path=model.onnx", "data=images"])
    with tempfile.TemporaryDirectory() as folder:
        data = write_scenes(Path(folder))
        rows = [measure(name, params, data, Path(folder) / name) for name in NAMES]
    record = {
        "date": date.today().isoformat(),
        "cpu_model": read_cpu_model(),
        "python": platform.python_version(),
        "onnx": onnx.__version__,
        "onnxruntime": onnxruntime.__version__,
        "openvino": openvino.__version__,
        "num_images": NUM_IMAGES,
        "rows": rows,
    }
    RESULTS.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")


def write_scenes(folder: Path) -> Path:
    """Write images of the default data set, without their masks, at the size of the models."""
    scenes = compose_params()["prepare_data"]["scenes"]
    counts = {f"num_{split}": count for split, count in NUM_IMAGES.items()}
    config: ScenesConfig = typed_config(ScenesConfig, scenes | counts, "prepare_data.scenes")
    splits = {
        split: SplitBatches(
            count,
            ((images, None) for images, _ in draw_scenes(split, config, height=SIDE, width=SIDE, seed=0)),
        )
        for split, count in NUM_IMAGES.items()
    }
    write_dataset(
        folder / "images",
        task=None,
        classes=(),
        height=SIDE,
        width=SIDE,
        source="images",
        splits=splits,
    )
    return folder / "images"


def measure(name: str, params: dict[str, Any], data: Path, folder: Path) -> dict[str, Any]:
    """Return one row: the imported model, the agreement of INT8 with float, and the latencies of both."""
    out = {stage: folder / stage for stage in ("import", "labels", "ptq")}
    for path in out.values():
        path.mkdir(parents=True)
    model, importing = light_model(name), config(params, "import_onnx")
    normalise_features(
        model, normalise(open_images(data, "calibration")[:NUM_NORMALISING], importing.mean, importing.std)
    )
    onnx.save(model, folder / "model.onnx")
    report = import_onnx(importing, model=folder / "model.onnx", data=data, out=out["import"])
    graphs = {"float": out["import"] / "model.onnx", "int8": out["ptq"] / "model.onnx"}
    label_images(config(params, "label_images"), model=graphs["float"], data=data, out=out["labels"])
    labelled = out["labels"] / "dataset"
    ptq = replace(
        config(params, "quantize_ptq"), calibrators=[Calibrator.minmax, Calibrator.percentile], batch_size=8
    )
    quantize_ptq(ptq, model=graphs["float"], data=labelled, out=out["ptq"])
    row: dict[str, Any] = {
        "model": name,
        "num_parameters": report.num_parameters,
        "macs": report.macs,
        "opset_before": report.opset_before,
        "worst_import_sqnr_db": round(min(found.sqnr_db for found in report.differences), 1),
    }
    for target in TARGETS:
        row |= measure_target(params, target, graphs, labelled, folder)
    print(
        f"{name:>14} {report.macs / 1e9:6.2f} GMACs  import {row['worst_import_sqnr_db']:.0f} dB  "
        + "  ".join(
            f"{target}: float {row[f'{target}_float_ms_p50']:.2f} ms, int8 {row[f'{target}_int8_ms_p50']:.2f} ms, "
            f"agreement {row[f'{target}_int8_agreement']:.3f}"
            for target in TARGETS
        ),
        flush=True,
    )
    return row


def measure_target(
    params: dict[str, Any], target: str, graphs: dict[str, Path], data: Path, folder: Path
) -> dict[str, Any]:
    """Build both engines of a target; return their agreement with the float model and their latencies."""
    engines, found = {}, {}
    for kind, graph in graphs.items():
        engine, checked = folder / f"{target}-{kind}", folder / f"{target}-{kind}-validate"
        for path in (engine, checked):
            path.mkdir()
        # Random weights leave less signal in int8 than trained ones; measure the engine anyway.
        declared = replace(config(params, f"build_engine.{target}"), min_agreement_int8_db=0.0)
        built = build_engine(declared, model=graph, images=calibration_images(data), out=engine)
        if built.status != "built":
            raise SystemExit(f"{target} has no engine of {graph}: {built.reason}")
        engines[kind] = engine / "engine"
        report = validate(config(params, "validate"), engine=engines[kind], data=data, out=checked)
        assert report.accuracy is not None
        found[f"{target}_{kind}_agreement"] = report.accuracy.top1
    with open_engine(engines["float"]) as plain, open_engine(engines["int8"]) as quantized:
        calls = {"float": on_frames(plain).answer, "int8": on_frames(quantized).answer}
        rounds = rounds_ms(calls, np.asarray(open_images(data, "test")[:1]), NUM_ROUNDS)
    for kind, bursts in rounds.items():
        found[f"{target}_{kind}_ms_p50"] = round(float(np.median(np.concatenate(bursts))), 3)
    return found


def config(params: dict[str, Any], address: str) -> Any:
    """Return the typed configuration of a stage."""
    name, section = find_section(params, address)
    return typed_config(load_stage(address)[1], section, name)


if __name__ == "__main__":
    main()
