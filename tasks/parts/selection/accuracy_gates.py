"""Hold every engine against the two accuracy gates, image by image."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tasks.parts.data.accuracy import ScoreLoss, Standing, worst
from tasks.parts.data.comparison import ImageResults, images_needed, score_loss
from tasks.parts.selection.engine_row import EngineRow, Losses, Unseen

_NONE = ScoreLoss(0.0, 0.0, 0.0)


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

    def losses(self, name: str) -> Losses:
        """Compare an engine with the reference and with its parent."""
        own, parent = self.results[name], self.parents.get(name, "")
        gates = [(self._loss(name, self.reference), self.reference, self.max_score_rel_loss)]
        if parent:
            gates.append((self._loss(name, parent), parent, self.max_parent_rel_loss))
        needed = [
            images_needed(own, self.results[base], limit)
            for loss, base, limit in gates
            if loss.standing(limit) is Standing.unproven
        ]
        against_reference, against_parent = gates[0][0], gates[1][0] if parent else _NONE
        return Losses(
            score_rel_loss=against_reference.rel_loss,
            score_rel_loss_low=against_reference.low,
            score_rel_loss_high=against_reference.high,
            parent=parent,
            parent_rel_loss=against_parent.rel_loss,
            parent_rel_loss_low=against_parent.low,
            parent_rel_loss_high=against_parent.high,
            images_needed=None
            if None in needed
            else max((number for number in needed if number), default=None),
        )

    def standing(self, losses: Losses) -> Standing:
        """Return the worse of the standings at both gates."""
        return worst(standing for standing, _ in self.explain(losses))

    def explain(self, losses: Losses) -> list[tuple[Standing, str]]:
        """Return the standing at each gate, and the loss in words."""
        bases = [
            (self.reference, losses.score_rel_loss, losses.score_rel_loss_low, losses.score_rel_loss_high)
        ]
        limits = [
            ("max_score_rel_loss", self.max_score_rel_loss),
            ("max_parent_rel_loss", self.max_parent_rel_loss),
        ]
        if losses.parent:
            bases.append(
                (
                    losses.parent,
                    losses.parent_rel_loss,
                    losses.parent_rel_loss_low,
                    losses.parent_rel_loss_high,
                )
            )
        told = []
        for (base, loss, low, high), (key, limit) in zip(bases, limits, strict=False):
            standing = ScoreLoss(loss, low, high).standing(limit)
            allowed = "" if standing is Standing.within else f", allowed are {100 * limit:g} % ({key})"
            told.append(
                (
                    standing,
                    f"{_in_words(loss)} {base} ({self.results[base].score:.4f}, 95 %: {_span(low, high)}){allowed}",
                )
            )
        return told

    def is_more_accurate(self, name: str, other: str) -> bool:
        """Return whether an engine certainly scores more than another one on the images that decide."""
        return self._loss(other, name).low > 0

    def unseen(self, name: str) -> Unseen:
        """Report an engine on the unseen split."""
        own = self.unseen_results[name]
        loss = _NONE if name == self.reference else score_loss(own, self.unseen_results[self.reference])
        return Unseen(self.unseen_split, own.score, loss.rel_loss, loss.low, loss.high)

    def _loss(self, name: str, base: str) -> ScoreLoss:
        return _NONE if name == base else score_loss(self.results[name], self.results[base])


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


def _in_words(loss: float) -> str:
    if abs(loss) < 5e-5:
        return "equal to"
    return f"{100 * abs(loss):.2f} % {'below' if loss > 0 else 'above'}"


def _span(low: float, high: float) -> str:
    return f"{-100 * high:+.2f} to {-100 * low:+.2f} %"
