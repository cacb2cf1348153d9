"""The choice of splits and calibration images: each class in proportion, groups whole, always the same by seed."""

import hashlib
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import pytest

from tasks.core.errors import DataError
from tasks.parts.data.image_files import ResizeMode
from tasks.parts.sources.config import FolderConfig
from tasks.parts.sources.splits import choose_stratified, read_split_files, refuse_few_groups, share_out

DIGESTS_OF_DIVISIONS = ["59e95e47", "e96a0665"]
"""Without groups and with 20, as they were before few groups had a rule of their own."""
COUNTS = {"val": 100, "test": 150, "train": 750}


def shuffled(num_images: int) -> list[str]:
    names = [f"{number:04}" for number in range(num_images)]
    return sorted(names, key=lambda name: hashlib.sha256(name.encode()).digest())


def labels_of(names: Sequence[str], frequencies: Sequence[float]) -> dict[str, tuple[int, ...]]:
    """Let each image hold a class with the probability of that class."""
    rng = np.random.default_rng(0)
    return {
        name: tuple(label for label, share in enumerate(frequencies) if rng.random() < share)
        for name in sorted(names)
    }


def counts_of(
    subsets: Mapping[str, Sequence[str]], labels: Mapping[str, Sequence[int]]
) -> dict[str, Counter[int]]:
    return {
        subset: Counter(label for name in names for label in labels[name])
        for subset, names in subsets.items()
    }


def config(num_calibration: int = 32) -> FolderConfig:
    return FolderConfig(
        channels=3,
        resize_mode=ResizeMode.resize,
        val_share=0.1,
        test_share=0.15,
        num_calibration=num_calibration,
        max_megapixels=1,
        max_bad_images=0,
    )


def test_every_class_is_present_in_proportion() -> None:
    names = shuffled(1000)
    labels = labels_of(names, [0.9, 0.5, 0.2, 0.05, 0.01])
    subsets = choose_stratified(names, COUNTS, labels, {})
    assert {subset: len(chosen) for subset, chosen in subsets.items()} == COUNTS
    assert sorted(name for chosen in subsets.values() for name in chosen) == sorted(names)
    totals = counts_of({"all": names}, labels)["all"]
    for subset, counted in counts_of(subsets, labels).items():
        for label, total in totals.items():
            assert abs(counted[label] - total * COUNTS[subset] / 1000) <= max(1, 0.05 * total)


def test_choice_is_nearer_to_the_proportion_than_chance() -> None:
    names = shuffled(1000)
    labels = labels_of(names, [0.3, 0.1, 0.05, 0.03, 0.02, 0.01])
    totals = counts_of({"all": names}, labels)["all"]

    def deviation(chosen: Sequence[str]) -> float:
        counted = counts_of({"val": chosen}, labels)["val"]
        return sum(abs(counted[label] / (total / 10) - 1) for label, total in totals.items()) / len(totals)

    stratified = choose_stratified(names, COUNTS, labels, {})["val"]
    assert deviation(stratified) < 0.5 * deviation(names[:100])


@pytest.mark.parametrize(
    ("num_images", "expected"), [(1, {"train"}), (3, {"train", "test"}), (5, {"train", "test", "val"})]
)
def test_rare_class_reaches_all_splits_while_there_are_enough_images(
    num_images: int, expected: set[str]
) -> None:
    names = shuffled(1000)
    labels = {name: (0, 1) if number < num_images else (0,) for number, name in enumerate(sorted(names))}
    subsets = choose_stratified(names, COUNTS, labels, {})
    assert {subset for subset, counted in counts_of(subsets, labels).items() if counted[1]} == expected


