"""Measure how far an engine differs from itself in ``benchmark``; smaller speed-ups mean nothing.

``python -m benchmarks.aa`` after a run of the pipeline, on an otherwise idle machine. Each engine races its own
file, several times, with bursts as configured in ``conf/benchmark``. The ratio of the two should be 1. Prints a
table, writes ``benchmarks/results/aa.json``, and fails if the median ratio of an engine is further from 1 than 2 %.
By default it measures the pick of each target and the references of speed-ups.
"""

import argparse
import json
import logging
import math
import platform
import statistics
import sys
import tempfile
from dataclasses import replace
from datetime import date
from pathlib import Path
from typing import Any

from benchmarks.runtimes import read_selection, stage_config
from tasks.benchmark import benchmark
from tasks.core.config import PARAMS_FILE, read_params
from tasks.core.execute import ARTIFACTS
from tasks.parts.data.dataset import calibration_images
from tasks.parts.engines.machine import read_cpu_model
from tasks.parts.engines.manifest import read_engine_manifest

RESULTS = Path(__file__).parent / "results" / "aa.json"
LIMIT = 0.02
NUM_ROUNDS = 40


def main() -> None:
    """Measure, print and write the table; exit with 1 if the limit is exceeded."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=7, help="measurements of each engine")
    parser.add_argument("--engines", nargs="+", help="such as pruned_qat-cpu_openvino")
    options = parser.parse_args()
    logging.basicConfig(level=logging.WARNING)
    rows = []
    for name in options.engines or default_engines():
        rows.append(measure(name, options.repeats))
        print("  ".join(f"{key} {value}" for key, value in rows[-1].items()), flush=True)
    record = {
        "date": date.today().isoformat(),
        "cpu_model": read_cpu_model(),
        "python": platform.python_version(),
        "limit": LIMIT,
        "rows": rows,
    }
    RESULTS.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    over = [row["engine"] for row in rows if abs(row["ratio"] - 1) > LIMIT]
    if over:
        sys.exit(f"further than {LIMIT:.0%} from 1: {', '.join(over)}")


def default_engines() -> list[str]:
    """Return the pick of each target, and the references of speed-ups."""
    picks, params = read_selection("picks.json"), read_params()
    variant = params["select_engine"]["float_reference"]["variant"]
    references = [f"{variant}-{item['target']}" for item in params["pipeline"]["references"].values()]
    names = [f"{pick['variant']}-{pick['target']}" for pick in picks.values()]
    return list(dict.fromkeys([*names, *references]))


def measure(name: str, num_repeats: int) -> dict[str, Any]:
    """Race an engine, its A/A control and another engine several times, each in a different order."""
    variant, target = name.split("-")
    config = replace(
        stage_config(f"benchmark.{target}"),
        variants=[variant],
        min_rounds=NUM_ROUNDS,
        max_aa_spread=math.inf,  # a repeated race would keep the better one
        batch_sizes=[],
        concurrencies=[],
    )
    builds = ARTIFACTS / "build_engine" / "*" / target / "engine"
    sha256 = read_engine_manifest(ARTIFACTS.joinpath("build_engine", variant, target, "engine")).sha256
    folders = sorted(ARTIFACTS.glob("build_engine/*/*/engine"))
    reference = next(folder for folder in folders if read_engine_manifest(folder).sha256 not in ("", sha256))
    images = calibration_images(Path(read_params(PARAMS_FILE)["pipeline"]["data"]))
    reports = []
    for seed in range(num_repeats):
        with tempfile.TemporaryDirectory() as folder:
            seeded = replace(config, seed=seed)
            report = benchmark(seeded, builds=builds, reference=reference, images=images, out=Path(folder))
            reports.append(report)
    ratios = [report.race.aa_ratio.factor for report in reports if report.race]
    measured = [report.engines[variant].latency for report in reports]
    latencies_ms = [latency.at_batch_1.latency_ms_p50 for latency in measured if latency]
    return {
        "engine": name,
        "ratio": round(statistics.median(ratios), 4),
        "ratio_low": round(min(ratios), 4),
        "ratio_high": round(max(ratios), 4),
        "aa_spread": round(statistics.median(report.aa_ratio_spread for report in reports), 4),
        "latency_ms_p50": round(statistics.median(latencies_ms), 4),
        "num_repeats": num_repeats,
        "num_rounds": NUM_ROUNDS,
    }


if __name__ == "__main__":
    main()
