"""Hold the picks against the roofs of this machine, layer by layer, at the size of the data and at a larger one.

``python -m benchmarks.roof`` after a run of the pipeline. Needs a quiet machine.

For each target the roofs are measured once, as `measure_machine` does. Its pick is built for both sizes with the
same weights, measured as `benchmark` does, in the same rounds as the float network that it was made from, and its
layers are explained as in `explain`: time, what bounds it, and the time of a layer that reaches its roof. In the
same rounds runs the pick with the runtime's own Resize, where its target has matrix products for it. Prints a table
and writes ``benchmarks/results/roof.json`` and, for reading, ``roof.md`` beside it.
"""

import argparse
import json
import logging
import platform
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from datetime import date
from pathlib import Path
from typing import Any

from benchmarks.runtimes import read_selection, stage_config
from benchmarks.speedup import build_resized, race_config
from tasks.benchmark import benchmark
from tasks.core.config import read_params
from tasks.measure_machine import measure_machine
from tasks.parts.data.dataset import calibration_images
from tasks.parts.engines.machine import read_cpu_model
from tasks.parts.explain.engine_view import EngineView, view_engines
from tasks.parts.explain.report import explain_engine
from tasks.parts.measuring.reports import SpeedRatio
from tasks.parts.roofs.roofs import Roofs

RESULTS = Path(__file__).parent / "results" / "roof.json"
TARGETS = ("cpu_onnxruntime", "cpu_openvino")
FLOAT, OWN_RESIZE = "pruned", "own_resize"
LAYER_FIELDS = (
    "layer",
    "operators",
    "precision",
    "milliseconds",
    "share",
    "bound",
    "attainable_ms",
    "source",
)


def main() -> None:
    """Measure, print and write the tables."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--targets", nargs="+", default=TARGETS, help="targets whose picks are measured")
    parser.add_argument("--size", type=int, default=256, help="side of the larger input in pixels")
    parser.add_argument("--rounds", type=int, default=150, help="rounds in which each engine has one burst")
    parser.add_argument("--results", type=Path, default=RESULTS)
    options = parser.parse_args()
    logging.basicConfig(level=logging.WARNING)
    params, picks = read_params(), read_selection("report.json")["picks"]
    engines = []
    for target in options.targets:
        with tempfile.TemporaryDirectory() as folder:
            roofs = measure_machine(stage_config(f"measure_machine.{target}"), out=Path(folder))
        for side in (params["prepare_data"]["height"], options.size):
            with tempfile.TemporaryDirectory() as folder:
                views, resize = measure_size(
                    params, picks[target]["variant"], target, side, options.rounds, roofs, Path(folder)
                )
                engines += [describe(view, side) for view in views]
                engines[-1]["time_of_own_resize"] = asdict(resize)
    record = {
        "date": date.today().isoformat(),
        "python": platform.python_version(),
        "cpu_model": read_cpu_model(),
        "engines": engines,
    }
    options.results.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    page = "\n".join(lines(record)) + "\n"
    options.results.with_suffix(".md").write_text(page, encoding="utf-8")
    print(page)


def measure_size(
    params: dict[str, Any], variant: str, target: str, side: int, num_rounds: int, roofs: Roofs, folder: Path
) -> tuple[Sequence[EngineView], SpeedRatio]:
    """Build a pick and its float network for inputs of ``side`` x ``side``, race them and return both.

    The ratio is that of the pick with the runtime's own Resize to the pick.
    """
    names = [*dict.fromkeys((FLOAT, variant)), OWN_RESIZE]
    for name in names[:-1]:
        build_resized(params, name, target, side, folder / name)
    build_resized(params, variant, target, side, folder / OWN_RESIZE, resize_as_matmul=False)
    config = race_config(target, names, num_rounds)
    builds = folder / "*" / "engine"
    images = calibration_images(Path(params["pipeline"]["data"]))
    reference = folder / FLOAT / "engine"
    report = benchmark(config, builds=builds, reference=reference, images=images, out=folder)
    views = view_engines(names[:-1], builds, folder, report, roofs)
    return list(views.values()), report.ratio(variant, OWN_RESIZE)


def describe(view: EngineView, side: int) -> dict[str, Any]:
    """Return what stands in the record: the engine and its layers, the slowest first."""
    explanation = explain_engine(view, None)
    layers = sorted(view.rows, key=lambda row: -row.milliseconds)
    return {
        "variant": view.name,
        "target": view.manifest.target.name,
        "runtime_version": view.manifest.runtime_version,
        "size": side,
        **{
            name: getattr(explanation, name)
            for name in ("latency_ms", "layers_ms", "call_ms", "remainder_ms", "attainable_ms")
        },
        "labelled_share": explanation.labelled_share,
        "share_by_bound": explanation.share_by_bound,
        "above_roof": explanation.above_roof,
        "layers": [
            {name: value for name, value in asdict(row).items() if name in LAYER_FIELDS} for row in layers
        ],
    }


def lines(record: dict[str, Any]) -> Iterator[str]:
    """Return the record as a page: the engines, then the layers of each."""
    yield f"# The picks and their roofs\n\n{record['cpu_model']}, {record['date']}; `python -m benchmarks.roof`.\n"
    yield "| engine | size | latency | at the roofs | share | compute | memory | overhead | mixed | remainder |"
    yield "|---|---|---|---|---|---|---|---|---|---|"
    for engine in record["engines"]:
        shares = engine["share_by_bound"]
        bounds = " | ".join(
            f"{shares.get(bound, 0.0):.0%}"
            for bound in ("compute", "memory", "overhead", "mixed", "remainder")
        )
        yield (
            f"| {engine['variant']} on {engine['target']} | {engine['size']} | {engine['latency_ms']:.3f} ms "
            f"| {engine['attainable_ms']:.3f} ms | {engine['attainable_ms'] / engine['latency_ms']:.0%} | {bounds} |"
        )
    yield "\nThe pick with the runtime's own Resize, in the same rounds:\n"
    for engine in record["engines"]:
        if ratio := engine.get("time_of_own_resize"):
            yield (
                f"- {engine['variant']} on {engine['target']}, {engine['size']}x{engine['size']}: "
                f"{ratio['factor']:.2f} times the time ({ratio['low']:.2f} to {ratio['high']:.2f})"
            )
    for engine in record["engines"]:
        yield f"\n## {engine['variant']} on {engine['target']}, {engine['size']}x{engine['size']}\n"
        yield "| layer | operators | precision | us | of the latency | bound by | of its roof |"
        yield "|---|---|---|---|---|---|---|"
        for row in engine["layers"]:
            reached = row["attainable_ms"]
            of_roof = "" if reached is None else f"{reached / row['milliseconds']:.0%}"
            yield (
                f"| {row['layer']} | {row['operators']} | {row['precision']} | {1000 * row['milliseconds']:.1f} "
                f"| {row['share']:.1%} | {row['bound']} | {of_roof} |"
            )


if __name__ == "__main__":
    main()
