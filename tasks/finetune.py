"""Recover the accuracy of a pruned network by training it further, with or without the teacher."""

import logging
from dataclasses import dataclass
from pathlib import Path

from tasks.core.environment import versions
from tasks.parts.training.config import DistillationConfig, TrainerConfig, TrainingReport

logger = logging.getLogger(__name__)

CURVES = "history.csv"
"""The table that grows by a row per epoch; MLflow shows it while the stage runs."""


@dataclass(frozen=True)
class Config:
    """Which losses, and how the network is trained further."""

    distillation: DistillationConfig
    """Terms of the loss; label_weight alone fine-tunes without the teacher."""
    trainer: TrainerConfig
    """Schedule, optimizer and devices."""


def environment(cfg: Config) -> dict[str, str]:
    """Return what the output depends on besides inputs, configuration and code."""
    return versions("lightning", "torch", "transformers", *cfg.trainer.extra_packages)


def finetune(cfg: Config, *, checkpoint: Path, teacher: Path, data: Path, out: Path) -> TrainingReport:
    """Train a checkpoint further and write ``model.safetensors`` and ``history.csv``.

    Weights that are exactly zero stay zero.

    Raises ArtifactError when checkpoint, teacher and data differ in their classes, TrainingDiverged when the
    loss is not finite.
    """
    import torch

    from tasks.parts.data.dataset import read_manifest
    from tasks.parts.data.input_card import check_same_classes
    from tasks.parts.networks.checkpoint import load_checkpoint, save_checkpoint
    from tasks.parts.networks.zeros import keep_zeros
    from tasks.parts.training.distillation import build_objective
    from tasks.parts.training.loop import train_network

    manifest = read_manifest(data)
    network, card = load_checkpoint(checkpoint)
    check_same_classes(checkpoint, card.classes, manifest.classes, "distill")
    keep_zeros(network)
    torch.manual_seed(cfg.trainer.seed)  # for the initial weights of the hint's adapter
    objective = build_objective(
        cfg.distillation,
        student=network,
        teacher=teacher,
        manifest=manifest,
        trainer=cfg.trainer,
    )
    report = train_network(network, objective, data=data, config=cfg.trainer, out=out)
    save_checkpoint(out / "model.safetensors", network, card)
    logger.info(
        "%s: val %s %.4f at epoch %d", card.network.name, report.metric, report.val_score, report.best_epoch
    )
    return report
