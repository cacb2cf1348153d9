"""TIFF images of many bands, many pages and more than 8 bits."""

import struct
import zlib
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tifffile
from PIL import Image

from tasks.core.errors import DataError
from tasks.parts.data.dataset import open_split
from tasks.parts.data.image_files import (
    OversizedImage,
    UnreadableImage,
    UnscaledValues,
    WrongChannels,
    read_image,
    read_values,
)
from tasks.parts.sources.config import FolderConfig
from tasks.parts.sources.stored_values import check_values
from tests.tasks.parts.sources.runs import HEIGHT, WIDTH, config_of, halves, run, write_mask

BANDS_16 = np.random.default_rng(0).integers(65536, size=(HEIGHT, WIDTH, 5)).astype(np.uint16)
SCALED = np.rint(BANDS_16.astype(np.float32) * np.float32(255 / 65535)).astype(np.uint8)


def folder_of(**changes: Any) -> FolderConfig:
    folder = config_of("folder", **changes).folder
    assert folder is not None
    return folder


def write_tiff(path: Path, image_HWC: np.ndarray, **options: Any) -> None:
    tifffile.imwrite(path, image_HWC, **{"photometric": "minisblack", "planarconfig": "contig", **options})


@pytest.mark.parametrize("order", ["<", ">"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"compression": "lzw", "predictor": True},
        {"compression": "deflate", "predictor": True, "tile": (16, 32)},
        {"bigtiff": True, "rowsperstrip": 5},
    ],
)
def test_bands_of_16_bits_are_scaled(tmp_path: Path, order: Any, options: dict[str, Any]) -> None:
    write_tiff(tmp_path / "a.tif", BANDS_16, byteorder=order, **options)
    assert (read_image(tmp_path / "a.tif", folder_of(channels=5, value_range=[0, 65535])) == SCALED).all()


def test_separate_planes_are_bands(tmp_path: Path) -> None:
    write_tiff(tmp_path / "a.tif", np.moveaxis(BANDS_16, -1, 0), planarconfig="separate")
    assert (read_image(tmp_path / "a.tif", folder_of(channels=5, value_range=[0, 65535])) == SCALED).all()


def test_value_range_becomes_0_to_255(tmp_path: Path) -> None:
    values = np.full((HEIGHT, WIDTH, 2), 1000, np.uint16)
    values[0, 0], values[0, 1], values[0, 2] = (0, 500), (2000, 3000), (1500, 750)
    write_tiff(tmp_path / "a.tif", values)
    image = read_image(tmp_path / "a.tif", folder_of(channels=2, value_range=[500, 1500]))
    # (value - 500) / 1000 * 255, between 0 and 255: 750 gives 63.75, 1000 gives 127.5
    assert image[0, :3].tolist() == [[0, 0], [255, 255], [255, 64]] and image[1, 1, 0] in (127, 128)


@pytest.mark.parametrize("suffix", ["png", "tif", "npy"])
def test_grey_of_16_bits_is_scaled_from_any_file(tmp_path: Path, suffix: str) -> None:
    values = np.linspace(0, 4095, HEIGHT * WIDTH).reshape(HEIGHT, WIDTH).astype(np.uint16)
    path = tmp_path / f"a.{suffix}"
    np.save(path, values) if suffix == "npy" else Image.fromarray(values).save(path)
    image = read_image(path, folder_of(channels=1, value_range=[0, 4095]))
    assert (image[..., 0] == np.rint(values / 4095 * 255)).all()
    if suffix != "npy":
        colours = read_image(path, folder_of(channels=3, value_range=[0, 4095]))
        assert (colours == image).all() and colours.shape == (HEIGHT, WIDTH, 3)


@pytest.mark.parametrize("suffix", ["png", "tif", "npy"])
def test_more_than_8_bits_without_a_range_are_refused_with_what_was_found_a1(
    tmp_path: Path, suffix: str
) -> None:
    values = np.linspace(12, 4083, HEIGHT * WIDTH).reshape(HEIGHT, WIDTH).astype(np.uint16)
    path = tmp_path / f"a.{suffix}"
    np.save(path, values) if suffix == "npy" else Image.fromarray(values).save(path)
    expected = r"holds values of type uint16 from 12 to 4083, .* Set prepare_data\.folder\.value_range"
    with pytest.raises(UnscaledValues, match=expected) as raised:
        read_image(path, folder_of(channels=1))
    assert (raised.value.dtype, raised.value.low, raised.value.high) == ("uint16", 12, 4083)


def test_pages_of_one_band_are_bands(tmp_path: Path) -> None:
    pages = np.random.default_rng(1).integers(256, size=(4, HEIGHT, WIDTH)).astype(np.uint8)
    first, *others = [Image.fromarray(page) for page in pages]
    first.save(tmp_path / "a.tif", save_all=True, append_images=others)
    image = read_image(tmp_path / "a.tif", folder_of(channels=4))
    assert (image == np.moveaxis(pages, 0, -1)).all()


def test_deep_colours_become_grey_where_one_channel_is_wanted(tmp_path: Path) -> None:
    write_tiff(tmp_path / "a.tif", np.repeat(BANDS_16[..., :1], 3, axis=2), photometric="rgb")
    image = read_image(tmp_path / "a.tif", folder_of(channels=1, value_range=[0, 65535]))
    assert (image[..., 0] == SCALED[..., 0]).all()


def test_usual_tiff_is_read_like_png(tmp_path: Path) -> None:
    content = np.random.default_rng(1).integers(256, size=(HEIGHT, WIDTH, 3)).astype(np.uint8)
    for suffix, options in (("png", {}), ("tif", {"compression": "tiff_lzw"})):
        Image.fromarray(content).save(tmp_path / f"a.{suffix}", **options)
        assert (read_image(tmp_path / f"a.{suffix}", folder_of()) == content).all()


