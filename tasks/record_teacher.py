"""Record what the teacher answers to the training images, so that trainings need not ask it in each step."""

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from tasks.core.bounds import AtLeast, Between
from tasks.core.environment import versions
from tasks.core.errors import ConfigError
from tasks.parts.training.config import ViewsConfig

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Config(ViewsConfig):
    """Which views of the images the teacher sees, and what is kept of its answers.

    The views have to be those of the trainings that learn from the recording.
    """

    stride: Annotated[int, Between(1, 64)]
    """Logits are averaged over squares of stride x stride pixels, as are the student's before they are compared. A
    teacher that enlarges its last map has little more to say than the stride of that map."""
    has_features: bool
    """Whether the map before the classifier is stored as well, for distillation.hint_weight; it is larger."""
    batch_size: Annotated[int, AtLeast(1)]
    """Images in one batch; changes memory and speed only."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.num_views is None:
            raise ConfigError(
                "num_views is null, which means that each epoch shows other images: a teacher cannot be recorded for "
                "them. Set num_views to 1 or more, or steps.record_teacher=false."
            )


@dataclass(frozen=True)
class Report:
    """What was recorded."""

    num_images: int
    num_views: int
    """Views of each image."""
    logits_shape: tuple[int, ...]
    """Views, images, classes, height, width."""
    features_shape: tuple[int, ...] | None
    """Views, images, channels, height, width; None without features."""
    size_mb: float
    """Size of both files in MB (10^6 bytes)."""


def environment(cfg: Config) -> dict[str, str]:
    """Return what the output depends on besides inputs, configuration and code."""
    return versions("torch", "transformers", *cfg.extra_packages)


def record_teacher(cfg: Config, *, teacher: Path, data: Path, out: Path) -> Report:
    """Write the folder ``recording``: the teacher's logits, and its features if wanted, for each view of each image.

    Raises ArtifactError when teacher and data differ in their classes, ConfigError for views that do not fit the
    images, DiskError before the first view when there is no space for all of them.
    """
    import torch
    from torch.nn import functional as F

    from tasks.parts.data.dataset import read_manifest
    from tasks.parts.data.input_card import check_same_classes
    from tasks.parts.networks.checkpoint import load_checkpoint
    from tasks.parts.networks.foreign import memory_format
    from tasks.parts.progress import tracked
    from tasks.parts.training.augmentation import Views
    from tasks.parts.training.distillation import LayerOutput
    from tasks.parts.training.recorded_teacher import FEATURES, LOGITS, create_files, write_card
    from tasks.parts.training.split_dataset import SplitDataset

    manifest = read_manifest(data)
    network, card = load_checkpoint(teacher)
    check_same_classes(teacher, card.classes, manifest.classes, "train.teacher")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    network.eval().to(device, memory_format=memory_format(network))  # type: ignore[call-overload]
    feature = LayerOutput(network) if cfg.has_features else None
    views, images = Views(cfg, manifest), SplitDataset(data, "train", manifest)
    folder, num_views = out / "recording", cfg.num_views or 1
    folder.mkdir()

    def answer(images_NCHW: torch.Tensor) -> dict[str, torch.Tensor]:
        with torch.inference_mode():
            logits_NCHW = network(images_NCHW.contiguous(memory_format=memory_format(network)))
            answers = {LOGITS: F.avg_pool2d(logits_NCHW, cfg.stride, ceil_mode=True)}
        return answers if feature is None else answers | {FEATURES: feature.value}

    first_NCHW = images.__getitems__([0])[0].to(device)
    shapes = {
        name: (num_views, len(images), *values_NCHW.shape[1:])
        for name, values_NCHW in answer(first_NCHW).items()
    }
    files = create_files(folder, shapes)
    size_mb = sum(file.nbytes for file in files.values()) / 1e6
    logger.info("%d views of %d images will take %.1f MB in %s", num_views, len(images), size_mb, folder)
    starts = [(view, start) for view in range(num_views) for start in range(0, len(images), cfg.batch_size)]
    for view, start in tracked(starts, "record_teacher"):
        indices = list(range(start, min(start + cfg.batch_size, len(images))))
        images_NCHW, masks_NHW, indices_N = (part.to(device) for part in images.__getitems__(indices))
        views_N = torch.full_like(indices_N, view)
        images_NCHW, _ = views(images_NCHW, masks_NHW, indices_N, views_N=views_N)
        for name, values_NCHW in answer(images_NCHW).items():
            files[name][view, indices] = values_NCHW.half().cpu().numpy()
    for file in files.values():
        file.flush()
    write_card(folder, cfg, manifest, cfg.stride)
    logger.info("%d views of %d images: %.1f MB in %s", num_views, len(images), size_mb, folder)
    return Report(len(images), num_views, shapes[LOGITS], shapes.get(FEATURES), size_mb)
