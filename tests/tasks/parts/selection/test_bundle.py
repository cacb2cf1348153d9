"""Bundles: run in another folder, in another environment, with the same predictions."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import openvino
import pytest
from google.protobuf import text_format
from onnx import TensorProto, helper
from tritonclient.grpc import model_config_pb2

from tasks.build_engine import build_engine
from tasks.core.errors import DataError
from tasks.parts.builders.graph_rewrites import fix_batch
from tasks.parts.data.dataset import normalise, open_split
from tasks.parts.data.input_card import Task
from tasks.parts.engines.description import describe_engine, on_frames
from tasks.parts.engines.frame_engine.images import cut_batches
from tasks.parts.engines.frame_engine.plans import check_gpu
from tasks.parts.engines.frame_engine.sessions import check_vnni, openvino_core
from tasks.parts.engines.gpu import Gpu
from tasks.parts.engines.manifest import (
    GRAPH_FILE,
    EngineManifest,
    read_engine_manifest,
    sha256_of,
    write_engine_manifest,
)
from tasks.parts.engines.open_engine import open_engine
from tasks.parts.engines.tensorrt_options import BatchProfile
from tasks.parts.onnx_graphs.graph import read_graph
from tasks.parts.selection.bundle import write_bundle
from tasks.parts.selection.triton import configure_native
from tests.cpp_programs import build_program
from tests.tasks.conftest import TOLD_BY_CI, Workshop

TARGETS = ["cpu_onnxruntime", "cpu_openvino"]


def bundled(workshop: Workshop, target: str, out: Path, variant: str = "quantized") -> Path:
    row = {"variant": variant, "target": target, "miou": 0.5}
    assert write_bundle(workshop.engine(variant, target), row, out)
    return out


def manifest_of(workshop: Workshop, target: str) -> EngineManifest:
    return read_engine_manifest(workshop.engine("quantized", target))


def change_card(bundle: Path, **fields: Any) -> None:
    card = json.loads((bundle / "model.json").read_text())
    (bundle / "model.json").write_text(json.dumps(card | fields))


def predictions(workshop: Workshop, target: str, images_NHWC: np.ndarray) -> np.ndarray:
    with open_engine(workshop.engine("quantized", target)) as runner:
        card = runner.manifest.card
        logits = [runner.infer(normalise(image[None], card.mean, card.std)) for image in images_NHWC]
    return np.concatenate(logits).argmax(axis=1).astype(np.uint8)


def infer(
    python: str, bundle: Path, images_NHWC: np.ndarray, folder: Path
) -> subprocess.CompletedProcess[str]:
    np.save(folder / "images.npy", images_NHWC)
    return run_script(python, bundle, folder)


def run_script(python: str, bundle: Path, folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run infer.py as a user would, away from the repository."""
    command = [python, "-I", str(bundle / "infer.py"), *(arguments or ("images.npy", "classes.npy"))]
    environment = {
        name: value for name, value in os.environ.items() if name not in {"PYTHONPATH", *TOLD_BY_CI}
    }
    environment["HOME"] = str(folder)
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("target", TARGETS)
def test_moved_bundle_predicts_what_the_engine_does(workshop: Workshop, tmp_path: Path, target: str) -> None:
    moved = shutil.move(bundled(workshop, target, tmp_path / "a"), tmp_path / "elsewhere")
    images_NHWC = np.asarray(open_split(workshop.data, "test")[0][:6])  # more than one batch
    done = infer(sys.executable, Path(moved), images_NHWC, tmp_path)
    assert done.returncode == 0, done.stderr
    assert not (tmp_path / "intel").exists()  # OpenVINO tells its maker nothing
    found_NHW = np.load(tmp_path / "classes.npy")
    np.testing.assert_array_equal(found_NHW, predictions(workshop, target, images_NHWC))


