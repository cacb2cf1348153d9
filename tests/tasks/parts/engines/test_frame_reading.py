"""Images of any kind and size through an engine of a few random convolutions: as prepare_data reads them."""

import dataclasses
import json
import subprocess
import sys
import threading
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import tifffile
from onnx import helper, numpy_helper
from PIL import Image

from tasks.parts.data.image_files import fit_image, fit_mask, read_image
from tasks.parts.engines.frame_engine.engine import Engine, load_engine
from tasks.parts.engines.frame_engine.sources import Source
from tasks.parts.engines.frame_engine.stream import Timings, run_stream
from tasks.parts.engines.manifest import sha256_of
from tasks.parts.reading.rules import Reading
from tasks.parts.reading.windows import cover, cut_image, cut_mask
from tasks.parts.selection.bundle import CLIENT, INFER, copy_frame_engine

Array = np.ndarray[Any, Any]

HEIGHT, WIDTH, CLASSES, MAX_BATCH = 32, 48, 4, 3
RANGE_12_BITS = (0.0, 4095.0)


def write_bundle(
    folder: Path, channels: int, reading: Reading, *, size: tuple[int, int] = (HEIGHT, WIDTH)
) -> Path:
    """Write a bundle whose masks depend on every value and its surroundings."""
    random = np.random.default_rng(0)
    weights = random.normal(size=(CLASSES, channels, 5, 5)).astype(np.float32)
    nodes = [
        helper.make_node("Cast", ["frames"], ["floats"], to=onnx.TensorProto.FLOAT),
        helper.make_node("Sub", ["floats", "middle"], ["centred"]),
        helper.make_node("Transpose", ["centred"], ["image"], perm=[0, 3, 1, 2]),
        helper.make_node("Conv", ["image", "weights"], ["logits"], pads=[2, 2, 2, 2]),
        helper.make_node("ArgMax", ["logits"], ["largest"], axis=1, keepdims=0),
        helper.make_node("Cast", ["largest"], ["classes"], to=onnx.TensorProto.UINT8),
    ]
    graph = helper.make_graph(
        nodes,
        "convolution",
        [helper.make_tensor_value_info("frames", onnx.TensorProto.UINT8, ["n", *size, channels])],
        [helper.make_tensor_value_info("classes", onnx.TensorProto.UINT8, ["n", *size])],
        [numpy_helper.from_array(weights, "weights"), numpy_helper.from_array(np.float32(127), "middle")],
    )
    model = helper.make_model(graph, ir_version=10, opset_imports=[helper.make_opsetid("", 20)])
    folder.mkdir(parents=True)
    copy_frame_engine(folder)
    (folder / "infer.py").write_text(INFER)
    (folder / "engine.onnx").write_bytes(model.SerializeToString())
    card = {
        "runtime": "onnxruntime",
        "package": "onnxruntime",
        "runtime_version": version("onnxruntime"),
        "file": "engine.onnx",
        "sha256": sha256_of(folder / "engine.onnx"),
        "task": "segmentation",
        "classes": [str(number) for number in range(CLASSES)],
        "height": size[0],
        "width": size[1],
        "mean": [0] * channels,
        "std": [1] * channels,
        "reading": dataclasses.asdict(reading),
        "reads": "frames",
        "gives": "classes",
        "threshold": None,
        "batches": [[1, MAX_BATCH]],
        "options": {
            "provider": "CPUExecutionProvider",
            "provider_options": {},
            "num_threads": 1,
            "needs_vnni": False,
        },
    }
    (folder / "model.json").write_text(json.dumps(card))
    return folder


def infer(bundle: Path, *arguments: object) -> subprocess.CompletedProcess[str]:
    """Run infer.py as a user would, away from the repository."""
    command = [sys.executable, "-I", str(bundle / "infer.py"), *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=bundle, timeout=120, check=False)
    assert "Traceback" not in done.stderr, done.stderr
    return done


@dataclasses.dataclass(frozen=True)
class Config:
    """What prepare_data.folder says."""

    channels: int
    value_range: list[float] | None
    max_pixels: int = 10**8


