"""Folders that say to which split their images belong, and sub-folders, whose images are a group."""

from collections.abc import Iterable
from pathlib import Path

from tasks.core.errors import DataError

SPLIT_OF_FOLDER = {"train": "train", "val": "val", "valid": "val", "validation": "val", "test": "test"}
"""Name of a folder, in lower case -> the split that its images are."""


def split_of_folder(folder: str) -> str | None:
    """Return the split that a folder is called as, in letters of any case; None for another name."""
    return SPLIT_OF_FOLDER.get(folder.lower())


def declared_splits(names: Iterable[str], *, root: Path, place: Path) -> dict[str, tuple[str, ...]]:
    """Return the images of each split whose folder the names begin with; nothing if no such folder says so.

    `names` are paths below `place`; lists in the root decide before folders do. Raises DataError where some images
    are in folders of splits and others are not, where two folders are one split, and where there is no folder of
    train.
    """
    if (root / "train.txt").exists():
        return {}
    members: dict[str, list[str]] = {}
    for name in sorted(names):
        members.setdefault(name.partition("/")[0] if "/" in name else "", []).append(name)
    split_of = {folder: split for folder in members if (split := split_of_folder(folder))}
    found, others = list(split_of), [folder for folder in members if folder not in split_of]
    if not found or (len(found) == 1 and others):
        return {}  # a single folder of such a name may be anything, such as pictures of trains
    if others:
        first = members[others[0]]
        raise DataError(
            f"{place}: holds the folders {_joined(found)} of splits, and {len(first)} image(s) outside of them, such "
            f"as '{first[0]}', which would be in no split. Move them into these folders or out of {place}, or name "
            "the images of each split in train.txt, val.txt and test.txt."
        )
    by_split: dict[str, str] = {}
    for folder, split in split_of.items():
        other = by_split.setdefault(split, folder)
        if other != folder:
            raise DataError(
                f"{place}: the folders '{other}' and '{folder}' are both the split '{split}', expected one. Rename "
                "or unite them."
            )
    if "train" not in by_split:
        raise DataError(
            f"{place}: holds the folders {_joined(found)} of splits and no folder 'train', expected images to train "
            "on. Add it, or move the images out of these folders, so that splits are chosen."
        )
    return {split: tuple(members[by_split[split]]) for split in sorted(by_split)}


def sub_folder(name: str, *, num_passed_over: int) -> str | None:
    """Return the folder of an image below the first ones, which are of a split or a class; None without one."""
    folders = name.split("/")[num_passed_over:-1]
    return "/".join(folders) or None


def _joined(names: Iterable[str]) -> str:
    return ", ".join(f"'{name}'" for name in names)
