"""The part of the Markdown report that tells where time and accuracy of the picks go, from the data of the page."""

from collections.abc import Iterator, Mapping
from typing import Any

from tasks.parts.selection.engine_row import EngineRow
from tasks.parts.selection.findings import NOTHING, Findings, milliseconds, percent_change
from tasks.parts.selection.markdown_table import safe, table

_MOST_STEPS = 10


def next_engines(data: Mapping[str, Any]) -> str:
    """Return what the next faster and the next more accurate engine of the front would cost, for each pick."""
    engines = [dict(zip(data["engine_fields"], values, strict=True)) for values in data["engines"]]
    rows = []
    for pick in (engine for engine in engines if engine["picked"]):
        front = [
            engine
            for engine in engines
            if engine["target"] == pick["target"] and engine["front"] and engine["may_ship"]
        ]
        faster = [engine for engine in front if engine["p50_high"] < pick["p50_low"]]
        better = [engine for engine in front if engine["score"] > pick["score"]]
        rows.append(
            [
                pick["target"],
                f"{pick['variant']}, {milliseconds(pick['p50'])} ms",
                _cost(pick, max(faster, key=_p50, default=None)),
                _cost(pick, min(better, key=_p50, default=None)),
            ]
        )
    return table(["target", "pick", "next faster", "next more accurate"], rows) if rows else ""


def _p50(engine: Mapping[str, Any]) -> float:
    return float(engine["p50"])


def _cost(pick: Mapping[str, Any], other: Mapping[str, Any] | None) -> str:
    if other is None:
        return NOTHING
    change, loss = percent_change(1 - other["p50"] / pick["p50"]), f"{100 * other['loss_high']:.1f} %"
    return f"{other['variant']}: {milliseconds(other['p50'])} ms ({change}), loses up to {loss}"


def where_time_goes(findings: Findings, data: Mapping[str, Any]) -> Iterator[str]:
    """Yield, for each pick whose layers are known, the waterfall from its float graph or from the slowest engine."""
    for pick in findings.picks:
        details = data["details"].get(pick.target)
        if details is None:
            continue
        name = details["same_file"].get(pick.variant)
        pairs = [pair for pair in details["pairs"] if pair["after"] == name]
        if not pairs:
            continue
        parent = (
            pick.measured.losses.parent.rpartition("-")[0] if pick.measured and pick.measured.losses else ""
        )
        [pair] = [each for each in pairs if each["before"] == details["same_file"].get(parent)] or pairs[:1]
        yield f"### {safe(pick.variant)} on {safe(pick.target)}"
        yield safe(pair["advice"])
        yield _waterfall(pair, details)
        yield _steps(pair, details)
        yield _images(pick, data)


def _waterfall(pair: Mapping[str, Any], details: Mapping[str, Any]) -> str:
    ends = [details["engines"][pair[side]]["latency_ms"] for side in ("before", "after")]
    parts = [
        [part.replace("_", " "), f"{ms:+.3f}"]
        for part, ms in zip(details["parts"], pair["parts_ms"], strict=True)
        if ms
    ]
    return table(
        ["", "ms"],
        [[pair["before"], f"{ends[0]:.3f}"], *parts, [pair["after"], f"{ends[1]:.3f}"]],
    )


def _steps(pair: Mapping[str, Any], details: Mapping[str, Any]) -> str:
    """Return the layers that differ most, with their precisions in both engines."""
    fields, texts = list(details["layer_fields"]), details["texts"]

    def value(side: str, places: list[int], field: str) -> str:
        layers = details["engines"][pair[side]]["layers"]
        found = dict.fromkeys(texts[layers[place][fields.index(field)]] for place in places)
        return " + ".join(name for name in found if name) or NOTHING

    rows = [
        [
            value("after", after, "layer") if after else value("before", before, "layer"),
            details["parts"][part].replace("_", " "),
            f"{value('before', before, 'precision')} to {value('after', after, 'precision')}",
            f"{ms:+.3f}",
            value("after", after, "source") if after else value("before", before, "source"),
        ]
        for part, before, after, ms in sorted(pair["steps"], key=lambda step: -abs(step[3]))[:_MOST_STEPS]
    ]
    return table(["layer", "part", "precision", "ms", "source"], rows)


def _images(pick: EngineRow, data: Mapping[str, Any]) -> str:
    """Return the images on which the answers of a pick differ from the reference's, the most different first."""
    gallery = data["gallery"] or {"answers": {}}
    first, other = (gallery["answers"].get(name) for name in (data["reference"], pick.name))
    if not first or not other:
        return ""
    differing = [
        str(place) for place, one, two in zip(gallery["places"], first, other, strict=True) if one != two
    ]
    if not differing:
        return ""
    return (
        f"Images of split {gallery['split']} on which its answers differ from those of {data['reference']}, of those "
        f"that the report keeps: {', '.join(differing)}."
    )
