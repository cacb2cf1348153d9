"""Find the files of a data set."""

from __future__ import annotations

import os
import unicodedata
from collections.abc import Iterable
from pathlib import Path

from tasks.core.errors import DataError
from tasks.parts.sources.class_list import check_relative_name
from tasks.parts.sources.links import check_link
from tasks.parts.sources.other_formats import refuse_other_formats


def list_files(folder: Path, endings: Iterable[str], *, root: Path) -> dict[str, Path]:
    """Map the name of each file below a folder to its path, without hidden files and files of other endings.

    The name is the path below the folder without the ending, in Unicode form NFC.
    """
    check_link(folder, root)
    if not folder.is_dir():
        raise DataError(
            f"{folder}: not a folder. Expected it in the data set of prepare_data.root; docs/data.md shows "
            "the layouts."
        )
    endings = tuple(endings)
    paths: dict[str, Path] = {}
    others: list[Path] = []
    for parent, folders, files in os.walk(folder):
        for entry in (*folders, *files):
            path = Path(parent, entry)
            if not file_name_is_text(path):
                raise DataError(f"{os.fsencode(path)!r}: the file name is not UTF-8. Rename it.")
            check_link(path, root)
        folders[:] = [name for name in folders if not name.startswith(".")]
        for path in (Path(parent, name) for name in files if not name.startswith(".")):
            ending = next((end for end in endings if path.name.lower().endswith(end.lower())), None)
            if ending is None:
                others.append(path)
                continue
            # macOS stores é as two characters; without normalisation, image and mask names might not match.
            stem = path.relative_to(folder).as_posix()[: -len(ending)]
            name = unicodedata.normalize("NFC", stem)
            check_relative_name(name, source=folder)
            if name in paths:
                raise DataError(
                    f"{path}: has the same name as {paths[name]}. Each mask belongs to one image: rename one."
                )
            paths[name] = path
    refuse_other_formats(folder, others)
    return paths


def file_name_is_text(path: str | os.PathLike[str]) -> bool:
    """Return whether a file name is valid UTF-8, so that logs, reports and manifests can hold it."""
    try:
        os.fspath(path).encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True
