"""Masks as files hold them: few bits, several pages, turned, or float values."""

import struct
import zlib
from pathlib import Path

import numpy as np
import pytest
import tifffile
from PIL import Image

from tasks.parts.data.class_table import ClassTable
from tasks.parts.data.masks import ColourMask, MaskFile, UnsuitableMask
from tasks.parts.sources.listed_files import HashedFile

MASK = np.array([[0, 1, 1, 0, 1, 0, 0, 1], [1, 0, 0, 0, 1, 1, 1, 0]], np.uint8)
TABLE = ClassTable(("a", "b"), "classes.yaml", ((0,), (1,)))
IGNORES_255 = ClassTable(("a", "b"), "classes.yaml", ((0,), (1,)), ignore_ids=frozenset({255}))
KNOWS_255 = ClassTable(("a", "b"), "classes.yaml", ((0,), (255,)))


def read(path: Path, table: ClassTable = TABLE) -> np.ndarray:
    stored = MaskFile(path).read(table, max_pixels=10_000)
    assert not stored.is_colour
    return stored.values_HW


def write_grey_png(path: Path, values: np.ndarray, num_bits: int) -> None:
    """Write a grey PNG of 1, 2 or 4 bits, which Pillow cannot."""
    bits = values[..., None] >> np.arange(num_bits - 1, -1, -1) & 1
    rows = b"".join(b"\0" + np.packbits(row).tobytes() for row in bits)
    height, width = values.shape
    parts = [(b"IHDR", struct.pack(">IIBBBBB", width, height, num_bits, 0, 0, 0, 0))]
    parts += [(b"IDAT", zlib.compress(rows)), (b"IEND", b"")]
    chunks = [
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        for kind, data in parts
    ]
    path.write_bytes(b"\x89PNG\r\n\x1a\n" + b"".join(chunks))


@pytest.mark.parametrize("num_bits", [2, 4])
def test_scaled_grey_is_refused(tmp_path: Path, num_bits: int) -> None:
    path = tmp_path / "a.png"
    write_grey_png(path, MASK, num_bits)
    for source in (path, HashedFile(path)):
        with pytest.raises(UnsuitableMask, match=rf"a\.png: grey of {num_bits} bits.*Save .* as 8-bit grey"):
            MaskFile(source).read(TABLE, max_pixels=10_000)


def test_scaled_grey_of_tiff_is_refused(tmp_path: Path) -> None:
    write_grey_tiff(tmp_path / "a.tif", MASK)
    with pytest.raises(UnsuitableMask, match=r"a\.tif: grey of 4 bits"):
        read(tmp_path / "a.tif")


def write_grey_tiff(path: Path, values: np.ndarray) -> None:
    """Write a grey TIFF of 4 bits: a header, a directory of short entries, and one strip."""
    height, width = values.shape
    strip = (values[:, ::2] << 4 | values[:, 1::2]).tobytes()
    entries = {256: width, 257: height, 258: 4, 259: 1, 262: 1, 273: 8, 277: 1, 278: height, 279: len(strip)}
    directory = b"".join(struct.pack("<HHII", tag, 3, 1, value) for tag, value in entries.items())
    offset = 8 + len(strip)
    head = struct.pack("<2sHI", b"II", 42, offset)
    path.write_bytes(head + strip + struct.pack("<H", len(entries)) + directory + bytes(4))


@pytest.mark.parametrize("suffix", ["png", "tif"])
def test_grey_of_1_bit_is_ids_unless_255_is_known(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"a.{suffix}"
    Image.fromarray(MASK.astype(bool)).save(path)
    assert (read(path) == MASK).all()
    for table in (IGNORES_255, KNOWS_255):
        with pytest.raises(UnsuitableMask, match=r"grey of 1 bit, .*classes\.yaml knows the id 255.*8-bit"):
            read(path, table)


@pytest.mark.parametrize("suffix", ["png", "tif"])
def test_8_bits_and_palettes_of_few_bits_are_ids(tmp_path: Path, suffix: str) -> None:
    mask = Image.fromarray(MASK)
    mask.save(tmp_path / f"grey.{suffix}")
    mask.putpalette([9, 9, 9, 200, 0, 0])
    mask.save(tmp_path / "palette.png", bits=1)
    for name in (f"grey.{suffix}", "palette.png"):
        assert (read(tmp_path / name, IGNORES_255) == MASK).all()


@pytest.mark.parametrize("suffix", ["png", "tif"])
def test_mask_of_several_pages_is_refused(tmp_path: Path, suffix: str) -> None:
    first, second = Image.fromarray(MASK), Image.fromarray(1 - MASK)
    first.save(tmp_path / f"a.{suffix}", save_all=True, append_images=[second, first])
    with pytest.raises(
        UnsuitableMask, match=rf"a\.{suffix}: a mask of 3 pages, expected one\. Save the page"
    ):
        read(tmp_path / f"a.{suffix}")


def test_smaller_copies_of_a_page_are_no_pages(tmp_path: Path) -> None:
    with tifffile.TiffWriter(tmp_path / "a.tif") as file:
        file.write(MASK, photometric="minisblack")
        file.write(MASK[::2, ::2], photometric="minisblack", subfiletype=1)
    assert (read(tmp_path / "a.tif", IGNORES_255) == MASK).all()


@pytest.mark.parametrize("kind", ["8 bits", "16 bits", "palette", "1 bit", "colour"])
@pytest.mark.parametrize(("suffix", "compression"), [("png", None), ("tif", "raw"), ("tif", "tiff_lzw")])
def test_orientation_is_applied_to_masks_as_to_images(
    tmp_path: Path, suffix: str, compression: str | None, kind: str
) -> None:
    mask = Image.fromarray(MASK.astype({"16 bits": np.uint16, "1 bit": bool}.get(kind, np.uint8)))
    if kind == "palette":
        mask.putpalette([0, 0, 0, 0, 0, 1])
    elif kind == "colour":
        mask = Image.fromarray(np.dstack([0 * MASK, 0 * MASK, MASK]))
    exif = mask.getexif()
    exif[0x0112] = 6  # the camera was turned: rotate by 90 degrees clockwise to view
    mask.save(tmp_path / f"a.{suffix}", exif=exif, **({"compression": compression} if compression else {}))
    table = ClassTable(("a", "b"), "t", None, ((0, 0, 0), (0, 0, 1))) if kind == "colour" else TABLE
    stored = MaskFile(tmp_path / f"a.{suffix}").read(table, max_pixels=10_000)
    assert (stored.values_HW == np.rot90(MASK, -1)).all()


def test_few_bits_are_refused_in_turned_masks_too(tmp_path: Path) -> None:
    write_grey_png(tmp_path / "a.png", MASK, 4)
    exif = Image.Exif()
    exif[0x0112] = 6
    content, block = (tmp_path / "a.png").read_bytes(), b"eXIf" + exif.tobytes()[6:]
    chunk = struct.pack(">I", len(block) - 4) + block + struct.pack(">I", zlib.crc32(block))
    (tmp_path / "a.png").write_bytes(content[:33] + chunk + content[33:])  # behind the header
    with Image.open(tmp_path / "a.png") as image:
        assert image.getexif()[0x0112] == 6
    with pytest.raises(UnsuitableMask, match=r"a\.png: grey of 4 bits"):
        read(tmp_path / "a.png")


def test_float_values_are_named(tmp_path: Path) -> None:
    Image.fromarray(MASK.astype(np.float32)).save(tmp_path / "a.tif")
    with pytest.raises(ColourMask, match=r"a\.tif: holds float values, expected whole numbers.*16-bit grey"):
        read(tmp_path / "a.tif")
