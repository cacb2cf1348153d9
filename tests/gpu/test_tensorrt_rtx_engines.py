"""Engines of TensorRT for RTX on this machine's GPU, and the kernels that it compiles. Not run on real hardware.

`python -m pytest tests/gpu/test_tensorrt_rtx_engines.py`: in a process without the tests of the other flavour.
"""

import importlib.util
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tasks.build_engine import build_engine
from tasks.parts.data.dataset import normalise, open_split
from tasks.parts.engines.frame_engine.jit import SUFFIX
from tasks.parts.engines.gpu import find_gpus
from tasks.parts.engines.manifest import EngineStatus, read_engine_manifest
from tasks.parts.engines.open_engine import open_engine
from tasks.parts.engines.runner import Runner
from tasks.parts.engines.target import Target
from tasks.parts.engines.tensorrt_options import RTX_CAPABILITIES, RUNTIME_CACHE
from tasks.parts.selection.bundle import write_bundle
from tests.tasks.conftest import Workshop
from tests.tasks.parts.selection.test_bundle import infer

_HAS_RTX = all(importlib.util.find_spec(name) for name in ("tensorrt_rtx", "pycuda"))
_CAPABILITIES = [gpu.compute_capability for gpu in find_gpus()[:1]]

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.tensorrt,
    pytest.mark.skipif(not _CAPABILITIES, reason="no NVIDIA GPU on this machine"),
    pytest.mark.skipif(
        not set(_CAPABILITIES) <= set(RTX_CAPABILITIES), reason="TensorRT for RTX builds nothing for this GPU"
    ),
    pytest.mark.skipif(not _HAS_RTX, reason="tensorrt_rtx or pycuda is not installed (extra rtx)"),
]


@pytest.fixture
def target(workshop: Workshop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Target:
    """The target of this GPU, in a folder that takes the kernels."""
    loaded = sys.modules.get("tensorrt")
    if loaded is not None and loaded.__name__ == "tensorrt":
        pytest.skip("this process runs plans of the other flavour of TensorRT; run this file alone")
    monkeypatch.chdir(tmp_path)
    return workshop.target("rtx4090_tensorrt_rtx", gpu=find_gpus()[0])


def build(workshop: Workshop, target: Target, *, is_quantized: bool = False) -> Path:
    out = Path("built")
    out.mkdir()
    model = workshop.quantized if is_quantized else workshop.graph
    report = build_engine(target, model=model, images=workshop.images, out=out)
    assert report.status is EngineStatus.built, report.reason
    assert report.agreement_db is not None and report.agreement_db > (10 if is_quantized else 30)
    return out / "engine"


def images_of(runner: Runner, count: int) -> np.ndarray:
    shape = (count, *runner.manifest.card.image_shape)
    return np.random.default_rng(0).standard_normal(shape, np.float32)


@pytest.mark.parametrize("cuda_graph", [False, True])
@pytest.mark.parametrize("is_quantized", [False, True])
def test_batches_in_any_order_give_the_logits_of_single_images(
    workshop: Workshop, target: Target, is_quantized: bool, cuda_graph: bool
) -> None:
    assert target.tensorrt is not None
    declared = replace(target, tensorrt=replace(target.tensorrt, cuda_graph=cuda_graph))
    with open_engine(build(workshop, declared, is_quantized=is_quantized)) as runner:
        images_NCHW = images_of(runner, 4)
        expected = np.concatenate([runner.infer(image[None]) for image in images_NCHW])
        for num_images in (4, 1, 3, 4, 4, 4):  # the third run of a size in a row is the first of a graph
            found = runner.infer(images_NCHW[:num_images])
            np.testing.assert_allclose(found, expected[:num_images], rtol=1e-2, atol=1e-2)
        assert runner.profile(images_NCHW[:1], 5)[0].milliseconds > 0  # not of a graph, which tells nothing
        np.testing.assert_allclose(runner.infer(images_NCHW[:1]), expected[:1], rtol=1e-2, atol=1e-2)


def kept() -> Path:
    [file] = RUNTIME_CACHE.glob(f"*{SUFFIX}")
    return file


def read_options(engine: Path) -> dict[str, Any]:
    with open_engine(engine) as runner:
        runner.infer(images_of(runner, 1))
        return dict(runner.describe().options)


def test_kernels_are_compiled_once_and_those_of_others_again(workshop: Workshop, target: Target) -> None:
    engine = build(workshop, target)
    file = kept()
    assert read_engine_manifest(engine).sha256 in file.name
    assert read_options(engine)["kernels_read"]
    compiled = file.read_bytes()
    file.write_bytes(compiled[: len(compiled) // 2])  # as a full disk would leave it
    assert not read_options(engine)["kernels_read"]
    assert read_options(engine)["kernels_read"] and len(file.read_bytes()) > len(compiled) // 2
    file.unlink()
    assert not read_options(engine)["kernels_read"] and kept() == file


def test_bundle_predicts_what_the_engine_does_and_keeps_kernels_of_its_own(
    workshop: Workshop, target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "caches"))
    engine, bundle = build(workshop, target), tmp_path / "bundle"
    assert write_bundle(engine, {"variant": "float", "target": target.name}, bundle)
    images_NHWC = np.asarray(open_split(workshop.data, "test")[0][:4])
    with open_engine(engine) as runner:
        card = runner.manifest.card
        expected = runner.infer(normalise(images_NHWC, card.mean, card.std)).argmax(axis=1)
    for _ in range(2):  # the second time with kernels
        done = infer(sys.executable, bundle, images_NHWC, tmp_path)
        assert done.returncode == 0, done.stderr
        np.testing.assert_array_equal(np.load(tmp_path / "classes.npy"), expected.astype(np.uint8))
        assert len(list((tmp_path / "caches" / "enginewright").glob(f"*{SUFFIX}"))) == 1
