"""The engine report as one HTML file that needs no network: plot, sortable table, picks on top."""

from collections.abc import Sequence
from pathlib import Path

from tasks.parts.selection.engine_row import Verdict
from tasks.parts.selection.findings import NOTHING, Findings, columns, shown, signed, times
from tasks.parts.selection.plots import colours, interactive_pareto

_TEMPLATES = Path(__file__).parent / "templates"

_CHIPS = {
    Verdict.ACCEPT: "good",
    Verdict.TOO_LOSSY: "bad",
    Verdict.PRECISION_MISMATCH: "bad",
    Verdict.BUILD_FAILED: "bad",
    Verdict.NOT_FASTER: "mild",
    Verdict.UNPROVEN: "mild",
    Verdict.INCONCLUSIVE: "mild",
    Verdict.SKIPPED: "off",
}
_WIDEST_HEAT = 0.42


def render_page(findings: Findings) -> str:
    """Return the whole page."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined
    from markupsafe import Markup
    from plotly.offline import get_plotlyjs

    environment = Environment(
        loader=FileSystemLoader(_TEMPLATES),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.policies["json.dumps_kwargs"] = {"allow_nan": False}
    ious = findings.ious
    classes = columns(iou for _, iou in ious)
    return environment.get_template("page.html").render(
        findings=findings,
        reference=findings.reference,
        ious=ious,
        heat={name: _shares([iou.get(name) for _, iou in ious]) for name in classes},
        conditions=findings.conditions(),
        condition_names=columns(findings.conditions().values()),
        colours=colours(findings.rows),
        chips=_CHIPS,
        nothing=NOTHING,
        shown=shown,
        signed=signed,
        times=times,
        figure=interactive_pareto(findings.rows, gate=findings.gate, metric=findings.reference.metric),
        plotly=Markup(get_plotlyjs()),
    )


def _shares(values: Sequence[float | None]) -> list[float | None]:
    """Return the strength of each value's colour: 0 for the lowest, the most for the highest."""
    known = [value for value in values if value is not None]
    low, span = (min(known), (max(known) - min(known)) or 1.0) if known else (0.0, 1.0)
    return [None if value is None else _WIDEST_HEAT * (value - low) / span for value in values]
