"""Measure installation and first run for a new user, and the share of orchestration.

``python -m benchmarks.overhead [hydra override ...]`` clones the checkout, runs ``make run`` there (with packages
from pip's cache if present), and prints a table: installation, first run, runs with everything up to date. Overhead
is the time of the first run in which no stage did its own work: server, flow, process starts, digests, ``dvc
commit``, and every import (also those of a stage's child processes). If stages run in parallel, time counts as work
while any of them works. ``--workspace DIR`` keeps the clone. Writes ``benchmarks/results/overhead.json``.
"""

import argparse
import json
import math
import os
import platform
import re
import shlex
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from datetime import date
from pathlib import Path
from typing import Any

from tasks.parts.engines.machine import read_cpu_model

REPOSITORY = Path(__file__).resolve().parents[1]
RESULTS = Path(__file__).parent / "results" / "overhead.json"

IMPORT_SPANS = Path(__file__).parent / "import_spans"

_RUNNING = re.compile(r"tasks\.core\.execute (\S+): started")
_FINISHED = re.compile(r"tasks\.core\.execute (\S+): finished in ([\d.]+) s")
_PROCESS = re.compile(r"stage-process (\d+) (\S+)")
_IMPORT = re.compile(r"import-span (\d+) (\d+) ([\d.]+) ([\d.]+)")

Span = tuple[float, float]
"""Start and end in seconds of the monotonic clock."""


def main() -> None:
    """Measure, print and write the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--workspace", type=Path, help="a new folder for the clone, which is kept there")
    parser.add_argument("overrides", nargs="*", help="as for flows.optimize")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        record = measure(options.workspace or Path(temporary, "clone"), options.overrides)
    for name, value in record.items():
        print(f"{name:>30}  {value}")
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")


def measure(workspace: Path, overrides: list[str]) -> dict[str, Any]:
    """Clone, install, run once and then again with everything up to date."""
    subprocess.run(["git", "clone", "-q", str(REPOSITORY), str(workspace)], check=True)
    run = ["make", "run", f"ARGS={shlex.join(overrides)}"]
    try:
        install_s, _ = timed(["make", ".venv/.installed"], workspace)
        wall_s, lines = timed(run, workspace, PYTHONPATH=str(IMPORT_SPANS))
        warm_s = min(timed(run, workspace)[0] for _ in range(3))
        timed(["make", "stop"], workspace)
        cold_s, _ = timed(run, workspace)
    finally:
        subprocess.run(["make", "stop"], cwd=workspace, check=False, capture_output=True)
    work_s = seconds_of(stage_work(lines))
    return {
        "date": date.today().isoformat(),
        "cpu_model": read_cpu_model(),
        "python": platform.python_version(),
        "overrides": overrides,
        "install_s": round(install_s, 1),
        "first_run_s": round(wall_s, 1),
        "first_make_run_minutes": round((install_s + wall_s) / 60, 1),
        "stage_work_s": round(work_s, 1),
        "overhead_share": round(1 - work_s / wall_s, 4),
        "warm_run_s": round(warm_s, 2),
        "warm_run_with_server_start_s": round(cold_s, 2),
    }


def timed(command: list[str], workspace: Path, **environment: str) -> tuple[float, list[tuple[float, str]]]:
    """Run a command; return its wall time in seconds and the lines that it printed, with the time of each."""
    environment = {**os.environ, **environment}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)  # if it is set, each process compiles our modules again
    started = time.monotonic()
    process = subprocess.Popen(
        command,
        cwd=workspace,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert process.stdout is not None
    lines = []
    for line in process.stdout:
        lines.append((time.monotonic(), line))
        if not _PROCESS.match(line) and not _IMPORT.match(line):
            print(line, end="", flush=True)
    seconds = time.monotonic() - started
    if process.wait() != 0:
        sys.exit(f"{' '.join(command)} failed:\n{''.join(line for _, line in lines[-40:])}")
    return seconds, lines


def stage_work(lines: list[tuple[float, str]]) -> list[Span]:
    """Return the spans in which stages did their own work, one list for all.

    A stage's span lasts from its "started" to its "finished", minus the imports of it and its child processes.
    """
    processes: dict[str, str] = {}
    imports: dict[str, list[Span]] = defaultdict(list)
    started: dict[str, float] = {}
    work: list[Span] = []
    for moment, line in lines:
        if found := _PROCESS.search(line):
            processes[found[2]] = found[1]
        elif found := _IMPORT.search(line):
            for process in (found[1], found[2]):
                imports[process].append((float(found[3]), float(found[4])))
        elif found := _RUNNING.search(line):
            started[found[1]] = moment
        elif found := _FINISHED.search(line):
            address = found[1]
            work += without((started[address], moment), imports[processes[address]])
    return work


def without(span: Span, cuts: list[Span]) -> list[Span]:
    """Return the parts of a span that remain between the cuts."""
    position, end = span
    left = []
    for cut_start, cut_end in sorted(cuts):
        if position < min(cut_start, end):
            left.append((position, min(cut_start, end)))
        position = max(position, cut_end)
    return [*left, (position, end)] if position < end else left


def seconds_of(spans: list[Span]) -> float:
    """Return the seconds that at least one of the spans covers."""
    total, covered_until = 0.0, -math.inf
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, covered_until))
        covered_until = max(covered_until, end)
    return total


if __name__ == "__main__":
    main()
