"""The networks, peers and results of benchmarks/zoo.py, small."""

import json
import subprocess
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from benchmarks.zoo import (
    MOST_LAYERS,
    Settings,
    compare,
    conditions_of,
    key_of,
    layers_in_float,
    losses_of,
    measure,
    missing_files,
    open_record,
    tables,
    trained_file,
    without,
    write_record,
)
from benchmarks.zoo_networks import ZOO, ZooNetwork, conv_bn, new_network, num_parameters
from benchmarks.zoo_peers import PEERS, Request, nncf_settings, open_peer, quantized_by
from benchmarks.zoo_training import (
    Exporter,
    class_names,
    draw_images,
    export,
    learning_rate_factor,
    scenes_of,
    train,
    write_images,
)
from flows.params import compose_params
from tasks import import_onnx, prepare_data
from tasks.build_engine import build_engine
from tasks.core.config import typed_config
from tasks.parts.data.comparison import compare_with_labels
from tasks.parts.data.dataset import normalised_batches, open_images, open_labels, read_manifest
from tasks.parts.data.dataset_writer import SplitBatches, write_dataset
from tasks.parts.data.input_card import Task
from tasks.parts.onnx_graphs.graph import read_card_of_graph, read_graph
from tasks.parts.onnx_graphs.macs import conv_macs
from tests.tasks.conftest import Workshop, workshop

__all__ = ["workshop"]

SETTINGS = Settings(
    train_s=0.05, num_train=64, num_val=8, num_test=4, num_rounds=2, overrides=("debug=smoke",)
)
COUNTS = {"calibration": 3, "val": 4, "test": 2}


def tiny(num_classes: int) -> nn.Module:
    """A classifier of two layers."""
    return nn.Sequential(
        conv_bn(3, 8, 3, stride=4, activation=nn.ReLU),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(8, num_classes),
    )


TINY = ZooNetwork("Tiny", "none", tiny, 1e3, 10, side=32)


@pytest.mark.parametrize("name", ZOO)
def test_network_has_its_published_parameters_and_shape(name: str) -> None:
    spec = ZOO[name]
    network = new_network(name, spec.num_classes)
    assert num_parameters(network) == pytest.approx(spec.num_parameters, rel=0.02)
    side = 64 if spec.task is Task.classification else 32
    with torch.inference_mode():
        logits = network.eval()(torch.zeros(1, 3, side, side))
    maps = (side, side) if spec.task is Task.segmentation else ()
    assert logits.shape == (1, spec.num_classes, *maps)


def test_equal_seeds_give_equal_weights() -> None:
    one, same, other = (new_network("shufflenet_v2", 10, seed=seed) for seed in (0, 0, 1))
    weights = [next(network.parameters()) for network in (one, same, other)]
    assert torch.equal(weights[0], weights[1]) and not torch.equal(weights[0], weights[2])


@pytest.mark.slow
@pytest.mark.parametrize("name", ZOO)
def test_files_of_both_exporters_are_imported(name: str, tmp_path: Path) -> None:
    spec = replace(ZOO[name], side=64 if name != "segformer_b0" else 32)
    scenes = scenes_of(spec.task, {})
    network, classes = new_network(name, 10), tuple(class_names(spec.task, scenes))
    if spec.task is Task.segmentation:
        network = new_network(name, len(classes))
    data = blank_data(tmp_path / "data", spec, classes)
    section = compose_params(["model=onnx", "model.path=x.onnx", "data=images"])["import_onnx"]
    cfg = typed_config(import_onnx.Config, section, "import_onnx")
    macs = set()
    for exporter in Exporter:
        file, out = tmp_path / f"{exporter}.onnx", tmp_path / exporter
        out.mkdir()
        export(network.eval(), file, exporter, side=spec.side)
        report = import_onnx.import_onnx(cfg, model=file, data=data, out=out)
        assert (report.task, report.num_classes, report.max_batch) == (spec.task, len(classes), None)
        macs.add(report.macs)
    assert len(macs) == 1 and macs.pop() > 1e6


def blank_data(folder: Path, spec: ZooNetwork, classes: tuple[str, ...]) -> Path:
    """A data set of black images."""
    images_NHWC = np.zeros((1, spec.side, spec.side, 3), np.uint8)
    is_masks = spec.task is Task.segmentation
    labels = images_NHWC[..., 0] if is_masks else np.zeros(1, np.uint16)
    splits = {
        split: SplitBatches(1, iter([(images_NHWC, labels)]))
        for split in ("train", "val", "test", "calibration")
    }
    folder.mkdir()
    write_dataset(
        folder / "dataset",
        task=spec.task,
        classes=classes,
        height=spec.side,
        width=spec.side,
        source="images",
        splits=splits,
    )
    return folder / "dataset"


