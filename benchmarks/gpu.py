"""Measure on an NVIDIA GPU without TensorRT: the GPU tests, engines against eager PyTorch, trainings.

``python -m benchmarks.gpu --out DIR --budget-s 540`` in the repository, on a machine with an NVIDIA GPU. Needs torch
with CUDA, safetensors, dacite, pyyaml and psutil. ONNX Runtime engines also need onnxruntime-gpu, onnxslim and
onnxscript, trainings need lightning, AOTInductor needs g++ and the CUDA headers, the kernels around an engine need
pycuda and NVRTC. Cells whose packages are missing are skipped with the reason. Prefect, Hydra and DVC are not needed.

Each cell of ``benchmarks/gpu_cells.py`` runs in its own process, the most valuable first, and adds one line to
``DIR/records.jsonl`` as soon as it is measured; ``DIR/log.txt`` holds the output of the processes. When the budget
is spent, run the same command again to continue. To repeat a cell, remove its line. ``--page DIR`` writes
``docs/gpu-results.md`` from DIR, with ``DIR/notes.md`` first.
"""

import argparse
import contextlib
import json
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from datetime import date
from importlib.metadata import PackageNotFoundError, version
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from benchmarks.gpu_cells import Cell, CellSkippedError, list_cells
from benchmarks.gpu_page import write_page
from tasks.core.errors import TargetMismatch
from tasks.core.processes import die_with_parent
from tasks.parts.engines.gpu import find_gpus
from tasks.parts.engines.machine import read_cpu_model
from tasks.parts.measuring.machine_state import read_versions

RECORDS, MACHINE, LOG = "records.jsonl", "machine.json", "log.txt"
PACKAGES = (
    "torch",
    "triton",
    "lightning",
    "transformers",
    "onnx",
    "onnxruntime",
    "onnxruntime-gpu",
    "pycuda",
)
SHORTEST_S = 20.0
"""No cell is started with less budget left."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure what fits into the budget, or write the page; return the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    task = parser.add_mutually_exclusive_group(required=True)
    task.add_argument("--out", type=Path, metavar="DIR", help="measure; records go there")
    task.add_argument("--page", type=Path, metavar="DIR", help="write docs/gpu-results.md from records")
    parser.add_argument("--budget-s", type=float, default=540.0, help="end after this many seconds")
    options = parser.parse_args(arguments)
    if options.page:
        machine = json.loads((options.page / MACHINE).read_text(encoding="utf-8"))
        page = write_page(machine, read_records(options.page), list_cells(), folder=options.page)
        print(f"wrote {page}")
        return 0
    if not find_gpus():
        print("This machine has no NVIDIA GPU, or no driver (libcuda.so.1): nothing to measure.")
        return 1
    deadline = time.monotonic() + options.budget_s
    options.out.mkdir(parents=True, exist_ok=True)
    check_machine(options.out)
    run_cells(list_cells(), options.out, deadline)
    return 0


def check_machine(out: Path) -> None:
    """Record the machine, or exit if the existing records are of another one."""
    versions = read_versions("cuda")
    for name in PACKAGES:
        with contextlib.suppress(PackageNotFoundError):
            versions[name] = version(name)
    found = {"gpu": asdict(find_gpus()[0]), "cpu_model": read_cpu_model(), "versions": versions}
    file = out / MACHINE
    if file.is_file():
        known = json.loads(file.read_text(encoding="utf-8"))
        changed = [name for name, value in found.items() if known[name] != value]
        if changed:
            raise SystemExit(
                f"{file} describes another machine ({', '.join(changed)} differ). Choose another folder with --out."
            )
        return
    text = json.dumps({"date": date.today().isoformat(), **found}, indent=2)
    file.write_text(text + "\n", encoding="utf-8")


def run_cells(cells: Sequence[Cell], out: Path, deadline: float) -> None:
    """Measure the cells that have no record yet, one after the other, until the deadline."""
    finished = {record["cell"] for record in read_records(out)}
    for cell in cells:
        if cell.name in finished:
            continue
        left_s = deadline - time.monotonic()
        if left_s < SHORTEST_S:
            print(f"The budget is spent before {cell.name}. Run the same command again to continue.")
            return
        run_cell(cell, out, left_s)
        for record in read_records(out)[-1:]:
            if record["cell"] == cell.name:
                print(
                    f"{cell.name}: {record['status']} in {record['seconds']:.0f} s {record['reason']}",
                    flush=True,
                )


def run_cell(cell: Cell, out: Path, left_s: float) -> None:
    """Run a cell in its own process; write the record of one that died or exceeded its time limit.

    A cell that the budget interrupts has no record, so that it is measured next time.
    """
    log = out / LOG
    log_start = log.stat().st_size if log.is_file() else 0
    start = time.monotonic()
    process = multiprocessing.get_context("spawn").Process(target=_measure, args=(cell, out, os.getpid()))
    process.start()
    try:
        process.join(min(cell.limit_s, left_s))
        is_over = process.is_alive()
    finally:
        _kill(process)
    if is_over and left_s < cell.limit_s:
        print(f"{cell.name}: interrupted by the end of the budget")
    elif is_over:
        reason = f"exceeded its limit of {cell.limit_s:g} s"
        write_record(out, cell, "failed", reason, time.monotonic() - start)
    elif process.exitcode != 0:
        code = process.exitcode or 0
        how = f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        lines = log.read_bytes()[log_start:].decode(errors="replace").split("\n") if log.is_file() else []
        last = next((line.strip() for line in reversed(lines) if line.strip()), "no output")
        write_record(out, cell, "failed", f"{how}: {last}", time.monotonic() - start)


def _kill(process: BaseProcess) -> None:
    """End a running process and everything that it started."""
    if process.is_alive() and process.pid:
        with contextlib.suppress(ProcessLookupError):  # it has no own process group yet
            os.killpg(process.pid, signal.SIGKILL)
        process.kill()
        process.join()


def _measure(cell: Cell, out: Path, parent_pid: int) -> None:
    """Run a cell; this is the main function of its process."""
    os.setsid()
    die_with_parent(parent_pid, signal.SIGKILL)
    with (out / LOG).open("a", encoding="utf-8") as log:
        log.write(f"--- {cell.name}\n")
        log.flush()
        for stream in (1, 2):
            os.dup2(log.fileno(), stream)
    start = time.monotonic()
    try:
        status, reason, result = "measured", "", cell.measure()
    except (CellSkippedError, TargetMismatch, ModuleNotFoundError) as error:
        status, reason, result = "skipped", str(error), None
    write_record(out, cell, status, reason, time.monotonic() - start, result)


def write_record(
    out: Path, cell: Cell, status: str, reason: str, seconds: float, result: dict[str, Any] | None = None
) -> None:
    """Append the record of a cell in one write, so that an interrupted run leaves complete lines."""
    told = {"cell": cell.name, "kind": cell.kind, "status": status, "reason": reason}
    record = told | {"seconds": seconds, "result": result}
    with (out / RECORDS).open("a", encoding="utf-8") as file:
        file.write(json.dumps(record) + "\n")


def read_records(out: Path) -> list[dict[str, Any]]:
    """Return the records of a folder in order; none if nothing was measured yet."""
    file = out / RECORDS
    return (
        [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()] if file.is_file() else []
    )


if __name__ == "__main__":
    sys.exit(main())
