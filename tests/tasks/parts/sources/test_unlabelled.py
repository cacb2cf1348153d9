"""Images without labels: prepare_data with missing_masks=unlabelled, and the trainings on what it writes."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor, nn

from tasks.core.errors import DataError
from tasks.parts.data.class_table import IGNORE_INDEX, ClassTable
from tasks.parts.data.dataset import MANIFEST_FILE, open_images, open_split, read_manifest
from tasks.parts.data.dataset_writer import write_chosen_images
from tasks.parts.data.masks import MaskFile
from tasks.parts.data.subsets import choose_rows
from tasks.parts.sources.pairs import Listing, Pair, check_pairs
from tasks.parts.training.augmentation import Views
from tasks.parts.training.config import DistillationConfig
from tasks.parts.training.distillation import DistillationObjective
from tasks.parts.training.loop import train_network
from tasks.parts.training.losses import LabelLoss
from tasks.parts.training.module import Batch, LabelObjective, rows_of_an_epoch
from tests.tasks.parts.sources.runs import config_of, fails, halves, pixels, run, write_image, write_mask
from tests.tasks.parts.sources.test_listed_splits import prepare
from tests.tasks.test_train import PLAIN, TRAINER

SPLITS = ("train", "val", "test", "calibration")
LABELLED = [str(number) for number in range(10)]
UNLABELLED = ["0-a", "0-b", "0-c"]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Make ten images with a mask, and three larger ones without, whose names are among theirs."""
    root = tmp_path / "mine"
    root.mkdir()
    (root / "classes.yaml").write_text("[road, car]")
    for number, name in enumerate(LABELLED):
        write_image(root / f"images/{name}.png", number)
        write_mask(root / f"masks/{name}.png", halves(0, 1))
    for number, name in enumerate(UNLABELLED):
        content = np.random.default_rng(100 + number).integers(256, size=(20, 40, 3)).astype(np.uint8)
        Image.fromarray(content).save(root / f"images/{name}.png")
    return root


def write_lists(root: Path, **names: list[str]) -> None:
    for split, listed in names.items():
        (root / f"{split}.txt").write_text("\n".join(listed))


def write_groups(root: Path, rows: list[tuple[str, str]]) -> None:
    (root / "groups.csv").write_text("image,group\n" + "".join(f"{name},{group}\n" for name, group in rows))


@pytest.mark.parametrize("copy", [True, False])
@pytest.mark.parametrize(("mode", "num_added"), [("resize", 3), ("crop", 3), ("windows", 3 * 4)])
def test_they_follow_the_images_of_train_and_nothing_else_changes(
    root: Path, tmp_path: Path, copy: bool, mode: str, num_added: int
) -> None:
    less, more = (
        prepare(root, tmp_path / name, copy=copy, missing_masks=name, resize_mode=mode, window_overlap=6)
        for name in ("skip", "unlabelled")
    )
    without, whole = read_manifest(less), read_manifest(more)
    assert (without.num_unlabelled, whole.num_unlabelled) == (0, num_added)
    assert whole.counts == {**without.counts, "train": without.counts["train"] + num_added}
    assert (whole.pixel_share, whole.mean, whole.std) == (without.pixel_share, without.mean, without.std)
    for split in SPLITS:
        for array, expected in zip(open_split(more, split), open_split(less, split), strict=True):
            np.testing.assert_array_equal(array[: len(expected)], expected[:])
    masks_NHW = open_split(more, "train")[1]
    assert (masks_NHW[-num_added:] == IGNORE_INDEX).all()
    assert (masks_NHW[:-num_added] != IGNORE_INDEX).all()


def test_the_report_counts_them_and_an_older_manifest_has_none(root: Path, tmp_path: Path) -> None:
    report = run("folder", root, tmp_path / "out", missing_masks="unlabelled")
    assert report.num_unlabelled == 3 and report.num_images["train"] == 10
    [warning] = report.warnings
    assert warning.startswith("3 image(s) have no mask, the first: ") and "They have no labels" in warning
    path = tmp_path / "out/dataset" / MANIFEST_FILE
    fields = json.loads(path.read_text())
    del fields["num_unlabelled"]
    path.write_text(json.dumps(fields))
    assert read_manifest(path.parent).num_unlabelled == 0


