"""The Lightning module of a training: objective, steps, optimizer, images.

N images, H rows, W columns.
"""

import math
import sys
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

from tasks.core.errors import ConfigError, TrainingDiverged
from tasks.parts.data.dataset import METRIC_FILE, Manifest
from tasks.parts.data.metrics import scores
from tasks.parts.data.own_metric import open_metric
from tasks.parts.networks.foreign import logits_of, memory_format
from tasks.parts.training.augmentation import Views
from tasks.parts.training.config import MemoryFormat, Optimizer, Precision, TrainerConfig
from tasks.parts.training.data_workers import DataWorkers, prepare_worker
from tasks.parts.training.lightning_imports import lightning
from tasks.parts.training.losses import LabelLoss
from tasks.parts.training.optimization import build_schedule, parameter_groups, rest_frozen_layers
from tasks.parts.training.split_dataset import EpochDataset, SplitDataset, as_is
from tasks.parts.training.worker_count import measure_num_workers

MIOU, SCORE = "val_miou", "val_score"
"""What each validation logs."""


class Batch(NamedTuple):
    """What a training sees in a step."""

    images_NCHW: Tensor
    masks_NHW: Tensor
    indices_N: Tensor
    """Number of each image in the training split."""
    views_N: Tensor
    """Which view of each image this is (augmentation.py)."""


class Objective(Protocol):
    """What a training minimises; an ``nn.Module`` whose own parameters are trained too."""

    needs_labels: bool
    """Whether images without labels teach nothing, so that the training leaves them out."""

    def __call__(self, network: nn.Module, batch: Batch) -> Tensor:
        """Return the loss of one batch."""
        ...


class LabelObjective(nn.Module):
    """Plain supervised segmentation."""

    needs_labels = True

    def __init__(self, label_loss: LabelLoss) -> None:
        super().__init__()
        self.label_loss = label_loss

    def forward(self, network: nn.Module, batch: Batch) -> Tensor:
        """Return the loss of one batch, with that of auxiliary logits."""
        loss: Tensor = self.label_loss(logits_of(network, batch.images_NCHW), batch.masks_NHW)
        return loss


def rows_of_an_epoch(num_images: int, num_unlabelled: int, *, needs_labels: bool) -> list[int]:
    """Return the images with labels, which come first, or, for an objective that needs none, all images.

    Then those with labels are repeated until they are about half: otherwise the loss of a batch would have few
    labels, or none.
    """
    num_labelled = num_images - num_unlabelled
    if needs_labels:
        return list(range(num_labelled))
    times = max(1, round(num_unlabelled / num_labelled))
    return [*range(num_labelled)] * times + [*range(num_labelled, num_images)]


