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
from onnxruntime.quantization import CalibrationDataReader, QuantType, quantize_static
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
from tasks.parts.onnx_graphs.foreign_form import ChannelOrder, Layout, Values
from tasks.parts.onnx_graphs.foreign_half import has_half
from tasks.parts.onnx_graphs.foreign_output import OutputKind
from tasks.parts.onnx_graphs.graph import other_types, read_card_of_graph, read_graph
from tasks.parts.onnx_graphs.macs import conv_macs
from tasks.parts.onnx_graphs.predict import predict_classes
from tasks.parts.onnx_graphs.signal_to_noise import difference
from tasks.parts.onnx_session import open_session
from tasks.parts.quantization.calibration import collect_statistics
from tasks.parts.quantization.qdq import quantizable_tensors
from tasks.validate import Config as ValidateConfig
from tasks.validate import validate
from tests.conftest import checked

REPOSITORY = Path(__file__).parents[2]
CONFIG = Config(
    classes=None,
    layout=Layout.nchw,
    channel_order=ChannelOrder.rgb,
    values=Values.normalised,
    mean=[0.485, 0.456, 0.406],
    std=[0.229, 0.224, 0.225],
    height=None,
    width=None,
    output=None,
    output_kind=OutputKind.classes,
    output_layout=Layout.nchw,
    threshold=None,
    batch_sizes=[1, 3],
    min_sqnr_db=80.0,
    min_half_sqnr_db=40.0,
    is_quantized=False,
    min_quantized_sqnr_db=30.0,
    min_float_form_sqnr_db=10.0,
    custom_operators=[],
)