def expected_mask(engine: Engine, path: Path, channels: int, reading: Reading) -> Array:
    """Return the mask in the image's own size from what validate runs: arrays as prepare_data makes them."""
    low_high = None if reading.value_range is None else list(reading.value_range)
    image_HWC = read_image(path, Config(channels, low_high))
    size, own = {"height": HEIGHT, "width": WIDTH}, image_HWC.shape[:2]
    if reading.resize_mode == "windows":
        assert reading.window_overlap is not None
        mask_HW = np.full(own, 255, np.uint8)
        for window in cover(
            *own,
            window_height=HEIGHT,
            window_width=WIDTH,
            overlap=reading.window_overlap,
            is_owned_once=True,
        ):
            answer = engine.predict(cut_image(image_HWC, window, **size)[None])[0]
            ids = np.arange(own[0] * own[1], dtype=np.int64).reshape(own)
            is_owned = cut_mask(np.zeros(own, np.uint8), window, **size) == 0
            top, left = window.rows.start, window.columns.start
            padded = np.full((HEIGHT, WIDTH), -1)
            part = ids[top : top + HEIGHT, left : left + WIDTH]
            padded[: part.shape[0], : part.shape[1]] = part
            mask_HW.ravel()[padded[is_owned]] = answer[is_owned]
        return mask_HW
    fitted = fit_image(image_HWC, mode=reading.resize_mode, **size)
    answer = engine.predict(fitted[None])[0]
    return fit_mask(answer, height=own[0], width=own[1], mode=reading.resize_mode, fill=255)


