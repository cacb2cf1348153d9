"""Run a torch network over the images of a split. N images, C classes, H rows, W columns."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from tasks.parts.data.dataset import METRIC_FILE, normalised_batches, open_split, read_manifest
from tasks.parts.data.lazy_array import part_of
from tasks.parts.data.metrics import confusion_matrix, scores
from tasks.parts.data.own_metric import Scorer, open_metric
from tasks.parts.data.subsets import choose_rows
from tasks.parts.networks.foreign import memory_format
from tasks.parts.networks.model_card import ModelCard


def predict_classes(
    network: nn.Module, images_NHWC: NDArray[Any], card: ModelCard, *, batch_size: int
) -> NDArray[np.uint8]:
    """Return the class of each pixel, [N, H, W], for images uint8 [N, H, W, C]; leave the network in eval mode."""
    batches = _logits(network, images_NHWC, card, batch_size)
    return np.concatenate([logits_NCHW.argmax(dim=1).to(torch.uint8).numpy() for logits_NCHW in batches])


def _logits(
    network: nn.Module, images_NHWC: NDArray[Any], card: ModelCard, batch_size: int
) -> Iterator[Tensor]:
    """Yield the logits of each batch; the network is left in eval mode."""
    network.eval()
    for batch_NCHW in normalised_batches(images_NHWC, card.for_input(), batch_size):
        images_NCHW = torch.from_numpy(batch_NCHW).contiguous(memory_format=memory_format(network))
        with torch.inference_mode():
            logits_NCHW = network(images_NCHW)
        yield logits_NCHW


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


@dataclass(frozen=True)
class LabelledImages:
    """Images of a split with their masks, and the user's own metric, if the data set has one."""

    images_NHWC: NDArray[Any]
    masks_NHW: NDArray[Any]
    score_images: Scorer | None


def open_labelled_images(data: Path, split: str, *, num_images: int | None = None) -> LabelledImages:
    """Open so many labelled images of a split (subsets.py chooses them), all if None."""
    manifest, rows = read_manifest(data), choose_rows(data, split, num_images)
    images_NHWC, masks_NHW = (part_of(array, rows) for array in open_split(data, split))
    score_images = open_metric(data / METRIC_FILE, manifest.metric) if manifest.metric else None
    return LabelledImages(images_NHWC, masks_NHW, score_images)


def measure_score(network: nn.Module, labelled: LabelledImages, card: ModelCard, *, batch_size: int) -> float:
    """Return the mean score of the images in the user's own metric, which reads logits, or the mIoU without one."""
    images_NHWC, masks_NHW = labelled.images_NHWC, labelled.masks_NHW
    if labelled.score_images is None:
        return measure_miou(network, images_NHWC, masks_NHW, card, batch_size=batch_size)
    total, start = 0.0, 0
    for logits_NCHW in _logits(network, images_NHWC, card, batch_size):
        masks = np.asarray(masks_NHW[start : start + len(logits_NCHW)])
        total += float(labelled.score_images(logits_NCHW.numpy(), masks).sum())
        start += len(logits_NCHW)
    return total / start
