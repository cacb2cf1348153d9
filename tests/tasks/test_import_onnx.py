"""Models that another tool wrote: real architectures, exports of torch, and files that are wrong."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
import yaml
from onnx import ModelProto, TensorProto, helper, numpy_helper
from torch import nn

from benchmarks.light_models import SIDE, light_model
from tasks.build_engine import build_engine
from tasks.convert_precision import Config as ConvertConfig
from tasks.convert_precision import convert_precision
from tasks.core.config import typed_config
from tasks.core.errors import ArtifactError, ConfigError, DataError, GateFailed
from tasks.import_onnx import Config, Report, import_onnx
from tasks.label_images import Config as LabelConfig
from tasks.label_images import label_images
from tasks.parts.data.accuracy import Accuracy
from tasks.parts.data.dataset import calibration_images, normalise, open_images, open_labels, read_manifest
from tasks.parts.data.dataset_writer import SplitBatches, write_dataset
from tasks.parts.data.input_card import Task
from tasks.parts.data.metrics import FLOAT_MODEL
from tasks.parts.engines.manifest import read_engine_manifest
from tasks.parts.engines.target import Target
from tasks.parts.onnx_graphs.graph import other_types, read_card_of_graph, read_graph
from tasks.parts.onnx_graphs.macs import conv_macs
from tasks.parts.onnx_graphs.predict import predict_classes
from tasks.parts.quantization.calibration import collect_statistics
from tasks.parts.quantization.qdq import quantizable_tensors
from tasks.validate import Config as ValidateConfig
from tasks.validate import validate
from tests.conftest import checked

REPOSITORY = Path(__file__).parents[2]
CONFIG = Config(
    classes=None,
    mean=[0.485, 0.456, 0.406],
    std=[0.229, 0.224, 0.225],
    height=None,
    width=None,
    output=None,
    batch_sizes=[1, 3],
    min_sqnr_db=80.0,
    seed=0,
)


def images(folder: Path, side: int, classes: tuple[str, ...] = ()) -> Path:
    """Write a data set of images of several colours; labelled in turns where there are classes."""
    random = np.random.default_rng(0)
    splits = {}
    for split in ("train", "val", "test", "calibration"):
        images_NHWC = random.integers(0, 64, (4, side, side, 3), np.uint8)
        images_NHWC[np.arange(3), ..., np.arange(3)] += 190  # a red, a green, a blue and a dark one
        labels_N = (np.arange(4) % len(classes)).astype(np.uint16) if classes else None
        splits[split] = SplitBatches(4, [(images_NHWC, labels_N)])
    write_dataset(
        folder / "dataset",
        task=Task.classification if classes else None,
        classes=classes,
        height=side,
        width=side,
        source="images",
        splits=splits,
    )
    return folder / "dataset"


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return images(tmp_path_factory.mktemp("large"), SIDE)


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return images(tmp_path_factory.mktemp("small"), 32)


def target(name: str) -> Target:
    fields = yaml.safe_load((REPOSITORY / f"conf/target/{name}.yaml").read_text(encoding="utf-8"))
    found: Target = typed_config(Target, fields, f"target.{name}")
    return replace(found, runtime_version="any", max_batch=4)


def run(model: Path, data: Path, out: Path, **changes: Any) -> Report:
    out.mkdir()
    return import_onnx(replace(CONFIG, **changes), model=model, data=data, out=out)


def export(network: nn.Module, path: Path, **options: Any) -> Path:
    """Export by torch's legacy exporter, which many files in the field come from."""
    torch.manual_seed(0)
    torch.onnx.export(
        network.eval(), (torch.zeros(1, 3, 32, 32),), path, dynamo=False, input_names=["pixels"], **options
    )
    return path


