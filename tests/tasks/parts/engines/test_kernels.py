"""The kernels around an engine: compiled for every GPU by NVRTC, and run on the CPU against Pillow and numpy.

None ran on a GPU here; `benchmarks.gpu` and tests/gpu do that.
"""

import ctypes
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from PIL import Image

from tasks.parts.engines.frame_engine.engine import Engine
from tasks.parts.engines.frame_engine.images import fit_frame
from tasks.parts.engines.frame_engine.kernels import (
    RESIZE_MODES,
    SIGNATURES,
    GpuArray,
    GpuFrames,
    Kernels,
    compile_kernels,
    is_height_first,
    resample,
)
from tasks.parts.engines.frame_engine.nvrtc import compile_cuda, find_nvrtc, version_of
from tasks.parts.engines.frame_engine.pixels import dtype_of_classes, find_classes, normalise
from tasks.parts.engines.frame_engine.plans import Plan
from tests import cuda_on_cpu
from tests.conftest import REPOSITORY
from tests.cuda_on_cpu import STREAM, Frames, Memory, at, build_library, download, launcher, upload
from tests.wheels import unpack_wheel

Array = np.ndarray[Any, Any]

CAPABILITIES = [(8, 0), (8, 6), (8, 7), (8, 9), (9, 0), (10, 0), (10, 3), (11, 0), (12, 0), (12, 1)]
"""From the A100 to Blackwell, with Orin (8.7) and Thor (11.0)."""
SIZES = [
    ((1, 1), (1, 1)),
    ((7, 13), (5, 3)),
    ((3, 2), (19, 8)),
    ((359, 641), (64, 48)),
    ((40, 64), (31, 64)),
    ((90, 20), (31, 17)),
]
"""Frames, and the engine that reads them: height and width."""


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    return build_library(tmp_path_factory.mktemp("kernels"))


@pytest.fixture(scope="module")
def nvrtc_site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("nvrtc")
    yield unpack_wheel("nvidia-cuda-nvrtc==13.*", folder)
    shutil.rmtree(folder)  # 200 MB


@pytest.fixture
def nvrtc(nvrtc_site: Path, monkeypatch: pytest.MonkeyPatch) -> ctypes.CDLL:
    monkeypatch.syspath_prepend(nvrtc_site)
    found = find_nvrtc(13)
    assert found is not None
    return found


def card_of(size: tuple[int, int], channels: int = 3, **changes: Any) -> dict[str, Any]:
    mean, std = np.linspace(0.3, 0.6, channels).tolist(), np.linspace(0.2, 0.3, channels).tolist()
    reading = {"types": ["uint8"], "value_range": None, "resize_mode": "resize", "window_overlap": None}
    shape = {"height": size[0], "width": size[1], "mean": mean, "std": std, "reading": reading}
    return shape | {"threshold": None, "task": "segmentation"} | changes


def kernels_for(library: ctypes.CDLL, card: dict[str, Any]) -> Kernels:
    return Kernels(card, launcher(library), upload)


def empty(shape: tuple[int, ...], dtype: Any) -> tuple[Array, GpuArray]:
    """Return memory with a guard behind it, and the array in it."""
    dtype = np.dtype(dtype)
    memory = Memory(int(np.prod(shape)) * dtype.itemsize + 64)
    array = at(int(memory), shape, dtype)
    return memory.bytes, GpuArray(array.ctypes.data, shape, dtype, STREAM)


def assert_guard(memory: Array) -> None:
    assert (memory[-64:] == 0xA5).all(), "a kernel wrote behind the end"


def random_frames(num: int, size: tuple[int, int], channels: int, seed: int = 0) -> Array:
    return np.random.default_rng(seed).integers(0, 256, (num, *size, channels), np.uint8)


def fit(frames_NHWC: Array, size: tuple[int, int], mode: str) -> Array:
    return np.stack([fit_frame(frame, size=size, mode=mode) for frame in frames_NHWC])


def test_every_gpu_of_the_targets_is_compiled_for() -> None:
    declared = [
        yaml.safe_load(file.read_text()) for file in (REPOSITORY / "conf" / "target").glob("*tensorrt*.yaml")
    ]
    capabilities = {target["gpu"]["compute_capability"] for target in declared} - {"any"}
    assert capabilities <= {f"{major}.{minor}" for major, minor in CAPABILITIES}


