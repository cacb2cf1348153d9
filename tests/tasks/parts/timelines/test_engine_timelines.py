"""Real engines, run and recorded with the profiler of their runtime."""

import csv
import itertools
from collections import Counter

import pytest

from tasks.core.errors import ArtifactError, DataError
from tasks.parts.engines.runtimes import Runtime
from tasks.parts.networks.checkpoint import load_checkpoint
from tasks.parts.timelines.engine import INFERENCES, LAYERS, engine_trace, record_engine
from tasks.parts.timelines.openvino import REMAINDER
from tests.tasks.conftest import AOTINDUCTOR

ENGINES = [
    ("float", "cpu_openvino"),
    ("quantized", "cpu_openvino"),
    ("float", "cpu_onnxruntime"),
    ("quantized", "cpu_onnxruntime"),
    ("float", "cpu_torch"),
]


@pytest.fixture(scope="module")
def recorded(workshop):
    """The timelines of all engines, by variant and target."""
    return {key: record_engine(workshop.engine(*key), num_inferences=3, batch_size=1) for key in ENGINES}


def table_of(engine):
    return {row["layer"]: row for row in csv.DictReader((engine / "layers.csv").open())}


@pytest.mark.parametrize("key", ENGINES)
def test_layers_lie_in_their_inference_and_do_not_overlap(recorded, key):
    timeline = recorded[key]
    assert len(timeline.inferences) == 3
    moment_us = -1e30
    for inference in timeline.inferences:
        assert moment_us <= inference.start_us
        moment_us = inference.start_us
        for layer in inference.layers:
            assert moment_us <= layer.start_us and layer.duration_us >= 0, layer
            moment_us = layer.end_us
        assert moment_us <= inference.end_us + 1e-6
    assert 0 < timeline.share_in_layers <= 1 + 1e-9


@pytest.mark.parametrize("key", [key for key in ENGINES if key[1] != "cpu_torch"])
def test_every_layer_of_the_engine_is_once_in_each_inference_with_what_the_table_says(
    workshop, recorded, key
):
    table = table_of(workshop.engine(*key))
    for inference in recorded[key].inferences:
        layers = [layer for layer in inference.layers if layer.name != REMAINDER]
        counts = Counter(layer.name for layer in layers)
        assert set(table) <= set(counts) and set(counts.values()) == {1}
        for layer in layers:
            row = table.get(layer.name)
            if row is not None:
                assert layer.details["kind"] == row["kind"]
                assert layer.details["precision"] == row["precision"]
                assert layer.details["onnx_nodes"] == row["nodes"].split()
    assert len({tuple(layer.name for layer in each.layers) for each in recorded[key].inferences}) == 1


def test_int8_and_float_layers_can_be_told_apart(recorded):
    for target in ("cpu_openvino", "cpu_onnxruntime"):
        layers = recorded["quantized", target].inferences[0].layers
        assert {"int8", "f32"} <= {layer.details.get("precision") for layer in layers}


def test_openvino_says_that_its_layers_are_laid_end_to_end_and_shows_the_rest(recorded):
    timeline = recorded["float", "cpu_openvino"]
    for inference in timeline.inferences:
        *layers, rest = inference.layers
        assert rest.name == REMAINDER and rest.end_us == pytest.approx(inference.end_us)
        moment_us = inference.start_us
        for layer in layers:
            assert layer.start_us == pytest.approx(moment_us)
            assert layer.details["start"] == "laid end to end: OpenVINO reports durations only"
            moment_us += layer.duration_us
    assert engine_trace(timeline).notes["layers"].startswith("laid end to end: OpenVINO")


def test_openvino_times_of_one_inference_are_free_of_the_slow_first_one(recorded):
    """OpenVINO reports means over all inferences; the first of this engine, in which it compiles, takes ms."""
    for inference in recorded["float", "cpu_openvino"].inferences:
        in_layers_us = sum(layer.duration_us for layer in inference.layers if layer.name != REMAINDER)
        assert 0 < in_layers_us <= inference.duration_us


def test_onnxruntime_keeps_the_timestamps_of_its_profiler(recorded):
    """Between two nodes it does work of its own, so real timestamps leave gaps."""
    layers = recorded["float", "cpu_onnxruntime"].inferences[0].layers
    gaps_us = [after.start_us - before.end_us for before, after in itertools.pairwise(layers)]
    assert any(gap_us > 0 for gap_us in gaps_us)


def test_torch_operators_carry_the_module_that_calls_them(workshop, recorded):
    network, _ = load_checkpoint(workshop.checkpoint)
    convolutions = {name for name, each in network.named_modules() if type(each).__name__ == "Conv2d"}
    for inference in recorded["float", "cpu_torch"].inferences:
        called = [layer.details["module"] for layer in inference.layers if layer.details["kind"] == "conv2d"]
        assert Counter(called) == Counter(convolutions)


def test_trace_has_a_track_of_inferences_and_one_of_layers(recorded):
    trace = engine_trace(recorded["float", "cpu_onnxruntime"])
    inferences, layers = trace.tracks
    assert trace.process == "engine.onnx on cpu_onnxruntime"
    assert (inferences.name, layers.name) == (INFERENCES, LAYERS)
    assert [each.name for each in inferences.slices] == ["inference 1", "inference 2", "inference 3"]


@pytest.mark.parametrize("target", [AOTINDUCTOR])
def test_runtime_without_times_of_layers_gives_whole_inferences_and_the_reason(workshop, target):
    timeline = record_engine(workshop.engine("float", target), num_inferences=2, batch_size=1)
    assert timeline.num_layers == 0 and "no layers: AOTInductor compiles" in timeline.note
    [track] = engine_trace(timeline).tracks
    assert track.name == INFERENCES and len(track.slices) == 2


def test_every_runtime_records_layers_or_says_why_not():
    from tasks.parts.timelines.engine import _NO_LAYERS

    assert {Runtime.openvino, Runtime.torch, *_NO_LAYERS} == set(Runtime)


def test_batch_and_engine_that_do_not_fit_are_refused(workshop, tmp_path):
    with pytest.raises(DataError, match=r"batch of 9.*target\.cpu_onnxruntime\.max_batch"):
        record_engine(workshop.engine("float", "cpu_onnxruntime"), num_inferences=1, batch_size=9)
    with pytest.raises(ArtifactError, match="Run build_engine first"):
        record_engine(tmp_path, num_inferences=1, batch_size=1)
