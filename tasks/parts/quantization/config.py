"""Calibrators, and operators that can read INT8; needs no onnx, so that a configuration can be checked without it."""

from collections.abc import Collection
from enum import StrEnum
from typing import Annotated, Literal

from tasks.core.bounds import Holds

OpType = Literal[
    "Conv",
    "ConvTranspose",
    "MatMul",
    "BatchMatMul",
    "Gemm",
    "Add",
    "Mul",
    "Concat",
    "AveragePool",
    "GlobalAveragePool",
    "MaxPool",
    "Resize",
    "Sigmoid",
]
"""An ONNX operator that Q/DQ insertion and training in simulated INT8 support.

MatMul and Gemm stand for products with a constant weight, BatchMatMul for a MatMul of two activations: both products
of attention. Training in simulated INT8 leaves the latter in float.
"""

OpTypes = Annotated[list[OpType], Holds("Conv")]

MANY_LAYERS = 64
"""In graphs with more layers, rank_layers and quantize_partial do not try them one by one."""


class Activations(StrEnum):
    """Type of the activations in an engine."""

    uint8 = "uint8"
    """With a zero point, so that the levels cover the range of a tensor: CPU runtimes."""
    int8 = "int8"
    """Symmetric, with wider steps: TensorRT."""


def coarsest(types: Collection[Activations]) -> Activations:
    """Return the type with the widest steps: int8 if it is among them."""
    return Activations.int8 if Activations.int8 in types else Activations.uint8


class Calibrator(StrEnum):
    """How the INT8 range of a tensor is chosen from its statistics on calibration images."""

    minmax = "minmax"
    entropy = "entropy"
    percentile = "percentile"
    mse = "mse"