@pytest.mark.parametrize("task", list(Task))
def test_pipeline_reads_the_images_as_they_were_drawn(task: Task, tmp_path: Path) -> None:
    write_images(tmp_path / "mine", task, 32, COUNTS)
    source = "class_folder" if task is Task.classification else "folder"
    overrides = ["model=onnx", "model.path=x.onnx", f"data={source}"]
    overrides += ["prepare_data.height=32", "prepare_data.width=32"]
    cfg = typed_config(prepare_data.Config, compose_params(overrides)["prepare_data"], "prepare_data")
    (tmp_path / "out").mkdir()
    prepare_data.prepare_data(cfg, root=tmp_path / "mine", out=tmp_path / "out")
    data = tmp_path / "out" / "dataset"
    assert read_manifest(data).counts == COUNTS | {"train": COUNTS["calibration"]}
    assert read_manifest(data).classes == tuple(class_names(task, scenes_of(task, {})))
    [(images_NHWC, labels)] = list(draw_images("val", task, scenes_of(task, COUNTS), 32))
    found = {
        image.tobytes(): label
        for image, label in zip(open_images(data, "val"), open_labels(data, "val", task), strict=True)
    }
    for image_HWC, label in zip(images_NHWC, labels, strict=True):
        assert np.array_equal(found[image_HWC.tobytes()], label)


def test_learning_rate_rises_and_falls_to_zero() -> None:
    rates = [learning_rate_factor(progress) for progress in (0.0, 0.025, 0.05, 0.525, 1.0, 1.2)]
    assert rates == pytest.approx([0.01, 0.5, 1.0, 0.5, 0.0, 0.0])


def test_training_lowers_the_loss_and_repeats() -> None:
    torch.manual_seed(0)
    network = tiny(10)
    started = [parameter.clone() for parameter in network.parameters()]
    found = train(network, TINY, num_images=32, budget_s=0.3)
    assert found.num_steps > 1 and found.loss < 2.3 and not network.training  # log(10) = 2.303
    assert not torch.equal(started[0], next(network.parameters()))


def test_trained_network_is_kept_until_the_settings_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(ZOO, "tiny", TINY)
    file, first = trained_file(tmp_path, "tiny", Exporter.torchscript, SETTINGS)
    content = file.read_bytes()
    assert trained_file(tmp_path, "tiny", Exporter.torchscript, SETTINGS) == (file, first)
    file.unlink()  # exported again from the kept weights
    assert trained_file(tmp_path, "tiny", Exporter.torchscript, SETTINGS)[0].read_bytes() == content
    longer = replace(SETTINGS, num_train=32, train_s=0.1)
    assert trained_file(tmp_path, "tiny", Exporter.torchscript, longer)[0].read_bytes() != content


def test_pipeline_without_time_is_a_fault(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ZOO, "tiny", TINY)
    row = measure(tmp_path, "tiny", Exporter.torchscript, SETTINGS, deadline=time.monotonic(), peer_s=None)
    assert row["fault"] == "the pipeline was not finished after 0 s" and row["engines"] == []
    assert missing_files([row], ["tiny"], ["torchscript"]) == [("tiny", "torchscript")]


def engine(variant: str, target: str = "cpu_openvino", **fields: Any) -> dict[str, Any]:
    """An engine in the results, before the race."""
    row = {"variant": variant, "target": target, "verdict": "ACCEPT", "picked": False, "score": 0.9}
    row |= {"score_rel_loss": 0.01, "score_rel_loss_low": 0.0, "score_rel_loss_high": 0.02}
    row |= {"precision": "int8", "macs_share": {"int8": 0.9, "f32": 0.1}, "int8_share_of_quantized": 0.95}
    return row | {"float_layers": []} | fields


def peer(name: str, standing: str | None, target: str = "cpu_openvino") -> dict[str, Any]:
    """A tool in the results, before the race."""
    row: dict[str, Any] = {"name": name, "target": target, "fault": "" if standing else "failed"}
    loss = {"rel_loss": 0.01, "low": 0.0, "high": 0.015}
    return row if standing is None else row | {"standing": standing, "score": 0.89, "loss": loss}