def images(folder: Path, side: int, classes: tuple[str, ...] = (), channels: int = 3) -> Path:
    """Write a data set of images of several colours; labelled in turns where there are classes."""
    random = np.random.default_rng(0)
    splits = {}
    for split in ("train", "val", "test", "calibration"):
        images_NHWC = random.integers(0, 64, (4, side, side, channels), np.uint8)
        few = np.arange(min(3, channels))
        images_NHWC[few, ..., few] += 190  # a red, a green, a blue and a dark one
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
        channels=channels,
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
    del fields["work_pool"]
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


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "opset", "macs", "parameters"),
    [
        ("squeezenet", 9, 349e6, 1.235e6),
        ("shufflenet", 9, 130e6, 1.43e6),
        ("inception_v1", 9, 1.58e9, 7.0e6),
        pytest.param("densenet121", 9, 2.83e9, 7.98e6, marks=pytest.mark.trial),
        pytest.param("resnet50", 9, 3.86e9, 25.56e6, marks=pytest.mark.trial),
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
    assert "batch of 1 made dynamic, 1 constants rewritten" in report.rewritten
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
    with pytest.raises(
        ArtifactError,
        match=r"2 outputs \('logits0' float32 \[n, 3, 1, 1\], 'logits1' .*model\.output=logits0",
    ):
        run(tmp_path / "model.onnx", small, tmp_path / "none")
    assert run(tmp_path / "model.onnx", small, tmp_path / "second", output="logits1").outputs == ("logits1",)
    with pytest.raises(
        ArtifactError, match=r"has no output 'softmax'.*found: 'logits0' float32 \[n, 3, 1, 1\], 'logits1'"
    ):
        run(tmp_path / "model.onnx", small, tmp_path / "wrong", output="softmax")


def test_float16_file_becomes_float32(small: Path, tmp_path: Path) -> None:
    """The Cast of the graph leads to float16 here, as in files whose weights were converted."""
    model = classifier(kind=TensorProto.FLOAT16)
    weights = numpy_helper.to_array(model.graph.initializer[0]).astype(np.float16)
    model.graph.initializer[0].CopyFrom(numpy_helper.from_array(weights, "weights"))
    model.graph.node[0].attribute[0].i = TensorProto.FLOAT16
    model.graph.output[0].type.tensor_type.elem_type = TensorProto.FLOAT16
    onnx.save(model, tmp_path / "model.onnx")
    report = run(tmp_path / "model.onnx", small, tmp_path / "imported")
    assert "float16 converted to float32, 1 constants" in report.rewritten
    assert 40 < min(found.sqnr_db for found in report.differences) < 90  # the file rounds to 11 bits
    graph = read_graph(tmp_path / "imported" / "model.onnx")
    assert not has_half(graph) and "Cast" not in {node.op_type for node in graph.graph.node}
    with pytest.raises(GateFailed, match=r"expected at least 120\.0 dB \(import_onnx\.min_half_sqnr_db"):
        run(tmp_path / "model.onnx", small, tmp_path / "strict", min_half_sqnr_db=120.0)


@pytest.mark.parametrize("opset", [9, 24, 26, onnx.defs.onnx_opset_version()])
def test_opset_that_runtimes_do_not_read_is_converted(small: Path, tmp_path: Path, opset: int) -> None:
    model = classifier()
    model.opset_import[0].version = opset
    onnx.save(model, tmp_path / "model.onnx")
    report = run(tmp_path / "model.onnx", small, tmp_path / "imported")
    assert (report.opset_before, report.opset) == (opset, 13 if opset < 13 else 23)
    assert f"opset {opset} converted to {report.opset} by onnx {onnx.__version__}" in report.rewritten
    assert (report.compared_with != "") == (opset > 26)  # ONNX Runtime reads 26
    assert min(found.sqnr_db for found in report.differences) > 100


def test_newer_operator_is_refused_by_name(small: Path, tmp_path: Path) -> None:
    model = classifier(outputs=2)
    model.opset_import[0].version = 24
    model.graph.node[3].op_type = "Swish"  # since opset 24
    onnx.save(model, tmp_path / "model.onnx")
    with pytest.raises(ArtifactError, match=r"node 'logits1' is Swish, which opset 23 lacks.*Export"):
        run(tmp_path / "model.onnx", small, tmp_path / "out", output="logits1")


def test_nodes_in_any_order_are_sorted_and_circles_refused(small: Path, tmp_path: Path) -> None:
    model = classifier()
    nodes = list(model.graph.node)
    del model.graph.node[:]
    model.graph.node.extend(reversed(nodes))
    onnx.save(model, tmp_path / "model.onnx")
    assert run(tmp_path / "model.onnx", small, tmp_path / "imported").num_classes == 3
    model.graph.node[3].input[0] = "maps"
    onnx.save(model, tmp_path / "model.onnx")
    with pytest.raises(ArtifactError, match=r"its nodes form a circle \((Cast|Conv)"):
        run(tmp_path / "model.onnx", small, tmp_path / "circle")


def quantized(folder: Path, data: Path, **options: Any) -> tuple[Path, Path]:
    """Write a network of convolutions, and ONNX Runtime's quantization of it; return both files."""
    torch.manual_seed(0)
    layers = [nn.Conv2d(3, 8, 3, 2, 1), nn.ReLU(), nn.Conv2d(8, 8, 3, 1, 1), nn.ReLU6(), nn.Conv2d(8, 8, 1)]
    network = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4))
    with torch.no_grad():
        layers[2].weight *= 60  # some values reach the 6 of ReLU6
    path = export(network, folder / "float.onnx", opset_version=17, dynamic_axes={"pixels": {0: "n"}})
    images_NCHW = normalise(np.asarray(open_images(data, "calibration")), tuple(MEANS), tuple(STDS))

    class Reader(CalibrationDataReader):
        left = iter(images_NCHW)

        def get_next(self) -> Any:
            image_CHW = next(self.left, None)
            return None if image_CHW is None else {"pixels": image_CHW[None]}

    quantize_static(path, folder / "int8.onnx", Reader(), **{"per_channel": True} | options)
    return path, folder / "int8.onnx"


