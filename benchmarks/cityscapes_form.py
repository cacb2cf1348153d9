"""Make a small data set in the form of Cityscapes: 2048 x 1024 PNGs, label ids, cities and sequences; drawn streets.

``python -m benchmarks.cityscapes_form data/streets`` writes it. The pipeline runs on it at reduced size:

    make run ARGS="data=cityscapes prepare_data.root=data/streets prepare_data.height=128 prepare_data.width=256"

It shows that the layout is read as it is downloaded. Its accuracy says nothing about Cityscapes.
"""

import argparse
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw

from tasks.parts.sources.cityscapes import CITYSCAPES

HEIGHT, WIDTH = 1024, 2048
CITIES = {"train": ("aachen", "bochum"), "val": ("lindau",)}
IDS = {name: ids[0] for name, ids in zip(CITYSCAPES.names, CITYSCAPES.ids, strict=True)}
EGO_VEHICLE, OUT_OF_ROI = 1, 3
"""Ids that are ignored."""
COLOURS = dict(zip(CITYSCAPES.names, CITYSCAPES.colours, strict=True))
OBJECTS = {  # width and height in pixels, and how many at most
    "pole": (14, 420, 4),
    "traffic light": (40, 110, 3),
    "traffic sign": (70, 70, 3),
    "person": (60, 170, 4),
    "rider": (60, 150, 2),
    "car": (320, 180, 4),
    "truck": (380, 320, 1),
    "bus": (420, 300, 1),
    "train": (520, 260, 1),
    "motorcycle": (130, 110, 2),
    "bicycle": (130, 100, 2),
    "fence": (360, 110, 2),
    "wall": (400, 130, 1),
}


def draw_street(random: np.random.Generator) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    """Return an image [1024, 2048, 3] and its label ids [1024, 2048]."""
    labels = Image.new("L", (WIDTH, HEIGHT), IDS["sky"])
    draw = ImageDraw.Draw(labels)
    horizon = int(random.integers(420, 520))
    for left in range(0, WIDTH, 256):
        name = random.choice(["building", "building", "vegetation"])
        draw.rectangle((left, horizon - int(random.integers(120, 400)), left + 255, horizon), IDS[name])
    draw.rectangle((0, horizon, WIDTH, HEIGHT), IDS["terrain"])
    centre = int(random.integers(800, 1250))
    for name, half in (("sidewalk", 1400), ("road", 1000)):
        corners = [(centre - half // 6, horizon), (centre + half // 6, horizon), (centre + half, HEIGHT)]
        draw.polygon([*corners, (centre - half, HEIGHT)], IDS[name])
    for name, (width, height, most) in OBJECTS.items():
        for _ in range(int(random.integers(0, most + 1))):
            scale = random.uniform(0.5, 1.2)
            left, bottom = int(random.integers(0, WIDTH - 200)), horizon + int(random.integers(20, 320))
            draw.rectangle((left, bottom - height * scale, left + width * scale, bottom), IDS[name])
    draw.rectangle((0, HEIGHT - 60, WIDTH, HEIGHT), EGO_VEHICLE)
    draw.rectangle((0, 0, 8, HEIGHT), OUT_OF_ROI)
    labels_HW = np.asarray(labels)
    palette = random.integers(0, 256, (256, 3))
    for name, number in IDS.items():
        palette[number] = COLOURS[name]
    light = random.uniform(0.6, 1.1) * np.linspace(1.1, 0.8, HEIGHT)[:, None, None]
    texture = random.normal(0, 12, (HEIGHT // 8, WIDTH // 8, 3)).repeat(8, axis=0).repeat(8, axis=1)
    image_HWC = np.clip(palette[labels_HW] * light + texture, 0, 255).astype(np.uint8)
    return image_HWC, labels_HW


def write(root: Path, *, images_per_city: int, seed: int) -> int:
    """Write the data set and return its number of images."""
    random, count = np.random.default_rng(seed), 0
    for split, cities in CITIES.items():
        for city in cities:
            folders = [root / kind / split / city for kind in ("leftImg8bit", "gtFine")]
            for folder in folders:
                folder.mkdir(parents=True, exist_ok=True)
            for number in range(images_per_city):
                name = f"{city}_{number // 4:06d}_{number % 4:06d}"  # four frames in a sequence
                image_HWC, labels_HW = draw_street(random)
                Image.fromarray(image_HWC).save(folders[0] / f"{name}_leftImg8bit.png", compress_level=1)
                Image.fromarray(labels_HW).save(folders[1] / f"{name}_gtFine_labelIds.png")
                count += 1
    return count


def main() -> None:
    """Write the data set that the command line names."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("root", type=Path)
    parser.add_argument("--images-per-city", type=int, default=16)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    count = write(options.root, images_per_city=options.images_per_city, seed=options.seed)
    print(f"{options.root}: {count} images of {WIDTH} x {HEIGHT}")


if __name__ == "__main__":
    main()