@pytest.mark.slow
@pytest.mark.parametrize("target", [TARGETS[0], pytest.param(TARGETS[1], marks=pytest.mark.trial)])
def test_bundle_runs_with_nothing_but_its_requirements(
    workshop: Workshop, tmp_path: Path, target: str
) -> None:
    bundle = bundled(workshop, target, tmp_path / "a")
    subprocess.run([sys.executable, "-m", "venv", tmp_path / "venv"], check=True)
    python = str(tmp_path / "venv" / "bin" / "python")
    install = [python, "-m", "pip", "install", "--quiet", "-r", str(bundle / "requirements.txt")]
    subprocess.run(install, check=True)
    images_NHWC = np.asarray(open_split(workshop.data, "test")[0][:2])
    done = infer(python, bundle, images_NHWC, tmp_path)
    assert done.returncode == 0, done.stderr
    found_NHW = np.load(tmp_path / "classes.npy")
    np.testing.assert_array_equal(found_NHW, predictions(workshop, target, images_NHWC))


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize(
    "damage", [lambda content: content[:-1] + bytes([content[-1] ^ 1]), lambda content: content[:-1]]
)
def test_changed_engine_is_not_loaded(
    workshop: Workshop, tmp_path: Path, target: str, damage: Callable[[bytes], bytes]
) -> None:
    bundle = bundled(workshop, target, tmp_path / "a")
    [engine] = bundle.glob("engine.*")
    engine.write_bytes(damage(engine.read_bytes()))
    done = infer(sys.executable, bundle, np.zeros((1, 64, 96, 3), np.uint8), tmp_path)
    assert done.returncode != 0 and "is not loaded. Copy the bundle again" in done.stderr
    sums = subprocess.run(
        ["sha256sum", "-c", "SHA256SUMS"], cwd=bundle, capture_output=True, text=True, check=False
    )
    assert sums.returncode != 0 and f"{engine.name}: FAILED" in sums.stdout


@pytest.mark.parametrize("target", TARGETS)
def test_other_version_of_the_runtime_is_named(workshop: Workshop, tmp_path: Path, target: str) -> None:
    bundle = bundled(workshop, target, tmp_path / "a")
    runtime, installed = (
        describe_engine(manifest_of(workshop, target))[key] for key in ("runtime", "runtime_version")
    )
    change_card(bundle, runtime_version="1.2.3")
    done = infer(sys.executable, bundle, np.zeros((1, 64, 96, 3), np.uint8), tmp_path)
    assert done.returncode != 0
    assert f"measured with {runtime} 1.2.3, installed is {installed}" in done.stderr


OPTIONS = {"provider_options": {}, "num_threads": 1, "needs_vnni": False}


def test_provider_that_is_not_here_is_refused(workshop: Workshop, tmp_path: Path) -> None:
    bundle = bundled(workshop, "cpu_onnxruntime", tmp_path / "a")
    change_card(bundle, options={**OPTIONS, "provider": "CUDAExecutionProvider"})
    done = infer(sys.executable, bundle, np.zeros((1, 64, 96, 3), np.uint8), tmp_path)
    assert done.returncode != 0
    assert "measured on CUDAExecutionProvider, onnxruntime here has" in done.stderr


@pytest.mark.parametrize(
    "images_NHWC",
    [
        np.zeros((1, 64, 96, 3), np.float32),
        np.zeros((1, 64, 96), np.uint8),  # grey
        np.zeros((1, 64, 96, 4), np.uint8),  # RGBA
    ],
)
def test_images_that_do_not_fit_are_refused(
    workshop: Workshop, tmp_path: Path, images_NHWC: np.ndarray
) -> None:
    bundle = bundled(workshop, "cpu_onnxruntime", tmp_path / "a")
    done = infer(sys.executable, bundle, images_NHWC, tmp_path)
    assert done.returncode != 0
    assert "expected uint8 [N, H, W, 3] (RGB for three channels)" in done.stderr


def write_torn(path: Path) -> None:
    np.save(path, np.zeros((2, 64, 96, 3), np.uint8))
    path.write_bytes(path.read_bytes()[:-1])


