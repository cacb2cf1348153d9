"""Random changes of training images and their masks: a preset per domain, as a list of steps with their reasons.

What happens to an image depends on the seed, the view and the index of the image alone: not on the batch it is in,
the process that loaded it, or what ran before. Each time that a training shows an image it is the next view. All
geometric steps of an image together are one warp, of the image bilinear, of its mask nearest neighbour; what lies
outside the image becomes black, and ignored in the mask.

N images, C channels, H rows, W columns. Images are float32, 0..1.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from tasks.parts.data.class_table import IGNORE_INDEX
from tasks.parts.data.contact_sheet import draw_contact_sheet
from tasks.parts.data.dataset import Manifest, open_split
from tasks.parts.training.config import Augmentation, ViewsConfig

logger = logging.getLogger(__name__)

Matrix = NDArray[np.float64]
"""Affine map, [3, 3], from a pixel (x, y, 1) of the changed image to where it lies in the image before."""

_SHEET_COLUMNS = 8
_SHEET_EPOCHS = 3
_BLUR_KERNEL_PX = 9


@dataclass(frozen=True)
class Mirror:
    """Mirror the columns (left and right), or the rows."""

    share: float
    reason: str
    rows: bool = False

    def matrix(self, random: np.random.Generator, height: int, width: int) -> Matrix:
        """Return the map of one image."""
        matrix = np.eye(3)
        if random.random() < self.share:
            axis, size = (1, height) if self.rows else (0, width)
            matrix[axis] *= -1
            matrix[axis, 2] = size - 1
        return matrix


@dataclass(frozen=True)
class ScaleAndCrop:
    """Scale by a factor, log-uniform, then cut the size of the network at a random place, or pad to it."""

    min_scale: float
    max_scale: float
    reason: str

    def matrix(self, random: np.random.Generator, height: int, width: int) -> Matrix:
        """Return the map of one image."""
        scale = float(np.exp(random.uniform(np.log(self.min_scale), np.log(self.max_scale))))
        left, top = ((scale - 1) * size * random.random() for size in (width, height))
        x, y = ((offset + 0.5) / scale - 0.5 for offset in (left, top))
        return np.array([[1 / scale, 0, x], [0, 1 / scale, y], [0, 0, 1]])


@dataclass(frozen=True)
class Rotate:
    """Turn about the centre by an angle up to a limit, in either direction."""

    max_degrees: float
    reason: str

    def matrix(self, random: np.random.Generator, height: int, width: int) -> Matrix:
        """Return the map of one image."""
        return _turn(np.deg2rad(random.uniform(-self.max_degrees, self.max_degrees)), height, width)


@dataclass(frozen=True)
class QuarterTurns:
    """Turn about the centre by 0, 90, 180 or 270 degrees."""

    reason: str

    def matrix(self, random: np.random.Generator, height: int, width: int) -> Matrix:
        """Return the map of one image."""
        return _turn(np.pi / 2 * random.integers(4), height, width)


@dataclass(frozen=True)
class Deform:
    """Move a coarse grid of points at random and interpolate between them (Ronneberger et al., 2015, section 3.1)."""

    share: float
    reason: str
    std: float = 0.02
    """Standard deviation of the displacement of a point, as a share of the shorter side."""
    grid: int = 3
    """Points per side."""

    def displacement(self, random: np.random.Generator, height: int, width: int) -> Tensor:
        """Return how far each pixel of one image moves in x and in y, in pixels, [2, H, W]."""
        std_px = self.std * min(height, width) * (random.random() < self.share)
        coarse = torch.from_numpy(random.normal(0, 1, (1, 2, self.grid, self.grid)) * std_px).float()
        return F.interpolate(coarse, (height, width), mode="bicubic", align_corners=True)[0]


@dataclass(frozen=True)
class _Factor:
    """A step with a factor near 1."""

    spread: float
    reason: str
    share: float = 1.0
    is_colour = False

    def draw(self, random: np.random.Generator) -> float:
        """Return the factor of one image."""
        return random.uniform(1 - self.spread, 1 + self.spread)


@dataclass(frozen=True)
class Gain(_Factor):
    """Scale all values of an image by a factor near 1."""

    def apply(self, images_NCHW: Tensor, values_N: Tensor) -> Tensor:
        """Return the changed images."""
        return (images_NCHW * values_N[:, None, None, None]).clamp(0, 1)


@dataclass(frozen=True)
class Contrast(_Factor):
    """Scale the distance of all values of an image from their mean by a factor near 1."""

    def apply(self, images_NCHW: Tensor, values_N: Tensor) -> Tensor:
        """Return the changed images."""
        from kornia.enhance import adjust_contrast_with_mean_subtraction

        return adjust_contrast_with_mean_subtraction(images_NCHW, values_N)


@dataclass(frozen=True)
class Gamma:
    """Raise all values to a power, log-uniform about 1: middle tones move, black and white stay."""

    max_power: float
    reason: str
    share: float = 1.0
    is_colour = False

    def draw(self, random: np.random.Generator) -> float:
        """Return the power of one image."""
        return float(np.exp(random.uniform(-1, 1) * np.log(self.max_power)))

    def apply(self, images_NCHW: Tensor, values_N: Tensor) -> Tensor:
        """Return the changed images."""
        from kornia.enhance import adjust_gamma

        return adjust_gamma(images_NCHW, values_N)


@dataclass(frozen=True)
class Saturation(_Factor):
    """Blend with the grey image, or away from it, by a factor near 1; for RGB."""

    is_colour = True

    def apply(self, images_NCHW: Tensor, values_N: Tensor) -> Tensor:
        """Return the changed images."""
        from kornia.enhance.adjust import adjust_saturation_with_gray_subtraction

        return adjust_saturation_with_gray_subtraction(images_NCHW, values_N)


@dataclass(frozen=True)
class Hue:
    """Turn the hue by a part of the colour circle; for RGB."""

    max_turn: float
    """Largest part of the circle, in either direction."""
    reason: str
    share: float = 1.0
    is_colour = True

    def draw(self, random: np.random.Generator) -> float:
        """Return the turn of one image."""
        return random.uniform(-self.max_turn, self.max_turn)

    def apply(self, images_NCHW: Tensor, values_N: Tensor) -> Tensor:
        """Return the changed images."""
        from kornia.enhance import adjust_hue

        return adjust_hue(images_NCHW, values_N * (2 * torch.pi))


@dataclass(frozen=True)
class Blur:
    """Blur with a Gaussian."""

    max_sigma_px: float
    reason: str
    share: float
    is_colour = False

    def draw(self, random: np.random.Generator) -> float:
        """Return the standard deviation for one image."""
        return random.uniform(0.1, self.max_sigma_px)

    def apply(self, images_NCHW: Tensor, values_N: Tensor) -> Tensor:
        """Return the changed images."""
        from kornia.filters import gaussian_blur2d

        return gaussian_blur2d(images_NCHW, _BLUR_KERNEL_PX, values_N[:, None].expand(-1, 2))


@dataclass(frozen=True)
class Noise:
    """Add Gaussian noise to each value."""

    std: float
    reason: str
    share: float
    is_colour = False

    def draw(self, random: np.random.Generator) -> float:
        """Return the seed of the noise of one image."""
        return float(random.integers(2**31))

    def apply(self, images_NCHW: Tensor, values_N: Tensor) -> Tensor:
        """Return the changed images."""
        seeds = [int(seed) for seed in values_N.tolist()]
        generators = [torch.Generator(images_NCHW.device).manual_seed(seed) for seed in seeds]
        noise = [
            torch.randn(image.shape, generator=generator, device=image.device)
            for image, generator in zip(images_NCHW, generators, strict=True)
        ]
        return (images_NCHW + torch.stack(noise) * self.std).clamp(0, 1)


Affine = Mirror | ScaleAndCrop | Rotate | QuarterTurns
Tone = Gain | Contrast | Gamma | Saturation | Hue | Blur | Noise
Step = Affine | Deform | Tone

STREET: tuple[Step, ...] = (
    Mirror(0.5, "a mirrored street is a street; signs with text are few"),
    ScaleAndCrop(0.5, 2.0, "the same object comes near and far; the range of DeepLabv3 (Chen et al., 2017)"),
    Gain(0.3, "exposure, sun and shadow"),
    Contrast(0.3, "haze, rain, low sun"),
    Saturation(0.4, "cameras and weather differ in colour"),
    Hue(0.02, "white balance; more would turn traffic lights"),
    Blur(1.5, "motion, focus, a wet lens", share=0.2),
)

MEDICAL: tuple[Step, ...] = (
    Mirror(0.5, "most tissue has no left and right; leave the preset out where the side counts"),
    Rotate(15, "the patient and the sample lie a little turned"),
    ScaleAndCrop(0.7, 1.4, "sizes of bodies and fields of view; the range of nnU-Net (Isensee et al., 2021)"),
    Deform(0.3, "tissue is soft: the augmentation of U-Net (Ronneberger et al., 2015)"),
    Gain(0.2, "dose, gain, thickness of a section"),
    Contrast(0.25, "window, contrast agent, stain"),
    Gamma(1.5, "response curves of scanners (nnU-Net)", share=0.3),
    Blur(1.0, "focus, motion, slice thickness (nnU-Net)", share=0.2),
    Noise(0.03, "low dose, short exposure (nnU-Net)", share=0.15),
)

SATELLITE: tuple[Step, ...] = (
    Mirror(0.5, "seen from above, no direction is special"),
    QuarterTurns("seen from above, no direction is special"),
    ScaleAndCrop(0.75, 1.33, "ground resolution differs between sensors and heights"),
    Gain(0.2, "height of the sun, haze"),
    Contrast(0.2, "haze, season"),
    Gamma(1.25, "radiometric processing differs between providers", share=0.5),
)

PRESETS: dict[Augmentation, tuple[Step, ...]] = {
    Augmentation.none: (),
    Augmentation.street: STREET,
    Augmentation.medical: MEDICAL,
    Augmentation.satellite: SATELLITE,
}


def choose_steps(config: ViewsConfig) -> tuple[Step, ...]:
    """Return the steps of the preset, with the configured range of scales in place of the preset's."""
    steps = PRESETS[config.augmentation]
    if config.min_scale is None or config.max_scale is None:
        return steps
    scale = ScaleAndCrop(config.min_scale, config.max_scale, "trainer.min_scale and max_scale")
    affine = tuple(step for step in steps if isinstance(step, Affine) and not isinstance(step, ScaleAndCrop))
    return (*affine, scale, *(step for step in steps if not isinstance(step, Affine)))


