"""A teacher's answers to the views of the training images, computed once and stored.

``logits.npy``: float16 [V, N, C, h, w] for V views of N images, C classes, and maps of the images' size divided by
the stride, rounded up; ``features.npy`` likewise, if they are stored, with the channels and size of the feature
layer; ``card.json``: what they belong to.
"""

import errno
import json
import math
import os
import shutil
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tasks.core.errors import ArtifactError, ConfigError, DiskError
from tasks.parts.data.dataset import Manifest
from tasks.parts.data.input_card import check_same_classes
from tasks.parts.training.config import ViewsConfig, check_views, views_of

if TYPE_CHECKING:
    from tasks.parts.training.module import Batch

LOGITS, FEATURES, CARD = "logits.npy", "features.npy", "card.json"

_NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def create_files(folder: Path, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, "np.memmap[Any, Any]"]:
    """Create the files of a recording with all of their space, as float16 arrays of these shapes.

    A mapped file whose pages find no space ends the process by SIGBUS, without a message. Raises DiskError instead.
    """
    item_bytes = np.dtype(np.float16).itemsize
    needed_bytes = sum(item_bytes * math.prod(shape) for shape in shapes.values())
    free_bytes = shutil.disk_usage(folder).free
    refusal = (
        f"{folder}: recording the teacher needs {needed_bytes:,} bytes and {free_bytes:,} bytes are free, or fewer "
        "by a quota. Free some space, raise record_teacher.stride, lower record_teacher.num_views, set "
        "record_teacher.has_features=false, or ask the teacher in each step (steps.record_teacher=false)."
    )
    if needed_bytes > free_bytes:
        raise DiskError(refusal)
    files = {}
    try:
        for name, shape in shapes.items():
            path = folder / name
            files[name] = np.lib.format.open_memmap(path, mode="w+", dtype=np.float16, shape=shape)
            if hasattr(os, "posix_fallocate"):  # not on macOS
                with path.open("r+b") as file:
                    os.posix_fallocate(file.fileno(), 0, path.stat().st_size)
    except OSError as error:
        if error.errno in _NO_SPACE:
            raise DiskError(refusal) from error
        raise
    return files


def write_card(folder: Path, config: ViewsConfig, manifest: Manifest, stride: int) -> None:
    """Write what recorded answers belong to."""
    card = {"views": views_of(asdict(config)), "stride": stride, "classes": list(manifest.classes)}
    card |= {"normalisation": [manifest.mean, manifest.std]}
    (folder / CARD).write_text(json.dumps(card, indent=2) + "\n", encoding="utf-8")


class RecordedTeacher:
    """Gives the stored answers to a batch."""

    def __init__(
        self, folder: Path, config: ViewsConfig, manifest: Manifest, *, needs_features: bool
    ) -> None:
        """Open a recording.

        Raises ConfigError when it is of other views or has no features that are needed, ArtifactError when it is
        damaged or of other data.
        """
        try:
            card = json.loads((folder / CARD).read_text(encoding="utf-8"))
            self._logits_VNCHW: NDArray[Any] = np.load(folder / LOGITS, mmap_mode="r")
            self._features_VNCHW: NDArray[Any] | None = (
                np.load(folder / FEATURES, mmap_mode="r") if needs_features else None
            )
            recorded, self.stride = card["views"], int(card["stride"])
            classes, normalisation = tuple(card["classes"]), card["normalisation"]
        except FileNotFoundError as error:
            if needs_features and (folder / LOGITS).is_file():
                raise ConfigError(
                    f"distillation.hint_weight is above 0, and {folder} has no features. Set "
                    "record_teacher.has_features=true, or steps.record_teacher=false."
                ) from error
            raise ArtifactError(f"{folder}: {error}. Run record_teacher again.") from error
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ArtifactError(f"{folder}: damaged ({error!r}). Run record_teacher again.") from error
        check_views(recorded, asdict(config))
        check_same_classes(folder, classes, manifest.classes, "train.teacher")
        num_images = manifest.counts["train"]
        if self._logits_VNCHW.shape[1] != num_images or normalisation != [
            list(manifest.mean),
            list(manifest.std),
        ]:
            raise ArtifactError(
                f"{folder}: recorded for {self._logits_VNCHW.shape[1]} images, the training split has {num_images}; "
                "or their mean or std changed. Run record_teacher again."
            )

    def num_feature_channels(self, _size: tuple[int, int]) -> int:
        """Return the number of channels of the feature map."""
        assert self._features_VNCHW is not None
        return int(self._features_VNCHW.shape[2])

    def __call__(self, batch: "Batch") -> tuple[Tensor, Tensor | None]:
        """Return logits_NCHW, and features_NCHW if they are wanted."""
        places, device = (
            (batch.views_N.cpu().numpy(), batch.indices_N.cpu().numpy()),
            batch.images_NCHW.device,
        )
        logits_NCHW, features_NCHW = (
            None if answers is None else torch.from_numpy(answers[places]).to(device).float()
            for answers in (self._logits_VNCHW, self._features_VNCHW)
        )
        assert logits_NCHW is not None
        return logits_NCHW, features_NCHW
