"""The names of the calibrators; light, so that a configuration can be checked without onnx."""

from enum import StrEnum


class Calibrator(StrEnum):
    """How the INT8 range of a tensor is chosen from what calibration images showed."""

    minmax = "minmax"
    entropy = "entropy"
    percentile = "percentile"
    mse = "mse"
