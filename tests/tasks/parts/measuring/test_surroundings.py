"""Counters of the kernel as proc_stat(5) describes them, and waiting for a quiet machine."""

import itertools
import subprocess
import sys
from pathlib import Path

import pytest

from tasks.core.errors import TargetMismatch
from tasks.parts.cpu import read_cpu_quota, usable_cores
from tasks.parts.measuring import surroundings
from tasks.parts.measuring.machine_state import MACHINE_ID_VARIABLE, measuring_environment, read_machine_id
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
    found = read_machine_id(file, {})
    assert len(found) == 16 and found not in file.read_text()
    assert found == read_machine_id(file, {})


def test_a_machine_without_an_id_is_not_measured_a11(tmp_path: Path) -> None:
    """With the same CPU it would share the measurements of another one."""
    (tmp_path / "empty").write_text("\n")
    for name in ("empty", "absent"):
        with pytest.raises(
            TargetMismatch, match=rf"{name} is missing or empty.*--volume .*{MACHINE_ID_VARIABLE}"
        ):
            read_machine_id(tmp_path / name, {})
    named, other = (read_machine_id(tmp_path / "absent", {MACHINE_ID_VARIABLE: name}) for name in ("a", "b"))
    assert named != other and len(named) == 16


def test_the_cores_that_a_process_may_use_are_in_the_key_a11() -> None:
    whole = measuring_environment()
    assert whole["usable_cores"] == str(usable_cores())
    pin = "import os; os.sched_setaffinity(0, {min(os.sched_getaffinity(0))}); "
    read = (
        "from tasks.parts.measuring.machine_state import measuring_environment as read; print(dict(read()))"
    )
    pinned = subprocess.run([sys.executable, "-c", pin + read], capture_output=True, text=True, check=True)
    assert "'usable_cores': '1'" in pinned.stdout


def test_the_least_cpu_quota_of_the_control_groups_counts_a11(tmp_path: Path) -> None:
    """Version 2: quota and period in microseconds in cpu.max; version 1: two files, -1 without a limit."""
    inner = tmp_path / "v2/pod/container"
    inner.mkdir(parents=True)
    own = tmp_path / "cgroup"
    own.write_text("0::/pod/container\n")
    assert read_cpu_quota(tmp_path / "v2", own) is None
    (inner / "cpu.max").write_text("max 100000\n")
    assert read_cpu_quota(tmp_path / "v2", own) is None
    (inner.parent / "cpu.max").write_text("150000 100000\n")
    assert read_cpu_quota(tmp_path / "v2", own) == 1.5
    (inner / "cpu.max").write_text("50000 100000\n")
    assert read_cpu_quota(tmp_path / "v2", own) == 0.5

    group = tmp_path / "v1/cpu/docker"
    group.mkdir(parents=True)
    own.write_text("5:memory:/docker\n1:cpu,cpuacct:/docker\n0::/\n")
    (group / "cpu.cfs_period_us").write_text("100000\n")
    (group / "cpu.cfs_quota_us").write_text("-1\n")
    assert read_cpu_quota(tmp_path / "v1", own) is None
    (group / "cpu.cfs_quota_us").write_text("200000\n")
    assert read_cpu_quota(tmp_path / "v1", own) == 2.0
    assert read_cpu_quota(tmp_path / "v1", tmp_path / "absent") is None