@pytest.mark.parametrize("options", [{}, {"activation_type": QuantType.QInt8}])
def test_quantized_file_is_kept_as_it_is_and_gets_its_float_form(
    small: Path, tmp_path: Path, options: dict[str, Any]
) -> None:
    """Relu and ReLU6 are missing in the file: ONNX Runtime drops them where the pair behind has their effect."""
    path, int8 = quantized(tmp_path, small, **options)
    if not options:
        assert not {"Relu", "Clip"} & {node.op_type for node in onnx.load(int8).graph.node}
    report = run(int8, small, tmp_path / "out", is_quantized=True)
    assert report.quantized is not None and min(found.sqnr_db for found in report.quantized.differences) > 40
    kept = read_graph(tmp_path / "out" / "quantized.onnx")
    pairs = sum(node.op_type == "QuantizeLinear" for node in kept.graph.node)
    assert f"{pairs} pairs of QuantizeLinear and DequantizeLinear removed" in report.rewritten
    graph = read_graph(tmp_path / "out" / "model.onnx")
    expected = ["Conv", "Relu", "Conv", "Clip", "Conv", "GlobalAveragePool", "Flatten", "Gemm"]
    assert [node.op_type for node in graph.graph.node] == expected
    card = read_card_of_graph(graph)
    images_NCHW = normalise(np.asarray(open_images(small, "test")), card.mean, card.std)
    before, float_form, after = (
        open_session(file, is_optimised=False).run(None, {"pixels": images_NCHW})[0]
        for file in (path, tmp_path / "out" / "model.onnx", int8)
    )
    assert difference(before, float_form).sqnr_db > difference(before, after).sqnr_db + 3
    (tmp_path / "engine").mkdir()
    built = build_engine(
        # Without VNNI weights get 7 bits: 8 dB for this network of random weights.
        replace(target("cpu_onnxruntime"), min_agreement_int8_db=5.0),
        model=tmp_path / "out" / "quantized.onnx",
        images=calibration_images(small),
        out=tmp_path / "engine",
    )
    assert built.status == "built", built.reason


def test_quantized_file_and_configuration_have_to_agree(small: Path, tmp_path: Path) -> None:
    path, int8 = quantized(tmp_path, small)
    with pytest.raises(
        ArtifactError, match=r"node '.*' is \w+, expected a float graph.*model=onnx_quantized"
    ):
        run(int8, small, tmp_path / "float")
    with pytest.raises(
        ArtifactError, match=r"no node is QuantizeLinear.*Choose model=onnx for a float graph"
    ):
        run(path, small, tmp_path / "quantized", is_quantized=True)
    with pytest.raises(
        GateFailed, match=r"dB \(import_onnx\.min_float_form_sqnr_db.* rounding of the file itself"
    ):
        run(int8, small, tmp_path / "strict", is_quantized=True, min_float_form_sqnr_db=150.0)


def test_bytes_that_are_dequantized_first_become_the_input(small: Path, tmp_path: Path) -> None:
    """Converters of integer networks read uint8, and only give it a scale and a zero point."""
    model = network(("n", 3, 32, 32), [CAST], kind=TensorProto.UINT8)
    scale, zero = numpy_helper.from_array(np.float32(0.02), "s"), numpy_helper.from_array(np.uint8(120), "z")
    model.graph.initializer.extend([scale, zero])
    model.graph.node[0].CopyFrom(helper.make_node("DequantizeLinear", ["pixels", "s", "z"], ["d"], "D"))
    pair = [
        helper.make_node("QuantizeLinear", ["d", "s", "z"], ["q"], "Q"),
        helper.make_node("DequantizeLinear", ["q", "s", "z"], ["t0"], "D2"),
    ]
    rest = list(model.graph.node)[1:]
    del model.graph.node[1:]
    model.graph.node.extend([*pair, *rest])
    onnx.save(model, tmp_path / "model.onnx")
    run(tmp_path / "model.onnx", small, tmp_path / "out", is_quantized=True, values=Values.byte)
    graph = read_graph(tmp_path / "out" / "model.onnx")
    assert tuple(node.op_type for node in graph.graph.node) == CONV
    card = read_card_of_graph(graph)
    np.testing.assert_allclose([card.mean, card.std], [[120 / 255] * 3, [1 / (255 * 0.02)] * 3], rtol=1e-5)


