"""What engines really run, from real engines of both CPU runtimes."""

import csv
from pathlib import Path

import pytest

from tasks.parts.builders.build import build
from tasks.parts.builders.executed_layers import UNKNOWN, ExecutedLayers
from tasks.parts.builders.report import EngineBuild
from tasks.parts.engines.manifest import ENGINE_FOLDER, LAYERS_FILE
from tasks.parts.onnx_graphs.graph import read_graph
from tasks.parts.onnx_graphs.macs import conv_macs
from tests.tasks.conftest import Workshop

TARGETS = ["cpu_onnxruntime", "cpu_openvino"]


def built(
    workshop: Workshop, target: str, model: Path, out: Path
) -> tuple[ExecutedLayers, list[dict[str, str]]]:
    report: EngineBuild = build(workshop.target(target), model=model, out=out)
    assert report.executed is not None, report.reason
    with (out / ENGINE_FOLDER / LAYERS_FILE).open(encoding="utf-8") as file:
        return report.executed, list(csv.DictReader(file))


@pytest.mark.parametrize("target", TARGETS)
def test_float_engine_runs_every_mac_in_float(workshop: Workshop, tmp_path: Path, target: str) -> None:
    executed, rows = built(workshop, target, workshop.graph, tmp_path)
    assert executed.macs_share == {"f32": pytest.approx(1.0)} and executed.macs_share_quantized == 0
    assert executed.num_fused_nodes > 0  # at least the ReLUs
    assert sum(int(row["macs"]) for row in rows) == sum(conv_macs(read_graph(workshop.graph)).values())
    [stem] = [row for row in rows if row["nodes"].startswith("downsample.0.conv/Conv")]
    assert stem["nodes"].split()[1] == "downsample.0.relu/Relu"


@pytest.mark.parametrize("target", TARGETS)
def test_quantized_engine_runs_most_macs_in_int8(workshop: Workshop, tmp_path: Path, target: str) -> None:
    executed, rows = built(workshop, target, workshop.quantized, tmp_path)
    assert executed.macs_share_quantized == pytest.approx(1.0)
    assert executed.macs_share["int8"] > 0.6 and UNKNOWN not in executed.macs_share
    assert executed.num_conversions > 0  # the image is quantized somewhere
    assert {row["precision"] for row in rows if int(row["macs"])} <= {"int8", "f32"}
