"""How much of the time of the zoo's engines is explained by one clear roof?

``python -m benchmarks.labels`` builds the networks of zoo_networks.py, with random weights because only time matters,
in float and in INT8 (MinMax ranges) for both CPU runtimes. They are measured as `benchmark` does and held against the
roofs of this machine as in `explain`. An engine's labelled share is the part of its latency whose layers are bound by
arithmetic, memory or overhead; layers within a quarter of two roofs are mixed, and what neither the layers nor the
call explain is the remainder, whose sign does not matter. Needs a quiet machine. Prints a table and writes
``benchmarks/results/labels.json`` network by network, so that a second start continues.
"""

import argparse
import json
import logging
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import torch

from benchmarks.placement import IMAGES, MEAN, STD, as_imported, draw_images, quantized
from benchmarks.records import open_record
from benchmarks.runtimes import stage_config
from benchmarks.speedup import race_config
from benchmarks.zoo_networks import ZOO, new_network
from benchmarks.zoo_training import class_names, export
from tasks.benchmark import benchmark
from tasks.parts.builders.build import build
from tasks.parts.data.dataset import normalise
from tasks.parts.engines.machine import read_cpu_model
from tasks.parts.explain.engine_view import view_engines
from tasks.parts.explain.report import explain_engine
from tasks.parts.onnx_graphs.graph import write_graph
from tasks.parts.roofs.measure import Effort, measure_roofs
from tasks.parts.roofs.roofs import Roofs

RESULTS = Path(__file__).parent / "results" / "labels.json"
TARGETS = ("cpu_onnxruntime", "cpu_openvino")
FLOAT, INT8 = "float", "int8"
NETWORKS = tuple(name for name, spec in ZOO.items() if spec.build)
NUM_IMAGES, WARM_UP_BATCHES = 8, 4


def main() -> None:
    """Measure what the record lacks, and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--networks", nargs="+", choices=NETWORKS, default=NETWORKS)
    parser.add_argument("--rounds", type=int, default=40, help="rounds in which each engine has one burst")
    parser.add_argument("--results", type=Path, default=RESULTS)
    options = parser.parse_args()
    logging.basicConfig(level=logging.WARNING)
    packages = {name: version(name) for name in ("onnxruntime", "openvino", "torch")}
    conditions = {"cpu_model": read_cpu_model(), "rounds": options.rounds, **packages}
    record = open_record(options.results, conditions, ["engines"])
    for name in options.networks:
        if name in {engine["network"] for engine in record["engines"]}:
            continue
        with tempfile.TemporaryDirectory() as folder:
            write_graphs(name, Path(folder))
            for target in TARGETS:
                record["engines"] += measure(name, target, options.rounds, Path(folder))
        options.results.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    print("\n".join(lines(record)))


def write_graphs(name: str, folder: Path) -> None:
    """Write the float and the Q/DQ graph of a network, and images beside them."""
    spec = ZOO[name]
    network = new_network(name, len(class_names(spec.task))).train()
    with torch.no_grad():
        for _ in range(WARM_UP_BATCHES):  # statistics of BatchNorm
            network(torch.randn(4, 3, spec.side, spec.side))
    exported = folder / "exported.onnx"
    export(network.eval(), exported, spec.exporters[0], side=spec.side)
    images_NHWC, graph = draw_images(NUM_IMAGES, spec.side), as_imported(onnx.load(exported), spec.side)
    np.save(folder / IMAGES, images_NHWC)
    write_graph(graph, folder / f"{FLOAT}.onnx")
    write_graph(quantized(graph, normalise(images_NHWC, MEAN, STD)), folder / f"{INT8}.onnx")


def measure(name: str, target: str, num_rounds: int, folder: Path) -> list[dict[str, Any]]:
    """Build both engines of a network, measure them in the same rounds, and explain them."""
    declared = replace(
        stage_config(f"build_engine.{target}"), min_agreement_db=0.0, min_agreement_int8_db=0.0
    )
    for variant in (FLOAT, INT8):
        out = folder / target / variant
        out.mkdir(parents=True)
        report = build(declared, model=folder / f"{variant}.onnx", images=folder / IMAGES, out=out)
        if report.reason:
            raise SystemExit(f"{name}, {variant} on {target}: {report.reason}")
    builds, measured = folder / target / "*" / "engine", folder / target / "benchmark"
    measured.mkdir()
    config = race_config(target, [FLOAT, INT8], num_rounds)
    reference = folder / target / FLOAT / "engine"
    report = benchmark(config, builds=builds, reference=reference, images=folder / IMAGES, out=measured)
    views = view_engines([FLOAT, INT8], builds, measured, report, roofs_of(target))
    return [
        {
            "network": name,
            "target": target,
            "variant": variant,
            "latency_ms": explained.latency_ms,
            "labelled_share": explained.labelled_share,
            "share_by_bound": explained.share_by_bound,
            "above_roof": explained.above_roof,
        }
        for variant, view in views.items()
        for explained in [explain_engine(view, None)]
    ]


@cache
def roofs_of(target: str) -> Roofs:
    """Return the roofs of a target, measured once."""
    config = stage_config(f"measure_machine.{target}")
    sizes = [1024 * size for size in config.working_sets_kib]
    return measure_roofs(config.target, Effort(config.num_rounds, sizes))


def lines(record: Mapping[str, Any]) -> Iterator[str]:
    """Return the table, and how much of the time of all has a label."""
    bounds = ("compute", "memory", "overhead", "mixed", "unknown", "remainder")
    yield f"| network | runtime | engine | ms | labelled | {' | '.join(bounds)} |"
    yield "|---" * (5 + len(bounds)) + "|"
    for engine in record["engines"]:
        shares = " | ".join(f"{engine['share_by_bound'].get(bound, 0.0):.0%}" for bound in bounds)
        yield (
            f"| {ZOO[engine['network']].title} | {engine['target']} | {engine['variant']} "
            f"| {engine['latency_ms']:.2f} | {engine['labelled_share']:.0%} | {shares} |"
        )
    engines = record["engines"]
    total_ms = sum(engine["latency_ms"] for engine in engines)
    labelled_ms = sum(engine["latency_ms"] * engine["labelled_share"] for engine in engines)
    enough = sum(engine["labelled_share"] >= 0.9 for engine in engines)
    yield f"\nLabelled: {labelled_ms / total_ms:.1%} of the time of all."
    yield f"At least 90 % is labelled in {enough} of {len(engines)} engines."


if __name__ == "__main__":
    main()
