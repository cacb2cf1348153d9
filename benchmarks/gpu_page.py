"""Write docs/gpu-results.md from the records of a `benchmarks.gpu` run."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.gpu_cells import Cell, Result

PAGE = Path("docs") / "gpu-results.md"
NOTES = "notes.md"
"""What is told before the tables, in the folder of the records; it may be missing."""

ENGINE_HEAD = (
    "| network | target | precision | p50 ms | device ms | x eager | A/A | images/s, 2 threads | "
    "images/s, batched (batch) | GPU MiB | agreement dB | build s |"
)
KERNEL_HEAD = "| size | step | form | p50 ms | x numpy | equal values |"
TRAINING_HEAD = "| network | size | batch | precision | checkpointing | step ms | compute ms | peak GPU MiB |"

READING_OF_ENGINES = """\
How to read it: weights are random, and the networks are those of `train.teacher` and `train.baseline` (the student).
Latencies are host times for one image, from memory to memory; device ms come from CUDA events and include copies.
`x eager` is the speed-up over eager PyTorch in float32 (without TF32) on the same GPU, measured in the same rounds,
with its 95 % interval. A/A is the measured difference of the engine from itself; smaller differences mean nothing.
GPU MiB is the memory of the engine's process after warm-up, including its CUDA context and the buffers for the
largest batch. Agreement is with the float32 network on the CPU, for ONNX Runtime with its own graph; a trained
network would differ. ONNX Runtime has no bf16 rows, because the pipeline writes no such graph."""

READING_OF_KERNELS = """\
No engine runs here. Frames and masks are in host memory, images and scores in that of the GPU, and copies count. The
camera's frame is 1080x1920. `graph`: the steps as `reads` and `gives` put them into the graph, in ONNX Runtime."""

READING_OF_TRAININGS = """\
Medians. A step includes loading its images in the training process; compute is forward, backward and optimizer
alone. The peak is the memory that torch allocated."""


def write_page(
    machine: Mapping[str, Any], records: Sequence[Mapping[str, Any]], cells: Sequence[Cell], *, folder: Path
) -> Path:
    """Write docs/gpu-results.md, with the notes of the folder of the records, and return its path."""
    notes = (folder / NOTES).read_text(encoding="utf-8").strip() if (folder / NOTES).is_file() else ""
    PAGE.write_text(page(machine, records, cells, notes), encoding="utf-8")
    return PAGE


def page(
    machine: Mapping[str, Any], records: Sequence[Mapping[str, Any]], cells: Sequence[Cell], notes: str = ""
) -> str:
    """Return the page: the measurements, what was skipped and why, and the machine."""

    def measured(kind: str) -> list[Result]:
        return [
            record["result"]
            for record in records
            if record["kind"] == kind and record["status"] == "measured"
        ]

    sections = [
        "# Results on a GPU",
        "Written by `python -m benchmarks.gpu --page DIR`.",
        *([notes] if notes else []),
        *_tests(measured("tests")),
        *_engines(measured("engine")),
        *_kernels(measured("kernels")),
        *_trainings(measured("training")),
        *_unmeasured(records, cells),
        _machine(machine),
    ]
    return "\n\n".join(sections) + "\n"


def _tests(results: Sequence[Result]) -> list[str]:
    return [
        section
        for result in results
        for section in (
            "## Tests",
            f"`python -m pytest -m gpu tests/gpu`: {result['summary']}.",
            *_bullets(result["outcomes"]),
        )
    ]


def _engines(results: Sequence[Result]) -> list[str]:
    if not results:
        return []
    sections = ["## Engines against eager PyTorch"]
    for height, width in sorted({(found["height"], found["width"]) for found in results}):
        rows = [
            _engine_row(found) for found in results if (found["height"], found["width"]) == (height, width)
        ]
        sections += [f"### {height}x{width}", _table(ENGINE_HEAD, sorted(rows))]
    return [*sections, READING_OF_ENGINES]


def _engine_row(found: Result) -> tuple[str, ...]:
    return (
        "student" if found["network"] == "baseline" else found["network"],
        found["target"],
        found["precision"],
        _number(found["latency_ms_p50"], 3),
        _number(found["device_ms_p50"], 3),
        f"{found['speedup']:.2f} ({found['speedup_low']:.2f} to {found['speedup_high']:.2f})",
        f"{found['aa_ratio_spread']:.1%}",
        _number(found["throughput_per_s"], 0),
        f"{_number(found['batch_throughput_per_s'], 0)} ({found['batch']})",
        _number(found["gpu_memory_mib"], 0),
        _number(found["agreement_db"], 1) + ("" if found["is_precision_ok"] else " (another precision)"),
        _number(found["build_s"], 1),
    )


def _kernels(results: Sequence[Result]) -> list[str]:
    if not results:
        return []
    rows = [
        (
            f"{found['height']}x{found['width']}",
            step,
            form,
            _number(row["latency_ms_p50"], 3),
            f"{row['speedup']:.2f} ({row['speedup_low']:.2f} to {row['speedup_high']:.2f})",
            f"{row['share_equal']:.3%}",
        )
        for found in results
        for step, forms in found["steps"].items()
        for form, row in forms.items()
    ]
    notes = sorted({found["graph_note"] for found in results} - {""})
    return ["## Around an engine", _table(KERNEL_HEAD, rows), READING_OF_KERNELS, *_bullets(notes)]


def _trainings(results: Sequence[Result]) -> list[str]:
    if not results:
        return []
    rows = [
        (
            "student" if found["network"] == "baseline" else found["network"],
            f"{found['height']}x{found['width']}",
            str(found["batch_size"]),
            found["precision"],
            "on" if found["gradient_checkpointing"] else "off",
            _number(found["step_ms_p50"], 1),
            _number(found["compute_ms_p50"], 1),
            _number(found["peak_gpu_memory_mib"], 0),
        )
        for found in results
    ]
    return ["## Training", _table(TRAINING_HEAD, rows), READING_OF_TRAININGS]


def _unmeasured(records: Sequence[Mapping[str, Any]], cells: Sequence[Cell]) -> list[str]:
    lines = [
        f"{record['cell']}: {record['status']}. {record['reason']}"
        for record in records
        if record["status"] != "measured"
    ]
    known = {record["cell"] for record in records}
    missing = [cell.name for cell in cells if cell.name not in known]
    if missing:
        lines.append(f"Not measured within the budget: {', '.join(missing)}.")
    return ["## Not measured", *_bullets(lines)] if lines else []


def _machine(machine: Mapping[str, Any]) -> str:
    gpu = machine["gpu"]
    versions = ", ".join(f"{name} {value}" for name, value in machine["versions"].items())
    return (
        f"Measured from {machine['date']} on, {gpu['name']} (compute capability {gpu['compute_capability']}), "
        f"{machine['cpu_model']}, {versions}."
    )


def _table(head: str, rows: Iterable[Sequence[str]]) -> str:
    lines = [head, "|---" * (head.count("|") - 1) + "|", *(f"| {' | '.join(row)} |" for row in rows)]
    return "\n".join(lines)


def _bullets(lines: Sequence[str]) -> list[str]:
    return ["\n".join(f"- {line}" for line in lines)] if lines else []


def _number(value: float | None, digits: int) -> str:
    return "" if value is None else f"{value:.{digits}f}"
