"""prepare_data without a copy: lists of files, and arrays that are read from them."""

import json
import os
import pickle
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from PIL import Image
from torch import nn

from tasks.core.config import typed_config
from tasks.core.errors import ArtifactError, ConfigError
from tasks.core.fingerprint import digest
from tasks.parts.data import source_files
from tasks.parts.data.class_table import ClassTable, StoredMask
from tasks.parts.data.dataset import open_groups, open_images, open_labels, open_split, read_manifest
from tasks.parts.data.dataset_writer import write_chosen_images
from tasks.parts.data.input_card import Task
from tasks.parts.data.subsets import choose_rows
from tasks.parts.sources.batches import refuse_embedded
from tasks.parts.sources.pairs import Listing, Pair
from tasks.parts.training.loop import train_network
from tasks.parts.training.losses import LabelLoss
from tasks.parts.training.module import LabelObjective
from tasks.prepare_data import Config, prepare_data
from tests.conftest import REPOSITORY
from tests.tasks.parts.sources.runs import config_of, write_image
from tests.tasks.parts.sources.test_windowed_splits import NAMES, write_folder
from tests.tasks.test_train import PLAIN, TRAINER

SPLITS = ("train", "val", "test", "calibration")


def prepare(root: Path, out: Path, *, copy: bool, **changes: object) -> Path:
    """Run the stage and return its data set."""
    out.mkdir()
    prepare_data(replace(config_of("folder", **changes), copy=copy), root=root, out=out)
    return out / "dataset"


@pytest.fixture(params=["resize", "crop", "windows"])
def changes(request: pytest.FixtureRequest) -> dict[str, object]:
    """Each way to bring images to one size."""
    return {"resize_mode": request.param, "window_overlap": 6}


def test_listed_data_is_what_a_copy_holds(tmp_path: Path, changes: dict[str, object]) -> None:
    write_folder(tmp_path / "root", smallest=(12, 20))
    copied = prepare(tmp_path / "root", tmp_path / "copied", copy=True, **changes)
    listed = prepare(tmp_path / "root", tmp_path / "listed", copy=False, **changes)
    for split in SPLITS:
        for lazy, array in zip(open_split(listed, split), open_split(copied, split), strict=True):
            assert (lazy.shape, lazy.dtype) == (array.shape, array.dtype)
            np.testing.assert_array_equal(lazy[:], array)
            np.testing.assert_array_equal(lazy[::-1][:3], array[::-1][:3])
        np.testing.assert_array_equal(open_groups(listed, split), open_groups(copied, split))
    one, two = read_manifest(copied), read_manifest(listed)
    assert (one.mean, one.std, one.pixel_share, one.counts) == (
        two.mean,
        two.std,
        two.pixel_share,
        two.counts,
    )
    names = {path.name for path in listed.iterdir()}
    assert names - {f"{split}_groups.npy" for split in SPLITS} == {
        "manifest.json",
        "reading.json",
        *(f"{split}_files.csv" for split in ("train", "val", "test")),
        "calibration_images.npy",
        "calibration_masks.npy",
    }
    assert set(two.files) == names - {"manifest.json"}


def test_a_file_that_changed_or_is_gone_is_named_when_it_is_read(tmp_path: Path) -> None:
    write_folder(tmp_path / "root", smallest=(16, 24))
    dataset = prepare(tmp_path / "root", tmp_path / "out", copy=False)
    images_NHWC, masks_NHW = open_split(dataset, "val")
    for path in (tmp_path / "root/images").iterdir():
        path.write_bytes(path.read_bytes() + b"\0")  # a decoder would not see it
    for path in (tmp_path / "root/masks").iterdir():
        path.unlink()
    with pytest.raises(
        ArtifactError, match=r"image\d\d\.png: changed since prepare_data read it.*run prepare_data again"
    ):
        images_NHWC[0]
    with pytest.raises(
        ArtifactError, match=r"masks/image\d\d\.png: cannot be read.*prepare_data\.copy=false"
    ):
        masks_NHW[:2]


def test_a_changed_source_changes_the_data_set_and_an_equal_one_does_not(tmp_path: Path) -> None:
    content = write_folder(tmp_path / "root", smallest=(16, 24))
    first = prepare(tmp_path / "root", tmp_path / "first", copy=False)
    again = prepare(tmp_path / "root", tmp_path / "again", copy=False)
    assert digest(first) == digest(again)
    path = tmp_path / f"root/masks/{NAMES[0]}.png"
    Image.fromarray(content[NAMES[0]][1]).save(path, compress_level=0)  # the same pixels in another file
    assert digest(prepare(tmp_path / "root", tmp_path / "other", copy=False)) != digest(first)