@pytest.mark.parametrize("capability", CAPABILITIES)
def test_kernels_compile_without_a_warning(nvrtc: ctypes.CDLL, capability: tuple[int, int]) -> None:
    code = compile_kernels(nvrtc, capability)
    assert code.startswith(b"\x7fELF")
    for name in SIGNATURES:
        assert f".text.{name}\0".encode() in code


def test_what_nvrtc_refuses_or_warns_of_is_an_error(nvrtc: ctypes.CDLL) -> None:
    with pytest.raises(
        ValueError, match=rf"NVRTC {version_of(nvrtc)} cannot compile .* for sm_99.*pip install"
    ):
        compile_kernels(nvrtc, (9, 9))
    with pytest.raises(ValueError, match="warning"):
        compile_cuda(nvrtc, "__global__ void unfinished() { int unused; }", "sm_90")


def test_nvrtc_is_never_newer_than_the_driver(nvrtc: ctypes.CDLL) -> None:
    assert version_of(nvrtc).startswith("13.")
    assert find_nvrtc(11) is None


@pytest.mark.parametrize("size", [1, 2, 3, 7, 64, 359, 641, 1080])
def test_tables_are_pillow_s(size: int) -> None:
    values = np.random.default_rng(size).integers(0, 256, (1, size), np.uint8)
    for new in (1, 2, 5, 63, 64, 65, 256, 642):
        line = np.asarray(Image.fromarray(values).resize((new, 1), Image.Resampling.BILINEAR))[0]
        found = [
            (int(values[0, first : first + count].astype(np.int64) @ weights[:count]) + (1 << 21)) >> 22
            for first, count, *weights in resample(size, new)
        ]
        np.testing.assert_array_equal(found, line)


@pytest.mark.parametrize("mode", RESIZE_MODES)
@pytest.mark.parametrize(("num", "channels"), [(1, 3), (3, 1), (2, 4)])
@pytest.mark.parametrize(("old", "new"), SIZES)
def test_fitted_frames_equal_pillow_s(
    library: ctypes.CDLL, old: tuple[int, int], new: tuple[int, int], num: int, channels: int, mode: str
) -> None:
    frames_NHWC = random_frames(num, old, channels)
    expected = fit(frames_NHWC, new, mode)
    kernels = kernels_for(library, card_of(new, channels))
    source = GpuFrames.of(Frames(frames_NHWC), channels)
    memory, out = empty((num, *new, channels), np.uint8)
    kernels.fit(source, out, resize=mode)
    np.testing.assert_array_equal(download(out), expected)
    kernels.fit(source, out, resize=mode, is_reversed=True)
    np.testing.assert_array_equal(download(out), expected[..., ::-1])
    assert_guard(memory)


def test_frames_of_random_sizes_equal_pillow_s(library: ctypes.CDLL) -> None:
    generator = np.random.default_rng(2)
    orders = set()
    for _ in range(300):
        old, new = (tuple(map(int, generator.integers(1, 70, 2))) for _ in range(2))
        mode = str(generator.choice(RESIZE_MODES))
        frames_NHWC = random_frames(1, old, 1, seed=old[0])
        _, out = empty((1, *new, 1), np.uint8)
        kernels_for(library, card_of(new, 1)).fit(GpuFrames.of(Frames(frames_NHWC), 1), out, resize=mode)
        np.testing.assert_array_equal(download(out), fit(frames_NHWC, new, mode), f"{old} {new} {mode}")
        orders.add(is_height_first(old, new))
    assert orders == {True, False}


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
@pytest.mark.parametrize("mode", RESIZE_MODES)
@pytest.mark.parametrize(("old", "new"), [*SIZES, ((64, 64), (64, 64))])
def test_normalised_images_equal_numpy_s(
    library: ctypes.CDLL, old: tuple[int, int], new: tuple[int, int], mode: str, dtype: Any
) -> None:
    card, frames_NHWC = card_of(new), random_frames(3, old, 3, seed=1)
    memory, out = empty((3, 3, *new), dtype)
    kernels_for(library, card).fit(GpuFrames.of(Frames(frames_NHWC), 3), out, resize=mode)
    expected = normalise(fit(frames_NHWC, new, mode), card["mean"], card["std"]).astype(dtype)
    np.testing.assert_array_equal(download(out).view(np.uint8), expected.view(np.uint8))
    assert_guard(memory)


