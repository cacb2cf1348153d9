"""Read the pairs of a data set at their final size, batch by batch, to be copied, or to be hashed and listed.

N images, H height, W width, C channels.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from tasks.core.errors import ConfigError
from tasks.parts.data.image_files import (
    FILES_PER_BATCH,
    ResizeMode,
    fit_image,
    fit_mask,
    pillow_without_own_cap,
    thread_pool,
)
from tasks.parts.data.masks import MaskFile
from tasks.parts.sources.config import FolderConfig
from tasks.parts.sources.listed_files import COPIED, HashedFile, Size, reading_rules
from tasks.parts.sources.pairs import CheckedPairs, Listing, Pair, class_without_mask, read_pair
from tasks.parts.sources.windows import cover_images

if TYPE_CHECKING:
    from tasks.parts.data.dataset import Batch
    from tasks.parts.data.dataset_writer import SplitBatches
    from tasks.parts.data.source_files import ReadingRules, SourceRow
    from tasks.parts.reading.windows import Window

_LARGE_FILES_PER_BATCH = 8
"""Number of files that are decoded at once where images keep their size."""


def copied_splits(content: CheckedPairs, config: FolderConfig, size: Size) -> dict[str, SplitBatches]:
    """Return the content of the splits; images are decoded as their batches are read."""
    return {split: _batches_of_split(content, split, config, size, root=None) for split in content.splits}


def listed_splits(
    content: CheckedPairs, config: FolderConfig, size: Size, root: Path
) -> dict[str, SplitBatches]:
    """Return the same with lists of files, which are hashed as their batches are read."""
    return {
        split: _batches_of_split(content, split, config, size, root=None if split in COPIED else root)
        for split in content.splits
    }


def refuse_embedded(listing: Listing) -> None:
    """Raise ConfigError for images or masks that are no files of their own: they cannot be listed."""
    for pair in listing.pairs:
        if not _is_file_of_its_own(pair):
            raise ConfigError(
                f"prepare_data.copy is false, and {pair.image} or its mask ({pair.mask}) is no file of its own. Set "
                "prepare_data.copy to true."
            )


def rules_of_pairs(content: CheckedPairs, config: FolderConfig, size: Size, root: Path) -> ReadingRules:
    """Return what turns the listed files into the same arrays again."""
    return reading_rules(config, size, root, content.table, class_without_mask(content.table, config))


def _batches_of_split(
    content: CheckedPairs, split: str, config: FolderConfig, size: Size, *, root: Path | None
) -> SplitBatches:
    """Return a split that is copied, or, with a root, one that is listed."""
    import numpy as np

    from tasks.parts.data.dataset_writer import SplitBatches

    pairs, groups_N = content.splits[split], content.groups[split]
    covers: list[tuple[Window, ...] | None] = [None] * len(pairs)
    if config.resize_mode is ResizeMode.windows:
        covers = [*cover_images(content, split, config, height=size.height, width=size.width)]
        groups_N = np.arange(len(pairs)) if groups_N is None else groups_N
        groups_N = np.repeat(groups_N, [len(cover or ()) for cover in covers]).astype(np.int64)
    rows: list[SourceRow] | None = None if root is None else []
    nums_images = [1 if cover is None else len(cover) for cover in covers]
    num_labelled = len(pairs) - (content.num_unlabelled if split == "train" else 0)
    batches = _read(content, list(zip(pairs, covers, strict=True)), config, size, root, rows)
    return SplitBatches(sum(nums_images), batches, groups_N, rows, sum(nums_images[num_labelled:]))


def _read(
    content: CheckedPairs,
    items: Sequence[tuple[Pair, tuple[Window, ...] | None]],
    config: FolderConfig,
    size: Size,
    root: Path | None,
    rows: list[SourceRow] | None,
) -> Iterator[Batch]:
    """Yield batches, and add the files of each image to the rows, if there are any to fill."""
    import numpy as np

    def read(item: tuple[Pair, tuple[Window, ...] | None]) -> tuple[Batch, list[SourceRow]]:
        pair, cover = item
        hashed = pair if root is None else _hashed(pair)
        batch = _fit_all(read_pair(hashed, content.table, config), cover, config.resize_mode, size)
        return batch, [] if root is None else _rows(hashed, cover, root)

    is_large = config.resize_mode is ResizeMode.windows or root is not None
    at_once = _LARGE_FILES_PER_BATCH if is_large else FILES_PER_BATCH
    with pillow_without_own_cap(), thread_pool() as pool:
        for start in range(0, len(items), at_once):
            read_items = list(pool.map(read, items[start : start + at_once]))
            if rows is not None:
                rows += [row for _, of_item in read_items for row in of_item]
            images, masks = zip(*(batch for batch, _ in read_items), strict=True)
            yield np.concatenate(images), np.concatenate(masks)


def _fit_all(pair: Batch, cover: tuple[Window, ...] | None, mode: ResizeMode, size: Size) -> Batch:
    """Return images_NHWC and masks_NHW of the windows of an image, or of the image itself."""
    import numpy as np

    from tasks.parts.data.class_table import IGNORE_INDEX
    from tasks.parts.reading.windows import cut_image, cut_mask

    image_HWC, mask_HW = pair
    shape = {"height": size.height, "width": size.width}
    if cover is None:
        images = [fit_image(image_HWC, mode=mode, **shape)]
        masks = [fit_mask(mask_HW, mode=mode, fill=IGNORE_INDEX, **shape)]
    else:
        images = [cut_image(image_HWC, window, **shape) for window in cover]
        masks = [cut_mask(mask_HW, window, **shape) for window in cover]
    return np.stack(images), np.stack(masks)


def _is_file_of_its_own(pair: Pair) -> bool:
    is_mask_file = isinstance(pair.mask, MaskFile) and isinstance(pair.mask.source, Path)
    return isinstance(pair.image, Path) and (pair.mask is None or is_mask_file)


def _hashed(pair: Pair) -> Pair:
    assert isinstance(pair.image, Path)
    mask = pair.mask
    if isinstance(mask, MaskFile):
        assert isinstance(mask.source, Path)
        mask = dataclasses.replace(mask, source=HashedFile(mask.source))
    return dataclasses.replace(pair, image=HashedFile(pair.image), mask=mask)


def _rows(hashed: Pair, cover: tuple[Window, ...] | None, root: Path) -> list[SourceRow]:
    """Return the rows of the list for a pair that was read."""
    from tasks.parts.data.source_files import SourceRow

    assert isinstance(hashed.image, HashedFile)
    image, mask = hashed.image.listed(root), None
    if isinstance(hashed.mask, MaskFile):
        assert isinstance(hashed.mask.source, HashedFile)
        mask = hashed.mask.source.listed(root)
    return [SourceRow(image, mask, window) for window in cover or (None,)]
