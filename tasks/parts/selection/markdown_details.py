"""The part of the Markdown report that tells where time and accuracy of the picks go, from the data of the page."""

from collections.abc import Iterator, Mapping
from typing import Any

from tasks.parts.selection.engine_row import EngineRow
from tasks.parts.selection.findings import NOTHING, Findings, milliseconds, percent_change, shown
from tasks.parts.selection.markdown_table import safe, table

_MOST_STEPS = 10


def next_engines(findings: Findings) -> str:
    """Return what the next faster and the next more accurate engine of the front would cost, for each pick."""
    rows = []
    for pick in findings.picks:
        front = [row for row in findings.rows if row.target == pick.target and row.pareto and row is not pick]
        faster = [row for row in front if _p50(row) < _p50(pick)]
        better = [row for row in front if _score(row) > _score(pick)]
        rows.append(
            [
                pick.target,
                f"{pick.variant}, {shown(pick).p50_ms} ms",
                _cost(pick, max(faster, key=_p50, default=None)),
                _cost(pick, min(better, key=_p50, default=None)),
            ]
        )
    return table(["target", "pick", "next faster", "next more accurate"], rows) if rows else ""


def _p50(row: EngineRow) -> float:
    assert row.measured is not None
    return row.measured.speed.latency_ms_p50


def _score(row: EngineRow) -> float:
    assert row.measured is not None
    return row.measured.accuracy.score


def _cost(pick: EngineRow, other: EngineRow | None) -> str:
    if other is None:
        return NOTHING
    assert other.measured is not None and other.measured.losses is not None
    change = percent_change(1 - _p50(other) / _p50(pick))
    high = 100 * other.measured.losses.score_rel_loss_high
    return f"{other.variant}: {milliseconds(_p50(other))} ms ({change}), loses up to {high:.1f} %"


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
