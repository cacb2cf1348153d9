"""prepare_data on an own folder: rows of classes.yaml, colours, images without masks, symbolic links."""

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tasks.core.errors import ConfigError, DataError
from tasks.parts.data.class_table import IGNORE_INDEX
from tasks.parts.data.dataset import open_split
from tests.tasks.parts.sources.runs import fails, halves, run, write_image, write_mask

ROWS = """
classes:
- {name: background, ids: [0, 4], colour: [0, 0, 0]}
- {name: road, ids: [7], colour: [128, 64, 128]}
ignore_ids: [255]
ignore_colours: [[255, 255, 255]]
"""


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Make ten images with masks of the ids 4 and 7."""
    root = tmp_path / "mine"
    root.mkdir()
    (root / "classes.yaml").write_text(ROWS)
    for number in range(10):
        write_image(root / f"images/{number}.png", number)
        write_mask(root / f"masks/{number}.png", halves(4, 7))
    return root


def colours(left: tuple[int, int, int], right: tuple[int, int, int]) -> np.ndarray:
    mask = np.zeros((16, 24, 3), np.uint8)
    mask[:, :12], mask[:, 12:] = left, right
    return mask


def all_masks(out: Path) -> np.ndarray:
    return np.concatenate([open_split(out / "dataset", split)[1] for split in ("train", "val", "test")])


def test_several_ids_become_one_class(root: Path, tmp_path: Path) -> None:
    mask = halves(0, 7)
    mask[0] = 255
    write_mask(root / "masks/3.png", mask)
    assert run("folder", root, tmp_path / "out").classes == ("background", "road")
    masks = all_masks(tmp_path / "out")
    assert (masks[:, 1:, :12] == 0).all() and (masks[:, 1:, 12:] == 1).all()
    assert int((masks == IGNORE_INDEX).sum()) == 24


@pytest.mark.parametrize("form", ["index", "palette", "colour", "colour and alpha", "16 bits"])
def test_one_table_reads_every_form_of_mask(root: Path, tmp_path: Path, form: str) -> None:
    palette = [1, 2, 3] * 256  # colours that no row names: a palette mask with ids is read by its indices
    for number in range(10):
        path = root / f"masks/{number}.png"
        if form == "palette":
            write_mask(path, halves(4, 7), palette)
        elif form == "16 bits":
            write_mask(path, halves(4, 7, np.uint16))
        elif form.startswith("colour"):
            mask = Image.fromarray(colours((0, 0, 0), (128, 64, 128)))
            mask.convert("RGBA" if "alpha" in form else "RGB").save(path)
    run("folder", root, tmp_path / "out")
    masks = all_masks(tmp_path / "out")
    assert (masks[:, :, :12] == 0).all() and (masks[:, :, 12:] == 1).all()


def test_table_of_colours_alone_reads_palettes_and_grey_by_their_colours(root: Path, tmp_path: Path) -> None:
    (root / "classes.yaml").write_text(
        "[{name: dark, colour: [10, 10, 10]}, {name: bright, colour: [200, 0, 0]}]"
    )
    palette = [0, 0, 0, 200, 0, 0, 10, 10, 10]
    for number in range(10):
        write_mask(root / f"masks/{number}.png", halves(2, 1), palette)
    write_mask(root / "masks/9.png", halves(10, 10))
    run("folder", root, tmp_path / "out")
    masks = all_masks(tmp_path / "out")
    assert sorted(int(mask.sum()) for mask in masks) == [0, *[16 * 12] * 9]


def test_ignored_colours_and_the_rest_are_ignored(root: Path, tmp_path: Path) -> None:
    mask = colours((0, 0, 0), (128, 64, 128))
    mask[0], mask[1] = (255, 255, 255), (9, 9, 9)
    write_mask(root / "masks/0.png", mask)
    fails("folder", root, tmp_path / "none", r"0\.png .*colours \[9, 9, 9\] are in no row of .*classes\.yaml")
    (root / "classes.yaml").write_text(ROWS + "ignore_rest: true\n")
    write_mask(root / "masks/1.png", halves(99, 7))
    run("folder", root, tmp_path / "out")
    assert int((all_masks(tmp_path / "out") == IGNORE_INDEX).sum()) == 2 * 24 + 16 * 12


def test_id_in_no_row_names_the_table(root: Path, tmp_path: Path) -> None:
    write_mask(root / "masks/3.png", halves(4, 8))
    match = r"masks/3\.png .*labels 8 are not classes; expected 0, 4, 7 \(ignored: 255\).*ignore_ids"
    fails("folder", root, tmp_path / "out", match, DataError)


@pytest.mark.parametrize(
    ("content", "match"),
    [
        ("[{name: a, ids: [1]}, {name: b, ids: [1]}]", r"id 1 stands for 'a' and for 'b'"),
        ("[{name: a, ids: [1, 1]}, {name: b, ids: [2]}]", r"id 1 stands for 'a' and for 'a'"),
        ("{classes: [{name: a, ids: [1]}], ignore_ids: [1]}", r"id 1 stands for 'ignore_ids' and for 'a'"),
        (
            "[{name: a, colour: [1, 2, 3]}, {name: b, colour: [1, 2, 3]}]",
            r"colour \[1, 2, 3\] stands for 'a'",
        ),
        ("[{name: a, colour: [1, 2]}]", r"colour holds \[1, 2\], expected \[red, green, blue\]"),
        ("[{name: a, colour: [1, 2, 256]}]", r"colour holds \[1, 2, 256\]"),
        ("[{name: a, ids: [1]}, {name: b}]", r"has no ids, and others have"),
        ("[{name: a, ids: []}]", r"ids of 'a' are \[\], expected a list of 0 to 65535"),
        ("[{name: a, ids: [-1]}]", r"ids of 'a' are \[-1\]"),
        ("[{name: a, ids: [yes]}]", r"ids of 'a' are \[True\]"),
        ("[{name: a, ids: 3}]", r"ids of 'a' are 3"),
        ("[{name: a, id: 3}]", r"has the key 'id'\. Allowed: name, ids, colour"),
        ("[{ids: [3]}]", r"has no name"),
        ("[{name: ../a, ids: [3]}]", r"is refused"),
        ("[a, {name: b, ids: [3]}]", r"holds names and rows, such as 'a'"),
        ("{classes: [a, b], ignore_ids: 255}", r"ignore_ids is 255, expected a list"),
        ("{classes: [a, b], ignore_ids: [x]}", r"ignore_ids holds \['x'\]"),
        ("{classes: [a, b], ignore_rest: maybe}", r"ignore_rest is 'maybe', expected true or false"),
        ("{classes: [a, b], ignore_colours: [red]}", r"ignore_colours holds 'red'"),
        ("[" + ", ".join(f"c{n}" for n in range(256)) + "]", r"256 classes, at most 255 are possible"),
    ],
)
def test_table_that_makes_no_sense_is_refused(root: Path, tmp_path: Path, content: str, match: str) -> None:
    (root / "classes.yaml").write_text(content)
    fails("folder", root, tmp_path / "out", f"classes.yaml: .*{match}", DataError)


def test_image_without_mask_stops_is_skipped_or_is_background(root: Path, tmp_path: Path) -> None:
    (root / "masks/4.png").unlink()
    fails(
        "folder", root, tmp_path / "none", r"images/4\.png: its mask .*masks/4\.png is missing.*missing_masks"
    )
    skipped = run("folder", root, tmp_path / "skipped", missing_masks="skip")
    assert len(all_masks(tmp_path / "skipped")) == 9
    assert any(
        "1 image(s) have no mask, the first: " in text and "left out" in text for text in skipped.warnings
    )
    kept = run("folder", root, tmp_path / "kept", missing_masks="background")
    assert sorted(int((mask == 0).all()) for mask in all_masks(tmp_path / "kept")) == [0] * 9 + [1]
    assert any("They are background." in text for text in kept.warnings)


def test_background_without_such_a_class_is_a_config_error(root: Path, tmp_path: Path) -> None:
    (root / "masks/4.png").unlink()
    (root / "classes.yaml").write_text("[{name: other, ids: [4]}, {name: road, ids: [7]}]")
    match = r"missing_masks is background, and .*classes\.yaml has no class of that name"
    fails("folder", root, tmp_path / "out", match, ConfigError, missing_masks="background")


def test_lists_may_name_images_that_are_skipped(root: Path, tmp_path: Path) -> None:
    (root / "masks/4.png").unlink()
    for split, names in (("train", "0 1 2 3 4 5"), ("val", "6 7"), ("test", "8 9")):
        (root / f"{split}.txt").write_text("\n".join(names.split()))
    report = run("folder", root, tmp_path / "out", missing_masks="skip")
    assert report.num_images == {"train": 5, "val": 2, "test": 2, "calibration": 2}


def test_links_to_files_inside_the_root_are_followed(root: Path, tmp_path: Path) -> None:
    (root / "store").mkdir()
    for place in ("images/3.png", "masks/3.png", "classes.yaml"):
        kept = root / "store" / place.replace("/", "-")
        (root / place).rename(kept)
        (root / place).symlink_to(kept)
    assert sum(run("folder", root, tmp_path / "out").num_images.values()) == 12


@pytest.mark.parametrize(
    ("place", "inside", "match"),
    [
        ("images/3.png", False, r"images/3\.png: is a symbolic link to .*outside .*mine, which is refused"),
        ("masks", True, r"masks: is a symbolic link to a folder, which is refused"),
    ],
)
def test_other_links_are_refused(root: Path, tmp_path: Path, place: str, inside: bool, match: str) -> None:
    target = root / "elsewhere" if inside else tmp_path / "elsewhere"
    (root / place).rename(target)
    (root / place).symlink_to(target)
    fails("folder", root, tmp_path / "out", match, DataError)


def test_root_itself_may_be_a_link(root: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(root)
    assert sum(run("folder", tmp_path / "link", tmp_path / "out").num_images.values()) == 12
