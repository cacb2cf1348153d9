"""The C++ program of a bundle: its answers are Python's, to the last pixel, and it refuses what it cannot run."""

import functools
import hashlib
import io
import json
import os
import re
import shutil
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import openvino
import pytest
from onnx import TensorProto, helper, numpy_helper

from tasks.parts.engines.frame_engine.engine import Engine
from tasks.parts.engines.frame_engine.pixels import find_classes
from tasks.parts.engines.frame_engine.sessions import openvino_core
from tasks.parts.engines.frame_engine_cpp.write import write_cpp
from tasks.parts.engines.machine import installed_version
from tasks.parts.engines.openvino.compile import export_blob
from tasks.parts.engines.runtimes import Runtime
from tests.cpp_programs import build_program, configure_program, onnxruntime_headers, onnxruntime_options
from tests.tensorrt_stand_in import GPU, StandInPlan, stand_in_version

HEIGHT, WIDTH = 37, 53
"""Odd: the frames of a file then start at addresses of any alignment."""

PROPERTIES = {
    "PERFORMANCE_HINT": "LATENCY",
    "NUM_STREAMS": 1,
    "INFERENCE_NUM_THREADS": 1,
    "INFERENCE_PRECISION_HINT": "f32",
    "ENABLE_CPU_PINNING": False,
}
READING = {"types": ["uint8"], "value_range": None, "resize_mode": "resize", "window_overlap": None}
Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Bundle:
    """A bundle with what its engine answers in Python."""

    folder: Path
    predict: Callable[[Array], Array]


def frames(count: int, height: int = HEIGHT, width: int = WIDTH, channels: int = 3) -> Array:
    return np.random.default_rng(count).integers(0, 256, (count, height, width, channels), dtype=np.uint8)


