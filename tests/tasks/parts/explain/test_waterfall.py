"""The waterfall from one engine to another, and the labels of layers against made-up roofs."""

from dataclasses import replace
from pathlib import Path

import pytest

from tasks.parts.explain.advice import advise
from tasks.parts.explain.engine_view import EngineView
from tasks.parts.explain.waterfall import Part, compare, sum_parts
from tasks.parts.roofs.roofs import Bound
from tests.tasks.conftest import Workshop
from tests.tasks.parts.explain.engines import convolutions, quantize, rate, view


@pytest.fixture(scope="module")
def engines(workshop: Workshop, tmp_path_factory: pytest.TempPathFactory) -> tuple[EngineView, EngineView]:
    """A float engine and a quantized one with a sum of its own and a layer left in float, with chosen times."""
    folder = tmp_path_factory.mktemp("engines")
    model, target = convolutions(16, 32, 32, 32, 32, has_sum=True), workshop.target("cpu_onnxruntime")
    before = view(model, target, folder, name="float")
    after = view(quantize(model, float_nodes={"conv3"}), target, folder, name="int8")
    return _timed(before, 0.102, 0.5), _timed(after, 0.052, 0.4)


def _timed(engine: EngineView, milliseconds: float, latency_ms: float) -> EngineView:
    """Give every layer the same time; the profiler's own 1 us of ROOFS goes off it."""
    layers = tuple(replace(layer, milliseconds=milliseconds) for layer in engine.layers)
    return replace(engine, layers=layers, latency_ms=latency_ms)


def test_steps_sum_to_the_measured_difference(engines: tuple[EngineView, EngineView]) -> None:
    before, after = engines
    parts = sum_parts(compare(before, after))
    assert sum(parts.values()) == pytest.approx(after.latency_ms - before.latency_ms)
    assert sum(sum_parts(compare(after, before)).values()) == pytest.approx(0.1)
    unexplained = (after.latency_ms - after.layers_ms) - (before.latency_ms - before.layers_ms)
    assert parts[Part.remainder] == pytest.approx(unexplained)


def test_each_layer_is_in_one_step(engines: tuple[EngineView, EngineView]) -> None:
    before, after = engines
    steps = compare(before, after)
    for side, engine in (("before", before), ("after", after)):
        named = [name for step in steps for name in getattr(step, side).split("\t") if name]
        assert sorted(named) == sorted(layer.name for layer in engine.layers)


def test_parts_hold_what_their_names_say(engines: tuple[EngineView, EngineView]) -> None:
    before, after = engines
    steps = {part: [step for step in compare(before, after) if step.part is part] for part in Part}
    assert [step.after for step in steps[Part.fusions_lost]] == ["sum"]
    assert steps[Part.fusions_lost][0].milliseconds == pytest.approx(0.051)
    nodes = {layer.name: layer.nodes for layer in after.layers}
    assert "conv3" in {node for step in steps[Part.left_in_float] for node in nodes[step.after]}
    num_before, num_after = (sum(layer.is_conversion for layer in each.layers) for each in engines)
    assert num_after > num_before and len(steps[Part.conversions]) == num_before + num_after
    in_int8 = {layer.name for layer in after.layers if layer.precision == "int8"}
    assert {step.after for step in steps[Part.faster_layers]} <= in_int8 and not steps[Part.slower_layers]


def test_engine_compared_with_itself_has_no_difference(engines: tuple[EngineView, EngineView]) -> None:
    assert set(sum_parts(compare(engines[0], engines[0])).values()) == {0.0}


def test_sentence_names_the_factor_and_what_ate_it(engines: tuple[EngineView, EngineView]) -> None:
    sentence = advise(*engines, 1.25)
    assert sentence.startswith(
        "int8 brings 1.25x over float, where the arithmetic of this machine is 2.0x as fast in INT8: "
    )
    assert "conversions" in sentence and "stayed in float (Conv Relu)" in sentence
    assert advise(*engines, 0.5).startswith("int8 is 2.00x slower than float")


def test_no_ratio_is_told_from_a_roof_that_no_cpu_reaches_a11(engines: tuple[EngineView, EngineView]) -> None:
    before, after = engines
    beyond = replace(after.roofs.compute[1], macs_per_s=rate(2120e9), highest_macs_per_s=1664e9)
    believed = replace(after.roofs, compute=(after.roofs.compute[0], beyond))
    sentence = advise(before, replace(after, roofs=believed), 1.25)
    assert sentence.startswith("int8 brings 1.25x over float") and "as fast in INT8" not in sentence


def test_label_follows_the_roof_that_leaves_the_most_time(workshop: Workshop, tmp_path: Path) -> None:
    target = workshop.target("cpu_openvino")
    cases = {
        Bound.compute: convolutions(16, 64, 64),
        Bound.memory: convolutions(16, 16, 16, groups=16, size=64),
        Bound.overhead: convolutions(16, 16, 16, kernel=1, size=2),
    }
    for bound, model in cases.items():
        engine = view(model, target, tmp_path, name=bound.value)
        rows = [row for row in engine.rows if row.macs]
        assert {row.bound for row in rows} == {bound}
        assert all((row.working_set_bytes is not None) == (bound is Bound.memory) for row in rows)


def test_counts_and_roof_of_a_layer_by_hand(workshop: Workshop, tmp_path: Path) -> None:
    """32 channels to 32 by 3 x 3 on 16 x 16: 2.36 MMACs take 47.2 us at 50 GMAC/s, and 1 us to start."""
    engine = view(convolutions(16, 32, 32), workshop.target("cpu_openvino"), tmp_path)
    engine = _timed(engine, 0.101, 0.3)
    [row] = [row for row in engine.rows if row.macs == 32 * 32 * 9 * 256]
    assert row.flops == 2 * row.macs and row.bound is Bound.compute
    assert (row.input_bytes, row.output_bytes) == (32 * 256 * 4, 32 * 256 * 4)
    assert row.weight_bytes is not None and row.weight_bytes >= 32 * 32 * 9 * 4
    assert row.attainable_ms == pytest.approx(0.04719 + 0.001, rel=1e-3)
    assert row.milliseconds == pytest.approx(0.1) and row.share == pytest.approx(1 / 3)
    assert row.share_of_roof == pytest.approx(0.482, rel=1e-2) and not row.is_above_roof
    [fast] = [row for row in _timed(engine, 0.03, 0.3).rows if row.macs == 32 * 32 * 9 * 256]
    assert fast.is_above_roof and fast.winnable_ms == 0


def test_layer_that_only_changes_the_shape_moves_nothing(workshop: Workshop, tmp_path: Path) -> None:
    engine = view(convolutions(16, 32, 32), workshop.target("cpu_onnxruntime"), tmp_path)
    size = 1 << 20  # 0.4 ms from memory
    shaped = replace(
        engine.layers[0], operators=("Reshape",), macs=0, input_bytes=size, weight_bytes=0, output_bytes=size
    )
    [row] = replace(engine, layers=(replace(shaped, milliseconds=0.003),)).rows
    assert row.bound is Bound.overhead and row.attainable_ms == 0.001 and not row.is_above_roof
    [moving] = replace(engine, layers=(replace(shaped, operators=("Transpose",), milliseconds=0.003),)).rows
    assert moving.bound is Bound.memory and moving.is_above_roof
