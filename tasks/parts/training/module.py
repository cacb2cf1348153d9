"""The Lightning module of a training: objective, steps, optimizer, images.

N images, H rows, W columns.
"""

import math
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

from tasks.core.errors import ConfigError, TrainingDiverged
from tasks.parts.data.dataset import Manifest
from tasks.parts.data.metrics import scores
from tasks.parts.networks.foreign import ForeignNetwork, logits_of, memory_format
from tasks.parts.training.augmentation import Augmenter
from tasks.parts.training.config import Augmentation, TrainerConfig
from tasks.parts.training.data_workers import DataWorkers, prepare_worker
from tasks.parts.training.lightning_imports import lightning
from tasks.parts.training.losses import label_loss
from tasks.parts.training.split_dataset import SplitDataset, as_is

_WARM_UP_SHARE = 0.15


class Objective(Protocol):
    """What a training minimises; an ``nn.Module`` whose own parameters are trained too."""

    def __call__(self, network: nn.Module, images_NCHW: Tensor, masks_NHW: Tensor) -> Tensor:
        """Return the loss of one batch."""
        ...


class CrossEntropy(nn.Module):
    """Plain supervised segmentation."""

    weights_C: Tensor

    def __init__(self, weights_C: Tensor) -> None:
        super().__init__()
        self.register_buffer("weights_C", weights_C, persistent=False)

    def forward(self, network: nn.Module, images_NCHW: Tensor, masks_NHW: Tensor) -> Tensor:
        """Return the mean cross-entropy of one batch, with that of auxiliary logits."""
        return label_loss(logits_of(network, images_NCHW), masks_NHW, self.weights_C)


class SegmentationModule(lightning.LightningModule):
    """A network with its objective, data and schedule."""

    _confusion: Tensor

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
        self._augmenter = Augmenter.for_training(config, manifest)
        self.register_buffer(
            "_confusion",
            torch.zeros(self._num_classes, self._num_classes, dtype=torch.int64),
            persistent=False,
        )
        self._losses: list[Tensor] = []

    def train_dataloader(self) -> DataLoader[Any]:
        """Load the shuffled training split; the order depends only on seed and epoch."""
        return self._loader("train", shuffle=True)

    def val_dataloader(self) -> DataLoader[Any]:
        """Load the validation split in its stored order."""
        return self._loader("val", shuffle=False)

    def on_train_epoch_start(self) -> None:
        """Seed the epoch, so that a resumed run draws the same random numbers as an uninterrupted one."""
        seed = (self._config.seed << 24) + (self.current_epoch << 8) + self.global_rank
        torch.manual_seed(seed)
        self._random = torch.Generator(self.device).manual_seed(seed)
        self._losses = []

    def training_step(self, batch: tuple[Tensor, Tensor, Tensor], _: int) -> Tensor:
        """Return the loss of one batch of images_NCHW, masks_NHW and indices_N."""
        images_NCHW, masks_NHW = self._augment(*batch)
        images_NCHW = images_NCHW.contiguous(memory_format=memory_format(self.network))
        loss: Tensor = self.objective(self.network, images_NCHW, masks_NHW)
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
        """Reset the counts of the previous epoch."""
        self._confusion.zero_()

    def validation_step(self, batch: tuple[Tensor, Tensor, Tensor], _: int) -> None:
        """Count predictions against labels."""
        images_NCHW, masks_NHW, _indices_N = batch
        logits_NCHW = self.network(images_NCHW.contiguous(memory_format=memory_format(self.network)))
        prediction_NHW = logits_NCHW.argmax(dim=1)
        is_labelled_NHW = masks_NHW < self._num_classes
        pairs = masks_NHW[is_labelled_NHW] * self._num_classes + prediction_NHW[is_labelled_NHW]
        self._confusion += torch.bincount(pairs, minlength=self._num_classes**2).view_as(self._confusion)

    def on_validation_epoch_end(self) -> None:
        """Log the mIoU over all ranks."""
        confusion: Any = self.trainer.strategy.reduce(self._confusion, reduce_op="sum")
        miou = scores(confusion.cpu().numpy()).miou
        self.log(
            "val_miou",
            miou if miou is not None else math.nan,
            prog_bar=True,
            logger=False,
            rank_zero_only=False,
        )

    def epoch_loss(self) -> float:
        """Return the mean training loss of the epoch so far."""
        return float(torch.stack(self._losses).float().mean()) if self._losses else math.nan

    def configure_optimizers(self) -> Any:
        """Return AdamW with a one-cycle schedule over all steps."""
        optimizer = torch.optim.AdamW(
            self.parameters(),
            lr=self._config.learning_rate,
            weight_decay=self._config.weight_decay,
            fused=True,
        )
        schedule = torch.optim.lr_scheduler.OneCycleLR(
            optimizer,
            max_lr=self._config.learning_rate,
            total_steps=int(self.trainer.estimated_stepping_batches) + 1,
            pct_start=_WARM_UP_SHARE,
            cycle_momentum=False,
        )
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def _loader(self, split: str, *, shuffle: bool) -> DataLoader[Any]:
        images = SplitDataset(self._data, split, self._manifest)
        config = self._config
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
            num_workers=config.num_workers,
            multiprocessing_context=DataWorkers() if config.num_workers else None,
            persistent_workers=config.num_workers > 0,
            worker_init_fn=prepare_worker,
            collate_fn=as_is,
            generator=torch.Generator(),  # otherwise each epoch draws a seed from the global one
        )

    def _augment(self, images_NCHW: Tensor, masks_NHW: Tensor, indices_N: Tensor) -> tuple[Tensor, Tensor]:
        if self._augmenter:
            images_NCHW, masks_NHW = self._augmenter(
                images_NCHW, masks_NHW, indices_N, epoch=self.current_epoch
            )
        if self._config.augmentation is not Augmentation.none:
            return images_NCHW, masks_NHW
        num_images = len(images_NCHW)
        if self._config.horizontal_flip:
            is_mirrored_N = self._draw(num_images) < self._config.horizontal_flip
            images_NCHW = torch.where(is_mirrored_N[:, None, None, None], images_NCHW.flip(3), images_NCHW)
            masks_NHW = torch.where(is_mirrored_N[:, None, None], masks_NHW.flip(2), masks_NHW)
        if self._config.brightness:
            spread = self._draw(num_images, 1, 1, 1) * 2 - 1
            mean, std = (
                torch.tensor(value, device=images_NCHW.device).view(1, -1, 1, 1)
                for value in (self._manifest.mean, self._manifest.std)
            )
            gain = 1 + spread * self._config.brightness
            images_NCHW = images_NCHW * gain + mean / std * (gain - 1)
        return images_NCHW, masks_NHW

    def _draw(self, *shape: int) -> Tensor:
        return torch.rand(*shape, generator=self._random, device=self.device)

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


def enable_gradient_checkpointing(network: nn.Module) -> None:
    """Recompute the activations of each child of the network in the backward pass (Chen et al., 2016).

    BatchNorm sees each batch twice, so its running statistics move a little faster.
    """
    for child in (network.network if isinstance(network, ForeignNetwork) else network).children():
        if any(True for _ in child.parameters()):
            _checkpoint_forward(child)


def _checkpoint_forward(module: nn.Module) -> None:
    plain_forward = module.forward

    def forward(*inputs: Any, **named: Any) -> Any:
        if torch.is_grad_enabled() and module.training:
            return checkpoint(plain_forward, *inputs, use_reentrant=False, **named)
        return plain_forward(*inputs, **named)

    module.forward = forward