def test_calibration_holds_every_class_of_train() -> None:
    names = shuffled(1000)
    labels = {
        name: (0, 1 + number // 100 if number % 100 == 0 else 0) for number, name in enumerate(sorted(names))
    }
    splits, _ = share_out(names, {}, {}, config(), 0, labels)
    counted = counts_of(splits, labels)
    assert set(counted["calibration"]) == set(counted["train"])
    assert len(counted["train"]) == 11 and len(splits["calibration"]) == 32
    assert set(splits["calibration"]) <= set(splits["train"])


def test_groups_stay_whole_and_no_split_is_empty() -> None:
    names = shuffled(60)
    groups = {name: f"video {int(name) // 6}" for name in names}
    labels = labels_of(names, [0.9, 0.3])
    subsets = choose_stratified(names, {"val": 6, "test": 9, "train": 45}, labels, groups)
    home = {groups[name]: subset for subset, chosen in subsets.items() for name in chosen}
    assert all(home[groups[name]] == subset for subset, chosen in subsets.items() for name in chosen)
    assert all(subsets.values()) and sum(map(len, subsets.values())) == 60


@pytest.mark.parametrize("num_groups", [3, 4, 5, 6])
@pytest.mark.parametrize("frequencies", [[1.0], [0.9, 0.3], [1.0, 0.5, 0.02]])
def test_few_groups_leave_no_split_empty(num_groups: int, frequencies: list[float]) -> None:
    names = shuffled(60)
    groups = {name: f"video {int(name) * num_groups // 60}" for name in names}
    splits, _ = share_out(names, {}, groups, config(8), 0, labels_of(names, frequencies))
    home = {groups[name]: split for split in COUNTS for name in splits[split]}
    assert all(home[groups[name]] == split for split in COUNTS for name in splits[split])
    assert all(splits.values()) and sum(len(splits[split]) for split in COUNTS) == 60
    assert len(splits["train"]) >= max(len(splits["val"]), len(splits["test"]))


def test_division_without_groups_and_with_many_stays_as_it_was() -> None:
    names = shuffled(100)
    labels = labels_of(names, [0.9, 0.3, 0.05])
    several = {name: f"video {int(name) // 5}" for name in names}
    digests = [
        hashlib.sha256(repr(share_out(names, {}, groups, config(8), 0, labels)).encode()).hexdigest()[:8]
        for groups in ({}, several)
    ]
    assert digests == DIGESTS_OF_DIVISIONS


def test_fewer_groups_than_splits_are_refused_and_named(tmp_path: Path) -> None:
    groups = {"a": "video 1", "b": "video 1", "c": "video 2"}
    match = r"3 image\(s\) in 2 group\(s\) .* among train, val, test, expected .*groups\.csv"
    with pytest.raises(DataError, match=match):
        refuse_few_groups(tmp_path, groups, {}, groups)
    refuse_few_groups(tmp_path, groups, {"train": ("a", "b", "c"), "test": ()}, groups)
    refuse_few_groups(tmp_path, [*groups, "alone"], {}, groups)
    refuse_few_groups(tmp_path, groups, {"train": ("a",), "val": ("b",), "test": ("c",)}, groups)


def test_calibration_list_may_be_alone_and_others_may_not(tmp_path: Path) -> None:
    (tmp_path / "calibration.txt").write_text("a\nb\n")
    assert read_split_files(tmp_path, {"a", "b", "c"}) == {"calibration": ("a", "b")}
    (tmp_path / "val.txt").write_text("c\n")
    with pytest.raises(DataError, match=r"holds val\.txt, calibration\.txt, but not train\.txt, test\.txt"):
        read_split_files(tmp_path, {"a", "b", "c"})


def test_choice_depends_on_the_seed_and_on_nothing_else() -> None:
    names = shuffled(200)
    labels = labels_of(names, [0.9, 0.3, 0.05])
    first, _ = share_out(names, {}, {}, config(), 0, labels)
    again, _ = share_out(sorted(names), {}, {}, config(), 0, dict(reversed(list(labels.items()))))
    other, _ = share_out(names, {}, {}, config(), 1, labels)
    assert first == again and set(first["val"]) != set(other["val"])


def test_missing_val_list_is_taken_from_train() -> None:
    names = shuffled(100)
    lists = {"train": tuple(names[:80]), "test": tuple(names[80:])}
    splits, warnings = share_out(names, lists, {}, config(8), 0, labels_of(names, [0.9, 0.3]))
    assert set(splits["test"]) == set(names[80:])
    assert len(splits["val"]) == 8 and len(splits["train"]) == 72
    assert set(splits["val"]) | set(splits["train"]) == set(names[:80]) and warnings == []


def test_images_without_labels_are_divided_too() -> None:
    splits, _ = share_out(shuffled(40), {}, {}, config(8), 0, {})
    assert [len(splits[split]) for split in ("train", "val", "test", "calibration")] == [30, 4, 6, 8]


def test_many_single_classes_take_little_time() -> None:
    names = shuffled(20_000)
    labels = {name: (number,) for number, name in enumerate(names)}
    subsets = choose_stratified(names, {"val": 2000, "train": 18_000}, labels, {})
    assert len(subsets["val"]) == 2000
