"""Limits of single classes, so that none dies behind a mean that hardly moves.

The score of a class is its IoU in masks and its recall, the share of its images that are right, in classification.
N images, C classes.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from tasks.core.errors import ConfigError
from tasks.parts.data.accuracy import ScoreLoss, Standing
from tasks.parts.data.comparison import LEVEL, ImageResults, groups_needed, score_loss

EVERY = "*"
"""In place of a class: every class that occurs in the labels and has no limit of its own."""
LIMITS, FLOORS = "class_limits", "class_floors"
"""Keys of the limits in the stages that judge."""
_ALARMING_LOSS = 1 / 3
"""A class that certainly loses a larger share of its score is warned of."""
_NOTHING = ScoreLoss(0.0, 0.0, 0.0)
_UNKNOWN = ScoreLoss(0.0, -1.0, 1.0)


@dataclass(frozen=True)
class ClassLimits:
    """What classes may lose, and what they have to reach; both by the name of the class, or `EVERY`."""

    max_rel_loss: Mapping[str, float]
    """Largest share of the class's score in the float reference that may be lost."""
    floors: Mapping[str, float]
    """Smallest score, 0..1, whatever the reference reaches."""

    def __bool__(self) -> bool:
        return bool(self.max_rel_loss or self.floors)

    def check_names(self, classes: Sequence[str], stage: str) -> None:
        """Raise ConfigError for a limit of a class that does not exist."""
        for key, named in ((LIMITS, self.max_rel_loss), (FLOORS, self.floors)):
            unknown = [name for name in named if name != EVERY and name not in classes]
            if unknown:
                known = (
                    f"expected some of {', '.join(classes)}" if classes else "but the model has no classes"
                )
                raise ConfigError(
                    f"{stage}.{key} names {', '.join(unknown)}, {known}. '{EVERY}' stands for every class without a "
                    "limit of its own."
                )
        if self and not classes:
            raise ConfigError(
                f"{stage}.{LIMITS} or .{FLOORS} is set, but the model has no classes. Set both to {{}}."
            )


@dataclass(frozen=True)
class ClassCheck:
    """A predictor at the limit of one class."""

    key: str
    """Key of the limit, with the name of the class: ``class_limits.nucleus``."""
    subject: str
    """What is limited: ``IoU of nucleus``."""
    limit: float
    """Largest loss or, of a floor, smallest score."""
    base: str
    """Name of what the loss refers to; empty for a floor, where it refers to the labels."""
    score: float | None
    """Score of the class; None if it does not occur in the labels."""
    base_score: float
    loss: ScoreLoss
    """With an interval of `level`."""
    level: float
    """How often the interval holds the truth: those of all classes together do so in 95 % of cases."""
    groups_needed: int | None
    """Groups of images that would tell, if that is unproven; None if far more than there are."""

    @property
    def max_rel_loss(self) -> float:
        """The limit as a loss: a score is 1 less the loss against labels, which have a score of 1."""
        return self.limit if self.base else 1 - self.limit

    @property
    def standing(self) -> Standing:
        """Whether the whole interval is within the limit."""
        return self.loss.standing(self.max_rel_loss)

    @property
    def excess(self) -> float:
        """How far the loss, as measured, is beyond the limit; 0 if it is within."""
        return max(0.0, self.loss.rel_loss - self.max_rel_loss)

    def __str__(self) -> str:
        if self.score is None:
            return f"{self.subject} unknown: the class is in no label ({self.key})"
        text, level = f"{self.subject} {self.score:.4f}", f"{100 * self.level:.4g} %"
        if not self.base:
            span = f"{max(0.0, 1 - self.loss.high):.4f} to {min(1.0, 1 - self.loss.low):.4f}"
            return f"{text} ({level}: {span}), wanted are {self.limit:g} ({self.key})"
        loss = self.loss.rel_loss
        side = (
            "equal to" if abs(loss) < 5e-5 else f"{100 * abs(loss):.2f} % {'below' if loss > 0 else 'above'}"
        )
        span = f"{-100 * self.loss.high:+.2f} to {-100 * self.loss.low:+.2f} %"
        allowed = f"allowed are {100 * self.limit:g} % ({self.key})"
        return f"{text}, {side} {self.base} ({self.base_score:.4f}, {level}: {span}), {allowed}"


def check_classes(
    engine: ImageResults, reference: ImageResults, classes: Sequence[str], limits: ClassLimits, base: str
) -> list[ClassCheck]:
    """Hold the classes of a predictor against their limits, on the images of the float reference, named `base`.

    Each decision rests on the same paired interval as that of the whole score (`score_loss`), on the images that show
    the class to one of both. A floor is a loss against the labels. Several limits are decided at once, so each
    interval is computed for an error of 5 % / their number: then the error of any of them stays within 5 %
    (Bonferroni's correction; Dunn, "Multiple comparisons among means", JASA 56, 1961).
    A class that the reference does not find at all has nothing to lose; only a floor guards it.
    """
    engine, reference = engine.by_class or engine, reference.by_class or reference
    wanted = [*_expanded(engine, classes, limits)]
    level = 1 - (1 - LEVEL) / max(1, len(wanted))
    return [_check(engine, reference, classes, one, level, base) for one in wanted]


