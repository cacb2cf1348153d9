"""Splits and groups that folders declare, images that are nearly in two splits, and the table of all files (C3)."""

import csv
import io
import logging
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from sklearn.datasets import load_sample_image

from tasks.core.errors import DataError
from tasks.parts.data.dataset import open_groups
from tasks.parts.sources.duplicates import MAX_DISTANCE, Pixels, find_duplicates, perceptual_hash, pixels_of
from tests.tasks.parts.sources.runs import fails, halves, masks_of, pixels, run, write_image, write_mask


def write_pair(root: Path, name: str, seed: int, *, images: str = "images", masks: str = "masks") -> None:
    write_image(root / f"{images}/{name}.png", seed)
    write_mask(root / f"{masks}/{name}.png", halves(0, 1))


def write_folders(root: Path, counts: dict[str, int]) -> Path:
    """Write so many images into each folder below images/."""
    seed = 0
    for folder, count in counts.items():
        for number in range(count):
            write_pair(root, f"{folder}/{number}", seed)
            seed += 1
    (root / "classes.yaml").write_text("[road, car]\n")
    return root


def table_of(out: Path) -> list[dict[str, str]]:
    with (out / "splits.csv").open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def folders_of(out: Path) -> dict[str, set[str]]:
    """Return the folders below images/ whose images are in each split."""
    found: dict[str, set[str]] = {}
    for row in table_of(out):
        folder = row["path"].removeprefix("images/").rpartition("/")[0]
        found.setdefault(row["split"], set()).add(folder)
    return found


def test_folders_of_splits_are_kept_c3(tmp_path: Path) -> None:
    root = write_folders(tmp_path / "mine", {"train": 8, "val": 2, "test": 3})
    report = run("folder", root, tmp_path / "out")
    assert report.num_images == {"train": 8, "val": 2, "test": 3, "calibration": 2}
    for split, count in (("train", 8), ("val", 2), ("test", 3)):
        kept = masks_of(tmp_path / "out", split)
        assert set(kept) == {pixels(root / f"images/{split}/{number}.png") for number in range(count)}
    assert report.split_origins["test"] == f"the folders of {root / 'images'}"


@pytest.mark.parametrize(
    ("folders", "missing", "origin"),
    [
        ({"train": 20, "valid": 4}, "test", r"drawn from train (prepare_data.folder.test_share=0.15)"),
        ({"train": 20, "test": 4}, "val", r"drawn from train (prepare_data.folder.val_share=0.1)"),
    ],
)
def test_only_the_split_without_a_folder_is_drawn_from_train_c3(
    tmp_path: Path, folders: dict[str, int], missing: str, origin: str
) -> None:
    root = write_folders(tmp_path / "mine", folders)
    report = run("folder", root, tmp_path / "out")
    found = folders_of(tmp_path / "out")
    assert found["train"] == found[missing] == {"train"}
    other = next(split for split in ("val", "test") if split != missing)
    assert report.num_images[other] == 4 and found[other] == set(folders) - {"train"}
    assert report.num_images["train"] + report.num_images[missing] == 20
    assert report.split_origins[missing] == origin


def test_splits_may_hold_images_and_masks_c3(tmp_path: Path) -> None:
    root = tmp_path / "mine"
    for split, seeds in (("train", range(6)), ("validation", range(6, 8)), ("test", range(8, 10))):
        for seed in seeds:
            write_pair(root, str(seed), seed, images=f"{split}/images", masks=f"{split}/masks")
    (root / "classes.yaml").write_text("[road, car]\n")
    report = run("folder", root, tmp_path / "out")
    assert report.num_images == {"train": 6, "val": 2, "test": 2, "calibration": 2}
    assert {row["path"] for row in table_of(tmp_path / "out") if row["split"] == "val"} == {
        "validation/images/6.png",
        "validation/images/7.png",
    }


@pytest.mark.parametrize(
    ("folders", "match"),
    [
        ({"train": 5, "val": 2, "extra": 2}, r"folders 'train', 'val' of splits, and 2 image.* 'extra/0'"),
        ({"train": 5, "val": 2, "valid": 2}, r"'val' and 'valid' are both the split 'val', expected one"),
        (
            {"val": 5, "test": 2},
            r"'test', 'val' of splits and no folder 'train', expected images to train on",
        ),
    ],
)
def test_folders_that_leave_a_split_open_are_refused_c3(
    tmp_path: Path, folders: dict[str, int], match: str
) -> None:
    fails("folder", write_folders(tmp_path / "mine", folders), tmp_path / "out", match, DataError)