@pytest.mark.parametrize(
    "write",
    [
        Path.touch,
        write_torn,
        lambda path: path.write_bytes(b"\x89PNG\r\n\x1a\n"),
        lambda path: np.save(path, np.array([{}]), allow_pickle=True),
    ],
)
def test_file_without_whole_images_is_named(
    workshop: Workshop, tmp_path: Path, write: Callable[[Path], Any]
) -> None:
    bundle, images = bundled(workshop, "cpu_onnxruntime", tmp_path / "a"), tmp_path / "images.npy"
    write(images)
    done = run_script(sys.executable, bundle, tmp_path)
    assert done.returncode != 0
    assert done.stderr.startswith("infer.py: images.npy: not a complete .npy file (")


def test_int8_engine_of_a_cpu_with_vnni_is_refused_without_it(workshop: Workshop, tmp_path: Path) -> None:
    manifest = read_engine_manifest(workshop.engine("quantized", "cpu_onnxruntime"))
    on_vnni = replace(manifest, isa=("avx2", "avx512_vnni"))
    assert describe_engine(on_vnni)["options"]["needs_vnni"]
    assert not describe_engine(replace(manifest, isa=("avx2",)))["options"]["needs_vnni"]
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text("flags\t\t: fpu avx2\n")
    with pytest.raises(ValueError, match="Build the engine again for this machine"):
        check_vnni(cpuinfo)
    cpuinfo.write_text("flags\t\t: fpu avx2 avx512_vnni\n")
    check_vnni(cpuinfo)


def test_help_names_the_arguments_and_ends_with_0(workshop: Workshop, tmp_path: Path) -> None:
    bundle = bundled(workshop, "cpu_onnxruntime", tmp_path / "a")
    done = run_script(sys.executable, bundle, tmp_path, "--help")
    assert done.returncode == 0 and "usage: infer.py [-h]" in done.stdout
    assert "uint8 [N, H, W, C]" in done.stdout


@pytest.mark.parametrize(
    ("ranges", "sizes"),
    [([[1, 4]], [4, 4, 1]), ([[1, 1], [4, 8]], [8, 1]), ([[1, 1], [2, 3]], [3, 3, 3]), ([[1, 1]], [1] * 9)],
)
def test_batches_are_the_largest_that_the_engine_takes(ranges: list[list[int]], sizes: list[int]) -> None:
    cut = list(cut_batches(9, ranges))
    assert [batch.stop - batch.start for batch in cut] == sizes
    assert np.concatenate([np.arange(9)[batch] for batch in cut]).tolist() == list(range(9))


@pytest.mark.parametrize(
    ("compatibility", "runs_on"),
    [
        ("none", ["NVIDIA A100"]),
        ("same_compute_capability", ["NVIDIA A100", "NVIDIA A30"]),
        ("ampere_plus", ["NVIDIA A100", "NVIDIA A30", "NVIDIA Thor"]),
    ],
)
def test_plan_is_refused_on_a_gpu_that_it_was_not_built_for(compatibility: str, runs_on: list[str]) -> None:
    gpu = {"name": "NVIDIA A100", "compute_capability": "8.0"}
    options = {"gpu": gpu, "hardware_compatibility": compatibility}
    for name, capability in (
        ("NVIDIA T4", (7, 5)),
        ("NVIDIA A100", (8, 0)),
        ("NVIDIA A30", (8, 0)),
        ("NVIDIA Thor", (11, 0)),
    ):
        if name in runs_on:
            check_gpu(name, capability, options)
        else:
            expected = rf"built on NVIDIA A100 \(8\.0\) with .* {compatibility}, this GPU is {name}"
            with pytest.raises(ValueError, match=expected):
                check_gpu(name, capability, options)


def test_checksums_cover_every_file(workshop: Workshop, tmp_path: Path) -> None:
    bundle = bundled(workshop, "cpu_onnxruntime", tmp_path / "a")
    done = subprocess.run(
        ["sha256sum", "-c", "SHA256SUMS"], cwd=bundle, capture_output=True, text=True, check=True
    )
    files = [path for path in bundle.rglob("*") if path.is_file() and path.name != "SHA256SUMS"]
    assert done.stdout.count(": OK") == len(files)