def _with_bfloat16(model: ModelProto) -> None:
    model.graph.initializer[0].CopyFrom(
        helper.make_tensor("weights", TensorProto.BFLOAT16, (3, 3, 1, 1), np.ones(9, np.float32))
    )


def _with_opset_99(model: ModelProto) -> None:
    model.opset_import[0].version = 99


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
            r"\[n, 1, 32, 32\], expected float32, float16 or uint8 \[N, 3, height, width\]",
        ),
        ((1, 32, 32, 3), TensorProto.FLOAT, None, r"looks like model\.layout=nhwc"),
        (
            ("n", 3, 32, 32),
            TensorProto.UINT8,
            None,
            r"uint8 \[n, 3, 32, 32\], and model\.values is norm.*=byte",
        ),
        (
            ("n", 3, 32, 32),
            TensorProto.INT32,
            None,
            r"int32 \[n, 3, 32, 32\], expected float32, float16 or uint8",
        ),
        (("n", 3, "h", "w"), TensorProto.FLOAT, None, r"leaves its height open .*model\.height=224"),
        (
            ("n", 3, 64, 64),
            TensorProto.FLOAT,
            None,
            r"reads 64x64.*prepare_data\.height=64 prepare_data\.width=64",
        ),
        (("n", 3, 32, 32), TensorProto.FLOAT, _with_nan, r"'weights' holds NaN or infinity"),
        (("n", 3, 32, 32), TensorProto.FLOAT, _with_bfloat16, r"'weights' is bfloat16.*float32 or float16"),
        (("n", 3, 32, 32), TensorProto.FLOAT, _with_opset_99, r"99"),
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


WEIGHTS_OIHW = np.random.default_rng(1).normal(size=(4, 3, 3, 3)).astype(np.float32) / 5
MEANS, STDS = np.array([0.485, 0.456, 0.406]), np.array([0.229, 0.224, 0.225])
CONV = ("Conv", "Relu", "GlobalAveragePool", "Flatten")


def network(
    shape: tuple[Any, ...],
    before: list[tuple[str, Any]],
    weights_OIHW: Any = WEIGHTS_OIHW,
    layers: tuple[str, ...] = CONV,
    kind: int = TensorProto.FLOAT,
) -> ModelProto:
    """Return operators on the input, each with a constant or its attributes, and then layers with four classes."""
    nodes, constants, tensor = [], [numpy_helper.from_array(weights_OIHW.astype(np.float32), "W")], "pixels"
    for operator, operand in [*before, *((layer, None) for layer in layers)]:
        inputs, attributes = [tensor], operand if isinstance(operand, dict) else {}
        if operator == "Conv":
            inputs.append("W")
            attributes = {"pads": [1, 1, 1, 1]}
        elif operand is not None and not attributes:
            inputs.append(f"{operator}_{len(nodes)}")
            constants.append(numpy_helper.from_array(np.asarray(operand, np.float32), inputs[1]))
        tensor = f"t{len(nodes)}" if len(nodes) + 1 < len(before) + len(layers) else "logits"
        nodes.append(helper.make_node(operator, inputs, [tensor], f"{operator}_{len(nodes)}", **attributes))
    pixels = helper.make_tensor_value_info("pixels", kind, shape)
    logits = helper.make_tensor_value_info("logits", TensorProto.FLOAT, [shape[0], 4])
    graph = helper.make_graph(nodes, "network", [pixels], [logits], constants)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


CAST = ("Cast", {"to": TensorProto.FLOAT})
CHANNELS_FIRST = ("Transpose", {"perm": [0, 3, 1, 2]})


