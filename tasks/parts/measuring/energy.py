"""Read how much energy the hardware uses: of the CPU through RAPL, of an NVIDIA GPU through NVML.

Both count the energy of a whole device since some moment in the past, including other processes and what the device
uses when it is idle. The layout of RAPL's counters is that of the kernel's Documentation/power/powercap/powercap.rst.
RAPL was not run on real hardware.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tasks.parts.engines.runtimes import CUDA
from tasks.parts.measuring.machine_state import open_gpu

POWERCAP = Path("/sys/class/powercap")

_PACKAGES = "package-"
"""Start of the names of zones that are a processor, also of AMD. Their subzones are parts of it, psys holds them all,
and the zones of intel-rapl-mmio are the same once more."""
_RAPL_MIN_S = 0.05
"""RAPL renews its counters about every millisecond (Intel SDM, volume 3, RAPL interfaces)."""
_NVML_MIN_S = 1.0
"""NVML renews its readings every 20 to 100 ms, depending on the GPU (Yang et al. 2024, arXiv:2312.02741)."""


@dataclass(frozen=True)
class EnergyMeter:
    """Counters of energy that can be read at any time."""

    name: str
    """What they cover: ``RAPL of package-0, all processes``."""
    min_s: float
    """The shortest time that they can measure."""
    read_uj: Callable[[], tuple[int, ...]]
    """Returns the value of each counter in microjoules."""
    ranges_uj: tuple[int, ...]
    """Where each counter starts again at zero."""

    def joules_between(self, before_uj: Sequence[int], after_uj: Sequence[int]) -> float:
        """Return the energy between two readings, between which no counter may start again twice."""
        pairs = zip(before_uj, after_uj, self.ranges_uj, strict=True)
        return sum((after - before) % length for before, after, length in pairs) / 1e6


def shortest_metered_s(device: str) -> float:
    """Return for how long engines on a device have to run so that their energy can be metered."""
    return _NVML_MIN_S if device == CUDA else _RAPL_MIN_S


@contextmanager
def open_energy_meter(
    device: str, *, seconds: float, powercap: Path = POWERCAP
) -> Iterator[tuple[EnergyMeter | None, str]]:
    """Yield a meter for `seconds` on the device that engines run on, and what it covers.

    Yields None and the reason if the device does not tell its energy, or not that of so short a time.
    """
    with _open_nvml() if device == CUDA else _open_rapl(powercap) as (meter, note):
        if meter is not None and seconds < meter.min_s:
            yield None, f"{seconds:g} s are too short for {meter.name}, which needs {meter.min_s:g} s"
        else:
            yield meter, note


@contextmanager
def _open_nvml() -> Iterator[tuple[EnergyMeter | None, str]]:
    with open_gpu() as (nvml, handle, note):
        if nvml is None:
            yield None, note
            return

        def read_uj() -> tuple[int, ...]:
            return (1000 * nvml.nvmlDeviceGetTotalEnergyConsumption(handle),)

        try:
            read_uj()
        except nvml.NVMLError as error:  # older than Volta, or a MIG instance
            yield None, f"this GPU does not count its energy (NVML: {error})"
            return
        name = "NVML, the whole GPU without the CPU"
        yield EnergyMeter(name, _NVML_MIN_S, read_uj, (1000 * 2**64,)), name


@contextmanager
def _open_rapl(powercap: Path) -> Iterator[tuple[EnergyMeter | None, str]]:
    zones = [zone for zone in sorted(powercap.glob("intel-rapl:*")) if (zone / "name").is_file()]
    names = {(zone / "name").read_text(encoding="ascii").strip(): zone for zone in zones}
    packages = {name: zone for name, zone in names.items() if name.startswith(_PACKAGES)}
    if not packages:
        yield None, f"{powercap} has no counter of a processor: few virtual machines and containers have one"
        return

    def read_uj() -> tuple[int, ...]:
        return tuple(int((zone / "energy_uj").read_text(encoding="ascii")) for zone in packages.values())

    try:
        read_uj()
        ranges_uj = [int((zone / "max_energy_range_uj").read_text("ascii")) for zone in packages.values()]
    except PermissionError as error:
        yield None, f"only root may read RAPL: sudo chmod a+r {error.filename}"
        return
    except (OSError, ValueError) as error:
        yield None, f"RAPL cannot be read ({error})"
        return
    name = f"RAPL of {', '.join(packages)}, all processes"
    yield EnergyMeter(name, _RAPL_MIN_S, read_uj, tuple(length + 1 for length in ranges_uj)), name
