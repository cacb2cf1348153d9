"""Draw a contact sheet of a data set: scenes above, the same scenes with coloured masks below."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from PIL import Image, ImageFont

    from tasks.parts.data.dataset import Batch

_BACKGROUND = (250, 250, 248)
_INK = (32, 33, 36)

_GAP_PX, _MARGIN_PX, _LINE_PX = 6, 24, 26
_IGNORED = (255, 255, 255)


def class_colour(index: int) -> tuple[int, int, int]:
    """Return the colour of a class: hues a golden angle apart, in three brightness steps; class 0 is a dark grey."""
    import colorsys

    if index == 0:
        return 60, 63, 72
    red, green, blue = colorsys.hsv_to_rgb(
        (index * 0.381966 + 0.62) % 1.0, 0.78 - 0.18 * (index // 8 % 2), (1.0, 0.86, 0.7)[index // 6 % 3]
    )
    return round(red * 255), round(green * 255), round(blue * 255)


def draw_contact_sheet(
    path: Path, *, classes: tuple[str, ...], samples: Mapping[str, Batch], side_px: int = 128
) -> None:
    """Write a PNG with a legend and one block per split; samples: split -> images_NHWC and masks_NHW."""
    from PIL import Image, ImageDraw

    font, small = _font(18), _font(14)
    num_columns = max(len(images) for images, _ in samples.values())
    height, width = next(iter(samples.values()))[0].shape[1:3]
    scale = side_px / min(height, width)
    tile = (max(1, round(width * scale)), max(1, round(height * scale)))
    width_px = 2 * _MARGIN_PX + max(num_columns * (tile[0] + _GAP_PX) - _GAP_PX, 480)
    legend = _legend_places(classes, small, width_px - 2 * _MARGIN_PX)
    block_px = _LINE_PX + 2 * (tile[1] + _GAP_PX) + _GAP_PX
    top_px = _MARGIN_PX + _LINE_PX * (legend[-1][1] + 1) + _GAP_PX
    sheet = Image.new("RGB", (width_px, top_px + block_px * len(samples) + _MARGIN_PX - _GAP_PX), _BACKGROUND)
    draw = ImageDraw.Draw(sheet)
    for index, (x, line) in enumerate(legend):
        left, top = _MARGIN_PX + x, _MARGIN_PX + line * _LINE_PX
        draw.rounded_rectangle((left, top, left + 16, top + 16), 4, fill=class_colour(index))
        draw.text((left + 23, top + 8), _shortened(classes[index]), fill=_INK, font=small, anchor="lm")
    for block, (split, (images, masks)) in enumerate(samples.items()):
        top = top_px + block * block_px
        draw.text((_MARGIN_PX, top), split, fill=_INK, font=font)
        for n in range(len(images)):
            left = _MARGIN_PX + n * (tile[0] + _GAP_PX)
            scene, overlay = _tiles(images[n], masks[n], tile, len(classes))
            sheet.paste(scene, (left, top + _LINE_PX))
            sheet.paste(overlay, (left, top + _LINE_PX + tile[1] + _GAP_PX))
    sheet.save(path, format="PNG", optimize=True)


def _tiles(
    image_HWC: Any, mask_HW: Any, size: tuple[int, int], num_classes: int
) -> tuple[Image.Image, Image.Image]:
    """Make two tiles: the scene, and the scene with outlined class colours; ignored pixels are hatched."""
    import numpy as np
    from PIL import Image

    from tasks.parts.data.class_table import IGNORE_INDEX

    shown_HWC = image_HWC[..., :3] if image_HWC.shape[2] >= 3 else np.repeat(image_HWC[..., :1], 3, axis=2)
    scene = Image.fromarray(np.ascontiguousarray(shown_HWC)).resize(size, Image.Resampling.BICUBIC)
    labels = np.asarray(Image.fromarray(np.ascontiguousarray(mask_HW)).resize(size, Image.Resampling.NEAREST))
    palette = np.zeros((256, 3), np.float32)
    palette[:num_classes] = [class_colour(index) for index in range(num_classes)]
    palette[IGNORE_INDEX] = _IGNORED
    strength = np.full(256, 0.72, np.float32)
    strength[0] = 0.45
    y, x = np.indices(labels.shape)
    is_hatched = (labels == IGNORE_INDEX) & ((x + y) % 8 < 3)
    weight = np.where(labels == IGNORE_INDEX, 0.25 + 0.65 * is_hatched, strength[labels])[..., None]
    picture = np.asarray(scene, np.float32) * (1 - weight) + palette[labels] * weight
    edge = np.zeros(labels.shape, bool)
    edge[:-1] |= labels[:-1] != labels[1:]
    edge[:, :-1] |= labels[:, :-1] != labels[:, 1:]
    picture[edge] = 255
    return scene, Image.fromarray(picture.astype(np.uint8))


def _legend_places(
    classes: tuple[str, ...], font: ImageFont.FreeTypeFont, width_px: int
) -> list[tuple[int, int]]:
    """Return the left edge and the line number of each legend entry."""
    places = []
    x, line = 0, 0
    for name in classes:
        entry_px = round(font.getlength(_shortened(name))) + 46
        if x and x + entry_px > width_px:
            x, line = 0, line + 1
        places.append((x, line))
        x += entry_px
    return places


def _shortened(name: str) -> str:
    return name if len(name) <= 28 else f"{name[:27]}…"


def _font(size: int) -> ImageFont.FreeTypeFont:
    # DejaVu comes with matplotlib and covers far more scripts than Pillow's built-in font.
    import matplotlib
    from PIL import ImageFont

    return ImageFont.truetype(str(Path(matplotlib.get_data_path()) / "fonts/ttf/DejaVuSans.ttf"), size)
