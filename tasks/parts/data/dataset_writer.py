"""Write the canonical data set layout batch by batch, with its statistics.

Shape letters: N images, H height, W width, C channels.
"""

import contextlib
import dataclasses
import hashlib
import json
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from tasks.core.errors import DataError
from tasks.parts.data.class_table import IGNORE_INDEX
from tasks.parts.data.dataset import (
    LABEL_FILES,
    LABEL_TYPES,
    MANIFEST_FILE,
    MAX_CLASSES,
    METRIC_FILE,
    METRIC_PACKAGES_FILE,
    Manifest,
    open_split,
    read_manifest,
)
from tasks.parts.data.input_card import Task, channel_values
from tasks.parts.data.lazy_array import part_of
from tasks.parts.data.reading import Reading
from tasks.parts.data.source_files import (
    RULES_FILE,
    ReadingRules,
    SourceRow,
    list_name,
    originals_name,
    write_list,
    write_rules,
)
from tasks.parts.data.subsets import choose_rows

MIN_STD = 1 / 255
"""Floor of the standard deviation of a channel, for images of one flat colour."""


@dataclass(frozen=True)
class SplitBatches:
    """The content of one split as a stream, so that a split need not fit into memory."""

    num_images: int
    batches: Iterable[tuple[NDArray[np.uint8], NDArray[Any] | None]]
    """images_NHWC, each with their masks_NHW, labels_N or values; None without labels."""
    groups_N: NDArray[np.int64] | None = None
    """Number of the group, 0 .. K - 1, that each image belongs to; None if each is its own."""
    rows: Sequence[SourceRow] | None = None
    """Files of each image, complete once the batches were read, if they are listed; None if images are copied."""
    num_unlabelled: int = 0
    """Number of images, the last ones, whose masks are ignored everywhere; in the split `train` only."""


def write_dataset(
    dataset: Path,
    *,
    task: Task | None,
    classes: tuple[str, ...],
    height: int,
    width: int,
    source: str,
    splits: Mapping[str, SplitBatches],
    channels: int = 3,
    values_shape: tuple[int, ...] | None = None,
    normalisation: tuple[tuple[float, ...], tuple[float, ...]] | None = None,
    rules: ReadingRules | None = None,
    reading: Reading | None = None,
    originals: Mapping[str, Sequence[SourceRow]] | None = None,
) -> Manifest:
    """Write all splits and the manifest into a new folder.

    `task` is the task of the labels: masks, classes of images, or values of `values_shape`; None without labels.
    `normalisation` is mean and standard deviation of each channel; None takes those of the split `train`. Splits that
    are listed, and not copied, need the `rules` by which their files are read again. `reading` says how files became
    images; None for images that were made or read as they are. `originals` are the files of copied splits, each once,
    in the order of their images; they need the rules, too.
    """
    if task is Task.segmentation and len(classes) > MAX_CLASSES:
        raise DataError(f"{len(classes)} classes; masks are uint8 and hold at most {MAX_CLASSES}.")
    dataset.mkdir(parents=True)
    statistics = {
        split: _write_split(
            dataset,
            split,
            content,
            task=task,
            shape_HWC=(height, width, channels),
            values_shape=values_shape or (),
        )
        for split, content in splits.items()
    }
    mean, std = normalisation or _mean_and_std(statistics["train"].colour_counts)
    manifest = Manifest(
        classes=classes,
        height=height,
        width=width,
        counts={split: content.num_images for split, content in splits.items()},
        pixel_share=_class_shares(statistics, len(classes), task),
        mean=mean,
        std=std,
        files=_all_files(statistics)
        | _write_originals(dataset, originals or {})
        | (_write_rules(dataset, rules) if rules else {}),
        source=source,
        values_shape=values_shape,
        num_unlabelled=sum(content.num_unlabelled for content in splits.values()),
        reading=reading or Reading(),
    )
    _write_manifest(dataset, manifest)
    return manifest