@pytest.mark.parametrize(
    ("shape", "before", "layers", "kind", "declared", "card", "expected_layers"),
    [
        pytest.param(
            ("n", 32, 32, 3),
            [CAST, ("Sub", 255 * MEANS[::-1]), ("Div", 255 * STDS[::-1]), CHANNELS_FIRST],
            CONV,
            TensorProto.UINT8,
            {"layout": Layout.nhwc, "channel_order": ChannelOrder.bgr, "values": Values.byte},
            (MEANS, STDS),
            CONV,
            id="bytes, BGR, channels last, normalised in the graph",
        ),
        pytest.param(
            ("n", 3, 32, 32),
            [("Mul", [[[[2.0]]]]), ("Add", [[[-1.0]]])],
            CONV,
            TensorProto.FLOAT,
            {"values": Values.unit},
            (np.full(3, 0.5), np.full(3, 0.5)),
            CONV,
            id="0..1, scaled to -1..1 in the graph",
        ),
        pytest.param(
            ("n", 3, 32, 32),
            [],
            CONV,
            TensorProto.FLOAT,
            {"values": Values.byte},
            (np.zeros(3), np.ones(3)),
            CONV,
            id="0..255 straight into the convolution",
        ),
        pytest.param(
            ("n", 3, 32, 32),
            [],
            CONV,
            TensorProto.FLOAT,
            {"channel_order": ChannelOrder.bgr, "std": [1 / 255] * 3},
            (MEANS, np.ones(3)),
            CONV,
            id="BGR minus its mean",
        ),
        pytest.param(
            ("batch_size", 3, 32, 32),
            [("AveragePool", {"kernel_shape": [2, 2], "strides": [2, 2]})],
            CONV,
            TensorProto.FLOAT,
            {"channel_order": ChannelOrder.bgr, "values": Values.byte},
            (np.zeros(3), np.ones(3)),
            ("Gather", "Mul", "AveragePool", *CONV),
            id="no convolution first",
        ),
        pytest.param(
            (2, 32, 32, 3),
            [("MaxPool", {"kernel_shape": [1, 1]}), CHANNELS_FIRST],
            CONV,
            TensorProto.FLOAT,
            {"layout": Layout.nhwc},
            (MEANS, STDS),
            ("Transpose", "MaxPool", "Transpose", *CONV),
            id="no transposition first, batch of 2",
        ),
        pytest.param(
            ("n", 32, 32, 3),
            [CHANNELS_FIRST, ("Mul", np.arange(1.0, 33.0))],
            CONV,
            TensorProto.FLOAT,
            {"layout": Layout.nhwc},
            (MEANS, STDS),
            ("Mul", *CONV),
            id="a factor for each column is no normalisation",
        ),
    ],
)
def test_declared_input_becomes_normalised_rgb(
    small: Path,
    tmp_path: Path,
    shape: tuple[Any, ...],
    before: list[tuple[str, Any]],
    layers: tuple[str, ...],
    kind: int,
    declared: dict[str, Any],
    card: tuple[Any, Any],
    expected_layers: tuple[str, ...],
) -> None:
    onnx.save(network(shape, before, layers=layers, kind=kind), tmp_path / "model.onnx")
    run(tmp_path / "model.onnx", small, tmp_path / "imported", **declared)
    graph = read_graph(tmp_path / "imported" / "model.onnx")
    assert tuple(node.op_type for node in graph.graph.node) == expected_layers
    found = read_card_of_graph(graph)
    np.testing.assert_allclose([found.mean, found.std], card, rtol=1e-5, atol=1e-6)
    images_NHWC = np.asarray(open_images(small, "test"))[:2]
    inputs = images_NHWC.astype(np.float64)
    if declared.get("values") is Values.unit:
        inputs /= 255
    elif "values" not in declared:
        inputs = (inputs / 255 - MEANS) / (1 / 255 if "std" in declared else STDS)
    if "channel_order" in declared:
        inputs = inputs[..., [2, 1, 0]]
    if "layout" not in declared:
        inputs = inputs.transpose(0, 3, 1, 2)
    dtype = np.uint8 if kind == TensorProto.UINT8 else np.float32
    original = onnxruntime.InferenceSession(tmp_path / "model.onnx")
    expected_NC = original.run(None, {"pixels": np.ascontiguousarray(inputs, dtype)})[0]
    written = onnxruntime.InferenceSession(tmp_path / "imported" / "model.onnx")
    images_NCHW = normalise(images_NHWC, found.mean, found.std)
    np.testing.assert_allclose(
        written.run(None, {"pixels": images_NCHW})[0], expected_NC, rtol=1e-4, atol=1e-4
    )


