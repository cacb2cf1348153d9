"""Engines of TensorRT on this machine's GPU: `make test-gpu`. Not run on real hardware."""

import importlib.util
import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch

from tasks.benchmark import benchmark
from tasks.build_engine import Report, build_engine
from tasks.core.errors import ArtifactError, DataError, TargetMismatch
from tasks.diff_layers import BisectionConfig, Config, diff_layers
from tasks.parts.data.dataset import normalise, open_split
from tasks.parts.data.input_card import InputCard
from tasks.parts.engines.description import on_frames
from tasks.parts.engines.frame_engine.engine import load_engine
from tasks.parts.engines.frame_engine.plans import Plan
from tasks.parts.engines.gpu import find_gpus
from tasks.parts.engines.manifest import (
    EngineStatus,
    FloatArray,
    plain_engine,
    read_engine_manifest,
    write_engine_manifest,
)
from tasks.parts.engines.open_engine import open_engine
from tasks.parts.engines.runner import Runner
from tasks.parts.engines.runtimes import Precision
from tasks.parts.engines.target import Gives, Reads, Target
from tasks.parts.engines.tensorrt_options import BatchProfile
from tasks.parts.selection.bundle import write_bundle
from tests.cpp_programs import compile_program, tensorrt_options
from tests.tasks.conftest import Workshop
from tests.tasks.parts.selection.test_bundle import infer
from tests.tasks.test_benchmark import CONFIG

_HAS_TENSORRT = all(importlib.util.find_spec(name) for name in ("tensorrt", "pycuda"))

BENCHMARK = replace(CONFIG, variants=["float"], concurrencies=[2])

pytestmark = [
    pytest.mark.tensorrt,
    pytest.mark.skipif(not find_gpus(), reason="no NVIDIA GPU on this machine"),
    pytest.mark.skipif(not _HAS_TENSORRT, reason="tensorrt or pycuda is not installed (extra gpu)"),
]


@pytest.fixture
def target(workshop: Workshop, tmp_path: Path) -> Target:
    declared = workshop.target("h200_tensorrt", gpu=find_gpus()[0])
    assert declared.tensorrt is not None
    return replace(declared, tensorrt=replace(declared.tensorrt, timing_cache=str(tmp_path / "cache")))


def with_options(target: Target, **changes: Any) -> Target:
    assert target.tensorrt is not None
    return replace(target, tensorrt=replace(target.tensorrt, **changes))


def random_images(card: InputCard, count: int) -> FloatArray:
    return np.random.default_rng(0).standard_normal((count, 3, card.height, card.width), np.float32)


def build(workshop: Workshop, target: Target, model: Path, out: Path) -> Report:
    out.mkdir()
    report = build_engine(target, model=model, images=workshop.images, out=out)
    assert report.status is EngineStatus.built, report.reason
    return report


def assert_batches_agree(runner: Runner) -> None:
    """Batches of any size, in any order, give the logits of single images."""
    images_NCHW = random_images(runner.manifest.card, 4)
    expected = np.concatenate([runner.infer(image[None]) for image in images_NCHW])
    for num_images in (4, 1, 3, 2, 4):
        found = runner.infer(images_NCHW[:num_images])
        np.testing.assert_allclose(found, expected[:num_images], rtol=1e-2, atol=1e-2)


def test_float_engine_agrees_with_the_graph(workshop: Workshop, target: Target, tmp_path: Path) -> None:
    report = build(workshop, target, workshop.graph, tmp_path / "a")
    assert report.is_precision_ok and report.agreement_db is not None and report.agreement_db > 30
    assert (tmp_path / "a" / "engine" / "commands.sh").is_file()


def test_quantized_graph_really_runs_in_int8(workshop: Workshop, target: Target, tmp_path: Path) -> None:
    report = build(workshop, target, workshop.quantized, tmp_path / "a")
    assert report.is_precision_ok and report.num_layers_int8 > 0


def test_plan_for_one_image_has_fixed_shapes(workshop: Workshop, target: Target, tmp_path: Path) -> None:
    report = build(workshop, replace(target, max_batch=1), workshop.graph, tmp_path / "a")
    assert report.kernel_units is not None
    image, *_ = onnx.load(tmp_path / "a" / "engine" / "graph.onnx").graph.input
    assert image.type.tensor_type.shape.dim[0].dim_value == 1
    with open_engine(tmp_path / "a" / "engine") as runner:
        assert runner.infer(random_images(runner.manifest.card, 1)).shape[0] == 1


