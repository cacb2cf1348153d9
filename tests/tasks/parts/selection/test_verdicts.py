"""Properties of verdicts and picks over random engines."""

import dataclasses

import numpy as np
import pytest

from tasks.parts.data.accuracy import Accuracy
from tasks.parts.data.comparison import ImageResults
from tasks.parts.measuring.machine_state import Machine
from tasks.parts.measuring.reports import BenchmarkReport, EngineMeasurement, Race, SpeedRatio, Timed
from tasks.parts.selection.accuracy_gates import AccuracyGates, find_parents
from tasks.parts.selection.engine_row import EngineRow, Measured, Speed, Verdict, fastest_first
from tasks.parts.selection.verdicts import Gates, find_reference, judge_all

NUM_IMAGES = 120
LADDER = ["distilled", "pruned", "pruned_fp16", "pruned_ptq", "pruned_qat"]
PARENTS = dict.fromkeys(LADDER[2:], "pruned")
TARGETS = ["cpu_torch", "cpu_onnxruntime"]


def random_engines(seed: int) -> tuple[list[EngineRow], dict[str, ImageResults], dict[str, BenchmarkReport]]:
    """Return engines with random losses of random certainty, and speeds that are often equal within noise."""
    generator = np.random.default_rng(seed)
    base_N = generator.normal(0.7, 0.1, NUM_IMAGES)
    rows, results, races = [], {}, {}
    for target in TARGETS:
        speeds = {variant: float(generator.choice([1, 1, 1.01, 2])) for variant in LADDER}
        speeds = {variant: speed * (1 + 0.02 * generator.normal()) for variant, speed in speeds.items()}
        width = generator.choice([0.002, 0.03])
        for variant in LADDER:
            name = f"{variant}-{target}"
            noise_N = generator.normal(0, generator.choice([0.001, 0.001, 0.1]), NUM_IMAGES)
            score_N = base_N * (1 - generator.choice([-0.03, -0.01, 0, 0.01, 0.03])) + noise_N
            is_reference = name == f"{LADDER[0]}-{TARGETS[0]}"
            hits = np.rint(1000 * np.clip(base_N if is_reference else score_N, 0.05, 1)).astype(np.int64)[
                :, None
            ]
            total = np.full_like(hits, 1000)
            results[name] = ImageResults(hits, total, total, np.arange(NUM_IMAGES))
            score, speed = results[name].score, 1.0 if is_reference else speeds[variant]
            speeds[variant] = speed
            rows.append(
                row_of(variant, target, score, speed, int(generator.choice([100, 100, 101, 300])) * 1000)
            )
        pairs = [(later, earlier) for i, later in enumerate(LADDER) for earlier in LADDER[:i]]
        ratios = [
            ratio_of(speeds[later] / speeds[earlier], later, earlier, width) for later, earlier in pairs
        ]
        ratios += [ratio_of(speeds[variant], variant, "reference", width) for variant in LADDER]
        engines = {variant: measurement(variant) for variant in LADDER}
        control = SpeedRatio("control", LADDER[0], 1.0, 1.0, 1.0)
        race = Race(tuple(ratios), control, 0.95, 4, 0.001, (), 1.0, 40, 0, (0,))
        machine = Machine("0" * 16, "A CPU", (), None, {})
        races[target] = BenchmarkReport(engines, "ref", "cpu_torch", Timed.frame, race, False, machine, None)
    return rows, results, races


def measurement(variant: str) -> EngineMeasurement:
    return EngineMeasurement("built", "", variant, variant, None, "onnxruntime", "1", "CPU", 2, {})


def ratio_of(factor: float, faster: str, slower: str, width: float) -> SpeedRatio:
    return SpeedRatio(faster, slower, factor, factor * (1 - width), factor * (1 + width))


def row_of(variant: str, target: str, score: float, speed: float, size_bytes: int) -> EngineRow:
    name = f"{variant}-{target}"
    fields = {field.name: 0.0 for field in dataclasses.fields(Speed)}
    numbers = {"speedup_vs_reference": speed, "latency_ms_p50": 1 / speed, "is_inconclusive": False}
    measured = Measured(
        accuracy=Accuracy("mIoU", score, None, None, {}),
        losses=None,
        unseen=None,
        speed=Speed(**(fields | numbers)),
        size_bytes=size_bytes,
        compressed_bytes=size_bytes,
        build_s=1.0,
        macs=1,
        engine_sha256=name,
        reference_sha256="ref",
    )
    return EngineRow(
        variant=variant,
        target=target,
        verdict=Verdict.ACCEPT,
        reason="",
        pareto=False,
        picked=False,
        precision="int8",
        macs_share={},
        macs_share_quantized=None,
        measured=measured,
        suspect_layers=(),
        conditions={"Machine": "0" * 16, "Reference": "eager PyTorch on the CPU"},
    )


