"""Check pairs of an image and a mask of any layout, and turn them into arrays.

A layout is a function in a module of its own (mask_folder.py, cityscapes.py, ..) that lists pairs and opens none.
Here each is read and checked once before anything is written, assigned to a split, and read again when it is written.
N images, H height, W width, C channels.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from tasks.core.errors import ConfigError, DataError
from tasks.parts.data.class_table import IGNORE_INDEX, UNKNOWN, ClassTable, StoredMask, unpacked
from tasks.parts.data.image_files import (
    EncodedImage,
    UnreadableImage,
    pillow_without_own_cap,
    read_image,
    thread_pool,
)
from tasks.parts.data.masks import MaskReader
from tasks.parts.sources.config import FolderConfig, Groups, MissingMasks
from tasks.parts.sources.division import Division, divide, origins_of_splits
from tasks.parts.sources.duplicates import Duplicates, Pixels, find_duplicates, pixels_of
from tasks.parts.sources.faults import without_traceback
from tasks.parts.sources.splits import (
    further,
    number_groups,
    read_groups,
    read_split_files,
    refuse_empty,
    refuse_empty_lists,
    refuse_few_groups,
    share_out,
)
from tasks.parts.sources.stored_values import check_values

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from tasks.parts.data.dataset import Batch

logger = logging.getLogger(__name__)

BACKGROUND = "background"
"""Class of all pixels of an image without a mask, if prepare_data.folder.missing_masks is background."""

_FILES_PER_PROGRESS_LINE = 1000
_WHITE = 255


@dataclass(frozen=True)
class Pair:
    """An image and its mask."""

    name: str
    """Name that lists of splits use, in Unicode form NFC."""
    image: EncodedImage
    mask: MaskReader | None
    """None if the image has no mask."""
    group: str | None = None
    """Images of one group, such as the frames of a video, go into the same split."""


@dataclass(frozen=True)
class Listing:
    """What a layout holds; nothing is opened yet."""

    table: ClassTable
    pairs: tuple[Pair, ...]
    splits: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Names of the pairs of each of train, val and test that the layout itself names; empty if it names none.
    A missing val or test is taken from train."""
    warnings: tuple[str, ...] = ()
    group_kind: str = "groups of the layout"
    """What the groups of the pairs are, for messages."""
    split_place: str = "the official splits"
    """What names the splits, for messages."""


@dataclass(frozen=True)
class CheckedPairs:
    """A data set that passed every check."""

    table: ClassTable
    splits: dict[str, tuple[Pair, ...]]
    groups: dict[str, NDArray[np.int64] | None]
    """Number of the group of each image, by split; None without groups."""
    sizes: dict[str, tuple[int, int]]
    """Height and width of each image, by the name of its pair."""
    num_bad_images: int
    """Number of images that are skipped because they cannot be read."""
    duplicates: Duplicates
    """Images of val or test that also occur in another of train, val, test."""
    division: Division
    """Where splits and groups come from, and the table of all images."""
    types: tuple[str, ...]
    """numpy's names of the types of the values in the files of the images."""
    num_unlabelled: int
    """Number of images, the last ones of train, without labels."""
    warnings: tuple[str, ...]


def check_pairs(root: Path, listing: Listing, config: FolderConfig, *, seed: int) -> CheckedPairs:
    """Read and check every pair and assign the images to the splits.

    Lists and groups.csv in the root replace the splits and groups of the layout.

    Raises:
        DataError: names the first bad file and counts the others, or a split has images without labels.
        ConfigError: images without masks are to be background, and there is no such class.
    """
    table = listing.table
    _refuse_repeated_names(root, listing.pairs)
    pairs, missing_warnings = _settle_missing_masks(root, listing, config)
    all_names = {pair.name for pair in listing.pairs}
    read = read_split_files(root, all_names)
    lists = read if "train" in read else {**listing.splits, **read}
    groups = _groups(root, listing, pairs, config)
    unlabelled = _unlabelled(pairs, config)
    _refuse_unlabelled(root, lists, unlabelled)
    refuse_empty_lists(root, [pair.name for pair in pairs], lists)
    refuse_few_groups(root, [pair.name for pair in pairs if pair.name not in unlabelled], lists, groups)
    values = check_values([pair.image for pair in pairs], config)
    checks = _check_all(pairs, table, config)
    good, bad_warnings = _drop_bad(checks, config.max_bad_images)
    check_of = {check.pair.name: check for check in good}
    labels = {name: check.labels for name, check in check_of.items()}
    names, split_warnings = share_out(list(check_of), lists, groups, config, seed, labels, unlabelled)
    labelled = [name for name in names["train"] if name not in unlabelled]
    refuse_empty(root, {**names, "train": tuple(labelled)}, lists)
    splits = {split: tuple(check_of[name].pair for name in listed) for split, listed in names.items()}
    _refuse_single_class(root, [check_of[name] for name in labelled], table)
    duplicates = find_duplicates(names, {name: _pixels(check) for name, check in check_of.items()})
    origins = origins_of_splits(root, read, listing.splits, listing.split_place, config)
    paths = {pair.name: _path_below(root, pair) for pair in listing.pairs}
    return CheckedPairs(
        table,
        splits,
        number_groups(names, groups),
        {name: check.size for name, check in check_of.items()},
        len(checks) - len(good),
        duplicates,
        divide(paths, names, groups, origins),
        values.types,
        len(names["train"]) - len(labelled),
        (
            *listing.warnings,
            *missing_warnings,
            *values.warnings,
            *bad_warnings,
            *split_warnings,
            *duplicates.warnings,
        ),
    )


