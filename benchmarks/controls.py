"""Hold quantization-aware training against a fair control.

``python -m benchmarks.controls [--seeds 3]`` after a run of the pipeline, whose networks it takes as they are. QAT
also gives the network more training than its predecessor had. Its control gets that training without the technique:
the network trained in float for the same epochs with the same losses and learning rate, then quantized by
quantize_ptq. (Its BatchNorm is not folded during these epochs.) ``benchmarks.distillation`` and
``benchmarks.pruning`` have the controls of these.

More seeds repeat both trainings from the same checkpoint of the run. Everything runs through the stages and their
caches: finished outputs under ``artifacts/benchmarks/controls`` are kept, killed trainings resume. mIoU is that of
the engines, on ``cpu_torch`` for float networks and on ``cpu_onnxruntime`` for INT8. Prints a table and writes
``benchmarks/results/controls.json`` and ``controls.md``.
"""

import argparse
import dataclasses
import json
import logging
import platform
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any

from benchmarks.runtimes import DATA, stage_config
from tasks import finetune
from tasks.core.config import read_params
from tasks.core.execute import ARTIFACTS, Call, execute, find_facts, load_stage, output_folder
from tasks.core.fingerprint import stage_key
from tasks.core.reports import read_report, write_json
from tasks.parts.data.accuracy import AccuracyReport
from tasks.parts.data.comparison import RESULTS_FILE, read_results
from tasks.parts.data.dataset import calibration_images
from tasks.parts.engines.machine import read_cpu_model

RESULTS = Path(__file__).parent / "results" / "controls.json"
FOLDER = ARTIFACTS / "benchmarks" / "controls"
FINETUNED = ARTIFACTS / "finetune" / "model.safetensors"
FLOAT_GRAPH = ARTIFACTS / "export_onnx" / "pruned" / "model.onnx"
PTQ = ARTIFACTS / "quantize_ptq"
SPLITS = ("val", "test")


@dataclass(frozen=True)
class Network:
    """A network of the table, to be measured."""

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
    options = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(message)s", datefmt="%H:%M:%S")
    if not (PTQ / "model.onnx").is_file():
        raise SystemExit(f"{PTQ / 'model.onnx'} does not exist. Run the pipeline here first: make run")
    first = stage_config("quantize_aware_train").trainer.seed
    networks = [
        network for seed in range(first, first + options.seeds) for network in networks_of_a_seed(seed)
    ]
    rows = summaries([{**described(network), **measured_miou(network)} for network in networks])
    print(table(rows))
    record = {
        "date": date.today().isoformat(),
        "cpu_model": read_cpu_model(),
        "python": platform.python_version(),
        "torch": version("torch"),
        "rows": rows,
    }
    write_json(RESULTS, record)
    RESULTS.with_suffix(".md").write_text(table(rows) + "\n", encoding="utf-8")


def networks_of_a_seed(seed: int) -> list[Network]:
    """Return the INT8 graphs of quantize_ptq, of QAT, and of quantize_ptq after the same steps in float."""
    teacher = Path(read_params()["pipeline"]["quantization_aware"]["student"]["teacher"])
    aware = trained(
        "quantize_aware_train",
        seed,
        checkpoint=FINETUNED,
        teacher=teacher,
        model=FLOAT_GRAPH,
        ranges=PTQ / "ranges.json",
        data=DATA,
    )
    cfg = changed_trainer(stage_config("quantize_aware_train"), seed=seed)
    in_float = finetune.Config(distillation=cfg.distillation, trainer=cfg.trainer)
    plain = run_stage(
        f"float_steps_{seed}", "finetune", in_float, checkpoint=FINETUNED, teacher=teacher, data=DATA
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
        Network("before", "pruned, PTQ", seed, 0, PTQ / "model.onnx"),
        Network("technique", "QAT", seed, read_epochs(aware), aware / "model.onnx"),
        Network("control", "same steps in float, then PTQ", seed, epochs, quantized / "model.onnx"),
        Network("control, float", "same steps in float", seed, epochs, checkpoint),
    ]


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


def read_epochs(folder: Path) -> int:
    """Return the number of epochs that a training ran."""
    return int(json.loads((folder / "report.json").read_text(encoding="utf-8"))["num_epochs"])


def described(network: Network) -> dict[str, Any]:
    """Return what identifies a network in the results."""
    return {key: value for key, value in dataclasses.asdict(network).items() if key != "model"}


def measured_miou(network: Network) -> dict[str, float]:
    """Build the engine of a network and measure it on each split."""
    target = "cpu_torch" if network.model.suffix == ".safetensors" else "cpu_onnxruntime"
    name = "_".join((network.role, network.name, str(network.seed))).lower()
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
    scores: dict[tuple[str, str, int], list[Mapping[str, Any]]] = {}
    techniques: dict[int, Mapping[str, Any]] = {}
    for row in rows:
        scores.setdefault((row["role"], row["name"], row["num_epochs"]), []).append(row)
        if row["role"] == "technique":
            techniques[row["seed"]] = row
    summarized = []
    for (role, name, num_epochs), runs in scores.items():
        summary: dict[str, Any] = {
            "role": role,
            "name": name,
            "num_epochs": num_epochs,
        }
        for split in SPLITS:
            found = [run[f"miou_{split}"] for run in runs]
            gains = [techniques[run["seed"]][f"miou_{split}"] - run[f"miou_{split}"] for run in runs]
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
        names = [row["role"], row["name"], str(row["num_epochs"])]
        lines.append(f"| {' | '.join([*names, *found, gain])} |")
    return "\n".join(lines)


def _with_spread(row: Mapping[str, Any], what: str, sign: str = "") -> str:
    spread = row[f"{what}_spread"]
    return f"{row[f'{what}_mean']:{sign}.4f}" + ("" if spread is None else f" ({spread:.4f})")


if __name__ == "__main__":
    main()
