"""Assign the images of a data set to train, val, test and calibration.

What no list decides is chosen so that each class is present in proportion (`choose_stratified`).
``<root>/groups.csv`` (columns ``image`` and ``group``) says which images belong together, such as the frames of one
video: they go into the same split, and the certainty of a score is computed from the groups. The images that it does
not name are in the groups of their layout, such as those of their sub-folder.
"""

from __future__ import annotations

import csv
import hashlib
import heapq
import unicodedata
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from tasks.core.errors import DataError
from tasks.parts.data.image_files import IMAGE_SUFFIXES
from tasks.parts.sources.class_list import check_relative_name
from tasks.parts.sources.config import FolderConfig
from tasks.parts.sources.links import check_link

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

GROUPS_FILE = "groups.csv"

LISTED_SPLITS = ("train", "val", "test")


def read_split_files(root: Path, names: set[str]) -> dict[str, tuple[str, ...]]:
    """Read train.txt, val.txt, test.txt (all or none) and calibration.txt, which may be alone."""
    paths = {split: root / f"{split}.txt" for split in (*LISTED_SPLITS, "calibration")}
    present = {split: path for split, path in paths.items() if path.exists() or path.is_symlink()}
    missing = [paths[split].name for split in LISTED_SPLITS if split not in present]
    if missing and any(split in present for split in LISTED_SPLITS):
        raise DataError(
            f"{root}: holds {', '.join(path.name for path in present.values())}, but not "
            f"{', '.join(missing)}. Add all three of train.txt, val.txt, test.txt, or remove all lists."
        )
    return {split: read_name_list(path, root, names) for split, path in present.items()}


def read_groups(root: Path, names: set[str]) -> dict[str, str]:
    """Read groups.csv: image -> group. Images that it leaves out, or all without the file, are alone."""
    path = root / GROUPS_FILE
    if not path.exists() and not path.is_symlink():
        return {}
    rows = [row for row in csv.reader(_read_lines(path, root)) if row]
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
        split: np.unique([group_of(name, groups) for name in names], return_inverse=True)[1]
        for split, names in splits.items()
    }


def group_of(name: str, groups: Mapping[str, str]) -> str:
    """Return the group of an image; one without a group is its own. Names of images do not begin with a slash."""
    return f"/{groups[name]}" if name in groups else name


def read_name_list(path: Path, root: Path, names: set[str]) -> tuple[str, ...]:
    """Read a list of images, one a line; raise DataError for one that is not in `names`."""
    lines = [line for line in _read_lines(path, root) if line]
    return tuple(dict.fromkeys(_known_names(lines, path, names)))


def _read_lines(path: Path, root: Path) -> list[str]:
    check_link(path, root)
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
            "Names are paths below the folder of the images, with or without suffix, such as "
            f"'{min(names, default='')}'."
        )
    return listed


def share_out(
    names: Sequence[str],
    lists: Mapping[str, tuple[str, ...]],
    groups: Mapping[str, str],
    config: FolderConfig,
    seed: int,
    labels: Mapping[str, Collection[int]],
    unlabelled: Collection[str] = frozenset(),
) -> tuple[dict[str, tuple[str, ...]], list[str]]:
    """Assign readable images to train, val, test and calibration, and warn about doubtful choices.

    `labels` tells which classes an image holds. Lists that name no val or no test leave it to be taken from train.
    The images of a group go into the same split, unless lists tear it. The images of a split are in an order that
    depends on the seed and not on their names, so that the first ones, on which some stages measure, are a random
    sample. No choice depends on images that are `unlabelled`: those of train follow the others there.
    """
    readable = set(names)

    def place(text: str) -> bytes:
        return hashlib.sha256(f"{seed}:{text}".encode()).digest()

    shuffled = sorted(readable, key=lambda name: (place(group_of(name, groups)), name))
    splits = {split: [name for name in listed if name in readable] for split, listed in lists.items()}
    warnings = _left_out_warnings(splits, readable)
    added = set(unlabelled).intersection(splits.get("train", readable))
    labelled = [name for name in splits.get("train", shuffled) if name not in unlabelled]
    if "train" in splits:
        splits["train"] = labelled
    shares = {"val": config.val_share, "test": config.test_share}
    missing = [split for split in shares if split not in splits]
    if missing:
        pool = set(labelled)
        # A rounded-down share must not leave a small folder without val or test.
        counts = {split: max(1, round(shares[split] * len(pool))) for split in missing}
        counts["train"] = len(pool) - sum(counts.values())
        splits |= choose_stratified([name for name in shuffled if name in pool], counts, labels, groups)
    if "calibration" not in splits:
        train = set(splits["train"])
        in_train = [name for name in shuffled if name in train]
        counts = {"calibration": min(config.num_calibration, len(in_train))}
        counts["rest"] = len(in_train) - counts["calibration"]
        chosen = choose_stratified(in_train, counts, labels, {}, complete=("calibration",))
        splits["calibration"] = chosen["calibration"]
    warnings += _calibration_warnings(splits, config) + _torn_group_warnings(splits, groups)
    held = {group_of(name, groups) for split in ("val", "test") for name in splits[split]}
    kept = [name for name in added if group_of(name, groups) not in held]
    warnings += _held_group_warnings(added.difference(kept))
    ordered = {split: tuple(sorted(splits[split], key=place)) for split in (*LISTED_SPLITS, "calibration")}
    return ordered | {"train": (*ordered["train"], *sorted(kept, key=place))}, warnings


