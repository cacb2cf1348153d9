"""Training of segmentation networks with Lightning: seeded, resumable, best epoch by validation score.

Shapes: N images, C channels or classes, H rows, W columns.
"""

import logging
import os
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import nn
from torch.distributed import DistError

from tasks.core.errors import ProcessDied, first_line
from tasks.parts.data.dataset import read_manifest
from tasks.parts.data.input_card import Task
from tasks.parts.data.judge import metric_name
from tasks.parts.training.activations import save_activation_memory
from tasks.parts.training.augmentation import Augmenter, draw_augmented_sheet
from tasks.parts.training.cadence import Cadence
from tasks.parts.training.callbacks import History, WorkerMemory
from tasks.parts.training.config import Accelerator, Precision, Strategy, TrainerConfig, TrainingReport
from tasks.parts.training.lightning_imports import (
    Callback,
    EarlyStopping,
    LightningEnvironment,
    ModelCheckpoint,
    TQDMProgressBar,
    WeightAveraging,
    lightning,
)
from tasks.parts.training.module import SCORE, SegmentationModule
from tasks.parts.training.optimization import moving_average
from tasks.parts.training.ranks import is_rank, run_ranks

logger = logging.getLogger(__name__)

_LIGHTNING_PRECISION = {
    Precision.fp32: "32-true",
    Precision.bf16_mixed: "bf16-mixed",
    Precision.fp16_mixed: "16-mixed",
}


def train_network(
    network: nn.Module, objective: nn.Module, *, data: Path, config: TrainerConfig, out: Path
) -> TrainingReport:
    """Train a network in place and leave the weights of its best epoch in it.

    An interrupted run resumes from the checkpoint in ``out/resume``, with the same result as an uninterrupted one.
    Writes ``out/history.csv`` (a row per epoch) and ``out/training.png``, ``out/augmentation.png`` if a preset is on.

    Raises TrainingDiverged when the loss is not finite, ProcessDied when a data worker or a rank was killed.
    """
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)  # its tips would bury the epochs
    quiet = r".*LeafSpec.*|.*does not have many workers.*|.*could not find the monitored key.*"
    warnings.filterwarnings("ignore", message=quiet)
    torch.use_deterministic_algorithms(True, warn_only=True)
    # Filling fresh memory is a debugging aid of deterministic mode and takes a tenth of a step.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    best = ModelCheckpoint(
        out / "resume",
        "best",
        monitor=SCORE,
        mode="max",
        save_on_train_epoch_end=True,
        enable_version_counter=False,
    )
    manifest = read_manifest(data)
    augmenter = Augmenter.for_views(config, manifest)
    if augmenter and not is_rank():
        draw_augmented_sheet(out / "augmentation.png", augmenter, data, manifest)
    if config.num_devices > 1 and "LOCAL_RANK" not in os.environ:
        cluster = LightningEnvironment()
        run_ranks(config.num_devices, main_address=cluster.main_address, main_port=cluster.main_port)
        writes_outputs = cluster.node_rank() == 0
    else:
        writes_outputs = _fit(network, objective, data, config, out, best) and not is_rank()
    if not writes_outputs:
        raise SystemExit(0)
    last_state, best_state = (
        torch.load(out / "resume" / name, map_location="cpu", weights_only=True)
        for name in ("last.ckpt", "best.ckpt")
    )
    prefix = "network."
    weights = {n.removeprefix(prefix): w for n, w in best_state["state_dict"].items() if n.startswith(prefix)}
    network.load_state_dict(weights)
    network.to(device="cpu", memory_format=torch.contiguous_format)  # type: ignore[call-overload]
    network.eval()
    return TrainingReport(
        metric=metric_name(manifest, Task.segmentation),
        val_score=float(last_state["callbacks"][best.state_key]["best_model_score"]),
        best_epoch=int(best_state["epoch"]) + 1,
        num_epochs=int(last_state["epoch"]) + 1,
        num_parameters=sum(parameter.numel() for parameter in network.parameters()),
    )


