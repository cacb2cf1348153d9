"""Engines on the original files of a split: the score of validate.split, or a difference with its cause."""

import dataclasses
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from tasks.core.config import typed_config
from tasks.core.errors import ArtifactError
from tasks.parts.data.comparison import RESULTS_FILE, compare_with_labels, frames_of, read_results
from tasks.parts.data.dataset import open_split, read_manifest
from tasks.parts.data.frame_score import FrameScore, score_frames
from tasks.parts.data.input_card import InputCard, Task
from tasks.parts.engines.frame_engine.engine import Engine, load_engine
from tasks.parts.engines.manifest import read_engine_manifest, write_engine_manifest
from tasks.prepare_data import Config as PrepareConfig
from tasks.prepare_data import prepare_data
from tasks.validate import Config, validate
from tests.tasks.conftest import Workshop
from tests.tasks.parts.engines import test_frame_reading as frames
from tests.tasks.parts.sources.runs import section_of

SIZE = (frames.HEIGHT, frames.WIDTH)


def prepare(
    root: Path, out: Path, *, size: tuple[int, int] = SIZE, copy: bool = True, **changes: Any
) -> Path:
    section = section_of("folder") | {"height": size[0], "width": size[1], "copy": copy}
    section["folder"] |= {"num_calibration": 2} | changes
    config: PrepareConfig = typed_config(PrepareConfig, section, "prepare_data")
    out.mkdir()
    prepare_data(config, root=root, out=out)
    return out / "dataset"


def write_root(root: Path, *, size: tuple[int, int], classes: tuple[str, ...], high: int = 256) -> Path:
    """Write ten images, and masks that follow them."""
    (root / "images").mkdir(parents=True)
    (root / "masks").mkdir()
    (root / "classes.yaml").write_text(f"[{', '.join(classes)}]\n")
    for number in range(10):
        shape = size if high > 256 else (*size, 3)
        image = np.roll(frames.random_image(*shape, high=high), 11 * number, axis=1)
        Image.fromarray(image).save(root / f"images/{number}.png")
        grey = image if high > 256 else image[..., 0]
        mask = (grey.astype(np.int64) * len(classes) // high).astype(np.uint8)
        Image.fromarray(mask).save(root / f"masks/{number}.png")
    return root


NAMES = tuple("abcd")


def scored(dataset: Path, engine: Engine) -> tuple[float, FrameScore]:
    """Return the score on the arrays of the split test, and what is found in its files."""
    images_NHWC, masks_NHW = open_split(dataset, "test")
    answers = engine.predict(np.asarray(images_NHWC[:]))
    score = compare_with_labels(answers, np.asarray(masks_NHW[:]), len(NAMES), Task.segmentation).score
    card = InputCard(NAMES, (0.0,), (1.0,), *SIZE)
    return score, score_frames(dataset, "test", card, engine.answer_image, score)


def engine_of(dataset: Path, folder: Path) -> Engine:
    manifest = read_manifest(dataset)
    reading = manifest.reading
    if reading.value_range is not None:
        reading = dataclasses.replace(reading, types=("uint16",))
    return load_engine(frames.write_bundle(folder, manifest.num_channels, reading))


@pytest.mark.parametrize("copy", [True, False])
@pytest.mark.parametrize(
    ("size", "high", "changes"),
    [
        ((70, 110), 256, {"resize_mode": "windows", "window_overlap": 8}),
        (
            (70, 110),
            4096,
            {"resize_mode": "windows", "window_overlap": 8, "value_range": [0, 4095], "channels": 1},
        ),
        (SIZE, 256, {"resize_mode": "resize"}),
        ((20, 30), 256, {"resize_mode": "crop"}),
    ],
)
def test_files_that_are_read_as_in_training_score_the_same_a1(
    tmp_path: Path, size: tuple[int, int], high: int, changes: dict[str, Any], copy: bool
) -> None:
    root = write_root(tmp_path / "root", size=size, classes=NAMES, high=high)
    dataset = prepare(root, tmp_path / "out", copy=copy, **changes)
    score, found = scored(dataset, engine_of(dataset, tmp_path / "bundle"))
    assert found.results is not None and found.results.num_images == 2
    assert 0 < found.results.score == pytest.approx(score, abs=1e-12)
    assert found.note == ""


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        (
            "resize",
            r"frame_score is [+-]0\.\d+ from the score: masks are judged at .*, where perfect masks of 48 x 32 ",
        ),
        ("crop", r"frame_score is -0\.\d+ from the score: crop does not see 80.1% of the labelled pixels"),
    ],
)
def test_a_difference_has_its_cause_a1(tmp_path: Path, mode: str, expected: str) -> None:
    root = write_root(tmp_path / "root", size=(70, 110), classes=NAMES)
    dataset = prepare(root, tmp_path / "out", resize_mode=mode)
    score, found = scored(dataset, engine_of(dataset, tmp_path / "bundle"))
    assert found.results is not None and abs(found.results.score - score) > 0.001
    assert pytest.approx(0) != score
    assert re.match(expected, found.note), found.note


def test_another_reading_than_that_of_the_data_set_is_a_difference_a1(tmp_path: Path) -> None:
    """An engine that stretches what was cut into windows: before, every bundle did that."""
    root = write_root(tmp_path / "root", size=(70, 110), classes=NAMES)
    dataset = prepare(root, tmp_path / "out", resize_mode="windows", window_overlap=8)
    bundle = frames.write_bundle(tmp_path / "bundle", 3, frames.Reading())
    score, found = scored(dataset, load_engine(bundle))
    assert found.results is not None and abs(found.results.score - score) > 0.001
    assert found.note.endswith("the cause is not known: the engine saw the same pixels")


