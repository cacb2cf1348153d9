"""The C++ program of a plan, compiled with NVIDIA's headers and run with the stand-in for TensorRT and CUDA."""

import hashlib
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tasks.parts.engines.frame_engine.engine import Engine
from tests.cpp_programs import build_program
from tests.tasks.parts.engines.test_infer_cpp import (
    HEIGHT,
    READING,
    SIZES,
    WIDTH,
    Array,
    Bundle,
    frames,
    infer,
    plan_card,
    refusal,
    write_bundle,
)
from tests.tensorrt_stand_in import INCLUDE_DIR, StandInPlan

FRAMES = ("|u1", (1, HEIGHT, WIDTH, 3))
MASKS = ("|u1", (1, HEIGHT, WIDTH))
MEAN, STD = [0.485, 0.456, 0.406], [0.229, 0.224, 0.225]


def plan_of_frames(**changes: Any) -> StandInPlan:
    return StandInPlan(**{"reads": FRAMES, "gives": MASKS, "num_classes": 6} | changes)


def plan_bundle(plan: StandInPlan, folder: Path, **changes: Any) -> Bundle:
    """Write the bundle of a plan; `changes` are of its card, those of "options" one by one."""
    card = plan_card(plan)
    options = card["options"] | changes.pop("options", {})
    write_bundle(folder, "engine.plan", plan.content(), card | changes | {"options": options})
    return Bundle(folder, plan)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    """A bundle whose program is built; it takes the folder of any other one."""
    bundle = plan_bundle(plan_of_frames(), tmp_path_factory.mktemp("plans") / "bundle")
    build_program(bundle.folder, "tensorrt")
    return bundle


def masks(built: Bundle, bundle: Path, frames_NHWC: Array) -> Array:
    """Return what the program answers to frames in a file."""
    np.save(bundle / "frames.npy", frames_NHWC)
    run = infer(built, bundle / "frames.npy", bundle / "masks.npy", "--bundle", bundle)
    assert (run.returncode, run.stdout, run.stderr) == (0, b"", b"")
    answers: Array = np.load(bundle / "masks.npy")
    return answers


@pytest.mark.parametrize("cuda_graph", [False, True])
@pytest.mark.parametrize(("num_classes", "threshold"), [(2, None), (2, 0.3), (6, None), (300, None)])
@pytest.mark.parametrize("resize_mode", ["resize", "windows"])
def test_a_plan_that_reads_images_and_gives_logits_answers_as_in_python(
    built: Bundle,
    tmp_path: Path,
    num_classes: int,
    threshold: float | None,
    resize_mode: str,
    cuda_graph: bool,
) -> None:
    """Normalised images in, logits out, some of them equal and some not numbers: to the last pixel."""
    plan = StandInPlan(
        ("<f4", (-1, 3, HEIGHT, WIDTH)), ("<f4", (-1, num_classes, HEIGHT, WIDTH)), batches=[[1, 4]]
    )
    described = {
        "reads": "normalised",
        "gives": "logits",
        "mean": MEAN,
        "std": STD,
        "threshold": threshold,
        "reading": {**READING, "resize_mode": resize_mode, "window_overlap": 9},
    }
    bundle = plan_bundle(plan, tmp_path / "bundle", **described, options={"cuda_graph": cuda_graph})
    sizes = {"task": "segmentation", "height": HEIGHT, "width": WIDTH}
    engine = Engine(plan_card(plan) | described | sizes, plan)

    found = {size: masks(built, bundle.folder, frames(2, *size)) for size in SIZES}

    expected = {size: np.stack([engine.answer_image(one) for one in frames(2, *size)]) for size in SIZES}
    for size, masks_NHW in found.items():
        assert masks_NHW.dtype == (np.uint16 if num_classes > 256 else np.uint8)
        np.testing.assert_array_equal(masks_NHW, expected[size])
    largest = max(expected.values(), key=np.size)
    assert len(np.unique(largest)) >= min(num_classes, 4) and (num_classes < 300 or largest.max() > 255)