@pytest.mark.parametrize(
    ("name", "opset", "macs", "parameters"),
    [
        ("squeezenet", 9, 349e6, 1.235e6),
        ("shufflenet", 9, 130e6, 1.43e6),
        ("inception_v1", 9, 1.58e9, 7.0e6),
        pytest.param("densenet121", 9, 2.83e9, 7.98e6, marks=pytest.mark.slow),
        pytest.param("resnet50", 9, 3.86e9, 25.56e6, marks=pytest.mark.slow),
    ],
)
def test_architecture_of_the_onnx_wheel_becomes_an_engine(
    large: Path, tmp_path: Path, name: str, opset: int, macs: float, parameters: float
) -> None:
    """Expected sizes are those of the papers: SqueezeNet 1.1/1.0, ShuffleNet, GoogLeNet, DenseNet-121, ResNet-50."""
    onnx.save(light_model(name), tmp_path / "model.onnx")
    report = run(tmp_path / "model.onnx", large, tmp_path / "imported")
    assert (report.task, report.num_classes) == (Task.classification, 1000)
    assert (report.opset_before, report.opset, report.static_batch_before) == (opset, 13, 1)
    assert min(found.sqnr_db for found in report.differences) > 90
    assert report.macs == pytest.approx(macs, rel=0.1)
    assert report.num_parameters == pytest.approx(parameters, rel=0.1)
    (tmp_path / "engine").mkdir()
    built = build_engine(
        target("cpu_onnxruntime"),
        model=tmp_path / "imported" / "model.onnx",
        images=calibration_images(large),
        out=tmp_path / "engine",
    )
    assert built.status == "built" and built.agreement_db is not None and built.agreement_db > 60


def test_segmentation_export_of_torch_is_resized_to_the_image(small: Path, tmp_path: Path) -> None:
    network = nn.Sequential(nn.Conv2d(3, 8, 3, 2, 1), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 5, 1))
    free = {"pixels": {0: "n", 2: "h", 3: "w"}}
    path = export(network, tmp_path / "model.onnx", dynamic_axes=free, opset_version=17)
    report = run(path, small, tmp_path / "imported", height=32, width=32)
    assert (report.task, report.num_classes, report.static_batch_before) == (Task.segmentation, 5, None)
    assert "logits of 16x16 resized bilinearly to 32x32" in report.rewritten
    graph = read_graph(tmp_path / "imported" / "model.onnx")
    images_NHWC = np.asarray(open_images(small, "test"))
    images_NCHW = torch.from_numpy(normalise(images_NHWC, tuple(CONFIG.mean), tuple(CONFIG.std)))
    with torch.no_grad():
        logits_NCHW = nn.functional.interpolate(network(images_NCHW), size=(32, 32), mode="bilinear")
    found_NHW = predict_classes(graph, images_NHWC, batch_size=3)
    assert (found_NHW == logits_NCHW.argmax(1).numpy()).mean() > 0.999
    assert report.macs == 8 * 27 * 16 * 16 + 8 * 5 * 16 * 16 == sum(conv_macs(graph).values())


