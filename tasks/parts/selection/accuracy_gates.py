"""Hold every engine against the accuracy gates, image by image."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from tasks.parts.data.accuracy import ScoreLoss, Standing, worst
from tasks.parts.data.class_limits import ClassCheck, ClassLimits, check_classes, class_warnings
from tasks.parts.data.comparison import ImageResults, groups_needed, score_loss
from tasks.parts.selection.engine_row import UNSEEN_VERDICTS, ClassLoss, EngineRow, Losses, Unseen

_NONE = ScoreLoss(0.0, 0.0, 0.0)
_SCORE, _PARENT, _BOUNDARY = "max_score_rel_loss", "max_parent_rel_loss", "max_boundary_iou_rel_loss"
"""Keys of the limits in select_engine."""
_FRAMES = f"{_SCORE} on the original files"
"""The limit of the score, held by that of the files."""


@dataclass(frozen=True)
class GateCheck:
    """An engine at one of the gates."""

    key: str
    """Key of the limit in select_engine."""
    subject: str
    """The score that it is about, with its number; empty for the score of the metric."""
    limit: float
    base: str
    """Name of the engine that it is compared with."""
    base_score: float
    loss: ScoreLoss
    groups_needed: int | None
    """Groups that would tell, if that is unproven; an image that belongs to none counts as one."""

    @property
    def standing(self) -> Standing:
        """Whether the loss is within the limit."""
        return self.loss.standing(self.limit)

    def __str__(self) -> str:
        loss = self.loss.rel_loss
        side = (
            "equal to" if abs(loss) < 5e-5 else f"{100 * abs(loss):.2f} % {'below' if loss > 0 else 'above'}"
        )
        span = f"{-100 * self.loss.high:+.2f} to {-100 * self.loss.low:+.2f} %"
        subject = f"{self.subject}, " if self.subject else ""
        text = f"{subject}{side} {self.base} ({self.base_score:.4f}, 95 %: {span})"
        if self.standing is Standing.within:
            return text
        return f"{text}, allowed are {100 * self.limit:g} % ({self.key})"


Check = GateCheck | ClassCheck


def open_or_broken(checks: Sequence[Check]) -> list[Check]:
    """Return the checks that an engine does not hold for certain."""
    return [check for check in checks if check.standing is not Standing.within]


def describe(checks: Sequence[Check]) -> list[str]:
    """Return the checks in words; of classes that hold their limits no more than their number."""
    of_classes = [check for check in checks if isinstance(check, ClassCheck)]
    held = sum(check.standing is Standing.within for check in of_classes)
    texts = [
        str(check)
        for check in checks
        if not isinstance(check, ClassCheck) or check.standing is not Standing.within
    ]
    return [*texts, f"{held} of {len(of_classes)} limits of classes hold"] if of_classes else texts


@dataclass(frozen=True)
class AccuracyGates:
    """The limits, and the results on the validation images that are held against them."""

    reference: str
    """Name of the engine whose score counts as 100 %."""
    parents: Mapping[str, str]
    """Name of an engine of reduced precision -> name of the engine that runs its own float graph."""
    max_score_rel_loss: float
    """Maximum loss against the reference, as a share of its score."""
    max_parent_rel_loss: float
    """Maximum loss against the parent, as a share of its score."""
    results: Mapping[str, ImageResults]
    """By name of the engine, on the split that decides."""
    unseen_results: Mapping[str, ImageResults]
    """By name of the engine, on the split that is only reported."""
    unseen_split: str
    max_boundary_iou_rel_loss: float | None = None
    """Maximum loss of Boundary IoU against the reference, as a share of its Boundary IoU; None for no limit."""
    boundary_results: Mapping[str, ImageResults] = field(default_factory=dict)
    """By name of the engine, on boundaries alone, on the split that decides; empty without this limit."""
    unseen_boundary_results: Mapping[str, ImageResults] = field(default_factory=dict)
    """The same on the split that is only reported."""
    frame_results: Mapping[str, ImageResults] = field(default_factory=dict)
    """By name of the engine, on the original files of the split that decides; empty where there are none."""
    classes: Sequence[str] = ()
    """Names of the classes, in the order of the model."""
    class_limits: ClassLimits = field(default_factory=lambda: ClassLimits({}, {}))

    def check(self, name: str) -> list[Check]:
        """Compare an engine with the reference and, if it has one, its parent; then boundaries, classes, files."""
        checks = self._check_on(name, self.results, self.boundary_results)
        if {name, self.reference} <= self.frame_results.keys():  # a machine may lack the original files
            subject = f"on the original files {self.frame_results[name].score:.4f}"
            limit = self.max_score_rel_loss
            checks.append(_check(_FRAMES, name, self.reference, self.frame_results, limit, subject))
        return checks

    def warnings(self, name: str) -> list[str]:
        """Return which classes an engine has lost, in words; it needs no limits."""
        return class_warnings(self.results[name], self.results[self.reference], self.classes)

    def _check_on(
        self, name: str, results: Mapping[str, ImageResults], boundaries: Mapping[str, ImageResults]
    ) -> list[Check]:
        checks: list[Check] = [_check(_SCORE, name, self.reference, results, self.max_score_rel_loss)]
        if parent := self.parents.get(name):
            checks.append(_check(_PARENT, name, parent, results, self.max_parent_rel_loss))
        if (limit := self.max_boundary_iou_rel_loss) is not None:
            subject = f"Boundary IoU {boundaries[name].score:.4f}"
            checks.append(_check(_BOUNDARY, name, self.reference, boundaries, limit, subject))
        if self.class_limits:
            pair = results[name], results[self.reference]
            checks += check_classes(*pair, self.classes, self.class_limits, self.reference)
        return checks

    def is_more_accurate(self, name: str, other: str) -> bool:
        """Return whether an engine certainly scores more than another one on the images that decide."""
        return _loss(other, name, self.results).low > 0

    def unseen(self, name: str) -> Unseen:
        """Hold an engine against the same gates on the unseen split."""
        checks = self._check_on(name, self.unseen_results, self.unseen_boundary_results)
        loss, score = checks[0].loss, self.unseen_results[name].score
        return Unseen(
            unseen_split=self.unseen_split,
            unseen_score=score,
            unseen_rel_loss=loss.rel_loss,
            unseen_rel_loss_low=loss.low,
            unseen_rel_loss_high=loss.high,
            unseen_verdict=UNSEEN_VERDICTS[worst(check.standing for check in checks)],
            unseen_reason=", ".join(map(str, open_or_broken(checks))),
        )


def _check(
    key: str, name: str, base: str, results: Mapping[str, ImageResults], limit: float, subject: str = ""
) -> GateCheck:
    loss = _loss(name, base, results)
    is_open = loss.standing(limit) is Standing.unproven
    needed = groups_needed(results[name], results[base], limit) if is_open else None
    return GateCheck(key, subject, limit, base, results[base].score, loss, needed)


def _loss(name: str, base: str, results: Mapping[str, ImageResults]) -> ScoreLoss:
    return _NONE if name == base else score_loss(results[name], results[base])


def losses_of(
    checks: Sequence[Check],
    boundary_iou_rel_loss: float | None,
    warnings: Sequence[str],
    *,
    are_grouped: bool,
) -> Losses:
    """Return what an engine lost at its gates; the loss of Boundary IoU is there without a gate, too.

    `are_grouped`: some of the images belong together, so more groups are needed rather than more images.
    """
    by_key = {check.key: check for check in checks if isinstance(check, GateCheck)}
    first, second, boundary = by_key[_SCORE], by_key.get(_PARENT), by_key.get(_BOUNDARY)
    frames = by_key.get(_FRAMES)
    parent_loss = second.loss if second else _NONE
    counts = [check.groups_needed for check in checks if check.standing is Standing.unproven]
    needed = None if None in counts else max((count for count in counts if count), default=None)
    return Losses(
        score_rel_loss=first.loss.rel_loss,
        score_rel_loss_low=first.loss.low,
        score_rel_loss_high=first.loss.high,
        parent=second.base if second else "",
        parent_rel_loss=parent_loss.rel_loss,
        parent_rel_loss_low=parent_loss.low,
        parent_rel_loss_high=parent_loss.high,
        images_needed=None if are_grouped else needed,
        groups_needed=needed if are_grouped else None,
        boundary_iou_rel_loss=boundary_iou_rel_loss,
        boundary_iou_rel_loss_low=boundary.loss.low if boundary else None,
        boundary_iou_rel_loss_high=boundary.loss.high if boundary else None,
        frame_rel_loss_high=frames.loss.high if frames else None,
        class_losses={
            check.key: ClassLoss(check.loss.rel_loss, check.loss.low, check.loss.high, check.max_rel_loss)
            for check in checks
            if isinstance(check, ClassCheck)
        },
        class_warnings=tuple(warnings),
    )


def find_parents(rows: Sequence[EngineRow], parents: Mapping[str, str], target: str) -> dict[str, str]:
    """Return the name of the engine that runs each row's own float graph.

    `parents` maps a variant to the variant of its float graph. The parent is this variant's engine on `target`, the
    reference's target, or if that was not built, on the row's own target; a row without either has no parent.
    """
    built = {row.name for row in rows if row.measured}
    found = {}
    for row in rows:
        variant = parents.get(row.variant)
        names = [f"{variant}-{place}" for place in (target, row.target) if f"{variant}-{place}" in built]
        if variant and names:
            found[row.name] = names[0]
    return found
