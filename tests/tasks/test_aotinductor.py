"""Engines of AOTInductor, compiled here for the CPU; those of a GPU are in tests/gpu."""

import copy
import shutil
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from flows.params import compose_params
from tasks.build_engine import Report, build_engine
from tasks.core.errors import BuildFailed, TargetMismatch
from tasks.diff_layers import Config, diff_layers
from tasks.parts.builders.aotinductor import export_program
from tasks.parts.engines.gpu import find_gpus
from tasks.parts.engines.manifest import EngineStatus, read_engine_manifest
from tasks.parts.engines.runtimes import CHECKPOINT_RUNTIMES, Precision
from tasks.parts.engines.target import Target
from tasks.parts.engines.torch.precision import CastNetwork, precisions_of_program
from tasks.parts.engines.torch.runner import set_up_torch
from tasks.parts.networks.build import build_network
from tasks.parts.networks.config import OWN_NETWORKS, NetworkConfig, NetworkName
from tasks.parts.onnx_graphs.signal_to_noise import difference
from tests.tasks.conftest import Workshop
from tests.tasks.test_diff_layers import NO_BISECTION

TRACED_ALWAYS = (NetworkName.fast_scnn, NetworkName.segformer)
"""A network of convolutions and one of attention; the others are traced in trials."""
CUDA_TARGETS = ["cuda_torch", "cuda_aotinductor", "cuda_onnxruntime"]

LEAST_DB = {"f32": 100.0, "bf16": 20.0, "f16": 38.0}
"""Signal-to-noise of rounded mantissas (24, 8 and 11 bits, 6 dB each), less what the layers add up."""


def built(workshop: Workshop, target: Target, model: Path, out: Path) -> Report:
    out.mkdir()
    return build_engine(target, model=model, images=workshop.images, out=out)


@pytest.mark.slow
def test_engine_is_one_file_that_follows_the_network(workshop: Workshop) -> None:
    engine = workshop.engine("float", "cpu_aotinductor")
    manifest = read_engine_manifest(engine)
    assert sorted(file.name for file in engine.iterdir()) == ["engine.pt2", "manifest.json"]
    assert manifest.is_precision_ok and not manifest.is_quantized
    assert manifest.precisions["conv2d"].keys() == {"f32"}
    assert "batch_norm" not in manifest.precisions  # folded


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="no g++ on this machine")
def test_bfloat16_engine_says_so_and_is_compared_with_float32(workshop: Workshop, tmp_path: Path) -> None:
    target = workshop.target(
        "cpu_aotinductor", precision=Precision.bf16, max_batch=1, min_agreement_db=LEAST_DB["bf16"]
    )
    report = built(workshop, target, workshop.checkpoint, tmp_path / "a")
    assert report.status is EngineStatus.built, report.reason
    assert report.is_precision_ok and report.precisions["conv2d"].keys() == {"bf16"}
    assert report.agreement_db is not None and report.agreement_db < 60


@pytest.mark.parametrize("precision", ["f32", "bf16", "f16"])
def test_eager_engine_computes_in_the_declared_precision(
    workshop: Workshop, tmp_path: Path, precision: str
) -> None:
    target = workshop.target("cpu_torch", precision=Precision(precision))
    report = built(workshop, target, workshop.checkpoint, tmp_path / "a")
    assert report.is_precision_ok and report.precisions["Conv2d"].keys() == {precision}
    assert report.agreement_db is not None and report.agreement_db > LEAST_DB[precision]


def test_engine_below_the_floor_fails_and_names_precision_and_floor(
    workshop: Workshop, tmp_path: Path
) -> None:
    target = workshop.target("cpu_torch", precision=Precision.bf16, min_agreement_db=90.0)
    report = built(workshop, target, workshop.checkpoint, tmp_path / "a")
    assert report.status is EngineStatus.failed
    assert "expected 90 dB or more (target.cpu_torch.min_agreement_db)" in report.reason
    assert "or a wider target.cpu_torch.precision" in report.reason
    assert [file.name for file in (tmp_path / "a" / "engine").iterdir()] == ["manifest.json"]


