"""The calibrators and the operators that can read INT8; light, so that a configuration is checked without onnx."""

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
"""An ONNX operator that Q/DQ insertion and training in simulated INT8 know."""

OpTypes = Annotated[list[OpType], Holds("Conv")]


class Calibrator(StrEnum):
    """How the INT8 range of a tensor is chosen from what calibration images showed."""

    minmax = "minmax"
    entropy = "entropy"
    percentile = "percentile"
    mse = "mse"