def test_eager_engine_has_no_bundle(workshop: Workshop, tmp_path: Path) -> None:
    assert not write_bundle(workshop.engine("float", "cpu_torch"), {}, tmp_path / "a")
    assert not (tmp_path / "a").exists()


def test_triton_serves_the_file_of_onnxruntime(workshop: Workshop, tmp_path: Path) -> None:
    bundle = bundled(workshop, "cpu_onnxruntime", tmp_path / "a")
    [model] = (bundle / "triton_native").iterdir()
    config = text_format.Parse((model / "config.pbtxt").read_text(), model_config_pb2.ModelConfig())
    assert (config.name, config.backend, config.max_batch_size) == (model.name, "onnxruntime", 4)
    assert list(config.input[0].dims) == [3, 64, 96] and config.input[0].name == "image"
    assert list(config.output[0].dims) == [3, 64, 96] and config.output[0].name == "logits"
    assert (model / "1" / "model.onnx").read_bytes() == (bundle / "engine.onnx").read_bytes()


@pytest.mark.parametrize("target", TARGETS)
def test_engine_for_one_image_takes_them_one_by_one_and_triton_serves_it_so(
    workshop: Workshop, tmp_path: Path, target: str
) -> None:
    built, bundle = tmp_path / "built", tmp_path / "bundle"
    built.mkdir()
    declared = workshop.target(target, max_batch=1)
    build_engine(declared, model=workshop.quantized, images=workshop.images, out=built)
    assert write_bundle(built / "engine", {"variant": "quantized", "target": target}, bundle)
    images_NHWC = np.asarray(open_split(workshop.data, "test")[0][:3])
    with open_engine(built / "engine") as runner:
        images_NCHW = normalise(images_NHWC, runner.manifest.card.mean, runner.manifest.card.std)
        with pytest.raises(DataError, match="input is a batch of 3"):
            runner.infer(images_NCHW)
        logits_NCHW = np.concatenate([runner.infer(image_CHW[None]) for image_CHW in images_NCHW])
    done = infer(sys.executable, bundle, images_NHWC, tmp_path)
    assert done.returncode == 0, done.stderr
    np.testing.assert_array_equal(np.load(tmp_path / "classes.npy"), logits_NCHW.argmax(axis=1))
    [model] = (bundle / "triton_native").iterdir()
    config = text_format.Parse((model / "config.pbtxt").read_text(), model_config_pb2.ModelConfig())
    assert (config.max_batch_size, list(config.input[0].dims)) == (0, [1, 3, 64, 96])
    graph = openvino_core().read_model(model / "1" / "model.onnx")
    assert list(graph.input(0).shape) == [1, 3, 64, 96]
    assert list(graph.output(0).shape) == list(config.output[0].dims)


@pytest.mark.parametrize("variant", ["float", "quantized"])
def test_triton_serves_the_graph_that_openvino_compiled(
    workshop: Workshop, tmp_path: Path, variant: str
) -> None:
    bundle = bundled(workshop, "cpu_openvino", tmp_path / "a", variant)
    [model] = (bundle / "triton_native").iterdir()
    config = text_format.Parse((model / "config.pbtxt").read_text(), model_config_pb2.ModelConfig())
    assert (config.name, config.backend, config.max_batch_size) == (model.name, "openvino", 0)
    graph = openvino_core().read_model(model / "1" / config.default_model_filename)
    for declared, found in ((config.input, graph.inputs), (config.output, graph.outputs)):
        assert [one.name for one in declared] == [one.get_any_name() for one in found]
        assert openvino.PartialShape(list(declared[0].dims)) == found[0].partial_shape
    parameters = {key: value.string_value for key, value in config.parameters.items()}
    assert parameters["INFERENCE_NUM_THREADS"] == "1" and "HINT_BF16" not in parameters
    properties = describe_engine(manifest_of(workshop, "cpu_openvino"))["options"]["properties"]
    compiled = openvino_core().compile_model(graph, "CPU", properties)
    images_NHWC = np.asarray(open_split(workshop.data, "test")[0][:4])
    with open_engine(workshop.engine(variant, "cpu_openvino")) as runner:
        images_NCHW = normalise(images_NHWC, runner.manifest.card.mean, runner.manifest.card.std)
        np.testing.assert_allclose(compiled(images_NCHW)[0], runner.infer(images_NCHW), rtol=1e-4, atol=1e-4)