def test_of_equally_fast_engines_the_certainly_more_accurate_one_is_picked_though_it_is_larger() -> None:
    target, variants = TARGETS[0], LADDER[1:3]
    hits_N = {"pruned": 690, "pruned_fp16": 697, LADDER[0]: 697}
    rows, results = [], {}
    for variant, size_bytes in zip((LADDER[0], *variants), (900, 100, 800), strict=True):
        hits = np.full((NUM_IMAGES, 1), hits_N[variant])
        total = np.full_like(hits, 1000)
        name = f"{variant}-{target}"
        results[name] = ImageResults(hits, total, total, np.arange(NUM_IMAGES))
        speed = {LADDER[0]: 1.0, "pruned": 2.02, "pruned_fp16": 2.0}[variant]
        rows.append(row_of(variant, target, results[name].score, speed, size_bytes))
    pairs = [("pruned", LADDER[0], 2.02), ("pruned_fp16", LADDER[0], 2.0), ("pruned_fp16", "pruned", 0.99)]
    ratios = [ratio_of(factor, faster, slower, 0.03) for faster, slower, factor in pairs]
    control = SpeedRatio("control", LADDER[0], 1.0, 1.0, 1.0)
    race = Race(tuple(ratios), control, 0.95, 2, 0.001, (), 1.0, 40, 0, (0,))
    engines = {row.variant: measurement(row.variant) for row in rows}
    machine = Machine("0" * 16, "A CPU", (), None, {})
    races = {target: BenchmarkReport(engines, "ref", "cpu_torch", Timed.frame, race, False, machine, None)}
    accuracy = AccuracyGates(f"{LADDER[0]}-{target}", {}, 0.02, 0.02, results, results, "test")
    gates = Gates(accuracy, allow_unproven=False, min_speedup_factor=1.02, max_latency_ms=None, min_fps=None)
    judged = judge_all(rows, gates, find_reference(rows, LADDER[0], target), LADDER, races)
    assert [row.variant for row in judged if row.picked] == ["pruned_fp16"]


@pytest.mark.parametrize("seed", range(60))
def test_no_pick_is_dominated_slower_for_certain_or_beyond_a_gate(seed: int) -> None:
    rows, results, races = random_engines(seed)
    reference = f"{LADDER[0]}-{TARGETS[0]}"
    parents = find_parents(rows, PARENTS, TARGETS[0])
    accuracy = AccuracyGates(reference, parents, 0.02, 0.02, results, results, "test")
    gates = Gates(accuracy, allow_unproven=False, min_speedup_factor=1.02, max_latency_ms=None, min_fps=None)
    judged = judge_all(rows, gates, find_reference(rows, LADDER[0], TARGETS[0]), LADDER, races)

    holding = [row for row in judged if row.verdict not in (Verdict.TOO_LOSSY, Verdict.UNPROVEN)]
    for target in TARGETS:
        of_target = [row for row in holding if row.target == target]
        picks = [row for row in judged if row.target == target and row.picked]
        assert len(picks) == bool(of_target)
        for pick in picks:
            assert pick in holding
            for other in of_target:
                assert not dominates(other, pick)
                ratio = races[target].ratio(other.variant, pick.variant)
                is_faster = other is not pick and ratio.low > 1
                fastest = max(of_target, key=lambda row: speed_of(row))
                assert not (is_faster and other is fastest)
                if not is_slower(races[target], other, fastest) and not is_dominated(other, of_target):
                    assert not accuracy.is_more_accurate(other.name, pick.name)
    for row in judged:
        assert row.measured and row.measured.losses
        for loss in ("score_rel_loss", "parent_rel_loss"):
            if row.verdict is Verdict.ACCEPT:
                assert getattr(row.measured.losses, f"{loss}_high") <= 0.02


def speed_of(row: EngineRow) -> float:
    assert row.measured
    return row.measured.speed.speedup_vs_reference


def score_of(row: EngineRow) -> float:
    assert row.measured
    return row.measured.accuracy.score


def dominates(other: EngineRow, row: EngineRow) -> bool:
    places = [(speed_of(each), score_of(each)) for each in (other, row)]
    return places[0] != places[1] and all(left >= right for left, right in zip(*places, strict=True))


def is_dominated(row: EngineRow, others: list[EngineRow]) -> bool:
    return any(dominates(other, row) for other in others)


def is_slower(race: BenchmarkReport, row: EngineRow, fastest: EngineRow) -> bool:
    return race.ratio(fastest.variant, row.variant).low > 1


def test_speed_ups_over_other_references_or_on_other_machines_are_not_ranked_with_one_another() -> None:
    def row(name: str, speed: float, latency_ms: float, reference: str, machine: str) -> EngineRow:
        made = row_of("pruned", name, 0.7, speed, 1000)
        assert made.measured is not None
        measured = dataclasses.replace(
            made.measured, speed=dataclasses.replace(made.measured.speed, latency_ms_p50=latency_ms)
        )
        return dataclasses.replace(
            made, measured=measured, conditions={"Machine": machine, "Reference": reference}
        )

    cpu, gpu = "eager PyTorch on the CPU", "eager PyTorch on the GPU"
    rows = [
        row("cpu_slow", 20.0, 2.0, cpu, "here"),
        row("gpu", 3.0, 0.1, gpu, "here"),
        row("other_cpu", 40.0, 4.0, cpu, "there"),
        row(
            "cpu_fast", 21.0, 2.1, cpu, "here"
        ),  # in the common rounds; its milliseconds are of other minutes
    ]
    ranked = [found.target for found in fastest_first(rows)]
    assert ranked == ["gpu", "cpu_fast", "cpu_slow", "other_cpu"]
    assert fastest_first([]) == []
