"""Calibrators, and operators that can read INT8; needs no onnx, so that a configuration can be checked without it."""

from enum import StrEnum
from typing import Annotated, Literal

from tasks.core.bounds import Holds

OpType = Literal[
    "Conv",
    "ConvTranspose",
    "MatMul",
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
"""An ONNX operator that Q/DQ insertion and training in simulated INT8 support."""

OpTypes = Annotated[list[OpType], Holds("Conv")]


class Activations(StrEnum):
    """Type of the activations in an engine."""

    uint8 = "uint8"
    """With a zero point, so that the levels cover the range of a tensor: CPU runtimes."""
    int8 = "int8"
    """Symmetric, with wider steps: TensorRT."""


class Calibrator(StrEnum):
    """How the INT8 range of a tensor is chosen from its statistics on calibration images."""

    minmax = "minmax"
    entropy = "entropy"
    percentile = "percentile"
    mse = "mse"
