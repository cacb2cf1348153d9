"""What NVML tells of this machine's GPU: `make test-gpu`."""

import os
import time

import pytest
import torch

from tasks.parts.engines.gpu import find_gpus
from tasks.parts.measuring.energy import open_energy_meter
from tasks.parts.measuring.machine_state import read_gpu_memory_mib, read_machine_state, read_versions

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not find_gpus(), reason="no NVIDIA GPU on this machine"),
]


def test_clocks_power_and_temperature_of_the_first_visible_gpu_are_read() -> None:
    state = read_machine_state("cuda")
    assert state.gpu is not None, state.gpu_note
    assert state.gpu.sm_mhz and state.gpu.memory_mhz and state.gpu.watts
    assert state.gpu.celsius and 0 < state.gpu.celsius < 120
    assert state.gpu.throttled_by is not None


def test_driver_has_a_version() -> None:
    assert read_versions("cuda")["nvidia driver"][0].isdigit()


def test_energy_of_the_gpu_rises_or_the_reason_is_known() -> None:
    with open_energy_meter("cuda", seconds=1.0) as (meter, note):
        if meter is None:
            assert "does not count its energy" in note
            return
        before_uj = meter.read_uj()
        end = time.monotonic() + 1.0
        while time.monotonic() < end:
            torch.ones(1 << 20, device="cuda").sum().item()
        assert 1 < meter.joules_between(before_uj, meter.read_uj()) < 5000


def test_memory_of_a_process_is_known_or_null() -> None:
    held = torch.empty(1 << 26, dtype=torch.uint8, device="cuda")  # 64 MiB
    found = read_gpu_memory_mib(os.getpid())
    assert found is None or found > held.nbytes / (1 << 20)  # null in a container with process ids of its own
