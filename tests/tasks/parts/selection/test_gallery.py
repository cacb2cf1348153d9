"""The images of the page: chosen at the size of the masks, shown smaller."""

import base64
import dataclasses
import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image

from tasks.core.reports import write_json
from tasks.parts.data.accuracy import AccuracyReport
from tasks.parts.data.answers import ANSWERS_FILE, Answers, write_answers
from tasks.parts.data.dataset_writer import SplitBatches, batches_of, write_dataset
from tasks.parts.data.input_card import Task
from tasks.parts.selection.engine_row import EngineRow, Verdict
from tasks.parts.selection.gallery import make_gallery
from tasks.parts.selection.stage_folders import StageFolders

HEIGHT, WIDTH, NUM_IMAGES = 320, 640, 3


def engine_row(number: int) -> EngineRow:
    """An engine of which nothing but its name counts here."""
    return EngineRow(
        variant=f"v{number}",
        target="cpu",
        verdict=Verdict.ACCEPT,
        reason="",
        pareto=True,
        picked=False,
        precision="f32",
        macs_share={},
        macs_share_quantized=None,
        measured=None,
        suspect_layers=(),
        conditions={},
    )


def gallery_of(folder: Path, answers: list[NDArray[Any]], num_bands: int = 3) -> dict[str, Any]:
    """Two engines and their masks; the images are a chessboard of single pixels, whose mean is 127."""
    board = 255 * (np.indices((HEIGHT, WIDTH)).sum(axis=0) % 2)
    images_NHWC = np.broadcast_to(board[None, :, :, None], (NUM_IMAGES, HEIGHT, WIDTH, num_bands))
    masks_NHW = np.zeros((NUM_IMAGES, HEIGHT, WIDTH), np.uint8)
    content = SplitBatches(NUM_IMAGES, [*batches_of(images_NHWC.astype(np.uint8), masks_NHW)])
    write_dataset(
        folder / "data",
        task=Task.segmentation,
        classes=("a", "b", "c"),
        height=HEIGHT,
        width=WIDTH,
        source="folder",
        splits=dict.fromkeys(("train", "val"), content),
        channels=num_bands,
    )
    folders = StageFolders(*(folder / name for name in ("builds", "validations", "benchmarks", "diffs")))
    rows = [engine_row(number) for number in range(len(answers))]
    for row, masks in zip(rows, answers, strict=True):
        place = folders.of(row.variant, row.target)["validate"]
        place.mkdir(parents=True)
        kept = Answers.of(3)
        kept.add(masks)
        write_answers(place / ANSWERS_FILE, kept)
        report = AccuracyReport("built", "", "0" * 64, "val", "test", NUM_IMAGES, None)
        write_json(place / "report.json", dataclasses.asdict(report))
    found = make_gallery(rows, folders, folder / "data", rows[0].name)
    assert found is not None
    return found


def unpacked(gallery: dict[str, Any], name: str, index: int) -> NDArray[Any]:
    runs = [run.split("x") for run in gallery["runs"][gallery["answers"][name][index]].split()]
    classes = [int(kind) for kind, length in runs for _ in range(int(length))]
    return np.array(classes).reshape(gallery["height"], gallery["width"])


@pytest.mark.parametrize("num_bands", [1, 3, 5])
def test_thin_differences_choose_images_and_pictures_are_means_c5(num_bands: int, tmp_path: Path) -> None:
    first = np.zeros((NUM_IMAGES, HEIGHT, WIDTH), np.uint8)
    first[:, 100:200, 320:] = 2
    second = first.copy()
    second[1, :, 0::10] = 1  # every tenth column is none of those at 5, 15, ..
    second[2, 5, 5] = 1
    gallery = gallery_of(tmp_path, [first, second], num_bands)
    assert gallery["places"] == [1, 2], "chosen by what is left of the masks"
    assert (gallery["height"], gallery["width"]) == (128, 256)
    name = next(iter(gallery["answers"]))
    shown = unpacked(gallery, name, 1)
    assert (shown == 2).sum() == pytest.approx(100 * 320 / 2.5**2, rel=0.02) and shown[60, 200] == 2
    jpeg = base64.b64decode(gallery["pictures"][0].partition(",")[2])
    with Image.open(io.BytesIO(jpeg)) as picture:
        assert picture.size == (256, 128) and picture.mode == ("L" if num_bands == 1 else "RGB")
        values = np.asarray(picture)
    assert values.min() > 90 and values.max() < 165, "single pixels of the chessboard are left"


def test_pictures_of_noise_are_smaller_so_that_the_page_stays_small_c5(tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    noise = [random.integers(0, 3, (NUM_IMAGES, HEIGHT, WIDTH)).astype(np.uint8) for _ in range(8)]
    gallery = gallery_of(tmp_path, noise)
    assert gallery["width"] < 256 and len(json.dumps(gallery)) <= 700_000