class Reshaped(nn.Module):
    """A classifier whose export holds the batch as a number."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head = nn.Conv2d(3, 6, 4, 4), nn.Linear(6, 4)

    def forward(self, images_NCHW: torch.Tensor) -> torch.Tensor:
        maps_NCT = self.stem(images_NCHW).relu().reshape(1, 6, 64)
        return self.head(maps_NCT.mean(dim=2))


def test_fixed_batch_is_freed_and_what_was_rewritten_is_said(small: Path, tmp_path: Path) -> None:
    path = export(Reshaped(), tmp_path / "model.onnx", opset_version=11)
    report = run(path, small, tmp_path / "imported", batch_sizes=[1, 2, 5])
    assert report.static_batch_before == 1 and report.opset_before == 11
    assert [found.batch_size for found in report.differences] == [1, 2, 5]
    assert "batch of 1 made dynamic, 1 Reshape constants rewritten" in report.rewritten
    graph = read_graph(tmp_path / "imported" / "model.onnx").graph
    assert graph.input[0].type.tensor_type.shape.dim[0].dim_param == "batch"
    assert all(node.name for node in graph.node) and len({node.name for node in graph.node}) == len(
        graph.node
    )


def classifier(shape: Any = ("n", 3, 32, 32), kind: int = TensorProto.FLOAT, outputs: int = 1) -> ModelProto:
    """Return global average pooling and one linear layer, three classes, as any tool could write it."""
    random = np.random.default_rng(0)
    weights = numpy_helper.from_array(random.normal(size=(3, 3, 1, 1)).astype(np.float32), "weights")
    nodes = [
        helper.make_node("Cast", ["pixels"], ["floats"], to=TensorProto.FLOAT),
        helper.make_node("Conv", ["floats", "weights"], ["maps"]),
        helper.make_node("GlobalAveragePool", ["maps"], ["logits0"]),
        helper.make_node("Relu", ["logits0"], ["logits1"]),
    ]
    answers = [
        helper.make_tensor_value_info(f"logits{n}", TensorProto.FLOAT, [shape[0], 3, 1, 1])
        for n in range(outputs)
    ]
    pixels = helper.make_tensor_value_info("pixels", kind, shape)
    graph = helper.make_graph(nodes, "classifier", [pixels], answers, [weights])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def test_logits_with_two_empty_axes_are_flattened_and_labels_give_top_1(tmp_path: Path) -> None:
    data = images(tmp_path, 32, classes=("cat", "dog", "hen"))
    onnx.save(classifier(), tmp_path / "model.onnx")
    report = run(tmp_path / "model.onnx", data, tmp_path / "imported")
    assert report.task is Task.classification
    assert "logits [N, C, 1, 1] flattened to [N, C]" in report.rewritten
    model = tmp_path / "imported" / "model.onnx"
    card = read_card_of_graph(read_graph(model))
    assert (card.task, card.classes, card.logits_shape) == (Task.classification, ("cat", "dog", "hen"), (3,))
    (tmp_path / "engine").mkdir()
    (tmp_path / "validated").mkdir()
    build_engine(
        target("cpu_openvino"), model=model, images=calibration_images(data), out=tmp_path / "engine"
    )
    checked = validate(
        ValidateConfig("test", "val", 3),
        engine=tmp_path / "engine" / "engine",
        data=data,
        out=tmp_path / "validated",
    )
    session = onnxruntime.InferenceSession(tmp_path / "model.onnx")
    images_NCHW = normalise(np.asarray(open_images(data, "test")), card.mean, card.std)
    logits = session.run(["logits0"], {"pixels": images_NCHW})[0][:, :, 0, 0]
    right = (logits.argmax(1) == open_labels(data, "test", Task.classification)).mean()
    assert checked.accuracy == Accuracy("top-1 accuracy", miou=None, top1=right, pixel_accuracy=None, iou={})


def test_unlabelled_images_get_the_float_model_s_own_answers(small: Path, tmp_path: Path) -> None:
    onnx.save(classifier(), tmp_path / "model.onnx")
    run(tmp_path / "model.onnx", small, tmp_path / "imported", classes=["cat", "dog", "hen"])
    model, labelled = tmp_path / "imported" / "model.onnx", tmp_path / "labelled"
    labelled.mkdir()
    report = label_images(LabelConfig(batch_size=3), model=model, data=small, out=labelled)
    manifest = read_manifest(labelled / "dataset")
    assert (manifest.source, manifest.classes) == (FLOAT_MODEL, ("cat", "dog", "hen"))
    assert report.num_images == {"train": 4, "val": 4, "test": 4, "calibration": 4}
    (tmp_path / "engine").mkdir()
    (tmp_path / "validated").mkdir()
    build_engine(
        target("cpu_onnxruntime"), model=model, images=calibration_images(small), out=tmp_path / "engine"
    )
    checked = validate(
        ValidateConfig("test", "val", 4),
        engine=tmp_path / "engine" / "engine",
        data=labelled / "dataset",
        out=tmp_path / "validated",
    )
    assert checked.accuracy is not None
    assert (checked.accuracy.metric, checked.accuracy.top1) == ("agreement with the float model (top-1)", 1.0)
    with pytest.raises(ArtifactError, match=r"has the classes cat, dog, hen, expected images without labels"):
        label_images(LabelConfig(1), model=model, data=labelled / "dataset", out=tmp_path / "engine")


def test_external_weights_come_in_with_their_folder(small: Path, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    onnx.save(
        classifier(),
        folder / "model.onnx",
        save_as_external_data=True,
        location="weights.bin",
        size_threshold=0,
    )
    with pytest.raises(ArtifactError, match=r"1 tensors are in other files \(weights\.bin\).*model\.path"):
        run(folder / "model.onnx", small, tmp_path / "file")
    assert run(folder, small, tmp_path / "folder").num_classes == 3
    (folder / "weights.bin").unlink()
    with pytest.raises(ArtifactError, match=r"its weights in weights\.bin cannot be read"):
        run(folder, small, tmp_path / "torn")


def test_output_is_chosen_by_name(small: Path, tmp_path: Path) -> None:
    onnx.save(classifier(outputs=2), tmp_path / "model.onnx")
    with pytest.raises(ArtifactError, match=r"2 outputs \(logits0, logits1\).*model\.output=logits0"):
        run(tmp_path / "model.onnx", small, tmp_path / "none")
    assert run(tmp_path / "model.onnx", small, tmp_path / "second", output="logits1").output == "logits1"
    with pytest.raises(ArtifactError, match=r"has no output 'softmax'.*found: logits0, logits1"):
        run(tmp_path / "model.onnx", small, tmp_path / "wrong", output="softmax")


def _with_nan(model: ModelProto) -> None:
    values = numpy_helper.to_array(model.graph.initializer[0]).copy()
    values[0] = np.nan
    model.graph.initializer[0].CopyFrom(numpy_helper.from_array(values, "weights"))


def _with_foreign_operator(model: ModelProto) -> None:
    model.graph.node[1].domain = "com.microsoft"
    model.graph.node[1].op_type = "NhwcConv"
    model.opset_import.append(helper.make_opsetid("com.microsoft", 1))


@pytest.mark.parametrize(
    ("shape", "kind", "change", "text"),
    [
        (
            ("n", 1, 32, 32),
            TensorProto.FLOAT,
            None,
            r"\[n, 1, 32, 32\], expected float32 \[N, 3, height, width\]",
        ),
        ((1, 32, 32, 3), TensorProto.FLOAT, None, r"It looks like \[N, height, width, 3\]: transpose"),
        (("n", 3, 32, 32), TensorProto.UINT8, None, r"uint8 \[n, 3, 32, 32\], expected float32"),
        (("n", 3, "h", "w"), TensorProto.FLOAT, None, r"leaves its height open .*model\.height=224"),
        (
            ("n", 3, 64, 64),
            TensorProto.FLOAT,
            None,
            r"reads 64x64.*prepare_data\.height=64 prepare_data\.width=64",
        ),
        (("n", 3, 32, 32), TensorProto.FLOAT, _with_nan, r"'weights' holds NaN or infinity"),
        (("n", 3, 32, 32), TensorProto.FLOAT, _with_foreign_operator, r"com\.microsoft::NhwcConv"),
    ],
)
def test_file_that_cannot_be_taken_is_refused_with_the_reason(
    small: Path, tmp_path: Path, shape: Any, kind: int, change: Callable[[ModelProto], None] | None, text: str
) -> None:
    model = classifier(shape, kind)
    if change is not None:
        change(model)
    onnx.save(model, tmp_path / "model.onnx")
    with pytest.raises(ArtifactError, match=text):
        run(tmp_path / "model.onnx", small, tmp_path / "out")
    assert not list((tmp_path / "out").iterdir())


@pytest.mark.parametrize("content", [b"", b"no model at all, but a text", b"\x89PNG\r\n\x1a\n" + bytes(200)])
def test_file_that_is_no_onnx_model_is_refused(small: Path, tmp_path: Path, content: bytes) -> None:
    (tmp_path / "model.onnx").write_bytes(content)
    with pytest.raises(ArtifactError, match=r"model\.onnx: .*model\.path"):
        run(tmp_path / "model.onnx", small, tmp_path / "out")


def test_torn_file_is_refused(small: Path, tmp_path: Path) -> None:
    content = classifier().SerializeToString()
    (tmp_path / "model.onnx").write_bytes(content[: len(content) // 2])
    with pytest.raises(ArtifactError, match=r"damaged"):
        run(tmp_path / "model.onnx", small, tmp_path / "out")


class Mixed(nn.Module):
    """Its answer depends on the other images of the batch, so that no batch but its own is right."""

    def forward(self, images_NCHW: torch.Tensor) -> torch.Tensor:
        maps_NC = images_NCHW.mean(dim=(2, 3))
        return maps_NC - maps_NC.mean(dim=0, keepdim=True) * 0.5


def test_batch_that_cannot_be_freed_stays_one_for_engines_too(small: Path, tmp_path: Path) -> None:
    path = export(Mixed(), tmp_path / "model.onnx", opset_version=17)
    report = run(path, small, tmp_path / "imported")
    assert (report.static_batch_before, report.max_batch) == (1, 1)
    assert "batch stays 1, which the graph depends on" in report.rewritten
    model = tmp_path / "imported" / "model.onnx"
    assert read_card_of_graph(read_graph(model)).max_batch == 1
    assert len(predict_classes(read_graph(model), np.asarray(open_images(small, "test")), batch_size=4)) == 4
    (tmp_path / "engine").mkdir()
    pixels = calibration_images(small)
    built = build_engine(target("cpu_openvino"), model=model, images=pixels, out=tmp_path / "engine")
    assert built.status == "built"
    assert read_engine_manifest(tmp_path / "engine" / "engine").target.max_batch == 1


def test_larger_batch_that_cannot_be_freed_is_refused(small: Path, tmp_path: Path) -> None:
    torch.onnx.export(
        Mixed(), (torch.zeros(2, 3, 32, 32),), tmp_path / "model.onnx", dynamo=False, opset_version=17
    )
    with pytest.raises(
        ArtifactError, match=r"the batch of 2 cannot be made dynamic.*Export it again with a dyn"
    ):
        run(tmp_path / "model.onnx", small, tmp_path / "out")


def test_classes_must_be_as_many_as_the_model_gives(small: Path, tmp_path: Path) -> None:
    onnx.save(classifier(), tmp_path / "model.onnx")
    with pytest.raises(ArtifactError, match=r"has 3 classes, but model\.classes names 2"):
        run(tmp_path / "model.onnx", small, tmp_path / "out", classes=["cat", "dog"])


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"std": [1.0, 0.0, 1.0]}, r"import_onnx\.std\[1\] is 0\.0, expected a number above 0"),
        ({"mean": [0.5]}, r"import_onnx\.mean is \[0\.5\]"),
        ({"height": 4}, r"import_onnx\.height is 4, .* or null"),
        ({"classes": ["cat", "cat"]}, r"import_onnx\.classes is .*without repeats or null"),
        ({"batch_sizes": []}, r"import_onnx\.batch_sizes is \[\]"),
        ({"min_sqnr_db": -1.0}, r"import_onnx\.min_sqnr_db is -1\.0"),
        ({"seed": -1}, r"import_onnx\.seed is -1"),
    ],
)
def test_impossible_values_name_their_key(change: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        checked(CONFIG, "import_onnx", **change)


def test_graph_that_computes_something_else_stops_at_the_gate(small: Path, tmp_path: Path) -> None:
    """Attention that was simplified rounds differently, which the strictest gate of all does not let pass."""
    attention = nn.TransformerEncoderLayer(64, 4, 64, batch_first=True)
    network = nn.Sequential(
        nn.Conv2d(3, 16, 4, 4), nn.Flatten(2), attention, nn.Flatten(1), nn.Linear(1024, 4)
    )
    torch.backends.mha.set_fastpath_enabled(False)
    path = export(network, tmp_path / "model.onnx", opset_version=17, dynamic_axes={"pixels": {0: "n"}})
    torch.backends.mha.set_fastpath_enabled(True)
    assert run(path, small, tmp_path / "imported").differences[0].sqnr_db > 120
    with pytest.raises(
        GateFailed, match=r"batch of \d: .*expected at least 199\.0 dB \(import_onnx\.min_sqnr_db\)"
    ):
        run(path, small, tmp_path / "strict", min_sqnr_db=199.0)


class ClassToken(nn.Module):
    """The head of a vision transformer: its export computes shapes from a batch that is not known."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, 16, 8, 8)
        self.token = nn.Parameter(torch.randn(1, 1, 16))
        self.mix = nn.Linear(16, 16)
        self.head = nn.Linear(16, 3)

    def forward(self, images_NCHW: torch.Tensor) -> torch.Tensor:
        tokens = self.patches(images_NCHW).flatten(2).transpose(1, 2)
        tokens = torch.cat([self.token.expand(tokens.shape[0], -1, -1), tokens], dim=1)
        return self.head(torch.relu(self.mix(tokens))[:, 0])