def choose_stratified(
    names: Sequence[str],
    counts: Mapping[str, int],
    labels: Mapping[str, Collection[int]],
    groups: Mapping[str, str],
    *,
    complete: Collection[str] = LISTED_SPLITS,
) -> dict[str, list[str]]:
    """Divide images into subsets of `counts` images so that each class is present in each of them in proportion.

    Iterative stratification: Sechidis, Tsoumakas, Vlahavas, "On the Stratification of Multi-Label Data", ECML PKDD
    2011, algorithm 1. The class with the fewest images left comes first; each of its images goes to the subset that
    wants most images of the class, then to the one with most room. Three things differ. A subset of `complete` wants
    at least one image of each class, so that rare ones reach it while there are enough; a full subset gets no more,
    so that counts are exact; and a group goes as a whole, large ones first, which may exceed a count. Ties go to the
    subset that `counts` names first; `names` are in the random order in which images of a class are taken.
    """
    units = _units(names, labels, groups)
    division = _Division(counts, _wanted(units, counts, complete), len(units))
    holders: dict[int, list[int]] = {}
    for number, unit in enumerate(units):
        for label in unit.num_images_of:
            holders.setdefault(label, []).append(number)
    num_left = {label: len(numbers) for label, numbers in holders.items()}
    queue = [(count, label) for label, count in num_left.items()]
    heapq.heapify(queue)
    placed: set[int] = set()
    while queue:
        count, label = heapq.heappop(queue)
        if count != num_left[label]:
            continue  # an entry of an earlier state
        for number in (number for number in holders[label] if number not in placed):
            placed.add(number)
            division.place(units[number], label)
            for held in units[number].num_images_of:
                num_left[held] -= 1
                if held != label and num_left[held]:
                    heapq.heappush(queue, (num_left[held], held))
    for number in (number for number in range(len(units)) if number not in placed):
        division.place(units[number], None)
    return division.subsets


class _Division:
    """Subsets that are being filled."""

    def __init__(
        self, counts: Mapping[str, int], wanted: dict[str, dict[int | None, float]], num_units: int
    ) -> None:
        """Begin with empty subsets; `wanted` is the number of images of each class that each still wants."""
        self._num_left = num_units
        self.subsets: dict[str, list[str]] = {subset: [] for subset in counts}
        self._room = dict(counts)
        self._wanted = wanted

    def place(self, unit: _Unit, label: int | None) -> None:
        """Add a unit to the subset that wants most images of a class, then to the one with most room."""
        not_full = [subset for subset, room in self._room.items() if room > 0]
        empty = [subset for subset in not_full if not self.subsets[subset]]
        open_to_it = empty if self._num_left <= len(empty) else not_full or list(self._room)
        self._num_left -= 1
        chosen = max(
            open_to_it, key=lambda subset: (self._wanted[subset].get(label, 0.0), self._room[subset])
        )
        self.subsets[chosen] += unit.names
        self._room[chosen] -= len(unit.names)
        for held, num_images in unit.num_images_of.items():
            self._wanted[chosen][held] -= num_images


@dataclass(frozen=True)
class _Unit:
    """Images that stay together."""

    names: tuple[str, ...]
    num_images_of: Mapping[int, int]
    """Number of its images that hold a class."""


def _units(
    names: Sequence[str], labels: Mapping[str, Collection[int]], groups: Mapping[str, str]
) -> list[_Unit]:
    """Return the groups and the single images, the largest first."""
    members: dict[str, list[str]] = {}
    for name in names:
        members.setdefault(group_of(name, groups), []).append(name)
    units = [
        _Unit(tuple(held), Counter(label for name in held for label in labels.get(name, ())))
        for held in members.values()
    ]
    return sorted(units, key=lambda unit: -len(unit.names))