def test_arrays_are_pickled_as_paths_and_read_in_another_process(tmp_path: Path) -> None:
    write_folder(tmp_path / "root", smallest=(16, 24))
    dataset = prepare(tmp_path / "root", tmp_path / "out", copy=False)
    arrays = open_split(dataset, "train")
    expected = [array[:].tolist() for array in arrays]  # what was decoded is not pickled
    file = tmp_path / "arrays.pickle"
    file.write_bytes(pickle.dumps(arrays))
    assert file.stat().st_size < 2000
    program = (
        "import pickle, sys, json; arrays = pickle.load(open(sys.argv[1], 'rb')); "
        "print(json.dumps([array[:].tolist() for array in arrays]))"
    )
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY)}
    done = subprocess.run(
        [sys.executable, "-c", program, str(file)],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    assert json.loads(done.stdout) == expected


def test_few_decoded_files_are_kept_and_only_while_windows_follow_each_other(tmp_path: Path) -> None:
    write_folder(tmp_path / "root", smallest=(16, 24))
    whole = source_files.open_reader(prepare(tmp_path / "root", tmp_path / "whole", copy=False), "test")
    whole.images(range(5))
    assert not whole._kept
    windows = {"resize_mode": "windows", "window_overlap": 6}
    dataset = prepare(tmp_path / "root", tmp_path / "windows", copy=False, **windows)
    reader = source_files.open_reader(dataset, "test")
    reader.images(range(len(reader)))
    assert len(reader._kept) == 5
    size = max(kept.nbytes for kept in reader._kept.values())
    small = source_files.FileReader(reader._rules, reader._rows, max_kept_bytes=2 * size)
    small.images(range(len(reader)))
    assert 0 < sum(kept.nbytes for kept in small._kept.values()) <= 2 * size


def test_a_smaller_data_set_is_copied_from_listed_files(tmp_path: Path) -> None:
    write_folder(tmp_path / "root", smallest=(16, 24))
    dataset = prepare(tmp_path / "root", tmp_path / "out", copy=False)
    write_chosen_images(dataset, tmp_path / "small", {"train": 2, "val": 1})
    np.testing.assert_array_equal(open_images(tmp_path / "small", "train"), open_images(dataset, "train")[:2])


def test_a_damaged_list_is_refused(tmp_path: Path) -> None:
    write_folder(tmp_path / "root", smallest=(16, 24))
    dataset = prepare(tmp_path / "root", tmp_path / "out", copy=False)
    lines = (dataset / "test_files.csv").read_text().splitlines()
    (dataset / "test_files.csv").write_text("\n".join(lines[:-1]))
    with pytest.raises(ArtifactError, match=r"test_files\.csv: lists 4 images, the manifest says 5"):
        open_images(dataset, "test")
    (dataset / "test_files.csv").write_text("nothing,of,it\n1,2,3\n")
    with pytest.raises(
        ArtifactError, match=r"the list of files of 'test' cannot be read.*Run prepare_data again"
    ):
        open_images(dataset, "test")


def test_sources_without_files_are_refused() -> None:
    content = yaml.safe_load((REPOSITORY / "conf/data/digit_scenes.yaml").read_text()) | {"copy": False}
    with pytest.raises(ConfigError, match=r"prepare_data\.copy is false, and source is digit_scenes"):
        typed_config(Config, content, "prepare_data")


def test_a_training_on_listed_data_gives_the_weights_of_one_on_a_copy(tmp_path: Path) -> None:
    write_folder(tmp_path / "root", smallest=(16, 24))
    weights = []
    for copy in (True, False):
        dataset = prepare(tmp_path / "root", tmp_path / str(copy), copy=copy)
        torch.manual_seed(0)
        network = nn.Conv2d(3, 3, 3, padding=1)
        network.feature_layer = None
        config = replace(TRAINER, max_epochs=1, batch_size=2)
        train_network(
            network,
            LabelObjective(LabelLoss(PLAIN, torch.ones(3))),
            data=dataset,
            config=config,
            out=tmp_path / str(copy),
        )
        weights.append(network.state_dict())
    assert all(torch.equal(value, weights[1][name]) for name, value in weights[0].items())


def test_masks_inside_a_larger_file_are_refused_before_anything_is_read(tmp_path: Path) -> None:
    listing = Listing(
        ClassTable(("a", "b"), "test", ((0,), (1,))), (Pair("one", tmp_path / "one.png", InLargerFile()),)
    )
    with pytest.raises(
        ConfigError, match=r"copy is false, and .*one\.png or its mask \(part 3 of all\.json\) is no file"
    ):
        refuse_embedded(listing)


class InLargerFile:
    """A mask that is drawn from what a larger file says."""

    def __str__(self) -> str:
        return "part 3 of all.json"

    def read(self, table: ClassTable, *, max_pixels: int) -> StoredMask:
        raise NotImplementedError


@pytest.mark.parametrize("source", ["class_folder", "images"])
def test_images_without_masks_are_listed_and_their_labels_copied(tmp_path: Path, source: str) -> None:
    for number in range(20):
        write_image(tmp_path / f"root/images/{'cat' if number % 2 else 'dog'}/{number}.png", number)
    if source == "class_folder":
        (tmp_path / "root/classes.yaml").write_text("classes: [cat, dog]\n", encoding="utf-8")
    datasets = []
    for copy in (True, False):
        (tmp_path / str(copy)).mkdir()
        config = replace(config_of(source, groups="none"), copy=copy, height=20, width=20)
        prepare_data(config, root=tmp_path / "root", out=tmp_path / str(copy))
        datasets.append(tmp_path / str(copy) / "dataset")
    copied, listed = datasets
    assert not (listed / "train_images.npy").exists()
    one, two = read_manifest(copied), read_manifest(listed)
    assert (one.mean, one.std, one.pixel_share, one.counts) == (
        two.mean,
        two.std,
        two.pixel_share,
        two.counts,
    )
    for split in SPLITS:
        np.testing.assert_array_equal(open_images(listed, split)[:], open_images(copied, split))
        with pytest.raises(ArtifactError, match=r"has no masks, expected them for segmentation"):
            open_labels(listed, split, Task.segmentation)
        if source == "class_folder":
            labels = open_labels(listed, split, Task.classification)
            np.testing.assert_array_equal(labels, open_labels(copied, split, Task.classification))
            choose_rows(listed, split, 2)
