"""The roofs of this machine, measured through both CPU runtimes, and what they leave to a layer."""

from dataclasses import replace

import pytest

from tasks.parts.roofs.measure import Effort, measure_roofs, moved_rate
from tasks.parts.roofs.peaks import macs_per_cycle, theoretical_peak
from tasks.parts.roofs.roofs import Bound, Limits, limits_of
from tests.tasks.conftest import Workshop
from tests.tasks.parts.explain.engines import ROOFS


@pytest.mark.parametrize("target", ["cpu_onnxruntime", "cpu_openvino"])
def test_every_roof_is_measured_through_the_runtime(workshop: Workshop, target: str) -> None:
    roofs = measure_roofs(workshop.target(target), Effort(3, [64 << 10, 1 << 20]))
    assert {roof.precision for roof in roofs.compute} == {"f32", "int8"} and not roofs.reason
    assert [roof.working_set_bytes for roof in roofs.memory] == [64 << 10, 1 << 20]
    rates = [roof.macs_per_s for roof in roofs.compute] + [roof.bytes_per_s for roof in roofs.memory]
    assert all(0 < rate.low <= rate.value <= rate.high for rate in rates)
    assert all(
        roof.macs_per_s.value > 1e9 for roof in roofs.compute
    )  # any core since 2013 does 16 in a cycle
    assert roofs.layer_ms is not None and roofs.call_ms is not None
    assert 0 < roofs.layer_ms.value < 1 and roofs.call_ms.value < 10


def test_runtime_that_reports_no_layers_has_no_roofs(workshop: Workshop) -> None:
    roofs = measure_roofs(workshop.target("cpu_torch"), Effort(3, [64 << 10]))
    assert roofs.reason == "torch reports no layers of an engine"
    assert not roofs.compute and not roofs.memory
    lacking = measure_roofs(workshop.target("cpu_openvino", cpu_flags=["none"]), Effort(3, [64 << 10]))
    assert lacking.reason == "this CPU lacks none"


@pytest.mark.parametrize(
    ("flags", "precision", "expected"),
    [
        (("avx2",), "f32", 16),  # 2 x 256 / 32
        (("avx2", "avx512f"), "f32", 32),
        (("avx2",), "int8", 21),  # 2 x 32 / 3 instructions
        (("avx2", "avx_vnni"), "int8", 64),
        (("avx2", "avx512f", "avx512_vnni"), "int8", 128),
        (("avx2", "avx512f", "avx512_bf16"), "bf16", 64),
        (("avx2", "avx512f", "avx512_vnni", "amx_tile", "amx_int8"), "int8", 1024),
        (("avx2", "avx512f", "amx_tile", "amx_bf16"), "bf16", 512),
    ],
)
def test_multiply_adds_per_cycle_follow_from_the_instruction_set(
    flags: tuple[str, ...], precision: str, expected: int
) -> None:
    found = macs_per_cycle(flags, precision)
    assert found is not None and found[0] == expected


def test_theoretical_peak_shows_its_formula_or_why_there_is_none() -> None:
    assert theoretical_peak(("avx2",), "f32", clock_mhz=3000, num_threads=2) == (
        96e9,
        "3.00 GHz x 2 units x 8 floats of 256 bits x 2 threads",
    )
    assert theoretical_peak(("avx2",), "f32", clock_mhz=None, num_threads=1)[0] is None
    assert theoretical_peak((), "f32", clock_mhz=3000, num_threads=1) == (
        None,
        "no formula for f32 on a CPU with none of the known flags",
    )


def test_limits_of_a_layer_by_hand() -> None:
    """5 MMACs at 50 GMAC/s are 0.1 ms; 20 kB at 20 GB/s are 1 us; a layer costs 1 us."""
    limits = limits_of(ROOFS, precision="f32", macs=5_000_000, moved_bytes=20_000)
    assert limits.compute_ms == pytest.approx(0.1) and limits.memory_ms == pytest.approx(0.001)
    assert limits.overhead_ms == 0.001 and limits.attainable_ms == pytest.approx(0.101)
    in_int8 = limits_of(ROOFS, precision="int8", macs=5_000_000, moved_bytes=100_000)
    assert in_int8.compute_ms == pytest.approx(0.05) and in_int8.memory_ms == pytest.approx(0.02)
    assert limits_of(ROOFS, precision="", macs=0, moved_bytes=100).compute_ms == 0


@pytest.mark.parametrize(
    ("times", "bound"),
    [
        ((1.0, 0.1, 0.1), Bound.compute),
        ((0.1, 1.0, 0.79), Bound.memory),
        ((0.1, 0.81, 1.0), Bound.mixed),
        ((0.0, 0.1, 0.2), Bound.overhead),
    ],
)
def test_two_roofs_within_a_quarter_bound_a_layer_together(
    times: tuple[float, float, float], bound: Bound
) -> None:
    assert Limits(*times).bound is bound


def test_times_below_the_resolution_of_the_profiler_give_no_rate() -> None:
    found = moved_rate(1_000_000, [0.0, 0.003, 0.002], 0.001)
    assert found is not None and found.low == pytest.approx(0.5e12) and found.high == pytest.approx(1e12)
    assert moved_rate(1_000_000, [0.0, 0.0], 0.001) is None


def test_bandwidth_is_that_of_the_smallest_working_set_that_holds_the_bytes() -> None:
    small, large = ROOFS.memory
    assert ROOFS.bandwidth(1) is small and ROOFS.bandwidth(64 << 10) is small
    assert ROOFS.bandwidth((64 << 10) + 1) is large and ROOFS.bandwidth(1 << 40) is large
    assert replace(ROOFS, compute=()).peak("f32") is None