def write_with_metric(
    dataset: Path, out: Path, metric: Path, function: str, *, packages: Mapping[str, str]
) -> Manifest:
    """Copy a data set into a new folder, with a function of the file `metric` as its metric.

    `packages` are the versions of those that the file imports.
    """
    shutil.copytree(dataset, out)
    content = metric.read_bytes()
    imported = json.dumps(packages, indent=2, sort_keys=True).encode() + b"\n"
    whole = read_manifest(dataset)
    files = dict(whole.files)
    for name, written in ((METRIC_FILE, content), (METRIC_PACKAGES_FILE, imported)):
        (out / name).write_bytes(written)
        files[name] = hashlib.sha256(written).hexdigest()
    manifest = dataclasses.replace(whole, files=files, metric=function)
    (out / MANIFEST_FILE).unlink()  # read-only where DVC links its cache into the workspace
    _write_manifest(out, manifest)
    return manifest


def write_chosen_images(dataset: Path, out: Path, counts: Mapping[str, int]) -> Manifest:
    """Write a smaller data set into a new folder: labelled images of each named split, at most as many as given.

    Mean and std stay those of the whole data set, because networks were trained with them; so does its metric. Groups
    are left out.
    """
    whole = read_manifest(dataset)
    out.mkdir(parents=True)
    statistics, chosen_counts = {}, {}
    for split, count in counts.items():
        rows = choose_rows(dataset, split, count)
        images_NHWC, masks_NHW = (part_of(array, rows) for array in open_split(dataset, split))
        content = SplitBatches(len(images_NHWC), batches_of(images_NHWC, masks_NHW))
        shape_HWC = whole.height, whole.width, whole.num_channels
        statistics[split] = _write_split(out, split, content, task=Task.segmentation, shape_HWC=shape_HWC)
        chosen_counts[split] = len(images_NHWC)
    shares = _class_shares(statistics, len(whole.classes), Task.segmentation)
    files = _all_files(statistics)
    if whole.metric is not None:
        shutil.copyfile(dataset / METRIC_FILE, out / METRIC_FILE)
        files[METRIC_FILE] = whole.files[METRIC_FILE]
    manifest = dataclasses.replace(
        whole, counts=chosen_counts, pixel_share=shares, files=files, num_unlabelled=0
    )
    _write_manifest(out, manifest)
    return manifest


def batches_of(
    images_NHWC: NDArray[np.uint8], labels: NDArray[Any], size: int = 256
) -> Iterator[tuple[NDArray[np.uint8], NDArray[Any]]]:
    """Split arrays that are in memory into batches for `write_dataset`."""
    for start in range(0, len(images_NHWC), size):
        yield images_NHWC[start : start + size], labels[start : start + size]


@dataclass(frozen=True)
class _SplitStatistics:
    label_counts: NDArray[np.int64]
    """Number of pixels, or of images, per possible value of a label."""
    colour_counts: NDArray[np.int64]
    """Number of pixels per channel and value, [C, 256], without unlabelled images."""
    files: dict[str, str]
    """File name -> sha256."""


def _write_split(
    dataset: Path,
    split: str,
    content: SplitBatches,
    *,
    task: Task | None,
    shape_HWC: tuple[int, int, int],
    values_shape: tuple[int, ...] = (),
) -> _SplitStatistics:
    label_type = LABEL_TYPES[task or Task.segmentation]
    num_values = 0 if task is Task.values else 256 ** np.dtype(label_type).itemsize
    label_counts, colour_counts = np.zeros(num_values, np.int64), np.zeros((shape_HWC[2], 256), np.int64)
    shape_NHW = (content.num_images, *shape_HWC[:2])
    streams: dict[str, _NpyStream] = {}
    with contextlib.ExitStack() as files:

        def open_stream(kind: str, shape: tuple[int, ...], dtype: type[np.generic]) -> _NpyStream:
            name = f"{split}_{kind}.npy"
            streams[name] = _NpyStream(files.enter_context((dataset / name).open("wb")), shape, dtype)
            return streams[name]

        is_copied = content.rows is None
        image_stream = label_stream = None
        if is_copied:
            image_stream = open_stream("images", (content.num_images, *shape_HWC), np.uint8)
        if task and (is_copied or task is Task.classification):
            shape = shape_NHW if task is Task.segmentation else (content.num_images, *values_shape)
            label_stream = open_stream(LABEL_FILES[task], shape, label_type)
        num_labelled = content.num_images - content.num_unlabelled
        for images_NHWC, labels in content.batches:
            if image_stream:
                image_stream.append(images_NHWC)
            colour_counts += _count_colours(images_NHWC[:num_labelled])
            num_labelled = max(0, num_labelled - len(images_NHWC))
            if labels is not None:
                if label_stream:
                    label_stream.append(labels)
                if task is not Task.values:
                    label_counts += np.bincount(labels.ravel(), minlength=num_values)
        if content.groups_N is not None:
            open_stream("groups", shape_NHW[:1], np.int64).append(content.groups_N)
        digests = {name: stream.finish() for name, stream in streams.items()}
        if content.rows is not None:
            digests |= _write_rows(dataset, split, content)
    return _SplitStatistics(label_counts, colour_counts, digests)