def test_plan_with_several_profiles_agrees_in_each(
    workshop: Workshop, target: Target, tmp_path: Path
) -> None:
    profiles = [BatchProfile(1, 1, 1), BatchProfile(2, 3, 4)]
    build(workshop, with_options(target, profiles=profiles), workshop.graph, tmp_path / "a")
    with open_engine(tmp_path / "a" / "engine") as runner:
        assert_batches_agree(runner)


@pytest.mark.parametrize("precision", [Precision.f16, Precision.bf16])
@pytest.mark.parametrize("variant", ["float", "quantized"])
def test_layers_that_are_not_quantized_run_in_the_target_s_precision(
    workshop: Workshop, target: Target, tmp_path: Path, variant: str, precision: Precision
) -> None:
    model = workshop.quantized if variant == "quantized" else workshop.graph
    declared = replace(target, precision=precision, min_agreement_db=10.0)
    report = build(workshop, declared, model, tmp_path / "a")
    assert report.is_precision_ok, report.precision_note
    assert (report.num_layers_int8 > 0) == (variant == "quantized")


@pytest.mark.parametrize("reads", [Reads.frames, Reads.bgr_frames])
@pytest.mark.parametrize("variant", ["float", "quantized"])
def test_plan_on_frames_answers_as_its_plain_twin(
    workshop: Workshop, target: Target, tmp_path: Path, variant: str, reads: Reads
) -> None:
    model = workshop.quantized if variant == "quantized" else workshop.graph
    build(workshop, replace(target, reads=reads, gives=Gives.classes), model, tmp_path / "a")
    engine = tmp_path / "a" / "engine"
    frames_NHWC = np.ascontiguousarray(open_split(workshop.data, "test")[0][:6])
    with open_engine(engine) as runner, open_engine(plain_engine(engine)) as twin:
        answers_NHW = on_frames(runner).predict(frames_NHWC)
        assert (answers_NHW == on_frames(twin).predict(frames_NHWC)).mean() > 0.999


@pytest.mark.skipif(
    "TensorrtExecutionProvider" not in onnxruntime.get_available_providers(),
    reason="ONNX Runtime without its TensorRT provider (onnxruntime-gpu is not installed)",
)
@pytest.mark.parametrize("variant", ["float", "quantized"])
def test_onnxruntime_runs_a_plan(workshop: Workshop, target: Target, tmp_path: Path, variant: str) -> None:
    declared = workshop.target("cuda_onnxruntime_tensorrt", gpu=find_gpus()[0], runtime_version="any")
    options = with_options(target, cuda_graph=False).tensorrt
    model = workshop.quantized if variant == "quantized" else workshop.graph
    report = build(workshop, replace(declared, tensorrt=options), model, tmp_path / "a")
    assert report.provider == "TensorrtExecutionProvider" and report.is_precision_ok
    assert (report.num_layers_int8 > 0) == (variant == "quantized")
    with open_engine(tmp_path / "a" / "engine") as runner:
        assert_batches_agree(runner)


@pytest.mark.parametrize("variant", ["float", "quantized"])
def test_layers_are_compared_through_debug_tensors(
    workshop: Workshop, target: Target, tmp_path: Path, variant: str
) -> None:
    model = workshop.quantized if variant == "quantized" else workshop.graph
    build(workshop, target, model, tmp_path / "a")
    report = diff_layers(
        Config("calibration", 2, 10.0, BisectionConfig(False, 0.0, 0, 4)),
        engine=tmp_path / "a" / "engine",
        model=model,
        float_graph=workshop.graph,
        data=workshop.data,
        out=tmp_path,
    )
    assert report.status == "built", report.reason
    assert report.differences is not None and report.differences.num_layers > 5
    assert report.differences.marked_agreement_db > 30
    assert report.differences.worst_sqnr_db > (0 if variant == "quantized" else 30)


@pytest.mark.parametrize("cuda_graph", [False, True])
def test_batches_in_any_order_give_the_same_logits(
    workshop: Workshop, target: Target, tmp_path: Path, cuda_graph: bool
) -> None:
    build(workshop, with_options(target, cuda_graph=cuda_graph), workshop.graph, tmp_path / "a")
    with open_engine(tmp_path / "a" / "engine") as runner:
        assert_batches_agree(runner)
        images_NCHW = random_images(runner.manifest.card, 6)
        assert runner.profile(images_NCHW[:1], 3)[0].milliseconds > 0
        with pytest.raises(DataError, match="batch of 5"):
            runner.infer(images_NCHW[:5])


