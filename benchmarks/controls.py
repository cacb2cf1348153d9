"""Hold distillation, pruning and quantization-aware training against fair controls.

``python -m benchmarks.controls [--seeds 3] [--comparisons pruning QAT]`` after a run of the pipeline, whose networks
it takes as they are. Each technique also gives the network more training than its predecessor had. A control gets
that training without the technique:

- distillation: the student on labels alone, for as many epochs as take the time of the distillation;
- pruning: the unpruned student with the same fine-tuning;
- quantization-aware training: the pruned network trained in float for the same epochs with the same losses and
  learning rate, then quantized by quantize_ptq. (Its BatchNorm is not folded during these epochs.)

The time of an epoch with and without the teacher is measured in turns on a tenth of the data: CPU seconds, which
other processes hardly change, or wall time where the training runs on a GPU. More seeds repeat the trainings of
techniques and controls from the same checkpoints of the run. Everything runs through the stages and their caches:
finished outputs under ``artifacts/benchmarks/controls`` are kept, killed trainings resume. mIoU is that of the
engines, on ``cpu_torch`` for float networks and on ``cpu_onnxruntime`` for INT8. Prints a table and writes
``benchmarks/results/controls.json`` and ``controls.md``.
"""

import argparse
import dataclasses
import json
import logging
import platform
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from benchmarks.runtimes import DATA, stage_config
from tasks import finetune
from tasks.core.execute import ARTIFACTS, Call, execute, find_facts, load_stage, output_folder
from tasks.core.fingerprint import stage_key
from tasks.core.reports import read_report, write_json
from tasks.distill import distill
from tasks.parts.data.accuracy import AccuracyReport
from tasks.parts.data.comparison import RESULTS_FILE, read_results
from tasks.parts.data.dataset import calibration_images, read_manifest
from tasks.parts.data.dataset_writer import write_chosen_images
from tasks.parts.engines.machine import read_cpu_model

RESULTS = Path(__file__).parent / "results" / "controls.json"
FOLDER = ARTIFACTS / "benchmarks" / "controls"
TEACHER = ARTIFACTS / "train" / "teacher" / "model.safetensors"
BASELINE = ARTIFACTS / "train" / "baseline" / "model.safetensors"
DISTILLED = ARTIFACTS / "distill" / "model.safetensors"
PRUNED = ARTIFACTS / "prune" / "model.safetensors"
FINETUNED = ARTIFACTS / "finetune" / "model.safetensors"
FLOAT_GRAPH = ARTIFACTS / "export_onnx" / "pruned" / "model.onnx"
PTQ = ARTIFACTS / "quantize_ptq"
EPOCH_TIME = FOLDER / "epoch_time.json"
SPLITS = ("val", "test")
SHARE_FOR_TIMING = 10
"""Epochs are timed on the first images of the data set, one of so many."""


@dataclass(frozen=True)
class Network:
    """A network of the table, to be measured."""

    comparison: str
    role: str
    """before, technique or control."""
    name: str
    seed: int
    num_epochs: int
    """Epochs of the training that is compared; 0 without one."""
    model: Path
    """Checkpoint or INT8 graph."""


