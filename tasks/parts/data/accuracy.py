"""The accuracy of an engine; needs no numpy, so that a report can be read without it."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Accuracy:
    """The scores of an engine on one split; `miou` is None for classification, `top1` for segmentation."""

    metric: str
    """Metric of the score: mIoU or top-1 accuracy, against the labels or as agreement with the float model."""
    miou: float | None
    """Mean IoU over the classes that occur in truth or prediction."""
    top1: float | None
    """Share of images whose class is predicted correctly."""
    pixel_accuracy: float | None
    """Share of pixels whose class is predicted correctly; None for classification."""
    iou: dict[str, float | None]
    """Class name -> IoU; None for a class that occurs in neither truth nor prediction. Empty for classification."""

    @property
    def score(self) -> float:
        """MIoU, or top-1 accuracy."""
        score = self.top1 if self.miou is None else self.miou
        assert score is not None
        return score


@dataclass(frozen=True)
class AccuracyReport:
    """Accuracy of one engine file."""

    status: str
    """"built", or why there was nothing to measure: "skipped", "failed"."""
    reason: str
    engine_sha256: str
    """SHA-256 of the file that was measured; empty if there is none."""
    split: str
    num_images: int
    accuracy: Accuracy | None
    """None if there is no engine."""