def graph_of_classes(
    num_classes: int, task: str, answer: int = TensorProto.UINT8, channels: int = 3
) -> onnx.ModelProto:
    """Return a graph from uint8 frames [N, H, W, C] to classes [N, H, W] or [N], with random weights."""
    generator = np.random.default_rng(num_classes)
    weights = {
        "scale": np.full((1, channels, 1, 1), 1 / 64, np.float32),
        "shift": np.full((1, channels, 1, 1), -2, np.float32),
        "first": generator.normal(size=(16, channels, 3, 3)).astype(np.float32),
        "last": generator.normal(size=(num_classes, 16, 1, 1)).astype(np.float32),
    }
    is_image = task == "classification"
    nodes = [
        helper.make_node("Transpose", ["frames"], ["planes"], perm=[0, 3, 1, 2]),
        helper.make_node("Cast", ["planes"], ["values"], to=TensorProto.FLOAT),
        helper.make_node("Mul", ["values", "scale"], ["scaled"]),
        helper.make_node("Add", ["scaled", "shift"], ["images"]),
        helper.make_node("Conv", ["images", "first"], ["features"], pads=[1, 1, 1, 1]),
        helper.make_node("Relu", ["features"], ["active"]),
        helper.make_node("GlobalMaxPool" if is_image else "Identity", ["active"], ["pooled"]),
        helper.make_node("Conv", ["pooled", "last"], ["map"]),
        helper.make_node("Flatten" if is_image else "Identity", ["map"], ["logits"]),
        helper.make_node("ArgMax", ["logits"], ["indices"], axis=1, keepdims=0),
        helper.make_node("Cast", ["indices"], ["classes"], to=answer),
    ]
    graph = helper.make_graph(
        nodes,
        "frames_to_classes",
        [helper.make_tensor_value_info("frames", TensorProto.UINT8, ["N", HEIGHT, WIDTH, channels])],
        [helper.make_tensor_value_info("classes", answer, ["N"] if is_image else ["N", HEIGHT, WIDTH])],
        [numpy_helper.from_array(value, name) for name, value in weights.items()],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    onnx.checker.check_model(model)
    return model


def openvino_bundle(model: onnx.ModelProto, folder: Path, max_batch: int = 1, **described: Any) -> Bundle:
    graph = openvino_core().read_model(io.BytesIO(model.SerializeToString()))
    channels = model.graph.input[0].type.tensor_type.shape.dim[3].dim_value
    graph.reshape({0: [openvino.Dimension(1, max_batch), HEIGHT, WIDTH, channels]})
    compiled = openvino_core().compile_model(graph, "CPU", PROPERTIES)
    request = compiled.create_infer_request()
    card = {
        "runtime": "openvino",
        "runtime_version": installed_version(Runtime.openvino),
        "options": {"properties": PROPERTIES, "isa": ["avx2"]},
    }
    write_bundle(folder, "engine.blob", export_blob(compiled), card, **described)
    return Bundle(folder, lambda frame_NHWC: request.infer({0: frame_NHWC})[0].copy())


def onnxruntime_bundle(model: onnx.ModelProto, folder: Path, max_batch: int = 1, **described: Any) -> Bundle:
    content = model.SerializeToString()
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.inter_op_num_threads = 1, 1
    session = onnxruntime.InferenceSession(content, options, providers=["CPUExecutionProvider"])
    card = {
        "runtime": "onnxruntime",
        "runtime_version": onnxruntime.__version__,
        "options": {"provider": "CPUExecutionProvider", "num_threads": 1, "needs_vnni": False},
    }
    write_bundle(folder, "engine.onnx", content, card, **described)
    return Bundle(folder, lambda frame_NHWC: session.run(None, {"frames": frame_NHWC})[0])


def tensorrt_bundle(model: onnx.ModelProto, folder: Path, max_batch: int = 1, **described: Any) -> Bundle:
    """A plan for the stand-in, with inputs and outputs as the graph's and answers of its own.

    TensorRT has no uint16: where the graph gives it, the plan gives logits, and the program takes the classes.
    """
    sizes = {one.name: one.type.tensor_type for one in (*model.graph.input, *model.graph.output)}
    shapes = {
        name: tuple(axis.dim_value or (-1 if max_batch > 1 else 1) for axis in one.shape.dim)
        for name, one in sizes.items()
    }
    [num_classes] = [one.dims[0] for one in model.graph.initializer if one.name == "last"]
    batch, *pixels = shapes["classes"]
    dtype = {TensorProto.UINT8: "|u1", TensorProto.INT64: "<i8"}.get(sizes["classes"].elem_type)
    gives = (dtype, shapes["classes"]) if dtype else ("<f4", (batch, num_classes, *pixels))
    plan = StandInPlan(("|u1", shapes["frames"]), gives, num_classes, [[1, max_batch]])
    card = plan_card(plan, channels=shapes["frames"][3], gives="classes" if dtype else "logits")
    write_bundle(folder, "engine.plan", plan.content(), card, **described)
    return Bundle(folder, plan if dtype else lambda frame_NHWC: find_classes(plan(frame_NHWC)))


def plan_card(plan: StandInPlan, channels: int = 3, **changes: Any) -> dict[str, Any]:
    """Return what model.json says of a plan alone."""
    return {
        "runtime": "tensorrt",
        "runtime_version": stand_in_version(),
        "custom_operators": [],
        "mean": [0.4] * channels,
        "std": [0.2] * channels,
        "threshold": None,
        "batches": plan.batches,
        "options": {
            "gpu": GPU,
            "version_compatible": False,
            "cuda_graph": True,
            "hardware_compatibility": "none",
        },
    } | changes


def write_bundle(
    folder: Path,
    file: str,
    content: bytes,
    card: dict[str, Any],
    task: str = "segmentation",
    reading: dict[str, Any] | None = None,
) -> None:
    folder.mkdir()
    (folder / file).write_bytes(content)
    shared = {
        "file": file,
        "sha256": hashlib.sha256(content).hexdigest(),
        "reads": "frames",
        "gives": "classes",
        "task": task,
        "reading": reading or READING,
    }
    assert write_cpp(shared | card, folder)


MAKERS = {"openvino": openvino_bundle, "onnxruntime": onnxruntime_bundle, "tensorrt": tensorrt_bundle}


@pytest.fixture(scope="module", params=MAKERS)
def runtime(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def built(runtime: str, tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    """A bundle of a segmentation engine whose program is built as a user would build it."""
    model = graph_of_classes(6, "segmentation")
    bundle = MAKERS[runtime](model, tmp_path_factory.mktemp(runtime) / "bundle")
    build_program(bundle.folder, runtime)
    return bundle


def infer(built: Bundle, *arguments: str | Path, stdin: bytes = b"") -> subprocess.CompletedProcess[bytes]:
    command = [built.folder / "infer", *arguments]
    return subprocess.run(command, input=stdin, capture_output=True, check=False)


def refusal(built: Bundle, *arguments: str | Path, stdin: bytes = b"") -> str:
    """Return the one line that the program says before it ends with 1."""
    run = infer(built, *arguments, stdin=stdin)
    assert run.returncode == 1, run.stderr
    text = run.stderr.decode()
    assert text.startswith("infer: ") and text.count("\n") == 1
    return text


def answers(bundle: Bundle, frames_NHWC: Array) -> Array:
    return np.concatenate([bundle.predict(frame[None]) for frame in frames_NHWC])


def test_masks_are_those_of_python_to_the_last_pixel(built: Bundle, tmp_path: Path) -> None:
    frames_NHWC = frames(100)
    np.save(tmp_path / "frames.npy", frames_NHWC)

    run = infer(built, tmp_path / "frames.npy", tmp_path / "masks.npy")

    assert (run.returncode, run.stdout, run.stderr) == (0, b"", b"")
    masks_NHW = np.load(tmp_path / "masks.npy")
    expected_NHW = answers(built, frames_NHWC)
    assert masks_NHW.dtype == np.uint8 and len(np.unique(expected_NHW)) > 2
    np.testing.assert_array_equal(masks_NHW, expected_NHW)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["frames.npy", "masks.npy"]
    np.save(tmp_path / "of_numpy.npy", expected_NHW)
    assert (tmp_path / "masks.npy").read_bytes() == (tmp_path / "of_numpy.npy").read_bytes()


def test_the_program_is_one_short_file(runtime: str, tmp_path: Path) -> None:
    bundle = MAKERS[runtime](graph_of_classes(6, "segmentation"), tmp_path / "bundle").folder

    assert sorted(path.name for path in (bundle / "cpp").iterdir()) == ["CMakeLists.txt", "infer.cpp"]
    lines = (bundle / "cpp" / "infer.cpp").read_text().splitlines()
    assert len(lines) < (700 if runtime == "tensorrt" else 460)
    assert max(len(line) for line in lines) <= 110
    assert [line for line in lines if line.startswith('#include "')] == []


def test_raw_frames_on_stdin_become_raw_masks_on_stdout(built: Bundle) -> None:
    frames_NHWC = frames(40)

    run = infer(built, "-", "-", stdin=frames_NHWC.tobytes())

    assert (run.returncode, run.stderr) == (0, b"")
    assert run.stdout == answers(built, frames_NHWC).tobytes()


def test_each_frame_of_a_stream_is_answered_before_the_next_is_sent(built: Bundle) -> None:
    with subprocess.Popen([built.folder / "infer", "-", "-"], stdin=-1, stdout=-1) as stream:
        assert stream.stdin is not None and stream.stdout is not None
        for frame in frames(3):
            stream.stdin.write(frame.tobytes())
            stream.stdin.flush()
            assert stream.stdout.read(HEIGHT * WIDTH) == built.predict(frame[None]).tobytes()


def test_a_long_stream_needs_no_more_memory_than_a_short_one(built: Bundle) -> None:
    frame = frames(1).tobytes()
    command = [built.folder / "infer", "-", "-", "--profile"]
    peaks_kib = []
    with subprocess.Popen(command, stdin=-1, stdout=-1, stderr=subprocess.DEVNULL) as stream:
        assert stream.stdin is not None and stream.stdout is not None
        for _ in range(2):
            for _ in range(1000):
                stream.stdin.write(frame)
                stream.stdin.flush()
                stream.stdout.read(HEIGHT * WIDTH)
            status = Path(f"/proc/{stream.pid}/status").read_text()
            peaks_kib += [int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM")]

    first, second = peaks_kib
    assert second - first < 1000  # of KiB: the masks alone of 1000 frames are 1900


@pytest.mark.parametrize(
    ("num_classes", "task", "answer", "dtype"),
    [
        (300, "segmentation", TensorProto.UINT16, np.uint16),
        (5, "classification", TensorProto.UINT8, np.uint8),
        (5, "classification", TensorProto.INT64, np.int64),
    ],
)
def test_answers_of_other_shapes_and_types(
    built: Bundle, runtime: str, tmp_path: Path, num_classes: int, task: str, answer: int, dtype: type
) -> None:
    bundle = MAKERS[runtime](graph_of_classes(num_classes, task, answer), tmp_path / "bundle", task=task)
    frames_NHWC = frames(7)
    np.save(tmp_path / "frames.npy", frames_NHWC)

    run = infer(built, tmp_path / "frames.npy", tmp_path / "masks.npy", "--bundle", bundle.folder)

    assert run.returncode == 0, run.stderr
    found, expected = np.load(tmp_path / "masks.npy"), answers(bundle, frames_NHWC)
    assert found.dtype == expected.dtype or runtime == "openvino"  # which answers int64 as int32
    assert found.dtype == dtype or answer == TensorProto.INT64
    np.testing.assert_array_equal(found, expected)


def test_an_engine_for_several_images_takes_one_frame_at_a_time(
    built: Bundle, runtime: str, tmp_path: Path
) -> None:
    bundle = MAKERS[runtime](graph_of_classes(6, "segmentation"), tmp_path / "bundle", 4)
    frames_NHWC = frames(9)

    run = infer(built, "-", "-", "--bundle", bundle.folder, stdin=frames_NHWC.tobytes())

    assert run.stdout == answers(bundle, frames_NHWC).tobytes(), run.stderr


def test_npy_files_of_other_versions_are_refused(built: Bundle, tmp_path: Path) -> None:
    """numpy.save writes version 1.0 for any array of numbers."""
    with (tmp_path / "frames.npy").open("wb") as file:
        np.lib.format.write_array(file, frames(3), version=(2, 0))

    assert "Write the frames with numpy.save" in refusal(
        built, tmp_path / "frames.npy", tmp_path / "masks.npy"
    )


def test_profile_tells_times_as_json(
    built: Bundle, runtime: str, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    frames_NHWC = frames(50)
    np.save(tmp_path / "frames.npy", frames_NHWC)

    run = infer(built, tmp_path / "frames.npy", tmp_path / "masks.npy", "--profile", "--repeat", "3")

    times = json.loads(run.stderr)
    assert set(times) == {"frames", "p50_ms", "p99_ms", "frames_per_s"}
    assert times["frames"] == 50 and len(np.load(tmp_path / "masks.npy")) == 50
    assert 0 < times["p50_ms"] <= times["p99_ms"]
    python_ms = []
    for frame in np.repeat(frames_NHWC, 3, axis=0):
        start = time.perf_counter()
        built.predict(frame[None])
        python_ms.append(1000 * (time.perf_counter() - start))
    record_property(f"{runtime}_cpp_p50_ms", times["p50_ms"])
    record_property(f"{runtime}_python_p50_ms", round(float(np.median(python_ms)), 4))


@pytest.mark.parametrize(
    ("array", "found"),
    [
        (
            frames(2).astype(np.float32),
            "the frames are of type <f4, the engine was measured on images of type uint8",
        ),
        (frames(2).astype(np.float64), "'descr': '<f8'"),
        (frames(2).astype(np.int8), "'descr': '|i1'"),
        (frames(2, channels=4), f"'shape': (2, {HEIGHT}, {WIDTH}, 4)"),
        (frames(1)[0], f"'shape': ({HEIGHT}, {WIDTH}, 3)"),
        (np.asfortranarray(frames(2)), "'fortran_order': True"),
        (frames(2)[:0], "at least one"),
    ],
    ids=["float32", "float64", "int8", "channels", "one frame", "order", "none"],
)
def test_frames_of_another_type_or_form_are_refused(
    built: Bundle, tmp_path: Path, array: Array, found: str
) -> None:
    np.save(tmp_path / "frames.npy", array)

    assert found in refusal(built, tmp_path / "frames.npy", tmp_path / "masks.npy")
    assert [path.name for path in tmp_path.iterdir()] == ["frames.npy"]


SIZES = [(HEIGHT, WIDTH), (121, 157), (20, 157), (121, 30), (16, 17), (300, 61)]
"""Of frames: the engine's; larger, smaller, and each along one axis."""


def deep_frames(dtype: str, count: int, height: int, width: int, channels: int) -> Array:
    """Return frames whose values lie around the range 0 .. 4095, or are no numbers at all."""
    values = np.random.default_rng(height).normal(2000, 1500, (count, height, width, channels))
    if dtype == "uint16":
        return values.clip(0, 65535).astype(np.uint16)
    values[:, ::7, ::5] = np.nan
    values[:, ::11, ::3] = np.inf
    return values.astype(np.float32)


@pytest.mark.parametrize("resize_mode", ["resize", "crop", "windows"])
@pytest.mark.parametrize(("dtype", "channels"), [("uint8", 3), ("uint16", 1), ("float32", 6)])
def test_frames_of_any_size_and_type_are_read_as_the_training_read_them_a1(
    built: Bundle, runtime: str, tmp_path: Path, resize_mode: str, dtype: str, channels: int
) -> None:
    value_range = None if dtype == "uint8" else [0.5, 4095.0]
    reading = {"types": [dtype], "value_range": value_range, "resize_mode": resize_mode, "window_overlap": 9}
    model = graph_of_classes(6, "segmentation", channels=channels)
    bundle = MAKERS[runtime](model, tmp_path / "bundle", reading=reading)
    engine = engine_in_python(bundle, reading, channels, "segmentation")
    for height, width in SIZES:
        make = frames if dtype == "uint8" else functools.partial(deep_frames, dtype)
        frames_NHWC = make(2, height, width, channels)
        np.save(tmp_path / "frames.npy", frames_NHWC)

        run = infer(built, tmp_path / "frames.npy", tmp_path / "masks.npy", "--bundle", bundle.folder)
        streamed = infer(
            built,
            *(
                "-",
                "-",
                "--frame-size",
                f"{width}x{height}",
                "--frame-type",
                dtype,
                "--bundle",
                bundle.folder,
            ),
            stdin=frames_NHWC.tobytes(),
        )

        assert run.returncode == 0, run.stderr
        expected_NHW = np.stack([engine.answer_image(frame) for frame in frames_NHWC])
        np.testing.assert_array_equal(np.load(tmp_path / "masks.npy"), expected_NHW)
        assert streamed.stdout == expected_NHW.tobytes(), streamed.stderr
        assert len(np.unique(expected_NHW)) > 2


def engine_in_python(bundle: Bundle, reading: dict[str, Any], channels: int, task: str) -> Engine:
    """Return the engine of the bundle as infer.py runs it."""
    card = {
        "task": task,
        "height": HEIGHT,
        "width": WIDTH,
        "mean": [0.0] * channels,
        "reads": "frames",
        "gives": "classes",
        "batches": [[1, 1]],
        "reading": reading,
    }
    return Engine(card, bundle.predict)


def test_the_class_of_a_frame_of_another_size(built: Bundle, runtime: str, tmp_path: Path) -> None:
    model = graph_of_classes(5, "classification")
    bundle = MAKERS[runtime](model, tmp_path / "bundle", task="classification")
    frames_NHWC = frames(3, 121, 157)
    np.save(tmp_path / "frames.npy", frames_NHWC)

    run = infer(built, tmp_path / "frames.npy", tmp_path / "classes.npy", "--bundle", bundle.folder)

    assert run.returncode == 0, run.stderr
    engine = engine_in_python(bundle, READING, 3, "classification")
    expected_N = [engine.answer_image(frame_HWC) for frame_HWC in frames_NHWC]
    np.testing.assert_array_equal(np.load(tmp_path / "classes.npy"), expected_N)


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({"types": ["uint16"], "value_range": [0, 4095]}, "type uint16 with the value_range 0 4095"),
        ({"types": []}, "no resize_mode or no types: another version wrote it"),
    ],
)
def test_frames_unlike_those_of_the_training_are_refused_a1(
    built: Bundle, runtime: str, tmp_path: Path, changed: dict[str, Any], told: str
) -> None:
    bundle = MAKERS[runtime](
        graph_of_classes(6, "segmentation"), tmp_path / "bundle", reading={**READING, **changed}
    )

    assert told in refusal(built, "-", "-", "--bundle", bundle.folder, stdin=frames(1).tobytes())


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("-", "-", "--frame-size", "12"), "expected WxH"),
        (("-", "-", "--frame-size", "12x0"), "expected WxH"),
        (("-", "-", "--frame-type", "int8"), "expected uint8, uint16 or float32"),
        (("frames.npy", "masks.npy", "--frame-size", "12x12"), "a .npy file names its own"),
    ],
)
def test_a_wrong_size_or_type_of_raw_frames_is_refused(
    built: Bundle, arguments: tuple[str, ...], told: str
) -> None:
    assert told in refusal(built, *arguments)


