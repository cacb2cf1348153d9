"""Index of the md5 of large files, shared by processes, so that not every stage reads the data set again.

The index is a database in the checkout. It only saves time: it may be deleted at any moment, and where it cannot
be used, files are read as if there were no index.
"""

import contextlib
import hashlib
import os
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import sqlite3

INDEX_FILE = Path("artifacts/.digests.sqlite")
MIN_SIZE_BYTES = 64 * 1024
"""Reading a smaller file is faster than looking it up, unless there are very many."""

_MIN_AGE_S = 2.0
"""A younger file may change again within one tick of the file system's clock and look unchanged."""

_BUSY_TIMEOUT_S = 1.0

_PROCESS = os.getpid()
_lock = threading.Lock()
_connections: dict[Path, "sqlite3.Connection | None"] = {}
"""Keyed by file, because a process may change its working directory; None where the index cannot be used."""


@dataclass(frozen=True)
class FileVersion:
    """What distinguishes a file from an earlier version at the same path, without reading it."""

    device: int
    inode: int
    size_bytes: int
    mtime_ns: int
    ctime_ns: int
    """Only the kernel sets it, so a change shows even if a program resets mtime."""

    @classmethod
    def from_status(cls, status: os.stat_result) -> "FileVersion":
        """Return the version that a result of `os.stat` describes."""
        return cls(status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)

    def belongs_in_index(self, min_size_bytes: int = MIN_SIZE_BYTES) -> bool:
        """Return whether the file is large, and old enough for a later change to show."""
        age_s = time.time() - max(self.mtime_ns, self.ctime_ns) / 1e9
        return self.size_bytes >= min_size_bytes and age_s >= _MIN_AGE_S


def find_md5(path: str, version: FileVersion) -> str | None:
    """Return the md5 that was entered for this version of a file, if there is one."""
    rows = _execute("SELECT md5, checksum FROM digests WHERE path = ?", (os.fsencode(path),))
    for md5, checksum in rows:
        if checksum == _checksum(path, version, md5):
            return str(md5, "ascii")
    return None


def enter_md5(path: str, version: FileVersion, md5: str) -> None:
    """Store the md5 of a file in place of that of its previous version."""
    values = (os.fsencode(path), md5.encode(), _checksum(path, version, md5.encode()))
    _execute("INSERT OR REPLACE INTO digests VALUES (?, ?, ?)", values)


def _checksum(path: str, version: FileVersion, md5: bytes) -> bytes:
    """Return the checksum of a row, which reveals another file version or damage that SQLite does not notice."""
    return hashlib.md5(repr((path, version, md5)).encode()).digest()


def _execute(statement: str, values: tuple[bytes, ...]) -> list[tuple[bytes, ...]]:
    """Run a statement; return no rows where the index cannot be used, and do not try again in this process."""
    file = INDEX_FILE.absolute()
    if os.getpid() != _PROCESS or not file.parent.is_dir():  # SQLite must not be used on both sides of a fork
        return []
    import sqlite3

    with _lock:
        try:
            if file not in _connections:
                _connections[file] = _open_index(file)
            connection = _connections[file]
            return connection.execute(statement, values).fetchall() if connection else []
        except sqlite3.Error as error:
            # read-only folder, full disk, locked or damaged index: files are read instead, which only takes longer
            _connections[file] = None
            if (
                type(error) is sqlite3.DatabaseError
            ):  # damaged or no database: the next process makes a new one
                with contextlib.suppress(OSError):
                    file.unlink()
            return []


def _open_index(file: Path) -> "sqlite3.Connection":
    """Open the index as a single file, with writes that never wait for the disk.

    A process that is killed while writing may damage it. A journal on disk would prevent that, but it would outlive
    the removal of a damaged index and be replayed into its successor.
    """
    import sqlite3

    connection = sqlite3.connect(file, timeout=_BUSY_TIMEOUT_S, isolation_level=None, check_same_thread=False)
    connection.text_factory = bytes  # damaged text must not raise a decoding error
    connection.execute("PRAGMA journal_mode = MEMORY")
    connection.execute("PRAGMA synchronous = OFF")
    connection.execute(
        "CREATE TABLE IF NOT EXISTS digests (path BLOB PRIMARY KEY, md5 BLOB, checksum BLOB) WITHOUT ROWID"
    )
    return connection
