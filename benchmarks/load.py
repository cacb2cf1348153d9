"""Measure one engine under load, and beside OpenVINO's benchmark_app.

``python -m benchmarks.load [--engine FOLDER] [--max-p99-ms 20] [--rounds 10]`` on a machine that does nothing else;
without --engine it is the pick of --target in the last run of the pipeline. It measures what `measure_load` does: the
grid of batch, lanes and threads, tunings of the best cell, and open arrivals at rising rates (docs/load.md).

An engine of OpenVINO is then run at batch 1 by ``benchmark_app`` of the openvino package and by the runner of
`benchmark`, both alone, in one thread and stream, in turns and in random order, each time in new processes; ours runs
twice in each round, as the A/A control. benchmark_app refuses the compiled file, so it compiles the graph that lies
beside it, with the same options. Prints the tables and writes ``benchmarks/results/load.json`` and ``load.md``; a
second start continues.
"""

import argparse
import dataclasses
import json
import math
import os
import random
import re
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import dacite

from benchmarks.records import open_record
from flows.params import compose_params
from tasks.core.config import typed_config
from tasks.core.execute import ARTIFACTS
from tasks.core.reports import STRICT, write_json
from tasks.measure_load import Config, measure_engine
from tasks.parts.engines.machine import read_cpu_model
from tasks.parts.engines.manifest import GRAPH_FILE, EngineManifest, read_engine_manifest
from tasks.parts.engines.runtimes import Precision, Runtime
from tasks.parts.engines.target import Reads
from tasks.parts.measuring.engine_process import EngineProcess
from tasks.parts.measuring.intervals import Estimate, estimate_ratio
from tasks.parts.measuring.load_page import describe_engine
from tasks.parts.measuring.load_report import EngineLoad
from tasks.parts.measuring.reports import Timed

RESULTS = Path(__file__).parent / "results" / "load.json"
PICKS = ARTIFACTS / "select_engine" / "picks.json"
OURS, AGAIN, APP = "ours", "ours, again (A/A)", "benchmark_app"
_START_APP = "from openvino.tools.benchmark.main import main; main()"
"""What the script benchmark_app of the package does, in this environment."""
_MEDIAN = re.compile(r"Median:\s+([\d.]+) (us|ms)")
_THROUGHPUT = re.compile(r"Throughput:\s+([\d.]+) FPS")


@dataclasses.dataclass(frozen=True)
class Run:
    """One run of an engine at batch 1 in one thread."""

    latency_ms_p50: float
    throughput_per_s: float


def main() -> None:
    """Measure what is missing, print and write the tables."""
    options = _parse()
    engine = options.engine or _picked(options.target)
    manifest = read_engine_manifest(engine)
    conditions = {
        "engine": f"{manifest.sha256[:12]} for {manifest.target.name}",
        "max_p99_ms": options.max_p99_ms,
        "cpu_model": read_cpu_model(),
        "num_cpus": os.cpu_count(),
        "runtime": f"{manifest.target.runtime} {manifest.runtime_version}",
    }
    record = open_record(options.results, conditions, ["load", "rounds"])
    if not record["load"]:
        cfg = _config(manifest, options.max_p99_ms)
        record["load"] = [dataclasses.asdict(measure_engine(cfg, engine, manifest, "engine"))]
        write_json(options.results, record)
    if manifest.target.runtime is Runtime.openvino:
        record["benchmark_app"] = version("openvino")
        while len(record["rounds"]) < options.rounds:
            shuffler = random.Random(len(record["rounds"]))
            record["rounds"].append(run_round(engine, manifest, options.seconds, shuffler))
            write_json(options.results, record)
            print(f"round {len(record['rounds'])}: {record['rounds'][-1]}", flush=True)
    page = render(record)
    print(page)
    options.results.with_suffix(".md").write_text(page, encoding="utf-8")


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--engine", type=Path, help="folder with a manifest.json, as build_engine writes it")
    parser.add_argument("--target", default="cpu_openvino", help="whose pick it is without --engine")
    parser.add_argument("--max-p99-ms", type=float, help="the bound; without it images per second alone")
    parser.add_argument("--rounds", type=int, default=10, help="runs of benchmark_app; 0: none")
    parser.add_argument("--seconds", type=float, default=2.0, help="length of each run")
    parser.add_argument("--results", type=Path, default=RESULTS)
    return parser.parse_args()


def _picked(target: str) -> Path:
    picks = json.loads(PICKS.read_text(encoding="utf-8")) if PICKS.is_file() else {}
    if target not in picks:
        raise SystemExit(f"{PICKS} has no pick of {target}. Run the pipeline (make run), or name --engine.")
    return ARTIFACTS / "build_engine" / str(picks[target]["variant"]) / target / "engine"


def _config(manifest: EngineManifest, max_p99_ms: float | None) -> Config:
    """Return the options of conf/measure_load for the engine's target."""
    sections = compose_params(["measure_load.variants=all"])["measure_load"]
    gpu = None if manifest.target.gpu is None else dataclasses.asdict(manifest.target.gpu)
    own = {"target": manifest.target.name, "gpu": gpu, "variants": ["engine"], "max_p99_ms": max_p99_ms}
    cfg: Config = typed_config(Config, next(iter(sections.values())) | own, "measure_load")
    return cfg


