"""The engine report as one HTML file that needs no network: plot, sortable table, picks on top."""

import json
from collections.abc import Iterable, Sequence
from html import escape

from tasks.parts.selection.engine_row import EngineRow, Verdict
from tasks.parts.selection.findings import (
    NOTHING,
    Findings,
    megabytes,
    milliseconds,
    number,
    percent_change,
    signed,
    times,
)
from tasks.parts.selection.page_style import CSS, SCRIPT
from tasks.parts.selection.plots import colours, interactive_pareto

_CHIPS = {
    Verdict.ACCEPT: "good",
    Verdict.TOO_LOSSY: "bad",
    Verdict.PRECISION_MISMATCH: "bad",
    Verdict.BUILD_FAILED: "bad",
    Verdict.NOT_FASTER: "mild",
    Verdict.SKIPPED: "off",
}

_WIDEST_HEAT = 0.42


def render_page(findings: Findings) -> str:
    """Return the whole page."""
    from plotly.offline import get_plotlyjs

    figure = json.dumps(
        interactive_pareto(findings.rows, gate=findings.gate, metric=findings.metric), allow_nan=False
    )
    sections = (
        _hero(findings),
        _picks(findings),
        _pareto(),
        _engines(findings),
        _ladders(findings),
        _techniques(findings),
        _classes(findings),
        _layers(findings),
        _conditions(findings),
        _verdicts(findings),
    )
    return "\n".join(
        (
            '<!doctype html><html lang="en"><head><meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>Engine report</title><style>{CSS}</style></head><body><main>",
            *sections,
            "</main>",
            f'<script type="application/json" id="pareto-data">{_inside_script(figure)}</script>',
            f"<script>{get_plotlyjs()}</script>",
            f"<script>{SCRIPT}</script></body></html>",
        )
    )


def _inside_script(text: str) -> str:
    """Escape what would end a script element; JSON reads it back."""
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _hero(findings: Findings) -> str:
    gate = (
        f"Accepted is what loses at most {100 * findings.max_score_rel_loss:g} % of the {escape(findings.metric)} of "
        f"{escape(findings.reference)} ({findings.reference_score:.4f}). {len(findings.rows)} engines, "
        f"{sum(row.verdict is Verdict.ACCEPT for row in findings.rows)} accepted."
    )
    eyebrow = '<p class="eyebrow">Enginewright engine report</p>'
    if not findings.picks:
        return f"<header>{eyebrow}<h1>No engine passes</h1><p class='soft'>{gate}</p></header>"
    best = findings.picks[0]
    figures = (
        (f"{milliseconds(best.latency_ms_p50)} ms", "latency p50, batch 1"),
        (times(best.speedup_vs_reference), f"the speed of {escape(findings.speed_reference)}"),
        (number(best.score, ".4f"), f"{escape(findings.metric)} on the test split"),
        (percent_change(best.score_rel_loss), "of it against the reference"),
        (f"{megabytes(best.size_bytes)} MB", "engine file"),
    )
    items = "".join(f"<li><b>{value}</b><span>{label}</span></li>" for value, label in figures)
    title = f'{escape(best.variant)} <span class="on">on {escape(best.target)}</span>'
    return (
        f'<header>{eyebrow}<h1>{title}</h1><p class="soft">The fastest engine that passes. {gate}</p>'
        f'<ul class="figures">{items}</ul></header>'
    )


def _picks(findings: Findings) -> str:
    dots = colours(findings.rows)
    cards = [
        f'<article class="pick"><h3>{_dot(dots[row.target])}{escape(row.target)}</h3>'
        f"<strong>{escape(row.variant)}</strong>"
        f"<p>{milliseconds(row.latency_ms_p50)} ms, {times(row.speedup_vs_reference)} "
        f"{escape(findings.speed_reference)}<br>"
        f"{escape(findings.metric)} {number(row.score, '.4f')} ({percent_change(row.score_rel_loss)})<br>"
        f"{megabytes(row.size_bytes)} MB, {escape(row.precision)}</p></article>"
        for row in findings.picks
    ]
    cards += [
        f'<article class="pick none"><h3>{_dot(dots[target])}{escape(target)}</h3><strong>No pick</strong>'
        f"<p>{escape(why)}</p></article>"
        for target, why in findings.without_pick.items()
    ]
    return f'<section><h2>One pick per target</h2><div class="picks">{"".join(cards)}</div></section>'