def test_triton_computes_in_bf16_where_the_target_does(workshop: Workshop) -> None:
    manifest = manifest_of(workshop, "cpu_openvino")
    manifest = replace(manifest, target=workshop.target("cpu_openvino_bf16"))
    text = configure_native("name", manifest, read_graph(workshop.graph).graph)
    config = text_format.Parse(text, model_config_pb2.ModelConfig())
    assert config.parameters["HINT_BF16"].string_value == "YES"


def plan_manifest(workshop: Workshop, **options: Any) -> EngineManifest:
    """What build_engine would say of a plan for an H200."""
    target = workshop.target("h200_tensorrt")
    assert target.tensorrt is not None
    return replace(
        manifest_of(workshop, "cpu_openvino"),
        target=replace(target, tensorrt=replace(target.tensorrt, **options)),
        file="engine.plan",
        runtime_version="11.4.0.1",
        tensorrt_version="11.4.0.1",
        gpu=Gpu("NVIDIA H200", "9.0"),
    )


def test_triton_gets_the_profiles_of_a_plan(workshop: Workshop) -> None:
    graph = read_graph(workshop.graph).graph
    text = configure_native("name", plan_manifest(workshop), graph)
    assert (
        "and windows (see 'reading'\n# in model.json) and the way back for masks are left to the client"
        in text
    )
    config = text_format.Parse(text, model_config_pb2.ModelConfig())
    assert (config.name, config.platform, config.max_batch_size) == ("name", "tensorrt_plan", 4)
    assert list(config.input[0].dims) == [3, 64, 96] and config.input[0].name == "image"
    assert list(config.output[0].dims) == [3, 64, 96] and config.output[0].name == "logits"
    [group] = config.instance_group
    assert group.kind == model_config_pb2.ModelInstanceGroup.KIND_GPU and list(group.profile) == ["0"]
    assert "Built by TensorRT 11.4.0.1 on NVIDIA H200 (9.0)" in text and "version-compatible" not in text
    several = plan_manifest(
        workshop, profiles=[BatchProfile(1, 1, 1), BatchProfile(2, 2, 4)], version_compatible=True
    )
    text = configure_native("name", several, graph)
    config = text_format.Parse(text, model_config_pb2.ModelConfig())
    assert config.max_batch_size == 4 and list(config.instance_group[0].profile) == ["0", "1"]
    assert "--backend-config=tensorrt,version-compatible=true" in text


def test_triton_gives_a_plan_for_one_image_its_fixed_shape(workshop: Workshop) -> None:
    manifest = plan_manifest(workshop)
    manifest = replace(manifest, target=replace(manifest.target, max_batch=1))
    text = configure_native("name", manifest, fix_batch(read_graph(workshop.graph)).graph)
    config = text_format.Parse(text, model_config_pb2.ModelConfig())
    assert config.max_batch_size == 0 and list(config.input[0].dims) == [1, 3, 64, 96]