def main() -> None:
    """Train what is missing, measure, print and write the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=1, help="trainings of each technique and control")
    parser.add_argument("--rounds", type=int, default=3, help="in which an epoch is timed")
    parser.add_argument("--comparisons", nargs="+", default=list(COMPARISONS), choices=list(COMPARISONS))
    options = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(message)s", datefmt="%H:%M:%S")
    if not (PTQ / "model.onnx").is_file():
        raise SystemExit(f"{PTQ / 'model.onnx'} does not exist. Run the pipeline here first: make run")
    if "distillation" in options.comparisons:
        time_epochs(options.rounds)
    first = stage_config("distill").trainer.seed
    networks = [
        network
        for comparison in options.comparisons
        for seed in range(first, first + options.seeds)
        for network in COMPARISONS[comparison](seed)
    ]
    measured = summaries([{**described(network), **measured_miou(network)} for network in networks])
    conditions = {
        "date": date.today().isoformat(),
        "cpu_model": read_cpu_model(),
        "python": platform.python_version(),
        "torch": version("torch"),
    }
    record = read_record()
    if "distillation" in options.comparisons:
        record["epoch_time_with_teacher"] = read_epoch_time()
    record["rows"] = rows = [
        *(row for row in record["rows"] if row["comparison"] not in options.comparisons),
        *(row | conditions for row in measured),
    ]
    print(table(rows))
    write_json(RESULTS, record)
    RESULTS.with_suffix(".md").write_text(table(rows) + "\n", encoding="utf-8")


def read_record() -> dict[str, Any]:
    """Return the results so far."""
    if not RESULTS.is_file():
        return {"epoch_time_with_teacher": None, "rows": []}
    return dict(json.loads(RESULTS.read_text(encoding="utf-8")))


def distillation(seed: int) -> list[Network]:
    """Return the student on labels alone, distilled, and on labels alone for the time of the distillation."""
    cfg = stage_config("distill")
    num_epochs = max(cfg.trainer.max_epochs, round(cfg.trainer.max_epochs * read_epoch_time()["median"]))
    same_time = changed_trainer(without_teacher(cfg), seed=seed, max_epochs=num_epochs)
    return [
        Network(comparison, role, name, seed, read_epochs(folder), folder / "model.safetensors")
        for comparison, role, name, folder in (
            ("distillation", "before", "labels alone", trained("train.baseline", seed, data=DATA)),
            (
                "distillation",
                "technique",
                "distilled",
                trained("distill", seed, teacher=TEACHER, start=BASELINE, data=DATA),
            ),
            (
                "distillation",
                "control",
                "labels alone, same time",
                run_stage(
                    f"same_time_{seed}", "distill", same_time, teacher=TEACHER, start=BASELINE, data=DATA
                ),
            ),
        )
    ]


def pruning(seed: int) -> list[Network]:
    """Return the student before pruning, pruned and fine-tuned, and unpruned with the same fine-tuning."""
    cfg = changed_trainer(stage_config("finetune"), seed=seed)
    pruned = trained("finetune", seed, checkpoint=PRUNED, teacher=TEACHER, data=DATA)
    whole = run_stage(f"unpruned_{seed}", "finetune", cfg, checkpoint=DISTILLED, teacher=TEACHER, data=DATA)
    return [
        Network("pruning", "before", "distilled", seed, 0, DISTILLED),
        Network(
            "pruning",
            "technique",
            "pruned, fine-tuned",
            seed,
            read_epochs(pruned),
            pruned / "model.safetensors",
        ),
        Network(
            "pruning",
            "control",
            "unpruned, fine-tuned",
            seed,
            read_epochs(whole),
            whole / "model.safetensors",
        ),
    ]


def quantization_aware_training(seed: int) -> list[Network]:
    """Return the INT8 graphs of quantize_ptq, of QAT, and of quantize_ptq after the same steps in float."""
    aware = trained(
        "quantize_aware_train",
        seed,
        checkpoint=FINETUNED,
        teacher=TEACHER,
        model=FLOAT_GRAPH,
        ranges=PTQ / "ranges.json",
        data=DATA,
    )
    cfg = changed_trainer(stage_config("quantize_aware_train"), seed=seed)
    in_float = finetune.Config(distillation=cfg.distillation, trainer=cfg.trainer)
    plain = run_stage(
        f"float_steps_{seed}", "finetune", in_float, checkpoint=FINETUNED, teacher=TEACHER, data=DATA
    )
    checkpoint = plain / "model.safetensors"
    graph = run_stage(
        f"float_graph_{seed}", "export_onnx", stage_config("export_onnx"), checkpoint=checkpoint
    )
    quantized = run_stage(
        f"float_steps_ptq_{seed}",
        "quantize_ptq",
        stage_config("quantize_ptq"),
        model=graph / "model.onnx",
        data=DATA,
    )
    epochs = read_epochs(plain)
    return [
        Network("QAT", "before", "pruned, PTQ", seed, 0, PTQ / "model.onnx"),
        Network("QAT", "technique", "QAT", seed, read_epochs(aware), aware / "model.onnx"),
        Network("QAT", "control", "same steps in float, then PTQ", seed, epochs, quantized / "model.onnx"),
        Network("QAT", "control, float", "same steps in float", seed, epochs, checkpoint),
    ]


COMPARISONS: Mapping[str, Callable[[int], list[Network]]] = {
    "distillation": distillation,
    "pruning": pruning,
    "QAT": quantization_aware_training,
}


def trained(address: str, seed: int, **inputs: Path) -> Path:
    """Return the output of a training of the pipeline: the run's own for the configured seed, else a new one."""
    cfg = stage_config(address)
    if cfg.trainer.seed == seed:
        return ARTIFACTS.joinpath(*address.split("."))
    name = f"{address.replace('.', '_')}_{seed}"
    return run_stage(name, address.split(".")[0], changed_trainer(cfg, seed=seed), **inputs)


def run_stage(name: str, stage: str, cfg: Any, **inputs: Path) -> Path:
    """Run a stage below FOLDER unless its output is fresh, and return the output folder."""
    address, function = f"benchmarks.controls.{name}", load_stage(stage)[0]
    facts = find_facts(function, cfg, output_folder(address)) or {}
    key = stage_key(stage, dataclasses.asdict(cfg), inputs, facts)
    return execute(Call(address, function, cfg, inputs, facts, key))


def changed_trainer(cfg: Any, **changes: int) -> Any:
    """Return a configuration with changes in its trainer."""
    return dataclasses.replace(cfg, trainer=dataclasses.replace(cfg.trainer, **changes))


def without_teacher(cfg: Any) -> Any:
    """Return the configuration of a distillation on labels alone."""
    losses = dataclasses.replace(
        cfg.distillation, label_weight=1.0, soft_target_weight=0.0, channel_wise_weight=0.0, hint_weight=0.0
    )
    return dataclasses.replace(cfg, distillation=losses)


