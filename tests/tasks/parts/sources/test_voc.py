"""prepare_data on Pascal VOC in its own layout."""

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tasks.core.errors import DataError
from tasks.parts.data.class_table import IGNORE_INDEX
from tasks.parts.data.dataset import open_split
from tasks.parts.sources.voc import VOC
from tests.tasks.parts.sources.runs import fails, halves, run, write_image, write_mask

NAMES = {"train": [f"2007_{n:06}" for n in range(8)], "val": ["2009_000001", "2009_000002"]}
CAT = 8
PALETTE = [part for colour in [*(VOC.colours or ()), *[(9, 9, 9)] * 234, (224, 224, 192)] for part in colour]


def mask_of(border: int) -> np.ndarray:
    mask = halves(0, CAT)
    mask[:, 12] = border
    return mask


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Make a VOC2012 folder of eight images for train and two for val, and one image without mask in no list."""
    root = tmp_path / "VOC2012"
    (root / "ImageSets/Segmentation").mkdir(parents=True)
    for split, names in NAMES.items():
        (root / f"ImageSets/Segmentation/{split}.txt").write_text("\n".join(names) + "\n")
        for name in names:
            write_image(root / f"JPEGImages/{name}.jpg", int(name[:4] + name[-1]))
            write_mask(root / f"SegmentationClass/{name}.png", mask_of(255), PALETTE)
    write_image(root / "JPEGImages/2008_000001.jpg", 5)
    (root / "ImageSets/Segmentation/test.txt").write_text("2008_000001\n")
    return root


def test_palette_of_voc_is_the_published_one() -> None:
    colours = dict(zip(VOC.names, VOC.colours or (), strict=True))
    assert colours["background"] == (0, 0, 0) and colours["aeroplane"] == (128, 0, 0)
    assert colours["cat"] == (64, 0, 0) and colours["person"] == (192, 128, 128)
    assert colours["tvmonitor"] == (0, 64, 128) and set(VOC.ignore_colours) == {(224, 224, 192)}


def test_palette_masks_are_read_as_indices_with_an_ignored_border(root: Path, tmp_path: Path) -> None:
    report = run("voc", root, tmp_path / "out")
    assert report.num_images == {"train": 7, "val": 1, "test": 2, "calibration": 2}
    assert report.warnings == () or all("no pixel of" in warning for warning in report.warnings)
    _, masks_NHW = open_split(tmp_path / "out/dataset", "test")
    assert (masks_NHW == np.where(mask_of(255) == 255, IGNORE_INDEX, mask_of(255))).all()


def test_masks_saved_as_colours_are_read_by_the_palette(root: Path, tmp_path: Path) -> None:
    run("voc", root, tmp_path / "indices")
    for path in (root / "SegmentationClass").iterdir():
        Image.open(path).convert("RGB").save(path)
    run("voc", root, tmp_path / "colours")
    for split in ("train", "test"):
        name = f"dataset/{split}_masks.npy"
        assert (tmp_path / "indices" / name).read_bytes() == (tmp_path / "colours" / name).read_bytes()


def test_unknown_index_is_named(root: Path, tmp_path: Path) -> None:
    write_mask(root / "SegmentationClass/2007_000003.png", mask_of(21), PALETTE)
    fails("voc", root, tmp_path / "out", r"2007_000003\.png .*labels 21 are not classes; expected 0 to 20")


def test_unknown_colour_is_named(root: Path, tmp_path: Path) -> None:
    colours = np.asarray(Image.open(root / "SegmentationClass/2007_000003.png").convert("RGB")).copy()
    colours[0, 0] = (1, 2, 3)
    write_mask(root / "SegmentationClass/2007_000003.png", colours)
    fails("voc", root, tmp_path / "out", r"2007_000003\.png .*colours \[1, 2, 3\] are in no row of the 21")


@pytest.mark.parametrize(
    ("place", "match"),
    [
        ("ImageSets/Segmentation/val.txt", r"Segmentation/val\.txt: not found"),
        ("JPEGImages", r"JPEGImages: not a folder"),
        ("SegmentationClass", r"SegmentationClass: not a folder"),
        (
            "JPEGImages/2007_000002.jpg",
            r"train\.txt: lists '2007_000002', but there is no image of that name",
        ),
        ("SegmentationClass/2007_000002.png", r"2007_000002\.jpg: its mask .*2007_000002\.png is missing"),
    ],
)
def test_what_is_missing_is_named(root: Path, tmp_path: Path, place: str, match: str) -> None:
    (root / place).rename(tmp_path / "elsewhere")
    fails("voc", root, tmp_path / "out", match, DataError)


def test_empty_list_is_an_empty_split(root: Path, tmp_path: Path) -> None:
    (root / "ImageSets/Segmentation/val.txt").write_text("")
    fails("voc", root, tmp_path / "out", r"split 'test' is empty", DataError)


def test_images_without_masks_are_skipped_or_background_as_configured(root: Path, tmp_path: Path) -> None:
    (root / "SegmentationClass/2007_000002.png").unlink()
    skipped = run("voc", root, tmp_path / "skipped", missing_masks="skip")
    assert skipped.num_images["train"] + skipped.num_images["val"] == 7
    assert any("1 image(s) have no mask, the first: " in warning for warning in skipped.warnings)
    kept = run("voc", root, tmp_path / "kept", missing_masks="background")
    assert kept.num_images["train"] + kept.num_images["val"] == 8
    masks = [open_split(tmp_path / "kept/dataset", split)[1] for split in ("train", "val")]
    assert sum(int((mask == 0).all()) for split_masks in masks for mask in split_masks) == 1
