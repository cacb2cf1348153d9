"""How right the predictions of an engine are; light, so that a report can be read without numpy."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Accuracy:
    """The scores of an engine on one split; `miou` is None for classification, `top1` for segmentation."""

    metric: str
    """What the score is: mIoU or top-1 accuracy, or the agreement with the float model in one of them."""
    miou: float | None
    """Mean IoU over the classes that occur in truth or prediction."""
    top1: float | None
    """Share of images whose class is right."""
    pixel_accuracy: float | None
    """Share of pixels whose class is right; None for classification."""
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
    """The file that was measured; empty without one."""
    split: str
    num_images: int
    accuracy: Accuracy | None
    """None where there is no engine."""
