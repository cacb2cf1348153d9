"""What engines run of graphs that torch's exporters write: with and without names, BatchNorm kept and folded."""

import io
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper
from torch import Tensor, nn

from tasks.parts.builders.build import build
from tasks.parts.builders.executed_layers import UNKNOWN, ExecutedLayers, sum_up_layers
from tasks.parts.data.input_card import InputCard, Task
from tasks.parts.engines.manifest import ENGINE_FOLDER, LAYERS_FILE
from tasks.parts.onnx_graphs.graph import CARD_KEY, name_nodes, write_graph
from tasks.parts.onnx_graphs.macs import conv_macs, quantized_layers
from tasks.parts.selection.stage_reports import macs_not_counted
from tasks.parts.tables import read_table
from tests.tasks.conftest import Workshop, quantize

SIDE, NUM_CLASSES = 16, 5
NUM_MACS = {
    "stem": 8 * 27 * 64,
    "depthwise": 8 * 9 * 64,
    "point": 8 * 16 * 64,
    "branch": 16 * 16 * 9 * 64,
    "up": 16 * 16 * 4 * 64,
    "attention": 2 * 16 * 16 * 16,  # keys and their product with the queries: 16 tokens of 16 channels
    "head": 16 * NUM_CLASSES,
}
TARGETS = ["cpu_onnxruntime", "cpu_openvino"]


class Mixed(nn.Module):
    """A convolution of each kind, products with a constant and without, and activations that runtimes fuse."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3, 2, 1, bias=False), nn.BatchNorm2d(8), nn.ReLU6())
        self.depthwise = nn.Sequential(
            nn.Conv2d(8, 8, 3, 1, 1, groups=8, bias=False), nn.BatchNorm2d(8), nn.Hardswish()
        )
        self.point = nn.Sequential(nn.Conv2d(8, 16, 1, bias=False), nn.BatchNorm2d(16))
        self.branch = nn.Sequential(nn.Conv2d(16, 16, 3, 1, 1, bias=False), nn.BatchNorm2d(16))
        self.up = nn.ConvTranspose2d(16, 16, 2, 2)
        self.keys = nn.Linear(16, 16)
        self.head = nn.Linear(16, NUM_CLASSES)

    def forward(self, images_NCHW: Tensor) -> Tensor:
        maps = self.point(self.depthwise(self.stem(images_NCHW)))
        maps = torch.relu(self.up(torch.relu(maps + self.branch(maps))))
        tokens = nn.functional.max_pool2d(maps, 4).flatten(2).transpose(1, 2)
        weights = torch.softmax(self.keys(tokens) @ tokens.transpose(1, 2), -1)
        return self.head((weights * tokens.mean(-1, keepdim=True)).mean(2))


class Straight(nn.Module):
    """Convolutions with ReLU, a pooling and a linear layer: all that is quantized runs in int8 everywhere."""

    def __init__(self) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for before, after in ((3, 32), (32, 32), (32, 32)):
            layers += [nn.Conv2d(before, after, 3, 1, 1, bias=False), nn.BatchNorm2d(after), nn.ReLU()]
        self.layers = nn.Sequential(*layers)
        self.head = nn.Linear(32, NUM_CLASSES)

    def forward(self, images_NCHW: Tensor) -> Tensor:
        return self.head(nn.functional.avg_pool2d(self.layers(images_NCHW), SIDE).flatten(1))


def export(network_type: type[nn.Module], exporter: str) -> onnx.ModelProto:
    """Export with one of torch's exporters; "kept" keeps BatchNorm, "unnamed" drops the names of the nodes too."""
    torch.manual_seed(0)
    network = network_type().eval()
    images_NCHW, file = torch.randn(2, 3, SIDE, SIDE), io.BytesIO()
    if exporter == "dynamo":
        program = torch.onnx.export(
            network,
            (images_NCHW,),
            input_names=["image"],
            output_names=["logits"],
            opset_version=18,
            dynamo=True,
            dynamic_shapes=({0: torch.export.Dim.DYNAMIC},),
            verbose=False,
        )
        assert program is not None
        model = program.model_proto
    else:
        is_kept = exporter != "torchscript"
        mode = torch.onnx.TrainingMode.PRESERVE if is_kept else torch.onnx.TrainingMode.EVAL
        torch.onnx.export(
            network,
            (images_NCHW,),
            file,
            input_names=["image"],
            output_names=["logits"],
            opset_version=17,
            dynamo=False,
            dynamic_axes={"image": {0: "batch"}, "logits": {0: "batch"}},
            training=mode,
            do_constant_folding=not is_kept,
        )
        model = onnx.load_from_string(file.getvalue())
    if exporter == "unnamed":
        for node in model.graph.node:
            node.name = ""
    return with_card(model)


