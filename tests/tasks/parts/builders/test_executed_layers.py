"""What engines really run, from real engines of both CPU runtimes."""

import csv
from pathlib import Path

import pytest

from tasks.core.fingerprint import digest
from tasks.parts.builders.build import build
from tasks.parts.builders.executed_layers import UNKNOWN, ExecutedLayers
from tasks.parts.builders.graph_rewrites import fuse_activations
from tasks.parts.builders.report import EngineBuild
from tasks.parts.engines.manifest import ENGINE_FOLDER, GRAPH_FILE, LAYERS_FILE, read_engine_manifest
from tasks.parts.onnx_graphs.graph import read_graph, write_graph
from tasks.parts.onnx_graphs.macs import conv_macs
from tests.tasks.conftest import Workshop

TARGETS = ["cpu_onnxruntime", "cpu_openvino"]


GRAPH_FILES = {"cpu_onnxruntime": "engine.onnx", "cpu_openvino": GRAPH_FILE}


def built(
    workshop: Workshop, target: str, model: Path, out: Path
) -> tuple[ExecutedLayers, list[dict[str, str]]]:
    report: EngineBuild = build(workshop.target(target), model=model, images=workshop.images, out=out)
    assert report.executed is not None, report.reason
    with (out / ENGINE_FOLDER / LAYERS_FILE).open(encoding="utf-8") as file:
        return report.executed, list(csv.DictReader(file))


@pytest.mark.parametrize("target", TARGETS)
def test_float_engine_runs_every_mac_in_float(workshop: Workshop, tmp_path: Path, target: str) -> None:
    executed, rows = built(workshop, target, workshop.graph, tmp_path)
    assert executed.macs_share == {"f32": pytest.approx(1.0)} and executed.macs_share_quantized == 0
    assert executed.num_fused_nodes > 0  # at least the ReLUs
    given = read_graph(tmp_path / ENGINE_FOLDER / GRAPH_FILES[target])
    assert sum(int(row["macs"]) for row in rows) == sum(conv_macs(given).values())
    [stem] = [row for row in rows if row["nodes"].startswith("downsample.0.conv/Conv")]
    assert stem["nodes"].split()[1] == "downsample.0.relu/Relu"


def test_onnxruntime_engine_that_is_built_again_has_the_same_bytes(
    workshop: Workshop, tmp_path: Path
) -> None:
    """ONNX Runtime numbers and orders the layers that it inserts differently each time."""
    for model in (workshop.graph, workshop.quantized):
        outs = [tmp_path / f"{model.stem}-{number}" for number in range(4)]
        for out in outs:
            out.mkdir()
            built(workshop, "cpu_onnxruntime", model, out)
        assert len({digest(out / ENGINE_FOLDER) for out in outs}) == 1


@pytest.mark.parametrize("target", TARGETS)
def test_quantized_engine_runs_most_macs_in_int8(workshop: Workshop, tmp_path: Path, target: str) -> None:
    executed, rows = built(workshop, target, workshop.quantized, tmp_path)
    assert executed.int8_share_of_quantized is not None and executed.int8_share_of_quantized > 0.95
    in_int8 = executed.int8_share_of_quantized * executed.macs_share_quantized
    assert executed.macs_share["int8"] == pytest.approx(in_int8) and UNKNOWN not in executed.macs_share
    assert executed.num_conversions > 0  # the image is quantized somewhere
    assert {row["precision"] for row in rows if int(row["macs"])} <= {"int8", "f32"}


def test_engine_with_too_few_quantized_macs_in_int8_is_built_and_says_which_operators(
    workshop: Workshop, tmp_path: Path
) -> None:
    """No Q follows the last convolution of this graph, so ONNX Runtime computes it in float."""
    strict = workshop.target("cpu_onnxruntime", min_int8_macs_share=1.0)
    write_graph(fuse_activations(read_graph(workshop.quantized)), tmp_path / "model.onnx")
    report: EngineBuild = build(strict, model=tmp_path / "model.onnx", images=workshop.images, out=tmp_path)
    manifest = read_engine_manifest(tmp_path / ENGINE_FOLDER)
    assert report.executed is not None and [n.node for n in report.executed.not_in_int8] == [
        "classifier/Conv"
    ]
    assert (report.status, report.is_precision_ok, manifest.is_precision_ok) == ("built", False, False)
    assert (tmp_path / ENGINE_FOLDER / report.file).is_file() and report.agreement_db is not None
    macs = report.executed.not_in_int8[0].macs / 1e6
    assert f"Conv 'classifier/Conv' in f32 ({macs:.3g} MMACs)" in report.precision_note
    assert "expected 100.0% or more (target.cpu_onnxruntime.min_int8_macs_share)" in report.precision_note


def test_stem_that_the_target_leaves_in_float_is_not_missed(workshop: Workshop, tmp_path: Path) -> None:
    shares = []
    for is_float in (False, True):
        out = tmp_path / str(is_float)
        out.mkdir()
        target = workshop.target("cpu_onnxruntime", stem_in_float=is_float)
        executed = build(target, model=workshop.quantized, images=workshop.images, out=out).executed
        assert executed is not None and "downsample.0.conv/Conv" not in {n.node for n in executed.not_in_int8}
        shares.append(executed.macs_share_quantized)
    assert shares[1] < shares[0]
