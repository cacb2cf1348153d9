"""Write an explanation as Markdown."""

from collections.abc import Iterator, Mapping, Sequence

from tasks.parts.explain.engine_view import EngineView
from tasks.parts.explain.report import EngineExplanation, Explanation, PairExplanation
from tasks.parts.explain.waterfall import Part
from tasks.parts.roofs.roofs import Roofs

_MOST_LAYERS = 8
_MOST_CAUSES = 12
_PARTS = {
    Part.faster_layers: "faster layers",
    Part.left_in_float: "left in float",
    Part.conversions: "conversions",
    Part.fusions_lost: "fusions lost",
    Part.slower_layers: "slower layers",
    Part.overhead: "overhead",
    Part.remainder: "remainder",
}


def write_explanation(explanation: Explanation, views: Mapping[str, EngineView], roofs: Roofs) -> str:
    """Return the page of a target."""
    lines = [f"# Where the time goes: {explanation.target}", ""]
    if explanation.reason:
        return "\n".join([*lines, f"Nothing to explain: {explanation.reason}.", ""])
    lines += [*_roofs(roofs), "", "## Engines", "", *_engines(explanation.engines), "", "## Pairs", ""]
    for pair in explanation.pairs:
        lines += [*waterfall_lines(pair), ""]
    for name, engine in explanation.engines.items():
        lines += [f"## {name}", "", *_layers(views[name]), "", *_causes(engine), ""]
    return "\n".join(lines)


def waterfall_lines(pair: PairExplanation) -> Iterator[str]:
    """Yield the sentence about a pair, and its waterfall as a table."""
    yield pair.advice
    yield ""
    yield f"| | {pair.before} to {pair.after}, ms |"
    yield "|---|---:|"
    yield f"| {pair.before} | {pair.before_ms:.3f} |"
    for part, words in _PARTS.items():
        if pair.parts_ms[part.value]:
            yield f"| {words} | {pair.parts_ms[part.value]:+.3f} |"
    yield f"| {pair.after} | {pair.after_ms:.3f} |"


def _roofs(roofs: Roofs) -> Iterator[str]:
    yield f"{roofs.machine.cpu_model}, runtime {roofs.runtime_version}, {roofs.num_threads} thread(s)."
    yield ""
    yield "| roof | reached | spread | theoretical |"
    yield "|---|---:|---|---|"
    for roof in roofs.compute:
        rate = roof.macs_per_s
        peak = (
            "" if roof.theoretical_macs_per_s is None else f"{roof.theoretical_macs_per_s / 1e9:.0f} GMAC/s: "
        )
        spread = f"{rate.low / 1e9:.1f} to {rate.high / 1e9:.1f}"
        yield f"| {roof.name} | {rate.value / 1e9:.1f} GMAC/s | {spread} | {peak}{roof.formula} |"
    for moved in roofs.memory:
        rate = moved.bytes_per_s
        spread = f"{rate.low / 1e9:.1f} to {rate.high / 1e9:.1f}"
        yield f"| {moved.working_set_bytes // 1024:,} KiB | {rate.value / 1e9:.1f} GB/s | {spread} | |"
    for name, cost in (("one more layer", roofs.layer_ms), ("a call", roofs.call_ms)):
        if cost is not None:
            yield (
                f"| {name} | {1000 * cost.value:.2f} us | {1000 * cost.low:.2f} to {1000 * cost.high:.2f} | |"
            )


def _engines(engines: Mapping[str, EngineExplanation]) -> Iterator[str]:
    yield "| variant | ms | attainable | compute | memory | overhead | mixed | unknown | remainder |"
    yield "|---|---:|---:|---:|---:|---:|---:|---:|---:|"
    for name, engine in engines.items():
        attainable = "" if engine.attainable_ms is None else f"{engine.attainable_ms / engine.latency_ms:.0%}"
        shares = [
            f"{engine.share_by_bound.get(bound, 0.0):.0%}"
            for bound in ("compute", "memory", "overhead", "mixed", "unknown", "remainder")
        ]
        yield f"| {name} | {engine.latency_ms:.3f} | {attainable} | {' | '.join(shares)} |"


def _layers(view: EngineView) -> Iterator[str]:
    """Yield the layers that take the most time."""
    yield "| layer | operators | precision | ms | share | bound | of its roof | winnable ms | source |"
    yield "|---|---|---|---:|---:|---|---:|---:|---|"
    for row in sorted(view.rows, key=lambda row: -row.milliseconds)[:_MOST_LAYERS]:
        roof = "" if row.share_of_roof is None else f"{row.share_of_roof:.0%}"
        winnable = "" if row.winnable_ms is None else f"{row.winnable_ms:.3f}"
        yield (
            f"| {row.layer} | {row.operators or row.kind} | {row.precision} | {row.milliseconds:.3f} "
            f"| {row.share:.0%} | {row.bound} | {roof} | {winnable} | {row.source} |"
        )


def _causes(engine: EngineExplanation) -> Sequence[str]:
    if not engine.causes:
        return ["No cause found."]
    lines = [
        f"- {cause.kind} {cause.layer}{': ' if cause.layer else ''}{cause.detail} "
        f"({cause.milliseconds:.3f} ms{'; ' + cause.source if cause.source else ''})"
        for cause in engine.causes[:_MOST_CAUSES]
    ]
    num_more = len(engine.causes) - len(lines)
    return [*lines, *([f"- and {num_more} more, in report.json"] if num_more else [])]
