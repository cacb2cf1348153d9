"""Tell from the name of a tactic which units of the GPU its kernel multiplies on.

TensorRT documents no names. They come from cuDNN, cuBLAS, CUTLASS and XMMA, which name the instruction: its shape
(``tensor16x8x32``, ``h884``, ``i8816``, ``s16816``) or its kind (``tensorop``, ``ffma``, ``simt``). XMMA alone says
nothing, it has kernels for both units. Not run on real hardware.
"""

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from enum import StrEnum


class Unit(StrEnum):
    """What a kernel multiplies on."""

    tensor_cores = "Tensor Cores"
    sparse_tensor_cores = "Tensor Cores with 2:4 sparsity"
    cuda_cores = "CUDA cores"
    unknown = ""
    """The name does not tell. Kernels that TensorRT generates (``__myl_...``) are such; most multiply nothing."""


_SHAPES = "884|1688|16816|16832|16864|8816|8832"
_UNITS = (
    (re.compile(r"(?<![a-z])sparse(?![a-z])|sptensor\d|spgemm", re.IGNORECASE), Unit.sparse_tensor_cores),
    (
        re.compile(
            rf"tensor\d+x\d+x\d+|tensorop|(?<![a-z])(hmma|imma|w?gmma)(?![a-z])|(?<![a-z\d])[his]({_SHAPES})(?!\d)"
            r"|_(tf32|b?f16|i8|e4m3|e5m2).*warpgroupsize\d",
            re.IGNORECASE,
        ),
        Unit.tensor_cores,
    ),
    (
        re.compile(
            r"(?<![a-z])(ffma|hfma|dp4a|simt|[his]cudnn|[hi]gemm|sgemm)(?![a-z])|^sm[56]\d_", re.IGNORECASE
        ),
        Unit.cuda_cores,
    ),
)
"""The first one that matches decides. GPUs before sm_70 have no Tensor Cores, so their kernels use none."""


def unit_of(tactic: str) -> Unit:
    """Return the units that the name of a tactic tells."""
    return next((unit for pattern, unit in _UNITS if pattern.search(tactic)), Unit.unknown)


def count_units(tactics: Iterable[str]) -> dict[str, int]:
    """Return how many kernels multiply on which units; those whose name does not tell count nowhere."""
    counts = Counter(unit_of(tactic) for tactic in tactics)
    return {unit.value: counts[unit] for unit in Unit if unit and counts[unit]}


def sum_up_units(counts: Mapping[str, int], *, may_be_sparse: bool) -> str:
    """Return "3 on Tensor Cores, 1 on CUDA cores" or the like, and whether 2:4 sparsity is proved.

    TensorRT may take dense kernels for sparse weights, so only a kernel's name proves that it uses the sparsity.
    """
    told = ", ".join(f"{count} on {unit}" for unit, count in counts.items())
    text = told or "their names do not tell on which units"
    is_sparse = Unit.sparse_tensor_cores in counts
    return f"{text}; 2:4 sparsity is not claimed, no name has it" if may_be_sparse and not is_sparse else text