def test_letterbox_is_black_before_it_is_normalised(library: ctypes.CDLL) -> None:
    card = card_of((8, 8))
    _, out = empty((1, 3, 8, 8), np.float32)
    white = np.full((1, 4, 8, 3), 255, np.uint8)
    kernels_for(library, card).fit(GpuFrames.of(Frames(white), 3), out, resize="letterbox")
    black_C, white_C = (
        normalise(np.full((1, 1, 1, 3), value, np.uint8), card["mean"], card["std"])[0] for value in (0, 255)
    )
    [found_CHW] = download(out)
    assert (found_CHW[:, [0, 1, 6, 7]] == black_C).all() and (found_CHW[:, 2:6] == white_C).all()


def test_frames_may_be_a_window_of_larger_ones(library: ctypes.CDLL) -> None:
    large_NHWC = random_frames(5, (20, 30), 3)
    window_NHWC = large_NHWC[::2, 3:17, 4:25]
    _, out = empty((3, 9, 11, 3), np.uint8)
    kernels_for(library, card_of((9, 11))).fit(GpuFrames.of(Frames(window_NHWC), 3), out)
    np.testing.assert_array_equal(download(out), fit(window_NHWC, (9, 11), "resize"))


def test_tables_of_many_sizes_do_not_pile_up(library: ctypes.CDLL) -> None:
    kernels = kernels_for(library, card_of((6, 6)))
    _, out = empty((1, 6, 6, 3), np.uint8)
    for height in [*range(1, 40), 1]:
        frames_NHWC = random_frames(1, (height, 9), 3, seed=height)
        kernels.fit(GpuFrames.of(Frames(frames_NHWC), 3), out)
        np.testing.assert_array_equal(download(out), fit(frames_NHWC, (6, 6), "resize"))
    assert len(kernels._fitted) == 16


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"typestr": "<f4"}, r"frames are <f4 \[2, 4, 5, 3\]"),
        ({"shape": (2, 4, 5, 1)}, r"\[2, 4, 5, 1\] .* expected \|u1 \[N, H, W, 3\]"),
        ({"shape": (0, 4, 5, 3)}, "at least one frame"),
        ({"shape": (4, 5, 3)}, r"\[4, 5, 3\]"),
        ({"strides": (60, 15, 4, 1)}, "with packed pixels"),
    ],
)
def test_other_arrays_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        GpuFrames.of(Frames(random_frames(2, (4, 5), 3), **changes), 3)


def test_array_in_host_memory_is_refused() -> None:
    with pytest.raises(ValueError, match="frames are ndarray, expected an array on the GPU"):
        GpuFrames.of(random_frames(1, (4, 5), 3), 3)


def scores_of(shape: tuple[int, ...], dtype: Any, kind: str) -> Array:
    """Return scores with ties, or with some NaN and infinities."""
    generator = np.random.default_rng(3)
    if kind == "ties":
        return generator.integers(-2, 2, shape).astype(dtype)
    scores = generator.standard_normal(shape).astype(dtype)
    if kind == "nan":
        for value, share in ((np.nan, 0.2), (np.inf, 0.1), (-np.inf, 0.1), (-0.0, 0.1), (0.0, 0.1)):
            scores[generator.random(shape) < share] = value
    return scores


