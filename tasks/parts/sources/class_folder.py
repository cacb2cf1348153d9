"""Read a user's images without masks: one sub-folder per class, or plain unlabelled images.

<root>/images/<class>/**/<name>.png|jpg|jpeg   classes as in <root>/classes.yaml, in the order of the logits
<root>/images/**/<name>.png|jpg|jpeg           plain images; no classes.yaml
<root>/train.txt, val.txt, test.txt, calibration.txt, groups.csv   as for mask_folder.py

Folders that are called as splits keep their images: images/<train|val|test>/<class>/**. Images of one sub-folder are
a group; sub-folders of one name in several classes, such as those of a patient, are the same group.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from tasks.core.errors import DataError
from tasks.parts.data.image_files import (
    FILES_PER_BATCH,
    IMAGE_SUFFIXES,
    UnreadableImage,
    fit_image,
    pillow_without_own_cap,
    read_image,
    thread_pool,
)
from tasks.parts.sources.class_list import CLASSES_FILE, in_quotes, read_class_list
from tasks.parts.sources.config import FolderConfig, Groups
from tasks.parts.sources.declared_splits import declared_splits, sub_folder
from tasks.parts.sources.division import Division, divide, origins_of_splits
from tasks.parts.sources.duplicates import Duplicates, Pixels, find_duplicates, pixels_of
from tasks.parts.sources.faults import without_traceback
from tasks.parts.sources.file_names import list_files
from tasks.parts.sources.listed_files import HashedFile, Size
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

    from tasks.parts.data.dataset_writer import SplitBatches
    from tasks.parts.data.source_files import SourceRow

logger = logging.getLogger(__name__)

MAX_CLASSES = 65535
"""Largest number of classes: labels are stored as uint16."""


@dataclass(frozen=True)
class ImageFile:
    """An image and its class."""

    path: Path
    label: int | None
    """Index of the class; None if the image is unlabelled."""


@dataclass(frozen=True)
class ImageFolder:
    """A folder that passed every check."""

    classes: tuple[str, ...]
    """Names of the classes; empty for plain images."""
    splits: dict[str, tuple[ImageFile, ...]]
    groups: dict[str, NDArray[np.int64] | None]
    """Number of the group of each image, by split; None without groups."""
    num_bad_images: int
    """Number of images that are skipped because they cannot be read."""
    duplicates: Duplicates
    """Images of val or test that also occur in another of train, val, test."""
    division: Division
    """Where splits and groups come from, and the table of all images."""
    types: tuple[str, ...]
    """numpy's names of the types of the values in the files."""
    warnings: tuple[str, ...]


def scan_images(root: Path, config: FolderConfig, *, seed: int, is_labelled: bool) -> ImageFolder:
    """List the images of a folder, decode each once, and assign them to the splits.

    Raises DataError for a class folder that classes.yaml does not name, an unreadable image, an empty split.
    """
    classes = read_class_list(root, max_classes=MAX_CLASSES).names if is_labelled else ()
    place = root / "images"
    paths = list_files(place, IMAGE_SUFFIXES, root=root)
    # A class may be called as a split is.
    declared = declared_splits(paths, root=root, place=place) if "train" not in classes else {}
    files = {
        name: ImageFile(path, _label(root, name, classes, bool(declared)) if classes else None)
        for name, path in paths.items()
    }
    read = read_split_files(root, set(files))
    lists = read if "train" in read else {**declared, **read}
    groups = _groups(root, files, config, num_passed_over=bool(declared) + is_labelled)
    refuse_empty_lists(root, files, lists)
    refuse_few_groups(root, files, lists, groups)
    values = check_values([file.path for file in files.values()], config)
    pixels, bad = _read_all(files, config)
    labels = {name: (file.label,) for name, file in files.items() if file.label is not None}
    names, warnings = share_out(list(pixels), lists, groups, config, seed, labels)
    refuse_empty(root, names, lists)
    duplicates = find_duplicates(names, pixels)
    warnings += [*values.warnings, *duplicates.warnings]
    if bad:
        warnings.append(f"{len(bad)} unreadable file(s) skipped, the first: {next(iter(bad.values()))}")
    splits = {split: tuple(files[name] for name in listed) for split, listed in names.items()}
    origins = origins_of_splits(root, read, declared, f"the folders of {place}", config)
    below = {name: file.path.relative_to(root).as_posix() for name, file in files.items()}
    division = divide(below, names, groups, origins)
    numbers = number_groups(names, groups)
    return ImageFolder(
        classes, splits, numbers, len(bad), duplicates, division, values.types, tuple(warnings)
    )


