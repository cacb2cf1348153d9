"""Sizes and batches that a file fixes, and what is told about a file before the first stage."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import ModelProto, helper, numpy_helper
from torch import nn

from flows.params import compose_params
from flows.preflight import check_models
from tasks.core.errors import ArtifactError, ConfigError
from tasks.parts.onnx_graphs.foreign_output import OutputKind
from tasks.parts.onnx_graphs.graph import read_graph
from tests.conftest import REPOSITORY
from tests.tasks.test_import_gates import chain
from tests.tasks.test_import_onnx import classifier, images, run

RANDOM = np.random.default_rng(0)
WEIGHTS_OIHW = RANDOM.normal(size=(4, 3, 3, 3)).astype(np.float32)
HALVED: tuple[str, list[str], dict[str, Any]] = ("Conv", ["W"], {"pads": [1] * 4, "strides": [2, 2]})


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return images(tmp_path_factory.mktemp("small"), 32)


def segmenter(batch: Any = 10, side: int = 64) -> ModelProto:
    """Return a fully convolutional graph whose file fixes batch, size and the size that it resizes to."""
    constants = {
        "W": WEIGHTS_OIHW,
        "whole": np.array([batch, 4, side, side]),
        "none": np.zeros(0, np.float32),
    }
    layers = [HALVED, ("Relu", [], {}), ("Resize", ["none", "none", "whole"], {"mode": "linear"})]
    return chain(layers, constants, (batch, 3, side, side))


def test_fixed_size_of_a_fully_convolutional_graph_is_changed_b9(small: Path, tmp_path: Path) -> None:
    onnx.save(segmenter(), tmp_path / "model.onnx")
    report = run(tmp_path / "model.onnx", small, tmp_path / "out", height=32, width=32)
    assert "image size changed to 32x32" in report.rewritten
    assert (report.static_batch_before, report.max_batch, report.height) == (10, None, 32)
    assert min(found.sqnr_db for found in report.differences) > 100
    logits = read_graph(tmp_path / "out/model.onnx").graph.output[0].type.tensor_type.shape.dim
    assert [axis.dim_value for axis in logits] == [0, 4, 32, 32]


def test_size_that_the_graph_depends_on_is_refused_with_the_node_b9(small: Path, tmp_path: Path) -> None:
    constants = {"W": WEIGHTS_OIHW, "places": RANDOM.normal(size=(1, 4, 32, 32)).astype(np.float32)}
    onnx.save(chain([HALVED, ("Add", ["places"], {})], constants, ("n", 3, 64, 64)), tmp_path / "model.onnx")
    with pytest.raises(
        ArtifactError,
        match=r"reads images of 64x64, .* ask for 32x32, which the graph cannot have \(.*Add.*"
        r"Set both to null and prepare_data to 64x64, or export the model for 32x32",
    ):
        run(tmp_path / "model.onnx", small, tmp_path / "out", height=32, width=32)


def in_workspace(folder: Path, monkeypatch: pytest.MonkeyPatch, *overrides: str) -> dict[str, Any]:
    monkeypatch.chdir(folder)
    size = ["prepare_data.height=32", "prepare_data.width=32", "prepare_data.root=data"]
    return compose_params(["model=onnx", "model.path=model.onnx", "data=images", *size, *overrides])


def test_size_and_classes_are_told_before_the_first_stage_b9(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    onnx.save(segmenter(), tmp_path / "model.onnx")
    with pytest.raises(
        ConfigError, match=r"model\.onnx reads images of 64x64, but prepare_data makes them 32x32"
    ):
        check_models(in_workspace(tmp_path, monkeypatch))
    fitting = ("model.height=32", "model.width=32")
    check_models(in_workspace(tmp_path, monkeypatch, *fitting))
    with pytest.raises(ConfigError, match=r"model\.onnx has 4 classes, but model\.classes names 2"):
        check_models(in_workspace(tmp_path, monkeypatch, *fitting, "model.classes=[a,b]"))
    with pytest.raises(
        ArtifactError, match=r"4 channels, and model\.threshold is 0\.5, which is for outputs of one"
    ):
        check_models(in_workspace(tmp_path, monkeypatch, *fitting, "model.threshold=0.5"))
    (tmp_path / "data").mkdir()
    (tmp_path / "data/classes.yaml").write_text("[a, b, c]")
    with pytest.raises(ConfigError, match=r"has 4 classes, but the data set data names 3"):
        check_models(in_workspace(tmp_path, monkeypatch, *fitting, "data=folder"))


def test_stray_file_beside_the_model_is_told_before_the_first_stage_b9(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    onnx.save(
        classifier(), folder / "model.onnx", save_as_external_data=True, location="w.bin", size_threshold=0
    )
    params = in_workspace(tmp_path, monkeypatch, "model.path=folder")
    check_models(params)
    (folder / "README.md").write_text("notes")
    text = r"folder/README\.md: not a part of the model in folder, expected only inputs\.npz, model\.onnx, w\.bin"
    with pytest.raises(ArtifactError, match=text):
        check_models(params)


def test_params_are_not_written_for_a_model_that_does_not_fit_b9(tmp_path: Path) -> None:
    onnx.save(classifier(("n", 3, 64, 64)), tmp_path / "model.onnx")
    overrides = ["model=onnx", f"model.path={tmp_path}/model.onnx", "data=images", "prepare_data.height=32"]
    done = subprocess.run(
        [sys.executable, "-m", "flows.params", *overrides, "prepare_data.width=32"],
        cwd=tmp_path,
        env={"PYTHONPATH": str(REPOSITORY), "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert done.stderr.startswith("ConfigError: ") and "reads images of 64x64" in done.stderr
    assert not (tmp_path / "params.yaml").exists()


class ClassToken(nn.Module):
    """A token beside those of the image, repeated for each image, and a position for each."""

    def __init__(self) -> None:
        super().__init__()
        self.patches, self.head = nn.Conv2d(3, 16, 8, 8), nn.Linear(16, 3)
        self.token, self.places = nn.Parameter(torch.randn(1, 1, 16)), nn.Parameter(torch.randn(1, 17, 16))

    def forward(self, images_NCHW: torch.Tensor) -> torch.Tensor:
        tokens = self.patches(images_NCHW).flatten(2).transpose(1, 2)
        tokens = torch.cat([self.token.expand(tokens.shape[0], -1, -1), tokens], dim=1) + self.places
        return self.head(tokens.softmax(dim=1)[:, 0])


class SequenceFirst(nn.Module):
    """Attention with the batch in the second axis, united with the heads."""

    def __init__(self) -> None:
        super().__init__()
        self.patches, self.head = nn.Conv2d(3, 16, 8, 8), nn.Linear(16, 3)
        self.attention = nn.MultiheadAttention(16, 4)

    def forward(self, images_NCHW: torch.Tensor) -> torch.Tensor:
        tokens_TNC = self.patches(images_NCHW).flatten(2).permute(2, 0, 1)
        mixed_TNC = self.attention(tokens_TNC, tokens_TNC, tokens_TNC, need_weights=False)[0]
        return self.head(mixed_TNC.mean(dim=0))


class Windows(nn.Module):
    """Windows of 4x4 that become images of the batch, as in Swin."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.mix, self.head = nn.Conv2d(3, 8, 2, 2), nn.Linear(16, 16), nn.Linear(8, 3)
        self.mask = nn.Parameter(torch.randn(16, 1, 8))

    def forward(self, images_NCHW: torch.Tensor) -> torch.Tensor:
        maps = self.stem(images_NCHW)
        number = maps.shape[0]
        windows = maps.reshape(number, 8, 4, 4, 4, 4).permute(0, 2, 4, 1, 3, 5).reshape(number * 16, 8, 16)
        scores = windows @ windows.transpose(1, 2) + self.mask.repeat(number, 1, 1)
        mixed = scores.softmax(dim=-1) @ self.mix(windows)
        maps = mixed.reshape(number, 4, 4, 8, 4, 4).permute(0, 3, 1, 4, 2, 5).reshape(number, 8, 16, 16)
        return self.head(maps.mean(dim=(2, 3)))


