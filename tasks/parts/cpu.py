"""What this machine's CPU can do."""

import functools
from pathlib import Path

VNNI = frozenset({"avx_vnni", "avx512_vnni"})
"""Flags of CPUs that add up products of INT8 in 32 bits."""


@functools.cache
def read_cpu_flags() -> frozenset[str]:
    """Return the flags of this machine's CPU; empty if the system does not report them (not Linux)."""
    cpuinfo = Path("/proc/cpuinfo")
    if not cpuinfo.is_file():
        return frozenset()
    for line in cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines():
        if line.startswith(("flags", "Features")):
            return frozenset(line.partition(":")[2].split())
    return frozenset()


def int8_sums() -> str:
    """Return how INT8 kernels of this CPU add products: the fact behind graphs that are judged as they will run."""
    return "16 bits" if int8_sums_saturate() else "32 bits"


def int8_sums_saturate() -> bool:
    """Return whether INT8 kernels of this CPU add two products in 16 bits, as x86 does without VNNI."""
    flags = read_cpu_flags()
    return "ssse3" in flags and not VNNI & flags
