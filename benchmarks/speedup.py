"""Measure the pick's speed-up over its predecessors, at the size of the data and at a larger one.

``python -m benchmarks.speedup`` after a run of the pipeline. Needs a quiet machine for tight intervals.

The best pick of ``artifacts/select_engine`` runs in the same rounds as three references: eager PyTorch of the float
student, and on the pick's own target the float variant that was quantized (``pruned``) and the student before
pruning. For the larger size the same weights get a larger input (latency only): the graphs resize by scale factors,
so only the declared input changes. Prints a table and writes ``benchmarks/results/speedup.json``.
"""

import argparse
import json
import logging
import platform
import tempfile
from dataclasses import replace
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.runtimes import read_selection, stage_config
from tasks.benchmark import benchmark
from tasks.build_engine import build_engine
from tasks.core.config import read_params
from tasks.parts.data.dataset import calibration_images
from tasks.parts.engines.machine import read_cpu_model
from tasks.parts.engines.manifest import read_engine_manifest
from tasks.parts.measuring.reports import REFERENCE
from tasks.parts.networks.checkpoint import load_checkpoint, save_checkpoint
from tasks.parts.onnx_graphs.graph import read_card_of_graph, read_graph, write_graph

RESULTS = Path(__file__).parent / "results" / "speedup.json"
CARD_KEY = "enginewright"
MAX_SECONDS = 600.0


def main() -> None:
    """Measure, print and write the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--size", type=int, default=256, help="side of the larger input in pixels")
    parser.add_argument("--rounds", type=int, default=150, help="rounds in which each engine has one burst")
    options = parser.parse_args()
    logging.basicConfig(level=logging.WARNING)
    params = read_params()
    pick = read_selection("report.json")["best"]
    size = params["prepare_data"]["height"]
    rows = [
        row
        for side in (size, options.size)
        for row in measure_size(params, pick["variant"], pick["target"], side, options.rounds)
    ]
    for row in rows:
        print(
            f"{row['size']:>4} px  {row['variant']} on {row['target']}: p50 {row['latency_ms_p50']:.3f} ms, "
            f"{row['speedup']:.2f}x ({row['low']:.2f} to {row['high']:.2f}) {row['reference']} on "
            f"{row['reference_target']} ({row['reference_ms_p50']:.3f} ms), A/A spread {row['aa_spread']:.1%}"
        )
    RESULTS.parent.mkdir(exist_ok=True)
    record = {"date": date.today().isoformat(), "python": platform.python_version(), "rows": rows}
    RESULTS.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")


def measure_size(
    params: dict[str, Any], variant: str, target: str, side: int, num_rounds: int
) -> list[dict[str, Any]]:
    """Build the pick and its references for an input of ``side`` x ``side`` and race them."""
    student = params["select_engine"]["float_reference"]["variant"]
    eager = params["pipeline"]["references"][target]["target"]
    references = [(student, eager), (student, target), ("pruned", target)]
    names = [*references, (variant, target)]
    with tempfile.TemporaryDirectory() as folder:
        engines = {
            name: build_resized(params, *name, side, Path(folder, "-".join(name)))
            for name in dict.fromkeys(names)
        }
        first, *others = ("-".join(name) for name in engines)
        config = race_config(target, others, num_rounds)
        builds = Path(folder, "*", "engine")
        images = calibration_images(Path(params["pipeline"]["data"]))
        reference = Path(folder, first, "engine")
        report = benchmark(config, builds=builds, reference=reference, images=images, out=Path(folder))
        pick = read_engine_manifest(engines[variant, target])
    assert report.race is not None
    latencies_ms = {first: report.race.reference_ms_p50} | {
        name: engine.latency.at_batch_1.latency_ms_p50
        for name, engine in report.engines.items()
        if engine.latency
    }
    rows = []
    for reference in references:
        name = "-".join(reference)
        ratio = report.ratio(f"{variant}-{target}", REFERENCE if name == first else name)
        rows.append(
            {
                "size": side,
                "variant": variant,
                "target": target,
                "reference": reference[0],
                "reference_target": reference[1],
                "latency_ms_p50": latencies_ms[f"{variant}-{target}"],
                "reference_ms_p50": latencies_ms[name],
                "speedup": ratio.factor,
                "low": ratio.low,
                "high": ratio.high,
                "aa_spread": report.aa_ratio_spread,
                "num_threads": pick.target.num_threads,
                "runtime_version": pick.runtime_version,
                "cpu_model": read_cpu_model(),
            }
        )
    return rows


def race_config(target: str, variants: list[str], num_rounds: int) -> Any:
    """Return the configuration of `benchmark` for a long race at batch 1 alone."""
    return replace(
        stage_config(f"benchmark.{target}"),
        variants=variants,
        min_rounds=num_rounds,
        budget_s=MAX_SECONDS,
        batch_sizes=[],
        concurrencies=[],
    )


def build_resized(
    params: dict[str, Any], variant: str, target: str, side: int, out: Path, **changes: object
) -> Path:
    """Build an engine of a variant for square inputs of another size and return its folder.

    `changes` are made to the target.
    """
    out.mkdir()
    model = Path(params["engines"][f"{variant}-{target}"]["model"])
    resized = out / model.name
    if model.suffix == ".onnx":
        graph = read_graph(model)
        card = replace(read_card_of_graph(graph), height=side, width=side)
        shape = graph.graph.input[0].type.tensor_type.shape.dim
        shape[2].dim_value = shape[3].dim_value = side
        output = graph.graph.output[0].type.tensor_type.shape.dim
        output[2].dim_value = output[3].dim_value = side
        del graph.graph.value_info[:]
        for entry in graph.metadata_props:
            if entry.key == CARD_KEY:
                entry.value = card.to_json()
        write_graph(graph, resized)
    else:
        network, card = load_checkpoint(model)
        save_checkpoint(resized, network, replace(card, height=side, width=side))
    images_NHWC = np.load(calibration_images(Path(params["pipeline"]["data"])), mmap_mode="r")
    rows_H, columns_W = (np.arange(side) * size // side for size in images_NHWC.shape[1:3])
    np.save(out / "images.npy", images_NHWC[:, rows_H][:, :, columns_W])
    config = replace(stage_config(f"build_engine.{variant}.{target}"), **changes)
    build_engine(config, model=resized, images=out / "images.npy", out=out)
    return out / "engine"


if __name__ == "__main__":
    main()
