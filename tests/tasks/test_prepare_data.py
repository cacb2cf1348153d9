"""prepare_data on real files: the made data set, and a user's folder with all that can be wrong in it."""

import dataclasses
import hashlib
import json
import os
import shutil
import struct
import unicodedata
import zlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from PIL import Image

from tasks.core.config import typed_config
from tasks.core.errors import ArtifactError, ConfigError, DataError
from tasks.parts.data.class_table import IGNORE_INDEX
from tasks.parts.data.dataset import open_groups, open_images, open_labels, open_split, read_manifest
from tasks.parts.data.image_files import OversizedImage, ResizeMode, UnreadableImage, read_image
from tasks.parts.data.input_card import Task
from tasks.parts.data.masks import ColourMask
from tasks.parts.sources.config import FolderConfig
from tasks.parts.sources.digit_scenes import load_pool
from tasks.prepare_data import Config, Report, prepare_data

REPOSITORY = Path(__file__).parents[2]
SCENES_ROOT = REPOSITORY / "data/digit_scenes"
NAMES = [f"street_{n}" for n in range(10)]
IMAGES = FolderConfig(
    channels=3,
    resize_mode=ResizeMode.resize,
    val_share=0.1,
    test_share=0.1,
    num_calibration=1,
    max_megapixels=0.001,
    max_bad_images=0,
)


def section(source: str) -> dict[str, Any]:
    content = yaml.safe_load((REPOSITORY / f"conf/data/{source}.yaml").read_text(encoding="utf-8"))
    assert isinstance(content, dict)
    return content


def scenes_config(*, height: int = 64, width: int = 64, seed: int = 0, **changes: Any) -> Config:
    counts = {"num_train": 40, "num_val": 9, "num_test": 10, "num_calibration": 5}
    content = section("digit_scenes") | {"height": height, "width": width, "seed": seed}
    content["scenes"] |= counts | changes
    return typed_config(Config, content, "prepare_data")


def folder_config(*, height: int = 16, width: int = 24, **changes: Any) -> Config:
    content = section("folder") | {"height": height, "width": width}
    content["folder"] |= {"num_calibration": 2} | changes
    return typed_config(Config, content, "prepare_data")


def run(cfg: Config, root: Path, out: Path) -> Report:
    out.mkdir()
    return prepare_data(cfg, root=root, out=out)


