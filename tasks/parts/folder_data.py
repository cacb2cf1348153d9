"""A user's own data set: images/, masks/ (index masks of the same names) and classes.yaml in one folder.

    <root>/images/**/<name>.png|jpg|jpeg     sub-folders and non-ASCII names are allowed
    <root>/masks/**/<name>.png               grey or palette indices
    <root>/classes.yaml                      see tasks/parts/class_list.py
    <root>/train.txt, val.txt, test.txt      optional, one name per line; else digests of names decide
    <root>/calibration.txt                   optional; else the first images of train

Everything is read and checked once before anything is written; N, H, W as in tasks/parts/data.py.
"""

from __future__ import annotations

import hashlib
import logging
import os
import unicodedata
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from tasks.core.errors import ConfigError, DataError
from tasks.parts.class_list import ClassList, check_relative_name, read_class_list
from tasks.parts.image_files import (
    IMAGE_SUFFIXES,
    ColourMask,
    OversizedImage,
    ResizeMode,
    UnreadableImage,
    file_name_is_text,
    fit,
    pillow_without_own_cap,
    read_image,
    read_mask,
)

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from tasks.parts.data import Batch

logger = logging.getLogger(__name__)

_LISTED_SPLITS = ("train", "val", "test")
FILES_PER_BATCH = 64
_FILES_PER_PROGRESS_LINE = 1000


@dataclass(frozen=True)
class FolderConfig:
    """How a user's folder becomes a data set."""

    resize_mode: ResizeMode
    """resize: stretched to height x width. crop: cut from the centre, padded with black, ignored pixels."""
    val_share: float
    """Share of the images for val, above 0; not read where the folder has train.txt, val.txt, test.txt."""
    test_share: float
    """Share of the images for test, above 0; val_share + test_share stays below 1."""
    num_calibration: int
    """Images of train that quantizers observe as well; at least 1."""
    max_megapixels: float
    """Larger images and masks are refused before they are decoded (memory)."""
    max_bad_images: int
    """So many unreadable files are skipped with a warning; one more stops the run. 0: none is skipped."""

    def __post_init__(self) -> None:
        section = "prepare_data.folder"
        for key in ("val_share", "test_share"):
            if not 0 < getattr(self, key) < 1:
                raise ConfigError(f"{section}.{key} = {getattr(self, key)}: must be above 0 and below 1.")
        if self.val_share + self.test_share >= 1:
            raise ConfigError(
                f"{section}.val_share + {section}.test_share = {self.val_share + self.test_share:g}: must be "
                "below 1, the rest is the train split."
            )
        if self.num_calibration < 1:
            raise ConfigError(
                f"{section}.num_calibration = {self.num_calibration}: must be at least 1, quantizers cannot "
                "be calibrated without images."
            )
        if not 0 < self.max_megapixels <= 100_000:
            raise ConfigError(
                f"{section}.max_megapixels = {self.max_megapixels}: must be above 0, at most 100000."
            )
        if self.max_bad_images < 0:
            raise ConfigError(f"{section}.max_bad_images = {self.max_bad_images}: must be 0 or more.")

    @property
    def max_pixels(self) -> int:
        """The pixel cap in pixels."""
        return round(self.max_megapixels * 1e6)


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
    num_bad_images: int
    """Skipped because they cannot be read."""
    num_duplicates: int
    """Images of val or test whose pixels also are in another of train, val, test."""
    warnings: tuple[str, ...]


def scan_folder(root: Path, config: FolderConfig, *, seed: int) -> FolderContent:
    """Read and check every file of a folder and share the images out to the splits.

    Raises:
        DataError: the first bad file is named, with a count of further ones.
    """
    class_list = read_class_list(root)
    pairs = _list_pairs(root)
    lists = read_split_files(root, {pair.name for pair in pairs})
    checks = _check_pairs(pairs, class_list, config)
    good, warnings = _drop_bad(checks, config.max_bad_images)
    check_of = {check.pair.name: check for check in good}
    names, split_warnings = share_out(list(check_of), lists, config, seed)
    refuse_empty(root, names, lists)
    splits = {split: tuple(check_of[name].pair for name in listed) for split, listed in names.items()}
    _refuse_single_class(root, [check_of[pair.name] for pair in splits["train"]], class_list)
    images = {name: (check.pair.image, check.digest) for name, check in check_of.items()}
    num_duplicates, duplicate_warnings = find_duplicates(names, images)
    return FolderContent(
        class_list,
        splits,
        len(checks) - len(good),
        num_duplicates,
        (*warnings, *split_warnings, *duplicate_warnings),
    )


