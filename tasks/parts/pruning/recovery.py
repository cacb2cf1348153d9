"""The parts of pruning that need the data set: batches, the loss on them, accuracy, new statistics, a short training.

Tensor suffixes: N images, C channels or classes, H height, W width.
"""

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from tasks.parts.data.dataset import normalise, normalised_batches, open_split, read_manifest
from tasks.parts.data.lazy_array import part_of
from tasks.parts.data.subsets import choose_rows
from tasks.parts.networks.foreign import logits_of, memory_format
from tasks.parts.networks.model_card import ModelCard
from tasks.parts.networks.zeros import keep_zeros
from tasks.parts.training.config import TrainerConfig
from tasks.parts.training.loop import train_network
from tasks.parts.training.losses import build_label_loss
from tasks.parts.training.module import LabelObjective
from tasks.parts.training.predict import measure_score, open_labelled_images


def read_batches(
    data: Path, split: str, *, batch_size: int, num_images: int | None = None
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield images_NCHW (normalised) and masks_NHW of `num_images` of a split that `choose_rows` chooses."""
    manifest, rows = read_manifest(data), choose_rows(data, split, num_images)
    images_NHWC, masks_NHW = (part_of(array, rows) for array in open_split(data, split))
    for start in range(0, len(images_NHWC), batch_size):
        part = slice(start, start + batch_size)
        images_NCHW = normalise(images_NHWC[part], manifest.mean, manifest.std)
        yield torch.from_numpy(images_NCHW), torch.from_numpy(np.asarray(masks_NHW[part], dtype=np.int64))


def batch_losses(
    network: nn.Module, data: Path, *, trainer: TrainerConfig, num_images: int, batch_size: int
) -> Iterator[Tensor]:
    """Yield the label loss on images of the training split, one batch at a time, in eval mode."""
    network.eval()
    label_loss = build_label_loss(trainer, read_manifest(data))
    for images_NCHW, masks_NHW in read_batches(data, "train", batch_size=batch_size, num_images=num_images):
        yield label_loss(logits_of(network, images_NCHW), masks_NHW)


def measure_val_score(network: nn.Module, card: ModelCard, data: Path, batch_size: int) -> float:
    """Return the score of a network on the validation split, in the metric of the data set."""
    return measure_score(network, open_labelled_images(data, "val"), card, batch_size=batch_size)


def recalibrate_batchnorm(
    network: nn.Module, images_NHWC: NDArray[Any], card: ModelCard, *, batch_size: int
) -> None:
    """Measure the running statistics of BatchNorm anew, in place, as the means over batches; nothing is trained.

    After a cut the old ones belong to activations that are gone, and would hide what the channels are worth: Li et
    al., "EagleEye: Fast Sub-net Evaluation for Efficient Neural Network Pruning", 2020, arXiv:2007.02491.
    All other layers stay in eval mode. A last batch of a single image is left out, because BatchNorm behind a global
    pooling needs two values of each channel.
    """
    norms = [
        layer
        for layer in network.modules()
        if isinstance(layer, nn.BatchNorm1d | nn.BatchNorm2d) and layer.track_running_stats
    ]
    if not norms:
        return
    momenta = [norm.momentum for norm in norms]
    network.eval()
    for norm in norms:
        norm.reset_running_stats()
        norm.momentum = None  # the mean over all batches
        norm.train()
    for number, batch_NCHW in enumerate(normalised_batches(images_NHWC, card.for_input(), batch_size)):
        if number == 0 or len(batch_NCHW) > 1:
            images_NCHW = torch.from_numpy(batch_NCHW).contiguous(memory_format=memory_format(network))
            with torch.no_grad():
                network(images_NCHW)
    for norm, momentum in zip(norms, momenta, strict=True):
        norm.momentum = momentum
    network.eval()


def recover(network: nn.Module, data: Path, config: TrainerConfig, out: Path) -> float:
    """Train a network on the labels, in place, and return the val score of its best epoch; zeros stay zero.

    The network gets the weights of that epoch. `out` holds the checkpoints from which an interrupted run resumes. A
    copy is trained, because training leaves hooks and other forward functions behind, and the network is traced
    later.
    """
    out.mkdir(parents=True, exist_ok=True)
    trained = copy.deepcopy(network)
    keep_zeros(trained)
    objective = LabelObjective(build_label_loss(config, read_manifest(data)))
    report = train_network(trained, objective, data=data, config=config, out=out)
    network.load_state_dict(trained.state_dict())
    return report.val_score
