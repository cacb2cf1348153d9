"""prepare_data on ADE20K in its own layout."""

from pathlib import Path

import pytest

from tasks.core.errors import DataError
from tasks.parts.data.class_table import IGNORE_INDEX
from tasks.parts.data.dataset import open_split
from tests.tasks.parts.sources.runs import fails, halves, run, write_image, write_mask

OBJECTS = """Idx\tRatio\tTrain\tVal\tStuff\tName
1\t0.1576\t11664\t1172\t1\twall
2\t0.1072\t6046\t612\t1\tbuilding, edifice
3\t0.0878\t8265\t796\t1\tsky
"""


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Make eight training and two validation images of wall, sky and a row of other pixels."""
    root = tmp_path / "ADEChallengeData2016"
    for split, kind, count in (("training", "train", 8), ("validation", "val", 2)):
        for number in range(count):
            name = f"{split}/ADE_{kind}_{number:08}"
            write_image(root / f"images/{name}.jpg", number + 100 * len(split))
            mask = halves(1, 3)
            mask[0] = 0
            write_mask(root / f"annotations/{name}.png", mask)
    (root / "objectInfo150.txt").write_text(OBJECTS)
    return root


def test_ids_count_from_one_and_zero_is_ignored(root: Path, tmp_path: Path) -> None:
    report = run("ade20k", root, tmp_path / "out")
    assert report.classes == ("wall", "building", "sky")
    assert report.num_images == {"train": 7, "val": 1, "test": 2, "calibration": 2}
    _, masks_NHW = open_split(tmp_path / "out/dataset", "test")
    assert (masks_NHW[:, 0] == IGNORE_INDEX).all()
    assert (masks_NHW[:, 1:, :12] == 0).all() and (masks_NHW[:, 1:, 12:] == 2).all()


def test_full_names_stand_where_first_names_are_equal(root: Path, tmp_path: Path) -> None:
    (root / "objectInfo150.txt").write_text(OBJECTS + "4\t0\t1\t1\t1\tsky, painted\n")
    assert run("ade20k", root, tmp_path / "out").classes == (
        "wall",
        "building, edifice",
        "sky",
        "sky, painted",
    )


def test_class_list_in_the_root_is_enough(root: Path, tmp_path: Path) -> None:
    (root / "objectInfo150.txt").unlink()
    fails("ade20k", root, tmp_path / "none", r"objectInfo150\.txt: not found.*classes\.yaml", DataError)
    (root / "classes.yaml").write_text(
        "classes: [{name: inside, ids: [1, 2]}, {name: sky, ids: [3]}]\nignore_ids: [0]\n"
    )
    assert run("ade20k", root, tmp_path / "out").classes == ("inside", "sky")


@pytest.mark.parametrize(
    ("content", "match"),
    [
        ("", r"its first line is \[\], expected columns with Idx and Name"),
        ("Index,Name\n1,wall\n", r"its first line is \['Index,Name'\]"),
        (OBJECTS + "x\t0\t1\t1\t1\tsea\n", r"holds the line \['x', .*expected Idx"),
        (OBJECTS + "3\t0\t1\t1\t1\tsea\n", r"id 3 stands for 'sky' and for 'sea'"),
        (OBJECTS + "4\t0\t1\t1\t1\tsky\n", r"class name 'sky' appears twice"),
        (OBJECTS + "4\t0\t1\t1\t1\n", r"'' is refused"),
        ("Idx\tName\n" + "".join(f"{n}\tc{n}\n" for n in range(1, 257)), r"256 classes, at most 255"),
    ],
)
def test_broken_table_of_classes_is_named(root: Path, tmp_path: Path, content: str, match: str) -> None:
    (root / "objectInfo150.txt").write_text(content)
    fails("ade20k", root, tmp_path / "out", match, DataError)


def test_id_in_no_row_is_named(root: Path, tmp_path: Path) -> None:
    write_mask(root / "annotations/validation/ADE_val_00000001.png", halves(1, 7))
    fails(
        "ade20k", root, tmp_path / "out", r"ADE_val_00000001\.png .*labels 7 are not classes; expected 1 to 3"
    )


@pytest.mark.parametrize(
    ("place", "match"),
    [
        ("annotations/validation", r"annotations/validation: not a folder"),
        ("images/training", r"images/training: not a folder"),
        ("annotations/training/ADE_train_00000003.png", r"ADE_train_00000003\.jpg: its mask .* is missing"),
        ("images/training/ADE_train_00000003.jpg", r"ADE_train_00000003\.png: its image .* is missing"),
    ],
)
def test_what_is_missing_is_named(root: Path, tmp_path: Path, place: str, match: str) -> None:
    (root / place).rename(tmp_path / "elsewhere")
    fails("ade20k", root, tmp_path / "out", match, DataError)