def test_machine_without_compiler_is_refused(workshop: Workshop, tmp_path: Path) -> None:
    with (
        torch._inductor.config.patch("cpp.cxx", (None, "no-such-g++")),
        pytest.raises(TargetMismatch, match=r"has no no-such-g\+\+\. Install g\+\+.*CXX.*its work pool"),
    ):
        built(workshop, workshop.target("cpu_aotinductor"), workshop.checkpoint, tmp_path / "a")


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.trial] * (name not in TRACED_ALWAYS)) for name in OWN_NETWORKS],
)
def test_every_network_is_traced_in_every_precision(workshop: Workshop, name: NetworkName) -> None:
    torch.manual_seed(0)
    network = build_network(NetworkConfig(name, width=0.25, depth=0.34, depthwise=False), 3).eval()
    images_NCHW = torch.randn(3, 3, 64, 64)
    with torch.inference_mode():
        expected_NCHW = network(images_NCHW).numpy()
    for precision, least_db in LEAST_DB.items():
        cast = CastNetwork(copy.deepcopy(network), Precision(precision))
        program = export_program(cast, images_NCHW[:2], workshop.target("cpu_aotinductor"))
        with torch.inference_mode():
            found_NCHW = program.module()(images_NCHW).numpy()
        assert difference(expected_NCHW, found_NCHW).sqnr_db > least_db
        assert precisions_of_program(program)["conv2d"].keys() == {precision}


class DecidesByValues(nn.Module):
    """Takes another way for dark images."""

    def forward(self, images_NCHW: Tensor) -> Tensor:
        return images_NCHW if images_NCHW.mean() > 0 else -images_NCHW


class KnowsItsBatch(nn.Module):
    """Works for two images."""

    def forward(self, images_NCHW: Tensor) -> Tensor:
        return images_NCHW.view(2, -1)


@pytest.mark.parametrize("network", [DecidesByValues(), KnowsItsBatch()])
def test_network_that_cannot_be_traced_is_refused_with_the_words_of_torch(
    workshop: Workshop, network: nn.Module
) -> None:
    message = r"cpu_aotinductor: torch\.export cannot trace the network for batches of 1\.\.4 \(.{20,}"
    with pytest.raises(BuildFailed, match=message):
        export_program(network, torch.zeros(2, 3, 8, 8), workshop.target("cpu_aotinductor"))


@pytest.mark.slow
def test_layers_are_not_compared_and_the_reason_is_told(workshop: Workshop, tmp_path: Path) -> None:
    report = diff_layers(
        Config(split="calibration", num_images=1, collapse_db=10.0, bisection=NO_BISECTION),
        engine=workshop.engine("float", "cpu_aotinductor"),
        model=workshop.checkpoint,
        float_graph=workshop.graph,
        data=workshop.data,
        out=tmp_path,
    )
    assert (report.status, report.differences) == ("skipped", None)
    assert "aotinductor" in report.reason


@pytest.mark.skipif(torch.cuda.is_available(), reason="torch can use a GPU of this machine")
def test_torch_without_cuda_is_refused_also_where_there_is_a_gpu(workshop: Workshop) -> None:
    with pytest.raises(TargetMismatch, match=r"cuda_torch needs torch with CUDA; torch 2\..*its work pool"):
        set_up_torch(workshop.target("cuda_torch"))


@pytest.mark.skipif(bool(find_gpus()), reason="this machine has a GPU")
@pytest.mark.parametrize("name", CUDA_TARGETS)
def test_engine_for_a_gpu_is_refused_at_once_where_there_is_none(
    workshop: Workshop, tmp_path: Path, name: str
) -> None:
    target = workshop.target(name)
    model = workshop.checkpoint if target.runtime in CHECKPOINT_RUNTIMES else workshop.graph
    with pytest.raises(
        TargetMismatch, match=rf"{name} needs an NVIDIA GPU; this machine has none.*its work pool"
    ):
        built(workshop, target, model, tmp_path / "a")
    assert not list((tmp_path / "a").iterdir())


def test_targets_of_a_gpu_take_float_checkpoints_or_every_graph() -> None:
    engines = compose_params([f"target=[cpu_torch,{','.join(CUDA_TARGETS)}]"])["engines"]
    assert engines["pruned-cuda_aotinductor"]["model"] == "artifacts/finetune/model.safetensors"
    assert "pruned_ptq-cuda_aotinductor" not in engines and "pruned_ptq-cuda_torch" not in engines
    assert engines["pruned_fp16-cuda_onnxruntime"]["model"].endswith(".onnx")