def bursts_of(*rows: dict[str, Any], milliseconds: tuple[float, ...]) -> dict[str, list[list[float]]]:
    """Ten rounds; every row shares their noise, and one latency of each burst is disturbed."""
    return {
        key_of(row): [[p50 * (1 + 0.01 * index)] * 2 + [9 * p50] for index in range(10)]
        for row, p50 in zip(rows, milliseconds, strict=True)
    }


def test_pick_is_compared_with_the_fastest_tool_that_holds_the_gate() -> None:
    engines = [
        engine("imported"),
        engine("imported_ptq", picked=True),
        engine("imported_partial", score=None),
    ]
    engines.append(engine("imported", "cpu_onnxruntime"))
    tools = [peer("lossy", "beyond"), peer("slow", "within"), peer("fast", "within"), peer("broken", None)]
    raced = [*engines[:2], engines[3], *tools[:3]]
    found = compare(engines, tools, bursts_of(*raced, milliseconds=(4.0, 2.0, 5.0, 0.5, 3.0, 1.6)))
    ptq = found["engines"][1]
    assert ptq["time_vs_float"] == {"value": 0.5, "low": 0.5, "high": 0.5}
    assert ptq["latency_ms_p50"] == pytest.approx(2.14)  # of 20 sound and 10 disturbed latencies
    assert found["engines"][2]["latency_ms_p50"] is None and found["engines"][2]["time_vs_float"] is None
    assert found["peers"][0]["time_vs_float"]["value"] == 0.125
    on_openvino, on_onnxruntime = found["against_peers"]
    assert (on_openvino["pick"], on_openvino["fastest_peer"]) == ("imported_ptq", "fast")
    assert on_openvino["time_vs_peer"]["value"] == 1.25
    assert on_onnxruntime == {
        "target": "cpu_onnxruntime",
        "pick": None,
        "fastest_peer": None,
        "time_vs_peer": None,
    }


def result(network: str, exporter: str, fault: str = "") -> dict[str, Any]:
    """The results of a file."""
    rows: dict[str, list[dict[str, Any]]] = {"engines": [], "peers": [], "against_peers": []}
    if not fault:
        layers = [
            {"node": name, "op_type": "Conv", "macs_share": 0.05, "reason": "left in float by the target"}
            for name in ("stem", "second")
        ]
        engines = [engine("imported"), engine("imported_ptq", picked=True, float_layers=layers)]
        tools = [peer("NNCF mixed", "within"), peer("NNCF accuracy control", None)]
        rows = compare(engines, tools, bursts_of(*engines, tools[0], milliseconds=(4.0, 2.0, 1.6)))
    return {"network": network, "exporter": exporter, "fault": fault, "has_peers": True} | rows


def test_tables_name_every_engine_tool_reason_and_fault() -> None:
    text = tables(
        [result("resnet_18", "torchscript", "import_onnx refused it"), result("mobilenet_v2", "dynamo")]
    )
    ratio = "0.500 (0.500 to 0.500)"
    start = "| MobileNetV2, dynamo | cpu_openvino"
    assert (
        f"{start} | imported_ptq | 0.9000 | 1.00 % (0.00 to 2.00) | {ratio} | 95.0 %, 90.0 % | ACCEPT, picked |"
        in text
    )
    assert (
        f"{start} | NNCF mixed | 0.8900 | 1.00 % (0.00 to 1.50) | 0.400 (0.400 to 0.400) | - | gate: within |"
        in text
    )
    assert f"{start} | NNCF accuracy control | - | - | - | - | failed |" in text
    assert f"{start} | imported_ptq | NNCF mixed | 1.250 (1.250 to 1.250) |" in text
    assert (
        "imported_ptq on cpu_openvino, MACs in float: left in float by the target: 2 layers, 10.0 %" in text
    )
    assert "- ResNet-18, torchscript: import_onnx refused it" in text


def test_second_start_measures_what_is_missing_or_failed(tmp_path: Path) -> None:
    results, conditions = tmp_path / "zoo.json", {"code": {"tasks": "ab"}, "train_s": 1.0}
    record = open_record(results, conditions)
    record["rows"] = [result("resnet_18", "dynamo", "killed"), result("mobilenet_v2", "dynamo")]
    write_record(results, record)
    again = open_record(results, conditions)
    assert again == json.loads(json.dumps(record)) and [file.name for file in tmp_path.iterdir()] == [
        "zoo.json"
    ]
    left = missing_files(again["rows"], ["mobilenet_v2", "resnet_18"], ["dynamo", "torchscript"])
    assert left == [("mobilenet_v2", "torchscript"), ("resnet_18", "dynamo"), ("resnet_18", "torchscript")]
    assert [row["network"] for row in without(again["rows"], "resnet_18", "dynamo")] == ["mobilenet_v2"]
    with pytest.raises(SystemExit, match=r"measured with other code than there are now. Delete it"):
        open_record(results, conditions | {"code": {"tasks": "cd"}})


