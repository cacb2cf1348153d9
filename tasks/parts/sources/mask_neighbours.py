"""Recognise masks that are told from their images by an ending of the name, such as x_mask.png beside x.png."""

from collections.abc import Collection, Mapping
from pathlib import Path

from tasks.core.errors import DataError
from tasks.parts.data.image_files import IMAGE_SUFFIXES

_ENDINGS = tuple(
    f"{separator}{word}"
    for separator in "_-."
    for word in ("mask", "masks", "label", "labels", "seg", "segmentation", "gt", "annotation")
)


def refuse_mixed_folder(folder: Path) -> None:
    """Raise DataError if a folder, which should hold the folder images, holds images and their masks side by side."""
    files = [path for path in sorted(folder.rglob("*")) if path.suffix.lower() in IMAGE_SUFFIXES]
    refuse_masks_among_images(
        {path.relative_to(folder).with_suffix("").as_posix(): path for path in files}, (), folder
    )


def refuse_masks_among_images(images: Mapping[str, Path], masks: Collection[str], folder: Path) -> None:
    """Raise DataError if some of the images look like the masks of others.

    Not those that have masks themselves; `folder` is the one in which images/ and masks/ are expected.
    """
    found = [name for name in sorted(images) if name not in masks and _image_of(name, images)]
    if found:
        path, image = images[found[0]], _image_of(found[0], images)
        raise DataError(
            f"{path}: looks like the mask of {images[image].name} beside it{_and_others(found)}. Expected images in "
            f"{folder / 'images'} and masks of the same names in {folder / 'masks'}: move it to "
            f"{folder / 'masks' / image}{path.suffix}{_and_so_on(found)} (prepare_data.root)."
        )


def refuse_renamed_masks(images: Mapping[str, Path], masks: Mapping[str, Path]) -> None:
    """Raise DataError if masks have an ending that the names of their images lack."""
    found = [name for name in sorted(masks) if name not in images and _image_of(name, images)]
    if found:
        path, image = masks[found[0]], _image_of(found[0], images)
        raise DataError(
            f"{path}: looks like the mask of {images[image]}{_and_others(found)}, expected masks of the same "
            f"names as their images. Rename it to {Path(image).name}{path.suffix}{_and_so_on(found)}."
        )


def _image_of(name: str, images: Collection[str]) -> str:
    """Return which of the images a name is the mask of; empty if it is none."""
    stems = (name[: -len(ending)] for ending in _ENDINGS if name.lower().endswith(ending))
    return next((stem for stem in stems if stem in images), "")


def _and_others(found: Collection[str]) -> str:
    return f", and so do {len(found) - 1} more file(s)" if len(found) > 1 else ""


def _and_so_on(found: Collection[str]) -> str:
    return ", and likewise the others" if len(found) > 1 else ""
