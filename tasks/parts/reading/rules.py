"""How image files become what a network reads, and what is raised for those that do not."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

LETTERBOX = "letterbox"
"""Scaled to fit, and padded with black. Networks are not trained so; programs that run an engine offer it."""
IGNORED = 255
"""What a mask says of pixels that do not count, or that the engine has not seen."""


class ResizeMode(StrEnum):
    """How an image is brought to the size of the data set."""

    resize = "resize"
    """Stretched: images bilinear (smoothed when they shrink), masks nearest neighbour."""
    crop = "crop"
    """Cropped at the centre without scaling; padding is black and ignored."""
    windows = "windows"
    """Cut into overlapping windows without scaling, so that every pixel of the original is used and counted once."""


@dataclass(frozen=True)
class Reading:
    """What was done to the images that a network was trained on; engines do the same to other images."""

    types: tuple[str, ...] = ("uint8",)
    """numpy's names of the types of the values in the files, sorted. Values of other types mean something else."""
    value_range: tuple[float, float] | None = None
    """Lowest and highest value of images of more than 8 bits, which become 0 and 255; None if all have 8 bits."""
    resize_mode: str = ResizeMode.resize
    """How images come to the height and width of the network: a ResizeMode, or LETTERBOX where a user asks for it."""
    window_overlap: int | None = None
    """Pixels that neighbouring windows share, for resize_mode windows."""

    @classmethod
    def from_fields(cls, fields: Mapping[str, Any]) -> Reading:
        """Return what `dataclasses.asdict` gave, as read from JSON; raise KeyError for a key that is missing."""
        low_high = fields["value_range"]
        return cls(
            types=tuple(map(str, fields["types"])),
            value_range=None if low_high is None else (float(low_high[0]), float(low_high[1])),
            resize_mode=ResizeMode(fields["resize_mode"]),
            window_overlap=fields["window_overlap"],
        )


@dataclass(frozen=True)
class Advice:
    """What to do about images that are not read, in the words of the program that reads them."""

    channels: str
    """About other channels than are read; a sentence with its full stop, in which {found} stands for those found."""
    value_range: str
    """About values of more than 8 bits without a range."""
    max_pixels: str
    """About images that are too large to be decoded as a whole."""

    def on_channels(self, found: int) -> str:
        """Return what to do about so many channels."""
        return self.channels.format(found=found)


@dataclass(frozen=True)
class Rules:
    """What decides how a file becomes values, besides the file."""

    channels: int
    """Channels of an image: 1 for grey, 3 for RGB, any number for .npy and TIFF files."""
    max_pixels: int
    """Largest number of pixels of an image that is decoded as a whole."""
    value_range: tuple[float, float] | None
    """Lowest and highest value of images of more than 8 bits, or None."""
    advice: Advice
    is_in_parts: bool = False
    """Whether large images are read in parts, where that is possible, because windows are cut from them."""
    types: tuple[str, ...] | None = None
    """Types of the values for which the range is meant; None for any."""


class ReadingError(ValueError):
    """An image is not read; the text says what was found, what was expected and what to do."""


class MissingPackage(ReadingError):
    """A package that reads this kind of file is not installed."""


class UnreadableImage(ReadingError):
    """A file is empty, truncated, or not of the type in its name."""


class OversizedImage(ReadingError):
    """An image has more pixels than allowed."""


class WrongChannels(ReadingError):
    """An image has other channels than are read."""


class UnscaledValues(WrongChannels):
    """Values of more than 8 bits, and no range says what they mean; or of 8 bits where others are meant."""

    def __init__(self, text: str, *, dtype: str, low: float, high: float) -> None:
        """Take what was found: the type of the values, the lowest and the highest."""
        super().__init__(text)
        self.dtype, self.low, self.high = dtype, low, high
