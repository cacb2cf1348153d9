"""Read what affects latency besides the engine: which machine it is, its clocks, power, temperatures and versions."""

import hmac
import importlib.metadata
import os
import platform
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tasks.core.errors import TargetMismatch
from tasks.parts.cpu import read_cpu_quota, usable_cores
from tasks.parts.engines.gpu import first_bus_id
from tasks.parts.engines.machine import read_cpu_model, read_isa
from tasks.parts.engines.runtimes import CUDA

_MIB = 1 << 20
_MACHINE_ID = Path("/etc/machine-id")
_GOVERNOR = Path("/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor")
MACHINE_ID_VARIABLE = "ENGINEWRIGHT_MACHINE_ID"
"""Environment variable that names a machine whose system does not."""
_CPU_SENSORS = ("coretemp", "k10temp", "zenpower", "cpu_thermal")
"""Names of Linux drivers that measure the processor."""
_THROTTLE_REASONS = {
    "SwPowerCap": "power cap",
    "HwSlowdown": "hardware slowdown",
    "SwThermalSlowdown": "software thermal slowdown",
    "HwThermalSlowdown": "hardware thermal slowdown",
    "HwPowerBrakeSlowdown": "power brake",
    "ApplicationsClocksSetting": "clocks set by the user",
}
"""Suffixes of NVML's names -> their meaning; an idle GPU is not a reason."""


@dataclass(frozen=True)
class Machine:
    """The machine that a latency belongs to; latencies of different machines cannot be compared."""

    id: str
    """Digest of ENGINEWRIGHT_MACHINE_ID or /etc/machine-id, which itself is confidential."""
    cpu_model: str
    cpu_flags: tuple[str, ...]
    """Instruction sets that change which kernels a runtime picks."""
    governor: str | None
    """How Linux chooses the clock of the CPU; None if it does not say, as in most virtual machines."""
    versions: dict[str, str]
    """Versions that latency depends on, besides those of the runtimes."""


@dataclass(frozen=True)
class GpuState:
    """What NVML reports; None if this GPU does not support it."""

    sm_mhz: int | None
    memory_mhz: int | None
    watts: float | None
    celsius: int | None
    throttled_by: tuple[str, ...] | None


@dataclass(frozen=True)
class MachineState:
    """The machine at one moment; None if it does not report a value."""

    cpu_mhz: float | None
    """Mean of all cores."""
    cpu_celsius: float | None
    """The hottest sensor of the processor."""
    gpu: GpuState | None
    gpu_note: str
    """Why `gpu` is None; otherwise empty."""


def read_machine(device: str) -> Machine:
    """Describe this machine, for a target of device cuda with the version of the driver."""
    governor = _GOVERNOR.read_text(encoding="ascii").strip() if _GOVERNOR.is_file() else None
    return Machine(read_machine_id(), read_cpu_model(), read_isa(), governor, read_versions(device))


def measuring_environment() -> dict[str, str]:
    """Return what a measurement depends on besides what is measured: the machine, and how much of it is ours.

    Raises TargetMismatch if the machine has no id.
    """
    quota = read_cpu_quota()
    return {
        "machine": read_machine_id(),
        "cpu": read_cpu_model(),
        "usable_cores": str(usable_cores()),
        "cpu_quota": "none" if quota is None else f"{quota:g} cores",
    }


def read_machine_id(file: Path = _MACHINE_ID, variables: Mapping[str, str] = os.environ) -> str:
    """Return a keyed digest of the machine's id, as machine-id(5) asks for.

    Raises TargetMismatch without one: two machines with the same CPU would share their measurements.
    """
    content = variables.get(MACHINE_ID_VARIABLE, "").strip().encode()
    if not content and file.is_file():
        content = file.read_bytes().strip()
    if not content:
        raise TargetMismatch(
            f"This machine has no id: {file} is missing or empty, so measurements could not be told from those of "
            f"another machine. In a container mount the file of its host (docker run --volume {file}:{file}:ro), or "
            f"set {MACHINE_ID_VARIABLE} to a name that no other machine has; elsewhere run "
            "`systemd-machine-id-setup`."
        )
    return hmac.new(content, b"enginewright", "sha256").hexdigest()[:16]