@pytest.mark.parametrize(
    ("lists", "match"),
    [
        (
            {"val": ["7", "0-a", "0-b"]},
            r"'0-a' of split 'val' has no mask \(and 1 more images\), .*only train",
        ),
        ({"test": ["0-c"]}, "'0-c' of split 'test' has no mask, expected a mask for each"),
        ({"train": UNLABELLED}, "'0-a' of split 'train' has no mask .*, expected some with one"),
    ],
)
def test_a_list_that_needs_labels_is_refused_before_images_are_read(
    root: Path, tmp_path: Path, lists: dict[str, list[str]], match: str
) -> None:
    write_lists(root, **{"train": LABELLED[:6], "val": ["7"], "test": ["8"]} | lists)
    (root / "images/3.png").write_bytes(b"")
    match = f"{match}.*Add masks.*out of its list.*missing_masks to skip"
    fails("folder", root, tmp_path / "out", match, DataError, missing_masks="unlabelled")


def test_lists_decide_which_of_them_are_in_train_and_may_calibrate_with_them(
    root: Path, tmp_path: Path
) -> None:
    write_lists(root, train=["0-b", *LABELLED[:6]], val=["7"], test=["8", "9"], calibration=["0-a", "1"])
    report = run("folder", root, tmp_path / "out", missing_masks="unlabelled", resize_mode="crop")
    assert (report.num_images["train"], report.num_unlabelled, report.num_images["calibration"]) == (7, 1, 2)
    masks_NHW = open_split(tmp_path / "out/dataset", "calibration")[1]
    assert sorted((masks_NHW == IGNORE_INDEX).mean(axis=(1, 2)).tolist()) == [0, 1]
    assert any("3 image(s) are in none of train.txt" in text for text in report.warnings)


def test_a_split_of_the_layout_that_lacks_a_mask_is_refused(root: Path) -> None:
    masks = {name: MaskFile(root / f"masks/{name}.png") for name in LABELLED}
    pairs = tuple(Pair(name, root / f"images/{name}.png", masks.get(name)) for name in LABELLED + UNLABELLED)
    table = ClassTable(("road", "car"), "test", ((0,), (1,)))
    config = config_of("folder", missing_masks="unlabelled").folder
    assert config is not None
    official = {"train": (*LABELLED[:8], "0-a"), "test": ("8", "9", "0-b")}
    with pytest.raises(DataError, match=r"'0-b' of split 'test' has no mask, expected a mask for each"):
        check_pairs(root, Listing(table, pairs, official), config, seed=0)
    content = check_pairs(root, Listing(table, pairs, official | {"test": ("8", "9")}), config, seed=0)
    assert [pair.name for pair in content.splits["train"]][-1:] == ["0-a"]
    assert (content.num_unlabelled, len(content.splits["val"])) == (1, 1)


def test_a_frame_whose_group_is_in_val_or_test_is_left_out(root: Path, tmp_path: Path) -> None:
    """Each labelled image is a film of its own; the unlabelled ones are frames of films of train, val and test."""
    rows = [(name, name) for name in LABELLED]
    write_groups(root, rows)
    run("folder", root, tmp_path / "first", missing_masks="skip")
    split_of = {
        image.tobytes(): split
        for split in ("train", "val", "test")
        for image in open_images(tmp_path / "first/dataset", split)
    }
    of_split = {split_of[pixels(root / f"images/{name}.png")]: name for name in LABELLED}
    films = [of_split[split] for split in ("val", "train", "test")]
    write_groups(root, [*rows, *zip(UNLABELLED, films, strict=True)])
    report = run("folder", root, tmp_path / "out", missing_masks="unlabelled")
    assert (report.num_unlabelled, report.num_images["train"]) == (1, 8)
    assert report.warnings[-1] == (
        "2 image(s) without labels are left out of train, because images of their group are in val or test: 0-a."
    )


@pytest.mark.parametrize("copy", [True, False])
def test_samples_of_train_are_of_labelled_images(root: Path, tmp_path: Path, copy: bool) -> None:
    data = prepare(root, tmp_path / "out", copy=copy, missing_masks="unlabelled")
    assert choose_rows(data, "train", None) == choose_rows(data, "train", 8) == slice(7)
    assert choose_rows(data, "train", 5) == slice(5)
    manifest = write_chosen_images(data, tmp_path / "small", {"train": 99, "val": 1})
    assert (manifest.counts["train"], manifest.num_unlabelled) == (7, 0)
    assert (open_split(tmp_path / "small", "train")[1] != IGNORE_INDEX).all()


class Labels(LabelObjective):
    """Notes which images are seen."""

    seen: list[int]

    def forward(self, network: nn.Module, batch: Batch) -> Tensor:
        self.seen += batch.indices_N.tolist()
        return super().forward(network, batch)