@pytest.mark.parametrize("kind", ["random", "ties", "nan"])
@pytest.mark.parametrize("dtype", [np.float32, np.float16])
@pytest.mark.parametrize(
    "shape", [(1, 1, 1, 1), (3, 2, 7, 13), (1, 6, 359, 641), (2, 256, 5, 3), (2, 300, 5, 3), (4, 10)]
)
def test_classes_and_colours_equal_numpy_s(
    library: ctypes.CDLL, shape: tuple[int, ...], dtype: Any, kind: str
) -> None:
    scores_NKHW, answer_shape = scores_of(shape, dtype, kind), (shape[0], *shape[2:])
    expected = find_classes(scores_NKHW)
    palette = np.random.default_rng(4).integers(0, 256, (max(1, shape[1] - 1), 3), np.uint8)
    kernels = kernels_for(library, card_of((1, 1)))
    scores = GpuArray(scores_NKHW.ctypes.data, shape, scores_NKHW.dtype, STREAM)
    memory, classes = empty(answer_shape, dtype_of_classes(shape[1]))
    colour_memory, colours = empty((*answer_shape, 3), np.uint8)
    kernels.choose(scores, classes)
    np.testing.assert_array_equal(download(classes), expected, strict=True)
    assert (colour_memory == 0xA5).all()
    kernels.choose(scores, classes, palette=palette, colours=colours)
    np.testing.assert_array_equal(download(classes), expected, strict=True)
    with_black = np.concatenate([palette, np.zeros((shape[1], 3), np.uint8)])
    np.testing.assert_array_equal(download(colours), with_black[expected])
    assert_guard(memory)
    assert_guard(colour_memory)


@pytest.mark.parametrize("kind", ["random", "ties", "nan"])
@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_threshold_of_two_classes_equals_numpy_s(library: ctypes.CDLL, dtype: Any, kind: str) -> None:
    scores_NKHW = scores_of((2, 2, 31, 17), dtype, kind)
    scores = GpuArray(scores_NKHW.ctypes.data, scores_NKHW.shape, scores_NKHW.dtype, STREAM)
    for threshold in (0.05, 0.5, 0.731):
        _, classes = empty((2, 31, 17), np.uint8)
        kernels_for(library, card_of((1, 1), threshold=threshold)).choose(scores, classes)
        np.testing.assert_array_equal(download(classes), find_classes(scores_NKHW, threshold))


def test_classes_of_an_engine_get_colours(library: ctypes.CDLL) -> None:
    classes_NHW = np.random.default_rng(5).integers(0, 8, (3, 7, 13), np.uint8)
    palettes = np.random.default_rng(6).integers(0, 256, (2, 5, 3), np.uint8)
    kernels = kernels_for(library, card_of((7, 13)))
    classes = GpuArray(classes_NHW.ctypes.data, classes_NHW.shape, classes_NHW.dtype, STREAM)
    memory, colours = empty((3, 7, 13, 3), np.uint8)
    for palette in (*palettes, palettes[0]):
        kernels.paint(classes, palette=palette, colours=colours)
        expected = np.concatenate([palette, np.zeros((3, 3), np.uint8)])[classes_NHW]
        np.testing.assert_array_equal(download(colours), expected)
    assert_guard(memory)
    with pytest.raises(ValueError, match=r"the palette is float64 \[5, 3\], expected uint8 \[K, 3\]"):
        kernels.paint(classes, palette=palettes[0] / 255, colours=colours)


class Linear:
    """A network of one matrix for each pixel, or of its mean for the image."""

    def __init__(self, card: dict[str, Any], num_classes: int, is_pooled: bool) -> None:
        generator = np.random.default_rng(7)
        self._card, self._is_pooled = card, is_pooled
        self._weights_KC = generator.standard_normal((num_classes, len(card["mean"]))).astype(np.float32)

    def __call__(self, inputs: Array) -> Array:
        card = self._card
        if card["reads"] != "normalised":
            frames = inputs[..., ::-1] if card["reads"] == "bgr_frames" else inputs
            inputs = normalise(frames, card["mean"], card["std"])
        logits = np.einsum("kc,nchw->nkhw", self._weights_KC, inputs)
        logits = logits.mean(axis=(2, 3)) if self._is_pooled else logits
        return find_classes(logits) if card["gives"] == "classes" else logits


CASES = [
    {"reads": "normalised", "gives": "logits"},
    {"reads": "normalised", "gives": "classes"},
    {"reads": "frames", "gives": "logits"},
    {"reads": "bgr_frames", "gives": "classes"},
    {"reads": "normalised", "gives": "logits", "task": "classification"},
    {"reads": "normalised", "gives": "logits", "task": "values"},
    {"reads": "normalised", "gives": "logits", "threshold": 0.3},
]