def read_batches(
    pairs: Sequence[Pair], class_list: ClassList, config: FolderConfig, *, height: int, width: int
) -> Iterator[Batch]:
    """Decode pairs again and yield them at their final size, with ignored pixels set to IGNORE_INDEX."""
    import numpy as np

    from tasks.parts.data import IGNORE_INDEX

    def read(pair: Pair) -> Batch:
        image_HWC = read_image(pair.image, max_pixels=config.max_pixels)
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
    """What reading one pair found."""

    pair: Pair
    fault: DataError | None
    digest: str
    """Of the decoded image."""
    labels: tuple[int, ...]
    """Mask values, ignored ones left out."""


class _SizeMismatch(DataError):
    """An image and its mask differ in size."""


class _LabelOutside(DataError):
    """A mask holds a value that is no class."""


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
            f"{root / 'images'}: no image. Expected files {', '.join(IMAGE_SUFFIXES)} (prepare_data.root)."
        )
    return [Pair(name, images[name], masks[name]) for name in sorted(images)]


def list_files(folder: Path, suffixes: Iterable[str]) -> dict[str, Path]:
    """Map the name of each file below a folder to its path, without hidden files and other suffixes."""
    if not folder.is_dir() or folder.is_symlink():
        raise DataError(
            f"{folder}: no folder. Expected images/ and masks/ in prepare_data.root, and no symbolic links."
        )
    found: dict[str, Path] = {}
    for parent, folders, files in os.walk(folder):
        for entry in (*folders, *files):
            path = Path(parent, entry)
            if not file_name_is_text(path):
                raise DataError(f"{os.fsencode(path)!r}: the file name is no UTF-8. Rename it.")
            if path.is_symlink():
                raise DataError(f"{path}: is a symbolic link, which is refused. Put the file itself there.")
        folders[:] = [name for name in folders if not name.startswith(".")]
        for path in (Path(parent, name) for name in files if not name.startswith(".")):
            if path.suffix.lower() not in suffixes:
                continue
            # macOS stores é as two characters: without one form, image and mask of one name would not meet.
            name = unicodedata.normalize("NFC", path.relative_to(folder).with_suffix("").as_posix())
            check_relative_name(name, source=folder)
            if name in found:
                raise DataError(
                    f"{path}: has the same name as {found[name]}. Masks belong to one image: rename one."
                )
            found[name] = path
    return found


def read_split_files(root: Path, names: set[str]) -> dict[str, tuple[str, ...]]:
    """Read train.txt, val.txt, test.txt (all or none) and calibration.txt."""
    paths = {split: root / f"{split}.txt" for split in (*_LISTED_SPLITS, "calibration")}
    present = {split: path for split, path in paths.items() if path.exists() or path.is_symlink()}
    missing = [paths[split].name for split in _LISTED_SPLITS if split not in present]
    if present and missing:
        raise DataError(
            f"{root}: holds {', '.join(path.name for path in present.values())}, but not "
            f"{', '.join(missing)}. Add all three of train.txt, val.txt, test.txt, or remove all lists."
        )
    return {split: _read_names(path, names) for split, path in present.items()}


