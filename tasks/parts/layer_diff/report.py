"""Report of diff_layers: how far an engine deviates from the float graph, and the layers to look at first."""

from dataclasses import dataclass

from tasks.parts.layer_diff.bisection import Bisection
from tasks.parts.layer_diff.table import Layer


@dataclass(frozen=True)
class LayerDifferences:
    """Result of the comparison with the float graph."""

    num_images: int
    num_tensors: int
    """Tensors of the float graph that depend on the image."""
    num_layers: int
    """Tensors that are compared one by one: the rows of layers.csv."""
    num_fused: int
    """Tensors that the engine never exposes, compared with the layer that they are fused into."""
    logits_sqnr_db: float
    """The engine's logits against those of the float graph."""
    logits_cosine: float
    variant_logits_sqnr_db: float | None
    """The logits of the variant's graph against those of the float graph; None if that is the float graph."""
    runtime_logits_sqnr_db: float | None
    """The engine's logits against those of the variant's graph; None if that is the float graph."""
    worst_sqnr_db: float
    first_collapse: Layer | None
    """First layer in graph order below diff_layers.collapse_db; None if none is."""
    largest_own_drop: Layer | None
    """Layer that adds most noise relative to its signal, fed with exact inputs if the variant is not the float graph;
    None if none adds any."""
    marking: str
    """How reading the layers changes the engine."""
    marked_agreement_db: float
    """SQNR of the logits of the engine file against those of the run with marked layers."""
    bisection: Bisection | None
    """Which layers have to run in float; None unless enabled, or if the graph has no Q/DQ."""


@dataclass(frozen=True)
class DiffReport:
    """Where one engine deviates from the network."""

    status: str
    """"built", or why there was nothing to compare: "skipped", "failed"."""
    reason: str
    engine_sha256: str
    differences: LayerDifferences | None
    """None if nothing was compared."""