def with_card(model: onnx.ModelProto) -> onnx.ModelProto:
    card = InputCard(
        tuple(f"class {number}" for number in range(NUM_CLASSES)),
        (0.5, 0.5, 0.5),
        (0.25, 0.25, 0.25),
        SIDE,
        SIDE,
        Task.classification,
    )
    del model.metadata_props[:]
    model.metadata_props.add(key=CARD_KEY, value=card.to_json())
    return model


def built(workshop: Workshop, target: str, model: onnx.ModelProto, folder: Path) -> ExecutedLayers:
    """Build an engine; every MAC of its graph is in exactly one row of layers.csv, in a row that computes."""
    write_graph(model, folder / "model.onnx")
    out = folder / target
    out.mkdir()
    declared = workshop.target(target, stem_in_float=False, max_batch=1)
    images_NHWC = np.random.default_rng(0).integers(0, 256, (2, SIDE, SIDE, 3), np.uint8)
    np.save(folder / "images.npy", images_NHWC)
    report = build(declared, model=folder / "model.onnx", images=folder / "images.npy", out=out)
    assert report.executed is not None, report.reason
    assert report.is_precision_ok, report.precision_note
    rows = read_table(out / ENGINE_FOLDER / LAYERS_FILE, "layer", stage="build_engine").values()
    assert sum(int(row["macs"]) for row in rows) == sum(conv_macs(model).values())
    assert not any(int(row["macs"]) for row in rows if row["is_conversion"] == "True")
    return report.executed


@pytest.mark.slow
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("exporter", ["dynamo", "torchscript", "kept", "unnamed"])
def test_every_mac_of_a_float_graph_has_a_layer(
    workshop: Workshop, tmp_path: Path, exporter: str, target: str
) -> None:
    model = export(Mixed, exporter)
    name_nodes(model)
    assert sum(conv_macs(model).values()) == sum(NUM_MACS.values())
    has_batchnorm = any(node.op_type == "BatchNormalization" for node in model.graph.node)
    assert has_batchnorm == (exporter in ("kept", "unnamed"))
    executed = built(workshop, target, model, tmp_path)
    assert executed.macs_share == {"f32": pytest.approx(1.0)}


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("exporter", ["dynamo", "torchscript"])
def test_right_engine_of_a_quantized_graph_is_not_a_mismatch(
    workshop: Workshop, tmp_path: Path, exporter: str, target: str
) -> None:
    model = export(Straight, exporter)
    images_NCHW = np.random.default_rng(0).normal(size=(4, 3, SIDE, SIDE)).astype(np.float32)
    quantized = quantize(model, images_NCHW)
    assert len(quantized_layers(quantized)) == 3
    executed = built(workshop, target, quantized, tmp_path)
    assert executed.not_in_int8 == ()
    assert executed.macs_share.keys() == {"int8", "f32"} and executed.int8_share_of_quantized == 1


