import csv
import dataclasses
import json
import shutil
import tracemalloc

import numpy as np
import onnx
import pytest
from onnx import helper

import tasks.validate as validate_module
from tasks.build_engine import build_engine
from tasks.core.errors import ArtifactError, GateFailed
from tasks.parts.data.answers import ANSWERS_FILE, Answers, read_answers, write_answers
from tasks.parts.data.class_table import IGNORE_INDEX
from tasks.parts.data.comparison import RESULTS_FILE, boundaries_of, compare_boundaries, read_results
from tasks.parts.data.dataset import MANIFEST_FILE, normalise, open_split, read_manifest
from tasks.parts.data.metrics import confusion_matrix, scores
from tasks.parts.engines.manifest import read_engine_manifest, sha256_of, write_engine_manifest
from tasks.validate import Config, validate
from tests.tasks.conftest import AOTINDUCTOR

CONFIG = Config(split="test", unseen_split="val", batch_size=4)


@pytest.mark.parametrize("target", ["cpu_torch", "cpu_onnxruntime", "cpu_openvino", AOTINDUCTOR])
def test_scores_are_those_of_the_network_itself(workshop, tmp_path, target):
    import torch

    from tasks.parts.networks.checkpoint import load_checkpoint

    report = validate(CONFIG, engine=workshop.engine("float", target), data=workshop.data, out=tmp_path)
    network, card = load_checkpoint(workshop.checkpoint)
    images_NHWC, masks_NHW = open_split(workshop.data, "test")
    with torch.inference_mode():
        logits_NCHW = network(torch.from_numpy(normalise(images_NHWC, card.mean, card.std)))
    predicted_NHW = logits_NCHW.argmax(1).numpy()
    expected = scores(confusion_matrix(predicted_NHW, masks_NHW, 3))
    on_boundaries = compare_boundaries(predicted_NHW, masks_NHW, 3)
    assert report.accuracy.miou == pytest.approx(expected.miou, abs=1e-3)
    assert report.accuracy.pixel_accuracy == pytest.approx(expected.pixel_accuracy, abs=1e-3)
    assert report.accuracy.boundary_iou == pytest.approx(on_boundaries.score, abs=2e-3)
    assert (
        list(report.accuracy.iou)
        == list(report.accuracy.boundary_iou_by_class)
        == ["background", "zero", "one"]
    )
    assert report.num_images == 6
    results = read_results(tmp_path / RESULTS_FILE, "test")
    assert results.score == pytest.approx(report.accuracy.miou) and results.num_images == 6
    assert read_results(tmp_path / RESULTS_FILE, "val").num_images > 0
    assert read_results(tmp_path / RESULTS_FILE, boundaries_of("val")).num_images > 0
    written = read_results(tmp_path / RESULTS_FILE, boundaries_of("test"))
    assert written.score == pytest.approx(report.accuracy.boundary_iou) and written.num_images == 6
    assert report.engine_sha256 == read_engine_manifest(workshop.engine("float", target)).sha256


def test_confusion_counts_every_pixel_once_whatever_the_batch(workshop, tmp_path):
    engine = workshop.engine("quantized", "cpu_onnxruntime")
    tables = []
    for batch_size in (1, 4, 100):
        validate(Config("test", "val", batch_size), engine=engine, data=workshop.data, out=tmp_path)
        with (tmp_path / "confusion.csv").open(encoding="utf-8") as file:
            rows = list(csv.reader(file))
        assert rows[0][1:] == [row[0] for row in rows[1:]] == ["background", "zero", "one"]
        tables.append(np.array([row[1:] for row in rows[1:]], int))
    assert tables[0].sum() == 6 * 64 * 96
    np.testing.assert_array_equal(tables[0], tables[1])
    np.testing.assert_array_equal(tables[0], tables[2])


def test_memory_does_not_grow_with_the_batch_beyond_its_limit_b10(workshop, tmp_path, monkeypatch):
    """One image of 64 x 96 with 3 classes fits into the limit, so that batches of 6 take what single images take."""
    engine = workshop.engine("float", "cpu_onnxruntime")
    monkeypatch.setattr(validate_module, "_MAX_BYTES", 64 * 96 * (3 * 4 + 64))
    peaks = {}
    for batch_size in (1, 1, 6):  # the first run also imports
        tracemalloc.start()
        report = validate(Config("test", "val", batch_size), engine=engine, data=workshop.data, out=tmp_path)
        peaks[batch_size] = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert report.num_images == 6
    assert peaks[6] < 1.2 * peaks[1]


def test_answers_are_the_masks_of_the_deciding_split(workshop, tmp_path):
    import torch

    from tasks.parts.networks.checkpoint import load_checkpoint

    validate(CONFIG, engine=workshop.engine("float", "cpu_torch"), data=workshop.data, out=tmp_path)
    network, card = load_checkpoint(workshop.checkpoint)
    images_NHWC, _ = open_split(workshop.data, "test")
    with torch.inference_mode():
        logits_NCHW = network(torch.from_numpy(normalise(images_NHWC, card.mean, card.std)))
    assert np.array_equal([*read_answers(tmp_path / ANSWERS_FILE)], logits_NCHW.argmax(1).numpy())


