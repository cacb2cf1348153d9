"""Predictions by hand: engines with chosen layer times, held against roofs that are made up."""

from dataclasses import replace
from pathlib import Path

import pytest
from onnx import ModelProto

from tasks.parts.explain.engine_view import EngineView
from tasks.parts.explain.layers import TimedLayer
from tasks.parts.what_if.change import Change, ChangeKind
from tasks.parts.what_if.predict import FloatRuns, predict_changes, start_of_layer
from tests.tasks.conftest import Workshop
from tests.tasks.parts.explain.engines import convolutions, quantize, view

START_MS, PROFILER_MS = 0.001, 0.001
"""What ROOFS says that a layer costs, and that the profiler adds to it."""


@pytest.fixture(scope="module")
def engines(
    workshop: Workshop, tmp_path_factory: pytest.TempPathFactory
) -> tuple[EngineView, EngineView, ModelProto]:
    """Float twin, INT8 engine and Q/DQ graph of four convolutions."""
    folder = tmp_path_factory.mktemp("engines")
    model, target = convolutions(16, 32, 32, 32, 32), workshop.target("cpu_onnxruntime")
    quantized = quantize(model)
    return view(model, target, folder, name="float"), view(quantized, target, folder, name="int8"), quantized


def timed(engine: EngineView, conversion_ms: float, **milliseconds: float) -> EngineView:
    """Give each convolution its time and all conversions another one; the latency is their sum and the call."""

    def time_of(layer: TimedLayer) -> float:
        if layer.is_conversion:
            return conversion_ms
        return next((value for name, value in milliseconds.items() if name in layer.nodes), 0.0)

    layers = tuple(replace(layer, milliseconds=time_of(layer) + PROFILER_MS) for layer in engine.layers)
    found = replace(engine, layers=layers, latency_ms=1.0)
    return replace(found, latency_ms=found.layers_ms + 0.01)


def of_kind(changes: list[Change], kind: ChangeKind) -> list[Change]:
    return [change for change in changes if change.kind is kind]


def test_layers_that_are_slower_in_int8_go_back_to_float(
    engines: tuple[EngineView, EngineView, ModelProto],
) -> None:
    twin = timed(engines[0], 0.0, conv0=0.1, conv1=0.1, conv2=0.1, conv3=0.1)
    engine = timed(engines[1], 0.0, conv0=0.05, conv1=0.5, conv2=0.4, conv3=0.05)
    [run] = of_kind(predict_changes(engine, twin, engines[2]), ChangeKind.back_to_float)
    assert run.nodes == {"conv1", "relu1", "conv2", "relu2"}
    assert engine.latency_ms - run.predicted_ms == pytest.approx(
        0.7, rel=0.02
    )  # conversions take no time here
    assert run.recipe == "quantize_partial.keep_float=[conv1, conv2]" and run.accuracy == "none is lost"


def test_new_conversions_take_as_long_as_those_of_the_engine(
    engines: tuple[EngineView, EngineView, ModelProto],
) -> None:
    twin = timed(engines[0], 0.0, conv0=0.1, conv1=0.1, conv2=0.1, conv3=0.1)
    engine = timed(engines[1], 0.2, conv0=0.05, conv1=0.3, conv2=0.05, conv3=0.05)
    runs = FloatRuns(engine, twin, engines[2])
    alone, whole = (runs.run_of(names) for names in (["conv1"], ["conv0", "conv1", "conv2", "conv3"]))
    assert runs.saving_ms(alone) < 0.2 - 2 * 0.2, "two borders of at least one conversion each"
    assert runs.saving_ms(whole) > 0.05, "no border is left"


def test_layer_between_pairs_stays_in_int8_on_onnxruntime(
    engines: tuple[EngineView, EngineView, ModelProto],
) -> None:
    """ONNX Runtime quantizes float weights of a layer whose input and output are rounded."""
    twin, engine, graph = engines
    runs = FloatRuns(engine, twin, graph)
    assert not runs.is_possible(runs.run_of(["conv1"]))
    assert runs.is_possible(runs.run_of(["conv1", "conv2"])) and runs.is_possible(
        runs.run_of(["conv0", "conv1"])
    )
    other = replace(engine.manifest, target=replace(engine.manifest.target, pairs_before_activations=False))
    elsewhere = FloatRuns(replace(engine, manifest=other), twin, graph)
    assert elsewhere.is_possible(elsewhere.run_of(["conv1"]))


