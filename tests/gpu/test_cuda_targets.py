"""Engines for an NVIDIA GPU without TensorRT: `python -m pytest -m gpu`.

Needs torch, safetensors, dacite, onnx, onnxruntime and onnxslim, and no orchestrator; the test of ONNX Runtime needs
onnxruntime-gpu and onnxscript as well.
"""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnxruntime
import pytest
import torch
import yaml

from tasks.benchmark import benchmark
from tasks.build_engine import Report, build_engine
from tasks.core.config import typed_config
from tasks.core.errors import DataError, TargetMismatch
from tasks.parts.data.input_card import InputCard
from tasks.parts.engines.gpu import find_gpus
from tasks.parts.engines.manifest import EngineStatus, FloatArray, read_engine_manifest, write_engine_manifest
from tasks.parts.engines.open_engine import open_engine
from tasks.parts.engines.runtimes import Precision
from tasks.parts.engines.target import Target
from tasks.parts.engines.torch.precision import CastNetwork
from tasks.parts.engines.torch.runner import set_up_torch
from tasks.parts.networks.build import build_network
from tasks.parts.networks.checkpoint import load_checkpoint, save_checkpoint
from tasks.parts.networks.config import NetworkConfig, NetworkName
from tasks.parts.networks.model_card import ModelCard
from tests.tasks.test_benchmark import CONFIG

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available(), reason="no NVIDIA GPU that torch can use on this machine"
    ),
]

LEAST_DB = {"f32": 90.0, "bf16": 20.0, "f16": 38.0}
"""Signal-to-noise of rounded mantissas (24, 8 and 11 bits, 6 dB each), less what the layers add up. TF32 has 11 bits
too, so f32 fails where it is on."""

HEIGHT, WIDTH = 64, 96

BENCHMARK = replace(CONFIG, variants=["float"], concurrencies=[2])

TORCH_TARGETS = ["cuda_torch", "cuda_aotinductor"]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A narrow Fast-SCNN with statistics of random images."""
    torch.manual_seed(0)
    config = NetworkConfig(name=NetworkName.fast_scnn, width=0.25, depth=0.34, depthwise=False)
    card = ModelCard(config, ("background", "zero", "one"), (0.5,) * 3, (0.25,) * 3, HEIGHT, WIDTH)
    network = build_network(config, len(card.classes)).train()
    with torch.no_grad():
        for _ in range(20):
            network(torch.randn(8, 3, card.height, card.width))
    path = tmp_path_factory.mktemp("checkpoint") / "model.safetensors"
    save_checkpoint(path, network.eval(), card)
    return path


def declared(name: str, precision: str = "f32") -> Target:
    file = Path(__file__).parents[2] / "conf" / "target" / f"{name}.yaml"
    fields = yaml.safe_load(file.read_text(encoding="utf-8"))
    del fields["work_pool"]
    target: Target = typed_config(Target, fields, f"target.{name}")
    return replace(
        target,
        runtime_version="any",
        max_batch=4,
        precision=Precision(precision),
        min_agreement_db=LEAST_DB[precision],
    )


def random_images(card: InputCard, count: int = 2) -> FloatArray:
    return np.random.default_rng(0).standard_normal((count, 3, card.height, card.width), np.float32)


def build(target: Target, model: Path, out: Path) -> Report:
    out.mkdir()
    images = out.with_suffix(".npy")
    np.save(images, np.random.default_rng(0).integers(0, 256, (4, HEIGHT, WIDTH, 3), np.uint8))
    report = build_engine(target, model=model, images=images, out=out)
    assert report.status is EngineStatus.built, report.reason
    return report


@pytest.fixture(scope="module")
def engines(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], Path]:
    """Engine folders by target and precision, each built once."""
    root = tmp_path_factory.mktemp("engines")
    found = {}
    for name in TORCH_TARGETS:
        for precision in LEAST_DB:
            out = root / f"{name}-{precision}"
            build(declared(name, precision), checkpoint, out)
            found[name, precision] = out / "engine"
    return found


@pytest.mark.parametrize("precision", LEAST_DB)
@pytest.mark.parametrize("name", TORCH_TARGETS)
def test_engine_runs_on_the_gpu_in_the_declared_precision(
    engines: dict[tuple[str, str], Path], name: str, precision: str
) -> None:
    manifest = read_engine_manifest(engines[name, precision])
    convolutions = manifest.precisions["Conv2d" if name == "cuda_torch" else "conv2d"]
    assert manifest.is_precision_ok and convolutions.keys() == {precision}
    assert manifest.gpu == find_gpus()[0] and manifest.gpu.name in manifest.provider


@pytest.mark.parametrize("precision", LEAST_DB)
def test_compiled_engine_agrees_with_torch_compile(
    engines: dict[tuple[str, str], Path], checkpoint: Path, precision: str
) -> None:
    set_up_torch(declared("cuda_torch"))
    network = CastNetwork(load_checkpoint(checkpoint)[0], Precision(precision)).cuda()
    with open_engine(engines["cuda_aotinductor", precision]) as runner, torch.inference_mode():
        images_NCHW = random_images(runner.manifest.card)
        found = runner.infer(images_NCHW)
        expected = torch.compile(network)(torch.from_numpy(images_NCHW).cuda()).cpu().numpy()
    noise, signal = np.square(found - expected).sum(), np.square(expected).sum()
    assert 10 * np.log10(signal / max(noise, 1e-30)) > LEAST_DB[precision]


@pytest.mark.parametrize("name", TORCH_TARGETS)
def test_batches_in_any_order_give_the_same_logits(engines: dict[tuple[str, str], Path], name: str) -> None:
    with open_engine(engines[name, "f32"]) as runner:
        images_NCHW = random_images(runner.manifest.card, 4)
        expected = np.concatenate([runner.infer(image[None]) for image in images_NCHW])
        for num_images in (4, 1, 3, 2, 4):
            found = runner.infer(images_NCHW[:num_images])
            np.testing.assert_allclose(found, expected[:num_images], rtol=1e-3, atol=1e-3)
        kept = found.copy()
        runner.infer(images_NCHW[::-1].copy())
        np.testing.assert_array_equal(found, kept)
        assert runner.profile(images_NCHW[:1], 3)[0].milliseconds > 0
        with pytest.raises(DataError, match="batch of 5"):
            runner.infer(np.repeat(images_NCHW, 2, axis=0)[:5])


@pytest.mark.parametrize("name", TORCH_TARGETS)
def test_runs_take_no_more_memory_of_the_gpu(engines: dict[tuple[str, str], Path], name: str) -> None:
    with open_engine(engines[name, "f16"]) as runner:
        images_NCHW = random_images(runner.manifest.card)
        for _ in range(3):
            runner.run(images_NCHW)
        reserved = torch.cuda.memory_reserved()
        for _ in range(20):
            runner.run(images_NCHW)
        assert torch.cuda.memory_reserved() == reserved


def test_weights_in_half_precision_take_less_memory(engines: dict[tuple[str, str], Path]) -> None:
    taken = {}
    for precision in ("f32", "f16"):
        before = torch.cuda.memory_allocated()
        with open_engine(engines["cuda_torch", precision]):
            taken[precision] = torch.cuda.memory_allocated() - before
    assert taken["f16"] < taken["f32"]


def test_package_of_another_gpu_is_never_loaded(engines: dict[tuple[str, str], Path], tmp_path: Path) -> None:
    manifest = read_engine_manifest(engines["cuda_aotinductor", "f32"])
    assert manifest.gpu is not None
    imaginary = replace(manifest.gpu, name="NVIDIA Imaginary")
    write_engine_manifest(tmp_path, replace(manifest, gpu=imaginary))
    with pytest.raises(TargetMismatch, match="was compiled on NVIDIA Imaginary"):
        open_engine(tmp_path)


def test_default_student_is_compiled_and_loaded(tmp_path: Path) -> None:
    """In a process of its own: on an H100, torch 2.11 crashed when it loaded this package, but no smaller one."""
    script = tmp_path / "build.py"
    script.write_text(
        f"""import sys
