"""Images that are read in parts: the values of the whole, in a part of its memory."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tifffile

from tasks.parts.engines.frame_engine.engine import load_engine
from tasks.parts.engines.frame_engine.images import MaskBands
from tasks.parts.engines.frame_engine.sources import MAX_PIXELS, PIXELS_OF_PARTS, rules_of
from tasks.parts.engines.frame_engine.stream import open_sink
from tasks.parts.reading.files import read_image
from tasks.parts.reading.parts import open_parts
from tasks.parts.reading.rules import OversizedImage, Reading, WrongChannels
from tests.tasks.parts.engines.test_frame_reading import infer, random_image, write_bundle

Array = np.ndarray[Any, Any]

RGB: dict[str, Any] = {"photometric": "rgb"}
BANDS: dict[str, Any] = {"photometric": "minisblack", "planarconfig": "contig"}

PLANES: dict[str, Any] = {"photometric": "minisblack", "planarconfig": "separate"}


@pytest.mark.parametrize(
    ("options", "bands", "channels", "high"),
    [
        ({**RGB}, 3, 3, 256),
        ({**RGB, "compression": "zlib", "rowsperstrip": 7}, 3, 3, 256),
        ({**RGB, "compression": "lzw", "predictor": True, "tile": (16, 32)}, 3, 3, 256),
        ({**RGB, "compression": "zlib", "tile": (16, 32)}, 3, 1, 256),
        ({**BANDS, "byteorder": ">", "rowsperstrip": 5}, 1, 1, 65536),
        ({**BANDS, "compression": "zlib", "rowsperstrip": 9}, 1, 3, 65536),
        ({**BANDS, "compression": "zlib", "tile": (32, 16)}, 6, 6, 65536),
        ({**PLANES}, 5, 5, 256),
        (
            {
                "photometric": "minisblack",
                "planarconfig": "separate",
                "compression": "zlib",
                "rowsperstrip": 8,
            },
            5,
            5,
            256,
        ),
        (None, 6, 6, 65536),
    ],
)
def test_parts_have_the_values_of_the_whole_a1(
    tmp_path: Path, options: dict[str, Any] | None, bands: int, channels: int, high: int
) -> None:
    image = random_image(70, 100, bands, high=high)
    path = tmp_path / ("a.npy" if options is None else "a.tif")
    if options is None:
        np.save(path, image)
    else:
        stored = image[..., 0] if bands == 1 else image
        stored = np.moveaxis(stored, -1, 0) if options.get("planarconfig") == "separate" else stored
        tifffile.imwrite(path, stored, **options)
    value_range = None if high == 256 else (0.0, 65535.0)
    rules = rules_of(Reading(("uint16", "uint8"), value_range, "windows", 8), channels)
    whole, parts = read_image(path, rules), open_parts(path, rules, more_than=0)
    assert parts is not None and parts.shape == whole.shape == (70, 100, channels)
    for first, end in ((0, 32), (24, 56), (38, 70), (0, 70), (69, 70), (60, 99)):
        np.testing.assert_array_equal(parts[first:end], whole[first:end])
    parts.close()
    assert open_parts(path, rules, more_than=7000) is None


def test_what_is_not_read_in_parts_is_read_as_a_whole_up_to_a_size_a1(tmp_path: Path) -> None:
    rules = rules_of(Reading(resize_mode="windows", window_overlap=8), 3)
    tifffile.imwrite(
        tmp_path / "a.tif", random_image(20, 30, 4), photometric="rgb", extrasamples=["unassalpha"]
    )
    assert open_parts(tmp_path / "a.tif", rules, more_than=0) is None
    np.lib.format.open_memmap(tmp_path / "a.npy", "w+", np.uint8, (1 << 14, 1 << 14, 3))  # a file with a hole
    with pytest.raises(OversizedImage, match=r"at most 134.218 megapixels .* is read in parts: save it"):
        read_image(tmp_path / "a.npy", rules)


def test_a_large_array_without_an_axis_of_channels_is_refused_as_a_small_one_a1(tmp_path: Path) -> None:
    rules = rules_of(Reading(resize_mode="windows", window_overlap=8), 3)
    np.save(tmp_path / "a.npy", random_image(20, 30))
    assert open_parts(tmp_path / "a.npy", rules, more_than=0) is None
    with pytest.raises(
        WrongChannels, match=r"holds uint8 \[20, 30, 1\], expected uint8 \[height, width, 3\]"
    ):
        read_image(tmp_path / "a.npy", rules)


def test_a_large_mask_is_no_png_a1(tmp_path: Path) -> None:
    shape = (1 << 14, 1 << 14)
    assert shape[0] * shape[1] > MAX_PIXELS > PIXELS_OF_PARTS
    expected = r"a\.png: a mask of 16384 x 16384 .* Name a \.tif or \.npy file"
    with (
        pytest.raises(ValueError, match=expected),
        open_sink(str(tmp_path / "a.png"), task="segmentation", classes=["a"]) as write,
    ):
        write("a", MaskBands(shape, np.dtype(np.uint8), iter(())))


def peak_bytes(bundle: Path, image: Path, mask: Path) -> int:
    """Return the most memory that infer.py had."""
    program = (
        "import resource, runpy, sys; sys.argv = sys.argv[1:]; runpy.run_path(sys.argv[0], run_name='__main__'); "
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)"
    )
    command = [sys.executable, "-I", "-c", program, bundle / "infer.py", image, mask]
    done = subprocess.run(command, capture_output=True, text=True, cwd=bundle, check=True, timeout=300)
    return int(done.stdout) * 1024


@pytest.mark.parametrize("name", ["mask.tif", "mask.npy"])
def test_a_large_tiff_takes_a_part_of_its_memory_a1(tmp_path: Path, name: str) -> None:
    reading = Reading(resize_mode="windows", window_overlap=32)
    bundle = write_bundle(tmp_path / "bundle", 3, reading, size=(512, 512))
    height, width = 6000, 6000
    image = np.tile(random_image(100, 100, 3), (height // 100, width // 100, 1))
    large, small = tmp_path / "large.tif", tmp_path / "small.tif"
    tifffile.imwrite(large, image, rowsperstrip=100, compression="zlib", **RGB)
    tifffile.imwrite(small, random_image(600, 600, 3), **RGB)
    more = peak_bytes(bundle, large, tmp_path / name) - peak_bytes(bundle, small, tmp_path / f"small.{name}")
    whole = height * width * 3
    assert more < whole / 3, (
        f"{more / 1e6:.0f} MB more than for a small image; the whole has {whole / 1e6:.0f} MB"
    )
    read = tifffile.imread if name.endswith("tif") else lambda path: np.load(path)[0]
    mask_HW = np.asarray(read(tmp_path / name))
    assert mask_HW.shape == (height, width)
    part = np.tile(random_image(100, 100, 3), (6, 6, 1))
    expected_HW = load_engine(bundle).answer_image(part)
    np.testing.assert_array_equal(mask_HW[:500, :500], expected_HW[:500, :500])


def test_a_large_image_that_is_resized_is_refused_a1(tmp_path: Path) -> None:
    bundle = write_bundle(tmp_path / "bundle", 3, Reading())
    np.lib.format.open_memmap(tmp_path / "a.npy", "w+", np.uint8, (1 << 14, 1 << 14, 3))
    done = infer(bundle, tmp_path / "a.npy", tmp_path / "a.png")
    assert (
        done.returncode == 1 and "16384 x 16384 pixels, at most 134.218 megapixels are allowed" in done.stderr
    )
