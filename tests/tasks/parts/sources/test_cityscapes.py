"""prepare_data on Cityscapes in its own layout."""

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tasks.core.errors import DataError
from tasks.parts.data.class_table import IGNORE_INDEX
from tasks.parts.data.dataset import open_groups
from tests.tasks.parts.sources.runs import fails, halves, masks_of, pixels, run, write_image, write_mask

ROAD, CAR, EGO_VEHICLE = 7, 26, 1
"""Label ids of Cityscapes; their train ids are 0, 13 and 255."""
FRAMES = {
    "train": [f"aachen/aachen_0000{n:02}_000019" for n in range(6)]
    + [f"bremen/bremen_000000_{n:06}" for n in range(4)],
    "val": ["lindau/lindau_000000_000019", "lindau/lindau_000001_000019"],
}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Make ten images of two cities for train and two for val; half of each mask is road."""
    root = tmp_path / "cityscapes"
    for number, (split, frame) in enumerate((name, frame) for name in FRAMES for frame in FRAMES[name]):
        write_image(root / f"leftImg8bit/{split}/{frame}_leftImg8bit.png", number)
        mask = halves(ROAD, CAR)
        mask[0] = EGO_VEHICLE
        write_mask(root / f"gtFine/{split}/{frame}_gtFine_labelIds.png", mask)
        for other in ("color", "instanceIds"):
            write_mask(root / f"gtFine/{split}/{frame}_gtFine_{other}.png", mask)
    return root


def test_label_ids_become_train_ids_and_the_official_val_split_is_test(root: Path, tmp_path: Path) -> None:
    report = run("cityscapes", root, tmp_path / "out")
    assert report.classes[:2] == ("road", "sidewalk") and len(report.classes) == 19
    assert report.num_images["test"] == 2 and report.num_images["train"] + report.num_images["val"] == 10
    test = masks_of(tmp_path / "out", "test")
    for frame in FRAMES["val"]:
        mask = test[pixels(root / f"leftImg8bit/val/{frame}_leftImg8bit.png")]
        assert (mask[0] == IGNORE_INDEX).all()
        assert (mask[1:, :12] == 0).all() and (mask[1:, 12:] == 13).all()


def test_frames_of_one_sequence_stay_together(root: Path, tmp_path: Path) -> None:
    run("cityscapes", root, tmp_path / "out", val_share=0.4)
    in_val = masks_of(tmp_path / "out", "val")
    is_in_val = [
        pixels(root / f"leftImg8bit/train/{frame}_leftImg8bit.png") in in_val for frame in FRAMES["train"][6:]
    ]
    assert len(set(is_in_val)) == 1
    assert len(set(open_groups(tmp_path / "out/dataset", "test"))) == 2


@pytest.mark.parametrize("has_labels", [False, True])
def test_official_test_split_is_left_alone(root: Path, tmp_path: Path, has_labels: bool) -> None:
    frame = "berlin/berlin_000000_000019"
    write_image(root / f"leftImg8bit/test/{frame}_leftImg8bit.png", 99)
    if has_labels:  # the download holds masks of ignored pixels there
        write_mask(root / f"gtFine/test/{frame}_gtFine_labelIds.png", halves(EGO_VEHICLE, EGO_VEHICLE))
    assert run("cityscapes", root, tmp_path / "out").num_images["test"] == 2


def test_class_list_in_the_root_replaces_the_nineteen(root: Path, tmp_path: Path) -> None:
    (root / "classes.yaml").write_text(
        "classes:\n- {name: ground, ids: [7, 8]}\n- {name: vehicle, ids: [26, 27]}\nignore_rest: true\n"
    )
    report = run("cityscapes", root, tmp_path / "out")
    assert report.classes == ("ground", "vehicle")
    [mask, *_] = masks_of(tmp_path / "out", "train").values()
    assert set(np.unique(mask)) == {0, 1, IGNORE_INDEX}


def test_unknown_label_id_is_named(root: Path, tmp_path: Path) -> None:
    write_mask(root / f"gtFine/val/{FRAMES['val'][0]}_gtFine_labelIds.png", halves(ROAD, 77))
    fails(
        "cityscapes", root, tmp_path / "out", r"lindau_000000_000019_gtFine_labelIds\.png .*labels 77 are not"
    )


@pytest.mark.parametrize(
    ("place", "match"),
    [
        ("leftImg8bit/val", r"leftImg8bit/val: not a folder"),
        ("gtFine", r"gtFine/train: not a folder"),
        (
            f"gtFine/train/{FRAMES['train'][0]}_gtFine_labelIds.png",
            r"000019_leftImg8bit\.png: its mask .*gtFine/train/aachen/aachen_000000_000019_gtFine_labelIds\.png is "
            r"missing\. .*prepare_data\.folder\.missing_masks",
        ),
        (
            f"leftImg8bit/train/{FRAMES['train'][0]}_leftImg8bit.png",
            r"labelIds\.png: its image .*aachen_000000_000019_leftImg8bit\.png is missing",
        ),
    ],
)
def test_what_is_missing_is_named(root: Path, tmp_path: Path, place: str, match: str) -> None:
    (root / place).rename(tmp_path / "elsewhere")
    fails("cityscapes", root, tmp_path / "out", match, DataError)


def test_folder_without_images_is_named(root: Path, tmp_path: Path) -> None:
    for path in [*root.glob("leftImg8bit/val/*/*"), *root.glob("gtFine/val/*/*")]:
        path.unlink()
    fails("cityscapes", root, tmp_path / "out", r"leftImg8bit/val: no images", DataError)


def test_mask_of_another_size_is_named(root: Path, tmp_path: Path) -> None:
    Image.new("L", (8, 8), ROAD).save(root / f"gtFine/val/{FRAMES['val'][1]}_gtFine_labelIds.png")
    fails("cityscapes", root, tmp_path / "out", r"is 24 x 16 .* is 8 x 8", DataError)
