import csv
from pathlib import Path
from typing import Any

import pytest
import torch

from tasks.core.errors import ArtifactError
from tasks.parts.onnx_graphs.graph import read_graph
from tasks.parts.onnx_graphs.macs import conv_macs
from tasks.rank_layers import Config, Report, rank_layers

OP_TYPES = ["Conv", "Add", "Concat", "AveragePool", "Resize"]
CONFIG = Config(op_types=OP_TYPES, num_images=4, num_val_images=0, batch_size=2)


@pytest.fixture(scope="module")
def ranked(unbalanced: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[Report, Path]:
    out = tmp_path_factory.mktemp("ranking")
    return rank(unbalanced, out), out


def rank(files: Any, out: Path, **changes: Path) -> Report:
    inputs = {"model": files.graph, "ranges": files.ranges, "data": files.data} | changes
    return rank_layers(CONFIG, **inputs, out=out)


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