def _read_names(path: Path, names: set[str]) -> tuple[str, ...]:
    if path.is_symlink():
        raise DataError(f"{path}: is a symbolic link, which is refused. Put the file itself there.")
    try:
        lines = [
            unicodedata.normalize("NFC", line.strip()) for line in path.read_text("utf-8-sig").split("\n")
        ]
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: is no UTF-8 ({error}). Save it as UTF-8.") from error
    listed: list[str] = []
    unknown: list[str] = []
    for line in filter(None, lines):
        check_relative_name(line, source=path)
        stem = line[: -len(Path(line).suffix)] if Path(line).suffix.lower() in IMAGE_SUFFIXES else line
        name = line if line in names else stem
        (listed if name in names else unknown).append(name)
    if unknown:
        raise DataError(
            f"{path}: lists '{unknown[0]}', but there is no image of that name{further(unknown, 'name')}. "
            "Names are paths below images/, with or without suffix."
        )
    return tuple(dict.fromkeys(listed))


def _check_pairs(pairs: list[Pair], class_list: ClassList, config: FolderConfig) -> list[_Check]:
    checks: list[_Check] = []
    with pillow_without_own_cap(), thread_pool() as pool:
        for check in pool.map(lambda pair: _check_pair(pair, class_list, config.max_pixels), pairs):
            checks.append(check)
            if len(checks) % _FILES_PER_PROGRESS_LINE == 0:
                logger.info("checked %d of %d images", len(checks), len(pairs))
    return checks


def _check_pair(pair: Pair, class_list: ClassList, max_pixels: int) -> _Check:
    import numpy as np

    try:
        image_HWC = read_image(pair.image, max_pixels=max_pixels)
        mask_HW = read_mask(pair.mask, max_pixels=max_pixels)
    except (UnreadableImage, OversizedImage, ColourMask) as error:
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


def digest_of_pixels(image_HWC: NDArray[np.uint8]) -> str:
    """Return the same for the same picture in another file."""
    return hashlib.sha256(str(image_HWC.shape).encode() + image_HWC.tobytes()).hexdigest()


def _label_outside_text(pair: Pair, outside: list[int], class_list: ClassList) -> str:
    shown = ", ".join(map(str, outside[:8])) + (f" and {len(outside) - 8} more" if len(outside) > 8 else "")
    last = len(class_list.names) - 1
    ignored = (
        "no ignore_index is set" if class_list.ignore_index is None else f"ignored: {class_list.ignore_index}"
    )
    text = f"{pair.mask} (of {pair.image}): labels {shown} are no classes; expected 0 to {last} ({ignored})."
    if outside[-1] > 255:
        return f"{text} A 16-bit mask: if it holds class * 1000 + instance, save value // 1000 as 8-bit grey."
    return (
        f"{text} Add the classes to classes.yaml, map the values, or set `ignore_index: {outside[-1]}` in it."
    )


def _drop_bad(checks: list[_Check], max_bad_images: int) -> tuple[list[_Check], list[str]]:
    """Stop at contradictions; skip unreadable files up to the configured number."""
    faults: dict[type[DataError], list[DataError]] = {}
    for check in checks:
        if check.fault is not None:
            faults.setdefault(type(check.fault), []).append(check.fault)
    unreadable = faults.pop(UnreadableImage, [])
    if faults:
        kind, found = next(iter(faults.items()))
        others = sum(map(len, faults.values())) - len(found) + len(unreadable)
        also = f" {others} more file(s) have other faults." if others else ""
        raise kind(f"{found[0]}{_same_fault(found)}{also}") from found[0]
    if len(unreadable) > max_bad_images:
        raise UnreadableImage(
            f"{unreadable[0]}{_same_fault(unreadable)} Found {len(unreadable)} unreadable file(s), "
            f"prepare_data.folder.max_bad_images = {max_bad_images}."
        ) from unreadable[0]
    warnings = (
        [f"{len(unreadable)} unreadable file(s) skipped, the first: {unreadable[0]}"] if unreadable else []
    )
    return [check for check in checks if check.fault is None], warnings


