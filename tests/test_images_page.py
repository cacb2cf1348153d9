"""docs/images.md: its table is what the programs do with each kind of image."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tifffile
from PIL import Image

from tasks.core.errors import DataError
from tasks.parts.data.image_files import read_image, read_values
from tasks.parts.engines.frame_engine.engine import Engine, load_engine
from tasks.parts.engines.frame_engine.sources import open_source, open_sources
from tasks.parts.engines.frame_engine.stream import Timings, run_stream
from tasks.parts.reading.rules import Reading
from tests.conftest import REPOSITORY
from tests.tasks.parts.data.test_tiff import deep_png
from tests.tasks.parts.engines.test_frame_reading import Config, random_image, write_bundle

PAGE = REPOSITORY / "docs/images.md"
HEADER = "| image | prepare_data reads | infer.py, client.py answer | validate answers | C++ takes, decoded |"

EIGHT, DEEP = Reading(), Reading(("uint16",), (0.0, 4095.0))
Write = Callable[[Path], Any]


def save(image: np.ndarray, mode: str | None = None, **options: Any) -> Write:
    def write(path: Path) -> None:
        opened = Image.fromarray(image)
        (opened if mode is None else opened.convert(mode)).save(path, **options)

    return write


def turned() -> Image.Exif:
    exif = Image.Exif()
    exif[274] = 6
    return exif


def write_bands(path: Path) -> None:
    tifffile.imwrite(path, BANDS, photometric="minisblack", planarconfig="contig")


RGB, GREY = random_image(60, 90, 3), random_image(60, 90)
GREY_12, BANDS = random_image(60, 90, high=4096), random_image(60, 90, 6)
KINDS: list[tuple[str, str, int, Reading, Write]] = [
    ("PNG, RGB", "png", 3, EIGHT, save(RGB)),
    ("PNG, palette", "png", 3, EIGHT, save(RGB, "P")),
    ("PNG, grey, for a network of RGB", "png", 3, EIGHT, save(GREY)),
    ("PNG, RGB, for a network of grey", "png", 1, EIGHT, save(RGB)),
    ("PNG with alpha (on black)", "png", 3, EIGHT, save(np.dstack([RGB, GREY]))),
    ("PNG, grey of 12 or 16 bits, with a range", "png", 1, DEEP, save(GREY_12)),
    ("PNG, grey of 12 or 16 bits, without a range", "png", 1, EIGHT, save(GREY_12)),
    ("PNG, colours of 16 bits", "png", 3, DEEP, deep_png),
    ("PNG, grey of 16 bits with alpha", "png", 1, DEEP, lambda path: deep_png(path, 4)),
    ("PNG, grey of 8 bits, for a network of more bits", "png", 1, DEEP, save(GREY)),
    ("JPEG, RGB", "jpg", 3, EIGHT, save(RGB)),
    ("JPEG, grey", "jpg", 3, EIGHT, save(GREY)),
    ("JPEG, CMYK", "jpg", 3, EIGHT, save(RGB, "CMYK")),
    ("JPEG, EXIF orientation 6 (turned upright)", "jpg", 3, EIGHT, save(RGB, exif=turned())),
    ("TIFF, RGB", "tif", 3, EIGHT, save(RGB)),
    ("TIFF, 16 bits, with a range", "tif", 1, DEEP, save(GREY_12)),
    ("TIFF, 6 bands", "tif", 6, EIGHT, write_bands),
    ("TIFF, 6 bands, for a network of RGB", "tif", 3, EIGHT, write_bands),
    (".npy, uint8, 6 bands", "npy", 6, EIGHT, lambda path: np.save(path, BANDS)),
    (".npy, uint16, with a range", "npy", 1, DEEP, lambda path: np.save(path, GREY_12)),
    (".npy, float32, with a range", "npy", 1, DEEP, lambda path: np.save(path, GREY_12.astype(np.float32))),
    (".npy, float32, without a range", "npy", 1, EIGHT, lambda path: np.save(path, GREY.astype(np.float32))),
]


def cells(path: Path, channels: int, reading: Reading, engine: Engine) -> list[str]:
    """Return what each program does with a file."""
    low_high = None if reading.value_range is None else list(reading.value_range)
    config = Config(channels, low_high)

    def answer(open_any: Callable[..., Any], place: Any) -> str:
        found: list[Any] = []
        source = open_any(place, channels=channels, size=(1, 1), reading=reading)
        run_stream(engine, source, lambda name, mask: found.append(mask), timings=Timings())
        return f"mask {list(found[0].shape)}"

    def described(read: Callable[[], Any]) -> str:
        try:
            found = read()
        except (DataError, ValueError):
            return "refused"
        return found if isinstance(found, str) else f"{found.dtype} {list(found.shape)}"

    by_infer = described(lambda: answer(open_source, str(path)))
    assert by_infer == described(lambda: answer(open_sources, [str(path)]))
    by_validate = described(lambda: f"mask {list(engine.answer_image(read_values(path, config)).shape)}")
    return [
        described(lambda: read_image(path, config)),
        by_infer,
        by_validate,
        cpp_cell(lambda: described(lambda: read_values(path, config)), by_validate),
    ]


def cpp_cell(decoded: Callable[[], str], answered: str) -> str:
    """Return what a C++ program takes: values that its caller has decoded, of the type in the file."""
    return "refused" if answered == "refused" else decoded()


def test_table_is_what_the_programs_do_a1(tmp_path: Path) -> None:
    engines = {
        (channels, reading): load_engine(write_bundle(tmp_path / f"{number}", channels, reading))
        for number, (channels, reading) in enumerate({(kind[2], kind[3]) for kind in KINDS})
    }
    lines = [HEADER, "|---|---|---|---|---|"]
    for number, (name, suffix, channels, reading, write) in enumerate(KINDS):
        path = tmp_path / f"image{number}.{suffix}"
        write(path)
        lines.append(f"| {' | '.join([name, *cells(path, channels, reading, engines[channels, reading])])} |")
    table = "\n".join(lines)
    assert table in PAGE.read_text(encoding="utf-8"), f"docs/images.md lacks this table:\n{table}"


@pytest.mark.parametrize("name", ["EXIF", "134 megapixels", "--value-range", "frame_score"])
def test_page_names_what_it_must(name: str) -> None:
    assert name in PAGE.read_text(encoding="utf-8")
