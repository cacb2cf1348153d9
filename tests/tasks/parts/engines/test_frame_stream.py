"""Streams of frames through an engine whose answer is the first channel of its input, so that order shows."""

import hashlib
import io
import itertools
import json
import os
import signal
import subprocess
import sys
import threading
import time
import tracemalloc
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper
from PIL import Image

from tasks.parts.data.image_files import ResizeMode, fit_image, fit_mask, read_image
from tasks.parts.engines.frame_engine.command import describe_profile
from tasks.parts.engines.frame_engine.engine import Engine, load_engine
from tasks.parts.engines.frame_engine.images import fit_frame
from tasks.parts.engines.frame_engine.sources import Source, open_source
from tasks.parts.engines.frame_engine.stream import PHASES, Durations, Timings, open_sink, run_stream
from tasks.parts.reading.rules import Reading
from tasks.parts.reading.sizes import restore_mask
from tasks.parts.selection.bundle import INFER, copy_frame_engine

Array = np.ndarray[Any, Any]

HEIGHT, WIDTH = 6, 8
SIZE = (HEIGHT, WIDTH)

MAX_BATCH = 4
READING = {"types": ["uint8"], "value_range": None, "resize_mode": "resize", "window_overlap": None}
DEFAULTS: dict[str, Any] = {
    "task": "segmentation",
    "classes": ["a"] * 256,
    "height": HEIGHT,
    "width": WIDTH,
    "mean": [0] * 3,
    "reading": READING,
}


def graph_of(card: dict[str, Any], dtype: str) -> onnx.ModelProto:
    """Return a graph that answers with the first channel of a frame, or with the means of all channels."""
    size, channels = (card["height"], card["width"]), len(card["mean"])
    kind = helper.np_dtype_to_tensor_dtype(np.dtype("float32" if card["task"] == "values" else dtype))
    constants = {"first": np.array(0), "axes": np.array([1, 2])}
    if card["task"] == "values":
        nodes = [("Cast", ["frames"], {"to": kind}), ("ReduceMean", ["axes"], {"keepdims": 0})]
        shape: list[Any] = ["batch", channels]
    else:
        nodes = [("Gather", ["frames", "first"], {"axis": 3})]
        shape = ["batch", *size]
        if card["task"] == "classification":
            nodes += [("Gather", ["first"], {"axis": 2}), ("Gather", ["first"], {"axis": 1})]
            shape = ["batch"]
        nodes += [("Cast", [], {"to": kind})]
    tensors = [f"t{number}" for number in range(len(nodes))]
    made = []
    for number, (op_type, inputs, attributes) in enumerate(nodes):
        read = inputs if number == 0 else [tensors[number - 1], *inputs]
        made.append(helper.make_node(op_type, read, [tensors[number]], **attributes))
    graph = helper.make_graph(
        made,
        "first_channel",
        [helper.make_tensor_value_info("frames", onnx.TensorProto.UINT8, ["batch", *size, channels])],
        [helper.make_tensor_value_info(tensors[-1], kind, shape)],
        [onnx.numpy_helper.from_array(values, name) for name, values in constants.items()],
    )
    return helper.make_model(graph, ir_version=10, opset_imports=[helper.make_opsetid("", 20)])


def write_engine(folder: Path, dtype: str = "uint8", **changes: Any) -> Path:
    """Write a bundle whose engine repeats what it reads."""
    card = DEFAULTS | changes
    if not (folder / "frame_engine").is_dir():
        copy_frame_engine(folder)
    (folder / "infer.py").write_text(INFER)
    content = graph_of(card, dtype).SerializeToString()
    (folder / "engine.onnx").write_bytes(content)
    session = {
        "provider": "CPUExecutionProvider",
        "provider_options": {},
        "num_threads": 1,
        "needs_vnni": False,
    }
    card |= {
        "runtime": "onnxruntime",
        "package": "onnxruntime",
        "runtime_version": version("onnxruntime"),
        "file": "engine.onnx",
        "sha256": hashlib.sha256(content).hexdigest(),
        "std": [1] * len(card["mean"]),
        "reads": "frames",
        "threshold": None,
        "gives": "logits" if card["task"] == "values" else "classes",
        "batches": [[1, MAX_BATCH]],
        "options": session,
    }
    (folder / "model.json").write_text(json.dumps(card))
    return folder


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    return write_engine(tmp_path / "bundle")


