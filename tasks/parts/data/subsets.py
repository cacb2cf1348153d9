"""Choose a few images of a split that stand for all of it.

`prepare_data` writes the images of a split in a random order that depends on its seed, so the first ones are a random
sample. Two things make such a sample worse than it need be, and are mended here: images of one group, such as the
windows of one large image, stand side by side, and a class of few images may be missing.

N images, C classes.
"""

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tasks.parts.data.dataset import (
    Manifest,
    has_labels,
    open_groups,
    open_images,
    open_labels,
    read_manifest,
)
from tasks.parts.data.input_card import Task
from tasks.parts.data.lazy_array import part_of

Rows = slice | NDArray[np.int64]
"""Which images of a split; a slice if they are the first ones."""

_SEED = 0


def open_chosen_images(dataset: Path, split: str, num_images: int | None) -> NDArray[np.uint8]:
    """Open the images that `choose_rows` chooses."""
    return part_of(open_images(dataset, split), choose_rows(dataset, split, num_images))


def choose_rows(dataset: Path, split: str, num_images: int | None) -> Rows:
    """Choose labelled images of a split, all if None or more than there are; the same whenever they are asked for.

    As many groups as possible are in the sample. Each class that is in the split is in the sample, if there is room:
    the last images that add no class give way to the first ones that hold what is missing. The first images of the
    split are chosen, in their order, if they are such a sample. Few labels are read: those of the sample, and more
    until every class was met.
    """
    manifest = read_manifest(dataset)
    num_all = manifest.counts[split] if split in manifest.counts else len(open_images(dataset, split))
    num_labelled = num_all - (manifest.num_unlabelled if split == "train" else 0)
    if num_images is None or num_images >= num_labelled:
        return slice(None) if num_labelled == num_all else slice(num_labelled)
    order_N = _one_of_each_group_first(open_groups(dataset, split)[:num_labelled])
    chosen = _with_all_classes(dataset, manifest, split, order_N, num_images)
    return slice(num_images) if chosen == list(range(num_images)) else np.array(chosen, np.int64)


def _one_of_each_group_first(groups_N: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the images in an order with a random one of each group first, then another of each, and so on."""
    if len(np.unique(groups_N)) == len(groups_N):
        return np.arange(len(groups_N))
    shuffled_N = np.random.default_rng(_SEED).permutation(len(groups_N))
    num_before: Counter[int] = Counter()
    rank_N = np.zeros(len(groups_N), np.int64)
    for place, group in enumerate(groups_N[shuffled_N].tolist()):
        rank_N[place] = num_before[group]
        num_before[group] += 1
    order_N: NDArray[np.int64] = shuffled_N[np.argsort(rank_N, kind="stable")]
    return order_N


def _with_all_classes(
    dataset: Path, manifest: Manifest, split: str, order_N: NDArray[np.int64], num_images: int
) -> list[int]:
    """Return the first images of an order, with some of the last replaced if classes are missing among them."""
    shares = manifest.pixel_share.get(split, ())
    present = {index for index, share in enumerate(shares) if share > 0}
    tasks = (Task.segmentation, Task.classification)
    task = next((task for task in tasks if has_labels(manifest, split, task)), None)
    chosen: list[int] = order_N[:num_images].tolist()
    if task is None or not present:
        return chosen
    classes = _classes_of(open_labels(dataset, split, task), order_N, len(shares))
    held = {row: found for row, (_, found) in zip(chosen, classes, strict=False)}
    count = Counter(index for found in held.values() for index in found)
    while missing := present - {index for index, number in count.items() if number}:
        row, found = next(((row, found) for row, found in classes if found & missing), (None, set[int]()))
        given_up = next(
            (row for row in reversed(chosen) if all(count[index] > 1 for index in held[row])), None
        )
        if row is None or given_up is None:
            break
        chosen.remove(given_up)
        count -= Counter(held.pop(given_up))
        chosen.append(row)
        held[row] = found
        count += Counter(found)
    return chosen


def _classes_of(
    labels: NDArray[Any], order_N: NDArray[np.int64], num_classes: int
) -> Iterator[tuple[int, set[int]]]:
    """Yield images in an order, each with its classes; labels are read one by one."""
    for row in order_N.tolist():
        counts = np.bincount(np.ravel(labels[row]), minlength=num_classes)
        yield row, set(np.flatnonzero(counts[:num_classes]).tolist())
