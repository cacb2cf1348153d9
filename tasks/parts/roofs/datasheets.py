"""What NVIDIA states for its GPUs, beside which the measured roofs stand. Few programs come near it.

Source: the data sheets of A100, H100 (SXM5, PCIe), H200, L4, L40S and T4, and the whitepaper of the Ada architecture
for the RTX 4090 (FP16 with FP32 accumulation). All numbers are dense: where a sheet states only the rate with 2:4
sparsity, half of it stands here. GPUs are found by the name that the driver gives them. Jetsons are left out because
it calls all modules with an Orin "Orin".
"""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class DataSheet:
    """One GPU."""

    tops: Mapping[str, float]
    """Tera-operations per second by precision; a multiply-add counts as two. "tf32" is float32 on Tensor Cores."""
    gb_per_s: float
    """Bandwidth of the memory."""


def _tops(f32: float, tf32: float, f16: float, int8: float) -> dict[str, float]:
    return {"f32": f32, "tf32": tf32, "f16": f16, "bf16": f16, "int8": int8}


_A100, _HOPPER_SXM = _tops(19.5, 156, 312, 624), _tops(67, 494.5, 989.5, 1979)

DATA_SHEETS = {
    "NVIDIA A100-SXM4-40GB": DataSheet(_A100, 1555),
    "NVIDIA A100-PCIE-40GB": DataSheet(_A100, 1555),
    "NVIDIA A100-SXM4-80GB": DataSheet(_A100, 2039),
    "NVIDIA A100 80GB PCIe": DataSheet(_A100, 1935),
    "NVIDIA H100 80GB HBM3": DataSheet(_HOPPER_SXM, 3350),
    "NVIDIA H100 PCIe": DataSheet(_tops(51, 378, 756.5, 1513), 2000),
    "NVIDIA H200": DataSheet(_HOPPER_SXM, 4800),
    "NVIDIA L4": DataSheet(_tops(30.3, 60, 121, 242.5), 300),
    "NVIDIA L40S": DataSheet(_tops(91.6, 183, 362, 733), 864),
    "NVIDIA GeForce RTX 4090": DataSheet(_tops(82.6, 82.6, 165.2, 660.6), 1008),
    "Tesla T4": DataSheet({"f32": 8.1, "f16": 65, "int8": 130}, 320),
}
"""By the name that the driver and nvidia-smi print."""


def stated_peak(gpu: str, precision: str) -> tuple[float | None, str]:
    """Return multiply-adds per second and where the number is from; None, with the reason, if there is none."""
    sheet = DATA_SHEETS.get(gpu)
    if sheet is None or precision not in sheet.tops:
        return None, f"no data-sheet value of {gpu or 'an unknown GPU'} for {precision}"
    tops = sheet.tops[precision]
    return tops * 1e12 / 2, f"data sheet of {gpu}: {tops:g} tera-operations per second, dense, / 2"


def stated_bandwidth(gpu: str) -> float | None:
    """Return bytes per second of the memory; None for a GPU that is not in the table."""
    return DATA_SHEETS[gpu].gb_per_s * 1e9 if gpu in DATA_SHEETS else None
