"""The loss of a student with a frozen teacher. Shapes: N images, C channels or classes, H rows, W columns."""

from pathlib import Path

import torch
from torch import Tensor, nn

from tasks.core.errors import ConfigError
from tasks.parts.data.dataset import Manifest
from tasks.parts.data.input_card import check_same_classes
from tasks.parts.networks.blocks import image_channels
from tasks.parts.networks.checkpoint import load_checkpoint
from tasks.parts.networks.foreign import logits_of
from tasks.parts.networks.model_card import read_card
from tasks.parts.training.config import DistillationConfig
from tasks.parts.training.losses import (
    FeatureHint,
    channel_wise_loss,
    class_weights,
    label_loss,
    soft_target_loss,
)


class DistillationObjective(nn.Module):
    """Weighted sum of the label, soft target, channel-wise and hint losses."""

    weights_C: Tensor

    def __init__(
        self,
        config: DistillationConfig,
        student: nn.Module,
        teacher: nn.Module | None,
        weights_C: Tensor,
        size: tuple[int, int] = (64, 64),
    ) -> None:
        """Watch the feature layers if the hint needs them, whose channels images of `size` (height, width) tell."""
        super().__init__()
        self.register_buffer("weights_C", weights_C, persistent=False)
        self._config = config
        self.hint: FeatureHint | None = None
        # In a tuple, so that the teacher is neither trained nor saved as a submodule.
        self._teacher = (teacher.eval().requires_grad_(False),) if teacher is not None else ()
        if self._teacher and config.hint_weight:
            self._student_feature = LayerOutput(student)
            self._teacher_feature = LayerOutput(self._teacher[0])
            self.hint = FeatureHint(_num_channels(student, size), _num_channels(self._teacher[0], size))

    def forward(self, network: nn.Module, images_NCHW: Tensor, masks_NHW: Tensor) -> Tensor:
        """Return the loss of one batch."""
        config = self._config
        all_logits = logits_of(network, images_NCHW)
        logits = all_logits[0]
        loss: Tensor = logits.new_zeros(())
        if config.label_weight:
            loss = loss + config.label_weight * label_loss(all_logits, masks_NHW, self.weights_C)
        if not self._teacher:
            return loss
        with torch.no_grad():
            teacher_logits = self._teacher[0].to(images_NCHW.device)(images_NCHW)
        if config.soft_target_weight:
            loss = loss + config.soft_target_weight * soft_target_loss(
                logits, teacher_logits, config.temperature
            )
        if config.channel_wise_weight:
            loss = loss + config.channel_wise_weight * channel_wise_loss(
                logits, teacher_logits, config.temperature
            )
        if self.hint is not None:
            loss = loss + config.hint_weight * self.hint(
                self._student_feature.value, self._teacher_feature.value
            )
        return loss


def build_objective(
    config: DistillationConfig, *, student: nn.Module, teacher: Path, manifest: Manifest, class_balance: float
) -> nn.Module:
    """Build the training objective of a student; the teacher is loaded only if a term needs it.

    Raises ArtifactError when the teacher has other classes than the data.
    """
    weights_C = class_weights(manifest.pixel_share["train"], class_balance)
    if not config.needs_teacher:
        return DistillationObjective(config, student, None, weights_C)
    check_same_classes(teacher, read_card(teacher).classes, manifest.classes, "train.teacher")
    size = manifest.height, manifest.width
    return DistillationObjective(config, student, load_checkpoint(teacher)[0], weights_C, size)


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
