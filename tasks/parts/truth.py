"""Images and what is right about them, for both tasks.

    dataset/<split>_images.npy     uint8 [N, H, W, 3], as in tasks/parts/data.py
    dataset/<split>_masks.npy      uint8 [N, H, W]: segmentation
    dataset/<split>_labels.npy     uint16 [N]: classification

A data set of plain images has neither of the two.
"""

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tasks.core.errors import ArtifactError
from tasks.parts.data import MANIFEST_FILE, MIN_STD, Manifest, open_split, read_manifest
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
    return _map(dataset / f"{split}_images.npy", shape, "uint8")


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
    return _map(dataset / f"{split}_labels.npy", (_count(dataset, manifest, split),), "uint16")


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
    sums_C, squares_C, num_pixels = np.zeros(3), np.zeros(3), 1
    for split, content in splits.items():
        path = dataset / f"{split}_images.npy"
        with path.open("wb") as file:
            shape = (content.num_images, height, width, 3)
            np.lib.format.write_array_header_1_0(
                file, {"descr": "|u1", "fortran_order": False, "shape": shape}
            )
            for images_NHWC in content.batches:
                file.write(np.ascontiguousarray(images_NHWC).data)
                if split == "train":
                    values = images_NHWC.reshape(-1, 3) / 255.0
                    sums_C, squares_C = sums_C + values.sum(axis=0), squares_C + (values**2).sum(axis=0)
                    num_pixels = content.num_images * height * width
        files[path.name] = _sha256(path)
        shares[split] = ()
        if content.labels_N is not None:
            files |= write_truth(dataset, split, content.labels_N)
            counts = np.bincount(content.labels_N, minlength=len(classes))
            shares[split] = tuple(float(share) for share in counts / max(1, len(content.labels_N)))
    mean_C = sums_C / num_pixels
    std_C = np.maximum(np.sqrt(np.maximum(squares_C / num_pixels - mean_C**2, 0)), MIN_STD)
    manifest = Manifest(
        classes=classes,
        height=height,
        width=width,
        counts={split: content.num_images for split, content in splits.items()},
        pixel_share=shares,
        mean=_triple(mean_C),
        std=_triple(std_C),
        files=files,
        source=source,
    )
    write_manifest(dataset, manifest)
    return manifest


def write_truth(dataset: Path, split: str, truth: NDArray[Any]) -> dict[str, str]:
    """Write masks_NHW (uint8) or labels_N (uint16) of a split; return the file's name and sha256."""
    task = Task.classification if truth.ndim == 1 else Task.segmentation
    path = dataset / f"{split}_{_TRUTH_FILES[task]}.npy"
    with path.open("wb") as file:
        np.save(file, truth.astype(np.uint16 if truth.ndim == 1 else np.uint8), allow_pickle=False)
    return {path.name: _sha256(path)}


def write_manifest(dataset: Path, manifest: Manifest) -> None:
    """Write `dataset/manifest.json`."""
    text = json.dumps(asdict(manifest), indent=2, ensure_ascii=False)
    (dataset / MANIFEST_FILE).write_text(text + "\n", encoding="utf-8")


def _count(dataset: Path, manifest: Manifest, split: str) -> int:
    if split not in manifest.counts:
        raise ArtifactError(f"{dataset}: no split '{split}'. Found: {', '.join(manifest.counts)}.")
    return manifest.counts[split]


def _map(path: Path, shape: tuple[int, ...], dtype: str) -> NDArray[Any]:
    try:
        array: NDArray[Any] = np.load(path, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise ArtifactError(f"{path}: cannot be read ({error}). Run prepare_data again.") from error
    if array.shape != shape or array.dtype != dtype:
        raise ArtifactError(
            f"{path}: holds {array.dtype} {array.shape}, the manifest says {dtype} {shape}. Run prepare_data "
            "again."
        )
    return array


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _triple(values: NDArray[Any]) -> tuple[float, float, float]:
    red, green, blue = (float(value) for value in values)
    return red, green, blue
