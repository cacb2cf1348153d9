"""The plot of accuracy against latency."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tasks.parts.selection.engine_row import EngineRow, Verdict

TARGET_COLOURS = ("#3b7dd8", "#e07b39", "#2a9d72", "#a45ccb", "#c9a227", "#d1495b", "#4c9aa8", "#7a7f87")
"""One per target, in the order of the rows; distinct on white, on black and to the colour-blind."""

_MARKERS = ("o", "s", "D", "^", "P", "*", "v", "X")


def colours(rows: Sequence[EngineRow]) -> dict[str, str]:
    """Return the colour of each target."""
    targets = dict.fromkeys(row.target for row in rows)
    return {target: TARGET_COLOURS[i % len(TARGET_COLOURS)] for i, target in enumerate(targets)}


def draw_pareto(rows: Sequence[EngineRow], *, gate: float, metric: str, file: Path) -> None:
    """Write a PNG: log latency, one colour per target, one marker per variant, fronts, gate and picks."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9.2, 5.2), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.axhline(gate, color="#8a8780", linestyle=(0, (4, 3)), linewidth=1, zorder=1)
    for target, colour in colours(rows).items():
        x, y = _coordinates(_front(rows, target))
        axes.step(x, y, where="post", color=colour, linewidth=1, alpha=0.55, zorder=2)
    for row in _measured(rows):
        is_out = row.verdict is not Verdict.ACCEPT
        colour = colours(rows)[row.target]
        x, y = _coordinates([row])
        marker = _markers(rows)[row.variant]
        axes.plot(
            x,
            y,
            marker,
            markersize=9 if marker != "*" else 13,
            markerfacecolor="white" if is_out else colour,
            markeredgecolor=colour if is_out else "white",
            markeredgewidth=1.4 if is_out else 0.8,
            zorder=4,
        )
        if row.picked:
            axes.plot(x, y, "o", ms=17, mfc="none", mec=colour, mew=1.5, zorder=3)
    _label(figure, axes, rows, gate, metric)
    figure.savefig(file, metadata={"Software": None})


def _label(figure: Any, axes: Any, rows: Sequence[EngineRow], gate: float, metric: str) -> None:
    from matplotlib.lines import Line2D
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    axes.set_xscale("log")
    axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.set_xlabel("latency p50, batch 1, all engines of a target in the same rounds (ms, log scale)")
    axes.set_ylabel(metric)
    axes.grid(color="#e9e7e2", linewidth=0.7)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.annotate(
        f"gate {gate:.3f}",
        (1, gate),
        xycoords=("axes fraction", "data"),
        xytext=(-2, 3),
        textcoords="offset points",
        ha="right",
        fontsize=8,
        color="#6b6862",
    )
    entries = [
        Line2D([], [], marker="o", linestyle="", color=colour, label=target)
        for target, colour in colours(rows).items()
    ]
    entries += [
        Line2D([], [], marker=marker, linestyle="", color="#6b6862", label=variant)
        for variant, marker in _markers(rows).items()
    ]
    entries += [
        Line2D([], [], marker="o", linestyle="", mfc="none", mec="#6b6862", ms=12, label="pick"),
        Line2D([], [], marker="o", linestyle="", mfc="white", mec="#6b6862", mew=1.4, label="not accepted"),
    ]
    figure.legend(handles=entries, loc="outside right upper", frameon=False, fontsize=9)


def _measured(rows: Sequence[EngineRow]) -> list[EngineRow]:
    return [row for row in rows if row.measured is not None]


def _coordinates(rows: Sequence[EngineRow]) -> tuple[list[float], list[float]]:
    """Return the latencies and the scores of measured rows."""
    measured = [row.measured for row in rows if row.measured]
    return [engine.speed.latency_ms_p50 for engine in measured], [
        engine.accuracy.score for engine in measured
    ]


def _front(rows: Sequence[EngineRow], target: str) -> list[EngineRow]:
    on_front = [row for row in _measured(rows) if row.pareto and row.target == target]
    return sorted(on_front, key=lambda row: _coordinates([row]))


def _markers(rows: Sequence[EngineRow]) -> dict[str, str]:
    variants = dict.fromkeys(row.variant for row in rows)
    return {variant: _MARKERS[i % len(_MARKERS)] for i, variant in enumerate(variants)}
