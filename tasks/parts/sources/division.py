"""Which image is in which split and group, as a table and in words."""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tasks.parts.sources.config import FolderConfig
from tasks.parts.sources.splits import LISTED_SPLITS

COLUMNS = ("path", "split", "group")


@dataclass(frozen=True)
class Division:
    """How the images of a data set were divided."""

    origins: dict[str, str]
    """Where each split comes from: a list, a folder, or a choice."""
    num_groups: int
    """Number of groups of more than one image; 0 if each image is its own."""
    rows: tuple[tuple[str, str, str], ...] = ()
    """Path of each image, its split and its group; empty for an image in no split, or in no group."""


def divide(
    paths: Mapping[str, str],
    splits: Mapping[str, Sequence[str]],
    groups: Mapping[str, str],
    origins: dict[str, str],
) -> Division:
    """Describe a division; `paths` holds all images by their names, `splits` those of each split.

    An image for calibration has two rows if it is also in train.
    """
    rows = [(name, split) for split, names in splits.items() for name in names]
    divided = {name for name, _ in rows}
    rows += [(name, "") for name in paths if name not in divided]
    sizes: dict[str, int] = {}
    for name in divided.intersection(groups):
        sizes[groups[name]] = sizes.get(groups[name], 0) + 1
    return Division(
        origins,
        sum(size > 1 for size in sizes.values()),
        tuple(sorted((paths[name], split, groups.get(name, "")) for name, split in rows)),
    )


def origins_of_splits(
    root: Path,
    read: Mapping[str, Sequence[str]],
    declared: Mapping[str, Sequence[str]],
    declared_by: str,
    config: FolderConfig,
) -> dict[str, str]:
    """Say where each split comes from: `read` are lists in the root, `declared` are splits of the layout."""
    keys = {"val": f"val_share={config.val_share:g}", "test": f"test_share={config.test_share:g}"}
    is_whole = "train" not in read and "train" not in declared
    origins = {}
    for split in LISTED_SPLITS:
        if split in read:
            origins[split] = f"{root / split}.txt"
        elif split in declared and "train" not in read:
            origins[split] = declared_by
        elif split == "train":
            origins[split] = "the images of no other split"
        else:
            origins[split] = (
                f"drawn from {'all images' if is_whole else 'train'} (prepare_data.folder.{keys[split]})"
            )
    return origins


def write_division(path: Path, rows: Sequence[tuple[str, str, str]]) -> None:
    """Write the table of all images, as `groups.csv` and lists name them: paths relative to the root."""
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(COLUMNS)
        writer.writerows(rows)
