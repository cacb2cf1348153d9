"""Hold every engine against the two accuracy gates, image by image."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tasks.parts.data.accuracy import ScoreLoss, Standing
from tasks.parts.data.comparison import ImageResults, images_needed, score_loss
from tasks.parts.selection.engine_row import EngineRow, Losses, Unseen

_NONE = ScoreLoss(0.0, 0.0, 0.0)


@dataclass(frozen=True)
class GateCheck:
    """An engine at one of the gates."""

    key: str
    """Key of the limit in select_engine."""
    limit: float
    base: str
    """Name of the engine that it is compared with."""
    base_score: float
    loss: ScoreLoss
    images_needed: int | None
    """Images that would tell, if that is unproven; see `Losses`."""

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
        text = f"{side} {self.base} ({self.base_score:.4f}, 95 %: {span})"
        if self.standing is Standing.within:
            return text
        return f"{text}, allowed are {100 * self.limit:g} % ({self.key})"


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

    def check(self, name: str) -> list[GateCheck]:
        """Compare an engine with the reference and, if it has one, with its parent."""
        checks = [self._check(name, self.reference, "max_score_rel_loss", self.max_score_rel_loss)]
        if parent := self.parents.get(name):
            checks.append(self._check(name, parent, "max_parent_rel_loss", self.max_parent_rel_loss))
        return checks

    def is_more_accurate(self, name: str, other: str) -> bool:
        """Return whether an engine certainly scores more than another one on the images that decide."""
        return self._loss(other, name).low > 0

    def unseen(self, name: str) -> Unseen:
        """Report an engine on the unseen split."""
        own = self.unseen_results[name]
        loss = _NONE if name == self.reference else score_loss(own, self.unseen_results[self.reference])
        return Unseen(self.unseen_split, own.score, loss.rel_loss, loss.low, loss.high)

    def _check(self, name: str, base: str, key: str, limit: float) -> GateCheck:
        loss, results = self._loss(name, base), self.results[base]
        is_open = loss.standing(limit) is Standing.unproven
        needed = images_needed(self.results[name], results, limit) if is_open else None
        return GateCheck(key, limit, base, results.score, loss, needed)

    def _loss(self, name: str, base: str) -> ScoreLoss:
        return _NONE if name == base else score_loss(self.results[name], self.results[base])


def losses_of(checks: Sequence[GateCheck]) -> Losses:
    """Return what an engine lost at its gates, the reference's first."""
    first, second = checks[0], checks[1] if len(checks) > 1 else None
    parent_loss = second.loss if second else _NONE
    needed = [check.images_needed for check in checks if check.standing is Standing.unproven]
    return Losses(
        score_rel_loss=first.loss.rel_loss,
        score_rel_loss_low=first.loss.low,
        score_rel_loss_high=first.loss.high,
        parent=second.base if second else "",
        parent_rel_loss=parent_loss.rel_loss,
        parent_rel_loss_low=parent_loss.low,
        parent_rel_loss_high=parent_loss.high,
        images_needed=None if None in needed else max((number for number in needed if number), default=None),
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
