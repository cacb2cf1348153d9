"""The whole way of a model that somebody else made, small, by both drivers."""

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import ModelProto, TensorProto, helper, numpy_helper
from PIL import Image

from tests.conftest import REPOSITORY, Workspace, copy_repository
from tests.wheels import run_tests_over

pytestmark = pytest.mark.slow

OVERRIDES = (
    "debug=smoke",
    "model=onnx",
    "model.path=data/mine/model.onnx",
    "model.classes=[red,green,blue]",
    "data=images",
    "prepare_data.height=32",
    "prepare_data.width=32",
    "prepare_data.folder.num_calibration=8",
    "target=[cpu_onnxruntime,cpu_openvino]",
)
VARIANTS = ("imported", "imported_fp16", "imported_ptq", "imported_repaired", "imported_partial")


def classifier() -> ModelProto:
    """Two convolutions and a linear layer of opset 11, with a fixed batch, as old files have it."""
    random = np.random.default_rng(0)
    shapes = {"first": (16, 3, 3, 3), "second": (16, 16, 3, 3), "last": (16, 3)}
    weights = {name: random.normal(size=shape) / 40 for name, shape in shapes.items()}
    for channel in range(16):  # each follows one colour from the image to its answer
        weights["first"][channel, channel % 3] += 1 / 9
        weights["second"][channel, channel, 1, 1] += 1
        weights["last"][channel, channel % 3] += 1
    constants = [numpy_helper.from_array(values.astype(np.float32), name) for name, values in weights.items()]
    constants.append(numpy_helper.from_array(np.array([1, 16]), "shape"))
    nodes = [
        helper.make_node("Conv", ["pixels", "first"], ["a"], strides=[2, 2], pads=[1, 1, 1, 1]),
        helper.make_node("Relu", ["a"], ["b"]),
        helper.make_node("Conv", ["b", "second"], ["c"], pads=[1, 1, 1, 1]),
        helper.make_node("Relu", ["c"], ["d"]),
        helper.make_node("GlobalAveragePool", ["d"], ["e"]),
        helper.make_node("Reshape", ["e", "shape"], ["f"]),
        helper.make_node("Gemm", ["f", "last"], ["answer"]),
    ]
    pixels = helper.make_tensor_value_info("pixels", TensorProto.FLOAT, [1, 3, 32, 32])
    answer = helper.make_tensor_value_info("answer", TensorProto.FLOAT, [1, 3])
    graph = helper.make_graph(nodes, "classifier", [pixels], [answer], constants)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 11)], ir_version=6)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Workspace, str]]:
    space = copy_repository(tmp_path_factory.mktemp("onnx"))
    images = space.path / "data" / "mine" / "images"
    images.mkdir(parents=True)
    random = np.random.default_rng(0)
    for number in range(40):
        flat = random.integers(0, 128, (4, 4, 3), np.uint8)
        flat[..., number % 3] += 127
        Image.fromarray(flat.repeat(12, axis=0).repeat(12, axis=1)).save(images / f"{number}.png")
    onnx.save(classifier(), images.parent / "model.onnx")
    done = space.run("python", "-m", "flows.optimize", *OVERRIDES)
    try:
        assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-8000:]
        yield space, done.stdout + done.stderr
    finally:
        space.run("python", "-m", "flows.local_server", "--stop")


def test_every_rung_becomes_an_engine_and_the_float_model_agrees_with_itself(
    finished: tuple[Workspace, str],
) -> None:
    space, output = finished
    rows = json.loads((space.path / "artifacts/select_engine/engines.json").read_text())
    assert {(row["variant"], row["target"]) for row in rows} == {
        (variant, target) for variant in VARIANTS for target in ("cpu_onnxruntime", "cpu_openvino")
    }
    found = {(row["variant"], row["target"]): row for row in rows}
    assert found["imported", "cpu_onnxruntime"]["top1"] == 1.0
    for row in rows:
        assert row["metric"] == "agreement with the float model (top-1)" and row["miou"] is None
        assert row["latency_ms_p50"] > 0 and 0.3 < row["top1"] <= 1.0
    assert "Traceback" not in output and "agreement with the" in output


def test_every_rung_is_built_by_tensorrt(finished: tuple[Workspace, str], tensorrt_builder: Path) -> None:
    environment = {"PYTHONPATH": f"{REPOSITORY}:{tensorrt_builder}", "RUN": str(finished[0].path)}
    run_tests_over("tests/over_tensorrt_rungs.py", environment)


def test_report_says_agreement_and_names_its_reference(finished: tuple[Workspace, str]) -> None:
    space, _ = finished
    for name in ("report.md", "report.html"):
        text = (space.path / "artifacts/select_engine" / name).read_text(encoding="utf-8")
        assert "agreement with the float model (top-1)" in text and "imported on cpu_onnxruntime" in text
        assert "mIoU" not in text and "eager" not in text.split("plotly")[0]
    report = json.loads((space.path / "artifacts/import_onnx/report.json").read_text())
    assert (report["task"], report["opset_before"], report["static_batch_before"]) == (
        "classification",
        11,
        1,
    )


def test_both_drivers_agree_on_what_is_done(finished: tuple[Workspace, str]) -> None:
    space, _ = finished
    again = space.run("python", "-m", "flows.optimize", *OVERRIDES)
    assert "stages run: 0 of" in again.stdout, again.stdout[-3000:] + again.stderr[-3000:]
    assert space.changed_stages() == {}
    assert space.reproduce() == []


def test_bundle_classifies_without_the_repository(finished: tuple[Workspace, str], tmp_path: Path) -> None:
    space, _ = finished
    bundle = space.path / "artifacts/select_engine/bundles/cpu_onnxruntime"
    if not bundle.is_dir():
        pytest.skip("no engine of cpu_onnxruntime was accepted at this size")
    images_NHWC = np.load(space.path / "artifacts/label_images/dataset/test_images.npy")
    labels_N = np.load(space.path / "artifacts/label_images/dataset/test_labels.npy")
    np.save(tmp_path / "images.npy", images_NHWC)
    done = space.run(
        "python", "-I", str(bundle / "infer.py"), f"{tmp_path}/images.npy", f"{tmp_path}/classes.npy"
    )
    assert done.returncode == 0, done.stderr
    found_N = np.load(tmp_path / "classes.npy")
    assert found_N.shape == labels_N.shape and (found_N == labels_N).mean() > 0.9


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (("model=onnx",), "model.path is missing"),
        (
            ("model=onnx", "model.path=x.onnx", "data=images", "target=[cpu_torch,cpu_onnxruntime]"),
            "target cpu_torch runs",
        ),
        (("model=onnx", "model.path=x.onnx"), "data is digit_scenes"),
        (("model=onnx", "model.path=x.onnx", "data=images"), "x.onnx is missing"),
        (("data=class_folder",), "data is class_folder, which has no masks"),
        (
            ("model=onnx", "model.path=x.onnx", "data=images", "target=[cpu_openvino]"),
            "It has to include cpu_onnxruntime",
        ),
    ],
)
def test_mistake_is_refused_before_any_stage(
    workspace: Workspace, overrides: tuple[str, ...], expected: str
) -> None:
    failed = workspace.run("python", "-m", "flows.optimize", *overrides)
    assert failed.returncode == 1 and expected in failed.stderr and "Traceback" not in failed.stderr
    assert not (workspace.path / "artifacts").exists()
