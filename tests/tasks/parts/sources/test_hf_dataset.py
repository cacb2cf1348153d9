"""prepare_data on Hugging Face data sets on disk: Arrow files as save_to_disk writes them, and Parquet."""

import csv
import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import tifffile
from PIL import Image

from tasks.core.errors import ConfigError, DataError
from tasks.parts.data.class_table import IGNORE_INDEX
from tasks.parts.data.dataset import open_split, read_manifest
from tasks.parts.data.image_files import UnreadableImage
from tasks.parts.sources.stored_values import DeepValues
from tasks.prepare_data import environment
from tests.tasks.parts.sources.runs import HEIGHT, WIDTH, config_of, fails, halves, masks_of, run

IMAGE = pa.struct([("bytes", pa.binary()), ("path", pa.string())])


def png(content: np.ndarray) -> bytes:
    file = io.BytesIO()
    Image.fromarray(content).save(file, format="PNG")
    return file.getvalue()


def picture(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(256, size=(HEIGHT, WIDTH, 3)).astype(np.uint8)


def table_of(seeds: range, mask_column: str = "label") -> pa.Table:
    """Make a table of images, masks of the values 0 and 1 with a row of 255, and a scene that is no mask."""
    mask = halves(0, 1)
    mask[0] = 255
    columns = {
        "image": pa.array([{"bytes": png(picture(seed)), "path": f"{seed}.png"} for seed in seeds], IMAGE),
        mask_column: pa.array([{"bytes": png(mask), "path": None} for _ in seeds], IMAGE),
        "scene": pa.array([seed % 3 for seed in seeds], pa.int64()),
    }
    return pa.table(columns)


def save_arrow(folder: Path, tables: list[pa.Table]) -> None:
    """Write the files of a Dataset as save_to_disk does: Arrow streams and a state.json that names them."""
    folder.mkdir(parents=True)
    names = [f"data-{number:05}-of-{len(tables):05}.arrow" for number in range(len(tables))]
    for name, table in zip(names, tables, strict=True):
        with pa.OSFile(str(folder / name), "wb") as file, pa.ipc.new_stream(file, table.schema) as stream:
            stream.write_table(table, max_chunksize=2)
    state = {"_data_files": [{"filename": name} for name in names], "_split": None, "_format_type": None}
    (folder / "state.json").write_text(json.dumps(state))
    (folder / "dataset_info.json").write_text(json.dumps({"features": {}}))


def save_parquet(file: Path, table: pa.Table) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(table, file, row_group_size=3)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    root = tmp_path / "mine"
    root.mkdir()
    (root / "classes.yaml").write_text("{0: road, 1: car, ignore_index: 255}\n")
    return root


@pytest.fixture
def arrow(root: Path) -> Path:
    """Make a DatasetDict of eight rows for train, in two files, and two for validation."""
    (root / "dataset_dict.json").write_text('{"splits": ["train", "validation"]}')
    save_arrow(root / "train", [table_of(range(5)), table_of(range(5, 8))])
    save_arrow(root / "validation", [table_of(range(8, 10))])
    return root


def check(out: Path, split: str, seeds: range) -> None:
    """Check that a split holds these images with their masks."""
    masks = masks_of(out, split)
    assert set(masks) == {picture(seed).tobytes() for seed in seeds}
    for mask in masks.values():
        assert (mask[0] == IGNORE_INDEX).all()
        assert (mask[1:, :12] == 0).all() and (mask[1:, 12:] == 1).all()


def test_saved_data_set_is_read_and_validation_is_test(arrow: Path, tmp_path: Path) -> None:
    report = run("hf_dataset", arrow, tmp_path / "out")
    assert report.num_images == {"train": 7, "val": 1, "test": 2, "calibration": 2}
    check(tmp_path / "out", "test", range(8, 10))


def test_three_splits_stay_as_they_are(root: Path, tmp_path: Path) -> None:
    for split, seeds in (("train", range(5)), ("valid", range(5, 7)), ("test", range(7, 10))):
        save_parquet(root / f"data/{split}-00000-of-00001.parquet", table_of(seeds))
    run("hf_dataset", root, tmp_path / "out")
    for split, seeds in (("train", range(5)), ("val", range(5, 7)), ("test", range(7, 10))):
        check(tmp_path / "out", split, seeds)


def test_parquet_in_folders_of_splits_is_read(root: Path, tmp_path: Path) -> None:
    save_parquet(root / "default/train/0000.parquet", table_of(range(5)))
    save_parquet(root / "default/train/0001.parquet", table_of(range(5, 8)))
    save_parquet(root / "default/validation/0000.parquet", table_of(range(8, 10)))
    report = run("hf_dataset", root, tmp_path / "out")
    assert report.num_images["train"] + report.num_images["val"] == 8
    check(tmp_path / "out", "test", range(8, 10))


@pytest.mark.parametrize(
    ("splits", "match"),
    [
        (
            ("train", "holdout"),
            r"the splits train, holdout, of which holdout is no known name; expected one each",
        ),
        (("train", "unsupervised", "test"), r"of which unsupervised is no known name"),
        (
            ("train", "val", "validation", "test"),
            r"the splits train, val, validation, test, of which val and validation both stand for 'val'",
        ),
        (("Train", "train", "test"), r"of which Train and train both stand for 'train'"),
    ],
)
def test_splits_that_are_not_known_or_the_same_are_refused(
    root: Path, tmp_path: Path, splits: tuple[str, ...], match: str
) -> None:
    (root / "dataset_dict.json").write_text(json.dumps({"splits": splits}))
    for number, split in enumerate(splits):
        save_arrow(root / split, [table_of(range(8 * number, 8 * number + 8))])
    fails("hf_dataset", root, tmp_path / "out", match, DataError)


@pytest.mark.parametrize("names", [("train", "testing"), ("Train", "Test")])
def test_official_test_rows_do_not_reach_train(root: Path, tmp_path: Path, names: tuple[str, str]) -> None:
    (root / "dataset_dict.json").write_text(json.dumps({"splits": names}))
    save_arrow(root / names[0], [table_of(range(8))])
    save_arrow(root / names[1], [table_of(range(8, 10))])
    run("hf_dataset", root, tmp_path / "out")
    check(tmp_path / "out", "test", range(8, 10))


@pytest.mark.parametrize(
    ("train", "test"),
    [
        ("ade_train.parquet", "ade_test.parquet"),
        ("Train.parquet", "TESTING-00000-of-00001.parquet"),
        ("Train/0000.parquet", "Test/0000.parquet"),
    ],
)
def test_parquet_names_its_split_anywhere(root: Path, tmp_path: Path, train: str, test: str) -> None:
    save_parquet(root / train, table_of(range(8)))
    save_parquet(root / test, table_of(range(8, 10)))
    run("hf_dataset", root, tmp_path / "out")
    check(tmp_path / "out", "test", range(8, 10))


@pytest.mark.parametrize(
    ("first", "second", "match"),
    [
        ("train.parquet", "holdout.parquet", r"of which holdout\.parquet is no known name"),
        (
            "street-00.parquet",
            "field-00.parquet",
            r"the splits field-\*\.parquet, street-\*\.parquet, of which",
        ),
        ("dev/ade_train.parquet", "dev/ade_test.parquet", r"of which dev/ade_test\.parquet is no known name"),
    ],
)
def test_parquet_of_no_known_split_is_refused(
    root: Path, tmp_path: Path, first: str, second: str, match: str
) -> None:
    save_parquet(root / first, table_of(range(8)))
    save_parquet(root / second, table_of(range(8, 16)))
    fails("hf_dataset", root, tmp_path / "out", match, DataError)


def test_numbered_parquet_of_no_split_is_divided(root: Path, tmp_path: Path) -> None:
    for number in range(2):
        save_parquet(
            root / f"data/part-{number:05}-of-00002.parquet", table_of(range(5 * number, 5 * number + 5))
        )
    assert run("hf_dataset", root, tmp_path / "out").num_images["train"] == 7


@pytest.mark.parametrize("form", ["arrow", "parquet"])
def test_test_split_without_rows_is_left_out(root: Path, tmp_path: Path, form: str) -> None:
    for split, seeds in (("train", range(8)), ("validation", range(8, 10)), ("test", range(0))):
        if form == "arrow":
            save_arrow(root / split, [table_of(seeds)])
        else:
            save_parquet(root / f"{split}.parquet", table_of(seeds))
    if form == "arrow":
        (root / "dataset_dict.json").write_text('{"splits": ["train", "validation", "test"]}')
    report = run("hf_dataset", root, tmp_path / "out")
    assert any("the test split of" in warning for warning in report.warnings)
    check(tmp_path / "out", "test", range(8, 10))


@pytest.mark.parametrize("form", ["arrow", "parquet"])
def test_rows_of_one_split_are_divided(root: Path, tmp_path: Path, form: str) -> None:
    if form == "arrow":
        save_arrow(tmp_path / "saved", [table_of(range(10))])
        for path in (tmp_path / "saved").iterdir():
            path.rename(root / path.name)
    else:
        save_parquet(root / "train.parquet", table_of(range(10)))
    assert run("hf_dataset", root, tmp_path / "out").num_images == {
        "train": 7,
        "val": 1,
        "test": 2,
        "calibration": 2,
    }


def test_plain_bytes_and_paths_inside_the_root_are_images_too(root: Path, tmp_path: Path) -> None:
    table = table_of(range(10))
    (root / "files").mkdir()
    paths = []
    for seed in range(10):
        (root / f"files/{seed}.png").write_bytes(png(picture(seed)))
        paths.append({"bytes": None, "path": f"files/{seed}.png"})
    table = table.set_column(0, "image", pa.array(paths, IMAGE))
    masks = pa.array([cell["bytes"] for cell in table["label"].to_pylist()], pa.binary())
    save_parquet(root / "train.parquet", table.set_column(1, "label", masks))
    report = run("hf_dataset", root, tmp_path / "out")
    assert sum(report.num_images[split] for split in ("train", "val", "test")) == 10


def test_columns_are_chosen_by_name(root: Path, tmp_path: Path) -> None:
    save_parquet(root / "train.parquet", table_of(range(10), "parts"))
    fails(
        "hf_dataset",
        root,
        tmp_path / "none",
        r"the mask column named mask, .* is missing\. It has image \(struct.*parts.*folder\.columns\.mask",
        DataError,
    )
    run("hf_dataset", root, tmp_path / "out", columns={"image": "image", "mask": "parts"})


@pytest.mark.parametrize(
    ("column", "match"),
    [
        ("nothing", r"the mask column 'nothing' is missing"),
        ("scene", r"the mask column 'scene' is no column of images"),
    ],
)
def test_wrong_column_is_named(arrow: Path, tmp_path: Path, column: str, match: str) -> None:
    fails("hf_dataset", arrow, tmp_path / "out", match, DataError, columns={"image": None, "mask": column})


def test_several_columns_of_usual_names_need_a_choice(root: Path, tmp_path: Path) -> None:
    table = table_of(range(10))
    save_parquet(root / "train.parquet", table.append_column("annotation", table["label"]))
    fails("hf_dataset", root, tmp_path / "none", r"columns\.mask is null, .*label, annotation", ConfigError)
    run("hf_dataset", root, tmp_path / "out", columns={"image": None, "mask": "annotation"})


def test_number_of_a_class_beside_the_mask_is_no_mask(root: Path, tmp_path: Path) -> None:
    table = table_of(range(10), "annotation").rename_columns(["image", "annotation", "label"])
    save_parquet(root / "train.parquet", table)
    assert run("hf_dataset", root, tmp_path / "out").num_images["test"] == 2


def test_test_split_without_masks_is_left_out(root: Path, tmp_path: Path) -> None:
    for split, seeds in (("train", range(8)), ("validation", range(8, 10)), ("test", range(10, 12))):
        table = table_of(seeds)
        if split == "test":
            empty: list[Any] = [None, {"bytes": None, "path": None}]
            table = table.set_column(1, "label", pa.array(empty, IMAGE))
        save_parquet(root / f"{split}.parquet", table)
    report = run("hf_dataset", root, tmp_path / "out")
    assert any("the test split of" in warning for warning in report.warnings)
    check(tmp_path / "out", "test", range(8, 10))


def test_row_without_mask_is_named(root: Path, tmp_path: Path) -> None:
    table = table_of(range(10))
    cells = table["label"].to_pylist()
    cells[4] = None
    save_parquet(root / "train.parquet", table.set_column(1, "label", pa.array(cells, IMAGE)))
    fails(
        "hf_dataset", root, tmp_path / "out", r"1 image\(s\) have no mask, .*train\.parquet: row 4 of column"
    )
    counts = run("hf_dataset", root, tmp_path / "skip", missing_masks="skip").num_images
    assert counts["train"] + counts["val"] + counts["test"] == 9


def test_row_that_is_no_image_is_named_and_can_be_skipped(root: Path, tmp_path: Path) -> None:
    table = table_of(range(10))
    cells = table["image"].to_pylist()
    cells[4]["bytes"] = b"\x89PNG\r\n\x1a\n"
    save_parquet(root / "train.parquet", table.set_column(0, "image", pa.array(cells, IMAGE)))
    match = r"train\.parquet: row 4 of column 'image': cannot be decoded.*max_bad_images = 0"
    fails("hf_dataset", root, tmp_path / "out", match, UnreadableImage)
    assert run("hf_dataset", root, tmp_path / "again", max_bad_images=1).num_bad_images == 1


@pytest.mark.parametrize("path", ["../secret.png", "/etc/passwd"])
def test_path_outside_the_root_is_refused(root: Path, tmp_path: Path, path: str) -> None:
    table = table_of(range(10))
    cells = [*table["image"].to_pylist()[:9], {"bytes": None, "path": path}]
    save_parquet(root / "train.parquet", table.set_column(0, "image", pa.array(cells, IMAGE)))
    fails("hf_dataset", root, tmp_path / "out", r"is refused", DataError)


@pytest.mark.parametrize("content", [b"", b"PAR1 and no more", b"<html>not found</html>"])
def test_unreadable_parquet_is_named(root: Path, tmp_path: Path, content: bytes) -> None:
    save_parquet(root / "train.parquet", table_of(range(8)))
    (root / "validation.parquet").write_bytes(content)
    fails("hf_dataset", root, tmp_path / "out", r"validation\.parquet: cannot be read as parquet", DataError)


def test_unreadable_arrow_is_named(arrow: Path, tmp_path: Path) -> None:
    path = arrow / "validation/data-00000-of-00001.arrow"
    path.write_bytes(path.read_bytes()[:200])
    fails("hf_dataset", arrow, tmp_path / "out", r"of-00001\.arrow: cannot be read as arrow", DataError)


@pytest.mark.parametrize(
    ("file", "content", "match"),
    [
        ("dataset_dict.json", "{", r"dataset_dict\.json: not valid JSON"),
        ("dataset_dict.json", "{}", r"dataset_dict\.json: has no list 'splits'"),
        ("dataset_dict.json", '{"splits": ["train", "tset"]}', r"tset/state\.json: not found"),
        ("dataset_dict.json", '{"splits": ["../x"]}', r"'\.\./x' is refused"),
        ("train/state.json", '{"_data_files": [{}]}', r"state\.json: _data_files holds .* expected filename"),
        ("train/state.json", '{"_data_files": [{"filename": "x.arrow"}]}', r"names x\.arrow, but"),
    ],
)
def test_broken_json_is_named(arrow: Path, tmp_path: Path, file: str, content: str, match: str) -> None:
    (arrow / file).write_text(content)
    fails("hf_dataset", arrow, tmp_path / "out", match, DataError)


def test_folder_without_tables_is_named(root: Path, tmp_path: Path) -> None:
    fails("hf_dataset", root, tmp_path / "out", r"holds no dataset_dict\.json, state\.json or \*\.parquet")


def test_environment_names_pyarrow_for_these_data_sets_only() -> None:
    assert "pyarrow" in environment(config_of("hf_dataset"))
    assert "pyarrow" not in environment(config_of("folder"))


@pytest.mark.parametrize("bands", [1, 3])
def test_tiff_of_many_bits_inside_a_table_is_scaled_and_not_cut_to_its_high_byte_c4(
    root: Path, tmp_path: Path, bands: int
) -> None:
    def tiff(seed: int) -> bytes:
        content = np.random.default_rng(seed).integers(4096, size=(HEIGHT, WIDTH, bands)).astype(np.uint16)
        file = io.BytesIO()
        tifffile.imwrite(file, content.squeeze(), photometric="rgb" if bands == 3 else "minisblack")
        return file.getvalue()

    table = table_of(range(10))
    images = pa.array([{"bytes": tiff(seed), "path": None} for seed in range(10)], IMAGE)
    save_parquet(root / "train.parquet", table.set_column(0, "image", images))
    fails("hf_dataset", root, tmp_path / "refused", r"value_range=\[0, 4095\]", DeepValues, channels=bands)
    run("hf_dataset", root, tmp_path / "out", channels=bands, value_range=[0, 4095])
    assert read_manifest(tmp_path / "out/dataset").reading.types == ("uint16",)
    images_NHWC, _ = open_split(tmp_path / "out/dataset", "train")
    assert images_NHWC.max() > 240


def test_table_names_rows_by_their_place_below_the_root_c3(arrow: Path, tmp_path: Path) -> None:
    run("hf_dataset", arrow, tmp_path / "out")
    with (tmp_path / "out/splits.csv").open(newline="") as file:
        paths = [row["path"] for row in csv.DictReader(file)]
    assert "train/data-00000-of-00002.arrow: row 0 of column 'image'" in paths
    assert not any(str(tmp_path) in path for path in paths)