@pytest.mark.parametrize("task", ["classification", "values"])
def test_scores_of_an_image(built: Bundle, tmp_path: Path, task: str) -> None:
    """The largest is the class; values stay as they are."""
    plan = StandInPlan(("<f4", (1, 3, HEIGHT, WIDTH)), ("<f4", (1, 7)))
    described = {"reads": "normalised", "gives": "logits", "mean": MEAN, "std": STD, "task": task}
    bundle = plan_bundle(plan, tmp_path / "bundle", **described)
    card = plan_card(plan) | described | {"height": HEIGHT, "width": WIDTH, "reading": READING}
    frames_NHWC = frames(9)

    found = masks(built, bundle.folder, frames_NHWC)

    expected = Engine(card, plan).predict(frames_NHWC)
    assert found.dtype == (np.float32 if task == "values" else np.uint8)
    assert found.shape == ((9, 7) if task == "values" else (9,))
    np.testing.assert_array_equal(found, expected)
    assert len(np.unique(expected)) > 2


@pytest.mark.parametrize("batches", [[[1, 1]], [[1, 4]], [[2, 4], [1, 1]], [[2, 8], [1, 2], [1, 1]]])
def test_the_first_profile_that_takes_one_image_is_used(
    built: Bundle, tmp_path: Path, batches: list[list[int]]
) -> None:
    plan = plan_of_frames(
        reads=("|u1", (-1, *FRAMES[1][1:])), gives=("|u1", (-1, *MASKS[1][1:])), batches=batches
    )
    bundle = plan_bundle(plan, tmp_path / "bundle")

    np.testing.assert_array_equal(masks(built, bundle.folder, frames(3)), plan(frames(3)))
    profile = [low for low, _ in batches].index(1)
    assert f"profile {profile}\n" in (bundle.folder / "engine.txt").read_text()


@pytest.mark.parametrize(
    ("compatibility", "gpu", "fits"),
    [
        ("none", {}, True),
        ("none", {"name": "NVIDIA Imaginary"}, False),
        ("none", {"compute_capability": "9.1"}, False),
        ("same_compute_capability", {"name": "NVIDIA Imaginary"}, True),
        ("same_compute_capability", {"compute_capability": "9.1"}, False),
        ("ampere_plus", {"name": "NVIDIA Imaginary", "compute_capability": "8.0"}, True),
        ("another", {}, False),
    ],
)
def test_a_plan_runs_on_the_gpus_that_it_was_built_for(
    built: Bundle, tmp_path: Path, compatibility: str, gpu: dict[str, str], fits: bool
) -> None:
    card = plan_card(plan_of_frames())["options"]["gpu"] | gpu
    options = {"hardware_compatibility": compatibility, "gpu": card}
    bundle = plan_bundle(plan_of_frames(), tmp_path / "bundle", options=options)

    if fits:
        np.testing.assert_array_equal(masks(built, bundle.folder, frames(1)), built.predict(frames(1)))
    else:
        assert (
            f"built on {card['name']} ({card['compute_capability']}) with hardware_compatibility {compatibility}, "
            "this GPU is NVIDIA H200 (9.0). Build it again here."
        ) in refusal(built, "-", "-", "--bundle", bundle.folder)


def test_another_version_of_tensorrt_runs_only_a_plan_that_is_compatible_with_it(
    built: Bundle, tmp_path: Path
) -> None:
    plan = plan_of_frames(others=["host_code"])
    for version, is_compatible, told in (
        ("10.3.0.1", False, "built and measured with TensorRT 10.3.0.1, linked is "),
        ("10.3.0.1", True, None),
    ):
        bundle = plan_bundle(
            plan,
            tmp_path / str(is_compatible),
            runtime_version=version,
            options={"version_compatible": is_compatible},
        )
        if told is None:
            np.testing.assert_array_equal(masks(built, bundle.folder, frames(1)), plan(frames(1)))
        else:
            assert told in refusal(built, "-", "-", "--bundle", bundle.folder)


def test_a_repaired_release_of_the_python_package_is_the_same_version(built: Bundle, tmp_path: Path) -> None:
    version = plan_card(plan_of_frames())["runtime_version"]
    bundle = plan_bundle(plan_of_frames(), tmp_path / "bundle", runtime_version=f"{version}.post1")

    np.testing.assert_array_equal(masks(built, bundle.folder, frames(1)), built.predict(frames(1)))