@pytest.mark.parametrize("cuda_graph", [False, True])
def test_execution_contexts_work_at_the_same_time(
    workshop: Workshop, target: Target, tmp_path: Path, cuda_graph: bool
) -> None:
    build(workshop, with_options(target, cuda_graph=cuda_graph), workshop.graph, tmp_path / "a")
    with open_engine(tmp_path / "a" / "engine") as runner:
        images_NCHW = random_images(runner.manifest.card, 4)[:3]
        expected = [runner.infer(image[None]) for image in images_NCHW]

        def drive(member: Runner, image_CHW: FloatArray) -> list[FloatArray]:
            with member:
                return [member.run(image_CHW[None]).copy() for _ in range(20)]

        with ThreadPoolExecutor(3) as pool:
            found = list(pool.map(drive, runner.open_concurrent(3), images_NCHW))
        for logits, right in zip(found, expected, strict=True):
            np.testing.assert_allclose(logits, [right] * 20, rtol=1e-3, atol=1e-3)
        np.testing.assert_array_equal(runner.infer(images_NCHW[:1]), expected[0])


@pytest.mark.parametrize("cuda_graph", [False, True])
def test_benchmark_tells_the_time_of_the_gpu_and_its_state(
    workshop: Workshop, target: Target, tmp_path: Path, cuda_graph: bool
) -> None:
    build(workshop, with_options(target, cuda_graph=cuda_graph), workshop.graph, tmp_path / "a")
    engine = tmp_path / "a" / "engine"
    report = benchmark(BENCHMARK, builds=engine, reference=engine, images=workshop.images, out=tmp_path)
    [measured] = report.engines.values()
    assert measured.latency is not None and report.surroundings is not None
    single = measured.latency.at_batch_1
    assert single.device_ms_p50 and single.device_compute_ms_p50 and single.latency_ms_p50
    assert 0 < single.device_compute_ms_p50 < single.device_ms_p50
    assert measured.options["cuda_graph"] is cuda_graph and measured.options["transfers_included"]
    for state in (report.surroundings.before, report.surroundings.after):
        assert state.gpu is not None and state.gpu.sm_mhz
    assert report.machine.versions["nvidia driver"] != "unknown"
    assert [one.concurrency for one in measured.latency.throughputs] == [2]


def test_tensors_on_the_gpu_need_no_copy(workshop: Workshop, target: Target, tmp_path: Path) -> None:
    build(workshop, target, workshop.graph, tmp_path / "a")
    with open_engine(tmp_path / "a" / "engine") as runner:
        images_NCHW = random_images(runner.manifest.card, 2)
        expected = runner.infer(images_NCHW)
        logits_NCHW = torch.empty(expected.shape, device="cuda")
        runner.infer_tensor(torch.from_numpy(images_NCHW).cuda(), logits_NCHW)
        torch.cuda.synchronize()
        np.testing.assert_allclose(logits_NCHW.cpu().numpy(), expected, rtol=1e-3, atol=1e-3)
        np.testing.assert_array_equal(runner.infer(images_NCHW), expected)  # the addresses are back
        with pytest.raises(DataError, match="expected contiguous float32"):
            runner.infer_tensor(torch.from_numpy(images_NCHW), logits_NCHW)


def test_frames_on_the_gpu_are_answered_there(workshop: Workshop, target: Target, tmp_path: Path) -> None:
    build(workshop, target, workshop.graph, tmp_path / "a")
    engine, bundle = tmp_path / "a" / "engine", tmp_path / "bundle"
    assert write_bundle(engine, {"variant": "float", "target": target.name}, bundle)
    frames_NHWC = np.ascontiguousarray(open_split(workshop.data, "test")[0][:3])
    palette = np.random.default_rng(0).integers(0, 256, (16, 3), np.uint8)
    with open_engine(engine) as runner:
        expected = on_frames(runner).predict(frames_NHWC)  # numpy around it
        alone = load_engine(bundle)
        assert isinstance(alone.run, Plan)
        if alone.run.card["reads"] == "normalised":
            pytest.skip("NVRTC is not installed")
        np.testing.assert_array_equal(alone.predict(frames_NHWC), expected)
        found = alone.run.answer_on_gpu(torch.from_numpy(frames_NHWC).cuda(), palette=palette)
        torch.cuda.synchronize()
        np.testing.assert_array_equal(torch.as_tensor(found.answers, device="cuda").cpu().numpy(), expected)
        colours = torch.as_tensor(found.colours, device="cuda").cpu().numpy()
        np.testing.assert_array_equal(colours, palette[expected])


def test_timing_cache_replays_the_build(workshop: Workshop, target: Target, tmp_path: Path) -> None:
    build(workshop, target, workshop.graph, tmp_path / "a")
    [cache] = (tmp_path / "cache").glob("*.cache")
    build(workshop, with_options(target, error_on_timing_cache_miss=True), workshop.graph, tmp_path / "b")
    cache.unlink()
    (tmp_path / "c").mkdir()
    strict = with_options(target, error_on_timing_cache_miss=True)
    report = build_engine(strict, model=workshop.graph, images=workshop.images, out=tmp_path / "c")
    assert report.status is EngineStatus.failed
    assert not list((tmp_path / "c" / "engine").glob("*.plan"))