def segmenter(layers: list[tuple[str, Any]], weights: Any) -> ModelProto:
    """Return a convolution, a Relu and then layers; a convolution among them has the given weights."""
    model = network(("n", 3, 32, 32), [("Conv", None), ("Relu", None)], layers=())
    del model.graph.output[:]
    tensor = "logits"
    bias = np.array([0.3], np.float32)
    constants = {
        "weights": weights.astype(np.float32),
        "bias": bias,
        "scales": np.array([1, 1, 2, 2], np.float32),
    }
    read = {
        "Conv": ["weights", "bias"],
        "ConvTranspose": ["weights"],
        "Resize": ["", "scales"],
        "Mul": ["bias"],
    }
    for name, value in constants.items():
        model.graph.initializer.append(numpy_helper.from_array(value, name))
    for operator, attributes in layers:
        node = helper.make_node(
            operator, [tensor, *read.get(operator, [])], [operator], operator, **attributes
        )
        model.graph.node.append(node)
        tensor = operator
    model.graph.output.append(helper.make_tensor_value_info(tensor, TensorProto.FLOAT, ["n", "k", "h", "w"]))
    return model


ONE_CHANNEL = np.random.default_rng(2).normal(size=(1, 4, 1, 1))
SIGMOID, POOL = ("Sigmoid", {}), ("AveragePool", {"kernel_shape": [2, 2], "strides": [2, 2]})


@pytest.mark.parametrize(
    ("layers", "weights", "last"),
    [
        ([("Conv", {}), SIGMOID], ONE_CHANNEL, "Conv"),
        ([("Conv", {})], ONE_CHANNEL, "Conv"),
        ([POOL, ("Conv", {}), ("Resize", {"mode": "linear"}), SIGMOID], ONE_CHANNEL, "Resize"),
        (
            [POOL, ("ConvTranspose", {"strides": [2, 2]}), SIGMOID],
            ONE_CHANNEL.reshape(4, 1, 1, 1),
            "DepthToSpace",
        ),
        ([("Conv", {}), ("Mul", {}), SIGMOID], ONE_CHANNEL, "Conv"),
        ([("Conv", {}), SIGMOID, ("Transpose", {"perm": [0, 2, 3, 1]})], ONE_CHANNEL, "Conv"),
    ],
)
def test_output_of_one_channel_becomes_two_classes(
    small: Path, tmp_path: Path, layers: list[tuple[str, Any]], weights: Any, last: str
) -> None:
    if last == "DepthToSpace":
        weights = np.tile(weights, (1, 1, 2, 2))
    onnx.save(segmenter(layers, weights), tmp_path / "model.onnx")
    images_NHWC = np.asarray(open_images(small, "test"))
    images_NCHW = normalise(images_NHWC, tuple(MEANS), tuple(STDS))
    answer = onnxruntime.InferenceSession(tmp_path / "model.onnx").run(None, {"pixels": images_NCHW})[0]
    threshold = float(np.quantile(answer, 0.4))
    declared = {"output_layout": Layout.nhwc} if layers[-1][0] == "Transpose" else {}
    report = run(tmp_path / "model.onnx", small, tmp_path / "out", threshold=threshold, **declared)
    assert (report.task, report.num_classes) == (Task.segmentation, 2)
    graph = read_graph(tmp_path / "out" / "model.onnx")
    assert graph.graph.node[-1].op_type == last
    assert "Sigmoid" not in {node.op_type for node in graph.graph.node}
    expected_NHW = answer.reshape(4, 32, 32) > threshold
    found_NHW = predict_classes(graph, images_NHWC, batch_size=4)
    assert (found_NHW == expected_NHW).mean() > 0.999  # rounding at the threshold


