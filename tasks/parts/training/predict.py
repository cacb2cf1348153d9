"""Run a torch network over the images of a split. N images, C classes, H rows, W columns."""

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from tasks.parts.data.dataset import normalised_batches
from tasks.parts.data.metrics import confusion_matrix, scores
from tasks.parts.networks.foreign import memory_format
from tasks.parts.networks.model_card import ModelCard


def predict_classes(
    network: nn.Module, images_NHWC: NDArray[Any], card: ModelCard, *, batch_size: int
) -> NDArray[np.uint8]:
    """Return the class of each pixel, [N, H, W], for images uint8 [N, H, W, 3]; the network is left in eval mode."""
    network.eval()
    predictions = []
    for batch_NCHW in normalised_batches(images_NHWC, card.for_input(), batch_size):
        images_NCHW = torch.from_numpy(batch_NCHW).contiguous(memory_format=memory_format(network))
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
    """Return the mIoU of a network on images with their masks, of which one batch at a time is in memory."""
    size, num_classes = card.for_input().fit_batch(batch_size), len(card.classes)
    confusion_CC = np.zeros((num_classes, num_classes), np.int64)
    for start in range(0, len(images_NHWC), size):
        part = slice(start, start + size)
        classes_NHW = predict_classes(network, images_NHWC[part], card, batch_size=size)
        confusion_CC += confusion_matrix(classes_NHW, masks_NHW[part], num_classes)
    return scores(confusion_CC).miou or 0.0
