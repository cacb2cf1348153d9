"""Samples of a split: tasks/parts/data/subsets.py."""

from pathlib import Path

import numpy as np
import pytest

from tasks.parts.data.class_table import IGNORE_INDEX
from tasks.parts.data.dataset import open_images
from tasks.parts.data.dataset_writer import SplitBatches, write_dataset
from tasks.parts.data.input_card import Task
from tasks.parts.data.subsets import choose_rows, open_chosen_images


def write_masks(dataset: Path, classes_N: list[list[int]], groups_N: list[int] | None = None) -> Path:
    """Write a split whose images show their number and hold the given classes beside class 0."""
    masks_NHW = np.zeros((len(classes_N), 4, 4), np.uint8)
    for mask_HW, classes in zip(masks_NHW, classes_N, strict=True):
        mask_HW.flat[: len(classes)] = classes
    images_NHWC = np.broadcast_to(
        np.arange(len(classes_N), dtype=np.uint8)[:, None, None, None], (len(classes_N), 4, 4, 3)
    )
    groups = None if groups_N is None else np.array(groups_N, np.int64)
    write_dataset(
        dataset,
        task=Task.segmentation,
        classes=("a", "b", "c", "d"),
        height=4,
        width=4,
        source="test",
        splits={"train": SplitBatches(len(classes_N), [(images_NHWC, masks_NHW)], groups)},
    )
    return dataset


def chosen(dataset: Path, num_images: int | None) -> list[int]:
    """Return the numbers of the images that are chosen."""
    return open_chosen_images(dataset, "train", num_images)[:, 0, 0, 0].tolist()


def test_the_first_images_are_chosen_if_they_show_all_classes(tmp_path: Path) -> None:
    dataset = write_masks(tmp_path / "a", [[1], [2], [1, IGNORE_INDEX], [2], [2], [1]])
    assert choose_rows(dataset, "train", 3) == slice(3)
    assert chosen(dataset, 3) == [0, 1, 2]


@pytest.mark.parametrize("num_images", [None, 6, 99])
def test_all_images_are_chosen_if_so_many_are_wanted(tmp_path: Path, num_images: int | None) -> None:
    dataset = write_masks(tmp_path / "a", [[1], [2], [1], [2], [2], [3]])
    assert choose_rows(dataset, "train", num_images) == slice(None)


def test_rare_classes_take_the_place_of_the_last_images_that_add_none(tmp_path: Path) -> None:
    dataset = write_masks(tmp_path / "a", [[1], [1], [2], [], [1], [], [3], [3], [1]])
    assert chosen(dataset, 4) == [0, 1, 2, 6]
    assert chosen(dataset, 3) == [0, 2, 6]
    assert len(chosen(dataset, 2)) == 2, "there is no room for all classes"


def test_images_of_as_many_groups_as_possible_are_chosen(tmp_path: Path) -> None:
    groups_N = [0] * 6 + [1] * 5 + [2] * 4 + [3]
    dataset = write_masks(tmp_path / "a", [[1, 2]] * 16, groups_N)
    for num_images, expected in ((4, [1, 1, 1, 1]), (3, [1, 1, 1]), (7, [2, 2, 2, 1])):
        numbers = chosen(dataset, num_images)
        assert len(set(numbers)) == num_images
        assert (
            sorted(np.unique([groups_N[n] for n in numbers], return_counts=True)[1], reverse=True) == expected
        )
        assert chosen(dataset, num_images) == numbers
    assert chosen(dataset, 8)[:4] == chosen(dataset, 4), "a part of a sample is a sample"
    assert chosen(dataset, 4) != [0, 6, 11, 15], "windows are not always those at the top"


@pytest.mark.parametrize("seed", range(30))
def test_samples_show_every_class_whenever_the_first_images_could(tmp_path: Path, seed: int) -> None:
    random = np.random.default_rng(seed)
    classes_N = [
        random.choice(4, random.integers(1, 4), p=(0.6, 0.3, 0.08, 0.02)).tolist() for _ in range(60)
    ]
    groups_N = random.integers(0, 12, 60).tolist() if seed % 2 else None
    dataset = write_masks(tmp_path / "a", classes_N, groups_N)
    present = {0, *(index for classes in classes_N for index in classes)}
    numbers = chosen(dataset, 8)
    assert len(set(numbers)) == 8
    assert {0, *(index for number in numbers for index in classes_N[number])} == present


def test_images_without_labels_are_the_first_ones(tmp_path: Path) -> None:
    images_NHWC = np.zeros((5, 4, 4, 3), np.uint8)
    write_dataset(
        tmp_path / "a",
        task=None,
        classes=(),
        height=4,
        width=4,
        source="test",
        splits={"train": SplitBatches(5, [(images_NHWC, None)])},
    )
    assert choose_rows(tmp_path / "a", "train", 2) == slice(2)
    assert len(open_images(tmp_path / "a", "train")) == 5


def test_classes_of_images_are_shown_too(tmp_path: Path) -> None:
    images_NHWC, labels_N = np.zeros((6, 4, 4, 3), np.uint8), np.array([0, 0, 0, 1, 0, 2], np.uint16)
    write_dataset(
        tmp_path / "a",
        task=Task.classification,
        classes=("a", "b", "c"),
        height=4,
        width=4,
        source="test",
        splits={"train": SplitBatches(6, [(images_NHWC, labels_N)])},
    )
    assert np.array(choose_rows(tmp_path / "a", "train", 3)).tolist() == [0, 3, 5]
