"""One engine with everything that was measured about it and the verdict: a row of engines.json."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum


class Verdict(StrEnum):
    """What becomes of an engine."""

    ACCEPT = "ACCEPT"
    TOO_LOSSY = "TOO_LOSSY"
    NOT_FASTER = "NOT_FASTER"
    BUILD_FAILED = "BUILD_FAILED"
    PRECISION_MISMATCH = "PRECISION_MISMATCH"
    SKIPPED = "SKIPPED"


@dataclass(frozen=True)
class SuspectLayer:
    """A layer that differs from the float graph, with the way back to its source."""

    kind: str
    """Why it is suspect: it is the first to collapse, or the one with the largest own drop."""
    node: str
    module: str
    source: str
    """``file:line`` of the module's call."""
    sqnr_db: float | None
    """Of the engine's output there, with the noise of all layers before."""
    own_sqnr_db: float | None
    """Of the layer alone, fed exact inputs; None where nothing but the runtime differs from the float graph."""


@dataclass(frozen=True)
class EngineRow:
    """Numbers are None where there is no engine."""

    variant: str
    target: str
    verdict: Verdict
    reason: str
    pareto: bool
    """No other sound engine of the target is as fast and as accurate, and better in one of the two."""
    picked: bool
    """The fastest accepted engine of its target."""
    precision: str
    """What the convolutions run in, most used first, as ``int8+f32``; of a row without an engine the target's."""
    macs_share: dict[str, float]
    """Precision -> share of the graph's MACs that the runtime really runs in it; empty where it does not tell."""
    macs_share_quantized: float | None
    """Share of the MACs that the graph wants in int8."""
    metric: str
    """What the score is: mIoU or top-1 accuracy, or the agreement with the float model in one of them."""
    miou: float | None
    """None for classification."""
    top1: float | None
    """None for segmentation."""
    score_rel_loss: float | None
    """Share of the float reference's score that is lost; negative: better than the reference."""
    pixel_accuracy: float | None
    iou: dict[str, float | None]
    """Per class; None for a class that neither truth nor prediction shows."""
    latency_ms_p50: float | None
    latency_ms_p90: float | None
    latency_ms_p99: float | None
    throughput_per_s: float | None
    """Images per second at batch 1, like every number of time that names no batch."""
    throughput_per_s_batched: float | None
    """Images per second at the largest of benchmark.batch_sizes that the engine takes."""
    speedup_vs_reference: float | None
    """Over the reference engine, measured in pairs with it; eager PyTorch with model=trained."""
    speedup_low: float | None
    speedup_high: float | None
    """Bounds of the bootstrap interval."""
    aa_ratio_spread: float | None
    """What the A/A control differs by: no smaller difference means anything."""
    inconclusive: bool
    memory_mib: float | None
    size_bytes: int | None
    engine_sha256: str | None
    """The file that accuracy and latency were measured on."""
    reference_sha256: str | None
    """The engine that the speed-up is over."""
    suspect_layers: tuple[SuspectLayer, ...]
    conditions: dict[str, str]
    """How the latency was measured."""

    @property
    def score(self) -> float | None:
        """MIoU, or top-1 accuracy."""
        return self.top1 if self.miou is None else self.miou

    @property
    def is_reduced(self) -> bool:
        """Whether some convolution runs in less than FP32."""
        return self.precision != "f32"

    @property
    def name(self) -> str:
        """The engine in one word, as in the DVC stage names."""
        return f"{self.variant}-{self.target}"


def rungs(rows: Sequence[EngineRow], ladder: Sequence[str], target: str) -> list[EngineRow]:
    """Return the engines of a target that are rungs of the ladder, in its order."""
    found = {row.variant: row for row in rows if row.target == target}
    return [found[variant] for variant in ladder if variant in found]
