"""prepare_data on COCO in its own layout: panoptic masks and instances."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tasks.core.config import typed_config
from tasks.core.errors import ConfigError, DataError
from tasks.parts.data.class_table import IGNORE_INDEX
from tasks.prepare_data import Config, environment
from tests.tasks.parts.sources.runs import (
    HEIGHT,
    WIDTH,
    config_of,
    fails,
    masks_of,
    pixels,
    run,
    section_of,
    write_image,
    write_mask,
)

PERSON, DOG, GRASS = 1, 18, 193
CATEGORIES = [{"id": DOG, "name": "dog"}, {"id": PERSON, "name": "person"}, {"id": GRASS, "name": "grass"}]
COUNTS = {"train2017": 8, "val2017": 2}


def box(left: int, top: int, right: int, bottom: int) -> list[float]:
    """Return the polygon of a box whose pixels are left .. right - 1, top .. bottom - 1."""
    return [left, top, right, top, right, bottom, left, bottom]


def colour_of(segment: int) -> tuple[int, int, int]:
    return segment % 256, segment // 256 % 256, segment // 65536


def images_of(folder: str) -> list[dict[str, Any]]:
    start = 100 if folder == "train2017" else 200
    return [
        {"id": start + number, "file_name": f"{start + number:012}.jpg", "height": HEIGHT, "width": WIDTH}
        for number in range(COUNTS[folder])
    ]


def write_json(path: Path, content: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content))


@pytest.fixture
def images(tmp_path: Path) -> Path:
    root = tmp_path / "coco"
    for folder in COUNTS:
        for image in images_of(folder):
            write_image(root / folder / str(image["file_name"]), int(image["id"]))
    return root


@pytest.fixture
def panoptic(images: Path) -> Path:
    """Make panoptic masks: grass with a dog on it, a crowd of persons, and a row that is no segment."""
    for folder in COUNTS:
        annotations = []
        for image in images_of(folder):
            segments = {GRASS: 70_000 + image["id"], DOG: 300, PERSON: 7}
            mask = np.zeros((HEIGHT, WIDTH, 3), np.uint8)
            mask[1:] = colour_of(segments[GRASS])
            mask[1:, 6:12] = colour_of(segments[DOG])
            mask[1:, 20:] = colour_of(segments[PERSON])
            name = str(image["file_name"]).replace(".jpg", ".png")
            write_mask(images / f"annotations/panoptic_{folder}/{name}", mask)
            info = [
                {"id": segment, "category_id": category, "iscrowd": int(category == PERSON), "area": 1}
                for category, segment in segments.items()
            ]
            annotations.append({"image_id": image["id"], "file_name": name, "segments_info": info})
        content = {"images": images_of(folder), "annotations": annotations, "categories": CATEGORIES}
        write_json(images / f"annotations/panoptic_{folder}.json", content)
    return images


@pytest.fixture
def instances(images: Path) -> Path:
    """Make instances: a large person, a small dog on it that is listed first, a crowd, an image without objects."""
    for folder in COUNTS:
        annotations: list[dict[str, Any]] = []
        for image in images_of(folder)[:-1]:
            crowd = np.zeros((HEIGHT, WIDTH), np.uint8)
            crowd[10:14, 2:20] = 1
            lengths = np.diff(
                np.flatnonzero(np.diff(crowd.ravel(order="F"), prepend=1 - crowd[0, 0])), append=0
            )
            counts = [int(length) for length in lengths[:-1]]
            counts.append(crowd.size - sum(counts))
            shapes: list[tuple[int, Any]] = [
                (DOG, [box(8, 2, 12, 6), box(14, 2, 16, 6)]),
                (PERSON, [box(4, 1, 18, 9)]),
                (PERSON, {"counts": counts, "size": [HEIGHT, WIDTH]}),
            ]
            annotations += [
                {
                    "id": 10 * image["id"] + number,
                    "image_id": image["id"],
                    "category_id": category,
                    "segmentation": shape,
                    "iscrowd": int(isinstance(shape, dict)),
                }
                for number, (category, shape) in enumerate(shapes)
            ]
        content = {"images": images_of(folder), "annotations": annotations, "categories": CATEGORIES}
        write_json(images / f"annotations/instances_{folder}.json", content)
    return images


def change(root: Path, file: str, edit: Callable[[Any], None]) -> None:
    path = root / "annotations" / file
    content = json.loads(path.read_text())
    edit(content)
    path.write_text(json.dumps(content))


def test_panoptic_segments_become_categories(panoptic: Path, tmp_path: Path) -> None:
    report = run("coco", panoptic, tmp_path / "out")
    assert report.classes == ("person", "dog", "grass")
    assert report.num_images == {"train": 7, "val": 1, "test": 2, "calibration": 2}
    mask = masks_of(tmp_path / "out", "test")[pixels(panoptic / "val2017/000000000200.jpg")]
    expected = np.full((HEIGHT, WIDTH), 2)
    expected[:, 6:12] = 1
    expected[:, 20:] = IGNORE_INDEX  # the crowd
    expected[0] = IGNORE_INDEX  # no segment
    assert (mask == expected).all()


def test_images_may_lie_in_a_folder_of_their_own(panoptic: Path, tmp_path: Path) -> None:
    (panoptic / "images").mkdir()
    for folder in COUNTS:
        (panoptic / folder).rename(panoptic / "images" / folder)
    assert run("coco", panoptic, tmp_path / "out").num_images["test"] == 2


def test_small_objects_lie_over_large_ones_and_crowds_are_ignored(instances: Path, tmp_path: Path) -> None:
    report = run("coco", instances, tmp_path / "out", annotations="instances")
    assert report.classes == ("background", "person", "dog", "grass")
    test = masks_of(tmp_path / "out", "test")
    expected = np.zeros((HEIGHT, WIDTH))
    expected[10:14, 2:20] = IGNORE_INDEX
    expected[1:9, 4:18] = 1
    expected[2:6, 8:12] = expected[2:6, 14:16] = 2
    assert (test[pixels(instances / "val2017/000000000200.jpg")] == expected).all()
    assert (test[pixels(instances / "val2017/000000000201.jpg")] == 0).all()


def test_later_one_of_equal_objects_lies_above(instances: Path, tmp_path: Path) -> None:
    def stack(content: Any) -> None:
        first, second, *_ = content["annotations"]
        first["segmentation"] = second["segmentation"] = [box(0, 0, 8, 8)]
        content["annotations"] = [first, second]

    change(instances, "instances_val2017.json", stack)
    run("coco", instances, tmp_path / "out", annotations="instances")
    mask = masks_of(tmp_path / "out", "test")[pixels(instances / "val2017/000000000200.jpg")]
    assert (mask[:8, :8] == 1).all() and (mask[8:] == 0).all()


def test_class_list_in_the_root_unites_categories(instances: Path, tmp_path: Path) -> None:
    (instances / "classes.yaml").write_text(
        "classes: [{name: rest, ids: [0, 193]}, {name: alive, ids: [1, 18]}]\n"
    )
    report = run("coco", instances, tmp_path / "out", annotations="instances")
    assert report.classes == ("rest", "alive")
    mask = masks_of(tmp_path / "out", "test")[pixels(instances / "val2017/000000000200.jpg")]
    assert (mask[1:9, 4:18] == 1).all()


def test_environment_names_pycocotools_for_coco_only() -> None:
    assert "pycocotools" in environment(config_of("coco"))
    libraries = {"imagecodecs", "imagehash", "numpy", "pillow", "scikit-learn", "scipy", "tifffile"}
    assert set(environment(config_of("voc"))) == libraries


def test_annotations_belong_to_coco_only() -> None:
    for source, annotations in (("coco", None), ("voc", "panoptic")):
        content = section_of(source)
        content["folder"]["annotations"] = annotations
        with pytest.raises(ConfigError, match=r"prepare_data\.folder\.annotations is .*, and source is"):
            typed_config(Config, content, "prepare_data")


def without(name: str, key: str) -> Callable[[Any], None]:
    return lambda content: content[name][0].pop(key)


@pytest.mark.parametrize(
    ("edit", "match"),
    [
        (lambda content: content.pop("categories"), r"has no list 'categories'"),
        (without("images", "file_name"), r"a row of 'images' has no 'file_name'"),
        (without("annotations", "segments_info"), r"a row of 'annotations' has no 'segments_info'"),
        (lambda c: c["annotations"][0]["segments_info"][0].pop("id"), r"a segment without id or category_id"),
        (lambda c: c["annotations"][0]["segments_info"].pop(1), r"holds the segment 300, which .* not list"),
        (lambda c: c["annotations"][0].update(image_id=5), r"an annotation is of image 5, which is not in"),
        (lambda c: c["annotations"][0].update(file_name="x.png"), r"lists the mask 'x\.png', but"),
        (lambda c: c["images"][0].update(file_name="../x.jpg"), r"'\.\./x\.jpg' is refused"),
        (
            lambda c: c["images"][0].update(file_name="x.jpg"),
            r"lists the image 'x\.jpg', but .* does not exist",
        ),
        (lambda c: c["images"].append(c["images"][0]), r"id 200 appears twice in 'images'"),
        (
            lambda c: c["images"][1].update(file_name=c["images"][0]["file_name"]),
            r"file_name '000000000200\.jpg' appears in 2 rows of 'images'",
        ),
        (
            lambda c: c["annotations"].append(c["annotations"][1]),
            r"image_id 201 appears in 2 rows of 'annotations'",
        ),
        (
            lambda c: c["categories"].append({"id": DOG, "name": "cat"}),
            r"id 18 appears twice in 'categories'",
        ),
        (lambda c: c["categories"][0].update(name="person"), r"class name 'person' appears twice"),
        (
            lambda c: c["categories"][0].update(name="hound"),
            r"categories differ from those of .*train2017\.json",
        ),
        (lambda c: c["categories"].pop(0), r"an annotation is of category 18, which is not in 'categories'"),
    ],
)
def test_json_that_contradicts_itself_is_named(
    panoptic: Path, tmp_path: Path, edit: Callable[[Any], None], match: str
) -> None:
    change(panoptic, "panoptic_val2017.json", edit)
    fails("coco", panoptic, tmp_path / "out", r"panoptic_val2017\.?.*" + match, DataError)


def test_json_that_cannot_be_read_is_named(panoptic: Path, tmp_path: Path) -> None:
    path = panoptic / "annotations/panoptic_train2017.json"
    path.write_bytes(path.read_bytes()[:-20])
    fails("coco", panoptic, tmp_path / "out", r"panoptic_train2017\.json: not valid JSON", DataError)


def test_missing_annotations_name_the_choice(panoptic: Path, tmp_path: Path) -> None:
    fails(
        "coco",
        panoptic,
        tmp_path / "out",
        r"holds no file instances_<train\|val><year>\.json.*folder\.annotations=panoptic",
        DataError,
        annotations="instances",
    )


def test_image_without_panoptic_mask_is_named(panoptic: Path, tmp_path: Path) -> None:
    change(panoptic, "panoptic_val2017.json", lambda content: content["annotations"].pop(0))
    fails("coco", panoptic, tmp_path / "out", r"1 image\(s\) have no mask, the first: .*000000000200\.jpg")
    assert run("coco", panoptic, tmp_path / "skipped", missing_masks="skip").num_images["test"] == 1


@pytest.mark.parametrize(
    ("shape", "match"),
    [
        ("text", r"annotation 2000 is no polygon and no run lengths of 24 x 16 pixels"),
        ({"counts": [5, 5]}, r"annotation 2000 is no polygon"),
        ({"counts": [16, 16], "size": [8, 4]}, r"annotation 2000 is no polygon"),
        ({"counts": [5, 5], "size": [16, 24]}, r"annotation 2000 is no polygon"),
        ([[1, 2, 3, 4]], r"annotation 2000 is no polygon"),
        ([], r"annotation 2000 has no segmentation and no bbox"),
    ],
)
def test_broken_shape_is_named(instances: Path, tmp_path: Path, shape: Any, match: str) -> None:
    change(
        instances,
        "instances_val2017.json",
        lambda content: content["annotations"][0].update(segmentation=shape),
    )
    fails("coco", instances, tmp_path / "out", match, DataError, annotations="instances")


def test_two_rows_of_one_file_are_refused_for_instances_too(instances: Path, tmp_path: Path) -> None:
    change(
        instances,
        "instances_val2017.json",
        lambda content: content["images"][1].update(file_name=content["images"][0]["file_name"]),
    )
    match = r"instances_val2017\.json: file_name '000000000200\.jpg' appears in 2 rows of 'images'"
    fails("coco", instances, tmp_path / "out", match, DataError, annotations="instances")


def test_size_of_the_json_is_held_against_the_image(instances: Path, tmp_path: Path) -> None:
    def widen(content: Any) -> None:
        content["images"][0]["width"] = 30
        content["annotations"] = content["annotations"][:2]  # the run lengths say 24 x 16

    change(instances, "instances_val2017.json", widen)
    match = r"is 24 x 16 .*instances_val2017\.json: image 200 is 30 x 16"
    fails("coco", instances, tmp_path / "out", match, DataError, annotations="instances")


ROAD, TRAM = 0, 1
EXPORTED = [{"id": ROAD, "name": "road"}, {"id": TRAM, "name": "tram"}]


def write_export(
    root: Path,
    file: str,
    names: dict[str, str],
    *,
    categories: list[dict[str, Any]] = EXPORTED,
    objects: tuple[tuple[int, Any], ...] = ((ROAD, [box(0, 8, 24, 16)]), (TRAM, [box(4, 2, 12, 6)])),
) -> None:
    """Write images, by their place below the root the `file_name` of each, and a JSON file with objects of each."""
    images: list[dict[str, Any]] = []
    annotations: list[dict[str, Any]] = []
    for number, (place, name) in enumerate(names.items()):
        write_image(root / place, len(file) * 100 + number)
        images.append({"id": number, "file_name": name, "height": HEIGHT, "width": WIDTH})
        annotations += [
            {
                "id": 10 * number + each,
                "image_id": number,
                "category_id": category,
                "segmentation": shape,
                "bbox": [20, 0, 4, 4],
            }
            for each, (category, shape) in enumerate(objects)
        ]
    write_json(root / file, {"images": images, "annotations": annotations, "categories": categories})


def test_export_of_roboflow_is_read_with_its_splits_c4(tmp_path: Path) -> None:
    root = tmp_path / "roboflow"
    categories = [
        {"id": 0, "name": "things", "supercategory": "none"},
        {"id": 1, "name": "tram", "supercategory": "things"},
    ]
    objects = ((1, [box(4, 2, 12, 6)]),)
    for split, count in (("train", 6), ("valid", 2), ("test", 1)):
        names = {f"{split}/{number}_jpg.rf.ab.jpg": f"{number}_jpg.rf.ab.jpg" for number in range(count)}
        file = f"{split}/_annotations.coco.json"
        write_export(root, file, names, categories=categories, objects=objects)
    report = run("coco", root, tmp_path / "out", annotations="instances")
    assert report.classes == ("background", "tram")
    assert report.num_images == {"train": 6, "val": 2, "test": 1, "calibration": 2}
    assert any("category 'things' is the group of the others" in text for text in report.warnings)
    [mask] = masks_of(tmp_path / "out", "test").values()
    assert (mask[2:6, 4:12] == 1).all() and mask.sum() == 4 * 8


@pytest.mark.parametrize("folder", ["images/", "images/default/", ""])
def test_export_of_cvat_has_sub_folders_and_a_category_0_c4(tmp_path: Path, folder: str) -> None:
    root = tmp_path / "cvat"
    names = {
        f"{folder}street{number // 4}/{number}.jpg": f"street{number // 4}/{number}.jpg"
        for number in range(16)
    }
    write_export(root, "annotations/instances_default.json", names)
    report = run("coco", root, tmp_path / "out", annotations="instances")
    assert report.classes == ("background", "road", "tram") and report.num_groups == 4
    assert sum(report.num_images[split] for split in ("train", "val", "test")) == 16
    mask = next(iter(masks_of(tmp_path / "out", "val").values()))
    assert (mask[8:] == 1).all() and (mask[2:6, 4:12] == 2).all() and (mask[:2] == 0).all()


@pytest.mark.parametrize("splits", [("train", "test"), ("Train", "Test")])
def test_splits_of_cvat_are_kept_and_val_is_drawn_c4(tmp_path: Path, splits: tuple[str, str]) -> None:
    root = tmp_path / "cvat"
    for split, count in zip(splits, (12, 3), strict=True):
        names = {f"images/{split}/{number}.jpg": f"{number}.jpg" for number in range(count)}
        write_export(root, f"annotations/instances_{split}.json", names)
    report = run("coco", root, tmp_path / "out", annotations="instances")
    assert report.num_images == {"train": 11, "val": 1, "test": 3, "calibration": 2}
    assert report.split_origins["val"].startswith("drawn from train")


def test_export_without_train_is_refused_c4(tmp_path: Path) -> None:
    """Its images were in test and train."""
    names = {f"images/{number}.jpg": f"{number}.jpg" for number in range(10)}
    write_export(tmp_path / "cvat", "annotations/instances_Test.json", names)
    text = r"instances_Test\.json and no annotations of train, expected some to train on"
    fails("coco", tmp_path / "cvat", tmp_path / "none", text, DataError, annotations="instances")


def test_boxes_without_a_shape_are_ignored_or_refused_c4(tmp_path: Path) -> None:
    names = {f"images/{number}.jpg": f"{number}.jpg" for number in range(10)}
    file = "annotations/instances_default.json"
    write_export(tmp_path / "some", file, names, objects=((ROAD, [box(0, 8, 24, 16)]), (TRAM, [])))
    report = run("coco", tmp_path / "some", tmp_path / "out", annotations="instances")
    assert any("10 object(s) are boxes without a segmentation" in text for text in report.warnings)
    mask = next(iter(masks_of(tmp_path / "out", "test").values()))
    assert (mask[:4, 20:] == IGNORE_INDEX).all() and (mask == IGNORE_INDEX).sum() == 16
    write_export(tmp_path / "all", file, names, objects=((TRAM, []),))
    text = r"all 10 annotations are boxes without a segmentation, which is data for detection"
    fails("coco", tmp_path / "all", tmp_path / "none", text, DataError, annotations="instances")


def test_image_that_an_export_lacks_is_named_with_the_folders_c4(tmp_path: Path) -> None:
    names = {f"images/{number}.jpg": f"{number}.jpg" for number in range(10)}
    write_export(tmp_path / "cvat", "annotations/instances_train.json", names)
    (tmp_path / "cvat/images/7.jpg").unlink()
    text = (
        r"lists the image '7\.jpg', but .*images/7\.jpg does not exist\. Expected .* below .*images/train or"
    )
    fails("coco", tmp_path / "cvat", tmp_path / "none", text, DataError, annotations="instances")