def _pareto() -> str:
    return (
        "<section><h2>Latency against accuracy</h2><p>Up and to the left is better. Lines join the engines "
        "that no other engine of their target beats. Large markers are picks, hollow ones failed a gate.</p>"
        '<div id="pareto" role="img" aria-label="Latency and accuracy of every engine"></div></section>'
    )


def _engines(findings: Findings) -> str:
    dots = colours(findings.rows)
    heads = (
        ("Engine", ""),
        ("Verdict", ""),
        (findings.metric, "num"),
        ("p50 ms", "num"),
        ("Speed-up", "num"),
        ("MB", "num"),
        ("Why", "why"),
    )
    head = "".join(
        f'<th class="{kind}"><button type="button">{escape(name)}</button></th>' for name, kind in heads
    )
    body = "".join(_engine_line(row, dots[row.target]) for row in findings.ordered)
    return (
        "<section><h2>All engines</h2><p>Picks first, then by latency; a click on a heading sorts. Small "
        "print: change of the score against the reference, p99, 95 % bounds of the speed-up, precision in use.</p>"
        f'<div class="scroll"><table class="sortable"><thead><tr>{head}</tr></thead><tbody>{body}</tbody>'
        "</table></div></section>"
    )


def _engine_line(row: EngineRow, colour: str) -> str:
    label = "pick" if row.picked else row.verdict.lower().replace("_", " ")
    interval = f"{number(row.speedup_low, '.3g')} to {number(row.speedup_high, '.3g')}"
    cells = (
        f'<td class="name" data-value="{escape(row.name)}"><b>{escape(row.variant)}</b>'
        f"<small>{_dot(colour)}{escape(row.target)}</small></td>",
        f'<td class="name" data-value="{escape(label)}">'
        f'<span class="chip {_CHIPS[row.verdict]}">{escape(label)}</span>'
        f"<small>{'on the front' if row.pareto else ''}</small></td>",
        _number_cell(row.score, number(row.score, ".4f"), percent_change(row.score_rel_loss)),
        _number_cell(row.latency_ms_p50, milliseconds(row.latency_ms_p50), milliseconds(row.latency_ms_p99)),
        _number_cell(row.speedup_vs_reference, times(row.speedup_vs_reference), interval),
        _number_cell(row.size_bytes, megabytes(row.size_bytes), row.precision),
        f'<td class="why">{escape(row.reason)}</td>',
    )
    return f"<tr>{''.join(cells)}</tr>"


def _ladders(findings: Findings) -> str:
    lines = []
    for target in findings.targets:
        for row in findings.rungs(target):
            label = row.verdict.lower().replace("_", " ")
            lines.append(
                f'<tr>{_name_cell(row)}<td class="num">{percent_change(row.score_rel_loss)}</td>'
                f'<td class="num">{milliseconds(row.latency_ms_p50)}</td>'
                f'<td class="num">{times(row.speedup_vs_reference)}</td>'
                f'<td class="name"><span class="chip {_CHIPS[row.verdict]}">{escape(label)}</span></td>'
                f'<td class="why">{escape(row.reason)}</td></tr>'
            )
        lines.append(
            f'<tr><td class="name"><b>{escape(target)}</b></td>'
            f'<td class="why" colspan="5">{escape(findings.ladder_end(target))}</td></tr>'
        )
    text = "From float to the last rung: each must be accurate enough and faster than the last accepted one below it."
    heads = ["Rung", f"Change of {findings.metric}", "p50 ms", "Speed-up", "Verdict", "Why"]
    return _section("The ladder of each target", text, heads, [], lines)


def _techniques(findings: Findings) -> str:
    lines = []
    for name, before, after in findings.techniques:
        gains = [findings.gain(before, after, target) for target in findings.targets]
        cells = "".join(
            f'<td class="num"><span class="{"up" if gain.score_change >= 0 else "down"}">'
            f"{signed(gain.score_change)}</span><br>{times(gain.speed_factor)}</td>"
            if gain
            else f'<td class="num">{NOTHING}</td>'
            for gain in gains
        )
        lines.append(
            f'<tr><td class="name"><b>{escape(name)}</b>'
            f"<small>{escape(before)} → {escape(after)}</small></td>{cells}</tr>"
        )
    text = f"Change of {findings.metric}, and below it the change of speed, on the same target."
    return _section("What each technique gave", text, ["Technique"], findings.targets, lines)