def test_headers_of_another_major_version_are_refused(
    built: Bundle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bundle = plan_bundle(plan_of_frames(), tmp_path / "bundle", options={"version_compatible": True})
    monkeypatch.setenv("STAND_IN_MAJOR", "9")

    text = refusal(built, "-", "-", "--bundle", bundle.folder)

    assert "the headers are of TensorRT 1" in text and "linked is 9.4.0.106" in text


def test_plugins_of_the_bundle_are_loaded_if_they_are_unchanged(built: Bundle, tmp_path: Path) -> None:
    plan = plan_of_frames(others=["plugins operators/lib of two.so"])
    libraries = {"operators/lib one.so": b"one", "operators/lib of two.so": b"two"}
    operators = [
        {"file": file, "sha256": hashlib.sha256(content).hexdigest()} for file, content in libraries.items()
    ]
    bundle = plan_bundle(plan, tmp_path / "bundle", custom_operators=operators).folder
    (bundle / "operators").mkdir()
    for file, content in libraries.items():
        (bundle / file).write_bytes(content)

    np.testing.assert_array_equal(masks(built, bundle, frames(1)), plan(frames(1)))
    relative = os.path.relpath(bundle)
    assert infer(built, "-", "-", "--bundle", relative, stdin=frames(1).tobytes()).returncode == 0
    (bundle / "operators/lib of two.so").write_bytes(b"changed")
    assert "was changed and is not loaded, because that would run its code" in refusal(
        built, "-", "-", "--bundle", bundle
    )
    (bundle / "operators/lib one.so").unlink()
    assert "lib one.so cannot be read" in refusal(built, "-", "-", "--bundle", bundle)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"others": ["plugins operators/none.so"]}, ["no such plugin", "TensorRT refuses the engine;"]),
        ({"others": ["host_code"]}, ["host code is not allowed", "Build the engine again here."]),
        ({"others": ["half"]}, ["takes no tensor of the type that the engine's its_input has"]),
        ({"others": ["writes_more"]}, ["writes another shape than it declares"]),
        ({"batches": [[2, 4]]}, ["a shape outside the profile", "refuses the shape of one image"]),
        ({"batches": []}, ["no such profile", "refuses its optimization profile"]),
        ({"reads": ("|u1", (4, HEIGHT, WIDTH, 3))}, ["takes no single frame of fixed size"]),
        (
            {"reads": ("<f4", (1, 3, HEIGHT, WIDTH))},
            ["reads <f4 and gives |u1, which is not what engine.txt"],
        ),
    ],
)
def test_what_tensorrt_refuses_is_told(
    built: Bundle, tmp_path: Path, changes: dict[str, Any], told: list[str]
) -> None:
    profile = [[4, 4], [1, 1]] if changes.get("batches") == [] else [[1, 1]]
    bundle = plan_bundle(plan_of_frames(**changes), tmp_path / "bundle", batches=profile)

    run = infer(built, "-", "-", "--bundle", bundle.folder)

    assert run.returncode == 1
    for text in told:
        assert text in run.stderr.decode()
    assert "what no one should read" not in run.stderr.decode()


def test_a_file_that_is_no_plan_is_refused(built: Bundle, tmp_path: Path) -> None:
    bundle = tmp_path / "bundle"
    write_bundle(bundle, "engine.plan", b"no plan", plan_card(plan_of_frames()))

    run = infer(built, "-", "-", "--bundle", bundle)

    assert run.returncode == 1
    assert run.stderr.decode().splitlines() == [
        "TensorRT: not a plan",
        "infer: TensorRT refuses the engine; its error is above. Build the engine again here.",
    ]


def test_without_a_gpu_cuda_s_own_words_are_told(built: Bundle) -> None:
    """By NVIDIA's runtime, which needs no GPU to say that it finds none."""
    [runtime] = (built.folder / "cpp" / "stand_in").glob("**/libcudart.so.*")

    run = subprocess.run(
        [built.folder / "infer", "-", "-"],
        env={**os.environ, "LD_PRELOAD": str(runtime), "CUDA_VISIBLE_DEVICES": ""},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )

    assert run.returncode == 1
    assert run.stderr.startswith("infer: cudaGetDeviceProperties of CUDA fails: ")
    assert "CUDA" in run.stderr.split(": ", 2)[2] and run.stderr.endswith(" has memory left.\n")


def test_cmake_says_which_option_names_the_headers(built: Bundle, tmp_path: Path) -> None:
    if Path("/usr/include/x86_64-linux-gnu/NvInfer.h").exists() or INCLUDE_DIR in os.environ:
        pytest.skip("TensorRT's headers are where CMake looks for them")
    shutil.copytree(
        built.folder / "cpp", tmp_path / "cpp", ignore=shutil.ignore_patterns("build", "stand_in")
    )
    command = ["cmake", "-S", tmp_path / "cpp", "-B", tmp_path / "build"]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    assert run.returncode != 0 and "TENSORRT_INCLUDE_DIR" in run.stderr
