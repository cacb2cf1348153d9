"""Measure what each practice of training gives on this machine in time and memory, and that losses stay equal.

``python -m benchmarks.training`` trains three networks for some steps at 64x64 in batches of 16 and at 256x256 in
batches of 8: with mixed precision, with contiguous maps, with activation checkpoints at several places; and one of
them with 0, 1 and 2 data workers. Every training runs in a process of its own, so that the peak of its memory is its
own. What is compared takes turns, for ``--rounds`` rounds. A second plain training in each round shows the noise.
Beside the peaks stands the account of the memory by purpose (``tasks/parts/training/memory_account.py``).

Finished trainings are kept under ``--workspace``, so an interrupted run goes on with the next; remove the folder
after a change of the code. ``--sizes 32x32x4 --steps 5 --rounds 1 --networks mobile_unet`` takes minutes, and
``--parts`` leaves some out. Prints a line for each training, and writes ``benchmarks/results/training.json`` and
``training.md``.
"""

import argparse
import json
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from datetime import date
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.large_data import draw_images, prepare_without_copy
from benchmarks.training_cells import (
    CHILDREN,
    FIRST,
    NESTED,
    NETWORKS,
    PHOTOS,
    PLAIN,
    PRACTICES,
    REPOSITORY,
    WARM_UP_STEPS,
    Cell,
    Result,
    account,
    measure,
    write_scenes,
)
from benchmarks.training_page import page
from tasks.core.environment import versions
from tasks.core.execute import ARTIFACTS
from tasks.parts.engines.machine import read_cpu_model, read_isa