def test_files_of_the_size_of_the_arrays_are_no_cause_of_a_difference_a1(tmp_path: Path) -> None:
    root = write_root(tmp_path / "root", size=SIZE, classes=NAMES)
    dataset = prepare(root, tmp_path / "out", resize_mode="resize")
    engine, card = engine_of(dataset, tmp_path / "bundle"), InputCard(NAMES, (0.0,), (1.0,), *SIZE)
    found = score_frames(dataset, "test", card, engine.answer_image, 0.9)
    assert found.note.endswith("the cause is not known: the engine saw the same pixels")


def test_files_without_labels_are_left_out_as_their_arrays_are_a1(tmp_path: Path) -> None:
    root = write_root(tmp_path / "root", size=SIZE, classes=NAMES)
    for number in (0, 1):
        (root / f"masks/{number}.png").unlink()
    dataset = prepare(root, tmp_path / "out", copy=False, missing_masks="unlabelled")
    manifest, engine = read_manifest(dataset), engine_of(dataset, tmp_path / "bundle")
    num_labelled = manifest.counts["train"] - manifest.num_unlabelled
    assert manifest.num_unlabelled == 2 and num_labelled > 0
    answered = []

    def answer(values_HWC: np.ndarray) -> np.ndarray:
        answered.append(values_HWC.shape)
        return engine.answer_image(values_HWC)

    found = score_frames(dataset, "train", InputCard(NAMES, (0.0,), (1.0,), *SIZE), answer, 0.5)
    assert found.results is not None and found.results.num_images == len(answered) == num_labelled


def test_a_file_that_changed_since_prepare_data_is_named_a1(tmp_path: Path) -> None:
    root = write_root(tmp_path / "root", size=SIZE, classes=NAMES)
    dataset = prepare(root, tmp_path / "out")
    for path in (root / "images").iterdir():
        path.write_bytes(path.read_bytes() + b"\0")
    with pytest.raises(
        ArtifactError, match=r"\.png: changed since prepare_data read it.*run prepare_data again"
    ):
        scored(dataset, engine_of(dataset, tmp_path / "bundle"))
    shutil.rmtree(root)
    _, found = scored(dataset, engine_of(dataset, tmp_path / "bundle2"))
    assert found.results is None and found.note.endswith(f"{root}, which is not here")


def test_classes_of_images_are_scored_on_their_files_a1(tmp_path: Path) -> None:
    for number, name in enumerate(NAMES):
        (tmp_path / "root/images" / name).mkdir(parents=True)
        for copy in range(6):
            image = np.full((40, 60, 3), 64 * number + copy, np.uint8)
            Image.fromarray(image).save(tmp_path / "root/images" / name / f"{copy}.png")
    (tmp_path / "root/classes.yaml").write_text("[a, b, c, d]\n")
    section = section_of("class_folder") | {"height": SIZE[0], "width": SIZE[1]}
    section["folder"] |= {"num_calibration": 2, "groups": "none"}
    (tmp_path / "out").mkdir()
    prepare_data(
        typed_config(PrepareConfig, section, "prepare_data"), root=tmp_path / "root", out=tmp_path / "out"
    )
    card = InputCard(NAMES, (0.0,), (1.0,), *SIZE, Task.classification)

    def answer(values_HWC: np.ndarray[Any, Any]) -> Any:
        """Take the last class for the one before it; files have their own size."""
        assert values_HWC.shape == (40, 60, 3)
        found = int(values_HWC[0, 0, 0]) // 64
        return np.uint8(3 if found == 2 else found)

    labels = np.load(tmp_path / "out/dataset/test_labels.npy")
    found = score_frames(tmp_path / "out/dataset", "test", card, answer, 1.0)
    assert found.results is not None and found.results.score == np.mean(labels != 2) < 1
    assert found.note.endswith("the cause is not known: the engine saw the same pixels")


def test_validate_scores_the_original_files_a1(workshop: Workshop, tmp_path: Path) -> None:
    names = ("background", "zero", "one")
    root = write_root(tmp_path / "root", size=(80, 150), classes=names)
    dataset = prepare(root, tmp_path / "out", size=(64, 96), resize_mode="windows", window_overlap=16)
    engine = tmp_path / "engine"
    shutil.copytree(workshop.engine("float", "cpu_onnxruntime"), engine)
    manifest = read_engine_manifest(engine)
    card = dataclasses.replace(manifest.card, reading=read_manifest(dataset).reading)
    write_engine_manifest(engine, dataclasses.replace(manifest, card=card))
    config = Config(split="test", unseen_split="val", batch_size=4)
    report = validate(config, engine=engine, data=dataset, out=tmp_path)
    assert report.accuracy is not None and report.accuracy.miou is not None
    assert report.frame_score == pytest.approx(report.accuracy.miou, abs=1e-9) and report.frame_note == ""
    results = read_results(tmp_path / RESULTS_FILE, frames_of("test"))
    assert results.num_images == 2 and results.score == report.frame_score


def test_drawn_scenes_have_no_files_a1(workshop: Workshop, tmp_path: Path) -> None:
    config = Config(split="test", unseen_split="val", batch_size=4)
    report = validate(
        config, engine=workshop.engine("float", "cpu_onnxruntime"), data=workshop.data, out=tmp_path
    )
    assert report.frame_score is None and "are drawn, or no files of their own" in report.frame_note
