"""Files that are listed in place of a copy: hashed as they are read, and how they are read again."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from tasks.parts.data.class_table import ClassTable
from tasks.parts.sources.config import FolderConfig

if TYPE_CHECKING:
    from tasks.parts.data.source_files import ReadingRules, SourceFile

COPIED = ("calibration",)
"""Splits that are copied in any case: stages that build engines read their images as one small file."""


@dataclass(frozen=True)
class Size:
    """Size of every image after this stage."""

    height: int
    width: int


@dataclass
class HashedFile:
    """A file that is hashed when it is read; an EncodedImage."""

    path: Path
    sha256: str = ""

    def __str__(self) -> str:
        return str(self.path)

    def read_bytes(self) -> bytes:
        """Return the content and keep its digest."""
        content = self.path.read_bytes()
        self.sha256 = hashlib.sha256(content).hexdigest()
        return content

    def listed(self, root: Path) -> SourceFile:
        """Return the file, which was read, as lists name it."""
        from tasks.parts.data.source_files import SourceFile

        return SourceFile(self.path.relative_to(root).as_posix(), self.sha256)


def reading_rules(
    config: FolderConfig, size: Size, root: Path, table: ClassTable | None, background: int | None
) -> ReadingRules:
    """Return what turns the listed files into the same arrays again; without masks there is no table."""
    from tasks.parts.data.source_files import ReadingRules

    return ReadingRules(
        root=root.as_posix(),
        height=size.height,
        width=size.width,
        resize_mode=config.resize_mode,
        channels=config.channels,
        max_pixels=config.max_pixels,
        value_range=config.value_range,
        table=table,
        background=background,
    )
