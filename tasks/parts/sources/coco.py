"""List COCO as it is downloaded: panoptic masks, or instances as polygons and run lengths. H height, W width.

<root>/<train|val>2017/<name>.jpg, or images/<train|val>2017/<name>.jpg
<root>/annotations/panoptic_<train|val>2017.json, panoptic_<train|val>2017/<name>.png     annotations: panoptic
<root>/annotations/instances_<train|val>2017.json                                         annotations: instances

Other years work too. Classes are the categories of the files; for instances, pixels of no object are the class
`background`, with id 0. Crowds are ignored, and so are pixels of no segment in panoptic masks. Where instances
overlap, smaller ones lie over larger ones, later over earlier ones of the same size. The official val split is
`test`, and val is taken from train.

Exports of instances are read, too; their splits are kept, and what lacks is taken from train:

<root>/annotations/instances_<train|val|test|default>.json, images/**      CVAT; default is of no split
<root>/<train|valid|test>/_annotations.coco.json and images beside it      Roboflow

A category may have the id 0; then background has the largest id plus one.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tasks.core.errors import DataError
from tasks.parts.data.class_table import IGNORED_ID, MAX_ID, ClassTable, StoredMask
from tasks.parts.data.image_files import UnreadableImage, check_pixels, decoded
from tasks.parts.data.masks import ColourMask, MaskReader
from tasks.parts.sources.class_list import (
    check_class_name,
    check_relative_name,
    check_table,
    has_class_list,
    read_class_list,
)
from tasks.parts.sources.config import Annotations, FolderConfig
from tasks.parts.sources.declared_splits import split_of_folder, sub_folder
from tasks.parts.sources.file_names import list_files
from tasks.parts.sources.links import check_link
from tasks.parts.sources.pairs import BACKGROUND, Listing, Pair
from tasks.parts.sources.splits import further

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

_SPLITS = {"train": "train", "val": "test"}
"""Official split -> split of the data set."""

_ROW_KEYS = {
    "images": ("id", "file_name", "height", "width"),
    "categories": ("id", "name"),
    Annotations.panoptic: ("image_id", "file_name", "segments_info"),
    Annotations.instances: ("image_id", "category_id", "segmentation"),
}
"""What a row of a list in a JSON file must hold."""


@dataclass(frozen=True)
class PanopticMask:
    """A PNG whose colours are ids of segments: red + 256 green + 65536 blue; 0 is no segment."""

    file: Path
    category_of: Mapping[int, int]
    """Segment -> category; IGNORED_ID for a crowd."""
    listed_in: Path

    def __str__(self) -> str:
        return str(self.file)

    def read(self, table: ClassTable, *, max_pixels: int) -> StoredMask:
        """Decode the mask to the category of each pixel; raise DataError for a segment that is not listed."""
        import numpy as np

        with decoded(self.file, max_pixels) as image:
            if image.mode != "RGB":
                raise ColourMask(
                    f"{self.file}: a {image.mode} image, expected RGB with the ids of segments. Set "
                    "prepare_data.folder.annotations to instances, or restore the file."
                )
            parts_HWC = np.asarray(image).astype(np.int32)
        segments_HW = parts_HWC[..., 0] + (parts_HWC[..., 1] << 8) + (parts_HWC[..., 2] << 16)
        segments, places = np.unique(segments_HW, return_inverse=True)
        category_of = {0: IGNORED_ID, **self.category_of}
        unlisted = [int(segment) for segment in segments if int(segment) not in category_of]
        if unlisted:
            raise DataError(
                f"{self.file}: holds the segment {unlisted[0]}, which {self.listed_in} does not list. Both files "
                "must be of the same version."
            )
        categories = np.array([category_of[int(segment)] for segment in segments], np.int32)
        return StoredMask(categories[places].reshape(segments_HW.shape), is_colour=False)


@dataclass(frozen=True)
class InstanceMask:
    """The objects of one image, as polygons or run lengths."""

    image_id: int
    height: int
    width: int
    objects: tuple[Mapping[str, Any], ...]
    listed_in: Path
    background: int = 0
    """Id of pixels of no object."""

    def __str__(self) -> str:
        return f"{self.listed_in}: image {self.image_id}"

    def read(self, table: ClassTable, *, max_pixels: int) -> StoredMask:
        """Draw the objects: first crowds and boxes, which are ignored, then from the largest to the smallest."""
        import numpy as np

        check_pixels(self, self.width, self.height, max_pixels)
        categories_HW = np.full((self.height, self.width), self.background, np.int32)
        drawn: list[tuple[bool, int, int, NDArray[np.bool_]]] = []
        for found in self.objects:
            is_object_HW = self._decode(found)
            is_crowd = bool(found.get("iscrowd", 0)) or _is_box_alone(found)
            drawn.append((not is_crowd, -int(is_object_HW.sum()), len(drawn), is_object_HW))
        for has_class, _, number, is_object_HW in sorted(drawn, key=lambda entry: entry[:3]):
            categories_HW[is_object_HW] = self.objects[number]["category_id"] if has_class else IGNORED_ID
        return StoredMask(categories_HW, is_colour=False)

    def _decode(self, found: Mapping[str, Any]) -> NDArray[np.bool_]:
        """Return the pixels of an object: a list of polygons, or run lengths as numbers or as text."""
        from pycocotools import mask as coco_mask

        shape = found["segmentation"]
        if _is_box_alone(found):
            left, top, width, height = found["bbox"]
            right, bottom = left + width, top + height
            shape = [[left, top, right, top, right, bottom, left, bottom]]
        if not _is_polygons(shape) and not _is_run_lengths(shape, self.height, self.width):
            raise self._broken(found, str(shape)[:60])
        try:
            if isinstance(shape, list):
                encoded = coco_mask.merge(coco_mask.frPyObjects(shape, self.height, self.width))
            elif isinstance(shape["counts"], list):
                encoded = coco_mask.frPyObjects(shape, self.height, self.width)
            else:
                encoded = shape
            pixels: NDArray[np.bool_] = coco_mask.decode(encoded).astype(bool)
        except (TypeError, ValueError) as error:
            raise self._broken(found, str(error)) from error
        return pixels

    def _broken(self, found: Mapping[str, Any], fault: str) -> UnreadableImage:
        return UnreadableImage(
            f"{self}: the segmentation of annotation {found.get('id', '?')} is no polygon and no run lengths of "
            f"{self.width} x {self.height} pixels ({fault}). Restore the file."
        )


def _is_polygons(shape: Any) -> bool:
    """Return whether a shape is a list of polygons: x and y in turn, of three corners or more."""
    return (
        isinstance(shape, list)
        and bool(shape)
        and all(
            isinstance(polygon, list)
            and len(polygon) >= 6
            and len(polygon) % 2 == 0
            and all(isinstance(value, int | float) for value in polygon)
            for polygon in shape
        )
    )


def _is_run_lengths(shape: Any, height: int, width: int) -> bool:
    """Return whether a shape is the lengths of runs, as numbers that sum to all pixels or as text."""
    if not isinstance(shape, dict) or shape.get("size") != [height, width]:
        return False
    counts = shape.get("counts")
    if isinstance(counts, list):
        are_lengths = all(isinstance(count, int) and count >= 0 for count in counts)
        return are_lengths and sum(counts) == height * width
    return isinstance(counts, str) and bool(counts)


@dataclass(frozen=True)
class _Part:
    """A JSON file of annotations."""

    name: str
    """Name of its images in lists of splits, before their own."""
    file: Path
    split: str | None
    """Split that its images are; None for a file of all images."""
    folders: tuple[Path, ...]
    """Folders below which its images may be."""


def list_coco(root: Path, config: FolderConfig) -> Listing:
    """List the official train and val splits, or the parts of an export of CVAT or Roboflow."""
    kind = config.annotations
    assert kind is not None
    pairs: list[Pair] = []
    splits: dict[str, tuple[str, ...]] = {}
    tables: dict[Path, ClassTable] = {}
    warnings: list[str] = []
    for part in _parts(root, kind):
        content = _read_json(part.file, kind)
        warnings += _drop_root_category(part.file, content, kind)
        tables[part.file] = _table(part.file, content, kind)
        on_disk = _images_on_disk(root, part, content)
        if kind is Annotations.panoptic:
            masks = _panoptic_masks(root, part.file, content)
        else:
            masks = _instance_masks(part.file, content)
            warnings += _box_warnings(part.file, content)
        listed = [
            Pair(
                f"{part.name}/{Path(row['file_name']).with_suffix('')}",
                on_disk[row["file_name"]],
                masks.get(row["id"]),
                sub_folder(row["file_name"], num_passed_over=0),
            )
            for row in content["images"]
        ]
        pairs += listed
        if part.split:
            splits[part.split] = tuple(pair.name for pair in listed)
    table = _common_table(root, tables)
    return Listing(table, tuple(pairs), splits, tuple(warnings), "sub-folders of file_name", "the JSON files")


def read_categories(root: Path, kind: Annotations) -> ClassTable:
    """Return the classes by the file of the val split, or of the first: those of all splits are the same."""
    parts = _parts(root, kind)
    part = next((part for part in parts if part.split == "val"), parts[0])
    content = _read_json(part.file, kind)
    _drop_root_category(part.file, content, kind)
    return _table(part.file, content, kind)


def _parts(root: Path, kind: Annotations) -> list[_Part]:
    """Return the JSON files of a data set, by the first of three layouts that it has."""
    found = [_official_part(root, official, split, kind) for official, split in _SPLITS.items()]
    official = [part for part in found if part]
    if official and len(official) < len(found):
        missing = next(name for name, part in zip(_SPLITS, found, strict=True) if not part)
        raise DataError(
            f"{root / 'annotations'}: holds no file {kind}_{missing}<year>.json, expected one beside "
            f"{official[0].file.name}. Unpack it there."
        )
    exported = {} if official or kind is Annotations.panoptic else _exported_files(root)
    if not official and not exported:
        raise DataError(
            f"{root / 'annotations'}: holds no file {kind}_<train|val><year>.json, expected one of each. Unpack the "
            "annotations there, or choose prepare_data.folder.annotations=panoptic or instances. Exports have "
            "annotations/instances_<train|val|test|default>.json (CVAT) or <train|valid|test>/_annotations.coco.json "
            "(Roboflow), of instances."
        )
    parts = [_exported_part(root, name, file) for name, file in exported.items()]
    _refuse_repeated_splits(root, parts)
    return official or parts


def _official_part(root: Path, official: str, split: str, kind: Annotations) -> _Part | None:
    folder = root / "annotations"
    found = sorted(folder.glob(f"{kind}_{official}[0-9]*.json"))
    if not found:
        return None
    if len(found) > 1:
        raise DataError(f"{folder}: holds {len(found)} files {kind}_{official}<year>.json, expected one.")
    check_link(found[0], root)
    name = found[0].stem.partition("_")[2]
    inside = root / "images" / name
    is_inside = inside.is_dir() and not (root / name).exists()
    return _Part(name, found[0], split, (inside if is_inside else root / name,))


def _exported_files(root: Path) -> dict[str, Path]:
    """Return the JSON files of an export of Roboflow, else of CVAT, by the names of its parts."""
    of_roboflow = {file.parent.name: file for file in sorted(root.glob("*/_annotations.coco.json"))}
    files = sorted((root / "annotations").glob("instances_*.json"))
    of_cvat = {file.stem.removeprefix("instances_"): file for file in files}
    for found in (of_roboflow, of_cvat):
        parts = {
            name: file
            for name, file in found.items()
            if file.is_file() and (split_of_folder(name) or name.lower() == "default")
        }
        if parts:
            return parts
    return {}


def _exported_part(root: Path, name: str, file: Path) -> _Part:
    check_link(file, root)
    folders = (root / "images" / name, root / name, root / "images", root)
    return _Part(name, file, split_of_folder(name), folders)


def _refuse_repeated_splits(root: Path, parts: Sequence[_Part]) -> None:
    by_split: dict[str | None, _Part] = {}
    for part in parts:
        other = by_split.setdefault(part.split, part)
        if other is not part:
            raise DataError(
                f"{root}: {other.file} and {part.file} are both the split '{part.split}', expected one."
            )
    if None in by_split and len(parts) > 1:
        raise DataError(
            f"{root}: holds {by_split[None].file} of no split beside others, such as {parts[0].file}. Remove one "
            "of them."
        )
    has_train = {"train", None}.intersection(by_split) or (root / "train.txt").exists()
    if parts and not has_train:
        raise DataError(
            f"{root}: holds {parts[0].file} and no annotations of train, expected some to train on. Export them, "
            "too, or all images as one part (default), so that splits are chosen, or name the images of each split "
            "in train.txt, val.txt and test.txt."
        )


def _images_on_disk(root: Path, part: _Part, content: Mapping[str, list[dict[str, Any]]]) -> dict[str, Path]:
    """Return the path of each image by its file_name, below the first folder that has the first of them."""
    names = [row["file_name"] for row in content["images"]]
    images_at = next((folder for folder in part.folders if (folder / names[0]).is_file()), part.folders[0])
    files = list_files(images_at, (".jpg", ".jpeg", ".png"), root=root)
    on_disk = {path.relative_to(images_at).as_posix(): path for path in files.values()}
    missing = [name for name in names if name not in on_disk]
    if missing:
        places = " or ".join(str(folder) for folder in part.folders)
        raise DataError(
            f"{part.file}: lists the image {missing[0]!r}{further(missing, 'image')}, but {images_at / missing[0]} "
            f"does not exist. Expected the images below {places}."
        )
    return on_disk


def _drop_root_category(file: Path, content: dict[str, list[dict[str, Any]]], kind: Annotations) -> list[str]:
    """Take out the category 0 of an export of Roboflow, which stands for all others and for no object."""
    roots = [
        row
        for row in content["categories"]
        if kind is Annotations.instances
        and row["id"] == 0
        and any(
            other.get("supercategory") == row["name"] for other in content["categories"] if other is not row
        )
    ]
    if not roots or any(row["category_id"] == 0 for row in content["annotations"]):
        return []
    content["categories"] = [row for row in content["categories"] if row is not roots[0]]
    return [
        f"{file}: the category '{roots[0]['name']}' is the group of the others and of no object: left out."
    ]


def _is_box_alone(row: Mapping[str, Any]) -> bool:
    return row["segmentation"] in ([], [[]], None)


def _box_warnings(file: Path, content: Mapping[str, list[dict[str, Any]]]) -> list[str]:
    """Return a warning that counts objects of which only a box is known; raise DataError if all are such."""
    boxes = [row for row in content["annotations"] if _is_box_alone(row)]
    if not boxes:
        return []
    if len(boxes) == len(content["annotations"]):
        raise DataError(
            f"{file}: all {len(boxes)} annotations are boxes without a segmentation, which is data for detection, "
            "expected polygons or run lengths. Export the data set for segmentation."
        )
    unplaced = [row for row in boxes if not _is_box(row.get("bbox"))]
    if unplaced:
        raise DataError(
            f"{file}: annotation {unplaced[0].get('id', '?')} has no segmentation and no bbox. Remove it, or draw it."
        )
    return [
        f"{file}: {len(boxes)} object(s) are boxes without a segmentation; pixels of these boxes are ignored."
    ]


def _is_box(box: Any) -> bool:
    return isinstance(box, list) and len(box) == 4 and all(isinstance(value, int | float) for value in box)


def _read_json(file: Path, kind: Annotations) -> dict[str, list[dict[str, Any]]]:
    """Return images, categories and annotations; raise DataError for what is missing or repeated."""
    try:
        content = json.loads(file.read_bytes())
    except ValueError as error:
        raise DataError(f"{file}: not valid JSON ({error}). Restore the file.") from error
    lists = {}
    for name, keys in (
        ("images", _ROW_KEYS["images"]),
        ("categories", _ROW_KEYS["categories"]),
        ("annotations", _ROW_KEYS[kind]),
    ):
        rows = content.get(name) if isinstance(content, dict) else None
        if not isinstance(rows, list) or not rows:
            raise DataError(f"{file}: has no list '{name}', expected images, categories and annotations.")
        for row in rows:
            missing = [key for key in keys if not isinstance(row, dict) or key not in row]
            if missing:
                raise DataError(f"{file}: a row of '{name}' has no '{missing[0]}': {str(row)[:200]}.")
        lists[name] = rows
    _refuse_wrong_rows(file, lists, kind)
    return lists


def _refuse_wrong_rows(file: Path, lists: Mapping[str, list[dict[str, Any]]], kind: Annotations) -> None:
    for name in ("images", "categories"):
        seen = set()
        for row in lists[name]:
            number = row["id"]
            if not isinstance(number, int) or isinstance(number, bool):
                raise DataError(f"{file}: id {number!r} in '{name}' is no whole number.")
            if number in seen:
                raise DataError(f"{file}: id {number} appears twice in '{name}'.")
            seen.add(number)
    for row in lists["images"]:
        check_relative_name(str(row["file_name"]), source=file)
        if not all(isinstance(row[side], int) and row[side] > 0 for side in ("height", "width")):
            raise DataError(
                f"{file}: image {row['id']} is {row['width']} x {row['height']}, expected pixels."
            )
    images = {row["id"] for row in lists["images"]}
    stray = [row["image_id"] for row in lists["annotations"] if row["image_id"] not in images]
    if stray:
        raise DataError(f"{file}: an annotation is of image {stray[0]}, which is not in 'images'.")
    _refuse_repeated(file, lists, "images", "file_name")
    if kind is Annotations.panoptic:
        _refuse_repeated(file, lists, "annotations", "image_id")


def _refuse_repeated(file: Path, lists: Mapping[str, list[dict[str, Any]]], name: str, key: str) -> None:
    """Raise DataError for two rows of a list with one value of a key: one of them would be lost."""
    counts = Counter(row[key] for row in lists[name])
    repeated = [value for value, count in counts.items() if count > 1]
    if repeated:
        raise DataError(
            f"{file}: {key} {repeated[0]!r} appears in {counts[repeated[0]]} rows of '{name}'"
            f"{further(repeated, 'value')}, expected one row each. Unite the rows, or restore the file."
        )


def _table(file: Path, content: Mapping[str, list[dict[str, Any]]], kind: Annotations) -> ClassTable:
    rows = sorted(content["categories"], key=lambda row: int(row["id"]))
    first = 0 if kind is Annotations.instances else 1
    outside = [row["id"] for row in rows if not first <= row["id"] <= MAX_ID]
    if outside:
        raise DataError(f"{file}: the category id {outside[0]} is outside {first} to {MAX_ID}.")
    names = [check_class_name(row["name"], source=file) for row in rows]
    ids = [(int(row["id"]),) for row in rows]
    if kind is Annotations.instances:
        names, ids = [BACKGROUND, *names], [(_background_id(content),), *ids]
    table = ClassTable(tuple(names), str(file), tuple(ids))
    check_table(table)
    return table


def _background_id(content: Mapping[str, list[dict[str, Any]]]) -> int:
    """Return the id of pixels of no object: 0, or, if a category has it, the largest id plus one."""
    numbers = {row["id"] for row in content["categories"]}
    return max(numbers) + 1 if 0 in numbers else 0


def _common_table(root: Path, tables: Mapping[Path, ClassTable]) -> ClassTable:
    """Return the classes that all files share, or those of classes.yaml."""
    if has_class_list(root):
        return read_class_list(root)
    (first_file, first), *others = tables.items()
    for file, table in others:
        if (table.names, table.ids) != (first.names, first.ids):
            raise DataError(
                f"{file}: its categories differ from those of {first_file}. Both must be the same."
            )
    return first


def _panoptic_masks(
    root: Path, file: Path, content: Mapping[str, list[dict[str, Any]]]
) -> dict[int, MaskReader]:
    folder = file.with_suffix("")
    pngs = list_files(folder, (".png",), root=root)
    on_disk = {path.relative_to(folder).as_posix(): path for path in pngs.values()}
    categories = {row["id"] for row in content["categories"]}
    masks: dict[int, MaskReader] = {}
    for row in content["annotations"]:
        name = row["file_name"]
        if name not in on_disk:
            raise DataError(f"{file}: lists the mask {name!r}, but {folder / str(name)} does not exist.")
        try:
            category_of = {
                int(segment["id"]): IGNORED_ID if segment.get("iscrowd", 0) else int(segment["category_id"])
                for segment in row["segments_info"]
            }
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise DataError(
                f"{file}: segments_info of image {row['image_id']} holds a segment without id or category_id "
                f"({error!r})."
            ) from error
        _refuse_unknown(file, categories, category_of.values())
        masks[row["image_id"]] = PanopticMask(on_disk[name], category_of, file)
    return masks


def _instance_masks(file: Path, content: Mapping[str, list[dict[str, Any]]]) -> dict[int, MaskReader]:
    """Return the objects by image; an image without any is all background."""
    categories = {row["id"] for row in content["categories"]}
    _refuse_unknown(file, categories, (row["category_id"] for row in content["annotations"]))
    objects: dict[int, list[Mapping[str, Any]]] = {row["id"]: [] for row in content["images"]}
    for row in content["annotations"]:
        kept = ("id", "category_id", "segmentation", "iscrowd", *(("bbox",) if _is_box_alone(row) else ()))
        objects[row["image_id"]].append({key: row[key] for key in kept if key in row})
    background = _background_id(content)
    return {
        row["id"]: InstanceMask(
            row["id"], row["height"], row["width"], tuple(objects[row["id"]]), file, background
        )
        for row in content["images"]
    }


def _refuse_unknown(file: Path, categories: set[int], found: Iterable[int]) -> None:
    unknown = sorted({category for category in found if category not in categories} - {IGNORED_ID})
    if unknown:
        raise DataError(f"{file}: an annotation is of category {unknown[0]}, which is not in 'categories'.")