def test_graph_that_computes_with_shapes_is_calibrated_and_converted(tmp_path: Path) -> None:
    data = images(tmp_path, 32, classes=("a", "b", "c"))
    axes = {"pixels": {0: "batch", 1: "channels", 2: "height", 3: "width"}}
    model = export(ClassToken(), tmp_path / "model.onnx", dynamic_axes=axes)
    report = run(model, data, tmp_path / "imported", height=32, width=32)
    graph = read_graph(tmp_path / "imported" / "model.onnx")
    assert other_types(graph), "nothing in this graph is an integer, so it shows nothing"
    assert report.macs == 16 * 3 * 64 * 16 + 17 * 16 * 16 + 16 * 3
    section = yaml.safe_load((REPOSITORY / "conf/convert_precision/default.yaml").read_text(encoding="utf-8"))
    config = typed_config(ConvertConfig, {**section, "num_images": 4}, "convert_precision")
    (tmp_path / "half").mkdir()
    half = convert_precision(config, model=tmp_path / "imported/model.onnx", data=data, out=tmp_path / "half")
    assert half.agreement == 1
    names = quantizable_tensors(graph, ["Conv", "MatMul", "Gemm", "Add", "Concat"])
    images_NCHW = np.zeros((2, 3, 32, 32), np.float32)
    assert set(collect_statistics(graph, lambda: [images_NCHW], names)) == set(names)


