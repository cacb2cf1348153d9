"""Energy from counters laid out as the kernel's Documentation/power/powercap/powercap.rst describes them."""

import os
import shutil
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from tasks.parts.engines.gpu import find_gpus
from tasks.parts.engines.open_engine import open_engine
from tasks.parts.measuring.energy import EnergyMeter, open_energy_meter
from tasks.parts.measuring.engine_process import _load_metered
from tasks.parts.measuring.reports import Timed
from tests.tasks.conftest import HEIGHT, WIDTH, Workshop

RANGE_UJ = 262_143_328_850


def add_zone(powercap: Path, zone: str, name: str, energy_uj: int) -> Path:
    """Add a zone, which in the class folder stands beside the zone that it is a part of."""
    folder = powercap / zone
    folder.mkdir(parents=True)
    for file, content in (("name", name), ("energy_uj", energy_uj), ("max_energy_range_uj", RANGE_UJ)):
        (folder / file).write_text(f"{content}\n")
    return folder / "energy_uj"


@pytest.fixture
def packages(tmp_path: Path) -> list[Path]:
    """The counters of two packages, beside zones that hold a part, all, or the same again."""
    counters = [
        add_zone(tmp_path, "intel-rapl:0", "package-0", 1_000_000),
        add_zone(tmp_path, "intel-rapl:1", "package-1", RANGE_UJ - 500_000),
    ]
    for zone, name in (
        ("intel-rapl:0:0", "core"),
        ("intel-rapl:0:1", "dram"),
        ("intel-rapl:2", "psys"),
        ("intel-rapl-mmio:0", "package-0"),
    ):
        add_zone(tmp_path, zone, name, 7)
    (tmp_path / "intel-rapl").mkdir()  # the control type, which has no counter
    return counters


def test_packages_are_added_up_and_a_counter_may_start_again(packages: list[Path], tmp_path: Path) -> None:
    with open_energy_meter("cpu", seconds=1.0, powercap=tmp_path) as (meter, note):
        assert meter is not None
        before_uj = meter.read_uj()
        packages[0].write_text("4000000\n")
        packages[1].write_text("1499999\n")
        assert meter.joules_between(before_uj, meter.read_uj()) == pytest.approx(3.0 + 2.0)
    assert note == "RAPL of package-0, package-1, all processes"


@pytest.mark.parametrize("is_there", [True, False])
def test_machine_without_counters_says_so(tmp_path: Path, is_there: bool) -> None:
    powercap = tmp_path / "powercap"
    if is_there:
        add_zone(powercap, "intel-rapl:0", "psys", 1)
    with open_energy_meter("cpu", seconds=1.0, powercap=powercap) as (meter, note):
        assert meter is None and note.startswith(f"{powercap} has no counter of a processor")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_counter_that_only_root_may_read_is_named_with_the_command(
    packages: list[Path], tmp_path: Path
) -> None:
    packages[1].chmod(0)
    with open_energy_meter("cpu", seconds=1.0, powercap=tmp_path) as (meter, note):
        assert (meter, note) == (None, f"only root may read RAPL: sudo chmod a+r {packages[1]}")


def test_counter_without_a_number_is_no_error(packages: list[Path], tmp_path: Path) -> None:
    packages[0].write_text("")
    with open_energy_meter("cpu", seconds=1.0, powercap=tmp_path) as (meter, note):
        assert meter is None and note.startswith("RAPL cannot be read (")


def test_shorter_than_the_counter_is_renewed_is_not_measured(packages: list[Path], tmp_path: Path) -> None:
    with open_energy_meter("cpu", seconds=0.01, powercap=tmp_path) as (meter, note):
        assert meter is None
    assert note == "0.01 s are too short for RAPL of package-0, package-1, all processes, which needs 0.05 s"


@pytest.mark.skipif(bool(find_gpus()), reason="this machine has an NVIDIA GPU")
def test_gpu_without_nvml_says_so() -> None:
    with open_energy_meter("cuda", seconds=2.0) as (meter, note):
        assert meter is None and note.startswith("NVML does not start")


def test_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)  # as Python marks a module that is not there
    with open_energy_meter("cuda", seconds=2.0) as (meter, note):
        assert (meter, note) == (None, "nvidia-ml-py is not installed (extra gpu)")


def test_counter_of_a_gpu_is_read_in_millijoules() -> None:
    meter = EnergyMeter("NVML", 1.0, lambda: (), (1000 * 2**64,))
    assert meter.joules_between((1000 * 5_000,), (1000 * 7_500,)) == 2.5


@contextmanager
def running(counter: Path) -> Iterator[None]:
    """Let a counter rise by a joule again and again."""
    stop, base_uj = threading.Event(), int(counter.read_text())

    def count() -> None:
        for joules in range(1, sys.maxsize):
            risen = counter.with_name("risen")
            risen.write_text(str(base_uj + joules * 1_000_000))
            risen.replace(counter)
            if stop.wait(0.001):
                return

    thread = threading.Thread(target=count)
    thread.start()
    yield
    stop.set()
    thread.join()


@pytest.mark.parametrize("is_running", [True, False])
def test_energy_of_the_windows_is_metered_while_the_lanes_run(
    workshop: Workshop, packages: list[Path], tmp_path: Path, is_running: bool
) -> None:
    shutil.rmtree(packages[1].parent)
    frames_NHWC = np.zeros((1, HEIGHT, WIDTH, 3), np.uint8)
    options = {"concurrency": 2, "seconds": 0.02, "num_windows": 3}
    with open_engine(workshop.engine("float", "cpu_onnxruntime")) as runner:
        if is_running:
            with running(packages[0]):
                load = _load_metered(runner, frames_NHWC, Timed.frame, powercap=tmp_path, **options)
            assert load["joules"] >= 1 and load["joules"] == int(load["joules"])
            assert load["energy_note"] == "RAPL of package-0, all processes"
        else:
            load = _load_metered(runner, frames_NHWC, Timed.frame, powercap=tmp_path, **options)
            assert load["joules"] is None
            assert load["energy_note"] == "RAPL of package-0, all processes: the counter stands still"
    assert len(load["calls_per_s"]) == 3 and len(load["latencies_ns"]) >= 6
