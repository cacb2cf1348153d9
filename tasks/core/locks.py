"""Locks between processes: the kernel releases one when its holder dies, however it dies."""

import contextlib
import fcntl
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO


@contextlib.contextmanager
def hold_lock(file: Path, note: str, *, before_waiting: Callable[[str], None]) -> Iterator[None]:
    """Hold the lock of a file, which then contains `note`; wait while another process holds it.

    `before_waiting` receives the note of that process; if it raises, there is no wait.
    """
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("a+", encoding="utf-8") as opened:
        try:
            fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            opened.seek(0)
            before_waiting(opened.read())
            fcntl.flock(opened, fcntl.LOCK_EX)
        _write(opened, note)
        yield


@contextlib.contextmanager
def try_lock(file: Path, note: str) -> Iterator[bool]:
    """Hold the lock of a file, which then contains `note`, and yield True; False if another process holds it."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("a+", encoding="utf-8") as opened:
        try:
            fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
            return
        _write(opened, note)
        yield True


def _write(opened: IO[str], note: str) -> None:
    opened.truncate(0)
    opened.write(note)
    opened.flush()
