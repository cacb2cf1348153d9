"""The canonical data set layout: what `prepare_data` writes and every later stage reads.

    dataset/manifest.json          Manifest
    dataset/<split>_images.npy     uint8 [N, H, W, C], RGB where C is 3
    dataset/<split>_masks.npy      uint8 [N, H, W], class index or IGNORE_INDEX, for segmentation
    dataset/<split>_labels.npy     uint16 [N], class index, for classification
    dataset/<split>_values.npy     float32 [N, ...], values of the float model, which are no classes
    dataset/<split>_groups.npy     int64 [N], number of the group of images that belong together, if there are groups
    dataset/metric.py              the user's own metric, if there is one

Images and masks may also lie where they come from (prepare_data.copy=false): then a split has no such arrays but a
list of files (source_files.py), and what opens it reads them one by one.

A data set without labels holds only images.

Shape letters: N images, H height, W width, C channels (in images) or classes (in histograms).
"""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from tasks.core.errors import ArtifactError
from tasks.parts.data.input_card import InputCard, Task, channel_values
from tasks.parts.data.lazy_array import LazyArray
from tasks.parts.data.reading import Reading
from tasks.parts.data.source_files import list_name, open_reader

MANIFEST_FILE = "manifest.json"
SPLITS = ("train", "val", "test", "calibration")
METRIC_FILE = "metric.py"
METRIC_PACKAGES_FILE = "metric_packages.json"
"""Name -> version of the installed packages that METRIC_FILE imports."""
LABEL_FILES = {Task.segmentation: "masks", Task.classification: "labels", Task.values: "values"}
LABEL_TYPES: dict[Task, type[np.generic]] = {
    Task.segmentation: np.uint8,
    Task.classification: np.uint16,
    Task.values: np.float32,
}
MAX_CLASSES = 255
"""Maximum number of classes in masks: they are stored as uint8, and 255 means ignored."""

Batch = tuple[NDArray[np.uint8], NDArray[np.uint8]]
"""images_NHWC and masks_NHW of some consecutive images of a split."""


@dataclass(frozen=True)
class Manifest:
    """What a data set holds: its classes, sizes, statistics and files."""

    classes: tuple[str, ...]
    height: int
    width: int
    counts: dict[str, int]
    """Number of images per split."""
    pixel_share: dict[str, tuple[float, ...]]
    """Share of each class, per split: among the pixels that are not ignored (all 0 if all are), or among the images;
    empty without labels."""
    mean: tuple[float, ...]
    """Mean by which each channel is normalised, on a 0..1 scale: that of the train split, without unlabelled images,
    unless another is set."""
    std: tuple[float, ...]
    """Standard deviation by which each channel is normalised, on a 0..1 scale."""
    files: dict[str, str]
    """File name in the data set folder -> sha256."""
    source: str
    """Source that prepare_data read, or FLOAT_MODEL if the labels are predictions of the float model."""
    values_shape: tuple[int, ...] | None = None
    """Shape of the values of one image, for labels that are values."""
    metric: str | None = None
    """Function of METRIC_FILE that scores each image; None for the metric of the task."""
    num_unlabelled: int = 0
    """Number of images, the last ones of train, whose masks are ignored everywhere: they are for teachers only."""
    reading: Reading = field(default_factory=Reading)
    """How the files of the source were read."""

    @property
    def num_channels(self) -> int:
        """Channels of the images; 3 are red, green and blue."""
        return len(self.mean)


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
            mean=channel_values(fields["mean"]),
            std=channel_values(fields["std"]),
            files={str(name): str(digest) for name, digest in fields["files"].items()},
            source=str(fields["source"]),
            values_shape=tuple(shape) if (shape := fields.get("values_shape")) else None,
            metric=fields.get("metric"),
            num_unlabelled=int(fields.get("num_unlabelled", 0)),
            reading=Reading.from_fields(fields["reading"]),
        )
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ArtifactError(
            f"{path}: damaged or of another version ({error!r}). Run prepare_data again."
        ) from error


def open_split(dataset: Path, split: str) -> Batch:
    """Map images_NHWC and masks_NHW of one split into memory, read-only; raise ArtifactError if damaged."""
    return open_images(dataset, split), open_labels(dataset, split, Task.segmentation)


def open_images(dataset: Path, split: str) -> NDArray[np.uint8]:
    """Map images_NHWC of one split into memory, read-only, or open the list of their files, which reads them when
    they are indexed; raise ArtifactError if damaged."""
    manifest = read_manifest(dataset)
    num_images = _num_images(dataset, manifest, split)
    shape_NHWC = (num_images, manifest.height, manifest.width, manifest.num_channels)
    if is_listed(manifest, split):
        return _open_listed(open_images, dataset, split, shape_NHWC)
    return _map_array(dataset / f"{split}_images.npy", shape_NHWC, np.uint8)


def calibration_images(dataset: Path) -> Path:
    """Return the file of the calibration images, for stages that need no other file of the data set."""
    return dataset / "calibration_images.npy"


