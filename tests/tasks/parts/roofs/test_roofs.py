"""The roofs of this machine, measured through both CPU runtimes, and what they leave to a layer."""

import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tasks.parts.engines.gpu import Gpu
from tasks.parts.engines.target import Target
from tasks.parts.measuring.machine_state import Machine, read_machine
from tasks.parts.roofs import rates
from tasks.parts.roofs.datasheets import DATA_SHEETS, stated_bandwidth, stated_peak
from tasks.parts.roofs.measure import measure_roofs
from tasks.parts.roofs.peaks import highest_possible, macs_per_cycle, theoretical_peak
from tasks.parts.roofs.rates import Effort, choose_roof, compute_roof, cost_of_calls, memory_roof, moved_rate
from tasks.parts.roofs.roofs import Bound, ComputeRoof, Limits, Rate, Roofs, limits_of
from tests.tasks.conftest import Workshop
from tests.tasks.parts.explain.engines import ROOFS, rate


@pytest.mark.parametrize("target", ["cpu_onnxruntime", "cpu_openvino"])
def test_every_roof_is_measured_through_the_runtime(workshop: Workshop, target: str) -> None:
    roofs = measure_roofs(workshop.target(target), Effort(3, [64 << 10, 1 << 20]))
    names = {roof.name for roof in roofs.compute}
    assert names == {"f32", "f32 depthwise", "int8", "int8 depthwise"} and not roofs.reason
    for precision in ("f32", "int8"):
        dense, depthwise = (roofs.peak(precision, is_depthwise=value) for value in (False, True))
        assert dense and depthwise and depthwise.macs_per_s.low < dense.macs_per_s.high
    assert [roof.working_set_bytes for roof in roofs.memory] == [64 << 10, 1 << 20]
    assert_plausible(roofs)


def assert_plausible(roofs: Roofs) -> None:
    found = [roof.macs_per_s for roof in roofs.compute] + [roof.bytes_per_s for roof in roofs.memory]
    assert all(0 < rate.low <= rate.value <= rate.high for rate in found)
    # Any core since 2013 does 16 in a cycle; a busy machine leaves a hundredth of them.
    assert all(roof.macs_per_s.value > 1e7 for roof in roofs.compute)
    assert roofs.layer_ms is not None and roofs.call_ms is not None
    assert 0 < roofs.layer_ms.value < 100 and 0 <= roofs.call_ms.value < 1000  # noise may leave nothing


@pytest.mark.parametrize(
    "target",
    ["cpu_torch", pytest.param("cpu_aotinductor", marks=[pytest.mark.slow, pytest.mark.trial])],
)
def test_runtimes_of_checkpoints_are_measured_by_whole_networks(workshop: Workshop, target: str) -> None:
    roofs = measure_roofs(workshop.target(target), Effort(3, [64 << 10]))
    [roof], [moved] = roofs.compute, roofs.memory
    assert roof.precision == "f32" and roof.probe.startswith("4 ") and not roofs.reason
    assert (moved.working_set_bytes, moved.theoretical_bytes_per_s) == (64 << 10, None)
    assert_plausible(roofs)


def test_time_below_zero_is_noise_and_counts_as_none() -> None:
    def slow(images: Any) -> Any:
        time.sleep(0.002)
        return images

    images = np.zeros((1, 1, 1, 1), np.float32)
    layer_ms, call_ms = cost_of_calls({4: slow, 20: lambda images: images}, images, 3)
    assert layer_ms == Rate(0, 0, 0) and call_ms.low >= 2
    layer_ms, call_ms = cost_of_calls({4: lambda images: images, 20: slow}, images, 3)
    assert layer_ms.low > 0.1 and call_ms == Rate(0, 0, 0)


def test_networks_compute_in_the_precision_of_the_target(workshop: Workshop) -> None:
    roofs = measure_roofs(workshop.target("cpu_torch", precision="bf16"), Effort(3, [64 << 10]))
    assert [roof.precision for roof in roofs.compute] == ["bf16"]


def test_cpu_without_a_declared_flag_has_no_roofs(workshop: Workshop) -> None:
    lacking = measure_roofs(workshop.target("cpu_openvino", cpu_flags=["none"]), Effort(3, [64 << 10]))
    assert lacking.reason == "this CPU lacks none" and not lacking.compute and not lacking.memory


@pytest.mark.parametrize(
    ("target", "changes", "gpu", "tops"),
    [
        ("h200_tensorrt_f32", {}, "NVIDIA H200", 67),
        ("h200_tensorrt_f32", {"tf32": True}, "NVIDIA H200", 494.5),
        ("cuda_torch", {}, "Tesla T4", 8.1),
        ("cuda_torch", {}, "NVIDIA Unknown", None),
    ],
)
def test_data_sheet_stands_beside_what_a_gpu_reaches(
    workshop: Workshop,
    monkeypatch: pytest.MonkeyPatch,
    target: str,
    changes: dict[str, bool],
    gpu: str,
    tops: float | None,
) -> None:
    monkeypatch.setattr(rates, "find_gpus", lambda: (Gpu(gpu, "9.0"),))
    declared = workshop.target(target)
    if declared.tensorrt is not None:
        declared = replace(declared, tensorrt=replace(declared.tensorrt, **changes))
    rate = Rate(1e12, 1e12, 1e12)
    roof = compute_roof(declared, read_machine("cpu"), "f32", rate, "probe")
    assert roof.theoretical_macs_per_s == (None if tops is None else pytest.approx(tops * 1e12 / 2))
    assert gpu in roof.formula
    assert memory_roof(declared, 1, rate).theoretical_bytes_per_s == stated_bandwidth(gpu)