def time_epochs(num_rounds: int) -> None:
    """Measure how many times as long an epoch of distillation takes as one on labels alone, unless it is known.

    The difference between trainings of three epochs and of one leaves out what is done once.
    """
    if EPOCH_TIME.is_file():
        return
    cfg = stage_config("distill")
    counts = {split: count // SHARE_FOR_TIMING for split, count in read_manifest(DATA).counts.items()}
    with tempfile.TemporaryDirectory() as folder:
        part = Path(folder) / "dataset"
        write_chosen_images(DATA, part, {split: max(1, count) for split, count in counts.items()})
        epoch_seconds(without_teacher(cfg), part)  # the first training also imports libraries
        ratios = [
            epoch_seconds(cfg, part) / epoch_seconds(without_teacher(cfg), part) for _ in range(num_rounds)
        ]
    found = {"median": statistics.median(ratios), "low": min(ratios), "high": max(ratios)}
    EPOCH_TIME.parent.mkdir(parents=True, exist_ok=True)
    write_json(EPOCH_TIME, {name: round(ratio, 3) for name, ratio in found.items()})


def read_epoch_time() -> dict[str, float]:
    """Return what `time_epochs` measured: median, lowest and highest ratio."""
    return dict(json.loads(EPOCH_TIME.read_text(encoding="utf-8")))


def epoch_seconds(cfg: Any, data: Path) -> float:
    """Return the time of one epoch of distillation with this configuration."""
    clock = time.monotonic if torch.cuda.is_available() else time.process_time
    seconds = []
    for num_epochs in (1, 3):
        short = changed_trainer(cfg, max_epochs=num_epochs)
        with tempfile.TemporaryDirectory() as out:
            started = clock()
            distill(short, teacher=TEACHER, start=BASELINE, data=data, out=Path(out))
            seconds.append(clock() - started)
    return (seconds[1] - seconds[0]) / 2


def read_epochs(folder: Path) -> int:
    """Return the number of epochs that a training ran."""
    return int(json.loads((folder / "report.json").read_text(encoding="utf-8"))["num_epochs"])


def described(network: Network) -> dict[str, Any]:
    """Return what identifies a network in the results."""
    return {key: value for key, value in dataclasses.asdict(network).items() if key != "model"}


def measured_miou(network: Network) -> dict[str, float]:
    """Build the engine of a network and measure it on each split."""
    target = "cpu_torch" if network.model.suffix == ".safetensors" else "cpu_onnxruntime"
    name = "_".join((network.comparison, network.role, network.name, str(network.seed))).lower()
    name = "".join(letter if letter.isalnum() else "_" for letter in name)
    built = run_stage(
        f"engine.{name}",
        "build_engine",
        stage_config(f"build_engine.{target}"),
        model=network.model,
        images=calibration_images(DATA),
    )
    checked = run_stage(
        f"validate.{name}", "validate", stage_config("validate"), engine=built / "engine", data=DATA
    )
    report = read_report(AccuracyReport, checked)
    if report.accuracy is None:
        raise SystemExit(f"{network.model} has no engine for {target}: {report.reason}")
    return {f"miou_{split}": read_results(checked / RESULTS_FILE, split).score for split in SPLITS}


def summaries(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return mean and spread over the seeds of each network, and its mean distance from the technique per seed."""
    scores: dict[tuple[str, str, str, int], list[Mapping[str, Any]]] = {}
    techniques: dict[tuple[str, int], Mapping[str, Any]] = {}
    for row in rows:
        scores.setdefault((row["comparison"], row["role"], row["name"], row["num_epochs"]), []).append(row)
        if row["role"] == "technique":
            techniques[row["comparison"], row["seed"]] = row
    summarized = []
    for (comparison, role, name, num_epochs), runs in scores.items():
        summary: dict[str, Any] = {
            "comparison": comparison,
            "role": role,
            "name": name,
            "num_epochs": num_epochs,
        }
        for split in SPLITS:
            found = [run[f"miou_{split}"] for run in runs]
            gains = [
                techniques[comparison, run["seed"]][f"miou_{split}"] - run[f"miou_{split}"] for run in runs
            ]
            for what, values in ((f"miou_{split}", found), (f"technique_gain_{split}", gains)):
                summary[f"{what}_mean"] = round(statistics.mean(values), 4)
                summary[f"{what}_spread"] = round(statistics.stdev(values), 4) if len(values) > 1 else None
        summarized.append(summary | {"num_seeds": len(runs)})
    return summarized


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return the rows as a markdown table."""
    lines = [
        "| | network | epochs | mIoU val | mIoU test | the technique is better by (test) |",
        "|---|---|---|---|---|---|",
    ]
    for row in rows:
        found = [_with_spread(row, f"miou_{split}") for split in SPLITS]
        gain = "" if row["role"] == "technique" else _with_spread(row, "technique_gain_test", sign="+")
        names = [f"{row['comparison']}: {row['role']}", row["name"], str(row["num_epochs"])]
        lines.append(f"| {' | '.join([*names, *found, gain])} |")
    return "\n".join(lines)


def _with_spread(row: Mapping[str, Any], what: str, sign: str = "") -> str:
    spread = row[f"{what}_spread"]
    return f"{row[f'{what}_mean']:{sign}.4f}" + ("" if spread is None else f" ({spread:.4f})")


if __name__ == "__main__":
    main()
