"""Nodes of a graph that stay in float32 when the others become FP16; needs no onnx."""

from dataclasses import dataclass
from enum import StrEnum


class Cause(StrEnum):
    """Why a node stays in float32."""

    operator = "operator"
    """Its type is among those that are named to stay."""
    large_constant = "large_constant"
    """FP16 ends below a constant that it reads."""
    small_constant = "small_constant"
    """FP16 has too few bits, or none, for a constant that it reads."""
    scale = "scale"
    """FP16 rounds the scale of a quantized weight that it reads by more than half a level."""
    large_values = "large_values"
    """A tensor that it reads or writes gets close to the end of FP16, or beyond."""
    small_values = "small_values"
    """A tensor that it reads or writes is so small that FP16 has too few bits for it, or none."""


@dataclass(frozen=True)
class Float32Node:
    """A node that stays in float32."""

    name: str
    op_type: str
    cause: Cause
    tensor: str
    """The constant, scale or activation; empty if the operator is the cause."""
    magnitude: float
    """Its largest magnitude; 0 if the operator is the cause."""