def command(bundle: Path, *arguments: object) -> list[str]:
    return [sys.executable, str(bundle / "infer.py"), *map(str, arguments)]


def infer(bundle: Path, *arguments: object, stdin: bytes = b"") -> subprocess.CompletedProcess[bytes]:
    """Run infer.py as a user would, away from the repository."""
    done = subprocess.run(
        command(bundle, *arguments),
        input=stdin,
        capture_output=True,
        cwd=bundle.parent,
        timeout=60,
        check=False,
    )
    assert b"Traceback" not in done.stderr, done.stderr.decode()
    return done


def loaded(folder: Path, **card: Any) -> Engine:
    return load_engine(write_engine(folder, **card))


def numbered(count: int, size: tuple[int, int] = SIZE, channels: int = 3) -> Array:
    """Return frames whose values are their number, modulo 251."""
    numbers = (np.arange(count) % 251).astype(np.uint8)
    return np.ascontiguousarray(np.broadcast_to(numbers[:, None, None, None], (count, *size, channels)))


def stream_of(count: int, decode: Callable[[int], Array] | None = None) -> Source:
    frames_NHWC = numbered(251)
    items = ((f"{index:06d}", index) for index in range(count))
    return Source(items, decode or (lambda index: frames_NHWC[index % 251]))


