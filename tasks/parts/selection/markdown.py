"""The engine report as Markdown, for a terminal, a pull request or a chat."""

from collections.abc import Iterable, Sequence

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


def render_markdown(findings: Findings) -> str:
    """Return the whole report; tables and one picture beside it, ``pareto.png``."""
    parts = [
        "# Engine report",
        _headline(findings),
        "## Picks",
        _picks(findings),
        "![Latency and accuracy of every engine](pareto.png)",
        "## All engines",
        _engines(findings),
        "## The ladder of each target",
        "A rung must be accurate enough and faster than the last accepted one below it.",
        _ladders(findings),
        "## What each technique gave",
        f"Change of {_safe(findings.metric)} and of speed on the same target.",
        _techniques(findings),
        _classes(findings),
        "## Layers that differ most from the float graph",
        _layers(findings),
        "## How it was measured",
        _conditions(findings),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _headline(findings: Findings) -> str:
    gate = (
        f"An engine is accepted if it loses at most {100 * findings.max_score_rel_loss:g} % of the "
        f"{findings.metric} of {findings.reference} ({findings.reference_score:.4f}), so from {findings.gate:.4f} on."
    )
    if not findings.picks:
        return f"**No engine passes.** {gate}"
    best = findings.picks[0]
    return (
        f"Best pick: **{best.variant} on {best.target}**, p50 {milliseconds(best.latency_ms_p50)} ms, "
        f"{times(best.speedup_vs_reference)} the speed of {findings.speed_reference}, {findings.metric} "
        f"{number(best.score, '.4f')} "
        f"({percent_change(best.score_rel_loss)}). {gate}"
    )


def _picks(findings: Findings) -> str:
    rows = [
        [
            row.target,
            row.variant,
            milliseconds(row.latency_ms_p50),
            times(row.speedup_vs_reference),
            number(row.score, ".4f"),
            percent_change(row.score_rel_loss),
            megabytes(row.size_bytes),
        ]
        for row in findings.picks
    ]
    table = (
        _table(["target", "pick", "p50 ms", "speed-up", findings.metric, "change", "MB"], rows)
        if rows
        else ""
    )
    missing = [f"- {_safe(target)}: no pick. {_safe(why)}" for target, why in findings.without_pick.items()]
    return "\n\n".join(part for part in (table, "\n".join(missing)) if part)


def _engines(findings: Findings) -> str:
    head = [
        "variant",
        "target",
        "verdict",
        findings.metric,
        "change",
        "p50 ms",
        "p99 ms",
        "speed-up",
        "MB",
        "front",
        "why",
    ]
    rows = [
        [
            row.variant,
            row.target,
            row.verdict,
            number(row.score, ".4f"),
            percent_change(row.score_rel_loss),
            milliseconds(row.latency_ms_p50),
            milliseconds(row.latency_ms_p99),
            times(row.speedup_vs_reference),
            megabytes(row.size_bytes),
            "yes" if row.pareto else "",
            row.reason,
        ]
        for row in findings.ordered
    ]
    return _table(head, rows)


def _ladders(findings: Findings) -> str:
    rows = [
        [
            row.target,
            row.variant,
            percent_change(row.score_rel_loss),
            milliseconds(row.latency_ms_p50),
            times(row.speedup_vs_reference),
            row.verdict,
            row.reason,
        ]
        for target in findings.targets
        for row in findings.rungs(target)
    ]
    table = _table(["target", "rung", "change", "p50 ms", "speed-up", "verdict", "why"], rows)
    ends = [f"- {_safe(target)}: {_safe(findings.ladder_end(target))}" for target in findings.targets]
    return table + "\n\n" + "\n".join(ends)


def _techniques(findings: Findings) -> str:
    rows = []
    for name, before, after in findings.techniques:
        gains = [findings.gain(before, after, target) for target in findings.targets]
        cells = [
            f"{signed(gain.score_change)}, {times(gain.speed_factor)}" if gain else NOTHING for gain in gains
        ]
        rows.append([f"{name} ({before} to {after})", *cells])
    return _table(["technique", *findings.targets], rows)


def _classes(findings: Findings) -> str:
    rows = [row for row in findings.ordered if row.iou]
    if not rows:
        return ""
    classes = list(dict.fromkeys(name for row in rows for name in row.iou))
    cells = [
        [row.variant, row.target, *(number(row.iou.get(name), ".3f") for name in classes)] for row in rows
    ]
    return "## IoU per class\n\n" + _table(["variant", "target", *classes], cells)


def _layers(findings: Findings) -> str:
    rows = [
        [
            row.variant,
            row.target,
            layer.kind,
            number(layer.sqnr_db, ".1f"),
            number(layer.own_sqnr_db, ".1f"),
            layer.node,
            layer.module,
            layer.source,
        ]
        for row in findings.ordered
        for layer in row.suspect_layers
    ]
    if not rows:
        return "None was named."
    return _table(["variant", "target", "what", "SQNR dB", "own dB", "node", "module", "source"], rows)


def _conditions(findings: Findings) -> str:
    by_target = findings.conditions()
    names = list(dict.fromkeys(name for found in by_target.values() for name in found))
    rows = [[target, *(found.get(name, NOTHING) for name in names)] for target, found in by_target.items()]
    return _table(["target", *names], rows)


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(_safe(cell) for cell in line)} |" for line in lines)


def _safe(text: str) -> str:
    """Keep a cell in its cell, and markup in a name from being markup."""
    one_line = " ".join(text.split())
    return one_line.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;").replace("|", "\\|")
