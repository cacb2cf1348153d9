"""Models of users, from the file to the pick: several channels, values, own metrics, quantized files."""

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import ModelProto, TensorProto, helper, numpy_helper
from onnxruntime.quantization import CalibrationDataReader, quantize_static
from PIL import Image

from tests.conftest import Workspace, copy_repository
from tests.test_onnx_smoke import classifier

pytestmark = pytest.mark.slow

SMALL = (
    "debug=smoke",
    "model.path=data/mine/model.onnx",
    "data=images",
    "prepare_data.height=32",
    "prepare_data.width=32",
    "prepare_data.folder.num_calibration=8",
)
METRIC = """import numpy as np


def closeness(outputs, labels):
    error = np.abs(outputs - labels).reshape(len(outputs), -1).mean(axis=1)
    return 1 / (1 + error)
"""


def regressor(channels: int) -> ModelProto:
    """Two convolutions and a map of one value for each fourth pixel, as a depth map has it."""
    random = np.random.default_rng(0)
    shapes = {"first": (8, channels, 3, 3), "second": (8, 8, 3, 3), "last": (1, 8, 1, 1)}
    constants = [
        numpy_helper.from_array((random.normal(size=shape) / 6).astype(np.float32), name)
        for name, shape in shapes.items()
    ]
    nodes = [
        helper.make_node("Conv", ["pixels", "first"], ["a"], strides=[2, 2], pads=[1, 1, 1, 1]),
        helper.make_node("Relu", ["a"], ["b"]),
        helper.make_node("Conv", ["b", "second"], ["c"], pads=[1, 1, 1, 1]),
        helper.make_node("Relu", ["c"], ["d"]),
        helper.make_node("Conv", ["d", "last"], ["depth"]),
    ]
    pixels = helper.make_tensor_value_info("pixels", TensorProto.FLOAT, ["n", channels, 32, 32])
    depth = helper.make_tensor_value_info("depth", TensorProto.FLOAT, ["n", 1, 16, 16])
    graph = helper.make_graph(nodes, "regressor", [pixels], [depth], constants)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def rows_of(space: Workspace) -> dict[tuple[str, str], dict[str, object]]:
    rows = json.loads((space.path / "artifacts/select_engine/engines.json").read_text())
    return {(row["variant"], row["target"]): row for row in rows}


def optimized(space: Workspace, *overrides: str) -> str:
    done = space.run("python", "-m", "flows.optimize", *SMALL, *overrides)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-8000:]
    return done.stdout + done.stderr


@pytest.fixture
def space(tmp_path: Path) -> Iterator[Workspace]:
    space = copy_repository(tmp_path / "space")
    (space.path / "data/mine/images").mkdir(parents=True)
    yield space
    space.run("python", "-m", "flows.local_server", "--stop")


