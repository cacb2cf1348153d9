"""Generate the data set `digit_scenes`: handwritten digits on photos, from real images that scikit-learn ships.

Handwritten scans (`load_digits`, 1797 of them, 8x8) are pasted in random colour, size, rotation and opacity
on random crops of two photos (`load_sample_images`). The pools of scans and of photo columns that train, val
and test draw from are disjoint; calibration draws from the pool of train.

Shape letters: N scenes of a chunk, D digits of a chunk, H height, W width, P side of a patch, C RGB.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tasks.parts.sources.config import ScenesConfig

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from tasks.parts.data.dataset import Batch

POOL_OF_SPLIT = {"train": "train", "val": "val", "test": "test", "calibration": "train"}
_POOL_BOUNDS = {"train": (0.0, 0.55), "val": (0.55, 0.75), "test": (0.75, 1.0)}
"""Share of the scans of each digit, and of the columns of each photo, in each pool."""
_CROP_SIDE_PX = (64, 120)
"""Longer side of a background crop in photo pixels; the narrowest pool is 128 columns wide."""
_SCAN_PX = 8
_CHUNK_PIXELS = 32 * 64 * 64
"""Scenes are made in chunks of about this many pixels: small enough for the CPU's cache."""


@dataclass(frozen=True)
class Pool:
    """The real pixels that one split may draw from."""

    scans: NDArray[np.float32]
    """[S, 10, 10], ink 0..1, with a border of one empty pixel."""
    digits: NDArray[np.int64]
    """Digit of each scan."""
    photos: tuple[NDArray[np.float32], ...]
    """[H, W, 3] each, 0..255: the columns of this pool."""


def load_pool(name: str, *, num_digits: int, seed: int) -> Pool:
    """Take the scans and photo columns of the pool `train`, `val` or `test`; the seed selects the scans."""
    import numpy as np
    from sklearn.datasets import load_digits, load_sample_images

    low, high = _POOL_BOUNDS[name]
    scans = load_digits()
    order = np.random.default_rng([seed, 1000]).permutation(len(scans.target))
    chosen = []
    for digit in range(num_digits):
        of_digit = order[scans.target[order] == digit]
        chosen.append(of_digit[int(low * len(of_digit)) : int(high * len(of_digit))])
    index = np.concatenate(chosen)
    ink = np.pad(scans.images[index].astype(np.float32) / 16, ((0, 0), (1, 1), (1, 1)))
    photos = tuple(
        np.ascontiguousarray(photo[:, int(low * photo.shape[1]) : int(high * photo.shape[1])], np.float32)
        for photo in load_sample_images().images
    )
    return Pool(ink, scans.target[index].astype(np.int64), photos)