@pytest.mark.parametrize("size", [0, 9, 15, 64, 127, 128 + HEIGHT * WIDTH * 3 * 2 - 1])
def test_a_truncated_file_of_frames_is_refused(built: Bundle, tmp_path: Path, size: int) -> None:
    np.save(tmp_path / "frames.npy", frames(2))
    os.truncate(tmp_path / "frames.npy", size)

    assert "numpy.save" in refusal(built, tmp_path / "frames.npy", tmp_path / "masks.npy")
    assert [path.name for path in tmp_path.iterdir()] == ["frames.npy"]


def test_a_file_that_is_no_npy_is_refused(built: Bundle, tmp_path: Path) -> None:
    (tmp_path / "frames.npy").write_bytes(b"\x89PNG\r\n" + bytes(range(256)))

    assert "not a complete .npy file" in refusal(built, tmp_path / "frames.npy", tmp_path / "masks.npy")
    assert "No such file" in refusal(built, tmp_path / "none.npy", tmp_path / "masks.npy")


def test_a_stream_that_ends_within_a_frame_is_refused(built: Bundle) -> None:
    size = HEIGHT * WIDTH * 3

    text = refusal(built, "-", "-", stdin=frames(2).tobytes()[:-1])

    assert f"after {size - 1} of its {size} bytes" in text


