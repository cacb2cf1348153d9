"""Decide which symbolic links of a data set are followed."""

from pathlib import Path

from tasks.core.errors import DataError


def check_link(path: Path, root: Path) -> None:
    """Raise DataError for a symbolic link, unless it is one to a file inside the root.

    What lies outside would not be in the digest of the root, and a link to a folder is not either: a change there
    would leave the old output in use.
    """
    if not path.is_symlink():
        return
    target = path.resolve()
    if path.is_dir():
        raise DataError(
            f"{path}: is a symbolic link to a folder, which is refused. Replace it by the folder itself."
        )
    if not target.is_relative_to(root.resolve()):
        raise DataError(
            f"{path}: is a symbolic link to {target}, outside {root}, which is refused. Replace it by the file "
            "itself."
        )