def test_workspace_with_other_code_is_refused(tmp_path: Path) -> None:
    for name in ("tasks", "flows", "conf"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "one").write_text(name, encoding="utf-8")
    git = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b"]
    for command in (["init", "-q"], ["add", "."], ["commit", "-q", "-m", "one"]):
        subprocess.run([*git, *command], check=True)
    with pytest.raises(SystemExit, match="has another tasks, flows, conf than the last commit"):
        conditions_of(tmp_path, SETTINGS)


@pytest.mark.parametrize("variant", ["quantized", "float"])
def test_layers_in_float_have_a_reason(variant: str, workshop: Workshop, tmp_path: Path) -> None:
    graph, stage = tmp_path / "variant" / "model.onnx", tmp_path / "build"
    for folder in (graph.parent, stage):
        folder.mkdir()
    graph.write_bytes((workshop.quantized if variant == "quantized" else workshop.graph).read_bytes())
    stem, *others = conv_macs(read_graph(graph))
    kept = {"node": stem, "reason": "worst of all"}
    (graph.parent / "report.json").write_text(json.dumps({"float_layers": [kept]}), encoding="utf-8")
    target = workshop.target("cpu_onnxruntime")
    report = build_engine(target, model=graph, images=workshop.images, out=stage)
    reasons = {layer["node"]: layer["reason"] for layer in layers_in_float(stage, report, graph)}
    if variant == "quantized":  # the target has stem_in_float
        assert reasons[stem] == "left in float by the target" and len(reasons) < len(others)
    else:
        assert reasons.get(stem, "worst of all") == "worst of all"
        assert set(reasons.values()) <= {"worst of all", "not quantized in the variant's graph"}
        assert len(reasons) == min(MOST_LAYERS, 1 + len(others))


@pytest.mark.parametrize("name", ["quantize_static QDQ", "quantize_static QOperator"])
def test_static_quantization_of_onnxruntime_is_measured(
    name: str, workshop: Workshop, tmp_path: Path
) -> None:
    check_peer(name, workshop, tmp_path / "peer.onnx")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["NNCF mixed", "NNCF accuracy control"])
def test_quantization_of_nncf_is_measured(name: str, workshop: Workshop, tmp_path: Path) -> None:
    pytest.importorskip("nncf")
    assert nncf_settings(workshop.graph, "MIXED")["model_type"] is None  # no attention
    check_peer(name, workshop, tmp_path / "peer.xml")


def check_peer(name: str, workshop: Workshop, out: Path) -> None:
    """Quantize the tiny graph: the peer quantizes, and loses nothing against itself."""
    PEERS[name].quantize(Request(workshop.graph, workshop.data, 0.02, out))
    network = open_peer(out, replace(workshop.target(PEERS[name].target), max_batch=1))
    card = read_card_of_graph(read_graph(workshop.graph))
    references = {}
    for split in ("val", "test"):
        batches = normalised_batches(open_images(workshop.data, split), card, 1)
        classes = np.concatenate([network(image_NCHW).argmax(axis=1) for image_NCHW in batches])
        labels = np.asarray(open_labels(workshop.data, split, card.task))
        references[split] = compare_with_labels(classes, labels, len(card.classes), card.task)
    found = losses_of(network, workshop.graph, workshop.data, references, 0.02)
    assert found["loss"]["rel_loss"] == 0.0 and found["unseen_loss"]["rel_loss"] == 0.0
    assert found["score"] == references["val"].score and found["unseen_score"] == references["test"].score
    image_NCHW = next(iter(normalised_batches(open_images(workshop.data, "test"), card, 1)))
    plain = open_peer(workshop.graph, workshop.target("cpu_onnxruntime"))
    assert 0 < float(np.abs(plain(image_NCHW) - network(image_NCHW)).max()) < 10


@pytest.mark.slow
def test_tool_that_fails_or_is_too_slow_says_so(workshop: Workshop, tmp_path: Path) -> None:
    name = "quantize_static QDQ"
    _, seconds, fault = quantized_by(name, workshop.graph, workshop.data, 0.02, tmp_path, timeout_s=0.1)
    assert (seconds, fault) == (0.1, "not finished after 0 s")
    fault = quantized_by(name, tmp_path / "no.onnx", workshop.data, 0.02, tmp_path, timeout_s=60)[2]
    assert "no.onnx" in fault