def read_machine_state(device: str) -> MachineState:
    """Read the CPU, and for a target of device cuda the first visible GPU."""
    import psutil

    try:
        frequency = psutil.cpu_freq()
    except NotImplementedError:  # some virtual machines
        frequency = None
    sensors = psutil.sensors_temperatures() if hasattr(psutil, "sensors_temperatures") else {}
    celsius = [sensor.current for name in _CPU_SENSORS for sensor in sensors.get(name, [])]
    gpu, note = _read_gpu() if device == CUDA else (None, "the target does not use one")
    return MachineState(frequency.current if frequency else None, max(celsius, default=None), gpu, note)


def read_gpu_memory_mib(pid: int) -> float | None:
    """Return the memory of a process on the first visible GPU, including its CUDA context.

    None if NVML does not report it, as in a container that does not see the process ids of its host.
    """
    with open_gpu() as (nvml, handle, _):
        processes = _ask(nvml, nvml.nvmlDeviceGetComputeRunningProcesses, handle) if nvml else None
    used = [process.usedGpuMemory for process in processes or () if process.pid == pid]
    return used[0] / _MIB if used and used[0] is not None else None


def read_versions(device: str) -> dict[str, str]:
    """Return the versions that latency depends on, besides that of the runtime."""
    versions = {
        "system": platform.platform(),
        "python": platform.python_version(),
        "numpy": importlib.metadata.version("numpy"),
    }
    if device == CUDA:
        with open_gpu() as (nvml, _, _):
            driver = _ask(nvml, nvml.nvmlSystemGetDriverVersion) if nvml else None
        versions["nvidia driver"] = driver or "unknown"
    return versions


def _read_gpu() -> tuple[GpuState | None, str]:
    with open_gpu() as (nvml, handle, note):
        if nvml is None:
            return None, note
        milliwatts = _ask(nvml, nvml.nvmlDeviceGetPowerUsage, handle)
        reasons = _ask(nvml, nvml.nvmlDeviceGetCurrentClocksThrottleReasons, handle)
        state = GpuState(
            sm_mhz=_ask(nvml, nvml.nvmlDeviceGetClockInfo, handle, nvml.NVML_CLOCK_SM),
            memory_mhz=_ask(nvml, nvml.nvmlDeviceGetClockInfo, handle, nvml.NVML_CLOCK_MEM),
            watts=None if milliwatts is None else milliwatts / 1000,
            celsius=_ask(nvml, nvml.nvmlDeviceGetTemperature, handle, nvml.NVML_TEMPERATURE_GPU),
            throttled_by=None if reasons is None else name_throttle_reasons(nvml, reasons),
        )
    return state, ""


def name_throttle_reasons(nvml: Any, reasons: int) -> tuple[str, ...]:
    """Return in words what slows the clocks down; `nvml` is the module pynvml."""
    return tuple(
        words
        for name, words in _THROTTLE_REASONS.items()
        if reasons & getattr(nvml, f"nvmlClocksThrottleReason{name}")
    )


@contextmanager
def open_gpu() -> Iterator[tuple[Any, Any, str]]:
    """Yield pynvml, the handle of the first visible GPU and ``""``; without a GPU, None, None and the reason."""
    try:
        import pynvml
    except ModuleNotFoundError:
        yield None, None, "nvidia-ml-py is not installed (extra gpu)"
        return
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        yield None, None, f"NVML does not start: {error}"
        return
    try:
        handle = pynvml.nvmlDeviceGetHandleByPciBusId(first_bus_id())
    except pynvml.NVMLError as error:
        yield None, None, f"NVML does not know the GPU: {error}"
    else:
        yield pynvml, handle, ""
    finally:
        pynvml.nvmlShutdown()


def _ask(nvml: Any, function: Callable[..., Any], *arguments: Any) -> Any:
    """Call a function of NVML; return None if this GPU does not support it."""
    try:
        return function(*arguments)
    except nvml.NVMLError:
        return None
