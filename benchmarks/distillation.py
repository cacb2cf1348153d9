"""Compare distillation with training on labels alone, for several seeds and at equal time.

``python -m benchmarks.distillation [--seeds 3]`` after a run of the pipeline, which made data and teacher. Every
method trains the configured student from random weights; only seed, loss weights and epochs differ. A step with the
teacher takes longer, so the fair baseline is ``labels, longer``: labels alone for as many epochs as fit into the time
of the first method with the first seed. mIoU is measured on the test split in eager PyTorch. Finished trainings are
kept under ``artifacts/benchmarks``. Prints a table and writes ``benchmarks/results/distillation.json``.
"""

import argparse
import json
import logging
import platform
import shutil
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from datetime import date
from importlib.metadata import version
from pathlib import Path

from benchmarks.runtimes import DATA, stage_config
from tasks.build_engine import build_engine
from tasks.core.execute import ARTIFACTS
from tasks.distill import distill
from tasks.parts.data.comparison import RESULTS_FILE, read_results
from tasks.parts.data.dataset import calibration_images
from tasks.parts.engines.machine import read_cpu_model
from tasks.train import train
from tasks.validate import validate

RESULTS = Path(__file__).parent / "results" / "distillation.json"
WORKSPACE = ARTIFACTS / "benchmarks" / "distillation"
TEACHER = ARTIFACTS / "train" / "teacher" / "model.safetensors"

METHODS: Mapping[str, Mapping[str, float]] = {
    "channel-wise": {"channel_wise_weight": 1.0, "temperature": 4.0},
    "soft targets": {"soft_target_weight": 1.0, "temperature": 2.0},
    "soft targets, temperature 1": {"soft_target_weight": 1.0, "temperature": 1.0},
    "hints": {"hint_weight": 0.5, "temperature": 1.0},
}
"""Loss weights in addition to that of the labels (1); terms that are not listed are 0."""
LABELS, LONGER = "labels", "labels, longer"


def main() -> None:
    """Run the missing trainings, print and write the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=3, help="trainings of each method")
    parser.add_argument("--methods", nargs="+", default=list(METHODS), choices=list(METHODS))
    options = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    found: dict[str, list[dict[str, float]]] = {}
    for seed in range(options.seeds):
        plain = found.setdefault(LABELS, [])
        plain.append(trained(LABELS, seed, lambda out, seed=seed: train_on_labels(seed, out)))
        for method in options.methods:
            found.setdefault(method, []).append(
                trained(
                    method, seed, lambda out, seed=seed, method=method: train_with_teacher(method, seed, out)
                )
            )
    factor = found[options.methods[0]][0]["seconds"] / found[LABELS][0]["seconds"]
    found[LONGER] = [
        trained(LONGER, seed, lambda out, seed=seed: train_on_labels(seed, out, factor))
        for seed in range(options.seeds)
    ]
    rows = [summary(method, runs, found[LABELS]) for method, runs in found.items()]
    for row in rows:
        print(
            f"{row['method']:>28}  mIoU {row['miou_mean']:.4f} (+-{row['miou_spread']:.4f})  "
            f"gain {row['gain_mean']:+.4f} (+-{row['gain_spread']:.4f})  {row['epochs']:.0f} epochs, "
            f"{row['seconds']:.0f} s"
        )
    record = {
        "date": date.today().isoformat(),
        "cpu_model": read_cpu_model(),
        "python": platform.python_version(),
        "torch": version("torch"),
        "rows": rows,
    }
    RESULTS.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")


def trained(method: str, seed: int, train_into: Callable[[Path], int]) -> dict[str, float]:
    """Train into a folder unless its result is there, and return mIoU, epochs and seconds."""
    folder = WORKSPACE / f"{method.replace(', ', '_').replace(' ', '_')}_{seed}"
    result = folder / "result.json"
    if not result.is_file():
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        print(f"{method}, seed {seed}", flush=True)
        started = time.monotonic()
        num_epochs = train_into(folder)
        seconds = time.monotonic() - started
        content = {"miou": measured_miou(folder), "epochs": num_epochs, "seconds": round(seconds, 1)}
        result.write_text(json.dumps(content), encoding="utf-8")
    content = json.loads(result.read_text(encoding="utf-8"))
    print(f"{method}, seed {seed}: mIoU {content['miou']:.4f}", flush=True)
    return content


def train_on_labels(seed: int, out: Path, factor: float = 1.0) -> int:
    """Train the student on labels for `factor` times the configured epochs; return their number."""
    cfg = stage_config("train.baseline")
    num_epochs = max(cfg.trainer.max_epochs, round(cfg.trainer.max_epochs * factor))
    trainer = replace(cfg.trainer, seed=seed, max_epochs=num_epochs)
    train(replace(cfg, trainer=trainer), data=DATA, out=out)
    return num_epochs


def train_with_teacher(method: str, seed: int, out: Path) -> int:
    """Distil the student; return the number of epochs."""
    cfg = stage_config("distill")
    off = {"soft_target_weight": 0.0, "channel_wise_weight": 0.0, "hint_weight": 0.0}
    losses = replace(cfg.distillation, label_weight=1.0, **(off | METHODS[method]))
    trainer = replace(cfg.trainer, seed=seed)
    distill(replace(cfg, distillation=losses, trainer=trainer), teacher=TEACHER, data=DATA, out=out)
    return int(trainer.max_epochs)


def measured_miou(folder: Path) -> float:
    """Measure a trained student on the unseen split as the pipeline does."""
    build_engine(
        stage_config("build_engine.distilled.cpu_torch"),
        model=folder / "model.safetensors",
        images=calibration_images(DATA),
        out=folder,
    )
    report = validate(stage_config("validate"), engine=folder / "engine", data=DATA, out=folder)
    return read_results(folder / RESULTS_FILE, report.unseen_split).score


def summary(
    method: str, runs: list[dict[str, float]], plain: list[dict[str, float]]
) -> dict[str, float | str]:
    """Return mean and standard deviation over the seeds; gains are computed per seed, seconds are of the first."""
    mious = [run["miou"] for run in runs]
    gains = [run["miou"] - other["miou"] for run, other in zip(runs, plain, strict=True)]
    return {
        "method": method,
        "miou_mean": round(statistics.mean(mious), 4),
        "miou_spread": round(statistics.stdev(mious), 4) if len(mious) > 1 else 0.0,
        "gain_mean": round(statistics.mean(gains), 4),
        "gain_spread": round(statistics.stdev(gains), 4) if len(gains) > 1 else 0.0,
        "num_seeds": len(runs),
        "epochs": runs[0]["epochs"],
        "seconds": runs[0]["seconds"],
    }


if __name__ == "__main__":
    main()