from pathlib import Path

import torch

sys.path.insert(0, {str(Path(__file__).parents[2])!r})
from benchmarks.gpu_cells import EngineCase, build, declared_target, write_checkpoint, write_random_dataset

torch._C._set_print_stack_traces_on_fatal_signal(True)  # of C++
case, root = EngineCase("baseline", 64, 64, "cuda_aotinductor", "f32"), Path({str(tmp_path)!r})
write_checkpoint(case, root / "model.safetensors")
write_random_dataset(root / "dataset", 64, 64, {{"train": 1, "val": 1, "calibration": 4}})
build(declared_target(case), root / "model.safetensors", root / "dataset", root / "engine")
""",
        encoding="utf-8",
    )
    done = subprocess.run([sys.executable, script], text=True, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("name", TORCH_TARGETS)
def test_benchmark_tells_the_energy_of_the_gpu(
    engines: dict[tuple[str, str], Path], name: str, tmp_path: Path
) -> None:
    engine = engines[name, "f32"]
    images = engine.parent.with_suffix(".npy")
    report = benchmark(BENCHMARK, builds=engine, reference=engine, images=images, out=tmp_path)
    [measured] = report.engines.values()
    assert measured.latency is not None
    told = measured.latency.energy_mj_per_image
    assert (told and told > 0) or "does not count its energy" in measured.latency.energy_note


@pytest.mark.skipif(
    "CUDAExecutionProvider" not in onnxruntime.get_available_providers(),
    reason="ONNX Runtime without CUDA (onnxruntime-gpu is not installed)",
)
def test_onnxruntime_runs_every_layer_on_the_gpu(checkpoint: Path, tmp_path: Path) -> None:
    from tasks.parts.onnx_graphs.export import export_graph
    from tasks.parts.onnx_graphs.graph import write_graph

    network, card = load_checkpoint(checkpoint)
    graph = export_graph(network, card, height=card.height, width=card.width, opset=20)
    write_graph(graph, tmp_path / "model.onnx")
    report = build(declared("cuda_onnxruntime"), tmp_path / "model.onnx", tmp_path / "a")
    assert report.provider == "CUDAExecutionProvider" and report.is_precision_ok
    with open_engine(tmp_path / "a" / "engine") as runner:
        images_NCHW = random_images(runner.manifest.card, 4)
        expected = np.concatenate([runner.infer(image[None]) for image in images_NCHW])
        for num_images in (4, 1, 3, 2, 4):
            found = runner.infer(images_NCHW[:num_images])
            np.testing.assert_allclose(found, expected[:num_images], rtol=1e-3, atol=1e-3)