def test_data_sheets_state_dense_numbers() -> None:
    """Each step down in bits doubles the rate of Tensor Cores; a 2:4 number among them would make it four.

    But for FP16 on GeForce cards, which add in FP32 at half the rate.
    """
    assert stated_peak("NVIDIA A100-SXM4-80GB", "int8")[0] == 312e12
    assert stated_peak("Tesla T4", "bf16") == (None, "no data-sheet value of Tesla T4 for bf16")
    assert stated_bandwidth("NVIDIA H200") == 4.8e12 and stated_bandwidth("Orin") is None
    for name, sheet in DATA_SHEETS.items():
        tops, doubled = sheet.tops, 4 if "GeForce" in name else 2
        assert tops["int8"] / tops["f16"] == pytest.approx(doubled, rel=0.02), name
        assert "tf32" not in tops or tops["f16"] / tops["tf32"] == pytest.approx(2, rel=0.02), name


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
    highest = highest_possible(flags, precision, num_threads=2)
    assert highest is not None and highest >= 2 * 6.5e9 * expected


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


EPYC = Machine("id", "AMD EPYC", ("avx2", "avx512f", "avx512_vnni", "avx512_bf16"), None, {})


def candidates(target: Target, precision: str, found: Mapping[str, float]) -> list[ComputeRoof]:
    """Return the roofs that probes told, of which the rates are given in GMAC/s."""
    return [compute_roof(target, EPYC, precision, rate(1e9 * value), name) for name, value in found.items()]


def test_a_rate_that_no_cpu_reaches_is_no_roof_a11(
    workshop: Workshop, caplog: pytest.LogCaptureFixture
) -> None:
    """Recorded with two threads: a profiler gave a layer's time to another one, and INT8 seemed 38 times as fast."""
    target = workshop.target("cpu_openvino", num_threads=2)
    found = candidates(target, "int8", {"convolutions": 2120, "products": 191, "few channels": 142})
    assert found[0].highest_macs_per_s == 6.5e9 * 128 * 2  # 1,664 GMAC/s
    assert not found[0].is_possible
    roof = choose_roof(found, lambda roof: roof.macs_per_s)
    assert roof is not None and (roof.probe, roof.macs_per_s.value) == ("products", 191e9)
    assert "convolutions: 2120 GMAC/s in int8 are no roof" in caplog.text
    assert choose_roof(found[:1], lambda roof: roof.macs_per_s) is None


def test_a_rate_that_its_repetition_does_not_confirm_is_no_roof_a11(
    workshop: Workshop, caplog: pytest.LogCaptureFixture
) -> None:
    target = workshop.target("cpu_openvino", num_threads=2)
    found = candidates(target, "int8", {"convolutions": 1320, "products": 191})
    repeated = {"convolutions": 208e9, "products": 185e9}
    roof = choose_roof(found, lambda roof: rate(repeated[roof.probe]))
    assert roof is not None and (roof.probe, roof.macs_per_s.value) == ("convolutions", 208e9)
    assert "convolutions: 1320 GMAC/s in int8 are no roof: repeated it is 208" in caplog.text
    repeated["convolutions"] = 100e9
    roof = choose_roof(found, lambda roof: rate(repeated[roof.probe]))
    assert roof is not None and (roof.probe, roof.macs_per_s.value) == ("products", 191e9)


def test_limits_of_a_layer_by_hand() -> None:
    """5 MMACs at 50 GMAC/s are 0.1 ms; 20 kB at 20 GB/s are 1 us; a layer costs 1 us."""
    limits = limits_of(ROOFS, precision="f32", macs=5_000_000, moved_bytes=20_000)
    assert limits.compute_ms == pytest.approx(0.1) and limits.memory_ms == pytest.approx(0.001)
    assert limits.overhead_ms == 0.001 and limits.attainable_ms == pytest.approx(0.101)
    in_int8 = limits_of(ROOFS, precision="int8", macs=5_000_000, moved_bytes=100_000)
    assert in_int8.compute_ms == pytest.approx(0.05) and in_int8.memory_ms == pytest.approx(0.02)
    assert limits_of(ROOFS, precision="", macs=0, moved_bytes=100).compute_ms == 0
    slow = replace(
        ROOFS, compute=(*ROOFS.compute, replace(ROOFS.compute[0], is_depthwise=True, macs_per_s=rate(5e9)))
    )
    depthwise = limits_of(slow, precision="f32", macs=5_000_000, moved_bytes=20_000, is_depthwise=True)
    assert depthwise.compute_ms == pytest.approx(1.0)
    dense = limits_of(slow, precision="f32", macs=5_000_000, moved_bytes=20_000)
    assert dense.compute_ms == pytest.approx(0.1)
    without = limits_of(slow, precision="int8", macs=5_000_000, moved_bytes=0, is_depthwise=True)
    assert without.compute_ms == pytest.approx(0.05)


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