def test_channels_last_output_and_integer_operators_are_refused(small: Path, tmp_path: Path) -> None:
    class ChannelsLast(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(3, 5, 1)

        def forward(self, images_NCHW: torch.Tensor) -> torch.Tensor:
            return self.conv(images_NCHW).permute(0, 2, 3, 1)

    model = export(ChannelsLast(), tmp_path / "last.onnx")
    with pytest.raises(ArtifactError, match=r"looks like \[N, height, width, classes\].*--outputs-as-nchw"):
        run(model, small, tmp_path / "last")
    graph = onnx.load(export(ClassToken(), tmp_path / "float.onnx"))
    graph.graph.node.append(helper.make_node("DynamicQuantizeLinear", ["pixels"], ["q", "s", "z"]))
    onnx.save(graph, tmp_path / "integer.onnx")
    with pytest.raises(ArtifactError, match=r"already quantized \(DynamicQuantizeLinear\)"):
        run(tmp_path / "integer.onnx", small, tmp_path / "integer")


def test_float_model_that_knows_one_answer_labels_nothing(small: Path, tmp_path: Path) -> None:
    network = ClassToken()
    with torch.no_grad():
        network.head.weight.zero_()
        network.head.bias.copy_(torch.tensor([0.0, 1.0, 0.0]))
    run(export(network, tmp_path / "model.onnx"), small, tmp_path / "imported")
    (tmp_path / "labelled").mkdir()
    with pytest.raises(DataError, match="the class 1 for every image"):
        label_images(
            LabelConfig(batch_size=4),
            model=tmp_path / "imported/model.onnx",
            data=small,
            out=tmp_path / "labelled",
        )
