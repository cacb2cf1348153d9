"""How a network is trained, by itself or by a teacher, and what came of it."""

import math
from dataclasses import dataclass
from enum import StrEnum

from tasks.core.errors import ConfigError


@dataclass(frozen=True)
class DistillationConfig:
    """Weights of the terms of the loss; a term of weight 0 is not computed."""

    label_weight: float
    """Cross-entropy with the labels."""
    soft_target_weight: float
    """Temperature-softened class probabilities per pixel (Hinton et al., 2015)."""
    channel_wise_weight: float
    """Temperature-softened channel maps of the logits, CWD (Shu et al., 2021)."""
    hint_weight: float
    """Feature map before the classifier through a trained 1x1 adapter (Romero et al., 2015)."""
    temperature: float
    """Softens both distributions; higher: the teacher's small probabilities count more."""

    def __post_init__(self) -> None:
        weights = {
            "label_weight": self.label_weight,
            "soft_target_weight": self.soft_target_weight,
            "channel_wise_weight": self.channel_wise_weight,
            "hint_weight": self.hint_weight,
        }
        for name, weight in weights.items():
            if not (math.isfinite(weight) and weight >= 0):
                raise ConfigError(f"distillation.{name} is {weight}, expected a number of at least 0.")
        if not any(weights.values()):
            raise ConfigError(
                "All weights of distillation are 0. Set distillation.label_weight to 1, for example."
            )
        if not (math.isfinite(self.temperature) and self.temperature > 0):
            raise ConfigError(f"distillation.temperature is {self.temperature}, expected a number over 0.")

    @property
    def needs_teacher(self) -> bool:
        """Whether any term looks at the teacher."""
        return self.soft_target_weight > 0 or self.channel_wise_weight > 0 or self.hint_weight > 0


class Precision(StrEnum):
    """Numeric precision of training."""

    fp32 = "fp32"
    bf16_mixed = "bf16_mixed"
    fp16_mixed = "fp16_mixed"


class Accelerator(StrEnum):
    """Where training runs."""

    auto = "auto"
    cpu = "cpu"
    gpu = "gpu"


class Strategy(StrEnum):
    """How training is spread over devices."""

    auto = "auto"
    ddp = "ddp"


@dataclass(frozen=True)
class TrainerConfig:
    """Schedule, optimizer, augmentation and devices of one training."""

    seed: int
    """Fixes initial weights, order of the images and augmentation."""
    max_epochs: int
    """Passes over the training split; fewer when early stopping ends it."""
    batch_size: int
    """Images per step and device."""
    learning_rate: float
    """Peak of the one-cycle schedule (Smith and Topin, 2018), for AdamW."""
    weight_decay: float
    """AdamW's decoupled weight decay."""
    batchnorm_l1: float
    """Weight of the L1 norm of all BatchNorm scales in the loss, for prune.importance batchnorm_scale (Liu et al.,
    "Network Slimming", 2017, arXiv:1708.06519, equation 1, with 1e-5 to 1e-4); 0 leaves it out."""
    patience_epochs: int
    """Stop after so many epochs without a better validation mIoU."""
    class_balance: float
    """A class counts by its pixel share to the power of minus this: 0 counts pixels, 1 counts classes."""
    horizontal_flip: float
    """Probability of mirroring an image; 0 where left and right differ in meaning, as in digits."""
    brightness: float
    """Images are scaled by a random factor in 1 ± this."""
    precision: Precision
    """bf16_mixed and fp16_mixed train with automatic mixed precision."""
    gradient_checkpointing: bool
    """Recompute activations in the backward pass: less memory, about a third more time."""
    accelerator: Accelerator
    """auto takes a GPU where there is one."""
    num_devices: int
    """Processes per node, one device each."""
    num_nodes: int
    """Machines; each starts the same command with the environment of its cluster."""
    strategy: Strategy
    """ddp when num_devices * num_nodes > 1."""
    num_workers: int
    """Processes that load images; 0 loads in the training process."""

    def __post_init__(self) -> None:
        for name in ("max_epochs", "batch_size", "patience_epochs", "num_devices", "num_nodes"):
            if getattr(self, name) < 1:
                raise ConfigError(f"trainer.{name} is {getattr(self, name)}, expected at least 1.")
        for name in ("seed", "num_workers", "weight_decay", "batchnorm_l1"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ConfigError(f"trainer.{name} is {getattr(self, name)}, expected at least 0.")
        if not 0 < self.learning_rate < 10:
            raise ConfigError(f"trainer.learning_rate is {self.learning_rate}, expected 0 < value < 10.")
        for name in ("horizontal_flip", "class_balance"):
            if not 0 <= getattr(self, name) <= 1:
                raise ConfigError(f"trainer.{name} is {getattr(self, name)}, expected 0 to 1.")
        if not 0 <= self.brightness < 1:
            raise ConfigError(f"trainer.brightness is {self.brightness}, expected 0 <= value < 1.")
        if self.strategy is Strategy.auto and self.num_devices * self.num_nodes > 1:
            raise ConfigError(
                f"trainer.strategy is auto with {self.num_devices} devices on {self.num_nodes} nodes. "
                "Set trainer.strategy=ddp."
            )


@dataclass(frozen=True)
class PretrainedReport:
    """What a training took from a file of pretrained weights."""

    num_loaded: int
    """Tensors of the network that the file gave."""
    num_fresh: int
    """Tensors of the network that stayed random: those of another classifier, or not in the file."""
    num_skipped: int
    """Tensors of the file that the network has no place for."""


@dataclass(frozen=True)
class TrainingReport:
    """What a training reached."""

    val_miou: float
    """mIoU of the kept epoch on the validation split."""
    best_epoch: int
    """The kept epoch, counted from 1."""
    num_epochs: int
    """Epochs that were run, by all resumed runs together."""
    num_parameters: int
    """Trainable weights of the network."""
    pretrained: PretrainedReport | None = None
    """What the file of pretrained weights gave; None where there was none."""
