"""Images and what is right about them, for both tasks.

    dataset/<split>_images.npy     uint8 [N, H, W, 3], as in tasks/parts/data.py
    dataset/<split>_masks.npy      uint8 [N, H, W]: segmentation
    dataset/<split>_labels.npy     uint16 [N]: classification

A data set of plain images has neither of the two.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tasks.core.errors import ArtifactError
from tasks.parts.data import (
    Manifest,
    NpyStream,
    count_colours,
    map_array,
    mean_and_std,
    open_split,
    read_manifest,
    write_manifest,
)
from tasks.parts.input_card import Task

_TRUTH_FILES = {Task.segmentation: "masks", Task.classification: "labels"}


@dataclass(frozen=True)
class ImageBatches:
    """The images of one split, as a stream."""

    num_images: int
    batches: Iterable[NDArray[np.uint8]]
    labels_N: NDArray[np.uint16] | None
    """Class of each image; None where it is not known."""


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
    if f"{split}_{_TRUTH_FILES[task]}.npy" not in manifest.files:
        raise ArtifactError(
            f"{dataset}: split '{split}' has no {_TRUTH_FILES[task]}, expected them for {task}. Choose "
            "data=folder for segmentation, data=class_folder for classification, and data=images where nothing "
            "is labelled."
        )
    if task is Task.segmentation:
        return open_split(dataset, split)[1]
    return map_array(dataset / f"{split}_labels.npy", (_count(dataset, manifest, split),), np.uint16)


def write_images(
    dataset: Path,
    *,
    classes: tuple[str, ...],
    height: int,
    width: int,
    source: str,
    splits: Mapping[str, ImageBatches],
) -> Manifest:
    """Write images, with labels where they are known, and the manifest into a new folder.

    Mean and standard deviation are those of the split `train`.
    """
    dataset.mkdir(parents=True)
    files: dict[str, str] = {}
    shares: dict[str, tuple[float, ...]] = {}
    train_colours = np.zeros((3, 256), np.int64)
    for split, content in splits.items():
        path = dataset / f"{split}_images.npy"
        with path.open("wb") as file:
            images = NpyStream(file, (content.num_images, height, width, 3))
            for images_NHWC in content.batches:
                images.append(images_NHWC)
                if split == "train":
                    train_colours += count_colours(images_NHWC)
            files[path.name] = images.finish()
        shares[split] = ()
        if content.labels_N is not None:
            files |= write_truth(dataset, split, content.labels_N)
            counts = np.bincount(content.labels_N, minlength=len(classes))
            shares[split] = tuple(float(share) for share in counts / max(1, len(content.labels_N)))
    mean, std = mean_and_std(train_colours)
    counts_by_split = {split: content.num_images for split, content in splits.items()}
    manifest = Manifest(classes, height, width, counts_by_split, shares, mean, std, files, source)
    write_manifest(dataset, manifest)
    return manifest


def write_truth(dataset: Path, split: str, truth: NDArray[Any]) -> dict[str, str]:
    """Write masks_NHW (uint8) or labels_N (uint16) of a split; return the file's name and sha256."""
    task, dtype = (Task.classification, np.uint16) if truth.ndim == 1 else (Task.segmentation, np.uint8)
    path = dataset / f"{split}_{_TRUTH_FILES[task]}.npy"
    with path.open("wb") as file:
        stream = NpyStream(file, truth.shape, dtype)
        stream.append(truth.astype(dtype))
        return {path.name: stream.finish()}


def _count(dataset: Path, manifest: Manifest, split: str) -> int:
    if split not in manifest.counts:
        raise ArtifactError(f"{dataset}: no split '{split}'. Found: {', '.join(manifest.counts)}.")
    return manifest.counts[split]
