"""Q/DQ files of ONNX Runtime's quantizer, which drops ReLUs, in the form of each target."""

import io
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import ModelProto, TensorProto, helper, numpy_helper
from onnxruntime.quantization import CalibrationDataReader, QuantType, quantize_static
from torch import nn

from tasks.build_engine import build_engine
from tasks.import_onnx import import_onnx
from tasks.parts.builders.graph_rewrites import rewrite_for
from tasks.parts.data.dataset import normalise, open_split
from tasks.parts.engines.open_engine import open_engine
from tasks.parts.engines.target import Target
from tasks.parts.onnx_graphs.dropped_activations import write_dropped_activations
from tasks.parts.onnx_graphs.foreign_qdq import float_form
from tasks.parts.onnx_graphs.graph import read_card_of_graph, read_graph
from tasks.parts.onnx_graphs.int8_activations import activations_to_int8
from tasks.parts.onnx_graphs.signal_to_noise import difference
from tasks.parts.onnx_session import open_session
from tests.tasks.conftest import HEIGHT, WIDTH, Workshop
from tests.tasks.test_import_onnx import CONFIG

U8, S8 = QuantType.QUInt8, QuantType.QInt8
SCHEMES: dict[str, dict[str, Any]] = {
    "u8s8": {"activation_type": U8},
    "s8s8": {"activation_type": S8},
    "u8u8": {"activation_type": U8, "weight_type": U8, "per_channel": False},
    "s8s8, weights off centre": {
        "activation_type": S8,
        "per_channel": False,
        "extra_options": {"WeightSymmetric": False},
    },
}
FORMS = {
    "cpu_openvino": {"max_batch": 1},
    "cpu_onnxruntime": {},
    "cpu_onnxruntime of TensorRT's graphs": {"uint8_activations": False, "pairs_before_activations": False},
}
PAIR = ("QuantizeLinear", "DequantizeLinear")


def network() -> nn.Module:
    """Convolutions whose ReLUs a quantizer drops: in front of another one, of HardSwish, and at the output."""
    torch.manual_seed(0)
    layers = [nn.Conv2d(3, 8, 3, 1, 1), nn.ReLU(), nn.Conv2d(8, 8, 3, 1, 1), nn.ReLU(), nn.Hardswish()]
    return nn.Sequential(*layers, nn.Conv2d(8, 3, 3, 1, 1), nn.ReLU())


def target(workshop: Workshop, form: str) -> Target:
    return workshop.target(form.partition(" ")[0], **FORMS[form])


def quantize(workshop: Workshop, folder: Path, **options: Any) -> Path:
    """Write the network and ONNX Runtime's quantization of it; return the latter."""
    file = io.BytesIO()
    torch.onnx.export(
        network().eval(),
        (torch.zeros(1, 3, HEIGHT, WIDTH),),
        file,
        dynamo=False,
        opset_version=17,
        input_names=["image"],
        output_names=["logits"],
        dynamic_axes={"image": {0: "batch"}, "logits": {0: "batch"}},
    )
    (folder / "float.onnx").write_bytes(file.getvalue())
    card = read_card_of_graph(read_graph(workshop.graph))
    images_NCHW = normalise(open_split(workshop.data, "calibration")[0], card.mean, card.std)

    class Reader(CalibrationDataReader):
        images: Iterator[np.ndarray] = iter(images_NCHW)

        def get_next(self) -> Any:
            image_CHW = next(self.images, None)
            return None if image_CHW is None else {"image": image_CHW[None]}

    quantize_static(folder / "float.onnx", folder / "int8.onnx", Reader(), **{"per_channel": True} | options)
    return folder / "int8.onnx"


def run(model: ModelProto, images_NCHW: np.ndarray) -> np.ndarray:
    """Return the logits as the graph is written."""
    session = open_session(model, is_optimised=False)
    return np.concatenate([session.run(None, {"image": image[None]})[0] for image in images_NCHW])


