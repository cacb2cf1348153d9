"""Render pages of text for the orientation model of benchmarks/pages.py.

A page is random words in a random font. Every second page lies on a part of a photo. A window of the page is scaled
and cropped as the model's package does (shorter side 256, centre 224), then loses contrast and sharpness and gets
noise. Shapes: H rows, W columns, C RGB.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageDraw, ImageFilter, ImageFont

from tasks.parts.sources.digit_scenes import POOL_OF_SPLIT, load_pool

SIDE = 224
"""Rows and columns of a page image."""
SHORTER_SIDE = 256
"""Side to which the package scales an image before it cuts the centre."""
FAMILIES = (
    ("DejaVuSans.ttf", "DejaVuSans-Bold.ttf"),
    ("DejaVuSerif.ttf", "DejaVuSerif-Bold.ttf"),
    ("DejaVuSansMono.ttf", "DejaVuSansMono-Bold.ttf"),
    ("LiberationSans-Regular.ttf", "LiberationSans-Bold.ttf"),
    ("LiberationSerif-Regular.ttf", "LiberationSerif-Bold.ttf"),
    ("LiberationMono-Regular.ttf", "LiberationMono-Bold.ttf"),
)
"""Text and headline of each font family."""
PACKAGES = "fonts-dejavu-core fonts-liberation"
"""Debian packages with these fonts."""

_CONSONANTS, _VOWELS = "bcdfghjklmnpqrstvwz", "aeiou"
_STREAM = 2000
"""Separates the random numbers of pages from those of digit_scenes."""


@dataclass(frozen=True)
class Difficulty:
    """How much of a page is visible, and how much it is disturbed; each is drawn evenly between two values."""

    visible_share: tuple[float, float] = (0.3, 1.0)
    """Side of the visible window as a share of the page."""
    contrast: tuple[float, float] = (0.2, 1.0)
    blur_px: tuple[float, float] = (0.0, 1.0)
    """Radius of the Gaussian blur, in pixels of the final image."""
    noise: tuple[float, float] = (0.0, 20.0)
    """Standard deviation of the noise, in steps of 1/255."""


def find_families(folders: Sequence[Path]) -> list[tuple[Path, Path]]:
    """Return the font families whose two files lie below one of the folders, in the order of FAMILIES."""
    files = {path.name: path for folder in folders for path in sorted(folder.rglob("*.ttf"))}
    return [(files[text], files[bold]) for text, bold in FAMILIES if text in files and bold in files]


def draw_pages(
    split: str,
    num_pages: int,
    families: Sequence[tuple[Path, Path]],
    *,
    seed: int,
    difficulty: Difficulty | None = None,
) -> list[np.ndarray]:
    """Return upright pages [224, 224, 3] of a split; a larger number only appends pages.

    Splits share no photo pixel. Equal arguments, fonts and versions of Pillow give equal pages.
    """
    photos = [
        Image.fromarray(photo_HWC.astype(np.uint8))
        for photo_HWC in load_pool(POOL_OF_SPLIT[split], num_digits=1, seed=seed).photos
    ]
    pages = []
    for index in range(num_pages):
        random = np.random.default_rng([seed, _STREAM, list(POOL_OF_SPLIT).index(split), index])
        page = _sheet(random, families[random.integers(len(families))])
        if index % 2:
            page = _on_photo(random, page, photos[random.integers(len(photos))])
        pages.append(_developed(random, page, difficulty or Difficulty()))
    return pages


def _sheet(random: np.random.Generator, family: tuple[Path, Path]) -> Image.Image:
    """Set a headline and paragraphs, in one or two columns."""
    width, height = (int(side) for side in random.integers(500, 900, 2))
    paper_C = random.integers(200, 256, 3) if random.random() < 0.5 else np.full(3, random.integers(225, 256))
    ink_C = random.integers(0, 110, 3)
    page = Image.new("RGB", (width, height), tuple(map(int, paper_C)))
    draw = ImageDraw.Draw(page)
    size = int(random.integers(18, 36))
    text, bold = (ImageFont.truetype(str(file), size) for file in family)
    margin, line_height = int(random.integers(15, 60)), int(size * random.uniform(1.15, 1.6))
    num_columns = 2 if width > 700 and random.random() < 0.3 else 1
    column_width = (width - (num_columns + 1) * margin) // num_columns
    for column in range(num_columns):
        left, top = margin + column * (column_width + margin), margin
        is_headline = True
        while top < height - margin - line_height:
            num_lines = 1 if is_headline else int(random.integers(1, 9))
            for line in _paragraph(random, bold if is_headline else text, column_width, num_lines):
                draw.text((left, top), line, tuple(map(int, ink_C)), bold if is_headline else text)
                top += line_height
                if top >= height - margin - line_height:
                    break
            top += line_height // 2
            is_headline = random.random() < 0.1
    return page


def _paragraph(random: np.random.Generator, font: Any, width: int, num_lines: int) -> list[str]:
    """Fill lines with words; the last one ends early."""
    lines = []
    for number in range(num_lines):
        room = width * (random.uniform(0.2, 1) if number == num_lines - 1 else 1)
        line = _word(random).capitalize() if number == 0 else _word(random)
        while True:
            longer = f"{line} {_word(random)}"
            if font.getlength(longer) > room:
                break
            line = longer
        lines.append(line + ("." if number == num_lines - 1 else ""))
    return lines


def _word(random: np.random.Generator) -> str:
    if random.random() < 0.06:
        return str(random.integers(1, 10_000))
    syllables = [
        _CONSONANTS[random.integers(len(_CONSONANTS))] + _VOWELS[random.integers(len(_VOWELS))]
        for _ in range(random.integers(1, 5))
    ]
    ending = _CONSONANTS[random.integers(len(_CONSONANTS))] if random.random() < 0.5 else ""
    return "".join(syllables) + ending


def _on_photo(random: np.random.Generator, page: Image.Image, photo: Image.Image) -> Image.Image:
    """Lay a page, smaller, slightly tilted and slightly transparent, on a part of a photo."""
    width, height = page.size
    side = int(random.integers(80, min(photo.size)))
    left, top = (int(random.integers(0, length - side + 1)) for length in photo.size)
    table = photo.crop((left, top, left + side, top + side)).resize((width, height), Image.Resampling.BICUBIC)
    scale = random.uniform(0.55, 1.0)
    sheet = page.resize((int(width * scale), int(height * scale)), Image.Resampling.LANCZOS).convert("RGBA")
    sheet.putalpha(int(255 * random.uniform(0.6, 1.0)))
    sheet = sheet.rotate(random.uniform(-6, 6), Image.Resampling.BICUBIC, expand=True)
    place = tuple(
        int(random.integers(-30, 31) + (room - own) / 2)
        for room, own in zip(table.size, sheet.size, strict=True)
    )
    table.paste(sheet, place, sheet)
    return table


def _developed(random: np.random.Generator, page: Image.Image, difficulty: Difficulty) -> np.ndarray:
    """Cut a window, scale and crop it, lower contrast and sharpness, and add noise."""
    share_2 = random.uniform(*difficulty.visible_share) * np.array([1.0, random.uniform(0.8, 1.0)])
    width, height = (
        max(1, int(length * share))
        for length, share in zip(page.size, random.permutation(share_2), strict=True)
    )
    left, top = (
        int(random.integers(0, room - own + 1)) for room, own in zip(page.size, (width, height), strict=True)
    )
    window = page.crop((left, top, left + width, top + height))
    scale = SHORTER_SIDE / min(width, height)
    size = (round(width * scale), round(height * scale))
    window = window.resize(size, Image.Resampling.LANCZOS)
    edge = tuple((length - SIDE) // 2 for length in size)
    window = window.crop((*edge, edge[0] + SIDE, edge[1] + SIDE))
    window = window.filter(ImageFilter.GaussianBlur(random.uniform(*difficulty.blur_px)))
    image_HWC = np.asarray(window, np.float32)
    level, contrast = random.uniform(60, 190), random.uniform(*difficulty.contrast)
    image_HWC = level + contrast * (image_HWC - level)
    image_HWC += random.uniform(*difficulty.noise) * random.standard_normal(image_HWC.shape, np.float32)
    return np.clip(np.rint(image_HWC), 0, 255).astype(np.uint8)