def test_several_builds_keep_one_and_tell_their_spread(
    workshop: Workshop, target: Target, tmp_path: Path
) -> None:
    report = build(workshop, with_options(target, num_builds=3), workshop.graph, tmp_path / "a")
    assert len(report.build_latencies_ms) == 3
    assert len(list((tmp_path / "a" / "engine").glob("*.plan"))) == 1


def test_plan_of_another_gpu_or_other_bytes_is_never_loaded(
    workshop: Workshop, target: Target, tmp_path: Path
) -> None:
    build(workshop, target, workshop.graph, tmp_path / "a")
    engine = tmp_path / "a" / "engine"
    manifest = read_engine_manifest(engine)
    assert manifest.gpu is not None
    write_engine_manifest(engine, replace(manifest, gpu=replace(manifest.gpu, name="NVIDIA Imaginary")))
    with pytest.raises(TargetMismatch, match="built on NVIDIA Imaginary"):
        open_engine(engine)
    write_engine_manifest(engine, replace(manifest, runtime_version="9.9"))
    with pytest.raises(TargetMismatch, match=r"built by TensorRT 9\.9"):
        open_engine(engine)
    write_engine_manifest(engine, manifest)
    (engine / manifest.file).write_bytes((engine / manifest.file).read_bytes()[:-1])
    with pytest.raises(ArtifactError, match="sha256"):
        open_engine(engine)


def test_bundle_predicts_what_the_engine_does(workshop: Workshop, target: Target, tmp_path: Path) -> None:
    build(workshop, with_options(target, cuda_graph=False), workshop.graph, tmp_path / "a")
    engine, bundle = tmp_path / "a" / "engine", tmp_path / "bundle"
    assert write_bundle(engine, {"variant": "float", "target": target.name}, bundle)
    images_NHWC = np.asarray(open_split(workshop.data, "test")[0][:6])  # more than one batch
    with open_engine(engine) as runner:
        card = runner.manifest.card
        logits = [runner.infer(normalise(batch, card.mean, card.std)) for batch in np.split(images_NHWC, [4])]
    done = infer(sys.executable, bundle, images_NHWC, tmp_path)
    assert done.returncode == 0, done.stderr
    np.testing.assert_array_equal(
        np.load(tmp_path / "classes.npy"), np.concatenate(logits).argmax(axis=1).astype(np.uint8)
    )
    model = json.loads((bundle / "model.json").read_text())
    model["options"]["gpu"]["name"] = "NVIDIA Imaginary"
    (bundle / "model.json").write_text(json.dumps(model))
    done = infer(sys.executable, bundle, images_NHWC, tmp_path)
    assert done.returncode != 0 and "was built on NVIDIA Imaginary" in done.stderr


@pytest.mark.parametrize("cuda_graph", [False, True])
@pytest.mark.parametrize(
    ("reads", "gives"), [(Reads.normalised, Gives.logits), (Reads.bgr_frames, Gives.classes)]
)
def test_cpp_program_answers_as_the_bundle_does_in_python(
    workshop: Workshop, target: Target, tmp_path: Path, reads: Reads, gives: Gives, cuda_graph: bool
) -> None:
    declared = replace(with_options(target, cuda_graph=cuda_graph), reads=reads, gives=gives)
    build(workshop, declared, workshop.graph, tmp_path / "a")
    bundle = tmp_path / "bundle"
    assert write_bundle(tmp_path / "a" / "engine", {"variant": "float", "target": target.name}, bundle)
    program = compile_program(bundle, tensorrt_options(tmp_path))
    frames_NHWC = np.ascontiguousarray(open_split(workshop.data, "test")[0][:6])
    engine = load_engine(bundle)
    expected = np.concatenate([engine.answer(frame[None]) for frame in frames_NHWC])

    is_reversed = reads is Reads.bgr_frames
    np.save(tmp_path / "frames.npy", frames_NHWC[..., ::-1].copy() if is_reversed else frames_NHWC)
    subprocess.run([program, "frames.npy", "masks.npy"], cwd=tmp_path, check=True)

    np.testing.assert_array_equal(np.load(tmp_path / "masks.npy"), expected)
    text = (bundle / "engine.txt").read_text()
    (bundle / "engine.txt").write_text(text.replace("\ngpu ", "\ngpu NVIDIA Imaginary or "))
    done = subprocess.run([program, "-", "-"], capture_output=True, text=True, check=False)
    assert done.returncode == 1 and "was built on NVIDIA Imaginary" in done.stderr
