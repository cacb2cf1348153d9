"""Write the canonical data set layout, image batch by image batch, with its statistics.

Shape letters: N images, H height, W width, C channels.
"""

import dataclasses
import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from tasks.core.errors import DataError
from tasks.parts.data.dataset import (
    IGNORE_INDEX,
    LABEL_FILES,
    MANIFEST_FILE,
    Batch,
    Manifest,
    open_split,
    read_manifest,
    rgb_triple,
)
from tasks.parts.data.input_card import Task

MIN_STD = 1 / 255
"""Floor of the standard deviation of a channel, for images of one flat colour."""


@dataclass(frozen=True)
class SplitBatches:
    """The content of one split, as a stream, so that no split has to fit into memory."""

    num_images: int
    batches: Iterable[Batch]


def write_dataset(
    dataset: Path,
    *,
    classes: tuple[str, ...],
    height: int,
    width: int,
    source: str,
    splits: Mapping[str, SplitBatches],
) -> Manifest:
    """Write all splits and the manifest into a new folder; mean and std come from the split `train`."""
    if len(classes) > IGNORE_INDEX:
        raise DataError(f"{len(classes)} classes; masks are uint8 and hold at most {IGNORE_INDEX}.")
    dataset.mkdir(parents=True)
    files: dict[str, str] = {}
    shares: dict[str, tuple[float, ...]] = {}
    train_colours = np.zeros((3, 256), np.int64)
    for split, content in splits.items():
        statistics = _write_split(dataset, split, content, height=height, width=width)
        files |= statistics.files
        shares[split] = _pixel_share(statistics.labels, len(classes), split)
        if split == "train":
            train_colours = statistics.colours
    mean, std = mean_and_std(train_colours)
    counts = {split: content.num_images for split, content in splits.items()}
    manifest = Manifest(classes, height, width, counts, shares, mean, std, files, source)
    write_manifest(dataset, manifest)
    return manifest


def write_first_images(dataset: Path, out: Path, counts: Mapping[str, int]) -> Manifest:
    """Write a smaller data set into a new folder: at most so many images of each named split, from the first on.

    Mean and std stay those of the whole, because the networks that were trained on it know no others.
    """
    whole = read_manifest(dataset)
    out.mkdir(parents=True)
    files: dict[str, str] = {}
    shares, taken = {}, {}
    for split, count in counts.items():
        images_NHWC, masks_NHW = (array[:count] for array in open_split(dataset, split))
        content = SplitBatches(len(images_NHWC), batches_of(images_NHWC, masks_NHW))
        statistics = _write_split(out, split, content, height=whole.height, width=whole.width)
        files |= statistics.files
        shares[split] = _pixel_share(statistics.labels, len(whole.classes), split)
        taken[split] = len(images_NHWC)
    manifest = dataclasses.replace(whole, counts=taken, pixel_share=shares, files=files)
    write_manifest(out, manifest)
    return manifest


def write_manifest(dataset: Path, manifest: Manifest) -> None:
    """Write `dataset/manifest.json`."""
    text = json.dumps(dataclasses.asdict(manifest), indent=2, ensure_ascii=False)
    (dataset / MANIFEST_FILE).write_text(text + "\n", encoding="utf-8")


@dataclass(frozen=True)
class _SplitStatistics:
    labels: NDArray[np.int64]
    """Pixels per mask value, 256 values."""
    colours: NDArray[np.int64]
    """Pixels per channel and value, [3, 256]."""
    files: dict[str, str]


def _write_split(
    dataset: Path, split: str, content: SplitBatches, *, height: int, width: int
) -> _SplitStatistics:
    labels = np.zeros(256, np.int64)
    colours = np.zeros((3, 256), np.int64)
    shape_NHW = (content.num_images, height, width)
    images_path, masks_path = dataset / f"{split}_images.npy", dataset / f"{split}_masks.npy"
    with images_path.open("wb") as images_file, masks_path.open("wb") as masks_file:
        images = NpyStream(images_file, (*shape_NHW, 3))
        masks = NpyStream(masks_file, shape_NHW)
        for images_NHWC, masks_NHW in content.batches:
            images.append(images_NHWC)
            masks.append(masks_NHW)
            labels += np.bincount(masks_NHW.ravel(), minlength=256)
            colours += count_colours(images_NHWC)
        digests = {images_path.name: images.finish(), masks_path.name: masks.finish()}
    return _SplitStatistics(labels, colours, digests)


