"""The table of classes of a data set: which ids and colours of a mask stand for which class. H height, W width."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

IGNORE_INDEX = 255
"""Class of pixels that losses and metrics ignore."""

Colour = tuple[int, int, int]
"""Red, green and blue, 0..255."""

IGNORED_ID = -1
"""Id of pixels that are ignored whatever the table says, such as those of a crowd."""
UNKNOWN = -2
"""Class of pixels whose id or colour is in no row of the table."""
MAX_ID = 65535
"""Largest id of a class."""


@dataclass(frozen=True)
class StoredMask:
    """A mask as its file holds it."""

    values_HW: NDArray[np.int32]
    """Ids, or colours as 65536 red + 256 green + blue."""
    is_colour: bool


@dataclass(frozen=True)
class ClassTable:
    """Class names in the order of their indices, and what stands for them in masks."""

    names: tuple[str, ...]
    place: str
    """Where the table comes from, for messages."""
    ids: tuple[tuple[int, ...], ...] | None
    """Ids of each class; None if masks are read by colour alone."""
    colours: tuple[Colour, ...] | None = None
    """Colour of each class, or None."""
    ignore_ids: frozenset[int] = frozenset()
    ignore_colours: frozenset[Colour] = frozenset()
    is_rest_ignored: bool = False
    """Whether ids and colours in no row are ignored; otherwise they are an error."""

    def to_classes(self, stored: StoredMask) -> NDArray[np.int16]:
        """Return the class index of each pixel, IGNORE_INDEX or UNKNOWN."""
        import numpy as np

        if stored.is_colour:
            return self._class_of_colour[stored.values_HW]
        # The last but one entry stands for all larger ids, the last one, at -1, for IGNORED_ID.
        return self._class_of_id[np.minimum(stored.values_HW, len(self._class_of_id) - 2)]

    @functools.cached_property
    def _class_of_id(self) -> NDArray[np.int16]:
        import numpy as np

        rows = self.ids or ()
        largest = max((0, *self.ignore_ids, *(number for row in rows for number in row)))
        classes = np.full(largest + 3, self._class_of_rest, np.int16)
        classes[[*self.ignore_ids, IGNORED_ID]] = IGNORE_INDEX
        for index, row in enumerate(rows):
            classes[list(row)] = index
        return classes

    @functools.cached_property
    def _class_of_colour(self) -> NDArray[np.int16]:
        import numpy as np

        classes = np.full(1 << 24, self._class_of_rest, np.int16)
        for colour in self.ignore_colours:
            classes[_packed(colour)] = IGNORE_INDEX
        for index, colour in enumerate(self.colours or ()):
            classes[_packed(colour)] = index
        return classes

    @property
    def _class_of_rest(self) -> int:
        return IGNORE_INDEX if self.is_rest_ignored else UNKNOWN


def _packed(colour: Colour) -> int:
    return (colour[0] << 16) + (colour[1] << 8) + colour[2]


def unpacked(value: int) -> Colour:
    """Return the colour that a value of a StoredMask stands for."""
    return value >> 16, value >> 8 & 255, value & 255