def test_folder_of_tiff_images_and_masks_becomes_a_data_set(tmp_path: Path) -> None:
    root = tmp_path / "mine"
    (root / "images").mkdir(parents=True)
    (root / "classes.yaml").write_text("[road, car]\n")
    for number in range(10):
        write_tiff(root / f"images/{number}.tif", np.roll(BANDS_16, number, axis=0))
        write_mask(root / f"masks/{number}.tif", halves(0, 1, np.uint16))
    report = run("folder", root, tmp_path / "out", channels=5, value_range=[0, 65535])
    assert len(report.mean) == 5
    images_NHWC, masks_NHW = open_split(tmp_path / "out/dataset", "test")
    assert images_NHWC.shape == (2, HEIGHT, WIDTH, 5) and (masks_NHW[:, :, 12:] == 1).all()


def deep_png(path: Path, colour_type: int = 2) -> None:
    """Write a PNG of one pixel row with 16 bits for each value: red of colour type 2, grey with alpha of type 4."""

    def chunk(kind: bytes, content: bytes) -> bytes:
        end = struct.pack(">I", zlib.crc32(kind + content))
        return struct.pack(">I", len(content)) + kind + content + end

    header = chunk(b"IHDR", struct.pack(">IIBBBBB", 4, 1, 16, colour_type, 0, 0, 0))
    pixel = struct.pack(">3H", 4095, 0, 0) if colour_type == 2 else struct.pack(">2H", 4095, 65535)
    pixels = chunk(b"IDAT", zlib.compress(b"\0" + pixel * 4))
    path.write_bytes(b"\x89PNG\r\n\x1a\n" + header + pixels + chunk(b"IEND", b""))


@pytest.mark.parametrize(("colour_type", "kind"), [(2, "colours"), (4, "grey with alpha")])
def test_deep_pixels_of_several_values_in_png_are_not_scaled_silently_a1(
    tmp_path: Path, colour_type: int, kind: str
) -> None:
    deep_png(tmp_path / "a.png", colour_type)
    for value_range in (None, [0, 4095]):
        with pytest.raises(
            WrongChannels, match=rf"a\.png: {kind} of 16 bits, .*Save the image .*without alpha"
        ):
            read_image(tmp_path / "a.png", folder_of(value_range=value_range))


@dataclass(frozen=True)
class Cell:
    """An image in a table, whose name says nothing of its kind."""

    content: bytes

    def __str__(self) -> str:
        return "table.parquet: row 3"

    def read_bytes(self) -> bytes:
        return self.content


def test_deep_colours_of_a_tiff_in_a_table_are_read_whole_a1(tmp_path: Path) -> None:
    write_tiff(tmp_path / "a.tif", BANDS_16[..., :3], photometric="rgb")
    cell, config = Cell((tmp_path / "a.tif").read_bytes()), folder_of(channels=3, value_range=[0, 65535])
    np.testing.assert_array_equal(read_values(cell, config), BANDS_16[..., :3])
    assert check_values([cell], config).types == ("uint16",)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"photometric": "miniswhite"}, r"colours of kind 0"),
        ({"extratags": [(274, 3, 1, 6, True)]}, r"orientation 6"),
    ],
)
def test_unread_kind_of_tiff_says_what_to_do(tmp_path: Path, options: dict[str, Any], match: str) -> None:
    write_tiff(tmp_path / "a.tif", BANDS_16[..., :1].repeat(2, axis=2), **options)
    with pytest.raises(UnreadableImage, match=rf"a.tif: a TIFF file with {match}, which.*Save it upright"):
        read_image(tmp_path / "a.tif", folder_of(channels=2))


@pytest.mark.parametrize(
    ("image", "changes", "kind", "match"),
    [
        (
            BANDS_16,
            {"channels": 3},
            WrongChannels,
            r"has 5 band\(s\) on 1 page\(s\), expected 3.*channels to 5",
        ),
        (
            BANDS_16.astype(np.float32),
            {"channels": 5},
            WrongChannels,
            r"type float32 from .* Set .*value_range",
        ),
        (BANDS_16, {"channels": 5, "max_megapixels": 0.0001}, OversizedImage, r"24 x 16 pixels, at most"),
    ],
)
def test_unsuitable_tiff_names_the_key(
    tmp_path: Path, image: np.ndarray, changes: dict[str, Any], kind: type[DataError], match: str
) -> None:
    write_tiff(tmp_path / "a.tif", image)
    with pytest.raises(kind, match=match):
        read_image(tmp_path / "a.tif", folder_of(**changes))


@pytest.mark.parametrize("num_bytes", [0, 4, 40, -30])
def test_damaged_tiff_is_named(tmp_path: Path, num_bytes: int) -> None:
    write_tiff(tmp_path / "a.tif", BANDS_16)
    (tmp_path / "a.tif").write_bytes((tmp_path / "a.tif").read_bytes()[:num_bytes])
    with pytest.raises(DataError, match=r"a\.tif"):
        read_image(tmp_path / "a.tif", folder_of(channels=5))


def test_pages_of_other_sizes_are_refused(tmp_path: Path) -> None:
    Image.new("L", (8, 8)).save(tmp_path / "a.tif", save_all=True, append_images=[Image.new("L", (8, 9))])
    with pytest.raises(UnreadableImage, match=r"has 2 pages that differ in size"):
        read_image(tmp_path / "a.tif", replace(folder_of(), channels=2))