def random_image(*shape: int, high: int = 256) -> Array:
    """Return noise on slopes, as 8 bits or more."""
    random = np.random.default_rng(1)
    slopes = np.add.outer(np.linspace(0, high / 3, shape[0]), np.linspace(0, high / 3, shape[1]))
    noise = random.integers(0, high // 3, shape)
    values = slopes.reshape(*slopes.shape, *[1] * (len(shape) - 2)) + noise
    return values.clip(0, high - 1).astype(np.uint8 if high == 256 else np.uint16)


def write_png(path: Path, size: tuple[int, int] = (96, 144)) -> None:
    Image.fromarray(random_image(*size, 3)).save(path)


def write_12_bits(path: Path) -> None:
    Image.fromarray(random_image(64, 96, high=4096)).save(path)


def write_turned(path: Path) -> None:
    exif = Image.Exif()
    exif[274] = 6
    Image.fromarray(random_image(96, 64, 3)).save(path, exif=exif, quality=95)


def write_palette(path: Path) -> None:
    Image.fromarray(random_image(64, 96, 3)).convert("P", palette=Image.Palette.ADAPTIVE).save(path)


KINDS: dict[str, tuple[str, int, Reading, Callable[[Path], None]]] = {
    "windows": ("png", 3, Reading(resize_mode="windows", window_overlap=8), write_png),
    "12 bits": ("png", 1, Reading(("uint16",), RANGE_12_BITS), write_12_bits),
    "16-bit TIFF": (
        "tif",
        1,
        Reading(("uint16",), (0.0, 65535.0), "windows", 8),
        lambda path: tifffile.imwrite(path, random_image(70, 100, high=65536)),
    ),
    "6 bands": ("npy", 6, Reading(), lambda path: np.save(path, random_image(64, 96, 6))),
    "grey JPEG": ("jpg", 3, Reading(), lambda path: Image.fromarray(random_image(64, 96)).save(path)),
    "palette PNG": ("png", 3, Reading(), write_palette),
    "odd size": ("png", 3, Reading(), lambda path: write_png(path, (121, 157))),
    "odd size in windows": (
        "png",
        3,
        Reading(resize_mode="windows", window_overlap=11),
        lambda path: write_png(path, (121, 157)),
    ),
    "cropped": ("png", 3, Reading(resize_mode="crop"), lambda path: write_png(path, (121, 40))),
    "EXIF orientation": ("jpg", 3, Reading(), write_turned),
}


@pytest.mark.parametrize("kind", KINDS)
def test_masks_of_original_files_are_those_of_the_arrays_of_validate_a1(tmp_path: Path, kind: str) -> None:
    suffix, channels, reading, write = KINDS[kind]
    photo = tmp_path / f"photo.{suffix}"
    write(photo)
    bundle = write_bundle(tmp_path / "bundle", channels, reading)
    expected_HW = expected_mask(load_engine(bundle), photo, channels, reading)
    is_tiff = suffix == "tif"
    done = infer(bundle, photo, tmp_path / f"mask.{'tif' if is_tiff else 'png'}")
    assert (done.returncode, done.stderr) == (0, "")
    mask_HW = np.asarray(Image.open(tmp_path / f"mask.{'tif' if is_tiff else 'png'}"))
    assert mask_HW.shape == expected_HW.shape
    differs = mask_HW != expected_HW
    if reading.resize_mode == "resize":  # Pillow rounds ties between two pixels down or up
        assert differs.mean() < 0.02
    else:
        assert not differs.any()
    assert len(np.unique(mask_HW)) >= 3, "a mask of one class shows nothing"


def test_exif_orientation_turns_the_mask_as_people_see_the_image_a1(tmp_path: Path) -> None:
    """The file has 96 rows of 64 pixels and says that its top is on the right: people see 64 rows of 96."""
    write_turned(tmp_path / "photo.jpg")
    bundle = write_bundle(tmp_path / "bundle", 3, Reading())
    assert infer(bundle, tmp_path / "photo.jpg", tmp_path / "mask.png").returncode == 0
    with Image.open(tmp_path / "mask.png") as mask:
        assert mask.size == (96, 64) and 274 not in mask.getexif()


@pytest.mark.parametrize("mode", ["resize", "crop", "windows", "letterbox"])
@pytest.mark.parametrize("size", [(121, 157), (32, 48), (20, 200)])
def test_answers_have_the_size_of_the_image_a1(tmp_path: Path, mode: str, size: tuple[int, int]) -> None:
    engine = load_engine(write_bundle(tmp_path / "bundle", 3, Reading(window_overlap=8)))
    reading = dataclasses.replace(engine.reading, resize_mode=mode)
    mask_HW = engine.answer_image(random_image(*size, 3), reading=reading)
    assert mask_HW.shape == size and mask_HW.dtype == np.uint8
    is_cut_off = mode == "crop" and size != (32, 48)
    assert (mask_HW == 255).any() == is_cut_off


@pytest.mark.parametrize("dtype", [np.uint16, np.float32, np.int32])
def test_values_are_scaled_by_the_range_of_the_training_a1(tmp_path: Path, dtype: type[np.generic]) -> None:
    reading = Reading(("uint16",), RANGE_12_BITS)
    engine = load_engine(write_bundle(tmp_path / "bundle", 1, reading))
    values = random_image(HEIGHT, WIDTH, 1, high=4096)
    eight_bits = np.rint(values.astype(np.float32) * np.float32(255 / 4095)).astype(np.uint8)
    np.testing.assert_array_equal(
        engine.answer_image(values.astype(dtype)), engine.predict(eight_bits[None])[0]
    )


@pytest.mark.parametrize(
    ("reading", "dtype", "expected"),
    [
        (
            Reading(),
            np.uint16,
            r"of type uint16 from \d+ to \d+, expected uint8.*with --value-range LOW,HIGH",
        ),
        (
            Reading(("uint16",), RANGE_12_BITS),
            np.uint8,
            r"of type uint8 from .*, expected uint16 as in training\. .* not by --value-range either\.$",
        ),
    ],
)
def test_other_types_than_in_training_are_refused_a1(
    tmp_path: Path, reading: Reading, dtype: type[np.generic], expected: str
) -> None:
    engine = load_engine(write_bundle(tmp_path / "bundle", 1, reading))
    values = random_image(HEIGHT, WIDTH, 1, high=256).astype(dtype)
    with pytest.raises(ValueError, match=expected):
        engine.answer_image(values)
    np.save(tmp_path / "scan.npy", values)
    done = infer(tmp_path / "bundle", tmp_path / "scan.npy", tmp_path / "mask.npy")
    assert done.returncode == 1 and done.stderr.startswith(f"infer.py: {tmp_path}/scan.npy: holds values")


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (("--resize", "letterbox"), "resize letterbox, measured windows"),
        (("--overlap", "4"), "overlap 4, measured 8"),
        (("--value-range", "0,100"), "value range (0.0, 100.0), measured None"),
        (("--resize", "windows"), ""),
    ],
)
def test_options_that_change_the_reading_say_so_a1(
    tmp_path: Path, options: tuple[str, ...], told: str
) -> None:
    bundle = write_bundle(tmp_path / "bundle", 3, Reading(resize_mode="windows", window_overlap=8))
    write_png(tmp_path / "photo.png")
    done = infer(bundle, tmp_path / "photo.png", tmp_path / "mask.png", *options)
    assert done.returncode == 0
    assert done.stderr == (f"reads otherwise than it was measured: {told}\n" if told else "")


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (("--overlap", "4"), "--overlap is for windows, and images are read by resize. Leave it out."),
        (("--resize", "windows"), "windows share pixels with their neighbours. Say how many with --overlap"),
        (
            ("--resize", "windows", "--overlap", "32"),
            "the overlap is 32 pixels, expected less than a window of 32",
        ),
    ],
)
def test_options_that_do_not_fit_are_refused_a1(
    tmp_path: Path, options: tuple[str, ...], expected: str
) -> None:
    bundle = write_bundle(tmp_path / "bundle", 3, Reading())
    write_png(tmp_path / "photo.png")
    done = infer(bundle, tmp_path / "photo.png", tmp_path / "mask.png", *options)
    assert done.returncode == 1 and done.stderr.startswith(f"infer.py: {expected}")
    assert not (tmp_path / "mask.png").exists()


