"""Configuration of a training, with or without a teacher, and the report of its results."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from enum import StrEnum
from typing import Annotated, Any

from tasks.core.bounds import AtLeast, AtMost, Between, LessThan, MinItems, MoreThan
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


class MemoryFormat(StrEnum):
    """How maps [N, C, H, W] lie in memory."""

    auto = "auto"
    """channels_last, except for networks of the user's own code, which may ask for views of contiguous maps."""
    channels_last = "channels_last"
    contiguous = "contiguous"


class Augmentation(StrEnum):
    """Preset of random changes of the training images; augmentation.py beside this file lists the steps of each."""

    none = "none"
    street = "street"
    medical = "medical"
    satellite = "satellite"


class Optimizer(StrEnum):
    """How weights follow their gradients."""

    adamw = "adamw"
    """Loshchilov and Hutter, "Decoupled Weight Decay Regularization", 2019, arXiv:1711.05101."""
    sgd = "sgd"
    """With momentum, and the weight decay as a part of the gradient."""


class Schedule(StrEnum):
    """How the learning rate changes from step to step, after it has risen to its peak."""

    one_cycle = "one_cycle"
    """It rises from a 25th of the peak and falls along half a cosine (Smith and Topin, 2018, arXiv:1708.07120)."""
    cosine = "cosine"
    """It rises linearly and falls along half a cosine to 0 (Loshchilov and Hutter, 2017, arXiv:1608.03983)."""
    poly = "poly"
    """It rises linearly and falls with (1 - share of the steps) ** 0.9 (Chen et al., 2017, arXiv:1606.00915)."""


class PixelLoss(StrEnum):
    """The loss of one labelled pixel, and how those of all pixels become one."""

    cross_entropy = "cross_entropy"
    """The mean cross-entropy."""
    ohem = "ohem"
    """The mean cross-entropy of the hardest pixels (Wu, Shen and van den Hengel, 2016, arXiv:1604.04339)."""
    focal = "focal"
    """The mean of (1 - p) ** gamma times the cross-entropy, p of the right class (Lin et al., 2017,
    arXiv:1708.02002)."""


@dataclass(frozen=True)
class LossConfig:
    """The loss of logits against labels."""

    pixel: PixelLoss
    """Loss per pixel."""
    ohem_share: Annotated[float, MoreThan(0), AtMost(1)]
    """Share of the labelled pixels of a batch that count for ohem, those with the largest loss."""
    focal_gamma: Annotated[float, AtLeast(0)]
    """Exponent of focal; higher: pixels that are right already count less."""
    dice_weight: Annotated[float, AtLeast(0)]
    """Weight of the Dice loss, the mean over the classes of a batch (Milletari et al., 2016, arXiv:1606.04797)."""
    auxiliary_weight: Annotated[float, AtLeast(0)]
    """Weight of the loss of each auxiliary output, for networks that have some (Zhao et al., 2017, arXiv:1612.01105,
    section 3.3)."""
    class_weights: Annotated[list[Annotated[float, AtLeast(0)]], MinItems(2)] | None
    """Weight of each class, in the order of the classes; null: by trainer.class_balance."""


@dataclass(frozen=True)
class ViewsConfig:
    """What a training makes of its images: the view of an image depends on these values and its number alone."""

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
    augmentation_seed: Annotated[int, AtLeast(0)]
    """Seed of the augmentation alone, so that trainings with several seeds can share a recorded teacher."""
    num_views: Annotated[int, AtLeast(1)] | None
    """Different views of an image: each time that it is shown the next, and after the last the first again. null:
    each time another one. A recorded teacher (record_teacher) has seen these views, so it needs a number."""

    def __post_init__(self) -> None:
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
        """Packages that shape these views, and not all."""
        is_augmented = self.augmentation is not Augmentation.none or self.min_scale is not None
        return ("kornia",) if is_augmented else ()