def test_folders_of_splits_are_known_in_any_case_c3(tmp_path: Path) -> None:
    """They were three groups before, of which any could become any split."""
    root = write_folders(tmp_path / "mine", {"Train": 2, "Val": 8, "TEST": 3})
    run("folder", root, tmp_path / "out")
    assert folders_of(tmp_path / "out") == {
        "train": {"Train"},
        "calibration": {"Train"},
        "val": {"Val"},
        "test": {"TEST"},
    }


def test_lists_decide_before_folders_of_splits_c3(tmp_path: Path) -> None:
    root = write_folders(tmp_path / "mine", {"train": 5, "val": 2, "extra": 3})
    for split, folder in (("train", "extra"), ("val", "train"), ("test", "val")):
        files = sorted((root / f"images/{folder}").iterdir())
        (root / f"{split}.txt").write_text("".join(f"{folder}/{file.name}\n" for file in files))
    report = run("folder", root, tmp_path / "out")
    assert folders_of(tmp_path / "out")["val"] == {"train"} and report.num_images["train"] == 3
    assert report.split_origins["train"] == f"{root}/train.txt"


def test_one_folder_called_train_beside_others_is_a_sub_folder_c3(tmp_path: Path) -> None:
    root = write_folders(tmp_path / "mine", {"train": 4, "tram": 4, "bus": 4})
    run("folder", root, tmp_path / "out")
    assert (
        sorted(folders_of(tmp_path / "out")[split] for split in ("train", "val", "test")) != [{"train"}] * 3
    )
    assert {row["group"] for row in table_of(tmp_path / "out")} == {"train", "tram", "bus"}