def test_server_runs_the_engine_as_it_was_best_under_load(workshop: Workshop, tmp_path: Path) -> None:
    options = {"batch": 4, "lanes": 2, "num_threads": 1}
    row = {"variant": "float", "target": "cpu_onnxruntime", "load_options": options, "knee_per_s": 900.0}
    for bound_ms, delay_us in ((None, 3000), (20.0, 3000), (5.5, 500), (4.0, 0)):
        speed = {"throughput_per_s_within_p99": 1000.0, "throughput_ms_p99": 5.0, "load_max_p99_ms": bound_ms}
        out = tmp_path / str(bound_ms)
        assert write_bundle(workshop.engine("float", "cpu_onnxruntime"), row | speed, out)
        text = (out / "triton" / "float-cpu_onnxruntime" / "config.pbtxt").read_text(encoding="utf-8")
        config = text_format.Parse(text, model_config_pb2.ModelConfig())
        assert (config.max_batch_size, config.instance_group[0].count) == (4, 2)
        assert config.dynamic_batching.max_queue_delay_microseconds == delay_us
        assert json.loads((out / "model.json").read_text())["load"]["num_threads"] == 1


def test_plan_is_packed_with_what_its_script_needs(workshop: Workshop, tmp_path: Path) -> None:
    """Packing reads no plan: any bytes will do here, and are refused without TensorRT."""
    engine, bundle = tmp_path / "engine", tmp_path / "bundle"
    engine.mkdir()
    (engine / "engine.plan").write_bytes(b"no plan")
    shutil.copyfile(workshop.graph, engine / GRAPH_FILE)
    manifest = plan_manifest(workshop, profiles=[BatchProfile(1, 1, 1), BatchProfile(2, 2, 4)])
    write_engine_manifest(engine, replace(manifest, sha256=sha256_of(engine / "engine.plan")))
    assert write_bundle(engine, {"variant": "pruned", "target": "h200_tensorrt"}, bundle)
    assert (bundle / "triton_native" / "pruned-h200_tensorrt" / "1" / "model.plan").read_bytes() == b"no plan"
    assert (bundle / "requirements.txt").read_text().split()[::2] == ["tensorrt==11.4.0.1", "pycuda"]
    assert "frame_engine/kernels.cu" in (bundle / "SHA256SUMS").read_text()
    assert "NvInfer.h" in (bundle / "cpp" / "infer.cpp").read_text()
    assert {"gpu NVIDIA H200", "compute_capability 9.0", "profile 0", "cuda_graph YES"} <= set(
        (bundle / "engine.txt").read_text().splitlines()
    )
    card = json.loads((bundle / "model.json").read_text())
    assert card["batches"] == [[1, 1], [2, 4]]
    assert card["options"] == {
        "gpu": {"name": "NVIDIA H200", "compute_capability": "9.0"},
        "version_compatible": False,
        "cuda_graph": True,
        "hardware_compatibility": "none",
    }
    done = infer(sys.executable, bundle, np.zeros((1, 64, 96, 3), np.uint8), tmp_path)
    assert done.returncode != 0 and "measured with tensorrt 11.4.0.1, installed is " in done.stderr


def test_plan_for_rtx_gets_no_backend_of_tensorrt_which_would_refuse_it(
    workshop: Workshop, tmp_path: Path
) -> None:
    engine, bundle = tmp_path / "engine", tmp_path / "bundle"
    engine.mkdir()
    (engine / "engine.plan").write_bytes(b"no plan")
    name = "rtx4090_tensorrt_rtx"
    manifest = replace(
        manifest_of(workshop, "cpu_openvino"),
        target=workshop.target(name),
        file="engine.plan",
        sha256=sha256_of(engine / "engine.plan"),
        runtime_version="1.7.1.116",
        tensorrt_version="1.7.1.116",
        gpu=Gpu("NVIDIA GeForce RTX 4090", "8.9"),
    )
    write_engine_manifest(engine, manifest)
    assert write_bundle(engine, {"variant": "pruned", "target": name}, bundle)
    assert not (bundle / "triton_native").exists() and not (bundle / "deepstream").exists()
    config = (bundle / "triton" / f"pruned-{name}" / "config.pbtxt").read_text()
    assert 'backend: "python"' in config and "KIND_GPU" in config
    packages = (bundle / "requirements.txt").read_text().split()
    assert packages[::2] == ["tensorrt_rtx_cu13==1.7.1.116", "pycuda"]
    assert "frame_engine/jit.py" in (bundle / "SHA256SUMS").read_text()
    done = infer(sys.executable, bundle, np.zeros((1, 64, 96, 3), np.uint8), tmp_path)
    assert done.returncode != 0 and "measured with tensorrt_rtx_cu13 1.7.1.116, installed is " in done.stderr


