"""How an engine is held against its graph where a network answers next to nothing."""

from pathlib import Path

import numpy as np
import onnx
import pytest

from tasks.build_engine import build_engine
from tasks.core.errors import BuildFailed
from tasks.parts.builders.agreement import compare_answers, measure_agreement, read_probe_images
from tasks.parts.builders.contract import GraphSource, read_source
from tasks.parts.data.input_card import InputCard, Task
from tasks.parts.engines.manifest import TWIN_FOLDER, read_engine_manifest
from tasks.parts.engines.target import Reads
from tasks.parts.onnx_graphs.graph import CARD_KEY, write_graph
from tests.tasks.conftest import Workshop

TRIED = (0, 11, 23, 35)
"""The images of thirty-six that an engine is tried on."""


def write_values(folder: Path, offset: float = 0.0) -> tuple[Path, Path]:
    """Write a network whose answers are the pixels and an offset, and images of which those tried are dark."""
    graph = onnx.parser.parse_model(
        '<ir_version: 10, opset_import: ["" : 20]> g (float[N, 3, 8, 8] image) => (float[N, 3, 8, 8] values) '
        f"<float offset = {{{offset}}}> {{ pixels = Relu(image) values = Add(pixels, offset) }}"
    )
    card = InputCard((), (0.0,) * 3, (1.0,) * 3, 8, 8, task=Task.values, values_shape=(3, 8, 8))
    entry = graph.metadata_props.add()
    entry.key, entry.value = CARD_KEY, card.to_json()
    write_graph(graph, folder / "model.onnx")
    images_NHWC = np.full((36, 8, 8, 3), 204, np.uint8)
    images_NHWC[list(TRIED)] = 1
    np.save(folder / "images.npy", images_NHWC)
    return folder / "model.onnx", folder / "images.npy"


def test_noise_counts_against_what_a_network_usually_answers(workshop: Workshop, tmp_path: Path) -> None:
    model, images = write_values(tmp_path)
    target = workshop.target("cpu_onnxruntime", max_batch=1)
    source = read_source(target, model, images)
    assert isinstance(source, GraphSource) and source.usual_power == 0
    expected_NCHW = source.compute_logits(target)
    assert float(np.abs(expected_NCHW).max()) < 0.01
    assert 0.4 < source.with_logits(target).usual_power < 0.64

    (tmp_path / "out").mkdir()
    report = build_engine(target, model=model, images=images, out=tmp_path / "out")
    assert report.status == "built", report.reason
    engine = tmp_path / "out" / "engine"
    manifest = read_engine_manifest(engine)
    noisy_NCHW = expected_NCHW + np.float32(1e-4)
    images_NCHW = read_probe_images(images, source.card)
    with pytest.raises(BuildFailed, match=r"agree with the graph by 3\d\.\d dB only"):
        measure_agreement(noisy_NCHW, images_NCHW, manifest, engine / manifest.file)
    found_db, _ = measure_agreement(
        noisy_NCHW, images_NCHW, manifest, engine / manifest.file, usual_power=source.usual_power
    )
    assert found_db == pytest.approx(10 * np.log10(source.usual_power / 1e-8), abs=0.1)


def test_images_for_which_a_graph_picks_other_values_of_its_own_do_not_count(
    workshop: Workshop, tmp_path: Path
) -> None:
    model, images = write_values(tmp_path)
    target = workshop.target("cpu_onnxruntime", max_batch=8)
    (tmp_path / "out").mkdir()
    report = build_engine(target, model=model, images=images, out=tmp_path / "out")
    assert report.status == "built", report.reason
    engine, source = tmp_path / "out" / "engine", read_source(target, model, images)
    manifest = read_engine_manifest(engine)
    assert isinstance(source, GraphSource)
    expected_NCHW = source.compute_logits(target).copy()

    def measured(choice: str = "TopK 'queries'") -> float:
        images_NCHW = read_probe_images(images, source.card)
        return measure_agreement(expected_NCHW, images_NCHW, manifest, engine / manifest.file, choice=choice)[
            0
        ]

    expected_NCHW[[0, 2]] *= -1
    assert measured() > 100
    with pytest.raises(BuildFailed, match=r"The runtime does not compute what the graph describes: "):
        measured(choice="")
    expected_NCHW[1] *= -1
    with pytest.raises(BuildFailed, match=r"rounds otherwise and TopK 'queries' then picks other ones"):
        measured()


def test_values_on_frames_may_differ_by_the_noise_of_int8_where_the_graph_is_quantized(
    workshop: Workshop, tmp_path: Path
) -> None:
    target = workshop.target(
        "cpu_onnxruntime", reads=Reads.frames, max_batch=1, min_agreement_db=60.0, min_agreement_int8_db=20.0
    )
    made = []
    for offset in (0.0, 0.02):
        folder = tmp_path / str(offset)
        folder.mkdir()
        model, images = write_values(folder, offset)
        report = build_engine(target, model=model, images=images, out=folder)
        assert report.status == "built", report.reason
        made.append(folder / "engine")
    (manifest, plain), frames = (
        map(read_engine_manifest, (made[0], made[1] / TWIN_FOLDER)),
        np.load(images)[1:3],
    )
    files = manifest, made[0] / manifest.file, plain, made[1] / TWIN_FOLDER / plain.file
    assert compare_answers(frames, *files, is_int8=True) is None
    with pytest.raises(BuildFailed, match=r"by 3\d\.\d dB only, expected 60 dB or more"):
        compare_answers(frames, *files)


def test_classes_need_no_further_images(workshop: Workshop) -> None:
    source = read_source(workshop.target("cpu_onnxruntime"), workshop.graph, workshop.images)
    assert isinstance(source, GraphSource) and source.more_NCHW is None
