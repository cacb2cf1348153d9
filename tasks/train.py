"""Train a network on labelled images: the teacher, and the baseline that a distilled student has to beat."""

import logging
from dataclasses import dataclass, replace
from pathlib import Path

from tasks.core.environment import versions
from tasks.parts.networks.config import NetworkConfig
from tasks.parts.networks.foreign_code import network_facts
from tasks.parts.training.config import TrainerConfig, TrainingReport
from tasks.parts.training.pretrained import PretrainedConfig

logger = logging.getLogger(__name__)

CURVES = "history.csv"
"""The table that grows by a row per epoch; MLflow shows it while the stage runs."""


@dataclass(frozen=True)
class Config:
    """Which network, and how it is trained."""

    network: NetworkConfig
    """Architecture, from conf/network/."""
    trainer: TrainerConfig
    """Schedule, optimizer and devices."""
    pretrained: PretrainedConfig
    """Weights to start from."""


def environment(cfg: Config) -> dict[str, str]:
    """Return what the output depends on besides inputs, configuration and code."""
    return versions("lightning", "torch", "transformers", *cfg.trainer.extra_packages) | network_facts(
        cfg.network
    )


def train(cfg: Config, *, data: Path, out: Path) -> TrainingReport:
    """Train from random or pretrained weights and write ``model.safetensors`` and ``history.csv``.

    Raises DataError for an unusable data set, ArtifactError for pretrained weights that do not fit,
    TrainingDiverged when the loss is not finite.
    """
    import torch

    from tasks.parts.data.dataset import read_manifest
    from tasks.parts.networks.build import build_for_data
    from tasks.parts.networks.checkpoint import save_checkpoint
    from tasks.parts.networks.model_card import ModelCard
    from tasks.parts.training.loop import train_network
    from tasks.parts.training.losses import build_label_loss
    from tasks.parts.training.module import LabelObjective
    from tasks.parts.training.pretrained import load_pretrained

    manifest = read_manifest(data)
    torch.manual_seed(cfg.trainer.seed)
    network = build_for_data(cfg.network, manifest)
    pretrained = load_pretrained(network, cfg.network.name, cfg.pretrained)
    objective = LabelObjective(build_label_loss(cfg.trainer, manifest))
    report = train_network(network, objective, data=data, config=cfg.trainer, out=out)
    card = ModelCard.for_data(cfg.network, manifest)
    save_checkpoint(out / "model.safetensors", network, card)
    logger.info(
        "%s: val %s %.4f at epoch %d", cfg.network.name, report.metric, report.val_score, report.best_epoch
    )
    return replace(report, pretrained=pretrained)