def _classes(findings: Findings) -> str:
    rows = [row for row in findings.ordered if row.iou]
    if not rows:
        return ""
    names = list(dict.fromkeys(name for row in rows for name in row.iou))
    ranges = {name: _range([row.iou.get(name) for row in rows]) for name in names}
    lines = []
    for row in rows:
        cells = "".join(_heat_cell(row.iou.get(name), *ranges[name]) for name in names)
        lines.append(f"<tr>{_name_cell(row)}{cells}</tr>")
    text = "Intersection over union on the test split; the darker, the better for that class."
    return _section("IoU per class", text, ["Engine"], names, lines)


def _layers(findings: Findings) -> str:
    lines = [
        f'<tr>{_name_cell(row)}<td class="name">{escape(layer.kind)}</td>'
        f"<td>{number(layer.sqnr_db, '.1f')}</td><td>{number(layer.own_sqnr_db, '.1f')}</td>"
        f'<td class="code">{escape(layer.node)}</td><td class="code">{escape(layer.module)}</td>'
        f'<td class="code">{escape(layer.source)}</td></tr>'
        for row in findings.ordered
        for layer in row.suspect_layers
    ]
    if not lines:
        return ""
    heads = ["Engine", "What", "SQNR dB", "Own dB", "Node", "Module", "Source"]
    text = "Where the engine leaves its float graph: the first layer to collapse, and the largest own drop."
    return _section("Suspect layers", text, heads, [], lines)


def _conditions(findings: Findings) -> str:
    by_target = findings.conditions()
    names = list(dict.fromkeys(name for found in by_target.values() for name in found))
    lines = [
        f'<tr><td class="name"><b>{escape(target)}</b></td>'
        + "".join(f"<td>{escape(found.get(name, NOTHING))}</td>" for name in names)
        + "</tr>"
        for target, found in by_target.items()
    ]
    doubtful = [row.name for row in findings.rows if row.inconclusive]
    text = (
        "Every engine ran in pairs with the reference engine, in random order, and with itself as control: "
        "the A/A spread is the smallest difference that means anything."
    )
    if doubtful:
        text += f" Inconclusive, because the machine was too noisy: {', '.join(doubtful)}."
    return _section("How it was measured", text, ["Target", *names], [], lines)


def _verdicts(findings: Findings) -> str:
    meanings = (
        (Verdict.ACCEPT, "sound, accurate enough, and compression pays off"),
        (
            Verdict.TOO_LOSSY,
            f"loses more than {100 * findings.max_score_rel_loss:g} % of the reference's {escape(findings.metric)}",
        ),
        (
            Verdict.NOT_FASTER,
            "accurate enough, but not faster than the accepted rung below it on the same target",
        ),
        (Verdict.PRECISION_MISMATCH, "the runtime does not compute in the declared precision"),
        (Verdict.BUILD_FAILED, "the runtime cannot make an engine from the graph"),
        (Verdict.SKIPPED, "this machine cannot run the target"),
    )
    items = "".join(
        f"<dt>{verdict.lower().replace('_', ' ')}</dt><dd>{meaning}</dd>" for verdict, meaning in meanings
    )
    return f"<section><h2>What the verdicts mean</h2><dl>{items}</dl></section>"


def _section(
    title: str, text: str, heads: Sequence[str], number_heads: Sequence[str], lines: Iterable[str]
) -> str:
    head = "".join(f"<th>{escape(name)}</th>" for name in heads)
    head += "".join(f'<th class="num">{escape(name)}</th>' for name in number_heads)
    return (
        f"<section><h2>{title}</h2><p>{escape(text)}</p>"
        f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{"".join(lines)}</tbody></table>'
        "</div></section>"
    )


def _name_cell(row: EngineRow) -> str:
    return f'<td class="name"><b>{escape(row.variant)}</b><small>{escape(row.target)}</small></td>'


def _number_cell(value: float | None, text: str, small: str) -> str:
    if value is None:
        return f'<td class="num" data-value="">{NOTHING}</td>'
    return f'<td class="num" data-value="{value}">{text}<small>{escape(small)}</small></td>'


def _range(values: Sequence[float | None]) -> tuple[float, float]:
    """Return the lowest value and the span up to the highest."""
    known = [value for value in values if value is not None]
    return (min(known), (max(known) - min(known)) or 1.0) if known else (0.0, 1.0)


def _heat_cell(value: float | None, low: float, span: float) -> str:
    if value is None:
        return f'<td class="num">{NOTHING}</td>'
    share = _WIDEST_HEAT * (value - low) / span
    return f'<td class="heat" style="--share:{share:.3f}">{value:.3f}</td>'


def _dot(colour: str) -> str:
    return f'<span class="dot" style="background:{colour}"></span>'
