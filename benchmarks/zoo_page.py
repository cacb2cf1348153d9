"""Lay out the results of benchmarks/zoo.py as Markdown."""

from collections.abc import Sequence
from typing import Any

from benchmarks.zoo_networks import ZOO

Row = dict[str, Any]


def tables(rows: Sequence[Row]) -> str:
    """Return the results as Markdown: the picks against the tools, every engine and tool, and what stays in float."""
    order = {name: number for number, name in enumerate(ZOO)}
    rows = sorted(rows, key=lambda row: (order[row["network"]], row["exporter"]))
    lines = [
        "| network, file | target | float | pick | its score | its loss %, val | its time / float | its int8 | "
        "fastest tool | pick / tool | fastest INT8 / tool |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        for race in row["races"]:
            own = {engine["name"]: engine for engine in row["engines"] if engine["target"] == race["target"]}
            score, loss, _, *speed = measured(own[race["pick"]]) if race["pick"] else ["-"] * 5
            reference = measured(next(iter(own.values())))[0] if own else "-"
            peer, ratios = (
                race["peer"] or "none",
                [span(race[f"{name}_vs_peer"]) for name in ("pick", "int8")],
            )
            cells = [race["target"], reference, race["pick"] or "none", score, loss, *speed, peer, *ratios]
            lines.append(f"| {' | '.join((title_of(row), *cells))} |")
    lines += [
        "",
        "| network, file | target | engine | score | loss %, val | loss %, test | time / float | int8 | verdict |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        for engine in row["engines"]:
            cells = [title_of(row), engine["target"], engine["name"], *measured(engine), verdict(engine)]
            lines.append(f"| {' | '.join(cells)} |")
    lines += ["", *(line for row in rows for line in left_in_float(row))]
    lines += [f"- {title_of(row)}: {row['fault']}" for row in rows if row["fault"]]
    return "\n".join(lines)


def measured(engine: Row) -> list[str]:
    """Return score, losses, time and the shares of the quantized MACs and of all MACs that run in int8."""
    shares = [engine.get(name) for name in ("int8_share_of_quantized", "int8_share_of_all")]
    return [
        f"{engine['score']:.4f}" if "score" in engine else "-",
        percent(engine.get("loss")),
        percent(engine.get("unseen_loss")),
        span(engine.get("time_vs_float")),
        "-" if shares[0] is None else f"{100 * shares[0]:.1f} %, {100 * (shares[1] or 0):.1f} %",
    ]


def verdict(engine: Row) -> str:
    """Return the verdict of the pipeline, or whether a tool holds the gate."""
    if engine["fault"]:
        return str(engine["fault"])
    if "verdict" not in engine:
        return f"gate: {engine['standing']}"
    return engine["verdict"] + (", picked" if engine["picked"] else "")


def percent(loss: Sequence[float] | None) -> str:
    """Return a loss with its interval in per cent."""
    return "-" if loss is None else "{:.2f} ({:.2f} to {:.2f})".format(*(100 * end for end in loss))


def span(ratio: Sequence[float] | None) -> str:
    """Return a ratio with its interval."""
    return "-" if ratio is None else "{:.3f} ({:.3f} to {:.3f})".format(*ratio)


def title_of(row: Row) -> str:
    """Return the name of a file."""
    return f"{ZOO[row['network']].title}, {row['exporter']}"


def left_in_float(row: Row) -> list[str]:
    """Return a line for each INT8 engine with layers in float: how many there are of each reason, and their MACs."""
    lines = []
    for engine in row["engines"]:
        reasons = [
            f"{found['reason']}: {found['num']} layers, {100 * found['macs_share']:.1f} %"
            for found in engine.get("float_layers", [])
        ]
        if reasons:
            name = f"{title_of(row)}, {engine['name']} on {engine['target']}"
            lines.append(f"- {name}, MACs in float: {'; '.join(reasons)}")
    return lines