class Distillation(DistillationObjective):
    """Notes which images are seen, in which view, and their means."""

    seen: list[int]

    def forward(self, network: nn.Module, batch: Batch) -> Tensor:
        self.seen += batch.indices_N.tolist()
        self.views += batch.views_N.tolist()
        self.means += batch.images_NCHW.mean(dim=(1, 2, 3)).tolist()
        return super().forward(network, batch)


def network_of(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    network = nn.Conv2d(3, 2, 3, padding=1)
    network.feature_layer = None
    return network


def train(objective: Any, network: nn.Module, data: Path, out: Path, **changes: Any) -> list[int]:
    """Train, for an epoch if nothing else is said, and return the images that were seen, in their order."""
    objective.seen, objective.views, objective.means = [], [], []
    out.mkdir()
    config = replace(TRAINER, **{"max_epochs": 1, "batch_size": 1, **changes})
    train_network(network, objective, data=data, config=config, out=out)
    return list(objective.seen)


def test_trainings_on_labels_do_not_see_them_and_distillation_sees_all(root: Path, tmp_path: Path) -> None:
    less, more = (
        prepare(root, tmp_path / name, copy=True, missing_masks=name) for name in ("skip", "unlabelled")
    )
    loss = LabelLoss(PLAIN, torch.ones(2))
    labels_only = DistillationConfig(1.0, 0.0, 0.0, 0.0, 2.0)
    weights, orders = [], []
    for number, data in enumerate((less, more, more)):
        network = network_of(0)
        objective = Distillation(labels_only, network, None, loss) if number == 2 else Labels(loss)
        orders.append(train(objective, network, data, tmp_path / str(number)))
        weights.append([value.numpy().tobytes() for value in network.state_dict().values()])
    assert weights[0] == weights[1] == weights[2]
    assert orders[0] == orders[1] == orders[2] and sorted(orders[0]) == list(range(7))
    student = network_of(0)
    objective = Distillation(DistillationConfig(1.0, 1.0, 0.0, 0.0, 2.0), student, network_of(1), loss)
    assert sorted(train(objective, student, more, tmp_path / "student")) == list(range(10))


def test_images_with_labels_are_repeated_until_they_are_half_of_what_a_student_of_a_teacher_sees() -> None:
    assert rows_of_an_epoch(8, 6, needs_labels=True) == [0, 1]
    assert rows_of_an_epoch(8, 6, needs_labels=False) == [0, 1] * 3 + [2, 3, 4, 5, 6, 7]
    assert rows_of_an_epoch(8, 2, needs_labels=False) == [*range(8)]


def keep_labels(data: Path, count: int) -> None:
    """Take the labels of all training images but `count`."""
    path = data / "manifest.json"
    fields = json.loads(path.read_text())
    fields["num_unlabelled"] = fields["counts"]["train"] - count
    path.write_text(json.dumps(fields))


def test_each_repetition_of_an_image_in_an_epoch_is_another_view_a9(root: Path, tmp_path: Path) -> None:
    """20 labelled images beside 980 without label are shown 49 times in an epoch."""
    assert rows_of_an_epoch(1000, 980, needs_labels=False).count(0) == 49
    data = prepare(root, tmp_path / "data", copy=True, missing_masks="unlabelled")
    keep_labels(data, 1)
    loss, student = LabelLoss(PLAIN, torch.ones(2)), network_of(0)
    objective = Distillation(DistillationConfig(1.0, 1.0, 0.0, 0.0, 2.0), student, network_of(1), loss)
    train(objective, student, data, tmp_path / "free", max_epochs=2, brightness=0.5)
    labelled = [view for index, view in zip(objective.seen, objective.views, strict=True) if index == 0]
    assert sorted(labelled[:9]) == [*range(9)] and sorted(labelled[9:]) == [*range(9, 18)]
    others = [view for index, view in zip(objective.seen, objective.views, strict=True) if index == 3]
    assert others == [0, 1]
    shown = {mean for index, mean in zip(objective.seen, objective.means, strict=True) if index == 0}
    assert len(shown) == 18  # its brightness is another one each time


def test_repetitions_go_through_the_views_of_a_recording_a9(root: Path, tmp_path: Path) -> None:
    data = prepare(root, tmp_path / "data", copy=True, missing_masks="skip")
    views = Views(replace(TRAINER, num_views=4), read_manifest(data))
    occurrences_N, times_N = torch.tensor([0, 1, 2, 0]), torch.tensor([3, 3, 3, 1])
    shown = [views.numbers(epoch, occurrences_N, times_N).tolist() for epoch in range(2)]
    assert shown == [[0, 1, 2, 0], [3, 0, 1, 1]]
