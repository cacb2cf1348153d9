"""Calibrators, and operators that can read INT8; needs no onnx, so that a configuration can be checked without it."""

from enum import StrEnum
from typing import Annotated, Literal

from tasks.core.bounds import Holds

OpType = Literal[
    "Conv",
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


class Calibrator(StrEnum):
    """How the INT8 range of a tensor is chosen from its statistics on calibration images."""

    minmax = "minmax"
    entropy = "entropy"
    percentile = "percentile"
    mse = "mse"