def test_values_of_five_channels_and_then_a_metric_of_one_s_own(space: Workspace) -> None:
    random = np.random.default_rng(0)
    for number in range(40):
        flat = random.integers(0, 256, (4, 4, 5), np.uint8)
        np.save(space.path / f"data/mine/images/{number}.npy", flat.repeat(12, axis=0).repeat(12, axis=1))
    onnx.save(regressor(5), space.path / "data/mine/model.onnx")
    five = (
        "target=[cpu_onnxruntime]",
        "model=onnx",
        "model.output_kind=values",
        "prepare_data.folder.channels=5",
        "model.mean=[0.5,0.5,0.5,0.5,0.5]",
        "model.std=[0.25,0.25,0.25,0.25,0.25]",
    )
    output = optimized(space, *five)
    rows = rows_of(space)
    assert {row["metric"] for row in rows.values()} == {"agreement with the float model (1 - noise / signal)"}
    assert rows["imported", "cpu_onnxruntime"]["other_score"] > 1 - 1e-6
    ptq = rows["imported_ptq", "cpu_onnxruntime"]
    assert 0.9 < ptq["other_score"] < 1 and 10 < ptq["sqnr_db"] < 60 and 0.95 < ptq["cosine"] < 1
    texts = [
        (space.path / "artifacts/select_engine" / name).read_text() for name in ("report.md", "report.html")
    ]
    assert all("These scores are no accuracy" in text and " dB, cosine 0.9" in text for text in texts)
    assert "These scores are no accuracy" in " ".join(output.split())

    git = ("git", "-c", "user.name=Tests", "-c", "user.email=tests@localhost")
    (space.path / "metrics.py").write_text(METRIC)
    for command in (("add", "metrics.py"), ("commit", "-q", "-m", "Metric")):
        assert space.run(*git, *command).returncode == 0
    (space.path / "metrics.py").write_text(METRIC.replace("(1 + error)", "(1 + 2 * error)"))
    key = space.path / "artifacts/build_engine/imported/cpu_onnxruntime/key.json"
    built_ns = key.stat().st_mtime_ns
    optimized(space, *five, "model.metric=metrics.py:closeness")
    rows = rows_of(space)
    assert {row["metric"] for row in rows.values()} == {"closeness (own metric, against the float model)"}
    float_score, score = (
        rows[name, "cpu_onnxruntime"]["other_score"] for name in ("imported", "imported_ptq")
    )
    assert float_score > 0.9999 > score > 0.5
    assert key.stat().st_mtime_ns == built_ns, "an engine was built again for another metric"
    assert space.changed_stages() == {}
    sha256 = str(rows["imported", "cpu_onnxruntime"]["engine_sha256"])
    again = space.run("python", "-m", "flows.reproduce", sha256)
    assert again.returncode == 1 and "because it was changed and not committed" in again.stderr, again.stderr


class Arrays(CalibrationDataReader):
    """Images as quantize_static asks for them."""

    def __init__(self, images_NHWC: list[np.ndarray]) -> None:
        mean, std = np.array([0.485, 0.456, 0.406]), np.array([0.229, 0.224, 0.225])
        self.left = iter((((image / 255 - mean) / std).transpose(2, 0, 1)[None]) for image in images_NHWC)

    def get_next(self) -> dict[str, np.ndarray] | None:
        """Return the next one."""
        image = next(self.left, None)
        return None if image is None else {"pixels": image.astype(np.float32)}


def test_quantized_file_is_measured_beside_the_ladder_of_its_float_form(space: Workspace) -> None:
    random, small = np.random.default_rng(0), []
    for number in range(40):
        flat = random.integers(0, 128, (4, 4, 3), np.uint8)
        flat[..., number % 3] += 127
        small.append(flat.repeat(8, axis=0).repeat(8, axis=1))
        Image.fromarray(flat.repeat(12, axis=0).repeat(12, axis=1)).save(
            space.path / f"data/mine/images/{number}.png"
        )
    model = classifier()
    model.opset_import[0].version = 13
    onnx.save(model, space.path / "float.onnx")
    quantize_static(
        space.path / "float.onnx", space.path / "data/mine/model.onnx", Arrays(small), per_channel=True
    )
    quantized = ("model=onnx_quantized", "model.classes=[red,green,blue]")
    output = optimized(space, *quantized, "target=[cpu_onnxruntime,cpu_openvino]")
    rows = rows_of(space)
    assert {variant for variant, _ in rows} == {
        "imported",
        "imported_fp16",
        "imported_quantized",
        "imported_ptq",
        "imported_repaired",
        "imported_partial",
    }
    for target in ("cpu_onnxruntime", "cpu_openvino"):
        row = rows["imported_quantized", target]
        assert row["engine_sha256"] and row["verdict"] not in ("BUILD_FAILED", "PRECISION_MISMATCH"), row
        assert row["top1"] > 0.7 and "int8" in str(row["precision"]), row
    report = json.loads((space.path / "artifacts/import_onnx/report.json").read_text())
    assert all(found["sqnr_db"] >= 30 for found in report["quantized"]["differences"])
    assert "Traceback" not in output
