"""Run the quantization ladder on several students: which rung wins on each target, and why.

``python -m benchmarks.ladder --workspace DIR`` after a run of the pipeline. The default student's ladder is taken
from that run. For every other student the pipeline runs once in DIR, a new clone with the run's data.
Prints a table per student and writes ``benchmarks/results/ladder.json``.
"""

import argparse
import json
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Sequence
from datetime import date
from pathlib import Path
from typing import Any

from benchmarks.runtimes import read_selection
from tasks.core.config import read_params
from tasks.core.execute import ARTIFACTS
from tasks.parts.engines.machine import read_cpu_model

REPOSITORY = Path(__file__).resolve().parents[1]
RESULTS = Path(__file__).parent / "results" / "ladder.json"

DEFAULT = "DeepLabV3+ (residual)"
STUDENTS = {
    "Fast-SCNN (depthwise)": [
        "network@train.baseline.network=fast_scnn",
        "train.baseline.network.width=1.0",
        "train.baseline.network.depth=0.34",
    ],
    "MobileUNet (inverted residuals)": [
        "network@train.baseline.network=mobile_unet",
        "train.baseline.network.width=0.5",
        "train.baseline.network.depth=0.5",
    ],
}
COLUMNS = ("variant", "target", "miou", "score_rel_loss", "latency_ms_p50", "verdict", "picked", "reason")


def main() -> None:
    """Run the missing students, print and write the tables."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--workspace", type=Path, required=True, help="a new folder for the other students")
    options = parser.parse_args()
    students = {DEFAULT: rungs_in(Path.cwd())}
    make_workspace(options.workspace)
    for student, overrides in STUDENTS.items():
        run_pipeline(options.workspace, overrides)
        students[student] = rungs_in(options.workspace)
    for student, rungs in students.items():
        print_ladder(student, rungs)
    record = {
        "date": date.today().isoformat(),
        "cpu_model": read_cpu_model(),
        "python": platform.python_version(),
        "students": students,
        "rescued": rescued(students),
    }
    print("PTQ too lossy, a later rung accepted:", *(record["rescued"] or ["nowhere"]), sep="\n  ")
    RESULTS.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")


def make_workspace(workspace: Path) -> None:
    """Clone the checkout and copy the data, which are the same for all students."""
    subprocess.run(["git", "clone", "-q", str(REPOSITORY), str(workspace)], check=True)
    shutil.copytree(ARTIFACTS / "prepare_data", workspace / "artifacts" / "prepare_data")


def run_pipeline(workspace: Path, overrides: Sequence[str]) -> None:
    """Run the flow in the clone and show its output."""
    environment = {**os.environ, "PYTHONPATH": str(workspace)}
    subprocess.run(
        [sys.executable, "-m", "flows.optimize", *overrides], cwd=workspace, env=environment, check=True
    )


def rungs_in(workspace: Path) -> list[dict[str, Any]]:
    """Return the rungs of a finished run by target, from the float start up."""
    rows = read_selection("engines.json", workspace)
    ladder = read_params()["select_engine"]["ladder"]
    rungs = [{name: row[name] for name in COLUMNS} for row in rows if row["variant"] in ladder]
    return sorted(rungs, key=lambda row: (row["target"], ladder.index(row["variant"])))


def print_ladder(student: str, rungs: Sequence[dict[str, Any]]) -> None:
    """Print one row per rung."""
    print(f"\n{student}")
    for row in rungs:
        loss = "-" if row["score_rel_loss"] is None else f"{100 * row['score_rel_loss']:+.2f} %"
        latency = "-" if row["latency_ms_p50"] is None else f"{row['latency_ms_p50']:.3f} ms"
        print(
            f"  {row['target']:>20} {row['variant']:>15}  loss {loss:>8}  {latency:>9}  {row['verdict']}"
            f"{'  <- pick' if row['picked'] else ''}"
        )


def rescued(students: dict[str, list[dict[str, Any]]]) -> list[str]:
    """List the cases in which PTQ failed the accuracy gate and a rung above it passed."""
    found = []
    for student, rungs in students.items():
        verdicts = {(row["target"], row["variant"]): row["verdict"] for row in rungs}
        for target in dict.fromkeys(row["target"] for row in rungs):
            if verdicts.get((target, "pruned_ptq")) != "TOO_LOSSY":
                continue
            found += [
                f"{student} on {target}: {variant}"
                for variant in ("pruned_repaired", "pruned_partial", "pruned_qat")
                if verdicts.get((target, variant)) == "ACCEPT"
            ]
    return found


if __name__ == "__main__":
    main()