@pytest.mark.parametrize("size", [0, 1, 55, 56, 63, 64, 119, 120, 1000])
def test_a_changed_engine_is_not_loaded(built: Bundle, tmp_path: Path, size: int) -> None:
    """The sizes are those around which SHA-256 pads to another block."""
    content = os.urandom(size)
    bundle = tmp_path / "bundle"
    shutil.copytree(built.folder, bundle, ignore=shutil.ignore_patterns("cpp", "infer"))
    [engine] = bundle.glob("engine.[bop]*")
    engine.write_bytes(content)

    text = refusal(built, "-", "-", "--bundle", bundle)

    assert f"its sha256 is {hashlib.sha256(content).hexdigest()}, engine.txt says" in text
    assert "changed or truncated" in text


@pytest.mark.parametrize(
    ("line", "changed", "told"),
    [
        ("runtime_version ", "runtime_version 1.0.", "was built and measured with"),
        ("runtime_version ", "version ", "was built and measured with"),
        ("file engine.", "file machine.", "cannot be read. Copy the bundle again"),
        ("sha256 ", "sha256 0", "changed or truncated"),
        ("sha256 ", "sum ", "changed or truncated"),
    ],
)
def test_a_bundle_that_does_not_fit_its_engine_is_refused(
    built: Bundle, tmp_path: Path, line: str, changed: str, told: str
) -> None:
    bundle = tmp_path / "bundle"
    shutil.copytree(built.folder, bundle, ignore=shutil.ignore_patterns("cpp", "infer"))
    text = (bundle / "engine.txt").read_text()
    assert line in text
    (bundle / "engine.txt").write_text(text.replace(line, changed))

    assert told in refusal(built, "-", "-", "--bundle", bundle)