@pytest.mark.parametrize("batch", [1, 4])
@pytest.mark.parametrize("network", [ClassToken, SequenceFirst, Windows])
def test_fixed_batch_of_any_number_becomes_dynamic_b9(
    small: Path, tmp_path: Path, network: type[nn.Module], batch: int
) -> None:
    torch.manual_seed(0)
    torch.backends.mha.set_fastpath_enabled(False)
    torch.onnx.export(
        network().eval(),
        (torch.zeros(batch, 3, 32, 32),),
        tmp_path / "model.onnx",
        dynamo=False,
        input_names=["pixels"],
    )
    torch.backends.mha.set_fastpath_enabled(True)
    report = run(tmp_path / "model.onnx", small, tmp_path / "out", batch_sizes=[1, 2, 3])
    assert (report.static_batch_before, report.max_batch) == (batch, None)
    assert min(found.sqnr_db for found in report.differences) > 80


def test_batch_in_the_size_of_a_resize_becomes_dynamic_b9(small: Path, tmp_path: Path) -> None:
    onnx.save(segmenter(side=32), tmp_path / "model.onnx")
    report = run(tmp_path / "model.onnx", small, tmp_path / "out", batch_sizes=[1, 2, 3])
    assert (report.static_batch_before, report.max_batch) == (10, None)