def test_windows_run_in_the_thread_that_called_as_contexts_of_a_gpu_ask_for_a1(tmp_path: Path) -> None:
    engine = load_engine(
        write_bundle(tmp_path / "bundle", 3, Reading(resize_mode="windows", window_overlap=8))
    )
    run, threads, names = engine.run, set(), []

    def run_here(inputs: Array) -> Array:
        threads.add(threading.get_ident())
        return run(inputs)

    engine.run = run_here
    sizes = [(40, 60), (HEIGHT, WIDTH), (121, 157)]
    items = ((str(number), size) for number, size in enumerate(sizes))
    source = Source(items, lambda size: random_image(*size, 3))
    run_stream(engine, source, lambda name, _: names.append(name), timings=Timings())
    assert names == ["0", "1", "2"] and threads == {threading.get_ident()}


def test_masks_of_the_engine_size_on_request_a1(tmp_path: Path) -> None:
    bundle = write_bundle(tmp_path / "bundle", 3, Reading())
    write_png(tmp_path / "photo.png")
    assert infer(bundle, tmp_path / "photo.png", tmp_path / "mask.png", "--engine-size").returncode == 0
    with Image.open(tmp_path / "mask.png") as mask:
        assert mask.size == (WIDTH, HEIGHT)


def test_a_folder_gives_tiff_masks_for_tiff_images_and_a_mask_file_holds_one_a1(tmp_path: Path) -> None:
    bundle = write_bundle(tmp_path / "bundle", 3, Reading())
    (tmp_path / "photos").mkdir()
    write_png(tmp_path / "photos" / "a.png")
    tifffile.imwrite(tmp_path / "photos" / "b.tif", random_image(40, 50, 3), photometric="rgb")
    assert infer(bundle, tmp_path / "photos", tmp_path / "masks").returncode == 0
    assert sorted(path.name for path in (tmp_path / "masks").iterdir()) == ["a.png", "b.tif"]
    assert tifffile.imread(tmp_path / "masks" / "b.tif").shape == (40, 50)
    done = infer(bundle, tmp_path / "photos", tmp_path / "mask.png")
    assert (
        done.returncode == 1
        and "mask.png: holds the mask of a, and there is b, too. Name a folder." in done.stderr
    )


@pytest.mark.parametrize(("name", "mask"), [("a.png", "."), ("a.tif", "."), ("a.png", "a.png")])
def test_a_mask_does_not_take_the_place_of_its_image_a1(tmp_path: Path, name: str, mask: str) -> None:
    bundle, photo = write_bundle(tmp_path / "bundle", 3, Reading()), tmp_path / "photos" / name
    photo.parent.mkdir()
    write_png(photo)
    before = photo.read_bytes()
    (bundle / "client.py").write_text(CLIENT)
    (bundle / "report.json").write_text(json.dumps({"variant": "student", "target": "cpu"}))
    for script, option in (("infer.py", ()), ("client.py", ("--out",))):
        command = [bundle / script, photo, *option, photo.parent / mask]
        done = subprocess.run([sys.executable, "-I", *command], capture_output=True, text=True, check=False)
        assert (
            done.returncode == 1
            and f"{script}: {photo}: is read, and its answers would take its place." in done.stderr
        )
        assert photo.read_bytes() == before


@pytest.mark.parametrize("missing", ["reading", "window_overlap"])
def test_a_bundle_of_the_version_before_is_refused_with_what_it_lacks_a1(
    tmp_path: Path, missing: str
) -> None:
    bundle = write_bundle(tmp_path / "bundle", 3, Reading())
    card = json.loads((bundle / "model.json").read_text())
    del (card if missing == "reading" else card["reading"])[missing]
    (bundle / "model.json").write_text(json.dumps(card))
    write_png(tmp_path / "photo.png")
    done = infer(bundle, tmp_path / "photo.png", tmp_path / "mask.png")
    name = "reading" if missing == "reading" else "reading.window_overlap"
    assert done.returncode == 1 and f"model.json has no '{name}'" in done.stderr
    assert "written by an older version. Build the bundle again" in done.stderr