def read_pair(pair: Pair, table: ClassTable, config: FolderConfig) -> Batch:
    """Decode a checked pair at its own size: image_HWC, and mask_HW of class indices or IGNORE_INDEX."""
    import numpy as np

    image_HWC = read_image(pair.image, config)
    if pair.mask is None:
        return image_HWC, np.full(image_HWC.shape[:2], class_without_mask(table, config), np.uint8)
    stored = pair.mask.read(table, max_pixels=config.max_pixels)
    return image_HWC, table.to_classes(stored).astype(np.uint8)


def class_without_mask(table: ClassTable, config: FolderConfig) -> int | None:
    """Return the class, or IGNORE_INDEX, of all pixels of an image without a mask; None if there is none for it."""
    if config.missing_masks is MissingMasks.unlabelled:
        return IGNORE_INDEX
    return table.names.index(BACKGROUND) if BACKGROUND in table.names else None


def match_masks(
    images: Mapping[str, Path],
    masks: Mapping[str, MaskReader],
    *,
    config: FolderConfig,
    image_place: str,
    mask_place: str,
) -> None:
    """Raise DataError for an image without mask, where that is an error, and for a mask without image.

    The places tell where a missing file belongs, with {name} for the name of the pair.
    """
    without_mask = [name for name in images if name not in masks]
    if without_mask and config.missing_masks is MissingMasks.error:
        raise DataError(
            f"{images[without_mask[0]]}: its mask {mask_place.format(name=without_mask[0])} is "
            f"missing{further(without_mask, 'image')}. Add the mask, remove the image, or set "
            "prepare_data.folder.missing_masks to skip, background or unlabelled."
        )
    without_image = [name for name in masks if name not in images]
    if without_image:
        raise DataError(
            f"{masks[without_image[0]]}: its image {image_place.format(name=without_image[0])} is "
            f"missing{further(without_image, 'mask')}. Add the image, or remove the mask."
        )


@dataclass(frozen=True)
class _Check:
    """Findings about one pair."""

    pair: Pair
    fault: DataError | None
    """What is wrong with the pair, or None."""
    pixels: Pixels | None
    """What tells whether the image is the same as another; None if the pair cannot be read."""
    labels: tuple[int, ...]
    """Classes of the mask."""
    size: tuple[int, int] = (0, 0)
    """Height and width of the image; 0 if the pair cannot be read."""
    is_black_and_white: bool = False
    """Whether the ids of the mask are 255 and perhaps 0, as programs that paint write masks of two classes."""


class SizeMismatch(DataError):
    """An image and its mask differ in size."""


class UnknownLabel(DataError):
    """A mask holds an id or a colour that is not in the table of classes."""


def _pixels(check: _Check) -> Pixels:
    assert check.pixels is not None
    return check.pixels


def _path_below(root: Path, pair: Pair) -> str:
    """Return the path of an image relative to the root; inside a larger file that of it, and the place in it."""
    place = Path(str(pair.image))
    return place.relative_to(root).as_posix() if place.is_relative_to(root) else str(place)


