"""Train a student from a frozen teacher: knowledge distillation."""

import logging
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path

from tasks.core.environment import versions
from tasks.core.errors import ArtifactError, ConfigError
from tasks.parts.networks.config import NetworkConfig
from tasks.parts.networks.foreign_code import network_facts
from tasks.parts.training.config import DistillationConfig, TrainerConfig, TrainingReport
from tasks.parts.training.pretrained import PretrainedConfig

logger = logging.getLogger(__name__)

CURVES = "history.csv"
"""The table that grows by a row per epoch; MLflow shows it while the stage runs."""


class Start(StrEnum):
    """The weights with which the student begins."""

    baseline = "baseline"
    """Those of the baseline, which the labels alone have trained: its training is continued with the teacher."""
    fresh = "fresh"
    """Random ones, or those of ``pretrained``."""


@dataclass(frozen=True)
class Config:
    """Which student, which losses, and how it is trained."""

    start: Start
    """The weights with which the student begins; baseline reaches the same accuracy in fewer epochs."""
    network: NetworkConfig
    """Architecture of the student, from conf/network/."""
    distillation: DistillationConfig
    """Terms of the loss."""
    trainer: TrainerConfig
    """Schedule, optimizer and devices."""
    pretrained: PretrainedConfig
    """Weights to start from, for start fresh."""

    def __post_init__(self) -> None:
        if self.start is Start.baseline and self.pretrained.file is not None:
            raise ConfigError(
                f"start is baseline and pretrained.file is {self.pretrained.file}, expected one of them. Set start "
                "to fresh, or pretrained.file and sha256 to null."
            )


def environment(cfg: Config) -> dict[str, str]:
    """Return what the output depends on besides inputs, configuration and code."""
    return versions("lightning", "torch", "transformers", *cfg.trainer.extra_packages) | network_facts(
        cfg.network
    )


def distill(cfg: Config, *, teacher: Path, start: Path, data: Path, out: Path) -> TrainingReport:
    """Train the student and write ``model.safetensors`` and ``history.csv``.

    ``start``, the baseline, is read only if the student begins with its weights.

    Raises ArtifactError when teacher, start and data differ in their classes, start is another network, or pretrained
    weights do not fit, TrainingDiverged when the loss is not finite.
    """
    import torch

    from tasks.parts.data.dataset import read_manifest
    from tasks.parts.data.input_card import check_same_classes
    from tasks.parts.networks.build import build_for_data
    from tasks.parts.networks.checkpoint import load_checkpoint, save_checkpoint
    from tasks.parts.networks.model_card import ModelCard
    from tasks.parts.training.distillation import build_objective
    from tasks.parts.training.loop import train_network
    from tasks.parts.training.pretrained import load_pretrained

    manifest = read_manifest(data)
    torch.manual_seed(cfg.trainer.seed)
    pretrained = None
    if cfg.start is Start.baseline:
        student, found = load_checkpoint(start)
        check_same_classes(start, found.classes, manifest.classes, "train.baseline")
        if found.network != cfg.network:
            raise ArtifactError(
                f"{start} is {found.network}, expected distill.network, which is {cfg.network}."
            )
    else:
        student = build_for_data(cfg.network, manifest)
        pretrained = load_pretrained(student, cfg.network.name, cfg.pretrained)
    objective = build_objective(
        cfg.distillation,
        student=student,
        teacher=teacher,
        manifest=manifest,
        trainer=cfg.trainer,
    )
    report = train_network(student, objective, data=data, config=cfg.trainer, out=out)
    card = ModelCard.for_data(cfg.network, manifest)
    save_checkpoint(out / "model.safetensors", student, card)
    logger.info(
        "%s: val %s %.4f at epoch %d", cfg.network.name, report.metric, report.val_score, report.best_epoch
    )
    return replace(report, pretrained=pretrained)
