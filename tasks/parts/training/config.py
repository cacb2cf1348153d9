"""Configuration of a training, with or without a teacher, and the report of its results."""

from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated

from tasks.core.bounds import AtLeast, Between, LessThan, MoreThan
from tasks.core.errors import ConfigError


@dataclass(frozen=True)
class DistillationConfig:
    """Weights of the terms of the loss; a term of weight 0 is not computed."""

    label_weight: Annotated[float, AtLeast(0)]
    """Weight of the cross-entropy with the labels."""
    soft_target_weight: Annotated[float, AtLeast(0)]
    """Weight of the temperature-softened class probabilities per pixel (Hinton et al., 2015)."""
    channel_wise_weight: Annotated[float, AtLeast(0)]
    """Weight of the temperature-softened channel maps of the logits, CWD (Shu et al., 2021)."""
    hint_weight: Annotated[float, AtLeast(0)]
    """Weight of the feature map before the classifier through a trained 1x1 adapter (Romero et al., 2015)."""
    temperature: Annotated[float, MoreThan(0)]
    """Temperature that softens both distributions; higher: the teacher's small probabilities count more."""

    def __post_init__(self) -> None:
        if self.label_weight == 0 and not self.needs_teacher:
            raise ConfigError(
                "label_weight and all other weights are 0, expected one above 0. Set label_weight to 1, for example."
            )

    @property
    def needs_teacher(self) -> bool:
        """Whether any term needs the teacher."""
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
    """How training is distributed over devices."""

    auto = "auto"
    ddp = "ddp"


class Augmentation(StrEnum):
    """Preset of random changes of the training images; augmentation.py beside this file lists the steps of each."""

    none = "none"
    street = "street"
    medical = "medical"
    satellite = "satellite"


@dataclass(frozen=True)
class TrainerConfig:
    """Schedule, optimizer, augmentation and devices of one training."""

    seed: Annotated[int, AtLeast(0)]
    """Seed of the initial weights, the order of the images and the augmentation."""
    max_epochs: Annotated[int, AtLeast(1)]
    """Maximum number of passes over the training split; early stopping may end training before."""
    batch_size: Annotated[int, AtLeast(1)]
    """Images per step and device."""
    learning_rate: Annotated[float, MoreThan(0), LessThan(10)]
    """Peak of the one-cycle schedule (Smith and Topin, 2018), for AdamW."""
    weight_decay: Annotated[float, AtLeast(0)]
    """AdamW's decoupled weight decay."""
    batchnorm_l1: Annotated[float, AtLeast(0)]
    """Weight of the L1 norm of all BatchNorm scales in the loss, for prune.importance batchnorm_scale (Liu et al.,
    "Network Slimming", 2017, arXiv:1708.06519, equation 1, with 1e-5 to 1e-4); 0 disables it."""
    patience_epochs: Annotated[int, AtLeast(1)]
    """Epochs without a better validation mIoU after which the training stops."""
    class_balance: Annotated[float, Between(0, 1)]
    """Exponent p that raises the weight of rare classes: pixel share ** -p; 0 weighs all pixels equally, 1 all
    classes equally."""
    horizontal_flip: Annotated[float, Between(0, 1)]
    """Probability of mirroring an image; use 0 if left and right differ in meaning, as in digits."""
    brightness: Annotated[float, AtLeast(0), LessThan(1)]
    """Largest deviation from 1 of the random factor that scales the values of an image."""
    augmentation: Augmentation
    """Steps for a domain, in place of horizontal_flip and brightness; none: only those two."""
    min_scale: Annotated[float, Between(0.1, 10)] | None
    """Smallest random scale of an image before the size of the network is cut from it, or padded with ignored pixels;
    null: as in the preset of augmentation."""
    max_scale: Annotated[float, Between(0.1, 10)] | None
    """Largest random scale; null: as in the preset of augmentation."""
    precision: Precision
    """Number format of the training; bf16_mixed and fp16_mixed train with automatic mixed precision."""
    gradient_checkpointing: bool
    """Recompute activations in the backward pass: saves memory, takes about a third more time."""
    accelerator: Accelerator
    """Device to train on; auto takes a GPU if there is one."""
    num_devices: Annotated[int, AtLeast(1)]
    """Processes per node, one device each."""
    num_nodes: Annotated[int, AtLeast(1)]
    """Machines; each starts the same command with the environment of its cluster."""
    strategy: Strategy
    """How training is distributed; must be ddp when num_devices * num_nodes > 1."""
    num_workers: Annotated[int, AtLeast(0)]
    """Processes that load images; 0 loads in the training process."""

    def __post_init__(self) -> None:
        if self.strategy is Strategy.auto and self.num_devices * self.num_nodes > 1:
            raise ConfigError(
                f"strategy is auto with {self.num_devices} devices on {self.num_nodes} nodes, expected ddp."
            )
        if (self.min_scale is None) != (self.max_scale is None):
            missing = "min_scale" if self.min_scale is None else "max_scale"
            raise ConfigError(
                f"{missing} is null, and the other limit of the scale is not: set both or none."
            )
        if self.min_scale is not None and self.max_scale is not None and self.min_scale > self.max_scale:
            raise ConfigError(
                f"min_scale is {self.min_scale}, expected at most max_scale, which is {self.max_scale}."
            )

    @property
    def extra_packages(self) -> tuple[str, ...]:
        """Packages that shape the result of this training, and not of every training."""
        is_augmented = self.augmentation is not Augmentation.none or self.min_scale is not None
        return ("kornia",) if is_augmented else ()


@dataclass(frozen=True)
class PretrainedReport:
    """What was loaded from a file of pretrained weights."""

    num_loaded: int
    """Tensors of the network that were loaded from the file."""
    num_fresh: int
    """Tensors of the network that stayed random: those of a different classifier, or missing in the file."""
    num_skipped: int
    """Tensors of the file that the network does not have."""


@dataclass(frozen=True)
class TrainingReport:
    """Result of a training."""

    val_miou: float
    """mIoU of the kept epoch on the validation split."""
    best_epoch: int
    """The kept epoch, counted from 1."""
    num_epochs: int
    """Number of epochs that were run, over all resumed runs together."""
    num_parameters: int
    """Trainable weights of the network."""
    pretrained: PretrainedReport | None = None
    """What was loaded from the file of pretrained weights; None without a file."""
