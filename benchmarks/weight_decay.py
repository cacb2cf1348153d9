"""Does the student lose accuracy because weight decay leaves norms and biases out?

``python -m benchmarks.weight_decay`` trains the network of ``train.baseline`` as params.yaml says, from several
seeds: with decay of every parameter, and as tasks/parts/training/optimization.py decides. The two take turns. Prints
a line for each seed with the mIoU of the kept epoch on the validation split and on the test split, and writes
``benchmarks/results/weight_decay.json`` training by training, so that a second start continues.
"""

import argparse
import json
import logging
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from statistics import mean
from typing import Any
from unittest import mock

import torch
from torch import nn

from benchmarks.gpu_cells import REPOSITORY, stage_config
from benchmarks.records import open_record
from benchmarks.training_cells import new_training
from tasks.core.environment import versions
from tasks.core.execute import ARTIFACTS
from tasks.parts.data.dataset import open_split, read_manifest
from tasks.parts.engines.machine import read_cpu_model
from tasks.parts.networks.model_card import ModelCard
from tasks.parts.training import module, optimization
from tasks.parts.training.config import TrainerConfig
from tasks.parts.training.loop import train_network
from tasks.parts.training.predict import measure_miou
from tasks.prepare_data import prepare_data

RESULTS = Path(__file__).parent / "results" / "weight_decay.json"
WORKSPACE = ARTIFACTS / "benchmarks" / "weight_decay"
ALL, LAYERS = "all parameters", "weights of layers"
SPLITS = ("val", "test")


def main() -> None:
    """Train what the record lacks, and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--workspace", type=Path, default=WORKSPACE)
    options = parser.parse_args()
    logging.basicConfig(level=logging.WARNING)
    data = options.workspace / "dataset"
    if not data.is_dir():
        cfg = stage_config("prepare_data")
        prepare_data(cfg, root=REPOSITORY / cfg.root, out=options.workspace)
    conditions = {"cpu_model": read_cpu_model(), "versions": versions("torch", "lightning")}
    record = open_record(options.results, conditions, ["trainings"])
    for seed in options.seeds:
        for decayed in (ALL, LAYERS):
            if (seed, decayed) not in {(row["seed"], row["decayed"]) for row in record["trainings"]}:
                record["trainings"].append({"seed": seed, "decayed": decayed, **train(seed, decayed, data)})
                options.results.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    print("\n".join(lines(record)))


def train(seed: int, decayed: str, data: Path) -> dict[str, Any]:
    """Return the mIoU of each split, and the epoch that was kept."""
    cfg = stage_config("train.baseline")
    trainer = replace(cfg.trainer, seed=seed)
    network, objective = new_training(cfg.network, trainer, data)
    groups = groups_with_decay_of_all if decayed == ALL else optimization.parameter_groups
    with (
        tempfile.TemporaryDirectory() as folder,
        mock.patch.object(module, "parameter_groups", groups),
    ):
        report = train_network(network, objective, data=data, config=trainer, out=Path(folder))
    card = ModelCard.for_data(cfg.network, read_manifest(data))
    scores = {
        split: round(measure_miou(network, *open_split(data, split), card, batch_size=32), 4)
        for split in SPLITS
    }
    return {"best_epoch": report.best_epoch, "miou": scores}


def groups_with_decay_of_all(
    network: nn.Module, objective: nn.Module, config: TrainerConfig
) -> list[dict[str, Any]]:
    """Return the groups of a training in which each parameter decays."""
    groups = optimization.parameter_groups(network, objective, config)
    return [group | {"weight_decay": config.weight_decay} for group in groups]


def lines(record: Mapping[str, Any]) -> Iterator[str]:
    """Yield a line for each seed, and the means."""
    rows = {(row["seed"], row["decayed"]): row["miou"] for row in record["trainings"]}
    for split in SPLITS:
        for seed in sorted({seed for seed, _ in rows}):
            yield f"{split:5} seed {seed}: " + ", ".join(
                f"{decayed} {rows[seed, decayed][split]:.4f}" for decayed in (ALL, LAYERS)
            )
        means = {
            decayed: mean(miou[split] for (_, found), miou in rows.items() if found == decayed)
            for decayed in (ALL, LAYERS)
        }
        yield f"{split:5} mean:   " + ", ".join(f"{decayed} {value:.4f}" for decayed, value in means.items())


if __name__ == "__main__":
    torch.set_num_threads(2)
    main()
