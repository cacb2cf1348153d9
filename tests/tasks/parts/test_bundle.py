"""Bundles: run in another folder, in another environment, with the same predictions."""

import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from google.protobuf import text_format

from tasks.parts.bundle import write_bundle
from tasks.parts.data import normalise, open_split
from tasks.parts.runners.open_engine import open_engine
from tests.tasks.conftest import Workshop
from tests.wheels import unpack_wheel

TARGETS = ["cpu_onnxruntime", "cpu_openvino"]


def bundled(workshop: Workshop, target: str, out: Path, variant: str = "quantized") -> Path:
    row = {"variant": variant, "target": target, "miou": 0.5}
    assert write_bundle(workshop.engine(variant, target), row, out)
    return out


def predictions(workshop: Workshop, target: str, images_NHWC: np.ndarray) -> np.ndarray:
    with open_engine(workshop.engine("quantized", target)) as runner:
        card = runner.manifest.card
        logits = [runner.infer(normalise(image[None], card.mean, card.std)) for image in images_NHWC]
    return np.concatenate(logits).argmax(axis=1).astype(np.uint8)


def infer(
    python: str, bundle: Path, images_NHWC: np.ndarray, folder: Path
) -> subprocess.CompletedProcess[str]:
    """Run infer.py as a user would, away from the repository."""
    np.save(folder / "images.npy", images_NHWC)
    command = [python, "-I", str(bundle / "infer.py"), "images.npy", "classes.npy"]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("target", TARGETS)
def test_moved_bundle_predicts_what_the_engine_does(workshop: Workshop, tmp_path: Path, target: str) -> None:
    moved = shutil.move(bundled(workshop, target, tmp_path / "a"), tmp_path / "elsewhere")
    images_NHWC = np.asarray(open_split(workshop.data, "test")[0][:6])  # more than one batch
    done = infer(sys.executable, Path(moved), images_NHWC, tmp_path)
    assert done.returncode == 0, done.stderr
    found_NHW = np.load(tmp_path / "classes.npy")
    np.testing.assert_array_equal(found_NHW, predictions(workshop, target, images_NHWC))


@pytest.mark.slow
@pytest.mark.parametrize("target", TARGETS)
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
def test_changed_engine_is_not_loaded(workshop: Workshop, tmp_path: Path, target: str) -> None:
    bundle = bundled(workshop, target, tmp_path / "a")
    [engine] = bundle.glob("engine.*")
    engine.write_bytes(engine.read_bytes()[:-1] + b"x")
    done = infer(sys.executable, bundle, np.zeros((1, 64, 96, 3), np.uint8), tmp_path)
    assert done.returncode != 0 and "is not loaded. Copy the bundle again" in done.stderr
    sums = subprocess.run(
        ["sha256sum", "-c", "SHA256SUMS"], cwd=bundle, capture_output=True, text=True, check=False
    )
    assert sums.returncode != 0 and f"{engine.name}: FAILED" in sums.stdout


@pytest.mark.parametrize(
    "images_NHWC",
    [
        np.zeros((1, 64, 96, 3), np.float32),
        np.zeros((1, 32, 96, 3), np.uint8),
        np.zeros((0, 64, 96, 3), np.uint8),
    ],
)
def test_images_that_do_not_fit_are_refused(
    workshop: Workshop, tmp_path: Path, images_NHWC: np.ndarray
) -> None:
    bundle = bundled(workshop, "cpu_onnxruntime", tmp_path / "a")
    done = infer(sys.executable, bundle, images_NHWC, tmp_path)
    assert done.returncode != 0
    assert "expected uint8 [N, 64, 96, 3], RGB, with one image or more" in done.stderr


def test_checksums_cover_every_file(workshop: Workshop, tmp_path: Path) -> None:
    bundle = bundled(workshop, "cpu_onnxruntime", tmp_path / "a")
    done = subprocess.run(
        ["sha256sum", "-c", "SHA256SUMS"], cwd=bundle, capture_output=True, text=True, check=True
    )
    files = [path for path in bundle.rglob("*") if path.is_file() and path.name != "SHA256SUMS"]
    assert done.stdout.count(": OK") == len(files)


def test_triton_configuration_holds_its_schema(workshop: Workshop, tmp_path: Path) -> None:
    bundle = bundled(workshop, "cpu_onnxruntime", tmp_path / "a")
    [model] = (bundle / "triton").iterdir()
    config = text_format.Parse(
        (model / "config.pbtxt").read_text(), triton_schema(tmp_path / "client").ModelConfig()
    )
    assert (config.name, config.backend, config.max_batch_size) == (model.name, "onnxruntime", 4)
    assert list(config.input[0].dims) == [3, 64, 96] and config.input[0].name == "image"
    assert list(config.output[0].dims) == [3, 64, 96] and config.output[0].name == "logits"
    assert (model / "1" / "model.onnx").is_file()


def test_eager_engine_has_no_bundle(workshop: Workshop, tmp_path: Path) -> None:
    assert not write_bundle(workshop.engine("float", "cpu_torch"), {}, tmp_path / "a")
    assert not (tmp_path / "a").exists()


def triton_schema(folder: Path) -> Any:
    """Load the schema of a model's configuration from Triton's client."""
    folder.mkdir()
    path = unpack_wheel("tritonclient==2.*", folder) / "tritonclient" / "grpc" / "model_config_pb2.py"
    spec = importlib.util.spec_from_file_location("model_config_pb2", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