def on_frames_bundle(workshop: Workshop, target: str, folder: Path) -> tuple[Path, Path]:
    """Build an engine that reads frames and gives classes; return its folder and its bundle."""
    built, bundle = folder / "built", folder / "bundle"
    built.mkdir()
    declared = workshop.target(target, reads="frames", gives="classes", max_batch=1)
    report = build_engine(declared, model=workshop.quantized, images=workshop.images, out=built)
    assert report.status == "built", report.reason
    assert write_bundle(built / "engine", {"variant": "quantized", "target": target}, bundle)
    return built / "engine", bundle


def many_frames(workshop: Workshop, count: int = 100) -> np.ndarray:
    """Return frames of all splits, shifted so that no two are equal."""
    images_NHWC = np.concatenate(
        [np.asarray(open_split(workshop.data, split)[0]) for split in ("val", "test")]
    )
    frames = [np.roll(images_NHWC[i % len(images_NHWC)], i, axis=(0, 1)) for i in range(count)]
    return np.stack(frames)


@pytest.mark.parametrize("target", TARGETS)
def test_python_cpp_and_validate_give_the_same_masks(workshop: Workshop, tmp_path: Path, target: str) -> None:
    engine, bundle = on_frames_bundle(workshop, target, tmp_path)
    frames_NHWC = many_frames(workshop)
    with open_engine(engine) as runner:  # what validate does
        expected_NHW = np.concatenate([on_frames(runner).answer(frame[None]) for frame in frames_NHWC])
    done = infer(sys.executable, bundle, frames_NHWC, tmp_path)
    assert done.returncode == 0, done.stderr
    np.testing.assert_array_equal(np.load(tmp_path / "classes.npy"), expected_NHW)
    assert len(np.unique(expected_NHW)) > 1
    program = build_program(bundle, target.removeprefix("cpu_"))
    subprocess.run([program, "images.npy", "cpp.npy"], cwd=tmp_path, check=True)
    np.testing.assert_array_equal(np.load(tmp_path / "cpp.npy"), expected_NHW)


def test_triton_gets_an_axis_for_the_class_of_an_image(workshop: Workshop) -> None:
    manifest = manifest_of(workshop, "cpu_onnxruntime")
    card = replace(manifest.card, task=Task.classification)
    target = workshop.target("cpu_onnxruntime", reads="frames", gives="classes")
    frames = helper.make_tensor_value_info("frames", TensorProto.UINT8, ["batch", 64, 96, 3])
    classes = helper.make_tensor_value_info("classes", TensorProto.UINT8, ["batch"])
    graph = helper.make_graph([], "classifier", [frames], [classes])
    text = configure_native("name", replace(manifest, target=target, card=card), graph)
    config = text_format.Parse(text, model_config_pb2.ModelConfig())
    assert list(config.output[0].dims) == [1] and list(config.output[0].reshape.shape) == []
    assert config.output[0].HasField("reshape") and config.max_batch_size == 4


def test_triton_is_told_what_an_engine_on_frames_reads_and_gives(workshop: Workshop, tmp_path: Path) -> None:
    _, bundle = on_frames_bundle(workshop, "cpu_openvino", tmp_path)
    [model] = (bundle / "triton_native").iterdir()
    config = text_format.Parse((model / "config.pbtxt").read_text(), model_config_pb2.ModelConfig())
    names = model_config_pb2.DataType
    assert (config.input[0].name, list(config.input[0].dims)) == ("frames", [1, 64, 96, 3])
    assert (config.output[0].name, list(config.output[0].dims)) == ("classes", [1, 64, 96])
    assert config.input[0].data_type == config.output[0].data_type == names.Value("TYPE_UINT8")
