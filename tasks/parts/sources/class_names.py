"""Find out the classes of a data set without reading its images."""

from pathlib import Path

from tasks.parts.sources.ade20k import read_objects
from tasks.parts.sources.cityscapes import CITYSCAPES
from tasks.parts.sources.class_folder import MAX_CLASSES
from tasks.parts.sources.class_list import has_class_list, read_class_list
from tasks.parts.sources.coco import read_categories
from tasks.parts.sources.config import FolderConfig, ScenesConfig
from tasks.parts.sources.voc import VOC


def read_class_names(
    source: str, root: Path, *, scenes: ScenesConfig | None, folder: FolderConfig | None
) -> tuple[str, ...] | None:
    """Return the names of the classes that `prepare_data` will find, in order; None for images without labels.

    Raises DataError if the file that holds them is missing or damaged.
    """
    if source == "images":
        return None
    if source == "digit_scenes":
        names = read_class_list(root).names
        return names if scenes is None else names[: scenes.num_digits + 1]
    if source == "class_folder":
        return read_class_list(root, max_classes=MAX_CLASSES).names
    if not has_class_list(root):
        if source == "cityscapes":
            return CITYSCAPES.names
        if source == "voc":
            return VOC.names
        if source == "ade20k":
            return read_objects(root).names
        if source == "coco" and folder is not None and folder.annotations is not None:
            return read_categories(root, folder.annotations).names
    return read_class_list(root).names
