"""Training objectives. Shapes: N images, C classes or channels, H rows, W columns."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tasks.core.errors import ConfigError
from tasks.parts.data.class_table import IGNORE_INDEX
from tasks.parts.data.dataset import Manifest
from tasks.parts.training.config import LossConfig, PixelLoss, TrainerConfig


def class_weights(pixel_share: Sequence[float], power: float) -> Tensor:
    """Return the weight of each class, share ** -power, scaled so that an average pixel weighs 1.

    A class without pixels gets the weight of the rarest class that has some.
    """
    shares_C = torch.tensor(pixel_share, dtype=torch.float64)
    if not shares_C.any():
        return torch.ones(len(pixel_share))
    weights_C = shares_C.clamp(min=float(shares_C[shares_C > 0].min())) ** -power
    return (weights_C * shares_C.sum() / (weights_C * shares_C).sum()).float()


class LabelLoss(nn.Module):
    """The loss of a network's logits, auxiliary ones included, against labels."""

    weights_C: Tensor

    def __init__(self, config: LossConfig, weights_C: Tensor) -> None:
        super().__init__()
        self.register_buffer("weights_C", weights_C, persistent=False)
        self._config = config

    def forward(self, logits: Sequence[Tensor], masks_NHW: Tensor) -> Tensor:
        """Return the loss of the first logits_NCHW, plus auxiliary_weight times that of each auxiliary one."""
        main, *auxiliary = (self._of(logits_NCHW.float(), masks_NHW) for logits_NCHW in logits)
        return main + self._config.auxiliary_weight * torch.stack(auxiliary).sum() if auxiliary else main

    def _of(self, logits_NCHW: Tensor, masks_NHW: Tensor) -> Tensor:
        config = self._config
        match config.pixel:
            case PixelLoss.cross_entropy:
                loss = segmentation_loss(logits_NCHW, masks_NHW, self.weights_C)
            case PixelLoss.ohem:
                loss = hardest_pixels_loss(logits_NCHW, masks_NHW, self.weights_C, share=config.ohem_share)
            case PixelLoss.focal:
                loss = focal_loss(logits_NCHW, masks_NHW, self.weights_C, gamma=config.focal_gamma)
        return loss + config.dice_weight * dice_loss(logits_NCHW, masks_NHW) if config.dice_weight else loss


def build_label_loss(trainer: TrainerConfig, manifest: Manifest) -> LabelLoss:
    """Return the loss that a training configures for a data set.

    Raises ConfigError when it has weights for another number of classes.
    """
    given, classes = trainer.loss.class_weights, manifest.classes
    if given is not None and len(given) != len(classes):
        raise ConfigError(
            f"trainer.loss.class_weights has {len(given)} weights, expected one for each of the {len(classes)} "
            f"classes: {', '.join(classes)}."
        )
    balanced_C = class_weights(manifest.pixel_share["train"], trainer.class_balance)
    return LabelLoss(trainer.loss, balanced_C if given is None else torch.tensor(given))


def segmentation_loss(logits_NCHW: Tensor, masks_NHW: Tensor, weights_C: Tensor | None = None) -> Tensor:
    """Return the mean cross-entropy over the labelled pixels; 0 when all pixels are ignored."""
    total = F.cross_entropy(
        logits_NCHW, masks_NHW, weight=weights_C, ignore_index=IGNORE_INDEX, reduction="sum"
    )
    return total / (masks_NHW != IGNORE_INDEX).sum().clamp(min=1)


def hardest_pixels_loss(
    logits_NCHW: Tensor, masks_NHW: Tensor, weights_C: Tensor | None = None, *, share: float
) -> Tensor:
    """Return the mean cross-entropy of the `share` of the labelled pixels of a batch whose loss is largest."""
    losses_NHW = _pixel_losses(logits_NCHW, masks_NHW, weights_C)
    num_hardest = max(1, int(share * int((masks_NHW != IGNORE_INDEX).sum())))
    return losses_NHW.flatten().topk(num_hardest).values.mean()


