"""Rendered pages and the model that reads their orientation: the data set of benchmarks/pages.py, small."""

import csv
from pathlib import Path
from typing import Any

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
    next_num_val,
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
from tasks.parts.selection.engine_row import Verdict

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


def test_more_pages_only_append_and_pages_differ(pages: Path, tmp_path: Path) -> None:
    few, more = (draw_pages("val", count, families(), seed=0) for count in (2, 4))
    assert all(np.array_equal(one, other) for one, other in zip(few, more, strict=False))
    assert len({page_HWC.tobytes() for page_HWC in more}) == 4
    write_pages(tmp_path / "again", {"train": 1, "val": 4}, families())
    first = sorted((pages / "images").rglob("val_*.png"))
    again = [tmp_path / "again" / file.relative_to(pages) for file in first]
    assert [file.read_bytes() for file in first] == [file.read_bytes() for file in again]


def test_data_set_keeps_the_pixels_and_the_order_of_the_classes(pages: Path, dataset: Path) -> None:
    manifest = read_manifest(dataset)
    assert manifest.classes == CLASSES
    assert manifest.counts == {split: 4 * count for split, count in NUM_PAGES.items()} | {
        "calibration": 4 * NUM_PAGES["train"]
    }
    images_NHWC = open_images(dataset, "val")
    labels_N = open_labels(dataset, "val", Task.classification)
    page_HWC = np.asarray(Image.open(pages / "images/0/val_00000.png"))
    [label] = [
        labels_N[place] for place, image_HWC in enumerate(images_NHWC) if (image_HWC == page_HWC).all()
    ]
    assert label == 0
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


def engine(
    variant: str, precision: str, verdict: Verdict, images_needed: int | None = None
) -> dict[str, Any]:
    """A row of the results of an engine that was built."""
    return {
        "variant": variant,
        "target": "cpu_openvino",
        "precision": precision,
        "verdict": verdict,
        "picked": False,
        "images_needed": images_needed,
        "top1": 0.96,
        "score_rel_loss": 0.01,
        "score_rel_loss_low": -0.005,
        "score_rel_loss_high": 0.03,
        "standing": "within" if verdict is Verdict.ACCEPT else "unproven",
        "unseen_loss": {"rel_loss": 0.012, "low": 0.001, "high": 0.019},
        "unseen_standing": "within",
        "latency_ms_p50": 3.4,
    }


MISSING = dict.fromkeys(
    ("top1", "score_rel_loss", "score_rel_loss_low", "score_rel_loss_high", "standing", "unseen_loss"),
) | {
    "variant": "imported",
    "target": "cpu_openvino_bf16",
    "precision": "bf16",
    "verdict": "SKIPPED",
    "picked": False,
    "images_needed": None,
    "unseen_standing": None,
    "latency_ms_p50": None,
}


def test_second_run_has_as_many_images_as_the_int8_engines_need() -> None:
    def needed(*rows: dict[str, Any], num_val: int = 160) -> int | None:
        return next_num_val({"num_val_images": num_val, "engines": [MISSING, *rows]})

    ptq = engine("imported_ptq", "int8+f32", Verdict.UNPROVEN, 701)
    partial = engine("imported_partial", "int8", Verdict.UNPROVEN, 350)
    imported = engine("imported", "f32", Verdict.UNPROVEN, 2000)
    assert needed(imported, ptq, partial) == 704  # four images a page
    assert (
        needed(engine("imported_ptq", "int8", Verdict.UNPROVEN), partial) == 3200
    )  # far more than there are
    assert needed(engine("imported_ptq", "int8", Verdict.UNPROVEN), num_val=3200) is None
    assert needed(imported, engine("imported_ptq", "int8", Verdict.ACCEPT)) is None


def test_table_shows_intervals_and_an_engine_that_was_not_built() -> None:
    loss = {"rel_loss": 0.02, "low": -0.01, "high": 0.05}
    val = {"float_score": 0.98, "ptq_score": 0.9, "partial_score": 0.96, "num_float_layers": 3}
    val |= {"partial_rel_loss": loss, "partial_standing": "unproven"}
    rows = [
        MISSING,
        engine("imported_ptq", "int8", Verdict.UNPROVEN, 701),
        engine("imported_partial", "int8", Verdict.ACCEPT),
    ]
    text = table([{"num_val_images": 8, "engines": rows, "val": val}])
    assert "| 8 | imported | cpu_openvino_bf16 | - | - | - | - | SKIPPED |" in text
    losses = "0.9600 | 1.00 % (-0.50 to 3.00) | 1.20 % (0.10 to 1.90) | 3.40"
    assert f"| 8 | imported_ptq | cpu_openvino | {losses} | UNPROVEN, about 701 images needed |" in text
    assert "8 validation images: float 0.9800" in text and "2.00 % (-1.00 to 5.00) is unproven." in text
    assert "about 1 of 2 INT8 engines; the test images decide the same about 1, leave 0 open" in text
