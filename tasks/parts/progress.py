"""Progress of long loops on a terminal; silent if stderr is a file or a pipe."""

from collections.abc import Iterable, Sequence
from typing import TypeVar

from rich.console import Console
from rich.progress import track

Item = TypeVar("Item")


def tracked(items: Sequence[Item], title: str) -> Iterable[Item]:
    """Yield the items and draw a bar that vanishes at the end."""
    console = Console(stderr=True)
    return track(items, title, console=console, disable=not console.is_terminal, transient=True)
