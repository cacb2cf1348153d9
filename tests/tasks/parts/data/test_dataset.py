"""tasks/parts/data/dataset.py: the layout that every stage reads."""

import hashlib
import json
from pathlib import Path

import numpy as np
import pytest

from tasks.core.errors import ArtifactError, DataError
from tasks.parts.data.class_table import IGNORE_INDEX
from tasks.parts.data.dataset import Manifest, normalise, open_split, read_manifest
from tasks.parts.data.dataset_writer import SplitBatches, batches_of, write_chosen_images, write_dataset
from tasks.parts.data.input_card import Task


@pytest.fixture
def arrays() -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    masks = rng.integers(2, size=(5, 6, 8)).astype(np.uint8)
    masks[0, 0] = IGNORE_INDEX
    return rng.integers(256, size=(5, 6, 8, 3)).astype(np.uint8), masks


def write(dataset: Path, arrays: tuple[np.ndarray, np.ndarray]) -> Manifest:
    splits = {split: SplitBatches(5, batches_of(*arrays, size=2)) for split in ("train", "val")}
    return write_dataset(
        dataset,
        task=Task.segmentation,
        classes=("a", "bé"),
        height=6,
        width=8,
        source="test",
        splits=splits,
    )


def test_written_data_set_is_read_back(tmp_path: Path, arrays: tuple[np.ndarray, np.ndarray]) -> None:
    manifest = write(tmp_path / "dataset", arrays)
    assert read_manifest(tmp_path / "dataset") == manifest
    images, masks = open_split(tmp_path / "dataset", "val")
    assert isinstance(images, np.memmap)
    assert (images == arrays[0]).all()
    assert (masks == arrays[1]).all()


def test_manifest_numbers_equal_numpy(tmp_path: Path, arrays: tuple[np.ndarray, np.ndarray]) -> None:
    manifest = write(tmp_path / "dataset", arrays)
    scaled = arrays[0].astype(np.float64) / 255
    assert manifest.mean == pytest.approx(scaled.mean(axis=(0, 1, 2)))
    assert manifest.std == pytest.approx(scaled.std(axis=(0, 1, 2)))
    counted = arrays[1][arrays[1] != IGNORE_INDEX]
    assert manifest.pixel_share["train"] == pytest.approx(((counted == 0).mean(), (counted == 1).mean()))
    for name, digest in manifest.files.items():
        assert hashlib.sha256((tmp_path / "dataset" / name).read_bytes()).hexdigest() == digest


def test_chosen_images_are_a_data_set_with_the_mean_of_the_whole(
    tmp_path: Path, arrays: tuple[np.ndarray, np.ndarray]
) -> None:
    whole = write(tmp_path / "dataset", arrays)
    part = write_chosen_images(tmp_path / "dataset", tmp_path / "part", {"train": 2, "val": 99})
    assert part == read_manifest(tmp_path / "part")
    assert part.counts == {"train": 2, "val": 5}
    assert (part.mean, part.std, part.classes) == (whole.mean, whole.std, whole.classes)
    images, masks = open_split(tmp_path / "part", "train")
    assert (images == arrays[0][:2]).all() and (masks == arrays[1][:2]).all()
    counted = masks[masks != IGNORE_INDEX]
    assert part.pixel_share["train"] == pytest.approx(((counted == 0).mean(), (counted == 1).mean()))


def test_all_pixels_ignored_gives_no_share_and_no_nan(tmp_path: Path) -> None:
    images, masks = np.zeros((1, 4, 4, 3), np.uint8), np.full((1, 4, 4), IGNORE_INDEX, np.uint8)
    splits = {"train": SplitBatches(1, [(images, masks)])}
    manifest = write_dataset(
        tmp_path / "d",
        task=Task.segmentation,
        classes=("a", "b"),
        height=4,
        width=4,
        source="test",
        splits=splits,
    )
    assert manifest.pixel_share == {"train": (0.0, 0.0)}
    assert np.isfinite(normalise(images, manifest.mean, manifest.std)).all()


def test_label_outside_the_classes_is_refused(tmp_path: Path) -> None:
    batch = np.zeros((1, 4, 4, 3), np.uint8), np.full((1, 4, 4), 9, np.uint8)
    with pytest.raises(DataError, match=r"labels \[9\] outside the 2 classes"):
        write_dataset(
            tmp_path / "d",
            task=Task.segmentation,
            classes=("a", "b"),
            height=4,
            width=4,
            source="test",
            splits={"train": SplitBatches(1, [batch])},
        )


def test_normalise_equals_the_formula() -> None:
    images = np.random.default_rng(0).integers(256, size=(2, 3, 5, 3)).astype(np.uint8)
    mean, std = (0.4, 0.5, 0.6), (0.1, 0.2, 0.3)
    result = normalise(images, mean, std)
    expected = ((images / 255.0 - np.array(mean)) / np.array(std)).transpose(0, 3, 1, 2)
    assert result.dtype == np.float32
    assert result.flags.c_contiguous
    np.testing.assert_allclose(result, expected, atol=1e-5)


def test_missing_data_set_names_the_stage_to_run(tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match=r"manifest.json: not found.*Run prepare_data"):
        read_manifest(tmp_path)


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"classes": 3}', '{"classes": ["a"], "height": "x"}'])
def test_damaged_manifest_is_named(tmp_path: Path, content: str) -> None:
    (tmp_path / "manifest.json").write_text(content)
    with pytest.raises(ArtifactError, match=r"manifest.json: damaged"):
        read_manifest(tmp_path)


@pytest.mark.parametrize("kept_bytes", [0, 40, 300])
def test_truncated_array_is_named(
    tmp_path: Path, arrays: tuple[np.ndarray, np.ndarray], kept_bytes: int
) -> None:
    write(tmp_path / "d", arrays)
    path = tmp_path / "d" / "val_images.npy"
    path.write_bytes(path.read_bytes()[:kept_bytes])
    with pytest.raises(ArtifactError, match=r"val_images\.npy: cannot be read"):
        open_split(tmp_path / "d", "val")


def test_array_that_contradicts_the_manifest_is_refused(
    tmp_path: Path, arrays: tuple[np.ndarray, np.ndarray]
) -> None:
    write(tmp_path / "d", arrays)
    fields = json.loads((tmp_path / "d" / "manifest.json").read_text())
    fields["height"] = 7
    (tmp_path / "d" / "manifest.json").write_text(json.dumps(fields))
    with pytest.raises(ArtifactError, match=r"\(5, 6, 8, 3\), the manifest says uint8 \(5, 7, 8, 3\)"):
        open_split(tmp_path / "d", "train")


def test_unknown_split_lists_the_known_ones(tmp_path: Path, arrays: tuple[np.ndarray, np.ndarray]) -> None:
    write(tmp_path / "d", arrays)
    with pytest.raises(ArtifactError, match=r"no split 'test'. Found: train, val"):
        open_split(tmp_path / "d", "test")
