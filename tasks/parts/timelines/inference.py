"""What the recorders of all runtimes share: an inference with the slices of its layers."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tasks.parts.engines.manifest import LAYERS_FILE
from tasks.parts.tables import read_table
from tasks.parts.timelines.trace import Slice

LayerTable = Mapping[str, Mapping[str, str]]
"""Name of a layer -> its row of layers.csv."""


@dataclass(frozen=True)
class Inference:
    """One inference; its layers lie in it, in the order of execution, and do not overlap."""

    start_us: float
    end_us: float
    layers: tuple[Slice, ...] = ()

    @property
    def duration_us(self) -> float:
        """How long it took."""
        return self.end_us - self.start_us


def read_layers(engine: Path) -> LayerTable:
    """Return the layers that build_engine found in an engine; none for engines without a table."""
    path = engine / LAYERS_FILE
    return read_table(path, "layer", stage="build_engine") if path.is_file() else {}


def layer_details(layers: LayerTable, name: str, *, kind: str) -> dict[str, Any]:
    """Return what is known of a layer; `kind` is the runtime's own word for one that is not in the table."""
    row = layers.get(name, {})
    return {
        "kind": row.get("kind", kind),
        "precision": row.get("precision", ""),
        "onnx_nodes": row.get("nodes", "").split(),
    }