class Collected:
    """What was written."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self.answers: list[Array] = []

    def __call__(self, name: str, answer: Array) -> None:
        self.names.append(name)
        self.answers.append(answer)


@pytest.mark.parametrize(("batch", "num_decoders"), [(1, 1), (1, 4), (3, 4), (4, 2)])
def test_order_is_kept_while_frames_are_decoded_out_of_order(
    tmp_path: Path, batch: int, num_decoders: int
) -> None:
    def decode(index: int) -> Array:
        time.sleep(0.004 if index % 3 == 0 else 0)
        return numbered(251)[index]

    engine, written, timings = loaded(tmp_path), Collected(), Timings()
    run_stream(
        engine, stream_of(50, decode), written, timings=timings, batch=batch, num_decoders=num_decoders
    )
    assert written.names == [f"{index:06d}" for index in range(50)]
    assert [int(answer[0, 0]) for answer in written.answers] == list(range(50))
    assert timings.num_frames == 50


def test_outputs_are_finished_before_the_next_run_overwrites_them(tmp_path: Path) -> None:
    engine, written = loaded(tmp_path), Collected()
    finish = engine.finish

    def slow(outputs: Array) -> Array:
        time.sleep(0.003)
        return np.array(finish(outputs))

    engine.finish = slow
    run_stream(engine, stream_of(30), written, timings=Timings())
    assert [int(answer[0, 0]) for answer in written.answers] == list(range(30))


def test_phases_overlap(tmp_path: Path) -> None:
    """Frame 0 is written while frame 1 runs and frame 3 is decoded: each waits for the others to begin."""
    engine, frames_NHWC = loaded(tmp_path), numbered(5)
    begun = {name: threading.Event() for name in ("decode", "run", "write")}
    run = engine.run

    def meet(name: str) -> None:
        begun[name].set()
        for other, event in begun.items():
            assert event.wait(60), f"{name} does not overlap with {other}"

    def decode(index: int) -> Array:
        if index == 3:
            meet("decode")
        return np.array(frames_NHWC[index])

    def run_frame(inputs: Array) -> Array:
        if inputs[0, 0, 0, 0] == 1:
            meet("run")
        return np.array(run(inputs))

    def write(name: str, answer: Array) -> None:
        if name == "000000":
            meet("write")

    engine.run = run_frame
    run_stream(engine, stream_of(5, decode), write, timings=Timings())


def test_memory_is_flat_over_ten_thousand_frames(tmp_path: Path) -> None:
    engine, timings, count = loaded(tmp_path), Timings(), itertools.count(1)
    sizes: list[int] = []

    def write(name: str, answer: Array) -> None:
        if next(count) % 2000 == 0:
            sizes.append(tracemalloc.get_traced_memory()[0])

    tracemalloc.start()
    try:
        run_stream(engine, stream_of(10_000), write, timings=timings, num_decoders=2)
    finally:
        tracemalloc.stop()
    assert timings.num_frames == 10_000 and len(sizes) == 5
    assert max(sizes) - sizes[0] < 64 * 1024  # one list of a float a frame would add 64 kB in 2000 frames


def test_frames_in_flight_are_bounded(tmp_path: Path) -> None:
    engine, read, written = loaded(tmp_path), itertools.count(), itertools.count()
    furthest: list[int] = []
    num_read = num_written = 0

    def items() -> Iterator[tuple[str, int]]:
        nonlocal num_read
        for num_read in read:
            furthest.append(num_read - num_written)
            if num_read == 200:
                return
            yield str(num_read), num_read

    def write(name: str, answer: Array) -> None:
        nonlocal num_written
        time.sleep(0.001)
        num_written = next(written)

    decode = stream_of(0).decode
    run_stream(engine, Source(items(), decode), write, timings=Timings(), batch=2, num_decoders=2)
    assert max(furthest) <= 2 * 2 + 2 + 4 * 2


class Fault(Exception):
    pass


@pytest.mark.parametrize("place", ["read", "decode", "prepare", "run", "finish", "write"])
@pytest.mark.parametrize("index", [0, 20])
def test_an_error_in_any_thread_ends_the_stream(tmp_path: Path, place: str, index: int) -> None:
    engine, calls = loaded(tmp_path), itertools.count()

    def faulty(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            if next(calls) == index:
                raise Fault(place)
            return function(*arguments)

        return call

    source, write = stream_of(10**9), Collected()
    if place == "read":
        items = map(faulty(lambda item: item), source.items)
        source = Source(items, source.decode)
    elif place == "decode":
        source = Source(source.items, faulty(source.decode))
    elif place != "write":
        setattr(engine, place, faulty(getattr(engine, place)))
    with pytest.raises(Fault, match=place):
        run_stream(
            engine, source, faulty(write) if place == "write" else write, timings=Timings(), num_decoders=2
        )
    assert write.names == [f"{number:06d}" for number in range(len(write.names))]
    wait_for_threads()


def wait_for_threads() -> None:
    deadline = time.monotonic() + 10
    while (
        left := [item for item in threading.enumerate() if "_work" in item.name]
    ) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert left == []


def test_a_write_error_ends_a_stream_that_waits_for_its_source(tmp_path: Path) -> None:
    engine, is_over = loaded(tmp_path), threading.Event()

    def items() -> Iterator[tuple[str, int]]:
        yield "first", 0
        is_over.wait(60)

    def write(name: str, answer: Array) -> None:
        raise Fault

    start = time.monotonic()
    with pytest.raises(Fault):
        run_stream(engine, Source(items(), stream_of(0).decode), write, timings=Timings())
    is_over.set()
    assert time.monotonic() - start < 30


def test_a_stream_without_frames_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"there is no frame to read, expected at least one\."):
        run_stream(loaded(tmp_path), stream_of(0), Collected(), timings=Timings())


@pytest.mark.parametrize("channels", [1, 3, 5])
@pytest.mark.parametrize("size", [(12, 20), (5, 7), (3, 30), (6, 8)])
def test_frames_are_resized_as_prepare_data_does(size: tuple[int, int], channels: int) -> None:
    frame_HWC = np.random.default_rng(0).integers(0, 256, (*size, channels), np.uint8)
    for mode, name in ((ResizeMode.resize, "resize"), (ResizeMode.crop, "crop")):
        expected = fit_image(frame_HWC, height=HEIGHT, width=WIDTH, mode=mode)
        np.testing.assert_array_equal(fit_frame(frame_HWC, size=SIZE, mode=name), expected)


def test_letterbox_keeps_the_aspect_ratio() -> None:
    frame_HWC = np.full((6, 24, 3), 200, np.uint8)
    fitted_HWC = fit_frame(frame_HWC, size=SIZE, mode="letterbox")  # 24 x 6 becomes 8 x 2
    assert fitted_HWC.shape == (HEIGHT, WIDTH, 3)
    assert (fitted_HWC[2:4] == 200).all() and not fitted_HWC[:2].any() and not fitted_HWC[4:].any()


@pytest.mark.parametrize("size", [(12, 16), (18, 40), (3, 2)])  # no ties, which Pillow rounds down or up
def test_stretched_masks_are_restored_with_their_nearest_pixels(size: tuple[int, int]) -> None:
    mask_HW = np.random.default_rng(0).integers(0, 9, SIZE, np.uint8)
    expected = fit_mask(mask_HW, height=size[0], width=size[1], mode=ResizeMode.resize, fill=0)
    np.testing.assert_array_equal(restore_mask(mask_HW, size=size, mode="resize"), expected)


@pytest.mark.parametrize("size", [(12, 21), (5, 7), (3, 30), (6, 8)])
def test_restored_crops_ignore_what_was_cut_off(size: tuple[int, int]) -> None:
    frame_HWC = np.random.default_rng(0).integers(0, 200, (*size, 1), np.uint8)
    mask_HW = fit_frame(frame_HWC, size=SIZE, mode="crop")[..., 0]
    restored_HW = restore_mask(mask_HW, size=size, mode="crop")
    is_seen = restored_HW != 255
    assert is_seen.sum() == min(size[0], HEIGHT) * min(size[1], WIDTH)
    np.testing.assert_array_equal(restored_HW[is_seen], frame_HWC[..., 0][is_seen])


def test_restored_letterbox_has_no_padding() -> None:
    mask_HW = np.full(SIZE, 7, np.uint8)
    mask_HW[2:4] = np.arange(16).reshape(2, 8)  # where a frame of 24 x 6 lies
    restored_HW = restore_mask(mask_HW, size=(6, 24), mode="letterbox")
    np.testing.assert_array_equal(restored_HW, mask_HW[2:4].repeat(3, axis=0).repeat(3, axis=1))


class Rules:
    channels, max_pixels, value_range = 3, 10**6, (0, 65535)

    def __init__(self, channels: int) -> None:
        self.channels = channels


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize(
    "kind",
    ["rgb.png", "grey.png", "deep.png", "clear.png", "palette.png", "turned.jpg", "grey.jpg", "deep.tif"],
)
def test_images_are_decoded_as_prepare_data_does(tmp_path: Path, kind: str, channels: int) -> None:
    random, path = np.random.default_rng(0), tmp_path / kind
    values_HWC = random.integers(0, 256, (5, 7, 4), np.uint8)
    rgb = Image.fromarray(values_HWC[..., :3])
    exif = Image.Exif()
    exif[274] = 6
    images = {
        "rgb": rgb,
        "grey": rgb.convert("L"),
        "deep": Image.fromarray(random.integers(0, 2**16, (5, 7), np.uint16)),
        "clear": Image.fromarray(values_HWC),
        "palette": rgb.convert("P"),
        "turned": rgb,
    }
    images[path.stem].save(path, **({"exif": exif} if path.stem == "turned" else {}))
    reading = Reading(types=("uint16", "uint8"), value_range=(0, 65535))
    source = open_source(str(path), channels=channels, size=SIZE, reading=reading)
    [(name, item)] = source.items
    assert name == path.stem
    np.testing.assert_array_equal(source.decode(item), read_image(path, Rules(channels)))


def test_folder_gives_its_images_by_name(tmp_path: Path) -> None:
    for name, value in (("b.png", 2), ("a.jpg", 1), ("c.npy", 3)):
        if name.endswith("npy"):
            np.save(tmp_path / name, np.full((5, 5, 3), value, np.uint8))
        else:
            Image.new("RGB", (5, 5), (value,) * 3).save(tmp_path / name)
    (tmp_path / "notes.txt").write_text("no image")
    source = open_source(str(tmp_path), channels=3, size=SIZE)
    decoded = [(name, int(source.decode(item)[0, 0, 0])) for name, item in source.items]
    assert decoded == [("a", 1), ("b", 2), ("c", 3)]


def test_folder_of_arrays_feeds_an_engine_of_any_number_of_channels(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.full((5, 5, 7), 9, np.uint8))
    source = open_source(str(tmp_path), channels=7, size=SIZE)
    assert [source.decode(item).shape for _, item in source.items] == [(5, 5, 7)]


def truncated(path: Path, content: bytes) -> Path:
    path.write_bytes(content[: len(content) // 2])
    return path


def test_damaged_files_are_named(tmp_path: Path) -> None:
    buffer = io.BytesIO()
    Image.fromarray(np.random.default_rng(0).integers(0, 256, (50, 50, 3), np.uint8)).save(buffer, "PNG")
    (tmp_path / "empty.png").touch()
    for path in (truncated(tmp_path / "half.png", buffer.getvalue()), tmp_path / "empty.png"):
        source = open_source(str(path), channels=3, size=SIZE)
        [(_, item)] = source.items
        with pytest.raises(
            ValueError, match=rf"{path.name}: (cannot be decoded as PNG|0 bytes).*Restore the file"
        ):
            source.decode(item)
    buffer = io.BytesIO()
    np.save(buffer, numbered(4))
    with pytest.raises(ValueError, match=r"half.npy: not a complete .npy file .*numpy\.save"):
        open_source(str(truncated(tmp_path / "half.npy", buffer.getvalue())), channels=3, size=SIZE)


@pytest.mark.parametrize(
    ("make", "channels", "message"),
    [
        (lambda path: None, 3, "source: not found. Name a .npy file, an image, a folder, a video, or - for"),
        (lambda path: path.mkdir(), 3, "source: holds no image, expected files .png, "),
        (lambda path: path.write_bytes(b"x"), 5, "source: the engine reads 5 channels. Give it .npy files."),
    ],
)
def test_unusable_sources_are_refused(
    tmp_path: Path, make: Callable[[Path], None], channels: int, message: str
) -> None:
    make(tmp_path / "source")
    with pytest.raises(ValueError, match=message.replace(".", r"\.")):
        open_source(str(tmp_path / "source"), channels=channels, size=SIZE)


def test_arrays_of_another_type_are_refused(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", numbered(2).astype(np.float32))
    with pytest.raises(ValueError, match=r"images are float32 \[2, 6, 8, 3\], expected uint8 \[N, H, W, 3\]"):
        open_source(str(tmp_path / "a.npy"), channels=3, size=SIZE)


def test_two_images_of_one_name_are_refused(tmp_path: Path) -> None:
    for name in ("a.jpg", "a.png"):
        Image.new("RGB", (5, 5)).save(tmp_path / name)
    with pytest.raises(ValueError, match=r"a.png: has the name of a.jpg. Rename one of them"):
        open_source(str(tmp_path), channels=3, size=SIZE)


def test_missing_packages_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("av", "cv2", "PIL", "PIL.Image"):
        monkeypatch.setitem(sys.modules, module, None)
    (tmp_path / "a.mp4").write_bytes(b"x")
    (tmp_path / "a.png").write_bytes(b"x")
    with pytest.raises(ValueError, match=r"a.mp4: .*a video needs PyAV or OpenCV\. Run pip install av"):
        open_source(str(tmp_path / "a.mp4"), channels=3, size=SIZE)
    with pytest.raises(ValueError, match=r"need Pillow\. Run pip install pillow"):
        open_source(str(tmp_path / "a.png"), channels=3, size=SIZE)


def write_video(path: Path, frames_NHWC: Array) -> None:
    """Write a video without loss (FFV1 in RGB)."""
    import av

    with av.open(str(path), "w") as container:
        stream = container.add_stream("ffv1", rate=10)
        stream.height, stream.width = frames_NHWC.shape[1:3]
        stream.pix_fmt = "bgr0"
        for frame_HWC in frames_NHWC:
            container.mux(stream.encode(av.VideoFrame.from_ndarray(frame_HWC, format="rgb24")))
        container.mux(stream.encode())


@pytest.fixture(scope="module")
def video(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Array]:
    """A video, and its frames."""
    path = tmp_path_factory.mktemp("video") / "a.mkv"
    frames_NHWC = np.random.default_rng(0).integers(0, 256, (9, 32, 48, 3), np.uint8)
    write_video(path, frames_NHWC)
    return path, frames_NHWC


@pytest.mark.parametrize("missing", ["cv2", "av"])
@pytest.mark.parametrize("channels", [1, 3])
def test_video_gives_its_frames_in_order(
    video: tuple[Path, Array], missing: str, channels: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, missing, None)
    source = open_source(str(video[0]), channels=channels, size=SIZE)
    frames = [source.decode(item) for _, item in source.items]
    expected = [np.asarray(Image.fromarray(frame)) for frame in video[1]]
    if channels == 1:
        expected = [np.asarray(Image.fromarray(frame).convert("L"))[..., None] for frame in expected]
    np.testing.assert_array_equal(frames, expected)


@pytest.mark.parametrize("missing", ["cv2", "av"])
def test_damaged_videos_are_refused(
    video: tuple[Path, Array], missing: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, missing, None)
    (tmp_path / "a.mkv").write_bytes(video[0].read_bytes()[:40])
    with pytest.raises(ValueError, match=r"a\.mkv: .*(cannot be decoded|cannot open it) as a video"):
        list(open_source(str(tmp_path / "a.mkv"), channels=3, size=SIZE).items)


def test_video_in_masks_out(bundle: Path, tmp_path: Path) -> None:
    write_video(tmp_path / "a.mkv", numbered(10))
    done = infer(bundle, "a.mkv", "answers.npy", "--profile")
    assert done.returncode == 0 and b"10 frames" in done.stderr
    np.testing.assert_array_equal(np.load(tmp_path / "answers.npy"), numbered(10)[..., 0])


@pytest.mark.parametrize("batch", [1, 4])
def test_arrays_in_and_out(bundle: Path, tmp_path: Path, batch: int) -> None:
    np.save(tmp_path / "images.npy", numbered(10))
    done = infer(bundle, "images.npy", "answers.npy", "--batch", batch)
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")
    answers_NHW = np.load(tmp_path / "answers.npy")
    assert answers_NHW.dtype == np.uint8
    np.testing.assert_array_equal(answers_NHW, numbered(10)[..., 0])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["answers.npy", "bundle", "images.npy"]


def test_classes_and_values_in_arrays(tmp_path: Path) -> None:
    np.save(tmp_path / "images.npy", numbered(3))
    bundle = write_engine(tmp_path / "classes", task="classification", dtype="uint16")
    assert infer(bundle, "images.npy", "classes.npy").returncode == 0
    np.testing.assert_array_equal(
        np.load(tmp_path / "classes.npy"), np.array([0, 1, 2], np.uint16), strict=True
    )
    bundle = write_engine(tmp_path / "values", task="values", classes=[])
    assert infer(bundle, "images.npy", "values.npy", "--batch", 2).returncode == 0
    expected = np.repeat(np.arange(3, dtype=np.float32)[:, None], 3, axis=1)
    np.testing.assert_array_equal(np.load(tmp_path / "values.npy"), expected, strict=True)


def test_raw_frames_on_stdin_and_raw_masks_on_stdout(bundle: Path) -> None:
    frames_NHWC = numbered(7, size=(12, 16))
    arguments = ("-", "-", "--frame-size", "16x12", "--batch", 3)
    done = infer(bundle, *arguments, stdin=frames_NHWC.tobytes())
    assert (done.returncode, done.stderr) == (0, b"")
    assert done.stdout == frames_NHWC[..., 0].tobytes()


def test_stdin_that_ends_within_a_frame_is_refused(bundle: Path, tmp_path: Path) -> None:
    done = infer(bundle, "-", "a.npy", stdin=numbered(2).tobytes()[:-1])
    assert done.returncode == 1
    assert done.stderr.decode().startswith(
        "infer.py: stdin ended in frame 1, after 143 of 144 bytes of [6, 8, 3]."
    )
    assert done.stderr.count(b"\n") == 1 and not list(tmp_path.glob("a.npy*"))


@pytest.mark.parametrize("dtype", ["uint8", "uint16"])
def test_folder_of_images_gives_a_folder_of_masks(tmp_path: Path, dtype: str) -> None:
    bundle = write_engine(tmp_path / "bundle", dtype=dtype)
    (tmp_path / "photos").mkdir()
    for name, size in (("a", (16, 12)), ("b", (8, 6))):
        Image.new("RGB", size, (9, 0, 0)).save(tmp_path / "photos" / f"{name}.png")
    done = infer(bundle, "photos", "masks", "--decoders", 2)
    assert done.returncode == 0, done.stderr
    assert sorted(path.name for path in (tmp_path / "masks").iterdir()) == ["a.png", "b.png"]
    with Image.open(tmp_path / "masks" / "a.png") as mask:
        assert mask.size == (16, 12) and mask.mode == {"uint8": "L", "uint16": "I;16"}[dtype]
        assert (np.asarray(mask) == 9).all()


def test_folder_of_images_gives_a_table_of_classes(tmp_path: Path) -> None:
    bundle = write_engine(tmp_path / "bundle", task="classification", classes=["cat", "dog, big"])
    (tmp_path / "photos").mkdir()
    for index, name in enumerate(("x", "y")):
        Image.new("RGB", (16, 12), (index, 0, 0)).save(tmp_path / "photos" / f"{name}.png")
    assert infer(bundle, "photos", "classes.csv").returncode == 0
    lines = (tmp_path / "classes.csv").read_text().splitlines()
    assert lines == ["name,class_index,class_name", "x,0,cat", 'y,1,"dog, big"']


def test_answers_of_several_shapes_do_not_fit_in_one_array(tmp_path: Path) -> None:
    with (
        pytest.raises(
            ValueError, match=r"b: the answer is \[2, 3\], those before it are \[3, 3\]\. Write them"
        ),
        open_sink(str(tmp_path / "a.npy"), task="segmentation", classes=[]) as write,
    ):
        write("a", np.zeros((3, 3), np.uint8))
        write("b", np.zeros((2, 3), np.uint8))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("name", "task", "message"),
    [
        ("a.csv", "segmentation", r"a.csv: .csv holds classes of images, and the engine gives segmentation"),
        ("a", "classification", r"a: holds masks, and the engine gives classification. Name a .npy"),
        (
            "a.txt",
            "segmentation",
            r"a.txt: expected a .npy, .csv, .png or .tif file, a folder, or - for stdout",
        ),
    ],
)
def test_unfit_sinks_are_refused(tmp_path: Path, name: str, task: str, message: str) -> None:
    with (
        pytest.raises(ValueError, match=message.replace(".", r"\.")),
        open_sink(str(tmp_path / name), task=task, classes=[]),
    ):
        pass
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("images.npy", "images.npy"), "images.npy: is read, and its answers would take its place."),
        (("images.npy", "a.npy", "--batch", 5), "--batch is 5, the engine takes at most 4 frames."),
        (("none.npy", "a.npy"), "none.npy: not found."),
        (("images.npy", "none/a.npy"), "[Errno 2] No such file or directory"),
    ],
)
def test_errors_are_one_line(
    bundle: Path, tmp_path: Path, arguments: tuple[object, ...], message: str
) -> None:
    np.save(tmp_path / "images.npy", numbered(2))
    done = infer(bundle, *arguments)
    assert done.returncode == 1 and done.stderr.decode().startswith(f"infer.py: {message}")
    assert done.stderr.count(b"\n") == 1
    np.testing.assert_array_equal(np.load(tmp_path / "images.npy"), numbered(2))


def test_missing_runtime_is_named(bundle: Path, tmp_path: Path) -> None:
    np.save(tmp_path / "images.npy", numbered(2))
    (bundle / "onnxruntime.py").write_text("import no_such_library")
    done = infer(bundle, "images.npy", "a.npy")
    assert done.returncode == 1
    expected = "infer.py: No module named 'no_such_library'. Run pip install -r requirements.txt.\n"
    assert done.stderr.decode() == expected


def test_frames_without_a_place_for_answers_are_only_measured(bundle: Path, tmp_path: Path) -> None:
    np.save(tmp_path / "images.npy", numbered(20, size=(12, 16)))
    assert infer(bundle, "images.npy").returncode == 2
    done = infer(bundle, "images.npy", "--profile", "--profile-json", "profile.json", "--batch", 2)
    assert done.returncode == 0 and done.stdout == b""
    lines = done.stderr.decode().splitlines()
    assert [line.split()[0] for line in lines[1:-2]] == list(PHASES)
    assert lines[-2].startswith("frame to mask ") and lines[-1].startswith("20 frames, ")
    profile = json.loads((tmp_path / "profile.json").read_text())
    assert profile["num_frames"] == 20 and profile["batch"] == 2 and profile["frames_per_second"] > 0
    assert sum(phase["share"] for phase in profile["phases"]) == pytest.approx(1)
    assert 0 < profile["frame_to_mask_ms_p50"] <= profile["frame_to_mask_ms_p99"]


def test_percentiles_are_right_to_half_a_percent() -> None:
    durations_ns = np.random.default_rng(0).lognormal(15, 2, 5001).astype(int)
    durations = Durations()
    for duration_ns in durations_ns:
        durations.add(int(duration_ns))
    for percent in (50, 99):
        expected_ms = np.percentile(durations_ns, percent, method="inverted_cdf") / 1e6
        assert durations.percentile_ms(percent) == pytest.approx(expected_ms, rel=0.005)
    assert Durations().percentile_ms(50) == 0


def test_profile_measures_what_each_phase_takes(tmp_path: Path) -> None:
    engine, timings = loaded(tmp_path), Timings()
    run = engine.run

    def slow(inputs: Array) -> Array:
        time.sleep(0.02)
        return np.array(run(inputs))

    engine.run = slow
    run_stream(engine, stream_of(20), Collected(), timings=timings)
    profile = timings.profile()
    run_phase = {phase.name: phase for phase in profile.phases}["run"]
    assert run_phase.latency_ms_p50 >= 19.9 and run_phase.share > 0.5
    assert profile.frame_to_mask_ms_p50 >= run_phase.latency_ms_p50 * 0.99
    assert profile.frames_per_second <= 50
    assert "20 frames, " in describe_profile(profile, batch=1)


def test_closed_stdout_ends_an_endless_stream_quietly(bundle: Path) -> None:
    with subprocess.Popen(
        command(bundle, "-", "-"), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdin and process.stdout and process.stderr
        process.stdin.write(numbered(10).tobytes())
        process.stdin.flush()
        assert len(process.stdout.read(HEIGHT * WIDTH)) == HEIGHT * WIDTH
        process.stdout.close()
        with pytest.raises(BrokenPipeError):
            while True:
                os.write(process.stdin.fileno(), numbered(10).tobytes())
        assert process.wait(timeout=30) == 0
        assert process.stderr.read() == b""


def test_ctrl_c_ends_a_stream_that_waits_and_keeps_its_answers(bundle: Path, tmp_path: Path) -> None:
    with subprocess.Popen(
        command(bundle, "-", tmp_path / "a.npy", "--profile"),
        stdin=subprocess.PIPE,
        stderr=subprocess.PIPE,
        preexec_fn=lambda: signal.signal(
            signal.SIGINT, signal.SIG_DFL
        ),  # a shell's background jobs ignore it
    ) as process:
        assert process.stdin and process.stderr
        os.write(process.stdin.fileno(), numbered(3).tobytes() + b"part")
        draft = tmp_path / "a.npy.draft"
        deadline = time.monotonic() + 30
        while time.monotonic() < deadline and not draft.exists():
            time.sleep(0.05)
        time.sleep(1)
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=30) == 130
        said = process.stderr.read().decode()
    assert "Traceback" not in said and said.endswith("infer.py: interrupted after 3 frames\n")
    assert "frame to mask" in said
    np.testing.assert_array_equal(np.load(tmp_path / "a.npy"), numbered(3)[..., 0])


def test_help_shows_how_to_use_it(bundle: Path) -> None:
    done = infer(bundle, "--help")
    assert done.returncode == 0
    assert b"python infer.py frames.npy masks.npy" in done.stdout and b"--engine-size" in done.stdout