def views_of(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return those values of a training's section on which its views depend."""
    return {field.name: values[field.name] for field in fields(ViewsConfig)}


def check_views(recorded: Mapping[str, Any], trainer: Mapping[str, Any], name: str = "trainer") -> None:
    """Raise ConfigError unless a training, given as its section of this name, shows the views that were recorded."""
    for key, wanted in views_of(trainer).items():
        if recorded.get(key) != wanted:
            raise ConfigError(
                f"{name}.{key} is {wanted}, and the teacher is recorded with {recorded.get(key)}: it would answer to "
                f"other images than the student sees. Set record_teacher.{key} instead, which gives all trainings "
                "that learn from it this one value, or steps.record_teacher=false."
            )


@dataclass(frozen=True)
class TrainerConfig(ViewsConfig):
    """Schedule, optimizer, loss, augmentation and devices of one training."""

    seed: Annotated[int, AtLeast(0)]
    """Seed of the initial weights and the order of the images."""
    max_epochs: Annotated[int, AtLeast(1)]
    """Maximum number of passes over the training split; max_steps and early stopping may end training before."""
    max_steps: Annotated[int, AtLeast(1)] | None
    """Maximum number of optimizer steps; null: max_epochs alone counts."""
    batch_size: Annotated[int, AtLeast(1)]
    """Images per batch and device."""
    accumulate: Annotated[int, AtLeast(1)]
    """Batches whose gradients are added up for one optimizer step; the last step of an epoch may have fewer."""
    optimizer: Optimizer
    """How weights follow their gradients."""
    learning_rate: Annotated[float, MoreThan(0), LessThan(10)]
    """Peak of the schedule; for AdamW about a tenth of what SGD needs."""
    momentum: Annotated[float, AtLeast(0), LessThan(1)]
    """SGD's momentum; AdamW has its own (0.9 and 0.999)."""
    schedule: Schedule
    """How the learning rate changes from step to step."""
    warm_up_share: Annotated[float, MoreThan(0), LessThan(1)]
    """Share of the steps in which the learning rate rises to its peak."""
    layer_rates: dict[str, Annotated[float, AtLeast(0)]]
    """Factor on the learning rate by the beginning of a module's name, for a backbone with pretrained weights; the
    longest name that fits counts. 0 freezes the layers, statistics of BatchNorm included."""
    weight_decay: Annotated[float, AtLeast(0)]
    """Weight decay, decoupled from the gradient for AdamW."""
    clip_norm: Annotated[float, MoreThan(0)] | None
    """Largest L2 norm of all gradients together, to which they are scaled down; null: gradients stay as they are."""
    ema_decay: Annotated[float, Between(0, 0.999999)]
    """Decay of the exponential moving average of the weights, which is what is judged and kept; 0: the weights
    themselves. It starts lower: min(decay, (1 + step) / (10 + step))."""
    loss: LossConfig
    """The loss of logits against labels."""
    batchnorm_l1: Annotated[float, AtLeast(0)]
    """Weight of the L1 norm of all BatchNorm scales in the loss, for prune.importance batchnorm_scale (Liu et al.,
    "Network Slimming", 2017, arXiv:1708.06519, equation 1, with 1e-5 to 1e-4); 0 disables it."""
    validate_every_epochs: Annotated[int, AtLeast(1)]
    """Epochs from one validation to the next; the last epoch is always validated."""
    patience_epochs: Annotated[int, AtLeast(1)] | None
    """Validations without a better score after which the training stops; null: never. A training that ends early ends
    before its learning rate has fallen."""
    class_balance: Annotated[float, Between(0, 1)]
    """Exponent p that raises the weight of rare classes: pixel share ** -p; 0 weighs all pixels equally, 1 all
    classes equally."""
    precision: Precision
    """Number format of the training; bf16_mixed and fp16_mixed train with automatic mixed precision."""
    memory_format: MemoryFormat
    """How maps lie in memory; changes speed, and results by rounding only."""
    activation_checkpoints: list[str]
    """Modules whose activations are computed again in the backward pass in place of being kept, which saves memory
    and takes up to a third more time: names or patterns such as "stages.*"; ["*"]: each child of the network."""
    activation_offload: list[str]
    """Modules whose activations wait for the backward pass in the memory of the CPU, names or patterns as above; on a
    GPU only."""
    accelerator: Accelerator
    """Device to train on; auto takes a GPU if there is one."""
    num_devices: Annotated[int, AtLeast(1)]
    """Processes per node, one device each."""
    num_nodes: Annotated[int, AtLeast(1)]
    """Machines; each starts the same command with the environment of its cluster."""
    strategy: Strategy
    """How training is distributed; must be ddp when num_devices * num_nodes > 1."""
    num_workers: Annotated[int, AtLeast(0)] | None
    """Processes that load images; 0 loads in the training process; null: as many as loading and training a batch,
    measured before the first step, ask for, and none on the CPU, which has no core to give away."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.strategy is Strategy.auto and self.num_devices * self.num_nodes > 1:
            raise ConfigError(
                f"strategy is auto with {self.num_devices} devices on {self.num_nodes} nodes, expected ddp."
            )


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

    metric: str
    """Metric of the score: mIoU, or the user's own (model.metric)."""
    val_score: float
    """Score of the kept epoch on the validation split."""
    best_epoch: int
    """The kept epoch, counted from 1."""
    num_epochs: int
    """Number of epochs that were run, over all resumed runs together."""
    num_parameters: int
    """Trainable weights of the network."""
    pretrained: PretrainedReport | None = None
    """What was loaded from the file of pretrained weights; None without a file."""
