"""What the machine tells. What a GPU tells through NVML: tests/gpu."""

import platform
import sys

import psutil
import pynvml
import pytest

from tasks.parts.engines.gpu import find_gpus
from tasks.parts.measuring.machine_state import (
    name_throttle_reasons,
    read_gpu_memory_mib,
    read_machine_state,
    read_versions,
)

without_gpu = pytest.mark.skipif(bool(find_gpus()), reason="this machine has an NVIDIA GPU")


def test_cpu_is_read_and_no_gpu_where_the_target_uses_none() -> None:
    state = read_machine_state("cpu")
    assert (state.cpu_mhz is None) == (psutil.cpu_freq() is None)
    assert state.cpu_celsius is None or 0 < state.cpu_celsius < 150
    assert (state.gpu, state.gpu_note) == (None, "the target does not use one")


@without_gpu
def test_machine_without_nvml_says_so() -> None:
    state = read_machine_state("cuda")
    assert state.gpu is None and state.gpu_note.startswith("NVML does not start")
    assert read_gpu_memory_mib(1) is None
    assert read_versions("cuda")["nvidia driver"] == "unknown"


@without_gpu
def test_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)  # as Python marks a module that is not there
    assert read_machine_state("cuda").gpu_note == "nvidia-ml-py is not installed (extra gpu)"


def test_throttle_reasons_are_named_in_words() -> None:
    reasons = pynvml.nvmlClocksThrottleReasonSwPowerCap | pynvml.nvmlClocksThrottleReasonHwThermalSlowdown
    assert name_throttle_reasons(pynvml, reasons) == ("power cap", "hardware thermal slowdown")
    assert name_throttle_reasons(pynvml, pynvml.nvmlClocksThrottleReasonGpuIdle) == ()
    assert len(name_throttle_reasons(pynvml, pynvml.nvmlClocksThrottleReasonAll)) == 6


@pytest.mark.parametrize(
    "name",
    [
        "nvmlDeviceGetClockInfo",
        "nvmlDeviceGetComputeRunningProcesses",
        "nvmlDeviceGetCurrentClocksThrottleReasons",
        "nvmlDeviceGetHandleByPciBusId",
        "nvmlDeviceGetPowerUsage",
        "nvmlDeviceGetTemperature",
        "nvmlDeviceGetTotalEnergyConsumption",
        "nvmlSystemGetDriverVersion",
    ],
)
def test_functions_of_nvml_exist(name: str) -> None:
    assert callable(getattr(pynvml, name))


def test_versions_are_those_of_this_process() -> None:
    versions = read_versions("cpu")
    assert versions["python"] == platform.python_version() and set(versions) == {"system", "python", "numpy"}