def test_output_of_one_channel_needs_its_threshold(small: Path, tmp_path: Path) -> None:
    onnx.save(segmenter([("Conv", {}), SIGMOID], ONE_CHANNEL), tmp_path / "model.onnx")
    with pytest.raises(
        ArtifactError, match=r"one channel, expected one for each class.*model\.threshold.*0\.5 for a"
    ):
        run(tmp_path / "model.onnx", small, tmp_path / "none")
    with pytest.raises(
        ArtifactError, match=r"'Sigmoid' \(Sigmoid\).*model\.threshold is 1\.0; expected a probab"
    ):
        run(tmp_path / "model.onnx", small, tmp_path / "one", threshold=1.0)
    onnx.save(classifier(), tmp_path / "classes.onnx")
    with pytest.raises(
        ArtifactError, match=r"3 channels, and model\.threshold is 0\.5.*model\.threshold=null"
    ):
        run(tmp_path / "classes.onnx", small, tmp_path / "three", threshold=0.5)


def test_one_logit_becomes_a_classification_with_two_classes(tmp_path: Path) -> None:
    data = images(tmp_path, 32, classes=("cat", "dog"))
    onnx.save(
        segmenter([("GlobalAveragePool", {}), ("Conv", {}), SIGMOID], ONE_CHANNEL), tmp_path / "model.onnx"
    )
    report = run(tmp_path / "model.onnx", data, tmp_path / "out", threshold=0.5)
    assert (report.task, report.num_classes) == (Task.classification, 2)


@pytest.mark.parametrize(
    "axes", [("b", "c", "s", "s"), (-1, 3, -1, -1), ("", "", "", ""), (None, 3, None, 32)]
)
def test_open_axes_of_any_name_are_set_by_the_configuration(small: Path, tmp_path: Path, axes: Any) -> None:
    model = segmenter([("Conv", {})], np.ones((5, 4, 1, 1)))
    model.graph.node[-1].input.pop()  # the bias is for one channel
    model.graph.input[0].CopyFrom(helper.make_tensor_value_info("pixels", TensorProto.FLOAT, axes))
    onnx.save(model, tmp_path / "model.onnx")
    report = run(tmp_path / "model.onnx", small, tmp_path / "out", height=32, width=32)
    assert (report.height, report.width, report.static_batch_before) == (32, 32, None)
    image = read_graph(tmp_path / "out" / "model.onnx").graph.input[0].type.tensor_type.shape.dim
    assert [axis.dim_param or axis.dim_value for axis in image] == ["batch", 3, 32, 32]


@pytest.mark.parametrize("channels", [1, 5, 16])
@pytest.mark.parametrize("name", ["cpu_onnxruntime", "cpu_openvino"])
def test_model_of_any_number_of_channels_becomes_an_engine(tmp_path: Path, channels: int, name: str) -> None:
    data = images(tmp_path, 32, classes=("a", "b", "c", "d"), channels=channels)
    weights_OIHW = np.random.default_rng(1).normal(size=(4, channels, 3, 3))
    onnx.save(network(("n", channels, 32, 32), [], weights_OIHW), tmp_path / "model.onnx")
    statistics = {
        "mean": [0.1 + 0.05 * n for n in range(channels)],
        "std": [0.2 + 0.1 * n for n in range(channels)],
    }
    run(tmp_path / "model.onnx", data, tmp_path / "out", **statistics)
    model = tmp_path / "out" / "model.onnx"
    for part in ("engine", "validated"):
        (tmp_path / part).mkdir()
    card = read_card_of_graph(read_graph(model))
    assert (card.image_shape, list(card.mean)) == ((channels, 32, 32), statistics["mean"])
    built = build_engine(target(name), model=model, images=calibration_images(data), out=tmp_path / "engine")
    assert built.status == "built", built
    checked = validate(
        ValidateConfig("test", "val", 4),
        engine=tmp_path / "engine" / "engine",
        data=data,
        out=tmp_path / "validated",
    )
    inputs = (np.asarray(open_images(data, "test")) / 255 - statistics["mean"]) / statistics["std"]
    inputs_NCHW = inputs.transpose(0, 3, 1, 2).astype(np.float32)
    logits_NC = onnxruntime.InferenceSession(tmp_path / "model.onnx").run(None, {"pixels": inputs_NCHW})[0]
    right_N = logits_NC.argmax(1) == open_labels(data, "test", Task.classification)
    assert checked.accuracy is not None and checked.accuracy.top1 == right_N.mean()


