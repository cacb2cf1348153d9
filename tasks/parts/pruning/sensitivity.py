"""What the channels of each group cost, from the cuts that rank_groups measured."""

import csv
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from tasks.core.errors import ArtifactError


@dataclass(frozen=True)
class GroupCost:
    """Loss of score of one group as a function of the channels that it loses.

    It is the largest convex function that is 0 without a cut and nowhere above the measured losses, of which negative
    ones count as 0: it never falls, and no channel is cheaper than those that go before it.
    """

    channels: int
    """Number of channels before any cut."""
    removed: tuple[int, ...]
    """Channels removed at the corners of the function, from 0 to the largest measured cut."""
    drops: tuple[float, ...]
    """Loss of score at the corners."""

    def between(self, start: int, end: int) -> float:
        """Return what it costs to remove `end` channels instead of `start`."""
        low, high = np.interp([start, end], self.removed, self.drops)
        return float(high - low)


def read_costs(path: Path) -> dict[str, GroupCost]:
    """Return the cost of each group of ``sensitivity.csv``, by the convolution that names it.

    Raises ArtifactError for a file that is missing, damaged or without any cut.
    """
    cuts: dict[str, list[tuple[int, float]]] = {}
    channels: dict[str, int] = {}
    try:
        with path.open(newline="", encoding="utf-8") as file:
            for row in csv.DictReader(file):
                channels[row["group"]] = int(row["channels"])
                cut = int(row["channels_removed"]), float(row["score_drop"])
                cuts.setdefault(row["group"], []).append(cut)
    except (OSError, ValueError, KeyError, TypeError, csv.Error) as error:
        raise ArtifactError(
            f"{path}: no table of cuts ({error!r}), expected sensitivity.csv of rank_groups. Run rank_groups again, "
            "or set prune.ranking to across_layers."
        ) from error
    if not cuts:
        raise ArtifactError(
            f"{path}: no rows, expected at least one cut of a group of channels. The report of rank_groups says why "
            "there is none. Mend that, or set prune.ranking to across_layers."
        )
    return {group: _convex(channels[group], found) for group, found in cuts.items()}


def check_costs(costs: Mapping[str, GroupCost], widths: Mapping[str, int]) -> None:
    """Raise ArtifactError when the costs are those of other groups than the network's (name -> channels uncut)."""
    for name, cost in costs.items():
        if widths.get(name) != cost.channels:
            found = f"{widths[name]} channels" if name in widths else "no such group"
            raise ArtifactError(
                f"The table of rank_groups has a group {name!r} of {cost.channels} channels, but the network has "
                f"{found}: it was measured on another network. Run rank_groups on the checkpoint that is pruned, or "
                "set prune.ranking to across_layers."
            )


def _convex(channels: int, cuts: Sequence[tuple[int, float]]) -> GroupCost:
    """Connect the corners by the flattest lines: from each corner to the cut with the least loss per channel."""
    corners = [(0, 0.0)]
    rest = sorted((removed, max(0.0, drop)) for removed, drop in cuts)
    while rest:
        removed, drop = corners[-1]
        slopes = [(cut[1] - drop) / (cut[0] - removed) for cut in rest]
        flattest = slopes.index(min(slopes))
        corners.append(rest[flattest])
        rest = rest[flattest + 1 :]
    return GroupCost(channels, *zip(*corners, strict=True))
