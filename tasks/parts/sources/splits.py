"""Assign the images of a folder to train, val, test and calibration.

``<root>/groups.csv`` (columns ``image`` and ``group``) says which images belong together, such as the frames of one
video: they go into the same split, and the certainty of a score is computed from the groups.
"""

from __future__ import annotations

import csv
import hashlib
import unicodedata
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from tasks.core.errors import DataError
from tasks.parts.sources.class_list import check_relative_name
from tasks.parts.sources.config import FolderConfig
from tasks.parts.sources.image_files import IMAGE_SUFFIXES

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

GROUPS_FILE = "groups.csv"

_LISTED_SPLITS = ("train", "val", "test")


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


def read_groups(root: Path, names: set[str]) -> dict[str, str]:
    """Read groups.csv: image -> group. Images that it leaves out, or all without the file, are alone."""
    path = root / GROUPS_FILE
    if not path.exists() and not path.is_symlink():
        return {}
    rows = [row for row in csv.reader(_read_lines(path)) if row]
    if not rows or [cell.strip() for cell in rows[0]] != ["image", "group"]:
        raise DataError(f"{path}: its first line is {rows[:1]}, expected the columns image,group.")
    broken = [row for row in rows if len(row) != 2]
    if broken:
        raise DataError(f"{path}: holds the line {','.join(broken[0])!r}, expected an image and its group.")
    images = _known_names([row[0].strip() for row in rows[1:]], path, names)
    return dict(zip(images, (row[1].strip() for row in rows[1:]), strict=True))


def number_groups(
    splits: Mapping[str, Sequence[str]], groups: Mapping[str, str]
) -> dict[str, NDArray[np.int64] | None]:
    """Return the number of each image's group, from 0 upward, by split; None without groups."""
    import numpy as np

    if not groups:
        return dict.fromkeys(splits)
    return {
        split: np.unique([_group_of(name, groups) for name in names], return_inverse=True)[1]
        for split, names in splits.items()
    }


def _group_of(name: str, groups: Mapping[str, str]) -> str:
    """Return the group of an image; one without a group is its own. Names of images do not begin with a slash."""
    return f"/{groups[name]}" if name in groups else name


def _read_names(path: Path, names: set[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(_known_names([line for line in _read_lines(path) if line], path, names)))


def _read_lines(path: Path) -> list[str]:
    if path.is_symlink():
        raise DataError(f"{path}: is a symbolic link, which is refused. Replace it by the file itself.")
    try:
        return [
            unicodedata.normalize("NFC", line.strip()) for line in path.read_text("utf-8-sig").split("\n")
        ]
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: not UTF-8 ({error}). Save it as UTF-8.") from error


def _known_names(lines: Sequence[str], path: Path, names: set[str]) -> list[str]:
    """Return the image that each line names, with or without suffix; raise DataError for one that does not exist."""
    listed: list[str] = []
    unknown: list[str] = []
    for line in lines:
        check_relative_name(line, source=path)
        stem = line[: -len(Path(line).suffix)] if Path(line).suffix.lower() in IMAGE_SUFFIXES else line
        name = line if line in names else stem
        (listed if name in names else unknown).append(name)
    if unknown:
        raise DataError(
            f"{path}: lists '{unknown[0]}', but there is no image of that name{further(unknown, 'name')}. "
            "Names are paths below images/, with or without suffix."
        )
    return listed


def digest_of_pixels(image_HWC: NDArray[np.uint8]) -> str:
    """Return a digest of the pixels, which is equal for the same picture in another file."""
    return hashlib.sha256(str(image_HWC.shape).encode() + image_HWC.tobytes()).hexdigest()


def share_out(
    names: Sequence[str],
    lists: dict[str, tuple[str, ...]],
    groups: Mapping[str, str],
    config: FolderConfig,
    seed: int,
) -> tuple[dict[str, tuple[str, ...]], list[str]]:
    """Assign readable images to train, val, test and calibration, and warn about doubtful choices.

    Without lists, the images of a group go into the same split. The images of a split are in an order that depends on
    the seed and not on their names, so that the first ones, on which some stages measure, are a random sample.
    """
    readable = set(names)

    def place(text: str) -> bytes:
        return hashlib.sha256(f"{seed}:{text}".encode()).digest()

    shuffled = sorted(readable, key=lambda name: (place(_group_of(name, groups)), name))
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
        end_of_val = _end_of_group(shuffled, num_val, groups)
        end_of_test = _end_of_group(shuffled, end_of_val + num_test, groups)
        splits["val"] = shuffled[:end_of_val]
        splits["test"] = shuffled[end_of_val:end_of_test]
        splits["train"] = shuffled[end_of_test:]
    if "calibration" not in splits:
        in_train = set(splits["train"])
        splits["calibration"] = [name for name in shuffled if name in in_train][: config.num_calibration]
    in_test = set(splits["test"]).intersection(splits["calibration"])
    if in_test:
        warnings.append(
            f"{len(in_test)} calibration image(s) are test images, so quantized accuracy is too optimistic: "
            f"{min(in_test)}."
        )
    if len(splits["calibration"]) < config.num_calibration:
        warnings.append(
            f"{len(splits['calibration'])} calibration image(s), prepare_data.folder.num_calibration "
            f"is {config.num_calibration}: calibrated ranges will be less certain."
        )
    split_of: dict[str, set[str]] = {}
    for split in _LISTED_SPLITS:
        for name in splits[split]:
            split_of.setdefault(_group_of(name, groups), set()).add(split)
    torn = sorted(group for group, found in split_of.items() if len(found) > 1)
    if torn:
        warnings.append(
            f"{len(torn)} group(s) of {GROUPS_FILE} are in more than one of train.txt, val.txt, test.txt, so the "
            f"accuracy is too optimistic: {torn[0][1:]}."
        )
    order = (*_LISTED_SPLITS, "calibration")
    return {split: tuple(sorted(splits[split], key=place)) for split in order}, warnings


def _end_of_group(names: Sequence[str], end: int, groups: Mapping[str, str]) -> int:
    """Return the first position from `end` at which another group begins."""
    while 0 < end < len(names) and _group_of(names[end], groups) == _group_of(names[end - 1], groups):
        end += 1
    return end


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


def find_duplicates(
    splits: Mapping[str, Sequence[str]], images: Mapping[str, tuple[Path, str]]
) -> tuple[int, list[str]]:
    """Count and warn about images of val or test whose pixels also occur in an earlier split.

    `splits` holds names, `images` the file and pixel digest of each name.
    """
    first_of: dict[str, tuple[str, Path]] = {}
    duplicates = []
    for split in _LISTED_SPLITS:
        for name in splits[split]:
            path, digest = images[name]
            first_split, first = first_of.setdefault(digest, (split, path))
            if first_split != split:
                duplicates.append((first, path))
    if not duplicates:
        return 0, []
    first, second = duplicates[0]
    return len(duplicates), [
        f"{len(duplicates)} image(s) of val or test also occur in another split, so the accuracy is too optimistic: "
        f"{second} has the pixels of {first}."
    ]


def further(names: Sequence[str], what: str) -> str:
    """Return text that counts the further names; empty for a single one."""
    return f" (and {len(names) - 1} more {what}s)" if len(names) > 1 else ""