def _groups(root: Path, listing: Listing, pairs: Sequence[Pair], config: FolderConfig) -> dict[str, str]:
    """Return the group of each image that has one, and say so."""
    of_layout = {pair.name: pair.group for pair in pairs if pair.group is not None}
    if config.groups is Groups.none:
        of_layout = {}
    if of_layout:
        logger.info(
            "images stay together by %s: %d images in %d groups (prepare_data.folder.groups=%s)",
            listing.group_kind,
            len(of_layout),
            len(set(of_layout.values())),
            config.groups,
        )
    return of_layout | read_groups(root, {pair.name for pair in listing.pairs})


def _refuse_repeated_names(root: Path, pairs: Sequence[Pair]) -> None:
    """Raise DataError for two pairs of one name: lists of splits could not tell them apart."""
    first_of: dict[str, Pair] = {}
    for pair in pairs:
        first = first_of.setdefault(pair.name, pair)
        if first is not pair:
            raise DataError(
                f"{root}: '{pair.name}' is the name of {first.image} and of {pair.image}, expected a name for each. "
                "Rename or remove one of them."
            )


def _settle_missing_masks(
    root: Path, listing: Listing, config: FolderConfig
) -> tuple[list[Pair], tuple[str, ...]]:
    """Return the pairs that stay, and a warning about the images that have no mask."""
    without = [pair for pair in listing.pairs if pair.mask is None]
    if not without:
        return list(listing.pairs), ()
    first = f"{len(without)} image(s) have no mask, the first: {without[0].image}"
    if config.missing_masks is MissingMasks.background:
        if BACKGROUND not in listing.table.names:
            raise ConfigError(
                f"prepare_data.folder.missing_masks is background, and {listing.table.place} has no class of that "
                f"name ({first}). Add the class, or choose error or skip."
            )
        return list(listing.pairs), (f"{first}. They are {BACKGROUND}.",)
    pairs = [pair for pair in listing.pairs if pair.mask is not None]
    if config.missing_masks is MissingMasks.error or not pairs:
        raise DataError(
            f"{root}: {first}. Add the masks, remove the images, or set prepare_data.folder.missing_masks to skip, "
            "background or unlabelled."
        )
    if config.missing_masks is MissingMasks.unlabelled:
        return list(listing.pairs), (
            f"{first}. They have no labels: only what learns from a teacher sees those of train.",
        )
    return pairs, (f"{first}. They are left out.",)


def _unlabelled(pairs: Sequence[Pair], config: FolderConfig) -> frozenset[str]:
    """Return the images that have no labels."""
    if config.missing_masks is not MissingMasks.unlabelled:
        return frozenset()
    return frozenset(pair.name for pair in pairs if pair.mask is None)


def _refuse_unlabelled(root: Path, lists: Mapping[str, tuple[str, ...]], unlabelled: Collection[str]) -> None:
    """Raise DataError for images of val or test that have no labels, and for a train list without labels."""
    for split in (split for split in ("train", "val", "test") if split in lists):
        found = [name for name in lists[split] if name in unlabelled]
        if found and (split != "train" or len(found) == len(lists[split])):
            expected = "some with one" if split == "train" else "a mask for each: only train may lack some"
            raise DataError(
                f"{root}: '{found[0]}' of split '{split}' has no mask{further(found, 'image')}, expected {expected}. "
                "Add masks, take such images out of its list, or set prepare_data.folder.missing_masks to skip."
            )


def _check_all(pairs: Sequence[Pair], table: ClassTable, config: FolderConfig) -> list[_Check]:
    checks: list[_Check] = []
    with pillow_without_own_cap(), thread_pool() as pool:
        for check in pool.map(lambda pair: _check_pair(pair, table, config), pairs):
            checks.append(check)
            if len(checks) % _FILES_PER_PROGRESS_LINE == 0:
                logger.info("checked %d of %d images", len(checks), len(pairs))
    return checks