def open_labels(dataset: Path, split: str, task: Task) -> NDArray[Any]:
    """Map masks_NHW, labels_N or values of one split into memory, read-only.

    Raises ArtifactError if they are damaged, or if the data set has none for this task.
    """
    manifest = read_manifest(dataset)
    num_images = _num_images(dataset, manifest, split)
    if _has_listed_masks(manifest, split, task):
        return _open_listed(_open_masks, dataset, split, (num_images, manifest.height, manifest.width))
    path = dataset / f"{split}_{LABEL_FILES[task]}.npy"
    if path.name not in manifest.files:
        raise ArtifactError(
            f"{dataset}: split '{split}' has no {LABEL_FILES[task]}, expected them for {task}. Choose "
            "data=folder for segmentation, data=class_folder for classification, and data=images for images "
            "without labels."
        )
    size = {Task.segmentation: (manifest.height, manifest.width), Task.values: manifest.values_shape or ()}
    return _map_array(path, (num_images, *size.get(task, ())), LABEL_TYPES[task])


def open_groups(dataset: Path, split: str) -> NDArray[np.int64]:
    """Return the group of each image of a split, [N], from 0 upward; without groups, each image is its own."""
    manifest = read_manifest(dataset)
    num_images, name = _num_images(dataset, manifest, split), f"{split}_groups.npy"
    if name not in manifest.files:
        return np.arange(num_images)
    return _map_array(dataset / name, (num_images,), np.int64)


def is_listed(manifest: Manifest, split: str) -> bool:
    """Return whether images and masks of a split are read from the files of its source."""
    return list_name(split) in manifest.files


def has_labels(manifest: Manifest, split: str, task: Task) -> bool:
    """Return whether a split has the labels of a task."""
    return f"{split}_{LABEL_FILES[task]}.npy" in manifest.files or _has_listed_masks(manifest, split, task)


def _has_listed_masks(manifest: Manifest, split: str, task: Task) -> bool:
    """Return whether masks are asked for and lie in files; images of one class each have an array of labels."""
    is_of_masks = manifest.classes and f"{split}_{LABEL_FILES[Task.classification]}.npy" not in manifest.files
    return task is Task.segmentation and is_listed(manifest, split) and bool(is_of_masks)


def normalise(
    images_NHWC: NDArray[np.uint8], mean: tuple[float, ...], std: tuple[float, ...]
) -> NDArray[np.float32]:
    """Turn uint8 images into the float32 NCHW input of every network: (value / 255 - mean) / std."""
    # One multiply and one add per pixel, in place, to keep memory traffic low.
    scale_C = (1.0 / (255.0 * np.asarray(std, np.float64))).astype(np.float32)
    shift_C = (-np.asarray(mean, np.float64) / np.asarray(std, np.float64)).astype(np.float32)
    images_NCHW = np.ascontiguousarray(np.moveaxis(images_NHWC, -1, 1), dtype=np.float32)
    images_NCHW *= scale_C[:, None, None]
    images_NCHW += shift_C[:, None, None]
    return images_NCHW


def normalised_batches(
    images_NHWC: NDArray[np.uint8], card: InputCard, batch_size: int
) -> Iterator[NDArray[np.float32]]:
    """Yield normalised images_NCHW for the network or graph of a card, in batches that it accepts."""
    batch_size = card.fit_batch(batch_size)
    for start in range(0, len(images_NHWC), batch_size):
        yield normalise(images_NHWC[start : start + batch_size], card.mean, card.std)


def _num_images(dataset: Path, manifest: Manifest, split: str) -> int:
    if split not in manifest.counts:
        raise ArtifactError(f"{dataset}: no split '{split}'. Found: {', '.join(manifest.counts)}.")
    return manifest.counts[split]


def _open_masks(dataset: Path, split: str) -> NDArray[Any]:
    return open_labels(dataset, split, Task.segmentation)


def _open_listed(
    function: Callable[[Path, str], NDArray[Any]], dataset: Path, split: str, shape: tuple[int, ...]
) -> NDArray[Any]:
    """Return an array whose rows are read from files, and which a data worker opens by the function."""
    reader = open_reader(dataset, split)
    if len(reader) != shape[0]:
        raise ArtifactError(
            f"{dataset / list_name(split)}: lists {len(reader)} images, the manifest says {shape[0]}. Run "
            "prepare_data again."
        )
    read_rows = reader.images if len(shape) == 4 else reader.masks
    rows_N = np.arange(shape[0])
    # Stages use it as an array; LazyArray says what of it there is.
    return cast(
        "NDArray[Any]",
        LazyArray(read_rows, shape[1:], np.uint8, rows_N=rows_N, reopen=(function, dataset, split)),
    )


def _map_array(path: Path, shape: tuple[int, ...], dtype: type[np.generic]) -> NDArray[Any]:
    """Map a .npy file into memory, read-only; raise ArtifactError if it differs from the manifest."""
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