def plan_of(
    monkeypatch: pytest.MonkeyPatch, library: ctypes.CDLL, card: dict[str, Any]
) -> tuple[Plan, Engine]:
    """Return a plan on the GPU that is none, and the same engine with numpy around it."""
    network = Linear(card, 2 if card["threshold"] else 5, card["task"] == "classification")
    size, channels = (card["height"], card["width"]), len(card["mean"])
    is_normalised = card["reads"] == "normalised"
    reads = ((channels, *size), np.dtype("f4")) if is_normalised else ((*size, channels), np.dtype("u1"))
    given = network(np.zeros((1, *reads[0]), reads[1]))
    cuda_on_cpu.put_pycuda(monkeypatch, library)
    cuda_on_cpu.put_tensorrt(monkeypatch, network, reads, (given.shape[1:], given.dtype))
    return Plan(b"plan", card), Engine(card, network)


def plan_card(**changes: Any) -> dict[str, Any]:
    gpu = {"name": "NVIDIA Imaginary", "compute_capability": "9.0"}
    options = {"gpu": gpu, "hardware_compatibility": "none", "version_compatible": False, "cuda_graph": False}
    return card_of((12, 17), runtime="tensorrt", batches=[[1, 4]], options=options, **changes)


@pytest.mark.parametrize("case", CASES)
def test_plan_with_kernels_answers_as_with_numpy(
    nvrtc: ctypes.CDLL, library: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch, case: dict[str, str]
) -> None:
    plan, plain = plan_of(monkeypatch, library, plan_card(**case))
    assert plan.card["reads"] == {"normalised": "frames"}.get(case["reads"], case["reads"])
    is_values = case.get("task") == "values"
    assert plan.card["gives"] == ("logits" if is_values else "classes")
    frames_NHWC = random_frames(7, (12, 17), 3)
    expected = plain.predict(frames_NHWC)
    np.testing.assert_array_equal(Engine(plan.card, plan).predict(frames_NHWC), expected, strict=True)

    palette = None if is_values else np.random.default_rng(8).integers(0, 256, (5, 3), np.uint8)
    for is_bgr in (False, True):
        given = np.ascontiguousarray(frames_NHWC[:3, ..., ::-1] if is_bgr else frames_NHWC[:3])
        found = plan.answer_on_gpu(Frames(given), is_bgr=is_bgr, palette=palette)
        np.testing.assert_array_equal(download(found.answers), expected[:3], strict=True)
        assert (found.colours is None) == is_values
        if found.colours is not None and palette is not None:
            np.testing.assert_array_equal(download(found.colours), palette[expected[:3]])
    for mode in RESIZE_MODES:
        large_NHWC = random_frames(4, (33, 20), 3)
        found = plan.answer_on_gpu(Frames(large_NHWC), resize=mode)
        right = plain.predict(fit(large_NHWC, (12, 17), mode))
        np.testing.assert_array_equal(download(found.answers), right, strict=True)
        assert found.colours is None


def test_plan_says_which_frames_it_does_not_take(
    nvrtc: ctypes.CDLL, library: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan, _ = plan_of(monkeypatch, library, plan_card(reads="normalised", gives="logits", task="values"))
    with pytest.raises(ValueError, match=r"5 frames, the engine takes \[\[1, 4\]\]"):
        plan.answer_on_gpu(Frames(random_frames(5, (12, 17), 3)))
    with pytest.raises(ValueError, match="the engine gives values"):
        plan.answer_on_gpu(Frames(random_frames(1, (12, 17), 3)), palette=np.zeros((5, 3), np.uint8))


def test_plan_without_nvrtc_runs_as_before(library: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tasks.parts.engines.frame_engine.kernels.find_nvrtc", lambda major: None)
    plan, plain = plan_of(monkeypatch, library, plan_card(reads="normalised", gives="logits"))
    frames_NHWC = random_frames(5, (12, 17), 3)
    assert (plan.card["reads"], plan.card["gives"]) == ("normalised", "logits")
    np.testing.assert_array_equal(Engine(plan.card, plan).predict(frames_NHWC), plain.predict(frames_NHWC))
    with pytest.raises(ValueError, match="pip install nvidia-cuda-nvrtc"):
        plan.answer_on_gpu(Frames(frames_NHWC))
