"""What orchestration costs: first run, warm run, warm run without a server.

``python -m benchmarks.overhead [hydra override ...]`` clones the checkout into a temporary folder, runs the flow
there, and prints a table. Overhead is the wall time of the flow minus the stages' own work; what a stage spends on
importing libraries (``-X importtime``, its child processes counted as well) is overhead. Writes
``benchmarks/results/overhead.json``.
"""

import json
import os
import platform
import re
import subprocess
import sys
import tempfile
import time
from datetime import date
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]
RESULTS = Path(__file__).parent / "results" / "overhead.json"

_STARTED = re.compile(r"tasks\.core\.execute (\S+): started")
_FINISHED = re.compile(r"tasks\.core\.execute (\S+): finished in ([\d.]+) s")
_IMPORT = re.compile(r"import time:\s+(\d+) \|")


def main(overrides: list[str]) -> None:
    """Measure, print and write the table."""
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run(["git", "clone", "-q", str(REPOSITORY), folder], check=True)
        command = [sys.executable, "-m", "flows.optimize", *overrides]
        try:
            wall_s, output = timed(command, folder, PYTHONPROFILEIMPORTTIME="1")
            work_s, import_s = stage_seconds(output)
            warm_s = min(timed(command, folder)[0] for _ in range(3))
        finally:
            stop = [sys.executable, "-m", "flows.local_server", "--stop"]
            subprocess.run(stop, cwd=folder, check=False, capture_output=True)
        cold_s, _ = timed(command, folder)
        subprocess.run(stop, cwd=folder, check=False, capture_output=True)
    record = {
        "date": date.today().isoformat(),
        "python": platform.python_version(),
        "overrides": overrides,
        "first_run_s": round(wall_s, 1),
        "stage_work_s": round(work_s - import_s, 1),
        "imports_in_stages_s": round(import_s, 1),
        "overhead_share": round((wall_s - (work_s - import_s)) / wall_s, 4),
        "warm_run_s": round(warm_s, 2),
        "warm_run_with_server_start_s": round(cold_s, 2),
    }
    for name, value in record.items():
        print(f"{name:>30}  {value}")
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")


def timed(command: list[str], folder: str, **environment: str) -> tuple[float, str]:
    """Run a command and return its wall time in seconds and what it printed."""
    started = time.perf_counter()
    finished = subprocess.run(
        command,
        cwd=folder,
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    seconds = time.perf_counter() - started
    if finished.returncode != 0:
        sys.exit(f"{' '.join(command)} failed:\n{finished.stdout[-3000:]}")
    return seconds, finished.stdout


def stage_seconds(output: str) -> tuple[float, float]:
    """Return the seconds inside stage functions, and those of them that went into imports."""
    work_s, import_us, is_inside = 0.0, 0, False
    for line in output.splitlines():
        if _STARTED.search(line):
            is_inside = True
        elif found := _FINISHED.search(line):
            is_inside = False
            work_s += float(found[2])
        elif is_inside and (found := _IMPORT.match(line)):
            import_us += int(found[1])
    return work_s, import_us / 1e6


if __name__ == "__main__":
    main(sys.argv[1:])
