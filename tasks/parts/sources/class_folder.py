"""Read a user's images without masks: one sub-folder per class, or plain unlabelled images.

<root>/images/<class>/**/<name>.png|jpg|jpeg   classes as in <root>/classes.yaml, in the order of the logits
<root>/images/**/<name>.png|jpg|jpeg           plain images; no classes.yaml
<root>/train.txt, val.txt, test.txt, calibration.txt, groups.csv   as for mask_folder.py
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
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
from tasks.parts.sources.class_list import CLASSES_FILE, read_class_list
from tasks.parts.sources.config import FolderConfig
from tasks.parts.sources.faults import without_traceback
from tasks.parts.sources.file_names import list_files
from tasks.parts.sources.listed_files import HashedFile, Size
from tasks.parts.sources.splits import (
    digest_of_pixels,
    find_duplicates,
    further,
    number_groups,
    read_groups,
    read_split_files,
    refuse_empty,
    refuse_empty_lists,
    refuse_few_groups,
    share_out,
)

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
    num_duplicates: int
    """Number of images of val or test whose pixels also occur in another of train, val, test."""
    warnings: tuple[str, ...]


def scan_images(root: Path, config: FolderConfig, *, seed: int, is_labelled: bool) -> ImageFolder:
    """List the images of a folder, decode each once, and assign them to the splits.

    Raises DataError for a class folder that classes.yaml does not name, an unreadable image, an empty split.
    """
    classes = read_class_list(root, max_classes=MAX_CLASSES).names if is_labelled else ()
    paths = list_files(root / "images", IMAGE_SUFFIXES, root=root)
    files = {
        name: ImageFile(path, _label(root, name, classes) if classes else None)
        for name, path in paths.items()
    }
    lists, groups = read_split_files(root, set(files)), read_groups(root, set(files))
    refuse_empty_lists(root, files, lists)
    refuse_few_groups(root, files, lists, groups)
    digests, bad = _read_all(files, config)
    labels = {name: (file.label,) for name, file in files.items() if file.label is not None}
    names, warnings = share_out(list(digests), lists, groups, config, seed, labels)
    refuse_empty(root, names, lists)
    images = {name: (files[name].path, digest) for name, digest in digests.items()}
    num_duplicates, duplicate_warnings = find_duplicates(names, images)
    warnings += duplicate_warnings
    if bad:
        warnings.append(f"{len(bad)} unreadable file(s) skipped, the first: {next(iter(bad.values()))}")
    splits = {split: tuple(files[name] for name in listed) for split, listed in names.items()}
    numbers = number_groups(names, groups)
    return ImageFolder(classes, splits, numbers, len(bad), num_duplicates, tuple(warnings))


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


def _label(root: Path, name: str, classes: tuple[str, ...]) -> int:
    folder, separator, _ = name.partition("/")
    if not separator or folder not in classes:
        place = f"the folder '{folder}'" if separator else "no class folder"
        raise DataError(
            f"{root / 'images' / name}: lies in {place}, expected images/<class>/ with a class of "
            f"{root / CLASSES_FILE}: {', '.join(classes[:8])}{further(classes[7:], 'class')}."
        )
    return classes.index(folder)


def _read_all(
    files: dict[str, ImageFile], config: FolderConfig
) -> tuple[dict[str, str], dict[str, DataError]]:
    """Decode every file; return the digests of readable files and the faults of the others.

    Stops if more files are unreadable than the configuration allows.
    """

    def read(file: ImageFile) -> str | DataError:
        try:
            return digest_of_pixels(read_image(file.path, config))
        except UnreadableImage as error:
            return without_traceback(error)

    with pillow_without_own_cap(), thread_pool() as pool:
        results = dict(zip(files, pool.map(read, files.values()), strict=True))
    digests = {name: result for name, result in results.items() if isinstance(result, str)}
    bad = {name: result for name, result in results.items() if not isinstance(result, str)}
    if len(bad) > config.max_bad_images:
        first = next(iter(bad.values()))
        raise UnreadableImage(
            f"{first} Found {len(bad)} unreadable file(s), prepare_data.folder.max_bad_images = "
            f"{config.max_bad_images}."
        ) from first
    logger.info("checked %d images", len(files))
    return digests, bad
