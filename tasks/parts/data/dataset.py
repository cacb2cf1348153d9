"""The canonical data set layout: what `prepare_data` writes and every later stage reads.

    dataset/manifest.json          Manifest
    dataset/<split>_images.npy     uint8 [N, H, W, 3], RGB
    dataset/<split>_masks.npy      uint8 [N, H, W], class index or IGNORE_INDEX

Shape letters: N images, H height, W width, C channels (in images) or classes (in histograms).
"""

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tasks.core.errors import ArtifactError
from tasks.parts.data.input_card import Task

MANIFEST_FILE = "manifest.json"

IGNORE_INDEX = 255
"""Mask value of pixels that count neither in a loss nor in a metric."""

SPLITS = ("train", "val", "test", "calibration")

Batch = tuple[NDArray[np.uint8], NDArray[np.uint8]]
"""images_NHWC and masks_NHW of some consecutive images of a split."""

LABEL_FILES = {Task.segmentation: "masks", Task.classification: "labels"}

MAX_CLASSES = 255
"""Masks are stored as uint8, and 255 means ignored."""


@dataclass(frozen=True)
class Manifest:
    """What a data set holds, as numbers."""

    classes: tuple[str, ...]
    height: int
    width: int
    counts: dict[str, int]
    """Images per split."""
    pixel_share: dict[str, tuple[float, ...]]
    """Per split: the share of each class among the pixels that are not ignored (all 0 if all are)."""
    mean: tuple[float, float, float]
    """RGB mean of the train split, on a 0..1 scale."""
    std: tuple[float, float, float]
    """RGB standard deviation of the train split, on a 0..1 scale; at least MIN_STD."""
    files: dict[str, str]
    """File name in the data set folder -> sha256."""
    source: str


def read_manifest(dataset: Path) -> Manifest:
    """Read `dataset/manifest.json`; raise ArtifactError if it is missing or damaged."""
    path = dataset / MANIFEST_FILE
    if not path.is_file():
        raise ArtifactError(
            f"{path}: not found. Expected the output of prepare_data. Run prepare_data first."
        )
    try:
        fields: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        return Manifest(
            classes=tuple(str(name) for name in fields["classes"]),
            height=int(fields["height"]),
            width=int(fields["width"]),
            counts={str(split): int(count) for split, count in fields["counts"].items()},
            pixel_share={str(split): tuple(map(float, s)) for split, s in fields["pixel_share"].items()},
            mean=rgb_triple(fields["mean"]),
            std=rgb_triple(fields["std"]),
            files={str(name): str(digest) for name, digest in fields["files"].items()},
            source=str(fields["source"]),
        )
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ArtifactError(
            f"{path}: damaged or of another version ({error!r}). Run prepare_data again."
        ) from error


def open_split(dataset: Path, split: str) -> Batch:
    """Map images_NHWC and masks_NHW of one split into memory, read-only; raise ArtifactError if damaged."""
    manifest = read_manifest(dataset)
    if split not in manifest.counts:
        raise ArtifactError(f"{dataset}: no split '{split}'. Found: {', '.join(manifest.counts)}.")
    shape_NHW = (manifest.counts[split], manifest.height, manifest.width)
    images_NHWC = map_array(dataset / f"{split}_images.npy", (*shape_NHW, 3))
    masks_NHW = map_array(dataset / f"{split}_masks.npy", shape_NHW)
    return images_NHWC, masks_NHW


def normalise(
    images_NHWC: NDArray[np.uint8], mean: tuple[float, ...], std: tuple[float, ...]
) -> NDArray[np.float32]:
    """Turn uint8 RGB images into the float32 NCHW input of every network: (value / 255 - mean) / std."""
    # One multiply and one add per pixel, in place, so that a batch is touched as little as possible.
    scale_C = (1.0 / (255.0 * np.asarray(std, np.float64))).astype(np.float32)
    shift_C = (-np.asarray(mean, np.float64) / np.asarray(std, np.float64)).astype(np.float32)
    images_NCHW = np.ascontiguousarray(np.moveaxis(images_NHWC, -1, 1), dtype=np.float32)
    images_NCHW *= scale_C[:, None, None]
    images_NCHW += shift_C[:, None, None]
    return images_NCHW


def rgb_triple(values: Iterable[float]) -> tuple[float, float, float]:
    red, green, blue = (float(value) for value in values)
    return red, green, blue


def map_array(path: Path, shape: tuple[int, ...], dtype: type[np.generic] = np.uint8) -> NDArray[Any]:
    """Map a .npy file into memory, read-only; raise ArtifactError where it is not what the manifest says."""
    try:
        array: NDArray[Any] = np.load(path, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise ArtifactError(f"{path}: cannot be read ({error}). Run prepare_data again.") from error
    if array.shape != shape or array.dtype != dtype:
        raise ArtifactError(
            f"{path}: holds {array.dtype} {array.shape}, the manifest says {np.dtype(dtype)} {shape}. Run "
            "prepare_data again."
        )
    return array


def open_images(dataset: Path, split: str) -> NDArray[np.uint8]:
    """Map images_NHWC of one split into memory; raise ArtifactError if damaged."""
    manifest = read_manifest(dataset)
    if f"{split}_masks.npy" in manifest.files:
        return open_split(dataset, split)[0]
    shape = (_count(dataset, manifest, split), manifest.height, manifest.width, 3)
    return map_array(dataset / f"{split}_images.npy", shape)


def open_truth(dataset: Path, split: str, task: Task) -> NDArray[Any]:
    """Map masks_NHW or labels_N of one split into memory.

    Raises ArtifactError for a data set that has none for this task.
    """
    manifest = read_manifest(dataset)
    if f"{split}_{LABEL_FILES[task]}.npy" not in manifest.files:
        raise ArtifactError(
            f"{dataset}: split '{split}' has no {LABEL_FILES[task]}, expected them for {task}. Choose "
            "data=folder for segmentation, data=class_folder for classification, and data=images where nothing "
            "is labelled."
        )
    if task is Task.segmentation:
        return open_split(dataset, split)[1]
    return map_array(dataset / f"{split}_labels.npy", (_count(dataset, manifest, split),), np.uint16)


def _count(dataset: Path, manifest: Manifest, split: str) -> int:
    if split not in manifest.counts:
        raise ArtifactError(f"{dataset}: no split '{split}'. Found: {', '.join(manifest.counts)}.")
    return manifest.counts[split]