def run_round(
    engine: Path, manifest: EngineManifest, seconds: float, shuffler: random.Random
) -> dict[str, dict[str, float]]:
    """Run both programs, ours twice, in random order."""
    order = shuffler.sample([OURS, AGAIN, APP], 3)
    runs = {
        name: run_app(engine, manifest, seconds) if name == APP else run_ours(engine, seconds)
        for name in order
    }
    return {name: vars(runs[name]) for name in (OURS, AGAIN, APP)}


def run_ours(engine: Path, seconds: float) -> Run:
    """Run an engine alone in a new process, one call after the other, in one thread."""
    with EngineProcess(engine, num_threads=1, timeout_s=60 + 2 * seconds, timed=Timed.run) as process:
        process.wait_until_loaded()
        load = process.load(1, concurrency=1, seconds=seconds, num_windows=1, warm_up_s=seconds / 10)
    return Run(statistics.median(load.latencies_ns) / 1e6, load.calls_per_s[0])


def run_app(engine: Path, manifest: EngineManifest, seconds: float) -> Run:
    """Run benchmark_app on the graph that the engine was compiled from, with the options of its target."""
    found = subprocess.run(
        app_command(engine, manifest, seconds), capture_output=True, text=True, check=False, timeout=600
    )
    if found.returncode:
        raise SystemExit(f"benchmark_app failed:\n{found.stdout[-2000:]}{found.stderr[-2000:]}")
    return read_app(found.stdout)


def app_command(engine: Path, manifest: EngineManifest, seconds: float) -> list[str]:
    """Return the command of benchmark_app, which takes whole seconds."""
    target, (channels, height, width) = manifest.target, manifest.card.image_shape
    is_plain = target.reads is Reads.normalised
    image = [channels, height, width] if is_plain else [height, width, channels]
    batch = "1" if target.max_batch == 1 else f"1..{target.max_batch}"
    return [
        *(sys.executable, "-c", _START_APP, "-d", "CPU"),
        *("-m", str(engine / GRAPH_FILE), "-hint", "none", "-nstreams", "1", "-nthreads", "1"),
        *("-api", "sync", "-pin", "NO", "-t", str(math.ceil(seconds)), "-inference_only", "true"),
        *("-infer_precision", "bf16" if target.precision is Precision.bf16 else "f32"),
        *("-ip", "f32" if is_plain else "u8"),
        *("-shape", f"[{','.join(map(str, [batch, *image]))}]"),
        *("-data_shape", f"[{','.join(map(str, [1, *image]))}]"),
    ]


def read_app(text: str) -> Run:
    """Return the numbers that benchmark_app prints."""
    median, throughput = _MEDIAN.search(text), _THROUGHPUT.search(text)
    if median is None or throughput is None:
        raise SystemExit(f"benchmark_app printed no median or no throughput:\n{text[-2000:]}")
    scale = 1e-3 if median[2] == "us" else 1.0
    return Run(scale * float(median[1]), float(throughput[1]))


def render(record: Mapping[str, Any]) -> str:
    """Return load.md."""
    load = dacite.from_dict(EngineLoad, json.loads(json.dumps(record["load"][0])), STRICT)
    conditions = ", ".join(f"{name}: {value}" for name, value in record["conditions"].items())
    parts = ["# One engine under load", f"{record['date']}. {conditions}.", *describe_engine(load)]
    if len(record["rounds"]) > 1:
        parts += ["## Beside benchmark_app", compare(record["rounds"])]
    return "\n\n".join(parts) + "\n"


def compare(rounds: Sequence[Mapping[str, Mapping[str, float]]]) -> str:
    """Return both programs beside each other, with the ratio of each quantity and its A/A control."""
    lines = [
        f"Batch 1, one thread, the engine alone, {len(rounds)} rounds of new processes in random order.",
        "",
        f"| | {OURS} | {APP} | ratio (95 %) | A/A (95 %) | within the A/A spread |",
        "|---|---:|---:|---|---|---|",
    ]
    for key, words in (("latency_ms_p50", "p50 ms"), ("throughput_per_s", "images/s")):
        values = {name: [each[name][key] for each in rounds] for name in (OURS, AGAIN, APP)}
        ratio, control = (_ratio(values[OURS], values[other]) for other in (APP, AGAIN))
        is_within = abs(ratio.value - 1) <= control.spread
        lines.append(
            f"| {words} | {statistics.median(values[OURS]):.4g} | {statistics.median(values[APP]):.4g} "
            f"| {_span(ratio)} | {_span(control)} | {'yes' if is_within else 'no'} |"
        )
    return "\n".join(lines)


def _ratio(ours: Sequence[float], others: Sequence[float]) -> Estimate:
    return estimate_ratio([one / other for one, other in zip(ours, others, strict=True)])


def _span(ratio: Estimate) -> str:
    return f"{ratio.value:.3f} ({ratio.low:.3f} to {ratio.high:.3f})"


if __name__ == "__main__":
    main()