def share_out(
    names: Sequence[str], lists: dict[str, tuple[str, ...]], config: FolderConfig, seed: int
) -> tuple[dict[str, tuple[str, ...]], list[str]]:
    """Share readable images out to train, val, test and calibration, with warnings about doubtful choices."""
    readable = set(names)
    by_digest = sorted(readable, key=lambda name: hashlib.sha256(f"{seed}:{name}".encode()).digest())
    splits = {split: [name for name in listed if name in readable] for split, listed in lists.items()}
    warnings: list[str] = []
    if lists:
        chosen = {name for split in _LISTED_SPLITS for name in splits[split]}
        if len(chosen) < len(readable):
            warnings.append(
                f"{len(readable) - len(chosen)} image(s) are in none of train.txt, val.txt, test.txt."
            )
    else:
        # A rounded-down share must not leave a small folder without val or test.
        num_val = max(1, round(config.val_share * len(readable)))
        num_test = max(1, round(config.test_share * len(readable)))
        splits["val"] = by_digest[:num_val]
        splits["test"] = by_digest[num_val : num_val + num_test]
        splits["train"] = by_digest[num_val + num_test :]
    if "calibration" not in splits:
        in_train = set(splits["train"])
        splits["calibration"] = [name for name in by_digest if name in in_train][: config.num_calibration]
    in_test = set(splits["test"]).intersection(splits["calibration"])
    if in_test:
        warnings.append(
            f"{len(in_test)} calibration image(s) are test images, so quantized accuracy flatters: "
            f"{min(in_test)}."
        )
    if len(splits["calibration"]) < config.num_calibration:
        warnings.append(
            f"{len(splits['calibration'])} calibration image(s), prepare_data.folder.num_calibration asks "
            f"for {config.num_calibration}: ranges of quantizers will be less certain."
        )
    order = (*_LISTED_SPLITS, "calibration")
    return {split: tuple(sorted(splits[split])) for split in order}, warnings


def refuse_empty(root: Path, splits: dict[str, tuple[str, ...]], lists: dict[str, tuple[str, ...]]) -> None:
    """Raise DataError for a split without images."""
    num_images = len({name for names in splits.values() for name in names})
    for split, names in splits.items():
        if not names:
            where = root / f"{split}.txt" if split in lists else root / "images"
            raise DataError(
                f"{where}: split '{split}' is empty ({num_images} usable images in all). Add images, or "
                "change the lists or prepare_data.folder.val_share and test_share."
            )


def _refuse_single_class(root: Path, train: list[_Check], class_list: ClassList) -> None:
    present = {label for check in train for label in check.labels}
    if len(present) < 2:
        found = f"only class '{class_list.names[present.pop()]}'" if present else "only ignored pixels"
        raise DataError(
            f"{root / 'masks'}: the {len(train)} masks of the train split hold {found} (the first: "
            f"{train[0].pair.mask}). At least two classes are needed: check the export of the masks."
        )


def find_duplicates(
    splits: Mapping[str, Sequence[str]], images: Mapping[str, tuple[Path, str]]
) -> tuple[int, list[str]]:
    """Count images of val or test whose pixels are in an earlier split too, and warn of them.

    `splits` holds names, `images` the file and the digest of the pixels of each.
    """
    first_of: dict[str, tuple[str, Path]] = {}
    found = []
    for split in _LISTED_SPLITS:
        for name in splits[split]:
            path, digest = images[name]
            first_split, first = first_of.setdefault(digest, (split, path))
            if first_split != split:
                found.append((first, path))
    if not found:
        return 0, []
    first, second = found[0]
    return len(found), [
        f"{len(found)} image(s) of val or test also occur in another split, so the accuracy flatters: {second} has "
        f"the pixels of {first}."
    ]


def _same_fault(faults: Sequence[DataError]) -> str:
    return f" And {len(faults) - 1} more file(s) with the same fault." if len(faults) > 1 else ""


def further(names: Sequence[str], what: str) -> str:
    """Say how many more there are."""
    return f" (and {len(names) - 1} more {what}s)" if len(names) > 1 else ""


def thread_pool() -> ThreadPoolExecutor:
    """Return threads that decode images side by side."""
    return ThreadPoolExecutor(max_workers=min(8, os.cpu_count() or 1))
