"""Counters of the kernel as proc_stat(5) describes them, and waiting for a quiet machine."""

import itertools
from pathlib import Path

import pytest

from tasks.parts.measuring import surroundings
from tasks.parts.measuring.machine_state import UNKNOWN, read_machine_id
from tasks.parts.measuring.surroundings import CpuTimes, QuietLimits, read_cpu_times, wait_until_quiet

LIMITS = QuietLimits(max_busy_cores=0.3, max_wait_s=60.0)


def test_counters_are_read_by_their_place(tmp_path: Path) -> None:
    stat = tmp_path / "stat"
    stat.write_text(
        "cpu  10 1 20 900 5 2 3 7 4 0\ncpu0 5 0 10 450 2 1 1 3 2 0\ncpu1 5 1 10 450 3 1 2 4 2 0\nintr 1\n"
    )
    assert read_cpu_times(stat, tmp_path) == CpuTimes(36, 7, 948, 2, None)
    for core, count in ((0, 4), (1, 5)):
        folder = tmp_path / f"cpu{core}" / "thermal_throttle"
        folder.mkdir(parents=True)
        (folder / "core_throttle_count").write_text(f"{count}\n")
    found = read_cpu_times(stat, tmp_path)
    assert found is not None and found.num_throttles == 9
    assert read_cpu_times(tmp_path / "absent", tmp_path) is None


def samples(*busy_cores: float, num_throttles: int | None = None) -> "itertools.chain[CpuTimes]":
    """Return pairs of counters, 100 ticks of two cores apart, in which others kept so many cores busy."""
    return itertools.chain.from_iterable(
        (CpuTimes(0, 0, 0, 2, num_throttles), CpuTimes(round(100 * cores), 0, 200, 2, num_throttles))
        for cores in busy_cores
    )


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(surroundings, "_SAMPLE_S", 0.0)
    monkeypatch.setattr(surroundings, "_PAUSE_S", 0.0)


def test_a_quiet_machine_is_not_waited_for() -> None:
    found = samples(0.1, 2.0)
    quiet = wait_until_quiet(LIMITS, lambda: next(found))
    assert (quiet.is_quiet, quiet.busy_cores) == (True, 0.1)


def test_a_busy_machine_is_waited_for() -> None:
    found = samples(2.0, 0.5, 0.2)
    quiet = wait_until_quiet(LIMITS, lambda: next(found))
    assert (quiet.is_quiet, quiet.busy_cores) == (True, 0.2)
    assert next(found, None) is None


def test_a_machine_that_stays_busy_is_measured_and_the_warning_names_the_key(
    caplog: pytest.LogCaptureFixture,
) -> None:
    found = samples(1.5)
    quiet = wait_until_quiet(QuietLimits(max_busy_cores=0.3, max_wait_s=0.0), lambda: next(found))
    assert (quiet.is_quiet, quiet.busy_cores) == (False, 1.5)
    assert "keep 1.50 cores busy" in caplog.text and "benchmark.quiet" in caplog.text


def test_time_stolen_by_other_virtual_machines_counts_as_busy() -> None:
    found = iter([CpuTimes(0, 0, 0, 4, None), CpuTimes(0, 100, 400, 4, None)])
    quiet = wait_until_quiet(QuietLimits(0.3, 0.0), lambda: next(found))
    assert (quiet.is_quiet, quiet.busy_cores) == (False, 1.0)


def test_a_cpu_that_slows_down_because_of_heat_is_not_quiet() -> None:
    found = iter([CpuTimes(0, 0, 0, 2, 7), CpuTimes(0, 0, 200, 2, 8)])
    assert wait_until_quiet(QuietLimits(0.3, 0.0), lambda: next(found)).is_quiet is False


def test_a_system_without_counters_is_not_waited_for() -> None:
    assert wait_until_quiet(LIMITS, lambda: None).is_quiet is None


def test_the_id_of_the_machine_is_not_given_away(tmp_path: Path) -> None:
    file = tmp_path / "machine-id"
    file.write_text("b08dfa6083e7567a1921a715000001fb\n")
    found = read_machine_id(file)
    assert len(found) == 16 and found not in file.read_text()
    assert found == read_machine_id(file)
    file.write_text("")
    assert read_machine_id(file) == read_machine_id(tmp_path / "absent") == UNKNOWN