class SegmentationModule(lightning.LightningModule):
    """A network with its objective, data and schedule."""

    def __init__(
        self, network: nn.Module, objective: nn.Module, data: Path, manifest: Manifest, config: TrainerConfig
    ) -> None:
        super().__init__()
        self.network = network
        self.objective = objective
        self._data = data
        self._manifest = manifest
        self._config = config
        self._num_classes = len(manifest.classes)
        self._views = Views(config, manifest)
        self._groups = parameter_groups(network, objective, config)
        self.memory_format = chosen_memory_format(network, config.memory_format)
        self.num_workers = config.num_workers
        self._losses: list[Tensor] = []
        self.metric = manifest.metric
        self._score_images = open_metric(data / METRIC_FILE, manifest.metric) if manifest.metric else None

    def train_dataloader(self) -> DataLoader[Any]:
        """Load the shuffled training split; the order depends only on seed and epoch."""
        return self._loader("train", shuffle=True)

    def val_dataloader(self) -> DataLoader[Any]:
        """Load the validation split in its stored order."""
        return self._loader("val", shuffle=False)

    def on_train_epoch_start(self) -> None:
        """Seed the epoch, so that a resumed run draws the same random numbers as an uninterrupted one."""
        torch.manual_seed((self._config.seed << 24) + (self.current_epoch << 8) + self.global_rank)
        self._losses = []
        rest_frozen_layers(self.network, self._config.layer_rates)

    def training_step(self, batch: tuple[Tensor, Tensor, Tensor, Tensor, Tensor], _: int) -> Tensor:
        """Return the loss of one batch of EpochDataset."""
        images_NCHW, masks_NHW, indices_N, occurrences_N, times_N = batch
        views_N = self._views.numbers(self.current_epoch, occurrences_N, times_N)
        images_NCHW, masks_NHW = self._views(images_NCHW, masks_NHW, indices_N, views_N=views_N)
        images_NCHW = images_NCHW.contiguous(memory_format=self.memory_format)
        loss: Tensor = self.objective(self.network, Batch(images_NCHW, masks_NHW, indices_N, views_N))
        if self._config.batchnorm_l1:
            loss = loss + self._config.batchnorm_l1 * batchnorm_l1_norm(self.network)
        if not torch.isfinite(loss):
            raise TrainingDiverged(
                f"The loss is {loss.item()} at step {self.global_step} (learning rate {self._learning_rate():.2e}). "
                f"Lower trainer.learning_rate (now {self._config.learning_rate}) or set trainer.precision=fp32. "
                "The last good checkpoint is kept."
            )
        self._losses.append(loss.detach())
        self.log("loss", loss.detach(), prog_bar=True, logger=False)
        return loss

    def on_validation_epoch_start(self) -> None:
        """Start to count, on all ranks with the BatchNorm statistics of the first, which are kept."""
        if self.trainer.world_size > 1:
            for buffer in self.network.buffers():
                torch.distributed.broadcast(buffer, 0)
        # No buffer: an average of the weights swaps those before the counts are read.
        self._confusion = torch.zeros(self._num_classes, self._num_classes, dtype=torch.int64).to(self.device)
        self._total_score = torch.zeros(1).to(self.device)

    def validation_step(self, batch: tuple[Tensor, Tensor, Tensor], batch_idx: int) -> None:
        """Count predictions against labels, and add up the scores of the user's own metric, each image once."""
        images_NCHW, masks_NHW, _indices_N = batch
        logits_NCHW = self.network(images_NCHW.contiguous(memory_format=self.memory_format))
        prediction_NHW = logits_NCHW.argmax(dim=1)
        is_labelled_NHW = masks_NHW < self._num_classes
        # Ranks run equally many batches, so the sampler gives some of them images again, at its end.
        positions_N = batch_idx * self._config.batch_size + torch.arange(len(masks_NHW), device=self.device)
        is_new_N = positions_N * self.trainer.world_size + self.global_rank < self._manifest.counts["val"]
        is_labelled_NHW = is_labelled_NHW & is_new_N[:, None, None]
        pairs = masks_NHW[is_labelled_NHW] * self._num_classes + prediction_NHW[is_labelled_NHW]
        self._confusion += torch.bincount(pairs, minlength=self._num_classes**2).view_as(self._confusion)
        if self._score_images is not None and is_new_N.any():
            logits, masks = logits_NCHW[is_new_N].float().cpu().numpy(), masks_NHW[is_new_N].cpu().numpy()
            self._total_score += float(self._score_images(logits, masks.astype(np.uint8)).sum())

    def on_validation_epoch_end(self) -> None:
        """Log the mIoU over all ranks, and the score by which epochs are chosen: the same, or the user's own."""
        confusion: Any = self.trainer.strategy.reduce(self._confusion, reduce_op="sum")
        miou = scores(confusion.cpu().numpy()).miou
        logged = {MIOU: miou if miou is not None else math.nan}
        logged[SCORE] = logged[MIOU]
        if self._score_images is not None:
            total: Any = self.trainer.strategy.reduce(self._total_score, reduce_op="sum")
            logged[SCORE] = float(total) / self._manifest.counts["val"]
        for name, value in logged.items():
            is_shown = name == SCORE
            self.log(name, value, prog_bar=is_shown, logger=False, rank_zero_only=False)

    def epoch_loss(self) -> float:
        """Return the mean training loss of the epoch so far."""
        return float(torch.stack(self._losses).float().mean()) if self._losses else math.nan

    def configure_optimizers(self) -> Any:
        """Return the optimizer with its schedule over all steps."""
        config = self._config
        # The fused kernel unscales gradients of float16 itself, after they would have been clipped.
        is_fused = config.precision is not Precision.fp16_mixed or config.clip_norm is None
        shared: dict[str, Any] = {
            "lr": config.learning_rate,
            "weight_decay": config.weight_decay,
            "fused": is_fused,
        }
        optimizer: torch.optim.Optimizer = (
            torch.optim.AdamW(self._groups, **shared)
            if config.optimizer is Optimizer.adamw
            else torch.optim.SGD(self._groups, momentum=config.momentum, **shared)
        )
        num_steps = min(int(self.trainer.estimated_stepping_batches), config.max_steps or sys.maxsize)
        schedule = build_schedule(optimizer, config, num_steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def _loader(self, split: str, *, shuffle: bool) -> DataLoader[Any]:
        stored = SplitDataset(self._data, split, self._manifest)
        images: SplitDataset | EpochDataset = stored
        if split == "train":
            rows = rows_of_an_epoch(
                len(stored), self._manifest.num_unlabelled, needs_labels=bool(self.objective.needs_labels)
            )
            images = EpochDataset(stored, rows)
        config = self._config
        if self.num_workers is None:
            self.num_workers = self._measure_workers(images)
        sampler: DistributedSampler[Any] = DistributedSampler(
            images,
            num_replicas=self.trainer.world_size,
            rank=self.trainer.global_rank,
            shuffle=shuffle,
            seed=config.seed,
        )
        return DataLoader(
            images,
            batch_size=config.batch_size,
            sampler=sampler,
            drop_last=shuffle and len(images) >= config.batch_size * self.trainer.world_size,
            num_workers=self.num_workers,
            multiprocessing_context=DataWorkers() if self.num_workers else None,
            persistent_workers=self.num_workers > 0,
            pin_memory=self.device.type == "cuda",
            worker_init_fn=prepare_worker,
            collate_fn=as_is,
            generator=torch.Generator(),  # otherwise each epoch draws a seed from the global one
        )

    def _measure_workers(self, images: SplitDataset | EpochDataset) -> int:
        if self.device.type == "cpu":
            return 0
        batch_size = self._config.batch_size
        images_NCHW = images.__getitems__([index % len(images) for index in range(batch_size)])[0]
        images_NCHW = images_NCHW.to(self.device, memory_format=self.memory_format)

        @torch.no_grad()
        def run_forward() -> None:
            self.network.eval()(images_NCHW).sum().item()

        num_ranks = self._config.num_devices
        found = measure_num_workers(
            images, batch_size=batch_size, num_ranks=num_ranks, run_forward=run_forward
        )
        self.network.train()
        return found

    def _learning_rate(self) -> float:
        return float(self.trainer.optimizers[0].param_groups[0]["lr"])


def batchnorm_l1_norm(network: nn.Module) -> Tensor:
    """Return the sum of the magnitudes of all BatchNorm scales (Liu et al., 2017, arXiv:1708.06519).

    Raises ConfigError when there is none, because the penalty would have no effect.
    """
    scales: list[Tensor] = [
        layer.weight for layer in network.modules() if isinstance(layer, nn.BatchNorm2d) and layer.affine
    ]
    if not scales:
        raise ConfigError(
            "trainer.batchnorm_l1 is above 0, but the network has no BatchNorm scale. Set it to 0."
        )
    return torch.cat(scales).abs().sum()


def chosen_memory_format(network: nn.Module, chosen: MemoryFormat) -> torch.memory_format:
    """Return how the maps of a network lie in memory during its training."""
    match chosen:
        case MemoryFormat.auto:
            return memory_format(network)
        case MemoryFormat.channels_last:
            return torch.channels_last
        case MemoryFormat.contiguous:
            return torch.contiguous_format
