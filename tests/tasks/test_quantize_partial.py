import csv
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnx import helper, numpy_helper, shape_inference

from tasks.core.errors import ArtifactError, ConfigError
from tasks.parts.data.accuracy import Standing
from tasks.parts.onnx_graphs.graph import read_card_of_graph, read_graph, write_graph
from tasks.parts.quantization.evaluation import open_evaluator
from tasks.parts.quantization.qdq import insert_qdq, quantizable_nodes, read_ranges
from tasks.parts.tables import write_empty_table
from tasks.quantize_partial import Config, Report, quantize_partial
from tasks.rank_layers import RankedLayer

OP_TYPES = ["Conv", "Add", "Concat", "AveragePool", "Resize"]
CONFIG = Config(
    op_types=OP_TYPES,
    max_score_rel_loss=0.35,  # random weights: INT8 costs a quarter even with every layer balanced
    max_parent_rel_loss=0.99,
    class_limits={},
    class_floors={},
    num_candidates=3,
    max_float_layers=8,
    keep_float=[],
    exclusions=[],
    num_val_images=0,
    batch_size=4,
    exhaustive=True,
    max_minutes=60.0,
)


def search(
    files: Any, out: Path, ranking: Path | None = None, repaired: Path | None = None, **changes: Any
) -> Report:
    return quantize_partial(
        replace(CONFIG, **changes),
        model=files.graph,
        repaired=repaired or files.graph,
        reference=files.graph,
        ranges=files.ranges,
        results=files.results,
        ranking=ranking or files.ranking,
        data=files.data,
        out=out,
    )


def test_only_the_layer_that_int8_ruins_stays_in_float(unbalanced: Any, tmp_path: Path) -> None:
    report = search(unbalanced, tmp_path)
    assert report.steps[0].action == "start"
    assert 1 - report.steps[0].score / report.float_score > CONFIG.max_score_rel_loss  # PTQ fails the gate
    assert report.standing is Standing.within
    assert report.score_rel_loss.high <= CONFIG.max_score_rel_loss
    assert [layer.node for layer in report.float_layers] == [unbalanced.node]
    layer = report.float_layers[0]
    assert 0 < layer.macs_share == report.float_macs_share < 0.5
    assert layer.source.count(":") == 1
    assert layer.score_in_int8 < report.score
    with (tmp_path / "steps.csv").open(encoding="utf-8") as file:
        assert [row["action"] for row in csv.DictReader(file)] == [step.action for step in report.steps]


def test_the_written_graph_is_the_one_that_was_judged(unbalanced: Any, tmp_path: Path) -> None:
    report = search(unbalanced, tmp_path)
    graph = read_graph(unbalanced.graph)
    evaluator = open_evaluator(graph, unbalanced.data, num_images=0, batch_size=4)
    written = read_graph(tmp_path / "model.onnx")
    assert evaluator.evaluate(written).score == report.score
    made_by = {name: node.op_type for node in written.graph.node for name in node.output}
    in_float = [
        node.name
        for node in written.graph.node
        if node.op_type == "Conv" and made_by.get(node.input[0]) != "DequantizeLinear"
    ]
    assert in_float == [unbalanced.node]


def test_a_graph_that_passes_at_once_is_the_ptq_graph(unbalanced: Any, tmp_path: Path) -> None:
    report = search(unbalanced, tmp_path, max_score_rel_loss=0.99)
    assert report.float_layers == ()
    assert len(report.steps) == 1
    expected = insert_qdq(read_graph(unbalanced.graph), read_ranges(unbalanced.ranges)[1], op_types=OP_TYPES)
    assert read_graph(tmp_path / "model.onnx") == expected


