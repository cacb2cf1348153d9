"""Theoretical multiply-adds per second of a CPU, beside which the measured ones stand.

The clock is the one that the system reports; most CPUs run above it, so a measured rate can be the higher one.
"""

from collections.abc import Collection

FMA_UNITS = 2
"""Vector units of a core that multiply and add, as in most cores of servers since 2015 (Intel 64 and IA-32
Architectures Optimization Reference Manual; AMD's Software Optimization Guides)."""

HIGHEST_CLOCK_HZ = 6.5e9
"""No CPU's clock is higher, so that no rate above what it would give is believed."""

_AMX_MACS = {"int8": 1024, "bf16": 512}
"""Per cycle: a tile product of 16 x 16 x 64 int8 values takes 16 cycles (Intel's optimization manual, chapter 20)."""


def macs_per_cycle(flags: Collection[str], precision: str) -> tuple[int, str] | None:
    """Return the multiply-adds of a core per cycle and how they come about; None for an unknown instruction set."""
    bits = 512 if "avx512f" in flags else 256 if "avx2" in flags else 0
    if not bits:
        return None
    if precision in _AMX_MACS and {"amx_tile", f"amx_{precision}"} <= set(flags):
        return _AMX_MACS[precision], f"AMX {_AMX_MACS[precision]} per cycle"
    if precision == "f32":
        return FMA_UNITS * bits // 32, f"{FMA_UNITS} units x {bits // 32} floats of {bits} bits"
    if precision == "bf16" and "avx512_bf16" in flags:
        return FMA_UNITS * bits // 16, f"{FMA_UNITS} units x {bits // 16} values of {bits} bits"
    if precision == "int8":
        if {"avx512_vnni", "avx_vnni"} & set(flags):
            used = 512 if "avx512_vnni" in flags else 256
            return FMA_UNITS * used // 8, f"{FMA_UNITS} units x {used // 8} values of {used} bits (VNNI)"
        products = bits // 8
        return (
            FMA_UNITS * products // 3,
            f"{FMA_UNITS} units x {products} values of {bits} bits / 3 instructions (no VNNI)",
        )
    return None


def highest_possible(flags: Collection[str], precision: str, *, num_threads: int) -> float | None:
    """Return multiply-adds per second that no CPU with these instruction sets exceeds; None for unknown ones."""
    found = macs_per_cycle(flags, precision)
    if found is None:
        return None
    is_without_vnni = precision == "int8" and "(no VNNI)" in found[1]
    overlap = (
        3 if is_without_vnni else 1
    )  # cores with a third vector unit run the three instructions side by side
    return HIGHEST_CLOCK_HZ * found[0] * overlap * num_threads


def theoretical_peak(
    flags: Collection[str], precision: str, *, clock_mhz: float | None, num_threads: int
) -> tuple[float | None, str]:
    """Return multiply-adds per second and the formula; None, with the reason, if the machine does not tell."""
    found = macs_per_cycle(flags, precision)
    if found is None:
        return (
            None,
            f"no formula for {precision} on a CPU with {', '.join(flags) or 'none of the known flags'}",
        )
    if clock_mhz is None:
        return None, f"{found[1]}; the machine does not tell its clock"
    return (
        1e6 * clock_mhz * found[0] * num_threads,
        f"{clock_mhz / 1000:.2f} GHz x {found[1]} x {num_threads} threads",
    )