@pytest.mark.parametrize("num_classes", [2, 19, 300])
def test_answers_are_kept_at_their_full_size_c5(num_classes, tmp_path):
    masks_NHW = np.random.default_rng(0).integers(0, num_classes, (3, 100, 201))
    for answers_N in (masks_NHW, masks_NHW[:, 0, 0]):
        answers = Answers.of(num_classes)
        answers.add(answers_N[:2])
        answers.add(answers_N[2:])
        write_answers(tmp_path / ANSWERS_FILE, answers)
        found = read_answers(tmp_path / ANSWERS_FILE)
        assert len(found) == 3 and np.array_equal([*found], answers_N)
        assert np.array_equal(found.unpack(2), answers_N[2])
    (tmp_path / ANSWERS_FILE).write_bytes(b"PK")
    with pytest.raises(ArtifactError, match=r"no answers .* Run validate again"):
        read_answers(tmp_path / ANSWERS_FILE)


def test_images_without_labels_count_nowhere_c5(workshop, tmp_path):
    data = tmp_path / "data"
    shutil.copytree(workshop.data, data)
    masks_NHW = np.load(data / "train_masks.npy")
    masks_NHW[-3:] = IGNORE_INDEX
    np.save(data / "train_masks.npy", masks_NHW)
    fields = json.loads((data / MANIFEST_FILE).read_text(encoding="utf-8"))
    (data / MANIFEST_FILE).write_text(json.dumps(fields | {"num_unlabelled": 3}), encoding="utf-8")
    engine = workshop.engine("float", "cpu_onnxruntime")
    report = validate(Config("train", "val", 2), engine=engine, data=data, out=tmp_path)
    assert report.num_images == len(read_answers(tmp_path / ANSWERS_FILE)) == len(masks_NHW) - 3
    assert read_results(tmp_path / RESULTS_FILE, "train").num_images == report.num_images
    whole = validate(Config("train", "val", 2), engine=engine, data=workshop.data, out=tmp_path)
    assert whole.num_images == len(masks_NHW)


def test_engine_that_was_skipped_gives_a_report_with_the_reason(workshop, tmp_path):
    (tmp_path / "build").mkdir()
    target = workshop.target("cpu_openvino_bf16", cpu_flags=["avx_imaginary"])
    build_engine(target, model=workshop.graph, images=workshop.images, out=tmp_path / "build")
    report = validate(CONFIG, engine=tmp_path / "build" / "engine", data=workshop.data, out=tmp_path)
    assert (report.status, report.accuracy, report.engine_sha256) == ("skipped", None, "")
    assert "avx_imaginary" in report.reason
    assert not (tmp_path / "confusion.csv").exists()


def test_other_classes_are_refused_with_both_lists(workshop, tmp_path):
    data = tmp_path / "dataset"
    shutil.copytree(workshop.data, data)
    manifest = read_manifest(data)
    text = (data / "manifest.json").read_text(encoding="utf-8").replace('"zero"', '"seven"')
    (data / "manifest.json").write_text(text, encoding="utf-8")
    assert read_manifest(data).classes != manifest.classes
    with pytest.raises(ArtifactError, match=r"background, zero, one.*background, seven, one"):
        validate(CONFIG, engine=workshop.engine("float", "cpu_onnxruntime"), data=data, out=tmp_path)


def test_nan_logits_fail_with_the_index_of_the_image(workshop, tmp_path):
    engine = tmp_path / "engine"
    shutil.copytree(workshop.engine("float", "cpu_onnxruntime"), engine)
    graph = onnx.load(engine / "engine.onnx")
    logits = graph.graph.output[0].name
    graph.graph.node[-1].output[0] = "finite"
    for name in ("ReduceMax", "ReduceMin"):
        graph.graph.node.append(helper.make_node(name, ["image"], [name], keepdims=1))
    # Reductions go over the whole batch: image by image, a constant image gives 0 / 0.
    graph.graph.node.append(helper.make_node("Sub", ["ReduceMax", "ReduceMin"], ["range"]))
    graph.graph.node.append(helper.make_node("Div", ["range", "range"], ["one_or_nan"]))
    graph.graph.node.append(helper.make_node("Mul", ["finite", "one_or_nan"], [logits]))
    (engine / "engine.onnx").write_bytes(graph.SerializeToString())
    manifest = read_engine_manifest(engine)
    write_engine_manifest(engine, dataclasses.replace(manifest, sha256=sha256_of(engine / "engine.onnx")))
    data = tmp_path / "dataset"
    shutil.copytree(workshop.data, data)
    card = manifest.card
    images_NHWC = np.load(data / "test_images.npy")
    images_NHWC[4] = 0
    np.save(data / "test_images.npy", images_NHWC)
    same_mean = dataclasses.replace(card, mean=(0.5, 0.5, 0.5), std=(0.25, 0.25, 0.25))
    write_engine_manifest(
        engine, dataclasses.replace(manifest, sha256=sha256_of(engine / "engine.onnx"), card=same_mean)
    )
    with pytest.raises(GateFailed, match="NaN or infinity in the logits of image 4 of split 'test'"):
        validate(Config("test", "val", 1), engine=engine, data=data, out=tmp_path)
