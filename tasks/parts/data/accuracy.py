"""The accuracy of an engine; needs no numpy, so that a report can be read without it."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum

FRAME_TOLERANCE = 0.001
"""A larger difference between the score of a split and that of its original files is explained."""


@dataclass(frozen=True)
class Similarity:
    """How similar values that are no classes are to those of the float model, over all images."""

    sqnr_db: float
    """Signal-to-noise ratio, dB; 200 if they are equal."""
    cosine: float


@dataclass(frozen=True)
class Accuracy:
    """The scores of an engine on one split; None is what its task does not have."""

    metric: str
    """Metric of the score, against the labels or as agreement with the float model."""
    miou: float | None
    """Mean IoU over the classes that occur in the labels."""
    top1: float | None
    """Share of images whose class is predicted correctly."""
    pixel_accuracy: float | None
    """Share of pixels whose class is predicted correctly; None for classification."""
    iou: dict[str, float | None]
    """Class name -> IoU; None for a class that occurs in neither truth nor prediction. Empty without masks."""
    other_score: float | None = None
    """Score of a metric of the user's own, or share of the signal in values that are no classes."""
    sqnr_db: float | None = None
    """Signal-to-noise ratio of such values against those of the float model, dB; of several outputs the lowest."""
    cosine: float | None = None
    """Cosine between such values and those of the float model; of several outputs the lowest."""
    outputs: dict[str, Similarity] = field(default_factory=dict)
    """Name -> similarity of each output, if a model's outputs are all kept."""
    boundary_iou: float | None = None
    """Mean Boundary IoU over the classes that occur in the labels; None without masks."""
    boundary_iou_by_class: dict[str, float | None] = field(default_factory=dict)
    """Class name -> Boundary IoU, as `iou`."""

    @property
    def scores(self) -> tuple[float, ...]:
        """The scores there are, that of `metric` first."""
        return tuple(score for score in (self.other_score, self.miou, self.top1) if score is not None)

    @property
    def score(self) -> float:
        """Score of `metric`."""
        return self.scores[0]


@dataclass(frozen=True)
class AccuracyReport:
    """Accuracy of one engine file."""

    status: str
    """"built", or why there was nothing to measure: "skipped", "failed"."""
    reason: str
    engine_sha256: str
    """SHA-256 of the file that was measured; empty if there is none."""
    split: str
    """Split of the accuracy."""
    unseen_split: str
    """Split of which only images.npz has results."""
    num_images: int
    """Images of `split`."""
    accuracy: Accuracy | None
    """None if there is no engine."""
    frame_score: float | None = None
    """Score of `split` on the original files, at their own sizes; None where there are none."""
    frame_note: str = ""
    """Why there is no frame_score, or why it differs from the score by more than FRAME_TOLERANCE."""


class Standing(StrEnum):
    """Whether a loss is within its limit."""

    within = "within"
    """The whole interval is."""
    beyond = "beyond"
    """None of the interval is."""
    unproven = "unproven"
    """A part of the interval is: there are too few images to tell."""


@dataclass(frozen=True)
class ScoreLoss:
    """The share of a reference's score that a predictor loses on the same images, negative if it scores more."""

    rel_loss: float
    low: float
    """Lower end of the 95 % interval."""
    high: float

    def standing(self, max_rel_loss: float) -> Standing:
        """Return whether the loss is within a limit."""
        if self.high <= max_rel_loss:
            return Standing.within
        return Standing.beyond if self.low > max_rel_loss else Standing.unproven


def worst(standings: Iterable[Standing]) -> Standing:
    """Return the standing of an engine that has to hold several limits."""
    return max(standings, key=(Standing.within, Standing.unproven, Standing.beyond).index)
