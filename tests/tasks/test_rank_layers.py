import csv
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tasks.core.errors import ArtifactError
from tasks.parts.onnx_graphs.graph import read_graph
from tasks.parts.onnx_graphs.macs import conv_macs
from tasks.parts.quantization.evaluation import open_evaluator
from tasks.parts.quantization.qdq import insert_qdq, read_ranges
from tasks.rank_layers import Config, Report, rank_layers
from tests.tasks.conftest import ANYWAY

OP_TYPES = ["Conv", "Add", "Concat", "AveragePool", "Resize"]
CONFIG = Config(op_types=OP_TYPES, num_images=4, num_val_images=0, batch_size=2, **ANYWAY)


@pytest.fixture(scope="module")
def ranked(unbalanced: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[Report, Path]:
    out = tmp_path_factory.mktemp("ranking")
    return rank(unbalanced, out), out


def rank(files: Any, out: Path, config: Config = CONFIG, **changes: Path) -> Report:
    inputs = {"model": files.graph, "ranges": files.ranges, "data": files.data, "results": files.results}
    return rank_layers(config, **(inputs | changes), out=out)


def test_every_layer_is_ranked_once_by_what_it_costs_alone(
    ranked: tuple[Report, Path], unbalanced: Any
) -> None:
    report, out = ranked
    names = [node.name for node in read_graph(unbalanced.graph).graph.node if node.op_type in OP_TYPES]
    assert {layer.node for layer in report.layers} <= set(names)
    assert {name for name in names if name.endswith("/Conv")} <= {layer.node for layer in report.layers}
    costs = [layer.disagreement for layer in report.layers]
    assert costs == sorted(costs, reverse=True)
    assert report.num_passes == len(report.layers) + 1
    assert sum(layer.macs_share for layer in report.layers) == pytest.approx(1)
    assert all(layer.source.count(":") == 1 for layer in report.layers if layer.op_type == "Conv")
    with (out / "ranking.csv").open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert [row["node"] for row in rows] == [layer.node for layer in report.layers]
    assert (out / "ranking.png").read_bytes().startswith(b"\x89PNG")


def test_the_same_inputs_give_the_same_ranking(
    ranked: tuple[Report, Path], unbalanced: Any, tmp_path: Path
) -> None:
    assert rank(unbalanced, tmp_path) == ranked[0]
    assert (tmp_path / "ranking.csv").read_bytes() == (ranked[1] / "ranking.csv").read_bytes()


def test_a_layer_that_int8_ruins_is_ranked_first(ranked: tuple[Report, Path], unbalanced: Any) -> None:
    report, _ = ranked
    worst = report.layers[0]
    assert worst.node == unbalanced.node
    assert worst.score_drop > 0.02
    assert worst.sqnr_db < min(layer.sqnr_db for layer in report.layers[1:])


def test_nothing_is_ranked_and_nothing_runs_where_no_layer_has_to_stay_in_float_b1(
    unbalanced: Any, repaired: Path, tmp_path: Path
) -> None:
    """The images are missing, so that a session would fail."""
    loose = replace(CONFIG, exhaustive=False, max_score_rel_loss=0.35, max_parent_rel_loss=0.99)
    data = tmp_path / "dataset"
    data.mkdir()
    shutil.copy(unbalanced.data / "manifest.json", data)
    results = repaired / "images.npz"
    report = rank(unbalanced, tmp_path, loose, results=results, data=data)
    assert (report.layers, report.num_passes, report.float_score) == ((), 0, None)
    assert report.left_out == (
        "no layer was ranked: INT8 holds all gates for certain (quantize_repaired.exhaustive=true asks for it)"
    )
    assert (tmp_path / "ranking.csv").read_text(encoding="utf-8").startswith("node,op_type,")
    with pytest.raises(ArtifactError, match="val_images"):
        rank(unbalanced, tmp_path, replace(loose, max_score_rel_loss=0.0), results=results, data=data)


def test_layers_without_time_are_ranked_by_their_noise_b1(
    ranked: tuple[Report, Path], unbalanced: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    report = rank(unbalanced, tmp_path, replace(CONFIG, max_minutes=1e-9))
    assert report.num_passes == 1 and "time was up after 1e-09 min" in report.left_out
    assert report.layers[0].node == unbalanced.node
    assert all(layer.disagreement is layer.score_drop is None for layer in report.layers)
    assert [layer.sqnr_db for layer in report.layers] == sorted(layer.sqnr_db for layer in report.layers)
    assert "rank_layers (8 layers at a time, all images): time is up after 0 of " in caplog.text
    assert {layer.node for layer in report.layers} == {layer.node for layer in ranked[0].layers}


def test_layers_that_are_tried_in_one_session_cost_what_each_costs_in_its_own_b1(
    ranked: tuple[Report, Path], unbalanced: Any
) -> None:
    graph, known = read_graph(unbalanced.graph), read_ranges(unbalanced.ranges)[1]
    evaluator = open_evaluator(graph, unbalanced.data, num_images=0, batch_size=2)
    names = {layer.node for layer in ranked[0].layers}
    for layer in ranked[0].layers[:: len(names) // 5]:
        alone = insert_qdq(graph, known, op_types=OP_TYPES, float_nodes=names - {layer.node})
        evaluation = evaluator.evaluate(alone)
        assert layer.disagreement == pytest.approx(1 - evaluation.agreement, abs=1e-3)
        assert layer.score_drop == pytest.approx(evaluator.float_score - evaluation.score, abs=1e-3)


def test_of_many_layers_those_that_change_the_outputs_most_are_tried_on_all_images(
    ranked: tuple[Report, Path], unbalanced: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tasks.rank_layers.MANY_LAYERS", len(ranked[0].layers) - 1)
    monkeypatch.setattr("tasks.rank_layers._MOST", 6)
    report = rank(unbalanced, tmp_path)
    assert report.num_passes == 7
    assert report.left_out.startswith(
        f"6 of {len(ranked[0].layers)} layers were tried in INT8 on all images: of the "
    )
    known = {layer.node: layer for layer in ranked[0].layers}
    assert report.layers[:6] == tuple(known[layer.node] for layer in report.layers[:6])
    assert {layer.node for layer in ranked[0].layers[:3]} <= {layer.node for layer in report.layers[:6]}
    assert all(layer.disagreement is None for layer in report.layers[6:])
    assert {layer.node for layer in report.layers} == known.keys()


def test_every_layer_of_a_graph_with_branches_is_tried_on_all_images(
    ranked: tuple[Report, Path], unbalanced: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tasks.rank_layers.MANY_LAYERS", 1)
    monkeypatch.setattr("tasks.rank_layers._MOST", 1)
    monkeypatch.setattr("tasks.parts.onnx_graphs.foreign_branches.branching_nodes", lambda graph: ["if"])
    report = rank(unbalanced, tmp_path)
    assert (report.num_passes, report.left_out) == (len(ranked[0].layers) + 1, "")


def test_macs_are_those_of_an_independent_count(workshop: Any) -> None:
    from torch.utils.flop_counter import FlopCounterMode

    from tasks.parts.networks.checkpoint import load_checkpoint

    model, card = load_checkpoint(workshop.checkpoint)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(torch.zeros(1, 3, card.height, card.width))
    assert sum(conv_macs(read_graph(workshop.graph)).values()) == counter.get_total_flops() // 2


def test_a_quantized_graph_is_refused(workshop: Any, unbalanced: Any, tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match="already has Q/DQ"):
        rank(unbalanced, tmp_path, model=workshop.quantized)


def test_ranges_of_another_graph_are_refused(unbalanced: Any, tmp_path: Path) -> None:
    (tmp_path / "ranges.json").write_text(
        '{"activations": ["uint8"], "ranges": {"image": [-1, 1]}}', encoding="utf-8"
    )
    with pytest.raises(ArtifactError, match="no range"):
        rank(unbalanced, tmp_path, ranges=tmp_path / "ranges.json")
