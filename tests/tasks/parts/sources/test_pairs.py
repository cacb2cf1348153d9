"""Checks of the pairs that any layout lists."""

from dataclasses import replace
from pathlib import Path

import pytest

from tasks.core.errors import DataError
from tasks.parts.data.class_table import ClassTable
from tasks.parts.data.masks import MaskFile
from tasks.parts.sources.config import FolderConfig
from tasks.parts.sources.pairs import Listing, Pair, check_pairs
from tests.tasks.parts.sources.runs import config_of, halves, write_image, write_mask

TABLE = ClassTable(("a", "b"), "test", ((0,), (1,)))


@pytest.fixture
def config() -> FolderConfig:
    folder = config_of("folder").folder
    assert folder is not None
    return folder


@pytest.fixture
def pairs(tmp_path: Path) -> tuple[Pair, ...]:
    """Make ten images with their masks."""
    for number in range(10):
        write_image(tmp_path / f"{number}.png", number)
        write_mask(tmp_path / f"{number}-mask.png", halves(0, 1))
    return tuple(
        Pair(str(number), tmp_path / f"{number}.png", MaskFile(tmp_path / f"{number}-mask.png"))
        for number in range(10)
    )


def test_two_pairs_of_one_name_are_refused(
    tmp_path: Path, pairs: tuple[Pair, ...], config: FolderConfig
) -> None:
    twice = (*pairs, Pair("3", pairs[4].image, pairs[4].mask))
    with pytest.raises(DataError, match=r"'3' is the name of .*/3\.png and of .*/4\.png.*Rename or remove"):
        check_pairs(tmp_path, Listing(TABLE, twice), config, seed=0)


def test_calibration_list_alone_keeps_official_splits(
    tmp_path: Path, pairs: tuple[Pair, ...], config: FolderConfig
) -> None:
    (tmp_path / "calibration.txt").write_text("1\n2\n")
    official = {"train": tuple("01234567"), "test": ("8", "9")}
    splits = check_pairs(tmp_path, Listing(TABLE, pairs, official), config, seed=0).splits
    assert {pair.name for pair in splits["calibration"]} == {"1", "2"}
    assert {pair.name for pair in splits["test"]} == {"8", "9"}
    divided = check_pairs(tmp_path, Listing(TABLE, pairs), config, seed=0).splits
    assert {split: len(held) for split, held in divided.items()} == {
        "train": 7,
        "val": 1,
        "test": 2,
        "calibration": 2,
    }


@pytest.mark.parametrize(
    ("splits", "groups", "match"),
    [
        (
            {"train": tuple("0123456789"), "test": ()},
            "0123456789",
            r"split 'test' is empty \(10 usable images",
        ),
        ({"train": tuple("0123456789"), "test": ("gone",)}, "0123456789", r"split 'test' is empty"),
        ({}, "0000011111", r"10 image\(s\) in 2 group\(s\) .*groups\.csv"),
    ],
)
def test_splits_that_must_be_empty_are_refused_before_images_are_read(
    tmp_path: Path,
    pairs: tuple[Pair, ...],
    config: FolderConfig,
    splits: dict[str, tuple[str, ...]],
    groups: str,
    match: str,
) -> None:
    for pair in pairs:
        Path(str(pair.image)).write_bytes(b"")
    grouped = tuple(replace(pair, group=group) for pair, group in zip(pairs, groups, strict=True))
    with pytest.raises(DataError, match=match):
        check_pairs(tmp_path, Listing(TABLE, grouped, splits), config, seed=0)
