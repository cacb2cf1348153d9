"""Which network to build, and how large; needs no torch, so that a configuration can be checked without it."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Annotated, Any

from tasks.core.bounds import AtLeast, AtMost, MinItems, MoreThan
from tasks.core.errors import ConfigError


class NetworkName(StrEnum):
    """An architecture of this package (its file names its source), or where a foreign one comes from."""

    deeplabv3plus = "deeplabv3plus"
    fast_scnn = "fast_scnn"
    bisenetv2 = "bisenetv2"
    ddrnet = "ddrnet"
    espnetv2 = "espnetv2"
    mobile_unet = "mobile_unet"
    mobilevit = "mobilevit"
    repvgg = "repvgg"
    segformer = "segformer"
    dinov2 = "dinov2"
    custom = "custom"
    """A Python file of the user with a function that returns the network."""
    installed = "installed"
    """A Python package that offers networks as entry points of the group ENTRY_POINTS."""
    transformers = "transformers"
    """Any AutoModelForSemanticSegmentation of `transformers`, by its configuration."""

    @property
    def is_foreign(self) -> bool:
        """Whether its code is not in this package."""
        return self in (NetworkName.custom, NetworkName.installed, NetworkName.transformers)


OWN_NETWORKS = tuple(name for name in NetworkName if not name.is_foreign)

SEGFORMER_SIZES = ("b0", "b1", "b2", "b3", "b4", "b5")
"""The sizes of SegFormer's paper, for `arguments.size`; width and depth scale them further."""

ENTRY_POINTS = "enginewright.networks"

FOREIGN_PREFIX = "network."
"""What stands before the names of a foreign network's tensors in our checkpoints."""


Multiplier = Annotated[float, MoreThan(0), AtMost(8)]


@dataclass(frozen=True)
class NetworkConfig:
    """Which network, and how large."""

    name: NetworkName
    """Architecture, or where a foreign one comes from."""
    width: Multiplier | None
    """Multiplier of all channel counts, rounded to multiples of 8; MACs grow with its square. None if foreign."""
    depth: Multiplier | None
    """Multiplier of the number of blocks in each repeated stage; at least one block stays. None if foreign."""
    depthwise: bool
    """Replace plain convolutions of 3x3 or more by depthwise-separable ones: about 1/8 of the MACs."""
    file: str | None = None
    """For custom: the Python file, relative to the repository. For transformers: a config.json, or None."""
    factory: str | None = None
    """For custom: the function of the file that returns the network. For installed: the name of the entry point."""
    arguments: Mapping[str, Any] = field(default_factory=dict)
    """What the function is called with beside num_classes; for transformers values of the configuration; for
    segformer {size: b0} to {size: b5}, of which b0 is the default; empty for other networks of this package."""
    atrous_rates: Annotated[list[Annotated[int, AtLeast(1)]], MinItems(1)] | None = None
    """For deeplabv3plus: distance of the taps in each branch of its pyramid, at stride 16; None: 1, 2, 3."""

    def __post_init__(self) -> None:
        sized, named = (self.width, self.depth), (self.file, self.factory)
        if self.atrous_rates is not None and self.name is not NetworkName.deeplabv3plus:
            raise ConfigError(
                f"atrous_rates is {self.atrous_rates}, and name is {self.name}, which has none: they belong to "
                "deeplabv3plus. Leave the key out, or choose network@train.baseline.network=deeplabv3plus."
            )
        if not self.name.is_foreign:
            if None in sized:
                raise ConfigError(f"width is {self.width} and depth is {self.depth}, expected two numbers.")
            is_sized = self.name is NetworkName.segformer and self.arguments.keys() == {"size"}
            if is_sized and self.arguments["size"] not in SEGFORMER_SIZES:
                raise ConfigError(
                    f"arguments.size is {self.arguments['size']!r}, expected one of {', '.join(SEGFORMER_SIZES)}. "
                    "Choose network@train.baseline.network=segformer_b2, for example."
                )
            if any(named) or (self.arguments and not is_sized):
                raise ConfigError(
                    f"file, factory and arguments belong to networks of your own, and name is {self.name}. Choose "
                    "network@train.baseline.network=custom."
                )
            return
        if any(sized):
            raise ConfigError(
                f"width is {self.width} and depth is {self.depth}, which size our own networks only. Hand "
                f"{self.name} what sizes it in network.arguments."
            )
        if self.name is NetworkName.custom and not all(named):
            raise ConfigError(
                f"file is {self.file} and factory is {self.factory}, expected a Python file and the name of its "
                "function that returns the network."
            )
        if self.name is NetworkName.installed and (self.file or not self.factory):
            raise ConfigError(
                f"factory is {self.factory}, expected the name of an entry point of the group {ENTRY_POINTS}, and no "
                "network.file."
            )
        if self.name is NetworkName.transformers and (
            self.factory or not (self.file or "model_type" in self.arguments)
        ):
            raise ConfigError(
                "arguments has no model_type, which names the architecture: set network.arguments.model_type, or "
                "network.file to a config.json; network.factory stays null."
            )