@pytest.fixture(scope="module", params=SCHEMES)
def imported(
    request: pytest.FixtureRequest, workshop: Workshop, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """The quantized file, as import_onnx writes it."""
    folder = tmp_path_factory.mktemp("foreign")
    int8 = quantize(workshop, folder, **SCHEMES[request.param])
    nodes = [node.op_type for node in onnx.load(int8).graph.node]
    assert "Relu" not in nodes and nodes.count("Conv") == 3
    card = read_card_of_graph(read_graph(workshop.graph))
    config = replace(CONFIG, mean=list(card.mean), std=list(card.std), is_quantized=True)
    (folder / "out").mkdir()
    import_onnx(config, model=int8, data=workshop.data, out=folder / "out")
    return folder / "out" / "quantized.onnx"


@pytest.mark.parametrize("form", FORMS)
def test_relus_that_a_quantizer_dropped_are_in_the_form_of_each_target_a2(
    workshop: Workshop, imported: Path, form: str
) -> None:
    """Where the pair stays, it computes the ReLU itself. Symmetric levels and float operators need it written."""
    source = read_graph(imported)
    card = read_card_of_graph(source)
    images_NCHW = normalise(np.load(workshop.images), card.mean, card.std)
    encoded = rewrite_for(target(workshop, form), source)
    onnx.checker.check_model(encoded, full_check=True)
    expected, found = run(source, images_NCHW), run(encoded, images_NCHW)
    assert found.min() == expected.min() == 0
    assert difference(expected, found).sqnr_db > 28
    exact = difference(*(run(float_form(model), images_NCHW) for model in (source, encoded)))
    assert exact.sqnr_db > (
        80 if "TensorRT" not in form else 35
    )  # weights that were off centre get new steps


def test_all_that_tensorrt_reads_is_int8_around_0_a2(workshop: Workshop, imported: Path) -> None:
    """It refuses other zero points, and dequantizes no biases."""
    encoded = rewrite_for(target(workshop, "cpu_onnxruntime of TensorRT's graphs"), read_graph(imported))
    constants = {tensor.name: tensor for tensor in encoded.graph.initializer}
    pairs = [node for node in encoded.graph.node if node.op_type in PAIR]
    assert pairs
    for node in pairs:
        zero_point = constants[node.input[2]]
        assert zero_point.data_type == TensorProto.INT8 and not numpy_helper.to_array(zero_point).any()
        assert node.input[0] not in constants or constants[node.input[0]].data_type == TensorProto.INT8


@pytest.mark.parametrize("form", FORMS)
def test_engine_of_a_file_with_dropped_relus_agrees_with_the_file_a2(
    workshop: Workshop, imported: Path, form: str, tmp_path: Path
) -> None:
    built = build_engine(target(workshop, form), model=imported, images=workshop.images, out=tmp_path)
    assert built.status == "built", built.reason
    assert built.agreement_db is not None and built.agreement_db > 28
    card = read_card_of_graph(read_graph(imported))
    with open_engine(tmp_path / "engine") as engine:
        images_NCHW = normalise(np.load(workshop.images)[:1], card.mean, card.std)
        assert engine.infer(images_NCHW).min() > -0.01


def test_no_activation_is_written_where_nothing_is_negative_a2(workshop: Workshop) -> None:
    """Graphs of this pipeline keep their activations."""
    graph = read_graph(workshop.quantized)
    before = graph.SerializeToString()
    assert write_dropped_activations(graph) == 0
    assert graph.SerializeToString() == before


def declared_type(kind: int, *zero_points: np.ndarray) -> ModelProto:
    """Return a graph of opset 21 whose pair names its type, maybe beside a zero point: (-image) rounded, negated."""
    constants = {"scale": np.float32(0.05), **{f"zero_{i}": value for i, value in enumerate(zero_points)}}
    inputs = list(constants)
    nodes = [
        helper.make_node("Neg", ["image"], ["negative"], "negative"),
        helper.make_node("QuantizeLinear", ["negative", *inputs], ["levels"], "quantize", output_dtype=kind),
        helper.make_node("DequantizeLinear", ["levels", *inputs], ["rounded"], "dequantize"),
        helper.make_node("Neg", ["rounded"], ["logits"], "logits"),
    ]
    image, logits = (
        helper.make_tensor_value_info(name, TensorProto.FLOAT, ["N", 2]) for name in ("image", "logits")
    )
    tensors = [numpy_helper.from_array(np.asarray(value), name) for name, value in constants.items()]
    graph = helper.make_graph(nodes, "declared", [image], [logits], tensors)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)


def test_a_pair_that_names_its_type_and_no_zero_point_is_no_relu_a2() -> None:
    image = np.array([[-3.0, 2.0]], np.float32)
    signed, unsigned = declared_type(TensorProto.INT8), declared_type(TensorProto.UINT8)
    np.testing.assert_allclose(run(signed, image), image, atol=1e-6)
    np.testing.assert_array_equal(run(float_form(signed), image), image)
    np.testing.assert_array_equal(run(float_form(unsigned), image), np.minimum(image, 0))


def test_a_pair_that_names_its_type_names_the_new_one_a2() -> None:
    image = np.array([[-3.0, 2.0]], np.float32)
    encoded = activations_to_int8(declared_type(TensorProto.UINT8, np.uint8(128)))
    onnx.checker.check_model(encoded, full_check=True)
    np.testing.assert_allclose(run(encoded, image), image, atol=0.03)


def test_pairs_of_other_types_stay_as_they_are_a2() -> None:
    """FP8 has no zero point, and negative levels."""
    graph = declared_type(TensorProto.FLOAT8E4M3FN)
    assert activations_to_int8(graph) == graph
    assert [node.op_type for node in float_form(graph).graph.node] == ["Neg", "Neg"]


@pytest.mark.parametrize(("added", "num_written"), [(1.0, 0), (0.5, 1)])
def test_half_of_one_plus_erf_needs_no_relu(added: float, num_written: int) -> None:
    """A Relu inside a GELU keeps runtimes from fusing it."""
    model = onnx.parser.parse_model(
        '<ir_version: 10, opset_import: ["" : 20]> g (float[N, 4] x) => (float[N, 4] y) '
        f"<float one = {{{added}}}, float scale = {{0.0079}}, int8 middle = {{0}}, uint8 least = {{0}}, "
        "uint8 levels = {63}> { "
        "e = Erf(x) el = QuantizeLinear(e, scale, middle) ed = DequantizeLinear(el, scale, middle) "
        "s = Add(ed, one) sl = QuantizeLinear(s, scale, least) sd = DequantizeLinear(sl, scale, least) "
        "half = DequantizeLinear(levels, scale, least) m = Mul(sd, half) "
        "ml = QuantizeLinear(m, scale, least) y = DequantizeLinear(ml, scale, least) }"
    )
    assert write_dropped_activations(model) == num_written
