"""Which network to build, and how large; needs no torch, so that a configuration can be checked without it."""

from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated

from tasks.core.bounds import AtMost, MoreThan


class NetworkName(StrEnum):
    """An architecture; the file of that name gives its source."""

    deeplabv3plus = "deeplabv3plus"
    fast_scnn = "fast_scnn"
    bisenetv2 = "bisenetv2"
    mobile_unet = "mobile_unet"
    segformer = "segformer"
    dinov2 = "dinov2"


Multiplier = Annotated[float, MoreThan(0), AtMost(8)]


@dataclass(frozen=True)
class NetworkConfig:
    """Which network, and how large."""

    name: NetworkName
    """Architecture; the file of the same name describes it and gives its source."""
    width: Multiplier
    """Multiplier of all channel counts, rounded to multiples of 8. MACs grow with its square."""
    depth: Multiplier
    """Multiplier of the number of blocks in each repeated stage; at least one block stays."""
    depthwise: bool
    """Replace plain convolutions of 3x3 or more by depthwise-separable ones: about 1/8 of the MACs."""
