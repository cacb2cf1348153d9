"""Plot a training: loss, accuracy and speed over its epochs."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_PANELS = (
    ("loss", "training loss", "#1f5fa8", False),
    ("learning_rate", "learning rate", "#6b6862", True),
    ("images_per_s", "images per second, without validation", "#2a9d72", True),
    ("data_wait_share", "waiting for data (% of the time)", "#e07b39", True),
    ("peak_memory_mib", "peak memory so far (MiB)", "#6b6862", True),
)
"""Column, title, colour, and whether the axis starts at 0; in two rows, of which the score is the second panel."""

_MANY_EPOCHS = 40
"""From here on, points would hide the line."""


@dataclass(frozen=True)
class Score:
    """What tells the best epoch."""

    column: str
    title: str


BY_MIOU = Score("val_miou", "mIoU")


def draw_training(rows: Sequence[dict[str, float]], file: Path, score: Score = BY_MIOU) -> None:
    """Write a PNG of the rows of history.csv, the best epoch marked; one row is a point in each panel."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11.5, 5.6), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    epochs = [int(row["epoch"]) for row in rows]
    best = max(rows, key=lambda row: -1.0 if math.isnan(row[score.column]) else row[score.column])
    scored = (score.column, f"validation {score.title}", "#1f5fa8", False)
    panels = (_PANELS[0], scored, *_PANELS[1:])
    for axes, (column, title, colour, from_zero) in zip(figure.subplots(2, 3).flat, panels, strict=True):
        scale = 100 if column.endswith("_share") else 1
        marker = "o" if len(rows) < _MANY_EPOCHS else ""
        values = [scale * row[column] for row in rows]
        axes.plot(epochs, values, color=colour, linewidth=1.5, marker=marker, markersize=4, clip_on=False)
        if column == score.column:
            axes.plot(best["epoch"], best[column], "o", ms=12, mfc="none", mec="#e07b39", mew=2, linestyle="")
        _style(axes, title, epochs)
        if from_zero:
            axes.set_ylim(0, 1.12 * max(values) or 1)
    figure.suptitle(
        f"Best validation {score.title} {best[score.column]:.4f}, after epoch {best['epoch']:g} of {epochs[-1]}",
        fontsize=11,
    )
    figure.savefig(file, metadata={"Software": None})


def _style(axes: Any, title: str, epochs: Sequence[int]) -> None:
    from matplotlib.ticker import MaxNLocator

    axes.set_title(title, fontsize=9, loc="left")
    axes.set_xlabel("epoch", fontsize=8)
    axes.xaxis.set_major_locator(MaxNLocator(8, steps=(1, 2, 5, 10), integer=True, min_n_ticks=1))
    axes.set_xlim(epochs[0] - 0.5, epochs[-1] + 0.5)
    axes.tick_params(labelsize=8)
    axes.margins(y=0.12)
    axes.grid(color="#e9e7e2", linewidth=0.7)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
