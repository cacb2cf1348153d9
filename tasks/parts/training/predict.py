"""Run a torch network over the images of a split. N images, C classes, H rows, W columns."""

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from tasks.parts.data.dataset import normalised_batches
from tasks.parts.data.metrics import mean_iou
from tasks.parts.networks.model_card import ModelCard


def predict_classes(
    network: nn.Module, images_NHWC: NDArray[Any], card: ModelCard, *, batch_size: int
) -> NDArray[np.uint8]:
    """Return the class of each pixel, [N, H, W], for images uint8 [N, H, W, 3]; the network is left in eval mode."""
    network.eval()
    predictions = []
    for batch_NCHW in normalised_batches(images_NHWC, card.for_input(), batch_size):
        images_NCHW = torch.from_numpy(batch_NCHW).contiguous(memory_format=torch.channels_last)
        with torch.inference_mode():
            logits_NCHW = network(images_NCHW)
        predictions.append(logits_NCHW.argmax(dim=1).to(torch.uint8).numpy())
    return np.concatenate(predictions)


def measure_miou(
    network: nn.Module,
    images_NHWC: NDArray[Any],
    masks_NHW: NDArray[Any],
    card: ModelCard,
    *,
    batch_size: int,
) -> float:
    """Return the mIoU of a network on images with their masks."""
    classes_NHW = predict_classes(network, images_NHWC, card, batch_size=batch_size)
    return mean_iou(classes_NHW, masks_NHW, len(card.classes))