def test_float_run_that_brings_nothing_is_not_proposed(
    engines: tuple[EngineView, EngineView, ModelProto],
) -> None:
    twin = timed(engines[0], 0.0, conv0=0.2, conv1=0.2, conv2=0.2, conv3=0.2)
    engine = timed(engines[1], 0.01, conv0=0.1, conv1=0.1, conv2=0.1, conv3=0.1)
    assert not of_kind(predict_changes(engine, twin, engines[2]), ChangeKind.back_to_float)


def test_remainder_scales_the_saving(engines: tuple[EngineView, EngineView, ModelProto]) -> None:
    twin = timed(engines[0], 0.0, conv0=0.1, conv1=0.1, conv2=0.1, conv3=0.1)
    engine = timed(engines[1], 0.0, conv0=0.05, conv1=0.5, conv2=0.4, conv3=0.05)
    slower = [replace(each, latency_ms=2 * each.latency_ms) for each in (twin, engine)]
    [run] = of_kind(predict_changes(engine, twin, engines[2]), ChangeKind.back_to_float)
    [same] = of_kind(predict_changes(slower[1], slower[0], engines[2]), ChangeKind.back_to_float)
    share = 1 - run.predicted_ms / engine.latency_ms
    assert 1 - same.predicted_ms / slower[1].latency_ms == pytest.approx(share, rel=0.02)


def test_batch_of_two_halves_the_call_and_the_starts(
    engines: tuple[EngineView, EngineView, ModelProto],
) -> None:
    engine = timed(engines[0], 0.0, conv0=0.1, conv1=0.1, conv2=0.1, conv3=0.1)
    [batch] = of_kind(predict_changes(engine, None, engines[2]), ChangeKind.batch)
    num_layers = sum(time > 0 for time in engine.times_ms.values())
    expected = 0.01 / 2 + 4 * start_of_layer(engine) / 2
    assert start_of_layer(engine) == START_MS and num_layers >= 4
    assert engine.latency_ms - batch.predicted_ms == pytest.approx(expected, rel=0.02)


def test_widths_beside_the_multiple_are_cut_in_proportion_to_the_work(
    workshop: Workshop, tmp_path: Path
) -> None:
    model = convolutions(16, 24, 24, 16)
    engine = timed(
        view(model, workshop.target("cpu_onnxruntime"), tmp_path), 0.0, conv0=0.1, conv1=0.1, conv2=0.1
    )
    [cut] = of_kind(predict_changes(engine, None, model), ChangeKind.narrower)
    assert cut.widths == {"conv0": 16, "conv1": 16}
    shares = (1 - 16 / 24, 1 - 16 * 16 / (24 * 24), 1 - 16 / 24)
    assert engine.latency_ms - cut.predicted_ms == pytest.approx(0.099 * sum(shares), rel=0.02)
    assert "pruned" in cut.accuracy


def test_padding_is_proposed_where_full_registers_are_much_more_efficient(
    workshop: Workshop, tmp_path: Path
) -> None:
    model = convolutions(16, 32, 32, 24, 32)
    built = view(model, workshop.target("cpu_onnxruntime"), tmp_path)
    slow = timed(built, 0.0, conv0=0.1, conv1=0.1, conv2=1.0, conv3=1.0)
    even = timed(built, 0.0, conv0=0.1, conv1=0.2, conv2=0.15, conv3=0.15)
    [padded] = of_kind(predict_changes(slow, None, model), ChangeKind.wider)
    assert padded.widths == {"conv2": 32} and padded.accuracy == "none is lost: the same function"
    assert padded.predicted_ms < slow.latency_ms - 1
    assert not of_kind(predict_changes(even, None, model), ChangeKind.wider)
