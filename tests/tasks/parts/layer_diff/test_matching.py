import numpy as np
import onnx
import onnxruntime
import pytest

from tasks.convert_precision import convert_precision
from tasks.core.errors import ArtifactError
from tasks.parts.data.dataset import normalise, open_split
from tasks.parts.layer_diff.matching import Twinned, add_exact_twins, mark, match_modules, match_tensors
from tasks.parts.layer_diff.readers import named_as
from tasks.parts.onnx_graphs.graph import node_sources, read_card_of_graph, read_graph
from tasks.parts.onnx_graphs.signal_to_noise import sqnr_db
from tasks.parts.tables import read_table
from tests.tasks.test_convert_precision import CONFIG


def run(model, names, images_NCHW):
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    return dict(zip(names, session.run(list(names), {"image": images_NCHW}), strict=True))


def calibration_images(graph, data):
    card = read_card_of_graph(graph)
    return normalise(open_split(data, "calibration")[0], card.mean, card.std)


def test_graphs_without_common_names_are_refused(workshop):
    graph = read_graph(workshop.graph)
    other = onnx.compose.add_prefix(graph, "other/")
    with pytest.raises(ArtifactError, match="no tensor names in common"):
        match_tensors(graph, other)


def test_convolution_is_judged_with_the_activation_that_a_runtime_fuses_into_it(workshop):
    graph, quantized = read_graph(workshop.graph), read_graph(workshop.quantized)
    match = match_tensors(graph, quantized)
    made = {name: node.op_type for node in quantized.graph.node for name in node.output}
    assert made[next(iter(match.names.values()))] == "DequantizeLinear"
    assert list(match.names)[-1] == "logits"
    kinds = {node.output[0]: node.op_type for node in graph.graph.node}
    assert {kinds[behind] for behind in match.fused.values()} == {"Relu"}
    assert len(match.names) + len(match.fused) == match.num_tensors == len(graph.graph.node) + 1


def test_module_without_parts_stands_for_its_last_node(workshop):
    graph = read_graph(workshop.graph)
    match, sources = match_modules(graph), node_sources(graph)
    relu = next(node for node in graph.graph.node if node.op_type == "Relu")
    assert match.names[relu.output[0]] == sources[relu.name][0]
    assert match.names["logits"] == "logits"


def test_noise_from_exact_inputs_is_that_of_the_ranking(unbalanced):
    """rank_layers measures the same with a graph of its own."""
    graph, variant = read_graph(unbalanced.graph), read_graph(unbalanced.graph.parent / "model.onnx")
    match = match_tensors(graph, variant)
    twinned = add_exact_twins(graph, variant, match.names)
    noise_of = twinned.noise_of
    ranking = read_table(unbalanced.ranking, "node", stage="rank_layers")
    images_NCHW = calibration_images(graph, unbalanced.data)
    shown = [*noise_of, *noise_of.values()]
    found = run(mark(twinned.graph, shown), shown, images_NCHW)
    behind = set(match.fused.values())
    checked = 0
    for node in graph.graph.node:
        name = node.output[0]
        if node.name in ranking and name in noise_of and name not in behind:
            signal = float(np.square(found[name].astype(np.float64)).sum())
            expected = float(ranking[node.name]["sqnr_db"])
            assert sqnr_db(signal, float(found[noise_of[name]])) == pytest.approx(expected, abs=0.05), (
                node.name
            )
            checked += 1
    assert checked > 5
    # Where the variant computes in float there is no noise from exact inputs.
    outside = [name for name in noise_of if name not in behind and name.rpartition("/")[2] == "Relu"]
    assert all(float(found[noise_of[name]]) == 0 for name in outside)


def test_layers_of_a_half_precision_graph_are_fed_exact_inputs_too(workshop, tmp_path):
    convert_precision(CONFIG, model=workshop.graph, data=workshop.data, out=tmp_path)
    graph, half = read_graph(workshop.graph), read_graph(tmp_path / "model.onnx")
    names = match_tensors(graph, half).names
    twinned = add_exact_twins(graph, half, names)
    noise_of = twinned.noise_of
    images_NCHW = calibration_images(graph, workshop.data)
    shown = [*noise_of, *noise_of.values()]
    found = run(mark(twinned.graph, shown), shown, images_NCHW)
    own_db = [
        sqnr_db(float(np.square(found[name]).sum()), float(found[noise])) for name, noise in noise_of.items()
    ]
    assert len(own_db) > 20
    assert min(own_db) > 50  # FP16 has 11 bits of significand


def test_variant_in_another_opset_has_no_twins(workshop):
    graph, other = read_graph(workshop.graph), read_graph(workshop.quantized)
    other.opset_import[0].version -= 1
    assert add_exact_twins(graph, other, {"logits": "logits"}) == Twinned(graph, {}, {})


def test_levels_that_a_fused_engine_shows_stand_for_the_dequantised_tensor(workshop):
    graph, variant = read_graph(workshop.graph), read_graph(workshop.quantized)
    names = match_tensors(graph, variant).names
    makers = {name: node for node in variant.graph.node for name in node.output}
    name, twin = next((n, t) for n, t in names.items() if n in makers and n != t)
    levels = makers[twin].input[0]
    images_NCHW = calibration_images(graph, workshop.data)
    found = run(mark(variant, [levels, twin, name]), [levels, twin, name], images_NCHW)
    assert found[levels].dtype == np.uint8
    [shown] = named_as({name: twin}, variant, {levels: found[levels]}).values()
    np.testing.assert_array_equal(shown, found[twin])
    assert named_as({name: twin}, variant, {name: found[name]}).keys() == {twin}
    assert named_as({name: twin}, variant, {"Reformatted Output Tensor 0": found[name]}) == {}


def test_pooling_of_integers_is_compared_behind_its_dequantizer():
    """Files of integer operators pool levels; their float form has the values under the same name."""
    head = (
        '<ir_version: 10, opset_import: ["" : 20]> g (float[N, 2, 4, 4] image) => (float[N, 2, 2, 2] logits)'
    )
    pool = "MaxPool<kernel_shape=[2, 2], strides=[2, 2]>"
    graph = onnx.parser.parse_model(f"{head} {{ a = Relu(image) pooled = {pool}(a) logits = Neg(pooled) }}")
    variant = onnx.parser.parse_model(
        f"{head} <float scale = {{0.5}}, uint8 zero = {{0}}> {{ a = Relu(image) "
        f"levels = QuantizeLinear(a, scale, zero) pooled = {pool}(levels) "
        "real = DequantizeLinear(pooled, scale, zero) logits = Neg(real) }"
    )
    for model in (graph, variant):
        for number, node in enumerate(model.graph.node):
            node.name = f"{node.op_type}_{number}"
    match = match_tensors(graph, variant)
    assert match.names["pooled"] == "real"
    twinned = add_exact_twins(graph, variant, match.names)
    noise_of = twinned.noise_of
    images_NCHW = np.random.default_rng(0).uniform(0, 9, (1, 2, 4, 4)).astype(np.float32)
    found = run(mark(twinned.graph, [noise_of["pooled"]]), [noise_of["pooled"]], images_NCHW)
    pooled = images_NCHW.reshape(1, 2, 2, 2, 2, 2).max(axis=(3, 5))
    noise = np.square(pooled - np.round(pooled / 0.5) * 0.5).sum()
    assert found[noise_of["pooled"]] == pytest.approx(noise, rel=1e-4)