def draw_scenes(split: str, scenes: ScenesConfig, *, height: int, width: int, seed: int) -> Iterator[Batch]:
    """Yield chunks of images_NHWC and masks_NHW of a split; equal arguments give equal bytes."""
    import numpy as np

    pool = load_pool(POOL_OF_SPLIT[split], num_digits=scenes.num_digits, seed=seed)
    split_number = list(POOL_OF_SPLIT).index(split)
    chunk_size = max(1, _CHUNK_PIXELS // (height * width))
    num_scenes = scenes.num_scenes(split)
    for chunk, start in enumerate(range(0, num_scenes, chunk_size)):
        rng = np.random.default_rng([seed, split_number, chunk])
        # A whole chunk is always drawn, so that a larger count only appends scenes.
        images_NHWC = _draw_backgrounds(rng, pool, chunk_size, height, width)
        masks_NHW = _paste_digits(rng, pool, scenes, images_NHWC)
        kept = min(chunk_size, num_scenes - start)
        yield _develop(rng, images_NHWC, scenes.max_noise)[:kept], masks_NHW[:kept]


def _draw_backgrounds(
    rng: np.random.Generator, pool: Pool, num: int, height: int, width: int
) -> NDArray[np.float32]:
    """Crop, mirror, scale (bilinear) and dim random parts of the photos."""
    import numpy as np

    images_NHWC = np.empty((num, height, width, 3), np.float32)
    photo_N = rng.integers(len(pool.photos), size=num)
    side_N = rng.uniform(*_CROP_SIDE_PX, size=num)
    place_N2 = rng.uniform(size=(num, 2))
    is_mirrored_N = rng.uniform(size=num) < 0.5
    gain_N = rng.uniform(0.6, 1.15, size=num).astype(np.float32)
    for n in range(num):
        photo = pool.photos[photo_N[n]]
        crop = side_N[n] / max(height, width)
        y0 = place_N2[n, 0] * (photo.shape[0] - 1 - crop * height)
        x0 = place_N2[n, 1] * (photo.shape[1] - 1 - crop * width)
        y_H, x_W = y0 + crop * np.arange(height), x0 + crop * np.arange(width)
        if is_mirrored_N[n]:
            x_W = x_W[::-1]
        rows_H, columns_W = y_H.astype(np.int64), x_W.astype(np.int64)
        dy_H = (y_H - rows_H).astype(np.float32)[:, None, None]
        dx_W = (x_W - columns_W).astype(np.float32)[:, None]
        lines = photo[rows_H] * (1 - dy_H) + photo[rows_H + 1] * dy_H
        images_NHWC[n] = lines[:, columns_W] * (1 - dx_W) + lines[:, columns_W + 1] * dx_W
    images_NHWC *= gain_N[:, None, None, None]
    return images_NHWC


def _paste_digits(
    rng: np.random.Generator, pool: Pool, scenes: ScenesConfig, images_NHWC: NDArray[np.float32]
) -> NDArray[np.uint8]:
    """Paste digits into `images_NHWC` in place; return the masks (digit d has label d + 1)."""
    import numpy as np

    num, height, width, _ = images_NHWC.shape
    shorter = min(height, width)
    num_digits_N = rng.integers(scenes.min_digits, scenes.max_digits + 1, size=num)
    scene_D = np.repeat(np.arange(num), num_digits_N)
    digit_D = rng.integers(scenes.num_digits, size=len(scene_D))
    scan_D = _pick_scans(rng, pool, digit_D, scenes.num_digits)
    side_D = rng.uniform(scenes.min_digit_share, scenes.max_digit_share, size=len(scene_D)) * shorter
    colour_DC = rng.uniform(0, 255, size=(len(scene_D), 3)).astype(np.float32)
    opacity_D = rng.uniform(scenes.min_opacity, 1, size=len(scene_D)).astype(np.float32)
    angle_D = np.deg2rad(rng.uniform(-1, 1, size=len(scene_D)) * scenes.max_rotation_deg)
    # A third of a digit may stick out of the scene.
    top_left_D2 = rng.uniform(size=(len(scene_D), 2)) * (np.array([height, width]) - side_D[:, None] * 0.7)
    centre_D2 = top_left_D2 + side_D[:, None] * 0.35
    ink_DPP, corner_D2 = _turn_scans(pool.scans[scan_D], side_D, angle_D, centre_D2)

    masks_NHW = np.zeros((num, height, width), np.uint8)
    patch = ink_DPP.shape[1]
    for d, n in enumerate(scene_D):
        top, left = corner_D2[d]
        here = (n, slice(max(top, 0), top + patch), slice(max(left, 0), left + patch))
        mask, image = masks_NHW[here], images_NHWC[here]
        skip_y, skip_x = max(-top, 0), max(-left, 0)
        ink = ink_DPP[d, skip_y : skip_y + mask.shape[0], skip_x : skip_x + mask.shape[1]]
        image += (ink * opacity_D[d])[..., None] * (colour_DC[d] - image)
        mask[ink > 0.5] = digit_D[d] + 1
    return masks_NHW


def _pick_scans(
    rng: np.random.Generator, pool: Pool, digit_D: NDArray[np.int64], num_digits: int
) -> NDArray[np.int64]:
    """Choose a random scan of each requested digit; the scans of a pool are sorted by digit."""
    import numpy as np

    counts = np.bincount(pool.digits, minlength=num_digits)
    first = np.concatenate([[0], np.cumsum(counts)[:-1]])
    return first[digit_D] + (rng.uniform(size=len(digit_D)) * counts[digit_D]).astype(np.int64)


def _turn_scans(
    scans_D: NDArray[np.float32],
    side_D: NDArray[np.float64],
    angle_D: NDArray[np.float64],
    centre_D2: NDArray[np.float64],
) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    """Scale and rotate scans to patches ink_DPP (0..1); also return the position of each patch in its scene."""
    import numpy as np

    patch = int(np.ceil(side_D.max(initial=1.0) * np.sqrt(2))) + 2
    corner_D2 = np.floor(centre_D2).astype(np.int64) - patch // 2
    from_centre = np.arange(patch) - (centre_D2 - corner_D2)[..., None]
    y_DP1 = from_centre[:, 0, :, None].astype(np.float32)
    x_D1P = from_centre[:, 1, None, :].astype(np.float32)
    cos_D = (np.cos(angle_D) * _SCAN_PX / side_D).astype(np.float32)[:, None, None]
    sin_D = (np.sin(angle_D) * _SCAN_PX / side_D).astype(np.float32)[:, None, None]
    middle, last = (_SCAN_PX + 1) / 2, _SCAN_PX + 0.999
    v_DPP = np.clip(cos_D * y_DP1 - sin_D * x_D1P + middle, 0, last)
    u_DPP = np.clip(sin_D * y_DP1 + cos_D * x_D1P + middle, 0, last)

    row_DPP, column_DPP = v_DPP.astype(np.int32), u_DPP.astype(np.int32)
    v_DPP -= row_DPP
    u_DPP -= column_DPP
    line = _SCAN_PX + 2
    index_DPP = np.arange(len(scans_D), dtype=np.int32)[:, None, None] * line**2 + row_DPP * line + column_DPP
    flat = scans_D.ravel()
    upper = flat[index_DPP] * (1 - u_DPP) + flat[index_DPP + 1] * u_DPP
    lower = flat[index_DPP + line] * (1 - u_DPP) + flat[index_DPP + line + 1] * u_DPP
    ink_DPP = upper + (lower - upper) * v_DPP
    # Sharpen the soft edges of enlarged 8x8 pixels: 0 below 0.25 ink, 1 above 0.6.
    return np.clip((ink_DPP - 0.25) / 0.35, 0, 1), corner_D2


def _develop(
    rng: np.random.Generator, images_NHWC: NDArray[np.float32], max_noise: float
) -> NDArray[np.uint8]:
    """Blur each scene by a random amount, add sensor noise, round to uint8."""
    import numpy as np

    num = len(images_NHWC)
    softness_N = rng.uniform(0, 0.9, size=num).astype(np.float32)[:, None, None, None]
    noise_N = rng.uniform(0, max_noise, size=num).astype(np.float32)[:, None, None, None]
    padded = np.pad(images_NHWC, ((0, 0), (1, 1), (1, 1), (0, 0)), mode="edge")
    columns = padded[:, :, :-2] + 2 * padded[:, :, 1:-1] + padded[:, :, 2:]
    blurred = (columns[:, :-2] + 2 * columns[:, 1:-1] + columns[:, 2:]) / 16
    images_NHWC = images_NHWC + softness_N * (blurred - images_NHWC)
    images_NHWC += noise_N * rng.standard_normal(images_NHWC.shape, dtype=np.float32)
    return np.clip(np.rint(images_NHWC), 0, 255).astype(np.uint8)
