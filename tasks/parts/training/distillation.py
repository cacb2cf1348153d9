"""The loss of a student with a frozen teacher. Shapes: N images, C channels or classes, H rows, W columns."""

from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tasks.core.errors import ConfigError
from tasks.parts.data.dataset import Manifest
from tasks.parts.data.input_card import check_same_classes
from tasks.parts.networks.blocks import image_channels
from tasks.parts.networks.checkpoint import load_checkpoint
from tasks.parts.networks.foreign import logits_of
from tasks.parts.networks.model_card import read_card
from tasks.parts.training.config import DistillationConfig, TrainerConfig
from tasks.parts.training.losses import (
    FeatureHint,
    LabelLoss,
    build_label_loss,
    channel_wise_loss,
    soft_target_loss,
)
from tasks.parts.training.module import Batch
from tasks.parts.training.recorded_teacher import RecordedTeacher


class DistillationObjective(nn.Module):
    """Weighted sum of the label, soft target, channel-wise and hint losses."""

    def __init__(
        self,
        config: DistillationConfig,
        student: nn.Module,
        teacher: "nn.Module | RecordedTeacher | None",
        label_loss: LabelLoss,
        size: tuple[int, int] = (64, 64),
    ) -> None:
        """Watch the feature layers if the hint needs them, whose channels images of `size` (height, width) tell."""
        super().__init__()
        self.label_loss = label_loss
        self._config = config
        self.hint: FeatureHint | None = None
        self._teacher: LiveTeacher | RecordedTeacher | None = (
            LiveTeacher(teacher, has_features=config.hint_weight > 0)
            if isinstance(teacher, nn.Module)
            else teacher
        )
        self.needs_labels = self._teacher is None
        if self._teacher is not None and config.hint_weight:
            self._student_feature = LayerOutput(student)
            self.hint = FeatureHint(_num_channels(student, size), self._teacher.num_feature_channels(size))

    def forward(self, network: nn.Module, batch: Batch) -> Tensor:
        """Return the loss of one batch."""
        config = self._config
        all_logits = logits_of(network, batch.images_NCHW)
        loss: Tensor = all_logits[0].new_zeros(())
        if config.label_weight:
            loss = loss + config.label_weight * self.label_loss(all_logits, batch.masks_NHW)
        if self._teacher is None:
            return loss
        teacher_NCHW, teacher_feature_NCHW = self._teacher(batch)
        logits = F.avg_pool2d(all_logits[0], self._teacher.stride, ceil_mode=True)
        if config.soft_target_weight:
            loss = loss + config.soft_target_weight * soft_target_loss(
                logits, teacher_NCHW, config.temperature
            )
        if config.channel_wise_weight:
            loss = loss + config.channel_wise_weight * channel_wise_loss(
                logits, teacher_NCHW, config.temperature
            )
        if self.hint is not None:
            loss = loss + config.hint_weight * self.hint(self._student_feature.value, teacher_feature_NCHW)
        return loss


class LiveTeacher:
    """A frozen network that answers in each step; no submodule, so that it is neither trained nor saved."""

    stride = 1

    def __init__(self, network: nn.Module, *, has_features: bool) -> None:
        self._network = network.eval().requires_grad_(False)
        self._feature = LayerOutput(network) if has_features else None

    def num_feature_channels(self, size: tuple[int, int]) -> int:
        """Return the number of channels of the feature map, which images of `size` tell."""
        return _num_channels(self._network, size)

    @torch.no_grad()
    def __call__(self, batch: Batch) -> tuple[Tensor, Tensor | None]:
        """Return logits_NCHW, and features_NCHW if they are wanted."""
        logits_NCHW = self._network.to(batch.images_NCHW.device)(batch.images_NCHW)
        return logits_NCHW, self._feature.value if self._feature else None


def build_objective(
    config: DistillationConfig,
    *,
    student: nn.Module,
    teacher: Path,
    manifest: Manifest,
    trainer: TrainerConfig,
) -> nn.Module:
    """Build the training objective of a student; the teacher is loaded only if a term needs it.

    `teacher` is a checkpoint, or the folder of record_teacher. Raises ArtifactError when the teacher has other
    classes than the data, ConfigError when it was recorded for other views than those of this training, or without
    the features that a hint needs.
    """
    label_loss = build_label_loss(trainer, manifest)
    if not config.needs_teacher:
        return DistillationObjective(config, student, None, label_loss)
    size = manifest.height, manifest.width
    if teacher.is_dir():
        recorded = RecordedTeacher(teacher, trainer, manifest, needs_features=config.hint_weight > 0)
        return DistillationObjective(config, student, recorded, label_loss, size)
    check_same_classes(teacher, read_card(teacher).classes, manifest.classes, "train.teacher")
    return DistillationObjective(config, student, load_checkpoint(teacher)[0], label_loss, size)


class LayerOutput:
    """Holds the output of a network's ``feature_layer`` in the latest forward pass, until `handle` is removed.

    Raises ConfigError if it has none.
    """

    value: Tensor

    def __init__(self, network: nn.Module) -> None:
        if network.feature_layer is None:
            raise ConfigError(
                f"distillation.hint_weight is above 0, but no module returns the map that {network.classifier_layer} "
                "reads, so there is nothing to watch. Set hint_weight to 0, or put a module (nn.Identity) before it."
            )
        feature_layer = network.get_submodule(str(network.feature_layer))
        self.handle = feature_layer.register_forward_hook(self._keep)

    def _keep(self, _module: nn.Module, _inputs: object, output: Tensor) -> None:
        self.value = output


@torch.no_grad()
def _num_channels(network: nn.Module, size: tuple[int, int]) -> int:
    """Run an image of `size` through the network to find the number of channels of its feature layer."""
    feature = LayerOutput(network)
    was_training = network.training
    network.eval()(torch.zeros(1, image_channels(network), *size))
    network.train(was_training)
    feature.handle.remove()
    if feature.value.ndim != 4:
        raise ConfigError(
            f"distillation.hint_weight is above 0, but {network.feature_layer} returns {list(feature.value.shape)}, "
            "expected maps [N, C, H, W]. Set it to 0."
        )
    return feature.value.shape[1]
