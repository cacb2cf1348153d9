"""Measure the overhead of orchestration: a thousand engines of trivial stages with Prefect and ``dvc repro``.

``python -m benchmarks.orchestration`` writes a workspace of trivial stages (``benchmarks/trivial_pipeline.py``: 50
variants on 20 targets, three stages each) into a temporary folder, runs its flow, runs it again with everything
up to date, and prints a table. Each stage is a separate process. Writes ``benchmarks/results/orchestration.json``.

Overhead of an executed call: stage functions report when they start and end; where ``n`` run in parallel, each slot
finishes one call in the time in which ``n`` of them start. That time minus the function's own is overhead: planning,
digests, Prefect, start and end of the process, locks, syncs, reports. A cached call: wall time of the whole second
command, start and imports included, divided by the number of calls. ``dvc repro`` rewrites dvc.lock after each stage,
so the time per stage grows with the pipeline; it is measured on smaller pipelines (``--dvc``). So is ``dvc commit``,
with which a real flow ends, and which parses params.yaml anew for every stage.
"""

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Sequence
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any

import psutil

from benchmarks.trivial_pipeline import write_workspace
from flows.stage_task import MAX_SIDE_BY_SIDE
from tasks.parts.engines.machine import read_cpu_model

RESULTS = Path(__file__).parent / "results" / "orchestration.json"

ALONE = ("benchmark", "select_engine", "track", "race_picks")
"""Stages that the flow runs one at a time; the others fill all slots."""