def _check_pair(pair: Pair, table: ClassTable, config: FolderConfig) -> _Check:
    import numpy as np

    try:
        image_HWC = read_image(pair.image, config)
        if pair.mask is None:
            is_labelled = config.missing_masks is not MissingMasks.unlabelled
            labels: tuple[int, ...] = (table.names.index(BACKGROUND),) if is_labelled else ()
            return _Check(pair, None, pixels_of(pair.image, image_HWC), labels, image_HWC.shape[:2])
        stored = pair.mask.read(table, max_pixels=config.max_pixels)
    except DataError as error:
        return _Check(pair, without_traceback(error), None, ())
    classes_HW = table.to_classes(stored)
    fault: DataError | None = None
    if image_HWC.shape[:2] != classes_HW.shape:
        fault = SizeMismatch(
            f"{pair.image} is {image_HWC.shape[1]} x {image_HWC.shape[0]} (EXIF orientation applied), its "
            f"mask {pair.mask} is {classes_HW.shape[1]} x {classes_HW.shape[0]}. Export both at the same size and "
            "orientation."
        )
    elif (classes_HW == UNKNOWN).any():
        fault = UnknownLabel(_unknown_label_text(pair, stored, classes_HW, table))
    counts = np.bincount(classes_HW.ravel() - UNKNOWN)
    labels = tuple(int(value) for value in np.flatnonzero(counts) + UNKNOWN if 0 <= value != IGNORE_INDEX)
    is_black_and_white = not stored.is_colour and _are_black_and_white(stored.values_HW)
    pixels = pixels_of(pair.image, image_HWC)
    return _Check(pair, fault, pixels, labels, image_HWC.shape[:2], is_black_and_white)


def _are_black_and_white(values: NDArray[np.int32]) -> bool:
    return bool((values == _WHITE).any() and ((values == 0) | (values == _WHITE)).all())


def _unknown_label_text(
    pair: Pair, stored: StoredMask, classes_HW: NDArray[np.int16], table: ClassTable
) -> str:
    import numpy as np

    unknown = [int(value) for value in np.unique(stored.values_HW[classes_HW == UNKNOWN])]
    more = f" and {len(unknown) - 8} more" if len(unknown) > 8 else ""
    where = f"{pair.mask} (of {pair.image})"
    if stored.is_colour:
        shown = ", ".join(str(list(unpacked(value))) for value in unknown[:8])
        return (
            f"{where}: colours {shown}{more} are in no row of {table.place}. Add them to a row as colour, or to "
            "ignore_colours, or set `ignore_rest: true`."
        )
    shown = ", ".join(map(str, unknown[:8]))
    ignored = f"ignored: {_spans(table.ignore_ids)}" if table.ignore_ids else "no ignore_index is set"
    known = _spans(number for row in table.ids or () for number in row)
    text = f"{where}: labels {shown}{more} are not classes; expected {known} ({ignored})."
    if unknown[-1] > 255:
        return f"{text} A 16-bit mask: if it holds class * 1000 + instance, save value // 1000 as 8-bit grey."
    if _are_black_and_white(stored.values_HW):
        return f"{text} {_black_and_white_advice(table)}"
    return (
        f"{text} Add the classes to classes.yaml, map the values by its `ids`, or name them in `ignore_ids` "
        f"({table.place})."
    )


def _spans(numbers: Iterator[int] | frozenset[int]) -> str:
    """Return text such as ``0 to 5, 255``."""
    spans: list[list[int]] = []
    for number in sorted(numbers):
        if spans and number == spans[-1][1] + 1:
            spans[-1][1] = number
        else:
            spans.append([number, number])
    return ", ".join(str(first) if first == last else f"{first} to {last}" for first, last in spans)


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


def _refuse_single_class(root: Path, train: list[_Check], table: ClassTable) -> None:
    present = {label for check in train for label in check.labels}
    if len(present) < 2:
        content = f"only class '{table.names[present.pop()]}'" if present else "only ignored pixels"
        painted = [check for check in train if check.is_black_and_white]
        advice = "check the export of the masks."
        if painted and _WHITE in table.ignore_ids:
            advice = (
                f"{len(painted)} of the masks hold the values 0 and 255 alone, and {table.place} ignores 255. "
                f"{_black_and_white_advice(table)}"
            )
        raise DataError(
            f"{root}: the {len(train)} masks of the train split hold {content} (the first: "
            f"{train[0].pair.mask}). At least two classes are needed: {advice}"
        )


def _black_and_white_advice(table: ClassTable) -> str:
    """Return what to write into classes.yaml for masks of 0 and 255, where 255 is a class."""
    names = table.names if len(table.names) == 2 else (BACKGROUND, "object")
    rows = ", ".join(
        f"{{name: '{name}', ids: [{number}]}}" for name, number in zip(names, (0, _WHITE), strict=True)
    )
    return (
        f"If 255 is the second class, write into classes.yaml: [{rows}], without 255 among what is ignored."
    )


def _same_fault(faults: Sequence[DataError]) -> str:
    return f" And {len(faults) - 1} more file(s) with the same fault." if len(faults) > 1 else ""
