"""Long loops: how far they are, how long they still take, and when their time is up.

On a terminal there is a bar, else a line in the log now and then: flows run stages behind pipes.
"""

import logging
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from rich.console import Console
from rich.progress import track

Item = TypeVar("Item")

logger = logging.getLogger(__name__)

_FIRST_LINE_S = 10.0
_LONGEST_SILENCE_S = 300.0


@dataclass
class TimeBudget:
    """The time that a search may take, counted from here on."""

    max_minutes: float
    started_s: float = field(default_factory=time.monotonic)
    has_cut: bool = False
    """Whether a loop ended because the time was up."""

    @property
    def is_spent(self) -> bool:
        """Whether the time is up."""
        return time.monotonic() - self.started_s >= 60 * self.max_minutes


class Progress:
    """Says in the log how far a search is: after 10 s, then each time as long again, at least every 5 minutes."""

    def __init__(self, title: str) -> None:
        self._title, self._started_s = title, time.monotonic()
        self._next_s = self._started_s + _FIRST_LINE_S

    def tell(self, num_done: int, num_all: int, *, is_most: bool = False) -> None:
        """Log a line if one is due; with `is_most` the search may end before it has done all."""
        now_s = time.monotonic()
        if now_s < self._next_s or not num_done:
            return
        passed_s = now_s - self._started_s
        left_s = passed_s / num_done * (num_all - num_done)
        logger.info(
            "%s: %d of %s%d after %s, %s %s left",
            self._title,
            num_done,
            "at most " if is_most else "",
            num_all,
            in_words(passed_s),
            "at most" if is_most else "about",
            in_words(left_s),
        )
        self._next_s = now_s + min(max(passed_s, _FIRST_LINE_S), _LONGEST_SILENCE_S)


def tracked(items: Sequence[Item], title: str, budget: TimeBudget | None = None) -> Iterator[Item]:
    """Yield the items and show how far they are; with a budget stop, with a warning, once it is spent."""
    console = Console(stderr=True)
    progress = Progress(title)
    shown = track(items, title, console=console, disable=not console.is_terminal, transient=True)
    for num_done, item in enumerate(shown):
        if budget is not None and budget.is_spent:
            budget.has_cut = True
            logger.warning("%s: time is up after %d of %d", title, num_done, len(items))
            return
        if not console.is_terminal:
            progress.tell(num_done, len(items))
        yield item


def in_words(seconds: float) -> str:
    """Return a time to the precision that counts: ``40 s``, ``12 min``, ``3.4 h``."""
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"
