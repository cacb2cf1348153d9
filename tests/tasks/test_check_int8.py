import csv
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tasks.check_int8 import Answer, Config, Report, check_int8
from tasks.core.errors import ArtifactError

OP_TYPES = ["Conv", "Add", "Concat", "AveragePool", "Resize"]
CONFIG = Config(
    op_types=OP_TYPES,
    num_images=4,
    num_train_images=4,
    num_val_images=0,
    batch_size=4,
    suspect_loss=0.1,
    suspect_clipped_share=0.05,
)


def check(files: Any, out: Path, **changes: Any) -> Report:
    inputs = {
        "model": files.graph,
        "quantized": files.graph.parent / "model.onnx",
        "ranges": files.ranges,
        "trials": files.graph.parent / "calibrators.csv",
        "ranking": files.ranking,
        "data": files.data,
    }
    return check_int8(CONFIG, **(inputs | changes), out=out)


def answer(report: Report, word: str) -> Answer:
    return next(found for found in report.answers if word in found.question)


def test_a_ruined_layer_is_named_and_what_is_sound_is_not_suspect(unbalanced: Any, tmp_path: Path) -> None:
    report = check(unbalanced, tmp_path)
    assert report.float_score == 1.0
    assert report.score < 0.7
    suspect = answer(report, "Which layers")
    assert suspect.is_suspect
    assert suspect.found.startswith(unbalanced.node)
    assert answer(report, "classes").is_suspect
    assert not answer(report, "batch").is_suspect
    assert not answer(report, "calibrator").is_suspect  # one was tried
    assert report.num_suspect == sum(found.is_suspect for found in report.answers)
    lines = (tmp_path / "checklist.md").read_text(encoding="utf-8").splitlines()
    assert sum(line.startswith("- [") for line in lines) == len(report.answers)
    assert sum(line.startswith("  What to do:") for line in lines) == report.num_suspect


def test_a_layer_that_is_not_the_first_of_the_ranking_is_suspect(unbalanced: Any, tmp_path: Path) -> None:
    rows = list(csv.DictReader(unbalanced.ranking.open(encoding="utf-8")))
    assert float(rows[0]["score_drop"]) > CONFIG.suspect_loss > float(rows[-1]["score_drop"])
    with (tmp_path / "ranking.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows([rows[-1], *rows[:-1]])
    found = answer(check(unbalanced, tmp_path, ranking=tmp_path / "ranking.csv"), "Which layers")
    assert found.is_suspect
    assert "artifacts/diff_layers/<variant>/<target>" in found.advice


def test_calibration_images_unlike_those_of_training_are_found(unbalanced: Any, tmp_path: Path) -> None:
    data = Path(shutil.copytree(unbalanced.data, tmp_path / "dataset"))
    images_NHWC = np.load(data / "train_images.npy")
    np.save(data / "train_images.npy", 255 * (images_NHWC > 127).astype(np.uint8))  # far more contrast
    same = answer(check(unbalanced, tmp_path), "cover")
    found = answer(check(unbalanced, tmp_path, data=data), "cover")
    assert not same.is_suspect
    assert found.is_suspect
    assert "of its training values are beyond the range" in found.found


def test_one_calibration_image_is_enough_to_answer(unbalanced: Any, tmp_path: Path) -> None:
    data = Path(shutil.copytree(unbalanced.data, tmp_path / "dataset"))
    for kind in ("images", "masks"):
        values = np.load(data / f"calibration_{kind}.npy")
        np.save(data / f"calibration_{kind}.npy", values[:1])
    manifest = json.loads((data / "manifest.json").read_text(encoding="utf-8"))
    manifest["counts"]["calibration"] = 1
    (data / "manifest.json").write_text(json.dumps(manifest), encoding="utf-8")
    assert "with 1 of 1 images" in answer(check(unbalanced, tmp_path, data=data), "enough").found


def test_a_ranking_of_another_graph_is_refused(unbalanced: Any, tmp_path: Path) -> None:
    (tmp_path / "ranking.csv").write_text("node,score_drop\nother/Conv,0.1\n", encoding="utf-8")
    with pytest.raises(ArtifactError, match="Run rank_layers again"):
        check(unbalanced, tmp_path, ranking=tmp_path / "ranking.csv")


@pytest.mark.parametrize("text", ["", "a,b\n1,2\n"])
def test_a_damaged_table_is_refused(unbalanced: Any, tmp_path: Path, text: str) -> None:
    (tmp_path / "calibrators.csv").write_text(text, encoding="utf-8")
    with pytest.raises(ArtifactError, match="Run quantize_ptq again"):
        check(unbalanced, tmp_path, trials=tmp_path / "calibrators.csv")
