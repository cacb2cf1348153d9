"""List the files that the copied images of a split were made from, so that engines can be run on them, too."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from tasks.parts.data.masks import MaskFile
from tasks.parts.data.source_files import SourceFile, SourceRow

if TYPE_CHECKING:
    from tasks.parts.sources.class_folder import ImageFolder
    from tasks.parts.sources.pairs import CheckedPairs

SPLITS = ("val", "test")
"""Splits that engines are judged on."""


def originals_of_pairs(content: CheckedPairs, root: Path) -> dict[str, list[SourceRow]]:
    """Return the files of each split whose images and masks are all files of their own."""
    found = {}
    for split in SPLITS:
        pairs = content.splits.get(split, ())
        masks = [pair.mask.source if isinstance(pair.mask, MaskFile) else pair.mask for pair in pairs]
        images = [pair.image for pair in pairs]
        if pairs and all(isinstance(file, Path) for file in (*images, *(mask for mask in masks if mask))):
            found[split] = [
                SourceRow(_listed(image, root), None if mask is None else _listed(mask, root), None)
                for image, mask in zip(images, masks, strict=True)
            ]
    return found


def originals_of_images(content: ImageFolder, root: Path) -> dict[str, list[SourceRow]]:
    """Return the files of each split of images without masks."""
    files: dict[str, Sequence[Path]] = {
        split: [file.path for file in content.splits.get(split, ())] for split in SPLITS
    }
    return {
        split: [SourceRow(_listed(path, root), None, None) for path in paths]
        for split, paths in files.items()
        if paths
    }


def _listed(file: object, root: Path) -> SourceFile:
    assert isinstance(file, Path)
    return SourceFile(file.relative_to(root).as_posix(), hashlib.sha256(file.read_bytes()).hexdigest())
