"""Which windows the images of a data set are cut into.

The windows of an image stay together: in one split, and in one group, so that the certainty of a score is computed
from images and not from their parts. In val and test each pixel counts in the window that owns it alone.
"""

from tasks.parts.reading.windows import Window, cover
from tasks.parts.sources.config import FolderConfig
from tasks.parts.sources.pairs import CheckedPairs

COUNTED_ONCE = ("val", "test")
"""Splits on which accuracies are measured."""


def cover_images(
    content: CheckedPairs, split: str, config: FolderConfig, *, height: int, width: int
) -> list[tuple[Window, ...]]:
    """Return the windows of each image of a split."""
    return [
        cover(
            *content.sizes[pair.name],
            window_height=height,
            window_width=width,
            overlap=config.window_overlap or 0,
            is_owned_once=split in COUNTED_ONCE,
        )
        for pair in content.splits[split]
    ]