def fails(root: Path, tmp_path: Path, match: str, **changes: Any) -> None:
    """Expect a DataError, and nothing written."""
    with pytest.raises(DataError, match=match):
        run(folder_config(**changes), root, tmp_path / "out")
    assert list((tmp_path / "out").iterdir()) == []


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Make ten images of 24 x 16 pixels with masks of the classes road and car."""
    root = tmp_path / "mine"
    (root / "images").mkdir(parents=True)
    (root / "masks").mkdir()
    (root / "classes.yaml").write_text("[road, car]\n")
    rng = np.random.default_rng(0)
    for name in NAMES:
        Image.fromarray(rng.integers(256, size=(16, 24, 3)).astype(np.uint8)).save(
            root / f"images/{name}.png"
        )
        mask = np.zeros((16, 24), np.uint8)
        mask[4:12, 6:18] = 1
        Image.fromarray(mask).save(root / f"masks/{name}.png")
    return root


def set_mask(root: Path, name: str, mask: Any, **options: Any) -> None:
    Image.fromarray(np.asarray(mask)).save(root / f"masks/{name}.png", **options)


def file_digests(folder: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(folder.rglob("*.*"))}


# digit_scenes


@pytest.mark.slow
def test_scenes_have_the_configured_counts_sizes_and_classes(tmp_path: Path) -> None:
    report = run(scenes_config(height=48, width=80, num_digits=3), SCENES_ROOT, tmp_path / "out")
    assert report.classes == ("background", "zero", "one", "two")
    assert report.num_images == {"train": 40, "val": 9, "test": 10, "calibration": 5}
    images, masks = open_split(tmp_path / "out/dataset", "train")
    assert images.shape == (40, 48, 80, 3)
    assert set(np.unique(masks)) == {0, 1, 2, 3}
    assert 0.75 < report.pixel_share["train"]["background"] < 0.97
    assert report.warnings == ()
    assert Image.open(tmp_path / "out/contact_sheet.png").width > 1000


@pytest.mark.slow
def test_images_may_be_normalised_as_finished_weights_need_it(tmp_path: Path) -> None:
    cfg = dataclasses.replace(scenes_config(), mean=[0.5, 0.4, 0.3], std=[0.25, 0.25, 0.2])
    report = run(cfg, SCENES_ROOT, tmp_path / "out")
    manifest = read_manifest(tmp_path / "out" / "dataset")
    assert (manifest.mean, manifest.std) == ((0.5, 0.4, 0.3), (0.25, 0.25, 0.2)) == (report.mean, report.std)


@pytest.mark.parametrize(
    ("mean", "std", "message"),
    [
        ([0.5] * 3, None, "expected both or none"),
        ([0.5], [0.2], "expected one for each of the 3 channels"),
        ([123.7, 116.3, 103.5], [58.4, 57.1, 57.4], "divide those for pixel values of 0 to 255 by 255"),
        ([0.5] * 3, [0.2, 0.2, 0.0], "std above 0"),
    ],
)
def test_impossible_normalisation_is_refused(mean: Any, std: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        dataclasses.replace(scenes_config(), mean=mean, std=std)


def test_equal_seeds_give_equal_bytes_and_other_seeds_do_not(tmp_path: Path) -> None:
    run(scenes_config(), SCENES_ROOT, tmp_path / "a")
    run(scenes_config(), SCENES_ROOT, tmp_path / "b")
    run(scenes_config(seed=1), SCENES_ROOT, tmp_path / "c")
    assert file_digests(tmp_path / "a") == file_digests(tmp_path / "b")
    other = file_digests(tmp_path / "c")
    assert other.pop("splits.csv") == hashlib.sha256(b"path,split,group\n").hexdigest()  # scenes are no files
    assert all(file_digests(tmp_path / "a")[name] != digest for name, digest in other.items())


@pytest.mark.slow
def test_more_scenes_keep_the_first_ones(tmp_path: Path) -> None:
    run(scenes_config(num_train=40), SCENES_ROOT, tmp_path / "a")
    run(scenes_config(num_train=100), SCENES_ROOT, tmp_path / "b")
    few, many = (open_split(tmp_path / run_name / "dataset", "train")[0] for run_name in "ab")
    assert (many[:40] == few).all()


def test_splits_share_no_scan_and_no_photo_column() -> None:
    pools = {name: load_pool(name, num_digits=10, seed=3) for name in ("train", "val", "test")}
    scans = {name: {scan.tobytes() for scan in pool.scans} for name, pool in pools.items()}
    assert sum(map(len, scans.values())) == len(set.union(*scans.values())) == 1797
    assert all(set(pool.digits) == set(range(10)) for pool in pools.values())
    for photo in range(2):
        assert sum(pool.photos[photo].shape[1] for pool in pools.values()) == 640


def test_scenes_of_calibration_are_no_train_scenes(tmp_path: Path) -> None:
    run(scenes_config(), SCENES_ROOT, tmp_path / "out")
    train, calibration = (
        open_split(tmp_path / "out/dataset", split)[0] for split in ("train", "calibration")
    )
    assert not {image.tobytes() for image in train} & {image.tobytes() for image in calibration}


def test_more_digits_than_names_is_a_config_error(tmp_path: Path) -> None:
    (tmp_path / "classes.yaml").write_text("[background, zero, one]\n")
    with pytest.raises(ConfigError, match=r"prepare_data.scenes.num_digits = 5: .* 2 digits"):
        run(scenes_config(), tmp_path, tmp_path / "out")


# config


@pytest.mark.parametrize(
    ("source", "key", "value"),
    [
        ("digit_scenes", "scenes.num_digits", 11),
        ("digit_scenes", "scenes.num_calibration", 0),
        ("digit_scenes", "scenes.num_train", -1),
        ("digit_scenes", "scenes.max_digits", 1),
        ("digit_scenes", "scenes.min_opacity", 0.0),
        ("digit_scenes", "seed", -1),
        ("digit_scenes", "height", 10**9),
        ("digit_scenes", "root", "../elsewhere"),
        ("digit_scenes", "root", "a\0b"),
        ("digit_scenes", "scenes", None),
        ("folder", "folder", None),
        ("folder", "folder.val_share", 0.0),
        ("folder", "folder.test_share", 0.95),
        ("folder", "folder.num_calibration", 0),
        ("folder", "folder.max_megapixels", 0.0),
        ("folder", "folder.max_bad_images", -1),
        ("folder", "folder.resize_mode", "stretch"),
        ("folder", "folder.channels", 17),
        ("folder", "folder.missing_masks", "ignore"),
        ("folder", "folder.value_range", [5, 5]),
        ("folder", "folder.value_range", [5]),
        ("folder", "source", "cityscapes_v2"),
        ("folder", "widht", 3),
    ],
)
def test_impossible_value_names_its_key(source: str, key: str, value: Any) -> None:
    content = section(source)
    *parents, last = key.split(".")
    part = content
    for parent in parents:
        part = part[parent]
    part[last] = value
    with pytest.raises(ConfigError, match=f"prepare_data.{key}".replace(".", r"\.")):
        typed_config(Config, content, "prepare_data")


# folder: what works


def test_folder_becomes_a_data_set(root: Path, tmp_path: Path) -> None:
    report = run(folder_config(), root, tmp_path / "out")
    assert report.num_images == {"train": 7, "val": 1, "test": 2, "calibration": 2}
    assert report.classes == ("road", "car")
    assert report.pixel_share["test"] == pytest.approx({"road": 0.75, "car": 0.25})
    assert (report.num_bad_images, report.num_duplicates, report.warnings) == (0, 0, ())
    splits = {split: open_split(tmp_path / "out/dataset", split)[0] for split in report.num_images}
    written = sorted(image.tobytes() for split in ("train", "val", "test") for image in splits[split])
    assert written == sorted(np.asarray(Image.open(path)).tobytes() for path in root.glob("images/*"))
    train = {image.tobytes() for image in splits["train"]}
    assert all(image.tobytes() in train for image in splits["calibration"])
    json.dumps(dataclasses.asdict(report), allow_nan=False)


def test_folder_gives_equal_bytes_whatever_the_order_of_files_on_disk(root: Path, tmp_path: Path) -> None:
    run(folder_config(), root, tmp_path / "a")
    for path in sorted(root.glob("*/*"), reverse=True):
        path.write_bytes(content) if (content := path.read_bytes()) and not path.unlink() else None
    run(folder_config(), root, tmp_path / "b")
    assert file_digests(tmp_path / "a") == file_digests(tmp_path / "b")


def test_split_files_decide_the_splits(root: Path, tmp_path: Path) -> None:
    (root / "train.txt").write_text("\n".join(NAMES[:6]) + "\n")
    (root / "val.txt").write_text("street_6.png\n\n")
    (root / "test.txt").write_text("street_7\r\nstreet_8\r\n")
    report = run(folder_config(), root, tmp_path / "out")
    assert report.num_images == {"train": 6, "val": 1, "test": 2, "calibration": 2}
    assert report.warnings == ("1 image(s) are in none of train.txt, val.txt, test.txt.",)
    expected = np.asarray(Image.open(root / "images/street_6.png"))
    assert (open_split(tmp_path / "out/dataset", "val")[0][0] == expected).all()


def test_images_of_a_group_stay_together_and_are_numbered(root: Path, tmp_path: Path) -> None:
    groups = {name: f"video {number // 3}" for number, name in enumerate(NAMES)}
    (root / "groups.csv").write_text("image,group\n" + "".join(f"{n}.png,{g}\n" for n, g in groups.items()))
    counts = run(folder_config(), root, tmp_path / "out").num_images
    assert counts["val"] + counts["test"] + counts["train"] == 10
    assert counts["val"] in (1, 3) and counts["test"] in (
        2,
        3,
        4,
    )  # whole videos: three of 3 images, one of 1
    numbers = {split: open_groups(tmp_path / "out/dataset", split) for split in ("train", "val", "test")}
    assert sum(len(set(groups)) for groups in numbers.values()) == 4
    assert set(numbers["val"]) == {0}


def test_without_groups_each_image_is_its_own(root: Path, tmp_path: Path) -> None:
    run(folder_config(), root, tmp_path / "out")
    np.testing.assert_array_equal(open_groups(tmp_path / "out/dataset", "train"), np.arange(7))


def test_groups_torn_by_lists_are_warned_of(root: Path, tmp_path: Path) -> None:
    (root / "groups.csv").write_text(f"image,group\n{NAMES[0]},a\n{NAMES[8]},a\n")
    for split, names in (("train", NAMES[:8]), ("val", NAMES[8:9]), ("test", NAMES[9:])):
        (root / f"{split}.txt").write_text("\n".join(names))
    report = run(folder_config(), root, tmp_path / "out")
    assert any(
        "1 group(s) are in more than one of train, val and test" in warning for warning in report.warnings
    )


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("name,video\n", r"expected the columns image,group"),
        ("image,group\nstreet_0\n", r"holds the line 'street_0', expected an image and its group"),
        ("image,group\nnowhere,a\n", r"lists 'nowhere', but there is no image of that name"),
        ("", r"expected the columns image,group"),
    ],
)
def test_broken_groups_are_named(root: Path, tmp_path: Path, content: str, expected: str) -> None:
    (root / "groups.csv").write_text(content)
    fails(root, tmp_path, expected)


def test_non_ascii_names_and_sub_folders_work(root: Path, tmp_path: Path) -> None:
    for folder, form in (("images", "NFC"), ("masks", "NFD")):
        name = unicodedata.normalize(form, "Straßé 道路")
        (root / folder / name).mkdir()
        (root / f"{folder}/street_0.png").rename(root / folder / name / "Bild é.png")
    (root / "classes.yaml").write_text("0: Straße\n1: 自動車\n", encoding="utf-8")
    report = run(folder_config(), root, tmp_path / "out")
    assert sum(report.num_images[split] for split in ("train", "val", "test")) == 10
    assert read_manifest(tmp_path / "out/dataset").classes == ("Straße", "自動車")


def test_palette_and_16_bit_index_masks_are_read_as_indices(root: Path, tmp_path: Path) -> None:
    mask = np.asarray(Image.open(root / "masks/street_0.png"))
    palette = Image.new("P", (24, 16))
    palette.putdata(mask.ravel().tolist())
    palette.putpalette([128, 0, 0, 0, 128, 0])
    palette.save(root / "masks/street_0.png")
    set_mask(root, "street_1", mask.astype(np.uint16))
    report = run(folder_config(), root, tmp_path / "out")
    for split in ("train", "val", "test"):
        assert report.pixel_share[split] == pytest.approx({"road": 0.75, "car": 0.25})


def test_ignore_index_is_mapped_and_not_counted(root: Path, tmp_path: Path) -> None:
    (root / "classes.yaml").write_text("classes: {0: road, 1: car}\nignore_index: 200\n")
    for name in NAMES:
        mask = np.array(Image.open(root / f"masks/{name}.png"))
        mask[:4] = 200
        set_mask(root, name, mask)
    report = run(folder_config(), root, tmp_path / "out")
    assert (open_split(tmp_path / "out/dataset", "train")[1][:, :4] == IGNORE_INDEX).all()
    assert report.pixel_share["train"]["car"] == pytest.approx(96 / 288)


def test_resize_stretches_images_and_keeps_mask_values(root: Path, tmp_path: Path) -> None:
    run(folder_config(height=32, width=32), root, tmp_path / "out")
    images, masks = open_split(tmp_path / "out/dataset", "train")
    assert images.shape == (7, 32, 32, 3)
    assert set(np.unique(masks)) == {0, 1}
    assert (masks == 1).mean() == pytest.approx(0.25)


def test_crop_cuts_the_centre_and_pads_with_ignored_pixels(root: Path, tmp_path: Path) -> None:
    run(folder_config(height=20, width=16, resize_mode="crop"), root, tmp_path / "out")
    images, masks = open_split(tmp_path / "out/dataset", "train")
    assert (masks[:, [0, 1, 18, 19]] == IGNORE_INDEX).all()
    assert (images[:, [0, 1, 18, 19]] == 0).all()
    originals = {np.asarray(Image.open(path))[:, 4:20].tobytes() for path in root.glob("images/*")}
    assert all(image[2:18].tobytes() in originals for image in images)
    assert (masks[:, 2:18] == 1).mean() == pytest.approx(8 * 12 / (16 * 16))


# folder: defined conversions


def test_grey_image_is_repeated(tmp_path: Path) -> None:
    Image.fromarray(np.full((4, 4), 77, np.uint8)).save(tmp_path / "a.png")
    assert (read_image(tmp_path / "a.png", IMAGES) == 77).all()


def test_transparent_pixels_are_laid_over_black(tmp_path: Path) -> None:
    pixels = np.full((4, 4, 4), 200, np.uint8)
    pixels[..., 3] = np.array([0, 255, 128, 255])
    Image.fromarray(pixels).save(tmp_path / "a.png")
    image = read_image(tmp_path / "a.png", IMAGES)
    assert image[0, :, 0].tolist() == pytest.approx([0, 200, 100, 200], abs=1)


def test_cmyk_jpeg_becomes_rgb(tmp_path: Path) -> None:
    Image.new("CMYK", (8, 8), (0, 255, 255, 0)).save(tmp_path / "a.jpg", quality=95)
    image = read_image(tmp_path / "a.jpg", IMAGES)
    assert image[4, 4].tolist() == pytest.approx([255, 0, 0], abs=6)


def test_exif_orientation_is_applied(tmp_path: Path) -> None:
    image = Image.new("RGB", (32, 16))
    image.paste((255, 0, 0), (0, 0, 16, 16))
    exif = image.getexif()
    exif[0x0112] = 6  # the camera was turned: rotate by 90 degrees clockwise to view
    image.save(tmp_path / "a.jpg", exif=exif, quality=95)
    upright = read_image(tmp_path / "a.jpg", IMAGES)
    assert upright.shape == (32, 16, 3)
    assert upright[4, 8, 0] > 200
    assert upright[28, 8, 0] < 50


def test_grey_data_set_has_one_channel(root: Path, tmp_path: Path) -> None:
    report = run(folder_config(channels=1, height=32, width=24), root, tmp_path / "out")
    images_NHWC, _ = open_split(tmp_path / "out/dataset", "train")
    assert images_NHWC.shape[1:] == (32, 24, 1)
    assert len(report.mean) == len(report.std) == read_manifest(tmp_path / "out/dataset").num_channels == 1
    assert Image.open(tmp_path / "out/contact_sheet.png").width > 400


@pytest.mark.parametrize(("channels", "height"), [(1, 16), (2, 16), (5, 16), (5, 32), (16, 32)])
def test_arrays_have_any_number_of_channels(root: Path, tmp_path: Path, channels: int, height: int) -> None:
    rng = np.random.default_rng(0)
    for name in NAMES:
        (root / f"images/{name}.png").unlink()
        shape = (16, 24, channels) if channels > 1 else (16, 24)
        np.save(root / f"images/{name}.npy", rng.integers(256, size=shape).astype(np.uint8))
    report = run(folder_config(channels=channels, height=height, width=24), root, tmp_path / "out")
    assert len(report.mean) == channels
    images_NHWC, _ = open_split(tmp_path / "out/dataset", "train")
    assert images_NHWC.shape[1:] == (height, 24, channels)
    stored = {np.load(path).tobytes() for path in (root / "images").iterdir()}
    assert all((image.tobytes() in stored) == (height == 16) for image in images_NHWC)
    rows = images_NHWC[:, :, 0].astype(int)
    if channels > 1:
        assert (rows[..., 0] != rows[..., 1]).mean() > 0.9, "channels were mixed by resizing"


@pytest.mark.parametrize(
    ("array", "text"),
    [
        (
            None,
            r"an image file, which gives 1 or 3 channels, expected 4\. .*numpy\.save as .*folder\.channels to 3",
        ),
        (
            np.zeros((16, 24, 4), np.float32),
            r"values of more than 8 bits, in 1 image\(s\) \(1 of float32, 9 of uint8\), .*value_range is null",
        ),
        (np.zeros((16, 24, 5), np.uint8), r"holds uint8 \[16, 24, 5\].*prepare_data\.folder\.channels"),
        (b"no array", r"cannot be read as \.npy"),
    ],
)
def test_image_with_other_channels_is_refused(root: Path, tmp_path: Path, array: Any, text: str) -> None:
    for name in NAMES[1:] if array is not None else ():
        (root / f"images/{name}.png").unlink()
        np.save(root / f"images/{name}.npy", np.zeros((16, 24, 4), np.uint8))
    if array is not None:
        (root / f"images/{NAMES[0]}.png").unlink()
        file = root / f"images/{NAMES[0]}.npy"
        file.write_bytes(array) if isinstance(array, bytes) else np.save(file, array)
    fails(root, tmp_path, text, channels=4)


# folder: what is refused (fault numbers in the comments are those of the list of faults)


def test_missing_mask_names_both_paths_and_counts(root: Path, tmp_path: Path) -> None:
    for name in NAMES[2:5]:
        (root / f"masks/{name}.png").unlink()
    fails(
        root,
        tmp_path,
        r"images/street_2\.png: its mask .*masks/street_2\.png is missing \(and 2 more images\)",
    )


def test_missing_image_names_both_paths(root: Path, tmp_path: Path) -> None:
    (root / "images/street_3.png").unlink()
    fails(root, tmp_path, r"masks/street_3\.png: its image .*images/street_3\.png")


def test_two_images_of_one_name_are_refused(root: Path, tmp_path: Path) -> None:
    Image.new("RGB", (24, 16)).save(root / "images/street_3.jpg")
    fails(root, tmp_path, "same name")


def test_size_mismatch_names_both_files_and_sizes(root: Path, tmp_path: Path) -> None:
    for name in NAMES[4:6]:
        set_mask(root, name, np.zeros((24, 16), np.uint8))
    fails(
        root,
        tmp_path,
        r"images/street_4\.png is 24 x 16 .*masks/street_4\.png is 16 x 24\..* 1 more file\(s\)",
    )


def test_label_outside_the_classes_gives_values_and_first_file(root: Path, tmp_path: Path) -> None:
    for name in NAMES[1:4]:
        mask = np.zeros((16, 24), np.uint8)
        mask[0, :2] = (7, 255)
        set_mask(root, name, mask)
    fails(
        root,
        tmp_path,
        r"masks/street_1\.png .*labels 7, 255 are not classes; expected 0 to 1.* 2 more file\(s\)",
    )


def test_16_bit_instance_mask_says_how_to_map(root: Path, tmp_path: Path) -> None:
    set_mask(root, "street_0", np.full((16, 24), 26001, np.uint16))
    fails(root, tmp_path, r"26001 are not classes.*value // 1000")


def test_colour_mask_says_how_to_map(root: Path, tmp_path: Path) -> None:
    colours = np.zeros((16, 24, 3), np.uint8)
    colours[:4] = (128, 64, 128)
    set_mask(root, "street_0", colours)
    with pytest.raises(ColourMask, match=r"street_0\.png.*2 colours.*\(128, 64, 128\).*Map each colour"):
        run(folder_config(), root, tmp_path / "out")


def damage(path: Path, kind: str) -> None:
    content = path.read_bytes()
    if kind == "truncated jpeg":
        Image.effect_noise((200, 200), 90).save(path.with_suffix(".jpg"))
        path.unlink()
        path = path.with_suffix(".jpg")
        path.write_bytes(path.read_bytes()[:3000])
    elif kind == "jpeg named png":
        Image.new("RGB", (24, 16)).save(path, format="JPEG")
    else:
        changed = {
            "0 bytes": b"",
            "text": b"<html>not found</html>",
            "truncated png": content[: len(content) // 2],
            "flipped": content[:60] + bytes(byte ^ 255 for byte in content[60:90]) + content[90:],
        }
        path.write_bytes(changed[kind])


KINDS_OF_DAMAGE = ["0 bytes", "text", "truncated png", "flipped", "truncated jpeg", "jpeg named png"]


@pytest.mark.parametrize("kind", KINDS_OF_DAMAGE)
def test_damaged_image_is_named(root: Path, tmp_path: Path, kind: str) -> None:
    damage(root / "images/street_5.png", kind)
    with pytest.raises(UnreadableImage, match=r"street_5\.(png|jpg).*max_bad_images = 0"):
        run(folder_config(), root, tmp_path / "out")
    assert list((tmp_path / "out").iterdir()) == []


@pytest.mark.parametrize("kind", KINDS_OF_DAMAGE[:4])
def test_damaged_mask_is_named(root: Path, tmp_path: Path, kind: str) -> None:
    damage(root / "masks/street_5.png", kind)
    fails(root, tmp_path, r"masks/street_5\.png")


def test_so_many_damaged_images_are_skipped_and_reported(root: Path, tmp_path: Path) -> None:
    for name in NAMES[:2]:
        (root / f"images/{name}.png").write_bytes(b"")
    fails(root, tmp_path, r"2 unreadable file\(s\), prepare_data.folder.max_bad_images = 1", max_bad_images=1)
    report = run(folder_config(max_bad_images=2), root, tmp_path / "skipped")
    assert report.num_bad_images == 2
    assert sum(report.num_images[split] for split in ("train", "val", "test")) == 8
    assert "2 unreadable file(s) skipped" in report.warnings[0]
    assert "street_0.png" in report.warnings[0]


def test_huge_image_is_refused_before_it_is_decoded(root: Path, tmp_path: Path) -> None:
    def chunk(kind: bytes, content: bytes) -> bytes:
        return (
            struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))
        )

    header = chunk(b"IHDR", struct.pack(">IIBBBBB", 100_000, 100_000, 8, 2, 0, 0, 0))
    pixels = chunk(b"IDAT", zlib.compress(b"\0" * 1000))
    (root / "images/street_0.png").write_bytes(b"\x89PNG\r\n\x1a\n" + header + pixels + chunk(b"IEND", b""))
    with pytest.raises(
        OversizedImage, match=r"100000 x 100000 pixels, at most 64 megapixels.*max_megapixels"
    ):
        run(folder_config(max_bad_images=5), root, tmp_path / "out")


def test_pixel_cap_is_the_configured_one(root: Path, tmp_path: Path) -> None:
    fails(root, tmp_path, r"24 x 16 pixels, at most 0.0003 megapixels", max_megapixels=0.0003)


@pytest.mark.parametrize("folder", ["images", "masks"])
def test_missing_folder_is_named(root: Path, tmp_path: Path, folder: str) -> None:
    (root / folder).rename(root / "elsewhere")
    fails(root, tmp_path, f"{folder}: not a folder")


def test_empty_folder_is_refused(root: Path, tmp_path: Path) -> None:
    for path in root.glob("*/*"):
        path.unlink()
    fails(root, tmp_path, "images: no images")


@pytest.mark.parametrize("split", ["train", "val", "test", "calibration"])
def test_empty_split_is_refused(root: Path, tmp_path: Path, split: str) -> None:
    lists = {"train": NAMES[:8], "val": NAMES[8:9], "test": NAMES[9:], "calibration": NAMES[:2]}
    for name, content in (lists | {split: []}).items():
        (root / f"{name}.txt").write_text("\n".join(content))
    fails(root, tmp_path, rf"{split}\.txt: split '{split}' is empty")


def test_incomplete_lists_are_refused(root: Path, tmp_path: Path) -> None:
    (root / "train.txt").write_text("street_0\n")
    fails(root, tmp_path, r"holds train\.txt, but not val\.txt, test\.txt")


def test_listed_name_without_image_is_named(root: Path, tmp_path: Path) -> None:
    (root / "train.txt").write_text("\n".join(NAMES[:8]))
    (root / "val.txt").write_text("street_8\nstreet_88\nstreet_99\n")
    (root / "test.txt").write_text("street_9\n")
    fails(
        root,
        tmp_path,
        r"val\.txt: lists 'street_88', but there is no image of that name \(and 1 more names\)",
    )


def test_one_class_only_is_refused(root: Path, tmp_path: Path) -> None:
    for name in NAMES:
        set_mask(root, name, np.ones((16, 24), np.uint8))
    fails(root, tmp_path, r"hold only class 'car' \(the first: .*masks/street_.\.png\)")


def test_all_pixels_ignored_is_refused(root: Path, tmp_path: Path) -> None:
    (root / "classes.yaml").write_text("{0: road, 1: car, ignore_index: 255}")
    for name in NAMES:
        set_mask(root, name, np.full((16, 24), 255, np.uint8))
    fails(root, tmp_path, "hold only ignored pixels")


@pytest.mark.parametrize(
    "place", ["images/street_0.png", "masks/street_0.png", "images", "masks", "classes.yaml"]
)
def test_symbolic_link_is_refused(root: Path, tmp_path: Path, place: str) -> None:
    (root / place).rename(tmp_path / "outside")
    (root / place).symlink_to(tmp_path / "outside")
    fails(root, tmp_path, "symbolic link")


@pytest.mark.parametrize("line", ["../secret", "/etc/passwd", "a/../../b", "C:\\x", "..\\x", "a\0b"])
def test_listed_name_that_leads_outside_is_refused(root: Path, tmp_path: Path, line: str) -> None:
    (root / "train.txt").write_text("\n".join(NAMES[:8]))
    (root / "val.txt").write_text(f"{line}\n")
    (root / "test.txt").write_text("street_9\n")
    fails(root, tmp_path, r"val\.txt: .* is refused")


@pytest.mark.skipif(os.name != "posix", reason="file names are bytes on POSIX only")
def test_file_name_that_is_no_utf8_is_refused(root: Path, tmp_path: Path) -> None:
    (root / "images/street_0.png").rename(os.fsdecode(os.fsencode(root / "images") + b"/stra\xdfe.png"))
    fails(root, tmp_path, "not UTF-8")


@pytest.mark.parametrize(
    ("content", "match"),
    [
        ("", "expected a list of names"),
        ("just text", "expected a list of names"),
        ("{0: road, 2: car}", r"indices are \[0, 2\], expected 0 to 1"),
        ("{zero: road}", "indices are"),
        ("[road, road]", "'road' appears twice"),
        ("[road, 3]", "class name 3 is not text"),
        ("[road, yes]", "class name True is not text"),
        ("[road, ../x]", "is refused"),
        ("[road, /etc]", "is refused"),
        ("[road, '']", "is refused"),
        ('[road, "a\\0b"]', "is refused"),
        ("{classes: [road, car], ignore_index: 1}", "ignore_index 1 is also a class"),
        ("{classes: [road, car], ignore_index: many}", "ignore_index is 'many'"),
        ("{classes: [road, car], colours: []}", "unknown key 'colours'"),
        ("[road", "not valid YAML"),
    ],
)
def test_class_list_that_makes_no_sense_is_refused(
    root: Path, tmp_path: Path, content: str, match: str
) -> None:
    (root / "classes.yaml").write_text(content)
    fails(root, tmp_path, f"classes.yaml: .*{match}")


def test_missing_class_list_is_named(root: Path, tmp_path: Path) -> None:
    (root / "classes.yaml").unlink()
    fails(root, tmp_path, r"classes\.yaml: not found")


# folder: what is reported


def test_same_image_in_two_splits_is_counted(root: Path, tmp_path: Path) -> None:
    (root / "train.txt").write_text("\n".join(NAMES[:6]))
    (root / "val.txt").write_text("\n".join(NAMES[6:8]))
    (root / "test.txt").write_text("\n".join(NAMES[8:]))
    # The same pixels in another file: stored uncompressed.
    for copy, original in (("street_6", "street_0"), ("street_9", "street_1")):
        Image.open(root / f"images/{original}.png").save(root / f"images/{copy}.png", compress_level=0)
    report = run(folder_config(), root, tmp_path / "out")
    assert report.num_duplicates == 2
    assert "2 image(s) of val or test" in report.warnings[0]
    assert "street_6.png" in report.warnings[0]
    assert "street_0.png" in report.warnings[0]


def test_class_absent_from_a_split_is_reported(root: Path, tmp_path: Path) -> None:
    (root / "classes.yaml").write_text("[road, car, tram]")
    report = run(folder_config(), root, tmp_path / "out")
    assert [warning for warning in report.warnings if "split val has no pixel of 'tram'" in warning]
    assert report.pixel_share["val"]["tram"] == 0.0


def test_calibration_images_from_test_or_too_few_are_reported(root: Path, tmp_path: Path) -> None:
    (root / "train.txt").write_text("\n".join(NAMES[:6]))
    (root / "val.txt").write_text("\n".join(NAMES[6:8]))
    (root / "test.txt").write_text("\n".join(NAMES[8:]))
    (root / "calibration.txt").write_text("street_0\nstreet_9\n")
    report = run(folder_config(num_calibration=4), root, tmp_path / "out")
    assert "1 calibration image(s) are test images" in report.warnings[0]
    assert "2 calibration image(s), prepare_data.folder.num_calibration is 4" in report.warnings[1]


def image_folder(root: Path, names: list[str], classes: list[str] | None = None) -> Path:
    random = np.random.default_rng(0)
    for name in names:
        path = root / "images" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(random.integers(0, 256, (20, 30, 3), np.uint8)).save(path)
    if classes is not None:
        (root / "classes.yaml").write_text(yaml.safe_dump(classes), encoding="utf-8")
    return root


def images_config(source: str, **changes: Any) -> Config:
    content = section(source) | {"height": 16, "width": 24}
    content["folder"] |= {"num_calibration": 2} | changes
    return typed_config(Config, content, "prepare_data")


def test_folder_of_each_class_gives_labels_in_the_order_of_classes_yaml(tmp_path: Path) -> None:
    names = [f"{folder}/{number}.png" for folder in ("cat", "dog", "hen") for number in range(8)]
    root = image_folder(tmp_path / "mine", names, ["hen", "cat", "dog"])
    for split, listed in (("train", names[::2]), ("val", names[1::4]), ("test", names[3::4])):
        (root / f"{split}.txt").write_text("\n".join(listed), encoding="utf-8")
    report = run(images_config("class_folder"), root, tmp_path / "out")
    assert report.classes == ("hen", "cat", "dog") and report.num_images["train"] == 12
    dataset = tmp_path / "out" / "dataset"
    images_NHWC, labels = open_images(dataset, "val"), open_labels(dataset, "val", Task.classification)
    for name in names[1::4]:
        image = np.asarray(Image.open(root / "images" / name).resize((24, 16), Image.Resampling.BILINEAR))
        [place] = [number for number, found in enumerate(images_NHWC) if (found == image).all()]
        assert report.classes[labels[place]] == name.partition("/")[0]
    assert len(labels) == 6
    train = open_images(dataset, "train").reshape(-1, 3) / 255
    assert report.mean == pytest.approx(train.mean(axis=0)) and report.std == pytest.approx(train.std(axis=0))
    for name, digest in read_manifest(dataset).files.items():
        assert hashlib.sha256((dataset / name).read_bytes()).hexdigest() == digest
    with pytest.raises(ArtifactError, match=r"split 'val' has no masks, expected them for segmentation"):
        open_labels(dataset, "val", Task.segmentation)


def test_first_images_of_a_split_are_a_sample_of_all_classes(tmp_path: Path) -> None:
    names = [f"{class_}/{number:02}.png" for class_ in "abcdefghijklmnopqrst" for number in range(10)]
    root = image_folder(tmp_path / "mine", names, list("abcdefghijklmnopqrst"))
    config = images_config("class_folder", num_calibration=100)
    run(config, root, tmp_path / "out")
    labels = open_labels(tmp_path / "out" / "dataset", "calibration", Task.classification)
    assert (
        len(set(labels[:32].tolist())) >= 12
    )  # 16 are expected, with a deviation of 1.2; in order of names 2
    run(replace(config, seed=config.seed + 1), root, tmp_path / "other")
    again = open_labels(tmp_path / "other" / "dataset", "calibration", Task.classification)
    assert list(labels) != list(again)


def test_image_of_one_split_that_is_in_another_too_is_counted(tmp_path: Path) -> None:
    root = image_folder(tmp_path / "mine", [f"{number}.png" for number in range(12)])
    for split, listed in (("train", range(6)), ("val", range(6, 9)), ("test", range(9, 12))):
        (root / f"{split}.txt").write_text("\n".join(map(str, listed)), encoding="utf-8")
    shutil.copy(root / "images" / "0.png", root / "images" / "10.png")
    report = run(images_config("images"), root, tmp_path / "out")
    assert report.num_duplicates == 1
    assert any("10.png has the pixels of" in warning for warning in report.warnings)


def test_plain_images_need_no_classes(tmp_path: Path) -> None:
    root = image_folder(tmp_path / "mine", [f"{number}.png" for number in range(12)])
    report = run(images_config("images"), root, tmp_path / "out")
    assert report.classes == () and sum(report.num_images.values()) == 12 + 2
    with pytest.raises(ArtifactError, match=r"split 'val' has no labels"):
        open_labels(tmp_path / "out" / "dataset", "val", Task.classification)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("fox/1.png", r"lies in the folder 'fox', expected images/<class>/ with a class of .*: 'cat', 'dog'"),
        ("1.png", r"lies in no class folder"),
    ],
)
def test_image_outside_the_class_folders_is_refused(tmp_path: Path, name: str, text: str) -> None:
    root = image_folder(
        tmp_path / "mine", [f"cat/{number}.png" for number in range(4)] + [name], ["cat", "dog"]
    )
    with pytest.raises(DataError, match=text):
        run(images_config("class_folder"), root, tmp_path / "out")


def test_unreadable_plain_image_stops_the_run_unless_it_is_allowed(tmp_path: Path) -> None:
    root = image_folder(tmp_path / "mine", [f"{number}.png" for number in range(12)])
    (root / "images" / "3.png").write_bytes(b"\x89PNG\r\n\x1a\n")
    with pytest.raises(UnreadableImage, match=r"3\.png.*max_bad_images = 0"):
        run(images_config("images"), root, tmp_path / "out")
    assert run(images_config("images", max_bad_images=1), root, tmp_path / "again").num_bad_images == 1