def attention_and_gru(kind: str) -> onnx.ModelProto:
    """Return a graph whose work is attention, in Einsum or as in opset 23, and a GRU; the head has 40 MACs."""
    if kind == "Einsum":
        attention = [
            helper.make_node("Einsum", ["tokens", "tokens"], ["scores"], "scores", equation="btc,bsc->bts"),
            helper.make_node("Softmax", ["scores"], ["weights"], "softmax"),
            helper.make_node("Einsum", ["weights", "tokens"], ["mixed"], "mixed", equation="bts,bsc->btc"),
        ]
    else:
        inputs, heads = ["tokens"] * 3, {"q_num_heads": 2, "kv_num_heads": 2}
        attention = [helper.make_node("Attention", inputs, ["mixed"], "attention", **heads)]
    nodes = [
        helper.make_node("Reshape", ["image", "shape"], ["tokens"], "reshape"),
        *attention,
        helper.make_node("Transpose", ["mixed"], ["steps"], "transpose", perm=[1, 0, 2]),
        helper.make_node("GRU", ["steps", "w", "r"], ["", "state"], "gru", hidden_size=8),
        helper.make_node("Squeeze", ["state", "first"], ["last"], "squeeze"),
        helper.make_node("Gemm", ["last", "head"], ["logits"], "head"),
    ]
    random = np.random.default_rng(0).standard_normal
    constants = {
        "shape": np.array([0, 48, 16]),
        "first": np.array([0]),
        "w": random((1, 24, 16)).astype(np.float32),
        "r": random((1, 24, 8)).astype(np.float32),
        "head": random((8, NUM_CLASSES)).astype(np.float32),
    }
    values = [
        helper.make_tensor_value_info(name, TensorProto.FLOAT, ["batch", *shape])
        for name, shape in (("image", (3, SIDE, SIDE)), ("logits", (NUM_CLASSES,)))
    ]
    tensors = [numpy_helper.from_array(array, name) for name, array in constants.items()]
    graph = helper.make_graph(nodes, "graph", values[:1], values[1:], tensors)
    opset = helper.make_opsetid("", 17 if kind == "Einsum" else 23)
    return with_card(helper.make_model(graph, opset_imports=[opset], ir_version=10))


@pytest.mark.parametrize(
    ("kind", "target"), [*(("Einsum", target) for target in TARGETS), ("Attention", "cpu_onnxruntime")]
)
def test_shares_count_einsum_attention_and_recurrent_layers_a6(
    workshop: Workshop, tmp_path: Path, kind: str, target: str
) -> None:
    model = attention_and_gru(kind)
    assert sum(conv_macs(model).values()) == 2 * 48 * 48 * 16 + 48 * 24 * (16 + 8) + 8 * NUM_CLASSES
    executed = built(workshop, target, model, tmp_path)
    assert executed.macs_share == {"f32": pytest.approx(1.0)} and executed.uncounted_operators == {}


def test_report_names_operators_whose_macs_are_not_known_a6() -> None:
    model = attention_and_gru("Einsum")
    scores = helper.make_node("Scores", ["tokens"], ["unused"], "unknown", domain="com.example")
    model.graph.node.append(scores)
    model.opset_import.append(helper.make_opsetid("com.example", 1))
    executed = sum_up_layers((), model)
    assert executed.uncounted_operators == {"Scores": 1}
    assert executed.macs_share == {UNKNOWN: 1.0}, "of the others, no layer is known"
    assert macs_not_counted(executed) == {"MACs not counted": "1 Scores"}
    assert macs_not_counted(sum_up_layers((), attention_and_gru("Einsum"))) == {}


def test_nodes_without_a_name_of_their_own_are_named_after_their_output() -> None:
    model = export(Straight, "kept")
    first, second, third = model.graph.node[:3]
    first.name, second.name, third.name = "", third.output[0], ""
    assert name_nodes(model) == 2
    assert first.name == first.output[0] and third.name == f"{third.output[0]}_2"
    names = [node.name for node in model.graph.node]
    assert len(set(names)) == len(names) and name_nodes(model) == 0
