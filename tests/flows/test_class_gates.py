"""Limits of single classes are checked before the first stage."""

import json
from pathlib import Path
from typing import Any

import pytest

from flows.class_gates import check_class_gates
from flows.params import compose_params
from tasks.core.errors import ConfigError
from tasks.parts.sources.class_names import read_class_names
from tasks.parts.sources.config import Annotations, FolderConfig


@pytest.mark.parametrize(
    ("override", "text"),
    [
        (
            "+select_engine.class_limits={thre: 0.1}",
            r"^select_engine\.class_limits names thre, expected some of background, zero, one, two, three, four\.",
        ),
        (
            "+quantize_partial.class_floors={eight: 0.1}",
            r"^quantize_partial\.class_floors names eight, expected some of background, zero",
        ),
        (
            "+select_engine.class_floors={three: 0}",
            r"^select_engine\.class_floors\.three is 0, expected .* above 0",
        ),
    ],
)
def test_a_limit_of_a_class_that_does_not_exist_is_refused_with_the_known_ones_c2(
    override: str, text: str
) -> None:
    with pytest.raises(ConfigError, match=text):
        compose_params([override])


def test_limits_reach_every_stage_that_judges_c2() -> None:
    params = compose_params(["+select_engine.class_limits={three: 0.05, *: 0.2}"])
    for stage in ("select_engine", "quantize_partial", "quantize_repaired", "rank_layers"):
        assert params[stage]["class_limits"] == {"three": 0.05, "*": 0.2}
        assert params[stage]["class_floors"] == {}


def test_classes_named_by_numbers_are_names_c2(tmp_path: Path) -> None:
    (tmp_path / "classes.yaml").write_text("0: '10'\n1: '20'\n", encoding="utf-8")
    data = ["data=folder", f"prepare_data.root={tmp_path}", "+select_engine.class_limits={20: 0.1}"]
    assert compose_params(data)["select_engine"]["class_limits"] == {"20": 0.1}
    with pytest.raises(ConfigError, match=r"class_limits names 30, expected some of 10, 20\."):
        compose_params([*data[:2], "+select_engine.class_limits={30: 0.1}"])


def test_values_have_no_classes_to_limit_c2() -> None:
    params = compose_params(["+select_engine.class_limits={three: 0.1}"])
    params["import_onnx"] = {"output_kind": "values"}
    with pytest.raises(ConfigError, match=r"names three, but the model has no classes"):
        check_class_gates(params)


@pytest.mark.parametrize(
    ("source", "classes"),
    [("voc", ("background", "aeroplane")), ("cityscapes", ("road", "sidewalk"))],
)
def test_layouts_bring_their_classes_along_c2(tmp_path: Path, source: str, classes: Any) -> None:
    names = read_class_names(source, tmp_path, scenes=None, folder=None)
    assert names is not None and names[:2] == classes
    assert read_class_names("images", tmp_path, scenes=None, folder=None) is None


def test_classes_of_coco_are_its_categories_c2(tmp_path: Path) -> None:
    image = {"id": 1, "file_name": "1.jpg", "height": 4, "width": 4}
    square = {"id": 1, "image_id": 1, "category_id": 3, "iscrowd": 0, "segmentation": [[0, 0, 2, 0, 2, 2]]}
    content = {"images": [image], "categories": [{"id": 3, "name": "cat"}], "annotations": [square]}
    (tmp_path / "annotations").mkdir()
    for split in ("train", "val"):
        file = tmp_path / f"annotations/instances_{split}2017.json"
        file.write_text(json.dumps(content), encoding="utf-8")
    section = compose_params(["model=onnx", "model.path=m.onnx", "data=coco"])["prepare_data"]["folder"]
    section |= {"annotations": Annotations.instances}
    folder = FolderConfig(**section)
    assert read_class_names("coco", tmp_path, scenes=None, folder=folder) == ("background", "cat")