def _write_rows(dataset: Path, split: str, content: SplitBatches) -> dict[str, str]:
    rows = content.rows or ()
    if len(rows) != content.num_images:
        raise ValueError(f"{len(rows)} images were listed, expected {content.num_images}")
    write_list(dataset / list_name(split), rows)
    return {list_name(split): _sha256(dataset / list_name(split))}


def _write_originals(dataset: Path, originals: Mapping[str, Sequence[SourceRow]]) -> dict[str, str]:
    for split, rows in originals.items():
        write_list(dataset / originals_name(split), rows)
    return {originals_name(split): _sha256(dataset / originals_name(split)) for split in originals}


def _write_rules(dataset: Path, rules: ReadingRules) -> dict[str, str]:
    write_rules(dataset, rules)
    return {RULES_FILE: _sha256(dataset / RULES_FILE)}


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


class _NpyStream:
    """Write a .npy file piece by piece; plain writes, because a memory map turns a full disk into SIGBUS."""

    def __init__(self, file: BinaryIO, shape: tuple[int, ...], dtype: type[np.generic]) -> None:
        """Write the header; the first axis of `shape` is the number of rows that will follow."""
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
            raise ValueError(f"{self._num_rows} images were written, expected {self._shape[0]}")
        return self._sha256.hexdigest()


class _Tee:
    """The part of a file's interface that numpy's header writer needs; also hashes what is written."""

    def __init__(self, file: BinaryIO, sha256: "hashlib._Hash") -> None:
        self._file, self._sha256 = file, sha256

    def write(self, content: bytes) -> None:
        self._file.write(content)
        self._sha256.update(content)


def _class_shares(
    statistics: Mapping[str, _SplitStatistics], num_classes: int, task: Task | None
) -> dict[str, tuple[float, ...]]:
    """Return split -> share of each class among its labels; no shares without labels."""
    shares: dict[str, tuple[float, ...]] = {}
    for split, counted in statistics.items():
        values = (int(value) for value in np.flatnonzero(counted.label_counts))
        ignored = IGNORE_INDEX if task is Task.segmentation else None
        outside = [value for value in values if num_classes <= value != ignored]
        if outside:
            raise DataError(f"split '{split}': labels {outside} outside the {num_classes} classes.")
        counts = counted.label_counts[:num_classes] if task else ()
        total = max(1, int(np.sum(counts)))
        shares[split] = tuple(float(count / total) for count in counts)
    return shares


def _count_colours(images_NHWC: NDArray[np.uint8]) -> NDArray[np.int64]:
    """Return the pixels per channel and value, [C, 256]."""
    return np.stack(
        [np.bincount(values.ravel(), minlength=256) for values in np.moveaxis(images_NHWC, -1, 0)]
    )


def _mean_and_std(colours: NDArray[np.int64]) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return both per channel, on a 0..1 scale, from the counts of `_count_colours`."""
    values = np.arange(256, dtype=np.float64) / 255
    num_pixels = np.maximum(colours.sum(axis=1), 1)
    mean_C = colours @ values / num_pixels
    variance_C = [
        (hist * (values - mean) ** 2).sum() / n
        for hist, mean, n in zip(colours, mean_C, num_pixels, strict=True)
    ]
    return channel_values(mean_C), channel_values(np.maximum(np.sqrt(variance_C), MIN_STD))


def _all_files(statistics: Mapping[str, _SplitStatistics]) -> dict[str, str]:
    return {name: digest for written in statistics.values() for name, digest in written.files.items()}


def _write_manifest(dataset: Path, manifest: Manifest) -> None:
    text = json.dumps(dataclasses.asdict(manifest), indent=2, ensure_ascii=False)
    (dataset / MANIFEST_FILE).write_text(text + "\n", encoding="utf-8")