RESULTS = Path(__file__).parent / "results" / "training.json"
WORKSPACE = ARTIFACTS / "benchmarks" / "training"
SIZES = ["64x64x16", "256x256x8"]
PRACTICE, WORKERS, MEMORY = "practices", "workers", "memory"
PARTS = (PRACTICE, WORKERS, MEMORY)
WORKER_STEPS = 2
"""Times the steps of other trainings: data workers first fill their queues."""
TASKS = {"measure": measure, "account": account}


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the missing trainings, print and write the tables."""
    options = _parse(arguments)
    if options.task:
        print(json.dumps(TASKS[options.task](Cell(**json.loads(options.cell)), options.data)))
        return
    sizes = [tuple(map(int, size.split("x"))) for size in options.sizes]
    found: dict[str, list[dict[str, Any]]] = {part: [] for part in PARTS}
    for part in options.parts:
        for cells in groups(part, options.networks, sizes, options.steps):
            num_rounds = 1 if part == MEMORY else options.rounds
            results = take_turns(cells, num_rounds, options.workspace)
            found[part] += [asdict(cell) | {"title": cell.title, "rounds": results[cell]} for cell in cells]
            if part == MEMORY:
                for row, cell in zip(found[part][-len(cells) :], cells, strict=True):
                    row["account"] = finished(cell, "account", 0, options.workspace)
    record = {
        "date": date.today().isoformat(),
        "cpu_model": read_cpu_model(),
        "isa": list(read_isa()),
        "python": platform.python_version(),
        "versions": versions("torch", "lightning", "transformers"),
        "command": " ".join(["python -m benchmarks.training", *(arguments or sys.argv[1:])]),
        "num_rounds": options.rounds,
        "num_steps": options.steps,
        "warm_up_steps": WARM_UP_STEPS,
        "parts": found,
    }
    options.results.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    options.results.with_suffix(".md").write_text(page(record), encoding="utf-8")
    print(f"wrote {options.results} and {options.results.with_suffix('.md').name}")


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--parts", nargs="+", default=list(PARTS), choices=PARTS)
    parser.add_argument("--networks", nargs="+", default=list(NETWORKS), choices=list(NETWORKS))
    parser.add_argument(
        "--sizes", nargs="+", default=SIZES, help="height x width x batch; the last is the large one"
    )
    parser.add_argument("--rounds", type=int, default=3, help="trainings of each cell")
    parser.add_argument("--steps", type=int, default=10, help="of a training, warm-up included")
    parser.add_argument("--workspace", type=Path, default=WORKSPACE)
    parser.add_argument("--results", type=Path, default=RESULTS)
    for hidden in ("--task", "--cell"):
        parser.add_argument(hidden, help=argparse.SUPPRESS)
    parser.add_argument("--data", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.steps <= WARM_UP_STEPS:
        parser.error(f"--steps is {options.steps}, expected more than the {WARM_UP_STEPS} that warm up")
    return options


def groups(
    part: str, networks: Sequence[str], sizes: Sequence[tuple[int, ...]], num_steps: int
) -> Iterator[list[Cell]]:
    """Yield the cells of a part that are compared with the first of each group."""
    if part == WORKERS:
        plain = Cell(networks[0], *sizes[-1], WORKER_STEPS * num_steps)
        for cell in (plain, replace(plain, source=PHOTOS)):
            yield [replace(cell, num_workers=number) for number in (0, 1, 2, None)]
        return
    for network in networks:
        if part == PRACTICE:
            for size in sizes:
                plain = Cell(network, *size, num_steps)
                practices = [replace(plain, practice=name) for name in PRACTICES]
                yield [*practices, replace(plain, is_mapped=True)]
        else:
            large = replace(Cell(network, *sizes[-1], num_steps), is_mapped=True)
            yield [
                *(
                    replace(large, practice=name, batch_size=num_images)
                    for name in (PLAIN, NESTED)
                    for num_images in (large.batch_size // 2, large.batch_size, 2 * large.batch_size)
                    if num_images > 1  # BatchNorm of a pooled map needs two
                ),
                *(replace(large, practice=name) for name in ("bf16_mixed", FIRST, CHILDREN)),
            ]


def take_turns(cells: Sequence[Cell], num_rounds: int, workspace: Path) -> dict[Cell, list[Result]]:
    """Run each cell once per round; every second round runs them in reverse, so that none always comes first."""
    results: dict[Cell, list[Result]] = {cell: [] for cell in cells}
    for number in range(num_rounds):
        for cell in cells if number % 2 == 0 else reversed(cells):
            result = finished(cell, "measure", number, workspace)
            results[cell].append(result)
            print(
                f"{cell.network} {cell.size}, {cell.title}, {cell.source}, {result['num_workers']} workers: "
                f"{median(result['step_ms']):.1f} ms, {result['growth_mib']:.0f} MiB, "
                f"loss {result['losses'][-1]:.6f}",
                flush=True,
            )
    return results


def finished(cell: Cell, task: str, number: int, workspace: Path) -> Result:
    """Return what a process finds about a cell in a round, unless a file has it already."""
    file = workspace / f"{cell.name}_{task}_{number}.json"
    if not file.is_file():
        command = [
            sys.executable,
            "-m",
            "benchmarks.training",
            "--task",
            task,
            "--cell",
            json.dumps(asdict(cell)),
        ]
        command += ["--data", str(data_of(cell, workspace).resolve())]
        environment = {**os.environ, **cell.environment}
        done = subprocess.run(
            command, cwd=REPOSITORY, env=environment, stdout=subprocess.PIPE, text=True, check=True
        )
        file.write_text(done.stdout.splitlines()[-1], encoding="utf-8")
    result: Result = json.loads(file.read_text(encoding="utf-8"))
    return result


def data_of(cell: Cell, workspace: Path) -> Path:
    """Return the data set of a cell, which is made unless it is there."""
    kind = "photos" if cell.source == PHOTOS else "scenes"
    folder = workspace / f"{kind}_{cell.height}x{cell.width}x{cell.num_images}"
    if kind == "photos":
        if not (folder / "out" / "finished").is_file():
            num_images = 2 * cell.num_images  # three quarters of them are for training
            draw_images(folder / "source", num_images)
            prepare_without_copy(folder, cell.height, cell.width, num_calibration=8)
            (folder / "out" / "finished").touch()
        return folder / "out" / "dataset"
    if not (folder / "finished").is_file():
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        write_scenes(folder, cell.height, cell.width, cell.num_images)
        (folder / "finished").touch()
    return folder / "dataset"


if __name__ == "__main__":
    main()