def class_warnings(engine: ImageResults, reference: ImageResults, classes: Sequence[str]) -> list[str]:
    """Return which classes a predictor does not find at all, or has certainly lost more than a third of.

    It needs no limits. The third is held against the lower end of the interval of the loss against the reference,
    corrected for the number of classes as in `check_classes`.
    """
    engine, reference = engine.by_class or engine, reference.by_class or reference
    word, found = _word(engine), []
    scores, bases = (scores_by_class(results, len(classes)) for results in (engine, reference))
    level = 1 - (1 - LEVEL) / max(1, sum(score is not None for score in scores))
    for number, (name, score, base) in enumerate(zip(classes, scores, bases, strict=True)):
        if score == 0:
            found.append(f"{word} of {name} is 0" + ("" if base else ", as in the float reference"))
        elif score is not None and base and 1 - score / base > _ALARMING_LOSS:
            loss = score_loss(*_pair(engine, reference, number), level=level)
            if loss.low > _ALARMING_LOSS:
                below = f"{100 * loss.rel_loss:.0f} % below the float reference ({base:.4f})"
                found.append(f"{word} of {name} is {score:.4f}, {below}")
    return found


def scores_by_class(results: ImageResults, num_classes: int) -> list[float | None]:
    """Return IoU or recall of each class, by its number; None for a class that no label has."""
    if results.class_N is None:
        if results.hits_NC.shape[1] != num_classes:
            return [None] * num_classes
        is_labelled = results.labels_NC.sum(axis=0) > 0
        return [
            score if labelled else None
            for score, labelled in zip(results.class_scores, is_labelled, strict=True)
        ]
    is_known = results.class_N < num_classes
    numbers = results.class_N[is_known].astype(np.int64)
    hits_C = np.bincount(numbers, weights=results.hits_NC[is_known, 0], minlength=num_classes)
    counts_C = np.bincount(numbers, minlength=num_classes)
    return [float(hits / count) if count else None for hits, count in zip(hits_C, counts_C, strict=True)]


def _word(results: ImageResults) -> str:
    return "IoU" if results.class_N is None else "recall"


def _expanded(
    results: ImageResults, classes: Sequence[str], limits: ClassLimits
) -> Iterator[tuple[str, str, float]]:
    """Yield key, class and limit; `EVERY` becomes the classes in the labels that are not named."""
    labelled = [
        name
        for name, score in zip(classes, scores_by_class(results, len(classes)), strict=True)
        if score is not None
    ]
    for key, named in ((LIMITS, limits.max_rel_loss), (FLOORS, limits.floors)):
        for name, limit in named.items():
            if name != EVERY:
                yield key, name, limit
        if EVERY in named:
            yield from ((key, name, named[EVERY]) for name in labelled if name not in named)


def _check(
    engine: ImageResults,
    reference: ImageResults,
    classes: Sequence[str],
    wanted: tuple[str, str, float],
    level: float,
    base: str,
) -> ClassCheck:
    key, name, limit = wanted
    number = classes.index(name)
    of_class, other = _pair(engine, _labels(reference) if key == FLOORS else reference, number)
    is_labelled = bool(other.labels_NC.any())
    loss, needed = _UNKNOWN, None
    if is_labelled:
        loss = score_loss(of_class, other, level=level) if other.score else _NOTHING
        loss = _NOTHING if engine is reference and key == LIMITS else loss
    check = ClassCheck(
        key=f"{key}.{name}",
        subject=f"{_word(engine)} of {name}",
        limit=limit,
        base=base if key == LIMITS else "",
        score=of_class.score if is_labelled else None,
        base_score=other.score if is_labelled else 0.0,
        loss=loss,
        level=level,
        groups_needed=None,
    )
    if is_labelled and check.standing is Standing.unproven:
        of_its_own = groups_needed(of_class, other, check.max_rel_loss, level=level)
        if of_its_own is not None:
            needed = math.ceil(of_its_own * engine.num_groups / of_class.num_groups)
    return replace(check, groups_needed=needed)


def _labels(results: ImageResults) -> ImageResults:
    """Return the results of a predictor that finds all that is labelled, and nothing else."""
    labels_NC = results.labels_NC
    return ImageResults(labels_NC, labels_NC, labels_NC, results.groups_N, results.class_N)


def _pair(engine: ImageResults, other: ImageResults, number: int) -> tuple[ImageResults, ImageResults]:
    """Return the results for one class, on the images that show it to any of both or to the labels."""
    if engine.class_N is not None:
        shows_N, column = engine.class_N == number, slice(0, 1)
    else:
        column = slice(number, number + 1)
        shows_N = (engine.union_NC[:, column] + other.union_NC[:, column]).any(axis=1)
    groups_N = np.unique(engine.groups_N[shows_N], return_inverse=True)[1]

    def part(results: ImageResults) -> ImageResults:
        hits_NC, union_NC, labels_NC = (counts_NC[shows_N, column] for counts_NC in results.counts)
        return ImageResults(hits_NC, union_NC, labels_NC, groups_N)

    return part(engine), part(other)
