"""A change of an engine, with the time that is predicted for it."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any

from tasks.parts.engines.target import Target


class ChangeKind(StrEnum):
    """The changes that can be predicted."""

    back_to_float = "back_to_float"
    """A run of layers leaves INT8."""
    wider = "wider"
    """Channels are padded with zeros to the next multiple."""
    narrower = "narrower"
    """Channels are cut to the multiple below, as pruning would."""
    scheme = "scheme"
    """Another switch of the target decides what a Q/DQ graph looks like."""
    batch = "batch"
    """Two images in one call."""


@dataclass(frozen=True)
class Change:
    """What would be changed, and what it is predicted to bring."""

    kind: ChangeKind
    title: str
    """What is changed, in words."""
    predicted_ms: float
    """Time of the changed engine for one image."""
    accuracy: str
    """What it costs in accuracy."""
    recipe: str
    """How to keep the change."""
    nodes: frozenset[str] = frozenset()
    """Nodes that leave INT8."""
    widths: Mapping[str, int] = field(default_factory=dict)
    """Convolution -> its new number of output channels."""
    switch: str = ""
    """Switch of the target that is turned on."""
    batch: int = 1
    """Images in one call."""


def turned_on(target: Target, switch: str) -> Target:
    """Return a target with one of its switches on."""
    options: dict[str, Any] = {switch: True}
    return replace(target, **options)