def main(arguments: Sequence[str]) -> None:
    """Measure, print and write the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--variants", type=int, default=50)
    parser.add_argument("--targets", type=int, default=20)
    parser.add_argument(
        "--dvc", type=int, nargs="*", default=[10, 50], help="numbers of engines for dvc repro"
    )
    parser.add_argument("--results", type=Path, default=RESULTS)
    options = parser.parse_args(arguments)
    record = {
        "date": date.today().isoformat(),
        "cpu_model": read_cpu_model(),
        "python": platform.python_version(),
        "prefect": version("prefect"),
        "dvc": version("dvc"),
    }
    with tempfile.TemporaryDirectory() as folder:
        record |= measure_flow(Path(folder), options.variants, options.targets)
    record["dvc_repro"] = []
    for num_engines in options.dvc:
        with tempfile.TemporaryDirectory() as folder:
            record["dvc_repro"].append(measure_dvc(Path(folder), num_engines))
    for name, value in record.items():
        print(f"{name:>30}  {value}")
    options.results.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")


def measure_flow(workspace: Path, num_variants: int, num_targets: int) -> dict[str, Any]:
    """Run the flow, and again with everything up to date."""
    write_workspace(workspace, num_variants=num_variants, num_targets=num_targets, seconds=0)
    try:
        start_server(workspace)
        executed = run_flow(workspace)
        spans = read_spans(workspace)
        cached = run_flow(workspace)
    finally:
        run(workspace, "-m", "flows.local_server", "--stop")
    num_calls = len(spans)
    if (executed["num_run"], cached["num_run"]) != (num_calls, 0):
        sys.exit(
            f"expected {num_calls} stages to run, and then none: {executed['num_run']}, {cached['num_run']}"
        )
    overheads = overheads_ms(spans, min(MAX_SIDE_BY_SIDE, os.cpu_count() or 1))
    return {
        "num_engines": num_variants * num_targets,
        "num_calls": num_calls,
        "executed_flow_s": executed["flow_s"],
        "executed_overhead_ms_p50": round(statistics.median(overheads), 1),
        "executed_overhead_ms_p95": round(statistics.quantiles(overheads, n=20)[-1], 1),
        "cached_command_s": cached["wall_s"],
        "cached_ms_per_call": round(1000 * cached["wall_s"] / num_calls, 2),
        "flow_rss_mb": executed["flow_rss_mb"],
        "server_rss_mb": executed["server_rss_mb"],
        "cached_flow_rss_mb": cached["flow_rss_mb"],
        "cached_server_rss_mb": cached["server_rss_mb"],
    }


def measure_dvc(workspace: Path, num_engines: int) -> dict[str, Any]:
    """Run ``dvc repro`` on a smaller pipeline of the same shape, again when up to date, and ``dvc commit``."""
    write_workspace(workspace, num_variants=num_engines // 5, num_targets=5, seconds=0)
    walls = []
    for command in (["repro"], ["repro"], ["commit", "--force"]):
        started = time.monotonic()
        run(workspace, "-m", "dvc", *command, "--quiet")
        walls.append(time.monotonic() - started)
    num_stages = len(read_spans(workspace))
    return {
        "num_engines": num_engines,
        "num_stages": num_stages,
        "executed_ms_per_stage": round(1000 * walls[0] / num_stages, 1),
        "cached_ms_per_stage": round(1000 * walls[1] / num_stages, 1),
        "commit_ms_per_stage": round(1000 * walls[2] / num_stages, 1),
    }


def run_flow(workspace: Path) -> dict[str, Any]:
    """Run the flow; return its duration and the memory of its process and of the server over time."""
    started = time.monotonic()
    flow_end = started
    num_run = -1
    command = [sys.executable, "-m", "benchmarks.trivial_pipeline", "--without-commit"]
    with subprocess.Popen(
        command,
        cwd=workspace,
        env=environment(workspace),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        memory = Memory(process.pid, server_pid(workspace))
        assert process.stdout is not None
        latest: deque[str] = deque(maxlen=40)
        for line in process.stdout:
            latest.append(line)
            if line.startswith("stages run: "):
                flow_end, num_run = time.monotonic(), int(line.split()[2])
                memory.stop()
        memory.stop()
    if process.returncode:
        sys.exit(f"the flow ended with {process.returncode}:\n{''.join(latest)}")
    ended = time.monotonic()
    return {
        "num_run": num_run,
        "flow_s": round(flow_end - started, 1),
        "wall_s": round(ended - started, 1),
        "flow_rss_mb": memory.start_middle_end(0),
        "server_rss_mb": memory.start_middle_end(1),
    }


class Memory(threading.Thread):
    """Samples the resident memory of two processes four times a second."""

    def __init__(self, *pids: int) -> None:
        super().__init__(daemon=True)
        self._processes = [psutil.Process(pid) for pid in pids]
        self._samples: list[list[float]] = []
        self._is_over = threading.Event()
        self.start()

    def run(self) -> None:
        """Sample until stopped."""
        while not self._is_over.wait(0.25):
            self._samples.append([process.memory_info().rss / 1e6 for process in self._processes])

    def stop(self) -> None:
        """Stop sampling."""
        self._is_over.set()
        self.join()

    def start_middle_end(self, number: int) -> list[float]:
        """Return the MB of a process after a tenth of the time, after half of it, and at the end."""
        found = [sample[number] for sample in self._samples]
        return [round(found[int(share * (len(found) - 1))], 1) for share in (0.1, 0.5, 1.0)]


def read_spans(workspace: Path) -> dict[str, tuple[float, float]]:
    """Return when each stage function started and ended, by address."""
    spans = {}
    for file in sorted((workspace / "artifacts").glob("[!.]*/**/report.json")):
        report = json.loads(file.read_text(encoding="utf-8"))
        address = ".".join(file.parent.relative_to(workspace / "artifacts").parts)
        spans[address] = (report["started_s"], report["finished_s"])
    return spans


def overheads_ms(spans: dict[str, tuple[float, float]], num_places: int) -> list[float]:
    """Return the overhead of each executed task: the time that it held its slot, minus its function's own."""
    found = []
    for is_alone, width in ((True, 1), (False, num_places)):
        group = sorted(span for name, span in spans.items() if (name.split(".")[0] in ALONE) is is_alone)
        found += [
            1000 * (later[0] - start - (end - start))
            for (start, end), later in zip(group, group[width:], strict=False)
        ]
    return found


def start_server(workspace: Path) -> None:
    """Start the Prefect server of a workspace, so that its start is not measured."""
    run(workspace, "-m", "flows.local_server")


def server_pid(workspace: Path) -> int:
    """Return the process of the workspace's Prefect server."""
    return int(json.loads((workspace / ".prefect/server.json").read_text(encoding="utf-8"))["pid"])


def run(workspace: Path, *arguments: str) -> None:
    """Run Python in a workspace."""
    subprocess.run(
        [sys.executable, *arguments],
        cwd=workspace,
        env=environment(workspace),
        stdout=subprocess.DEVNULL,
        check=True,
    )


def environment(workspace: Path) -> dict[str, str]:
    """Return the environment for commands in a workspace: its own modules, compiled once, and no Prefect settings."""
    outside = ("PREFECT_", "PYTHONDONTWRITEBYTECODE")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(outside)}
    binaries = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"  # dvc.yaml calls `python`
    return {**kept, "PATH": binaries, "PYTHONPATH": str(workspace)}


if __name__ == "__main__":
    main(sys.argv[1:])