def _groups(
    root: Path, files: Mapping[str, ImageFile], config: FolderConfig, *, num_passed_over: int
) -> dict[str, str]:
    """Return the group of each image that has one, and say so."""
    names = files if config.groups is Groups.folder else ()
    found = {name: group for name in names if (group := sub_folder(name, num_passed_over=num_passed_over))}
    if found:
        num_groups = len(set(found.values()))
        logger.info(
            "images stay together by sub-folders: %d images in %d groups (prepare_data.folder.groups=%s)",
            len(found),
            num_groups,
            config.groups,
        )
    return found | read_groups(root, set(files))


def split_images(
    content: ImageFolder, split: str, config: FolderConfig, size: Size, *, root: Path | None
) -> SplitBatches:
    """Return a split that is copied, or, with a root, one whose files are listed; labels are copied."""
    from tasks.parts.data.dataset_writer import SplitBatches

    files = content.splits[split]
    rows: list[SourceRow] | None = None if root is None else []
    return SplitBatches(
        len(files), _read_batches(files, config, size, root, rows), content.groups[split], rows
    )


def _read_batches(
    files: Sequence[ImageFile],
    config: FolderConfig,
    size: Size,
    root: Path | None,
    rows: list[SourceRow] | None,
) -> Iterator[tuple[NDArray[np.uint8], NDArray[np.uint16] | None]]:
    """Decode images again and yield images_NHWC at their final size, with labels_N if they have labels.

    The files of each image are added to the rows, if there are any to fill.
    """
    import numpy as np

    from tasks.parts.data.source_files import SourceRow

    def read(file: ImageFile) -> tuple[NDArray[np.uint8], list[SourceRow]]:
        source = file.path if root is None else HashedFile(file.path)
        image_HWC = read_image(source, config)
        fitted = fit_image(image_HWC, height=size.height, width=size.width, mode=config.resize_mode)
        if root is None or not isinstance(source, HashedFile):
            return fitted, []
        return fitted, [SourceRow(source.listed(root), None, None)]

    with pillow_without_own_cap(), thread_pool() as pool:
        for start in range(0, len(files), FILES_PER_BATCH):
            batch = files[start : start + FILES_PER_BATCH]
            labels = [file.label for file in batch if file.label is not None]
            images, listed = zip(*pool.map(read, batch), strict=True)
            if rows is not None:
                rows += [row for of_image in listed for row in of_image]
            yield np.stack(images), np.array(labels, np.uint16) if labels else None


def _label(root: Path, name: str, classes: tuple[str, ...], is_below_split: bool) -> int:
    below = name.partition("/")[2] if is_below_split else name
    folder, separator, _ = below.partition("/")
    if not separator or folder not in classes:
        place = f"the folder '{folder}'" if separator else "no class folder"
        raise DataError(
            f"{root / 'images' / name}: lies in {place}, expected images/<class>/ with a class of "
            f"{root / CLASSES_FILE}: {in_quotes(classes[:8])}{further(classes[7:], 'class')}."
        )
    return classes.index(folder)


def _read_all(
    files: dict[str, ImageFile], config: FolderConfig
) -> tuple[dict[str, Pixels], dict[str, DataError]]:
    """Decode every file; return what tells readable files apart, and the faults of the others.

    Stops if more files are unreadable than the configuration allows.
    """

    def read(file: ImageFile) -> Pixels | DataError:
        try:
            return pixels_of(file.path, read_image(file.path, config))
        except UnreadableImage as error:
            return without_traceback(error)

    with pillow_without_own_cap(), thread_pool() as pool:
        results = dict(zip(files, pool.map(read, files.values()), strict=True))
    pixels = {name: result for name, result in results.items() if isinstance(result, Pixels)}
    bad = {name: result for name, result in results.items() if not isinstance(result, Pixels)}
    if len(bad) > config.max_bad_images:
        first = next(iter(bad.values()))
        raise UnreadableImage(
            f"{first} Found {len(bad)} unreadable file(s), prepare_data.folder.max_bad_images = "
            f"{config.max_bad_images}."
        ) from first
    logger.info("checked %d images", len(files))
    return pixels, bad