def test_nothing_is_searched_and_nothing_runs_where_the_repaired_graph_holds_the_gates_b1(
    unbalanced: Any, repaired: Path, tmp_path: Path
) -> None:
    """The images are missing, so that a session would fail, and the ranking was not needed."""
    data = tmp_path / "dataset"
    data.mkdir()
    shutil.copy(unbalanced.data / "manifest.json", data)
    write_empty_table(tmp_path / "ranking.csv", RankedLayer)
    inputs = {"ranges": repaired / "ranges.json", "results": repaired / "images.npz", "data": data}
    files = replace(unbalanced, ranking=tmp_path / "ranking.csv", **inputs)
    report = search(files, tmp_path, exhaustive=False, repaired=repaired / "float.onnx")
    assert (report.num_judged, report.float_layers, len(report.steps)) == (0, (), 1)
    assert report.standing is Standing.within
    assert report.left_out == "no layer was tried in float: INT8 holds all gates for certain"
    assert (tmp_path / "left_out.txt").read_text(encoding="utf-8") == report.left_out
    assert read_graph(tmp_path / "model.onnx") == read_graph(repaired / "model.onnx")
    with pytest.raises(ArtifactError, match="val_images"):
        search(files, tmp_path, exhaustive=False, keep_float=[unbalanced.node])


def test_a_search_without_a_ranking_goes_through_the_graph_in_its_order_b1(
    unbalanced: Any, tmp_path: Path
) -> None:
    write_empty_table(tmp_path / "ranking.csv", RankedLayer)
    report = search(unbalanced, tmp_path, tmp_path / "ranking.csv", num_candidates=30)
    assert [layer.node for layer in report.float_layers] == [unbalanced.node]


def test_the_best_set_is_kept_once_the_time_is_up_b1(unbalanced: Any, tmp_path: Path) -> None:
    report = search(unbalanced, tmp_path, max_minutes=1e-9)
    assert [step.action for step in report.steps] == ["start"] and report.num_judged == 1
    assert report.left_out == (
        "time was up after 1e-09 min (quantize_partial.max_minutes) and 1 graphs; this is the best of them"
    )