def test_shapes_that_are_computed_from_the_batch_become_constants_where_they_stay_open_b9(
    small: Path, tmp_path: Path
) -> None:
    """An expand(n, -1, -1) of torch: its exporter looks for -1 in a shape that holds the batch."""
    nodes = [
        helper.make_node("Conv", ["pixels", "W"], ["maps"], "patches", strides=[8, 8]),
        helper.make_node("Reshape", ["maps", "flat"], ["places"], "flat"),
        helper.make_node("Transpose", ["places"], ["tokens"], "tokens", perm=[0, 2, 1]),
        helper.make_node("Shape", ["tokens"], ["sizes"], "sizes"),
        helper.make_node("Slice", ["sizes", "zero", "one"], ["batch"], "batch"),
        helper.make_node("Concat", ["batch", "open", "open"], ["wanted"], "wanted", axis=0),
        helper.make_node("Equal", ["wanted", "every"], ["is_open"], "is_open"),
        helper.make_node("Where", ["is_open", "ones", "wanted"], ["shape"], "shape"),
        helper.make_node("Expand", ["token", "shape"], ["repeated"], "repeat"),
        helper.make_node("Concat", ["repeated", "tokens"], ["both"], "both", axis=1),
        helper.make_node("Mul", ["both", "both"], ["answer"], "square"),
    ]
    model = chain([("Conv", ["W"], {})], {"W": RANDOM.normal(size=(4, 3, 8, 8)).astype(np.float32)})
    del model.graph.node[:]
    model.graph.node.extend(nodes)
    constants = {
        "flat": np.array([0, 4, 16]),
        "zero": np.array([0]),
        "one": np.array([1]),
        "open": np.array([-1]),
        "every": np.array([-1, -1, -1]),
        "ones": np.array([1, 1, 1]),
        "token": RANDOM.normal(size=(1, 1, 4)).astype(np.float32),
    }
    model.graph.initializer.extend(numpy_helper.from_array(value, name) for name, value in constants.items())
    del model.graph.output[0].type.tensor_type.shape.dim[3]
    onnx.save(model, tmp_path / "model.onnx")
    report = run(
        tmp_path / "model.onnx", small, tmp_path / "out", output_kind=OutputKind.values, batch_sizes=[1, 3]
    )
    assert (report.static_batch_before, report.max_batch) == (None, None)
    assert any(change.startswith("batch of 1 only for the simplification") for change in report.rewritten)
    kinds = {node.op_type for node in read_graph(tmp_path / "out/model.onnx").graph.node}
    assert not kinds & {"Equal", "Where"}


def test_batch_that_only_the_declaration_frees_is_freed_b9(small: Path, tmp_path: Path) -> None:
    """Exports say that the first axis is dynamic, and hold a Reshape to [1, ...] nevertheless."""
    constants = {"W": WEIGHTS_OIHW, "flat": np.array([1, 4, 256]), "maps": np.array([1, 4, 16, 16])}
    layers: list[Any] = [HALVED, ("Reshape", ["flat"], {}), ("Relu", [], {}), ("Reshape", ["maps"], {})]
    onnx.save(chain(layers, constants), tmp_path / "model.onnx")
    report = run(tmp_path / "model.onnx", small, tmp_path / "out", batch_sizes=[1, 2, 3])
    assert (report.static_batch_before, report.max_batch) == (None, None)
    assert [found.batch_size for found in report.differences] == [1, 2, 3]
