"""Training objectives. Shapes: N images, C classes or channels, H rows, W columns."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tasks.parts.data.class_table import IGNORE_INDEX

AUXILIARY_WEIGHT = 0.4
"""Of auxiliary logits: Zhao et al., "Pyramid Scene Parsing Network", 2017, arXiv:1612.01105, section 3.3."""


def class_weights(pixel_share: Sequence[float], power: float) -> Tensor:
    """Return the weight of each class, share ** -power, scaled so that an average pixel weighs 1.

    A class without pixels gets the weight of the rarest class that has some.
    """
    shares_C = torch.tensor(pixel_share, dtype=torch.float64)
    if not shares_C.any():
        return torch.ones(len(pixel_share))
    weights_C = shares_C.clamp(min=float(shares_C[shares_C > 0].min())) ** -power
    return (weights_C * shares_C.sum() / (weights_C * shares_C).sum()).float()


def segmentation_loss(logits_NCHW: Tensor, masks_NHW: Tensor, weights_C: Tensor | None = None) -> Tensor:
    """Return the mean cross-entropy over the labelled pixels; 0 when all pixels are ignored."""
    total = F.cross_entropy(
        logits_NCHW, masks_NHW, weight=weights_C, ignore_index=IGNORE_INDEX, reduction="sum"
    )
    return total / (masks_NHW != IGNORE_INDEX).sum().clamp(min=1)


def label_loss(logits: Sequence[Tensor], masks_NHW: Tensor, weights_C: Tensor | None = None) -> Tensor:
    """Return the loss of the first logits_NCHW, plus AUXILIARY_WEIGHT times that of each auxiliary one."""
    main, *auxiliary = (segmentation_loss(logits_NCHW, masks_NHW, weights_C) for logits_NCHW in logits)
    return main + AUXILIARY_WEIGHT * torch.stack(auxiliary).sum() if auxiliary else main


def soft_target_loss(student_NCHW: Tensor, teacher_NCHW: Tensor, temperature: float) -> Tensor:
    """Return KL(teacher || student) per pixel of the softened classes, times temperature squared.

    Hinton, Vinyals and Dean, "Distilling the Knowledge in a Neural Network", 2015, section 2.
    """
    student = F.log_softmax(student_NCHW / temperature, dim=1)
    teacher = F.log_softmax(teacher_NCHW / temperature, dim=1)
    divergence_NHW = F.kl_div(student, teacher, reduction="none", log_target=True).sum(dim=1)
    return divergence_NHW.mean() * temperature**2


def channel_wise_loss(student_NCHW: Tensor, teacher_NCHW: Tensor, temperature: float) -> Tensor:
    """Return KL(teacher || student) per channel of maps softened over all pixels, times temperature squared.

    Shu et al., "Channel-wise Knowledge Distillation for Dense Prediction", ICCV 2021, equations 3 and 4.
    """
    student = F.log_softmax(student_NCHW.flatten(2) / temperature, dim=2)
    teacher = F.log_softmax(teacher_NCHW.flatten(2) / temperature, dim=2)
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
        target = F.instance_norm(teacher_NCHW)
        target = F.interpolate(target, size=student_NCHW.shape[2:], mode="bilinear", align_corners=False)
        return F.mse_loss(self.adapter(student_NCHW), target)