@pytest.mark.parametrize(
    "arguments",
    [(), ("a",), ("a", "-"), ("-", "a"), ("-", "-", "--repeat", "0"), ("-", "-", "--repeat"), ("--fast",)],
)
def test_a_wrong_command_points_to_the_help(built: Bundle, arguments: tuple[str, ...]) -> None:
    assert "See --help" in refusal(built, *arguments)
    assert b"usage: infer" in infer(built, "--help").stdout


def test_answers_that_cannot_be_written_are_told(built: Bundle, tmp_path: Path) -> None:
    np.save(tmp_path / "frames.npy", frames(1))

    assert "No such file" in refusal(built, tmp_path / "frames.npy", tmp_path / "none" / "masks.npy")


def test_a_device_is_not_replaced_by_a_file(built: Bundle, tmp_path: Path) -> None:
    np.save(tmp_path / "frames.npy", frames(1))
    os.mkfifo(tmp_path / "pipe")

    assert "is not a file. Name a .npy file" in refusal(built, tmp_path / "frames.npy", tmp_path / "pipe")
    assert (tmp_path / "pipe").is_fifo()


def test_headers_newer_than_the_library_are_refused(tmp_path: Path) -> None:
    bundle = onnxruntime_bundle(graph_of_classes(6, "segmentation"), tmp_path / "bundle").folder
    headers = shutil.copytree(onnxruntime_headers(), tmp_path / "headers")
    api = headers / "onnxruntime_c_api.h"
    api.write_text(re.sub(r"define ORT_API_VERSION \d+", "define ORT_API_VERSION 99", api.read_text()))

    run = configure_program(bundle, onnxruntime_options(headers))

    assert run.returncode != 0
    assert re.search(r"headers are of ONNX Runtime 1\.99, the library is 1\.\d+\.\s+Set", run.stderr)


@pytest.mark.parametrize(
    ("runtime_name", "reads", "gives", "options"),
    [
        ("openvino", "normalised", "classes", {"properties": {}, "isa": []}),
        ("openvino", "frames", "logits", {"properties": {}, "isa": []}),
        ("onnxruntime", "frames", "classes", {"provider": "CUDAExecutionProvider"}),
    ],
)
def test_engines_without_a_program_get_no_files(
    tmp_path: Path, runtime_name: str, reads: str, gives: str, options: dict[str, Any]
) -> None:
    card = {"runtime": runtime_name, "reads": reads, "gives": gives, "task": "segmentation"}
    assert not write_cpp(card | {"options": options}, tmp_path)
    assert not list(tmp_path.iterdir())
