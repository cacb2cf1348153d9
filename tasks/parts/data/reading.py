"""How an image file becomes what a network reads, from prepare_data to whoever runs the engine."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tasks.parts.data.image_files import ResizeMode


@dataclass(frozen=True)
class Reading:
    """What was done to the images that a network was trained on; engines do the same to other images."""

    types: tuple[str, ...] = ("uint8",)
    """numpy's names of the types of the values in the files, sorted. Values of other types mean something else."""
    value_range: tuple[float, float] | None = None
    """Lowest and highest value of images of more than 8 bits, which become 0 and 255; None if all have 8 bits."""
    resize_mode: ResizeMode = ResizeMode.resize
    """How images come to the height and width of the network."""
    window_overlap: int | None = None
    """Pixels that neighbouring windows share, for resize_mode windows."""

    @classmethod
    def from_fields(cls, fields: Mapping[str, Any]) -> "Reading":
        """Return what `dataclasses.asdict` gave, as read from JSON; raise KeyError for a key that is missing."""
        low_high = fields["value_range"]
        return cls(
            types=tuple(map(str, fields["types"])),
            value_range=None if low_high is None else (float(low_high[0]), float(low_high[1])),
            resize_mode=ResizeMode(fields["resize_mode"]),
            window_overlap=fields["window_overlap"],
        )
