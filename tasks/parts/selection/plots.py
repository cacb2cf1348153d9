"""The plot of accuracy against latency, as a PNG and as the data of an interactive plot."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tasks.parts.selection.engine_row import EngineRow, Verdict
from tasks.parts.selection.findings import NOTHING, shown, times

TARGET_COLOURS = ("#3b7dd8", "#e07b39", "#2a9d72", "#a45ccb", "#c9a227", "#d1495b", "#4c9aa8", "#7a7f87")
"""One per target, in the order of the rows; distinct on white, on black and to the colour-blind."""

_MARKERS = ("o", "s", "D", "^", "P", "*", "v", "X")
_SYMBOLS = ("circle", "square", "diamond", "triangle-up", "cross", "star", "triangle-down", "x")


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
        marker = _styles(rows, _MARKERS)[row.variant]
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
        for variant, marker in _styles(rows, _MARKERS).items()
    ]
    entries += [
        Line2D([], [], marker="o", linestyle="", mfc="none", mec="#6b6862", ms=12, label="pick"),
        Line2D([], [], marker="o", linestyle="", mfc="white", mec="#6b6862", mew=1.4, label="not accepted"),
    ]
    figure.legend(handles=entries, loc="outside right upper", frameon=False, fontsize=9)


def interactive_pareto(rows: Sequence[EngineRow], *, gate: float, metric: str) -> dict[str, Any]:
    """Return ``data`` and ``layout`` for Plotly; the page sets the text colours."""
    data: list[dict[str, Any]] = []
    for target, colour in colours(rows).items():
        x, y = _coordinates(_front(rows, target))
        line = {"color": colour, "width": 1.5, "shape": "hv"}
        data.append(
            {
                "type": "scatter",
                "mode": "lines",
                "x": x,
                "y": y,
                "line": line,
                "opacity": 0.45,
                "legendgroup": target,
                "showlegend": False,
                "hoverinfo": "skip",
            }
        )
        data.append(_points([row for row in _measured(rows) if row.target == target], rows, target, colour))
    data += [
        _legend_entry(variant, symbol)
        for variant, symbol in _styles(rows, _SYMBOLS).items()
        if _measured(rows)
    ]
    line = {"type": "line", "xref": "paper", "x0": 0, "x1": 1, "y0": gate, "y1": gate}
    note = {
        "xref": "paper",
        "x": 1,
        "y": gate,
        "xanchor": "right",
        "yanchor": "bottom",
        "text": f"gate {gate:.3f}",
        "showarrow": False,
        "font": {"size": 11},
    }
    layout = {
        "xaxis": {
            "type": "log",
            "title": {"text": "latency p50, batch 1, all engines of a target in the same rounds (ms)"},
            "zeroline": False,
            **_ticks(rows),
        },
        "yaxis": {"title": {"text": metric}, "zeroline": False},
        "shapes": [line | {"line": {"dash": "dash", "width": 1, "color": "#8a8780"}, "layer": "below"}],
        "annotations": [note],
        "margin": {"l": 56, "r": 12, "t": 12, "b": 48},
        "hovermode": "closest",
        "legend": {"orientation": "v", "tracegroupgap": 0, "itemsizing": "constant"},
        "paper_bgcolor": "rgba(0,0,0,0)",
        "plot_bgcolor": "rgba(0,0,0,0)",
    }
    return {"data": data, "layout": layout}


def _points(
    shown_rows: Sequence[EngineRow], rows: Sequence[EngineRow], target: str, colour: str
) -> dict[str, Any]:
    symbols = _styles(rows, _SYMBOLS)
    x, y = _coordinates(shown_rows)
    return {
        "type": "scatter",
        "mode": "markers",
        "name": target,
        "legendgroup": target,
        "x": x,
        "y": y,
        "text": [_hover(row) for row in shown_rows],
        "hovertemplate": "%{text}<extra></extra>",
        "marker": {
            "color": colour,
            "opacity": 1,
            "symbol": [
                symbols[row.variant] + ("" if row.verdict is Verdict.ACCEPT else "-open")
                for row in shown_rows
            ],
            "size": [17 if row.picked else 11 for row in shown_rows],
            "line": {"color": colour, "width": [3 if row.picked else 1.5 for row in shown_rows]},
        },
    }


def _legend_entry(variant: str, symbol: str) -> dict[str, Any]:
    return {
        "type": "scatter",
        "mode": "markers",
        "name": variant,
        "x": [None],
        "y": [None],
        "marker": {"symbol": symbol, "size": 9, "color": "#8a8780"},
        "hoverinfo": "skip",
    }


def _hover(row: EngineRow) -> str:
    """Return the hover text of an engine; names are escaped because Plotly interprets some markup."""
    from html import escape

    assert row.measured is not None
    numbers, speed = shown(row), row.measured.speed
    batched = NOTHING if speed.throughput_per_s_batched is None else f"{speed.throughput_per_s_batched:.0f}"
    lines = [
        f"<b>{escape(row.variant)}</b> on {escape(row.target)}" + (" (pick)" if row.picked else ""),
        f"{row.verdict}, {escape(row.precision)}",
        f"{escape(row.measured.accuracy.metric)} {numbers.score} ({numbers.change})",
        f"p50 {numbers.p50_ms}, p90 {numbers.p90_ms}, p99 {numbers.p99_ms} ms",
        f"{numbers.speedup} the reference ({times(speed.speedup_low)} to {times(speed.speedup_high)})",
        f"{speed.throughput_per_s:.0f} images/s, {batched} batched",
        f"{numbers.size_mb} MB file, {speed.memory_mib:.0f} MiB memory",
    ]
    return "<br>".join(lines)


def _measured(rows: Sequence[EngineRow]) -> list[EngineRow]:
    return [row for row in rows if row.measured is not None]


def _ticks(rows: Sequence[EngineRow]) -> dict[str, list[float]]:
    """Return ticks at 1, 2 and 5 of every decade that the latencies span."""
    latencies_ms, _ = _coordinates(_measured(rows))
    if not latencies_ms:
        return {}
    decades = range(math.floor(math.log10(min(latencies_ms))), math.ceil(math.log10(max(latencies_ms))) + 1)
    return {"tickvals": [step * 10.0**decade for decade in decades for step in (1, 2, 5)]}


def _coordinates(rows: Sequence[EngineRow]) -> tuple[list[float], list[float]]:
    """Return the latencies and the scores of measured rows."""
    measured = [row.measured for row in rows if row.measured]
    return [engine.speed.latency_ms_p50 for engine in measured], [
        engine.accuracy.score for engine in measured
    ]


def _front(rows: Sequence[EngineRow], target: str) -> list[EngineRow]:
    on_front = [row for row in _measured(rows) if row.pareto and row.target == target]
    return sorted(on_front, key=lambda row: _coordinates([row]))


def _styles(rows: Sequence[EngineRow], styles: Sequence[str]) -> dict[str, str]:
    variants = dict.fromkeys(row.variant for row in rows)
    return {variant: styles[i % len(styles)] for i, variant in enumerate(variants)}
