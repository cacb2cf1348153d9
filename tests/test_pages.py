"""Rendered pages and the model that reads their orientation: the data set of benchmarks/pages.py, small."""

import csv
from pathlib import Path

import matplotlib
import numpy as np
import pytest
from PIL import Image

from benchmarks.pages import (
    CLASSES,
    MODEL_SHA256,
    OVERRIDES,
    ModelMissing,
    fetch_model,
    holds_pages,
    table,
    write_pages,
)
from benchmarks.rendered_pages import Difficulty, draw_pages, find_families
from flows.params import compose_params
from tasks import import_onnx, prepare_data
from tasks.core.config import typed_config
from tasks.parts.data.dataset import open_images, open_labels, read_manifest
from tasks.parts.data.input_card import Task
from tasks.parts.onnx_graphs.graph import read_graph
from tasks.parts.onnx_graphs.predict import predict_classes

NUM_PAGES = {"train": 2, "val": 3, "test": 8}


def families() -> list[tuple[Path, Path]]:
    """DejaVu as matplotlib ships it."""
    return find_families([Path(matplotlib.get_data_path()) / "fonts" / "ttf"])


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("rendered") / "pages"
    write_pages(root, NUM_PAGES, families())
    return root


@pytest.fixture(scope="module")
def dataset(pages: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The data set that the pipeline makes of the pages with the benchmark's overrides."""
    out = tmp_path_factory.mktemp("prepared")
    section = compose_params(OVERRIDES)["prepare_data"]
    prepare_data.prepare_data(typed_config(prepare_data.Config, section, "prepare_data"), root=pages, out=out)
    return out / "dataset"


def test_every_image_has_a_group_and_a_group_is_one_page_in_four_orientations(pages: Path) -> None:
    with (pages / "groups.csv").open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    listed = [
        name for split in NUM_PAGES for name in (pages / f"{split}.txt").read_text(encoding="utf-8").split()
    ]
    assert sorted(row["image"] for row in rows) == sorted(listed)
    assert len(listed) == 4 * sum(NUM_PAGES.values())
    assert holds_pages(pages, 3) and not holds_pages(pages, 4)
    members = [row["image"] for row in rows if row["group"] == "val_00001"]
    assert members == [f"{name}/val_00001" for name in CLASSES]
    upright_HWC, *turned = (np.asarray(Image.open(pages / "images" / f"{name}.png")) for name in members)
    for quarter, image_HWC in enumerate(turned, start=1):
        assert np.array_equal(np.rot90(image_HWC, quarter), upright_HWC)  # rot90 turns against the clock


def test_more_pages_only_append_and_pages_differ(pages: Path) -> None:
    few, more = (draw_pages("val", count, families(), seed=0) for count in (2, 4))
    assert all(np.array_equal(one, other) for one, other in zip(few, more, strict=False))
    assert len({page_HWC.tobytes() for page_HWC in more}) == 4


def test_data_set_keeps_the_pixels_and_the_order_of_the_classes(pages: Path, dataset: Path) -> None:
    manifest = read_manifest(dataset)
    assert manifest.classes == CLASSES
    assert manifest.counts == {split: 4 * count for split, count in NUM_PAGES.items()} | {
        "calibration": 4 * NUM_PAGES["train"]
    }
    images_NHWC = open_images(dataset, "val")
    labels_N = open_labels(dataset, "val", Task.classification)
    assert np.array_equal(images_NHWC[0], np.asarray(Image.open(pages / "images/0/val_00000.png")))
    assert sorted(labels_N.tolist()) == [label for label in range(4) for _ in range(NUM_PAGES["val"])]


def test_imported_model_sees_how_pages_are_turned(dataset: Path, tmp_path: Path) -> None:
    try:
        fetch_model(tmp_path / "fetched.onnx")
    except ModelMissing as error:
        pytest.skip(str(error))
    section = compose_params(OVERRIDES)["import_onnx"]
    report = import_onnx.import_onnx(
        typed_config(import_onnx.Config, section, "import_onnx"),
        model=tmp_path / "fetched.onnx",
        data=dataset,
        out=tmp_path,
    )
    assert (report.task, report.num_classes, report.max_batch) == (Task.classification, 4, None)
    classes_N = predict_classes(
        read_graph(tmp_path / "model.onnx"), open_images(dataset, "test"), batch_size=8
    )
    assert (
        classes_N == open_labels(dataset, "test", Task.classification)
    ).mean() > 0.8  # 0.975 of 800 images of the benchmark


def test_another_model_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model.onnx").write_bytes(b"another")
    with pytest.raises(ModelMissing, match=f"expected {MODEL_SHA256}. Delete it"):
        fetch_model(tmp_path / "model.onnx")


def test_difficulty_changes_the_page() -> None:
    plain = Difficulty(contrast=(1.0, 1.0), blur_px=(0.0, 0.0), noise=(0.0, 0.0))
    [clear] = draw_pages("val", 1, families(), seed=0, difficulty=plain)
    [disturbed] = draw_pages("val", 1, families(), seed=0, difficulty=Difficulty(noise=(20.0, 20.0)))
    assert clear.shape == (224, 224, 3) and clear.std() != disturbed.std()


def test_table_shows_an_engine_that_was_not_built() -> None:
    missing = {"variant": "imported", "target": "cpu_openvino_bf16", "verdict": "SKIPPED", "picked": False}
    numbers = {"top1": None, "score_rel_loss": None, "race_latency_ms_p50": None}
    val = {"float_score": 0.98, "ptq_score": 0.9, "partial_score": 0.96, "num_float_layers": 3}
    text = table(
        [{"num_val_images": 8, "engines": [missing | numbers], "val": val | {"partial_gate_holds": False}}]
    )
    assert "| 8 | imported | cpu_openvino_bf16 | - | - | - | SKIPPED |" in text
    assert "8 validation images: float 0.9800" in text and "fails the gate" in text