def _fit(
    network: nn.Module,
    objective: nn.Module,
    data: Path,
    config: TrainerConfig,
    out: Path,
    best: ModelCheckpoint,
) -> bool:
    """Train in this process and return whether it is the process of global rank 0.

    Raises ProcessDied when a data worker was killed.
    """
    save_activation_memory(network, config.activation_checkpoints, config.activation_offload)
    last = ModelCheckpoint(out / "resume", "last", save_on_train_epoch_end=True, enable_version_counter=False)
    network.train()  # a loaded checkpoint is in eval mode, and Lightning leaves modes as they are
    module = SegmentationModule(network, objective, data, read_manifest(data), config)
    module.to(memory_format=module.memory_format)
    workers = WorkerMemory()
    trainer = lightning.Trainer(
        max_epochs=config.max_epochs,
        accelerator=config.accelerator.value,
        devices=config.num_devices,
        num_nodes=config.num_nodes,
        strategy=config.strategy.value,
        sync_batchnorm=_synchronises_batchnorm(network, config),
        precision=_LIGHTNING_PRECISION[config.precision],  # type: ignore[arg-type]
        accumulate_grad_batches=config.accumulate,
        gradient_clip_val=config.clip_norm,
        callbacks=[
            Cadence(config.validate_every_epochs, config.max_steps),
            *_optional_callbacks(config),
            History(out / "history.csv", module.metric),
            workers,
            best,
            last,
        ],
        enable_progress_bar=sys.stderr.isatty(),
        enable_model_summary=False,
        logger=False,
        use_distributed_sampler=False,
        num_sanity_val_steps=0,
    )
    try:
        trainer.fit(module, ckpt_path=_resumable(out / "resume"), weights_only=True)
    except (RuntimeError, OSError, EOFError) as error:
        killed = workers.describe_killed(error)
        if killed:
            raise ProcessDied(
                f"{killed} Usually memory ran out. Run the same command again to resume from the last complete "
                f"checkpoint; a lower trainer.num_workers (now {config.num_workers}) needs less memory, but starts "
                "over."
            ) from error
        if is_rank() and (isinstance(error, DistError) or "by peer" in str(error)):
            logger.warning("another rank is gone: %s", first_line(error))
            raise SystemExit(1) from error
        raise
    return trainer.is_global_zero


def _synchronises_batchnorm(network: nn.Module, config: TrainerConfig) -> bool:
    """Whether processes share the statistics of BatchNorm; torch.nn.SyncBatchNorm runs on GPUs alone."""
    if config.strategy is not Strategy.ddp:
        return False
    is_on_gpu = config.accelerator is Accelerator.gpu or (
        config.accelerator is Accelerator.auto and torch.cuda.is_available()
    )
    has_batchnorm = any(isinstance(layer, nn.modules.batchnorm._BatchNorm) for layer in network.modules())
    if not is_on_gpu and has_batchnorm and config.num_devices * config.num_nodes > 1:
        logger.warning(
            "training on the CPU with ddp: BatchNorm has the statistics of each process's own batch of %d images, "
            "because SyncBatchNorm runs on GPUs alone (trainer.batch_size, trainer.accelerator)",
            config.batch_size,
        )
    return is_on_gpu


def _optional_callbacks(config: TrainerConfig) -> Iterator[Callback]:
    if config.patience_epochs is not None:
        yield EarlyStopping(
            SCORE,
            mode="max",
            patience=config.patience_epochs,
            check_finite=False,
            check_on_train_epoch_end=False,
        )
    if config.ema_decay:
        yield WeightAveraging(avg_fn=moving_average(config.ema_decay))
    if sys.stderr.isatty():
        yield TQDMProgressBar()


def _resumable(folder: Path) -> Path | None:
    """Return the newest readable checkpoint of an interrupted run; log the ones that cannot be read."""
    for path in _checkpoints(folder):
        try:
            state = torch.load(path, map_location="cpu", weights_only=True)
        except (RuntimeError, EOFError, ValueError, OSError) as error:
            logger.warning("ignoring %s, which is not a complete checkpoint: %s", path, first_line(error))
            continue
        logger.info("resuming after epoch %d from %s", state["epoch"] + 1, path)
        return path
    return None


def _checkpoints(folder: Path) -> Iterator[Path]:
    for name in ("last.ckpt", "best.ckpt"):
        if (folder / name).is_file():
            yield folder / name