@pytest.fixture(scope="module")
def harmless_first(unbalanced: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A ranking with the layer that INT8 ruins as the third, behind harmless ones."""
    rows = list(csv.DictReader(unbalanced.ranking.open(encoding="utf-8")))
    rows.sort(key=lambda row: (row["node"] == unbalanced.node, float(row["disagreement"])))
    rows.insert(2, rows.pop())
    path = tmp_path_factory.mktemp("harmless_first") / "ranking.csv"
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    return path


def test_layers_go_back_to_int8_where_the_gate_allows_it(
    unbalanced: Any, harmless_first: Path, tmp_path: Path
) -> None:
    """A ranking that puts harmless layers first makes the search take them; the step back returns them."""
    report = search(unbalanced, tmp_path, harmless_first, num_candidates=1)
    assert [step.action for step in report.steps].count("float") == 3
    assert {step.node for step in report.steps if step.action == "int8"}
    assert [layer.node for layer in report.float_layers] == [unbalanced.node]


def test_of_many_layers_as_few_of_the_first_as_the_gate_needs_move_to_float_together(
    unbalanced: Any, harmless_first: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tasks.quantize_partial.MANY_LAYERS", 2)
    report = search(unbalanced, tmp_path, harmless_first)
    tried = [step.num_float_layers for step in report.steps if step.action == "together"]
    assert tried == [1, 2, 4, 3], "doubled until the gate holds, then halved"
    assert [step.num_float_layers for step in report.steps if step.action == "int8"] == [2, 1]
    assert [layer.node for layer in report.float_layers] == [unbalanced.node]
    assert report.standing is Standing.within and report.num_judged == 7
    one_by_one = search(unbalanced, tmp_path, unbalanced.ranking, max_score_rel_loss=0.99)
    assert [step.action for step in one_by_one.steps] == ["start"], (
        "nothing moves where the gate holds at once"
    )


def test_of_many_layers_the_best_that_was_tried_is_written_where_the_gate_never_holds(
    unbalanced: Any, harmless_first: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tasks.quantize_partial.MANY_LAYERS", 2)
    report = search(unbalanced, tmp_path, harmless_first, max_float_layers=2)
    assert [step.num_float_layers for step in report.steps] == [0, 1, 2]
    best = max(report.steps, key=lambda step: step.score)
    assert (report.score, len(report.float_layers)) == (best.score, best.num_float_layers)
    assert report.standing is not Standing.within
    cut = search(unbalanced, tmp_path, harmless_first, max_minutes=1e-9)
    assert [step.action for step in cut.steps] == ["start"] and "time was up" in cut.left_out


def test_a_search_that_may_not_go_on_says_that_the_gate_does_not_hold(
    unbalanced: Any, tmp_path: Path
) -> None:
    report = search(unbalanced, tmp_path, max_float_layers=0)
    assert report.standing is not Standing.within
    assert (tmp_path / "model.onnx").is_file()


def test_a_search_that_gives_up_writes_the_best_graph_it_tried(unbalanced: Any, tmp_path: Path) -> None:
    """A ranking upside down: the layers that are tried do not help, and some of them harm."""
    rows = list(csv.DictReader(unbalanced.ranking.open(encoding="utf-8")))
    with (tmp_path / "ranking.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(reversed(rows))
    limits = {"num_candidates": 1, "max_float_layers": 3, "max_score_rel_loss": 0.0}
    report = search(unbalanced, tmp_path, tmp_path / "ranking.csv", **limits)
    assert report.standing is not Standing.within
    scores = [step.score for step in report.steps[:-1]]
    assert scores[-1] < max(scores), "or else the last graph is the best one"
    last = report.steps[-1]
    assert last.action == "back"
    assert last.score == report.score == max(scores)
    assert last.num_float_layers == len(report.float_layers) == scores.index(max(scores))
    written = read_graph(tmp_path / "model.onnx")
    evaluator = open_evaluator(read_graph(unbalanced.graph), unbalanced.data, num_images=0, batch_size=4)
    assert evaluator.evaluate(written).score == report.score


def test_a_layer_stays_in_float_for_the_sake_of_one_class_c2(unbalanced: Any, tmp_path: Path) -> None:
    """The score may lose nearly all, so that without a limit of a class the graph passes at once."""
    loose: dict[str, Any] = {"max_score_rel_loss": 0.99, "max_parent_rel_loss": 0.99}
    evaluator = open_evaluator(read_graph(unbalanced.graph), unbalanced.data, num_images=0, batch_size=4)
    classes = read_card_of_graph(read_graph(unbalanced.graph)).classes
    everything = insert_qdq(
        read_graph(unbalanced.graph), read_ranges(unbalanced.ranges)[1], op_types=OP_TYPES
    )
    pairs = [evaluator.float_results.class_scores, evaluator.evaluate(everything).results.class_scores]
    losses = {
        name: 1 - after / before
        for name, before, after in zip(classes, *pairs, strict=True)
        if before and after is not None
    }
    worst = max(losses, key=lambda name: losses[name])
    assert search(unbalanced, tmp_path, **loose).float_layers == ()
    limit = losses[worst] / 2
    report = search(unbalanced, tmp_path, **loose, class_limits={worst: limit}, max_float_layers=30)
    assert report.float_layers, "some layer is in float now"
    results = evaluator.evaluate(read_graph(tmp_path / "model.onnx")).results
    assert (
        1 - (results.class_scores[classes.index(worst)] or 0) / (pairs[0][classes.index(worst)] or 1)
        < losses[worst]
    ), "the class lost less"
    if report.standing is not Standing.within:
        assert all(f"(class_limits.{worst})" in text for text in report.open_classes)


def test_a_limit_of_a_class_that_cannot_hold_is_named_and_unknown_ones_are_refused_c2(
    unbalanced: Any, tmp_path: Path
) -> None:
    name = read_card_of_graph(read_graph(unbalanced.graph)).classes[0]
    report = search(unbalanced, tmp_path, class_floors={name: 0.999}, max_float_layers=0)
    assert report.standing is not Standing.within
    assert len(report.open_classes) == 1
    assert f"IoU of {name} " in report.open_classes[0] and f"(class_floors.{name})" in report.open_classes[0]
    with pytest.raises(
        ConfigError, match=rf"quantize_partial\.class_limits names nucleos, expected .*{name}"
    ):
        search(unbalanced, tmp_path, class_limits={"nucleos": 0.1})


def test_the_preset_stays_in_float_and_is_named_as_such(unbalanced: Any, tmp_path: Path) -> None:
    first = quantizable_nodes(read_graph(unbalanced.graph), OP_TYPES)[0].name
    report = search(unbalanced, tmp_path, keep_float=[first], max_score_rel_loss=0.99)
    assert [(layer.node, layer.reason) for layer in report.float_layers] == [
        (first, "quantize_partial.keep_float or .exclusions")
    ]


def against(reference: Path, files: Any, model: Path, out: Path) -> Report:
    return quantize_partial(
        replace(CONFIG, max_score_rel_loss=0.0),
        model=model,
        repaired=model,
        reference=reference,
        ranges=files.ranges,
        results=files.results,
        ranking=files.ranking,
        data=files.data,
        out=out,
    )


def test_the_gate_counts_from_the_reference(unbalanced: Any, tmp_path: Path) -> None:
    graph = read_graph(unbalanced.graph)
    int8 = insert_qdq(graph, read_ranges(unbalanced.ranges)[1], op_types=OP_TYPES)
    write_graph(int8, tmp_path / "int8.onnx")
    report = against(tmp_path / "int8.onnx", unbalanced, unbalanced.graph, tmp_path)
    assert report.reference_score < report.float_score
    assert report.steps[0].score >= report.reference_score  # PTQ is as good as this reference
    assert report.standing is Standing.within


def test_a_float_graph_below_the_gate_is_not_searched(unbalanced: Any, tmp_path: Path) -> None:
    graph = read_graph(unbalanced.graph)
    weight = next(item for item in graph.graph.initializer if item.name == "classifier/Conv:weight")
    other_classes = numpy_helper.to_array(weight)[::-1].copy()
    weight.CopyFrom(numpy_helper.from_array(other_classes, weight.name))
    write_graph(graph, tmp_path / "worse.onnx")
    report = against(unbalanced.graph, unbalanced, tmp_path / "worse.onnx", tmp_path)
    assert report.float_score < report.reference_score
    assert report.standing is not Standing.within
    assert report.float_layers == () and len(report.steps) == 1


def test_usual_exclusions_are_found_in_the_graph(unbalanced: Any, tmp_path: Path) -> None:
    graph = read_graph(unbalanced.graph)
    layers = quantizable_nodes(graph, OP_TYPES)
    first, logits = (
        search(unbalanced, tmp_path, exclusions=[name], max_score_rel_loss=0.99)
        for name in ("first", "logits")
    )
    assert [layer.node for layer in first.float_layers] == [layers[0].name]
    convs = [node.name for node in graph.graph.node if node.op_type == "Conv"]
    assert [layer.node for layer in logits.float_layers] == [convs[-1]]
    neighbours = search(unbalanced, tmp_path, exclusions=["resize_neighbours"], max_score_rel_loss=0.99)
    names = {layer.node for layer in neighbours.float_layers}
    assert {node.name for node in layers if node.op_type == "Resize"} <= names
    assert 2 < len(names) < len(layers)


def test_logits_that_a_matrix_product_makes_exclude_no_convolution_before_it(
    unbalanced: Any, tmp_path: Path
) -> None:
    graph = read_graph(unbalanced.graph)
    conv = [node for node in graph.graph.node if node.op_type == "Conv"][-1]
    reader = next(node for node in graph.graph.node if conv.output[0] in node.input)
    sizes = shape_inference.infer_shapes(graph).graph.value_info
    shape = next(value for value in sizes if value.name == conv.output[0]).type.tensor_type.shape
    width = shape.dim[3].dim_value
    graph.graph.initializer.append(numpy_helper.from_array(np.eye(width, dtype=np.float32), "head:weight"))
    head = helper.make_node("MatMul", [conv.output[0], "head:weight"], ["head"], name="head/MatMul")
    reader.input[:] = ["head" if name == conv.output[0] else name for name in reader.input]
    graph.graph.node.insert(list(graph.graph.node).index(conv) + 1, head)
    write_graph(graph, tmp_path / "head.onnx")
    files = replace(unbalanced, graph=tmp_path / "head.onnx")
    report = search(files, tmp_path, exclusions=["logits"], max_score_rel_loss=0.99)
    assert report.float_layers == ()


def test_an_unknown_preset_names_the_layers_there_are(unbalanced: Any, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"quantize_partial\.keep_float names no/Conv.*/Conv"):
        search(unbalanced, tmp_path, keep_float=["no/Conv"])


@pytest.mark.parametrize("text", ["node,sqnr_db\nother/Conv,3\n", "a,b\n1,2\n", ""])
def test_a_ranking_of_something_else_is_refused(unbalanced: Any, tmp_path: Path, text: str) -> None:
    (tmp_path / "ranking.csv").write_text(text, encoding="utf-8")
    with pytest.raises(ArtifactError, match="Run rank_layers again"):
        search(unbalanced, tmp_path, tmp_path / "ranking.csv")
