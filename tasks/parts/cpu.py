"""What this machine's CPU can do."""

import functools
import os
from pathlib import Path

_CGROUPS, _OWN_CGROUP = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")

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


def usable_cores() -> int:
    """Return on how many logical cores this process may run: its CPU affinity, as of taskset or a cpuset."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1  # macOS has no affinity


def read_cpu_quota(cgroups: Path = _CGROUPS, own: Path = _OWN_CGROUP) -> float | None:
    """Return how many cores' time this process may use, the least of its control groups; None without a limit.

    Version 2 has `cpu.max` with quota and period, version 1 `cpu.cfs_quota_us` and `cpu.cfs_period_us` (cgroups(7)).
    In a container the own group is the root that it sees.
    """
    limits = []
    for line in own.read_text(encoding="ascii").splitlines() if own.is_file() else []:
        number, controllers, path = line.split(":", 2)
        is_version_2 = number == "0" and not controllers
        if not is_version_2 and "cpu" not in controllers.split(","):
            continue
        root = cgroups if is_version_2 else cgroups / "cpu"
        folder = root / path.lstrip("/")
        for group in (folder, *folder.parents):
            if not group.is_relative_to(root):
                break
            limits.append(_quota_of(group, is_version_2=is_version_2))
    return min((limit for limit in limits if limit is not None), default=None)


def _quota_of(group: Path, *, is_version_2: bool) -> float | None:
    names = ("cpu.max",) if is_version_2 else ("cpu.cfs_quota_us", "cpu.cfs_period_us")
    files = [group / name for name in names]
    if not all(file.is_file() for file in files):
        return None
    quota, period = " ".join(file.read_text(encoding="ascii") for file in files).split()
    return None if quota in ("max", "-1") else int(quota) / int(period)
