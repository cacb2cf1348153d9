"""Read a user's own data set: images/, masks/ (index masks of the same names) and classes.yaml in one folder.

    <root>/images/**/<name>.png|jpg|jpeg     sub-folders and non-ASCII names are allowed
    <root>/masks/**/<name>.png               grey or palette indices
    <root>/classes.yaml                      see class_list.py
    <root>/train.txt, val.txt, test.txt      optional, one name per line; default: by digests of names
    <root>/calibration.txt                   optional; default: the first images of train
    <root>/groups.csv                        optional; see splits.py

Everything is read and checked once before anything is written; N images, H height, W width.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from tasks.core.errors import DataError
from tasks.parts.sources.class_list import ClassList, read_class_list
from tasks.parts.sources.config import FolderConfig
from tasks.parts.sources.image_files import (
    FILES_PER_BATCH,
    IMAGE_SUFFIXES,
    ColourMask,
    OversizedImage,
    UnreadableImage,
    WrongChannels,
    fit,
    list_files,
    pillow_without_own_cap,
    read_image,
    read_mask,
    thread_pool,
)
from tasks.parts.sources.splits import (
    digest_of_pixels,
    find_duplicates,
    further,
    number_groups,
    read_groups,
    read_split_files,
    refuse_empty,
    share_out,
)

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from tasks.parts.data.dataset import Batch

logger = logging.getLogger(__name__)

_FILES_PER_PROGRESS_LINE = 1000


@dataclass(frozen=True)
class Pair:
    """An image and its mask; the name is its path below images/, without suffix, in Unicode form NFC."""

    name: str
    image: Path
    mask: Path


@dataclass(frozen=True)
class FolderContent:
    """A folder that passed every check."""

    class_list: ClassList
    splits: dict[str, tuple[Pair, ...]]
    groups: dict[str, NDArray[np.int64] | None]
    """Number of the group of each image, by split; None without groups."""
    num_bad_images: int
    """Number of images that are skipped because they cannot be read."""
    num_duplicates: int
    """Number of images of val or test whose pixels also occur in another of train, val, test."""
    warnings: tuple[str, ...]


def scan_folder(root: Path, config: FolderConfig, *, seed: int) -> FolderContent:
    """Read and check every file of a folder and assign the images to the splits.

    Raises:
        DataError: names the first bad file and counts the others.
    """
    class_list = read_class_list(root)
    pairs = _list_pairs(root)
    all_names = {pair.name for pair in pairs}
    lists, groups = read_split_files(root, all_names), read_groups(root, all_names)
    checks = _check_pairs(pairs, class_list, config)
    good, warnings = _drop_bad(checks, config.max_bad_images)
    check_of = {check.pair.name: check for check in good}
    names, split_warnings = share_out(list(check_of), lists, groups, config, seed)
    refuse_empty(root, names, lists)
    splits = {split: tuple(check_of[name].pair for name in listed) for split, listed in names.items()}
    _refuse_single_class(root, [check_of[pair.name] for pair in splits["train"]], class_list)
    images = {name: (check.pair.image, check.digest) for name, check in check_of.items()}
    num_duplicates, duplicate_warnings = find_duplicates(names, images)
    return FolderContent(
        class_list,
        splits,
        number_groups(names, groups),
        len(checks) - len(good),
        num_duplicates,
        (*warnings, *split_warnings, *duplicate_warnings),
    )


def read_batches(
    pairs: Sequence[Pair], class_list: ClassList, config: FolderConfig, *, height: int, width: int
) -> Iterator[Batch]:
    """Decode pairs again and yield them at their final size, with ignored pixels set to IGNORE_INDEX."""
    import numpy as np

    from tasks.parts.data.dataset import IGNORE_INDEX

    def read(pair: Pair) -> Batch:
        image_HWC = read_image(pair.image, max_pixels=config.max_pixels, channels=config.channels)
        stored_HW = read_mask(pair.mask, max_pixels=config.max_pixels)
        is_ignored = stored_HW == (-1 if class_list.ignore_index is None else class_list.ignore_index)
        mask_HW = np.where(is_ignored, IGNORE_INDEX, stored_HW).astype(np.uint8)
        return fit(image_HWC, mask_HW, height=height, width=width, mode=config.resize_mode, fill=IGNORE_INDEX)

    with pillow_without_own_cap(), thread_pool() as pool:
        for start in range(0, len(pairs), FILES_PER_BATCH):
            read_pairs = list(pool.map(read, pairs[start : start + FILES_PER_BATCH]))
            yield np.stack([image for image, _ in read_pairs]), np.stack([mask for _, mask in read_pairs])


@dataclass(frozen=True)
class _Check:
    """Findings about one pair."""

    pair: Pair
    fault: DataError | None
    """What is wrong with the pair, or None."""
    digest: str
    """Digest of the decoded image; empty if the pair cannot be read."""
    labels: tuple[int, ...]
    """Values of the mask without the ignored one."""


class _SizeMismatch(DataError):
    """An image and its mask differ in size."""


class _LabelOutside(DataError):
    """A mask holds a value that is not a class."""


def _list_pairs(root: Path) -> list[Pair]:
    images = list_files(root / "images", IMAGE_SUFFIXES)
    masks = list_files(root / "masks", (".png",))
    without_mask = [name for name in images if name not in masks]
    if without_mask:
        raise DataError(
            f"{images[without_mask[0]]}: its mask {root / 'masks' / without_mask[0]}.png is "
            f"missing{further(without_mask, 'image')}. Add the mask, or remove the image."
        )
    without_image = [name for name in masks if name not in images]
    if without_image:
        raise DataError(
            f"{masks[without_image[0]]}: its image {root / 'images' / without_image[0]}.png (or .jpg, .jpeg) "
            f"is missing{further(without_image, 'mask')}. Add the image, or remove the mask."
        )
    if not images:
        raise DataError(
            f"{root / 'images'}: no images. Expected files {', '.join(IMAGE_SUFFIXES)} (prepare_data.root)."
        )
    return [Pair(name, images[name], masks[name]) for name in sorted(images)]


def _check_pairs(pairs: list[Pair], class_list: ClassList, config: FolderConfig) -> list[_Check]:
    checks: list[_Check] = []
    with pillow_without_own_cap(), thread_pool() as pool:
        for check in pool.map(lambda pair: _check_pair(pair, class_list, config), pairs):
            checks.append(check)
            if len(checks) % _FILES_PER_PROGRESS_LINE == 0:
                logger.info("checked %d of %d images", len(checks), len(pairs))
    return checks


def _check_pair(pair: Pair, class_list: ClassList, config: FolderConfig) -> _Check:
    import numpy as np

    try:
        image_HWC = read_image(pair.image, max_pixels=config.max_pixels, channels=config.channels)
        mask_HW = read_mask(pair.mask, max_pixels=config.max_pixels)
    except (UnreadableImage, OversizedImage, WrongChannels, ColourMask) as error:
        return _Check(pair, error, "", ())
    values = [int(value) for value in np.flatnonzero(np.bincount(mask_HW.ravel()))]
    labels = tuple(value for value in values if value != class_list.ignore_index)
    outside = [value for value in labels if value >= len(class_list.names)]
    fault: DataError | None = None
    if image_HWC.shape[:2] != mask_HW.shape:
        fault = _SizeMismatch(
            f"{pair.image} is {image_HWC.shape[1]} x {image_HWC.shape[0]} (EXIF orientation applied), its "
            f"mask {pair.mask} is {mask_HW.shape[1]} x {mask_HW.shape[0]}. Export both at the same size and "
            "orientation."
        )
    elif outside:
        fault = _LabelOutside(_label_outside_text(pair, outside, class_list))
    return _Check(pair, fault, digest_of_pixels(image_HWC), labels)


def _label_outside_text(pair: Pair, outside: list[int], class_list: ClassList) -> str:
    shown = ", ".join(map(str, outside[:8])) + (f" and {len(outside) - 8} more" if len(outside) > 8 else "")
    last = len(class_list.names) - 1
    ignored = (
        "no ignore_index is set" if class_list.ignore_index is None else f"ignored: {class_list.ignore_index}"
    )
    text = f"{pair.mask} (of {pair.image}): labels {shown} are not classes; expected 0 to {last} ({ignored})."
    if outside[-1] > 255:
        return f"{text} A 16-bit mask: if it holds class * 1000 + instance, save value // 1000 as 8-bit grey."
    return (
        f"{text} Add the classes to classes.yaml, map the values, or set `ignore_index: {outside[-1]}` in it."
    )


def _drop_bad(checks: list[_Check], max_bad_images: int) -> tuple[list[_Check], list[str]]:
    """Stop at inconsistent files; skip unreadable files up to the configured number."""
    faults: dict[type[DataError], list[DataError]] = {}
    for check in checks:
        if check.fault is not None:
            faults.setdefault(type(check.fault), []).append(check.fault)
    unreadable = faults.pop(UnreadableImage, [])
    if faults:
        kind, errors = next(iter(faults.items()))
        others = sum(map(len, faults.values())) - len(errors) + len(unreadable)
        also = f" {others} more file(s) have other faults." if others else ""
        raise kind(f"{errors[0]}{_same_fault(errors)}{also}") from errors[0]
    if len(unreadable) > max_bad_images:
        raise UnreadableImage(
            f"{unreadable[0]}{_same_fault(unreadable)} Found {len(unreadable)} unreadable file(s), "
            f"prepare_data.folder.max_bad_images = {max_bad_images}."
        ) from unreadable[0]
    warnings = (
        [f"{len(unreadable)} unreadable file(s) skipped, the first: {unreadable[0]}"] if unreadable else []
    )
    return [check for check in checks if check.fault is None], warnings


def _refuse_single_class(root: Path, train: list[_Check], class_list: ClassList) -> None:
    present = {label for check in train for label in check.labels}
    if len(present) < 2:
        content = f"only class '{class_list.names[present.pop()]}'" if present else "only ignored pixels"
        raise DataError(
            f"{root / 'masks'}: the {len(train)} masks of the train split hold {content} (the first: "
            f"{train[0].pair.mask}). At least two classes are needed: check the export of the masks."
        )


def _same_fault(faults: Sequence[DataError]) -> str:
    return f" And {len(faults) - 1} more file(s) with the same fault." if len(faults) > 1 else ""