def test_channels_of_model_and_images_have_to_agree(small: Path, tmp_path: Path) -> None:
    onnx.save(network(("n", 1, 32, 32), [], WEIGHTS_OIHW[:, :1]), tmp_path / "model.onnx")
    with pytest.raises(
        ArtifactError, match=r"the images have 3 channels, .* 1 items\. Set prepare_data\.folder\.channels=1"
    ):
        run(tmp_path / "model.onnx", small, tmp_path / "out", mean=[0.5], std=[0.5])


def test_operator_that_computes_with_bytes_is_refused_by_name(small: Path, tmp_path: Path) -> None:
    before = [CHANNELS_FIRST, ("Cast", {"to": TensorProto.INT32}), CAST]
    onnx.save(network(("n", 32, 32, 3), before, kind=TensorProto.UINT8), tmp_path / "model.onnx")
    with pytest.raises(
        ArtifactError, match=r"node 'Cast_1' \(Cast\) reads the uint8 input, expected a Cast to fl"
    ):
        run(tmp_path / "model.onnx", small, tmp_path / "out", layout=Layout.nhwc, values=Values.byte)


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
    assert built.status == "built", built.reason
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
        ({"mean": [0.5]}, r"mean has 1 items and std 3, expected one for each channel"),
        ({"mean": [0.5] * 17, "std": [0.5] * 17}, r"mean has 17 items and std 17.*at most 16"),
        (
            {"mean": [0.5], "std": [0.5], "channel_order": "bgr"},
            r"channel_order is bgr, and mean has 1 items",
        ),
        ({"mean": []}, r"import_onnx\.mean is \[\]"),
        ({"height": 4}, r"import_onnx\.height is 4, .* or null"),
        ({"classes": ["cat", "cat"]}, r"import_onnx\.classes is .*without repeats or null"),
        ({"batch_sizes": []}, r"import_onnx\.batch_sizes is \[\]"),
        ({"min_sqnr_db": -1.0}, r"import_onnx\.min_sqnr_db is -1\.0"),
        ({"min_half_sqnr_db": -1.0}, r"import_onnx\.min_half_sqnr_db is -1\.0"),
    ],
)
def test_impossible_values_name_their_key(change: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        checked(CONFIG, "import_onnx", **change)


def test_attention_that_was_simplified_computes_the_same(small: Path, tmp_path: Path) -> None:
    attention = nn.TransformerEncoderLayer(64, 4, 64, batch_first=True)
    network = nn.Sequential(
        nn.Conv2d(3, 16, 4, 4), nn.Flatten(2), attention, nn.Flatten(1), nn.Linear(1024, 4)
    )
    torch.backends.mha.set_fastpath_enabled(False)
    path = export(network, tmp_path / "model.onnx", opset_version=17, dynamic_axes={"pixels": {0: "n"}})
    torch.backends.mha.set_fastpath_enabled(True)
    assert run(path, small, tmp_path / "imported").differences[0].sqnr_db > 100


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


def test_channels_last_output_is_refused_unless_declared(small: Path, tmp_path: Path) -> None:
    class ChannelsLast(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(3, 5, 1)

        def forward(self, images_NCHW: torch.Tensor) -> torch.Tensor:
            return self.conv(images_NCHW).permute(0, 2, 3, 1)

    model = export(ChannelsLast(), tmp_path / "last.onnx")
    with pytest.raises(ArtifactError, match=r"It looks like model\.output_layout=nhwc"):
        run(model, small, tmp_path / "last")


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