def _wanted(
    units: Sequence[_Unit], counts: Mapping[str, int], complete: Collection[str]
) -> dict[str, dict[int | None, float]]:
    """Return the number of images of each class that each subset wants: its share, at least one in `complete`."""
    totals: Counter[int] = Counter()
    for unit in units:
        totals.update(unit.num_images_of)
    num_images = max(1, sum(len(unit.names) for unit in units))
    return {
        subset: {
            label: max(1.0 if subset in complete else 0.0, total * count / num_images)
            for label, total in totals.items()
        }
        for subset, count in counts.items()
    }


def _left_out_warnings(splits: Mapping[str, Sequence[str]], readable: set[str]) -> list[str]:
    listed = {name for split in LISTED_SPLITS for name in splits.get(split, ())}
    if not any(split in splits for split in LISTED_SPLITS) or len(listed) == len(readable):
        return []
    return [f"{len(readable) - len(listed)} image(s) are in none of train.txt, val.txt, test.txt."]


def _calibration_warnings(splits: Mapping[str, Sequence[str]], config: FolderConfig) -> list[str]:
    warnings = []
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
    return warnings


def _torn_group_warnings(splits: Mapping[str, Sequence[str]], groups: Mapping[str, str]) -> list[str]:
    split_of: dict[str, set[str]] = {}
    for split in LISTED_SPLITS:
        for name in splits[split]:
            split_of.setdefault(group_of(name, groups), set()).add(split)
    torn = sorted(group for group, found in split_of.items() if len(found) > 1)
    if not torn:
        return []
    return [
        f"{len(torn)} group(s) are in more than one of train, val and test, so the accuracy is too optimistic: "
        f"'{torn[0][1:]}' is in {', '.join(split for split in LISTED_SPLITS if split in split_of[torn[0]])}."
    ]


def _held_group_warnings(left_out: Collection[str]) -> list[str]:
    if not left_out:
        return []
    return [
        f"{len(left_out)} image(s) without labels are left out of train, because images of their group are in val or "
        f"test: {min(left_out)}."
    ]


def refuse_few_groups(
    root: Path, names: Collection[str], lists: Mapping[str, tuple[str, ...]], groups: Mapping[str, str]
) -> None:
    """Raise DataError if there are fewer groups than splits to choose for them, before images are read."""
    chosen = [split for split in LISTED_SPLITS if split == "train" or split not in lists]
    if len(chosen) == 1 or not groups:
        return
    divided = set(names).intersection(lists.get("train", names))
    num_groups = len({group_of(name, groups) for name in divided})
    if num_groups < len(chosen):
        raise DataError(
            f"{root}: {len(divided)} image(s) in {num_groups} group(s) are to be divided among {', '.join(chosen)}, "
            f"expected a group or more for each. Divide the groups in {root / GROUPS_FILE}, name the images of each "
            "split in train.txt, val.txt and test.txt, or, if the images of a sub-folder do not belong together, set "
            "prepare_data.folder.groups to none."
        )


def refuse_empty_lists(root: Path, names: Collection[str], lists: Mapping[str, tuple[str, ...]]) -> None:
    """Raise DataError for a list that names no image that can be used, before images are read."""
    usable = set(names)
    for split, listed in lists.items():
        if usable.isdisjoint(listed):
            raise _empty_split(root, split, lists, len(usable))


def refuse_empty(
    root: Path, splits: Mapping[str, tuple[str, ...]], lists: Mapping[str, tuple[str, ...]]
) -> None:
    """Raise DataError for a split without images."""
    num_images = len({name for names in splits.values() for name in names})
    for split, names in splits.items():
        if not names:
            raise _empty_split(root, split, lists, num_images)


def _empty_split(root: Path, split: str, lists: Mapping[str, tuple[str, ...]], num_images: int) -> DataError:
    file = root / f"{split}.txt"
    where = file if split in lists and file.exists() else root
    return DataError(
        f"{where}: split '{split}' is empty ({num_images} usable images in all). Add images, or "
        "change the lists or prepare_data.folder.val_share and test_share."
    )


def further(names: Sequence[str], what: str) -> str:
    """Return text that counts the further names; empty for a single one."""
    return f" (and {len(names) - 1} more {what}s)" if len(names) > 1 else ""