def test_frames_of_a_sub_folder_stay_in_one_split_c3(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    root = write_folders(tmp_path / "mine", {f"video{number}": 5 for number in range(6)})
    with caplog.at_level(logging.INFO):
        report = run("folder", root, tmp_path / "out")
    found = folders_of(tmp_path / "out")
    held = [found["train"], found["val"], found["test"]]
    assert sum(map(len, held)) == len(set.union(*held)) == 6
    assert report.num_groups == 6
    assert "by sub-folders: 30 images in 6 groups (prepare_data.folder.groups=folder)" in caplog.text
    assert len(set(open_groups(tmp_path / "out/dataset", "train"))) == len(found["train"])


def test_sub_folders_are_no_groups_if_the_key_says_so_c3(tmp_path: Path) -> None:
    root = write_folders(tmp_path / "mine", {"video0": 10, "video1": 10})
    fails(
        "folder",
        root,
        tmp_path / "none",
        r"20 image\(s\) in 2 group\(s\) .* train, val, test, .*set prepare_data\.folder\.groups to none",
    )
    report = run("folder", root, tmp_path / "out", groups="none")
    assert report.num_images["train"] == 15 and report.num_groups == 0
    assert folders_of(tmp_path / "out")["train"] == {"video0", "video1"}


def test_group_in_two_folders_of_splits_is_warned_of_c3(tmp_path: Path) -> None:
    root = write_folders(tmp_path / "mine", {"train/a": 4, "train/b": 4, "val/c": 2, "test/a": 2})
    report = run("folder", root, tmp_path / "out")
    assert any(
        "1 group(s) are in more than one" in text and "'a' is in train, test" in text
        for text in report.warnings
    )


def test_folders_of_splits_hold_folders_of_classes_c3(tmp_path: Path) -> None:
    root = tmp_path / "mine"
    for split, count in (("train", 6), ("valid", 2), ("test", 2)):
        for number in range(count):
            write_image(root / f"images/{split}/Ödem, groß/{number}.png", 100 * len(split) + number)
            write_image(root / f"images/{split}/нож/{number}.png", 100 * len(split) + 50 + number)
    (root / "classes.yaml").write_text("['Ödem, groß', нож]\n", encoding="utf-8")
    report = run("class_folder", root, tmp_path / "out")
    assert report.num_images == {"train": 12, "val": 4, "test": 4, "calibration": 2}
    assert report.pixel_share["val"] == {"Ödem, groß": 0.5, "нож": 0.5}
    assert report.num_groups == 0


def test_images_of_a_patient_in_two_classes_are_one_group_c3(tmp_path: Path) -> None:
    """Each half of a patient could be in another split before."""
    root = tmp_path / "mine"
    for patient in range(8):
        for seed, kind in enumerate(("healthy", "tumour")):
            write_image(root / f"images/{kind}/patient{patient}/0.png", 10 * patient + seed)
    (root / "classes.yaml").write_text("[healthy, tumour]\n")
    report = run("class_folder", root, tmp_path / "out")
    patients: dict[str, set[str]] = {}
    for row in table_of(tmp_path / "out"):
        if row["split"] != "calibration":
            patients.setdefault(row["group"], set()).add(row["split"])
    assert report.num_groups == len(patients) == 8
    assert all(len(splits) == 1 for splits in patients.values())


def test_table_lists_every_file_its_split_and_its_group_c3(tmp_path: Path) -> None:
    root = write_folders(tmp_path / "mine", {f"video{number}": 4 for number in range(4)})
    write_image(root / "images/alone.png", 99)
    report = run("folder", root, tmp_path / "out", missing_masks="skip")
    rows = table_of(tmp_path / "out")
    assert list(rows[0]) == ["path", "split", "group"]
    counts = {split: sum(row["split"] == split for row in rows) for split in report.num_images}
    assert counts == report.num_images
    assert {"path": "images/alone.png", "split": "", "group": ""} in rows
    in_files = {path.relative_to(root).as_posix() for path in root.glob("images/**/*.png")}
    assert {row["path"] for row in rows} == in_files
    assert all(row["group"] == row["path"].split("/")[1] for row in rows if row["split"])


@pytest.fixture(scope="module")
def photo() -> Image.Image:
    return Image.fromarray(load_sample_image("china.jpg"))


def changed(photo: Image.Image, change: str) -> Image.Image:
    """Return a photo without its margin, changed as frames of a video or copies of a file are."""
    width, height = photo.size
    shift = 4 if change == "moved" else 0
    cut = photo.crop((40 + shift, 40 + shift // 2, width - 40 + shift, height - 40 + shift // 2))
    match change:
        case "smaller":
            return cut.resize((cut.width // 2, cut.height // 2))
        case "JPEG":
            buffer = io.BytesIO()
            cut.save(buffer, "JPEG", quality=40)
            return Image.open(buffer)
        case "noise":
            values = np.asarray(cut) + np.random.default_rng(0).normal(0, 10, (cut.height, cut.width, 3))
            return Image.fromarray(values.clip(0, 255).astype(np.uint8))
    return cut


def distance(first: Image.Image, second: Image.Image) -> int:
    hashes = [perceptual_hash(np.asarray(image)) for image in (first, second)]
    assert hashes[0] is not None and hashes[1] is not None
    return (hashes[0] ^ hashes[1]).bit_count()


@pytest.mark.parametrize("change", ["moved", "smaller", "JPEG", "noise"])
def test_nearly_equal_images_have_nearly_equal_hashes_c3(photo: Image.Image, change: str) -> None:
    assert distance(changed(photo, ""), changed(photo, change)) <= MAX_DISTANCE
    assert distance(changed(photo, ""), Image.fromarray(load_sample_image("flower.jpg"))) > 16


def test_near_duplicates_between_splits_are_counted_and_named_c3(photo: Image.Image, tmp_path: Path) -> None:
    root = write_folders(tmp_path / "mine", {"train": 6, "val": 2, "test": 2})
    for name, change in (("train/0", ""), ("val/0", "moved"), ("test/0", "noise"), ("test/1", "")):
        changed(photo, change).save(root / f"images/{name}.png")
        size = changed(photo, change).size
        Image.fromarray(np.tile(np.uint8([0, 1]), (size[1], size[0] // 2))).save(root / f"masks/{name}.png")
    report = run("folder", root, tmp_path / "out")
    assert (report.num_duplicates, report.num_near_duplicates) == (1, 2)
    [warning] = [text for text in report.warnings if "nearly the same" in text]
    assert f"{root}/images/val/0.png and {root}/images/train/0.png" in warning and "groups.csv" in warning


def test_flat_images_are_no_near_duplicates_c3() -> None:
    flat = [pixels_of(number, np.full((16, 16, 3), number, np.uint8)) for number in range(3)]
    splits = {"train": ["a"], "val": ["b"], "test": ["c"]}
    found = find_duplicates(splits, dict(zip("abc", flat, strict=True)))
    assert (found.num_equal, found.num_near, found.warnings) == (0, 0, ())


def test_all_pairs_of_many_images_are_found_c3() -> None:
    rng = np.random.default_rng(0)
    hashes = [int(value) for value in rng.integers(2**63, size=6000)]
    hashes[5999] = hashes[17] ^ 0b1111
    hashes[5000] = hashes[4500] ^ (1 << 63)
    images = {str(number): Pixels(number, str(number), value) for number, value in enumerate(hashes)}
    names = list(images)
    splits = {"train": names[:4000], "val": names[4000:4800], "test": names[4800:]}
    found = find_duplicates(splits, images)
    assert found.num_near == 2
    assert "5000 and 4500; 5999 and 17" in found.warnings[0]
