"""Lay out the results of benchmarks/zoo.py as Markdown."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.pages import runs_int8
from benchmarks.zoo_networks import ZOO

Row = dict[str, Any]


def tables(rows: Sequence[Row]) -> str:
    """Return the results as Markdown: every engine and tool, the picks against the tools, and what stays in float."""
    order = {name: number for number, name in enumerate(ZOO)}
    rows = sorted(rows, key=lambda row: (order[row["network"]], row["exporter"]))
    done = [row for row in rows if not row["fault"]]
    lines = [
        "Loss: share of the float reference's score, with its 95 % interval. Time: against float on the same target,",
        "in one race. int8: share of the MACs between Q/DQ that run in int8, and of all MACs. Ours / tool: time",
        "of the pick against the fastest of the tools that hold the gate.",
        "",
        "| network, file | target | engine | score | loss (val) | time / float | int8 | verdict |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in done:
        for engine in row["engines"]:
            loss = {
                "rel_loss": engine["score_rel_loss"],
                "low": engine["score_rel_loss_low"],
                "high": engine["score_rel_loss_high"],
            }
            verdict = engine["verdict"] + (", picked" if engine["picked"] else "")
            cells = (engine["variant"], engine["score"], loss, engine, shares(engine), verdict)
            lines.append(line(row, engine["target"], *cells))
        for peer in row["peers"]:
            verdict = peer["fault"] or f"gate: {peer['standing']}"
            lines.append(
                line(
                    row, peer["target"], peer["name"], peer.get("score"), peer.get("loss"), peer, "-", verdict
                )
            )
    lines += ["", "| network, file | target | pick | fastest tool | ours / tool |", "|---|---|---|---|---|"]
    for row in done:
        for found in row["against_peers"] if row["has_peers"] else []:
            cells = [found["pick"] or "none", found["fastest_peer"] or "none", span(found["time_vs_peer"])]
            lines.append(f"| {title_of(row)} | {found['target']} | {' | '.join(cells)} |")
    lines += ["", *left_in_float(done)]
    lines += [f"- {title_of(row)}: {row['fault']}" for row in rows if row["fault"]]
    return "\n".join(lines)


def line(
    row: Row,
    target: str,
    name: str,
    score: float | None,
    loss: Mapping[str, float | None] | None,
    timed: Row,
    int8: str,
    verdict: str,
) -> str:
    """Return one line of the first table."""
    if loss is None or loss["rel_loss"] is None:
        lost = "-"
    else:
        ends = " to ".join(f"{100 * (loss[end] or 0.0):.2f}" for end in ("low", "high"))
        lost = f"{100 * loss['rel_loss']:.2f} % ({ends})"
    cells = ["-" if score is None else f"{score:.4f}", lost, span(timed["time_vs_float"]), int8, verdict]
    return f"| {title_of(row)} | {target} | {name} | {' | '.join(cells)} |"


def shares(engine: Row) -> str:
    """Return the shares of the MACs that an INT8 engine runs in int8."""
    if not engine["precision"] or not runs_int8(engine):
        return "-"
    wanted = engine["int8_share_of_quantized"]
    of_all = engine["macs_share"].get("int8", 0.0)
    return f"{'-' if wanted is None else f'{100 * wanted:.1f} %'}, {100 * of_all:.1f} %"


def span(ratio: Mapping[str, float] | None) -> str:
    """Return a ratio with its interval."""
    return "-" if ratio is None else f"{ratio['value']:.3f} ({ratio['low']:.3f} to {ratio['high']:.3f})"


def title_of(row: Mapping[str, Any]) -> str:
    """Return the name of a file."""
    return f"{ZOO[row['network']].title}, {row['exporter']}"


def left_in_float(rows: Sequence[Row]) -> list[str]:
    """Return a line for each INT8 engine with layers in float: how many there are of each reason, and their MACs."""
    lines = []
    for row in rows:
        for engine in row["engines"]:
            count: Counter[str] = Counter()
            macs: Counter[str] = Counter()
            for layer in engine["float_layers"]:
                count[layer["reason"]] += 1
                macs[layer["reason"]] += layer["macs_share"]
            reasons = [f"{reason}: {count[reason]} layers, {100 * macs[reason]:.1f} %" for reason in count]
            if reasons:
                name = f"{title_of(row)}, {engine['variant']} on {engine['target']}"
                lines.append(f"- {name}, MACs in float: {'; '.join(reasons)}")
    return lines