class NpyStream:
    """Write a .npy file piece by piece; plain writes, because a memory map turns a full disk into SIGBUS."""

    def __init__(self, file: BinaryIO, shape: tuple[int, ...], dtype: type[np.generic] = np.uint8) -> None:
        """Announce the whole array; the first axis counts the rows to come."""
        self._file, self._shape, self._dtype = file, shape, np.dtype(dtype)
        self._num_rows, self._sha256 = 0, hashlib.sha256()
        header = {"descr": self._dtype.str, "fortran_order": False, "shape": shape}
        np.lib.format.write_array_header_1_0(_Tee(file, self._sha256), header)

    def append(self, rows: NDArray[Any]) -> None:
        """Write the next rows."""
        if rows.shape[1:] != self._shape[1:] or rows.dtype != self._dtype:
            expected = f"{self._dtype} [n, *{self._shape[1:]}]"
            raise ValueError(f"batch is {rows.dtype} {rows.shape}, expected {expected}")
        content = np.ascontiguousarray(rows).data
        self._file.write(content)
        self._sha256.update(content)
        self._num_rows += len(rows)

    def finish(self) -> str:
        """Return the sha256 of the whole file."""
        if self._num_rows != self._shape[0]:
            raise ValueError(f"{self._num_rows} images were written, {self._shape[0]} announced")
        return self._sha256.hexdigest()


class _Tee:
    """The part of a file that numpy's header writer needs, hashed on the way."""

    def __init__(self, file: BinaryIO, sha256: "hashlib._Hash") -> None:
        self._file, self._sha256 = file, sha256

    def write(self, content: bytes) -> None:
        self._file.write(content)
        self._sha256.update(content)


def batches_of(
    images_NHWC: NDArray[np.uint8], masks_NHW: NDArray[np.uint8], size: int = 256
) -> Iterator[Batch]:
    """Cut arrays that are in memory into batches for `write_dataset`."""
    for start in range(0, len(images_NHWC), size):
        yield images_NHWC[start : start + size], masks_NHW[start : start + size]


def _pixel_share(labels: NDArray[np.int64], num_classes: int, split: str) -> tuple[float, ...]:
    outside = [int(v) for v in np.flatnonzero(labels) if num_classes <= v != IGNORE_INDEX]
    if outside:
        raise DataError(f"split '{split}': labels {outside} outside the {num_classes} classes.")
    total = int(labels[:num_classes].sum())
    return tuple(float(count / total) if total else 0.0 for count in labels[:num_classes])


def count_colours(images_NHWC: NDArray[np.uint8]) -> NDArray[np.int64]:
    """Return the pixels per channel and value, [3, 256]."""
    return np.stack([np.bincount(images_NHWC[..., channel].ravel(), minlength=256) for channel in range(3)])


def mean_and_std(
    colours: NDArray[np.int64],
) -> tuple[tuple[float, float, float], tuple[float, float, float]]:
    """Return both per channel, on a 0..1 scale, from the counts of `count_colours`."""
    values = np.arange(256, dtype=np.float64) / 255
    num_pixels = np.maximum(colours.sum(axis=1), 1)
    mean_C = colours @ values / num_pixels
    variance_C = [
        (hist * (values - mean) ** 2).sum() / n
        for hist, mean, n in zip(colours, mean_C, num_pixels, strict=True)
    ]
    return rgb_triple(mean_C), rgb_triple(np.maximum(np.sqrt(variance_C), MIN_STD))


@dataclass(frozen=True)
class ImageBatches:
    """The images of one split, as a stream."""

    num_images: int
    batches: Iterable[NDArray[np.uint8]]
    labels_N: NDArray[np.uint16] | None
    """Class of each image; None where it is not known."""


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
    path = dataset / f"{split}_{LABEL_FILES[task]}.npy"
    with path.open("wb") as file:
        stream = NpyStream(file, truth.shape, dtype)
        stream.append(truth.astype(dtype))
        return {path.name: stream.finish()}