class Views:
    """Makes the views of training images that a configuration describes."""

    def __init__(self, config: ViewsConfig, manifest: Manifest) -> None:
        self._config = config
        self._augmenter = Augmenter.for_views(config, manifest)
        self._gain_of_black = torch.tensor(manifest.mean).div(torch.tensor(manifest.std)).view(1, -1, 1, 1)

    def numbers(self, epoch: int, occurrences_N: Tensor, times_N: Tensor) -> Tensor:
        """Return the views of images of an epoch, counted from 0, that shows each of them `times_N` times.

        `occurrences_N`, counted from 0, says which time it is. After the last of `num_views` the first follows.
        """
        views_N = epoch * times_N + occurrences_N
        return views_N % self._config.num_views if self._config.num_views else views_N

    @torch.no_grad()
    def __call__(
        self, images_NCHW: Tensor, masks_NHW: Tensor, indices_N: Tensor, *, views_N: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return a view of each normalised image and of its mask."""
        config = self._config
        if self._augmenter:
            images_NCHW, masks_NHW = self._augmenter(images_NCHW, masks_NHW, indices_N, views_N=views_N)
        if config.augmentation is not Augmentation.none or not (config.horizontal_flip or config.brightness):
            return images_NCHW, masks_NHW
        device = images_NCHW.device
        randoms = _random_generators(config.augmentation_seed, views_N, indices_N)
        draws = [random.random(2) for random in randoms]
        flips_N, gains_N = torch.tensor(np.array(draws, np.float32)).to(device).T
        if config.horizontal_flip:
            is_mirrored_N = flips_N < config.horizontal_flip
            images_NCHW = torch.where(is_mirrored_N[:, None, None, None], images_NCHW.flip(3), images_NCHW)
            masks_NHW = torch.where(is_mirrored_N[:, None, None], masks_NHW.flip(2), masks_NHW)
        if config.brightness:
            gain_N111 = (1 + (gains_N * 2 - 1) * config.brightness).view(-1, 1, 1, 1)
            images_NCHW = images_NCHW * gain_N111 + self._gain_of_black.to(device) * (gain_N111 - 1)
        return images_NCHW, masks_NHW


class Augmenter:
    """Changes batches of training images by the steps of a preset."""

    def __init__(
        self, steps: Sequence[Step], *, seed: int, mean: tuple[float, ...], std: tuple[float, ...]
    ) -> None:
        self._affine = [step for step in steps if isinstance(step, Affine)]
        self._deform = [step for step in steps if isinstance(step, Deform)]
        self._tone = [step for step in steps if isinstance(step, Tone)]
        self._seed = seed
        self._mean, self._std = (torch.tensor(values).view(1, -1, 1, 1) for values in (mean, std))

    @classmethod
    def for_views(cls, config: ViewsConfig, manifest: Manifest) -> "Augmenter | None":
        """Return the augmenter of a training; None if the configuration has no steps.

        Steps of colour are for RGB alone: images of other bands get the others.
        """
        steps = _without_colour(config, choose_steps(config), manifest.num_channels)
        seed = config.augmentation_seed
        return cls(steps, seed=seed, mean=manifest.mean, std=manifest.std) if steps else None

    @torch.no_grad()
    def __call__(
        self, images_NCHW: Tensor, masks_NHW: Tensor, indices_N: Tensor, *, views_N: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return the changed images, normalised as those given, and the changed masks."""
        randoms = _random_generators(self._seed, views_N, indices_N)
        mean, std = (values.to(images_NCHW.device) for values in (self._mean, self._std))
        with torch.autocast(images_NCHW.device.type, enabled=False):
            images_NCHW = (images_NCHW.float() * std + mean).clamp(0, 1)
            if self._affine or self._deform:
                images_NCHW, masks_NHW = self._warp(images_NCHW, masks_NHW, randoms)
            for step in self._tone:
                # Drawn for every image, so that what one step draws does not depend on another's share.
                drawn = [(random.random() < step.share, step.draw(random)) for random in randoms]
                chosen = [n for n, (is_chosen, _) in enumerate(drawn) if is_chosen]
                if chosen:
                    values_N = torch.tensor([drawn[n][1] for n in chosen], device=images_NCHW.device)
                    images_NCHW[chosen] = step.apply(images_NCHW[chosen], values_N)
            return (images_NCHW - mean) / std, masks_NHW

    def _warp(
        self, images_NCHW: Tensor, masks_NHW: Tensor, randoms: list[np.random.Generator]
    ) -> tuple[Tensor, Tensor]:
        from kornia.geometry.transform import remap

        height, width = masks_NHW.shape[1:]
        y, x = np.indices((height, width)).reshape(2, -1)
        pixels = np.stack([x, y, np.ones(height * width)])
        places_N2HW = []
        for random in randoms:
            matrix = np.eye(3)
            for step in self._affine:
                matrix = matrix @ step.matrix(random, height, width)
            places_2HW = torch.from_numpy((matrix @ pixels)[:2].reshape(2, height, width)).float()
            for deform in self._deform:
                places_2HW = places_2HW + deform.displacement(random, height, width)
            places_N2HW.append(places_2HW)
        map_x, map_y = torch.stack(places_N2HW, dim=1).to(images_NCHW.device)
        # What lies outside becomes 0: black in images, and IGNORE_INDEX in masks shifted by it.
        shifted_N1HW = (masks_NHW - IGNORE_INDEX)[:, None].float()
        masks_N1HW = remap(shifted_N1HW, map_x, map_y, mode="nearest", align_corners=True)
        images_NCHW = remap(images_NCHW, map_x, map_y, mode="bilinear", align_corners=True)
        return images_NCHW, masks_N1HW[:, 0].round().to(masks_NHW.dtype) + IGNORE_INDEX


def draw_augmented_sheet(path: Path, augmenter: Augmenter, data: Path, manifest: Manifest) -> None:
    """Write a contact sheet of the first training images and masks as the first epochs will see them."""
    images_NHWC, masks_NHW = (array[:_SHEET_COLUMNS] for array in open_split(data, "train"))
    mean, std = (np.asarray(values, np.float32)[:, None, None] for values in (manifest.mean, manifest.std))
    normalised = (np.moveaxis(np.asarray(images_NHWC), -1, 1).astype(np.float32) / 255 - mean) / std
    labels: NDArray[Any] = np.asarray(masks_NHW)
    samples = {}
    for epoch in range(_SHEET_EPOCHS):
        changed_NCHW, changed_NHW = augmenter(
            torch.from_numpy(normalised),
            torch.from_numpy(labels.astype(np.int64)),
            torch.arange(len(labels)),
            views_N=torch.full((len(labels),), epoch),
        )
        values_NCHW = ((changed_NCHW.numpy() * std + mean) * 255).round().clip(0, 255).astype(np.uint8)
        samples[f"train, epoch {epoch + 1}"] = (
            np.moveaxis(values_NCHW, 1, -1),
            changed_NHW.numpy().astype(np.uint8),
        )
    draw_contact_sheet(path, classes=manifest.classes, samples=samples)


def _random_generators(seed: int, views_N: Tensor, indices_N: Tensor) -> list[np.random.Generator]:
    views_and_indices = torch.stack([views_N, indices_N], dim=1).tolist()
    return [np.random.default_rng((seed, view, index)) for view, index in views_and_indices]


def _without_colour(config: ViewsConfig, steps: tuple[Step, ...], num_channels: int) -> tuple[Step, ...]:
    """Leave out what needs RGB where the images have other bands, and say so."""
    colour = _colour_steps(steps)
    if not colour or num_channels == 3:
        return steps
    logger.info(
        "trainer.augmentation=%s without %s: they need RGB, and the images have %d bands",
        config.augmentation,
        ", ".join(colour),
        num_channels,
    )
    return tuple(step for step in steps if not (isinstance(step, Tone) and step.is_colour))


def _colour_steps(steps: Sequence[Step]) -> list[str]:
    return [type(step).__name__ for step in steps if isinstance(step, Tone) and step.is_colour]


def _turn(radians: float, height: int, width: int) -> Matrix:
    """Return the map of a turn about the centre."""
    x, y = (width - 1) / 2, (height - 1) / 2
    cos, sin = np.cos(radians), np.sin(radians)
    return np.array([[cos, -sin, x - cos * x + sin * y], [sin, cos, y - sin * x - cos * y], [0, 0, 1]])
