"""How `prepare_data` reads a folder of the user, and how it draws scenes."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from tasks.core.errors import ConfigError


class ResizeMode(StrEnum):
    """How an image comes to the size of the data set."""

    resize = "resize"
    """Stretched: images bilinear (smoothed when they shrink), masks nearest neighbour."""
    crop = "crop"
    """Cut from the centre without scaling; what is missing is black and ignored."""


@dataclass(frozen=True)
class FolderConfig:
    """How a user's folder becomes a data set."""

    resize_mode: ResizeMode
    """resize: stretched to height x width. crop: cut from the centre, padded with black, ignored pixels."""
    val_share: float
    """Share of the images for val, above 0; not read where the folder has train.txt, val.txt, test.txt."""
    test_share: float
    """Share of the images for test, above 0; val_share + test_share stays below 1."""
    num_calibration: int
    """Images of train that quantizers observe as well; at least 1."""
    max_megapixels: float
    """Larger images and masks are refused before they are decoded (memory)."""
    max_bad_images: int
    """So many unreadable files are skipped with a warning; one more stops the run. 0: none is skipped."""

    def __post_init__(self) -> None:
        section = "prepare_data.folder"
        for key in ("val_share", "test_share"):
            if not 0 < getattr(self, key) < 1:
                raise ConfigError(f"{section}.{key} = {getattr(self, key)}: must be above 0 and below 1.")
        if self.val_share + self.test_share >= 1:
            raise ConfigError(
                f"{section}.val_share + {section}.test_share = {self.val_share + self.test_share:g}: must be "
                "below 1, the rest is the train split."
            )
        if self.num_calibration < 1:
            raise ConfigError(
                f"{section}.num_calibration = {self.num_calibration}: must be at least 1, quantizers cannot "
                "be calibrated without images."
            )
        if not 0 < self.max_megapixels <= 100_000:
            raise ConfigError(
                f"{section}.max_megapixels = {self.max_megapixels}: must be above 0, at most 100000."
            )
        if self.max_bad_images < 0:
            raise ConfigError(f"{section}.max_bad_images = {self.max_bad_images}: must be 0 or more.")

    @property
    def max_pixels(self) -> int:
        """The pixel cap in pixels."""
        return round(self.max_megapixels * 1e6)


@dataclass(frozen=True)
class ScenesConfig:
    """What a scene looks like and how many there are."""

    num_digits: int
    """Digit classes 0 .. num_digits - 1; the network has one class more, the background. 1 to 10."""
    num_train: int
    """Scenes in the train split; more of them help more than more epochs."""
    num_val: int
    """Scenes in the val split (early stop, best checkpoint, choice of calibrator)."""
    num_test: int
    """Scenes in the test split (every reported accuracy)."""
    num_calibration: int
    """Scenes that quantizers observe; drawn like train scenes, but not among them."""
    min_digits: int
    """Fewest digits pasted on a scene."""
    max_digits: int
    """Most digits pasted on a scene; later ones may cover earlier ones."""
    min_digit_share: float
    """Smallest side of a digit as a share of the shorter scene side; smaller: harder."""
    max_digit_share: float
    """Largest side of a digit as a share of the shorter scene side."""
    max_rotation_deg: float
    """Digits are turned by up to so many degrees either way."""
    min_opacity: float
    """Least opacity of a digit, above 0, at most 1; lower: harder."""
    max_noise: float
    """Largest standard deviation of the sensor noise of a scene, in steps of 1/255; higher: harder."""

    def __post_init__(self) -> None:
        _check("num_digits", self.num_digits, 1, 10)
        for key in ("num_train", "num_val", "num_test", "num_calibration"):
            _check(key, getattr(self, key), 1, 10_000_000)
        _check("min_digits", self.min_digits, 1, 100)
        _check("max_digits", self.max_digits, self.min_digits, 100)
        _check("min_digit_share", self.min_digit_share, 0.05, 1.0)
        _check("max_digit_share", self.max_digit_share, self.min_digit_share, 1.0)
        _check("max_rotation_deg", self.max_rotation_deg, 0.0, 180.0)
        _check("min_opacity", self.min_opacity, 0.05, 1.0)
        _check("max_noise", self.max_noise, 0.0, 255.0)

    def num_scenes(self, split: str) -> int:
        """Configured number of scenes of a split."""
        counts = {
            "train": self.num_train,
            "val": self.num_val,
            "test": self.num_test,
            "calibration": self.num_calibration,
        }
        return counts[split]


def _check(key: str, value: float, low: float, high: float) -> None:
    if not low <= value <= high:
        raise ConfigError(f"prepare_data.scenes.{key} = {value}: must be between {low} and {high}.")
