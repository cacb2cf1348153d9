"""Find images of val or test that are also in another split, pixel by pixel or nearly.

Nearly equal images, such as neighbouring frames of a video or the same photo in two sizes, have nearly equal
perceptual hashes: Zauner, "Implementation and Benchmarking of Perceptual Image Hash Functions", 2010, section 3.2.1,
the signs of the lowest 8 x 8 frequencies of the cosine transform of the grey image. H height, W width, C channels.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tasks.parts.sources.splits import LISTED_SPLITS

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

MAX_DISTANCE = 4
"""Bits of 64 in which the hashes of nearly equal images differ at most. Those of a photo at another scale, JPEG
quality or moved by up to 4 pixels differ by 0 to 4, those of other scenes by about 32."""

_HASHED_SIDE_PX = 64
"""Images are averaged to about this before they are hashed, which is quicker and changes hardly any bit."""
_PAIRS_AT_ONCE = 1 << 22
_NUM_SHOWN = 3


@dataclass(frozen=True)
class Pixels:
    """What tells whether two images are the same, and where they are."""

    place: object
    """File of the image, for messages."""
    digest: str
    """Equal for the same pixels in another file."""
    perceptual_hash: int | None
    """64 bits that hardly change with size, noise or a small movement; None for an image of one flat colour."""


@dataclass(frozen=True)
class Duplicates:
    """Images of val or test that also occur in another of train, val, test."""

    num_equal: int
    """Number of those with the same pixels."""
    num_near: int
    """Number of further ones that are nearly the same."""
    warnings: tuple[str, ...]


def pixels_of(place: object, image_HWC: NDArray[np.uint8]) -> Pixels:
    """Return what tells whether an image is the same as another."""
    digest = hashlib.sha256(str(image_HWC.shape).encode() + image_HWC.tobytes()).hexdigest()
    return Pixels(place, digest, perceptual_hash(image_HWC))


def perceptual_hash(image_HWC: NDArray[np.uint8]) -> int | None:
    """Return the 64 bits of pHash; None for an image of one flat colour, whose bits say nothing."""
    import numpy as np
    from imagehash import phash
    from PIL import Image

    if image_HWC.shape[2] in (1, 3):
        image = Image.fromarray(image_HWC if image_HWC.shape[2] == 3 else image_HWC[..., 0]).convert("L")
    else:
        image = Image.fromarray(image_HWC.mean(axis=2, dtype=np.float32).astype(np.uint8))
    low, high = image.getextrema()
    if low == high:
        return None
    reduced = image.reduce(max(1, min(image.size) // _HASHED_SIDE_PX))
    return int.from_bytes(np.packbits(phash(reduced).hash).tobytes())


def find_duplicates(splits: Mapping[str, Sequence[str]], images: Mapping[str, Pixels]) -> Duplicates:
    """Count and warn about images of val or test that also occur in an earlier split.

    `splits` holds the names of the images of each split. 100,000 images, a quarter of them in val and test, take some
    3 seconds to compare.
    """
    equal = _equal_pairs(splits, images)
    known = {second for _, second in equal}
    near = _near_pairs(splits, {name: pixels for name, pixels in images.items() if name not in known})
    warnings = []
    if equal:
        first, second = (images[name].place for name in equal[0])
        warnings.append(
            f"{len(equal)} image(s) of val or test also occur in another split, so the accuracy is too optimistic: "
            f"{second} has the pixels of {first}."
        )
    if near:
        shown = [f"{images[second].place} and {images[first].place}" for first, second in near[:_NUM_SHOWN]]
        warnings.append(
            f"{len(near)} image(s) of val or test are nearly the same as one of another split (at most "
            f"{MAX_DISTANCE} of the 64 bits of their perceptual hashes differ), so the accuracy may be too "
            f"optimistic: {'; '.join(shown)}. Put images of one scene into one group, by sub-folders or groups.csv."
        )
    return Duplicates(len(equal), len(near), tuple(warnings))


def _equal_pairs(splits: Mapping[str, Sequence[str]], images: Mapping[str, Pixels]) -> list[tuple[str, str]]:
    """Return the first image, and the one of a later split, of each pair with the same pixels."""
    first_of: dict[str, tuple[str, str]] = {}
    found = []
    for split in LISTED_SPLITS:
        for name in splits[split]:
            first_split, first = first_of.setdefault(images[name].digest, (split, name))
            if first_split != split:
                found.append((first, name))
    return found


def _near_pairs(splits: Mapping[str, Sequence[str]], images: Mapping[str, Pixels]) -> list[tuple[str, str]]:
    """Return, for each image of val and test that has one, the nearest image of an earlier split and itself."""
    earlier: dict[str, int] = {}
    found = []
    for split in LISTED_SPLITS:
        of_split = {
            name: number
            for name in splits[split]
            if name in images and (number := images[name].perceptual_hash) is not None
        }
        found += _nearest(of_split, earlier)
        earlier |= of_split
    return found


def _nearest(images: Mapping[str, int], earlier: Mapping[str, int]) -> list[tuple[str, str]]:
    import numpy as np

    if not images or not earlier:
        return []
    names, earlier_names = list(images), list(earlier)
    hashes_N = np.fromiter(images.values(), np.uint64, len(images))
    hashes_M = np.fromiter(earlier.values(), np.uint64, len(earlier))
    at_once = max(1, _PAIRS_AT_ONCE // len(hashes_M))
    found = []
    for start in range(0, len(hashes_N), at_once):
        distances_NM = np.bitwise_count(hashes_N[start : start + at_once, None] ^ hashes_M)
        for row in np.flatnonzero(distances_NM.min(axis=1) <= MAX_DISTANCE):
            found.append((earlier_names[int(distances_NM[row].argmin())], names[start + int(row)]))
    return found
