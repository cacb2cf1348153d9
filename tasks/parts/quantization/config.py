"""The names of calibrators and of operators that can read INT8; light, so that a configuration can be checked
without onnx."""

from collections.abc import Sequence
from enum import StrEnum

from tasks.core.errors import ConfigError

OP_TYPES = (
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
)
"""All that Q/DQ insertion and training in simulated INT8 know."""


def check_op_types(op_types: Sequence[str], key: str) -> None:
    """Raise ConfigError unless these are known operators, Conv among them; `key` is the one in the configuration."""
    unknown = [name for name in op_types if name not in OP_TYPES]
    if unknown or "Conv" not in op_types:
        problem = f"has {', '.join(unknown)}" if unknown else "lacks Conv"
        raise ConfigError(
            f"{key} is [{', '.join(op_types)}], which {problem}; expected Conv and any of {', '.join(OP_TYPES[1:])}."
        )


class Calibrator(StrEnum):
    """How the INT8 range of a tensor is chosen from what calibration images showed."""

    minmax = "minmax"
    entropy = "entropy"
    percentile = "percentile"
    mse = "mse"
