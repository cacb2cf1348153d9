"""prepare_data on large images that are cut into windows, against the whole images."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

from tasks.core.errors import ConfigError
from tasks.parts.data.class_table import IGNORE_INDEX
from tasks.parts.data.comparison import compare_with_labels, join_results, score_loss
from tasks.parts.data.dataset import open_groups, open_split, read_manifest
from tasks.parts.data.input_card import Task
from tasks.parts.data.metrics import confusion_matrix
from tests.tasks.parts.sources.runs import HEIGHT, WIDTH, config_of, run, write_image, write_mask

NAMES = [f"image{number:02d}" for number in range(12)]
REACH = 3
"""Pixels around a pixel on which its prediction depends."""


def network() -> nn.Module:
    """Return a network of small whole numbers: its sums are exact in float32, whatever their order."""
    layers = nn.Sequential(nn.Conv2d(3, 4, 5, padding=2), nn.ReLU(), nn.Conv2d(4, 3, 3, padding=1))
    random = torch.Generator().manual_seed(0)
    for parameter in layers.parameters():
        parameter.data = torch.randint(-2, 3, parameter.shape, generator=random).float()
    return layers


@torch.no_grad()
def predict(images_NHWC: np.ndarray) -> np.ndarray:
    images_NCHW = torch.from_numpy(np.moveaxis(images_NHWC, -1, 1).astype(np.float32))
    return network()(images_NCHW).argmax(dim=1).numpy()


def write_folder(root: Path, *, smallest: tuple[int, int]) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Write images of random sizes with masks of 3 classes and ignored pixels; return both by name."""
    random = np.random.default_rng(0)
    (root / "images").mkdir(parents=True)
    (root / "masks").mkdir()
    content = {}
    for name in NAMES:
        height, width = (int(side + random.integers(0, 50)) for side in smallest)
        coarse = random.integers(0, 3, (-(-height // 8), -(-width // 8)))
        mask_HW = coarse.repeat(8, axis=0).repeat(8, axis=1)[:height, :width].astype(np.uint8)
        image_HWC = (mask_HW[..., None] * 60 + random.integers(0, 130, (height, width, 3))).astype(np.uint8)
        mask_HW[random.uniform(size=mask_HW.shape) < 0.02] = IGNORE_INDEX
        Image.fromarray(image_HWC).save(root / "images" / f"{name}.png")
        Image.fromarray(mask_HW).save(root / "masks" / f"{name}.png")
        content[name] = image_HWC, mask_HW
    (root / "classes.yaml").write_text("classes: [a, b, c]\nignore_index: 255\n", encoding="utf-8")
    for split, names in (("train", NAMES[:4]), ("val", NAMES[4:7]), ("test", NAMES[7:])):
        (root / f"{split}.txt").write_text("\n".join(names), encoding="utf-8")
    return content


def confusion_of_windows(dataset: Path, split: str) -> np.ndarray:
    images_NHWC, masks_NHW = open_split(dataset, split)
    return confusion_matrix(predict(images_NHWC), masks_NHW, 3)


@pytest.mark.parametrize(("overlap", "is_exact"), [(2 * REACH, True), (2 * REACH + 3, True), (0, False)])
def test_windows_count_what_the_whole_images_do_if_they_overlap_by_the_reach_of_the_network(
    overlap: int, is_exact: bool, tmp_path: Path
) -> None:
    content = write_folder(tmp_path / "root", smallest=(HEIGHT, WIDTH))
    run("folder", tmp_path / "root", tmp_path / "out", resize_mode="windows", window_overlap=overlap)
    for split, names in (("val", NAMES[4:7]), ("test", NAMES[7:])):
        expected = sum(confusion_matrix(predict(content[n][0][None]), content[n][1][None], 3) for n in names)
        found = confusion_of_windows(tmp_path / "out/dataset", split)
        assert (found.sum(axis=1) == expected.sum(axis=1)).all(), (
            "each pixel counts once, with or without overlap"
        )
        assert (found == expected).all() == is_exact


def test_the_windows_of_an_image_are_one_group_with_the_counts_of_the_image(tmp_path: Path) -> None:
    content = write_folder(tmp_path / "root", smallest=(HEIGHT, WIDTH))
    run("folder", tmp_path / "root", tmp_path / "out", resize_mode="windows", window_overlap=2 * REACH)
    images_NHWC, masks_NHW = open_split(tmp_path / "out/dataset", "test")
    groups_N = open_groups(tmp_path / "out/dataset", "test")
    assert len(groups_N) > len(NAMES[7:]) == len(set(groups_N.tolist()))
    windows = compare_with_labels(predict(images_NHWC), masks_NHW, 3, Task.segmentation, groups_N)
    whole = [
        compare_with_labels(predict(content[name][0][None]), content[name][1][None], 3, Task.segmentation)
        for name in NAMES[7:]
    ]
    images = join_results(whole, np.arange(len(whole)))
    assert windows.score == images.score
    by_image = [
        counts[groups_N == group].sum(axis=0).tolist() for counts in windows.counts for group in range(5)
    ]
    of_images = [counts[n].tolist() for counts in images.counts for n in range(5)]
    assert sorted(by_image) == sorted(of_images)
    of_windows, of_images = (
        score_loss(replace(results, hits_NC=results.hits_NC * [0.9, 0.7, 1.0]), results)
        for results in (windows, images)
    )
    assert of_windows.low == pytest.approx(of_images.low) and of_windows.low < of_windows.rel_loss


def test_training_sees_all_labels_of_each_window_and_small_images_are_padded(tmp_path: Path) -> None:
    content = write_folder(tmp_path / "root", smallest=(8, 8))
    report = run("folder", tmp_path / "root", tmp_path / "out", resize_mode="windows", window_overlap=8)
    images_NHWC, masks_NHW = open_split(tmp_path / "out/dataset", "train")
    assert images_NHWC.shape[1:3] == (HEIGHT, WIDTH)
    assert report.num_images["train"] == len(images_NHWC) > 4
    num_labelled = sum(int((content[name][1] != IGNORE_INDEX).sum()) for name in NAMES[:4])
    assert (masks_NHW != IGNORE_INDEX).sum() > num_labelled  # what windows share counts in each
    sizes = [mask.shape for _, mask in content.values()]
    assert min(height for height, _ in sizes) < HEIGHT and min(width for _, width in sizes) < WIDTH
    pixels = sum(int((content[name][1] != IGNORE_INDEX).sum()) for name in NAMES[7:])
    _, test_NHW = open_split(tmp_path / "out/dataset", "test")
    assert (test_NHW != IGNORE_INDEX).sum() == pixels


def test_groups_of_the_user_hold_the_windows_of_all_their_images(tmp_path: Path) -> None:
    write_folder(tmp_path / "root", smallest=(HEIGHT, WIDTH))
    rows = "".join(f"{name},{'film' if name in NAMES[7:10] else name}\n" for name in NAMES)
    (tmp_path / "root/groups.csv").write_text(f"image,group\n{rows}", encoding="utf-8")
    run("folder", tmp_path / "root", tmp_path / "out", resize_mode="windows", window_overlap=4)
    assert len(set(open_groups(tmp_path / "out/dataset", "test").tolist())) == 3


def test_windows_work_for_other_layouts(tmp_path: Path) -> None:
    for split, seed in (("train", 0), ("val", 10)):
        for number in range(4):
            stem = f"{split}/aachen/aachen_{number:06d}_000019"
            write_image(tmp_path / f"root/leftImg8bit/{stem}_leftImg8bit.png", seed + number)
            ids = np.full((HEIGHT, WIDTH), 7, np.uint8)
            ids[:, : WIDTH // 2] = 8
            write_mask(tmp_path / f"root/gtFine/{stem}_gtFine_labelIds.png", ids)
    content = config_of("cityscapes", resize_mode="windows", window_overlap=0)
    assert content.height == HEIGHT
    run("cityscapes", tmp_path / "root", tmp_path / "out", resize_mode="windows", window_overlap=0)
    assert read_manifest(tmp_path / "out/dataset").counts["test"] == 4


@pytest.mark.parametrize(
    ("source", "changes", "message"),
    [
        ("folder", {"window_overlap": None}, r"prepare_data\.folder\.window_overlap is null"),
        (
            "folder",
            {"window_overlap": HEIGHT},
            r"window_overlap is 16, expected less than a window of 16 x 24",
        ),
        (
            "images",
            {"window_overlap": 4},
            r"resize_mode is windows, and source is images: windows need masks",
        ),
    ],
)
def test_windows_that_cannot_be_are_refused(
    source: str, changes: dict[str, int | None], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        config_of(source, resize_mode="windows", **changes)
