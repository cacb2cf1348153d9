"""Configuration of the sources of prepare_data: how a user's folder is read, and how scenes are generated."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated

from tasks.core.bounds import AtLeast, AtMost, Between, LessThan, MoreThan
from tasks.core.errors import ConfigError
from tasks.parts.data.image_files import ResizeMode


class MissingMasks(StrEnum):
    """What happens to an image without a mask."""

    error = "error"
    """It stops the run."""
    skip = "skip"
    """It is left out, with a warning."""
    background = "background"
    """All its pixels are of the class `background`."""
    unlabelled = "unlabelled"
    """It is in the training split without labels: only terms that need a teacher learn from it."""


class Groups(StrEnum):
    """Which images stay together in one split."""

    folder = "folder"
    """Those of one sub-folder, such as the frames of a video; where a layout knows more, such as the sequences of
    Cityscapes, those."""
    none = "none"
    """None but those that groups.csv names."""


class Annotations(StrEnum):
    """Which annotations of COCO are read."""

    panoptic = "panoptic"
    """PNG masks of segments, of things and of stuff."""
    instances = "instances"
    """Objects as polygons and run lengths; the rest is background."""


@dataclass(frozen=True)
class ColumnsConfig:
    """Which columns of a table are read."""

    image: str | None
    """Column of the images; None: the only one of the usual names."""
    mask: str | None
    """Column of the masks; None: the only one of the usual names."""


@dataclass(frozen=True)
class FolderConfig:
    """How a user's folder becomes a data set."""

    channels: Annotated[int, Between(1, 16)]
    """Channels of an image. 1: grey. 3: RGB. Any number: TIFF files, or .npy files [H, W, channels]."""
    resize_mode: ResizeMode
    """resize: stretched to height x width. crop: cropped at the centre, padded with black, ignored pixels. windows:
    cut into windows of height x width."""
    val_share: Annotated[float, MoreThan(0), LessThan(1)]
    """Share of the images for val; unused where a list or a folder says which images val has."""
    test_share: Annotated[float, MoreThan(0), LessThan(1)]
    """Share of the images for test; val_share + test_share stays below 1."""
    num_calibration: Annotated[int, AtLeast(1), "quantizers cannot be calibrated without images"]
    """Images of train that are also used for calibration."""
    max_megapixels: Annotated[float, MoreThan(0), AtMost(100_000)]
    """Larger images and masks are refused before they are decoded (memory)."""
    max_bad_images: Annotated[int, AtLeast(0)]
    """Number of unreadable files that are skipped with a warning; one more stops the run."""
    missing_masks: MissingMasks = MissingMasks.error
    """What happens to an image without a mask."""
    groups: Groups = Groups.folder
    """Which images stay together in one split; groups.csv replaces the groups of the images that it names."""
    value_range: list[float] | None = None
    """Lowest and highest value of images of more than 8 bits, which become 0 and 255; such images need it."""
    window_overlap: Annotated[int, AtLeast(0)] | None = None
    """Pixels that neighbouring windows share, for resize_mode windows; half of it is the context that the network
    sees beyond what counts, so twice the reach of the network is best."""

    annotations: Annotations | None = None
    """Which annotations are read, for source coco only."""
    columns: ColumnsConfig | None = None
    """Which columns are read, for source hf_dataset only."""

    def __post_init__(self) -> None:
        if self.value_range is not None and not _is_range(self.value_range):
            raise ConfigError(
                f"value_range is {self.value_range}, expected two numbers, the lowest and the highest value, such as "
                "[0, 4095]."
            )
        if self.resize_mode is ResizeMode.windows and self.window_overlap is None:
            raise ConfigError(
                "window_overlap is null, and resize_mode is windows: set the pixels that neighbouring windows share, "
                "such as 64."
            )
        if self.val_share + self.test_share >= 1:
            raise ConfigError(
                f"test_share is {self.test_share} and val_share {self.val_share}, expected a sum below 1: the rest "
                "is the train split."
            )

    @property
    def max_pixels(self) -> int:
        """Largest number of pixels that an image may have."""
        return round(self.max_megapixels * 1e6)


def _is_range(values: list[float]) -> bool:
    return len(values) == 2 and values[0] < values[1]


@dataclass(frozen=True)
class ScenesConfig:
    """How scenes look, and how many there are."""

    num_digits: Annotated[int, Between(1, 10)]
    """Digit classes 0 .. num_digits - 1; the network has one class more, the background."""
    num_train: Annotated[int, Between(1, 10_000_000)]
    """Scenes in the train split; more scenes help more than more epochs."""
    num_val: Annotated[int, Between(1, 10_000_000)]
    """Scenes in the val split (early stop, best checkpoint, choice of calibrator)."""
    num_test: Annotated[int, Between(1, 10_000_000)]
    """Scenes in the test split (every reported accuracy)."""
    num_calibration: Annotated[int, Between(1, 10_000_000)]
    """Scenes for calibration; drawn like train scenes, but not among them."""
    min_digits: Annotated[int, Between(1, 100)]
    """Fewest digits pasted on a scene."""
    max_digits: Annotated[int, Between(1, 100)]
    """Most digits pasted on a scene; later ones may cover earlier ones."""
    min_digit_share: Annotated[float, Between(0.05, 1)]
    """Smallest side of a digit as a share of the shorter scene side; smaller: harder."""
    max_digit_share: Annotated[float, Between(0.05, 1)]
    """Largest side of a digit as a share of the shorter scene side."""
    max_rotation_deg: Annotated[float, Between(0, 180)]
    """Largest rotation of digits, in either direction."""
    min_opacity: Annotated[float, Between(0.05, 1)]
    """Least opacity of a digit; lower: harder."""
    max_noise: Annotated[float, Between(0, 255)]
    """Largest standard deviation of the sensor noise of a scene, in steps of 1/255; higher: harder."""

    def __post_init__(self) -> None:
        for low, high in (("min_digits", "max_digits"), ("min_digit_share", "max_digit_share")):
            if getattr(self, low) > getattr(self, high):
                raise ConfigError(
                    f"{high} is {getattr(self, high)}, expected at least {low}, which is {getattr(self, low)}."
                )

    def num_scenes(self, split: str) -> int:
        """Return the configured number of scenes of a split."""
        counts = {
            "train": self.num_train,
            "val": self.num_val,
            "test": self.num_test,
            "calibration": self.num_calibration,
        }
        return counts[split]