def focal_loss(
    logits_NCHW: Tensor, masks_NHW: Tensor, weights_C: Tensor | None = None, *, gamma: float
) -> Tensor:
    """Return the mean over the labelled pixels of (1 - p) ** gamma times the cross-entropy, p of the right class."""
    losses_NHW = _pixel_losses(logits_NCHW, masks_NHW)
    focused_NHW = -torch.expm1(-losses_NHW)  # 1 - p, which is 0 where the pixel is ignored
    weighted_NHW = losses_NHW if weights_C is None else _pixel_losses(logits_NCHW, masks_NHW, weights_C)
    total = (focused_NHW.clamp(min=1e-6) ** gamma * weighted_NHW).sum()
    return total / (masks_NHW != IGNORE_INDEX).sum().clamp(min=1)


def dice_loss(logits_NCHW: Tensor, masks_NHW: Tensor) -> Tensor:
    """Return 1 minus the mean Dice coefficient of the classes that the labels of a batch have.

    2 sum(p g) / (sum(p^2) + sum(g^2)) over the labelled pixels, p the probability of a class and g 1 where it is the
    label (Milletari et al., 2016, arXiv:1606.04797, section 3). 0 when all pixels are ignored.
    """
    is_labelled_N1HW = (masks_NHW != IGNORE_INDEX).unsqueeze(1)
    classes_N1HW = torch.arange(logits_NCHW.shape[1], device=masks_NHW.device).view(1, -1, 1, 1)
    truth_NCHW = (masks_NHW.unsqueeze(1) == classes_N1HW).to(logits_NCHW.dtype)
    found_NCHW = logits_NCHW.softmax(dim=1) * is_labelled_N1HW
    shared_C, sizes_C = ((found_NCHW * truth_NCHW).sum((0, 2, 3)), truth_NCHW.sum((0, 2, 3)))
    dice_C = 2 * shared_C / (found_NCHW.square().sum((0, 2, 3)) + sizes_C).clamp(min=1e-6)
    is_present_C = sizes_C > 0
    return ((1 - dice_C) * is_present_C).sum() / is_present_C.sum().clamp(min=1)


def _pixel_losses(logits_NCHW: Tensor, masks_NHW: Tensor, weights_C: Tensor | None = None) -> Tensor:
    return F.cross_entropy(
        logits_NCHW, masks_NHW, weight=weights_C, ignore_index=IGNORE_INDEX, reduction="none"
    )


def soft_target_loss(student_NCHW: Tensor, teacher_NCHW: Tensor, temperature: float) -> Tensor:
    """Return KL(teacher || student) per pixel of the softened classes, times temperature squared.

    Hinton, Vinyals and Dean, "Distilling the Knowledge in a Neural Network", 2015, section 2.
    """
    student = F.log_softmax(student_NCHW.float() / temperature, dim=1)
    teacher = F.log_softmax(teacher_NCHW.float() / temperature, dim=1)
    divergence_NHW = F.kl_div(student, teacher, reduction="none", log_target=True).sum(dim=1)
    return divergence_NHW.mean() * temperature**2


def channel_wise_loss(student_NCHW: Tensor, teacher_NCHW: Tensor, temperature: float) -> Tensor:
    """Return KL(teacher || student) per channel of maps softened over all pixels, times temperature squared.

    Shu et al., "Channel-wise Knowledge Distillation for Dense Prediction", ICCV 2021, equations 3 and 4. Computed in
    float32: the probabilities of thousands of pixels are too small for bfloat16.
    """
    student = F.log_softmax(student_NCHW.float().flatten(2) / temperature, dim=2)
    teacher = F.log_softmax(teacher_NCHW.float().flatten(2) / temperature, dim=2)
    divergence_NC = F.kl_div(student, teacher, reduction="none", log_target=True).sum(dim=2)
    return divergence_NC.mean() * temperature**2


class FeatureHint(nn.Module):
    """Mean squared distance of a student's feature map to the teacher's, through a trained 1x1 adapter.

    Romero et al., "FitNets: Hints for Thin Deep Nets", ICLR 2015, section 2.2. The teacher's map is
    normalised per channel, so that its scale does not affect the loss, and resized to the student's.
    """

    def __init__(self, student_channels: int, teacher_channels: int) -> None:
        super().__init__()
        self.adapter = nn.Conv2d(student_channels, teacher_channels, 1)

    def forward(self, student_NCHW: Tensor, teacher_NCHW: Tensor) -> Tensor:
        """Return the loss of two maps of any sizes."""
        target = F.instance_norm(teacher_NCHW.float())
        target = F.interpolate(target, size=student_NCHW.shape[2:], mode="bilinear", align_corners=False)
        return F.mse_loss(self.adapter(student_NCHW).float(), target)
