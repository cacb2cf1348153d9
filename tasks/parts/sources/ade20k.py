"""List ADE20K as the scene parsing challenge offers it (ADEChallengeData2016.zip, 150 classes).

<root>/images/<training|validation>/<name>.jpg
<root>/annotations/<training|validation>/<name>.png   0: other, which is ignored; 1 .. 150: the classes
<root>/objectInfo150.txt                              names of the classes; or classes.yaml

The official validation split is `test`, and val is taken from the training split.
"""

import csv
from pathlib import Path

from tasks.core.errors import DataError
from tasks.parts.data.class_table import MAX_ID, ClassTable
from tasks.parts.data.masks import MaskFile
from tasks.parts.sources.class_list import (
    CLASSES_FILE,
    check_class_name,
    check_table,
    has_class_list,
    read_class_list,
)
from tasks.parts.sources.config import FolderConfig
from tasks.parts.sources.file_names import list_files
from tasks.parts.sources.links import check_link
from tasks.parts.sources.pairs import Listing, Pair, match_masks

OBJECTS_FILE = "objectInfo150.txt"

_SPLITS = {"training": "train", "validation": "test"}
"""Official split -> split of the data set."""


def list_ade20k(root: Path, config: FolderConfig) -> Listing:
    """List the official training and validation splits."""
    table = read_class_list(root) if has_class_list(root) else read_objects(root)
    pairs: list[Pair] = []
    splits: dict[str, tuple[str, ...]] = {}
    for official, split in _SPLITS.items():
        images_at, masks_at = root / "images" / official, root / "annotations" / official
        images = list_files(images_at, (".jpg", ".jpeg", ".png"), root=root)
        files = list_files(masks_at, (".png",), root=root)
        masks = {name: MaskFile(path) for name, path in files.items()}
        match_masks(
            images,
            masks,
            config=config,
            image_place=f"{images_at}/{{name}}.jpg",
            mask_place=f"{masks_at}/{{name}}.png",
        )
        if not images:
            raise DataError(f"{images_at}: no images, expected *.jpg (prepare_data.root).")
        listed = [Pair(f"{official}/{name}", images[name], masks.get(name)) for name in sorted(images)]
        pairs += listed
        splits[split] = tuple(pair.name for pair in listed)
    return Listing(table, tuple(pairs), splits)


def read_objects(root: Path) -> ClassTable:
    """Read the names of the classes from the table of the data set, whose columns are parted by tabs.

    Of several names of a class, such as "building, edifice", the first stands for it if that keeps all apart.
    """
    path = root / OBJECTS_FILE
    check_link(path, root)
    try:
        rows = [
            row for row in csv.reader(path.read_text(encoding="utf-8").splitlines(), delimiter="\t") if row
        ]
    except FileNotFoundError as error:
        raise DataError(
            f"{path}: not found. Expected the table of the classes that comes with the data set, or "
            f"{root / CLASSES_FILE} (prepare_data.root)."
        ) from error
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: not UTF-8 ({error}). Restore the file.") from error
    columns = [cell.strip() for cell in rows[0]] if rows else []
    if "Idx" not in columns or "Name" not in columns:
        raise DataError(
            f"{path}: its first line is {columns}, expected columns with Idx and Name, parted by tabs."
        )
    numbers, names = [], []
    for row in rows[1:]:
        cells = dict(zip(columns, (cell.strip() for cell in row), strict=False))
        number = cells.get("Idx", "")
        if not number.isdecimal() or not 0 < int(number) <= MAX_ID:
            raise DataError(f"{path}: holds the line {row}, expected Idx to be a number from 1 upward.")
        numbers.append((int(number),))
        names.append(check_class_name(cells.get("Name", ""), source=path))
    first_names = [name.partition(",")[0].strip() for name in names]
    are_apart = len(set(first_names)) == len(names) and all(first_names)
    table = ClassTable(
        tuple(first_names if are_apart else names), str(path), tuple(numbers), ignore_ids=frozenset({0})
    )
    check_table(table)
    return table
